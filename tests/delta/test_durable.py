"""The offsets of a run's last batch are committed too, although Spark does not report it to the source as durable."""

from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest
from conftest import await_until
from crash.killed import CALM, Application
from delta_files import living_rows
from kafka_helpers import set_committed
from rebalance.accounts import describe
from scenes import Scene
from streams import OtherMember, numbered, planned

from spark_group_source import DeltaSink
from spark_group_source.host import run_files
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark

HANG_S = 600


def test_a_stopped_query_commits_the_offsets_of_its_last_batch(scene: Scene) -> None:
    """No batch follows the one in which it is stopped, so Spark does not report that one as durable."""
    name, table = scene.topic(2), scene.folder / "table"
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name)
    query = one.start_into(DeltaSink(table), processingTime="1 hour")
    try:
        await_until(lambda: query.lastProgress is not None, what="the end of the batch")
    finally:
        query.stop()
    assert len(living_rows(table, ["offset"])) == 10
    ends = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
    await_until(lambda: scene.committed() == ends, what="the last offsets in Kafka")


@pytest.mark.parametrize("wrapped", [False, True], ids=["the sink", "a function with two sinks"])
def test_between_two_triggers_offsets_are_committed_partitions_released_and_a_drain_served(
    scene: Scene, wrapped: bool
) -> None:
    """The next trigger is an hour away, so only the durable mark shows that the batch is in the table."""
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    first, second = (DeltaSink(scene.folder / table) for table in ("a", "b"))
    marks: list[int] = []

    def both(df: "DataFrame", batch_id: int) -> None:
        for sink in (first, second):
            sink(df, batch_id)
            marks.extend(run_files.durable_mark(run["stream"]).seq for run in run_files.read(scene.group))

    query = scene.job(subscribe=name).start_into(both if wrapped else first, processingTime="1 hour")
    ends = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
    try:
        await_until(lambda: scene.committed() == ends, HANG_S, what="the offsets of the first batch in Kafka")
        assert marks == ([-1, -1] if wrapped else []), "durable before the function has returned"
        with OtherMember(scene.servers, scene.group, [name]) as other:
            await_until(lambda: len(other.partitions) == 1, HANG_S, what="the release of a partition")
        run_files.drain(scene.group, timeout_s=HANG_S)
    finally:
        query.stop()


@pytest.mark.crash
def test_a_query_whose_host_is_lost_goes_on_after_a_consumer_that_read_a_part_again(scene: Scene) -> None:
    """Driver, JVM and stream reader die at once, and no run file is left. Kafka gets the consumer's commit in place of
    the query's, as if they had died before that."""
    name, table = scene.topic(1), scene.folder / "table"
    arguments = {"servers": scene.servers, "group": scene.group, "topic": name, "table": str(table), **CALM}
    scene.produce(name, numbered(0, 9, 1))
    host = Application(scene.folder / "host", arguments, str(scene.folder / "host" / "checkpoint"), lambda: table)
    try:
        job = host.start()
        await_until(lambda: scene.committed() == {TopicPartition(name, 0): 10}, HANG_S, what="the offsets in Kafka")
        for process in job.tree():
            with suppress(psutil.NoSuchProcess):  # it ended with its parent
                process.kill()
        host.end()
        stream = planned(host.home / "checkpoint")[0].stream
        for file in run_files.directory().glob(f"{stream}.*"):
            file.unlink()
        await_until(lambda: describe(scene.admin, scene.group).state == "empty", HANG_S, what="the end of its sessions")
        set_committed(scene.admin, scene.group, name, {0: 4})
        scene.produce(name, numbered(10, 14, 1))
        host.start()
        await_until(lambda: scene.committed() == {TopicPartition(name, 0): 15}, HANG_S, what="the offsets in Kafka")
    finally:
        host.end()
    assert sorted(row["offset"] for row in living_rows(table, ["offset"])) == list(range(15))
    (warned,) = [line for line in host.log.read_text().splitlines() if "are already in the table" in line]
    assert f"6 offsets are already in the table and are left out: {name}-0[4,10)" in warned
    to = f"""--to-offsets '{{"{name}": {{"0": 4}}}}' --table {table} --execute"""
    assert f"spark-group reset --bootstrap-servers {scene.servers} --group {scene.group} {to}" in warned
