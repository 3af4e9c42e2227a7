"""Every ``spark-group`` command of the documents, run as printed during one query.

Deliberately absent: the commands of the first ten minutes (``test_docs``), of the guide for changing over
(``test_migrate``) and of the page on recovery (``delta/decisions/test_recovery``), which are typed there in their
order; and names of commands in a sentence, without what they need.
"""

import re
import shlex
import signal
import subprocess
import sys

import pytest
from kafka_helpers import await_until, set_committed
from kafka_tool import kafka_consumer_groups
from metrics.scrapes import scrape, values
from rebalance.accounts import describe
from scenes import Scene
from streams import numbered
from test_docs import commands

from spark_group_source import DeltaSink
from spark_group_source.model import TopicPartition

pytestmark = pytest.mark.spark

ELSEWHERE = {"first.md", "migrate.md", "recovery.md"}
LIVE = ("list", "describe", "watch", "exporter", "drain")
"""Commands that run while the query runs, in this order; the drain is the last."""
STOPPED = ("ledger", "reset", "delete-offsets", "delete-group")
COMPLETE = ("--group", "--bootstrap-server", "/lake/", "TABLE")
"""Words that show that a command has arguments."""
ELSEWHERE_COMMANDS = ("broker", "run")
"""Tested in ``tests/local/test_broker.py`` and ``tests/test_jobs.py``."""


def lines() -> list[str]:
    """Each command once: without its optional parts, and with them."""
    found: dict[str, None] = {}
    for document, line in commands():
        text = re.sub(r"\s+#.*$", "", line)
        if document in ELSEWHERE or not text.startswith("spark-group ") or not any(w in text for w in COMPLETE):
            continue
        if text.split()[1] not in ELSEWHERE_COMMANDS:
            found |= dict.fromkeys(
                " ".join(one.split()) for one in (re.sub(r"\[.*?\]", "", text), re.sub(r"[\[\]]", "", text))
            )
    return sorted(found, key=lambda line: (LIVE + STOPPED).index(line.split()[1]))


class Typist:
    """Runs commands as printed, with this test's broker, group, topic and folder."""

    def __init__(self, scene: Scene, topic: str, former: str) -> None:
        self.scene, self.topic, self.former = scene, topic, former
        self.plan = scene.folder / "plan.csv"

    def words(self, line: str) -> list[str]:
        text = line.replace("hdfs:///", "/").replace("CHECKPOINT_URI", "/lake/_chk/orders")
        text = text.replace("broker:9092", self.scene.servers).replace("/lake/", f"{self.scene.folder}/")
        text = re.sub(r"--topic orders\b", f"--topic {self.topic}", text).replace("plan.csv", str(self.plan))
        text = text.replace("--topic former", f"--topic {self.former}")
        text = text.replace("HOST:PORT", self.scene.servers).replace("--group GROUP", "--group etl")
        text = re.sub(r"\bTABLE\b", f"{self.scene.folder}/orders", text)
        return shlex.split(text.replace("--group etl", f"--group {self.scene.group}"))[1:]

    def type(self, line: str) -> None:
        words = self.words(line)
        if words[0] == "exporter":
            self._serve(words)
            return
        shown = self.scene.typed(*words, *(["--once"] if words[0] == "watch" else []))
        assert shown.code == 0, f"{line}\n{shown.output}"
        assert shown.output.strip(), line
        if "--export" in words:
            self.plan.write_text(shown.stdout)

    def _serve(self, words: list[str]) -> None:
        """The exporter serves metrics at the printed port and stops on a signal."""
        words = ["0" if before == "--port" else word for before, word in zip(["", *words], words, strict=False)]
        words = ["1" if before == "--interval" else word for before, word in zip(["", *words], words, strict=False)]
        command = [sys.executable, "-m", "spark_group_source", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                found = re.search(r" at port (\d+),", process.stdout.readline())
                assert found
                port = int(found[1])
                await_until(lambda: values(scrape(port), "kafka_group_lag_records", topic=self.topic), what="a sweep")
            finally:
                process.send_signal(signal.SIGTERM)
        assert process.returncode == 0


def test_commands_of_the_documents_run_as_printed(scene: Scene) -> None:
    topic, former, other = scene.topic(2), scene.topic(), scene.topic()
    typist, every = Typist(scene, topic, former), lines()
    assert len(every) > 20
    for name in (former, other):  # a group goes with the last of its offsets
        set_committed(scene.admin, scene.group, name, {0: 0})
    job = scene.job(subscribe=topic, checkpoint="_chk/orders", leaveOnStop="always")
    scene.produce(topic, numbered(0, 399, 2))
    query = job.start_into(DeltaSink(scene.folder / "orders"))
    try:
        at = {TopicPartition(topic, p): 200 for p in range(2)}
        await_until(lambda: at.items() <= scene.committed().items(), what="the rows of the topic")
        for line in every:
            if line.split()[1] in LIVE:
                typist.type(line)
    finally:
        query.stop()
    await_until(lambda: describe(scene.admin, scene.group).state == "empty", what="the members that leave")
    for line in every:
        if line.split()[1] in STOPPED:
            typist.type(line)
    assert scene.group not in kafka_consumer_groups(scene.servers, "--list")
