"""The source without Spark: pickling, building a reader, and offsets of a checkpoint."""

import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.types import StructType
from scenes import Scene
from streams import numbered, options_of

from spark_group_source.errors import CheckpointMismatch, OptionError
from spark_group_source.source import GroupStreamReader, KafkaGroupDataSource

LOAD_S = 120
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
    reader.getDefaultReadLimit()
    reader.stop()
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"v": 2}, "has format version 2, and this release reads version 1 only"),
        ({"topics": 7}, "the checkpoint's offset is damaged"),
        ({"group": "another"}, "the checkpoint belongs to group 'another', but kafka.group.id is 'g'"),
        (None, "the checkpoint's offset was not written by kafka-group"),
    ],
)
def test_an_unreadable_checkpoint_offset_is_refused(change: dict[str, Any] | None, says: str) -> None:
    reader = KafkaGroupDataSource(options_of("127.0.0.1:1", "g", subscribe="t")).streamReader(StructType())
    offset = {"t": {"0": 5}} if change is None else {**reader.initialOffset(), **change}
    with pytest.raises(CheckpointMismatch, match=says):
        reader.latestOffset(offset, reader.getDefaultReadLimit())
    with pytest.raises(CheckpointMismatch, match=says):
        reader.partitions(reader.initialOffset(), offset)


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
    said = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, timeout=LOAD_S)
    loaded = set(said.stdout.split())
    assert "spark_group_source.reader.range_reader" in loaded
    assert not {name for name in loaded if ".agent" in name or ".channel" in name or ".members" in name}


@pytest.mark.parametrize("host", ["executor", "auto"])
def test_a_control_server_that_cannot_listen_is_reported_at_the_start(
    host: str, group_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spark_group_source.source._prepare_process", lambda: None)
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


def _latest(reader: GroupStreamReader, start: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(reader.latestOffset(start, reader.getDefaultReadLimit())))
    return found
