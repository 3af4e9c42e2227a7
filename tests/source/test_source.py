"""The source without Spark: pickling, building a reader, and offsets of a checkpoint."""

import json
import logging
import pickle
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.types import BinaryType, StringType, StructField, StructType, TimestampNTZType, TimestampType
from scenes import Scene
from streams import numbered, options_of

from spark_group_source import compatibility
from spark_group_source.errors import CheckpointMismatch, OptionError, SetupError
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.source import (
    LOG_LEVEL_ENV,
    GroupStreamReader,
    KafkaGroupDataSource,
    PlainReader,
    RangesPartition,
    _prepare_process,
)

LOAD_S = 600
"""Time limit of a hanging process."""


def test_source_reader_and_pieces_are_pickled_without_clients_even_while_the_reader_runs(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_group_source.source._prepare_process", lambda: None)
    name = scene.topic()
    scene.produce(name, numbered(0, 2))
    source = pickle.loads(cloudpickle.dumps(KafkaGroupDataSource(scene.options(subscribe=name))))
    reader = source.streamReader(StructType())
    running = _latest(reader, reader.initialOffset())
    try:
        copy = pickle.loads(cloudpickle.dumps(reader))
        assert copy.__dict__["_coordinator"] is None
        (piece,) = reader.partitions(reader.initialOffset(), running)
        rows = [row for batch in copy.read(pickle.loads(pickle.dumps(piece))) for row in batch.to_pylist()]
        assert [row["value"] for row in rows] == [b"0", b"1", b"2"]
    finally:
        reader._coordinator.close()


@pytest.mark.parametrize(
    ("ddl", "refused"),
    [
        ("value BINARY", True),
        ("key STRING, value BINARY", True),
        ("value BINARY, key BINARY", True),
        ("key BINARY, value BINARY, timestamp TIMESTAMP_NTZ", True),
        ("key BINARY, value BINARY, timestamp TIMESTAMP", False),
    ],
)
def test_another_schema_than_the_sources_is_refused_before_a_task_fails(ddl: str, refused: bool) -> None:
    types = {"BINARY": BinaryType(), "STRING": StringType(), "TIMESTAMP": TimestampType()}
    types["TIMESTAMP_NTZ"] = TimestampNTZType()
    schema = StructType([StructField(name, types[kind]) for name, kind in (part.split() for part in ddl.split(", "))])
    source = KafkaGroupDataSource(options_of("127.0.0.1:1", "g", subscribe="t", columns="key,value,timestamp"))
    with pytest.raises(OptionError, match=r"leave .schema\(\) out") if refused else nullcontext():
        source.streamReader(schema)


def test_the_initial_offset_is_a_constant(scene: Scene) -> None:
    name = scene.topic()
    options = scene.options(subscribe=name, startingOffsets="latest")
    first = KafkaGroupDataSource(options).streamReader(StructType())
    before = json.dumps(first.initialOffset())
    scene.produce(name, numbered(0, 2))
    second = KafkaGroupDataSource(options).streamReader(StructType())
    assert {before, json.dumps(first.initialOffset()), json.dumps(second.initialOffset())} == {before}
    assert name not in before


def test_building_a_reader_opens_nothing(group_id: str) -> None:
    threads = set(threading.enumerate())
    reader = KafkaGroupDataSource(options_of("127.0.0.1:1", group_id, subscribe="t")).streamReader(StructType())
    reader.initialOffset()
    if compatibility.has_admission_control():
        reader.getDefaultReadLimit()
    reader.stop()
    assert set(threading.enumerate()) <= threads  # some of other tests may have ended


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": 2}, "has format version 2, and this release reads version 1 only"),
        ({"topics": 7}, "the checkpoint's offset is damaged"),
        ({"group": "another"}, "the checkpoint belongs to group 'another', but kafka.group.id is 'g'"),
        (None, "the checkpoint's offset was not written by kafka-group"),
    ],
)
def test_an_unreadable_checkpoint_offset_is_refused(change: dict[str, Any] | None, message: str) -> None:
    reader = KafkaGroupDataSource(options_of("127.0.0.1:1", "g", subscribe="t")).streamReader(StructType())
    offset = {"t": {"0": 5}} if change is None else {**reader.initialOffset(), **change}
    with pytest.raises(CheckpointMismatch, match=message):
        _latest(reader, offset)
    with pytest.raises(CheckpointMismatch, match=message):
        reader.partitions(reader.initialOffset(), offset)
    assert reader._coordinator is None, "nothing was moved"


# --- Spark 4.0 and 4.1, which pass no start ---------------------------------------------------------------------------


class FakeCoordinator:
    """Plans a batch after each start, up to ``ends``; records the starts."""

    def __init__(self, ends: int) -> None:
        self.ends, self.starts, self.read = ends, list[int](), list[int]()

    def latest(self, start: StreamOffset, *, unlimited: bool, after_batch: bool = False) -> StreamOffset:
        self.starts.append(start.seq)
        return start if start.seq >= self.ends else batch(start.seq + 1)

    def start_batch(self, end: StreamOffset) -> None:
        self.read.append(end.seq)


def batch(seq: int) -> StreamOffset:
    return StreamOffset(group="g", stream="s", seq=seq, ranges={TopicPartition("t", 0): (seq, seq + 1)})


def stored(seq: int) -> dict[str, Any]:
    """The offset of a batch as Spark passes it."""
    found: dict[str, Any] = json.loads(batch(seq).to_json())
    return found


def plain(ends: int) -> tuple[PlainReader, FakeCoordinator, dict[str, Any]]:
    reader = PlainReader(Options.parse(options_of("127.0.0.1:1", "g", subscribe="t")))
    coordinator = FakeCoordinator(ends)
    reader._coordinator = coordinator  # type: ignore[assignment]
    return reader, coordinator, json.loads(json.dumps(reader.initialOffset()))


def test_a_new_query_without_starts_begins_before_batch_0_and_continues_at_the_end_of_each_batch() -> None:
    reader, coordinator, initial = plain(ends=1)
    assert reader.latestOffset() == batch(0).to_json_dict()
    reader.initialOffset()
    reader.partitions(initial, stored(0))
    assert reader.latestOffset() == batch(1).to_json_dict()
    reader.partitions(stored(0), stored(1))
    assert [json.dumps(reader.latestOffset()) for _ in range(2)] == [json.dumps(stored(1))] * 2
    assert (coordinator.starts, coordinator.read) == ([-1, 0, 1, 1], [0, 1])


def test_a_restarted_query_without_starts_begins_after_the_last_batch_of_its_checkpoint() -> None:
    reader, coordinator, _ = plain(ends=5)
    assert reader.partitions(stored(4), stored(4)) == []
    assert reader.latestOffset() == batch(5).to_json_dict()
    assert (coordinator.starts, coordinator.read) == ([4], [])


@pytest.mark.parametrize("pending", [0, 4])
def test_a_restarted_query_without_starts_runs_an_unfinished_batch_again(pending: int) -> None:
    reader, coordinator, initial = plain(ends=9)
    reader.partitions(stored(pending), stored(pending))
    reader.partitions(stored(pending - 1) if pending else initial, stored(pending))
    assert reader.latestOffset() == batch(pending + 1).to_json_dict()
    assert (coordinator.starts, coordinator.read) == ([pending], [pending])


def test_calls_out_of_order_are_refused_because_the_start_is_unknown() -> None:
    reader, coordinator, _ = plain(ends=9)
    reader.latestOffset()
    with pytest.raises(SetupError, match=r"the next batch before it read batch 0.*triggerAvailableNowWrapper"):
        reader.latestOffset()
    with pytest.raises(SetupError, match=r"before it passed batch 3 of the checkpoint.*triggerAvailableNowWrapper"):
        reader.partitions(stored(3), stored(3))
    with pytest.raises(SetupError, match=r"reads batch 7, which is not the planned one.*triggerAvailableNowWrapper"):
        reader.partitions(stored(6), stored(7))
    assert (coordinator.starts, coordinator.read) == ([-1], [])


LOADED = """
import sys
from pyspark.sql.types import StructType
from spark_group_source.model import Piece
from spark_group_source.source import KafkaGroupDataSource, RangesPartition
options = {"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.group.id": "g", "subscribe": "t"}
KafkaGroupDataSource(options).streamReader(StructType()).read(RangesPartition(Piece()))
print(*(name for name in sys.modules if name.startswith("spark_group_source.")))
"""


def test_a_task_without_an_agent_imports_no_module_of_agents() -> None:
    """Importing them takes six times as long as importing the reader, in every worker's first task."""
    process = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, timeout=LOAD_S)
    loaded = set(process.stdout.split())
    assert "spark_group_source.reader.range_reader" in loaded
    assert not {name for name in loaded if ".agent" in name or ".channel" in name or ".members" in name}


@pytest.mark.parametrize(("level", "number"), [("debug", 10), ("", 30), ("WARNING", 30)])
def test_the_log_level_is_accepted_in_any_case(level: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL_ENV, level)
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.NOTSET))
    before = signal.getsignal(signal.SIGTERM)
    try:
        _prepare_process()
        assert logging.root.level == number
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("host", ["executor", "auto"])
def test_a_control_server_that_cannot_listen_is_reported_at_the_start(
    host: str, group_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spark_group_source.source._prepare_process", lambda: None)
    monkeypatch.setattr("spark_group_source.agents.channel.server.PORT_WAIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        more = {"memberHost": host, "coordinatorPort": port, "coordinatorHost": "127.0.0.1"}
        reader = KafkaGroupDataSource(options_of("127.0.0.1:1", group_id, subscribe="t", **more)).streamReader(
            StructType()
        )
        for _ in range(2):  # a second call fails in the same way
            if host == "executor":
                with pytest.raises(OptionError, match=rf"memberHost is executor.*port {port}.*coordinatorPort"):
                    reader._running_coordinator()
            else:
                assert reader._running_coordinator() is reader._coordinator
    assert ("members stay in the stream reader" in caplog.text) == (host == "auto")
    before = signal.getsignal(signal.SIGTERM)
    try:
        reader.stop()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN  # which processes started here would inherit
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("host", ["auto", "executor", "driver"])
@pytest.mark.parametrize("tasks_report", [False, True])
def test_tasks_use_agents_or_only_report_or_have_no_control_server(
    host: str, is_local: bool, tasks_report: bool, group_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_group_source.source._prepare_process", lambda: None)
    monkeypatch.setattr("spark_group_source.agents.agent_folder.is_local_mode", lambda: is_local)
    monkeypatch.setattr("spark_group_source.source.atexit.register", lambda _: None)
    more: dict[str, Any] = {"memberHost": host, "coordinatorHost": "127.0.0.1", "failOnDataLoss": not tasks_report}
    reader = PlainReader(Options.parse(options_of("127.0.0.1:1", group_id, subscribe="t", **more)))
    coordinator = reader._running_coordinator()
    try:
        monkeypatch.setattr(coordinator, "start_batch", lambda _: None)
        end = StreamOffset(group=group_id, stream="s", seq=1, ranges={TopicPartition("t", 0): (1, 2)})
        (partition,) = GroupStreamReader.partitions(reader, reader.initialOffset(), end.to_json_dict())
    finally:
        coordinator.close()
        if reader._control_server is not None:
            reader._control_server.stop()
    assert isinstance(partition, RangesPartition)
    uses_agents = host == "executor" or (host == "auto" and not is_local)
    assert (partition.task is not None) == (uses_agents or tasks_report)
    assert partition.task is None or partition.task.uses_agents == uses_agents
    assert partition.piece.ranges == tuple(end.batch())


def _latest(reader: Any, start: dict[str, Any]) -> dict[str, Any]:
    """What a query that starts at ``start`` calls first."""
    if compatibility.has_admission_control():
        latest = reader.latestOffset(start, reader.getDefaultReadLimit())
    else:
        if start != reader.initialOffset():
            reader.partitions(start, start)
        latest = reader.latestOffset()
    found: dict[str, Any] = json.loads(json.dumps(latest))
    return found
