"""Kafka's group coordinator, as far as members and committing processes can see it: the part that all protocols share.

Runs in: tests. The protocols are in ``classic_group`` and ``consumer_group``. Modelled: committed offsets with their
metadata, offsets that a transaction has sent but not finished (a plain read shows the old ones), fencing by
transactional id, sessions. Deliberately absent: logs of records (``invariants`` knows what was produced), topics that
are deleted, brokers of their own.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from spark_group_source.model import TopicPartition
from spark_group_source.testing.world import World

SESSION_MS = 8_000
REBALANCE_MS = 15_000
"""max.poll.interval.ms of every member: how long the group waits for one that does not give back or join."""
MARKER_MS_MAX = 60
"""From "the transaction is committed" until a plain read shows it."""


class Code(Enum):
    """What the broker answers."""

    OK = "ok"
    REBALANCE = "REBALANCE_IN_PROGRESS"
    UNKNOWN_MEMBER = "UNKNOWN_MEMBER_ID"
    ILLEGAL_GENERATION = "ILLEGAL_GENERATION"
    FENCED_INSTANCE = "FENCED_INSTANCE_ID"
    UNRELEASED = "UNRELEASED_INSTANCE_ID"
    FENCED_EPOCH = "FENCED_MEMBER_EPOCH"
    FENCED_PRODUCER = "INVALID_PRODUCER_EPOCH"


class Entry(NamedTuple):
    """A committed offset. ``by`` is who wrote it, ``order`` its place in the log, ``stream`` from its metadata."""

    offset: int
    stream: str | None
    by: str
    order: int


class CommitListener(Protocol):
    """Who wants to know of each commit that takes effect."""

    def committed(self, tp: TopicPartition, old: Entry | None, new: Entry) -> None: ...


@dataclass(slots=True)
class Member:
    """What the coordinator knows of one member; fields of both protocols."""

    id: str
    instance: str | None
    process: str
    joined_order: int
    seen_ms: int = 0
    assigned: set[TopicPartition] = field(default_factory=set)
    # classic
    owned: set[TopicPartition] = field(default_factory=set)
    generation: int = -1
    join_reply: Callable[["Answer"], None] | None = None
    sync_reply: Callable[["Answer"], None] | None = None
    # KIP-848
    epoch: int = 0
    revoking: set[TopicPartition] = field(default_factory=set)
    revoking_since_ms: int | None = None


class Answer(NamedTuple):
    """Of a join, sync or heartbeat."""

    code: Code
    member: str = ""
    generation: int = -1
    leader: bool = False
    assignment: frozenset[TopicPartition] | None = None


class Group:
    """Offsets and members of one group. Subclasses are the protocols."""

    incremental = True

    def __init__(self, world: World, topics: Mapping[str, int], listener: CommitListener) -> None:
        self.world = world
        self.topics = dict(topics)
        self.members: dict[str, Member] = {}
        self.offsets: dict[TopicPartition, Entry] = {}
        self.rebalances = 0
        self._listener = listener
        self._pending: list[dict[TopicPartition, Entry]] = []
        self._producers: dict[str, int] = {}
        self._order = 0
        self._joined = 0
        self._check_sessions()

    # --- topics -----------------------------------------------------------------------------------------------------

    def partitions(self) -> list[TopicPartition]:
        return [TopicPartition(topic, p) for topic, count in sorted(self.topics.items()) for p in range(count)]

    def grow(self, topic: str) -> TopicPartition:
        """Add a partition; members find it when they refresh their metadata."""
        self.topics[topic] += 1
        self.on_topics_changed()
        return TopicPartition(topic, self.topics[topic] - 1)

    # --- offsets ----------------------------------------------------------------------------------------------------

    def read(
        self,
        tps: Iterable[TopicPartition],
        stable: bool,
        reply: Callable[[dict[TopicPartition, Entry | None]], None],
    ) -> None:
        """Committed offsets; a stable read waits for transactions that are being finished."""
        asked = list(tps)
        if stable and any(tp in sent for sent in self._pending for tp in asked):
            self.world.at(10, lambda: self.read(asked, stable, reply))
        else:
            reply({tp: self.offsets.get(tp) for tp in asked})

    def init_producer(self, transactional_id: str) -> int:
        """A newer process takes the id: the epoch that all older ones have is refused from now on."""
        self._producers[transactional_id] = self._producers.get(transactional_id, 0) + 1
        return self._producers[transactional_id]

    def commit_transaction(
        self,
        transactional_id: str,
        epoch: int,
        offsets: Mapping[TopicPartition, int],
        members: Iterable[tuple[str, int]],
        entry: Entry,
    ) -> Code:
        """Commit for members of the present generation: accepted in every state of the group."""
        if self._producers.get(transactional_id) != epoch:
            return Code.FENCED_PRODUCER
        for member, generation in members:
            if (code := self.check_commit(member, generation)) not in (Code.OK, Code.REBALANCE):
                return code
        self._order += 1
        sent = {tp: entry._replace(offset=offset, order=self._order) for tp, offset in offsets.items()}
        self._pending.append(sent)
        self.world.at(self.world.between(0, MARKER_MS_MAX), lambda: self._finish(sent))
        return Code.OK

    def commit_as_member(
        self, member: str, generation: int, offsets: Mapping[TopicPartition, int], entry: Entry
    ) -> Code:
        """Commit as a member: any partition, if the member is one of the present generation."""
        code = self.check_commit(member, generation)
        if code is Code.OK:
            self.members[member].seen_ms = self.world.now_ms
            self._order += 1
            for tp, offset in offsets.items():
                self._store(tp, entry._replace(offset=offset, order=self._order))
        return code

    def _finish(self, sent: dict[TopicPartition, Entry]) -> None:
        self._pending.remove(sent)
        for tp, entry in sent.items():
            self._store(tp, entry)

    def _store(self, tp: TopicPartition, entry: Entry) -> None:
        old = self.offsets.get(tp)
        if old is None or entry.order > old.order:  # the place in the log decides, not when the marker came
            self.offsets[tp] = entry
            self._listener.committed(tp, old, entry)

    # --- members ----------------------------------------------------------------------------------------------------

    def check_commit(self, member: str, generation: int) -> Code:
        raise NotImplementedError

    def on_topics_changed(self) -> None:
        raise NotImplementedError

    def on_member_gone(self, member: Member) -> None:
        raise NotImplementedError

    def alive(self, member: Member) -> bool:
        """Whether the member's session is not judged now."""
        raise NotImplementedError

    def static(self, instance: str | None) -> Member | None:
        return next((m for m in self.members.values() if instance is not None and m.instance == instance), None)

    def new_member(self, id_: str, instance: str | None, process: str) -> Member:
        self._joined += 1
        member = Member(id_, instance, process, self._joined, seen_ms=self.world.now_ms)
        self.members[id_] = member
        return member

    def remove(self, member: Member, why: str) -> None:
        self.world.note(f"group: {member.id} is out ({why})")
        del self.members[member.id]
        self.on_member_gone(member)

    def _check_sessions(self) -> None:
        now = self.world.now_ms
        if now < self.world.down_until_ms:
            for member in self.members.values():  # a new coordinator starts every session anew
                member.seen_ms = now
        for member in list(self.members.values()):
            if member.id in self.members and not self.alive(member) and now - member.seen_ms > SESSION_MS:
                self.remove(member, "its session ended")
        self.world.at(250, self._check_sessions)


def balanced(
    members: list[Member], owned: Mapping[str, set[TopicPartition]], partitions: list[TopicPartition]
) -> dict[str, set[TopicPartition]]:
    """A sticky assignment: equal numbers, and what is owned stays where that allows it."""
    target: dict[str, set[TopicPartition]] = {member.id: set() for member in members}
    if not members:
        return target
    ranked = sorted(members, key=lambda m: (-len(owned[m.id]), m.joined_order))
    least, extra = divmod(len(partitions), len(ranked))
    quota = {member.id: least + (rank < extra) for rank, member in enumerate(ranked)}
    left = []
    for tp in partitions:
        keeper = next((m.id for m in ranked if tp in owned[m.id] and len(target[m.id]) < quota[m.id]), None)
        if keeper is None:
            left.append(tp)
        else:
            target[keeper].add(tp)
    for tp in left:
        taker = min(ranked, key=lambda m: (len(target[m.id]) - quota[m.id], m.joined_order))
        target[taker.id].add(tp)
    return target
