"""The slots of a run: which member joins, what it holds, what it is asked to give back, and who took its place.

Runs in: the stream reader (inside ``machine``), tests. Deliberately absent: where a partition stands (``positions``),
when a revocation may go (the machine's joint rule), batches and commits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import assert_never

from spark_group_source.errors import Fenced, RebalanceTimeout, SourceError
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.protocol.outbox import Outbox
from spark_group_source.protocol.partitions import Partitions
from spark_group_source.protocol.rules import SLOTS_MAX, Rules, pause_ms
from spark_group_source.protocol.states import SLOTS, SlotState, moved
from spark_group_source.protocol.statistics import Statistics

HOME = ""
"""The host that is always there: the stream reader itself."""

WITHOUT_PARTITIONS = frozenset({SlotState.CLOSED, SlotState.CHECKING, SlotState.MOVING})


@dataclass(slots=True)
class Slot:
    """One member of ours. ``client`` counts its consumers, so that a late event of a former one is told apart."""

    number: int
    state: SlotState = SlotState.CLOSED
    client: int = 0
    held: set[TopicPartition] = field(default_factory=set)
    revoking: set[TopicPartition] = field(default_factory=set)
    eager: bool = False
    fenced: bool = False
    """In ASKING: whether the broker said that another client has its place; else that is only possible."""
    hold_since_ms: int = 0
    failing_since_ms: int | None = None
    failures: int = 0
    generation: int = -1
    told: tuple[str, ...] = ()
    """The topics that its member was told to subscribe to."""
    host: str = HOME
    """Where its member lives; of a slot that moves, where the next one will."""
    left: str = HOME
    """Of a slot that moves: where its last member still closes."""
    moved_ms: int | None = None
    """When it last began to move."""
    since_ms: int = 0
    """Since when its members live at its host."""
    recalls: int = 0
    """How often it was called back from an agent."""
    buffered_bytes: int = 0
    buffered_rows: int = 0
    """What its agent has read ahead of its partitions, as that said last."""
    rows_from_memory: int = 0
    rows_from_brokers: int = 0
    """Rows of its partitions that tasks read so far, as far as they told."""
    out_since_ms: int | None = None
    """Since when it has no assignment from its present host; None: it has one."""
    vanished: bool = False
    """Its last member was not heard to close: the broker may think that it lives."""
    awaited: set[TopicPartition] = field(default_factory=set)
    """After a move: what it had before, and does not have again."""


class Slots:
    """All slots of one run.

    Args:
        rules: how many there are, and their budgets.
        positions: what their partitions stand at.
        counts: what happened.
        out: takes orders and log lines; it has the time.
        must_wait: whether a partition that Kafka wants back has to stay for now.
        place, place_name: the host where a slot's next member is to live, and what people call it.
    """

    def __init__(
        self,
        rules: Rules,
        positions: Partitions,
        counts: Statistics,
        out: Outbox,
        *,
        must_wait: Callable[[TopicPartition], bool],
        place: Callable[[Slot], str],
        place_name: Callable[[str], str],
    ) -> None:
        self._rules, self._positions, self._counts, self._out = rules, positions, counts, out
        self._must_wait, self._place, self._place_name = must_wait, place, place_name
        self._stream, self.static = "", True
        self._topics: tuple[str, ...] = ()
        self._before: tuple[str, ...] = ()
        self._told_at: dict[int, int] = {}  # generations in which slots that came back were told the topics of now
        self.all = [Slot(number) for number in range(rules.slots)]
        self._former: dict[int, int] = {}  # slots that left: their last client
        self._holding: set[int] = set()  # in state REVOKING: thousands of others need not be looked at
        self._wake_at_ms: dict[int, int] = {}  # when a slot joins again, or asks again whether it was replaced
        self._assigned_count = 0

    # --- events -----------------------------------------------------------------------------------------------------

    def join_all(
        self, stream: str, topics: tuple[str, ...], *, before: tuple[str, ...] = (), static: bool, places: int = 0
    ) -> None:
        """The stream has a name: every slot's member joins.

        Args:
            places: that a former run left; each has a slot at first.
            before: the topics as a former run knew them, if they were others. Who comes back to a place is given what
                that had, until the next rebalance (classic), which a member that changes them causes. So they are told.
        """
        self._stream, self._topics, self.static = stream, topics, static
        self._before = before if before != topics and static and self._rules.classic else ()
        self.all += [Slot(number) for number in range(len(self.all), min(places, SLOTS_MAX))]
        for slot in self.all:
            self.join(slot)

    def take(self, event: ev.MemberReport) -> SourceError | None:
        """What a member reports. Returns what the run must end with, if anything."""
        slot = self.get(event.slot)
        if slot is None or event.client != slot.client or slot.state in WITHOUT_PARTITIONS:
            return None  # a late event of a consumer that was replaced or closed
        match event:
            case ev.Assigned():
                self._assigned(slot, event)
            case ev.Revoking():
                self._revoking(slot, event)
            case ev.Lost():
                self._lost(slot, event.partitions, "Kafka took them away without asking")
                if not slot.held:
                    self._move(slot, ev.Lost)
                    self._is_out(slot)
            case ev.MemberFailed():
                self._lost(slot, tuple(slot.held), event.reason)
                self._move(slot, ev.MemberFailed)
                self._is_out(slot)
                return self._joins_again(slot, event.reason)
            case ev.MemberFenced():
                self._lost(slot, tuple(slot.held), event.reason)
                self._move(slot, ev.MemberFenced)
                if slot.failing_since_ms is None:
                    slot.failing_since_ms = self._out.now_ms
                slot.fenced = event.confirmed
                self._out.say(
                    f"another client {'has' if event.confirmed else 'may have'} the instance id of slot {slot.number} "
                    f"({event.reason}); checking whether a newer driver runs this stream",
                    warn=True,
                )
                self._out.order(ev.CheckReplaced(slot=slot.number, confirmed=slot.fenced))
            case _:
                assert_never(event)
        return None

    def not_replaced(self, event: ev.NotReplaced) -> SourceError | None:
        """No newer driver runs this stream: the slot joins again. If an older process took its place, maybe one that
        was frozen, it takes the place back."""
        slot = self.get(event.slot)
        if slot is None or slot.state is not SlotState.CHECKING:
            return None
        self._move(slot, ev.NotReplaced)
        older = "an older process of this stream had taken its place"
        return self._joins_again(slot, older if slot.fenced else "it may have been out of the group for a while")

    def replaced_unknown(self, event: ev.ReplacedUnclear) -> SourceError | None:
        """Nobody could say who took the place: asked again, for as long as brokers are waited for."""
        slot = self.get(event.slot)
        if slot is None or slot.state is not SlotState.CHECKING:
            return None
        self._move(slot, ev.ReplacedUnclear)
        if event.final:
            return self.replaced(f"the place of slot {slot.number} was taken, and {event.reason}")
        since_ms = self._out.now_ms if slot.failing_since_ms is None else slot.failing_since_ms
        waited_ms = self._out.now_ms - since_ms
        bound_ms = self._rules.broker_timeout_ms and max(self._rules.broker_timeout_ms, self._rules.joining_budget_ms)
        if bound_ms and waited_ms >= bound_ms:
            return RebalanceTimeout(
                f"the place of slot {slot.number} in group {self._rules.group!r} was taken, and for {waited_ms} ms "
                f"nobody could say by whom; the last answer: {event.reason}",
                group=self._rules.group,
                waited_ms=waited_ms,
            )
        self._wake_at_ms[slot.number] = self._out.now_ms + pause_ms(slot.failures)
        slot.failures += 1
        return None

    def replaced(self, reason: str) -> Fenced:
        """A newer driver has the stream."""
        return Fenced(
            f"another driver runs this stream of group {self._rules.group!r} now ({reason}). This run stops; nothing "
            "of it was committed after that",
            group=self._rules.group,
        )

    def topics_seen(self, topics: tuple[str, ...]) -> None:
        if topics == self._topics:
            return  # nothing changed: no disturbance
        self._out.say(f"the subscription now stands for {len(topics)} topics: {', '.join(topics[:10])}")
        self._topics = topics
        for slot in self.all:
            if slot.state not in (SlotState.CLOSED, SlotState.MOVING) and not self._comes_back(slot):
                self._tell(slot)

    def tick(self) -> None:
        now_ms = self._out.now_ms
        for number in [number for number, at_ms in self._wake_at_ms.items() if now_ms >= at_ms]:
            del self._wake_at_ms[number]
            if self.all[number].state is SlotState.CHECKING:
                self._out.order(ev.CheckReplaced(slot=number, confirmed=self.all[number].fenced))
            else:
                self.join(self.all[number])
        for slot in list(self._holds()):
            if now_ms - slot.hold_since_ms >= self._rules.hold_budget_ms:
                self._release(slot, overrun=True)

    def release_what_may_go(self) -> None:
        """Let go of the revocations none of whose partitions has to wait."""
        for slot in list(self._holds()):
            if not any(map(self._must_wait, slot.revoking)):
                self._release(slot, overrun=False)

    def stocked(self, event: ev.PrefetchReported) -> None:
        """An agent tells what it has read ahead."""
        for of in event.buffered:
            slot = self.get(of.slot)
            if slot is not None and slot.host == event.agent:
                slot.buffered_bytes, slot.buffered_rows = of.bytes, of.rows

    def task_read(self, event: ev.TaskReported) -> None:
        """A task tells what it read. Its rows are those of the slot that has the partition now, if one of ours has."""
        ours = self._positions.ours
        for tp, rows in event.rows_from_memory.items():
            if tp in ours:
                self.all[ours[tp].slot].rows_from_memory += rows
        for tp, rows in event.rows_from_brokers.items():
            if tp in ours:
                self.all[ours[tp].slot].rows_from_brokers += rows

    def close(self, *, leave: bool) -> None:
        for slot in self.all:
            if slot.state is not SlotState.CLOSED:
                self._move(slot, ev.Leave)
                self._out.order(ev.Leave(slot=slot.number, leave=leave))

    def may_move(self, slot: Slot) -> bool:
        """Whether it could close here and join elsewhere, as far as the group is concerned."""
        settled = slot.told == self._topics and slot.number not in self._told_at
        return slot.state is SlotState.ASSIGNED and settled and self.static

    def move(self, slot: Slot, host: str) -> None:
        """Its member closes; when that has ended the next one joins from ``host``. Kafka has its positions."""
        slot.awaited = set(slot.held)
        self._drop(slot, tuple(slot.held), ev.SlotMoves)
        self._move(slot, ev.SlotMoves)
        slot.left, slot.moved_ms, slot.out_since_ms = slot.host, self._out.now_ms, None
        self._live_at(slot, host)
        self._out.order(ev.Leave(slot=slot.number, leave=False))

    def add(self) -> None:
        """One more slot, which joins at once."""
        number = len(self.all)
        self.all.append(Slot(number, client=self._former.pop(number, 0)))
        self.join(self.all[-1])

    def remove_last(self) -> None:
        """The last slot leaves the group. It may move, and Kafka has its positions."""
        slot = self.all[-1]
        self._drop(slot, tuple(slot.held), ev.SlotMoves)
        self._move(slot, ev.Leave)
        self._former[slot.number] = slot.client
        self.all.pop()
        self._out.order(ev.Leave(slot=slot.number, leave=True))

    def host_lost(self, slot: Slot, host: str, why: str) -> None:
        """Where its member lived is gone: the next one joins at once. If the first still lives, it is fenced."""
        if slot.state is SlotState.MOVING:
            if slot.left == host:
                slot.vanished = True
                self.join(slot)
        elif slot.state not in WITHOUT_PARTITIONS:
            slot.vanished = True
            self._lost(slot, tuple(slot.held), why)
            self._move(slot, ev.AgentLost)
            self.join(slot)

    # --- what may be asked ------------------------------------------------------------------------------------------

    def get(self, number: int) -> Slot | None:
        return self.all[number] if number < len(self.all) else None

    @property
    def all_assigned(self) -> bool:
        """Every slot has an assignment of its subscription, maybe an empty one, and is not asked for any of it."""
        return self._assigned_count == len(self.all) and not self._told_at

    @property
    def all_out(self) -> bool:
        """Whether no slot has a member that serves the run."""
        return all(slot.state is SlotState.CLOSED for slot in self.all)

    def leaving(self) -> Iterator[TopicPartition]:
        """Partitions that are asked for and were not let go yet."""
        for slot in self._holds():
            yield from slot.revoking

    def deadlines_ms(self) -> list[int]:
        holds = [slot.hold_since_ms + self._rules.hold_budget_ms for slot in self._holds()]
        return holds + list(self._wake_at_ms.values())

    def check(self) -> str | None:
        """What contradicts itself, or None."""
        for slot in self.all:
            if not slot.revoking <= slot.held:
                return f"slot {slot.number} gives back what it does not have"
            if (slot.state is SlotState.REVOKING) != (slot.number in self._holding):
                return f"slot {slot.number} holds without state"
            if slot.revoking and slot.state is not SlotState.REVOKING:
                return f"slot {slot.number} holds without state"
            if slot.state in WITHOUT_PARTITIONS and slot.held:
                return f"slot {slot.number} is {slot.state.value} and has partitions"
        if sum(len(slot.held) for slot in self.all) != len(self._positions.ours):
            return "a partition has two slots of ours or none"
        for tp, partition in self._positions.ours.items():
            if tp not in self.all[partition.slot].held:
                return f"{tp} does not know its slot"
        assigned = sum(slot.state is SlotState.ASSIGNED for slot in self.all)
        return None if assigned == self._assigned_count else "the assigned slots are miscounted"

    # --- changes ----------------------------------------------------------------------------------------------------

    def _comes_back(self, slot: Slot) -> bool:
        """Whether its members have had no assignment as yet, and are to be told the former topics until then."""
        return slot.generation < 0 and bool(self._before)

    def _tell(self, slot: Slot) -> None:
        slot.told = self._topics
        self._out.order(ev.Subscribe(slot=slot.number, topics=self._topics))

    def join(self, slot: Slot) -> None:
        """Its next member joins, from where it belongs now."""
        moves, host = slot.state is SlotState.MOVING, self._place(slot)
        if moves or host != slot.host:
            self._live_at(slot, host)
            slot.since_ms = self._out.now_ms
            slot.out_since_ms = self._out.now_ms if host != HOME else None
        if not moves:  # the broker takes no notice of another subscription of who comes back
            slot.told = self._before if self._comes_back(slot) else self._topics
        slot.left = HOME
        slot.client += 1
        self._told_at.pop(slot.number, None)
        self._move(slot, ev.Join)
        self._out.order(
            ev.Join(
                slot=slot.number,
                client=slot.client,
                topics=slot.told,
                client_id=identifiers.client_id(self._stream, slot.number, self._place_name(host)),
                instance_id=identifiers.instance_id(self._rules.group, self._stream, slot.number)
                if self.static
                else None,
                agent=host,
                takes_over=slot.vanished and self.static and not self._rules.classic,
            )
        )

    def _live_at(self, slot: Slot, host: str) -> None:
        """Its members live there from now on; what the agent of before has read ahead is of no use there."""
        if host != slot.host:
            slot.host, slot.buffered_bytes, slot.buffered_rows = host, 0, 0

    def _assigned(self, slot: Slot, event: ev.Assigned) -> None:
        if slot.revoking:  # an assignment after a hold: the hold is over, whether we let go or not
            late = tuple(tp for tp in slot.revoking if self._must_wait(tp))
            self._lost(slot, late, "Kafka went on while they were held")
            self._drop(slot, tuple(slot.revoking), ev.Release)
        self._move(slot, ev.Assigned)
        slot.vanished = False
        slot.failing_since_ms, slot.failures, slot.generation = None, 0, event.generation
        slot.out_since_ms = None
        slot.awaited.difference_update(event.partitions)
        new = [tp for tp in event.partitions if tp not in slot.held and not self._is_past(tp, event.generation)]
        for tp in new:
            before = self._positions.ours.get(tp)
            if before is not None:  # its former slot was not told yet: Kafka's newest word counts
                self._lost(self.all[before.slot], (tp,), f"slot {slot.number} has it now")
            self._positions.assign(tp, slot.number)
            slot.held.add(tp)
        if new:
            self._counts.count_rebalance(f"slot {slot.number} was given {len(new)} partitions", now_ms=self._out.now_ms)
        if slot.told != self._topics:
            self._tell(slot)
            self._told_at[slot.number] = event.generation
        elif event.generation > self._told_at.get(slot.number, -1):
            self._told_at.pop(slot.number, None)

    def _is_past(self, tp: TopicPartition, generation: int) -> bool:
        """Whether another slot of ours was given the partition later: a member whose thread was busy for long, as with
        a commit that nobody answered, hears of its assignments after they were taken back."""
        partition = self._positions.ours.get(tp)
        return partition is not None and self.all[partition.slot].generation > generation

    def _revoking(self, slot: Slot, event: ev.Revoking) -> None:
        leaving = {tp for tp in event.partitions if tp in slot.held}
        slot.eager = event.eager
        if slot.state is not SlotState.REVOKING:
            slot.hold_since_ms = self._out.now_ms
        self._move(slot, ev.Revoking)
        slot.out_since_ms = None
        slot.revoking |= leaving
        if leaving:
            self._counts.count_rebalance(f"slot {slot.number} was asked for {len(leaving)}", now_ms=self._out.now_ms)

    def _release(self, slot: Slot, *, overrun: bool) -> None:
        held_ms = self._out.now_ms - slot.hold_since_ms
        if overrun:
            late = [tp for tp in slot.revoking if self._must_wait(tp)]
            self._out.say(
                f"slot {slot.number} held a revocation for {held_ms} ms, its whole budget: {len(late)} partitions go "
                "without a commit, and their next reader may see the batch in flight again",
                warn=True,
            )
            self._lost(slot, tuple(late), "the budget of their hold was used up")
        self._drop(slot, tuple(slot.revoking), ev.Release)
        self._counts.count_release(held_ms, overrun=overrun)
        release = ev.ReleaseAll if slot.eager else ev.Release
        self._move(slot, release)
        self._out.order(release(slot=slot.number, client=slot.client))

    def _lost(self, slot: Slot, partitions: tuple[TopicPartition, ...], why: str) -> None:
        """Somebody else may read these already: never commit them, and count what Kafka does not know."""
        gone = [tp for tp in partitions if tp in slot.held]
        twice = sum(map(self._positions.unconfirmed, gone))
        self._drop(slot, tuple(gone), ev.Lost)
        if gone:
            reason = f"slot {slot.number} lost {len(gone)} partitions: {why}"
            self._counts.partitions_lost += len(gone)
            self._counts.possible_duplicates += twice
            self._counts.count_rebalance(reason, now_ms=self._out.now_ms)
            self._out.say(f"{reason}; {twice} offsets may be read twice", warn=True)

    def _drop(self, slot: Slot, partitions: tuple[TopicPartition, ...], cause: type) -> None:
        for tp in partitions:
            self._positions.drop(tp, cause)
            slot.held.discard(tp)
            slot.revoking.discard(tp)

    def _joins_again(self, slot: Slot, reason: str) -> SourceError | None:
        if slot.failing_since_ms is None:
            slot.failing_since_ms = self._out.now_ms
        waited_ms = self._out.now_ms - slot.failing_since_ms
        if waited_ms >= self._rules.joining_budget_ms:
            return RebalanceTimeout(
                f"slot {slot.number} could not join group {self._rules.group!r} for {waited_ms} ms, "
                f"{slot.failures + 1} tries; the last answer: {reason}",
                group=self._rules.group,
                waited_ms=waited_ms,
            )
        self._wake_at_ms[slot.number] = self._out.now_ms + pause_ms(slot.failures)
        slot.failures += 1
        self._out.say(f"slot {slot.number}'s member failed ({reason}); it joins again", warn=slot.failures > 1)
        return None

    def _is_out(self, slot: Slot) -> None:
        if slot.host != HOME and slot.out_since_ms is None:
            slot.out_since_ms = self._out.now_ms

    def _holds(self) -> Iterator[Slot]:
        return (self.all[number] for number in sorted(self._holding))

    def _move(self, slot: Slot, cause: type) -> None:
        before = slot.state
        slot.state = to = moved(SLOTS, before, cause, f"slot {slot.number}")
        self._assigned_count += (to is SlotState.ASSIGNED) - (before is SlotState.ASSIGNED)
        if to is SlotState.REVOKING:
            self._holding.add(slot.number)
        else:
            self._holding.discard(slot.number)
