"""A run driven by short methods: a test feeds events, and gets the commands that follow.

Runs in: tests. Deliberately absent: threads, and a group with members of its own (``kafka_group``).
:class:`GroupHarness` has a run, and the test plays Spark, Kafka and the agents (in ``run_harness`` Kafka answers from
dictionaries). Each event is followed by :func:`require_consistent`, so every test also tests the invariants.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from kit.contradictions import require_consistent
from spark_group_source.errors import InvariantBroken
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.protocol.offsets import BatchKey, StreamOffset
from spark_group_source.protocol.planner import Planner
from spark_group_source.protocol.rules import Rules, StartingPosition
from spark_group_source.protocol.run import Run
from spark_group_source.protocol.states import RunState

GROUP = "etl"
STREAM = "9f2c"
HOLD_BUDGET_MS = 24_000
JOINING_BUDGET_MS = 75_000
PING_MS = 1_000
"""The interval of agents' heartbeats."""

C = TypeVar("C")
Commands = list[ev.Command]


def tps(topic: str, *partitions: int) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(topic, p) for p in partitions)


def only(kind: type[C], commands: Commands) -> list[C]:
    """The commands of one class, in order."""
    return [command for command in commands if isinstance(command, kind)]


def rules_with(**rules: Any) -> Rules:
    """The rules of the tests, changed by these."""
    usual: dict[str, Any] = {
        "group": GROUP,
        "starting": StartingPosition(),
        "connection": ("--bootstrap-servers", "broker:9092"),
        "hold_budget_ms": HOLD_BUDGET_MS,
        "joining_budget_ms": JOINING_BUDGET_MS,
    }
    return Rules(**usual | rules)


def plan_batch(
    run: Run,
    ends: Mapping[TopicPartition, int],
    planner: Planner | None = None,
    *,
    topic_ids: Mapping[str, str] | None = None,
    first: bool = False,
    unlimited: bool = False,
    now_ms: int = 0,
) -> StreamOffset | None:
    """The plan of the run's next batch."""
    return (planner or Planner(rules_with())).plan(
        run.plannable(),
        ends,
        topic_ids or {},
        lambda _: {},
        stream=run.stream,
        partitions=run.partitions,
        lookups=run.lookups,
        first=first,
        unlimited=unlimited,
        now_ms=now_ms,
    )


class ManualClock:
    """A clock in milliseconds that moves only when a test advances it. Called, it returns the time."""

    def __init__(self, now_ms: int = 0) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, *, ms: int) -> int:
        """Move forward; a clock never goes back."""
        if ms < 0:
            raise ValueError(f"a clock cannot go back by {-ms} ms")
        self.now_ms += ms
        return self.now_ms


class GroupHarness:
    """One run of a query, driven by a test.

    Args:
        slots: the members of the run.
        rules: other rules.
    """

    def __init__(self, slots: int = 1, **rules: Any) -> None:
        self.clock = ManualClock()
        self.run = Run(rules_with(slots=slots, **rules))
        self.run.placement.transactional = True
        self.clients: dict[int, int] = {}
        self.history: Commands = []

    def feed(self, *events: ev.Event) -> Commands:
        """Handle events; returns the commands of all of them, without log lines."""
        commands: Commands = []
        for event in events:
            commands += self.run.handle(event, now_ms=self.clock())
            require_consistent(self.run)
        return self._ordered(commands)

    def start_moves(self) -> Commands:
        """Start the moves of slots as at a boundary; returns the commands without log lines."""
        self.run._out.begin(self.clock())
        self.run._start_moves()
        require_consistent(self.run)
        return self._ordered(self.run._out.commands)

    def _ordered(self, commands: Commands) -> Commands:
        for command in commands:
            if isinstance(command, ev.Join):
                self.clients[command.slot] = command.client
            if isinstance(command, ev.Fail) and isinstance(command.error, InvariantBroken):
                raise command.error
        self.history += commands
        return [command for command in commands if not isinstance(command, ev.LogLine)]

    def logged(self) -> list[str]:
        return [line.text for line in only(ev.LogLine, self.history)]

    def warned(self) -> list[str]:
        return [line.text for line in only(ev.LogLine, self.history) if line.warn]

    def gathered(self) -> bool:
        return self.run.is_gathered

    def followed(self) -> set[TopicPartition]:
        """Partitions whose position is a commit that no stream made."""
        return {tp for tp, at in self.run.partitions.jumps().items() if at.followed}

    def truncated(self) -> dict[TopicPartition, int]:
        """Partitions that go back to where their log was truncated: the leader epochs known before that."""
        jumps = self.run.partitions.jumps()
        return {tp: at.truncated_after for tp, at in jumps.items() if at.truncated_after is not None}

    # --- members --------------------------------------------------------------------------------------------------

    def assigned(self, *partitions: TopicPartition, slot: int = 0, generation: int = 1) -> Commands:
        return self.feed(ev.Assigned(**self._of(slot), partitions=partitions, generation=generation))

    def revoking(self, *partitions: TopicPartition, slot: int = 0, eager: bool = False) -> Commands:
        return self.feed(ev.Revoking(**self._of(slot), partitions=partitions, eager=eager))

    def lost(self, *partitions: TopicPartition, slot: int = 0) -> Commands:
        return self.feed(ev.Lost(**self._of(slot), partitions=partitions))

    def failed(self, reason: str = "broker down", slot: int = 0, *, group_full: bool = False) -> Commands:
        return self.feed(ev.MemberFailed(**self._of(slot), reason=reason, group_full=group_full))

    def fenced(self, slot: int = 0) -> Commands:
        return self.feed(ev.MemberFenced(**self._of(slot), reason="FENCED_INSTANCE_ID"))

    def member_ended(self, slot: int = 0) -> Commands:
        return self.feed(ev.MemberEnded(**self._of(slot)))

    # --- agents ---------------------------------------------------------------------------------------------------

    def agent_connects(self, host: str, *, executor: str = "", fresh: bool = True) -> Commands:
        """An agent connects; each has its own executor unless ``executor`` names one."""
        return self.feed(ev.AgentConnected(agent=host, executor=executor or f"of {host}", fresh=fresh))

    def send_heartbeats(self, ms: int, *hosts: str) -> Commands:
        """Time passes, and agents send heartbeats; all of them unless ``hosts`` names some."""
        commands: Commands = []
        for _ in range(0, ms, PING_MS):
            commands += self.tick(ms=PING_MS)
            connected = hosts or tuple(self.run.placement.agents.all)
            commands += self.feed(*(ev.AgentHeartbeat(agent=host) for host in connected))
        return commands

    # --- Spark ----------------------------------------------------------------------------------------------------

    def start_stream(self, known: Mapping[str, int] | None = None) -> Commands:
        known = known or {"orders": 4}
        first = ev.NextBatchRequested(start=StreamOffset.initial(GROUP), new_stream=STREAM)
        return self.feed(first, ev.TopicsListed(topics=known))

    def resume(
        self, offset: StreamOffset, topics: Iterable[str] = ("orders",), *, committed: StreamOffset | None = None
    ) -> Commands:
        """The run starts after this durable batch of an earlier run. ``committed``: the batch after which a run of the
        stream stopped with all offsets committed."""
        listed = ev.TopicsListed(topics=dict.fromkeys(topics, 4))
        mark = None if committed is None else BatchKey.of(committed)
        return self.feed(ev.NextBatchRequested(start=offset, new_stream=STREAM, committed=mark), listed)

    def replay(self, offset: StreamOffset) -> Commands:
        """The run starts with this batch of an earlier run, which is read again."""
        return self.feed(ev.BatchStarted(offset=offset), ev.TopicsListed(topics={"orders": 4}))

    def close(self, *, leave: bool) -> Commands:
        """Spark stops the run, and its members close."""
        return self.feed(ev.StopRequested(), ev.MembersClosing(leave=leave))

    def plan(self, ranges: Mapping[TopicPartition, tuple[int, int]]) -> Commands:
        """Plan a batch that reads these ranges, and nothing of the other assigned partitions."""
        still = {tp: (at, at) for tp, at in self.run.plannable().items()}
        return self.planned(self.offset(still | dict(ranges), self.run.seq + 1))

    def planned(self, offset: StreamOffset) -> Commands:
        """This batch was planned: puts the run into the state in which that happens."""
        self.run.state = RunState.FETCHING_ENDS
        return self.feed(ev.Planned(offset=offset))

    def durable(self, ranges: Mapping[TopicPartition, tuple[int, int]] | None = None) -> Commands:
        """The batch in flight is durable (or, as the first event, the batch with these ranges is)."""
        if ranges is not None:
            return self.resume(self.offset(ranges, 7))
        return self.feed(ev.Durable(offset=self.offset({}, self.run.seq + 1)))

    def offset(self, ranges: Mapping[TopicPartition, tuple[int, int]], seq: int) -> StreamOffset:
        return StreamOffset(group=GROUP, stream=STREAM, seq=seq, known=self.run.lookups.known, ranges=ranges)

    # --- Kafka ----------------------------------------------------------------------------------------------------

    def committed(self, offsets: Mapping[TopicPartition, int | ev.Committed | None]) -> Commands:
        """The group's committed offsets; a plain number is a commit of this stream that is older than all the run
        remembers."""
        read = {
            tp: ev.Committed(offset=found, stream=STREAM) if isinstance(found, int) else found
            for tp, found in offsets.items()
        }
        return self.feed(ev.CommittedOffsetsRead(offsets=read, requested=tuple(read), reset_number=0))

    def resolved(self, offsets: Mapping[TopicPartition, int | None]) -> Commands:
        """The offsets of the starting options."""
        return self.feed(ev.StartsResolved(offsets=offsets, requested=tuple(offsets)))

    def commit_succeeds(self, commands: Commands | None = None) -> Commands:
        """The last commit that was ordered (in ``commands``, or ever) succeeds."""
        echo = only(ev.CommitOffsets, self.history if commands is None else commands)[-1]
        return self.feed(ev.OffsetsCommitted(offsets=echo.offsets))

    def tick(self, *, ms: int) -> Commands:
        self.clock.advance(ms=ms)
        return self.feed(ev.Tick())

    def adopt(self, offsets: Mapping[TopicPartition, ev.Committed]) -> Commands:
        """Foreign commits of these offsets are found, and the commit under this stream's name succeeds."""
        commands = self.committed(offsets)
        return commands + self.commit_succeeds(commands)

    def settled(self, *partitions: TopicPartition, at: int = 100, slot: int = 0) -> None:
        """Bring partitions to the state "assigned, committed by this stream at ``at``"."""
        self.assigned(*partitions, slot=slot)
        self.committed(dict.fromkeys(partitions, at))

    def reads(self, ranges: Mapping[TopicPartition, tuple[int, int]], *others: TopicPartition) -> None:
        """The start of many tests: all these partitions are settled at 100, and a batch reads ``ranges``."""
        self.settled(*ranges, *others)
        self.plan(ranges)

    def replays(self, ranges: Mapping[TopicPartition, tuple[int, int]], **more: Any) -> StreamOffset:
        """The run starts with batch 3 of an earlier one, which reads these ranges; its members join."""
        offset = StreamOffset(group=GROUP, stream=STREAM, seq=3, known={"orders": 3}, ranges=ranges, **more)
        self.replay(offset)
        return offset

    def join(self, slot: int = 0, *, client: int = 1, topics: tuple[str, ...] = ("orders",)) -> ev.Join:
        """The command that creates this slot's consumer."""
        instance_id = identifiers.instance_id(GROUP, STREAM, slot)
        client_id = identifiers.client_id(STREAM, slot)
        return ev.Join(slot=slot, client=client, topics=topics, client_id=client_id, instance_id=instance_id)

    def _of(self, slot: int) -> dict[str, Any]:
        return {"slot": slot, "client": self.clients.get(slot, 0)}
