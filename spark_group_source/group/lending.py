"""Which slot lives where: lent to the agents evenly, called home from those that are gone, moved between two batches.

Runs in: the stream reader (inside ``machine``), tests. Deliberately absent: who is there (``hosts``), what a slot holds
(``slots``).

A slot moves by an orderly close here and a join there under the same name, within the session timeout: the broker hands
the new member what the place had, without a rebalance. So it moves only when nothing of it is in doubt: no batch is
planned, and Kafka has every position of its partitions. The next plan waits for that, but not for long.
"""

from collections import Counter
from collections.abc import Callable

from spark_group_source.group import events as ev
from spark_group_source.group.hosts import Host, Hosts
from spark_group_source.group.outbox import Outbox
from spark_group_source.group.rules import Rules
from spark_group_source.group.slot import HOME, Slot
from spark_group_source.group.slots import Slots
from spark_group_source.group.states import SlotState
from spark_group_source.model import TopicPartition

STAYS_MS = 30_000
"""A slot that has moved stays where it is for so long, unless its host is gone."""
LOOK_EVERY_MS = 1_000
"""How often it is looked which slots should be elsewhere, while nobody comes or goes."""
BEGIN_MS_MAX = 2_000
"""How long the next plan waits for a move that cannot begin: some offset is still on its way to Kafka."""
PUT_OFF_MS = 5_000
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


class Lending:
    """Where the slots of one run live.

    Args:
        rules: what the options say.
        slots: the slots.
        out: takes orders and log lines; it has the time.
        is_settled: whether Kafka has the position of a partition of ours, and nothing of it is on its way.
    """

    def __init__(self, rules: Rules, slots: Slots, out: Outbox, is_settled: Callable[[TopicPartition], bool]) -> None:
        self._rules, self._slots, self._out, self._is_settled = rules, slots, out, is_settled
        self.hosts = Hosts(rules, out)
        self._due: list[tuple[Slot, str]] = []
        self._due_since_ms: int | None = None
        self._look_at_ms = 0
        self._coming: set[int] = set()  # slots that moved, and that the next plan waits for
        self._out_ms_max = min(LEASES_OUT_MAX * rules.lease_ms, rules.joining_budget_ms // 2)
        self._unfit_since_ms: int | None = None  # since when there are too few slots, or too many
        self._too_many = False
        self._told_dynamic = False
        self.moves = self.recalls = 0

    # --- events -----------------------------------------------------------------------------------------------------

    def take(self, event: ev.HostReport, *, seq: int) -> None:
        """What an agent does; ``seq`` is the last durable batch."""
        match event:
            case ev.HostCame():
                self._lost(self.hosts.came(event), seq=seq)
                self._tell_dynamic()
            case ev.HostHeard():
                self.hosts.heard(event)
            case ev.HostCut():
                self.hosts.cut(event)
            case ev.HostGone():
                self._lost(self.hosts.gone(event), seq=seq)
        if not isinstance(event, ev.HostHeard):
            self._look_at_ms = 0

    def ended(self, event: ev.MemberEnded) -> None:
        """A member has closed: the slot that moves joins from where it belongs."""
        slot = self._slots.get(event.slot)
        if slot is not None and slot.state is SlotState.MOVING and event.client == slot.client:
            self._slots.join(slot)

    def boundary(self, *, seq: int) -> None:
        """Begin the moves that are due and can begin."""
        now_ms = self._out.now_ms
        self._fit(seq=seq)
        self._due = self._misplaced() if now_ms >= self._look_at_ms or self._due else []
        left = []
        for slot, host in self._due:
            if all(map(self._is_settled, slot.held)):
                self._move(slot, host, seq=seq)
            else:
                left.append((slot, host))
        self._due = left
        if not left:
            self._due_since_ms, self._look_at_ms = None, now_ms + LOOK_EVERY_MS
        elif self._due_since_ms is None:
            self._due_since_ms = now_ms
        elif now_ms - self._due_since_ms >= BEGIN_MS_MAX:
            self._due, self._due_since_ms, self._look_at_ms = [], None, now_ms + PUT_OFF_MS

    def tick(self, *, seq: int) -> None:
        if not self.any:
            return
        now_ms = self._out.now_ms
        self._lost(self.hosts.tick(), seq=seq)
        for slot in self._slots.all:
            if slot.state is SlotState.MOVING and slot.moved_ms is not None and now_ms >= slot.moved_ms + CLOSE_MS_MAX:
                slot.vanished = True
                self._slots.join(slot)
            elif slot.host != HOME and slot.out_since_ms is not None and now_ms >= self._out_until_ms(slot):
                self._call_back(slot, seq=seq)

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
        self._coming = {n for n in self._coming if self._is_coming(all_[n])}
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
        return self._rules.member_host != "driver" and self._slots.static

    def _ready(self) -> list[Host]:
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

    def _more_come(self, ready: list[Host]) -> bool:
        """Whether slots at home wait for agents that came soon after these: each is to have its part of them at once,
        because who has moved stays for a while."""
        first_ms = min(host.since_ms for host in ready)
        return self.hosts.coming() and self._out.now_ms < first_ms + TOGETHER_MS_MAX

    # --- changes ----------------------------------------------------------------------------------------------------

    def _fit(self, *, seq: int) -> None:
        """As many slots as agents that stay, where that is not fixed: more at once for all that came together, fewer
        only when agents have stayed away for long. Each change is a rebalance."""
        if not (self._rules.auto_slots and self._may_lend):
            return
        now_ms, slots = self._out.now_ms, self._slots.all
        wanted = max(1, min(len(self._ready()), self._rules.slots_max))
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
                self._slots.remove_last(seq=seq)
            self._coming.intersection_update(range(len(slots)))
            self._due = [(slot, host) for slot, host in self._due if slot.number < len(slots)]

    def _may_leave(self, slot: Slot) -> bool:
        return self._slots.may_move(slot) and all(map(self._is_settled, slot.held))

    def _move(self, slot: Slot, host: str, *, seq: int) -> None:
        where = self.hosts.name(host) or "the stream reader"
        self._out.say(f"slot {slot.number} moves to {where}")
        self.moves += 1
        self._slots.move(slot, host, seq=seq)
        self._coming.add(slot.number)

    def _call_back(self, slot: Slot, *, seq: int) -> None:
        """It could not join from there."""
        self.hosts.put_off(slot.host)
        self._out.say(
            f"slot {slot.number} has no assignment at {self.hosts.name(slot.host)} after "
            f"{self._out_ms_max} ms; it joins from elsewhere",
            warn=True,
        )
        self.recalls += 1
        slot.recalls += 1
        slot.out_since_ms = None
        if slot.state is SlotState.JOINING and not slot.held:
            self._move(slot, self.place(slot), seq=seq)

    def _lost(self, reasons: dict[str, str], *, seq: int) -> None:
        for host, why in reasons.items():
            lent = [slot for slot in self._slots.all if host in (slot.host, slot.left)]
            if lent:
                self._out.say(f"{why}; {len(lent)} slots join from elsewhere", warn=True)
            self.recalls += len(lent)
            for slot in lent:
                slot.recalls += 1
                self._slots.host_lost(slot, host, why, seq=seq)

    def _out_until_ms(self, slot: Slot) -> int:
        return (slot.out_since_ms or 0) + self._out_ms_max

    def _tell_dynamic(self) -> None:
        if not self._told_dynamic and not self._slots.static and self._rules.member_host != "driver":
            self._told_dynamic = True
            self._out.say(
                "this run's members have no places of their own, so that each move would be a rebalance: "
                "they stay in the stream reader"
            )
