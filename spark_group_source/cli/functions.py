"""``describe()`` and ``reset()`` for notebooks and programs: two commands of ``spark-group`` as functions.

Runs in: the user's driver. Deliberately absent: the implementation (``report``, ``group_reset``), and a Spark
session: for a table the caller's session is used.
"""

import logging
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from spark_group_source.cli import common, report
from spark_group_source.cli.group_reset import Destination, GroupReset, Offsets, Scope, move
from spark_group_source.cli.report import GroupReport
from spark_group_source.cli.reset import ms_of
from spark_group_source.errors import OptionError
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition
from spark_group_source.options.table import EARLIEST_OFFSET

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

WORDS: Mapping[str, Destination] = {"earliest": EARLIEST, "latest": LATEST, "ledger": "ledger"}


def describe(
    group: str,
    bootstrap_servers: str,
    *,
    table: str | None = None,
    spark: "SparkSession | None" = None,
    options: Mapping[str, str] | None = None,
) -> GroupReport:
    """The members, offsets and lag of a group, like ``spark-group describe``; a notebook shows the value as tables.

    Args:
        table: a Delta table, by path or name; its ledger is included.
        spark: the session that reads it; by default the active one.
        options: security settings, with the names of the source's options: ``kafka.security.protocol`` ….

    Raises:
        OptionError: an option is invalid, or there is no session for ``table``.
        GroupError: the group does not exist, neither in Kafka nor in the ledger nor among the runs of this host.
        BrokerUnavailable, AccessDenied: the cluster did not answer, or refused.
    """
    ledger = None
    if table is not None:
        from spark_group_source.delta.table_writer import open_existing

        history = open_existing(_session(spark), table).history()
        ledger = report.ledgers_in(history, [group], log.warning).get(group, {})
    with common.admin_of(bootstrap_servers, group, options=options) as admin:
        described = report.read_group(admin, group, ledger)
        if described is None:
            raise report.missing_group(admin, group)
        return described


def reset(
    group: str,
    bootstrap_servers: str,
    *,
    to: "str | int | datetime | Mapping[str, Mapping[int, int]]",
    topics: str | Iterable[str] = (),
    table: str | None = None,
    spark: "SparkSession | None" = None,
    options: Mapping[str, str] | None = None,
    execute: bool = False,
) -> GroupReset:
    """Move a stopped group's offsets, like ``spark-group reset``. Nothing is changed unless ``execute`` is true.

    Args:
        to: "earliest", "latest", "ledger" (of ``table``), an offset, a time with a time zone, or an offset for
            each partition, as ``{"orders": {0: 23, 1: -1}}``, where -1 is latest and -2 earliest.
        topics: only these, or this one; by default all partitions that the group ever committed.
        table: a Delta table whose ledger is moved too, so that the next batch is not refused.
        spark, options: as of :func:`describe`.

    Raises:
        OptionError: there is nothing to move, a partition of ``to`` does not exist, or an argument is invalid.
        GroupError: the group has members; stop them first.
        CommitFailed: Kafka refused.
    """
    if to == "ledger" and table is None:
        raise OptionError("to='ledger' needs table=, the Delta table with the ledger")
    destination = _destination(to)
    scope: Scope = dict.fromkeys([topics] if isinstance(topics, str) else topics, frozenset())
    session = _session(spark) if table is not None else None
    with common.admin_of(bootstrap_servers, group, options=options) as admin:
        return move(admin, group, destination, scope, spark=session, table=table, execute=execute)


def _destination(to: Any) -> Destination:
    if isinstance(to, Mapping):
        try:
            offsets = {TopicPartition(topic, int(p)): at for topic, each in to.items() for p, at in each.items()}
        except (AttributeError, ValueError):
            raise OptionError(f'to={to!r} must have partitions and offsets by topic: {{"orders": {{0: 23}}}}') from None
        for tp, at in offsets.items():
            if type(at) is not int or at < EARLIEST_OFFSET:  # -1001 is the client library's "no offset"
                raise OptionError(f"to has {at!r} for {tp}; it must be an offset, or -1 for latest, or -2 for earliest")
        return Offsets(offsets)
    if isinstance(to, datetime):
        if to.tzinfo is None:
            raise OptionError(f"to={to!r} has no time zone; add one, such as datetime.UTC")
        return StartAt("time", ms_of(to, f"to={to!r}"))
    if type(to) is int and to >= 0:
        return StartAt("offset", to)
    if to not in WORDS:
        raise OptionError(
            f"to={to!r} must be 'earliest', 'latest', 'ledger', an offset, a time, or offsets by partition"
        )
    return WORDS[to]


def _session(given: "SparkSession | None") -> "SparkSession":
    from pyspark.sql import SparkSession

    found = given or SparkSession.getActiveSession()
    if found is None:
        raise OptionError("table= needs a Spark session that can read Delta tables; pass spark=")
    return found
