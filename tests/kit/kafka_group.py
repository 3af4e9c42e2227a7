"""Kafka's group coordinator as members and committing processes see it: the part that all protocols share.

Runs in: tests. The protocols are in ``classic_group`` and ``consumer_group``. Modelled: committed offsets with their
notes, offsets that a transaction has sent but not finished (a plain read returns the old ones), sessions,
subscriptions. Deliberately absent: logs of records and topics (``cluster``), transactional ids (``transactions``),
individual brokers, racks.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kit.world import World
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from kit.kafka_client import Client

SESSION_MS = 8_000
"""session.timeout.ms of each member."""
REBALANCE_MS = 15_000
"""max.poll.interval.ms of each member: how long the group waits until it revokes or joins."""
SESSION_CHECK_MS = 250
SIZE_MAX = 2**31 - 1
"""The limit of a group's members where the broker has none."""
STABLE_CHECK_MS = 10


class Code(Enum):
    """The broker's error codes, with Kafka's numbers."""

    UNKNOWN_SERVER = -1
    OK = 0
    UNKNOWN_TOPIC = 3
    ILLEGAL_GENERATION = 22
    UNKNOWN_MEMBER = 25
    REBALANCE = 27
    FENCED_PRODUCER = 47
    INVALID_TXN_STATE = 48
    UNKNOWN_PRODUCER = 49
    CONCURRENT = 51
    GROUP_FULL = 81
    FENCED_INSTANCE = 82
    FENCED_EPOCH = 110
    UNRELEASED = 111
    STALE_EPOCH = 113


class Entry(NamedTuple):
    """A committed offset. ``by``: the process that wrote it; ``order``: its position in the log; ``stream``: from its
    note."""

    offset: int
    stream: str | None
    by: str
    order: int
    note: str = ""
    leader_epoch: int | None = None


class Books:
    """Receives the events of the group. This class ignores them; ``invariants`` checks its rules with them."""

    def committed(self, tp: TopicPartition, old: Entry | None, new: Entry) -> None: ...
    def joins(self, client: "Client", *, answered: bool) -> None: ...
    def assigned(self, tps: frozenset[TopicPartition], client: "Client") -> None: ...
    def released(self, tps: frozenset[TopicPartition], client: "Client") -> None: ...
    def lost(self, tps: frozenset[TopicPartition], client: "Client") -> None: ...


@dataclass(slots=True)
class Member:
    """The coordinator's state of one member; fields of both protocols."""

    id: str
    instance: str | None
    client_id: str
    joined_order: int
    topics: frozenset[str] = frozenset()
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
    taken: bool = False
    """Joined by a member of the classic protocol, which takes over an instance id."""


class Answer(NamedTuple):
    """The response to a join, sync or heartbeat."""

    code: Code
    member: str = ""
    generation: int = -1
    leader: bool = False
    assignment: frozenset[TopicPartition] | None = None


class Group:
    """Offsets and members of one group. Subclasses are the protocols.

    Args:
        topics: partitions of each topic, as the coordinator knows them.
        books: receives each commit.
    """

    incremental = True
    protocol = "classic"
    size_max = SIZE_MAX  # group.max.size, group.consumer.max.size
    refusals = 0  # of members, because of it

    def __init__(self, world: World, topics: Mapping[str, int], books: Books) -> None:
        self.world = world
        self.topics = dict(topics)
        self.members: dict[str, Member] = {}
        self.offsets: dict[TopicPartition, Entry] = {}
        self.rebalances = 0
        self.session_ms, self.rebalance_ms = SESSION_MS, REBALANCE_MS
        self._books = books
        self._pending: dict[str, dict[TopicPartition, Entry]] = {}  # by transactional id
        self._order = 0
        self._joined = 0
        self._check_sessions()

    # --- topics -----------------------------------------------------------------------------------------------------

    def partitions(self) -> list[TopicPartition]:
        """All partitions that a member subscribes to."""
        wanted = {topic for member in self.members.values() for topic in member.topics}
        counts = sorted((topic, count) for topic, count in self.topics.items() if topic in wanted)
        return [TopicPartition(topic, p) for topic, count in counts for p in range(count)]

    def unowned(self) -> set[TopicPartition]:
        """Partitions that a member subscribes to and that have no owner."""
        return set(self.partitions()) - {tp for member in self.members.values() for tp in member.assigned}

    def set_topics(self, topics: Mapping[str, int]) -> None:
        """Update the coordinator's topics and their numbers of partitions."""
        if topics != self.topics:
            self.topics = dict(topics)
            self.on_topics_changed()

    def forget(self, tps: Collection[TopicPartition]) -> None:
        """Partitions were deleted, and their offsets with them."""
        for found in (self.offsets, *self._pending.values()):
            for tp in found.keys() & set(tps):
                del found[tp]

    # --- offsets ----------------------------------------------------------------------------------------------------

    def read(
        self,
        tps: Iterable[TopicPartition],
        stable: bool,
        reply: Callable[[dict[TopicPartition, Entry | None]], None],
    ) -> None:
        """Read committed offsets; a stable read waits for unfinished transactions."""
        requested = list(tps)
        if stable and any(tp in sent for sent in self._pending.values() for tp in requested):
            self.world.at(STABLE_CHECK_MS, lambda: self.read(requested, stable, reply))
        else:
            reply({tp: self.offsets.get(tp) for tp in requested})

    def commit(
        self, member: str, generation: int, entries: Mapping[TopicPartition, Entry], *, instance: str | None = None
    ) -> Code:
        """A plain commit: of any partition, by a member of the current generation, or by any client if there are no
        members."""
        code = self.check_commit(member, generation, instance, transactional=False)
        if code is Code.OK:
            if member in self.members:
                self.members[member].seen_ms = self.world.now_ms
            for tp, entry in self._ordered(entries).items():
                self._store(tp, entry)
        return code

    def send(
        self,
        transactional_id: str,
        member: str,
        generation: int,
        entries: Mapping[TopicPartition, Entry],
        *,
        instance: str | None = None,
    ) -> Code:
        """Offsets of an open transaction: they become visible when it is finished."""
        code = self.check_commit(member, generation, instance, transactional=True)
        if code is Code.OK:
            self._pending.setdefault(transactional_id, {}).update(self._ordered(entries))
        return code

    @property
    def unfinished(self) -> bool:
        """Whether stable reads wait for a transaction, possibly of a killed process."""
        return any(self._pending.values())

    def finish(self, transactional_id: str, *, commit: bool) -> None:
        """Write the transaction's marker."""
        sent = self._pending.pop(transactional_id, {})
        if commit:
            for tp, entry in sent.items():
                self._store(tp, entry)

    def _ordered(self, entries: Mapping[TopicPartition, Entry]) -> dict[TopicPartition, Entry]:
        self._order += 1
        return {tp: entry._replace(order=self._order) for tp, entry in entries.items()}

    def _store(self, tp: TopicPartition, entry: Entry) -> None:
        old = self.offsets.get(tp)
        if old is None or entry.order > old.order:  # the position in the log decides, not the time of the marker
            self.offsets[tp] = entry
            self._books.committed(tp, old, entry)

    # --- members ----------------------------------------------------------------------------------------------------

    def check_commit(self, member: str, generation: int, instance: str | None, *, transactional: bool) -> Code:
        """Check the committing member; the partitions are not checked."""
        if generation < 0 and not member and instance is None and (transactional or not self.members):
            return Code.OK
        holder = self.static(instance)
        if holder is not None and holder.id != member:
            return Code.FENCED_INSTANCE
        if member not in self.members:
            return Code.UNKNOWN_MEMBER
        return self.check_generation(self.members[member], generation, transactional=transactional)

    def check_generation(self, member: Member, generation: int, *, transactional: bool) -> Code:
        raise NotImplementedError

    def on_topics_changed(self) -> None:
        raise NotImplementedError

    def on_member_gone(self, member: Member) -> None:
        raise NotImplementedError

    def alive(self, member: Member) -> bool:
        """Whether the member's session timeout is suspended now."""
        raise NotImplementedError

    def describe(self) -> tuple[str, dict[str, frozenset[TopicPartition]]]:
        """Return Kafka's name of the state, in upper case, and the partitions by member id."""
        raise NotImplementedError

    def refuses(self, id_: str) -> bool:
        """Whether the group is full for a member that joins. Instance ids do not matter: a static member that returns
        is refused until the session of its former membership ends."""
        full = self.is_full(id_)
        self.refusals += full
        return full

    def is_full(self, id_: str) -> bool:
        return id_ not in self.members and len(self.members) >= self.size_max

    def static(self, instance: str | None) -> Member | None:
        return next((m for m in self.members.values() if instance is not None and m.instance == instance), None)

    def new_member(self, id_: str, instance: str | None, client_id: str) -> Member:
        self._joined += 1
        member = Member(id_, instance, client_id, self._joined, seen_ms=self.world.now_ms)
        self.members[id_] = member
        return member

    def remove(self, member: Member, why: str) -> None:
        self.world.note(f"group: {member.id} is out ({why})")
        del self.members[member.id]
        self.on_member_gone(member)

    def _check_sessions(self) -> None:
        now = self.world.now_ms
        if now < self.world.down_until_ms:
            for member in self.members.values():  # a new coordinator restarts all sessions
                member.seen_ms = now
        for member in list(self.members.values()):
            if member.id in self.members and not self.alive(member) and now - member.seen_ms > self.session_ms:
                self.remove(member, "its session ended")
        self.world.at(SESSION_CHECK_MS, self._check_sessions)


def balanced(
    members: list[Member], owned: Mapping[str, set[TopicPartition]], partitions: list[TopicPartition]
) -> dict[str, set[TopicPartition]]:
    """A sticky assignment: equal numbers, and owned partitions stay where possible. A partition is assigned only to a
    member that subscribes to its topic, or to none."""
    target: dict[str, set[TopicPartition]] = {member.id: set() for member in members}
    if not members:
        return target
    ranked = sorted(members, key=lambda m: (-len(owned[m.id]), m.joined_order))
    least, extra = divmod(len(partitions), len(ranked))
    quota = {member.id: least + (rank < extra) for rank, member in enumerate(ranked)}
    left = []
    for tp in partitions:
        keepers = [m.id for m in ranked if tp in owned[m.id] and tp.topic in m.topics]
        keeper = next((id_ for id_ in keepers if len(target[id_]) < quota[id_]), None)
        if keeper is None:
            left.append(tp)
        else:
            target[keeper].add(tp)
    for tp in left:
        takers = [m for m in ranked if tp.topic in m.topics]
        if takers:
            taker = min(takers, key=lambda m: (len(target[m.id]) - quota[m.id], m.joined_order))
            target[taker.id].add(tp)
    return target
