"""A model of Kafka for commands that move a group's offsets.

Runs in: tests. Deliberately absent: a broker, records, and more than one topic.
"""

from collections.abc import Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from spark_group_source.kafka.translation import CommittedOffset, Topic
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import Note, note_text, parse_note

P0 = TopicPartition("orders", 0)
SERVERS = "broker-1:9092,broker-2:9092"
END = 1000
"""The end of each partition."""


class OffsetModel:
    """The committed offsets of one stopped group and its topic, as ``spark-group reset`` reads and moves them."""

    def __init__(self, group: str = "etl", topic: str = "orders", partitions: int = 1) -> None:
        self.connection = ("--bootstrap-servers", SERVERS)
        self.offsets: dict[TopicPartition, CommittedOffset] = {}
        self.topic_id, self.group, self.topic = "id-1", group, topic
        self.partitions = [TopicPartition(topic, p) for p in range(partitions)]
        self.end = END
        self.settings: dict[str, str] = {}
        """The settings with which the last command connects."""

    def commit(self, at: int, *, foreign: bool = False) -> None:
        self.offsets[P0] = CommittedOffset(at, "" if foreign else note_text(Note("s1", 0)))

    @property
    def position(self) -> int:
        return self.offsets[P0].offset

    @property
    def resets(self) -> int:
        return parse_note(self.offsets[P0].metadata).reset_number

    def committed(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        assert group == self.group
        return self.offsets

    def describe_group(self, group: str) -> Any:
        return SimpleNamespace(state="empty", members=())

    def existing_topics(self, names: Iterable[str]) -> dict[str, Topic]:
        return {name: Topic(self.topic_id, len(self.partitions)) for name in names if name == self.topic}

    require_topics = existing_topics

    def earliest(self, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 0)

    def offsets_at_time(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """It has no times, and the commands of refusals use none."""
        assert not times
        return {}

    def latest(self, tps: Collection[TopicPartition], *, committed: bool = True) -> dict[TopicPartition, int]:
        del committed  # no transaction is open
        return dict.fromkeys(tps, self.end)

    def recreate(self, id_: str, end: int) -> None:
        """Delete the topic, with the group's offsets of it, and create it again."""
        self.offsets, self.topic_id, self.end = {}, id_, end

    def move_committed(
        self, group: str, offsets: Mapping[TopicPartition, int], *, notes: Mapping[TopicPartition, str]
    ) -> None:
        self.offsets |= {tp: CommittedOffset(at, notes[tp]) for tp, at in offsets.items()}
