"""How Kafka's rebalances become boundaries between micro-batches: the whole protocol as one pure machine.

Runs in: the stream reader (under the coordinator's lock), tests. Deliberately absent: clock (``now_ms`` is passed in),
threads, sockets, logs, Kafka, Spark. Two rules of this file: events come in through :meth:`GroupMachine.handle` and
nowhere else, and everything the outside must do goes out as commands. After each event the joint rules (`_pump`) run
in a fixed order: what must be committed, which revocations may go, which partitions need a position.

A partition is *held* from :class:`Assigned` until :class:`Release` or :class:`Lost`. A held partition has a
``position`` (the next offset after all durable batches), maybe a range in the batch in flight, and what Kafka has as
``committed``. Partitions whose position Kafka does not have yet are *dirty*; the echo carries all of them at once.

A partition that was committed by somebody else is committed again under our name before it is first read (*taken*):
else, after a crash before its first echo, that old commit could not be told from one made after ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_group_source.errors import Fenced, InvariantBroken, RebalanceTimeout
from spark_group_source.group import events as ev
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.group.states import PHASES, SLOTS, Phase, SlotState
from spark_group_source.group.statistics import Counters, Statistics
from spark_group_source.group.story import Story
from spark_group_source.model import TopicPartition

RETRY_PAUSES_MS = (100, 200, 500, 1_000, 2_000, 5_000)
"""Pauses before what failed is ordered again: a broker's fail-over takes seconds, so the last one repeats."""


@dataclass(slots=True)
class _Held:
    """One partition that a slot of ours has."""

    slot: int
    position: int | None = None
    planned: tuple[int, int] | None = None
    committed: int | None = None
    began: int = 0  # its first position here: without a commit, the next reader may begin there
    blind: int = 0  # offsets that became durable here before its position was known
    taken: bool = True  # nobody else's name is on the committed offset
    foreign: bool = False  # the position came from a commit that no stream made


@dataclass(slots=True)
class _Slot:
    number: int
    state: SlotState = SlotState.OUT
    client: int = 0
    held: set[TopicPartition] = field(default_factory=set)
    revoking: set[TopicPartition] = field(default_factory=set)
    eager: bool = False
    hold_since_ms: int = 0
    failing_since_ms: int | None = None
    failures: int = 0
    generation: int = -1


class GroupMachine:
    """The coordinator's state for one run of one query.

    Args:
        group: the consumer group's name.
        slots: how many members are ours, from 1.
        hold_budget_ms: how long a revocation may be held for the batch in flight; after it the partition goes without
            a commit and is counted.
        founding_budget_ms: how long a slot may fail to join before the run gives up.
    """

    def __init__(self, *, group: str, slots: int, hold_budget_ms: int, founding_budget_ms: int) -> None:
        self.group = group
        self.phase = Phase.NEW
        self.stream = ""
        self.seq = -1
        self._hold_budget_ms = hold_budget_ms
        self._founding_budget_ms = founding_budget_ms
        self._slots = [_Slot(number) for number in range(slots)]
        self._holds: set[int] = set()  # slots in state REVOKING: thousands of others need not be looked at
        self._rejoin_at_ms: dict[int, int] = {}  # slots that failed
        self._held: dict[TopicPartition, _Held] = {}
        self._memory: dict[TopicPartition, int] = {}  # positions of partitions that are not held now
        self._owed: dict[TopicPartition, int] = {}  # those of them that Kafka may not have
        self._known: Mapping[str, int] = {}
        self._topics: tuple[str, ...] = ()
        self._plan: StreamOffset | None = None
        self._dirty: set[TopicPartition] = set()
        self._unresolved: set[TopicPartition] = set()  # no position, and nobody is looking it up
        self._asked: set[TopicPartition] = set()  # a lookup is on its way, maybe from before the partition left
        self._echo: Mapping[TopicPartition, int] | None = None
        self._echo_failures = 0
        self._echo_at_ms: int | None = None
        self._lookup_failures = 0
        self._lookup_at_ms: int | None = None
        self._durable_at_ms: int | None = None
        self._counters = Counters()
        self._story = Story()
        self._out: list[ev.Command] = []
        self._now_ms = 0

    # --- the door in ------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, *, now_ms: int) -> list[ev.Command]:
        """Take in one event and say what has to be done, in order.

        Raises:
            InvariantBroken: the event contradicts what this machine knows in a way that only a bug can explain.
        """
        self._now_ms = now_ms
        self._story.happened(event, now_ms)
        if self.phase is Phase.CLOSED:
            return []
        self._out = []
        if isinstance(event, ev.MemberEvent):
            self._on_member(event)
        else:
            self._on_other(event)
        if self.phase not in (Phase.CLOSED, Phase.NEW):
            self._pump()
        self._story.led_to(self._out, now_ms)
        return self._out

    def _on_member(self, event: ev.MemberEvent) -> None:
        slot = self._slots[event.slot]
        if event.client != slot.client or slot.state in (SlotState.OUT, SlotState.FENCED):
            return  # a late event of a consumer that was replaced or closed
        match event:
            case ev.Assigned():
                self._assigned(slot, event)
            case ev.Revoking():
                self._revoking(slot, event)
            case ev.Lost():
                self._lost(slot, event.partitions, "Kafka took them away without asking")
                if not slot.held:
                    self._move(slot, "Lost")
            case ev.MemberFailed():
                self._lost(slot, tuple(slot.held), event.reason)
                self._move(slot, "MemberFailed")
                self._member_failed(slot, event.reason)
            case ev.MemberFenced():
                self._move(slot, "MemberFenced")
                self._fail(
                    Fenced(
                        f"slot {slot.number} of group {self.group!r} is held by a newer process ({event.reason}): "
                        "another driver runs this query now. This run stops; nothing of it was committed after that",
                        group=self.group,
                        slot=slot.number,
                    )
                )

    def _on_other(self, event: ev.Event) -> None:
        match event:
            case ev.Born():
                self._move_phase("Born")
                self.stream, self.seq, self._known = event.stream, -1, event.known
                self._found(event.topics)
            case ev.Durable():
                self._durable(event)
            case ev.Replay():
                self._replay(event)
            case ev.Planned():
                self._planned_batch(event.offset)
            case ev.Closing():
                self._close(event.leave)
            case ev.CommittedRead():
                self._committed_read(event.offsets)
            case ev.StartsResolved():
                self._lookup_failures = 0
                for tp, offset in event.offsets.items():
                    if self._answered(tp):
                        self._set_position(tp, offset)
            case ev.LookupFailed():
                self._asked.difference_update(event.partitions)
                self._unresolved.update(tp for tp in event.partitions if self._is_open(tp))
                self._lookup_at_ms = self._now_ms + _pause(self._lookup_failures)
                self._lookup_failures += 1
                self._say(f"offsets of {len(event.partitions)} partitions could not be read: {event.reason}", warn=True)
            case ev.EchoDone():
                self._echo_done(event.offsets)
            case ev.EchoFailed():
                self._echo_failed(event)
            case ev.TopicsSeen():
                self._topics_seen(event.topics)
            case ev.Moved():
                self._moved(event)
            case ev.Tick():
                self._tick()

    # --- what the shell may ask -------------------------------------------------------------------------------------

    def plannable(self) -> dict[TopicPartition, int]:
        """The position of every partition that the next batch may read.

        Those that are leaving are not among them, nor those that Kafka does not show as ours yet.
        """
        return {
            tp: held.position
            for tp, held in self._held.items()
            if held.position is not None and held.taken and tp not in self._slots[held.slot].revoking
        }

    def owed(self) -> dict[TopicPartition, int]:
        """Positions after durable batches that Kafka does not have, as far as we know.

        The next offset must carry those that its ranges do not: a partition can be with nobody of ours when a batch is
        planned (it is late after a restart, or just leaving), and after a crash nothing else would remember it.
        """
        dirty = {tp: at for tp in self._dirty if (at := self._held[tp].position) is not None}
        return self._owed | dirty

    def held(self) -> set[TopicPartition]:
        """Every partition that a slot of ours has."""
        return set(self._held)

    def foreign(self) -> frozenset[TopicPartition]:
        """Held partitions whose position came from a commit that no stream made, until a batch moved them on."""
        return frozenset(tp for tp, held in self._held.items() if held.foreign)

    def known(self) -> Mapping[str, int]:
        """How many partitions each topic had when the stream first saw it; topics that came later are not in it."""
        return self._known

    @property
    def founded(self) -> bool:
        """Every slot has had an assignment, and every partition can be planned: a first plan misses nothing."""
        everyone = all(slot.state is SlotState.ASSIGNED for slot in self._slots)
        return everyone and all(held.position is not None and held.taken for held in self._held.values())

    @property
    def resolved(self) -> bool:
        """No held partition waits for its position."""
        return all(held.position is not None for held in self._held.values())

    @property
    def echoed(self) -> bool:
        """Kafka has the position of every held partition."""
        return not self._dirty and self._echo is None

    def next_deadline_ms(self) -> int | None:
        """When :class:`Tick` is due; None while nothing waits for time."""
        if self.phase is Phase.CLOSED:
            return None
        due = [self._slots[number].hold_since_ms + self._hold_budget_ms for number in self._holds]
        due += self._rejoin_at_ms.values()
        due += [at for at in (self._echo_at_ms, self._lookup_at_ms) if at is not None]
        return min(due, default=None)

    def story(self) -> str:
        """The last events and what they led to, one a line, oldest first."""
        return self._story.text()

    def statistics(self) -> Statistics:
        """What happened so far, as a frozen snapshot."""
        return self._counters.snapshot(
            group=self.group,
            stream=self.stream,
            seq=self.seq,
            phase=self.phase.value,
            generation=max((slot.generation for slot in self._slots), default=-1),
            assigned=tuple(len(slot.held) for slot in self._slots),
            slots=tuple(slot.state.value for slot in self._slots),
            uncommitted=len(self._dirty),
        )

    def check(self) -> None:
        """State the invariants. Costs a walk over everything: for tests and for the story of a failure.

        Raises:
            InvariantBroken: one of them does not hold.
        """
        if self.phase is Phase.CLOSED:
            return  # events are ignored: what it knew then is not kept true
        for slot in self._slots:
            self._require(slot.revoking <= slot.held, f"slot {slot.number} gives back what it does not have")
            self._require(
                not slot.revoking or slot.state is SlotState.REVOKING, f"slot {slot.number} holds without state"
            )
            self._require(
                slot.state is not SlotState.OUT or not slot.held, f"slot {slot.number} is out and has partitions"
            )
        self._require(
            sum(len(slot.held) for slot in self._slots) == len(self._held), "a partition has two slots of ours or none"
        )
        for tp, held in self._held.items():
            self._require(tp in self._slots[held.slot].held, f"{tp} does not know its slot")
            if held.planned is not None:
                self._require(self._plan is not None and tp in self._plan.ranges, f"{tp} is planned without a batch")
                self._require(held.position == held.planned[0], f"the range of {tp} does not start at its position")
            if held.committed is not None and held.position is not None:
                # Dirty and behind: it was moved back while its old position was being committed; the next echo is due.
                self._require(
                    held.committed <= held.position or tp in self._dirty, f"{tp} is committed ahead of what is durable"
                )
        self._require((self._plan is not None) == (self.phase is Phase.PLANNED), "a plan without its phase")
        waiting = {tp for tp in self._held if self._is_open(tp)}
        self._require(waiting <= self._unresolved | self._asked, "a partition waits for a position nobody looks up")
        self._require(self._unresolved <= waiting, "a position is looked up for a partition that has one")

    # --- slots ------------------------------------------------------------------------------------------------------

    def _found(self, topics: tuple[str, ...]) -> None:
        self._topics = topics
        for slot in self._slots:
            self._join(slot)

    def _join(self, slot: _Slot) -> None:
        slot.client += 1
        self._rejoin_at_ms.pop(slot.number, None)
        self._move(slot, "Join")
        self._out.append(ev.Join(slot=slot.number, client=slot.client, topics=self._topics))

    def _assigned(self, slot: _Slot, event: ev.Assigned) -> None:
        if slot.revoking:  # an assignment after a hold: the hold is over, whether we let go or not
            late = tuple(tp for tp in slot.revoking if self._must_wait(tp))
            self._lost(slot, late, "Kafka went on while they were held")
            self._drop(slot, tuple(slot.revoking))
        self._move(slot, "Assigned")
        slot.failing_since_ms, slot.failures, slot.generation = None, 0, event.generation
        new = [tp for tp in event.partitions if tp not in slot.held]
        for tp in new:
            before = self._held.get(tp)
            if before is not None:  # its former slot was not told yet: Kafka's newest word counts
                self._lost(self._slots[before.slot], (tp,), f"slot {slot.number} has it now")
            self._held[tp] = _Held(slot.number)
            slot.held.add(tp)
            self._unresolved.add(tp)
        if new:
            self._counters.rebalanced(f"slot {slot.number} was given {len(new)} partitions", now_ms=self._now_ms)

    def _revoking(self, slot: _Slot, event: ev.Revoking) -> None:
        leaving = {tp for tp in event.partitions if tp in slot.held}
        slot.eager = event.eager
        if slot.state is not SlotState.REVOKING:
            slot.hold_since_ms = self._now_ms
        self._move(slot, "Revoking")
        slot.revoking |= leaving
        if leaving:
            self._counters.rebalanced(f"slot {slot.number} was asked for {len(leaving)}", now_ms=self._now_ms)

    def _release(self, slot: _Slot, *, overrun: bool) -> None:
        held_ms = self._now_ms - slot.hold_since_ms
        if overrun:
            late = [tp for tp in slot.revoking if self._must_wait(tp)]
            self._say(
                f"slot {slot.number} held a revocation for {held_ms} ms, its whole budget: {len(late)} partitions go "
                "without a commit, and their next reader may see the batch in flight again",
                warn=True,
            )
            self._lost(slot, tuple(late), "the budget of their hold was used up")
        self._drop(slot, tuple(slot.revoking))
        self._counters.released(held_ms, overrun=overrun)
        self._move(slot, "Release (eager)" if slot.eager else "Release")
        self._out.append(ev.Release(slot=slot.number, client=slot.client))

    def _lost(self, slot: _Slot, partitions: tuple[TopicPartition, ...], why: str) -> None:
        """Somebody else may read these already: never commit them, and count what Kafka does not know."""
        gone = [tp for tp in partitions if tp in slot.held]
        twice = sum(map(self._unconfirmed, gone))
        self._drop(slot, tuple(gone))
        if gone:
            reason = f"slot {slot.number} lost {len(gone)} partitions: {why}"
            self._counters.lost(len(gone), twice)
            self._counters.rebalanced(reason, now_ms=self._now_ms)
            self._say(f"{reason}; {twice} offsets may be read twice", warn=True)

    def _drop(self, slot: _Slot, partitions: tuple[TopicPartition, ...]) -> None:
        for tp in partitions:
            held = self._held.pop(tp)
            slot.held.discard(tp)
            slot.revoking.discard(tp)
            self._dirty.discard(tp)
            self._unresolved.discard(tp)
            if held.position is not None:
                self._memory[tp] = held.position
                if held.committed is None or held.committed < held.position:
                    self._owed[tp] = held.position

    def _member_failed(self, slot: _Slot, reason: str) -> None:
        if slot.failing_since_ms is None:
            slot.failing_since_ms = self._now_ms
        waited_ms = self._now_ms - slot.failing_since_ms
        if waited_ms >= self._founding_budget_ms:
            self._fail(
                RebalanceTimeout(
                    f"slot {slot.number} could not join group {self.group!r} for {waited_ms} ms, {slot.failures + 1} "
                    f"tries; the last answer: {reason}",
                    group=self.group,
                    waited_ms=waited_ms,
                )
            )
            return
        self._rejoin_at_ms[slot.number] = self._now_ms + _pause(slot.failures)
        slot.failures += 1
        self._say(f"slot {slot.number}'s member failed ({reason}); it joins again", warn=slot.failures > 1)

    def _topics_seen(self, topics: tuple[str, ...]) -> None:
        if topics == self._topics or self.phase is Phase.NEW:
            return  # nothing changed: no disturbance
        self._say(f"the subscription now stands for {len(topics)} topics: {', '.join(topics[:10])}")
        self._topics = topics
        for slot in self._slots:
            if slot.state is not SlotState.OUT:
                self._out.append(ev.Subscribe(slot=slot.number, topics=topics))

    # --- batches ----------------------------------------------------------------------------------------------------

    def _durable(self, event: ev.Durable) -> None:
        offset = event.offset
        if self.phase is Phase.NEW:
            self._move_phase("Durable")
            self._adopt(offset, event.topics)
            return
        self._require(offset.stream == self.stream, f"offset of stream {offset.stream!r}, not of {self.stream!r}")
        if self._plan is not None and offset.seq == self._plan.seq:
            self._finish(self._plan)
            self._move_phase("Durable")
            return
        # commit() repeats, one batch late, what the start of latestOffset() said before
        self._require(offset.seq <= self.seq, f"batch {offset.seq} is durable but was never planned here")

    def _finish(self, plan: StreamOffset) -> None:
        """The rows of the plan are safe, whoever has the partitions now: nobody of ours reads them again."""
        self.seq, self._plan = plan.seq, None
        self._durable_at_ms = self._now_ms
        for tp, (start, end) in plan.ranges.items():
            held = self._held.get(tp)
            if held is None or held.position is None:
                self._memory[tp] = max(self._memory.get(tp, end), end)
                if start < end:
                    self._owed[tp] = self._memory[tp]
                if held is not None:
                    held.blind = end - start
            elif start <= held.position < end:
                held.planned, held.foreign = None, False
                self._set_position(tp, end)

    def _adopt(self, offset: StreamOffset, topics: tuple[str, ...]) -> None:
        self.stream, self.seq, self._known = offset.stream, offset.seq, offset.known
        self._remember(offset.positions() | dict(offset.owed))
        self._found(topics)

    def _remember(self, positions: dict[TopicPartition, int]) -> None:
        """What a checkpoint says. Whether Kafka has it shows when the partitions come."""
        self._memory, self._owed = positions, dict(positions)

    def _replay(self, event: ev.Replay) -> None:
        if self.phase is not Phase.NEW:
            self._require(
                self._plan is not None and event.offset.seq == self._plan.seq,
                f"batch {event.offset.seq} is read but was not planned here",
            )
            return  # the plan of this run, read once more
        self._move_phase("Replay")
        self._adopt(event.offset, event.topics)
        self.seq = event.offset.seq - 1
        self._remember(dict(event.offset.owed) | {tp: start for tp, (start, _) in event.offset.ranges.items()})
        self._plan = event.offset

    def _planned_batch(self, offset: StreamOffset) -> None:
        self._require(
            offset.stream == self.stream and offset.seq == self.seq + 1,
            f"batch {offset.seq} does not follow {self.seq}",
        )
        for tp, (start, end) in offset.ranges.items():
            held = self._held.get(tp)
            if held is None or held.position != start or tp in self._slots[held.slot].revoking:
                at = "another member" if held is None else held.position
                self._require(False, f"{tp}[{start},{end}) is planned, but the partition is at {at}")
            elif start < end:
                held.planned = (start, end)
        self._plan = offset
        self._move_phase("Planned")

    # --- positions --------------------------------------------------------------------------------------------------

    def _committed_read(self, offsets: Mapping[TopicPartition, ev.Committed | None]) -> None:
        """The start-position rules, in order: our own position, the group's committed offset, ``startingOffsets``."""
        unknown = []
        for tp, committed in offsets.items():
            held = self._held.get(tp)
            if not self._answered(tp) or held is None:
                continue
            ours = self._memory.get(tp)
            if committed is None:
                if ours is None:
                    unknown.append(tp)
                else:
                    self._set_position(tp, ours)
                continue
            held.committed = committed.offset
            if committed.stream == self.stream:
                self._set_position(tp, max(committed.offset, ours if ours is not None else committed.offset))
                continue
            held.taken, held.foreign = False, committed.stream is None
            if ours is not None and committed.offset != ours:
                self._say(f"{tp} was moved from {ours} to {committed.offset} by another member or an operator")
            self._set_position(tp, committed.offset)
        if not unknown:
            self._lookup_failures = 0
        else:
            self._asked.update(unknown)
            old = [tp for tp in unknown if tp.partition < self._known.get(tp.topic, 0)]
            new = [tp for tp in unknown if tp.partition >= self._known.get(tp.topic, 0)]
            self._out.append(ev.ResolveStarts(initial=tuple(old), new=tuple(new)))

    def _answered(self, tp: TopicPartition) -> bool:
        """Whether an answer that came is about the partition as we have it now.

        What left and came back since the question waits for a question of its own: another member may have committed.
        """
        self._asked.discard(tp)
        return self._is_open(tp) and tp not in self._unresolved

    def _set_position(self, tp: TopicPartition, offset: int) -> None:
        held = self._held.get(tp)
        if held is None:
            return
        if held.position is None:
            held.began = offset
        held.position = offset
        self._unresolved.discard(tp)
        self._owed.pop(tp, None)
        self._join_plan(tp, held)
        if not held.taken or held.committed is None or offset > held.committed:
            self._dirty.add(tp)
        else:
            self._dirty.discard(tp)

    def _join_plan(self, tp: TopicPartition, held: _Held) -> None:
        """A partition came (back) while a batch that reads it is in flight: it leaves only when that is durable."""
        if self._plan is None or held.position is None:
            return
        start, end = self._plan.ranges.get(tp, (0, 0))
        if start <= held.position < end:
            held.planned = (held.position, end)

    def _moved(self, event: ev.Moved) -> None:
        for tp, offset in event.offsets.items():
            held = self._held.get(tp)
            if held is not None and held.planned is None:
                held.committed, held.began, held.foreign = None, offset, False
                self._set_position(tp, offset)
        self._say(event.reason, warn=True)

    # --- the echo ---------------------------------------------------------------------------------------------------

    def _echo_done(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._echo, self._echo_failures = None, 0
        for tp, offset in offsets.items():
            held = self._held.get(tp)
            if held is not None:
                held.committed = offset
                if held.position == offset:
                    held.taken = True
                    self._dirty.discard(tp)
        drain_ms = None
        if self._durable_at_ms is not None and not self._dirty:
            drain_ms, self._durable_at_ms = self._now_ms - self._durable_at_ms, None
        self._counters.committed(drain_ms)

    def _echo_failed(self, event: ev.EchoFailed) -> None:
        self._echo = None
        self._echo_at_ms = self._now_ms + _pause(self._echo_failures)
        if event.stale:
            return
        self._echo_failures += 1
        self._counters.commit_failed()
        self._say(
            f"the group's offsets were not committed ({event.reason}); the rows are safe, the next commit covers them",
            warn=True,
        )

    # --- joint rules ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        if self._dirty and self._echo is None and self._echo_at_ms is None:
            self._echo = {tp: position for tp in self._dirty if (position := self._held[tp].position) is not None}
            slots = {tp: self._held[tp].slot for tp in self._echo}
            self._out.append(ev.Echo(offsets=self._echo, slots=slots, stream=self.stream, seq=self.seq))
        for slot in [self._slots[number] for number in sorted(self._holds)]:
            if not any(map(self._must_wait, slot.revoking)):
                self._release(slot, overrun=False)
        if self._lookup_at_ms is None and (ask := self._unresolved - self._asked):
            self._out.append(ev.FetchCommitted(partitions=tuple(sorted(ask))))
            self._asked |= ask
            self._unresolved -= ask

    def _must_wait(self, tp: TopicPartition) -> bool:
        held = self._held[tp]
        if (
            held.position is None
        ):  # a former run's batch, or its rows that Kafka may not know: first see where it stands
            return tp in self._owed or self._in_flight(tp) > 0
        on_its_way = self._echo is not None and tp in self._echo
        return held.planned is not None or (tp in self._dirty and (on_its_way or held.position != held.committed))

    def _in_flight(self, tp: TopicPartition) -> int:
        """Offsets of the partition that the batch in flight reads."""
        start, end = (0, 0) if self._plan is None else self._plan.ranges.get(tp, (0, 0))
        return end - start

    def _unconfirmed(self, tp: TopicPartition) -> int:
        """Offsets that the partition's next reader reads again: from what Kafka has to the end of what was read."""
        held = self._held[tp]
        if held.position is None:
            return self._in_flight(tp) + held.blind
        end = held.planned[1] if held.planned else held.position
        return end - min(held.position, held.began if held.committed is None else held.committed)

    def _tick(self) -> None:
        now = self._now_ms
        if self._echo_at_ms is not None and now >= self._echo_at_ms:
            self._echo_at_ms = None
        if self._lookup_at_ms is not None and now >= self._lookup_at_ms:
            self._lookup_at_ms = None
        for number in [number for number, at_ms in self._rejoin_at_ms.items() if now >= at_ms]:
            self._join(self._slots[number])
        for slot in [self._slots[number] for number in sorted(self._holds)]:
            if now - slot.hold_since_ms >= self._hold_budget_ms:
                self._release(slot, overrun=True)

    # --- ends and helpers -------------------------------------------------------------------------------------------

    def _close(self, leave: bool) -> None:
        for slot in self._slots:
            if slot.state is not SlotState.OUT:
                self._move(slot, "Leave")
                self._out.append(ev.Leave(slot=slot.number, leave=leave))
        self._move_phase("Closing")

    def _fail(self, error: Fenced | RebalanceTimeout) -> None:
        self._move_phase("Fail")
        self._out.append(ev.Fail(error=error))

    def _is_open(self, tp: TopicPartition) -> bool:
        held = self._held.get(tp)
        return held is not None and held.position is None

    def _move(self, slot: _Slot, cause: str) -> None:
        to = SLOTS.get((slot.state, cause))
        self._require(to is not None, f"slot {slot.number}: {cause} in state {slot.state.value}")
        if to is not None:
            slot.state = to
            if to is SlotState.REVOKING:
                self._holds.add(slot.number)
            else:
                self._holds.discard(slot.number)

    def _move_phase(self, cause: str) -> None:
        to = PHASES.get((self.phase, cause))
        self._require(to is not None, f"{cause} in phase {self.phase.value}")
        if to is not None:
            self.phase = to

    def _say(self, text: str, *, warn: bool = False) -> None:
        self._out.append(ev.Say(text=text, warn=warn))

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise InvariantBroken(f"{otherwise}. The last events:\n{self.story()}")


def _pause(failures: int) -> int:
    return RETRY_PAUSES_MS[min(failures, len(RETRY_PAUSES_MS) - 1)]
