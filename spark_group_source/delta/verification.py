"""Compares the rows of a table with the ledgers of its groups.

Runs in: the command line. Deliberately absent: Kafka (the command compares topic ids), and any repair of the rows.
:func:`verify` reports these kinds of findings:

- **doubled**: a record has more rows than a record may have, or the table has more rows than the groups' commits added;
- **missing**: the table has fewer rows than the groups' commits added, and no commit removed rows on purpose;
- **behind**: the table has a record that its group's ledger does not count;
- **ledger**: a ledger cannot be read, or a commit of its group does not follow the one before;
- **restore**: after a ``RESTORE``, ``REPLACE`` or overwrite the rows of a group may be others than its ledger counts.

A record may have several rows for a good reason: a transform writes several (the caller states how many), several
groups read the topic, the topic was recreated, or a reset moved the group back. Rows in files of other writers, whose
commits have no ledger, are not compared. ``OPTIMIZE`` and operations that remove rows write files anew; these belong to
the groups if all files that they replace do.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source.delta import table_names, table_writer
from spark_group_source.delta.ledger_decision import listed
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.replaced_rows import find_unsettled
from spark_group_source.delta.table_history import Commit, LedgerExpired, LogFiles, TableHistory, actions_of
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

OPERATIONS_THAT_ADD_ROWS = {
    *("WRITE", "STREAMING UPDATE", "MERGE", "COPY INTO", "CONVERT", "CREATE TABLE AS SELECT"),
    *("CREATE OR REPLACE TABLE AS SELECT", "REPLACE TABLE AS SELECT"),
}
"""Operations whose files may have rows that no file before had."""


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
    """Empty: what could be compared agrees; see ``notes``."""
    groups: list[str]
    """The groups that have a ledger in the table."""
    commits: int
    """How many commits the table's log has."""
    rows: int
    """How many rows the table has."""
    notes: list[str]
    """The comparisons that were not possible, each with its reason."""
    ledgers: Mapping[str, Ledger]
    """The newest ledger of each group whose ledger can be read."""


@dataclass
class _Rows:
    """What the log says about the table's rows."""

    foreign: set[str] = field(default_factory=set)
    """The names of files with rows of other writers."""
    added: int = 0
    """How many rows the groups' commits added."""
    are_counted: bool = True
    """Whether the statistics of all these files have their number."""
    removing: set[str] = field(default_factory=set)
    """Operations that removed rows."""
    foreign_versions: list[int] = field(default_factory=list)
    """The commits of other writers that added rows."""


def verify(spark: "SparkSession", table: str, *, rows_per_record: int = 1) -> Verification:
    """Compare the rows of a table with the ledgers of all its groups, by the whole history in the table's log.

    Args:
        rows_per_record: how many rows the transform of a group writes for a record at most; 0: any number.

    Raises:
        OptionError: there is no such Delta table.
    """
    history = table_writer.open_existing(spark, table).history()
    commits = list(history.commits())[::-1]
    findings: list[Finding] = []
    ledgers: dict[str, Ledger] = {}
    again: set[TopicPartition] = set()
    groups = history.groups()
    for group in history.ledger_keys():
        findings += _check_history(history.table, group, commits, again)
        group_findings, ledger = _check_ledger(history, group)
        findings += group_findings
        if ledger is not None and group in groups:
            ledgers[group] = ledger
    found = _read_log(history, commits)
    row_findings, notes, row_count, own_count = _check_rows(spark, history, ledgers, again, found, rows_per_record)
    findings += row_findings
    if why := _not_counted(history, commits, found):
        notes.append(f"the number of rows is not compared: {why}")
    elif own_count != found.added:
        kind, what = ("missing", "are missing") if own_count < found.added else ("doubled", "were never written")
        difference = f"{abs(found.added - own_count):,} {what}"
        text = f"{found.added:,} rows were written and the table has {own_count:,}: {difference}"
        findings.append(Finding(kind, text))
    return Verification(findings, groups, len(commits), row_count, notes, ledgers)


def _check_ledger(history: TableHistory, group: str) -> tuple[list[Finding], Ledger | None]:
    """Return the newest ledger of a group, with a finding if it cannot be read or its rows were replaced."""
    try:
        ledger = history.ledger(group)
        if ledger is None or not ledger.offsets:  # replays of dead letters have no offsets
            return [], ledger
        replacement = find_unsettled(history, ledger)
    except (LedgerExpired, LedgerConflict) as exc:
        return [Finding("ledger", f"the ledger of group {group} cannot be read: {exc}")], None
    if replacement is None:
        return [], ledger
    to = "" if replacement.restored_to is None else f" to version {replacement.restored_to}"
    text = f"after a {replacement.operation}{to} the rows of group {group} are not those that its ledger counts"
    return [Finding("restore", text, replacement.version)], ledger


def _check_history(table: str, group: str, commits: Iterable[Commit], again: set[TopicPartition]) -> Iterable[Finding]:
    """Yield a finding for each commit of a group that does not follow the one before.

    Args:
        commits: of the table, oldest first.
        again: gets the partitions that moved back, by a reset or because their log was truncated: their records may be
            in the table again.
    """
    before: Ledger | None = None
    for commit in commits:
        try:
            ledger = commit.ledger(group, table)
        except LedgerConflict as exc:
            yield Finding("ledger", f"a ledger of group {group} cannot be read: {exc}", commit.version)
            before = None
            continue
        if ledger is None:
            continue
        if before is not None:
            if ledger.number <= before.number:
                text = f"commit #{ledger.number} of group {group} follows #{before.number}"
                yield Finding("ledger", text, commit.version)
            again |= {tp for tp, n in before.offsets.items() if tp not in ledger.offsets or ledger.offsets[tp] < n}
            again |= {
                TopicPartition(name, p)
                for name, topic in ledger.topics.items()
                for p, rows in topic.partitions.items()
                if (known := before.topic(name, topic.id).partition(p)).offset is not None
                and rows.epoch not in (0, known.epoch)
            }
        before = ledger


def _read_log(history: TableHistory, commits: Iterable[Commit]) -> _Rows:
    """Read which files have rows of other writers, and how many rows the groups added."""
    found = _Rows()
    for commit in commits:
        own = bool(commit.entries)
        if commit.operation not in OPERATIONS_THAT_KEEP_ROWS and not own:
            found.removing.add(commit.operation or "an unknown operation")
        adds: list[dict[str, Any]] = []
        removes: list[str] = []
        if isinstance(history.source, LogFiles):
            for kind, action in actions_of(history.source.actions(commit.version) or b"", "add", "remove"):
                adds += [action] if kind == "add" else []
                removes += [action["path"]] if kind == "remove" else []
        elif not own and commit.operation in OPERATIONS_THAT_ADD_ROWS:
            found.foreign_versions.append(commit.version)
        if own:
            counts = [json.loads(add.get("stats") or "{}").get("numRecords") for add in adds]
            found.added += sum(int(count or 0) for count in counts)
            found.are_counted &= None not in counts
            if removes:  # a merge writes the rows of the files that it changes again
                found.removing.add(commit.operation)
            continue
        replaced = {_name(path) in found.foreign for path in removes}
        adds_rows = commit.operation in OPERATIONS_THAT_ADD_ROWS and bool(adds)
        if adds_rows:
            found.foreign_versions.append(commit.version)
        if commit.parameters.get("mode") == "Overwrite" or (adds_rows and removes):
            found.removing.add(f"{commit.operation} with overwrite")
        if commit.operation != "RESTORE" and (adds_rows or True in replaced):
            found.foreign |= {_name(add["path"]) for add in adds}
            if len(replaced) > 1:
                found.removing.add(f"{commit.operation} of files of several writers")
    return found


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _check_rows(
    spark: "SparkSession",
    history: TableHistory,
    ledgers: Mapping[str, Ledger],
    again: set[TopicPartition],
    found: _Rows,
    rows_per_record: int,
) -> tuple[list[Finding], list[str], int, int]:
    """Find records with too many rows or that no ledger counts. Returns the findings, notes, the number of rows and
    the number of rows that groups wrote."""
    from pyspark.sql import functions as F

    findings: list[Finding] = []
    notes: list[str] = []

    def add(kind: str, text: str, more: str = "") -> None:
        if found.foreign_versions and not found.foreign:
            notes.append(f"{text}; other writers added rows (versions {listed(found.foreign_versions)})")
        else:
            findings.append(Finding(kind, text + more))

    own = rows = table_names.read(spark, history.table, version=history.version)  # a query may write meanwhile
    own_count = row_count = rows.count()
    if found.foreign:
        own = rows.where(~F.col("_metadata.file_name").isin(sorted(found.foreign)))
        own_count = own.count()
        if own_count < row_count:
            notes.append(
                f"{row_count - own_count:,} rows in files with rows of other writers are not compared (versions "
                f"{listed(found.foreign_versions)})"
            )
    types = dict(rows.dtypes)
    if not table_names.RECORD_COLUMNS.items() <= types.items():
        lacking = ", ".join(sorted(table_names.RECORD_COLUMNS.keys() - types.keys())) or "of the source's types"
        notes.append(f"doubled records are not searched: the table has no columns {lacking}")
        return findings, notes, row_count, own_count
    records = own.groupBy("topic", "partition", "offset").agg(F.count("*").alias("n"))
    partitions: list[Any] = (
        records.groupBy("topic", "partition", "n", F.col("offset").isNull().alias("is_none"))
        .agg(F.count("*"), F.max("offset"))
        .drop("is_none")
        .orderBy("topic", "partition", "n")
        .collect()
    )
    unknown: Counter[str] = Counter()
    highest: dict[TopicPartition, int] = {}
    counts: dict[TopicPartition, dict[int, int]] = {}
    without_offset = 0
    for topic, partition, n, record_count, last in partitions:
        if last is None:  # of another source, or without a record
            without_offset += n
            continue
        tp = TopicPartition(topic, partition)
        if not (readers := _generations(tp, ledgers)):
            unknown[str(topic)] += n * record_count
            continue
        highest[tp] = max(last, highest.get(tp, -1))
        if rows_per_record and n > rows_per_record * readers:
            counts.setdefault(tp, {})[n] = record_count
    expected = "1 row" if rows_per_record == 1 else f"{rows_per_record} rows"
    for tp, by_number in counts.items():
        text = f"{sum(by_number.values()):,} records of {tp} have up to {max(by_number)} rows, and may have {expected}"
        if tp in again:
            notes.append(f"{text}; a reset or a truncated log moved it back, so they were read again")
        else:
            of_each = " for each group" if len(ledgers) > 1 else ""
            add("doubled", text, f"{of_each}. If a transform writes several, state it: --rows-per-record")
    for tp, last in highest.items():
        counted = max((ledger.offsets[tp] for ledger in ledgers.values() if tp in ledger.offsets), default=None)
        if counted is None or last < counted or tp in again or _generations(tp, ledgers, former=True):
            continue
        add("behind", f"{tp} has rows up to offset {last}, but the next offset in its ledger is {counted}")
    if without_offset:
        notes.append(f"{without_offset:,} rows without an offset are not compared: they are of no Kafka record")
    if unknown:
        notes.append(
            f"{sum(unknown.values()):,} rows of topics that no ledger has are not compared: {listed(sorted(unknown))}"
        )
    return findings, notes, row_count, own_count


def _generations(tp: TopicPartition, ledgers: Mapping[str, Ledger], *, former: bool = False) -> int:
    """Return how often a partition may have been read: by each group, under each id that its topic had, or each former
    one."""
    return sum(
        (not former and tp in ledger.offsets)
        + sum(
            topic.name == tp.topic and topic.partition(tp.partition).offset is not None
            for topic in ledger.former.values()
        )
        for ledger in ledgers.values()
    )


def _not_counted(history: TableHistory, commits: list[Commit], found: _Rows) -> str:
    """Return why the log does not show how many rows the groups have; empty if it does."""
    if not isinstance(history.source, LogFiles):
        return "the files of the table's log cannot be read from here"
    if not found.are_counted:
        return "the log has files without statistics"
    if found.removing:
        return f"the log has {', '.join(sorted(found.removing))}"
    return "the log does not reach back to version 0" if commits[0].version > 0 else ""
