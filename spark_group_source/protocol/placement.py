"""The agents of a run, and where the member of each slot lives.

Runs in: the stream reader (inside ``run``), tests. Deliberately absent: channels, and the partitions of a slot
(``slots``).

Slots are placed on the agents evenly, and moved between two batches. An agent has an id of its own, and runs for one
executor. Its lease starts again with each heartbeat. An agent whose channel is closed is not lost: it may reconnect
within its lease, under the same id. An agent that reconnects later, or was accepted by an earlier run, is dismissed:
its slots are placed elsewhere.

A slot moves by closing its member and joining from the new place under the same instance id, within the session
timeout. Then the broker assigns the partitions of the old member to the new one, without a rebalance. So a slot moves
only between batches, and only when the positions of all its partitions are committed. The next plan waits for that,
within a bound.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spark_group_source.protocol import events as ev
from spark_group_source.protocol.outbox import Outbox
from spark_group_source.protocol.rules import SLOTS_MAX, Rules
from spark_group_source.protocol.slots import IN_READER, Slot, Slots
from spark_group_source.protocol.states import AGENTS, AgentState, AnyCause, Cause, SlotState, next_state
from spark_group_source.protocol.statistics import Statistics

MOVE_INTERVAL_MS = 30_000
"""Time between two moves of a slot, unless its agent is lost."""
PLACEMENT_INTERVAL_MS = 1_000
"""Time between two checks for misplaced slots while no agent comes or goes."""
MOVE_START_MS_MAX = 2_000
"""How long the next plan waits for a move that cannot start, because an offset is not committed yet."""
MOVE_RETRY_MS = 5_000
"""When moves that did not start within that time are tried again."""
RETURN_MS_MAX = 5_000
"""How long the next plan waits in all for a moving slot."""
GATHER_MS_MAX = 15_000
"""How long slots wait for agents that connected but are not ready, so that all are placed together."""
UNASSIGNED_LEASES_MAX = 2
"""How many leases a slot may be without an assignment on an agent, before it is recalled. After the loss of a KIP-848
member its instance id is free when its session has ended, which takes one lease."""

READY_AFTER_MS = 5_000
"""How long an agent must be connected before slots are placed on it: executors that start together are one change."""
AVOID_PAUSES_MS = (60_000, 480_000, 3_600_000)
"""How long nothing is placed on an agent from which a slot could not join the group: the first time, the second, and
each time after it, until a slot can."""
AGENTS_MAX = 5_000
"""Agents of a run; further ones are dismissed."""
ENDED_IDS_MAX = 1_000
"""Ids of ended agents that are remembered, to dismiss an agent that reconnects as if it were new."""


@dataclass(slots=True)
class Refusals:
    """How often slots could not join the group from an agent, or from any, since one could."""

    count: int = 0
    avoided_until_ms: int = 0
    """Until when no slot is placed there."""

    def add(self, now_ms: int) -> None:
        """A slot could not join. Slots that were placed there together count once."""
        if now_ms >= self.avoided_until_ms:
            self.avoided_until_ms = now_ms + AVOID_PAUSES_MS[min(self.count, len(AVOID_PAUSES_MS) - 1)]
            self.count += 1


@dataclass(slots=True)
class AgentRecord:
    """One agent."""

    id: str
    executor: str
    """The name of its executor in claims. A newer agent of one executor supersedes the older one."""
    name: str
    """Shown in logs and client ids; empty if the agent has none."""
    since_ms: int
    """Since when it is connected without interruption."""
    heartbeat_ms: int
    """The time of its last heartbeat."""
    state: AgentState = AgentState.NEW
    refusals: Refusals = field(default_factory=Refusals)

    @property
    def label(self) -> str:
        """What log lines call it."""
        return self.name or self.executor


class AgentRegistry:
    """All agents of one run. Methods that can end agents return the reason by the id of each ended agent."""

    def __init__(self, rules: Rules, out: Outbox) -> None:
        self._rules, self._out = rules, out
        self.all: dict[str, AgentRecord] = {}
        self._ended: deque[str] = deque(maxlen=ENDED_IDS_MAX)
        self._refusals = Refusals()
        """Of all agents, while no slot is in the group from any: executors may have no way to join it. One after the
        other would keep a slot from its partitions."""

    # --- events -----------------------------------------------------------------------------------------------------

    def connected(self, event: ev.AgentConnected) -> dict[str, str]:
        """Accept an agent that is new, or reconnects within its lease; dismiss any other. Ends an older agent of its
        executor."""
        now_ms, known = self._out.now_ms, self.all.get(event.agent)
        if known is not None:
            if known.state is AgentState.DISCONNECTED:
                known.since_ms = now_ms
            self._move(known, ev.AgentConnected)
            known.heartbeat_ms = now_ms
            self._out.order(ev.AcceptAgent(agent=event.agent))
            return {}
        if not event.fresh or event.agent in self._ended:
            self._dismiss(event.agent, "it is not an agent of this run, or its lease has expired")
            return {}
        ended = {}
        for twin in [agent for agent in self.all.values() if agent.executor == event.executor]:
            ended[twin.id] = self._end(twin, Cause.AGENT_SUPERSEDED, "its executor started a newer agent")
        if len(self.all) >= AGENTS_MAX:
            self._dismiss(event.agent, f"there are {AGENTS_MAX} agents")
            return ended
        self.all[event.agent] = AgentRecord(event.agent, event.executor, event.name, now_ms, now_ms)
        self._out.order(ev.AcceptAgent(agent=event.agent))
        return ended

    def heartbeat(self, event: ev.AgentHeartbeat) -> None:
        """Start the agent's lease again. An agent that is not of this run is dismissed."""
        agent = self.all.get(event.agent)
        if agent is None:
            self._dismiss(event.agent, "it is not an agent of this run, or its lease has expired")
        else:
            agent.heartbeat_ms = self._out.now_ms

    def disconnected(self, event: ev.AgentDisconnected) -> None:
        """Keep the agent until its lease expires. Meanwhile no slot is placed on it or rejoins from it."""
        agent = self.all.get(event.agent)
        if agent is not None and agent.state is not AgentState.DISCONNECTED:
            self._move(agent, ev.AgentDisconnected)

    def ended(self, event: ev.AgentEnded) -> dict[str, str]:
        """Remove an agent that ended, or that cannot be reached any more. An unknown one is ignored."""
        agent = self.all.get(event.agent)
        return {} if agent is None else {agent.id: self._end(agent, ev.AgentEnded, event.reason)}

    def tick(self) -> dict[str, str]:
        """End agents whose lease has expired. A new agent becomes ready :data:`READY_AFTER_MS` after it connected."""
        now_ms = self._out.now_ms
        ended = {}
        for agent in list(self.all.values()):
            silent_ms = now_ms - agent.heartbeat_ms
            if silent_ms >= self._rules.lease_ms:
                ended[agent.id] = self._end(agent, Cause.LEASE_EXPIRED, f"no heartbeat for {silent_ms} ms")
            elif agent.state is AgentState.NEW and now_ms - agent.since_ms >= READY_AFTER_MS:
                self._move(agent, Cause.AGENT_STABLE)
        return ended

    def refused(self, id_: str, *, has_others: bool) -> None:
        """A slot could not join from an agent: place none on it for a while, nor on any other agent unless slots of
        those are in the group (``has_others``)."""
        if (agent := self.all.get(id_)) is not None:
            agent.refusals.add(self._out.now_ms)
        if not has_others:
            self._refusals.add(self._out.now_ms)

    def joined(self, id_: str) -> None:
        """A slot has joined from an agent."""
        self._refusals = Refusals()
        if (agent := self.all.get(id_)) is not None:
            agent.refusals = Refusals()

    # --- queries ----------------------------------------------------------------------------------------------------

    def ready(self) -> list[AgentRecord]:
        """The agents on which slots may be placed, in the order in which they connected."""
        now_ms = self._out.now_ms
        if now_ms < self._refusals.avoided_until_ms:
            return []
        ready = (agent for agent in self.all.values() if agent.state is AgentState.READY)
        return [agent for agent in ready if now_ms >= agent.refusals.avoided_until_ms]

    def has_new(self) -> bool:
        """Whether an agent is connected but not ready yet."""
        return any(agent.state is AgentState.NEW for agent in self.all.values())

    def can_rejoin(self, id_: str) -> bool:
        """Whether a slot that is placed on an agent may join from there again."""
        agent = self.all.get(id_)
        if agent is None or agent.state is AgentState.DISCONNECTED:
            return False
        return self._out.now_ms >= agent.refusals.avoided_until_ms

    def name(self, id_: str) -> str:
        """The name of an agent, as logs show it; empty for the stream reader."""
        agent = self.all.get(id_)
        return id_ if agent is None else agent.label

    def deadlines_ms(self) -> list[int]:
        """When :meth:`tick` has something to do."""
        leases = [agent.heartbeat_ms + self._rules.lease_ms for agent in self.all.values()]
        new = [agent for agent in self.all.values() if agent.state is AgentState.NEW]
        return leases + [agent.since_ms + READY_AFTER_MS for agent in new]

    # --- changes ----------------------------------------------------------------------------------------------------

    def _end(self, agent: AgentRecord, cause: AnyCause, why: str) -> str:
        self._move(agent, cause)
        del self.all[agent.id]
        self._ended.append(agent.id)
        self._dismiss(agent.id, why)
        return f"agent {agent.label} ended: {why}"

    def _dismiss(self, id_: str, reason: str) -> None:
        self._out.order(ev.DismissAgent(agent=id_, reason=reason))

    def _move(self, agent: AgentRecord, cause: AnyCause) -> None:
        agent.state = next_state(AGENTS, agent.state, cause, f"agent {agent.id}")


class Placement:
    """Decides where the members of one run live."""

    def __init__(self, rules: Rules, slots: Slots, counts: Statistics, out: Outbox) -> None:
        self._rules, self._slots, self._counts, self._out = rules, slots, counts, out
        self.agents = AgentRegistry(rules, out)
        self.transactional = False
        """Whether the brokers allow transactions, as far as is known. If not, all members live in the stream reader,
        where they commit their offsets themselves."""
        self._moves_since_ms: int | None = None  # since when moves are waiting that could not start yet
        self._next_check_ms = 0
        self._moving: set[int] = set()  # slots that moved, and for which the next plan waits
        self._unassigned_ms_max = min(UNASSIGNED_LEASES_MAX * rules.lease_ms, rules.joining_budget_ms // 2)
        self._misfit_since_ms: int | None = None  # since when there are too few slots, or too many
        self._has_too_many = False
        self._has_logged_dynamic = False
        self._logged_max = SLOTS_MAX  # the last limit of the number of members that a log line explained

    # --- events -----------------------------------------------------------------------------------------------------

    def apply(self, event: ev.AgentEvent | ev.TransactionsChecked) -> None:
        """Handle what an agent reports, or whether transactions are allowed."""
        match event:
            case ev.AgentConnected():
                self._recall_from(self.agents.connected(event))
                self._log_dynamic()
            case ev.AgentHeartbeat():
                self.agents.heartbeat(event)
            case ev.AgentDisconnected():
                self.agents.disconnected(event)
            case ev.TransactionsChecked():
                self.transactional = event.allowed
            case ev.AgentEnded():
                self._recall_from(self.agents.ended(event))
        if not isinstance(event, ev.AgentHeartbeat):
            self._next_check_ms = 0

    def member_assigned(self, number: int) -> None:
        """A slot has an assignment: from its agent, slots can join."""
        slot = self._slots.get(number)
        if slot is not None and slot.agent != IN_READER and slot.state.kind is SlotState.ASSIGNED:
            self.agents.joined(slot.agent)

    def member_ended(self, event: ev.MemberEnded) -> None:
        """A member has closed. If its slot moves, the next member joins."""
        slot = self._slots.get(event.slot)
        if slot is not None and slot.state.kind is SlotState.MOVING and event.client == slot.client:
            self._slots.join(slot)

    def start_moves(self) -> None:
        """Between two batches: start the moves that are due and can start."""
        now_ms = self._out.now_ms
        if not self.transactional:
            self._recall_all()
        are_waiting = self._adjust_slot_count()
        self._moving = {slot.number for slot in self._in_move() if self._is_on_the_move(slot)}
        if self._moves_since_ms is None and now_ms < self._next_check_ms:
            return
        for slot, agent in self._misplaced():
            if self._slots.is_fully_committed(slot):
                self._move(slot, agent)
            else:
                are_waiting = True
        if not are_waiting:
            self._moves_since_ms, self._next_check_ms = None, now_ms + PLACEMENT_INTERVAL_MS
        elif self._moves_since_ms is None:
            self._moves_since_ms = now_ms
        elif now_ms - self._moves_since_ms >= MOVE_START_MS_MAX:
            self._moves_since_ms, self._next_check_ms = None, now_ms + MOVE_RETRY_MS

    def tick(self) -> None:
        """Recall slots from agents whose lease has expired, and from those where they stay unassigned."""
        if not self.has_agents:
            return
        now_ms = self._out.now_ms
        self._recall_from(self.agents.tick())
        for slot in self._slots.all:
            if slot.agent != IN_READER and slot.unassigned_since_ms is not None and now_ms >= self._recall_ms(slot):
                self._recall(slot)

    # --- queries ----------------------------------------------------------------------------------------------------

    @property
    def has_agents(self) -> bool:
        """Whether there is an agent, or a slot still moves from one. If not, there is nothing to check or wait for."""
        return bool(self.agents.all or self._moving)

    def agent_for(self, slot: Slot) -> str:
        """The agent for the slot's next member. A member that fails joins again from where it was, or from the stream
        reader: another agent might keep it from its partitions for as long."""
        if slot.agent != IN_READER and self._may_place and self.agents.can_rejoin(slot.agent):
            return slot.agent
        ready = self._ready() if slot.failing_since_ms is None else []
        return _least(ready, self._load()) if ready else IN_READER

    def agent_names(self) -> tuple[str, ...]:
        """The name of each slot's agent; empty for the stream reader."""
        return tuple(self.agents.name(slot.agent) for slot in self._slots.all)

    def waits_until_ms(self) -> int | None:
        """Until when the next plan waits for moving slots and for moves that could not start; None: it does not."""
        until_ms = [(slot.moved_ms or 0) + RETURN_MS_MAX for slot in self._in_move()]
        if self._moves_since_ms is not None:
            until_ms.append(self._moves_since_ms + MOVE_START_MS_MAX)
        return max(until_ms, default=None)

    def deadlines_ms(self) -> list[int]:
        """When :meth:`tick` has something to do."""
        slots = self._slots.all if self.has_agents else ()
        unassigned = [slot for slot in slots if slot.agent != IN_READER and slot.unassigned_since_ms is not None]
        return self.agents.deadlines_ms() + [self._recall_ms(slot) for slot in unassigned]

    # --- where slots belong -----------------------------------------------------------------------------------------

    @property
    def _may_place(self) -> bool:
        return self._rules.member_host != "driver" and self._slots.static and self.transactional

    def _ready(self) -> list[AgentRecord]:
        return self.agents.ready() if self._may_place else []

    def _in_move(self) -> list[Slot]:
        slots = map(self._slots.get, self._moving)
        return [slot for slot in slots if slot is not None]

    def _is_on_the_move(self, slot: Slot) -> bool:
        is_late = self._out.now_ms >= (slot.moved_ms or 0) + RETURN_MS_MAX
        is_back = slot.state.kind is SlotState.ASSIGNED and not slot.missing
        return slot.state.kind is SlotState.MOVING or not (is_late or is_back)

    def _load(self) -> Counter[str]:
        return Counter(slot.agent for slot in self._slots.all)

    def _misplaced(self) -> list[tuple[Slot, str]]:
        """Slots that should move, and where to: those in the stream reader, and those of an agent that has at least two
        more than another."""
        ready = self._ready()
        if not ready:
            return []
        now_ms, load = self._out.now_ms, self._load()
        free = [
            slot
            for slot in self._slots.all
            if self._slots.may_move(slot) and (slot.moved_ms is None or now_ms >= slot.moved_ms + MOVE_INTERVAL_MS)
        ]
        due = []
        for slot in [slot for slot in free if slot.agent == IN_READER and not self._waits_for_more(ready)]:
            due.append((slot, _least(ready, load)))
            load[due[-1][1]] += 1
        by_agent: dict[str, list[Slot]] = {agent.id: [] for agent in ready}
        for slot in free:
            if slot.agent in by_agent:
                by_agent[slot.agent].append(slot)
        while movable := [agent.id for agent in ready if by_agent[agent.id]]:
            most, least = max(movable, key=load.__getitem__), _least(ready, load)
            if load[most] - load[least] < 2:
                break
            due.append((by_agent[most].pop(), least))
            load[most] -= 1
            load[least] += 1
        return due

    def _waits_for_more(self, ready: list[AgentRecord]) -> bool:
        """Whether slots in the stream reader wait for agents that connected soon after these: each agent should get its
        share at once, because a slot that has moved stays for a while."""
        first_ms = min(agent.since_ms for agent in ready)
        return self.agents.has_new() and self._out.now_ms < first_ms + GATHER_MS_MAX

    # --- changes ----------------------------------------------------------------------------------------------------

    def _adjust_slot_count(self) -> bool:
        """With ``auto_slots``: one slot for each ready agent, as far as Kafka can store the group. Slots are added at
        once for all agents that connected together, and removed only when agents are gone for long, because each change
        is a rebalance. Returns whether a slot has to leave, and waits for the commit of its offsets."""
        if not (self._rules.auto_slots and self._may_place):
            return False
        now_ms, slots = self._out.now_ms, self._slots.all
        ready, most = len(self._ready()), self._slots.members_max
        wanted = max(1, min(ready, most))
        if most not in (SLOTS_MAX, self._logged_max) and ready > most:
            self._logged_max = most
            self._out.log(
                f"{ready} agents are ready, but only {most} members join: the topic names of more members might not "
                "fit into the record in which Kafka stores this group. Set kafka.group.protocol to consumer to have "
                "one member for each executor"
            )
        if wanted == len(slots):
            self._misfit_since_ms = None
            return False
        if self._misfit_since_ms is None or (wanted < len(slots)) != self._has_too_many:
            self._misfit_since_ms, self._has_too_many = now_ms, wanted < len(slots)
        misfit_ms = now_ms - self._misfit_since_ms
        if wanted > len(slots) and (misfit_ms >= GATHER_MS_MAX or not self.agents.has_new()):
            self._out.log(f"{wanted} agents are ready; adding {wanted - len(slots)} members")
            while len(slots) < wanted:
                self._slots.add()
        elif wanted < len(slots) and misfit_ms >= self._rules.shrink_ms:
            before = len(slots)
            while len(slots) > wanted and self._may_leave(slots[-1]):
                self._slots.remove_last()
            if left := before - len(slots):
                self._out.log(f"{left} members were too many for the agents and topics; they leave the group")
            return wanted < len(slots) and self._slots.may_move(slots[-1])
        return False

    def _may_leave(self, slot: Slot) -> bool:
        return slot.is_refused or (self._slots.may_move(slot) and self._slots.is_fully_committed(slot))

    def _move(self, slot: Slot, agent: str) -> None:
        self._out.log(f"slot {slot.number} moves to {self.agents.name(agent) or 'the stream reader'}")
        self._counts.moves += 1
        self._slots.move(slot, agent)
        self._moving.add(slot.number)

    def _recall_all(self) -> None:
        """Transactions are refused, so the offsets of members on agents cannot be committed: recall the members."""
        for slot in self._slots.all:
            if slot.agent != IN_READER and slot.state.kind in (SlotState.ASSIGNED, SlotState.REVOKING):
                self._out.log(
                    f"transactions are refused; slot {slot.number} moves to the stream reader, where members commit "
                    "without them",
                    warn=True,
                )
                self._counts.recalls += 1
                slot.recalls += 1
                self._out.order(ev.Leave(slot=slot.number, leave=False))
                self._slots.agent_lost(slot, slot.agent, "transactions are refused")

    def _recall(self, slot: Slot) -> None:
        """The slot could not join from its agent: it joins from the stream reader."""
        in_group = (SlotState.ASSIGNED, SlotState.REVOKING)
        placed = (other for other in self._slots.all if other.agent != IN_READER)
        self.agents.refused(slot.agent, has_others=any(other.state.kind in in_group for other in placed))
        why = f" (the last error: {slot.failure})" if slot.failure else ""
        self._out.log(
            f"slot {slot.number} has no assignment on {self.agents.name(slot.agent)} after "
            f"{self._unassigned_ms_max} ms{why}; it joins from the stream reader, and is placed on agents again later. "
            "If members cannot join from executors, set memberHost=driver",
            warn=True,
        )
        self._counts.recalls += 1
        slot.recalls += 1
        slot.unassigned_since_ms = None
        self._slots.begin_failing(slot)
        if slot.state.kind is SlotState.JOINING and not slot.partitions:
            self._move(slot, IN_READER)
        else:
            slot.moved_ms = self._out.now_ms  # it stays there for a while

    def _recall_from(self, ended: dict[str, str]) -> None:
        """Agents ended: their slots join from elsewhere."""
        for agent, why in ended.items():
            slots = [slot for slot in self._slots.all if slot.uses(agent)]
            if slots:
                self._out.log(f"{why}; {len(slots)} slots join from elsewhere", warn=True)
            self._counts.recalls += len(slots)
            for slot in slots:
                slot.recalls += 1
                self._slots.agent_lost(slot, agent, why)

    def _recall_ms(self, slot: Slot) -> int:
        """When a slot without an assignment is recalled."""
        return (slot.unassigned_since_ms or 0) + self._unassigned_ms_max

    def _log_dynamic(self) -> None:
        if not self._has_logged_dynamic and not self._slots.static and self._rules.member_host != "driver":
            self._has_logged_dynamic = True
            self._out.log(
                "the members of this run have no instance ids, so each move would be a rebalance; they stay in the "
                "stream reader"
            )


def _least(ready: Iterable[AgentRecord], load: Mapping[str, int]) -> str:
    """The agent that has the fewest slots; of several, one from which the fewest could not join."""
    return min(ready, key=lambda agent: (load[agent.id], agent.refusals.count)).id
