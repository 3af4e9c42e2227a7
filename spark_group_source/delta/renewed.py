"""Ledgers that are written again before the table's log is cleaned.

Runs in: the command line (``spark-group ledger renew``). Deliberately absent: a clock that does it by itself.

Delta deletes what is older in its log than ``delta.logRetentionDuration`` whenever somebody's commit makes a checkpoint
of the table, and the notes with ledgers go with it. Each batch with records writes its group's ledger anew. A group
that has nothing to read does not: Spark calls no sink then, and the table may be written by others all the time. So it
is done from outside, for all groups of a table, by empty commits that count like any other of the group: of a renewal
and a batch that come at one moment one is judged anew.

A ledger in a metadata domain does not age, but only those see it who have Delta's classes: its note is renewed, too.
"""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from spark_group_source.delta import by_options, doors, kept, notes, races
from spark_group_source.delta.history import Aged
from spark_group_source.delta.told import Told
from spark_group_source.errors import LedgerConflict

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG_RETENTION, LOG_RETENTION_DEFAULT = "delta.logRetentionDuration", "interval 30 days"
DUE = 0.5
"""A ledger is renewed from this share of that time on."""

DAY_S = 24 * 3600


class Renewal(NamedTuple):
    """What became of a group. ``age_days``: of its note before; None, if the history has none. ``why``: it was refused
    or gone."""

    group: str
    what: Literal["young", "renewed", "refused", "gone"]
    age_days: float | None
    why: str = ""


def renew(spark: "SparkSession", table: str, *, due: float = DUE) -> list[Renewal]:
    """Renew the ledgers of all groups of a table whose notes are older than ``due`` of what its log is kept for.

    A ledger that fits the table no more (after a ``RESTORE``), or that cannot be read, is left as it is: an empty
    commit would make it look as if somebody had settled that.

    Raises:
        OptionError: there is no such Delta table.
        LedgerConflict: other writers won every one of the bounded attempts.
    """
    door = doors.existing(spark, table)
    past = door.begin().past
    due_s = due * keeps_s(spark, past.table)
    return [_renewed(spark, door, past.table, group, due_s) for group in past.groups()]


def keeps_s(spark: "SparkSession", table: str) -> int:
    """For how many seconds a table keeps its log."""
    text = (by_options.properties(spark, table) or {}).get(LOG_RETENTION, LOG_RETENTION_DEFAULT)
    frame = spark.createDataFrame([(text,)], "text string")
    row: Any = frame.selectExpr("unix_seconds(timestamp_seconds(0) + CAST(text AS INTERVAL))").first()
    return int(row[0])


def _renewed(spark: "SparkSession", door: doors.Door, table: str, group: str, due_s: float) -> Renewal:
    def attempt() -> Renewal:
        entry = door.begin()
        age_s = Told(spark, table, version=entry.past.version).age_s(group)
        days = None if age_s is None else age_s / DAY_S
        if age_s is not None and age_s < due_s:
            return Renewal(group, "young", days)
        try:
            found = entry.ledger(group)
            if found is not None:
                kept.refuse_restored(entry.past, found, after=-1)
        except Aged:
            found = None
        except LedgerConflict as exc:
            return Renewal(group, "refused", days, str(exc))
        if found is None:
            why = f"the log of table {table} does not go back to it. The group's next batch makes it anew from the rows"
            return Renewal(group, "gone", days, why)
        new = found.written()
        entry.restate(new, notes.text((), [new], read=entry.past.version, reason="renewed"))
        return Renewal(group, "renewed", days)

    return races.retry_races(attempt, what=f"renewing the ledger of group {group!r} in table {table}")
