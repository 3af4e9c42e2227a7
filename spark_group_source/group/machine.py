"""How Kafka's rebalances become boundaries between micro-batches: slots, partitions, the echo; one pure machine.

Runs in: the stream reader (inside ``run``, under the coordinator's lock), tests. Deliberately absent: clock (``now_ms``
is passed in), threads, sockets, logs, Kafka, Spark; what Spark's call waits for (``run``), where a partition stands
(``positions``). Events come in through :meth:`GroupMachine.handle` and nowhere else, and everything the outside must do
goes out as commands. After each event the joint rules (`_pump`) run in a fixed order: what must be committed, which
revocations may go, which partitions need a position.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from spark_group_source.errors import InvariantBroken, SourceError
from spark_group_source.group import events as ev
from spark_group_source.group.echo import EchoSchedule
from spark_group_source.group.lending import Lending
from spark_group_source.group.lookups import Lookups
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.group.outbox import Outbox
from spark_group_source.group.partition import UNKNOWN
from spark_group_source.group.positions import NotInTable, Positions, adopted
from spark_group_source.group.renewal import Renewal
from spark_group_source.group.rules import Rules
from spark_group_source.group.slot import Slot
from spark_group_source.group.slots import Slots
from spark_group_source.group.states import PHASES, PartitionState, Phase, SlotState
from spark_group_source.group.statistics import Counters, Statistics
from spark_group_source.group.story import Story
from spark_group_source.model import TopicPartition


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
        self._out = Outbox()
        self._counters = Counters()
        self._slots = Slots(
            rules, self.positions, self._counters, self._out, self._must_wait, self._place, self._place_name
        )
        self.lending = Lending(rules, self._slots, self._out, self._is_settled)
        self._echo = EchoSchedule()
        self._lookups = Lookups(rules, self.positions, self._counters, self._out)
        self._renewal = Renewal(self.positions, self._counters, self._out)
        self._story = Story()

    # --- the door in ------------------------------------------------------------------------------------------------

    def handle(self, event: ev.MachineEvent, *, now_ms: int) -> list[ev.Command]:
        """Take in one event and say what has to be done, in order.

        Raises:
            InvariantBroken: the event contradicts what this machine knows in a way that only a bug can explain.
        """
        self._story.happened(event, now_ms)
        if self.phase is Phase.CLOSED:
            return []
        self._out.begin(now_ms)
        try:
            self._take(event)
            if self.phase not in (Phase.CLOSED, Phase.NEW) and not isinstance(event, ev.HostHeard):
                self._pump()
        except NotInTable as exc:
            self._require(False, str(exc))
        self._story.led_to(self._out.commands, now_ms)
        return self._out.commands

    def _take(self, event: ev.MachineEvent) -> None:
        match event:
            case ev.Assigned() | ev.Revoking() | ev.Lost() | ev.MemberFailed() | ev.MemberFenced():
                self._end_with(self._slots.take(event, seq=self.seq))
                if isinstance(event, ev.Assigned):
                    self._echo.slot_is_back(event.slot)
            case ev.MemberEnded():
                self.lending.ended(event)
            case ev.HostCame() | ev.HostHeard() | ev.HostCut() | ev.HostGone():
                self.lending.take(event, seq=self.seq)
            case ev.Boundary():
                if self.phase is Phase.OPEN:
                    self.lending.boundary(seq=self.seq)
            case ev.Born():
                self._move_phase(ev.Born)
                self.stream, self.seq, self._lookups.known = event.stream, -1, event.known
                self._slots.join_all(self.stream, event.topics, static=self.static)
            case ev.Durable():
                self._durable(event)
            case ev.Replay():
                self._replay(event)
            case ev.Planned():
                self._planned(event.offset)
            case ev.Closing():
                self._close(event.leave)
            case ev.Broken():
                self._end_with(event.error)
            case ev.CommittedRead():
                self._lookups.committed_read(event, self.stream)
            case ev.StartsResolved():
                self._end_with(self._lookups.starts_resolved(event))
            case ev.LookupFailed():
                self._lookups.ask_later(event.partitions, str(event.error))
            case ev.EchoDone():
                self._echo_done(event)
            case ev.EchoFailed():
                self._echo_failed(event)
            case ev.TopicsSeen():
                if self.phase is not Phase.NEW:
                    self._slots.topics_seen(event.topics)
            case ev.NotReplaced():
                self._end_with(self._slots.not_replaced(event))
            case ev.ReplacedUnknown():
                self._end_with(self._slots.replaced_unknown(event))
            case ev.Replaced():
                self._end_with(self._slots.replaced(event.reason))
            case ev.RecordsGone():
                self.positions.gone(event.offsets, event.topics, event.cut)
                self._lookups.made_again(event.topics)
                self._out.say(event.reason, warn=True)
            case ev.RetentionTold():
                self._renewal.told(event.retention_ms)
            case ev.Tick():
                self._tick()
            case _:
                assert_never(event)

    # --- what may be asked ------------------------------------------------------------------------------------------

    def plannable(self) -> dict[TopicPartition, int]:
        """The position of every partition that the next batch may read.

        Those that are leaving are not among them, nor those that Kafka does not show as ours yet.
        """
        found = self.positions.plannable()
        for tp in self._slots.leaving():
            found.pop(tp, None)
        return found

    def began(self) -> frozenset[TopicPartition]:
        """Those that nobody committed, and that begin behind their first record."""
        return frozenset(self._lookups.began)

    def held(self) -> set[TopicPartition]:
        """Every partition that a slot of ours has."""
        return set(self.positions.ours)

    def known(self) -> Mapping[str, int]:
        """How many partitions each topic had when the stream first saw it; topics that came later are not in it."""
        return self._lookups.known

    @property
    def gathered(self) -> bool:
        """Every slot has had an assignment, and every partition can be planned: a first plan misses nothing."""
        return self._slots.all_assigned and self.positions.ready

    @property
    def echoed(self) -> bool:
        """Kafka has the position of every held partition."""
        return not self.positions.due() and self._echo.in_flight is None

    @property
    def slot_count(self) -> int:
        return len(self._slots.all)

    @property
    def slots(self) -> Sequence[Slot]:
        """To be looked at."""
        return self._slots.all

    def awaits_end(self, slot: int) -> bool:
        """Whether anything waits for a slot's member to have closed. Any thread: who asks was ordered to close."""
        found = self._slots.get(slot)
        return found is not None and found.state is SlotState.MOVING

    @property
    def rebalances(self) -> int:
        return self._counters.rebalances

    def next_deadline_ms(self) -> int | None:
        """When :class:`Tick` is due; None while nothing waits for time."""
        if self.phase is Phase.CLOSED:
            return None
        due = self._slots.deadlines_ms() + self._echo.deadlines_ms() + self._lookups.deadlines_ms()
        due += self.lending.deadlines_ms() + self._renewal.deadlines_ms()
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
            generation=max((slot.generation for slot in self._slots.all), default=-1),
            assigned=tuple(len(slot.held) for slot in self._slots.all),
            slots=tuple(slot.state.value for slot in self._slots.all),
            uncommitted=len(self.positions.due()),
        )

    def check(self) -> None:
        """State the invariants, or raise InvariantBroken. Walks over everything: for tests, and for a failure."""
        if self.phase is Phase.CLOSED:  # events are ignored: what it knew then is not kept true
            self._require(self._slots.all_out, "a member is left in a run that has ended")
            return
        self._require((self.plan is not None) == (self.phase is Phase.PLANNED), "a plan without its phase")
        wrong = self._slots.check() or self.positions.check()
        self._require(wrong is None, wrong or "")

    # --- batches ----------------------------------------------------------------------------------------------------

    def _durable(self, event: ev.Durable) -> None:
        offset = event.offset
        if self.phase is Phase.NEW:
            self._move_phase(ev.Durable)
            self._adopt(event, seq=offset.seq)
            return
        self._require(offset.stream == self.stream, f"offset of stream {offset.stream!r}, not of {self.stream!r}")
        if self.plan is not None and offset.seq == self.plan.seq:
            self._lookups.began -= self.plan.ranges.keys()
            self.seq, self.plan = offset.seq, None
            self._echo.durable(self._out.now_ms)
            self.positions.durable()
            self._move_phase(ev.Durable)
            return
        # commit() repeats, one batch late, what the start of latestOffset() said before
        self._require(offset.seq <= self.seq, f"batch {offset.seq} is durable but was never planned here")

    def _adopt(self, event: ev.Durable | ev.Replay, *, seq: int) -> None:
        offset, topics = event.offset, event.topics
        self.stream, self.seq, self._lookups.known = offset.stream, seq, offset.known
        self.positions.epoch = offset.epoch
        replay = seq < offset.seq
        ranges = {} if replay else offset.ranges
        # The batch itself did not read these.
        self.positions.remember(offset.owed, as_of=offset.seq - 1, ranges={}, since=offset.since)
        after = adopted(offset, replay=replay)
        self.positions.remember(after, as_of=seq, ranges=ranges, planned=replay, cut=offset.cut, lost=offset.lost)
        former = offset.known.keys() | offset.topic_ids.keys() | {tp.topic for tp in offset.ranges}
        before = tuple(topic for topic in topics if topic in former) or tuple(sorted(former))
        self._slots.join_all(self.stream, topics, before=before, static=self.static, places=event.places)

    def _replay(self, event: ev.Replay) -> None:
        if self.phase is not Phase.NEW:
            self._require(
                self.plan is not None and event.offset.seq == self.plan.seq,
                f"batch {event.offset.seq} is read but was not planned here",
            )
            return  # the plan of this run, read once more
        self._move_phase(ev.Replay)
        self._adopt(event, seq=event.offset.seq - 1)
        self.plan = event.offset
        self.positions.replayed(event.offset.takes)

    def _planned(self, offset: StreamOffset) -> None:
        self._require(
            offset.stream == self.stream and offset.seq == self.seq + 1,
            f"batch {offset.seq} does not follow {self.seq}",
        )
        leaving = offset.ranges.keys() & set(self._slots.leaving())
        self._require(not leaving, f"batch {offset.seq} reads {leaving}, which are leaving")
        self._require((self.phase, ev.Planned) in PHASES, f"Planned in phase {self.phase.value}")
        elsewhere = self.positions.planned(offset.ranges, offset.takes)
        self._require(elsewhere is None, f"{elsewhere}")
        self.plan = offset
        self._move_phase(ev.Planned)

    # --- the echo ---------------------------------------------------------------------------------------------------

    def _echo_done(self, event: ev.EchoDone) -> None:
        self.positions.echoed(event.offsets, now_ms=self._out.now_ms)
        took_ms = self._echo.done(self._out.now_ms, left=event.left, all_done=not self.positions.due())
        self._counters.committed(took_ms)
        self._tell_of_silent_slots()

    def _echo_failed(self, event: ev.EchoFailed) -> None:
        if event.stale:
            self._echo.stale(self._out.now_ms, event.reason)
            self._tell_of_silent_slots()
            return
        self._echo.failed(self._out.now_ms)
        self._counters.commit_failed()
        self._out.say(
            f"the group's offsets were not committed ({event.reason}); the rows are safe, the next commit covers them",
            warn=True,
        )

    def _tell_of_silent_slots(self) -> None:
        for number, reason in self._echo.silent(self._out.now_ms):
            self._out.say(
                f"slot {number} is not in the group at the moment ({reason}): the offsets of its partitions wait, "
                "those of other slots are committed",
                warn=True,
            )

    # --- joint rules ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        if (due := self.positions.due()) and self._echo.may_order(self._out.now_ms):
            self._order_echo(due)
        self._slots.release_what_may_go(seq=self.seq)
        self._lookups.order()

    def _order_echo(self, due: Iterable[TopicPartition]) -> None:
        offsets: dict[TopicPartition, int] = {}
        slots: dict[TopicPartition, int] = {}
        followed, cut = [], {}
        ours, out = self.positions.ours, self._echo.waiting_slots
        for tp in due:
            partition = ours[tp]
            if partition.slot in out or partition.position is None:
                continue
            offsets[tp], slots[tp] = partition.position, partition.slot
            if partition.followed:
                followed.append(tp)
            if partition.cut is not None:
                cut[tp] = partition.cut
        if offsets:
            self._echo.ordered(offsets, slots.values())
            self._out.order(
                ev.Echo(
                    offsets=offsets,
                    slots=slots,
                    stream=self.stream,
                    seq=self.seq,
                    epoch=self.positions.epoch,
                    followed=frozenset(followed),
                    cut=cut,
                )
            )

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

    def _is_settled(self, tp: TopicPartition) -> bool:
        """Whether Kafka has the position of a partition of ours, and nothing of it is on its way."""
        on_its_way = self._echo.in_flight is not None and tp in self._echo.in_flight
        ready = self.positions.ours[tp].state is PartitionState.READY
        return ready and not on_its_way and tp not in self.positions.due()

    def _place(self, slot: Slot) -> str:
        return self.lending.place(slot)

    def _place_name(self, host: str) -> str:
        return self.lending.hosts.name(host)

    def _tick(self) -> None:
        now = self._out.now_ms
        self._echo.tick(now)
        self._lookups.tick()
        self._renewal.tick()
        self._slots.tick(seq=self.seq)
        self.lending.tick(seq=self.seq)

    # --- ends and helpers -------------------------------------------------------------------------------------------

    def _close(self, leave: bool) -> None:
        self._slots.close(leave=leave)
        self._move_phase(ev.Closing)

    def _end_with(self, error: SourceError | None) -> None:
        """End the run with an error, if there is one. Its members close at once, for nobody would answer them any more:
        the batch in flight may take long, and a revocation that they hold would keep the group waiting for it."""
        if error is None:
            return
        self._slots.close(leave=self.rules.leave_on_stop == "always")
        if self.phase is not Phase.NEW:
            self._move_phase(ev.Fail)
        self._out.order(ev.Fail(error=error))

    def _move_phase(self, cause: type) -> None:
        to = PHASES.get((self.phase, cause))
        if to is None:
            raise NotInTable(f"{cause.__name__} in phase {self.phase.value}")
        self.phase = to

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise InvariantBroken(f"{otherwise}. The last events:\n{self.story()}")
