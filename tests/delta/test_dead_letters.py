"""DeadLetters on a real Spark with Delta, with either writer: bad records go to their table, each once. Both tables are
read from their log files."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import functions as F
from sink_helpers import BeforeNextCommit, NewQuery, Query, actions, commits, next_offsets, one, records, rows
from sink_source import offset
from typer.testing import CliRunner

from spark_group_source import BadRecords, DeadLetters, DeltaSinks
from spark_group_source.cli import common
from spark_group_source.cli.app import app
from spark_group_source.delta import dead_letters, table_writer
from spark_group_source.delta.dead_letters import LetterBox
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.ledger_store import set_ledger
from spark_group_source.delta.sink import BatchCommit, DeltaSink
from spark_group_source.delta.table_history import CommitRace, LedgerExpired, TableHistory
from spark_group_source.delta.table_writer import TableWriter
from spark_group_source.delta.verification import verify
from spark_group_source.errors import OptionError
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]

EVEN = "offset % 2 = 0"
LOOSE = 1.0


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """The path of the dead-letter table."""
    return tmp_path / "bad"


NewSink = Callable[..., DeltaSink]


@pytest.fixture
def new_sink(query: Query, table: Path, bad: Path) -> NewSink:
    """``new_sink(valid, ...)``: a sink whose rows are good if this is true."""

    def build(
        valid: str | dict[str, str] = EVEN, *, of: Query = query, to: Path = table, fraction: float = LOOSE, **more: Any
    ) -> DeltaSink:
        letters = DeadLetters(bad, valid=valid, max_fraction=fraction, min_rows=more.pop("min_rows", 100))
        return of.sink(to, dead_letters=letters, **more)

    return build


def offsets(table: Path, topic: str = "") -> list[int]:
    return [row[2] for row in rows(table) if topic in ("", row[0])]


def errors(table: Path) -> list[tuple[int, str, str]]:
    """The offset, class and text of each bad record."""
    at = list(dead_letters.COLUMNS).index
    return sorted((row[2], row[at("error_class")], row[at("error")]) for row in rows(table))


@pytest.mark.parametrize("writer", ["auto", "options"])
def test_G4_bad_record_is_in_the_dead_letter_table_and_the_others_in_the_table(
    query: Query, new_sink: NewSink, table: Path, bad: Path
) -> None:
    sink = new_sink({"even": EVEN, "small": "offset < 4"})
    for n, (start, end) in enumerate([(0, 3), (3, 7)]):
        query.run(sink, n, offset(n, one(start, end)))
    assert offsets(table) == [0, 2]
    even, small = "even: offset % 2 = 0", "small: offset < 4"
    assert errors(bad) == [
        *((n, "RULE", even) for n in (1, 3)),
        *((n, "RULE", small if n % 2 == 0 else even) for n in range(4, 7)),
    ]
    assert next_offsets(table) == {("orders", 0): 7}
    numbers = [(txn["appId"], txn["version"]) for commit in commits(bad) for txn in actions(commit, "txn")]
    assert numbers == [(numbers[0][0], n) for n in (1, 2)]
    (first,) = [row for row in rows(bad) if row[2] == 1]
    found = dict(zip(dead_letters.COLUMNS, first, strict=True))
    assert (found["topic"], found["partition"], found["topic_id"]) == ("orders", 0, "id-1")
    assert (found["group_id"], found["query_id"], found["batch_id"]) == ("etl", query.id, 0)
    assert found["table"] == str(table)
    assert found["value"] == records(1, 2)[0][3].encode()


def test_G4_bad_record_that_the_second_read_lacks_has_a_letter_without_a_value(
    query: Query, new_sink: NewSink, table: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its topic was compacted meanwhile."""
    letters = LetterBox._letters
    monkeypatch.setattr(
        LetterBox, "_letters", lambda self, source, found: letters(self, source.where("offset <> 1"), found)
    )
    query.run(new_sink(), 0, offset(0, one(0, 4)))
    assert offsets(table) == [0, 2]
    at = list(dead_letters.COLUMNS).index("value")
    assert [(row[2], row[at]) for row in rows(bad)] == [(1, None), (3, records(3, 4)[0][3].encode())]


def test_batch_without_bad_records_does_not_commit_to_the_dead_letter_table(
    query: Query, new_sink: NewSink, table: Path, bad: Path
) -> None:
    query.run(new_sink("offset >= 0"), 0, offset(0, one(0, 4)))
    assert offsets(table) == [0, 1, 2, 3]
    assert len(commits(bad)) == 1, "its creation"


def test_G4_batch_that_runs_again_keeps_to_the_dead_letter_table_in_a_session_without_delta(
    query: Query, new_sink: NewSink, table: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between the two commits, and other rules afterwards."""
    monkeypatch.setattr(table_writer, "has_delta", lambda spark: False)
    query.run(new_sink(), 0, offset(0, one(0, 4)))
    with monkeypatch.context() as patch:
        patch.setattr(BatchCommit, "_log_decision", None)
        patch.setattr(BatchCommit, "_commit", crash_after(BatchCommit.rows_of))
        with pytest.raises(KeyboardInterrupt):
            query.run(new_sink(), 1, offset(1, one(4, 8)))
    assert (offsets(table), offsets(bad)) == ([0, 2], [1, 3, 5, 7])
    query.run(new_sink("offset <> 6 AND offset <> 7"), 1, offset(1, one(4, 8)))
    assert (offsets(table), offsets(bad)) == ([0, 2, 4], [1, 3, 5, 6, 7])
    assert next_offsets(table) == {("orders", 0): 8}


def crash_after(step: Callable[..., Any]) -> Callable[..., None]:
    """A commit that ends after this step."""

    def commit(self: BatchCommit, history: object, before: Any, decision: Any) -> None:
        step(self, decision, before)
        raise KeyboardInterrupt

    return commit


def test_G4_records_after_a_truncation_and_of_a_recreated_topic_are_not_those_before_it(
    query: Query, new_sink: NewSink, table: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other records have the offsets of bad ones, in the first batch after the truncation and in later ones, also after
    a reset. A batch that runs again keeps to the records that it found bad before, also if another query reads them."""
    query.run(new_sink(), 0, offset(0, one(0, 10) | one(0, 4, topic="clicks")))
    truncated = offset(1, one(5, 8) | one(0, 4, topic="clicks"), truncated_after={("orders", 0): 0})
    recreated = replace(truncated, topic_ids={"orders": "id-1", "clicks": "id-2"})
    with monkeypatch.context() as patch:
        patch.setattr(BatchCommit, "_commit", crash_after(BatchCommit.rows_of))
        with pytest.raises(KeyboardInterrupt):
            query.run(new_sink("topic = 'clicks' OR offset <> 6"), 1, recreated)
    query.run(new_sink("true"), 1, replace(recreated, leader_epochs={TopicPartition("orders", 0): 4}))
    assert (offsets(table, "orders"), offsets(bad, "orders")) == ([0, 2, 4, 5, 6, 7, 8], [1, 3, 5, 6, 7, 9])
    assert (offsets(table, "clicks"), offsets(bad, "clicks")) == ([0, 0, 1, 2, 2, 3], [1, 3])
    set_ledger(query.spark, str(table), "etl", {TopicPartition("orders", 0): 8}, reason="--to-ledger", reset_number=1)
    query.run(new_sink("true"), 2, offset(2, one(8, 12), reset_number=1))
    assert offsets(table, "orders") == [0, 2, 4, 5, 6, 7, 8, 8, 9, 10, 11]
    assert offsets(bad, "orders") == [1, 3, 5, 6, 7, 9]


def test_G4_first_batch_keeps_to_the_dead_letter_table_under_another_leader(
    query: Query, new_sink: NewSink, table: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint was deleted after a crash between the two commits."""
    first, again = (
        replace(offset(0, one(0, 4), stream=stream), leader_epochs={TopicPartition("orders", 0): epoch})
        for stream, epoch in (("s1", 2), ("s2", 3))
    )
    with monkeypatch.context() as patch:
        patch.setattr(BatchCommit, "_commit", crash_after(BatchCommit.rows_of))
        with pytest.raises(KeyboardInterrupt):
            query.run(new_sink(), 0, first)
    query.run(new_sink("true"), 0, again)
    assert (offsets(table), offsets(bad)) == ([0, 2], [1, 3])


def test_G4_of_two_writers_of_one_batch_one_commits_its_bad_records(
    query: Query, new_query: NewQuery, new_sink: NewSink, table: Path, bad: Path, before_next_commit: BeforeNextCommit
) -> None:
    other = new_query("other")
    query.run(new_sink(), 0, offset(0, one(0, 2)))
    before_next_commit(lambda: other.run(new_sink(of=other), 0, offset(0, one(2, 5), stream="s2")))
    query.run(new_sink(), 1, offset(1, one(2, 9)))
    assert (offsets(table), offsets(bad)) == ([0, 2, 4, 6, 8], [1, 3, 5, 7])


def test_G4_records_that_are_bad_for_one_group_are_written_for_another_one(
    query: Query, new_query: NewQuery, new_sink: NewSink, table: Path, bad: Path
) -> None:
    """Both write rows of their own to one table. Each keeps to its own bad records, and a replay writes both."""
    other = new_query("other")
    query.run(new_sink(transform=as_text), 0, offset(0, one(0, 4)))
    set_ledger(query.spark, str(table), "b", {TopicPartition("orders", 0): 0}, reason="--to-offsets", reset_number=1)
    of_b = new_sink("offset <> 3", of=other, transform=as_text)
    other.run(of_b, 0, offset(0, one(0, 4), group="b", stream="s2", reset_number=1))
    assert (offsets(table), offsets(bad)) == ([0, 0, 1, 2, 2], [1, 3, 3])
    assert new_sink("true", transform=as_text).replay(query.spark) == 3
    assert offsets(table) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_several_tables_share_a_dead_letter_table(query: Query, new_sink: NewSink, tmp_path: Path, bad: Path) -> None:
    tables = [tmp_path / "one", tmp_path / "two"]
    query.plan(0, batch := offset(0, one(0, 4)))
    for table in tables:
        new_sink(to=table)(query.rows(batch), 0)
    assert [offsets(table) for table in tables] == [[0, 2], [0, 2]]
    assert sorted((row[2], row[11]) for row in rows(bad)) == [(n, str(table)) for n in (1, 3) for table in tables]


def test_G4_tables_of_one_batch_write_their_bad_records_side_by_side(query: Query, tmp_path: Path, bad: Path) -> None:
    letters = DeadLetters(bad, valid=EVEN, max_fraction=LOOSE)
    topics = ("clicks", "orders")
    sinks = DeltaSinks(
        {topic: query.sink(tmp_path / topic, dead_letters=letters) for topic in topics}, checkpoint=str(query.root)
    )
    for n in range(2):
        query.run(sinks, n, offset(n, {(topic, 0): (4 * n, 4 * n + 4) for topic in topics}))
    assert [offsets(tmp_path / topic) for topic in topics] == [[0, 2, 4, 6]] * 2
    assert sorted(row[:3] for row in rows(bad)) == [(topic, 0, n) for topic in topics for n in (1, 3, 5, 7)]


def test_rows_against_a_constraint_or_a_type_of_the_table_are_bad(
    query: Query, new_sink: NewSink, tmp_path: Path, bad: Path
) -> None:
    """Also ones that are null. Columns are those of the table whatever their case. A constraint of a column that the
    rows lack is left to Delta."""
    spark, strict = query.spark, tmp_path / "strict"
    spark.sql(
        f"CREATE TABLE delta.`{strict}` (topic string, partition int, offset long, value string NOT NULL, "
        "size int, name string) USING delta"
    )
    spark.sql(f"ALTER TABLE delta.`{strict}` ADD CONSTRAINT few CHECK (size < 5)")
    spark.sql(f"ALTER TABLE delta.`{strict}` ADD CONSTRAINT named CHECK (name IS NULL OR name <> '')")

    def change(df: "DataFrame") -> "DataFrame":
        value = F.when(F.col("offset") != 1, F.col("value"))
        at = F.col("offset")
        size = F.when(at == 2, "many").when(at != 3, at.cast("string"))
        return df.select("topic", "partition", "offset", value.alias("VALUE"), size.alias("SIZE"))

    query.run(new_sink("true", to=strict, transform=change), 0, offset(0, one(0, 7)))
    assert offsets(strict) == [0, 4]
    assert errors(bad) == [
        (1, "NOT_NULL", "value: `VALUE` IS NOT NULL"),
        (2, "CAST", "size: `SIZE` IS NULL OR coalesce(try_cast(`SIZE` AS int) IS NOT NULL, false)"),
        (3, "CHECK", "few: size < 5"),
        (5, "CHECK", "few: size < 5"),
        (6, "CHECK", "few: size < 5"),
    ]


def test_a_number_that_the_column_would_change_is_bad(query: Query, new_sink: NewSink, tmp_path: Path) -> None:
    """Each of these columns has the values of four records, and is null in the others."""
    cases = {
        "int": ("n / 2", [0, 2]),
        "decimal(38, 0)": ("CAST(n / 2 AS DECIMAL(38, 18))", [0, 2]),
        "decimal(4, 2)": ("CAST(1.1 + n AS FLOAT)", [0, 1, 2, 3]),
        "float": ("n / 3", [0, 1, 2, 3]),
        "timestamp": ("1758000000000L", []),
    }
    typed, columns = tmp_path / "typed", ", ".join(f"c{at} {kind}" for at, kind in enumerate(cases))
    query.spark.sql(f"CREATE TABLE delta.`{typed}` (topic string, partition int, offset long, {columns}) USING delta")

    def change(df: "DataFrame") -> "DataFrame":
        at, n = F.floor(F.col("offset") / 4), F.col("offset") % 4
        values = [F.when(at == c, F.expr(value)).alias(f"c{c}") for c, (value, _) in enumerate(cases.values())]
        return df.withColumn("n", n).select("topic", "partition", "offset", *values)

    query.run(new_sink("true", to=typed, transform=change), 0, offset(0, one(0, 4 * len(cases))))
    assert offsets(typed) == [4 * at + n for at, (_, good) in enumerate(cases.values()) for n in good]


def test_all_rows_of_a_record_with_a_bad_one_are_left_out(query: Query, table: Path, bad: Path) -> None:
    """It is bad by a rule, or by a column of errors, whose name may have a dot."""

    def twice(df: "DataFrame") -> "DataFrame":
        both = df.unionByName(df.withColumn("value", F.lit("second")))
        return both.withColumn("decode.error", F.when(F.expr("offset = 3 AND value = 'second'"), "broken"))

    rule = "value <> 'second' OR offset > 1"
    letters = DeadLetters(bad, valid=rule, error="decode.error", max_fraction=LOOSE)
    query.run(query.sink(table, transform=twice, dead_letters=letters), 0, offset(0, one(0, 4)))
    by_rule = [(n, "RULE", f"valid: {rule}") for n in (0, 1)]
    assert (offsets(table), errors(bad)) == ([2, 2], [*by_rule, (3, "TRANSFORM", "decode.error: broken")])


def test_too_many_bad_records_end_the_query_before_anything_is_written(
    query: Query, new_sink: NewSink, table: Path, bad: Path
) -> None:
    sink = new_sink(fraction=0.4, min_rows=6)
    query.run(sink, 0, offset(0, one(0, 4)))
    with pytest.raises(BadRecords, match=r"4 of the last 8 rows .* orders-0 offset 5, valid: offset % 2 = 0; ") as why:
        query.run(sink, 1, offset(1, one(4, 8)))
    assert (why.value.fields["bad"], why.value.fields["rows"]) == (4, 8)
    assert (offsets(table), offsets(bad)) == ([0, 2], [1, 3])
    query.run(new_sink(fraction=0.6, min_rows=6), 1, offset(1, one(4, 8)))
    assert (offsets(table), offsets(bad)) == ([0, 2, 4, 6], [1, 3, 5, 7])


def test_rows_are_counted_once_and_none_is_written_if_the_commit_of_bad_records_fails_or_loses_a_race(
    query: Query, new_sink: NewSink, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, commit, before = new_sink(fraction=0.5, min_rows=6), LetterBox._commit, len(commits(table))
    troubles = [CommitRace("lost"), OSError("No space left on device")]

    def trouble(self: LetterBox, *args: Any) -> None:
        if troubles:
            raise troubles.pop()
        commit(self, *args)

    monkeypatch.setattr(LetterBox, "_commit", trouble)
    with pytest.raises(OSError, match="No space left"):
        query.run(sink, 0, offset(0, one(0, 4)))
    assert len(commits(table)) == before
    query.run(sink, 0, offset(0, one(0, 4)))
    assert (troubles, len(commits(table))) == ([], before + 1)
    assert sink.dead_letters is not None
    assert [(known.counted, known.bad) for known in sink.dead_letters._of_tables.values()] == [(4, 2)]


def test_batch_with_more_bad_rows_than_a_sink_takes_is_not_written_and_a_replay_takes_several_commits(
    query: Query, new_sink: NewSink, table: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "BAD_MAX", 2)
    query.run(new_sink(), 0, offset(0, one(0, 4)))
    with pytest.raises(BadRecords, match=r"3 rows of one batch .* takes at most 2\. Nothing of this batch"):
        query.run(new_sink(), 1, offset(1, one(4, 10)))
    assert (offsets(table), offsets(bad)) == ([0, 2], [1, 3])
    monkeypatch.setattr(dead_letters, "BAD_MAX", 1)
    assert new_sink("true", transform=as_text).replay(query.spark) == 2
    assert offsets(table) == [0, 1, 2, 3]
    assert sorted(str(number) for number in replays(bad).values()) == ["1", "2"]


def narrow(df: "DataFrame") -> "DataFrame":
    return df.select("topic", "value")


def moved(df: "DataFrame") -> "DataFrame":
    return df.withColumn("offset", F.col("offset") + 100)


@pytest.mark.parametrize(
    ("transform", "message"),
    [(narrow, "no column partition"), (moved, "that the batch does not have.*A stateful query")],
)
def test_transform_that_hides_the_record_of_a_row_is_refused(
    query: Query, new_sink: NewSink, table: Path, transform: Any, message: str
) -> None:
    before = len(commits(table))
    with pytest.raises(OptionError, match=message):
        query.run(new_sink(transform=transform), 0, offset(0, one(0, 4)))
    assert len(commits(table)) == before


def test_table_cannot_have_its_own_bad_records(query: Query, new_sink: NewSink, bad: Path) -> None:
    with pytest.raises(OptionError, match="needs another table"):
        query.run(new_sink(to=bad), 0, offset(0, one(0, 4)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"max_fraction": 1.5}, "between 0 and 1"), ({"min_rows": 0}, "min_rows is 0")],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DeadLetters("/lake/bad", **arguments)
    wrong: Any = "/lake/bad"
    with pytest.raises(OptionError, match=r"must be DeadLetters\('/lake/bad'\)"):
        DeltaSink("/lake/orders", dead_letters=wrong)


def replays(bad: Path) -> dict[int, int | None]:
    """The number of the replay of each bad record."""
    return {row[2]: row[-1] for row in rows(bad)}


def as_text(df: "DataFrame") -> "DataFrame":
    """A transform for records whose value is binary, as Kafka's are, or text, as the tests' are."""
    return df.select("topic", "partition", "offset", F.col("value").cast("string").alias("value"))


def test_G4_replay_writes_each_record_that_is_good_now_once_also_if_it_is_killed_after_its_commit(
    query: Query, new_sink: NewSink, table: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query does not read headers and other columns, and its transform returns all that it gets: the table does not
    get them."""
    query.run(new_sink(), 0, offset(0, one(0, 8)))
    columns, commit = DeltaTable(table).schema().to_arrow().names, TableWriter.commit_ledger

    def whole(df: "DataFrame") -> "DataFrame":
        return df.withColumn("value", F.col("value").cast("string"))

    def killed(self: TableWriter, *args: Any, **more: Any) -> None:
        commit(self, *args, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TableWriter, "commit_ledger", killed)
        with pytest.raises(KeyboardInterrupt):
            new_sink("offset < 4", transform=whole, merge_schema=True).replay(query.spark)
    assert (offsets(table), replays(bad)) == ([0, 1, 2, 3, 4, 6], {1: 1, 3: 1, 5: None, 7: None})
    assert new_sink("offset < 6", transform=whole, merge_schema=True).replay(query.spark) == 1
    assert (rows(table), replays(bad)) == (records(0, 7), {1: 1, 3: 1, 5: 2, 7: None})
    assert DeltaTable(table).schema().to_arrow().names == columns
    assert next_offsets(table) == {("orders", 0): 8}
    found = verify(query.spark, str(table))
    assert (found.findings, found.groups) == ([], ["etl"])


def test_G4_records_of_an_interrupted_replay_are_replayed_anew(
    query: Query, new_sink: NewSink, table: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever rules they have then; also if the one that ends the interrupted one is interrupted."""
    query.run(new_sink(), 0, offset(0, one(0, 6)))
    replay = new_sink("offset < 4", transform=as_text).open_replay(query.spark)
    for step in ("_write", "_release"):
        with monkeypatch.context() as patch:
            patch.setattr(dead_letters.LetterReplay, step, interrupted)
            with pytest.raises(KeyboardInterrupt):
                new_sink("offset < 4", transform=as_text).replay(query.spark)
        assert (offsets(table), replays(bad)) == ([0, 2, 4], {1: 1, 3: 1, 5: None})
    late = as_text(query.rows(offset(0, {("orders", 0): (1, 2)})))
    replay._commit_number(1, Ledger(group=replay._key), late)
    assert offsets(table) == [0, 2, 4], "a cluster finished the write of the driver that was killed"
    assert new_sink("offset < 2", transform=as_text).replay(query.spark) == 1
    assert (offsets(table), replays(bad)) == ([0, 1, 2, 4], {1: 2, 3: None, 5: None})
    assert new_sink("true", transform=as_text).replay(query.spark) == 2
    assert (offsets(table), replays(bad)) == ([0, 1, 2, 3, 4, 5], {1: 2, 3: 3, 5: 3})


def test_G4_replay_whose_rows_the_table_refuses_can_be_repeated_with_another_rule(
    query: Query, new_sink: NewSink, tmp_path: Path, bad: Path
) -> None:
    strict = tmp_path / "strict"
    query.spark.sql(
        f"CREATE TABLE delta.`{strict}` (topic string, partition int, offset long, value varchar(5)) USING delta"
    )

    def change(df: "DataFrame") -> "DataFrame":
        value = F.when(F.col("offset") == 3, "too long").otherwise("ok")
        return df.select("topic", "partition", "offset", value.alias("value"))

    query.run(new_sink(transform=change, to=strict), 0, offset(0, one(0, 6)))
    with pytest.raises(Exception, match="EXCEED_CHAR_VARCHAR_LIMIT"):
        new_sink("true", transform=change, to=strict).replay(query.spark)
    assert new_sink("length(value) <= 5", transform=change, to=strict).replay(query.spark) == 2
    assert (offsets(strict), replays(bad)) == ([0, 1, 2, 4, 5], {1: 2, 3: None, 5: 2})


def test_G4_replay_writes_again_what_a_restore_removed(query: Query, new_sink: NewSink, table: Path, bad: Path) -> None:
    query.run(new_sink(), 0, offset(0, one(0, 6)))
    before = DeltaTable(table).version()
    query.run(new_sink(), 1, offset(1, one(6, 8)))
    assert new_sink("offset < 4", transform=as_text).replay(query.spark) == 2
    assert replays(bad) == {1: 1, 3: 1, 5: None, 7: None}
    DeltaTable(table).restore(before)
    set_ledger(query.spark, str(table), "etl", {TopicPartition("orders", 0): 6}, reason="--to-ledger", reset_number=1)
    query.run(new_sink(), 2, offset(2, one(6, 8), reset_number=1))
    assert verify(query.spark, str(table)).findings == []
    assert new_sink("offset < 6", transform=as_text).replay(query.spark) == 3
    assert (offsets(table), replays(bad)) == ([0, 1, 2, 3, 4, 5, 6], {1: 2, 3: 2, 5: 2, 7: None})


def test_G4_replay_writes_its_records_where_the_number_of_the_last_one_is_unknown(
    query: Query, new_sink: NewSink, table: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log that Delta describes does not have the numbers, and its oldest commits expire. Delta's writer shows
    whether a number is used."""
    query.run(new_sink(), 0, offset(0, one(0, 6)))
    assert new_sink("offset < 2", transform=as_text, writer="options").replay(query.spark) == 1
    read = TableHistory.ledger

    def ledger(self: TableHistory, group: str, known: Ledger | None = None) -> Ledger | None:
        found = read(self, group, known)
        if group.startswith("replay.") and found is not None and found.number == 1:
            raise LedgerExpired(group)
        return found

    monkeypatch.setattr(TableHistory, "ledger", ledger)
    monkeypatch.setattr(TableHistory, "number", lambda self, group: None)
    for count in (2, 0):
        assert new_sink("offset < 6", transform=as_text, writer="options").replay(query.spark) == count
        assert offsets(table) == [0, 1, 2, 3, 4, 5]


def interrupted(self: object, *args: object) -> None:
    raise KeyboardInterrupt


def test_replay_begins_again_if_bad_records_are_written_meanwhile(
    query: Query, new_sink: NewSink, table: Path, bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta refuses an update of a table to which another commit added rows since it was read."""
    query.run(new_sink(), 0, offset(0, one(0, 6)))
    others = DeltaTable(bad).to_pyarrow_table().slice(0, 1)
    others = others.set_column(others.schema.get_field_index("table_id"), "table_id", pa.array(["another"]))
    begun, frame = tmp_path / "begun", dead_letters._frame

    def overtaken(*args: Any) -> "DataFrame":
        def append_once(at: Any) -> Any:
            if not begun.exists():
                begun.touch()
                write_deltalake(bad, others, mode="append")
            return at

        append_once.__annotations__.clear()  # PySpark takes them for those of a pandas function
        return frame(*args).withColumn("offset", F.udf(append_once, "long")("offset"))

    monkeypatch.setattr(dead_letters, "_frame", overtaken)
    assert new_sink("true", transform=as_text).replay(query.spark) == 3
    assert begun.exists() and offsets(table) == [0, 1, 2, 3, 4, 5]


def test_replay_refuses_a_transform_that_changes_its_result_and_ends_with_one_that_hides_or_drops_records(
    query: Query, new_sink: NewSink, table: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.run(new_sink(), 0, offset(0, one(0, 4)))
    claim = dead_letters.LetterReplay._claim

    def changed(self: dead_letters.LetterReplay, *args: Any) -> int:
        claimed = claim(self, *args)
        self.transform = lambda df: as_text(df).where("offset < 2")
        return claimed

    with monkeypatch.context() as patch:
        patch.setattr(dead_letters.LetterReplay, "_claim", changed)
        with pytest.raises(
            OptionError, match=r"again: orders-0 offset 3, the transform returns no row for it\. They were"
        ):
            new_sink("true", transform=as_text).replay(query.spark)
    assert offsets(table) == [0, 2]
    assert new_sink("true", transform=lambda df: moved(as_text(df))).replay(query.spark) == 0
    assert new_sink("true", transform=lambda df: as_text(df).where("offset < 2")).replay(query.spark) == 1
    assert (offsets(table), replays(bad)) == ([0, 1, 2], {1: 2, 3: None})


def test_replay_needs_dead_letters_and_a_table(query: Query, new_sink: NewSink, table: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no dead_letters"):
        query.sink(table).replay(query.spark)
    with pytest.raises(OptionError, match="there is no Delta table"):
        new_sink(to=tmp_path / "none").replay(query.spark)


@pytest.fixture
def on_session(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the session of the tests."""

    @contextmanager
    def session(*, avro: bool = False) -> Iterator[Any]:
        yield query.spark

    monkeypatch.setattr(common, "session", session)


@pytest.mark.usefixtures("on_session")
def test_commands_show_and_replay_bad_records(
    query: Query, new_sink: NewSink, table: Path, bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = CliRunner()
    query.run(new_sink({"even": EVEN, "few": "offset < 7"}), 0, offset(0, one(0, 9)))
    monkeypatch.chdir(tmp_path)
    Path("orders_sink.py").write_text(
        "from spark_group_source import DeadLetters, DeltaSink\n"
        "def text(df):\n"
        "    return df.selectExpr('topic', 'partition', 'offset', 'CAST(value AS STRING) AS value')\n"
        f"sink = DeltaSink('{table}', transform=text, dead_letters=DeadLetters('{bad}', valid='offset < 5'))\n"
    )
    written = command.invoke(app, ["letters", "replay", "orders_sink:sink"])
    left = "3 left: the first bad one is orders-0 offset 5, valid: offset < 5"
    assert (written.exit_code, written.output) == (0, f"2 of 5 records written to table {table}; {left}\n")
    assert offsets(table) == [0, 1, 2, 3, 4, 6]
    shown = command.invoke(app, ["letters", "show", str(bad), "--json"])
    first = {"table": str(table), "class": "RULE"}
    assert json.loads(shown.output) == [
        first | {"error": "even: offset % 2 = 0", "records": 4, "left": 2, "first": "orders-0 offset 5"},
        first | {"error": "few: offset < 7", "records": 1, "left": 1, "first": "orders-0 offset 8"},
    ]
    assert "few: offset < 7" in command.invoke(app, ["letters", "show", str(bad)], env={"COLUMNS": "200"}).output
    Path("orders_sink.py").write_text(Path("orders_sink.py").read_text().replace("offset < 5", "true"))
    monkeypatch.delitem(sys.modules, "orders_sink")
    rest = command.invoke(app, ["letters", "replay", "orders_sink:sink"])
    assert (rest.exit_code, rest.output) == (0, f"3 records written to table {table}\n")
    wrong = command.invoke(app, ["letters", "show", str(table)])
    refusal = f"table {table} is no dead-letter table: it lacks the column batch_id"
    assert wrong.exit_code == 1 and refusal in wrong.output


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:sink", "imported"),
        ("json:dumps", "function"),
        ("./job.py:sink", "imported"),
        (":sink", "imported"),
    ],
)
def test_replay_of_what_is_no_sink_is_refused(name: str, reason: str) -> None:
    refused = CliRunner().invoke(app, ["letters", "replay", name])
    assert refused.exit_code == 2 and reason in refused.output
