"""B55, G4: an operator moves a group back while a batch of its query is pending; the query goes on with its checkpoint.

A batch is pending when Spark has written down what it reads (``offsets/N``) and not that it is done (``commits/N``):
Spark runs it again at every start, whatever happened meanwhile.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient
from conftest import Offsets, Produce, TopicFactory, await_until
from delta_files import living_rows
from kafka_words import set_committed
from streams import END_S, Job, describe, forget, numbered, options_of, planned, readers_below
from typer.testing import CliRunner

from spark_group_source import DeltaSink
from spark_group_source.cli import shared
from spark_group_source.cli.app import app
from spark_group_source.local.broker import Broker
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

PARTITIONS = 2


class Scene:
    """One group, its topic of two partitions, a table, and one checkpoint for every run."""

    def __init__(
        self, spark: "SparkSession", admin: AdminClient, servers: str, group: str, topic: str, folder: Path
    ) -> None:
        self.admin, self.servers, self.group, self.topic = admin, servers, group, topic
        self.table = folder / "table"
        options = options_of(servers, group, subscribe=topic, kafka__session__timeout__ms=2000)
        self.job = Job(spark, options, folder / "checkpoint")

    def run(self) -> None:
        """An AvailableNow run to its end; raises what the query failed with."""
        self._run(DeltaSink(self.table))

    def refused(self) -> str:
        """A run that ends with an error; returns it."""
        with pytest.raises(Exception, match="LedgerConflict") as found:
            self.run()
        return str(found.value)

    def die_in_a_batch(self, *, written: bool) -> int:
        """A run whose source is killed in the middle of its first batch; returns that batch's number.

        Args:
            written: the table has the batch then, and Spark does not know.
        """
        numbers: list[int] = []
        sink = DeltaSink(self.table)

        def write(frame: "DataFrame", number: int) -> None:
            numbers.append(number)
            for reader in readers_below():
                os.kill(reader, signal.SIGKILL)
            if written:
                sink(frame, number)
            raise RuntimeError("killed")

        with pytest.raises(Exception, match="killed"):
            self._run(write)
        await_until(lambda: not describe(self.admin, self.group).members, what="the end of its session")
        assert not (self.job.checkpoint / "commits" / str(numbers[0])).exists()
        return numbers[0]

    def _run(self, sink: "Callable[[DataFrame, int], None]") -> None:
        writer = self.job.load().writeStream.foreachBatch(sink)
        query = writer.option("checkpointLocation", str(self.job.checkpoint)).trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(END_S)
        finally:
            query.stop()

    def reset(self, *arguments: str) -> None:
        common = ["--group", self.group, "--bootstrap-servers", self.servers, "--table", str(self.table), "--execute"]
        done = CliRunner().invoke(app, ["reset", *common, *arguments], env={"COLUMNS": "2000"})
        assert done.exit_code == 0, done.output

    def by_kafkas_own_tool(self, offset: int) -> None:
        set_committed(self.admin, self.group, self.topic, dict.fromkeys(range(PARTITIONS), offset))

    @property
    def offsets(self) -> Counter[tuple[int, int]]:
        """How often the table has each record."""
        return Counter((row["partition"], row["offset"]) for row in living_rows(self.table, ["partition", "offset"]))


@pytest.fixture
def scene(
    spark: "SparkSession",
    broker: Broker,
    admin: AdminClient,
    topic: TopicFactory,
    group_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Scene:
    @contextmanager
    def session(wanted: bool) -> "Iterator[SparkSession | None]":
        yield spark if wanted else None

    monkeypatch.setattr(shared, "session", session)
    return Scene(spark, admin, broker.bootstrap_servers, group_id, topic(PARTITIONS), tmp_path)


def times(*counts: tuple[int, int, int]) -> dict[tuple[int, int], int]:
    """From ``(first, end, n)``: the offsets from first to before end are in the table n times, in every partition."""
    return {(p, offset): n for first, end, n in counts for offset in range(first, end) for p in range(PARTITIONS)}


@pytest.mark.parametrize("written", [False, True], ids=["batch-not-in-table", "batch-in-table"])
def test_B55_a_reset_while_a_batch_is_pending_is_followed_exactly_with_the_same_checkpoint(
    written: bool, scene: Scene, produce: Produce, committed: Callable[[str], Offsets], group_id: str
) -> None:
    produce(scene.topic, numbered(0, 9, PARTITIONS))
    scene.run()
    produce(scene.topic, numbered(10, 19, PARTITIONS))
    pending = scene.die_in_a_batch(written=written)
    assert scene.offsets == times((0, 10 if written else 5, 1))

    scene.reset("--to-offset", "3")
    scene.run()
    once_more = times((0, 3, 1), (3, 5, 2), (5, 10, 2 if written else 1))
    assert scene.offsets == once_more
    assert planned(scene.job.checkpoint)[pending + 1].ranges == {
        TopicPartition(scene.topic, p): (3, 10) for p in range(PARTITIONS)
    }
    assert set(committed(group_id).values()) == {10}

    scene.reset(
        "--to-offset", "8"
    )  # the same, twice in a row: the second one counts, and nothing is read for the first
    scene.reset("--to-offset", "8")
    scene.run()
    produce(scene.topic, numbered(20, 21, PARTITIONS))
    scene.run()
    assert scene.offsets == {**once_more, **{at: once_more[at] + 1 for at in times((8, 10, 1))}, **times((10, 11, 1))}
    assert set(committed(group_id).values()) == {11}


def test_B55_the_ways_out_that_a_conflict_names_work_with_the_same_checkpoint(scene: Scene, produce: Produce) -> None:
    produce(scene.topic, numbered(0, 9, PARTITIONS))
    scene.run()
    scene.by_kafkas_own_tool(2)
    text = scene.refused()
    assert "spark-group reset" in text and "--to-ledger" in text
    assert "with the same checkpoint" in text
    assert "LedgerConflict" in scene.refused(), "a start alone settles nothing"
    assert scene.offsets == times((0, 5, 1)), "nothing was written"

    scene.reset("--to-ledger")
    produce(scene.topic, numbered(10, 11, PARTITIONS))
    scene.run()
    assert scene.offsets == times((0, 6, 1))

    scene.by_kafkas_own_tool(2)
    scene.refused()
    scene.reset("--to-offset", "4")
    scene.run()
    assert scene.offsets == times((0, 4, 1), (4, 6, 2))
    scene.run()
    assert scene.offsets == times((0, 4, 1), (4, 6, 2))


def test_B55_a_rewind_by_kafkas_own_tool_is_refused_again_though_its_plan_was_lost_with_the_driver(
    scene: Scene, produce: Produce
) -> None:
    """By then the run has committed the position under its own name: the note beside it says where it came from."""
    produce(scene.topic, numbered(0, 9, PARTITIONS))
    scene.run()
    scene.by_kafkas_own_tool(2)
    scene.refused()
    last = max(planned(scene.job.checkpoint))
    forget(scene.job.checkpoint, "offsets", last)  # as if the driver had died before it was written
    produce(scene.topic, numbered(10, 11, PARTITIONS))
    text = scene.refused()
    assert f"{scene.topic}-0: Kafka says 2, the table holds up to 5" in text
    assert scene.offsets == times((0, 5, 1)), "nothing was written"
