"""Whether a table's rows fit the ledgers of its groups.

Runs in: the command line. Deliberately absent: Kafka, the code that decides about batches, and mending anything: a
finding says what is wrong.

- **doubled**: a record is in the table more than once, or the table has more rows than its commits added;
- **missing**: the table has fewer rows than its commits added, and no commit took rows away on purpose;
- **behind**: the table has a record that its group's ledger does not count;
- **ledger**, **restore**: a ledger cannot be read, or a ``RESTORE`` took rows away that it counts.
"""

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source.delta import ledger_store, table_names, table_writer
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.sink import ROW_COLUMNS
from spark_group_source.delta.table_history import Aged, LogFiles, TableHistory
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEAVES_ROWS = {
    *("WRITE", "STREAMING UPDATE", "CREATE TABLE", "CREATE TABLE AS SELECT", "OPTIMIZE", "VACUUM START", "VACUUM END"),
    *("SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "ADD CONSTRAINT", "DROP CONSTRAINT", "ADD COLUMNS", "ADD COLUMN"),
    *("CHANGE COLUMN", "UPGRADE PROTOCOL", "ADD FEATURE", "COMPUTE STATS"),
}
"""Operations after which all rows are there that were there before."""


class Finding(NamedTuple):
    """Something that does not fit. ``version``: of the table, where one commit is to blame."""

    kind: str
    text: str
    version: int | None = None


class Checked(NamedTuple):
    """``commits``: how many the table's log has; ``notes``: what could not be compared, and why."""

    findings: list[Finding]
    groups: list[str]
    commits: int
    rows: int
    notes: list[str]


def verify(spark: "SparkSession", table: str) -> Checked:
    """Compare the rows of a table with the ledgers of all its groups.

    Raises:
        OptionError: there is no such Delta table.
    """
    history = table_writer.existing(spark, table).history()
    commits = list(history.commits())
    findings: list[Finding] = []
    ends: dict[TopicPartition, int] = {}
    groups = history.groups()
    for group in groups:
        found, ledger = _ledger(history, group)
        findings += found
        for tp, at in () if ledger is None else ledger.offsets.items():
            ends[tp] = max(ends.get(tp, 0), at)
    doubled, notes, total = _rows(spark, history.table, ends)
    missing, why = _missing(history, total)
    return Checked(findings + doubled + missing, groups, len(commits), total, [*notes, *why])


def _ledger(history: TableHistory, group: str) -> tuple[list[Finding], Ledger | None]:
    """The ledger as it was written last, and whether its rows are there."""
    try:
        found = history.ledger(group)
        restored = ledger_store.restored(history, group)
    except (Aged, LedgerConflict) as exc:
        return [Finding("ledger", f"the ledger of group {group} cannot be read: {exc}")], None
    if restored is None:
        return [], found
    text = f"a RESTORE to version {restored.to} took rows of group {group} away"
    return [Finding("restore", text, restored.version)], found


def _rows(spark: "SparkSession", table: str, ends: dict[TopicPartition, int]) -> tuple[list[Finding], list[str], int]:
    """Rows that are there twice, or behind every ledger; notes; how many rows there are."""
    from pyspark.sql import functions as F

    rows = table_names.read(spark, table)
    types = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
    if not ROW_COLUMNS.items() <= types.items():
        lacking = ", ".join(sorted(ROW_COLUMNS.keys() - types.keys()))
        return [], [f"rows are counted, but not told apart: they lack the columns {lacking}"], rows.count()
    found: list[Any] = (
        rows.groupBy("topic", "partition")
        .agg(F.count("*"), F.count_distinct("offset"), F.max("offset"))
        .orderBy("topic", "partition")
        .collect()
    )
    findings = []
    for topic, partition, count, distinct, highest in found:
        tp = TopicPartition(topic, partition)
        if count > distinct:
            findings.append(Finding("doubled", f"{count - distinct} rows of {tp} are there more than once"))
        if tp in ends and highest >= ends[tp]:
            text = f"{tp} has rows up to offset {highest}, but its ledger says {ends[tp]} is the next one"
            findings.append(Finding("behind", text))
    return findings, [], sum(row[2] for row in found)


def _missing(history: TableHistory, total: int) -> tuple[list[Finding], list[str]]:
    """Whether as many rows are there as the table's commits added."""
    if not isinstance(history.source, LogFiles):
        return [], ["whether rows are missing is not compared: the files of the table's log cannot be read from here"]
    others: set[str] = set()
    added, least = 0, history.version + 1
    for commit in history.commits():
        least = commit.version
        if commit.operation not in LEAVES_ROWS:
            others.add(commit.operation or "an unknown operation")
        elif commit.operation != "OPTIMIZE":
            rows, overwrites = _added(history.source, commit.version)
            added += rows
            others |= {f"{commit.operation} with overwrite"} if overwrites else set()
    if others or least > 0:
        why = f"the log has {', '.join(sorted(others))}" if others else "the log does not go back to version 0"
        return [], [f"whether rows are missing is not compared: {why}"]
    if total == added:
        return [], []
    kind, what = ("missing", "are gone") if total < added else ("doubled", "were never written")
    return [Finding(kind, f"{added:,} rows were written, {total:,} are there: {abs(added - total):,} {what}")], []


def _added(log: LogFiles, version: int) -> tuple[int, bool]:
    """How many rows a commit added, and whether it is an overwrite."""
    rows, overwrites = 0, False
    for line in (log.actions(version) or b"").splitlines():
        action = json.loads(line)
        if "add" in action:
            rows += int(json.loads(action["add"].get("stats") or "{}").get("numRecords", 0))
        elif "commitInfo" in action:
            overwrites = (action["commitInfo"].get("operationParameters") or {}).get("mode") == "Overwrite"
    return rows, overwrites
