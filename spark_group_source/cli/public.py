"""``describe()`` and ``reset()`` for notebooks and programs: what ``spark-group`` does, as values.

Runs in: the user's driver. Deliberately absent: how it is done (``report``, ``reset``), and any session of our own:
where a table is meant, the caller's is used.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from spark_group_source.cli import report, shared
from spark_group_source.cli import reset as resetting
from spark_group_source.cli.report import GroupReport
from spark_group_source.cli.reset import GroupReset, Offsets, To
from spark_group_source.errors import OptionError
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORDS = {"earliest": EARLIEST, "latest": LATEST}


def describe(
    group: str,
    bootstrap_servers: str,
    *,
    table: str | None = None,
    spark: "SparkSession | None" = None,
    options: Mapping[str, str] | None = None,
) -> GroupReport:
    """Who is in a group and where it stands: what ``spark-group describe`` shows, as a value that a notebook shows as
    tables.

    Args:
        table: a Delta table, by path or name: its ledger too.
        spark: the session that reads it; by default the active one.
        options: what the cluster asks for, with the names of the source's options: ``kafka.security.protocol`` ….

    Raises:
        OptionError: an option cannot work, or there is no session for ``table``.
        BrokerUnavailable, AccessDenied: the cluster did not answer, or refused.
    """
    ledger = None
    if table is not None:
        from spark_group_source.delta.ledger_store import read_ledger

        found = read_ledger(_session(spark), table, group)
        ledger = {} if found is None else found.offsets
    return report.describe(shared.admin_of(bootstrap_servers, group, options=options), group, ledger)


def reset(
    group: str,
    bootstrap_servers: str,
    *,
    to: "str | int | datetime | Mapping[str, Mapping[int, int]]",
    topics: Iterable[str] = (),
    table: str | None = None,
    spark: "SparkSession | None" = None,
    options: Mapping[str, str] | None = None,
    execute: bool = False,
) -> GroupReset:
    """Move a stopped group: what ``spark-group reset`` does. Nothing is changed unless ``execute`` is true.

    Args:
        to: "earliest", "latest", "ledger" (what ``table`` holds), an offset, a time with its zone, or an offset for
            each partition, as ``{"orders": {0: 23, 1: -1}}``, where -1 is latest and -2 earliest.
        topics: only these; by default all partitions that the group ever committed.
        table: a Delta table whose ledger moves along, so that nothing is refused later.
        spark, options: as of :func:`describe`.

    Raises:
        OptionError: there is nothing to move, a partition of ``to`` does not exist, or an argument cannot work.
        GroupError: the group has members; stop them first.
        CommitFailed: Kafka refused.
    """
    admin = shared.admin_of(bootstrap_servers, group, options=options)
    place = Offsets(_ledger(group, table, spark), written=False) if to == "ledger" else _place(to)
    targets = resetting.find(admin, group, place, dict.fromkeys(topics, frozenset()))
    session = _session(spark) if table is not None and execute else None
    return resetting.reset(admin, group, targets, spark=session, table=table, execute=execute)


def _ledger(group: str, table: str | None, spark: "SparkSession | None") -> Mapping[TopicPartition, int]:
    if table is None:
        raise OptionError("to='ledger' needs table: the Delta table whose ledger is meant")
    from spark_group_source.delta.ledger_store import require_ledger

    return require_ledger(_session(spark), table, group).offsets


def _place(to: Any) -> To:
    if isinstance(to, Mapping):
        return Offsets({TopicPartition(topic, int(p)): at for topic, each in to.items() for p, at in each.items()})
    if isinstance(to, datetime):
        if to.tzinfo is None:
            raise OptionError(f"to={to!r} has no zone; add one, such as datetime.UTC")
        return StartAt("time", int(to.timestamp() * 1000))
    if isinstance(to, int) and to >= 0:
        return StartAt("offset", to)
    if to not in WORDS:
        raise OptionError(f"to={to!r}: give 'earliest', 'latest', 'ledger', an offset, a time, or offsets by partition")
    return WORDS[to]


def _session(given: "SparkSession | None") -> "SparkSession":
    from pyspark.sql import SparkSession

    found = given or SparkSession.getActiveSession()
    if found is None:
        raise OptionError("table needs a Spark session that can read Delta tables: give spark=")
    return found
