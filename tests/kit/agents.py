"""Executors with agents on which members of a simulated query are placed, and their channels to the stream reader.

Runs in: tests. Both ends are shipped code (``agents.hosted_members``, ``agents.connected_agents``), the channel is a
model. It keeps messages in order, as TCP does, delays them, and loses them when it is closed. A message that is dropped
on the way closes the channel when the next one arrives in its direction, as the MACs do. Deliberately absent: bytes,
handshakes, tasks that read from an agent.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from kit.cluster import Cluster
from kit.environment import SimulatedEnvironment
from kit.invariants import Invariants
from kit.world import Draws, Process, Thread, World, the_thread
from spark_group_source.agents import messages as ms
from spark_group_source.agents.hosted_members import HostedMembers
from spark_group_source.protocol.placement import UNASSIGNED_LEASES_MAX
from spark_group_source.protocol.slots import CLOSE_MS_MAX, IN_READER, LEAVE_MS_MAX, MovingState

if TYPE_CHECKING:
    from kit.spark import SparkRun

CONNECT_MS = (5, 800)
"""From a closed channel until the agent tries another."""
CLOSE_SEEN_MS = (0, 3_000)
"""From the loss of a channel until each end detects it."""
TORN_SEEN_MS = (0, 100)
"""The same if one end closes it because a message is missing."""
OUTLIVES_MS = (0, 10_000)
"""How long an agent may outlive its executor."""
EXECUTORS_MAX = 3
LOOK_MS = 10_000
"""How late the run may look at its clock: its request thread may wait for brokers."""
FOREVER_MS = 10**9
TWO_MS_MAX = 20_000
"""How long an instance id may have two living members: until the fenced one is notified, or ordered to end."""

M = TypeVar("M")


@dataclass
class Luck:
    """The probability of each fault of a message."""

    swallowed: float = 0.0
    cut: float = 0.0
    delay_ms_max: int = 10


class Inbox(Generic[M]):
    """Messages that arrived at a process, and the thread there that takes them in order."""

    def __init__(self, process: Process, take: Callable[[M], None]) -> None:
        self._items: deque[M] = deque()
        self._world, self._take = process.world, take
        self._waiting: Thread | None = None
        process.spawn("channel", self._run)

    def put(self, item: M) -> None:
        self._items.append(item)
        if self._waiting is not None:
            thread, self._waiting = self._waiting, None
            thread.wake()

    def _run(self) -> None:
        while True:
            while self._items:
                self._take(self._items.popleft())
            self._waiting = me = the_thread(self._world)
            me.block(None)


class Channel:
    """One connection of an agent with a run: the run's ``AgentConnection``."""

    def __init__(self, world: World, agent: "Agent", run: "SparkRun", luck: Luck) -> None:
        self.world, self.agent, self.run, self.luck = world, agent, run, luck
        self.open = True
        self._arrived_ms = {"agent": 0, "run": 0}
        self._torn: set[str] = set()  # directions in which a message was lost
        self._draws = {to: agent.process.draws(f"channel to {to}") for to in self._arrived_ms}

    # --- the run's end ----------------------------------------------------------------------------------------------

    def send(self, message: ms.AgentOrders) -> None:
        self.carry("agent", lambda: self.agent.receive(self, message))

    def drop(self, reason: str) -> None:
        del reason
        self.cut()

    # --- both -------------------------------------------------------------------------------------------------------

    def to_run(self, message: ms.AgentReport) -> None:
        self.carry("run", lambda: self.run.receive(self, message))

    def cut(self, seen_ms: tuple[int, int] = CLOSE_SEEN_MS) -> None:
        """Close the channel: messages on their way are lost."""
        if self.open:
            self.open = False
            self.world.note(f"{self.agent.process.name}: its channel is closed")
            self.world.at(self._draws["run"].between(*seen_ms), lambda: self.run.cut(self))
            self.world.at(self._draws["agent"].between(*seen_ms), lambda: self.agent.cut(self))

    def carry(self, to: str, deliver: Callable[[], None]) -> None:
        world, draws = self.world, self._draws[to]
        if not self.open or world.inert:
            return
        if draws.chance(self.luck.cut):
            self.cut()
            return
        silent = world.now_ms < self.agent.silent_until_ms
        if silent or draws.chance(self.luck.swallowed):
            self._torn.add(to)
            return
        at_ms = max(self._arrived_ms[to], world.now_ms + draws.between(1, self.luck.delay_ms_max))
        self._arrived_ms[to] = at_ms
        world.at(at_ms - world.now_ms, partial(self._arrive, deliver, torn=to in self._torn))

    def _arrive(self, deliver: Callable[[], None], *, torn: bool) -> None:
        if torn:
            self.cut(TORN_SEEN_MS)
        elif self.open:
            deliver()


class WatchedMembers(HostedMembers):
    """The shipped class. Notes in the books when it ends by itself: its members give up partitions that the run did not
    release."""

    truth: Invariants
    process: Process

    def _end(self, reason: str) -> None:
        self.process.world.note(f"{self.process.name}: the agent ends: {reason}")
        self.truth.gives_up(self.process.name)
        super()._end(reason)


class Agent:
    """One agent: a process beside an executor, on behalf of one run."""

    def __init__(
        self, world: World, cluster: Cluster, truth: Invariants, run: "SparkRun", executor: str, number: int, luck: Luck
    ) -> None:
        self.executor, self.run, self.luck = executor, run, luck
        self.process = Process(world, f"{run.process.name}/{executor}.{number}")
        self.silent_until_ms = 0  # its channels carry nothing before
        self.ended = False
        self.gone_ms: int | None = None  # since when it is dead
        self.former = False  # another run had admitted it
        self.channel: Channel | None = None
        self._world = world
        self._draws = self.process.draws("agent")
        truth.reads_for(self.process.name, run.reader)
        environment = SimulatedEnvironment(self.process, cluster)
        self.hosted = WatchedMembers(
            agent=environment.new_id(),
            executor=executor,
            name=executor,
            settings=run.options.member_settings(),
            environment=environment,
            prefetched=lambda _: (0, 0),
            send=self._send,
            on_ended=self._on_ended,
            on_silent=self._on_silent,
        )
        self.hosted.truth, self.hosted.process = truth, self.process
        self._inbox: Inbox[tuple[Channel, ms.AgentOrders | None]] | None = None
        self.process.spawn("main", self._main)

    @property
    def healthy(self) -> bool:
        return self.process.alive and not self.process.frozen and not self.ended

    def kill(self) -> None:
        """Kill it with all its members; none of them closes."""
        if self.process.alive:
            self.process.kill()
            self.gone_ms = self._world.now_ms
            if self.channel is not None and self._draws.chance(0.7):
                self.channel.cut()  # else the whole machine is gone, and the connection stays silent

    def bye(self) -> None:
        """Its executor has ended."""
        self.process.spawn("watch", lambda: self.hosted.close("its executor ended"))

    def receive(self, channel: Channel, message: ms.AgentOrders) -> None:
        if self._inbox is not None:
            self._inbox.put((channel, message))

    def cut(self, channel: Channel) -> None:
        if channel is self.channel and self.process.alive and not self.ended:
            self.channel = None
            self.process.later("connects", self._draws.between(*CONNECT_MS), self.connect)

    def connect(self) -> None:
        """Connect again, as long as the run's process lives."""
        if self.ended or self.channel is not None:
            return
        if not self.run.process.alive or self._inbox is None:
            self.process.later("connects", self._draws.between(*CONNECT_MS), self.connect)
            return
        self.channel = Channel(self._world, self, self.run, self.luck)
        self._inbox.put((self.channel, None))

    def _main(self) -> None:
        self._inbox = Inbox(self.process, self._take)
        self.hosted.start()
        self.connect()

    def _take(self, item: tuple[Channel, ms.AgentOrders | None]) -> None:
        channel, message = item
        if channel is not self.channel:
            return
        if message is None:
            self.hosted.connected()
        else:
            self.hosted.receive(message)

    def _send(self, message: ms.AgentReport) -> None:
        if self.channel is not None:
            self.channel.to_run(message)

    def _on_silent(self) -> None:
        if self.channel is not None:
            self.channel.cut()

    def _on_ended(self, reason: str) -> None:
        del reason
        self.ended, self.gone_ms = True, self._world.now_ms
        self.process.kill("ends")


class Executors:
    """The executors of one query: each task starts the agent there, if none runs.

    Args:
        luck: of the channels.
        draws: of this query's executors.
    """

    def __init__(self, world: World, cluster: Cluster, truth: Invariants, luck: Luck, draws: Draws) -> None:
        self.wanted = draws.randint(1, EXECUTORS_MAX)
        self.agents: list[Agent] = []
        self.luck = luck
        self._may_join = True
        self._double_since_ms: dict[tuple[SparkRun, str], int] = {}
        self._world, self._cluster, self._truth, self._draws = world, cluster, truth, draws

    def task(self, run: "SparkRun") -> None:
        """Read a batch of this run on all executors."""
        for number in range(self.wanted):
            executor = f"x{number}"
            if not any(agent.executor == executor for agent in self.of(run)) and self._draws.chance(0.9):
                self.start(run, executor)
        for agent in self.agents:
            over = agent.run is not run and agent.healthy and agent.channel is None
            if over and not agent.run.process.alive and self._draws.chance(0.3):
                agent.former |= not agent.hosted._fresh
                agent.run = run  # an agent of an ended run finds this one at its addresses

    def start(self, run: "SparkRun", executor: str) -> None:
        agent = Agent(self._world, self._cluster, self._truth, run, executor, len(self.agents) + 1, self.luck)
        self.agents.append(agent)
        if not self._may_join:
            agent.process.cut_members(FOREVER_MS)

    def keep_from_joining(self) -> None:
        """From now on no member joins from any executor, while the stream reader's do: their network has no way to the
        coordinator, or their role may not use the group."""
        self._may_join = False
        for agent in self.agents:
            agent.process.cut_members(FOREVER_MS)

    def of(self, run: "SparkRun") -> list[Agent]:
        """The living agents of this run."""
        return [agent for agent in self.agents if agent.run is run and agent.process.alive and not agent.ended]

    def calm(self) -> None:
        """Stop all faults."""
        self.luck.swallowed = self.luck.cut = 0.0
        self.luck.delay_ms_max = 10
        for agent in self.agents:
            agent.silent_until_ms = agent.process.cut_off_until_ms = 0
            if agent.process.alive and agent.process.frozen:
                agent.process.thaw()

    def wrong(self, run: "SparkRun") -> str | None:
        """The rule of placement that a living run violates, if any."""
        assert run.watched is not None
        if run.watched.closed:
            return None  # a closed run ignores its agents
        placement, now_ms = run.watched.placement, self._world.now_ms
        ever = self._cluster.had_transactions or self._cluster.transactions_allowed
        executors = [host.executor for host in placement.agents.all.values()]
        if len(executors) != len(set(executors)):
            return f"an executor has two agents: {executors}"
        for agent in self.agents:
            if agent.former and agent.hosted._agent in placement.agents.all:
                return f"{agent.process.name} was another run's, and is used by this one"
            if agent.gone_ms is not None and agent.hosted._agent in placement.agents.all:
                gone_ms = now_ms - max(agent.gone_ms, run.process.thawed_at_ms)
                if gone_ms > run.watched.rules.lease_ms + LOOK_MS:
                    return f"{agent.process.name} is gone for {gone_ms} ms, and is still used"
        for slot in run.watched.slots.all:
            if (
                isinstance(slot.state, MovingState)
                and now_ms > (slot.moved_ms or 0) + CLOSE_MS_MAX + LEAVE_MS_MAX + LOOK_MS
            ):
                return f"slot {slot.number} moves since {slot.moved_ms} ms"
            if slot.state.member is not None and slot.agent != IN_READER and slot.agent not in placement.agents.all:
                return f"slot {slot.number} is placed on agent {slot.agent}, which is gone"
            if slot.agent != IN_READER and slot.unassigned_since_ms is not None:
                waits_ms = now_ms - max(slot.unassigned_since_ms, run.process.thawed_at_ms)
                if waits_ms > UNASSIGNED_LEASES_MAX * run.watched.rules.lease_ms + LOOK_MS:
                    return f"slot {slot.number} waits for {waits_ms} ms on an agent from which it cannot join"
            if slot.agent != IN_READER and not ever:
                return f"slot {slot.number} is placed on an agent although transactions are refused"
            if slot.agent != IN_READER and run.query.habits.member_host == "driver":
                return f"slot {slot.number} is placed on an agent although memberHost is driver"
        return self._two_of_one_place(run)

    def _two_of_one_place(self, run: "SparkRun") -> str | None:
        """Of two members with one instance id the group fences one. It ends, unless it is cut off from the brokers."""
        places: dict[str, list[str]] = {}
        for process in [run.process, *(agent.process for agent in self.of(run))]:
            reached = process.alive and not process.frozen and not process.cut_off()
            for consumer in self._cluster.consumers.get(process.name, ()) if reached else ():
                if consumer.place is not None:
                    places.setdefault(consumer.place, []).append(consumer._name)
        double = {place: names for place, names in places.items() if len(names) > 1}
        now_ms = self._world.now_ms
        self._double_since_ms = {(run, place): self._double_since_ms.get((run, place), now_ms) for place in double} | {
            key: at_ms for key, at_ms in self._double_since_ms.items() if key[0] is not run
        }
        for (of, place), since_ms in self._double_since_ms.items():
            if of is run and now_ms - since_ms > TWO_MS_MAX:
                return f"{place} has two members for {now_ms - since_ms} ms: {double[place]}"
        return None

    def ended(self, run: "SparkRun") -> None:
        """The application has ended: its executors end at once or soon, or stay without noticing."""
        for agent in self.of(run):
            if agent.channel is not None:
                agent.channel.cut()
            how = self._draws.choice(["killed", "ended", "unnoticed"])
            if how == "killed":
                self._world.at(self._draws.between(0, 100), agent.kill)
            elif how == "ended":
                agent.process.later("executor", self._draws.between(*OUTLIVES_MS), agent.bye)
