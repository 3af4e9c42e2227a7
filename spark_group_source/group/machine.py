"""How Kafka's rebalances become boundaries between micro-batches: slots, partitions, the echo; one pure machine.

Runs in: the stream reader (inside ``run``, under the coordinator's lock), tests. Deliberately absent: clock (``now_ms``
is passed in), threads, sockets, logs, Kafka, Spark; what Spark's call waits for (``run``), where a partition stands
(``positions``). Events come in through :meth:`GroupMachine.handle` and nowhere else, and everything the outside must do
goes out as commands. After each event the joint rules (`_pump`) run in a fixed order: what must be committed, which
revocations may go, which partitions need a position.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import assert_never

from spark_group_source.errors import Fenced, InvariantBroken, RebalanceTimeout, SourceError
from spark_group_source.group import events as ev
from spark_group_source.group import names, starts
from spark_group_source.group.echo import EchoSchedule
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.group.positions import UNKNOWN, NotInTable, Positions, adopted
from spark_group_source.group.rules import Rules, pause_ms
from spark_group_source.group.states import PHASES, SLOTS, PartitionState, Phase, SlotState
from spark_group_source.group.statistics import Counters, Statistics
from spark_group_source.group.story import Story
from spark_group_source.model import TopicPartition


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
    """The state of one run's stream: its slots, partitions and commits.

    Args:
        rules: what the options say.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.phase = Phase.NEW
        self.stream = ""
        self.seq = -1
        self.plan: StreamOffset | None = None
        self.static = True
        self.positions = Positions()
        self._slots = [_Slot(number) for number in range(rules.slots)]
        self._holds: set[int] = set()  # slots in state REVOKING: thousands of others need not be looked at
        self._wake_at_ms: dict[int, int] = {}  # slots that join again, or ask again whether they were replaced
        self._assigned_slots = 0
        self._echo = EchoSchedule()
        self._known: Mapping[str, int] = {}
        self._topics: tuple[str, ...] = ()
        self._lookup_failures = 0
        self._lookup_at_ms: int | None = None
        self._counters = Counters()
        self._story = Story()
        self._out: list[ev.Command] = []
        self._now_ms = 0

    # --- the door in ------------------------------------------------------------------------------------------------

    def handle(self, event: ev.MachineEvent, *, now_ms: int) -> list[ev.Command]:
        """Take in one event and say what has to be done, in order.

        Raises:
            InvariantBroken: the event contradicts what this machine knows in a way that only a bug can explain.
        """
        self._now_ms = now_ms
        self._story.happened(event, now_ms)
        if self.phase is Phase.CLOSED:
            return []
        self._out = []
        try:
            self._take(event)
            if self.phase not in (Phase.CLOSED, Phase.NEW):
                self._pump()
        except NotInTable as exc:
            self._require(False, str(exc))
        self._story.led_to(self._out, now_ms)
        return self._out

    def _take(self, event: ev.MachineEvent) -> None:
        match event:
            case ev.Assigned() | ev.Revoking() | ev.Lost() | ev.MemberFailed() | ev.MemberFenced():
                self._on_member(event)
            case ev.Born():
                self._move_phase(ev.Born)
                self.stream, self.seq, self._known = event.stream, -1, event.known
                self._join_all(event.topics)
            case ev.Durable():
                self._durable(event)
            case ev.Replay():
                self._replay(event)
            case ev.Planned():
                self._planned(event.offset)
            case ev.Closing():
                self._close(event.leave)
            case ev.Broken():
                self._fail(event.error)
            case ev.CommittedRead():
                self._committed_read(event)
            case ev.StartsResolved():
                self._starts_resolved(event)
            case ev.LookupFailed():
                self._ask_later(event.partitions, event.reason)
            case ev.EchoDone():
                self._echo_done(event)
            case ev.EchoFailed():
                self._echo_failed(event)
            case ev.TopicsSeen():
                self._topics_seen(event.topics)
            case ev.NotReplaced():
                self._not_replaced(self._slots[event.slot])
            case ev.ReplacedUnknown():
                self._replaced_unknown(self._slots[event.slot], event)
            case ev.Replaced():
                self._fail(self._fenced(event.reason))
            case ev.RecordsGone():
                self.positions.gone(event.offsets)
                self._say(event.reason, warn=True)
            case ev.Tick():
                self._tick()
            case _:
                assert_never(event)

    def _on_member(self, event: ev.MemberReport) -> None:
        slot = self._slots[event.slot]
        if event.client != slot.client or slot.state in (SlotState.OUT, SlotState.ASKING, SlotState.FENCED):
            return  # a late event of a consumer that was replaced or closed
        match event:
            case ev.Assigned():
                self._assigned(slot, event)
            case ev.Revoking():
                self._revoking(slot, event)
            case ev.Lost():
                self._lost(slot, event.partitions, "Kafka took them away without asking")
                if not slot.held:
                    self._move(slot, ev.Lost)
            case ev.MemberFailed():
                self._lost(slot, tuple(slot.held), event.reason)
                self._move(slot, ev.MemberFailed)
                self._joins_again(slot, event.reason)
            case ev.MemberFenced():
                self._lost(slot, tuple(slot.held), event.reason)
                self._move(slot, ev.MemberFenced)
                slot.failing_since_ms = slot.failing_since_ms or self._now_ms
                self._say(f"slot {slot.number}'s place was taken ({event.reason}): asking who did", warn=True)
                self._out.append(ev.AskReplaced(slot=slot.number))
            case _:
                assert_never(event)

    # --- what may be asked ------------------------------------------------------------------------------------------

    def plannable(self) -> dict[TopicPartition, int]:
        """The position of every partition that the next batch may read.

        Those that are leaving are not among them, nor those that Kafka does not show as ours yet.
        """
        found = self.positions.plannable()
        for number in self._holds:
            for tp in self._slots[number].revoking:
                found.pop(tp, None)
        return found

    def held(self) -> set[TopicPartition]:
        """Every partition that a slot of ours has."""
        return set(self.positions.ours)

    def known(self) -> Mapping[str, int]:
        """How many partitions each topic had when the stream first saw it; topics that came later are not in it."""
        return self._known

    @property
    def gathered(self) -> bool:
        """Every slot has had an assignment, and every partition can be planned: a first plan misses nothing."""
        return self._assigned_slots == len(self._slots) and self.positions.ready

    @property
    def echoed(self) -> bool:
        """Kafka has the position of every held partition."""
        return not self.positions.due() and self._echo.in_flight is None

    @property
    def rebalances(self) -> int:
        return self._counters.rebalances

    def next_deadline_ms(self) -> int | None:
        """When :class:`Tick` is due; None while nothing waits for time."""
        if self.phase is Phase.CLOSED:
            return None
        due = [self._slots[number].hold_since_ms + self.rules.hold_budget_ms for number in self._holds]
        due += self._wake_at_ms.values()
        due += self._echo.deadlines_ms()
        due += [] if self._lookup_at_ms is None else [self._lookup_at_ms]
        return min(due, default=None)

    def story(self) -> str:
        """The last events and what they led to, one a line, oldest first."""
        return self._story.text()

    def statistics(self, state: str = "") -> Statistics:
        """What happened so far, as a frozen snapshot; ``state`` is the run's."""
        return self._counters.snapshot(
            group=self.rules.group,
            stream=self.stream,
            seq=self.seq,
            state=state,
            generation=max((slot.generation for slot in self._slots), default=-1),
            assigned=tuple(len(slot.held) for slot in self._slots),
            slots=tuple(slot.state.value for slot in self._slots),
            uncommitted=len(self.positions.due()),
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
            out = slot.state in (SlotState.OUT, SlotState.ASKING, SlotState.FENCED)
            self._require(not out or not slot.held, f"slot {slot.number} is out and has partitions")
        ours = self.positions.ours
        total = sum(len(slot.held) for slot in self._slots)
        self._require(total == len(ours), "a partition has two slots of ours or none")
        for tp, partition in ours.items():
            self._require(tp in self._slots[partition.slot].held, f"{tp} does not know its slot")
        assigned = sum(slot.state is SlotState.ASSIGNED for slot in self._slots)
        self._require(assigned == self._assigned_slots, "the assigned slots are miscounted")
        self._require((self.plan is not None) == (self.phase is Phase.PLANNED), "a plan without its phase")
        wrong = self.positions.check()
        self._require(wrong is None, wrong or "")

    # --- slots ------------------------------------------------------------------------------------------------------

    def _join_all(self, topics: tuple[str, ...]) -> None:
        self._topics = topics
        for slot in self._slots:
            self._join(slot)

    def _join(self, slot: _Slot) -> None:
        slot.client += 1
        self._move(slot, ev.Join)
        self._out.append(
            ev.Join(
                slot=slot.number,
                client=slot.client,
                topics=self._topics,
                client_id=names.client_id(self.stream, slot.number),
                instance_id=names.instance_id(self.rules.group, self.stream, slot.number) if self.static else None,
            )
        )

    def _assigned(self, slot: _Slot, event: ev.Assigned) -> None:
        if slot.revoking:  # an assignment after a hold: the hold is over, whether we let go or not
            late = tuple(tp for tp in slot.revoking if self._must_wait(tp))
            self._lost(slot, late, "Kafka went on while they were held")
            self._drop(slot, tuple(slot.revoking), ev.Release)
        self._move(slot, ev.Assigned)
        slot.failing_since_ms, slot.failures, slot.generation = None, 0, event.generation
        self._echo.slot_is_back(slot.number)
        new = [tp for tp in event.partitions if tp not in slot.held]
        for tp in new:
            before = self.positions.ours.get(tp)
            if before is not None:  # its former slot was not told yet: Kafka's newest word counts
                self._lost(self._slots[before.slot], (tp,), f"slot {slot.number} has it now")
            self.positions.assign(tp, slot.number)
            slot.held.add(tp)
        if new:
            self._counters.rebalanced(f"slot {slot.number} was given {len(new)} partitions", now_ms=self._now_ms)

    def _revoking(self, slot: _Slot, event: ev.Revoking) -> None:
        leaving = {tp for tp in event.partitions if tp in slot.held}
        slot.eager = event.eager
        if slot.state is not SlotState.REVOKING:
            slot.hold_since_ms = self._now_ms
        self._move(slot, ev.Revoking)
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
        self._drop(slot, tuple(slot.revoking), ev.Release)
        self._counters.released(held_ms, overrun=overrun)
        release = ev.ReleaseAll if slot.eager else ev.Release
        self._move(slot, release)
        self._out.append(release(slot=slot.number, client=slot.client))

    def _lost(self, slot: _Slot, partitions: tuple[TopicPartition, ...], why: str) -> None:
        """Somebody else may read these already: never commit them, and count what Kafka does not know."""
        gone = [tp for tp in partitions if tp in slot.held]
        twice = sum(map(self.positions.unconfirmed, gone))
        self._drop(slot, tuple(gone), ev.Lost)
        if gone:
            reason = f"slot {slot.number} lost {len(gone)} partitions: {why}"
            self._counters.lost(len(gone), twice)
            self._counters.rebalanced(reason, now_ms=self._now_ms)
            self._say(f"{reason}; {twice} offsets may be read twice", warn=True)

    def _drop(self, slot: _Slot, partitions: tuple[TopicPartition, ...], cause: type) -> None:
        for tp in partitions:
            self.positions.drop(tp, cause, as_of=self.seq)
            slot.held.discard(tp)
            slot.revoking.discard(tp)

    def _joins_again(self, slot: _Slot, reason: str) -> None:
        if slot.failing_since_ms is None:
            slot.failing_since_ms = self._now_ms
        waited_ms = self._now_ms - slot.failing_since_ms
        if waited_ms >= self.rules.founding_budget_ms:
            self._fail(
                RebalanceTimeout(
                    f"slot {slot.number} could not join group {self.rules.group!r} for {waited_ms} ms, "
                    f"{slot.failures + 1} tries; the last answer: {reason}",
                    group=self.rules.group,
                    waited_ms=waited_ms,
                )
            )
            return
        self._wake_at_ms[slot.number] = self._now_ms + pause_ms(slot.failures)
        slot.failures += 1
        self._say(f"slot {slot.number}'s member failed ({reason}); it joins again", warn=slot.failures > 1)

    def _not_replaced(self, slot: _Slot) -> None:
        if slot.state is SlotState.ASKING:
            self._move(slot, ev.NotReplaced)
            self._joins_again(slot, "an older process of this stream had taken its place")

    def _replaced_unknown(self, slot: _Slot, event: ev.ReplacedUnknown) -> None:
        if slot.state is not SlotState.ASKING:
            return
        self._move(slot, ev.ReplacedUnknown)
        waited_ms = self._now_ms - (slot.failing_since_ms or self._now_ms)
        if event.final or waited_ms >= self.rules.founding_budget_ms:
            self._fail(self._fenced(f"the place of slot {slot.number} was taken, and {event.reason}"))
            return
        self._wake_at_ms[slot.number] = self._now_ms + pause_ms(slot.failures)
        slot.failures += 1

    def _fenced(self, reason: str) -> Fenced:
        return Fenced(
            f"another driver runs this stream of group {self.rules.group!r} now ({reason}). This run stops; nothing of "
            "it was committed after that",
            group=self.rules.group,
        )

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
            self._move_phase(ev.Durable)
            self._adopt(offset, event.topics, seq=offset.seq)
            return
        self._require(offset.stream == self.stream, f"offset of stream {offset.stream!r}, not of {self.stream!r}")
        if self.plan is not None and offset.seq == self.plan.seq:
            self.seq, self.plan = offset.seq, None
            self._echo.durable(self._now_ms)
            self.positions.durable(seq=self.seq)
            self._move_phase(ev.Durable)
            return
        # commit() repeats, one batch late, what the start of latestOffset() said before
        self._require(offset.seq <= self.seq, f"batch {offset.seq} is durable but was never planned here")

    def _adopt(self, offset: StreamOffset, topics: tuple[str, ...], *, seq: int) -> None:
        self.stream, self.seq, self._known = offset.stream, seq, offset.known
        self.positions.epoch = offset.epoch
        self.positions.remember(adopted(offset, replay=seq < offset.seq), as_of=seq)
        self._join_all(topics)

    def _replay(self, event: ev.Replay) -> None:
        if self.phase is not Phase.NEW:
            self._require(
                self.plan is not None and event.offset.seq == self.plan.seq,
                f"batch {event.offset.seq} is read but was not planned here",
            )
            return  # the plan of this run, read once more
        self._move_phase(ev.Replay)
        self._adopt(event.offset, event.topics, seq=event.offset.seq - 1)
        self.plan = event.offset
        self.positions.replayed(event.offset.ranges)

    def _planned(self, offset: StreamOffset) -> None:
        self._require(
            offset.stream == self.stream and offset.seq == self.seq + 1,
            f"batch {offset.seq} does not follow {self.seq}",
        )
        for number in self._holds:
            leaving = self._slots[number].revoking & offset.ranges.keys()
            self._require(not leaving, f"batch {offset.seq} reads {leaving}, which are leaving")
        elsewhere = self.positions.planned(offset.ranges)
        self._require(elsewhere is None, f"batch {offset.seq} reads {elsewhere}, which does not stand there")
        self.plan = offset
        self._move_phase(ev.Planned)

    # --- lookups ----------------------------------------------------------------------------------------------------

    def _committed_read(self, event: ev.CommittedRead) -> None:
        epoch = max((at.epoch for at in event.offsets.values() if at is not None), default=0)
        if epoch > self.positions.epoch:
            self._say(f"the group was reset (for the {epoch}. time): every partition goes on where the reset says")
            self.positions.reset_seen(epoch)
        unknown = []
        for tp, committed in event.offsets.items():
            partition = self.positions.answered(tp, PartitionState.ASKED)
            if partition is None:
                continue
            if committed is None and partition.position is None and partition.pending is None:
                unknown.append(tp)
            elif (ours := self.positions.found(tp, committed, stream=self.stream)) is not None and committed:
                self._say(f"{tp} was moved from {ours} to {committed.offset} by another member or an operator")
        for tp in unknown:
            self.positions.start(tp)
        if unknown:
            self._out.append(ev.ResolveStarts(starts=starts.words(unknown, self._known, self.rules.starting)))
        self._left_out(event.asked, event.offsets)

    def _starts_resolved(self, event: ev.StartsResolved) -> None:
        late = []
        for tp, at in event.offsets.items():
            if self.positions.answered(tp, PartitionState.STARTING) is None:
                continue
            if at is None:
                late.append(tp)
                continue
            if starts.is_new(tp, self._known) and at > 0 and (error := starts.first_records_gone(tp, at, self.rules)):
                self._fail(error)
                return
            self.positions.started(tp, at)
        if late:
            if (refused := starts.too_young(late, self.rules)) is not None:
                self._fail(refused)
                return
            for tp in late:
                self.positions.all[tp].questions += 1
            self._out.append(ev.ResolveStarts(starts=starts.at_the_end(late)))
        self._left_out(event.asked, event.offsets)

    def _left_out(self, asked: tuple[TopicPartition, ...], offsets: Mapping[TopicPartition, object]) -> None:
        """An answer that leaves something out is no answer for it."""
        left = tuple(tp for tp in asked if tp not in offsets)
        if left:
            self._ask_later(left, "the answer did not name them")
        else:
            self._lookup_failures = 0

    def _ask_later(self, partitions: tuple[TopicPartition, ...], reason: str) -> None:
        self.positions.not_answered(partitions)
        self._lookup_at_ms = self._now_ms + pause_ms(self._lookup_failures)
        self._lookup_failures += 1
        # The first time says nothing to anyone: a topic that was just made answers so for a moment.
        warn = self._lookup_failures > 1
        self._say(f"offsets of {len(partitions)} partitions could not be read: {reason}; asking again", warn=warn)

    # --- the echo ---------------------------------------------------------------------------------------------------

    def _echo_done(self, event: ev.EchoDone) -> None:
        self.positions.echoed(event.offsets)
        took_ms = self._echo.done(self._now_ms, left=event.left, all_done=not self.positions.due())
        self._counters.committed(took_ms)
        for number in self._echo.silent(self._now_ms):
            self._say(
                f"slot {number} is not in the group at the moment ({event.left.get(number, '')}): the offsets of its "
                "partitions wait, those of the others are committed",
                warn=True,
            )

    def _echo_failed(self, event: ev.EchoFailed) -> None:
        self._echo.failed(self._now_ms, stale=event.stale)
        if not event.stale:
            self._counters.commit_failed()
            self._say(
                f"the group's offsets were not committed ({event.reason}); the rows are safe, the next commit covers "
                "them",
                warn=True,
            )

    # --- joint rules ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        if (due := self.positions.due()) and self._echo.may_order(self._now_ms):
            ours = self.positions.ours
            out = self._echo.waiting_slots
            share = {tp: at for tp in due if (at := ours[tp].position) is not None and ours[tp].slot not in out}
            if share:
                self._echo.in_flight = share
                self._out.append(
                    ev.Echo(
                        offsets=share,
                        slots={tp: ours[tp].slot for tp in share},
                        stream=self.stream,
                        seq=self.seq,
                        epoch=self.positions.epoch,
                        followed=frozenset(tp for tp in share if ours[tp].followed),
                    )
                )
        for slot in [self._slots[number] for number in sorted(self._holds)]:
            if not any(map(self._must_wait, slot.revoking)):
                self._release(slot, overrun=False)
        if self._lookup_at_ms is None and (ask := self.positions.ask()):
            self._out.append(ev.FetchCommitted(partitions=ask))

    def _must_wait(self, tp: TopicPartition) -> bool:
        """Whether a partition that Kafka wants back has to stay for now."""
        partition = self.positions.ours[tp]
        if partition.state in UNKNOWN:
            # a former run's batch, or its rows that Kafka may not know: first see where it stands
            return partition.owed or self.positions.in_flight(tp) > 0
        if partition.state is PartitionState.PLANNED:
            return True
        on_its_way = self._echo.in_flight is not None and tp in self._echo.in_flight
        return tp in self.positions.due() and (on_its_way or partition.position != partition.committed)

    def _tick(self) -> None:
        now = self._now_ms
        self._echo.tick(now)
        if self._lookup_at_ms is not None and now >= self._lookup_at_ms:
            self._lookup_at_ms = None
        for number in [number for number, at_ms in self._wake_at_ms.items() if now >= at_ms]:
            slot = self._slots[number]
            del self._wake_at_ms[number]
            if slot.state is SlotState.ASKING:
                self._out.append(ev.AskReplaced(slot=number))
            else:
                self._join(slot)
        for slot in [self._slots[number] for number in sorted(self._holds)]:
            if now - slot.hold_since_ms >= self.rules.hold_budget_ms:
                self._release(slot, overrun=True)

    # --- ends and helpers -------------------------------------------------------------------------------------------

    def _close(self, leave: bool) -> None:
        for slot in self._slots:
            if slot.state is not SlotState.OUT:
                self._move(slot, ev.Leave)
                self._out.append(ev.Leave(slot=slot.number, leave=leave))
        self._move_phase(ev.Closing)

    def _fail(self, error: SourceError) -> None:
        for slot in self._slots:
            if slot.state is SlotState.ASKING:
                self._move(slot, ev.Fail)
        if self.phase is not Phase.NEW:
            self._move_phase(ev.Fail)
        self._out.append(ev.Fail(error=error))

    def _move(self, slot: _Slot, cause: type) -> None:
        before, to = slot.state, SLOTS.get((slot.state, cause))
        if to is None:
            raise NotInTable(f"slot {slot.number}: {cause.__name__} in state {slot.state.value}")
        slot.state = to
        self._assigned_slots += (to is SlotState.ASSIGNED) - (before is SlotState.ASSIGNED)
        if to is SlotState.REVOKING:
            self._holds.add(slot.number)
        else:
            self._holds.discard(slot.number)

    def _move_phase(self, cause: type) -> None:
        to = PHASES.get((self.phase, cause))
        if to is None:
            raise NotInTable(f"{cause.__name__} in phase {self.phase.value}")
        self.phase = to

    def _say(self, text: str, *, warn: bool = False) -> None:
        self._out.append(ev.Say(text=text, warn=warn))

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise InvariantBroken(f"{otherwise}. The last events:\n{self.story()}")
