"""One run of a query: what events do to it, and through it to its slots and positions.

Runs in: the stream reader (under the coordinator's lock), tests. Deliberately absent: clock, threads, Kafka, Spark;
what Spark's call waits for (``steps``).

Every event of the process comes in through :meth:`Run.handle`. The thread of Spark's call asks :meth:`Run.proceed` what
to do next until that is an :class:`Answer` or :class:`Raise`: the coordinator has no state of its own.
"""

from dataclasses import replace
from typing import assert_never

from spark_group_source.errors import BrokerUnavailable, InvariantBroken, OptionError
from spark_group_source.group import events as ev
from spark_group_source.group import names
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.group.outage import Asker
from spark_group_source.group.positions import NotInTable
from spark_group_source.group.slot import HOME
from spark_group_source.group.states import Phase, RunState
from spark_group_source.group.statistics import Statistics
from spark_group_source.group.steps import Steps
from spark_group_source.model import TopicPartition

START_MS_MAX = 20_000
"""How long brokers may be silent before a query has begun: an address that is wrong is told within 30 s."""


class Run(Steps):
    """One run.

    Args:
        rules: what the options say.
    """

    def handle(self, event: ev.Event, *, now_ms: int) -> list[ev.Command]:
        """Take in one event; returns what has to be done, in order. Never raises: a broken rule fails the run."""
        self._now_ms, self._out = now_ms, []
        try:
            self._take(event)
        except (InvariantBroken, NotInTable) as exc:
            self._fail(exc)
        return self._out

    # --- what may be asked ------------------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        slots = self.machine.slots
        readings = [self.reading.of(slot) for slot in slots]
        positions = self.machine.positions
        return replace(
            self.machine.statistics(self.state.value),
            unreachable_since_ms=self.outage.since_ms or 0,
            uncommitted_offsets=sum(positions.ours[tp].uncommitted for tp in positions.due()),
            records_lost=self.lookout.records_lost + self.reading.records_lost,
            hosts=self.machine.lending.places(),
            lent_since_ms=tuple(slot.since_ms if slot.host != HOME else 0 for slot in slots),
            buffered_bytes=tuple(of.buffered_bytes for of in readings),
            buffered_rows=tuple(of.buffered_rows for of in readings),
            rows_from_memory=tuple(of.from_memory for of in readings),
            rows_from_brokers=tuple(of.from_brokers for of in readings),
            recalled=tuple(slot.recalls for slot in slots),
            moves=self.machine.lending.moves,
            recalls=self.machine.lending.recalls,
        )

    @property
    def drained(self) -> bool:
        """Whether all is at Kafka and no batch will follow."""
        return self.state is RunState.DRAINED

    def next_deadline_ms(self) -> int | None:
        """When :class:`Tick` is due."""
        return self.machine.next_deadline_ms()

    # --- events -----------------------------------------------------------------------------------------------------

    def _take(self, event: ev.Event) -> None:
        match event:
            case ev.Asked():
                self._asked(event)
            case ev.Reading():
                self._reading(event)
            case ev.TargetAsked():
                self._move(ev.TargetAsked)
            case ev.TargetTaken():
                self._answered(Asker.CALL)
                self.planner.take_target(event.ends)
                self._members_of_a_bounded_run()
                self._move(ev.TargetTaken)
            case ev.Stopping():
                self._stopping(event)
            case ev.TopicsListed():
                self._answered(Asker.CALL)
                self._topics = dict(event.topics)
                if not self._asks_for_places:
                    self._begin(self._topics)
            case ev.GroupSeen():
                self._answered(Asker.CALL)
                if self.state is RunState.STARTING and self._topics is not None:
                    self._begin(self._topics, self._places(event))
                else:
                    self._seen = event
            case ev.Looked():
                self._answered(Asker.CALL)
                self._look = None if self._look is None else self.lookout.take(event)
            case ev.NotAnswered():
                self._not_answered(Asker.CALL, event.error)
                if self._look is not None:  # what it began with may not hold any more
                    self._look = self.lookout.begin(
                        self.machine.plannable(), self._now_ms, self.machine.positions.epoch
                    )
            case ev.SiblingsSeen():
                self._siblings_seen(event)
            case ev.HostStocked():
                self.reading.stocked(event)
            case ev.TaskRead():
                self.reading.task_read(event, self.machine.positions.ours)
            case ev.Closing():
                self._machine(event)
                self._move(ev.Closing)
            case ev.Durable() if self.machine.phase is Phase.NEW:
                pass  # Spark repeats it; the call that begins the run says where it stands
            case (
                ev.Assigned()
                | ev.Revoking()
                | ev.Lost()
                | ev.MemberFailed()
                | ev.MemberFenced()
                | ev.MemberEnded()
                | ev.HostCame()
                | ev.HostHeard()
                | ev.HostCut()
                | ev.HostGone()
                | ev.Boundary()
                | ev.Born()
                | ev.Durable()
                | ev.Replay()
                | ev.Planned()
                | ev.Broken()
                | ev.CommittedRead()
                | ev.StartsResolved()
                | ev.LookupFailed()
                | ev.EchoDone()
                | ev.EchoFailed()
                | ev.TopicsSeen()
                | ev.NotReplaced()
                | ev.ReplacedUnknown()
                | ev.Replaced()
                | ev.RecordsGone()
                | ev.RetentionTold()
                | ev.Tick()
            ):
                self._machine(event)
            case _:
                assert_never(event)

    def _machine(self, event: ev.MachineEvent) -> None:
        """Hand an event on; a batch that became durable, or an end, is one of the run too."""
        if isinstance(event, ev.LookupFailed):
            self._not_answered(Asker.LOOKUP, event.error)
        elif isinstance(event, ev.CommittedRead | ev.StartsResolved):
            self._answered(Asker.LOOKUP)
        commands = self.machine.handle(event, now_ms=self._now_ms)
        self._out += commands
        errors = [command.error for command in commands if isinstance(command, ev.Fail)]
        if isinstance(event, ev.Broken):  # the machine says nothing more once it has ended
            errors.append(event.error)
        if errors and self._error is None and self.state is not RunState.CLOSED:
            self._error = errors[0]
            self._move(ev.Fail)
        if self.state in (RunState.PLANNED, RunState.READING) and self.machine.plan is None:
            self._move(ev.Durable)

    def _not_answered(self, asker: Asker, error: BrokerUnavailable) -> None:
        name = self.machine.stream or self.rules.group
        if self.outage.not_answered(asker, error, name=name, now_ms=self._now_ms):
            self._say(f"the brokers do not answer, and are asked again: {error}", warn=True)
        bound_ms = self.rules.broker_timeout_ms
        if self.state in (RunState.AIMING, RunState.STARTING):
            bound_ms = min(bound_ms or START_MS_MAX, START_MS_MAX)
        if (failure := self.outage.over(asker, bound_ms, now_ms=self._now_ms)) is not None:
            self._fail(failure)

    def _answered(self, asker: Asker) -> None:
        if (took_ms := self.outage.answered(asker, now_ms=self._now_ms)) is not None:
            self._say(f"the brokers answer again, after {took_ms / 1000:.0f} s", warn=True)

    def _asked(self, event: ev.Asked) -> None:
        self._unlimited |= event.unlimited
        self._drain = event.drain
        self._start = event.start
        if self.state is RunState.NEW:
            self._members_of_a_bounded_run()
            self._first = event
        elif not event.start.is_initial and self.machine.phase is not Phase.NEW:
            self._machine(ev.Durable(offset=event.start))
        if self.state is not RunState.FAILED:
            self._move(ev.Asked)

    def _reading(self, event: ev.Reading) -> None:
        if self.state in (RunState.CLOSED, RunState.FAILED, RunState.STOPPING):
            return
        if self.state is RunState.NEW:
            self._first = event
        else:
            self._machine(ev.Replay(offset=event.offset))
        if self._error is None:
            self._move(ev.Reading)

    @property
    def _past(self) -> StreamOffset:
        """Where the call that began the run says that the stream stands."""
        assert self._first is not None
        return self._first.offset if isinstance(self._first, ev.Reading) else self._first.start

    @property
    def _asks_for_places(self) -> bool:
        """A stream that has as many slots as agents comes back before these: its places in the group say how many
        there were. With fewer at first the rest would go to ghosts until the session ends, and be moved twice."""
        return self.rules.auto_slots and self.machine.static and not self._past.is_initial

    def _places(self, seen: ev.GroupSeen) -> int:
        numbers = [names.slot_of(self._past.stream, client) for client in seen.given]
        places = 1 + max((number for number in numbers if number is not None), default=-1)
        if places > self.rules.slots:
            self._say(f"the group still has {places} members of this stream: it begins with as many")
        return places

    def _begin(self, topics: dict[str, int], places: int = 0) -> None:
        """The topics are listed: name the stream, or go on with the checkpoint's, and let its members join."""
        first, listed = self._first, tuple(topics)
        if isinstance(first, ev.Reading):
            self._adopt(first.offset)
            self._machine(ev.Replay(offset=first.offset, topics=listed, places=places))
            self._move(ev.Replay)
        elif first is not None and first.start.is_initial:
            try:
                self.rules.starting.resolve([TopicPartition(t, p) for t, count in topics.items() for p in range(count)])
            except OptionError as exc:
                self._fail(exc)
                return
            self._machine(ev.Born(stream=first.name, known=topics, topics=listed))
            self._move(ev.Born)
        elif first is not None:
            self._adopt(first.start)
            self._machine(ev.Durable(offset=first.start, topics=listed, places=places))
            self._move(ev.Durable)

    def _adopt(self, offset: StreamOffset) -> None:
        self.planner.adopt(offset)
        self.lookout.heights.remember(offset)
        self.lookout.topic_ids = {topic: id_ for topic, id_ in offset.topic_ids.items() if id_}
        self.lookout.epoch = offset.epoch
        self._returning = True

    def _stopping(self, event: ev.Stopping) -> None:
        if self.state is RunState.STOPPING:
            return
        plan = self.machine.plan
        # What Spark never began to read it may have refused: then another run's batch has that number.
        if plan is not None and plan.seq == event.durable and self.state is RunState.READING:
            self._machine(ev.Durable(offset=plan))
        elif plan is not None and self._unlimited:
            self._say(
                "the run ends with its only batch, as Trigger.Once does, and its sink does not say that it has it: "
                "Kafka learns of its offsets at the next start. Trigger.AvailableNow brings them at once"
            )
        self._move(ev.Stopping)

    def _siblings_seen(self, event: ev.SiblingsSeen) -> None:
        before, self._sibling = self._sibling, event.waiting
        seen_twice = before is not None and before == event.waiting
        if seen_twice and self.state in (RunState.GATHERING, RunState.SETTLING):
            self._fail(
                OptionError(
                    f"this query reads group {self.rules.group!r} by two loads (the other one is process "
                    f"{event.waiting}), as a self-join of one load() does: they are two streams that share the group's "
                    "partitions, so that each has a part of the records, or waits for the other one's batch. Give each "
                    "side a load() with a group of its own",
                    group=self.rules.group,
                )
            )

    def _members_of_a_bounded_run(self) -> None:
        self.machine.static = self.rules.classic or not self._bounded
