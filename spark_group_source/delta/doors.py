"""The two ways into a table, and what both can do.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line.
Deliberately absent: what is decided about a batch (:mod:`ledger`, :mod:`sink`).

Whichever way is taken, a commit holds the rows, the number of the group's commits and the note with the ledger after
it; and of two that count the same number Delta lets one through. So both ways may be used of one table.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from spark_group_source.delta import by_options, by_transaction, deltalog, names
from spark_group_source.delta.draft import Draft
from spark_group_source.delta.history import Past
from spark_group_source.delta.ledger import Ledger
from spark_group_source.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Entry(Protocol):
    """One attempt to commit, on the newest version of the table."""

    @property
    def past(self) -> Past: ...

    def forgets(self) -> str | None:
        """After what time Delta forgets numbers, if it does."""

    def ledger(self, group: str) -> Ledger | None:
        """As :meth:`Past.ledger`. Nobody else can commit for this group unnoticed after it."""

    def number(self, group: str, /) -> int:
        """A number that no commit of the group is beyond, where its ledger cannot be read."""

    def recorded(self, query_id: str, ledgers: Mapping[str, Ledger | None]) -> int:
        """The number of the last batch of a query that the table has, or -1. ``ledgers``: of the batch's groups."""

    def write(self, draft: Draft) -> int | None:
        """Commit a batch; returns the version, or None if nothing had to be committed.

        Raises:
            CommitRace: somebody else was first.
            Delta's own errors, unchanged. Nothing was written.
        """

    def restate(self, ledger: Ledger, note: str) -> int:
        """Commit nothing but a ledger; returns the version. Raises CommitRace."""


class Door(Protocol):
    """A table that one batch, or one operator, is at."""

    def prepare(self, rows: "Callable[[], DataFrame]") -> str:
        """Make sure that there is a table that ledgers can be kept in; returns what names it for good."""

    def begin(self) -> Entry: ...


def of(
    spark: "SparkSession",
    table: str,
    *,
    known: dict[str, Ledger],
    classes: bool,
    partition_by: tuple[str, ...] = (),
    merge_schema: bool = False,
) -> Door:
    """A way into a table.

    Args:
        known: the ledger of each group as it was last seen, kept for the next batch.
        classes: whether to go by Delta's classes.
    """
    table = names.qualified(spark, table)
    if classes:
        return by_transaction.Door(spark, table, partition_by, merge_schema)
    return by_options.Door(spark, table, known, partition_by, merge_schema)


def existing(spark: "SparkSession", table: str) -> Door:
    """The way into a table that is there, for an operator.

    Raises:
        OptionError: there is no such Delta table.
    """
    name = names.qualified(spark, names.canonical(table))
    if deltalog.available(spark):
        return by_transaction.Door(spark, deltalog.open_table(spark, name).table, (), False)
    if by_options.properties(spark, name) is None:
        raise OptionError(names.no_table(spark, name), table=name)
    return by_options.Door(spark, name, {}, (), False)
