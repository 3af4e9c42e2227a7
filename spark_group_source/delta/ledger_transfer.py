"""Carries the ledger of a group to a clone of its table or to the group's new name, and finds a table that needs it.

Runs in: the user's driver, the command line. Deliberately absent: Kafka, and the rows. A table whose folder was moved
or renamed has its log with it, and so its ledgers.

``CLONE`` copies rows, and neither ``SetTransaction`` numbers nor notes. A ledger belongs to a group's name. Where the
group has no ledger, the sink takes all records for new, so those that the table has already would be written again.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pyspark.errors import PySparkException

from spark_group_source import command_line
from spark_group_source.delta import table_names, table_writer
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.replaced_rows import ledger_of_rows
from spark_group_source.delta.table_history import CommitRace, LedgerExpired, TableHistory
from spark_group_source.errors import GroupError, LedgerConflict, OptionError
from spark_group_source.protocol.offsets import StreamOffset

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import SparkSession


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
        if commit.operation == "CLONE":
            source, version = (str(commit.parameters.get(name)).strip('"') for name in ("source", "sourceVersion"))
            return Clone(table_names.canonical(source), int(version), commit.version) if version.isdecimal() else None
    return None


def check_new_group(
    spark: "SparkSession", history: TableHistory, batch: StreamOffset, ways: "Callable[[], Mapping[str, str]]"
) -> None:
    """Check the first batch of a group in a table, which has no ledger of it.

    Args:
        ways: returns the commands by which the group can continue without a ledger of the table, by purpose.

    Raises:
        LedgerConflict: the table is a clone of one that has a ledger of the group, or another group's ledger counts
            records of the batch's topics and does not end where the batch starts: rows could be written twice.
    """
    table, group, clone = history.table, batch.group, find_clone(history)
    to_ledger, to_further = (table_names.reset_command(group, table, to) for to in ("--to-ledger", "--to-further"))
    offers: dict[str, str] = {}
    why = ""
    if clone is not None:
        of_source = f"table {table} is a clone of version {clone.version} of table {clone.source}"
        copy = table_names.ledger_command("copy", clone.source, table, "--group", group)
        try:
            source = table_writer.TableWriter(spark, clone.source)
            if not source.exists():
                raise FileNotFoundError("there is no such table")
            cloned = source.history().at(clone.version)
            if ledger_of_rows(cloned, group) is not None:
                why = f"{of_source}, which has a ledger of group {group!r}, and the clone has none: CLONE copies none"
                offers["continue where the clone's rows end"] = f"{copy}\n    {to_ledger}"
                offers["leave out the records in between"] = f"{copy}\n    {to_further}"
            elif _was_cloned_from_ledger(spark, cloned, group):
                why = f"{of_source}, which is a clone, too, so records that the clone lacks are unknown"
                offers = dict(ways())
            else:
                why, offers = _renamed(cloned, table, batch, clone.source)
        except (GroupError, LedgerExpired, OSError, PySparkException) as exc:
            reason = str(exc).partition("\n")[0] or type(exc).__name__
            why = f"{of_source}, whose ledgers cannot be read, so records that the clone lacks are unknown: {reason}"
            offers = dict(ways())
    if not why:
        why, offers = _renamed(history, table, batch)
    if not why:
        return
    if clone is None or len(offers) == 1:
        offers |= ways()
    raise LedgerConflict(
        f"{why}. Which records of the batch the table has is not recorded there, so nothing was written. Stop the "
        "query, run the commands of one of these lines, and start the query with the same checkpoint:"
        + command_line.alternatives(offers),
        table=table,
        group=group,
    )


def _was_cloned_from_ledger(spark: "SparkSession", history: TableHistory, group: str) -> bool:
    """Return whether a table from which this one was cloned, directly or not, has a ledger of the group."""
    while (clone := find_clone(history)) is not None:
        source = table_writer.TableWriter(spark, clone.source)
        if not source.exists():
            raise FileNotFoundError(f"there is no table {clone.source}")
        history = source.history().at(clone.version)
        if ledger_of_rows(history, group) is not None:
            return True
    return False


def _renamed(
    history: TableHistory, table: str, batch: StreamOffset, source: str | None = None
) -> tuple[str, dict[str, str]]:
    """Return which other group has a ledger of the batch's topics, and the commands that give it to the batch's group.
    A group whose ledger ends where the batch starts is left out: no record is written twice, and none is missing.

    Args:
        source: the cloned table, if the history is that of one.
    """
    offers: dict[str, str] = {}
    group, named = batch.group, list[str]()
    for other, topics in sorted(history.topics().items()):
        if other == group or topics.isdisjoint(tp.topic for tp in batch.ranges):
            continue
        try:
            ledger = ledger_of_rows(history, other)
        except (LedgerConflict, LedgerExpired):  # the commands report it
            ledger = None
        if ledger is not None:
            ends = {tp: ledger.offsets_of(tp.topic, batch.topic_ids.get(tp.topic, "")) for tp in batch.ranges}
            known = {tp: n[tp.partition] for tp, n in ends.items() if tp.partition in n}
            if not known or all(batch.ranges[tp][0] == n for tp, n in known.items()):
                continue
        commands = [table_names.ledger_command("rename", table, "--group", other, "--to", group)]
        if source is not None:
            commands.insert(0, table_names.ledger_command("copy", source, table, "--group", other))
        commands.append(table_names.reset_command(group, table, "--to-ledger"))
        offers[f"continue where the rows of group {other} end, if that is its former name"] = "\n    ".join(commands)
        named.append(other)
    if not named:
        return "", {}
    where = f"table {table}" if source is None else f"table {table} is a clone of table {source}, which"
    return f"{where} has no ledger of group {group!r}, and has one of group {named[0]} with the same topics", offers


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
        OptionError: there is no such table or ledger, or the table has another ledger of the group already.
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
        taken = OptionError(
            f"table {table} has a ledger of group {group!r} already. Nothing was written; reset with --table moves it"
        )
        is_unknown = False
        try:
            present = history.ledger(group)
        except LedgerExpired:
            if history.number(group) is not None:
                raise taken from None
            present, is_unknown = None, True  # Delta refuses the first number below if there is a ledger
        if present is not None:
            if ledger.has_same_content(present):
                return present  # this command ran before
            raise taken
        what = f"the ledger of group {former_group} in table {source}"
        if not execute:
            return ledger
        try:
            return writer.commit_ledger(history, ledger, reason=f"copy of {what}", decided_at=decided_at)
        except CommitRace:
            if is_unknown:
                raise taken from None
            raise

    return table_writer.retry_races(attempt, what=f"setting the ledger of group {group!r} in table {table}")
