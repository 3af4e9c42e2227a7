"""``DeltaSink(merge=Merge(...))`` on a real Spark with Delta: after each batch the table equals a reference that is
computed from all changes so far. Deliberately absent: Kafka, kills (``tests/crash/test_kill.py``)."""

import contextlib
import json
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from delta_files import living_files
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F
from pyspark.sql.classic.dataframe import DataFrame as ClassicFrame
from sink_helpers import BeforeNextCommit, NewQuery, Query, actions, commits, next_offsets, notes, rows
from sink_source import offset

from spark_group_source import DeadLetters, DeltaSink, DeltaSinks, Merge, OptionError
from spark_group_source.delta.ledger_store import read_ledger
from spark_group_source.delta.merge import MergeWriter
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]

DDL = "id long, op string, name string, lsn long"
PLAIN = Merge(["id"], delete_when="op = 'd'", without=["op", "topic", "partition", "offset"])


class Change(NamedTuple):
    id: int | None
    op: str
    name: str
    lsn: int | None


Transform = Callable[["DataFrame"], "DataFrame"]


def changes_of(changes: Sequence[Change], *, extra: str = "") -> Transform:
    """A transform that returns the change with the number of each record's offset."""

    def transform(df: "DataFrame") -> "DataFrame":
        texts = F.array(*(F.lit(json.dumps(change._asdict())) for change in changes))
        change = F.from_json(F.get(texts, F.col("offset").cast("int")), DDL + extra)
        return df.select("topic", "partition", "offset", change.alias("c")).select(
            "topic", "partition", "offset", "c.*"
        )

    return transform


def batch(number: int, start: int, end: int, *, topic: str = "orders") -> Any:
    return offset(number, {(topic, 0): (start, end)})


def by_offset(changes: Sequence[Change]) -> list[tuple[Any, ...]]:
    """The rows of a table after all of these changes, in their order."""
    last = {change.id: change for change in changes}
    return sorted((c.id, c.name, c.lsn) for c in last.values() if c.op != "d")


def by_lsn(changes: Sequence[Change]) -> list[tuple[Any, ...]]:
    """The same by their sequence, in whatever order they came."""
    return by_offset(sorted(changes, key=lambda change: change.lsn or 0))


A, B, C = 1, 2, 3
HISTORY = [
    Change(A, "i", "a1", 1),
    Change(B, "i", "b1", 2),
    Change(A, "u", "a2", 3),
    Change(C, "i", "c1", 4),
    Change(B, "d", "", 5),
    Change(C, "u", "c2", 6),
    Change(B, "i", "b2", 7),
    Change(C, "d", "", 8),
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "customers"


def test_G4_the_latest_change_of_each_key_is_its_row_and_rows_and_ledger_are_one_commit(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_columns = ClassicFrame.withColumns

    def as_on_connect(rows: ClassicFrame, columns: dict[str, Any]) -> Any:
        assert columns, "Spark Connect refuses a call without columns"
        return with_columns(rows, columns)

    monkeypatch.setattr(ClassicFrame, "withColumns", as_on_connect)
    sink = query.sink(table, transform=changes_of(HISTORY), merge=PLAIN)
    for number, (start, end) in enumerate([(0, 3), (3, 6), (6, 8)]):
        query.run(sink, number, batch(number, start, end))
        assert rows(table) == by_offset(HISTORY[:end])
        assert next_offsets(table) == {("orders", 0): end}
    merges = [commit for commit in commits(table) if notes(commit)]
    assert [info["operation"] for commit in merges for info in actions(commit, "commitInfo")] == ["MERGE"] * 3
    assert [txn["version"] for commit in merges for txn in actions(commit, "txn")] == [1, 2, 3]


def test_G4_changes_that_the_table_has_are_left_out_after_a_lost_checkpoint(new_query: NewQuery, table: Path) -> None:
    """The later change of a key is not undone by an earlier one that is read again."""
    first, again = new_query("first"), new_query("again")
    sink = first.sink(table, transform=changes_of(HISTORY), merge=PLAIN)
    first.run(sink, 0, batch(0, 0, 6))
    sink = again.sink(table, transform=changes_of(HISTORY), merge=PLAIN)
    again.run(sink, 0, offset(0, {("orders", 0): (1, 5)}, stream="again"))
    assert rows(table) == by_offset(HISTORY[:6])
    again.run(sink, 1, offset(1, {("orders", 0): (5, 8)}, stream="again"))
    assert rows(table) == by_offset(HISTORY)


FEATURES = {
    "plain": "USING delta",
    "deletion vectors": "USING delta TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')",
    "change data feed": "USING delta TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')",
    "clustering": "USING delta CLUSTER BY (id)",
    "partitions": "USING delta PARTITIONED BY (id)",
    "column mapping": "USING delta TBLPROPERTIES ('delta.columnMapping.mode' = 'name')",
    "generated": "USING delta",
}


@pytest.mark.parametrize(
    "feature", [name if name == "plain" else pytest.param(name, marks=pytest.mark.full) for name in FEATURES]
)
def test_G4_late_changes_lose_also_against_a_deletion_in_whatever_order_they_come(
    query: Query, spark: "SparkSession", table: Path, tmp_path: Path, feature: str
) -> None:
    rng = random.Random(7)
    changes = [Change(rng.randrange(5), rng.choice("iud"), f"n{lsn}", lsn) for lsn in range(24)]
    rng.shuffle(changes)
    more = ", twice long GENERATED ALWAYS AS (id * 2)" if feature == "generated" else ""
    try:
        spark.sql(f"CREATE TABLE delta.`{table}` (id long, name string, lsn long{more}) {FEATURES[feature]}")
    except AnalysisException as exc:
        if not more or exc.getCondition() != "UNSUPPORTED_FEATURE.TABLE_OPERATION":
            raise
        pytest.skip("Delta Lake 4.0 creates generated columns by its own API only")
    by = Merge(
        ["id"], delete_when="op = 'd'", sequence_by="lsn", deleted=str(tmp_path / "deleted"), without=PLAIN.without
    )
    sink = query.sink(table, transform=changes_of(changes), merge=by)
    for number, start in enumerate(range(0, 24, 8)):
        query.run(sink, number, batch(number, start, start + 8))
        found = spark.read.format("delta").load(str(table)).orderBy("id").collect()
        assert [tuple(row)[:3] for row in found] == by_lsn(changes[: start + 8])
        assert feature != "generated" or all(row["twice"] == 2 * row["id"] for row in found)


def test_G4_a_batch_that_ended_between_the_deleted_keys_and_the_rows_runs_again(
    query: Query, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [Change(A, "i", "a", 5), Change(A, "d", "", 9), Change(A, "u", "late", 7)]
    by = Merge(
        ["id"], delete_when="op = 'd'", sequence_by="lsn", deleted=str(tmp_path / "deleted"), without=PLAIN.without
    )
    sink = query.sink(table, transform=changes_of(changes), merge=by)
    query.run(sink, 0, batch(0, 0, 1))
    run, ended = MergeWriter._run, RuntimeError("killed")

    def until_the_rows(self: MergeWriter, source: Any, name: str, *more: Any) -> None:
        if "customers" in name:
            raise ended
        run(self, source, name, *more)

    with monkeypatch.context() as patch:
        patch.setattr(MergeWriter, "_run", until_the_rows)
        with pytest.raises(RuntimeError, match="killed"):
            query.run(sink, 1, batch(1, 1, 2))
    assert (rows(table), len(rows(tmp_path / "deleted"))) == ([(A, "a", 5)], 1)
    for number, start in ((1, 1), (2, 2)):
        query.run(sink, number, batch(number, start, start + 1))
        assert rows(table) == []


def test_G4_of_two_writers_of_one_batch_one_commits(
    query: Query, table: Path, before_next_commit: BeforeNextCommit
) -> None:
    one, two = (query.sink(table, transform=changes_of(HISTORY), merge=PLAIN) for _ in range(2))
    query.run(one, 0, batch(0, 0, 2))
    before_next_commit(lambda: query.run(two, 1, batch(1, 2, 8)))
    query.run(one, 1, batch(1, 2, 8))
    assert rows(table) == by_offset(HISTORY)
    assert [txn["version"] for commit in commits(table) for txn in actions(commit, "txn")] == [1, 2]


@pytest.mark.full
def test_deleted_keys_are_forgotten_after_their_retention(query: Query, table: Path, tmp_path: Path) -> None:
    changes = [Change(A, "d", "", 9), Change(B, "d", "", 9), Change(A, "i", "late", 7)]
    by = Merge(
        ["id"], delete_when="op = 'd'", sequence_by="lsn", deleted=str(tmp_path / "deleted"), retention_days=0,
        without=PLAIN.without,
    )  # fmt: skip
    sink = query.sink(table, transform=changes_of(changes), merge=by)
    for number in range(3):
        query.run(sink, number, batch(number, number, number + 1))
    assert rows(table) == [(A, "late", 7)]


def test_deletion_has_an_instant_also_where_the_session_prefers_timestamps_without_time_zone(
    query: Query, spark: "SparkSession", table: Path, tmp_path: Path
) -> None:
    """Else its retention depends on the time zones of the sessions."""
    deleted = tmp_path / "deleted"
    by = Merge(["id"], delete_when="op = 'd'", sequence_by="at", deleted=str(deleted), without=PLAIN.without)

    def transform(df: "DataFrame") -> "DataFrame":
        change = changes_of([Change(A, "d", "", 9), Change(B, "i", "new", 9)])(df)
        return change.withColumn("at", F.expr("timestamp_millis(lsn)"))

    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        query.run(query.sink(table, transform=transform, merge=by), 0, batch(0, 0, 2))
    finally:
        spark.conf.unset("spark.sql.timestampType")
    types = dict(spark.read.format("delta").load(str(deleted)).dtypes)
    assert (types["at"], types["deleted_at"]) == ("timestamp", "timestamp")
    assert spark.read.format("delta").load(str(table)).schema["at"].dataType.simpleString() == "timestamp"


def test_deleted_keys_may_have_names_that_need_column_mapping(
    query: Query, spark: "SparkSession", table: Path, tmp_path: Path
) -> None:
    mapping = "TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    spark.sql(f"CREATE TABLE delta.`{table}` (`the id` int, name string, lsn long) USING delta {mapping}")
    deleted = str(tmp_path / "deleted")
    by = Merge(["the id"], delete_when="op = 'd'", sequence_by="lsn", deleted=deleted, without=PLAIN.without)
    changes = changes_of([Change(A, "i", "a", 1), Change(A, "d", "", 9), Change(A, "i", "late", 7)])
    sink = query.sink(table, transform=lambda df: changes(df).withColumnRenamed("id", "the id"), merge=by)
    for number in range(3):
        query.run(sink, number, batch(number, number, number + 1))
    assert spark.read.format("delta").load(str(table)).count() == 0
    assert spark.read.format("delta").load(deleted).select("the id").collect() == [(A,)]


def test_G4_tables_of_one_batch_are_merged_side_by_side(query: Query, tmp_path: Path) -> None:
    """Each statement has the settings of its own commit, and they are gone afterwards."""
    topics = ("customers", "orders")
    sinks = DeltaSinks(
        lambda topic: query.sink(tmp_path / topic, transform=changes_of(HISTORY), merge=PLAIN),
        checkpoint=str(query.root),
    )
    for number, (start, end) in enumerate([(0, 4), (4, 8)]):
        query.run(sinks, number, offset(number, {(topic, 0): (start, end) for topic in topics}))
    for topic in topics:
        assert rows(tmp_path / topic) == by_offset(HISTORY)
        assert next_offsets(tmp_path / topic) == {(topic, 0): 8}
        numbers = [txn["version"] for commit in commits(tmp_path / topic) for txn in actions(commit, "txn")]
        assert numbers == [1, 2], "no other statement took the settings"
    assert query.spark.conf.get("spark.databricks.delta.write.txnAppId", None) is None


@pytest.mark.full
def test_new_columns_need_merge_schema(query: Query, new_query: NewQuery, table: Path) -> None:
    sink = query.sink(table, transform=changes_of(HISTORY), merge=PLAIN)
    query.run(sink, 0, batch(0, 0, 2))
    wide = {"transform": changes_of(HISTORY, extra=", note string"), "merge": PLAIN}
    with pytest.raises(OptionError, match="lacks the columns note of the batch, and merge_schema is False"):
        query.run(query.sink(table, **wide), 1, batch(1, 2, 4))
    query.run(query.sink(table, merge_schema=True, **wide), 1, batch(1, 2, 4))
    assert rows(table) == [(*row, None) for row in by_offset(HISTORY[:4])]


@pytest.mark.full
def test_new_columns_may_be_structs_with_any_names(query: Query, table: Path) -> None:
    query.run(query.sink(table, transform=changes_of(HISTORY), merge=PLAIN), 0, batch(0, 0, 2))

    def wide(df: "DataFrame") -> "DataFrame":
        return changes_of(HISTORY)(df).selectExpr("*", "named_struct('first-name', name) AS person")

    query.run(query.sink(table, transform=wide, merge=PLAIN, merge_schema=True), 1, batch(1, 2, 4))
    assert {row[:-1] for row in rows(table)} == set(by_offset(HISTORY[:4]))


def test_a_key_that_is_text_in_the_batch_finds_a_number_in_the_table(query: Query, table: Path) -> None:
    """As text, 9 is above 10 and 250."""
    changes = [Change(n, "i", "x", n) for n in (9, 10, 250)]
    query.run(query.sink(table, transform=changes_of(changes), merge=PLAIN), 0, batch(0, 0, 3))

    def as_text(df: "DataFrame") -> "DataFrame":
        again = [change._replace(name="y") for change in changes]
        return changes_of([*changes, *again])(df).withColumn("id", F.col("id").cast("string"))

    query.run(query.sink(table, transform=as_text, merge=PLAIN), 1, batch(1, 3, 6))
    assert [row[:2] for row in rows(table)] == [(n, "y") for n in (9, 10, 250)]


def test_a_table_with_auto_compaction_keeps_its_ledger(query: Query, spark: "SparkSession", table: Path) -> None:
    """Delta compacts the files in a commit of its own, with the settings of the merge before it."""
    changes = [Change(n, "i", f"n{n}", n) for n in range(6)]
    auto = "TBLPROPERTIES ('delta.autoOptimize.autoCompact' = 'true')"
    spark.sql(f"CREATE TABLE delta.`{table}` (id long, name string, lsn long) USING delta {auto}")
    fewest = "spark.databricks.delta.autoCompact.minNumFiles"
    spark.conf.set(fewest, "2")
    try:
        for number in range(3):
            sink = query.sink(table, transform=changes_of(changes), merge=PLAIN)
            query.run(sink, number, batch(number, 2 * number, 2 * number + 2))
    finally:
        spark.conf.unset(fewest)
    noted = {info["operation"] for commit in commits(table) if notes(commit) for info in actions(commit, "commitInfo")}
    assert noted == {"MERGE", "OPTIMIZE"}, "otherwise this proves nothing"
    assert rows(table) == by_offset(changes)
    ledger = read_ledger(spark, str(table), "etl")
    assert ledger is not None and ledger.offsets == {TopicPartition("orders", 0): 6}


def test_keys_that_are_one_number_in_the_table_are_one_key_and_their_sequence_is_that_of_its_numbers(
    query: Query, spark: "SparkSession", table: Path
) -> None:
    changes = [Change(A, "i", f"a{n}", n) for n in (9, 10, 11, 8)]
    spark.sql(f"CREATE TABLE delta.`{table}` (id int, name string, lsn long) USING delta")

    def as_text(df: "DataFrame") -> "DataFrame":
        texts = {"id": F.expr("IF(offset % 2 = 0, '1', '01')"), "lsn": F.col("lsn").cast("string")}
        return changes_of(changes)(df).withColumns(texts)

    sink = query.sink(table, transform=as_text, merge=Merge(["id"], sequence_by="lsn", without=PLAIN.without))
    for number, (start, end) in enumerate([(0, 2), (2, 4)]):
        query.run(sink, number, batch(number, start, end))
        assert rows(table) == by_lsn(changes[:end])


def test_a_key_that_the_tables_type_would_change_is_refused_or_a_bad_record(
    query: Query, spark: "SparkSession", table: Path, tmp_path: Path
) -> None:
    """Two such keys may be one in the table. ``merge_schema`` widens no type of a merged table."""
    spark.sql(f"CREATE TABLE delta.`{table}` (topic string, partition int, offset long, id date) USING delta")

    def parse(df: "DataFrame") -> "DataFrame":
        moment = "IF(offset < 2, TIMESTAMP'2026-11-30 10:00:00', TIMESTAMP'2026-11-30 00:00:00')"
        return df.selectExpr("topic", "partition", "offset", f"{moment} AS id")

    merges: dict[str, Any] = {"transform": parse, "merge": Merge(["id"])}
    for widens in (False, True):
        with pytest.raises(
            OptionError, match=r"2 changes .* have no id, which is a key and has type date in the table"
        ):
            query.run(query.sink(table, merge_schema=widens, **merges), 0, batch(0, 0, 3))
    letters = DeadLetters(tmp_path / "bad", max_fraction=1)
    query.run(query.sink(table, merge_schema=True, dead_letters=letters, **merges), 0, batch(0, 0, 3))
    assert [row[2] for row in rows(table)] == [2]
    assert [row[2] for row in rows(tmp_path / "bad")] == [0, 1]


def test_a_value_that_the_tables_type_would_change_is_refused(query: Query, spark: "SparkSession", table: Path) -> None:
    """Delta's MERGE writes the changed value, and refuses to append one. That of a deletion is not written."""
    cases = [
        ("int", "1.9D", 4),
        ("struct<a: array<map<string, int>>>", "named_struct('A', array(map('b', offset / 2)))", 2),
        ("date", "TIMESTAMP'2026-11-30 00:00:00' + make_dt_interval(0, CAST(offset AS INT))", 3),
        ("timestamp", "1764460800000L", 4),
        ("boolean", "offset", 2),
        ("struct<a: int, b: string>", "named_struct('b', 'x', 'a', offset)", 0),
    ]
    columns = ", ".join(f"size{n} {kind}" for n, (kind, _, _) in enumerate(cases))
    spark.sql(f"CREATE TABLE delta.`{table}` (id int, {columns}) USING delta")

    def sink(*given: int) -> DeltaSink:
        """Its rows have these of the values."""
        sizes = [
            f"{value if n in given else f'CAST(NULL AS {kind})'} AS size{n}" for n, (kind, value, _) in enumerate(cases)
        ]

        def parse(df: "DataFrame") -> "DataFrame":
            return df.selectExpr("offset", "IF(offset < 4, offset, 0L) AS id", *sizes, "offset = 4 AS gone")

        return query.sink(table, transform=parse, merge=Merge(["id"], delete_when="gone", without=["offset", "gone"]))

    for n, (_, _, wrong) in enumerate(cases):
        is_refused = pytest.raises(OptionError, match=rf"{wrong} changes .* a size{n} ")
        with is_refused if wrong else contextlib.nullcontext():
            query.run(sink(n), 0, batch(0, 0, 4))
    query.run(sink(*range(len(cases))), 1, batch(1, 4, 5))
    assert sorted(row[0] for row in rows(table)) == [1, 2, 3]


def test_a_key_may_have_any_value(query: Query, spark: "SparkSession", table: Path) -> None:
    """Also dates and text that Python does not have, and text that Spark replaces in a statement: each record has one
    of these and else plain values."""
    kinds = [
        ("DATE'+10000-01-01'", "DATE'2026-11-30'"),
        ("TIMESTAMP'9999-12-31 23:59:59Z' + INTERVAL 1 DAY", "TIMESTAMP'2026-11-30 00:00:00Z'"),
        ("concat('${env:', 'HOME}')", "'plain'"),
        ("CAST(X'636166E9' AS STRING)", "'plain'"),
    ]

    def parse(df: "DataFrame") -> "DataFrame":
        values = [f"IF(offset % 4 = {n}, {odd}, {plain}) AS key{n}" for n, (odd, plain) in enumerate(kinds)]
        return df.selectExpr("offset", *values, "value")

    sink = query.sink(table, transform=parse, merge=Merge([f"key{n}" for n in range(4)], without=["offset"]))
    for number in range(2):
        query.run(sink, number, batch(number, 4 * number, 4 * number + 4))
    found = spark.read.format("delta").load(str(table))
    assert sorted(row[0] for row in found.select("value").collect()) == [f"orders-0@{n}" for n in range(4, 8)]
    parameters = [
        info.get("operationParameters") for commit in commits(table) for info in actions(commit, "commitInfo")
    ]
    assert os.environ["HOME"] not in json.dumps(parameters)


@pytest.mark.parametrize("merge", [Merge(["name"]), Merge(["offset"], sequence_by="name")], ids=["key", "sequence"])
def test_columns_of_type_char_order_and_identify_no_changes(
    query: Query, spark: "SparkSession", table: Path, merge: Merge
) -> None:
    spark.sql(f"CREATE TABLE delta.`{table}` (offset long, name char(5)) USING delta")
    sink = query.sink(table, transform=lambda df: df.selectExpr("offset", "'a' AS name"), merge=merge)
    with pytest.raises(OptionError, match=r"column name of table .* is char\(5\), whose padded values"):
        query.run(sink, 0, batch(0, 0, 2))


def test_tables_share_a_table_of_deleted_keys(query: Query, tmp_path: Path) -> None:
    """Of two tables with one key, a deletion in one does not hold up changes of the other."""
    changes = [Change(A, "i", "a", 1), Change(A, "d", "", 100), Change(A, "u", "b", 50)]
    by = Merge(
        ["id"], delete_when="op = 'd'", sequence_by="lsn", deleted=str(tmp_path / "deleted"), without=PLAIN.without
    )
    sinks = DeltaSinks(
        lambda topic: query.sink(tmp_path / topic, transform=changes_of(changes), merge=by), checkpoint=str(query.root)
    )
    query.run(sinks, 0, offset(0, {("gone", 0): (0, 2)}))
    query.run(sinks, 1, offset(1, {("kept", 0): (2, 3), ("gone", 0): (2, 3)}))
    assert (rows(tmp_path / "gone"), rows(tmp_path / "kept")) == ([], [(A, "b", 50)])


def test_a_null_key_is_refused_or_a_bad_record(query: Query, table: Path, tmp_path: Path) -> None:
    changes = [Change(None, "i", "x", 1), Change(None, "i", "y", 1), *HISTORY]
    sink = query.sink(table, transform=changes_of(changes), merge=PLAIN)
    with pytest.raises(OptionError, match=r"2 changes for table .* have no id, which is a key"):
        query.run(sink, 0, batch(0, 0, 10))
    letters = DeadLetters(tmp_path / "bad", valid="id IS NOT NULL", max_fraction=1)
    sink = query.sink(table, transform=changes_of(changes), merge=PLAIN, dead_letters=letters)
    query.run(sink, 0, batch(0, 0, 10))
    assert rows(table) == by_offset(HISTORY)
    assert [row[2] for row in rows(tmp_path / "bad")] == [0, 1]
    with pytest.raises(OptionError, match="a replay would write old changes over newer ones"):
        sink.replay(query.spark)


def test_a_key_and_a_sequence_may_have_a_dot_which_the_printed_rule_for_a_null_key_quotes(
    query: Query, table: Path, tmp_path: Path
) -> None:
    changes = [Change(None, "i", "x", 1), Change(A, "i", "a", 2), Change(A, "i", "late", 1)]

    def dotted(df: "DataFrame") -> "DataFrame":
        return changes_of(changes)(df).withColumnsRenamed({"id": "a.b", "lsn": "source.lsn"})

    merge = Merge(["a.b"], sequence_by="source.lsn", without=PLAIN.without)
    with pytest.raises(OptionError, match=r"1 changes for table .* have no a\.b, which is a key") as refused:
        query.run(query.sink(table, transform=dotted, merge=merge), 0, batch(0, 0, 3))
    (rule,) = re.findall("valid='(.*)'", str(refused.value))
    letters = DeadLetters(tmp_path / "bad", valid=rule, max_fraction=1)
    query.run(query.sink(table, transform=dotted, merge=merge, dead_letters=letters), 0, batch(0, 0, 3))
    assert rows(table) == by_lsn(changes[1:])


def test_a_null_sequence_is_refused_or_a_bad_record(query: Query, table: Path, tmp_path: Path) -> None:
    """Also beside another change of its key: it is not known which of the two is the later one."""
    changes = [Change(A, "i", "a1", 1), Change(A, "u", "a2", None), Change(B, "i", "b1", 2)]
    merge = Merge(["id"], sequence_by="lsn", without=["op", "topic", "partition", "offset"])
    sink = query.sink(table, transform=changes_of(changes), merge=merge)
    with pytest.raises(OptionError, match=r"1 changes for table .* have no lsn, which orders changes"):
        query.run(sink, 0, batch(0, 0, 3))
    letters = DeadLetters(tmp_path / "bad", valid="lsn IS NOT NULL", max_fraction=1)
    sink = query.sink(table, transform=changes_of(changes), merge=merge, dead_letters=letters)
    query.run(sink, 0, batch(0, 0, 3))
    assert rows(table) == by_offset([changes[0], changes[2]])
    assert [row[2] for row in rows(tmp_path / "bad")] == [1]


def test_a_replayed_change_loses_against_a_row_and_a_deletion_of_the_same_sequence(
    query: Query, spark: "SparkSession", table: Path, tmp_path: Path
) -> None:
    """They came after it. A replayed deletion removes an older row."""
    changes = [Change(A, "u", "bad", 10), Change(A, "u", "a2", 10), Change(B, "u", "bad", 10), Change(B, "d", "", 10)]
    changes += [Change(C, "i", "c1", 9), Change(C, "d", "bad", 10)]
    merge = replace(PLAIN, sequence_by="lsn", deleted=str(tmp_path / "deleted"))

    def sink(rule: str) -> DeltaSink:
        letters = DeadLetters(tmp_path / "bad", valid=rule, max_fraction=1)
        return query.sink(table, transform=changes_of(changes), merge=merge, dead_letters=letters)

    query.run(sink("offset NOT IN (0, 2, 5)"), 0, batch(0, 0, 6))
    assert rows(table) == [(A, "a2", 10), (C, "c1", 9)]
    assert sink("true").replay(spark) == 3
    assert rows(table) == [(A, "a2", 10)]


def test_a_deletion_is_asked_only_what_its_key_answers(query: Query, table: Path, tmp_path: Path) -> None:
    """It may have no other values, or some of other types; the table does not get them."""
    query.spark.sql(f"CREATE TABLE delta.`{table}` (id int, name string, size int, lsn long) USING delta")
    far = 2**40  # no INT
    changes = [Change(A, "i", "1", 1), Change(B, "i", "2", 2), Change(A, "d", "", 3), Change(None, "d", "", 4)]
    changes += [Change(far, "d", "", 5)]

    def sized(df: "DataFrame") -> "DataFrame":
        return changes_of(changes)(df).withColumn("size", F.expr("IF(name = '', 'none', name)"))

    rules = {"named": "length(name) > 0", "both": "id IS NOT NULL AND name IS NOT NULL", "few": "id IS NULL OR id < 9"}
    letters = DeadLetters(tmp_path / "bad", valid=rules, max_fraction=1)
    query.run(query.sink(table, transform=sized, merge=PLAIN, dead_letters=letters), 0, batch(0, 0, 5))
    assert rows(table) == [(B, "2", 2, 2)]
    assert [row[2] for row in rows(tmp_path / "bad")] == [3, 4]


def test_a_value_that_the_column_cannot_have_is_bad_and_makes_no_deletion(
    query: Query, table: Path, tmp_path: Path
) -> None:
    """It is null in the column's type."""
    query.spark.sql(f"CREATE TABLE delta.`{table}` (id int, name int, lsn long) USING delta")
    changes = [Change(A, "i", "1", 1), Change(B, "i", "2", 2), Change(A, "u", "none", 3)]
    merge = replace(PLAIN, delete_when="name IS NULL")
    letters = DeadLetters(tmp_path / "bad", max_fraction=1)
    query.run(query.sink(table, transform=changes_of(changes), merge=merge, dead_letters=letters), 0, batch(0, 0, 3))
    assert rows(table) == [(A, 1, 1), (B, 2, 2)]
    assert [row[2] for row in rows(tmp_path / "bad")] == [2]


def test_a_key_may_have_a_dot(query: Query, table: Path, tmp_path: Path) -> None:
    def dotted(df: "DataFrame") -> "DataFrame":
        return changes_of(HISTORY)(df).withColumnRenamed("id", "a.b")

    merge = Merge(["a.b"], delete_when="op = 'd'", without=["op", "topic", "partition", "offset"])
    letters = DeadLetters(tmp_path / "bad", valid="`a.b` > 0")
    query.run(query.sink(table, transform=dotted, merge=merge, dead_letters=letters), 0, batch(0, 0, 8))
    assert rows(table) == by_offset(HISTORY)
    wrong = query.sink(table, transform=dotted, merge=replace(merge, keys=["id"]), dead_letters=letters)
    with pytest.raises(OptionError, match="the merge needs the column id"):
        query.run(wrong, 1, batch(1, 0, 8))


@pytest.mark.full
def test_only_files_that_may_have_the_keys_are_read(query: Query, spark: "SparkSession", table: Path) -> None:
    """Delta skips them by the statistics of the key, which the statement's condition bounds: a lost file that has none
    of the keys does not disturb a merge."""
    changes = [Change(n, "i", "x", n) for n in range(20)] + [Change(19, "u", "y", 20)]
    sink = query.sink(table, transform=changes_of(changes), merge=PLAIN)
    query.run(sink, 0, batch(0, 0, 10))
    (lost,) = table.glob("*.parquet")
    query.run(sink, 1, batch(1, 10, 20))
    lost.unlink()
    query.run(sink, 2, batch(2, 20, 21))
    (found,) = (
        spark.read.parquet(*(str(path) for path in living_files(table) if path != lost)).where("id = 19").collect()
    )
    assert found["name"] == "y"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"keys": "id"}, "keys is 'id'; it must be a list"),
        ({"keys": []}, "it must be a list of one or more columns"),
        ({"keys": ["id"], "without": ["id"]}, "without names id, which the table needs"),
        ({"keys": ["id"], "delete_when": "x", "sequence_by": "lsn"}, "needs deleted="),
        ({"keys": ["id"], "deleted": "/x/y"}, "deleted is used with both"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        Merge(**arguments)


def test_a_merge_needs_delta_lake_and_its_columns(query: Query, table: Path) -> None:
    with pytest.raises(OptionError, match="leave out writer='native'"):
        DeltaSink(table, writer="native", merge=PLAIN)
    sink = query.sink(table, transform=lambda df: changes_of(HISTORY)(df).drop("offset"), merge=Merge(["id"]))
    with pytest.raises(OptionError, match="the merge needs the column offset, and the sink's transform returns topic"):
        query.run(sink, 0, batch(0, 0, 2))
