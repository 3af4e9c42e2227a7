"""Moving a group on purpose: Kafka's committed offsets, and with a table its ledger, to the same place.

Runs in: a terminal. Deliberately absent: printing, and the Spark session (the caller passes one where a ledger is to be
moved too).
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from spark_group_source.errors import GroupError, OptionError
from spark_group_source.kafka import Admin
from spark_group_source.model import TopicPartition
from spark_group_source.starting import LATEST_OFFSET, StartAt, start_at

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
    """Where a word or a number means for each partition; an offset outside the log becomes its nearest end."""
    tps = list(tps)
    first, end = admin.earliest(tps), admin.latest(tps)
    if to.kind == "earliest":
        return first
    if to.kind == "latest":
        return end
    if to.kind == "time":
        return {tp: end[tp] if at is None else at for tp, at in admin.at_time(dict.fromkeys(tps, to.value)).items()}
    return {tp: min(max(to.value, first[tp]), end[tp]) for tp in first}


def named_targets(admin: Admin, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """The same for a JSON that names each partition (-1 latest, -2 earliest)."""
    return {
        tp: found[tp]
        for tp, offset in offsets.items()
        if (found := targets(admin, [tp], start_at(max(offset, LATEST_OFFSET - 1))))
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
        from spark_group_source import ledger

        ledger.set_ledger(spark, table, group, offsets, reason="spark-group reset")
