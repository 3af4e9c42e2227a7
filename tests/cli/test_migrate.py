"""The migration guide as printed: from a job of Spark's own connector to this source and back."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from delta_files import living_rows
from kafka_helpers import await_until
from kit.spark_kafka import spark_kafka_jars
from rebalance.accounts import describe
from scenes import Scene
from streams import END_S, numbered, remove_entry
from test_docs import blocks
from typer.testing import CliRunner

from spark_group_source.cli import migrate
from spark_group_source.cli.app import app
from spark_group_source.delta.checkpoint import local_files, spark_files
from spark_group_source.model import TopicPartition

pytestmark = [pytest.mark.spark, pytest.mark.full]

GUIDE = "migrate.md"
PARTITIONS = 2
CLI_S = 600


class Guide:
    """Runs the guide's blocks with this test's broker, group, topic and folder."""

    def __init__(self, scene: Scene, topic: str) -> None:
        self.scene, self.topic = scene, topic
        self.names: dict[str, Any] = {"spark": scene.spark}
        self.all = [block for block in blocks() if block.document == GUIDE]
        self.blocks = iter(self.all)

    def _here(self, text: str) -> str:
        text = text.replace("broker:9092", self.scene.servers).replace("/lake/", f"{self.scene.folder}/")
        text = text.replace("start.json", f"{self.scene.folder}/start.json").replace('"orders")', f'"{self.topic}")')
        return text.replace('"etl"', f'"{self.scene.group}"').replace("--group etl", f"--group {self.scene.group}")

    def python(self) -> None:
        _, language, text = next(self.blocks)
        assert language == "python"
        exec(compile(self._here(text), GUIDE, "exec"), self.names)

    def commands(self) -> list[str]:
        """Run the next block's commands, each in its own process; returns their output."""
        _, language, text = next(self.blocks)
        assert language == ""
        return [self._typed(line) for line in self._here(text).splitlines()]

    def _typed(self, line: str) -> str:
        words = line.split()
        assert words[0] == "spark-group"
        command = [sys.executable, "-m", "spark_group_source", *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CLI_S, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def look(self) -> list[str]:
        """The words of the guide's first command."""
        return self._here(next(block.text for block in self.all if not block.language)).splitlines()[0].split()[1:]

    def stop_old(self) -> None:
        """Stop the first query when its last batch is in the table but not in Spark's commit log."""
        checkpoint = self.scene.folder / "_chk/old"
        last = max(int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*"))
        await_until((checkpoint / "commits" / str(last)).exists, what="the end of the batch")
        self.names["query"].stop()
        remove_entry(checkpoint, "commits", last)

    def finish_old(self) -> None:
        """Follow the guide for an unfinished batch."""
        writer = self.names["old"].writeStream.format("delta").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", f"{self.scene.folder}/_chk/old")
        assert writer.start(f"{self.scene.folder}/orders").awaitTermination(END_S)

    def await_rows(self, last: int) -> None:
        """Wait until every number up to ``last`` is in the table."""
        rows: list[int] = []

        def there() -> bool:
            query = self.names["query"]
            assert query.isActive, query.exception()
            rows[:] = numbers(self.scene.folder / "orders")
            return len(rows) > last

        await_until(there, what="the rows")


def numbers(table: Path) -> list[int]:
    if not (table / "_delta_log").exists():
        return []
    return [int(bytes(row["value"])) for row in living_rows(table, ["value"])]


def test_migration_guide_there_and_back_keeps_each_record_once(scene: Scene) -> None:
    for jar in spark_kafka_jars():
        scene.spark.sql(f"ADD JAR '{jar}'")
    topic = scene.topic(PARTITIONS)
    guide, every = Guide(scene, topic), [TopicPartition(topic, p) for p in range(PARTITIONS)]
    try:
        scene.produce(topic, numbered(0, 19, PARTITIONS))
        guide.python()
        guide.await_rows(19)
        guide.stop_old()
        refused = CliRunner().invoke(app, guide.look())
        assert refused.exit_code == 1
        assert "batch 0 was planned and is not finished" in refused.output
        guide.finish_old()
        here, far = f"{scene.folder}/_chk/old", spark_files(scene.spark)
        assert migrate.progress(far, f"file:{here}") == migrate.progress(local_files(), here)
        scene.produce(topic, numbered(20, 29, PARTITIONS))

        looked, moved = guide.commands()
        assert "nothing was changed" in looked
        assert f"moved {PARTITIONS} partitions of group {scene.group}" in moved
        assert scene.committed() == dict.fromkeys(every, 10)
        guide.python()
        guide.await_rows(29)

        assert "1 query of group" in guide.commands()[0]
        scene.produce(topic, numbered(30, 39, PARTITIONS))
        guide.python()
        await_until(lambda: not describe(scene.admin, scene.group).members, what="the end of the members")
        guide.commands()
        assert json.loads((scene.folder / "start.json").read_text()) == {topic: {"0": 15, "1": 15}}
        guide.python()
        guide.await_rows(39)
    finally:
        if "query" in guide.names:
            guide.names["query"].stop()
    assert Counter(numbers(scene.folder / "orders")) == dict.fromkeys(range(40), 1)


def test_migration_covers_new_partitions_and_refuses_recreated_topics(scene: Scene) -> None:
    topic, folder = scene.topic(3), scene.folder
    scene.produce(topic, numbered(0, 29, 3))

    def planned(offsets: dict[str, int], *more: str) -> tuple[int, str]:
        for log, text in (("offsets", f"v1\n{{}}\n{json.dumps({topic: offsets})}"), ("commits", "v1\n{}")):
            (folder / log).mkdir(exist_ok=True)
            (folder / log / "0").write_text(text)
        words = ["migrate", "--group", scene.group, "--bootstrap-server", scene.servers, "--json", *more]
        shown = CliRunner().invoke(app, [*words, "--from-checkpoint", str(folder)])
        return shown.exit_code, shown.output

    code, text = planned({"0": 4, "1": 10}, "--execute")
    assert code == 0, text
    assert [(row["now"], row["then"]) for row in json.loads(text)["partitions"]] == [(None, 4), (None, 10), (None, 0)]
    assert scene.committed() == {TopicPartition(topic, p): at for p, at in enumerate((4, 10, 0))}
    back = ["migrate", "--group", scene.group, "--bootstrap-server", scene.servers, "--to-checkpoint", "--out"]
    full = scene.typed(*back, "/dev/full")
    assert (full.code, "--out /dev/full cannot be written: No space left" in full.output) == (1, True)
    code, text = planned({"0": 4, "1": 11})
    assert (code, "which ends at 10: the topic was recreated" in text) == (1, True)
