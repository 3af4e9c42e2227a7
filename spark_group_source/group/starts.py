"""Where partitions without a committed offset start: the question to the broker, and what its answers mean.

Runs in: the stream reader, tests. Deliberately absent: asking, and which partitions have no committed offset
(``machine``).
"""

from collections.abc import Iterable, Mapping, Sequence

from spark_group_source.errors import DataLoss, OptionError
from spark_group_source.group.rules import Rules, Starting
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition

NAMED_MAX = 10
"""Partitions that an error names."""

Known = Mapping[str, int]


def is_new(tp: TopicPartition, known: Known) -> bool:
    """Whether the partition was added after the stream began: else its first records would be skipped by ``latest``."""
    return tp.partition >= known.get(tp.topic, 0)


def words(tps: Iterable[TopicPartition], known: Known, starting: Starting) -> dict[TopicPartition, StartAt]:
    """Where to start: by the starting options, or at the beginning for a new partition."""
    return {tp: EARLIEST if is_new(tp, known) else starting.of(tp) for tp in tps}


def at_the_end(tps: Iterable[TopicPartition]) -> dict[TopicPartition, StartAt]:
    return dict.fromkeys(tps, LATEST)


def too_young(tps: Sequence[TopicPartition], rules: Rules) -> OptionError | None:
    """What ``startingOffsetsByTimestampStrategy`` says of partitions without a record that is young enough."""
    if rules.starting.no_match == "latest":
        return None
    return OptionError(
        f"no record of {', '.join(map(str, tps[:NAMED_MAX]))} is as young as the starting timestamp "
        f"{rules.starting.of(tps[0]).value} (milliseconds since the epoch). Give an earlier one, or set "
        "startingOffsetsByTimestampStrategy to latest to start these at their end",
        partitions=[str(tp) for tp in tps],
    )


def first_records_gone(tp: TopicPartition, first: int, rules: Rules) -> DataLoss | None:
    """What to say of a new partition that does not begin at 0: its first records went before anyone read them."""
    if not rules.fail_on_data_loss:
        return None
    return DataLoss(
        f"new partition {tp} begins at {first}, not at 0. Set failOnDataLoss to false to go on with the records that "
        "are left",
        topic=tp.topic,
        partition=tp.partition,
        expected=0,
        available=first,
    )
