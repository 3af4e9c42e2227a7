"""The run compared with a small model of the design's rules, over random histories.

The model has the group's committed offsets with their notes, the sink's durable batch, and the assigned partitions.
After each event it derives which revocations must be released, which offsets must be committed, the position of every
partition and the contents of the next plan.

A history is a list of moves that are drawn before it starts, so it can be repeated without one of them: a failure is
reported with the shortest history that still fails. (Hypothesis runs about twenty times fewer moves in the same time.)
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from kit.contradictions import contradiction
from kit.harness import GROUP, HOLD_BUDGET_MS, STREAM, plan_batch, rules_with

from model.group_rules import ALL, KNOWN, START, Model
from spark_group_source.errors import BrokerUnavailable
from spark_group_source.model import EARLIEST, LATEST, TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.identifiers import client_id
from spark_group_source.protocol.offsets import StreamOffset, parse
from spark_group_source.protocol.planner import Planner
from spark_group_source.protocol.rules import StartingPosition
from spark_group_source.protocol.run import Run
from spark_group_source.protocol.slots import FULL_PAUSE_MS
from spark_group_source.protocol.states import RunState

SLOTS = 2
OFFSET_MAX = 60
BATCH_MAX = 9
MOVES_EACH = 60
OTHERS = (None, "another", "deleted")
RULES = rules_with(slots=SLOTS, starting=StartingPosition(everywhere=LATEST))
LONGEST_PAUSE_MS = 5_000


class GroupRun:
    """One stream, its runs and its group."""

    def __init__(self, owned: list[int]) -> None:
        self.model = Model()
        self.now_ms = 0
        self.last: StreamOffset | None = None
        self.logged: StreamOffset | None = None
        self.begin()
        self.send(ev.NextBatchRequested(start=StreamOffset.initial(GROUP), new_stream=STREAM))
        self.send(ev.TopicsListed(topics=KNOWN))
        self.divide(owned)

    def begin(self, slots: int = SLOTS) -> None:
        self.run = Run(replace(RULES, slots=slots, auto_slots=True))
        self.planner = Planner(RULES)
        self.clients: dict[int, int] = {}
        self.commits: list[tuple[ev.CommitOffsets, Counter[TopicPartition]]] = []
        self.lookups: list[tuple[ev.FetchCommittedOffsets | ev.ResolveStarts, Counter[TopicPartition], int]] = []
        self.stay = 0  # how often it had no partition at all
        self.knows = False  # knows every reset before this stay
        self.arrivals: Counter[TopicPartition] = Counter()  # how often it was assigned, or all was void
        self.out: set[int] = set()  # slots whose offsets a commit left out
        self.revoked_at: dict[int, int] = {}
        self.checks: list[ev.CheckReplaced] = []  # requests of the slot that was fenced last
        self.model = Model(group_offsets=self.model.group_offsets)

    def send(self, event: ev.Event) -> None:
        """Pass an event to the run, after the model was changed by it, and compare the commands."""
        released = []
        for command in self.run.handle(event, now_ms=self.now_ms):
            match command:
                case ev.Join():
                    self.clients[command.slot] = command.client
                case ev.CheckReplaced():
                    self.checks.append(command)
                case ev.FetchCommittedOffsets():
                    unasked = set(ALL[:3]) - set(command.partitions)
                    assert self.knows or unasked <= set(command.notes_only), "not every note is read"
                    self.lookups.append((command, self.arrivals.copy(), self.stay))
                case ev.ResolveStarts():
                    assert command.starts == {tp: EARLIEST if tp is ALL[3] else LATEST for tp in command.starts}
                    self.lookups.append((command, self.arrivals.copy(), self.stay))
                case ev.CommitOffsets():
                    self.compare(command)
                    assert not self.commits, "only one commit may be in flight"
                    self.commits.append((command, self.arrivals.copy()))
                case ev.Release():
                    released.append(command.slot)
                case ev.Fail():
                    raise AssertionError(command.error)
                case _:
                    pass
        for slot, leaving in list(self.model.leaving.items()):
            stays = any(self.model.must_hold(tp, self.on_its_way()) for tp in leaving)
            overrun = isinstance(event, ev.Tick) and self.now_ms - self.revoked_at[slot] >= HOLD_BUDGET_MS
            if overrun or not stays:
                assert slot in released, f"slot {slot} must be released"
                released.remove(slot)
                for tp in list(self.model.leaving.pop(slot)):
                    self.model.drop(tp)
        assert not released, f"slots {released} must be held"
        if not self.model.held:
            self.stay, self.knows = self.stay + 1, False

    def compare(self, commit: ev.CommitOffsets) -> None:
        """The commit contains all uncommitted offsets, except for slots that the previous commit left out."""
        model = self.model
        named = {model.held[tp] for tp in commit.offsets}
        assert commit.offsets == {tp: at for tp, at in model.due().items() if model.held[tp] in named}
        assert {model.held[tp] for tp in model.due()} <= named | self.out
        assert commit.slots == {tp: model.held[tp] for tp in commit.offsets}
        assert (commit.seq, commit.reset_number) == (model.seq, model.reset_number)
        assert commit.followed == model.followed & commit.offsets.keys()

    def on_its_way(self) -> set[TopicPartition]:
        return {tp for commit, _ in self.commits for tp in commit.offsets}

    def of(self, slot: int) -> dict[str, Any]:
        return {"slot": slot, "client": self.clients[slot]}

    def mine(self, slot: int, wanted: set[TopicPartition]) -> tuple[TopicPartition, ...]:
        return tuple(sorted(tp for tp in wanted if self.model.held.get(tp) == slot))

    # --- reports of members ----------------------------------------------------------------------------------------

    def assign(self, slot: int, wanted: set[TopicPartition]) -> None:
        if slot in self.model.leaving:
            return
        wanted -= {tp for tp, owner in self.model.held.items() if owner in self.model.leaving}
        for tp in wanted:
            if self.model.held.get(tp, slot) != slot:  # it moved without a reported revocation
                self.model.drop(tp)
            self.arrivals[tp] += tp not in self.model.held
            self.model.held[tp] = slot
        self.out.discard(slot)
        self.send(ev.Assigned(**self.of(slot), partitions=tuple(sorted(wanted))))

    def divide(self, owned: list[int]) -> None:
        """Each slot's first assignment."""
        for slot in range(SLOTS):
            self.assign(slot, {tp for tp, owner in zip(ALL, owned, strict=True) if owner == slot})

    def revoke(self, slot: int, wanted: set[TopicPartition], eager: bool) -> None:
        gone = self.mine(slot, set(ALL) if eager else wanted)
        if not gone:
            return
        if slot not in self.model.leaving:
            self.revoked_at[slot] = self.now_ms
        self.model.leaving.setdefault(slot, set()).update(gone)
        self.send(ev.Revoking(**self.of(slot), partitions=gone, eager=eager))

    def lose(self, wanted: set[TopicPartition], by: str | None, at: list[int], back: bool) -> None:
        """Some partitions are lost; another consumer may commit for them, and they may be assigned again."""
        slot = min(self.model.held.get(tp, SLOTS) for tp in wanted)
        gone = self.mine(slot, wanted)
        if slot in self.model.leaving or not gone:
            return
        before, twice = self.run.statistics().possible_duplicates, self.model.duplicates_of(gone)
        for tp in gone:
            self.model.drop(tp)
        self.send(ev.Lost(**self.of(slot), partitions=gone))
        assert self.run.statistics().possible_duplicates - before == twice
        for tp in gone if by != STREAM else ():
            self.commit_of_others(tp, by, at[ALL.index(tp)])
        if back:
            self.assign(slot, set(gone))

    def fail(self, slot: int, how: str) -> None:
        """The consumer of a slot dies, or an older process of this stream fences it, or may have, or the group is full;
        the slot joins again, later if the group is full.

        Late events of the former consumer follow.
        """
        old = self.of(slot)
        for tp in self.mine(slot, set(ALL)):
            self.model.drop(tp)
        self.model.leaving.pop(slot, None)
        if how in ("fenced", "in doubt"):
            self.checks = []
            self.send(ev.MemberFenced(**self.of(slot), reason="test", confirmed=how == "fenced"))
            self.send(ev.ReplacedUnclear(slot=slot, reason="test"))
            self.tick(LONGEST_PAUSE_MS)
            again = ev.CheckReplaced(slot=slot, confirmed=how == "fenced")
            assert self.checks == [again, again], "the request is repeated until it is answered"
            self.send(ev.NotReplaced(slot=slot))
        else:
            self.send(ev.MemberFailed(**self.of(slot), reason="test", group_full=how == "full"))
        self.tick(FULL_PAUSE_MS if how == "full" else LONGEST_PAUSE_MS)
        self.out.discard(slot)
        self.send(ev.Assigned(**self.of(slot), partitions=()))
        self.send(ev.Lost(**old, partitions=tuple(ALL)))
        self.send(ev.Revoking(**old, partitions=tuple(ALL), eager=True))
        self.send(ev.MemberFailed(**old, reason="late"))
        self.send(ev.MemberFenced(**old, reason="late"))

    # --- calls of Spark ---------------------------------------------------------------------------------------------

    def plan(self, sizes: list[int], done: bool) -> None:
        """Plan the next batch; it may be durable immediately."""
        self.finish(False)
        model = self.model
        ranges = {tp: (at, at + sizes[ALL.index(tp)]) for tp, at in model.plannable().items()}
        ends = {tp: end for tp, (_, end) in ranges.items()}
        offset = plan_batch(self.run, ends, self.planner, first=True, now_ms=self.now_ms)
        assert offset is not None
        assert (offset.seq, offset.reset_number, offset.ranges) == (model.seq + 1, model.reset_number, ranges)
        moved_back = model.moved_back()
        elsewhere = model.uncommitted() | {tp: at for tp, (at, _) in moved_back.items()}
        assert offset.uncommitted == {tp: at for tp, at in elsewhere.items() if tp not in ranges}
        assert offset.durable_to == {tp: end for tp, (_, end) in moved_back.items()}
        away = {
            tp: model.memory[tp][1] for tp in offset.uncommitted.keys() & model.memory.keys() - model.position.keys()
        }
        since = {tp: (seq, model.start[tp]) for tp, seq in away.items() if tp in model.start}
        since |= {tp: (seq + 1, model.pending[tp][0]) for tp, seq in away.items() if tp in model.pending}
        assert offset.last_batches == since
        assert offset.followed == model.followed & ranges.keys()
        bases = {tp: model.base(tp) for tp in model.uncommitted()}
        assert offset.behind == {tp: at - bases[tp] for tp, at in model.uncommitted().items() if at > bases[tp]}
        self.logged = offset
        model.in_flight = {tp: pair for tp, pair in ranges.items() if pair[0] < pair[1]}
        self.run.state = RunState.FETCHING_ENDS  # Spark's call has reached this state
        self.send(ev.Planned(offset=offset))
        if done:
            self.finish(False)

    def finish(self, twice: bool) -> None:
        if self.logged is self.last:
            return
        assert self.logged is not None
        self.last = self.logged
        self.model.seq = self.last.seq
        self.model.batch_durable()
        self.send(ev.Durable(offset=self.last))
        if twice:
            self.send(ev.Durable(offset=self.last))

    def restart(self, reset: list[int] | None, owned: list[int]) -> None:
        """The driver is killed; an operator may reset the group; the next run reads the checkpoint as text, and may
        read its number of members from the group."""
        if self.logged is None:
            return
        durable = self.logged is self.last
        offset = parse(self.logged.to_json())
        self.begin(slots=1 + offset.seq % SLOTS)
        model = self.model
        if reset is not None:
            reset_number = 1 + max(
                [offset.reset_number, *(found.reset_number for found in model.group_offsets.values())]
            )
            model.group_offsets = {
                tp: ev.Committed(offset=reset[ALL.index(tp)], reset_number=reset_number) for tp in model.group_offsets
            }
        model.reset_number, model.seq = offset.reset_number, offset.seq - (not durable)
        positions = dict(offset.uncommitted) | {tp: pair[durable] for tp, pair in offset.ranges.items()}
        as_of = dict.fromkeys(offset.ranges, model.seq)  # the batch did not read the others
        model.memory = {
            tp: (at, as_of.get(tp, offset.last_batches.get(tp, (offset.seq - 1, 0))[0])) for tp, at in positions.items()
        }
        model.start = {tp: start for tp, (_, start) in offset.last_batches.items()}
        starts = dict(offset.uncommitted) | {tp: start for tp, (start, _) in offset.ranges.items()}
        model.unsure = {tp: start - offset.behind.get(tp, 0) for tp, start in starts.items()}
        model.durable_to = {tp: end for tp, end in offset.durable_to.items() if end > positions[tp]}
        if durable:
            model.start |= {tp: start for tp, (start, _) in offset.ranges.items()}
            self.send(ev.NextBatchRequested(start=offset, new_stream=STREAM))
        else:
            model.in_flight = {tp: pair for tp, pair in offset.ranges.items() if pair[0] < pair[1]}
            model.replayed = set(model.in_flight)
            self.send(ev.BatchStarted(offset=offset))
        self.send(ev.TopicsListed(topics=KNOWN))
        places = {client_id(STREAM, slot): frozenset[TopicPartition]() for slot in range(SLOTS)}
        self.send(ev.GroupDescribed(state="stable", assigned=places))
        self.divide(owned)

    # --- responses of Kafka -----------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Kafka answers all requests."""
        while self.lookups or self.commits:
            while self.lookups:
                self.answer(0, 1, set())
            while self.commits:
                self.commit(True, True, None)

    def answer(self, which: int, fails: int, left_out: set[TopicPartition]) -> None:
        """A response, in any order; it may be an error, or cover only some of the partitions."""
        if not self.lookups:
            return
        lookup, arrivals, stay = self.lookups.pop(which % len(self.lookups))
        requested = lookup.partitions if isinstance(lookup, ev.FetchCommittedOffsets) else tuple(lookup.starts)
        covered = [tp for tp in requested if tp not in left_out]
        counts = {tp for tp in covered if self.waits(tp, arrivals)}
        if fails == 0:
            self.send(ev.LookupFailed(partitions=requested, error=BrokerUnavailable("test")))
        elif isinstance(lookup, ev.ResolveStarts):
            for tp in counts:
                found = self.model.group_offsets.pop(tp, None)  # later commits are not in the response
                self.model.resolve(tp)
                self.model.group_offsets |= {} if found is None else {tp: found}
            self.send(ev.StartsResolved(offsets={tp: START[tp] for tp in covered}, requested=requested))
        else:
            read = {tp: self.model.group_offsets.get(tp) for tp in covered}
            twice = self.run.statistics().possible_duplicates - self.model.duplicates
            notes = [
                found.reset_number
                for tp, found in self.model.group_offsets.items()
                if tp in (*covered, *lookup.notes_only)
            ]
            reset_number = max(notes, default=0)
            self.knows |= bool(lookup.notes_only) and stay == self.stay
            if reset_number > self.model.reset_number:
                self.model.reset(reset_number)
                self.arrivals.update(ALL)
            else:
                for tp in counts:
                    if read[tp] is not None or self.model.reached(tp) is not None or tp in self.model.before:
                        self.model.resolve(tp)
            self.send(
                ev.CommittedOffsetsRead(
                    offsets=read, requested=requested, reset_number=reset_number if lookup.notes_only else None
                )
            )
            assert self.run.statistics().possible_duplicates - self.model.duplicates == twice

    def waits(self, tp: TopicPartition, arrivals: Counter[TopicPartition]) -> bool:
        """Return whether a response counts: a partition that was lost and assigned again since the request is read
        again."""
        return tp in self.model.held and tp not in self.model.position and arrivals[tp] == self.arrivals[tp]

    def commit(self, landed: bool, answered: bool, left: int | None) -> None:
        """A commit that arrives or not, with a response that arrives or not; the offsets of a slot may be left out."""
        if not self.commits:
            return
        commit, arrivals = self.commits.pop()
        ordered = set(commit.slots.values())
        # A partition lost since is no longer the member's to commit: the broker refuses its offsets.
        same = {tp for tp in commit.offsets if tp in self.model.held and arrivals[tp] == self.arrivals[tp]}
        done = {tp: at for tp, at in commit.offsets.items() if tp in same and commit.slots[tp] != left}
        if not done and left is not None:
            self.out |= ordered
            self.send(ev.OffsetsCommitted(offsets={}, left_out=dict.fromkeys(ordered, "test")))
            return
        if landed or answered:
            for tp, at in done.items():
                self.model.group_offsets[tp] = ev.Committed(
                    offset=at,
                    stream=STREAM,
                    seq=commit.seq,
                    reset_number=commit.reset_number,
                    followed=tp in commit.followed,
                )
        if not answered:
            self.send(ev.OffsetCommitFailed(reason="test"))
            return
        self.out = self.out - ordered | {slot for slot in ordered if slot == left}
        self.model.committed |= done
        self.model.foreign -= {tp for tp, at in done.items() if self.model.position.get(tp) == at}
        self.send(ev.OffsetsCommitted(offsets=done, left_out=dict.fromkeys(self.out & ordered, "test")))

    def commit_of_others(self, tp: TopicPartition, by: str | None, offset: int) -> None:
        """A commit of another stream, of an ordinary consumer, or of an operator with Kafka's own tool, which writes no
        reset number and may delete an offset. A negative offset counts from the end of what the stream has planned."""
        if offset < 0:
            _, end = (self.logged or StreamOffset.initial(GROUP)).ranges.get(tp, (0, 0))
            offset = max(0, end + offset)
        if tp in self.model.held or tp in self.on_its_way():
            return
        if by == "deleted":
            self.model.group_offsets.pop(tp, None)
        else:
            reset_number = (
                max((found.reset_number for found in self.model.group_offsets.values()), default=0) if by else 0
            )
            self.model.group_offsets[tp] = ev.Committed(offset=offset, stream=by, reset_number=reset_number)

    def tick(self, ms: int) -> None:
        self.now_ms += ms
        for slot, leaving in self.model.leaving.items():
            if self.now_ms - self.revoked_at[slot] >= HOLD_BUDGET_MS:
                for tp in list(leaving):
                    self.model.drop(tp)
        self.send(ev.Tick())

    # --- always -----------------------------------------------------------------------------------------------------

    def agrees(self) -> None:
        assert contradiction(self.run) is None
        positions = self.run.partitions
        assert self.run.partitions.ours.keys() == set(self.model.held)
        assert self.run.plannable() == self.model.plannable()
        assert positions.all_known() == (self.model.held.keys() == self.model.position.keys())
        assert positions.uncommitted() == self.model.uncommitted()
        assert self.run.all_committed == (not self.model.due() and not self.commits)

    def left_alone(self) -> None:
        """All activity ends: all durable batches are committed, no revocation is held."""
        for _ in range(6):
            self.finish(False)
            self.rest()
            self.tick(LONGEST_PAUSE_MS)
        positions = self.run.partitions
        assert positions.all_known() and not positions.any_adopting
        assert self.run.all_committed and not self.model.leaving


# --- histories ------------------------------------------------------------------------------------------------------


def some(r: Random) -> set[TopicPartition]:
    return set(r.sample(ALL, r.randint(1, 3)))


def numbers(r: Random, most: int) -> list[int]:
    """Draw one number for each partition."""
    return [r.randint(0, most) for _ in ALL]


def other_commits(r: Random) -> list[int]:
    """Draw a committed offset for each partition: all anywhere, or all inside the stream's last batches."""
    return numbers(r, OFFSET_MAX) if r.random() < 0.5 else [-r.randint(1, BATCH_MAX // 3) for _ in ALL]


def slot(r: Random) -> int:
    return r.randrange(SLOTS)


MOVES: dict[str, Callable[[Random], tuple[Any, ...]]] = {
    "assign": lambda r: (slot(r), some(r)),
    "revoke": lambda r: (slot(r), some(r), r.random() < 0.2),
    "lose": lambda r: (some(r), r.choice((*OTHERS, STREAM, STREAM)), other_commits(r), r.random() < 0.7),
    "fail": lambda r: (slot(r), r.choice(("dead", "fenced", "in doubt", "full"))),
    "plan": lambda r: (numbers(r, BATCH_MAX), r.random() < 0.5),
    "finish": lambda r: (r.random() < 0.3,),
    "restart": lambda r: (numbers(r, OFFSET_MAX) if r.random() < 0.3 else None, numbers(r, SLOTS)),
    "rest": lambda r: (),
    "answer": lambda r: (r.randrange(4), r.randrange(8), some(r) if r.random() < 0.2 else set()),
    "commit": lambda r: (r.random() < 0.8, r.random() < 0.7, slot(r) if r.random() < 0.3 else None),
    "commit_of_others": lambda r: (r.choice(ALL), r.choice(OTHERS), other_commits(r)[0]),
    "tick": lambda r: (r.choice([1, 100, LONGEST_PAUSE_MS, LONGEST_PAUSE_MS, HOLD_BUDGET_MS]),),
}
"""The moves and how to draw their arguments: they do not depend on earlier moves."""
OFTEN = ("lose", "lose", "plan", "plan", "finish", "answer", "answer", "commit")

Move = tuple[str, tuple[Any, ...]]


def history(seed: int) -> tuple[list[int], list[Move]]:
    r = Random(seed)
    names = r.choices((*MOVES, *OFTEN), k=MOVES_EACH)
    return numbers(r, SLOTS), [(name, MOVES[name](r)) for name in names]


def play(owned: list[int], moves: list[Move]) -> None:
    run = GroupRun(owned)
    for name, arguments in moves:
        getattr(run, name)(*arguments)
        run.agrees()
    run.left_alone()


def shortest(owned: list[int], moves: list[Move]) -> list[Move]:
    """Remove every move without which the history still fails."""
    at = 0
    while at < len(moves):
        fewer = moves[:at] + moves[at + 1 :]
        try:
            play(owned, fewer)
            at += 1
        except Exception:  # noqa: BLE001 - any failure counts
            moves = fewer
    return moves


@pytest.mark.parametrize("hundred", range(8))
def test_run_behaves_as_the_model(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * (hundred + 1)):
        owned, moves = history(seed)
        try:
            play(owned, moves)
            continue
        except Exception:  # noqa: BLE001 - raised below, by the shortest history that fails
            moves = shortest(owned, moves)
        try:
            play(owned, moves)
        except Exception as exc:
            exc.add_note(f"seed {seed}; shortest history: play({owned}, {moves})")
            raise
