"""The driver of a simulated query: the real group machine, with the coordinator's shell in miniature around it.

Runs in: tests. It has the threads of the real one: Spark's (plans, reads, sink, commit log), one per slot (a consumer's
callbacks; a held revocation asks for the budget every 250 ms), and the worker (lookups and the echo, one after
another). Deliberately absent: agents, real rows, the ledger. The sink here is idempotent by batch number, like a Delta
``txn``, and nothing else protects from processing twice.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from spark_group_source.errors import InvariantBroken
from spark_group_source.group import admission
from spark_group_source.group import events as ev
from spark_group_source.group.machine import GroupMachine
from spark_group_source.group.offsets import StreamOffset, parse
from spark_group_source.group.states import Phase
from spark_group_source.group.story import brief
from spark_group_source.model import TopicPartition
from spark_group_source.testing.invariants import Invariants, Reader, Violation
from spark_group_source.testing.kafka_client import Client, Tps, make_client
from spark_group_source.testing.kafka_group import REBALANCE_MS, SESSION_MS, Code, Entry, Group
from spark_group_source.testing.world import Process, World

HOLD_BUDGET_MS = int(REBALANCE_MS * 0.8)
FOUNDING_BUDGET_MS = REBALANCE_MS + SESSION_MS
HOLD_CHECK_MS = 250
READ_BACK_MS_MAX = 3_000
GROUP = "etl"

SPARK, WORKER = "spark", "worker"


STALE_CODES = (Code.UNKNOWN_MEMBER, Code.ILLEGAL_GENERATION)


class _Claim(NamedTuple):
    """A member as it was known when a commit was ordered."""

    client: Client
    number: int
    member: str
    generation: int


_Claims = dict[int, _Claim]
"""By slot."""


@dataclass
class Checkpoint:
    """What survives a driver: Spark's offset log and commit log, and the sink's record of batches."""

    offsets: dict[int, str] = field(default_factory=dict)
    commits: set[int] = field(default_factory=set)
    sink: set[int] = field(default_factory=set)
    births: int = 0


@dataclass(frozen=True)
class Habits:
    """How one query behaves."""

    slots: int = 2
    transactional: bool = True
    max_offsets: int | None = 20
    sink_ms_max: int = 800
    crash: float = 0.0  # chance to die at each step of a batch


class SparkDriver:
    """One run of one query.

    Args:
        query: the name that its runs share; their streams are named after it.
        number: of the run.
        machine: the class under test.
        on_end: told when the process has ended.
    """

    def __init__(
        self,
        world: World,
        group: Group,
        truth: Invariants,
        checkpoint: Checkpoint,
        *,
        query: str,
        number: int,
        habits: Habits,
        machine: type[GroupMachine],
        on_end: Callable[["SparkDriver"], None],
    ) -> None:
        self.process = Process(world, f"{query}.{number}")
        self.query, self.habits, self.checkpoint = query, habits, checkpoint
        self.machine = machine(
            group=GROUP,
            slots=habits.slots,
            hold_budget_ms=HOLD_BUDGET_MS,
            founding_budget_ms=FOUNDING_BUDGET_MS,
        )
        self.reader = Reader(self.process.name, query, number, lambda: self.machine.statistics().maybe_twice)
        self.holds = 0
        self._world, self._group, self._truth, self._on_end = world, group, truth, on_end
        self._clients: dict[int, Client] = {}
        self._releases: dict[int, Callable[[], None]] = {}
        self._hold_ms: dict[int, int] = {}
        self._work: deque[tuple[ev.FetchCommitted | ev.ResolveStarts | ev.Echo, _Claims]] = deque()
        self._numbers: dict[int, int] = {}  # of the consumer in each slot
        self._working = False
        self._epoch: int | None = None
        self._turn: TopicPartition | None = None
        truth.reads_as(self.process.name, self.reader)

    # --- Spark's thread ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._spark(self._world.between(5, 200), self._begin)

    def _begin(self) -> None:
        topics = tuple(self._group.topics)
        last = max(self.checkpoint.offsets, default=None)
        if last is None:
            self.checkpoint.births += 1
            self.reader.party = stream = f"{self.query}{self.checkpoint.births}"
            self._handle(ev.Born(stream=stream, known=dict(self._group.topics), topics=topics))
            self._wait(StreamOffset.initial(GROUP))
            return
        offset = parse(self.checkpoint.offsets[last])
        self.reader.party = offset.stream
        if last in self.checkpoint.commits:
            self._handle(ev.Durable(offset=offset, topics=topics))
            self._wait(offset)
        else:
            self._handle(ev.Replay(offset=offset, topics=topics))
            if last not in self.checkpoint.sink:
                self._truth.replaying(self.reader, offset.ranges)
            self._read(offset)

    def _boundary(self, start: StreamOffset) -> None:
        if not start.is_initial:
            self._handle(ev.Durable(offset=start))
        self._wait(start)

    def _wait(self, start: StreamOffset) -> None:
        if self.machine.founded if start.is_initial else self.machine.resolved:
            tps = list(self.machine.plannable())
            ends: Callable[[Callable[[dict[TopicPartition, int]], None]], None] = lambda reply: reply(  # noqa: E731
                {tp: self._truth.books[tp].end for tp in tps}
            )
            self.process.call(SPARK, ends, lambda found: self._cut(start, found))
        else:
            self._spark(50, lambda: self._wait(start))

    def _cut(self, start: StreamOffset, ends: Mapping[TopicPartition, int]) -> None:
        positions = self.machine.plannable()
        backlogs = {tp: (at, max(at, ends[tp])) for tp, at in positions.items() if tp in ends}
        if not start.is_initial and all(at == end for at, end in backlogs.values()):
            self._spark(self._world.between(50, 300), lambda: self._boundary(start))
            return
        until, self._turn = admission.cut(backlogs, self.habits.max_offsets, self._turn)
        planned = StreamOffset(
            group=GROUP,
            stream=self.machine.stream,
            seq=start.seq + 1,
            topic_ids=dict.fromkeys(self._group.topics, "id"),
            known=self.machine.known(),
            ranges={tp: (backlogs[tp][0], end) for tp, end in until.items()},
            followed=frozenset(tp for tp in self.machine.foreign() if tp in until),
            owed={tp: at for tp, at in self.machine.owed().items() if tp not in until},
            turn=self._turn,
        )
        self._handle(ev.Planned(offset=planned))
        self._truth.intends(self.reader, planned.ranges)
        self._step(5, 60, lambda: self._log(planned))

    def _log(self, planned: StreamOffset) -> None:
        if planned.seq in self.checkpoint.offsets:
            self.end("another run wrote this batch")
            return
        self.checkpoint.offsets[planned.seq] = planned.to_json()
        self._truth.planned(self.reader, planned.ranges)
        self._read(planned)

    def _read(self, offset: StreamOffset) -> None:
        self._step(5, self.habits.sink_ms_max, lambda: self._sink(offset))

    def _sink(self, offset: StreamOffset) -> None:
        if offset.seq not in self.checkpoint.sink:
            self.checkpoint.sink.add(offset.seq)
            self._truth.processed_by(self.reader, offset.ranges)
        self._truth.durable(self.reader, offset.ranges)
        self._step(5, 150, lambda: self._commit_log(offset))

    def _commit_log(self, offset: StreamOffset) -> None:
        self.checkpoint.commits.add(offset.seq)
        if self._world.chance(0.2):  # Spark's commit() says it once more, a batch late
            self._spark(self._world.between(100, 900), lambda: self._handle(ev.Durable(offset=offset)))
        self._step(1, 30, lambda: self._boundary(offset))

    def _step(self, low_ms: int, high_ms: int, do: Callable[[], None]) -> None:
        """The next step of a batch; the process may die before it or right behind it."""

        def run() -> None:
            do()
            if self.process.alive and self._world.chance(self.habits.crash):
                self.end("crashed")

        self._spark(self._world.between(low_ms, high_ms), run)

    def _spark(self, delay_ms: int, do: Callable[[], None]) -> None:
        self.process.later(SPARK, delay_ms, do)

    # --- the machine ------------------------------------------------------------------------------------------------

    def _handle(self, event: ev.Event) -> None:
        if not self.process.alive:
            return
        is_tick = isinstance(event, ev.Tick)
        before, overruns = (self.machine.held(), self.machine.statistics().overruns) if is_tick else (set(), 0)
        try:
            commands = self.machine.handle(event, now_ms=self._world.now_ms)
            self.machine.check()
        except InvariantBroken as exc:
            raise Violation(f"{self.process.name}: {exc}") from exc
        if commands or not is_tick:
            self._world.note(lambda: self._told(event, commands))
        if is_tick and self.machine.statistics().overruns > overruns:
            for tp in before - self.machine.held():
                for client in self._clients.values():
                    self._truth.overran(tp, client)
        for command in commands:
            self._carry_out(command)
        if (due_ms := self.machine.next_deadline_ms()) is not None:
            self.process.later(WORKER, max(1, due_ms - self._world.now_ms), self._on_time)

    def _told(self, event: ev.Event, commands: list[ev.Command]) -> str:
        return f"{self.process.name} {brief(event)}" + "".join(f"\n{'':>14}-> {brief(c)}" for c in commands)

    def _on_time(self) -> None:
        due_ms = self.machine.next_deadline_ms()
        if due_ms is not None and due_ms <= self._world.now_ms and not self._working:
            self._handle(ev.Tick())

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.Join():
                self._join(command)
            case ev.Release():
                if (release := self._releases.pop(command.slot, None)) is not None:
                    # The slot's thread lets go when it looks at its orders.
                    self.process.later(f"slot{command.slot}", self._world.between(0, 20), release)
            case ev.Leave():
                self._clients[command.slot].close(leave=command.leave)
            case ev.FetchCommitted() | ev.ResolveStarts() | ev.Echo():
                if isinstance(command, ev.Echo):
                    for tp in command.offsets.keys() - self.machine.held():
                        raise Violation(f"{self.process.name} commits {tp}, which it was told is another member's")
                self._work.append((command, self._claims(command)))
                self.process.later(WORKER, 0, self._work_on)
            case ev.Fail():
                self.end(str(command.error).splitlines()[0])
            case _:
                pass

    def end(self, reason: str) -> None:
        """The process stops where it stands: no close, no commit."""
        if self.process.alive:
            self._world.note(f"{self.process.name}: ends: {reason}")
            self.process.kill()
            self._truth.ended(self.reader)
            self._on_end(self)

    def stop(self, *, leave: bool) -> None:
        """The query is stopped: members close, then the process ends."""
        self._handle(ev.Closing(leave=leave))
        self.end("stopped")

    def break_member(self) -> None:
        """One consumer dies inside a process that lives on."""
        slot = self._world.random.randrange(self.habits.slots)
        client = self._clients.get(slot)
        if self.machine.phase is Phase.NEW or client is None or client.closed or self.process.frozen:
            return
        client.abandon()
        self._truth.told(client.owned, client)
        self._slot_dead(slot, client, "broken by the test")

    def _slot_dead(self, slot: int, client: Client, reason: str) -> None:
        self._releases.pop(slot, None)
        if self._clients.get(slot) is client:
            number = int(client.name.rpartition(".")[2])
            self._handle(ev.MemberFailed(slot=slot, client=number, reason=reason))

    # --- slots ------------------------------------------------------------------------------------------------------

    def _join(self, join: ev.Join) -> None:
        instance = f"{GROUP}.{self.machine.stream}.{join.slot}"
        name = f"{self.process.name}/{join.slot}.{join.client}"
        slot = _Slot(self, join)
        client = make_client(self.process, f"slot{join.slot}", name, self._group, slot, self._truth, instance)
        self._clients[join.slot], self._numbers[join.slot] = client, join.client
        self._releases.pop(join.slot, None)
        self.process.later(f"slot{join.slot}", self._world.between(1, 40), client.start)

    def hold(self, slot: int, event: ev.Revoking, done: Callable[[], None]) -> None:
        since_ms = self._world.now_ms
        client = self._clients[slot]

        def release() -> None:
            self._check_hold(slot, since_ms)
            done()

        def look() -> None:
            if self._releases.get(slot) is release and not client.closed:
                self._handle(ev.Tick())
                self.process.later(f"slot{slot}", HOLD_CHECK_MS, look)

        self._releases[slot] = release
        self._handle(event)
        self.process.later(f"slot{slot}", HOLD_CHECK_MS, look)

    def _check_hold(self, slot: int, since_ms: int) -> None:
        held_ms = self._world.now_ms - since_ms
        slack_ms = 2 * HOLD_CHECK_MS
        self.holds += held_ms > 25
        if held_ms > HOLD_BUDGET_MS + slack_ms and self._world.now_ms - self.process.thawed_at_ms > slack_ms:
            raise Violation(f"{self.process.name}/{slot} held a revocation for {held_ms} ms")

    # --- the worker -------------------------------------------------------------------------------------------------

    def _work_on(self) -> None:
        if self._working or not self._work:
            return
        self._working = True
        work, claims = self._work.popleft()
        match work:
            case ev.FetchCommitted():
                self._fetch(work)
            case ev.ResolveStarts():
                tps = work.initial + work.new
                if self._world.chance(self._world.loss):
                    self._done(ev.LookupFailed(partitions=tps, reason="simulated"))
                else:
                    starts = {tp: self._truth.books[tp].start for tp in tps}
                    self._worker(self._world.between(1, 60), lambda: self._done(ev.StartsResolved(offsets=starts)))
            case ev.Echo():
                self._echo(work, claims)

    def _fetch(self, work: ev.FetchCommitted) -> None:
        def answer(found: dict[TopicPartition, Entry | None]) -> None:
            if self._world.chance(self._world.loss):
                self._done(ev.LookupFailed(partitions=work.partitions, reason="simulated"))
                return
            self._done(
                ev.CommittedRead(
                    offsets={
                        tp: None if at is None else ev.Committed(offset=at.offset, stream=at.stream)
                        for tp, at in found.items()
                    }
                )
            )

        self.process.call(WORKER, lambda reply: self._group.read(work.partitions, True, reply), answer)

    def _claims(self, command: ev.Command) -> _Claims:
        """Who our members are is asked when the commit is ordered: later they may be new members of the same name."""
        claims = {}
        for slot in sorted(set(command.slots.values())) if isinstance(command, ev.Echo) else []:
            client = self._clients[slot]
            claims[slot] = _Claim(client, self._numbers[slot], client.member, client.generation)
        return claims

    def _echo(self, work: ev.Echo, claims: _Claims) -> None:
        entry = Entry(0, work.stream, self.process.name, 0)

        def committed(code: Code) -> None:
            if code is Code.OK:
                # The answer of a commit that was made may be lost for good: then it is made again.
                if self._world.chance(self._world.loss):
                    self._done(ev.EchoFailed(reason="no answer"))
                else:
                    self._read_back(work, self._world.now_ms + READ_BACK_MS_MAX)
            elif code is Code.FENCED_PRODUCER:
                self.end("another driver commits for this stream")
            else:
                if code is Code.UNKNOWN_MEMBER:
                    self._thrown_out(claims)
                self._done(ev.EchoFailed(reason=code.value, stale=code in STALE_CODES))

        if not self.habits.transactional:
            self._echo_by_members(work, claims, entry, committed)
            return
        id_, members = f"{GROUP}.{work.stream}", [(claim.member, claim.generation) for claim in claims.values()]

        def commit(epoch: int) -> None:
            self._epoch = epoch
            self.process.call(
                WORKER,
                lambda reply: reply(self._group.commit_transaction(id_, epoch, work.offsets, members, entry)),
                committed,
                repeat=False,
            )

        if self._epoch is None:
            self.process.call(WORKER, lambda reply: reply(self._group.init_producer(id_)), commit, repeat=False)
        else:
            commit(self._epoch)

    def _thrown_out(self, claims: _Claims) -> None:
        """The broker does not know a member: its slot has another one, which starts anew."""
        for slot, claim in claims.items():
            if claim.member not in self._group.members and not claim.client.closed:
                claim.client.abandon()
                self._handle(ev.MemberFailed(slot=slot, client=claim.number, reason="unknown to the group"))
                return

    def _echo_by_members(self, work: ev.Echo, claims: _Claims, entry: Entry, done: Callable[[Code], None]) -> None:
        """Where transactions are not allowed: each member commits what it holds, one after the other."""

        def go_on(left: list[int]) -> None:
            if not left:
                done(Code.OK)
                return
            claim = claims[left[0]]
            share = {tp: offset for tp, offset in work.offsets.items() if work.slots[tp] == left[0]}
            if claim.client.closed:
                done(Code.UNKNOWN_MEMBER)
                return
            claim.client.commit(
                share,
                entry,
                lambda code: self._worker(0, lambda: go_on(left[1:]) if code is Code.OK else done(code)),
                known=(claim.member, claim.generation),
            )

        go_on(list(claims))

    def _read_back(self, work: ev.Echo, deadline_ms: int) -> None:
        def seen(found: dict[TopicPartition, Entry | None]) -> None:
            if all(at is not None and at.offset == work.offsets[tp] for tp, at in found.items()):
                self._done(ev.EchoDone(offsets=work.offsets))
            elif self._world.now_ms > deadline_ms:
                self._done(ev.EchoFailed(reason="the group shows other offsets"))
            else:
                self._worker(20, lambda: self._read_back(work, deadline_ms))

        self.process.call(WORKER, lambda reply: self._group.read(work.offsets, False, reply), seen)

    def _worker(self, delay_ms: int, do: Callable[[], None]) -> None:
        self.process.later(WORKER, delay_ms, do)

    def _done(self, event: ev.Event) -> None:
        self._working = False
        self._handle(event)
        self._worker(0, self._work_on)
        self._worker(0, self._on_time)


class _Slot:
    """The thread of one slot: turns a consumer's callbacks into events."""

    def __init__(self, driver: SparkDriver, join: ev.Join) -> None:
        self._driver, self._join = driver, join
        self._me = {"slot": join.slot, "client": join.client}
        self._member = ""

    def assigned(self, tps: Tps, generation: int) -> None:
        if self._is_another(tps):
            return
        self._driver._handle(ev.Assigned(**self._me, partitions=tuple(sorted(tps)), generation=generation))

    def revoked(self, tps: Tps, done: Callable[[], None]) -> None:
        if self._is_another(frozenset()):
            return
        eager = not self._driver._group.incremental
        event = ev.Revoking(**self._me, partitions=tuple(sorted(tps)), eager=eager)
        self._driver.hold(self._join.slot, event, done)

    def _is_another(self, added: Tps) -> bool:
        """Thrown out while it held a revocation or stood still, and back with what it still calls its own."""
        client = self._driver._clients[self._join.slot]
        before, self._member = self._member, client.member
        if before in ("", client.member) or not client.owned - added:
            return False
        client.abandon()
        self._driver._handle(ev.MemberFailed(**self._me, reason="back as another member"))
        return True

    def lost(self, tps: Tps) -> None:
        self._member = ""
        self._driver._handle(ev.Lost(**self._me, partitions=tuple(sorted(tps))))

    def dead(self, code: Code) -> None:
        if code is Code.FENCED_INSTANCE:
            self._driver._handle(ev.MemberFenced(**self._me, reason=code.value))
        else:
            self._driver._handle(ev.MemberFailed(**self._me, reason=code.value))
