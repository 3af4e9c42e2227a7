"""Which agents there are and which slot lives where: lent to the agents evenly, called home from those that are gone,
moved between two batches.

Runs in: the stream reader (inside ``machine``), tests. Deliberately absent: channels, and what a slot holds
(``slots``).

An agent is known by an id of its own, and runs for one executor. Its lease begins anew whenever it is heard. A channel
that is cut is no lost host: the agent may come back within its lease, under the same id. One that comes back later, or
was admitted by a former run, is dismissed: its slots are elsewhere.

A slot moves by an orderly close here and a join there under the same name, within the session timeout: the broker hands
the new member what the place had, without a rebalance. So it moves only when nothing of it is in doubt: no batch is
planned, and Kafka has every position of its partitions. The next plan waits for that, but not for long.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.outbox import Outbox
from spark_group_source.protocol.rules import SLOTS_MAX, Rules
from spark_group_source.protocol.slots import HOME, Slot, Slots
from spark_group_source.protocol.states import AGENTS, AgentState, SlotState, moved
from spark_group_source.protocol.statistics import Statistics

STAYS_MS = 30_000
"""A slot that has moved stays where it is for so long, unless its host is gone."""
LOOK_EVERY_MS = 1_000
"""How often it is looked which slots should be elsewhere, while nobody comes or goes."""
BEGIN_MS_MAX = 2_000
"""How long the next plan waits for a move that cannot begin: some offset is still on its way to Kafka."""
MOVE_PUT_OFF_MS = 5_000
"""For how long moves that could not begin in that time are put off."""
CLOSE_MS_MAX = 3_000
"""How long a slot that moves waits for its last member to close; then the next one joins anyway."""
BACK_MS_MAX = 5_000
"""How long the next plan waits in all for a slot that moves; then it goes without."""
TOGETHER_MS_MAX = 15_000
"""How long agents that stay wait for others that came, so that their slots join together."""
LEASES_OUT_MAX = 2
"""For how many leases a slot may be without an assignment at an agent, before it is called home from there. After the
loss of a KIP-848 member its place is free when its session has ended, which is one."""

STAY_MS = 5_000
"""How long an agent must have stayed before slots are lent to it: executors that come together are one change."""
HOST_PUT_OFF_MS = 60_000
"""How long an agent is lent nothing from which a slot could not join the group."""
HOSTS_MAX = 5_000
"""Agents at a time; more are dismissed."""
GONE_MAX = 1_000
"""Ids of agents that are gone, which are dismissed when they come back as if they were new."""


@dataclass(slots=True)
class AgentRecord:
    """One agent. ``since_ms``: since when it stays; ``put_off_until_ms``: it is lent nothing before."""

    id: str
    executor: str
    name: str
    since_ms: int
    heard_ms: int
    state: AgentState = AgentState.NEW
    put_off_until_ms: int = 0


class AgentRegistry:
    """All agents of one run.

    Args:
        rules: the lease.
        out: takes orders and log lines; it has the time.
    """

    def __init__(self, rules: Rules, out: Outbox) -> None:
        self._rules, self._out = rules, out
        self.all: dict[str, AgentRecord] = {}
        self._gone: deque[str] = deque(maxlen=GONE_MAX)

    # --- events: each returns who is lost by it, and why -------------------------------------------------------------

    def came(self, event: ev.AgentConnected) -> dict[str, str]:
        now_ms, known = self._out.now_ms, self.all.get(event.agent)
        if known is not None:
            if known.state is AgentState.DISCONNECTED:
                known.since_ms = now_ms
            self._move(known, ev.AgentConnected)
            known.heard_ms = now_ms
            self._out.order(ev.AcceptAgent(agent=event.agent))
            return {}
        if not event.fresh or event.agent in self._gone:
            self._dismiss(event.agent, "it is none of this run's, or its lease is over")
            return {}
        lost = {}
        for twin in [host for host in self.all.values() if host.executor == event.executor]:
            lost[twin.id] = self._lose(twin, ev.AgentSuperseded, "a newer agent of its executor came")
        if len(self.all) >= HOSTS_MAX:
            self._dismiss(event.agent, f"there are {HOSTS_MAX} agents")
            return lost
        self.all[event.agent] = AgentRecord(event.agent, event.executor, event.name, now_ms, now_ms)
        self._out.order(ev.AcceptAgent(agent=event.agent))
        return lost

    def heard(self, event: ev.AgentHeartbeat) -> None:
        host = self.all.get(event.agent)
        if host is None:
            self._dismiss(event.agent, "it is none of this run's, or its lease is over")
        else:
            host.heard_ms = self._out.now_ms

    def cut(self, event: ev.AgentDisconnected) -> None:
        host = self.all.get(event.agent)
        if host is not None and host.state is not AgentState.DISCONNECTED:
            self._move(host, ev.AgentDisconnected)

    def gone(self, event: ev.AgentEnded) -> dict[str, str]:
        host = self.all.get(event.agent)
        return {} if host is None else {host.id: self._lose(host, ev.AgentEnded, event.reason)}

    def tick(self) -> dict[str, str]:
        now_ms = self._out.now_ms
        lost = {}
        for host in list(self.all.values()):
            silent_ms = now_ms - host.heard_ms
            if silent_ms >= self._rules.lease_ms:
                lost[host.id] = self._lose(host, ev.LeaseExpired, f"it was not heard for {silent_ms} ms")
            elif host.state is AgentState.NEW and now_ms - host.since_ms >= STAY_MS:
                self._move(host, ev.AgentStable)
        return lost

    def put_off(self, id_: str) -> None:
        """A slot could not join from there."""
        if (host := self.all.get(id_)) is not None:
            host.put_off_until_ms = self._out.now_ms + HOST_PUT_OFF_MS

    # --- what may be asked ------------------------------------------------------------------------------------------

    def ready(self) -> list[AgentRecord]:
        """Those that slots may be lent to, in the order in which they came."""
        now_ms = self._out.now_ms
        return [h for h in self.all.values() if h.state is AgentState.READY and now_ms >= h.put_off_until_ms]

    def coming(self) -> bool:
        """Whether some have come that must stay for a while."""
        return any(host.state is AgentState.NEW for host in self.all.values())

    def reaches(self, id_: str) -> bool:
        """Whether a slot that is lent to it may join from there again."""
        host = self.all.get(id_)
        return (
            host is not None and host.state is not AgentState.DISCONNECTED and self._out.now_ms >= host.put_off_until_ms
        )

    def name(self, id_: str) -> str:
        """As people know it; empty for the stream reader itself."""
        host = self.all.get(id_)
        return id_ if host is None else host.name or host.executor

    def deadlines_ms(self) -> list[int]:
        leases = [host.heard_ms + self._rules.lease_ms for host in self.all.values()]
        return leases + [host.since_ms + STAY_MS for host in self.all.values() if host.state is AgentState.NEW]

    # --- changes ----------------------------------------------------------------------------------------------------

    def _lose(self, host: AgentRecord, cause: type, why: str) -> str:
        self._move(host, cause)
        del self.all[host.id]
        self._gone.append(host.id)
        self._dismiss(host.id, why)
        return f"agent {host.name or host.executor} is gone: {why}"

    def _dismiss(self, id_: str, reason: str) -> None:
        self._out.order(ev.DismissAgent(agent=id_, reason=reason))

    def _move(self, host: AgentRecord, cause: type) -> None:
        host.state = moved(AGENTS, host.state, cause, f"host {host.id}")


class Placement:
    """Where the slots of one run live.

    Args:
        rules: what the options say.
        slots: the slots.
        counts: what it counts.
        out: takes orders and log lines; it has the time.
        is_settled: whether Kafka has the position of a partition of ours, and nothing of it is on its way.
    """

    def __init__(
        self,
        rules: Rules,
        slots: Slots,
        counts: Statistics,
        out: Outbox,
        is_settled: Callable[[TopicPartition], bool],
    ) -> None:
        self._rules, self._slots, self._counts, self._out, self._is_settled = rules, slots, counts, out, is_settled
        self.hosts = AgentRegistry(rules, out)
        self.transactional = False
        """Whether the brokers take transactions, as far as is known. Else slots stay at home, where members commit."""
        self._due: list[tuple[Slot, str]] = []
        self._due_since_ms: int | None = None
        self._look_at_ms = 0
        self._coming: set[int] = set()  # slots that moved, and that the next plan waits for
        self._out_ms_max = min(LEASES_OUT_MAX * rules.lease_ms, rules.joining_budget_ms // 2)
        self._unfit_since_ms: int | None = None  # since when there are too few slots, or too many
        self._too_many = False
        self._told_dynamic = False

    # --- events -----------------------------------------------------------------------------------------------------

    def take(self, event: ev.AgentEvent | ev.TransactionsChecked) -> None:
        """What an agent does, or the brokers say of transactions."""
        match event:
            case ev.AgentConnected():
                self._lost(self.hosts.came(event))
                self._tell_dynamic()
            case ev.AgentHeartbeat():
                self.hosts.heard(event)
            case ev.AgentDisconnected():
                self.hosts.cut(event)
            case ev.TransactionsChecked():
                self.transactional = event.allowed
            case ev.AgentEnded():
                self._lost(self.hosts.gone(event))
        if not isinstance(event, ev.AgentHeartbeat):
            self._look_at_ms = 0

    def ended(self, event: ev.MemberEnded) -> None:
        """A member has closed: the slot that moves joins from where it belongs."""
        slot = self._slots.get(event.slot)
        if slot is not None and slot.state is SlotState.MOVING and event.client == slot.client:
            self._slots.join(slot)

    def boundary(self) -> None:
        """Begin the moves that are due and can begin."""
        now_ms = self._out.now_ms
        if not self.transactional:
            self._call_home()
        self._fit()
        self._coming = {n for n in self._coming if self._is_coming(self._slots.all[n])}
        if not self._due and now_ms < self._look_at_ms:
            return
        self._due = self._misplaced()
        left = []
        for slot, host in self._due:
            if all(map(self._is_settled, slot.held)):
                self._move(slot, host)
            else:
                left.append((slot, host))
        self._due = left
        if not left:
            self._due_since_ms, self._look_at_ms = None, now_ms + LOOK_EVERY_MS
        elif self._due_since_ms is None:
            self._due_since_ms = now_ms
        elif now_ms - self._due_since_ms >= BEGIN_MS_MAX:
            self._due, self._due_since_ms, self._look_at_ms = [], None, now_ms + MOVE_PUT_OFF_MS

    def tick(self) -> None:
        if not self.any:
            return
        now_ms = self._out.now_ms
        self._lost(self.hosts.tick())
        for slot in self._slots.all:
            if slot.state is SlotState.MOVING and slot.moved_ms is not None and now_ms >= slot.moved_ms + CLOSE_MS_MAX:
                slot.vanished = True
                self._slots.join(slot)
            elif slot.host != HOME and slot.out_since_ms is not None and now_ms >= self._out_until_ms(slot):
                self._call_back(slot)

    # --- what may be asked ------------------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether there is, or was, an agent: else there is nothing to wait for or to look at."""
        return bool(self.hosts.all or self._coming)

    def place(self, slot: Slot) -> str:
        """Where the slot's next member is to live."""
        if slot.host != HOME and self._may_lend and self.hosts.reaches(slot.host):
            return slot.host
        ready = self._ready()
        load = self._load()
        return min(ready, key=lambda host: load[host.id]).id if ready else HOME

    def places(self) -> tuple[str, ...]:
        """Where each slot's member lives, by name."""
        return tuple(self.hosts.name(slot.host) for slot in self._slots.all)

    def waits_until_ms(self) -> int | None:
        """Until when the next plan waits for slots that should move, or are on their way; None: it need not."""
        all_ = self._slots.all
        until_ms = [(all_[n].moved_ms or 0) + BACK_MS_MAX for n in self._coming]
        if self._due_since_ms is not None:
            until_ms.append(self._due_since_ms + BEGIN_MS_MAX)
        return max(until_ms, default=None)

    def deadlines_ms(self) -> list[int]:
        slots = self._slots.all if self.any else ()
        closing = [(slot.moved_ms or 0) + CLOSE_MS_MAX for slot in slots if slot.state is SlotState.MOVING]
        out = [self._out_until_ms(slot) for slot in slots if slot.host != HOME and slot.out_since_ms is not None]
        return self.hosts.deadlines_ms() + closing + out

    # --- where slots belong -----------------------------------------------------------------------------------------

    @property
    def _may_lend(self) -> bool:
        return self._rules.member_host != "driver" and self._slots.static and self.transactional

    def _ready(self) -> list[AgentRecord]:
        return self.hosts.ready() if self._may_lend else []

    def _is_coming(self, slot: Slot) -> bool:
        late = self._out.now_ms >= (slot.moved_ms or 0) + BACK_MS_MAX
        back = slot.state is SlotState.ASSIGNED and not slot.awaited
        return slot.state is SlotState.MOVING or not (late or back)

    def _load(self) -> Counter[str]:
        return Counter(slot.host for slot in self._slots.all)

    def _misplaced(self) -> list[tuple[Slot, str]]:
        """Slots that should be elsewhere, and where: those at home, and those of an agent that has two more than
        another."""
        ready = self._ready()
        if not ready:
            return []
        now_ms, load = self._out.now_ms, self._load()
        free = [
            slot
            for slot in self._slots.all
            if self._slots.may_move(slot) and (slot.moved_ms is None or now_ms >= slot.moved_ms + STAYS_MS)
        ]
        due = []
        for slot in [slot for slot in free if slot.host == HOME and not self._more_come(ready)]:
            due.append((slot, min(ready, key=lambda host: load[host.id]).id))
            load[due[-1][1]] += 1
        by_host: dict[str, list[Slot]] = {host.id: [] for host in ready}
        for slot in free:
            if slot.host in by_host:
                by_host[slot.host].append(slot)
        while movable := [host.id for host in ready if by_host[host.id]]:
            most, least = max(movable, key=load.__getitem__), min(ready, key=lambda host: load[host.id]).id
            if load[most] - load[least] < 2:
                break
            due.append((by_host[most].pop(), least))
            load[most] -= 1
            load[least] += 1
        return due

    def _more_come(self, ready: list[AgentRecord]) -> bool:
        """Whether slots at home wait for agents that came soon after these: each is to have its part of them at once,
        because who has moved stays for a while."""
        first_ms = min(host.since_ms for host in ready)
        return self.hosts.coming() and self._out.now_ms < first_ms + TOGETHER_MS_MAX

    # --- changes ----------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        """As many slots as agents that stay, where that is not fixed: more at once for all that came together, fewer
        only when agents have stayed away for long. Each change is a rebalance."""
        if not (self._rules.auto_slots and self._may_lend):
            return
        now_ms, slots = self._out.now_ms, self._slots.all
        wanted = max(1, min(len(self._ready()), SLOTS_MAX))
        if wanted == len(slots):
            self._unfit_since_ms = None
            return
        if self._unfit_since_ms is None or (wanted < len(slots)) != self._too_many:
            self._unfit_since_ms, self._too_many = now_ms, wanted < len(slots)
        unfit_ms = now_ms - self._unfit_since_ms
        if wanted > len(slots) and (unfit_ms >= TOGETHER_MS_MAX or not self.hosts.coming()):
            self._out.say(f"{wanted} agents stay: {wanted - len(slots)} members more")
            while len(slots) < wanted:
                self._slots.add()
        elif wanted < len(slots) and unfit_ms >= self._rules.shrink_ms:
            self._out.say(f"{len(slots) - wanted} agents stayed away: their members leave")
            while len(slots) > wanted and self._may_leave(slots[-1]):
                self._slots.remove_last()
            self._coming.intersection_update(range(len(slots)))
            self._due = [(slot, host) for slot, host in self._due if slot.number < len(slots)]

    def _may_leave(self, slot: Slot) -> bool:
        return self._slots.may_move(slot) and all(map(self._is_settled, slot.held))

    def _move(self, slot: Slot, host: str) -> None:
        where = self.hosts.name(host) or "the stream reader"
        self._out.say(f"slot {slot.number} moves to {where}")
        self._counts.moves += 1
        self._slots.move(slot, host)
        self._coming.add(slot.number)

    def _call_home(self) -> None:
        """Transactions are refused, and nobody commits for members at agents: what they have is not on its way."""
        for slot in self._slots.all:
            if slot.host != HOME and slot.state in (SlotState.ASSIGNED, SlotState.REVOKING):
                self._out.say(f"slot {slot.number} comes home: transactions are refused, and members commit", warn=True)
                self._counts.recalls += 1
                slot.recalls += 1
                self._out.order(ev.Leave(slot=slot.number, leave=False))
                self._slots.host_lost(slot, slot.host, "transactions are refused")

    def _call_back(self, slot: Slot) -> None:
        """It could not join from there."""
        self.hosts.put_off(slot.host)
        self._out.say(
            f"slot {slot.number} has no assignment at {self.hosts.name(slot.host)} after "
            f"{self._out_ms_max} ms; it joins from elsewhere",
            warn=True,
        )
        self._counts.recalls += 1
        slot.recalls += 1
        slot.out_since_ms = None
        if slot.state is SlotState.JOINING and not slot.held:
            self._move(slot, self.place(slot))

    def _lost(self, reasons: dict[str, str]) -> None:
        for host, why in reasons.items():
            lent = [slot for slot in self._slots.all if host in (slot.host, slot.left)]
            if lent:
                self._out.say(f"{why}; {len(lent)} slots join from elsewhere", warn=True)
            self._counts.recalls += len(lent)
            for slot in lent:
                slot.recalls += 1
                self._slots.host_lost(slot, host, why)

    def _out_until_ms(self, slot: Slot) -> int:
        return (slot.out_since_ms or 0) + self._out_ms_max

    def _tell_dynamic(self) -> None:
        if not self._told_dynamic and not self._slots.static and self._rules.member_host != "driver":
            self._told_dynamic = True
            self._out.say(
                "this run's members have no places of their own, so that each move would be a rebalance: "
                "they stay in the stream reader"
            )
