"""Carries the ledger of a group to a clone of its table or to the group's new name, and finds a table that needs it.

Runs in: the user's driver, the command line. Deliberately absent: Kafka, and the rows. A table whose folder was moved
or renamed has its log with it, and so its ledgers.

``CLONE`` copies rows, and neither ``SetTransaction`` numbers nor notes. A ledger belongs to a group's name. Where the
group has no ledger, the sink takes all records for new, so those that the table has already would be written again.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pyspark.errors import PySparkException

from spark_group_source import command_line
from spark_group_source.delta import table_names, table_writer
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.restored_table import ledger_of_rows
from spark_group_source.delta.table_history import LedgerExpired, TableHistory
from spark_group_source.errors import GroupError, LedgerConflict, OptionError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


class Clone(NamedTuple):
    """The newest ``CLONE`` in a table's log."""

    source: str
    """The table that was cloned."""
    version: int
    """The version of the source whose rows the clone has."""
    made: int
    """The version of the clone that the ``CLONE`` made."""


def find_clone(history: TableHistory) -> Clone | None:
    """Return the newest ``CLONE`` in a table's log; None if there is none."""
    for commit in history.commits():
        if commit.clone is not None:
            source, version = (str(commit.clone.get(name)).strip('"') for name in ("source", "sourceVersion"))
            return Clone(table_names.canonical(source), int(version), commit.version) if version.isdecimal() else None
    return None


def check_new_group(
    spark: "SparkSession", history: TableHistory, group: str, topics: "Collection[str]", keep: "Sequence[str]"
) -> None:
    """Check the first batch of a group in a table, which has no ledger of it.

    Args:
        topics: the topics of the batch; a warning names another group whose ledger has some of them.
        keep: the position of ``spark-group reset`` at which the batch starts.

    Raises:
        LedgerConflict: the table is a clone of one that has a ledger of the group.
    """
    table, others = history.table, dict[str, set[str]]()
    for commit in history.commits():
        for entry in commit.entries:
            others.setdefault(str(entry["group"]), set()).update(entry["ledger"]["topics"])
    for other, of_other in sorted(others.items()):
        if other != group and (shared := sorted(of_other & set(topics))):
            log.warning(
                "group %s: table %s has no ledger of it, and group %s wrote topic %s there; if the group was renamed, "
                "its records are written again: stop the query and run %s",
                group,
                table,
                other,
                shared[0],
                command_line.in_sentence(table_names.ledger_command("rename", table, "--group", other, "--to", group)),
            )
    if (clone := find_clone(history)) is None:
        return
    copy = table_names.ledger_command("copy", clone.source, table, "--group", group)
    try:
        source = table_writer.TableWriter(spark, clone.source)
        if not source.exists():
            raise FileNotFoundError("there is no such table")
        if ledger_of_rows(source.history().at(clone.version), group) is None:
            return
    except (GroupError, LedgerExpired, OSError, PySparkException) as exc:
        log.warning(
            "group %s: table %s is a clone of version %d of table %s, whose ledgers cannot be read: %s; if the group "
            "wrote there, stop the query and run %s",
            *(group, table, clone.version, clone.source, str(exc) or type(exc).__name__),
            command_line.in_sentence(copy),
        )
        return
    commands = {
        "continue where the clone's rows end": f"{copy}\n    {table_names.reset_command(group, table, '--to-ledger')}",
        "continue where this batch starts": table_names.reset_command(group, table, *keep),
    }
    raise LedgerConflict(
        f"table {table} is a clone of version {clone.version} of table {clone.source}, which has a ledger of group "
        f"{group!r}, and the clone has none: CLONE does not copy it. Which records of the batch the clone has is not "
        "recorded there, so nothing was written. Stop the query, run the commands of one of these lines, and start "
        "the query with the same checkpoint:" + command_line.alternatives(commands),
        table=table,
        group=group,
        source=clone.source,
    )


def transfer_ledger(
    spark: "SparkSession",
    source: str,
    former_group: str,
    table: str,
    group: str,
    *,
    version: int | None = None,
    decided_at: int | None = None,
    execute: bool,
) -> Ledger:
    """Return the ledger of a group that a table gets from another table or another group, and set it with ``execute``.

    Batches that were planned before are void, like after a reset: their positions do not have to fit this ledger.

    Args:
        version: the version of the source whose rows the table has; None: the newest one.
        decided_at: the version of the table that has these rows; None: the newest one. If rows were replaced since, the
            next batch is refused.

    Raises:
        OptionError: there is no such table or ledger, or the table has a ledger of the group already.
        LedgerConflict: the ledger cannot be read.
    """
    origin = table_writer.open_existing(spark, source).history()
    try:
        found = ledger_of_rows(origin if version is None else origin.at(version), former_group)
    except LedgerExpired:
        raise OptionError(
            f"the log of table {source} does not reach back to the last commit of group {former_group!r} in version "
            f"{origin.version if version is None else version}, so its ledger cannot be copied. Set one "
            "at a position that fits the rows, with reset and --table"
        ) from None
    if found is None:
        raise OptionError(f"group {former_group!r} never wrote to table {source}, so there is no ledger to carry over")
    ledger = replace(found, group=group, number=0).after_reset(found.reset_number + 1, {})
    writer = table_writer.open_existing(spark, table)

    def attempt() -> Ledger:
        history = writer.history()
        if _has_ledger(history, group):
            raise OptionError(
                f"table {table} has a ledger of group {group!r} already. Nothing was written; reset with "
                "--table moves it"
            )
        what = f"the ledger of group {former_group} in table {source}"
        return (
            writer.commit_ledger(history, ledger.with_next_number(), f"copy of {what}", decided_at)
            if execute
            else ledger
        )

    return table_writer.retry_races(attempt, what=f"setting the ledger of group {group!r} in table {table}")


def _has_ledger(history: TableHistory, group: str) -> bool:
    try:
        return history.ledger(group) is not None
    except LedgerExpired:
        return True
