"""The protocol with short words around it: say what happened, get back what is ordered.

Runs in: tests. Deliberately absent: threads, and a group with members of its own (``kafka_group``).
:class:`GroupHarness` has the machine, and the test plays everybody else (``run_harness`` has a run, and plays the shell
and a Kafka that answers from dictionaries). Each event is followed by :meth:`Run.check`, so every test also
tests the invariants.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from spark_group_source.errors import InvariantBroken
from spark_group_source.model import TopicPartition
from spark_group_source.options.starting import StartingPosition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.partition_states import Origin
from spark_group_source.protocol.rules import Rules
from spark_group_source.protocol.run import Run
from spark_group_source.protocol.states import RunState

GROUP = "etl"
STREAM = "9f2c"
HOLD_BUDGET_MS = 24_000
JOINING_BUDGET_MS = 75_000
PING_MS = 1_000
"""How often agents are heard, where they are."""

C = TypeVar("C")
Commands = list[ev.Command]


def tps(topic: str, *partitions: int) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(topic, p) for p in partitions)


def only(kind: type[C], commands: Commands) -> list[C]:
    """The commands of one class, in order."""
    return [command for command in commands if isinstance(command, kind)]


def rules_with(**rules: Any) -> Rules:
    """The rules of the tests, but for these."""
    usual: dict[str, Any] = {
        "group": GROUP,
        "starting": StartingPosition(),
        "servers": "broker:9092",
        "hold_budget_ms": HOLD_BUDGET_MS,
        "joining_budget_ms": JOINING_BUDGET_MS,
    }
    return Rules(**usual | rules)


class ManualClock:
    """Milliseconds since some moment, which move only when a test says so. Called, it reads as the product's clocks."""

    def __init__(self, now_ms: int = 0) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, *, ms: int) -> int:
        """Move on; a clock never goes back."""
        if ms < 0:
            raise ValueError(f"a clock cannot go back by {-ms} ms")
        self.now_ms += ms
        return self.now_ms


class GroupHarness:
    """One run of a query, played by a test.

    Args:
        slots: members of ours.
        rules: what else the options say.
    """

    def __init__(self, slots: int = 1, **rules: Any) -> None:
        self.clock = ManualClock()
        self.machine = Run(rules_with(slots=slots, **rules))
        self.machine.placement.transactional = True
        self.clients: dict[int, int] = {}
        self.history: Commands = []

    def feed(self, *events: ev.Event) -> Commands:
        """Hand over events; the commands of all of them, without the log lines."""
        commands: Commands = []
        for event in events:
            commands += self.machine.handle(event, now_ms=self.clock())
            self.machine.check()
        for command in commands:
            if isinstance(command, ev.Join):
                self.clients[command.slot] = command.client
            if isinstance(command, ev.Fail) and isinstance(command.error, InvariantBroken):
                raise command.error
        self.history += commands
        return [command for command in commands if not isinstance(command, ev.LogLine)]

    def said(self) -> list[str]:
        return [say.text for say in only(ev.LogLine, self.history)]

    def warned(self) -> list[str]:
        return [say.text for say in only(ev.LogLine, self.history) if say.warn]

    def gathered(self) -> bool:
        return self.machine.is_gathered

    def followed(self) -> set[TopicPartition]:
        """Partitions whose position is a commit that no stream made."""
        return {tp for tp, at in self.machine.positions.jumps().items() if at.origin is Origin.FOLLOWED}

    def truncated(self) -> dict[TopicPartition, int]:
        """Partitions that go back to where their log was truncated: the positions before that."""
        jumps = self.machine.positions.jumps()
        return {tp: at.truncated_from for tp, at in jumps.items() if at.truncated_from is not None}

    # --- what members report ----------------------------------------------------------------------------------------

    def assigned(self, *partitions: TopicPartition, slot: int = 0, generation: int = 1) -> Commands:
        return self.feed(ev.Assigned(**self._of(slot), partitions=partitions, generation=generation))

    def revoking(self, *partitions: TopicPartition, slot: int = 0, eager: bool = False) -> Commands:
        return self.feed(ev.Revoking(**self._of(slot), partitions=partitions, eager=eager))

    def lost(self, *partitions: TopicPartition, slot: int = 0) -> Commands:
        return self.feed(ev.Lost(**self._of(slot), partitions=partitions))

    def failed(self, reason: str = "broker down", slot: int = 0) -> Commands:
        return self.feed(ev.MemberFailed(**self._of(slot), reason=reason))

    def fenced(self, slot: int = 0) -> Commands:
        return self.feed(ev.MemberFenced(**self._of(slot), reason="FENCED_INSTANCE_ID"))

    def member_ended(self, slot: int = 0) -> Commands:
        return self.feed(ev.MemberEnded(**self._of(slot)))

    # --- what agents do ---------------------------------------------------------------------------------------------

    def host_came(self, host: str, *, executor: str = "", fresh: bool = True) -> Commands:
        """An agent says hello; each has an executor of its own unless ``executor`` says otherwise."""
        return self.feed(ev.AgentConnected(agent=host, executor=executor or f"of {host}", fresh=fresh))

    def stay(self, ms: int, *hosts: str) -> Commands:
        """Time passes, and agents are heard; all of them unless ``hosts`` says which."""
        commands: Commands = []
        for _ in range(0, ms, PING_MS):
            commands += self.tick(ms=PING_MS)
            heard = hosts or tuple(self.machine.placement.hosts.all)
            commands += self.feed(*(ev.AgentHeartbeat(agent=host) for host in heard))
        return commands

    # --- what Spark says --------------------------------------------------------------------------------------------

    def born(self, known: Mapping[str, int] | None = None) -> Commands:
        known = known or {"orders": 4}
        first = ev.NextBatchRequested(start=StreamOffset.initial(GROUP), name=STREAM)
        return self.feed(first, ev.TopicsListed(topics=known))

    def goes_on(self, offset: StreamOffset, topics: Iterable[str] = ("orders",)) -> Commands:
        """The run begins after this durable batch of a former one."""
        listed = ev.TopicsListed(topics=dict.fromkeys(topics, 4))
        return self.feed(ev.NextBatchRequested(start=offset, name=STREAM), listed)

    def replay(self, offset: StreamOffset) -> Commands:
        """The run begins with this batch of a former one, which is read again."""
        return self.feed(ev.BatchStarted(offset=offset), ev.TopicsListed(topics={"orders": 4}))

    def close(self, *, leave: bool) -> Commands:
        """Spark ends the run, and its members close."""
        return self.feed(ev.StopRequested(), ev.MembersClosing(leave=leave))

    def plan(self, ranges: Mapping[TopicPartition, tuple[int, int]]) -> Commands:
        """Plan a batch that reads these; what else is held stands still."""
        still = {tp: (at, at) for tp, at in self.machine.plannable().items()}
        return self.planned(self.offset(still | dict(ranges), self.machine.seq + 1))

    def planned(self, offset: StreamOffset) -> Commands:
        """This batch was planned: the call of Spark has come that far."""
        self.machine.state = RunState.FETCHING_ENDS
        return self.feed(ev.Planned(offset=offset))

    def durable(self, ranges: Mapping[TopicPartition, tuple[int, int]] | None = None) -> Commands:
        """The batch in flight is durable (or, as the first event, the batch with these ranges is)."""
        if ranges is not None:
            return self.goes_on(self.offset(ranges, 7))
        return self.feed(ev.Durable(offset=self.offset({}, self.machine.seq + 1)))

    def offset(self, ranges: Mapping[TopicPartition, tuple[int, int]], seq: int) -> StreamOffset:
        return StreamOffset(group=GROUP, stream=STREAM, seq=seq, known=self.machine.lookups.known, ranges=ranges)

    # --- what Kafka answers -----------------------------------------------------------------------------------------

    def committed(self, offsets: Mapping[TopicPartition, int | ev.Committed | None]) -> Commands:
        """The group's offsets; a plain number is a commit of this stream from before all that this run remembers."""
        read = {
            tp: ev.Committed(offset=found, stream=STREAM) if isinstance(found, int) else found
            for tp, found in offsets.items()
        }
        return self.feed(ev.CommittedOffsetsRead(offsets=read, asked=tuple(read), reset_number=0))

    def resolved(self, offsets: Mapping[TopicPartition, int | None]) -> Commands:
        """What the starting options stand for."""
        return self.feed(ev.StartsResolved(offsets=offsets, asked=tuple(offsets)))

    def echoed(self, commands: Commands | None = None) -> Commands:
        """The last echo that was ordered (in ``commands``, or ever) is committed and shows."""
        echo = only(ev.CommitOffsets, self.history if commands is None else commands)[-1]
        return self.feed(ev.OffsetsCommitted(offsets=echo.offsets))

    def tick(self, *, ms: int) -> Commands:
        self.clock.advance(ms=ms)
        return self.feed(ev.Tick())

    def taken(self, offsets: Mapping[TopicPartition, ev.Committed]) -> Commands:
        """Others committed these: the echo under our name is ordered, and answered."""
        commands = self.committed(offsets)
        return commands + self.echoed(commands)

    def settled(self, *partitions: TopicPartition, at: int = 100, slot: int = 0) -> None:
        """Bring partitions to the state "held, committed by us at ``at``"."""
        self.assigned(*partitions, slot=slot)
        self.committed(dict.fromkeys(partitions, at))

    def reads(self, ranges: Mapping[TopicPartition, tuple[int, int]], *others: TopicPartition) -> None:
        """The opening of many tests: all of these are held, committed by us at 100, and a batch reads ``ranges``."""
        self.settled(*ranges, *others)
        self.plan(ranges)

    def replays(self, ranges: Mapping[TopicPartition, tuple[int, int]], **more: Any) -> StreamOffset:
        """The run begins with batch 3 of a former one, which reads these; its members join."""
        offset = StreamOffset(group=GROUP, stream=STREAM, seq=3, known={"orders": 3}, ranges=ranges, **more)
        self.replay(offset)
        return offset

    def join(self, slot: int = 0, *, client: int = 1, topics: tuple[str, ...] = ("orders",)) -> ev.Join:
        """The order to make this slot's consumer."""
        instance_id = identifiers.instance_id(GROUP, STREAM, slot)
        client_id = identifiers.client_id(STREAM, slot)
        return ev.Join(slot=slot, client=client, topics=topics, client_id=client_id, instance_id=instance_id)

    def _of(self, slot: int) -> dict[str, Any]:
        return {"slot": slot, "client": self.clients.get(slot, 0)}
