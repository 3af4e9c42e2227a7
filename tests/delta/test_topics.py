"""DeltaSinks on a real Spark: a batch is read once, its rows are released, and its jobs belong to the query.
Deliberately absent: the decisions about a batch (``decisions/test_topic_sinks.py``, without a JVM)."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kit import frames
from kit.frames import Session
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from sink_helpers import Query, commits, next_offsets, records, rows, run, stream
from sink_source import SCHEMA, offset

from spark_group_source import DeltaSink, DeltaSinks
from spark_group_source.delta import Writer, topic_sinks
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]

TOPICS = ("clicks", "orders", "payments")
RECORD = ["topic", "partition", "offset"]


def keeps_rows(spark: "SparkSession") -> bool:
    """Whether Spark keeps the rows of a DataFrame. Delta Lake keeps the states of tables in another way."""
    session: Any = spark
    return not session._jsparkSession.sharedState().cacheManager().isEmpty()


def test_G4_batch_for_several_tables_is_read_once_and_its_rows_are_released(
    scripted: "SparkSession", tmp_path: Path
) -> None:
    """Although the transform counts its rows and joins them with themselves."""
    groups = set()

    def change(df: "DataFrame") -> "DataFrame":
        groups.add(df.sparkSession.sparkContext.getLocalProperty("spark.jobGroup.id"))
        assert df.count() in (0, 4)
        return df.join(df.select(*RECORD), RECORD).select(*RECORD, "value")

    batches = [offset(n, {(t, 0): (4 * n, 4 * n + 4) for t in TOPICS}) for n in range(2)]
    sinks = DeltaSinks(lambda topic: DeltaSink(tmp_path / topic, transform=change))
    read = run(stream(scripted, tmp_path, batches), sinks, tmp_path / "checkpoint")
    assert [count for count in read if count] == [12, 12]
    for topic in TOPICS:
        assert rows(tmp_path / topic) == records(0, 8, topic=topic)
        assert next_offsets(tmp_path / topic) == {(topic, 0): 8}
    assert not keeps_rows(scripted)
    assert len(groups) == 1 and None not in groups, "that of the query's run: stopping the query cancels them"


@pytest.mark.parametrize("several", [False, True], ids=["DeltaSink", "DeltaSinks with one table in the batch"])
def test_transform_that_uses_its_rows_twice_reads_the_batch_once_with_persist(
    scripted: "SparkSession", tmp_path: Path, several: bool
) -> None:
    def change(df: "DataFrame") -> "DataFrame":
        assert df.count() == 4
        return df

    batches = [offset(n, {("orders", 0): (4 * n, 4 * n + 4)}) for n in range(2)]
    sink = DeltaSink(tmp_path / "orders", transform=change, persist=True)
    used = DeltaSinks({"orders": sink}) if several else sink
    read = run(stream(scripted, tmp_path, batches), used, tmp_path / "checkpoint")
    assert [count for count in read if count] == [4, 4]
    assert rows(tmp_path / "orders") == records(0, 8)
    assert not keeps_rows(scripted)


def test_rows_are_released_and_other_tables_written_when_one_fails(scripted: "SparkSession", tmp_path: Path) -> None:
    def full(df: "DataFrame") -> "DataFrame":
        raise OSError("No space left on device")

    batch = offset(0, {(t, 0): (0, 4) for t in TOPICS})
    sinks = {t: DeltaSink(tmp_path / t, transform=full if t == "orders" else None) for t in TOPICS}
    with pytest.raises(StreamingQueryException, match="No space left"):
        run(stream(scripted, tmp_path, [batch]), DeltaSinks(sinks), tmp_path / "checkpoint")
    assert not keeps_rows(scripted)
    assert rows(tmp_path / "payments") == records(0, 4, topic="payments")
    run(stream(scripted, tmp_path, [batch]), DeltaSinks(lambda t: DeltaSink(tmp_path / t)), tmp_path / "checkpoint")
    assert {t: rows(tmp_path / t) for t in TOPICS} == {t: records(0, 4, topic=t) for t in TOPICS}


@pytest.mark.parametrize("fake", [False, True], ids=["Spark", "fake"])
def test_rows_are_divided_by_topic_and_others_refused(
    spark: "SparkSession", fake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = Session() if fake else spark
    for name in ("other_topics", "rows_of") if fake else ():
        monkeypatch.setattr(topic_sinks, name, getattr(frames, name))
    found = [r for t in TOPICS for r in records(0, 2, topic=t)]
    topics = {("clicks", "payments"): 2, ("orders",): 1}
    with topic_sinks.rows_by_topics(session.createDataFrame(found, SCHEMA), {**topics, ("none",): 1}) as parts:
        read: list[Any] = list(parts)
        counts = [part.rows.num_rows if fake else part.count() for part in read]
    assert counts == [4, 2, 0]
    for other in ("Orders", None):
        df = session.createDataFrame([*found, (other, 0, 9, "v")], SCHEMA)
        with pytest.raises(OptionError, match="rows with topic"), topic_sinks.rows_by_topics(df, topics):
            pytest.fail("nothing may be written")
    assert not keeps_rows(spark)


# --- by a column ------------------------------------------------------------------------------------------------------

BY = "CASE WHEN offset = 3 THEN 'three' WHEN offset % 2 = 0 THEN 'even' END"


def offsets_of(table: Path) -> list[int]:
    return [row[2] for row in rows(table)]


@pytest.mark.parametrize("writer", ["auto", pytest.param("options", marks=pytest.mark.full)])
def test_G4_rows_go_to_the_table_of_their_key_and_each_table_has_the_ledger_of_each_batch(
    scripted: "SparkSession", tmp_path: Path, writer: Writer
) -> None:
    """By a function of the rows; the next tests have expressions."""
    names = ("three", "even", "rest")
    three, even, rest = (DeltaSink(tmp_path / name, writer=writer) for name in names)
    sinks = DeltaSinks({"three": three, "even": even}, by=lambda _: F.expr(BY), others=rest)
    batches = [offset(n, {("orders", 0): (4 * n, 4 * n + 4)}) for n in range(2)]
    read = run(stream(scripted, tmp_path, batches), sinks, tmp_path / "checkpoint")
    assert [count for count in read if count] == [4, 4]
    assert {name: offsets_of(tmp_path / name) for name in names} == {
        "three": [3],
        "even": [0, 2, 4, 6],
        "rest": [1, 5, 7],
    }
    assert [next_offsets(tmp_path / name) for name in names] == [{("orders", 0): 8}] * 3
    assert rows(tmp_path / "rest")[0] == records(1, 2)[0], "without the column of the key"
    assert not keeps_rows(scripted)


def test_a_row_without_a_table_is_named_before_anything_is_written(query: Query, tmp_path: Path) -> None:
    sinks = DeltaSinks({"a": query.sink(tmp_path / "a")}, by="IF(offset = 1, NULL, 'a')", checkpoint=str(query.root))
    with pytest.raises(OptionError, match="1 rows of the batch have no table: the value of by is None"):
        query.run(sinks, 0, offset(0, {("orders", 0): (0, 4)}))
    assert not (tmp_path / "a").exists() and not keeps_rows(query.spark)


def test_a_table_that_is_added_later_begins_there(query: Query, tmp_path: Path) -> None:
    """So does one that was left out for a batch; the records of that batch are not in it."""
    a, b = (query.sink(tmp_path / name) for name in "ab")
    by = "IF(offset % 2 = 0, 'a', 'b')"

    def write(number: int, **sinks: DeltaSink) -> None:
        routed = DeltaSinks(sinks, by=by, others=a, checkpoint=str(query.root))
        query.run(routed, number, offset(number, {("orders", 0): (2 * number, 2 * number + 2)}))

    write(0, a=a)
    write(1, a=a, b=b)
    write(2, a=a)
    write(3, a=a, b=b)
    assert (offsets_of(tmp_path / "a"), offsets_of(tmp_path / "b")) == ([0, 1, 2, 4, 5, 6], [3, 7])


class OnDemand:
    """A query with a table for each remainder of the offset by 4 but 3, made by a function, and others for the rest."""

    BY = "IF(offset % 4 = 3, NULL, CONCAT('r', offset % 4))"

    def __init__(self, query: Query, lake: Path) -> None:
        self.query, self.lake = query, lake
        self.number = 0

    def sinks(self, rest: str = "", broken: str = "", **arguments: Any) -> DeltaSinks:
        def full(df: "DataFrame") -> "DataFrame":
            raise OSError("No space left on device")

        def sink_of(key: str) -> DeltaSink:
            return self.query.sink(self.lake / key, transform=full if key == broken else None)

        return DeltaSinks(
            lambda key: None if key == rest else sink_of(key),
            **{"by": self.BY, "others": sink_of("others"), "checkpoint": str(self.query.root), **arguments},
        )

    def write(self, sinks: DeltaSinks, start: int, end: int) -> None:
        self.query.run(sinks, self.number, offset(self.number, {("orders", 0): (start, end)}))
        self.number += 1

    def found(self) -> dict[str, list[int]]:
        return {table.name: offsets_of(table) for table in sorted(self.lake.iterdir())}


@pytest.fixture
def on_demand(query: Query, tmp_path: Path) -> OnDemand:
    return OnDemand(query, tmp_path / "lake")


def test_G4_a_function_names_the_tables_and_one_without_rows_gets_no_commit(on_demand: OnDemand) -> None:
    sinks = on_demand.sinks(rest="r2")
    on_demand.write(sinks, 0, 1)
    assert on_demand.found() == {"others": [], "r0": [0]}
    on_demand.write(sinks, 1, 4)
    on_demand.write(sinks, 4, 9)
    assert on_demand.found() == {"others": [2, 3, 6, 7], "r0": [0, 4, 8], "r1": [1, 5]}
    ends = {table: next_offsets(on_demand.lake / table)["orders", 0] for table in ("others", "r0", "r1")}
    assert ends == {"others": 9, "r0": 9, "r1": 9}
    on_demand.write(on_demand.sinks(rest="r2"), 9, 11)  # another run
    assert [len(commits(on_demand.lake / table)) for table in ("others", "r0", "r1")] == [5, 3, 4]


def test_G4_a_batch_that_a_table_named_by_a_function_lacks_is_not_in_others(on_demand: OnDemand) -> None:
    on_demand.write(on_demand.sinks(), 0, 4)
    with pytest.raises(OSError, match="No space left"):
        on_demand.write(on_demand.sinks(broken="r1"), 4, 8)
    assert on_demand.found() == {"others": [3], "r0": [0, 4], "r1": [1], "r2": [2, 6]}
    on_demand.write(on_demand.sinks(), 4, 8)
    assert on_demand.found() == {"others": [3, 7], "r0": [0, 4], "r1": [1, 5], "r2": [2, 6]}


def test_G5_gap_before_the_rows_of_a_table_is_no_loss_if_others_has_what_is_in_it(on_demand: OnDemand) -> None:
    """The group's offsets were lost, and startingOffsets decided where the query goes on: at the end of others."""
    on_demand.write(on_demand.sinks(), 0, 5)
    on_demand.write(on_demand.sinks(), 5, 8)  # nothing of r0
    ranges = {("orders", 0): (8, 12)}
    started = replace(offset(0, ranges, stream="s2"), started=frozenset({TopicPartition("orders", 0)}))
    on_demand.query.run(on_demand.sinks(), 2, started)
    assert on_demand.found()["r0"] == [0, 4, 8]
    behind = replace(offset(1, {("orders", 0): (13, 17)}, stream="s2"), started=started.started)
    with pytest.raises(LedgerConflict, match="starts at 13, the table holds up to 12"):
        on_demand.query.run(on_demand.sinks(), 3, behind)


def test_G4_rows_whose_key_is_not_valid_text_are_in_one_of_the_tables(on_demand: OnDemand) -> None:
    """The driver gets another key for them than executors have, unless Spark replaces its bytes."""
    on_demand.write(on_demand.sinks(by="IF(offset = 1, CAST(X'636166E9' AS STRING), NULL)"), 0, 4)
    assert on_demand.found() == {"caf\ufffd": [1], "others": [0, 2, 3]}


def test_keys_without_a_bound_and_too_many_tables_are_refused_before_anything_is_written(on_demand: OnDemand) -> None:
    with pytest.raises(OptionError, match=f"more than {topic_sinks.KEYS_MAX} values in a batch, such as '10"):
        on_demand.write(on_demand.sinks(by="CAST(offset AS STRING)"), 1000, 2001)
    with pytest.raises(OptionError, match=r"key r2 would be written to table .*, and tables_max=3 tables are in use"):
        on_demand.write(on_demand.sinks(tables_max=3), 0, 4)
    assert not on_demand.lake.exists() and not keeps_rows(on_demand.query.spark)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"by": "topic"}, "a function of the key needs others="),
        ({"others": DeltaSink("/x/t")}, "others needs a dict of sinks, or by"),
    ],
)
def test_a_function_of_the_key_needs_others_and_one_of_the_topic_has_none(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OptionError, match=reason):
        DeltaSinks(lambda topic: DeltaSink(f"/x/{topic}"), **arguments)


def test_topics_that_a_dict_does_not_name_go_to_others(query: Query, tmp_path: Path) -> None:
    rest = query.sink(tmp_path / "rest")
    sinks = DeltaSinks({"orders": query.sink(tmp_path / "orders")}, others=rest, checkpoint=str(query.root))
    query.run(sinks, 0, offset(0, {(topic, 0): (0, 2) for topic in TOPICS}))
    assert rows(tmp_path / "orders") == records(0, 2)
    assert {row[0] for row in rows(tmp_path / "rest")} == {"clicks", "payments"}
