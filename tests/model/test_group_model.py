"""The group machine against a small model of what the design promises, over random histories.

The model knows Kafka's committed offsets, what the sink has and which partitions are ours; it is written from the
rules, and says after each event which revocations must go, what must be committed and where every partition stands.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spark_group_source.group import events as ev
from spark_group_source.group.machine import GroupMachine
from spark_group_source.group.offsets import StreamOffset, parse
from spark_group_source.model import TopicPartition
from spark_group_source.testing.harness import FOUNDING_BUDGET_MS, GROUP, HOLD_BUDGET_MS, STREAM

SLOTS = 2
ALL = [TopicPartition("orders", p) for p in range(4)]
KNOWN = {"orders": 3}  # partition 3 was added later
START = {ALL[0]: 5, ALL[1]: 0, ALL[2]: 9, ALL[3]: 0}

partitions = st.sets(st.sampled_from(ALL), min_size=1, max_size=3)
slots = st.integers(0, SLOTS - 1)


@dataclass
class Model:
    """What is true, in as few words as possible."""

    kafka: dict[TopicPartition, tuple[int, str | None]] = field(default_factory=dict)
    durable: dict[TopicPartition, int] = field(default_factory=dict)  # end of what the sink has, by our reading
    held: dict[TopicPartition, int] = field(default_factory=dict)  # -> slot
    position: dict[TopicPartition, int] = field(default_factory=dict)  # of what is held and was looked up
    known: dict[TopicPartition, int] = field(default_factory=dict)  # what we know that Kafka has
    began: dict[TopicPartition, int] = field(default_factory=dict)  # position at the first answer
    theirs: set[TopicPartition] = field(default_factory=set)  # committed by others, not yet under our name
    owed: set[TopicPartition] = field(default_factory=set)  # durable ends that Kafka may not have, of what is not held
    leaving: dict[int, set[TopicPartition]] = field(default_factory=dict)
    flight: dict[TopicPartition, tuple[int, int]] = field(default_factory=dict)

    def start_of(self, tp: TopicPartition) -> int:
        offset, by = self.kafka.get(tp, (None, None))
        if offset is None:
            return self.durable.get(tp, START[tp])
        return max(offset, self.durable.get(tp, offset)) if by == STREAM else offset

    def busy(self, tp: TopicPartition) -> bool:
        """Whether the batch in flight reads on from where the partition stands."""
        start, end = self.flight.get(tp, (0, 0))
        return tp in self.position and start <= self.position[tp] < end

    def dirty(self) -> dict[TopicPartition, int]:
        return {tp: at for tp, at in self.position.items() if self.known.get(tp, -1) < at or tp in self.theirs}

    def may_go(self, slot: int, on_its_way: set[TopicPartition]) -> bool:
        return not any(self.must_stay(tp, on_its_way) for tp in self.leaving[slot])

    def must_stay(self, tp: TopicPartition, on_its_way: set[TopicPartition]) -> bool:
        if tp not in self.position:
            return tp in self.flight or tp in self.owed
        unknown = tp in self.dirty() and (self.known.get(tp) != self.position[tp] or tp in on_its_way)
        return self.busy(tp) or unknown

    def drop(self, tp: TopicPartition) -> None:
        slot = self.held.pop(tp)
        known = self.known.pop(tp, -1)
        self.theirs.discard(tp)
        if (at := self.position.pop(tp, None)) is not None:
            self.durable[tp] = at
            if known < at:
                self.owed.add(tp)
        self.leaving.get(slot, set()).discard(tp)

    def finish(self) -> None:
        for tp, (_, end) in self.flight.items():
            if self.busy(tp):
                self.position[tp] = end
            elif tp not in self.position:
                self.durable[tp] = max(self.durable.get(tp, end), end)
                self.owed.add(tp)
        self.flight = {}


class GroupRun(RuleBasedStateMachine):
    """One stream, its runs and its group."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.now_ms = 0
        self.last: StreamOffset | None = None
        self.logged: StreamOffset | None = None
        self.begin()

    @initialize()
    def born(self) -> None:
        self.send(ev.Born(stream=STREAM, known=KNOWN, topics=("orders",)))

    def begin(self) -> None:
        self.machine = GroupMachine(
            group=GROUP, slots=SLOTS, hold_budget_ms=HOLD_BUDGET_MS, founding_budget_ms=FOUNDING_BUDGET_MS
        )
        self.clients: dict[int, int] = {}
        self.echoes: list[ev.Echo] = []
        self.lookups: deque[tuple[ev.FetchCommitted | ev.ResolveStarts, dict[TopicPartition, int]]] = deque()
        self.arrivals: Counter[TopicPartition] = Counter()  # how often it became ours
        self.revoked_at: dict[int, int] = {}
        self.model.held, self.model.position, self.model.known, self.model.leaving = {}, {}, {}, {}
        self.model.theirs = set()

    def send(self, event: ev.Event) -> None:
        """Hand an event over, after the model was changed by it, and compare what is ordered."""
        released = []
        for command in self.machine.handle(event, now_ms=self.now_ms):
            match command:
                case ev.Join():
                    self.clients[command.slot] = command.client
                case ev.FetchCommitted() | ev.ResolveStarts():
                    self.lookups.append((command, dict(self.arrivals)))
                case ev.Echo():
                    assert command.offsets == self.model.dirty(), "the echo carries all that Kafka does not have"
                    assert not self.echoes, "one commit at a time"
                    self.echoes.append(command)
                case ev.Release():
                    released.append(command.slot)
                case ev.Fail():
                    raise AssertionError(command.error)
                case _:
                    pass
        for slot in list(self.model.leaving):
            overrun = isinstance(event, ev.Tick) and self.now_ms - self.revoked_at[slot] >= HOLD_BUDGET_MS
            if self.model.may_go(slot, self.on_its_way()) or overrun:
                assert slot in released, f"slot {slot} must be let go"
                released.remove(slot)
                for tp in list(self.model.leaving.pop(slot)):
                    self.model.drop(tp)
        assert not released, f"slots {released} must be held"

    def on_its_way(self) -> set[TopicPartition]:
        return {tp for echo in self.echoes for tp in echo.offsets}

    def of(self, slot: int) -> dict[str, int]:
        return {"slot": slot, "client": self.clients[slot]}

    def mine(self, slot: int, wanted: set[TopicPartition]) -> tuple[TopicPartition, ...]:
        return tuple(sorted(tp for tp in wanted if self.model.held.get(tp) == slot))

    def in_group(self, slot: int) -> bool:
        return self.machine.statistics().slots[slot] != "out"

    # --- what members report ---------------------------------------------------------------------------------------

    @rule(slot=slots, wanted=partitions)
    def assign(self, slot: int, wanted: set[TopicPartition]) -> None:
        if slot in self.model.leaving or not self.in_group(slot):
            return
        wanted -= {tp for tp, owner in self.model.held.items() if owner in self.model.leaving}
        for tp in wanted:
            if self.model.held.get(tp, slot) != slot:  # it moved without our being told
                self.model.drop(tp)
            self.arrivals[tp] += tp not in self.model.held
            self.model.held[tp] = slot
        self.send(ev.Assigned(**self.of(slot), partitions=tuple(sorted(wanted))))

    @rule(slot=slots, wanted=partitions, eager=st.booleans())
    def revoke(self, slot: int, wanted: set[TopicPartition], eager: bool) -> None:
        if not self.in_group(slot):
            return
        gone = tuple(tp for tp, owner in self.model.held.items() if owner == slot) if eager else self.mine(slot, wanted)
        if not gone:
            return
        if slot not in self.model.leaving:
            self.revoked_at[slot] = self.now_ms
        self.model.leaving.setdefault(slot, set()).update(gone)
        self.send(ev.Revoking(**self.of(slot), partitions=gone, eager=eager))

    @rule(slot=slots, wanted=partitions)
    def lose(self, slot: int, wanted: set[TopicPartition]) -> None:
        gone = self.mine(slot, wanted)
        if slot in self.model.leaving or not gone:
            return
        before, twice = self.machine.statistics().maybe_twice, self.uncommitted(gone)
        for tp in gone:
            self.model.drop(tp)
        self.send(ev.Lost(**self.of(slot), partitions=gone))
        assert self.machine.statistics().maybe_twice - before == twice

    @rule(slot=slots)
    def fail(self, slot: int) -> None:
        if not self.in_group(slot):
            return
        for tp in [tp for tp, owner in self.model.held.items() if owner == slot]:
            self.model.drop(tp)
        self.model.leaving.pop(slot, None)
        self.send(ev.MemberFailed(**self.of(slot), reason="test"))
        self.tick(5_000)
        self.send(ev.Assigned(**self.of(slot), partitions=()))

    @rule(slot=slots)
    def talk_late(self, slot: int) -> None:
        """Words of a consumer that was replaced."""
        old = {"slot": slot, "client": self.clients[slot] - 1}
        self.send(ev.Lost(**old, partitions=tuple(ALL)))
        self.send(ev.Revoking(**old, partitions=tuple(ALL), eager=True))
        self.send(ev.MemberFailed(**old, reason="late"))

    def uncommitted(self, gone: tuple[TopicPartition, ...]) -> int:
        """Offsets that the next reader of these reads again."""
        total = sum(end - start for tp, (start, end) in self.model.flight.items() if tp in self.unresolved(gone))
        for tp in set(gone) & self.model.position.keys():
            at = self.model.position[tp]
            end = self.model.flight[tp][1] if self.model.busy(tp) else at
            total += end - min(at, self.model.known.get(tp, self.model.began[tp]))
        return total

    def unresolved(self, gone: tuple[TopicPartition, ...]) -> set[TopicPartition]:
        return set(gone) - self.model.position.keys()

    # --- what Spark says --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.logged is self.last)
    @rule(sizes=st.lists(st.integers(0, 9), min_size=len(ALL), max_size=len(ALL)))
    def plan(self, sizes: list[int]) -> None:
        plannable = self.machine.plannable()
        ranges = {tp: (at, at + sizes[ALL.index(tp)]) for tp, at in plannable.items()}
        owed = {tp: at for tp, at in self.machine.positions.owed().items() if tp not in ranges}
        assert owed == {tp: at for tp, at in self.owed().items() if tp not in ranges}
        seq = self.machine.seq + 1
        offset = StreamOffset(group=GROUP, stream=STREAM, seq=seq, known=KNOWN, ranges=ranges, owed=owed)
        self.logged = offset
        self.model.flight = {tp: pair for tp, pair in ranges.items() if pair[0] < pair[1]}
        self.send(ev.Planned(offset=offset))

    def owed(self) -> dict[TopicPartition, int]:
        return {tp: self.model.durable[tp] for tp in self.model.owed} | self.model.dirty()

    @precondition(lambda self: self.logged is not self.last)
    @rule(twice=st.booleans())
    def finish(self, twice: bool) -> None:
        assert self.logged is not None
        self.last = self.logged
        self.model.finish()
        self.send(ev.Durable(offset=self.last))
        if twice:
            self.send(ev.Durable(offset=self.last))

    @precondition(lambda self: self.logged is not None)
    @rule()
    def restart(self) -> None:
        """The driver is killed; the next run finds the checkpoint, as text."""
        assert self.logged is not None
        self.begin()
        offset = parse(self.logged.to_json())
        self.model.durable = {tp: pair[self.logged is self.last] for tp, pair in offset.ranges.items()}
        self.model.durable |= offset.owed
        self.model.owed = set(self.model.durable)
        if self.logged is self.last:
            self.send(ev.Durable(offset=offset, topics=("orders",)))
        else:
            self.send(ev.Replay(offset=offset, topics=("orders",)))

    # --- what Kafka answers -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.lookups)
    @rule(fails=st.integers(0, 4))
    def answer(self, fails: int) -> None:
        lookup, arrivals = self.lookups.popleft()
        asked = lookup.partitions if isinstance(lookup, ev.FetchCommitted) else lookup.initial + lookup.new
        if fails == 0:
            self.send(ev.LookupFailed(partitions=asked, reason="test"))
        elif isinstance(lookup, ev.ResolveStarts):
            assert set(lookup.initial) <= set(ALL[:3]) and set(lookup.new) <= {ALL[3]}
            self.resolved({tp for tp in asked if self.waits(tp, arrivals)})
            self.send(ev.StartsResolved(offsets={tp: START[tp] for tp in asked}))
        else:
            found = {tp: self.model.kafka.get(tp) for tp in asked}
            known = {tp for tp in asked if found[tp] or tp in self.model.durable}
            self.resolved({tp for tp in known if self.waits(tp, arrivals)})
            read = {tp: None if at is None else ev.Committed(offset=at[0], stream=at[1]) for tp, at in found.items()}
            self.send(ev.CommittedRead(offsets=read))

    def waits(self, tp: TopicPartition, arrivals: dict[TopicPartition, int]) -> bool:
        """Whether an answer counts: what left and came back since the question is asked for again."""
        return tp in self.model.held and tp not in self.model.position and arrivals[tp] == self.arrivals[tp]

    def resolved(self, tps: set[TopicPartition]) -> None:
        for tp in tps:
            self.model.position[tp] = self.model.began[tp] = self.model.start_of(tp)
            self.model.owed.discard(tp)
            if tp in self.model.kafka:
                self.model.known[tp], by = self.model.kafka[tp]
                if by != STREAM:
                    self.model.theirs.add(tp)

    @precondition(lambda self: self.echoes)
    @rule(landed=st.booleans(), heard=st.booleans())
    def echo(self, landed: bool, heard: bool) -> None:
        """A commit that arrives or not, and whose answer arrives or not."""
        echo = self.echoes.pop()
        # What another member has by now is not ours to move: see tests/simulation for commits that come too late.
        offsets = {tp: at for tp, at in echo.offsets.items() if self.model.position.get(tp, -1) >= at}
        if landed or heard:
            self.model.kafka.update({tp: (at, STREAM) for tp, at in offsets.items()})
        if heard:
            self.model.known.update(offsets)
            self.model.theirs -= {tp for tp, at in offsets.items() if self.model.position[tp] == at}
            self.send(ev.EchoDone(offsets=offsets))
        else:
            self.send(ev.EchoFailed(reason="test"))

    @rule(tp=st.sampled_from(ALL), by=st.sampled_from([None, "another"]), offset=st.integers(0, 60))
    def commit_of_others(self, tp: TopicPartition, by: str | None, offset: int) -> None:
        if tp not in self.model.held and not any(tp in echo.offsets for echo in self.echoes):
            self.model.kafka[tp] = (offset, by)

    @rule(ms=st.sampled_from([1, 100, 5_000, HOLD_BUDGET_MS]))
    def tick(self, ms: int) -> None:
        self.now_ms += ms
        for slot, leaving in self.model.leaving.items():
            if self.now_ms - self.revoked_at[slot] >= HOLD_BUDGET_MS:
                for tp in [tp for tp in leaving if self.model.must_stay(tp, self.on_its_way())]:
                    self.model.drop(tp)
        self.send(ev.Tick())

    @rule()
    def list_topics(self) -> None:
        self.send(ev.TopicsSeen(topics=("orders",)))

    # --- always -----------------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.machine.check()
        if self.machine.phase.value == "new":
            return
        leaving = {tp for tps in self.model.leaving.values() for tp in tps}
        assert self.machine.held() == set(self.model.held)
        assert self.machine.plannable() == {
            tp: at for tp, at in self.model.position.items() if tp not in leaving | self.model.theirs
        }
        assert self.machine.echoed == (not self.model.dirty() and not self.echoes)

    def teardown(self) -> None:
        """Left alone, everything comes to rest: all that is durable is committed, nothing is held."""
        if self.machine.phase.value == "new":
            return
        for _ in range(5):
            if self.logged is not self.last:
                self.finish(False)
            while self.lookups:
                self.answer(1)
            while self.echoes:
                self.echo(True, True)
            self.tick(5_000)
        assert self.machine.resolved and self.machine.echoed and not self.model.leaving


TestGroupRun = GroupRun.TestCase
TestGroupRun.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.filter_too_much],
)
