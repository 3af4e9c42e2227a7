"""Moving a group on purpose: Kafka's committed offsets, and with a table its ledger, to the same place.

Runs in: a terminal. Deliberately absent: printing, and the Spark session (the caller passes one where a ledger is to be
moved too).
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from spark_group_source.errors import GroupError, OptionError
from spark_group_source.kafka import Admin
from spark_group_source.model import StartAt, TopicPartition
from spark_group_source.options.starting import EARLIEST_OFFSET, LATEST_OFFSET

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ACTIVE = frozenset({"stable", "preparing_rebalancing", "completing_rebalancing", "assigning", "reconciling"})
"""States in which Kafka refuses to move a group's offsets, because its members go on from where they are."""


def partitions_of(admin: Admin, group: str, topics: Iterable[str]) -> list[TopicPartition]:
    """The partitions to move: those of the named topics, or all that the group ever committed."""
    names = list(topics)
    if not names:
        return sorted(admin.committed(group))
    return [TopicPartition(name, p) for name, topic in admin.require(names).items() for p in range(topic.partitions)]


def targets(admin: Admin, tps: Iterable[TopicPartition], to: StartAt) -> dict[TopicPartition, int]:
    """Where a word, an offset or a time means for each partition. Partitions that are gone are left out."""
    tps = list(tps)
    if to.kind == "time":
        found = admin.at_time(dict.fromkeys(tps, to.value))
        end = admin.latest(tp for tp, at in found.items() if at is None)
        return {tp: end[tp] if at is None else at for tp, at in found.items()}
    number = {"earliest": EARLIEST_OFFSET, "latest": LATEST_OFFSET}.get(to.kind, to.value)
    return named_targets(admin, dict.fromkeys(tps, number))


def named_targets(admin: Admin, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """The same for an offset each (-1 latest, -2 earliest); one that is outside the log becomes its nearest end."""
    first, end = admin.earliest(offsets), admin.latest(offsets)
    words = {EARLIEST_OFFSET: first, LATEST_OFFSET: end}
    return {
        tp: words[at][tp] if at in words else min(max(at, first[tp]), end[tp])
        for tp, at in offsets.items()
        if tp in first and tp in end
    }


def move(
    admin: Admin, group: str, offsets: Mapping[TopicPartition, int], *, spark: "SparkSession | None", table: str | None
) -> None:
    """Commit the offsets for the group and then, with a table, set its ledger to them. Kafka goes first: it refuses
    while the group is active, and a ledger that did not follow makes the next batch stop and say so.

    Raises:
        GroupError: the group has members; stop them first.
        OptionError: there is nothing to move.
    """
    if not offsets:
        raise OptionError(f"group {group!r} has no offsets to move; name the topics with --topic")
    described = admin.group(group)
    if described.members or described.state in ACTIVE:
        raise GroupError(
            f"group {group!r} is {described.state} with {len(described.members)} members: Kafka moves offsets only of "
            "an inactive group. Stop its queries and consumers, and wait for their session timeout",
            group=group,
        )
    admin.move_committed(group, offsets)
    if spark is not None and table is not None:
        from spark_group_source.delta import ledger

        ledger.set_ledger(spark, table, group, offsets, reason="spark-group reset")
