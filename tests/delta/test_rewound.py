"""RESTORE of a table without a ledger (writer options): seen by DESCRIBE HISTORY, refused with what settles it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from sink_source import offset
from sink_words import Query, actions, commits, one, records, rows

from spark_group_source.delta import rewound
from spark_group_source.delta.history import Commit
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import TopicPartition

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
LATER = offset(9, one(90, 100))


def batch(version: int, start: int, *, read: int | None = None, **more: Any) -> Commit:
    """A commit of ten records."""
    doc = offset(version, one(start, start + 10), **more).to_json_dict()
    return Commit(version, version - 1 if read is None else read, (doc,))


def restore(version: int, to: int) -> Commit:
    return Commit(version, version - 1, restored_to=to)


# What a history says


def test_of_batches_that_a_restore_took_away_it_is_known_where_they_began_and_ended() -> None:
    found = rewound.rewound([Commit(0, -1), batch(1, 0), batch(2, 10), batch(3, 20), restore(4, 1)], LATER)
    assert found == rewound.Rewound(4, 1, {P0: 10}, {P0: 30}, None)


def test_a_restore_that_was_taken_back_by_another_is_none() -> None:
    history = [batch(1, 0), batch(2, 10), restore(3, 1), restore(4, 2)]
    assert rewound.rewound(history[:3], LATER) is not None
    assert rewound.rewound(history, LATER) is None


def test_a_restore_to_before_the_known_history_took_all_of_it_away() -> None:
    found = rewound.rewound([batch(7, 70), batch(8, 80), restore(9, 3)], LATER)
    assert found is not None and found.starts == {P0: 70}


def test_a_batch_that_came_in_behind_the_restore_has_to_go_as_well() -> None:
    found = rewound.rewound([batch(1, 0), batch(2, 10), restore(3, 1), batch(4, 20, read=2)], LATER)
    assert found == rewound.Rewound(3, 1, {P0: 10}, {P0: 20}, 4)
    after = [batch(1, 0), batch(2, 10), restore(3, 1), batch(4, 20, read=2), restore(5, 3)]
    assert rewound.rewound(after, LATER) == rewound.Rewound(5, 3, {P0: 10}, {P0: 30}, None)


def test_what_is_gone_of_other_streams_alone_is_theirs_to_settle() -> None:
    history = [batch(1, 0), batch(2, 10, stream="s2"), restore(3, 1)]
    assert rewound.rewound(history, LATER) is None
    assert rewound.rewound(history, replace(LATER, group="another")) is None
    assert rewound.rewound(history, replace(LATER, stream="s2")) is not None
    assert rewound.rewound([*history, batch(4, 10, stream="s3")], replace(LATER, stream="s3")) is None


def test_a_reset_of_the_table_settles_it_for_who_knows_of_that_reset() -> None:
    reset = Commit(4, 3, ({"group": "etl", "ledger": {"epoch": 1}, "reason": "reset"},))
    history = [batch(1, 0), batch(2, 10), restore(3, 1), reset]
    assert rewound.rewound(history, LATER) is not None
    assert rewound.rewound(history, replace(LATER, epoch=1)) is None


def test_a_table_that_has_fewer_versions_than_it_had_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spark: Any = None
    monkeypatch.setattr(rewound, "_look", lambda spark, table, after: (5, False))
    assert rewound.refuse(spark, "t", [LATER], after=5) == 5, "nobody has committed since"
    with pytest.raises(LedgerConflict, match="was deleted while the query runs"):
        rewound.refuse(spark, "t", [LATER], after=6)


# On a real table


@pytest.mark.spark
def test_after_a_restore_the_query_stops_and_with_a_new_checkpoint_every_record_is_there_once(
    query: Query, new_query: Callable[[str], Query], table: Path
) -> None:
    sink = query.sink(table, tier="writer-options")
    for n in range(3):
        query.run(sink, n, offset(n, {("orders", 0): (n * 10, n * 10 + 10), ("orders", 1): (7, 7 + n)}))
    query.spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 1")
    before = len(commits(table))
    for again in (sink, query.sink(table, tier="writer-options")):
        with pytest.raises(
            LedgerConflict,
            match=r"restored to version 1 .*version 4.*orders-0\[10,30\), orders-1\[7,9\).*"
            r"--to-offsets '\{\"orders\": \{\"0\": 10, \"1\": 7\}\}'.*new checkpointLocation",
        ):
            query.run(again, 3, offset(3, one(30, 40)))
    assert len(commits(table)) == before and rows(table) == records(0, 10)
    anew = new_query("anew")
    fresh = anew.sink(table, tier="writer-options")
    anew.run(fresh, 0, offset(0, {("orders", 0): (10, 35), ("orders", 1): (7, 9)}, stream="s2"))
    anew.run(fresh, 1, offset(1, one(35, 40), stream="s2"))
    assert rows(table) == sorted(records(0, 40) + records(7, 9, partition=1))


@pytest.mark.spark
@pytest.mark.soak  # each RESTORE is ten seconds of CPU; what a history of them says is tested above
def test_a_restore_that_takes_nothing_of_the_stream_away_or_that_is_taken_back_is_no_reason_to_stop(
    query: Query, table: Path
) -> None:
    sink, spark = query.sink(table, tier="writer-options"), query.spark
    query.run(sink, 0, offset(0, one(0, 10)))
    spark.sql(f"DELETE FROM delta.`{table}` WHERE offset < 5")
    spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 1")
    query.run(sink, 1, offset(1, one(10, 20)))
    query.run(query.sink(table, tier="writer-options"), 2, offset(2, one(20, 30)))
    moment = spark.sql(f"DESCRIBE HISTORY delta.`{table}`").where("version = 4").collect()[0]["timestamp"]
    spark.sql(f"RESTORE TABLE delta.`{table}` TO TIMESTAMP AS OF '{moment}'")
    with pytest.raises(LedgerConflict, match=r"restored to version 4 .*orders-0\[20,30\)"):
        query.run(sink, 3, offset(3, one(30, 40)))
    spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 5")
    query.run(sink, 3, offset(3, one(30, 40)))
    assert rows(table) == records(0, 40)
    operations = [actions(commit, "commitInfo")[0]["operation"] for commit in commits(table)]
    assert operations.count("RESTORE") == 3 and operations.count("WRITE") == 4


@pytest.mark.spark
def test_a_table_that_is_deleted_while_the_query_runs_is_not_made_anew_without_a_word(
    query: Query, table: Path
) -> None:
    sink = query.sink(table, tier="writer-options")
    for n in range(3):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    rmtree(table)
    with pytest.raises(LedgerConflict, match="was deleted while the query runs"):
        query.run(sink, 3, offset(3, one(30, 40)))
    assert not list(table.glob("_delta_log/*.json"))
    query.run(query.sink(table, tier="writer-options"), 3, offset(3, one(30, 40)))
    with pytest.raises(LedgerConflict, match="was deleted while the query runs"):
        query.run(sink, 4, offset(4, one(40, 50)))
    assert rows(table) == records(30, 40)
