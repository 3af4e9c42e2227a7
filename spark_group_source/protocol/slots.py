"""The slots of a run: the member of each, its partitions, the revocation that it holds, and whether it was replaced.

Runs in: the stream reader (inside ``run``), tests. Deliberately absent: changes of positions and batches
(``partitions``), the choice of a member's agent (``placement``), orders of commits (``run``). From the position of a
partition, the batch in flight and the commit on its way, :meth:`Slots.must_hold` decides whether a revocation is held.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar, assert_never

from spark_group_source.error_codes import Suspicions
from spark_group_source.errors import Fenced, RebalanceTimeout, SourceError
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.protocol.data_loss import GRACE_MS
from spark_group_source.protocol.outbox import Outbox
from spark_group_source.protocol.partitions import Known, Partitions, uncommitted_offset
from spark_group_source.protocol.request_schedule import CommitSchedule, pause_ms
from spark_group_source.protocol.rules import SLOTS_MAX, Rules
from spark_group_source.protocol.states import SLOTS, AnyCause, Cause, SlotState, require_change
from spark_group_source.protocol.statistics import Statistics

IN_READER = ""
"""In place of an agent's id: the member lives in the stream reader."""

CLOSE_MS_MAX = 3_000
"""How long a moving slot waits for its last member to close, before the next member joins anyway."""
LEAVE_MS_MAX = 5_000
"""How much longer, if it leaves the group: a member that joins before that gets its assignment."""
STEADY_MS = 10_000
"""How long a member must be in the group after its first assignment before its slot counts as recovered from earlier
failures. By then it has polled and sent heartbeats several times."""
FULL_PAUSE_MS = 300_000
"""How long a slot waits that the brokers refused because the group is full. In a rebalance they accept members in the
order in which they join: each attempt may cost a member of another application its place."""

CHECKING_BUDGETS = 1.5
"""A check whether a newer driver runs this stream may take this many joining budgets. After one, a consumer that
this run has closed has left the group."""
SHOWN_MAX = 10
"""How many topics an error or a log line lists."""

RECORD_BYTES_MAX = 1_048_588
"""Kafka's default of ``max.message.bytes``, for the topic in which it stores groups."""
NAMES_SHARE = 0.9
"""The share of it that topic names may take; the rest is for partition numbers and the ids and hosts of members."""
LENGTH_BYTES = 2
"""Before each name in the record of a group."""
PARTITIONS_BYTES = 4
"""The count of a topic's partitions, after its name in an assignment."""


@dataclass(slots=True)
class Membership:
    """The present member of a slot."""

    partitions: set[TopicPartition] = field(default_factory=set)
    """Its partitions, including revoked ones that are not released yet."""
    outdated: set[TopicPartition] = field(default_factory=set)
    """Partitions that it reported, and that another slot had got in a later generation."""
    assigned_since_ms: int | None = None
    """When it got its first assignment; None before that."""


# --- states ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClosedState:
    """The slot has no member."""

    kind: ClassVar = SlotState.CLOSED
    member: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class JoiningState:
    """The member waits for an assignment."""

    kind: ClassVar = SlotState.JOINING
    member: Membership


@dataclass(frozen=True, slots=True)
class AssignedState:
    """The member has an assignment, possibly an empty one."""

    kind: ClassVar = SlotState.ASSIGNED
    member: Membership


@dataclass(frozen=True, slots=True)
class RevokingState:
    """The member holds a revocation."""

    kind: ClassVar = SlotState.REVOKING
    member: Membership
    since_ms: int
    """Since when it is held; the budget of a hold counts from here."""
    is_eager: bool
    """Whether the member gives up everything and joins again."""
    partitions: set[TopicPartition]
    """The revoked partitions that are not released yet."""


@dataclass(frozen=True, slots=True)
class CheckingState:
    """Another client may have the instance id: the run checks whether a newer driver runs this stream."""

    kind: ClassVar = SlotState.CHECKING
    member: ClassVar[None] = None
    is_fenced: bool
    """Whether the broker reported that another client has the instance id; else that is only possible."""
    since_ms: int
    """Since when; the check has a bound of its own, so its time is not part of the joining budget."""


@dataclass(frozen=True, slots=True)
class MovingState:
    """The last member closes; then the next one joins from another place."""

    kind: ClassVar = SlotState.MOVING
    member: ClassVar[None] = None
    closing_on: str
    """Where the last member is closing."""


AnySlotState = ClosedState | JoiningState | AssignedState | RevokingState | CheckingState | MovingState


@dataclass(slots=True)
class Slot:
    """One member of this run after another: what outlives each of them, and the state of the present one."""

    number: int
    client: int = 0
    """The number of its consumers so far: events of an earlier consumer are ignored."""
    state: AnySlotState = ClosedState()
    generation: int = -1
    """Of its last assignment; -1 before the first."""
    failing_since_ms: int | None = None
    """Since when its members have failed to join or to stay in the group; None if they have not."""
    failures: int = 0
    """How often they failed since then."""
    failure: str = ""
    """Why the last one failed; empty if its last member has an assignment."""
    topics: tuple[str, ...] = ()
    """The topics that its member subscribes to, or the last one did."""
    is_rejoining: bool = False
    """Whether its members subscribe to the topics of the run before, until one has an assignment."""
    is_refused: bool = False
    """Whether the group was full when its last member joined: the run continues without the slot until it has a
    place."""
    may_be_alive: bool = False
    """Whether the broker may still see its last member, because that did not report that it closed."""
    agent: str = IN_READER
    """Where its member lives, or the next one will."""
    placed_since_ms: int = 0
    """Since when its members have lived there."""
    unassigned_since_ms: int | None = None
    """Since when it has had no assignment on its present agent; None if that does not count towards a recall."""
    moved_ms: int | None = None
    """When its last move started; None before the first."""
    missing: set[TopicPartition] = field(default_factory=set)
    """After a move: partitions that it had before, and has not got back."""
    recalls: int = 0
    """How often it was recalled from an agent."""
    buffered_bytes: int = 0
    """Size of what its agent has read ahead for it, by the last report."""
    buffered_rows: int = 0
    """The same in rows."""
    rows_from_memory: int = 0
    """Rows of its partitions that tasks got from an agent, by their reports."""
    rows_from_brokers: int = 0
    """Rows of its partitions that tasks got from brokers, by their reports."""

    @property
    def partitions(self) -> Set[TopicPartition]:
        """The partitions of its member; none without a member."""
        member = self.state.member
        return frozenset() if member is None else member.partitions

    def uses(self, agent: str) -> bool:
        """Whether its member lives on an agent, or the last one closes there, or the next one will live there."""
        return agent == self.agent or (isinstance(self.state, MovingState) and agent == self.state.closing_on)


class Slots:
    """All slots of one run.

    Args:
        agent_for: the agent for the next member of a slot.
        agent_name: the name of an agent for logs and client ids.
    """

    def __init__(
        self,
        rules: Rules,
        partitions: Partitions,
        commits: CommitSchedule,
        counts: Statistics,
        out: Outbox,
        *,
        agent_for: Callable[[Slot], str],
        agent_name: Callable[[str], str],
    ) -> None:
        self._rules, self._partitions, self._commits = rules, partitions, commits
        self._counts, self._out = counts, out
        self._agent_for, self._agent_name = agent_for, agent_name
        self._stream, self.static = "", True
        self._topics: tuple[str, ...] = ()
        self.missing_topics: tuple[str, ...] = ()
        """Topics that the query names and that do not exist, since members have joined."""
        self._former_topics: tuple[str, ...] = ()
        self._unlisted = Suspicions(GRACE_MS)  # subscribed topics that the last lists lack
        self._resubscribed_in: dict[int, int] = {}  # by slot: the generation in which it got the present topics
        self.all = [Slot(number) for number in range(rules.slots)]
        self._removed: dict[int, int] = {}  # slots that left: their last client
        self._held: dict[int, RevokingState] = {}  # by slot, so that a tick does not visit thousands of others
        self._wake_at_ms: dict[int, int] = {}  # when a slot joins anyway, or checks again whether it was replaced
        self._assigned_count = 0
        self._unassigned_since_ms = 0
        """Since when no slot has had an assignment, while none has one."""

    # --- events -----------------------------------------------------------------------------------------------------

    def join_all(
        self,
        stream: str,
        topics: tuple[str, ...],
        *,
        former_topics: tuple[str, ...] = (),
        static: bool,
        former_slots: int = 0,
    ) -> None:
        """The stream has an id: the member of every slot joins.

        Args:
            stream: the stream id.
            topics: the subscribed topics.
            former_topics: as an earlier run knew them, if they were different. A classic member that rejoins under its
                instance id gets its old assignment until the next rebalance, and different topics would cause one. So
                members rejoin with the former topics. If none of them is subscribed any more, all topics: former ones
                alone may be deleted, and then a member would not join. It leaves when it gets an assignment, which may
                be the old one, and the next member joins.
            static: whether members have instance ids.
            former_slots: of an earlier run; each gets a slot at first.
        """
        self._stream, self.static = stream, static
        self._former_topics = former_topics if former_topics != topics and static and self._rules.classic else ()
        self.all += [Slot(number) for number in range(len(self.all), min(former_slots, SLOTS_MAX))]
        self._set_topics(topics)
        self._unassigned_since_ms = self._out.now_ms
        for slot in self.all:
            slot.is_rejoining = bool(self._former_topics)
            self.join(slot)

    def apply(self, event: ev.MemberReport) -> SourceError | None:
        """Handle the report of a member. Returns the error that the run fails with, if there is one."""
        slot = self.get(event.slot)
        if slot is None or event.client != slot.client or (member := slot.state.member) is None:
            return None  # a late event of a consumer that was replaced or closed
        match event:
            case ev.Assigned():
                self._assigned(slot, member, event)
            case ev.Revoking():
                member.outdated.difference_update(event.partitions)
                self._revoking(slot, member, event)
            case ev.Lost():
                member.outdated.difference_update(event.partitions)
                self._lose(slot, event.partitions, "the group revoked them without notice")
                if not member.partitions:
                    self._change(slot, ev.Lost, JoiningState(member))
                    self._start_unassigned(slot)
            case ev.MemberFailed():
                self._lose(slot, tuple(member.partitions), event.reason)
                self._change(slot, ev.MemberFailed, ClosedState())
                placed = sum(not other.is_refused for other in self.all if other is not slot)
                if event.group_full and self._rules.auto_slots and placed:
                    self._do_without(slot, placed, event.reason)
                    return None
                slot.is_refused = False
                self._start_unassigned(slot)
                return self._join_later(slot, event.reason)
            case ev.MemberFenced():
                self._lose(slot, tuple(member.partitions), event.reason)
                self._change(slot, ev.MemberFenced, CheckingState(event.confirmed, self._out.now_ms))
                self.begin_failing(slot)
                self._out.log(
                    f"another client {'has' if event.confirmed else 'may have'} the instance id of slot {slot.number} "
                    f"({event.reason}); checking whether a newer driver runs this stream",
                    warn=True,
                )
                self._out.order(ev.CheckReplaced(slot=slot.number, confirmed=event.confirmed))
            case _:
                assert_never(event)
        return None

    def not_replaced(self, event: ev.NotReplaced) -> SourceError | None:
        """No newer driver runs this stream: the slot joins again. If an older process has its instance id, for example
        one that was frozen, the slot takes the id back."""
        slot = self.get(event.slot)
        if slot is None or not isinstance(checking := slot.state, CheckingState):
            return None
        self._change(slot, ev.NotReplaced, ClosedState())
        now_ms = self._out.now_ms  # an outage may have ended during the check
        slot.failing_since_ms = min(now_ms, self.begin_failing(slot) + now_ms - checking.since_ms)
        self._unassigned_since_ms = now_ms
        older = "an older process of this stream had its instance id"
        return self._join_later(slot, older if checking.is_fenced else "it may have been out of the group for a while")

    def replacement_unclear(self, event: ev.ReplacedUnclear) -> SourceError | None:
        """It is not known whether a newer driver runs this stream: the check is repeated, within its bound."""
        slot = self.get(event.slot)
        if slot is None or not isinstance(slot.state, CheckingState):
            return None
        self._change(slot, ev.ReplacedUnclear, slot.state)
        waited_ms = self._out.now_ms - self.begin_failing(slot)
        checking_ms = int(CHECKING_BUDGETS * self._rules.joining_budget_ms)
        bound_ms = self._rules.broker_timeout_ms and max(self._rules.broker_timeout_ms, checking_ms)
        if bound_ms and waited_ms >= bound_ms:
            return RebalanceTimeout(
                f"another client has the instance id of slot {slot.number} in group {self._rules.group!r}, and for "
                f"{waited_ms} ms it could not be checked whether it is a newer driver of this stream. The last answer: "
                f"{event.reason}",
                group=self._rules.group,
                waited_ms=waited_ms,
            )
        self._wake_at_ms[slot.number] = self._out.now_ms + pause_ms(slot.failures)
        slot.failures += 1
        return None

    def replaced(self, reason: str) -> Fenced:
        """A newer driver runs this stream."""
        return Fenced(
            f"another driver runs this stream of group {self._rules.group!r} now ({reason}). This run stops, and has "
            "committed nothing since",
            group=self._rules.group,
        )

    def change_topics(self, listed: tuple[str, ...]) -> None:
        """A broker listed these topics for the subscription. A topic that is not in the list stays subscribed until a
        list after the grace period lacks it as well: a broker may not know all topics for a moment."""
        self._unlisted.clear(*listed)
        unlisted = set(self._topics).difference(listed)
        gone = {topic for topic in unlisted if self._unlisted.report(topic, self._out.now_ms)}
        self._unlisted.clear(*gone)
        topics = tuple(sorted({*listed, *unlisted} - gone))
        if topics == self._topics:
            return  # a new subscription could cause a rebalance
        self._out.log(f"the subscription matches {len(topics)} topics now: {shown(topics)}")
        self._set_topics(topics)
        for slot in self.all:
            if slot.state.member is not None and not slot.is_rejoining:
                self._subscribe(slot)

    def tick(self) -> None:
        """Let slots rejoin and check memberships when their pauses are over. A moving slot joins if its last member
        does not close in time. Release holds that exceed their budget."""
        now_ms = self._out.now_ms
        for number in [number for number, at_ms in self._wake_at_ms.items() if now_ms >= at_ms]:
            del self._wake_at_ms[number]
            if isinstance(state := self.all[number].state, CheckingState):
                self._out.order(ev.CheckReplaced(slot=number, confirmed=state.is_fenced))
            else:
                self.all[number].may_be_alive |= isinstance(state, MovingState)
                self.join(self.all[number])
        for number, revoking in sorted(self._held.items()):
            if now_ms - revoking.since_ms >= self._rules.hold_budget_ms:
                self._release(self.all[number], revoking, is_overrun=True)

    def release_revocations(self) -> None:
        """Release the revocations of which no partition has to be held any more."""
        for number, revoking in sorted(self._held.items()):
            if not any(map(self.must_hold, revoking.partitions)):
                self._release(self.all[number], revoking, is_overrun=False)

    def record_prefetch(self, event: ev.PrefetchReported) -> None:
        """Store what an agent has read ahead."""
        for of in event.buffered:
            slot = self.get(of.slot)
            if slot is not None and slot.agent == event.agent:
                slot.buffered_bytes, slot.buffered_rows = of.bytes, of.rows

    def record_read(self, event: ev.TaskReported) -> None:
        """Count what a task read, for the slots that have the partitions now."""
        ours = self._partitions.ours
        for tp, rows in event.counts.rows_from_memory.items():
            if tp in ours:
                self.all[ours[tp].slot].rows_from_memory += rows
        for tp, rows in event.counts.rows_from_brokers.items():
            if tp in ours:
                self.all[ours[tp].slot].rows_from_brokers += rows

    def close(self, *, leave: bool) -> None:
        """Close all members.

        Args:
            leave: whether they leave the group.
        """
        for slot in self.all:
            self._close(slot, leave=leave)

    def may_move(self, slot: Slot) -> bool:
        """Whether the state of the group allows the slot to close its member and join from another agent."""
        settled = slot.topics == self._topics and slot.number not in self._resubscribed_in
        return isinstance(slot.state, AssignedState) and settled and self.static

    def move(self, slot: Slot, agent: str, *, leave: bool = False) -> None:
        """Close the member; when it is closed, the next one joins on ``agent``. All positions must be committed.

        Args:
            leave: the member leaves the group; otherwise the next one gets its assignment.
        """
        slot.missing = set(slot.partitions)
        self._drop(slot, tuple(slot.partitions), Cause.SLOT_MOVES)
        self._change(slot, Cause.SLOT_MOVES, MovingState(slot.agent))
        slot.moved_ms, slot.unassigned_since_ms = self._out.now_ms, None
        self._wake_at_ms[slot.number] = self._out.now_ms + CLOSE_MS_MAX + (LEAVE_MS_MAX if leave else 0)
        self._place_on(slot, agent)
        self._out.order(ev.Leave(slot=slot.number, leave=leave))

    def add(self) -> None:
        """Add a slot; its member joins at once."""
        number = len(self.all)
        self.all.append(Slot(number, client=self._removed.pop(number, 0)))
        self.join(self.all[-1])

    def remove_last(self) -> None:
        """Remove the last slot; its member leaves the group, and slots that were refused may join in its place. All its
        positions must be committed."""
        slot = self.all[-1]
        self._drop(slot, tuple(slot.partitions), Cause.SLOT_MOVES)
        self._close(slot, leave=True)
        self._wake_at_ms.pop(slot.number, None)
        self._removed[slot.number] = slot.client
        self.all.pop()
        for other in self.all:
            if other.is_refused:
                other.is_refused = False
                if other.number in self._wake_at_ms:
                    self._wake_at_ms[other.number] = self._out.now_ms + LEAVE_MS_MAX

    def agent_lost(self, slot: Slot, agent: str, why: str) -> None:
        """The agent of the slot's member is lost: the next member joins at once. If the old one still runs, the broker
        fences it."""
        if isinstance(slot.state, MovingState):
            if slot.state.closing_on == agent:
                slot.may_be_alive = True
                self.join(slot)
        elif slot.state.member is not None:
            slot.may_be_alive = True
            self._lose(slot, tuple(slot.partitions), why)
            self._change(slot, Cause.AGENT_LOST, ClosedState())
            self.join(slot)

    def begin_failing(self, slot: Slot) -> int:
        """A member failed. Returns since when the slot has been failing. An assignment does not end that: a member may
        fail after each one."""
        if slot.failing_since_ms is None:
            slot.failing_since_ms = self._out.now_ms
        return slot.failing_since_ms

    # --- queries ----------------------------------------------------------------------------------------------------

    def get(self, number: int) -> Slot | None:
        """The slot with this number; None if there is none, as for a late event of a removed slot."""
        return self.all[number] if number < len(self.all) else None

    @property
    def has_topics(self) -> bool:
        """Whether any topic matches the subscription; without one, members are not in the group."""
        return bool(self._topics)

    @property
    def members_max(self) -> int:
        """How many members with these topics Kafka can store; at least one."""
        return max(1, self._fitting())

    @property
    def all_assigned(self) -> bool:
        """Whether every slot has an assignment for its present topics, maybe an empty one, and none is revoking; but
        for those that a full group refused."""
        refused = sum(slot.is_refused for slot in self.all)
        return self._assigned_count + refused == len(self.all) and not self._resubscribed_in

    @property
    def unassigned_since_ms(self) -> int | None:
        """Since when no slot has had an assignment; None if one has, or holds a revocation, or checks whether it was
        replaced, which has a bound of its own."""
        if self._assigned_count or self._held or any(isinstance(slot.state, CheckingState) for slot in self.all):
            return None
        return self._unassigned_since_ms

    def must_hold(self, tp: TopicPartition) -> bool:
        """Whether a partition that Kafka revokes must be held for now: its batch is not durable or not committed."""
        partition = self._partitions.ours[tp]
        if not isinstance(partition, Known):
            # an earlier run's batch may be in flight, or its offsets not committed: first resolve the position
            return uncommitted_offset(partition.memory) is not None or self._partitions.is_in_flight(tp)
        if partition.until is not None:
            return True
        at = partition.position
        # A position is due without a new offset if the commit is renewed, or a foreign one is adopted: Kafka has it.
        return tp in self._partitions.due and (self._commits.includes(tp) or at.offset != at.committed)

    def is_fully_committed(self, slot: Slot) -> bool:
        """Whether Kafka has the positions of all partitions of a slot, and no batch or commit of one is on its way."""
        for tp in slot.partitions:
            partition = self._partitions.ours[tp]
            is_ready = isinstance(partition, Known) and partition.is_ready
            if not is_ready or self._commits.includes(tp) or tp in self._partitions.due:
                return False
        return True

    def revoked(self) -> Iterator[TopicPartition]:
        """Partitions that are revoked and not released yet."""
        for revoking in self._held.values():
            yield from revoking.partitions

    def deadlines_ms(self) -> list[int]:
        """When :meth:`tick` has something to do."""
        overruns = [revoking.since_ms + self._rules.hold_budget_ms for revoking in self._held.values()]
        return overruns + list(self._wake_at_ms.values())

    def too_large(self) -> str:
        """Return why Kafka may be unable to store the group, for errors; empty if it fits."""
        if self._fitting() >= len(self.all):
            return ""
        bytes_ = member_bytes(self._topics, cooperative=self._rules.cooperative)
        return (
            f"The names of {len(self._topics)} topics take up to {bytes_} bytes for each of {len(self.all)} members in "
            "the record in which Kafka stores this group. A record above max.message.bytes of the topic "
            f"__consumer_offsets (default {RECORD_BYTES_MAX}) cannot be stored, and then no member "
            "gets an assignment. Set kafka.group.protocol to consumer, a smaller groupMembers, or a larger "
            "max.message.bytes for that topic, or subscribe to fewer topics."
        )

    # --- changes ----------------------------------------------------------------------------------------------------

    def _set_topics(self, topics: tuple[str, ...]) -> None:
        """Set the subscribed topics. Warnings name those that do not exist, because nothing else shows a wrong name,
        and a classic group that Kafka may be unable to store."""
        self._topics = topics
        self.missing_topics = tuple(sorted(set(self._rules.named_topics).difference(topics)))
        if self.missing_topics:
            self._out.log(
                f"topic {shown(self.missing_topics)} does not exist. It is read from its first record when it has been "
                "created; if the name is wrong, correct subscribe",
                warn=True,
            )
        elif not topics:
            self._out.log("no topic matches subscribePattern; nothing is read before one is created", warn=True)
        if text := self.too_large():
            self._out.log(text, warn=True)

    def _fitting(self) -> int:
        """Return how many members with these topics fit into the group's record, at most SLOTS_MAX.

        Kafka stores a classic group as one record in the topic ``__consumer_offsets``: for each member the names of its
        topics in its subscription and again in its assignment (``GroupMetadataValue``; with cooperative-sticky a third
        time, as the partitions that it owns). A record above the topic's ``max.message.bytes`` cannot be stored. Then
        the broker answers each SyncGroup with UNKNOWN_SERVER_ERROR, librdkafka joins again without a word, and no
        member of the group gets an assignment, for ever. A KIP-848 group has records for each member, with topic ids in
        assignments. The subscriptions of other applications' members are not known here.
        """
        bytes_ = member_bytes(self._topics, cooperative=self._rules.cooperative) if self._rules.classic else 0
        return min(int(RECORD_BYTES_MAX * NAMES_SHARE) // bytes_, SLOTS_MAX) if bytes_ else SLOTS_MAX

    def _subscribe(self, slot: Slot) -> None:
        slot.topics = self._topics
        self._out.order(ev.Subscribe(slot=slot.number, topics=self._topics))

    def join(self, slot: Slot) -> None:
        """Start the next member of a slot, on the agent where it belongs now."""
        is_moving, agent = isinstance(slot.state, MovingState), self._agent_for(slot)
        if is_moving or agent != slot.agent:
            self._place_on(slot, agent)
            slot.placed_since_ms = self._out.now_ms
            slot.unassigned_since_ms = self._out.now_ms if agent != IN_READER else None
        if not is_moving:  # the broker ignores a new subscription of a member that returns under its instance id
            slot.topics = self._former_topics if slot.is_rejoining else self._topics
        slot.client += 1
        self._resubscribed_in.pop(slot.number, None)
        self._wake_at_ms.pop(slot.number, None)
        self._change(slot, ev.Join, JoiningState(Membership()))
        self._out.order(
            ev.Join(
                slot=slot.number,
                client=slot.client,
                topics=slot.topics,
                client_id=identifiers.client_id(self._stream, slot.number, self._agent_name(agent)),
                instance_id=identifiers.instance_id(self._rules.group, self._stream, slot.number)
                if self.static
                else None,
                agent=agent,
                takes_over=slot.may_be_alive and not self._rules.classic,
            )
        )

    def _place_on(self, slot: Slot, agent: str) -> None:
        """Members of the slot live there from now on; what its former agent has read ahead does not count any more."""
        if agent != slot.agent:
            slot.agent, slot.buffered_bytes, slot.buffered_rows = agent, 0, 0

    def _assigned(self, slot: Slot, member: Membership, event: ev.Assigned) -> None:
        slot.is_refused = False
        if isinstance(slot.state, RevokingState):  # an assignment ends a revocation, whether it was released or not
            late = tuple(tp for tp in slot.state.partitions if self.must_hold(tp))
            self._lose(slot, late, "the group completed a rebalance while they were held")
            self._drop(slot, tuple(slot.state.partitions), ev.Release)
        is_rejoining, slot.is_rejoining = slot.is_rejoining, False
        if is_rejoining and {*self._topics} <= {*slot.topics}:  # joined with all topics: see join_all
            slot.generation, slot.topics = event.generation, self._topics
            self.move(slot, slot.agent, leave=True)
            return
        self._change(slot, ev.Assigned, AssignedState(member))
        slot.may_be_alive, slot.failure = False, ""
        has_restarted = event.generation < slot.generation
        slot.generation, slot.unassigned_since_ms = event.generation, None
        if member.assigned_since_ms is None:
            member.assigned_since_ms = self._out.now_ms
        slot.missing.difference_update(event.partitions)
        outdated = {tp for tp in event.partitions if self._is_outdated(tp, event.generation)}
        member.outdated |= outdated
        new = [tp for tp in event.partitions if tp not in member.partitions and tp not in outdated]
        for tp in new:
            before = self._partitions.ours.get(tp)
            if before is not None:  # its former slot has not reported the revocation yet
                self._lose(self.all[before.slot], (tp,), f"slot {slot.number} was assigned it")
            self._partitions.assign(tp, slot.number)
            member.partitions.add(tp)
        if new:
            self._counts.count_rebalance(
                f"slot {slot.number} was assigned {len(new)} partitions", now_ms=self._out.now_ms
            )
        if slot.topics != self._topics:
            adds = not set(self._topics) <= set(slot.topics)
            self._subscribe(slot)
            # Else no rebalance need follow: by KIP-848 for a member whose partitions stay the same, and a cooperative
            # member does not join again for a subscription that only lacks topics.
            if self._rules.classic and (adds or not self._rules.cooperative):
                self._resubscribed_in[slot.number] = event.generation
        elif event.generation != self._resubscribed_in.get(slot.number, -1):
            self._resubscribed_in.pop(slot.number, None)
        if has_restarted:
            self._assign_outdated()

    def _assign_outdated(self) -> None:
        """The group was created again, and its generations start again: the earlier one was the later one."""
        for slot in self.all:
            if (member := slot.state.member) is None:
                continue
            for tp in sorted(member.outdated - self._partitions.ours.keys()):
                self._partitions.assign(tp, slot.number)
                member.partitions.add(tp)
                member.outdated.discard(tp)

    def _is_outdated(self, tp: TopicPartition, generation: int) -> bool:
        """Whether another slot of this run got the partition in a later generation. A member whose thread was busy for
        long, for example with a commit without an answer, reports assignments after they were revoked."""
        partition = self._partitions.ours.get(tp)
        return partition is not None and self.all[partition.slot].generation > generation

    def _revoking(self, slot: Slot, member: Membership, event: ev.Revoking) -> None:
        revoked, held, since_ms = member.partitions.intersection(event.partitions), set(), self._out.now_ms
        if isinstance(slot.state, RevokingState):
            held, since_ms = slot.state.partitions, slot.state.since_ms
        self._change(slot, ev.Revoking, RevokingState(member, since_ms, event.eager, held | revoked))
        slot.unassigned_since_ms = None
        if revoked:
            self._counts.count_rebalance(
                f"{len(revoked)} partitions of slot {slot.number} were revoked", now_ms=self._out.now_ms
            )

    def _release(self, slot: Slot, revoking: RevokingState, *, is_overrun: bool) -> None:
        held_ms = self._out.now_ms - revoking.since_ms
        if is_overrun:
            late = [tp for tp in revoking.partitions if self.must_hold(tp)]
            self._out.log(
                f"slot {slot.number} held a revocation for {held_ms} ms, its whole budget; {len(late)} partitions are "
                "released without a commit, and their next reader may read the batch in flight again",
                warn=True,
            )
            self._lose(slot, tuple(late), "the revocation was held for its whole budget")
        self._drop(slot, tuple(revoking.partitions), ev.Release)
        self._counts.count_release(held_ms, overrun=is_overrun)
        if revoking.is_eager:
            self._change(slot, Cause.RELEASE_ALL, JoiningState(revoking.member))
        else:
            self._change(slot, ev.Release, AssignedState(revoking.member))
        self._out.order(ev.Release(slot=slot.number, client=slot.client))

    def _lose(self, slot: Slot, partitions: tuple[TopicPartition, ...], why: str) -> None:
        """Another consumer may read these already: never commit them, and count what is not committed."""
        lost = [tp for tp in partitions if tp in slot.partitions]
        twice = sum(map(self._partitions.unconfirmed, lost))
        self._drop(slot, tuple(lost), ev.Lost)
        if lost:
            reason = f"slot {slot.number} lost {len(lost)} partitions: {why}"
            self._counts.partitions_lost += len(lost)
            self._counts.possible_duplicates += twice
            self._counts.count_rebalance(reason, now_ms=self._out.now_ms)
            self._out.log(f"{reason}; {twice} offsets may be read twice", warn=True)

    def _drop(self, slot: Slot, partitions: tuple[TopicPartition, ...], cause: AnyCause) -> None:
        state = slot.state
        for tp in partitions:
            self._partitions.drop(tp, cause)
        if state.member is not None:
            state.member.partitions.difference_update(partitions)
        if isinstance(state, RevokingState):
            state.partitions.difference_update(partitions)

    def _join_later(self, slot: Slot, reason: str) -> SourceError | None:
        """Join again after a pause. Returns the error that the run fails with if the budget is used up."""
        waited_ms = self._out.now_ms - self.begin_failing(slot)
        if waited_ms >= self._rules.joining_budget_ms:
            return RebalanceTimeout(
                f"slot {slot.number} could not join group {self._rules.group!r} and stay in it for {waited_ms} ms, in "
                f"{slot.failures + 1} attempts. The last answer: {reason}",
                group=self._rules.group,
                waited_ms=waited_ms,
            )
        slot.failure = reason
        self._wake_at_ms[slot.number] = self._out.now_ms + pause_ms(slot.failures)
        slot.failures += 1
        self._out.log(f"the member of slot {slot.number} failed ({reason}); it joins again", warn=slot.failures > 1)
        return None

    def _do_without(self, slot: Slot, members: int, reason: str) -> None:
        """The group is full: the run continues with its other members. The slot joins again much later, when some have
        left, maybe its own last one: brokers count that, too, although the next one has its instance id."""
        if not slot.is_refused:
            self._out.log(
                f"only {members} members of this query have a place in the group; slot {slot.number} joins again in "
                f"{FULL_PAUSE_MS // 1000} s: {reason}",
                warn=True,
            )
        slot.is_refused, slot.failing_since_ms, slot.failures, slot.unassigned_since_ms = True, None, 0, None
        self._wake_at_ms[slot.number] = self._out.now_ms + FULL_PAUSE_MS

    def _close(self, slot: Slot, *, leave: bool) -> None:
        if not isinstance(slot.state, ClosedState):
            self._change(slot, ev.Leave, ClosedState())
            self._out.order(ev.Leave(slot=slot.number, leave=leave))

    def outage_ended(self) -> None:
        """An outage of the brokers, which has a bound of its own, is not part of the time for which slots fail."""
        for slot in self.all:
            if slot.failing_since_ms is not None:
                slot.failing_since_ms = self._out.now_ms

    def _start_unassigned(self, slot: Slot) -> None:
        if slot.agent != IN_READER and slot.unassigned_since_ms is None:
            slot.unassigned_since_ms = self._out.now_ms

    def _change(self, slot: Slot, cause: AnyCause, after: AnySlotState) -> None:
        """Replace the record of a slot's state by that of its state after a cause."""
        before = slot.state
        require_change(SLOTS, before.kind, cause, after.kind, f"slot {slot.number}")
        slot.state = after
        if before.member is not None and after.member is None:  # if it was steady, the slot has recovered
            since_ms = before.member.assigned_since_ms
            if since_ms is not None and self._out.now_ms - since_ms >= STEADY_MS:
                slot.failing_since_ms, slot.failures = None, 0
        had_some = bool(self._assigned_count or self._held)
        self._assigned_count += isinstance(after, AssignedState) - isinstance(before, AssignedState)
        if isinstance(after, RevokingState):
            self._held[slot.number] = after
        else:
            self._held.pop(slot.number, None)
        if had_some and not (self._assigned_count or self._held):
            self._unassigned_since_ms = self._out.now_ms


def shown(topics: Sequence[str]) -> str:
    """The first topics, for an error or a log line."""
    more = f" and {len(topics) - SHOWN_MAX} more" if len(topics) > SHOWN_MAX else ""
    return ", ".join(topics[:SHOWN_MAX]) + more


# --- the size of a classic group -------------------------------------------------------------------------------------


def member_bytes(topics: Iterable[str], *, cooperative: bool) -> int:
    """Return how much of the group's record the topic names of one member take, if it has a partition of each topic."""
    times = 3 if cooperative else 2
    return sum(times * (len(name) + LENGTH_BYTES) + (times - 1) * PARTITIONS_BYTES for name in topics)
