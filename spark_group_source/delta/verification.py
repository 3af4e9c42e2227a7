"""Verifies that the rows of a table match the ledgers of its groups.

Runs in: the command line. Deliberately absent: Kafka, the code that decides about batches, and any repair. The findings
are of these kinds:

- **doubled**: a record is in the table more than once, or the table has more rows than its commits added;
- **missing**: the table has fewer rows than its commits added, and no commit removed rows on purpose;
- **behind**: the table has a record that its group's ledger does not count;
- **ledger**, **restore**: a ledger cannot be read, or a ``RESTORE`` removed rows that it counts.
"""

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source.delta import restored_table, table_names, table_writer
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.table_history import LedgerExpired, LogFiles, TableHistory
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OPERATIONS_THAT_KEEP_ROWS = {
    *("WRITE", "STREAMING UPDATE", "CREATE TABLE", "CREATE TABLE AS SELECT", "OPTIMIZE", "VACUUM START", "VACUUM END"),
    *("SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "ADD CONSTRAINT", "DROP CONSTRAINT", "ADD COLUMNS", "ADD COLUMN"),
    *("CHANGE COLUMN", "UPGRADE PROTOCOL", "ADD FEATURE", "COMPUTE STATS"),
}
"""Operations of Delta that remove no row."""


class Finding(NamedTuple):
    """One mismatch between the rows of a table and its ledgers."""

    kind: str
    """One of the kinds in the module's docstring."""
    text: str
    version: int | None = None
    """The version of the table whose commit caused it; None where it is not a single commit."""


class Verification(NamedTuple):
    """The result of :func:`verify`."""

    findings: list[Finding]
    groups: list[str]
    """The groups that have a ledger in the table."""
    commits: int
    """How many commits the table's log has."""
    rows: int
    """How many rows the table has."""
    notes: list[str]
    """The comparisons that were not possible, each with its reason."""


def verify(spark: "SparkSession", table: str) -> Verification:
    """Compare the rows of a table with the ledgers of all its groups.

    Raises:
        OptionError: there is no such Delta table.
    """
    history = table_writer.open_existing(spark, table).history()
    commits = list(history.commits())
    findings: list[Finding] = []
    next_offsets: dict[TopicPartition, int] = {}
    groups = history.groups()
    for group in groups:
        group_findings, ledger = _check_ledger(history, group)
        findings += group_findings
        for tp, offset in () if ledger is None else ledger.offsets.items():
            next_offsets[tp] = max(next_offsets.get(tp, 0), offset)
    row_findings, row_notes, row_count = _check_rows(spark, history.table, next_offsets)
    count_findings, count_notes = _check_row_count(history, row_count)
    findings += row_findings + count_findings
    return Verification(findings, groups, len(commits), row_count, row_notes + count_notes)


def _check_ledger(history: TableHistory, group: str) -> tuple[list[Finding], Ledger | None]:
    """Return the newest ledger of a group, with a finding if it cannot be read or a RESTORE removed its rows."""
    try:
        ledger = history.ledger(group)
        restore = restored_table.find_restore(history, group)
    except (LedgerExpired, LedgerConflict) as exc:
        return [Finding("ledger", f"the ledger of group {group} cannot be read: {exc}")], None
    if restore is None:
        return [], ledger
    text = f"a RESTORE to version {restore.restored_to} removed rows of group {group}"
    return [Finding("restore", text, restore.version)], ledger


def _check_rows(
    spark: "SparkSession", table: str, next_offsets: dict[TopicPartition, int]
) -> tuple[list[Finding], list[str], int]:
    """Find records that are doubled or that no ledger counts; return also notes and the number of rows."""
    from pyspark.sql import functions as F

    rows = table_names.read(spark, table)
    types = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
    if not table_names.RECORD_COLUMNS.items() <= types.items():
        lacking = ", ".join(sorted(table_names.RECORD_COLUMNS.keys() - types.keys()))
        return [], [f"doubled records are not searched: the table has no columns {lacking}"], rows.count()
    partitions: list[Any] = (
        rows.groupBy("topic", "partition")
        .agg(F.count("*"), F.count_distinct("offset"), F.max("offset"))
        .orderBy("topic", "partition")
        .collect()
    )
    findings = []
    for topic, partition, count, distinct, highest in partitions:
        tp = TopicPartition(topic, partition)
        if count > distinct:
            findings.append(Finding("doubled", f"{count - distinct} rows of {tp} are in the table more than once"))
        if tp in next_offsets and highest >= next_offsets[tp]:
            text = f"{tp} has rows up to offset {highest}, but the next offset in its ledger is {next_offsets[tp]}"
            findings.append(Finding("behind", text))
    return findings, [], sum(row[2] for row in partitions)


def _check_row_count(history: TableHistory, row_count: int) -> tuple[list[Finding], list[str]]:
    """Compare the number of rows with the number that the table's commits added."""
    not_compared = "the number of rows is not compared"
    if not isinstance(history.source, LogFiles):
        return [], [f"{not_compared}: the files of the table's log cannot be read from here"]
    removing: set[str] = set()
    added, oldest = 0, history.version + 1
    for commit in history.commits():
        oldest = commit.version
        if commit.operation not in OPERATIONS_THAT_KEEP_ROWS:
            removing.add(commit.operation or "an unknown operation")
        elif commit.operation != "OPTIMIZE":
            rows, is_overwrite = _added_rows(history.source, commit.version)
            added += rows
            removing |= {f"{commit.operation} with overwrite"} if is_overwrite else set()
    if removing or oldest > 0:
        why = f"the log has {', '.join(sorted(removing))}" if removing else "the log does not reach back to version 0"
        return [], [f"{not_compared}: {why}"]
    if row_count == added:
        return [], []
    kind, what = ("missing", "are missing") if row_count < added else ("doubled", "were never written")
    text = f"{added:,} rows were written and the table has {row_count:,}: {abs(added - row_count):,} {what}"
    return [Finding(kind, text)], []


def _added_rows(log: LogFiles, version: int) -> tuple[int, bool]:
    """Return how many rows a commit added, and whether it is an overwrite."""
    rows, is_overwrite = 0, False
    for line in (log.actions(version) or b"").splitlines():
        action = json.loads(line)
        if "add" in action:
            rows += int(json.loads(action["add"].get("stats") or "{}").get("numRecords", 0))
        elif "commitInfo" in action:
            is_overwrite = (action["commitInfo"].get("operationParameters") or {}).get("mode") == "Overwrite"
    return rows, is_overwrite
