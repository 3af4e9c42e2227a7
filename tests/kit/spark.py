"""A simulated Spark for one run of a query: calls the product's driver code, from the checkpoint that runs share.

Runs in: tests. One simulated process stands for the driver JVM and the stream reader beside it: they run, freeze and
end together. Its first thread is Spark's: it requests the next offset, writes it to the offset log, has the batch read
and written by the sink, and writes the commit log. The stream reader may die alone: then Spark's thread finishes
the batch, and its next call fails. All code below those calls is the product's (``runtime``, ``kafka``, ``protocol``).
Deliberately absent: tasks and rows (a record is its offset), Spark's own retries.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

from greenlet import GreenletExit

from kit.agents import Channel, Executors, Inbox
from kit.books import Reader
from kit.cluster import Cluster
from kit.contradictions import contradiction
from kit.environment import SimulatedEnvironment
from kit.invariants import Invariants, Violation
from kit.world import Do, Process, Thread, World
from spark_group_source.agents import messages as ms
from spark_group_source.errors import AccessDenied, DataLoss, InvariantBroken, SourceError
from spark_group_source.host import run_files
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import BatchKey, StreamOffset, parse
from spark_group_source.protocol.outbox import brief
from spark_group_source.protocol.rules import Rules
from spark_group_source.protocol.run import Run
from spark_group_source.protocol.states import RunState
from spark_group_source.protocol.statistics import Statistics
from spark_group_source.runtime.coordinator import Coordinator

GROUP = "etl"
POLLING_DELAY_MS = 10
"""Spark's pause between two calls when there was nothing to read."""
TRIGGER_CHECK_MS = 1_000
"""Interval of a check whether the trigger has become shorter."""
UNREACHED_MS = 250
"""Interval of a task's check whether the brokers are reachable."""
ON_ITS_WAY_MS_MAX = 5_000
"""Time after its sender's end in which a request may reach a broker (``Misfortune.late_ms_max``)."""

READER_DIES_MS_MAX = 400
"""Maximum time after the start of a batch until the stream reader dies."""
SERVED_MS_MAX = 1_000
"""Time in which a run notices a durable batch or a drain request between two calls of Spark."""
SHRINK_MS = 20_000
"""Time for which agents must be absent before their slots leave."""

Trigger = Literal["default", "available now", "once"]
MemberHost = Literal["auto", "executor", "driver"]


@dataclass
class Checkpoint:
    """The state that outlives a run: Spark's offset log and commit log, under the id of the query."""

    query_id: str
    offsets: dict[int, str] = field(default_factory=dict)
    commits: set[int] = field(default_factory=set)

    def last(self) -> StreamOffset | None:
        """Return the newest planned batch."""
        return parse(self.offsets[max(self.offsets)]) if self.offsets else None

    def pending(self) -> StreamOffset | None:
        """Return the newest planned batch, unless the commit log has it."""
        return None if max(self.offsets, default=-1) in self.commits else self.last()


@dataclass(frozen=True)
class Habits:
    """The settings of a query. ``options``: as a user writes them."""

    options: dict[str, str]
    trigger: Trigger = "default"
    interval_ms: int = 0  # between two starts of batches, of the default trigger
    sink_ms_max: int = 800
    crash: float = 0.0  # chance to end at each step of a batch
    member_host: MemberHost = "auto"
    auto_slots: bool = False


class Sink(Protocol):
    """The destination of a query's rows."""

    def write(self, run: "SparkRun", offset: StreamOffset, read: "Read") -> None:
        """Write a batch, on Spark's thread. Raises SourceError if the sink refuses it."""


Read = Callable[[list[OffsetRange]], dict[TopicPartition, tuple[int, int]]]
"""Reads ranges; returns the available range of each partition."""


@dataclass
class Query:
    """One query with all of its runs."""

    name: str
    habits: Habits
    sink: Sink
    checkpoint: Checkpoint
    runs: list["SparkRun"] = field(default_factory=list)
    durable: dict[str, BatchKey] = field(default_factory=dict)  # the sink's durable mark, by stream id
    committed: dict[str, BatchKey] = field(default_factory=dict)  # of runs that stopped with all committed
    void: dict[tuple[str, int], int] = field(default_factory=dict)  # by stream and batch: the reset that made it void
    threads_left: int | None = None  # how many threads its next run can start
    executors: Executors | None = None  # where its members may be placed


class ReaderDied(Exception):
    """The stream reader has died alone: Spark's next call fails, and with it the query."""


class ConcurrentUpdate(Exception):
    """Another run wrote to the offset log or the commit log: Spark stops the query."""


class Publisher(run_files.Publisher):
    """Without files."""

    def __init__(self, query: Query, drained: Do) -> None:
        self._query, self._stream, self._drained = query, "", drained
        self.drain = self.drained = False

    @property
    def is_drain_requested(self) -> bool:
        return self.drain

    def publish(
        self, statistics: Statistics, *, drained: bool = False, last_batch: int = -1, committed: bool = False
    ) -> None:
        if drained and not self.drained:
            self._drained()
        self.drained, self._stream = drained, statistics.stream

    def durable_mark(self, stream: str) -> BatchKey:
        return self._query.durable.get(stream, run_files.NO_MARK)

    def committed_mark(self, stream: str) -> BatchKey:
        return self._query.committed.get(stream, run_files.NO_MARK)

    def void_by(self, stream: str, seq: int) -> int:
        return self._query.void.get((stream, seq), 0)

    def close(self, committed: StreamOffset | None = None, *, seq: int = -1) -> None:
        if not run_files.is_later(self.durable_mark(self._stream), seq):
            self._query.durable.pop(self._stream, None)
        if committed is not None:
            self._query.committed[committed.stream] = BatchKey.of(committed)


NO_THREAD = "can't start new thread"
"""Python's message when the machine has no more threads: no rule is broken."""


class WatchedRun(Run):
    """The product's run, checked after each event: a broken rule ends the history. It decides nothing.

    Args:
        process, reader: the process and reader of the run.
        truth: receives the run's decisions.
    """

    def __init__(self, rules: Rules, process: Process, reader: Reader, truth: Invariants) -> None:
        super().__init__(rules)
        self._process, self._reader, self._truth = process, reader, truth
        self._planned_seq = -1
        self._waits_since_ms: int | None = None  # of Spark's call, unless an event came since
        self.during_check: tuple[int, Do] | None = None
        """The number of a request of a check before a batch, and what is called once when it is sent next."""
        self.target: Mapping[TopicPartition, int] | None = None
        """The ends up to which an AvailableNow run reads."""
        self.failed_ms: int | None = None
        """When the run failed: maybe long before Spark's next call, which reports it."""

    def longest_hold_ms(self, now_ms: int) -> int:
        """Return how long the oldest revocation has been held."""
        return max((now_ms - held.since_ms for held in self.slots._held.values()), default=0)

    def handle(self, event: ev.Event, *, now_ms: int) -> list[ev.Command]:
        tick, self._waits_since_ms = isinstance(event, ev.Tick), None
        self._reader.closing |= isinstance(event, ev.MembersClosing)
        if isinstance(event, ev.Lost):
            self._truth.loss_reported(self._reader, event.partitions)
        if isinstance(event, ev.TargetRead):
            self.target = event.ends
        if isinstance(event, ev.CommittedOffsetsRead):
            self._truth.told(self._reader, {tp: at.offset if at else None for tp, at in event.offsets.items()})
        placement = self.placement
        before, overruns = (
            (set(self.partitions.ours), self.counts.hold_overruns) if tick or placement.has_agents else (set(), 0)
        )
        recalls, has_place = self.counts.recalls, self.slots._assigned_count > 0
        commands = super().handle(event, now_ms=now_ms)
        if has_place and isinstance(event, ev.MemberFailed) and event.group_full and self.closed:
            self._break("fails because the group is full, although other members of it have a place")
        self._recalled(before, recalls)
        if commands or not tick:
            self._process.world.note(lambda: f"{self._process.name} {_in_words(event, commands)}")
        if tick and self.counts.hold_overruns > overruns:
            for tp in sorted(before - self.partitions.ours.keys()):
                self._truth.overran(tp, self._reader)
        self._inspect(commands)
        return commands

    def _recalled(self, before: set[TopicPartition], recalls: int) -> None:
        """Members were recalled from their agents, and the run counted the partitions as lost."""
        if self.counts.recalls > recalls:
            self._truth.host_lost(self._reader, sorted(before - self.partitions.ours.keys()))

    def proceed(self, *, now_ms: int) -> tuple[ev.Step, list[ev.Command]]:
        before = set(self.partitions.ours) if self.placement.has_agents else set()
        recalls = self.counts.recalls
        step, commands = super().proceed(now_ms=now_ms)
        self._recalled(before, recalls)
        if not isinstance(step, ev.Wait):
            self._process.world.note(lambda: f"{self._process.name} {_in_words(step, commands)}")
        elif step.until_ms > now_ms:
            if self._waits_since_ms == now_ms:
                self._break("Spark's call does not wait, although nothing is to be done")
            self._waits_since_ms = now_ms
        if isinstance(step, ev.ReadLogEnds) and self.during_check is not None:
            number, do = self.during_check
            if number == (1 if step.ends else 2 if step.topics else 3):
                self.during_check = None
                do()
        plan = self.plan
        if plan is not None and plan.seq != self._planned_seq and isinstance(step, ev.ReturnOffset):
            self._planned_seq = plan.seq
            self._truth.intends(self._reader, plan.ranges)
        self._inspect(commands)
        return step, commands

    def _inspect(self, commands: list[ev.Command]) -> None:
        if self.stream and self._reader.known is not self.lookups.known:
            self._reader.party, self._reader.known = self.stream, self.lookups.known
        self._reader.closing |= self.closed  # nothing is counted any more
        if wrong := contradiction(self):
            self._break(wrong)
        for command in commands:
            if isinstance(command, ev.Fail):
                self.failed_ms = self._process.world.now_ms
            broken = isinstance(command, ev.Fail) and isinstance(command.error, InvariantBroken)
            if isinstance(command, ev.Fail) and broken and NO_THREAD not in str(command.error):
                self._break(str(command.error))
            if isinstance(command, ev.CommitOffsets) and not self.closed:
                for tp in command.offsets.keys() - self.partitions.ours.keys():
                    self._break(f"commits {tp}, although the run knows that another member owns it")

    def _break(self, rule: str) -> None:
        self._process.world.note(f"VIOLATION: {self._process.name}: {rule}")
        self._process.world.fail(Violation(f"{self._process.name}: {rule}"))


def _in_words(event: ev.Event | ev.Step, commands: list[ev.Command]) -> str:
    return brief(event) + "".join(f"\n{'':>14}-> {brief(command)}" for command in commands)


class SparkRun:
    """One run of a query.

    Args:
        on_end: called when the process has ended, with its error: None if the query ended by itself or was stopped.
    """

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        truth: Invariants,
        query: Query,
        *,
        on_end: Callable[["SparkRun", BaseException | None], None],
    ) -> None:
        self.number = len(query.runs) + 1
        self.process = Process(world, f"{query.name}.{self.number}")
        self.query, self.cluster = query, cluster
        self.options = Options.parse(query.habits.options)
        self.trigger = query.habits.trigger
        self.watched: WatchedRun | None = None
        self.reader = Reader(self.process.name, self.process.name, self.number, self._counted)
        self.publisher = Publisher(query, partial(truth.drained, self.reader))
        self.reader.fails_on_loss = self.options.fail_on_data_loss
        self.calling_since_ms: int | None = None  # inside a call from Spark
        self.calling = ""
        self.host_dies: Do | None = None  # called when the host dies, which is right after the next batch
        self.reader_dies = False  # alone, while the sink has the next batch
        self.after_plan: Callable[[StreamOffset], None] | None = None  # called once, with the next batch
        self.slow_ms = 0  # how much longer its next batch takes
        self.after_write: Do | None = None  # called once, when the sink has a batch
        self.marked: StreamOffset | None = None  # the batch that its sink marked as durable last
        self._lasting_since_ms: dict[tuple[str, int], int] = {}  # with the last durable batch
        self._triggered_ms = 0
        self.ended_ms: int | None = None
        self._world, self._truth, self._on_end = world, truth, on_end
        self._draws = self.process.draws("spark")
        self._environment = SimulatedEnvironment(self.process, cluster)
        self._environment.threads_left, query.threads_left = query.threads_left, None
        # These may fence this one: a frozen process sends its request to take over the id when it continues.
        asking = cluster.transactions.asking
        self.late = [run for run in query.runs if run.lately_alive and (not run.prepared or run.process.name in asking)]
        self.executors = query.executors
        self._inbox: Inbox[tuple[Channel, ms.AgentReport | None]] | None = None
        self._coordinator: Coordinator | None = None
        self._thread: Thread | None = None
        self._stopping = False
        truth.reads_as(self.process.name, self.reader)

    # --- control ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread = self.process.spawn("spark", self._main)

    def kill(self, how: str = "killed") -> None:
        """End the process: no close, no commit."""
        if self.process.alive:
            self._gone(None)
            self.process.kill(how)

    def stop(self) -> None:
        """Stop the query at any point: its reader gets a signal and closes."""
        if self.process.alive and self._thread is not None and not self._stopping:
            self._world.note(f"{self.process.name}: Spark stops the query")
            self._stopping = True
            self._thread.interrupt(SystemExit())

    def receive(self, channel: Channel, message: ms.AgentReport) -> None:
        """A message of an agent has arrived."""
        if self._inbox is None:
            self._inbox = Inbox(self.process, self._take)
        self._inbox.put((channel, message))

    def cut(self, channel: Channel) -> None:
        """An agent's connection is closed."""
        if self._inbox is not None:
            self._inbox.put((channel, None))

    def _take(self, item: tuple[Channel, ms.AgentReport | None]) -> None:
        channel, message = item
        assert self._coordinator is not None
        if message is None:
            self._coordinator.agents.closed(channel, "cut")
        else:
            self._coordinator.agents.receive(channel, message)

    @property
    def prepared(self) -> bool:
        """Whether it has initialized its transactional id, so that older runs are fenced."""
        worker = None if self._coordinator is None else self._coordinator._requests
        return worker is not None and worker._is_prepared

    @property
    def lately_alive(self) -> bool:
        """Whether it runs, or a request of it may still be in transit."""
        return self.ended_ms is None or self._world.now_ms - self.ended_ms <= ON_ITS_WAY_MS_MAX

    @property
    def healthy(self) -> bool:
        return self.process.alive and not self.process.frozen and not self.has_lost_reader

    @property
    def has_lost_reader(self) -> bool:
        """Whether the stream reader has died, and only the driver is left."""
        return self.process.survivor is not None

    def _counted(self) -> int:
        return 0 if self.watched is None else self.watched.counts.possible_duplicates

    # --- Spark's thread ---------------------------------------------------------------------------------------------

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            self.pause(5, 200)
            self._query()
            self._require_all_read()
        except GreenletExit:
            raise
        except (SourceError, ConcurrentUpdate, ReaderDied) as exc:
            error = exc
            self._world.note(f"{self.process.name}: the query ends: {str(exc).splitlines()[0]}")
        except SystemExit:
            pass
        self._stopping = True
        if self._coordinator is not None and not self.has_lost_reader:
            self._call("close()", self._coordinator.close)
        self._gone(error)
        self.process.kill("ends")

    def _gone(self, error: BaseException | None) -> None:
        self.ended_ms = self._world.now_ms
        self._truth.ended(self.reader)
        if self.executors is not None:
            self.executors.ended(self)
        self._on_end(self, error)

    def _query(self) -> None:
        self._coordinator = coordinator = Coordinator(
            self.options, environment=self._environment, publisher=self.publisher
        )
        habits = self.query.habits
        rules = replace(self.options.rules(), member_host=habits.member_host)
        if habits.auto_slots:
            rules = replace(rules, slots=1, auto_slots=True, shrink_ms=SHRINK_MS)
        self.watched = WatchedRun(rules, self.process, self.reader, self._truth)
        coordinator._run = self.watched
        if self.trigger == "available now":
            self._call("prepareForTriggerAvailableNow()", coordinator.prepare_available_now)
        log = self.query.checkpoint
        start = StreamOffset.initial(self.options.group_id)
        if log.offsets:
            last = max(log.offsets)
            start = parse(log.offsets[last])
            if last not in log.commits:
                self.reader.party = start.stream
                self._truth.replaying(self.reader, start)
                self._batch(last, start)
        while (number := self._trigger(start)) is not None:
            start = parse(log.offsets[number])
            self._batch(number, start)
            if self.trigger == "once":
                return
            self._await_trigger()

    def _trigger(self, start: StreamOffset) -> int | None:
        """Poll until there is another batch, and write it to the offset log: its number. None: the query is
        complete."""
        coordinator, log = self._coordinator, self.query.checkpoint
        assert coordinator is not None
        while True:
            end = self._call("latestOffset()", lambda: coordinator.latest(start, unlimited=self.trigger == "once"))
            if end is not start and end.to_json() != start.to_json():
                break
            if self.trigger != "default":
                return None
            self.pause(POLLING_DELAY_MS, POLLING_DELAY_MS)
            self._await_trigger()
        number = 1 + max(log.offsets, default=-1)
        self._step(5, 60)
        if number != start.seq + 1 or number in log.offsets:
            raise ConcurrentUpdate(f"another run wrote batch {number}")
        self._only_what_is_stable(end)
        log.offsets[number] = end.to_json()
        self._truth.planned(self.reader, end)
        if self.after_plan is not None:
            after_plan, self.after_plan = self.after_plan, None
            after_plan(end)
        return number

    def _await_trigger(self) -> None:
        """Pause until the trigger's interval since the last start of a batch is over."""
        while self.trigger == "default":
            left_ms = self._triggered_ms + self.query.habits.interval_ms - self._world.now_ms
            if left_ms <= 0:
                break
            self.pause(min(left_ms, TRIGGER_CHECK_MS), min(left_ms, TRIGGER_CHECK_MS))
        self._triggered_ms = self._world.now_ms

    def _require_all_read(self) -> None:
        """Check that an AvailableNow run that ends by itself has left nothing to the next one, but for partitions
        without a leader."""
        target = None if self.watched is None else self.watched.target
        if target is not None and not self.publisher.drain:
            led = {tp: end for tp, end in target.items() if self.cluster.led_since_ms(tp) <= self.reader.began_ms}
            self._truth.all_read(self.reader, led)

    def unserved(self) -> str | None:
        """Return what this run should have noticed by now, although Spark does not call it."""
        run, now_ms = self.watched, self._world.now_ms
        if run is None or run.closed or self.calling_since_ms is not None:
            self._lasting_since_ms.clear()
            return None
        lasting = {
            "the durable batch in flight": run.plan is not None
            and run.plan is self.marked
            and run.stream in self.query.durable,  # the end of another run of the stream removes the mark
            "the drain request": self.publisher.drain
            and run.plan is None
            and run.all_committed
            and run.partitions.all_known()  # one without a leader has a bound of its own
            and (run.slots.all_assigned or not run.partitions.uncommitted())  # members may get partitions back
            and not self.publisher.drained
            and run.state in (RunState.OPEN, RunState.DRAINED),
        }
        since_ms = self._lasting_since_ms
        self._lasting_since_ms = {
            (what, run.seq): since_ms.get((what, run.seq), now_ms) for what, lasts in lasting.items() if lasts
        }
        late = [what for (what, _), since in self._lasting_since_ms.items() if now_ms - since > SERVED_MS_MAX]
        return late[0] if late else None

    def _only_what_is_stable(self, planned: StreamOffset) -> None:
        for tp, start, end in planned.batch():
            log = self.cluster.log(tp)
            if self.options.isolation_level == "read_committed" and log is not None and log.held is not None:
                self._truth.require(end <= log.held, f"{self.process.name} plans {tp}[{start},{end}) beyond {log.held}")

    def _batch(self, number: int, offset: StreamOffset) -> None:
        coordinator = self._coordinator
        assert coordinator is not None
        self._step(1, 30)
        self._call("partitions()", lambda: coordinator.start_batch(offset))
        if self.executors is not None:
            self.executors.task(self)
        if self.reader_dies:
            self.reader_dies = False
            self._world.at(self._draws.between(0, READER_DIES_MS_MAX), self._lose_reader)
        self._step(5, self.query.habits.sink_ms_max)
        if self.slow_ms:
            slow_ms, self.slow_ms = self.slow_ms, 0
            self.pause(slow_ms, slow_ms)
        self.query.sink.write(self, offset, partial(self._read, offset.leader_epochs))
        if self.after_write is not None:
            after_write, self.after_write = self.after_write, None
            after_write()
        if self.query.durable.get(offset.stream) != BatchKey.of(offset):
            self._truth.durable(self.reader, offset)
        if self.host_dies is not None and number not in self.query.checkpoint.commits:
            self.query.checkpoint.commits.add(number)
            self.host_dies()
            self.kill("its host dies")
        self._step(5, 150)
        if number in self.query.checkpoint.commits:
            raise ConcurrentUpdate(f"another run finished batch {number}")
        self.query.checkpoint.commits.add(number)
        self._step(1, 30)

    def _read(
        self, epochs: Mapping[TopicPartition, int], ranges: list[OffsetRange]
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Return the ranges that tasks read: the remaining part of each, without records that later leaders than the
        planned one wrote (``epochs``)."""
        while self.process.cut_off() or any(self.cluster.is_leaderless(tp) for tp, _, _ in ranges):
            self._environment.pause(UNREACHED_MS / 1000)
        if self.cluster.is_denied(tp.topic for tp, _, _ in ranges):
            raise AccessDenied(f"no permission to read {ranges[0].tp.topic}")
        found = {}
        for tp, start, end in ranges:
            log = self.cluster.log(tp)
            first, last = (end, end) if log is None else (max(start, log.first), min(end, log.end))
            if log is not None and tp in epochs and (until := log.epoch_end(epochs[tp])) is not None:
                last = min(last, until)
            if (first, last) != (start, end) and self.options.fail_on_data_loss:
                raise DataLoss(f"records of {tp}[{start},{end}) are gone")
            if first < last:
                found[tp] = (first, last)
        return found

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _lose_reader(self) -> None:
        """The stream reader dies: the driver writes its batch to the end, unless it waits for an answer."""
        if self.healthy and self._thread is not None:
            if self.calling_since_ms is None and not self._stopping:
                self._truth.reader_died(self.reader)
                self.process.kill_all_but(self._thread, "its stream reader dies")
            else:
                self.kill("its stream reader dies during a call")

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        if self.has_lost_reader:
            raise ReaderDied("the stream reader has died")
        self.calling, self.calling_since_ms = name, self._world.now_ms
        try:
            return call()
        finally:
            if not self._world.inert:
                self.calling_since_ms = None

    def _step(self, low_ms: int, high_ms: int) -> None:
        """Take some time; the process may end before or after it."""
        self.pause(low_ms, high_ms)
        if self._draws.chance(self.query.habits.crash):
            self._gone(None)
            self.process.kill("crashed")

    def pause(self, low_ms: int, high_ms: int) -> None:
        self._environment.pause(self._draws.between(low_ms, max(low_ms, high_ms)) / 1000)
