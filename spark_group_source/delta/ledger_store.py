"""Reads, sets and verifies the ledgers of a table, for an operator.

Runs in: the command line, the user's driver. Deliberately absent: what a ledger means for a batch
(:mod:`ledger_decision`), Kafka, and any repair of the rows. :func:`verify` reports these kinds of findings:

- **doubled**: a record is in the table more than once, or the table has more rows than its commits added;
- **missing**: the table has fewer rows than its commits added, and no commit removed rows on purpose;
- **behind**: the table has a record that its group's ledger does not count;
- **ledger**, **restore**: a ledger cannot be read, or a ``RESTORE``, ``REPLACE`` or overwrite removed rows that it
  counts.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source import command_line
from spark_group_source.delta import table_names, table_writer
from spark_group_source.delta.ledger_format import APP_PREFIX, Ledger, LedgerDamaged
from spark_group_source.delta.restored_table import find_replacement, ledger_of_rows, ledger_to_reset
from spark_group_source.delta.table_history import LedgerExpired, LogFiles, TableHistory
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

OPERATIONS_THAT_KEEP_ROWS = {
    *("WRITE", "STREAMING UPDATE", "CREATE TABLE", "CREATE TABLE AS SELECT", "OPTIMIZE", "VACUUM START", "VACUUM END"),
    *("SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "ADD CONSTRAINT", "DROP CONSTRAINT", "ADD COLUMNS", "ADD COLUMN"),
    *("CHANGE COLUMN", "UPGRADE PROTOCOL", "ADD FEATURE", "COMPUTE STATS"),
}
"""Operations of Delta that remove no row."""


def read_ledger(spark: "SparkSession", table: str, group: str, *, to_reset: bool = False) -> Ledger | None:
    """Read the ledger of one group in a table; None if the group never wrote to it.

    After a ``RESTORE`` it is the ledger that fits the remaining rows.

    Args:
        table: a path or a table name.
        to_reset: whether a reset will replace it: then it is the newest one where none is known to fit the rows.

    Raises:
        OptionError: there is no such Delta table.
        LedgerConflict: the ledger is damaged, a newer release wrote it, it expired with the table's log, or which
            ledger fits the rows is unknown.
    """
    try:
        history = table_writer.open_existing(spark, table).history()
        return ledger_to_reset(history, group) if to_reset else ledger_of_rows(history, group)
    except LedgerExpired as exc:
        raise LedgerDamaged(
            f"the last commit of group {group!r} in table {table} is older than the table's log "
            "(delta.logRetentionDuration), so its ledger cannot be read. The group's next batch starts a new ledger at "
            "the query's positions; to set it now, run this command (or the same with another position of reset):"
            + command_line.alternatives(
                {"continue at the group's offsets in Kafka": table_names.reset_command(group, table, "--to-current")}
            ),
            table=table,
            group=group,
        ) from exc


def require_ledger(spark: "SparkSession", table: str, group: str) -> Ledger:
    """Read the ledger of one group, like :func:`read_ledger`.

    Raises:
        OptionError: the group never wrote to the table; and as :func:`read_ledger`.
        LedgerConflict: as :func:`read_ledger`.
    """
    found = read_ledger(spark, table, group)
    if found is None:
        raise OptionError(f"group {group!r} never wrote to table {table}, so the table has no ledger of it")
    return found


def read_ledgers(history: TableHistory) -> dict[str, Ledger | None]:
    """Read the ledgers of all groups that wrote to a table; None for a ledger that expired with the table's log.

    Where none is known to fit the rows it is the newest one.

    Raises:
        LedgerConflict: one is damaged, a newer release wrote it, or a batch was committed behind a ``RESTORE``.
    """
    found: dict[str, Ledger | None] = {}
    for group in history.groups():
        try:
            found[group] = ledger_to_reset(history, group)
        except LedgerExpired:
            found[group] = None
    return found


def set_ledger(
    spark: "SparkSession",
    table: str,
    group: str,
    offsets: Mapping[TopicPartition, int],
    *,
    reason: str,
    reset_number: int,
    topic_ids: Mapping[str, str] = MappingProxyType({}),
    deleted: Iterable[str] = (),
) -> Ledger:
    """Set the ledger of a group, in one Delta commit without rows.

    Unlike a batch this may move the ledger backwards, so only set the ledger of a stopped group. A damaged ledger is
    replaced by one that holds only the given offsets.

    Args:
        offsets: the next offset of each partition to set; other partitions keep theirs.
        reason: what set the ledger; stored in the commit's note.
        reset_number: the number of the reset: batches that were planned before it are void.
        topic_ids: the ids of the topics, where known; needed for topics that the ledger does not have yet.
        deleted: topics that no longer exist. A batch that still reads one is compared with its former offsets.

    Raises:
        OptionError: there is no such Delta table, or it knows a newer reset.
        LedgerConflict: a newer release wrote the ledger, or other writers won every attempt.
    """
    writer = table_writer.open_existing(spark, table)

    def attempt() -> Ledger:
        history = writer.history()
        old = _replaced_ledger(writer, history, group)
        if reset_number < old.reset_number:
            raise OptionError(
                f"table {table} already knows reset #{old.reset_number} of group {group!r}, so reset #{reset_number} "
                "is too old. Nothing was written; run the reset again",
                table=table,
                group=group,
            )
        ledger = old.after_reset(reset_number, offsets, topic_ids, deleted)
        return writer.commit_ledger(history, ledger.with_next_number(), reason)

    return table_writer.retry_races(attempt, what=f"setting the ledger of group {group!r} in table {table}")


def _replaced_ledger(writer: table_writer.TableWriter, history: TableHistory, group: str) -> Ledger:
    """Return the ledger that is about to be replaced; if it cannot be read, an empty one with its number."""
    number = history.source.number(APP_PREFIX + group)
    try:
        newest = history.ledger(group)
        return Ledger(group=group) if newest is None else ledger_to_reset(history, group) or newest
    except LedgerDamaged as exc:
        log.warning("group %s: the ledger in table %s is replaced: %s", group, writer.table, exc)
    except LedgerExpired:
        log.warning(
            "group %s: its last commit is older than the log of table %s; it gets a new ledger", group, writer.table
        )
    if number is None:
        found = writer.commit_first_ledger(history, group)
        return found if isinstance(found, Ledger) else Ledger(group=group, number=found)
    return Ledger(group=group, number=number)


# --- comparison with the rows -----------------------------------------------------------------------------------------


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
    """Return the newest ledger of a group, with a finding if it cannot be read or its rows were replaced."""
    try:
        ledger = history.ledger(group)
        replacement = find_replacement(history, group)
    except (LedgerExpired, LedgerConflict) as exc:
        return [Finding("ledger", f"the ledger of group {group} cannot be read: {exc}")], None
    if replacement is None:
        return [], ledger
    restored_to = replacement.restored_to
    to = "" if restored_to is None else f" to version {restored_to}"
    text = f"a {replacement.operation}{to} removed rows of group {group}"
    return [Finding("restore", text, replacement.version)], ledger


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


def _added_rows(source: LogFiles, version: int) -> tuple[int, bool]:
    """Return how many rows a commit added, and whether it is an overwrite."""
    rows, is_overwrite = 0, False
    for line in (source.actions(version) or b"").splitlines():
        action = json.loads(line)
        if "add" in action:
            rows += int(json.loads(action["add"].get("stats") or "{}").get("numRecords", 0))
        elif "commitInfo" in action:
            is_overwrite = (action["commitInfo"].get("operationParameters") or {}).get("mode") == "Overwrite"
    return rows, is_overwrite
