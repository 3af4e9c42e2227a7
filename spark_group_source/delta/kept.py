"""Reading and setting the ledgers that a table keeps.

Runs in: the user's driver, the command line. Deliberately absent: what a ledger means (:mod:`ledger`), Kafka.
"""

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from spark_group_source.delta import deltalog
from spark_group_source.delta.ledger import DOMAIN_PREFIX, VERSION, Ledger, LedgerDamaged
from spark_group_source.errors import OptionError
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def read_ledger(spark: "SparkSession", table: str, group: str) -> Ledger | None:
    """The ledger of one group in a table (a path or a table name), or None if the group never wrote there.

    Raises:
        OptionError: there is no such Delta table, or this session has no Delta classes (Spark Connect).
        LedgerConflict: the ledger is damaged or of a newer release.
    """
    return in_snapshot(deltalog.open_table(spark, table).snapshot(), group)


def ledgers(spark: "SparkSession", table: str) -> list[Ledger]:
    """The ledgers of all groups that ever wrote to a table, sorted by group. Errors as in :func:`read_ledger`."""
    snapshot = deltalog.open_table(spark, table).snapshot()
    groups = sorted(d.removeprefix(DOMAIN_PREFIX) for d in snapshot.domains() if d.startswith(DOMAIN_PREFIX))
    return [found for found in (in_snapshot(snapshot, group) for group in groups) if found is not None]


def set_ledger(
    spark: "SparkSession",
    table: str,
    group: str,
    offsets: Mapping[TopicPartition, int | None],
    *,
    reason: str,
    topic_ids: Mapping[str, str] | None = None,
    epoch: int | None = None,
) -> Ledger:
    """Put the ledger of a group where an operator wants it, in one Delta commit that holds nothing else.

    Unlike a batch this may move it backwards, so only a stopped group's ledger should be set. A damaged ledger is
    written anew and then holds nothing but what is given here.

    Args:
        offsets: the next offset of each partition to set, or None to forget the partition; others stay as they are.
        reason: who asked for it and why; kept in the commit's ``userMetadata``.
        topic_ids: the topics' ids, where known; they are needed only for topics that the ledger has not seen.
        epoch: number of the reset that this is a part of: batches of before it are void from now on. None: it is part
            of no reset, and nothing becomes void.

    Raises:
        OptionError: there is no such Delta table, or this session has no Delta classes (Spark Connect); or the table
            knows of a newer reset.
        LedgerConflict: the ledger is of a newer release, or other writers won every one of the bounded attempts.
    """
    handle = deltalog.open_table(spark, table)
    handle.ensure_domains()

    def attempt() -> Ledger:
        txn = handle.begin()
        old = _readable(txn.snapshot, group) or Ledger(group=group)
        now = old.epoch if epoch is None else epoch
        if now < old.epoch:
            raise OptionError(
                f"table {table} knows of reset {old.epoch} of group {group!r} already, so reset {now} comes too late. "
                "Nothing was written; run the reset again",
                table=table,
                group=group,
            )
        kept = {**old.offsets, **{tp: n for tp, n in offsets.items() if n is not None}}
        new = Ledger(
            group=group,
            offsets={tp: n for tp, n in kept.items() if offsets.get(tp, n) is not None},
            topic_ids={**old.topic_ids, **(topic_ids or {})},
            epoch=now,
            void=old.void if now == old.epoch else {},
        )
        text = new.to_json()
        note = {"group": group, "ledger": json.loads(text), "reason": reason, "v": VERSION}
        version = txn.commit_domains({DOMAIN_PREFIX + group: text}, user_metadata=json.dumps(note, sort_keys=True))
        return Ledger.from_json(group, text, table_version=version)

    return deltalog.retry_races(attempt, what=f"setting the ledger of group {group!r} in table {table}")


def in_snapshot(snapshot: deltalog.Snapshot, group: str) -> Ledger | None:
    """The ledger of a group in a version of the table, or None. Errors as in :func:`read_ledger`."""
    text = snapshot.domains().get(DOMAIN_PREFIX + group)
    return None if text is None else Ledger.from_json(group, text, table_version=snapshot.version)


def _readable(snapshot: deltalog.Snapshot, group: str) -> Ledger | None:
    try:
        return in_snapshot(snapshot, group)
    except LedgerDamaged as exc:
        log.warning("it is replaced: %s", exc)
        return None
