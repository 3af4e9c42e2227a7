"""Each row of the tables in ``docs/sink.md`` and ``docs/restore.md`` that state which batch is written, skipped or
refused. Deliberately absent: the messages, and the commands that they name (``test_commands.py``)."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from sink_helpers import NewQuery, Query, expire_log, one, rewrite, rows
from sink_source import offset
from table_changes import ByFiles

from spark_group_source.delta.ledger_store import set_ledger
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

DOCS = Path(__file__).parents[3] / "docs"
TABLES = {"sink.md": "| the batch | decision |", "restore.md": "| commit since the group's last one | the next batch |"}
P0, ORDERS_0 = TopicPartition("orders", 0), ("orders", 0)
AT = "orders", (0, 3, 7)
NEXT = offset(2, one(20, 30))


class Started(Query):
    """A query whose first two batches, [0, 10) and [10, 20), are in its table."""

    def __init__(self, query: Query, table: Path) -> None:
        self.__dict__ |= vars(query)
        self.table = table
        for n in range(2):
            self.run(self.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))

    def verdict(self, batch: StreamOffset, table: Path | None = None) -> str:
        """Run a batch after a restart, and return what became of its rows."""
        table = table or self.table
        before = rows(table)
        try:
            self.run(self.sink(table), batch.seq, batch)
        except LedgerConflict:
            assert rows(table) == before
            return "refused"
        added, read = len(rows(table)) - len(before), sum(r.end - r.start for r in batch.batch())
        return "skipped" if not added else "written" if added == read else "written without"


Start = Callable[[], Started]


def replayed(start: Start) -> Iterator[list[str]]:
    yield [start().verdict(offset(1, one(10, 20))), start().verdict(offset(1, one(15, 25)))]


def planned_before_a_reset(start: Start) -> Iterator[list[str]]:
    query = start()
    set_ledger(query.spark, str(query.table), "etl", {P0: 20}, reason="reset", reset_number=1)
    yield [query.verdict(NEXT), query.verdict(offset(3, one(30, 40)))]


def at_the_ledger(start: Start) -> Iterator[list[str]]:
    yield [start().verdict(NEXT)]
    yield [start().verdict(offset(2, {ORDERS_0: (20, 20), ("orders", 1): (5, 9)}))]


def unknown_after_an_expired_ledger(start: Start) -> Iterator[list[str]]:
    query = start()
    query.run(query.sink(query.table), 2, offset(2, one(0, 9, partition=1)))
    expire_log(query.table)
    query.run(query.sink(query.table), 3, offset(3, one(20, 30)))
    yield [query.verdict(offset(4, one(5, 10, partition=1)))]


def planned_before_a_truncation(start: Start) -> Iterator[list[str]]:
    query = start()
    query.run(query.sink(query.table), 2, offset(2, one(6, 15), truncated_after={ORDERS_0: 3}))
    yield [query.verdict(replace(offset(3, one(15, 25)), leader_epochs={P0: 3}))]


def batch(planned: StreamOffset) -> Callable[[Start], Iterator[list[str]]]:
    def case(start: Start) -> Iterator[list[str]]:
        yield [start().verdict(planned)]

    return case


def after(*changes: Callable[[Path], object]) -> Callable[[Start], Iterator[list[str]]]:
    def case(start: Start) -> Iterator[list[str]]:
        for change in changes:
            query = start()
            change(query.table)
            yield [query.verdict(NEXT)]

    return case


by = ByFiles()


def overwrite_some(table: Path) -> None:
    found = DeltaTable(table).to_pyarrow_table()
    some = found.filter(pc.less(found["offset"], 3))
    write_deltalake(table, some, mode="overwrite", predicate="offset < 5")


def clone_into(table: Path) -> None:
    by.overwrite(table, 1)
    rewrite(table, 3, "commitInfo", lambda info: info.update(operation="CLONE", operationParameters={}))


def restore_no_rows_of_the_group(table: Path) -> None:
    by.optimize(table)
    by.restore(table, 2)


def rows_brought_back(start: Start) -> Iterator[list[str]]:
    query = start()
    by.restore(query.table, 1)
    set_ledger(query.spark, str(query.table), "etl", {TopicPartition("orders", 0): 10}, reason="r", reset_number=1)
    by.restore(query.table, 2)
    yield [query.verdict(offset(2, one(10, 30), reset_number=1))]


def in_a_clone(start: Start) -> Iterator[list[str]]:
    query = start()
    clone = query.table.with_name(f"{query.table.name}-clone")
    by.clone(query.table, 2, clone)
    yield [query.verdict(NEXT, clone)]


def set_property(table: Path) -> None:
    DeltaTable(table).alter.set_table_properties({"their.own": "1"}, raise_if_not_exists=False)


REPLACEMENTS = (clone_into, lambda table: by.replace(table, 1), lambda table: by.overwrite(table, 1))

CASES: dict[str, Callable[[Start], Iterator[list[str]]]] = {
    "has a number that the ledger already has for this query": replayed,
    "was planned before a `spark-group reset`": planned_before_a_reset,
    "`from` = L, or the ledger does not know the partition": at_the_ledger,
    "the ledger does not know the partition, the table has rows at or behind `from`, and its log does not reach back "
    "to its creation": unknown_after_an_expired_ledger,
    "`from` > L": batch(offset(2, one(25, 30))),
    "`from` > L, and no member's commit explains it: `startingOffsets` chose `from`, because Kafka had no committed "
    "offset, or only the start position of a query that wrote nothing; or a checkpoint that is older than a reset "
    "chose it": batch(offset(2, one(25, 30), started=[ORDERS_0])),
    "`from` < L, and the log was truncated at `from`, which the ledger does not know yet, and after which no query "
    "has read from there on": batch(offset(2, one(6, 15), truncated_after={ORDERS_0: 3})),
    "any, and the batch was planned before a truncation that the ledger knows": planned_before_a_truncation,
    "`from` < L, and a query of this package made the last commit": batch(offset(2, one(15, 30))),
    "`from` < L, and another tool or consumer moved the group back": batch(offset(2, one(15, 30), followed=[ORDERS_0])),
    "any, after a `RESTORE` that removed or brought back rows of the group, a `REPLACE TABLE`, a clone into the table, "
    "or an overwrite": after(lambda table: by.restore(table, 1), *REPLACEMENTS),
    "`RESTORE` that removes rows of the group": after(
        lambda table: by.restore(table, 1), lambda table: by.restore_to_time(table, 1)
    ),
    "`RESTORE` that brings back rows behind the ledger, as after a reset": rows_brought_back,
    "`RESTORE` that neither removes nor brings back rows of the group": after(restore_no_rows_of_the_group),
    "`REPLACE TABLE`, `CREATE OR REPLACE TABLE`, `CLONE` into the table, `INSERT OVERWRITE` or "
    '`mode("overwrite")` of the whole table, of some partitions (also dynamic ones) or with `replaceWhere`, if it '
    "removes rows or sets the whole of an empty table": after(*REPLACEMENTS, overwrite_some),
    "the table is a new `CLONE` of one that has the group's ledger": in_a_clone,
    "`DELETE`, `UPDATE`, `MERGE`, `TRUNCATE` (Databricks)": after(
        lambda table: by.delete(table, *AT), lambda table: by.update(table, *AT), lambda table: by.merge(table, *AT)
    ),
    "`OPTIMIZE`, `VACUUM`, `ALTER TABLE`, `COMPUTE STATISTICS`": after(by.optimize, by.vacuum, set_property),
}
"""By the first cell of a row: what its batches became, for each change or variant; an item for each of its clauses."""


def documented() -> Iterator[tuple[str, list[str]]]:
    """The first cell of each row, and its verdicts."""
    for page, header in TABLES.items():
        for line in (DOCS / page).read_text().split(header)[1].split("\n\n")[0].splitlines()[2:]:
            condition, decision = line.strip("|").split("|")[:2]
            clauses = [re.match(r"\s*(?:is )?(written without|[a-z]+)", part) for part in decision.split(";")]
            yield condition.strip(), [found[1] for found in clauses if found is not None]


@pytest.fixture
def start(new_query: NewQuery, tmp_path: Path) -> Start:
    """``start()``: another query with its own table."""
    made: list[Started] = []

    def new() -> Started:
        name = f"q{len(made)}"
        made.append(Started(new_query(name), tmp_path / name))
        return made[-1]

    return new


@pytest.mark.parametrize(("condition", "verdicts"), [pytest.param(*row, id=row[0][:60]) for row in documented()])
def test_a_batch_is_decided_as_in_the_table_of_a_page(condition: str, verdicts: list[str], start: Start) -> None:
    found = list(CASES[condition](start))
    assert found == [verdicts] * len(found)


def test_every_case_is_a_row() -> None:
    assert {condition for condition, _ in documented()} == CASES.keys()
