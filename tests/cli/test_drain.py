"""``spark-group drain`` and statistics from another host: through the status files in the query's checkpoint."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from delta_files import living_rows
from kafka_helpers import await_until
from scenes import Scene
from streams import numbered

from spark_group_source import DeltaSink
from spark_group_source.delta import checkpoint_status
from spark_group_source.delta.checkpoint import CheckpointFiles
from spark_group_source.delta.checkpoint_status import StatusFiles
from spark_group_source.errors import GroupError
from spark_group_source.host import run_files
from spark_group_source.model import TopicPartition

CLI_S = 600


RUN, DRAIN = (f"c/{checkpoint_status.FOLDER}/etl.{what}.json" for what in ("run", "drain"))


class Folder:
    """Status files in memory; ``then``: what the run reports after the request."""

    def __init__(self, **run: Any) -> None:
        self.files: dict[str, str] = {}
        self.write_status(**run)
        self.place = StatusFiles(CheckpointFiles(self.files.get, self._write, lambda _: []), "c")
        self.then: dict[str, Any] = {}

    def write_status(self, **run: Any) -> None:
        doc = {"group": "etl", "run": "r1", "host": "h", "pid": 7, "drained": False, "written_ms": 0, **run}
        self.files[RUN] = json.dumps(doc)

    def _write(self, name: str, text: str) -> None:
        self.files[name] = text
        if self.then:
            self.write_status(**self.then, answered=json.loads(text)["id"])


def test_a_drain_request_names_the_run_and_waits_until_it_is_drained() -> None:
    folder = Folder()
    folder.then = {"drained": True}
    assert checkpoint_status.drain(folder.place, "etl", timeout_s=10) == 1
    assert json.loads(folder.files[DRAIN])["run"] == "r1"


def test_the_status_of_a_run_that_was_drained_before_is_no_answer() -> None:
    """It remains when the run ends, and the next run has none before its first batch."""
    folder = Folder(drained=True, answered="of yesterday")
    with pytest.raises(GroupError, match="did not finish its batch within 0 s"):
        checkpoint_status.drain(folder.place, "etl", timeout_s=0)
    reporter = checkpoint_status._StatusReporter("r1", "etl", 7, folder.place)
    for _ in range(2):
        reporter.poll({"pid": 7, "group": "etl", "drained": True})
    request = json.loads(folder.files[DRAIN])
    assert checkpoint_status.last_status(folder.place, "etl")["answered"] == request["id"]


def test_a_run_that_does_not_drain_in_time_is_reported_with_the_age_of_its_status() -> None:
    with pytest.raises(
        GroupError, match=r"in process 7 on host h, whose last status is \d+ s old, did not finish its batch within 0 s"
    ):
        checkpoint_status.drain(Folder().place, "etl", timeout_s=0)


def test_a_run_that_starts_during_the_drain_is_reported() -> None:
    folder = Folder()
    folder.then = {"run": "r2", "drained": True}
    with pytest.raises(GroupError, match="was started during the drain"):
        checkpoint_status.drain(folder.place, "etl", timeout_s=10)


def test_a_checkpoint_without_a_status_is_reported() -> None:
    folder = Folder()
    del folder.files[RUN]
    with pytest.raises(GroupError, match="c has no status of a run in group 'etl'"):
        checkpoint_status.last_status(folder.place, "etl")


@pytest.mark.parametrize("part", ['{"group": "et', ""])
def test_a_status_that_is_being_written_is_read_again(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_status, "READ_AGAIN_S", 0.0)
    folder = Folder()
    complete = folder.files[RUN]
    texts = [part] * (checkpoint_status.READS_MAX - 1) + [complete]
    place = folder.place._replace(files=folder.place.files._replace(read=lambda _: texts.pop(0)))
    assert checkpoint_status.last_status(place, "etl")["run"] == "r1"
    texts[:] = [part] * checkpoint_status.READS_MAX
    with pytest.raises(GroupError, match=rf"etl\.run\.json stays incomplete \({len(part)} characters\)"):
        checkpoint_status.last_status(place, "etl")


@pytest.mark.parametrize("part", ['{"run": "r', ""])
def test_a_run_reports_although_a_drain_request_stays_incomplete(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command was killed while it wrote the file."""
    monkeypatch.setattr(checkpoint_status, "READ_AGAIN_S", 0.0)
    folder = Folder()
    folder.files[DRAIN] = part
    with pytest.raises(GroupError, match=r"etl\.drain\.json stays incomplete .*a drain command writes it"):
        folder.place.read("etl", "drain")
    reporter = checkpoint_status._StatusReporter("r2", "etl", 7, folder.place)
    reporter.poll({"pid": 7, "group": "etl", "drained": False})
    assert json.loads(folder.files[RUN])["run"] == "r2"


@pytest.mark.parametrize(("requested", "drained", "then"), [("r1", False, [7]), ("r0", False, []), ("r1", True, [])])
def test_a_run_drains_when_the_request_names_it(
    requested: str, drained: bool, then: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pids = Folder(), list[int]()
    monkeypatch.setattr(run_files, "request_drain", pids.append)
    folder.files[DRAIN] = json.dumps({"run": requested})
    reporter = checkpoint_status._StatusReporter("r1", "etl", 7, folder.place)
    reporter.poll({"pid": 7, "group": "etl", "drained": drained})
    assert pids == then
    status = checkpoint_status.last_status(folder.place, "etl")
    assert (status["run"], status["drained"]) == ("r1", drained)


@pytest.mark.spark
def test_query_is_drained_and_described_from_another_host(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_status, "POLL_S", 0.5)
    name, table = scene.topic(2), scene.folder / "table"
    job = scene.job(subscribe=name)
    folder = job.checkpoint / checkpoint_status.FOLDER
    folder.mkdir(parents=True)
    (folder / f"{scene.group}.drain.json").write_text('{"run": "of yesterday"}')
    elsewhere = {**os.environ, "TMPDIR": str(scene.folder)}  # the files of this host's runs are not found there

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "spark_group_source", *words, "--group", scene.group]
        return subprocess.run(command, capture_output=True, text=True, timeout=CLI_S, check=False, env=elsewhere)

    def arrived(count: int) -> None:
        await_until(lambda: table.exists() and len(living_rows(table, ["offset"])) == count, what="the rows")

    query = job.start_into(DeltaSink(table))
    try:
        scene.produce(name, numbered(0, 9, 2))
        arrived(10)
        await_until((folder / f"{scene.group}.run.json").exists, what="the run's status")
        here = typed("drain")
        assert (here.returncode, "no query of group" in here.stderr) == (1, True)
        scene.produce(name, numbered(10, 19, 2))
        arrived(20)

        drained = typed("drain", "--checkpoint", str(job.checkpoint), "--timeout-s", str(CLI_S))
        assert drained.returncode == 0, drained.stderr
        assert scene.committed() == {TopicPartition(name, p): 10 for p in range(2)}
        shown = typed("describe", "--checkpoint", str(job.checkpoint), "--bootstrap-server", scene.servers, "--json")
        (run,) = json.loads(shown.stdout)["runs"]
        assert (run["drained"], run["group"], run["partitions_lost"]) == (True, scene.group, 0)
        scene.produce(name, numbered(20, 21, 2))
        assert query.isActive
    finally:
        query.stop()
    assert len(living_rows(table, ["offset"])) == 20, "nothing was read after the drain"
    assert scene.committed() == {TopicPartition(name, p): 10 for p in range(2)}
