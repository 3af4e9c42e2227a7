"""A run with short methods around it: a test makes Spark's calls, and Kafka answers from dictionaries.

Runs in: tests. Deliberately absent: threads; a run without Kafka's answers (``harness``). Each event is followed by
:func:`require_consistent`, so every test also tests the invariants.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeVar

from kit.contradictions import require_consistent
from kit.harness import GROUP, STREAM, Commands, ManualClock, only, rules_with, tps
from spark_group_source.errors import BrokerUnavailable
from spark_group_source.model import StartAt, TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.protocol.offsets import BatchKey, StreamOffset
from spark_group_source.protocol.run import Run
from spark_group_source.protocol.states import RunState

GIVEN_UP_MS = 3_000
"""How long a request takes to fail while the brokers are down."""
ANSWER_MS = 10
"""How long Kafka takes to execute a command."""
STEPS_MAX = 20_000
"""More steps than this in one call: the run loops."""

C = TypeVar("C")
K = TypeVar("K")
V = TypeVar("V")


class RunHarness:
    """One run of a query with its shell: a test makes Spark's calls and sets what Kafka has.

    Kafka answers requests after :data:`ANSWER_MS` from the dictionaries below; commands whose class is in ``silent``
    are never answered. Time passes only while the run waits, and in :meth:`pass_time`.

    Args:
        slots: the members of the run. Slot 0 gets all partitions unless ``assignments`` sets others.
        topics: the subscribed topics and their partition counts.
        rules: other rules.
    """

    def __init__(self, slots: int = 1, topics: Mapping[str, int] | None = None, **rules: Any) -> None:
        self.clock = ManualClock(1_000)
        self.run = Run(rules_with(slots=slots, **rules))
        self.run.placement.transactional = True
        self.down_until_ms = 0  # no broker answers
        self.topics = dict(topics or {"orders": 2})
        self.ids = {topic: f"id-{topic}" for topic in self.topics}
        partitions = [tp for topic, count in self.topics.items() for tp in tps(topic, *range(count))]
        self.firsts = dict.fromkeys(partitions, 0)
        self.ends = dict.fromkeys(partitions, 0)
        self.leader_epochs: dict[TopicPartition, int] = {}  # of the leaders that report the ends
        self.epoch_ends: dict[TopicPartition, int] = {}  # where the records of any earlier epoch end
        self.committed: dict[TopicPartition, ev.Committed] = {}
        self.assignments: dict[int, tuple[TopicPartition, ...]] = dict.fromkeys(range(slots), ()) | {
            0: tuple(partitions)
        }
        self.former_slots: set[int] = set()  # members that an earlier run left in the group
        self.group_state = "stable"
        self.ends_took_ms = 0
        self.silent: set[type] = set()
        self.leaderless: set[TopicPartition] = set()  # brokers report that they have no leader
        self.unreachable: set[TopicPartition] = set()  # their leaders do not answer: a request about them alone fails
        self.unanswered_starts: set[TopicPartition] = set()  # no broker resolves where they start
        self.unanswered_commits: set[TopicPartition] = set()  # reads of committed offsets leave them out
        self.clients: dict[int, int] = {}
        self.start = StreamOffset.initial(GROUP)
        self.steps: list[ev.Step] = []
        self.history: Commands = []
        self._later: list[tuple[int, ev.Event]] = []

    @classmethod
    def resumed(cls, past: StreamOffset, slots: int = 1, **rules: Any) -> "RunHarness":
        """A run that continues a stream after this durable batch, which is committed; there are no newer records."""
        run, ends = cls(slots, **rules), past.positions()
        run.start, run.ends = past, ends
        run.committed = {tp: ev.Committed(offset=at, stream=STREAM, seq=past.seq) for tp, at in ends.items()}
        return run

    def restore(self, ends: Mapping[TopicPartition, int], *, epoch: int, reset_number: int) -> None:
        """The cluster is restored from a backup: logs end there, under leaders of this earlier epoch, and
        ``spark-group reset`` has set the group's offsets to these ends."""
        self.ends = dict(ends)
        self.leader_epochs = dict.fromkeys(ends, epoch)
        self.committed = {tp: ev.Committed(offset=at, reset_number=reset_number) for tp, at in ends.items()}

    # --- Spark's calls ----------------------------------------------------------------------------------------------

    def latest(self, *, unlimited: bool = False, drain: bool = False) -> StreamOffset:
        """Call ``latestOffset`` with ``start``, which is durable."""
        if drain:
            self.feed(ev.DrainRequested())
        return self.call(ev.NextBatchRequested(start=self.start, unlimited=unlimited, new_stream=STREAM))

    def batch(self, *, unlimited: bool = False) -> StreamOffset:
        """Plan the next batch and read it; it is durable when the next one is requested."""
        end = self.latest(unlimited=unlimited)
        if end != self.start:
            self.call(ev.BatchStarted(offset=end))
        self.start = end
        return end

    def stop(self, *, durable: int = -1) -> None:
        """Stop the run. ``durable``: the number in the sink's mark, which is of the batch in flight if that has it."""
        plan = self.run.plan
        self.feed(ev.BatchMarked(batch=BatchKey.of(plan) if plan and plan.seq == durable else BatchKey(durable, "")))
        self.call(ev.StopRequested())

    def call(self, event: ev.Event) -> StreamOffset:
        """Execute the steps of a call until it returns."""
        self.feed(event)
        return self.continue_call()

    def continue_call(self) -> StreamOffset:
        """Execute the remaining steps of a call."""
        for _ in range(STEPS_MAX):
            match step := self.step():
                case ev.ReturnOffset():
                    return step.offset
                case ev.RaiseError():
                    raise step.error
                case ev.Wait():
                    assert step.until_ms > self.clock(), "a wait for what is past"
                    self._wait(step.until_ms)
                case _:
                    self.feed(self.answer(step))
        raise AssertionError(f"no answer after {STEPS_MAX} steps, in state {self.run.state.value}")

    def step(self) -> ev.Step:
        """The run's next step; its commands are executed."""
        step, commands = self.run.proceed(now_ms=self.clock())
        self._carry_out(commands)
        self.steps.append(step)
        return step

    def begin(self, event: ev.Event, until: RunState) -> None:
        """Start a call, and leave it when the run is in this state."""
        self.feed(event)
        for _ in range(STEPS_MAX):
            if self.state() is until:
                return
            step = self.step()
            if isinstance(step, ev.Wait):
                self._wait(step.until_ms)
            elif self.state() is not until:
                self.feed(self.answer(step))
        raise AssertionError(f"{until.value} was not reached, but {self.state().value}")

    # --- events -----------------------------------------------------------------------------------------------------

    def feed(self, *events: ev.Event) -> Commands:
        """Handle events; returns the commands of all of them."""
        commands: Commands = []
        for event in events:
            now = self.run.handle(event, now_ms=self.clock())
            self._carry_out(now)
            commands += now
            require_consistent(self.run)
        return commands

    def set_target(self, ends: Mapping[TopicPartition, int]) -> None:
        """Start an AvailableNow run that ends at these offsets."""
        self.feed(ev.TargetRequested(), ev.TargetRead(ends=dict(ends)))

    def later(self, event: ev.Event, *, ms: int) -> None:
        """This event happens after so many milliseconds."""
        self._later.append((self.clock() + ms, event))

    def pass_time(self, ms: int) -> None:
        until_ms = self.clock() + ms
        while self.clock() < until_ms:
            self._wait(until_ms)

    def assigned(self, *partitions: TopicPartition, slot: int = 0) -> Commands:
        return self.feed(ev.Assigned(slot=slot, client=self.clients[slot], partitions=partitions))

    def lost(self, *partitions: TopicPartition, slot: int = 0) -> Commands:
        return self.feed(ev.Lost(slot=slot, client=self.clients[slot], partitions=partitions))

    def state(self) -> RunState:
        return self.run.state

    def drained(self) -> bool:
        return self.run.is_drained

    def logged(self) -> list[str]:
        return [line.text for line in only(ev.LogLine, self.history)]

    def warned(self) -> list[str]:
        return [line.text for line in only(ev.LogLine, self.history) if line.warn]

    def steps_of(self, kind: type[C]) -> list[C]:
        """The steps of one class, in order."""
        return [step for step in self.steps if isinstance(step, kind)]

    # --- the shell and Kafka ----------------------------------------------------------------------------------------

    def _wait(self, until_ms: int) -> None:
        """Wait until then, or until something happens before."""
        deadline_ms = self.run.next_deadline_ms()
        due = [until_ms, *(at_ms for at_ms, _ in self._later), *([] if deadline_ms is None else [deadline_ms])]
        self.clock.now_ms = max(self.clock(), min(due))
        ripe = [(at_ms, event) for at_ms, event in self._later if at_ms <= self.clock()]
        self._later = [(at_ms, event) for at_ms, event in self._later if at_ms > self.clock()]
        self.feed(*(event for _, event in sorted(ripe, key=lambda pair: pair[0])))
        if deadline_ms is not None and deadline_ms <= self.clock():
            self.feed(ev.Tick())

    def answer(self, step: ev.Step) -> ev.Event:
        """The event with which the shell answers a request or the end of the run."""
        match step:
            case ev.ListTopics() | ev.ReadTarget() | ev.ReadLogEnds() | ev.DescribeGroup() if (
                self.clock() < self.down_until_ms or self._is_unreachable(step)
            ):
                self.clock.advance(ms=GIVEN_UP_MS)
                return ev.RequestFailed(error=BrokerUnavailable("no leaders", servers="b:9092", waited_ms=GIVEN_UP_MS))
            case ev.ReadTarget():
                return ev.TargetRead(ends=_some(self.ends, self.ends, (self.leaderless, self.unreachable)))
            case ev.ListTopics():
                return ev.TopicsListed(topics=self.topics)
            case ev.ReadLogEnds():
                self.clock.advance(ms=self.ends_took_ms)
                return ev.LogEndsRead(
                    ends=_some(self.ends, step.ends, (self.leaderless, self.unreachable)),
                    leader_epochs=_some(self.leader_epochs, step.ends),
                    epoch_ends={tp: self.epoch_ends.get(tp) for tp in step.epoch_ends},  # None: it knows none
                    firsts=_some(self.firsts, step.firsts, (self.leaderless, self.unreachable)),
                    log_ends=_some(self.ends, step.log_ends, (self.leaderless, self.unreachable)),
                    topic_ids=_some(self.ids, step.topics),
                    took_ms=self.ends_took_ms,
                )
            case ev.DescribeGroup():
                there = self.clients.keys() | self.former_slots
                joined = {slot: frozenset(given) for slot, given in self.assignments.items() if slot in there}
                given = {identifiers.client_id(STREAM, slot): partitions for slot, partitions in joined.items()}
                return ev.GroupDescribed(state=self.group_state, assigned=given)
            case ev.CloseMembers():
                return ev.MembersClosing(leave=step.leave)
            case _:
                raise AssertionError(f"{step} is no request")

    def _is_unreachable(self, step: ev.Step) -> bool:
        """Whether one of the requests is about partitions alone whose leaders do not answer."""
        requested = (step.ends, step.firsts, step.log_ends) if isinstance(step, ev.ReadLogEnds) else ()
        return any(tps and self.unreachable.issuperset(tps) for tps in requested)

    def _carry_out(self, commands: Commands) -> None:
        """Record the commands; Kafka answers them later."""
        self.history += commands
        for command in commands:
            if isinstance(command, ev.Join):
                self.clients[command.slot] = command.client
            if type(command) not in self.silent and (answer := self._answer(command)) is not None:
                self.later(answer, ms=ANSWER_MS)

    def _answer(self, command: ev.Command) -> ev.Event | None:
        match command:
            case ev.Join() if command.slot in self.assignments:
                given = self.assignments[command.slot]
                return ev.Assigned(slot=command.slot, client=command.client, partitions=given)
            case ev.Leave():
                return ev.MemberEnded(slot=command.slot, client=self.clients[command.slot])
            case ev.FetchCommittedOffsets():
                if self.clock() < self.down_until_ms:
                    error = BrokerUnavailable("no coordinator", servers="b:9092", waited_ms=GIVEN_UP_MS)
                    return ev.LookupFailed(partitions=command.partitions, error=error)
                requested = [tp for tp in command.partitions if tp not in self.unanswered_commits]
                read = {tp: self.committed.get(tp) for tp in requested}
                noted = [
                    self.committed[tp].reset_number
                    for tp in command.partitions + command.notes_only
                    if tp in self.committed
                ]
                reset_number = max(noted, default=0) if command.notes_only else None
                return ev.CommittedOffsetsRead(
                    offsets=read,
                    requested=command.partitions,
                    reset_number=reset_number,
                    topic_ids=_some(self.ids, command.topics),
                )
            case ev.ResolveStarts():
                requested = [tp for tp in command.starts if tp not in self.unanswered_starts]
                found = {tp: self._start_of(tp, command.starts[tp]) for tp in requested}
                return ev.StartsResolved(offsets=found, requested=tuple(command.starts))
            case ev.CommitOffsets():
                for tp, at in command.offsets.items():
                    followed = tp in command.followed
                    self.committed[tp] = ev.Committed(
                        offset=at,
                        stream=command.stream,
                        seq=command.seq,
                        reset_number=command.reset_number,
                        followed=followed,
                        started=tp in command.started,
                    )
                return ev.OffsetsCommitted(offsets=command.offsets)
            case ev.CheckReplaced():
                return ev.NotReplaced(slot=command.slot)
            case _:
                return None

    def _start_of(self, tp: TopicPartition, at: StartAt) -> int:
        return self.firsts[tp] if at.kind == "earliest" else self.ends[tp] if at.kind == "latest" else at.value


def _some(known: Mapping[K, V], requested: Iterable[K], silent: Iterable[Container[K]] = ()) -> dict[K, V]:
    """The known values of the requested keys."""
    return {key: known[key] for key in requested if key in known and not any(key in each for each in silent)}
