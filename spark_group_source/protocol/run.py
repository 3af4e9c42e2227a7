"""How Kafka's rebalances become boundaries between micro-batches: one run of a query as one pure machine.

Runs in: the stream reader (under the coordinator's lock), tests. Deliberately absent: clock (``now_ms`` is passed in),
threads, sockets, logs, Kafka, Spark; where a partition stands (``positions``), which member has it (``slots``), the
ranges of a batch (``plan``), lost data (``loss``).

Events come in through :meth:`Run.handle` and nowhere else, and everything the outside must do goes out as commands.
After each event the joint rules (`_pump`) run in a fixed order: what must be committed, which revocations may go, which
partitions need a position. The thread of Spark's call asks :meth:`Run.proceed` what to do next until that is an
:class:`ReturnOffset` or :class:`RaiseError`: the coordinator has no state of its own.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from spark_group_source.errors import BrokerUnavailable, InvariantBroken, OptionError, RebalanceTimeout, SourceError
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.protocol.commit_schedule import CommitSchedule
from spark_group_source.protocol.data_loss import DataLossDetector
from spark_group_source.protocol.lookups import PositionLookups
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.outage import Asker, Outage
from spark_group_source.protocol.outbox import Outbox
from spark_group_source.protocol.partitions import RENEW_LOOK_MS, UNKNOWN, Partitions
from spark_group_source.protocol.placement import Placement
from spark_group_source.protocol.planner import Planner
from spark_group_source.protocol.rules import Rules
from spark_group_source.protocol.slots import HOME, Slot, Slots
from spark_group_source.protocol.states import RUN, PartitionState, RunState, SlotState, moved
from spark_group_source.protocol.statistics import Skips, Statistics

SETTLE_MS_MAX = 10_000
"""How long the first batch of a run waits for a rebalance that is going on; then it takes what it has."""
PATIENCE_MS = 10_000
"""How long an assignment may take before the log says why that can be."""
ECHO_MS_MAX = 60_000
"""How long a run that ends or drains waits for its offsets to be committed."""
STOP_ECHO_MS_MAX = 4_000
"""The same for a run that is stopped: Spark ends its process after some seconds."""
IDLE_LOAD_MAX = 0.04
"""Share of the time that an idle query may spend asking for new records; it sets the pause between two questions."""
IDLE_PAUSES_MS = (100, 1_000)
"""Shortest and longest of these pauses: the latency of a new record, and the cost of many partitions."""
START_MS_MAX = 20_000
"""How long brokers may be silent before a query has begun: an address that is wrong is reported within 30 s."""


class Run:
    """One run's stream: what its slots, partitions and commits do, and what Spark's call waits for.

    Args:
        rules: what the options say.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.state = RunState.NEW
        self.stream = ""
        """The stream's id; empty before the run has begun: no member joins before."""
        self.plan: StreamOffset | None = None
        """The batch in flight: revocations of its partitions are held."""
        self.closed = False
        """Whether the members were told to close: what they and Kafka report is ignored from then on."""
        self.static = True
        self.counts = Statistics(group=rules.group)
        self.positions = Partitions(self.counts)
        self.planner = Planner(rules)
        self.outage = Outage()
        self.lookout = DataLossDetector(fail_on_data_loss=rules.fail_on_data_loss)
        self._out = Outbox()
        self.slots = Slots(
            rules,
            self.positions,
            self.counts,
            self._out,
            must_wait=self._must_wait,
            place=self._place,
            place_name=self._place_name,
        )
        self.lending = Placement(rules, self.slots, self.counts, self._out, self._is_settled)
        self.lookups = PositionLookups(rules, self.positions, self.counts, self._out)
        self._echo = CommitSchedule()
        self._skips = Skips()
        self._renew_at_ms: int | None = None
        self._error: SourceError | None = None
        # --- of Spark's calls
        self._first: ev.NextBatchRequested | ev.BatchStarted | None = None  # the call that began it
        self._topics: dict[str, int] | None = None  # those that there are, once they are listed
        self._start = StreamOffset.initial(rules.group)
        self._unlimited = self._returning = self._drain = False
        self._since_ms = 0  # in this state
        self._unsettled_since_ms: int | None = None
        self._told_waiting = False
        self._seen: ev.GroupDescribed | None = None
        self._describe_at_ms = 0
        self._settled = False
        self._elsewhere: list[TopicPartition] = []  # with members of this stream's names that this run does not have
        self._look: ev.ReadLogEnds | None = None
        self._idle = False
        self._asked_at_ms = 0
        self._rest_rebalances = 0

    # --- the door in ------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, *, now_ms: int) -> list[ev.Command]:
        """Take in one event; returns what has to be done, in order. Never raises: a broken rule fails the run."""
        self._out.begin(now_ms)
        try:
            self._happen(event)
        except InvariantBroken as exc:
            self._broken(exc)
        return self._out.commands

    def proceed(self, *, now_ms: int) -> tuple[ev.Step, list[ev.Command]]:
        """What the thread of Spark's call does next, and the commands that come with it."""
        self._out.begin(now_ms)
        step: ev.Step | None = None
        while step is None:
            try:
                step = self._next()
            except InvariantBroken as exc:
                self._broken(exc)
        again_at_ms = self.outage.again_at_ms(Asker.CALL)
        if isinstance(step, ev.BrokerQuery) and now_ms < again_at_ms:
            step = ev.Wait(until_ms=again_at_ms)
        return step, self._out.commands

    # --- what may be asked ------------------------------------------------------------------------------------------

    @property
    def seq(self) -> int:
        """Number of the last durable batch; -1 before the first."""
        return self.positions.seq

    @property
    def gathered(self) -> bool:
        """Every slot has had an assignment, and every partition can be planned: a first plan misses nothing."""
        return self.slots.all_assigned and self.positions.ready

    @property
    def echoed(self) -> bool:
        """Kafka has the position of every held partition."""
        return not self.positions.due() and self._echo.in_flight is None

    @property
    def drained(self) -> bool:
        """Whether all is at Kafka and no batch will follow."""
        return self.state is RunState.DRAINED

    def plannable(self) -> dict[TopicPartition, int]:
        """The position of every partition that the next batch may read.

        Those that are leaving are not among them, nor those that Kafka does not show as ours yet.
        """
        found = self.positions.plannable()
        for tp in self.slots.leaving():
            found.pop(tp, None)
        return found

    def awaits_end(self, slot: int) -> bool:
        """Whether anything waits for a slot's member to have closed. Any thread: who asks was ordered to close."""
        found = self.slots.get(slot)
        return found is not None and found.state is SlotState.MOVING

    def next_deadline_ms(self) -> int | None:
        """When :class:`Tick` is due; None while nothing waits for time."""
        if self.closed:
            return None
        due = self.slots.deadlines_ms() + self._echo.deadlines_ms() + self.lookups.deadlines_ms()
        due += self.lending.deadlines_ms()
        due += [] if self._renew_at_ms is None else [self._renew_at_ms]
        return min(due, default=None)

    def statistics(self) -> Statistics:
        """What happened so far and how things stand: a copy."""
        slots, positions = self.slots.all, self.positions
        return replace(
            self.counts,
            stream=self.stream,
            seq=self.seq,
            state=self.state.value,
            generation=max((slot.generation for slot in slots), default=-1),
            slots=tuple(slot.state.value for slot in slots),
            assigned=tuple(len(slot.held) for slot in slots),
            hosts=self.lending.places(),
            lent_since_ms=tuple(slot.since_ms if slot.host != HOME else 0 for slot in slots),
            buffered_bytes=tuple(slot.buffered_bytes for slot in slots),
            buffered_rows=tuple(slot.buffered_rows for slot in slots),
            rows_from_memory=tuple(slot.rows_from_memory for slot in slots),
            rows_from_brokers=tuple(slot.rows_from_brokers for slot in slots),
            recalled=tuple(slot.recalls for slot in slots),
            unreachable_since_ms=self.outage.since_ms or 0,
            uncommitted=len(positions.due()),
            uncommitted_offsets=sum(positions.ours[tp].uncommitted for tp in positions.due()),
            records_lost=self.lookout.records_lost + self._skips.records_lost,
        )

    def check(self) -> None:
        """State the invariants, or raise InvariantBroken. Walks over everything: for tests, and for a failure."""
        if self.closed:  # events are ignored: what it knew then is not kept true
            _require(self.slots.all_out, "a member is left in a run that has ended")
            return
        wrong = self.slots.check() or self.positions.check()
        _require(wrong is None, wrong or "")

    # --- events -----------------------------------------------------------------------------------------------------

    def _happen(self, event: ev.Event) -> None:
        """Take in an event, from outside or noticed in a step."""
        self._out.happened(event)
        if isinstance(event, ev.CallEvent):
            self._take_of_call(event)
        elif not self.closed:
            self._take(event)
            if self.stream and not self.closed and not isinstance(event, ev.AgentHeartbeat):
                self._pump()

    def _take(self, event: ev.GroupEvent) -> None:
        match event:
            case ev.Assigned() | ev.Revoking() | ev.Lost() | ev.MemberFailed() | ev.MemberFenced():
                self._end_with(self.slots.take(event))
                if isinstance(event, ev.Assigned):
                    self._echo.slot_is_back(event.slot)
            case ev.MemberEnded():
                self.lending.ended(event)
            case (
                ev.AgentConnected()
                | ev.AgentHeartbeat()
                | ev.AgentDisconnected()
                | ev.AgentEnded()
                | ev.TransactionsChecked()
            ):
                self.lending.take(event)
            case ev.BatchBoundary():
                if self.plan is None:
                    self.lending.boundary()
            case ev.Durable():
                self._durable(event.offset)
            case ev.Planned():
                self._planned(event.offset)
            case ev.CommittedOffsetsRead():
                self._answered(Asker.LOOKUP)
                self.lookups.committed_read(event, self.stream)
            case ev.StartsResolved():
                self._answered(Asker.LOOKUP)
                self._end_with(self.lookups.starts_resolved(event))
            case ev.LookupFailed():
                self._not_answered(Asker.LOOKUP, event.error)
                self.lookups.ask_later(event.partitions, str(event.error))
            case ev.OffsetsCommitted():
                self._echo_done(event)
            case ev.OffsetCommitFailed():
                self._echo_failed(event)
            case ev.TopicsChanged():
                if self.stream:
                    self.slots.topics_seen(event.topics)
            case ev.NotReplaced():
                self._end_with(self.slots.not_replaced(event))
            case ev.ReplacedUnclear():
                self._end_with(self.slots.replaced_unknown(event))
            case ev.Replaced():
                self._end_with(self.slots.replaced(event.reason))
            case ev.RecordsMissing():
                self.positions.gone(event.offsets, event.topics, event.cut)
                self.lookups.made_again(event.topics)
                self._out.say(event.reason, warn=True)
            case ev.Tick():
                self._tick()
            case _:
                assert_never(event)

    def _take_of_call(self, event: ev.CallEvent) -> None:
        """What Spark says, what its thread was answered, and numbers: none of it moves a partition by itself."""
        match event:
            case ev.NextBatchRequested():
                self._asked(event)
            case ev.BatchStarted():
                self._reading(event)
            case ev.TargetRequested():
                self._move(ev.TargetRequested)
            case ev.TargetRead():
                self._answered(Asker.CALL)
                self.planner.take_target(event.ends)
                self._members_of_a_bounded_run()
                self._move(ev.TargetRead)
            case ev.TopicsListed():
                self._answered(Asker.CALL)
                self._topics = dict(event.topics)
                if self.state is RunState.STARTING and not self._asks_for_places:
                    self._begin(self._topics)
            case ev.GroupDescribed():
                self._answered(Asker.CALL)
                if self.state is RunState.STARTING and self._topics is not None:
                    self._begin(self._topics, self._places(event))
                else:
                    self._seen = event
            case ev.LogEndsRead():
                self._answered(Asker.CALL)
                self._look = None if self._look is None else self.lookout.take(event)
            case ev.RequestFailed():
                self._not_answered(Asker.CALL, event.error)
                if self._look is not None:  # what it began with may not hold any more
                    self._look = self.lookout.begin(self.plannable(), self._now_ms, self.positions.epoch)
            case ev.StopRequested():
                self._stopping(event)
            case ev.MembersClosing():
                if not self.closed:
                    self.slots.close(leave=event.leave)
                    self.closed = True
                self._move(ev.MembersClosing)
            case ev.InternalFailure():
                self._end_with(event.error)
            case ev.PrefetchReported():
                self.slots.stocked(event)
            case ev.TaskReported():
                self.slots.task_read(event)
                self._skips.add(event)
            case _:
                assert_never(event)

    # --- the beginning ----------------------------------------------------------------------------------------------

    def _asked(self, event: ev.NextBatchRequested) -> None:
        self._unlimited |= event.unlimited
        self._drain = event.drain
        self._start = event.start
        if self.state is RunState.NEW:
            self._members_of_a_bounded_run()
            self._first = event
        elif not event.start.is_initial and self.stream and not self.closed:
            self._happen(ev.Durable(offset=event.start))
        if self.state is not RunState.FAILED:
            self._move(ev.NextBatchRequested)

    def _reading(self, event: ev.BatchStarted) -> None:
        if self.state in (RunState.CLOSED, RunState.FAILED, RunState.STOPPING):
            return
        if self.state is RunState.NEW:
            self._first = event
        else:
            planned = self.plan is not None and event.offset.seq == self.plan.seq
            _require(planned, f"batch {event.offset.seq} is read but was not planned here")
        self._move(ev.BatchStarted)

    @property
    def _past(self) -> StreamOffset:
        """Where the call that began the run says that the stream stands."""
        assert self._first is not None
        return self._first.offset if isinstance(self._first, ev.BatchStarted) else self._first.start

    @property
    def _asks_for_places(self) -> bool:
        """A stream that has as many slots as agents comes back before these: its places in the group say how many
        there were. With fewer at first the rest would go to ghosts until the session ends, and be moved twice."""
        return self.rules.auto_slots and self.static and not self._past.is_initial

    def _places(self, seen: ev.GroupDescribed) -> int:
        numbers = [identifiers.slot_of(self._past.stream, client) for client in seen.given]
        places = 1 + max((number for number in numbers if number is not None), default=-1)
        if places > self.rules.slots:
            self._out.say(f"the group still has {places} members of this stream: it begins with as many")
        return places

    def _begin(self, topics: dict[str, int], places: int = 0) -> None:
        """The topics are listed: name the stream, or go on with the checkpoint's, and let its members join."""
        first, past = self._first, self._past
        if isinstance(first, ev.NextBatchRequested) and past.is_initial:
            try:
                self.rules.starting.resolve([TopicPartition(t, p) for t, count in topics.items() for p in range(count)])
            except OptionError as exc:
                self._end_with(exc)
                return
            self.stream, self.lookups.known = first.name, topics
            self.slots.join_all(self.stream, tuple(topics), static=self.static)
            self._move(ev.StreamCreated)
        else:
            replayed = isinstance(first, ev.BatchStarted)
            self._adopt(past, tuple(topics), places, replay=replayed)
            self._move(ev.Replay if replayed else ev.Durable)
        self._renew_at_ms = self._now_ms + RENEW_LOOK_MS

    def _adopt(self, offset: StreamOffset, topics: tuple[str, ...], places: int, *, replay: bool) -> None:
        """Go on from a checkpoint: after its last batch, or before it if that is to be run again."""
        self._returning = True
        self.lookout.adopt(offset)
        self.stream, self.lookups.known = offset.stream, offset.known
        self.positions.adopt(offset, replay=replay)
        self.plan = offset if replay else None
        former = offset.known.keys() | offset.topic_ids.keys() | {tp.topic for tp in offset.ranges}
        before = tuple(topic for topic in topics if topic in former) or tuple(sorted(former))
        self.slots.join_all(self.stream, topics, before=before, static=self.static, places=places)

    def _members_of_a_bounded_run(self) -> None:
        self.static = self.rules.classic or not self._bounded

    # --- batches ----------------------------------------------------------------------------------------------------

    def _planned(self, offset: StreamOffset) -> None:
        _require(
            offset.stream == self.stream and offset.seq == self.seq + 1 and self.plan is None,
            f"batch {offset.seq} does not follow {self.seq if self.plan is None else self.plan.seq}",
        )
        leaving = offset.ranges.keys() & set(self.slots.leaving())
        _require(not leaving, f"batch {offset.seq} reads {leaving}, which are leaving")
        self._move(ev.Planned)
        self.positions.planned(offset.ranges, offset.takes)
        self.plan = offset

    def _durable(self, offset: StreamOffset) -> None:
        _require(offset.stream == self.stream, f"offset of stream {offset.stream!r}, not of {self.stream!r}")
        if self.plan is None or offset.seq != self.plan.seq:  # maybe the start of before, once more
            _require(offset.seq <= self.seq, f"batch {offset.seq} is durable but was never planned here")
            return
        self.lookups.began -= self.plan.ranges.keys()
        self.plan = None
        self._echo.durable(self._now_ms)
        self.positions.durable(offset.seq)
        if self.state in (RunState.PLANNED, RunState.READING):
            self._move(ev.Durable)

    # --- the echo ---------------------------------------------------------------------------------------------------

    def _echo_done(self, event: ev.OffsetsCommitted) -> None:
        self.positions.echoed(event.offsets, now_ms=self._now_ms)
        took_ms = self._echo.done(self._now_ms, left=event.left, all_done=not self.positions.due())
        self.counts.committed(took_ms)
        self._tell_of_silent_slots()

    def _echo_failed(self, event: ev.OffsetCommitFailed) -> None:
        if event.stale:
            self._echo.stale(self._now_ms, event.reason)
            self._tell_of_silent_slots()
            return
        self._echo.failed(self._now_ms)
        self.counts.commits_failed += 1
        self._out.say(
            f"the group's offsets were not committed ({event.reason}); the rows are safe, the next commit covers them",
            warn=True,
        )

    def _tell_of_silent_slots(self) -> None:
        for number, reason in self._echo.silent(self._now_ms):
            self._out.say(
                f"slot {number} is not in the group at the moment ({reason}): the offsets of its partitions wait, "
                "those of other slots are committed",
                warn=True,
            )

    # --- joint rules ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        if (due := self.positions.due()) and self._echo.may_order(self._now_ms):
            self._order_echo(due)
        self.slots.release_what_may_go()
        self.lookups.order()

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
                ev.CommitOffsets(
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
        if partition.state is PartitionState.IN_FLIGHT:
            return True
        return tp in self.positions.due() and (self._on_its_way(tp) or partition.position != partition.committed)

    def _is_settled(self, tp: TopicPartition) -> bool:
        """Whether Kafka has the position of a partition of ours, and nothing of it is on its way."""
        ready = self.positions.ours[tp].state is PartitionState.READY
        return ready and not self._on_its_way(tp) and tp not in self.positions.due()

    def _place(self, slot: Slot) -> str:
        return self.lending.place(slot)

    def _place_name(self, host: str) -> str:
        return self.lending.hosts.name(host)

    def _on_its_way(self, tp: TopicPartition) -> bool:
        return self._echo.in_flight is not None and tp in self._echo.in_flight

    def _tick(self) -> None:
        self._echo.tick(self._now_ms)
        self.lookups.tick()
        self._renew()
        self.slots.tick()
        self.lending.tick()

    def _renew(self) -> None:
        if self._renew_at_ms is not None and self._now_ms >= self._renew_at_ms:
            self.counts.offsets_renewed += self.positions.renew(self._now_ms)
            self._renew_at_ms = self._now_ms + RENEW_LOOK_MS

    # --- brokers that do not answer ---------------------------------------------------------------------------------

    def _not_answered(self, asker: Asker, error: BrokerUnavailable) -> None:
        name = self.stream or self.rules.group
        if self.outage.not_answered(asker, error, name=name, now_ms=self._now_ms):
            self._out.say(f"the brokers do not answer, and are asked again: {error}", warn=True)
        bound_ms = self.rules.broker_timeout_ms
        if self.state in (RunState.TARGETING, RunState.STARTING):
            bound_ms = min(bound_ms or START_MS_MAX, START_MS_MAX)
        self._end_with(self.outage.over(asker, bound_ms, now_ms=self._now_ms))

    def _answered(self, asker: Asker) -> None:
        if (took_ms := self.outage.answered(asker, now_ms=self._now_ms)) is not None:
            self._out.say(f"the brokers answer again, after {took_ms / 1000:.0f} s", warn=True)

    # --- steps: what Spark's call waits for and does, state by state ------------------------------------------------

    def _next(self) -> ev.Step | None:
        match self.state:
            case RunState.NEW | RunState.OPEN | RunState.CLOSED:
                return ev.ReturnOffset(offset=self._start)
            case RunState.PLANNED | RunState.READING:
                assert self.plan is not None
                return ev.ReturnOffset(offset=self.plan)
            case RunState.FAILED:
                assert self._error is not None
                return ev.RaiseError(error=self._error)
            case RunState.TARGETING:
                return ev.ReadTarget()
            case RunState.STARTING:
                return ev.ListTopics() if self._topics is None else ev.DescribeGroup()
            case RunState.GATHERING:
                return self._gathering()
            case RunState.SETTLING:
                return self._settling()
            case RunState.RESTING:
                return self._resting()
            case RunState.LOOKING:
                return self._looking()
            case RunState.DRAINING:
                return self._draining()
            case RunState.DRAINED:
                return self._wait(IDLE_PAUSES_MS[1]) or ev.ReturnOffset(offset=self._start)
            case RunState.ENDING:
                return self._ending()
            case RunState.STOPPING:
                return self._closing()
            case _:
                assert_never(self.state)

    def _gathering(self) -> ev.Step | None:
        if self._drain:
            self._move(ev.DrainRequested)
            return None
        if self.lending.any and (wait := self._lend()) is not None:
            return wait
        enough = self.gathered if self._is_first or self._bounded else self.positions.resolved
        if not enough:
            return self._wait_for_the_group()
        # "nothing to read" must not mean "nothing assigned yet"; after a while it may
        late = self._returning and not self.gathered
        if late and (wait := self._wait(SETTLE_MS_MAX)) is not None:
            return wait
        self._returning, self._seen = False, None
        self._move(ev.PositionsKnown)
        return None

    def _lend(self) -> ev.Wait | None:
        """Before the next batch is planned slots go where they belong; the plan waits for them, but not for long."""
        self._happen(ev.BatchBoundary())
        until_ms = self.lending.waits_until_ms()
        return None if until_ms is None or until_ms <= self._now_ms else ev.Wait(until_ms=until_ms)

    def _wait_for_the_group(self) -> ev.Step | None:
        budget_ms = self.rules.joining_budget_ms
        since_ms = max(self._since_ms, self.outage.ended_ms)
        waited_ms = self._now_ms - since_ms
        if waited_ms >= budget_ms and self._seen is None:
            return ev.DescribeGroup()  # the group is silent; or nobody reaches it, and an outage has a bound of its own
        if waited_ms >= budget_ms:
            self._end_with(self._timeout("given an assignment", waited_ms))
            return None
        self._seen = None
        patience_ms = min(PATIENCE_MS, budget_ms)
        if waited_ms >= patience_ms and not self._told_waiting:
            self._told_waiting = True
            self._out.say(
                f"group {self.rules.group} has not given an assignment to all {len(self.slots.all)} members after "
                f"{waited_ms / 1000:.0f} s; waiting up to {budget_ms / 1000:.0f} s. Another member may be in "
                "a long batch. A query that reads this group by two loads waits for itself: give each side a load() "
                "with a group of its own",
                warn=True,
            )
        return ev.Wait(until_ms=since_ms + (budget_ms if self._told_waiting else patience_ms))

    def _settling(self) -> ev.Step | None:
        """Whether we have all that the group means to give us now, so that "nothing to read" can be believed.

        The members alone cannot tell: an assignment may still be on its way (KIP-848 gives partitions one by one), and
        members of a killed run of this stream may still have some, which will be ours when their session ends.
        """
        if not (self._is_first or self._bounded):
            self._move(ev.GroupStable)
            return None
        if self._seen is None:
            early = self._now_ms < self._describe_at_ms
            return ev.Wait(until_ms=self._describe_at_ms) if early else ev.DescribeGroup()
        self._settled, self._seen = self._is_settled_group(self._seen), None
        self._describe_at_ms = self._now_ms + IDLE_PAUSES_MS[0]
        if self._settled or not self._is_first or self._now_ms - self._since_ms >= SETTLE_MS_MAX:
            self._move(ev.GroupStable)
        return None

    def _is_settled_group(self, seen: ev.GroupDescribed) -> bool:
        slots, held = set(range(len(self.slots.all))), self.positions.ours.keys()
        ours = {client: slot for client in seen.given if (slot := identifiers.slot_of(self.stream, client)) in slots}
        given = {tp for client in ours for tp in seen.given[client]}
        self._elsewhere = sorted(given - held)
        return self.gathered and seen.state == "stable" and slots == set(ours.values()) and given == held

    def _resting(self) -> ev.Step | None:
        """An idle query asks no more often than it can afford; new records are always looked for after the call."""
        shortest, longest = IDLE_PAUSES_MS
        pause_ms = min(max(int(self.lookout.took_ms / IDLE_LOAD_MAX), shortest), longest)
        rests = self._idle and self.counts.rebalances == self._rest_rebalances
        if rests and self._now_ms < self._asked_at_ms + pause_ms:
            return ev.Wait(until_ms=self._asked_at_ms + pause_ms)
        self._move(ev.PauseEnded)
        self._look = self.lookout.begin(self.plannable(), self._now_ms, self.positions.epoch)
        return None

    def _looking(self) -> ev.Step | None:
        if self._look is not None:
            return self._look
        self._asked_at_ms, self._rest_rebalances = self._now_ms, self.counts.rebalances
        for text in self.lookout.warnings:
            self._out.say(text, warn=True)
        if self.lookout.error is not None:
            self._end_with(self.lookout.error)
            return None
        if self.lookout.gone is not None:
            self._happen(self.lookout.gone)
        planned = self.planner.cut(
            self,
            self.lookout.ends,
            self.lookout.topic_ids,
            self.lookout.leader_epochs,
            first=self._is_first,
            unlimited=self._unlimited,
            now_ms=self._now_ms,
        )
        self._idle = planned is None
        if planned is not None:
            self._unsettled_since_ms = None
            self.lookout.heights.remember(planned)
            self._happen(ev.Planned(offset=planned))
        else:
            self._nothing()
        return None

    def _nothing(self) -> None:
        if not self._bounded:
            self._move(ev.NothingToRead)
        elif self._settled and self.lookout.complete and not self.lookout.suspects:
            self._move(ev.TargetReached if self.planner.bounded else ev.NothingToRead)
        else:
            if self._unsettled_since_ms is None:
                self._unsettled_since_ms = self._now_ms
            waited_ms = self._now_ms - self._unsettled_since_ms
            if waited_ms >= self.rules.joining_budget_ms:
                self._end_with(self._timeout('come to rest, so that "nothing to read" could be believed,', waited_ms))
            else:
                self._move(ev.GroupUnstable)

    def _draining(self) -> ev.Step | None:
        """Plan nothing more: whoever asked for it learns when all that is durable is at Kafka."""
        if self.echoed:
            self._move(ev.AllCommitted)
            return None
        if (wait := self._wait(ECHO_MS_MAX)) is not None:
            return wait
        self._not_echoed()
        return ev.ReturnOffset(offset=self._start)

    def _ending(self) -> ev.Step | None:
        if not self.echoed:
            if (wait := self._wait(ECHO_MS_MAX)) is not None:
                return wait
            self._not_echoed()
        if self.rules.leave_on_stop == "never":
            self._move(ev.AllCommitted)
            return None
        return ev.CloseMembers(leave=True)

    def _stopping(self, event: ev.StopRequested) -> None:
        if self.state is RunState.STOPPING:
            return
        plan = self.plan
        # What Spark never began to read it may have refused: then another run's batch has that number.
        if plan is not None and plan.seq == event.durable and self.state is RunState.READING:
            self._happen(ev.Durable(offset=plan))
        elif plan is not None and self._unlimited:
            self._out.say(
                "the run ends with its only batch, as Trigger.Once does, and its sink does not say that it has it: "
                "Kafka learns of its offsets at the next start. Trigger.AvailableNow brings them at once"
            )
        self._move(ev.StopRequested)

    def _closing(self) -> ev.Step | None:
        if self._error is None and not self.echoed and (wait := self._wait(STOP_ECHO_MS_MAX)) is not None:
            return wait
        rule = self.rules.leave_on_stop
        return ev.CloseMembers(leave=rule == "always" or (rule == "auto" and self._bounded))

    def _not_echoed(self) -> None:
        seconds = ECHO_MS_MAX // 1000
        self._out.say(f"the group's offsets were not committed within {seconds} s; the next start does it", warn=True)

    # --- helpers ----------------------------------------------------------------------------------------------------

    @property
    def _now_ms(self) -> int:
        return self._out.now_ms

    @property
    def _is_first(self) -> bool:
        """Whether the next batch is the stream's first."""
        return self._start.is_initial

    @property
    def _bounded(self) -> bool:
        """Whether this run ends by itself: AvailableNow or Once."""
        return self._unlimited or self.planner.bounded

    def _wait(self, at_most_ms: int) -> ev.Wait | None:
        """Wait in this state, but not for longer than that in all."""
        until_ms = self._since_ms + at_most_ms
        return ev.Wait(until_ms=until_ms) if self._now_ms < until_ms else None

    def _timeout(self, done: str, waited_ms: int) -> RebalanceTimeout:
        slots = ", ".join(sorted({slot.state.value for slot in self.slots.all}))
        others = (
            f"Members of this stream that are not this run's have {len(self._elsewhere)} partitions, such as "
            f"{self._elsewhere[0]}: another driver of it may still run. "
            if self._elsewhere
            else ""
        )
        return RebalanceTimeout(
            f"group {self.rules.group!r} has not {done} within {waited_ms / 1000:.0f} s, for all "
            f"{len(self.slots.all)} members of this query ({slots}). {others}`spark-group describe` shows who is "
            f"in the group. The last events:\n"
            f"{self._out.story()}",
            group=self.rules.group,
            waited_ms=waited_ms,
        )

    def _broken(self, error: InvariantBroken) -> None:
        """A rule was broken, which only a bug can explain: the last events say how."""
        self._end_with(InvariantBroken(f"{error}. The last events:\n{self._out.story()}"))

    def _end_with(self, error: SourceError | None) -> None:
        """End the run with an error, if there is one. Its members close at once, for nobody would answer them any more:
        the batch in flight may take long, and a revocation that they hold would keep the group waiting for it."""
        if error is None:
            return
        if not self.closed:
            self.slots.close(leave=self.rules.leave_on_stop == "always")
            self.closed = True
            self._out.order(ev.Fail(error=error))
        if self._error is None and self.state is not RunState.CLOSED:
            self._error = error
            self._move(ev.Fail)

    def _move(self, cause: type) -> None:
        to = moved(RUN, self.state, cause, "the run")
        if to is not self.state or cause is ev.NextBatchRequested:
            self._since_ms = self._now_ms
        self.state = to


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvariantBroken(otherwise)
