"""Whether a table's ledgers, the batches in its history and its rows fit one another.

Runs in: the command line. Deliberately absent: Kafka, and mending anything: a finding says what is wrong and where.

Three things are compared, none of them by the code that wrote them alone:

- each batch in the history with the ledger before it, which makes the ledger after it (:func:`ledger.judge`);
- the ledger as it is read now with that of the last commit;
- the rows: none twice, none behind the ledgers, and, where the history tells all that was written and nothing takes
  rows away on purpose (``DELETE``, ``UPDATE``, ``MERGE`` and the like), as many as were written.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source.delta import doors, kept, ledger, names
from spark_group_source.delta.history import COMMITS_MAX, Aged, Past
from spark_group_source.delta.ledger import Ledger, shown
from spark_group_source.delta.notes import Commit
from spark_group_source.delta.rebuilt import ROW_COLUMNS
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WRITES = {"WRITE", "STREAMING UPDATE"}
"""Operations that add rows, and tell how many."""

LEAVES_ROWS = {
    *WRITES,
    *("CREATE TABLE", "OPTIMIZE", "VACUUM START", "VACUUM END", "ADD CONSTRAINT", "DROP CONSTRAINT", "ADD COLUMNS"),
    *("SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "UPGRADE PROTOCOL", "CHANGE COLUMN", "ADD FEATURE", "COMPUTE STATS"),
}
"""Operations after which all rows are there that were there before."""


class Finding(NamedTuple):
    """Something that does not fit. ``version``: of the table, where one commit is to blame."""

    kind: str
    text: str
    version: int | None = None


class Checked(NamedTuple):
    """``commits``: how many of the table's history were looked at; ``notes``: what could not be compared, and why."""

    findings: list[Finding]
    groups: list[str]
    commits: int
    rows: int
    notes: list[str]


def verify(spark: "SparkSession", table: str) -> Checked:
    """Look at all groups of a table.

    Raises:
        OptionError: there is no such Delta table.
    """
    past = doors.existing(spark, table).begin().past
    commits = list(past.commits())[::-1]
    findings: list[Finding] = []
    ends: dict[TopicPartition, int] = {}
    groups = past.groups()
    for group in groups:
        findings += chained(commits, group)
        found, now = _now(past, group, commits)
        findings += found
        for tp, at in () if now is None else now.offsets.items():
            ends[tp] = max(ends.get(tp, 0), at)
    rows, said, total = _rows(spark, past.table, ends)
    findings += rows
    missing, why = _missing(spark, past.table, total)
    return Checked(findings + missing, groups, len(commits), total, [*said, *why])


def chained(commits: Sequence[Commit], group: str) -> list[Finding]:
    """Whether each batch of a group begins where the ledger stands, and leaves it where its note says.

    Args:
        commits: of a table, oldest first. What came before them is not known.
    """
    findings: list[Finding] = []
    before: Ledger | None = None
    began = bool(commits) and commits[0].version == 0
    for commit in commits:
        noted, batches = commit.ledger(group), commit.batch(group)
        after = before
        for offset in batches if before is not None or began else ():
            verdict = ledger.judge(offset, after)
            after = verdict.ledger
            what = f"batch {offset.seq} of stream {offset.stream}"
            if verdict.refused:
                tp, start, recorded = verdict.refused[0]
                findings.append(
                    Finding("overlap", f"{what} begins {tp} at {start}, below the ledger's {recorded}", commit.version)
                )
            gaps = [r for r in verdict.skipped if r.tp not in offset.followed]
            if gaps:
                findings.append(Finding("gap", f"{what} leaves out {shown(gaps)}", commit.version))
        if batches and noted is not None and after is not None and after is not before and not noted.same(after):
            findings.append(
                Finding("ledger", f"the ledger of group {group} is not what the batch makes of it", commit.version)
            )
        before = noted or after
        began = began and before is None
    return findings


def _now(past: Past, group: str, commits: Sequence[Commit]) -> tuple[list[Finding], Ledger | None]:
    """The ledger as it is read now; and whether it is that of the last commit, and its rows are there."""
    try:
        now = past.ledger(group)
    except (Aged, LedgerConflict) as exc:
        return [Finding("ledger", f"the ledger of group {group} cannot be read: {exc}")], None
    last = next((found for commit in reversed(commits) if (found := commit.ledger(group)) is not None), None)
    findings = []
    if now is not None and last is not None and not now.same(last):
        findings.append(
            Finding(
                "ledger", f"the ledger of group {group} is not the one that its last commit noted", last.table_version
            )
        )
    restored = kept.restored(past, group)
    if restored is not None:
        findings.append(
            Finding("restore", f"a RESTORE to version {restored.to} took rows of group {group} away", restored.version)
        )
    return findings, now


def _rows(spark: "SparkSession", table: str, ends: dict[TopicPartition, int]) -> tuple[list[Finding], list[str], int]:
    """Rows that are there twice, or behind every ledger; notes; how many rows there are."""
    rows = names.read(spark, table)
    types = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
    if not ROW_COLUMNS.items() <= types.items():
        lacking = ", ".join(ROW_COLUMNS.keys() - types.keys())
        return [], [f"rows are counted, but not told apart: they lack the columns {lacking}"], rows.count()
    found: list[Any] = (
        rows.groupBy("topic", "partition")
        .agg(*map(_expr, ("count(*)", "count(DISTINCT offset)", "max(offset)")))
        .orderBy("topic", "partition")
        .collect()
    )
    findings = []
    for topic, partition, count, distinct, highest in found:
        tp = TopicPartition(topic, partition)
        if count > distinct:
            findings.append(Finding("doubled", f"{count - distinct} rows of {tp} are there more than once"))
        if tp in ends and highest >= ends[tp]:
            findings.append(
                Finding(
                    "behind", f"{tp} has rows up to offset {highest}, but its ledger says {ends[tp]} is the next one"
                )
            )
    return findings, [], sum(row[2] for row in found)


def _missing(spark: "SparkSession", table: str, total: int) -> tuple[list[Finding], list[str]]:
    """Whether as many rows are there as were written, where the history tells."""
    history = spark.sql(f"DESCRIBE HISTORY {names.sql_name(table)} LIMIT {COMMITS_MAX}")
    told: list[Any] = history.selectExpr(
        "version", "operation", "operationMetrics['numOutputRows'] AS rows", "operationParameters['mode'] AS mode"
    ).collect()
    others = sorted({row["operation"] for row in told if row["operation"] not in LEAVES_ROWS})
    others += ["WRITE with overwrite"] * any(row["mode"] == "Overwrite" for row in told)
    if others or min(row["version"] for row in told) > 0:
        why = f"the history has {', '.join(others)}" if others else "the history does not go back to the beginning"
        return [], [f"whether rows are missing is not compared: {why}"]
    written = sum(int(row["rows"] or 0) for row in told if row["operation"] in WRITES)
    if total == written:
        return [], []
    kind, what = ("missing", "are gone") if total < written else ("doubled", "were never written")
    return [Finding(kind, f"{written:,} rows were written, {total:,} are there: {abs(written - total):,} {what}")], []


def _expr(text: str) -> Any:
    from pyspark.sql import functions as F

    return F.expr(text)
