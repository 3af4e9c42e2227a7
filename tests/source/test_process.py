"""The source among processes: what is pickled, forked and started, and how every process ends."""

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from conftest import await_until
from pyspark import cloudpickle
from pyspark.sql.types import StructType
from scenes import Scene
from streams import (
    PROTOCOLS,
    Engine,
    alive,
    descendants,
    describe,
    numbered,
    options_of,
    readers_below,
    rename,
    texts,
    values_of,
)

from spark_group_source.errors import OptionError
from spark_group_source.source import GroupStreamReader, KafkaGroupDataSource

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark

FROZEN_SESSION_S = 3
CHILD_S = 120
"""Bound of a process that starts a Spark of its own."""


# --- what travels ---------------------------------------------------------------------------------------------------


def test_B72_source_reader_and_pieces_pickle_without_a_client_also_when_the_reader_runs(
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


def test_B73_the_offset_before_batch_0_is_a_constant(scene: Scene) -> None:
    name = scene.topic()
    options = scene.options(subscribe=name, startingOffsets="latest")
    first = KafkaGroupDataSource(options).streamReader(StructType())
    before = json.dumps(first.initialOffset())
    scene.produce(name, numbered(0, 2))
    anew = KafkaGroupDataSource(options).streamReader(StructType())
    assert {before, json.dumps(first.initialOffset()), json.dumps(anew.initialOffset())} == {before}
    assert name not in before


def test_building_a_reader_opens_nothing(group_id: str) -> None:
    threads = set(threading.enumerate())
    reader = KafkaGroupDataSource(options_of("127.0.0.1:1", group_id, subscribe="t")).streamReader(StructType())
    reader.initialOffset()
    reader.getDefaultReadLimit()
    reader.stop()
    assert set(threading.enumerate()) == threads


LOADED = """
import sys
from pyspark.sql.types import StructType
from spark_group_source.model import Piece
from spark_group_source.source import KafkaGroupDataSource, RangesPartition
options = {"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.group.id": "g", "subscribe": "t"}
KafkaGroupDataSource(options).streamReader(StructType()).read(RangesPartition(Piece()))
print(*(name for name in sys.modules if name.startswith("spark_group_source.")))
"""


def test_a_task_that_has_no_agent_loads_nothing_of_agents() -> None:
    """It would take six times as long to load as what reads, in every worker's first task."""
    said = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, timeout=CHILD_S)
    loaded = set(said.stdout.split())
    assert "spark_group_source.executor.fetch" in loaded
    assert not {name for name in loaded if ".agent" in name or ".channel" in name or ".members" in name}


@pytest.mark.parametrize("host", ["executor", "auto"])
def test_where_agents_cannot_reach_the_stream_reader_is_told_at_the_start(
    host: str, group_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spark_group_source.source._prepare_process", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        more = {"memberHost": host, "coordinatorPort": port, "coordinatorHost": "127.0.0.1"}
        reader = KafkaGroupDataSource(options_of("127.0.0.1:1", group_id, subscribe="t", **more)).streamReader(
            StructType()
        )
        for _ in range(2):  # asked again it is not forgotten
            if host == "executor":
                with pytest.raises(OptionError, match=rf"memberHost is executor.*port {port}.*coordinatorPort"):
                    reader._started()
            else:
                assert reader._started() is reader._coordinator
    assert ("members stay in the stream reader" in caplog.text) == (host == "auto")
    before = signal.getsignal(signal.SIGTERM)
    try:
        reader.stop()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN  # whatever starts here inherits that
    finally:
        signal.signal(signal.SIGTERM, before)


def _latest(reader: GroupStreamReader, start: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(reader.latestOffset(start, reader.getDefaultReadLimit())))
    return found


# --- a Spark of its own ---------------------------------------------------------------------------------------------

PREAMBLE = """
import json, os, signal, subprocess, sys, threading
from pyspark.sql import SparkSession
given = json.loads(sys.argv[1])
builder = SparkSession.builder.master(given["master"]).config("spark.ui.enabled", "false")
for host in ("spark.driver.host", "spark.driver.bindAddress"):
    builder = builder.config(host, "127.0.0.1")
spark = builder.config("spark.sql.shuffle.partitions", "1").getOrCreate()
frame = spark.readStream.format("kafka-group").options(**given["options"]).load()
"""

BOUNDED = """
def fails_once(batches):
    yield from batches
    try:
        os.close(os.open(given["flag"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    # The first try: every Python worker of this executor goes, with the one that reads among them.
    mine = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    for pid, parent in (map(int, line.split()) for line in mine.splitlines()):
        if parent == os.getppid() and pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

seen = []
def keep(batch, number):
    seen.append([number, sorted(row.value.decode() for row in batch.collect())])
query = (
    frame.select("value").mapInArrow(fails_once, "value binary").writeStream.foreachBatch(keep)
    .option("checkpointLocation", given["checkpoint"]).trigger(availableNow=True).start()
)
query.awaitTermination()
print("seen", json.dumps(seen), flush=True)
"""

ENDLESS = """
def keep(batch, number):
    print("batch", number, len(batch.collect()), flush=True)
frame.writeStream.foreachBatch(keep).option("checkpointLocation", given["checkpoint"]).start().awaitTermination()
"""


def child(code: str, **given: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + code, json.dumps(given)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.proves("G1", level="spark")
@pytest.mark.slow
def test_B35_G1_a_fresh_spark_finds_the_format_and_a_retried_task_gives_the_same_rows(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    with child(
        BOUNDED,
        master="local[2,3]",
        options=scene.options(subscribe=name),
        checkpoint=str(scene.folder / "c"),
        flag=str(scene.folder / "failed"),
    ) as driver:
        try:
            out, _ = driver.communicate(timeout=CHILD_S)
        finally:
            driver.kill()
    assert driver.returncode == 0
    line = next(line for line in out.splitlines() if line.startswith("seen "))
    assert json.loads(line.removeprefix("seen ")) == [[0, texts(0, 9)]]
    assert (scene.folder / "failed").exists()  # the first try did die
    assert scene.committed() == scene.end_offsets(name)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["python", "jvm"])
def test_a_killed_driver_leaves_no_process_and_its_places_go_with_the_session(victim: str, scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    with child(
        ENDLESS,
        master="local[2]",
        options=scene.options(subscribe=name, groupMembers=2),
        checkpoint=str(scene.folder / "c"),
    ) as driver:
        try:
            assert driver.stdout is not None
            assert next(line for line in driver.stdout if line.startswith("batch")).split() == ["batch", "0", "10"]
            below = descendants(driver.pid)
            assert len(readers_below(driver.pid)) == 1
            jvm = next(pid for pid, args in below.items() if "SparkSubmit" in args)
            os.kill(driver.pid if victim == "python" else jvm, signal.SIGKILL)
            await_until(lambda: not any(map(alive, below)), what="the end of every process below the driver")
        finally:
            driver.kill()
    await_until(lambda: describe(scene.admin, scene.group).members == {}, what="the end of its members")


# --- stop() ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_reader_left(spark: "SparkSession") -> Iterator[None]:
    """Every stream reader that the test started is gone soon after the test."""
    before = set(readers_below())
    yield
    await_until(lambda: set(readers_below()) <= before, what="the end of the stream readers")


def asking(query: "StreamingQuery") -> bool:
    """Whether the stream reader is at work. One that is stopped before that, Spark itself forgets to end."""
    return "Getting offsets" in query.status["message"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B74_stop_ends_an_idle_query(protocol: str, scene: Scene, no_reader_left: None) -> None:
    query = scene.job(protocol, subscribe=scene.topic(), groupMembers=2).start()
    query.processAllAvailable()
    assert len(readers_below()) == 1
    query.stop()
    assert query.exception() is None


def test_B74_stop_ends_a_query_whose_tasks_are_busy(scene: Scene, no_reader_left: None) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 2))
    busy = scene.folder / "busy"

    def stuck(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        for batch in batches:
            busy.touch()
            threading.Event().wait(300)
            yield batch

    one = scene.job(subscribe=name)
    frame = one.load().select("value").mapInArrow(stuck, "value binary")
    query = frame.writeStream.format("noop").option("checkpointLocation", str(one.checkpoint)).start()
    await_until(busy.exists, what="a task in the middle of its batch")
    query.stop()
    assert query.exception() is None
    assert values_of(one.run()) == texts(0, 2)


def test_B74_stop_ends_a_query_that_finds_no_broker(scene: Scene, no_reader_left: None) -> None:
    one = scene.job(subscribe="t", kafka__bootstrap__servers="127.0.0.1:1", fetchOffset__numRetries=1000)
    query = one.start()
    await_until(lambda: asking(query), what="the first question for offsets")
    query.stop()
    assert query.exception() is None


def test_B74_stop_ends_a_query_that_waits_for_its_place_in_the_group(scene: Scene, no_reader_left: None) -> None:
    name = scene.topic(2)
    # A member of a second slot that another run holds under the same name: ours cannot join (KIP-848).
    one = scene.job("consumer", subscribe=name)
    one.run()
    options = scene.options("consumer", subscribe=name)
    log = [path.read_text().splitlines()[2] for path in sorted((one.checkpoint / "offsets").glob("[0-9]*"))]
    with Engine(options, log) as holder:
        await_until(lambda: holder.step() is None and len(describe(scene.admin, scene.group).members) == 1)
        query = one.start()
        await_until(lambda: asking(query), what="the first question for offsets")
        query.stop()
        assert query.exception() is None


# --- an old driver that comes back ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B51_a_driver_that_was_frozen_in_a_batch_neither_commits_it_nor_loses_its_successors_rows(
    protocol: str, scene: Scene
) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    session: dict[str, Any] = {"kafka__session__timeout__ms": FROZEN_SESSION_S * 1000} if protocol == "classic" else {}
    old = scene.job(protocol, subscribe=name, **session)
    new = scene.job(protocol, checkpoint="copy", subscribe=name, **session)
    frozen = threading.Event()
    readers: list[int] = []

    def freeze(number: int) -> None:
        if number == 1:
            shutil.copytree(old.checkpoint, new.checkpoint)  # the batch is planned and not done
            rename(new.checkpoint)
            readers.extend(readers_below())
            for reader in readers:
                os.kill(reader, signal.SIGSTOP)
            frozen.set()

    old.on_batch = freeze
    first = old.start()
    try:
        first.processAllAvailable()
        scene.produce(name, numbered(4, 7, 2))
        await_until(frozen.is_set, what="the batch in which it is frozen")
        scene.produce(name, numbered(8, 11, 2))
        with new.running() as second:
            await_until(lambda: len(new.rows) >= 8, what="the successor's rows")
            await_until(lambda: scene.committed() == scene.end_offsets(name), what="the successor's offsets")
            # Past its session: its client library will then know of no place but by joining again.
            assert not first.awaitTermination(FROZEN_SESSION_S + 1)
            for reader in readers:
                os.kill(reader, signal.SIGCONT)
            # Its batch is done in its own sink: now it would commit it. With the classic protocol its client library
            # would join again under the same instance id, and the broker throw the successor's member out for it.
            await_until(first.exception, what="the end of the driver that was replaced")
            assert scene.committed() == scene.end_offsets(name)
            scene.produce(name, numbered(12, 13, 2))
            await_until(lambda: len(new.rows) >= 10, what="more rows")
            second.processAllAvailable()
            assert second.exception() is None
        first.stop()
        scene.produce(name, numbered(14, 15, 2))
        new.run()
        assert scene.committed() == scene.end_offsets(name)
    finally:
        for reader in filter(alive, readers):
            os.kill(reader, signal.SIGCONT)
        first.stop()
    assert new.values == texts(4, 15)
