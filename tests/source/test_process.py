"""Processes of a query: which ones it starts, and how each of them ends."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil
import pytest
from kafka_helpers import await_until
from rebalance.accounts import describe
from scenes import Scene
from streams import alive, descendants, numbered, readers_below, texts, values_of

from spark_group_source.agents.agent_folder import agents_directory

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark

CHILD_S = 600
"""Time limit of a process that starts its own Spark."""


# --- a separate Spark -----------------------------------------------------------------------------------------------

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
    # The first attempt: kill every Python worker of this executor, including the one that reads.
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
def test_G1_a_retried_task_returns_the_same_rows(scene: Scene) -> None:
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
    assert (scene.folder / "failed").exists()  # the first attempt failed
    assert scene.committed() == scene.end_offsets(name)


@pytest.mark.slow
@pytest.mark.full
def test_a_killed_driver_leaves_no_process_and_its_members_expire(scene: Scene) -> None:
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
            os.kill(jvm, signal.SIGKILL)
            await_until(lambda: not any(map(alive, below)), what="the end of every process below the driver")
        finally:
            driver.kill()
    await_until(lambda: describe(scene.admin, scene.group).members == {}, what="the end of its members")


# --- agents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("member_host", "agents"), [("auto", 0), ("executor", 1)])
def test_in_local_mode_an_agent_starts_only_if_the_option_demands_it(
    scene: Scene, no_reader_left: None, member_host: str, agents: int
) -> None:
    """The driver's JVM is the only executor: members beside it gain nothing over members in the stream reader, which
    listens only if agents may connect, and not for other hosts."""
    name = scene.topic()
    scene.produce(name, numbered(0, 9))
    before = set(agents_directory().glob("*"))
    query = scene.job(subscribe=name, memberHost=member_host).start()
    query.processAllAvailable()
    (reader,) = map(psutil.Process, readers_below())
    started = set(agents_directory().glob(f"{reader.ppid()}-*")) - before
    listening = {c.laddr.ip for c in reader.net_connections() if c.status == psutil.CONN_LISTEN}
    query.stop()
    assert query.exception() is None
    assert len(started) == agents
    assert listening == ({"127.0.0.1"} if agents else set())


# --- stop() ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_reader_left(spark: "SparkSession") -> Iterator[None]:
    """Every stream reader that the test started ends soon after the test."""
    before = set(readers_below())
    yield
    await_until(lambda: set(readers_below()) <= before, what="the end of the stream readers")


def is_planning(query: "StreamingQuery") -> bool:
    """Whether the stream reader plans a batch. Spark itself does not end one that is stopped before that."""
    return "Getting offsets" in query.status["message"]


def test_stop_ends_a_query_with_busy_tasks(scene: Scene, no_reader_left: None) -> None:
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


def test_stop_ends_a_query_without_a_broker(scene: Scene, no_reader_left: None) -> None:
    one = scene.job(subscribe="t", kafka__bootstrap__servers="127.0.0.1:1", fetchOffset__numRetries=1000)
    query = one.start()
    await_until(lambda: is_planning(query), what="the first offset request")
    query.stop()
    assert query.exception() is None
