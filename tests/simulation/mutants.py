"""One-line changes that break the product's code: the simulation must find each of them.

``python -m tests.simulation.mutants NAME [PROTOCOL SEED ...]`` runs histories with one line changed, and exits with 1
at the first that fails. The function that has the line runs with the code of its changed text; no file changes.

``python -m tests.simulation.mutants find`` prints the current ``FOUND_BY``: a change of the code or of the simulation
changes the histories. If the known history does not find a mutant, ``find`` searches all histories of the quick run,
and then more.
"""

import ast
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' modules are found as by pytest

from kit.calm import play_calm
from kit.simulation import PROTOCOLS, Failed, run

PACKAGE = Path(__file__).resolve().parent.parent.parent / "spark_group_source"
SEEDS = 60
"""Histories of each protocol in the quick run: a few seconds per protocol."""
AGENT_SEEDS = 40
"""The same number, with agents."""
FIND_SEEDS = 1_000
"""Histories of each protocol that ``find`` runs after those of the quick run, for a mutant that they do not find."""
CALM, CALM_SEEDS = "calm-", 4
"""Prefix of a protocol: histories with nothing but the placement of members (``kit.calm``)."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rule, and the line that breaks it."""

    name: str
    file: str
    old: str
    new: str
    rule: str
    agents: bool = False
    """Whether histories with agents must find it."""

    @property
    def module(self) -> str:
        return "spark_group_source." + self.file.removesuffix(".py").replace("/", ".")

    def source(self) -> str:
        """Return the source of the module with the changed line.

        Raises:
            ValueError: the line is not in the module exactly once.
        """
        text = (PACKAGE / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} contains {self.old!r} {text.count(self.old)} times")
        return text.replace(self.old, self.new)

    def function(self) -> tuple[FunctionType, CodeType]:
        """Return the function that has the line, and its code with the changed one."""
        text = self.source()
        line = text.count("\n", 0, (PACKAGE / self.file).read_text().index(self.old)) + 1
        found: Any = importlib.import_module(self.module)
        code: CodeType = compile(text, str(PACKAGE / self.file), "exec", dont_inherit=True)
        scope: ast.AST = ast.parse(text)
        while not isinstance(scope, ast.FunctionDef):
            scope = next(
                inner
                for inner in ast.iter_child_nodes(scope)
                if isinstance(inner, ast.ClassDef | ast.FunctionDef) and inner.lineno <= line <= (inner.end_lineno or 0)
            )
            code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == scope.name)
            found = vars(found)[scope.name]
        function: FunctionType = getattr(found, "fget", found)  # of a property
        return function, code


@contextmanager
def broken(mutant: Mutant) -> Iterator[None]:
    """Break a rule until the block ends."""
    function, changed = mutant.function()
    real, function.__code__ = function.__code__, changed
    try:
        yield
    finally:
        function.__code__ = real


P, M, S, E, L = (
    "protocol/partitions.py",
    "protocol/run.py",
    "protocol/slots.py",
    "protocol/request_schedule.py",
    "protocol/data_loss.py",
)
LE = H = "protocol/placement.py"

MUTANTS = [
    # --- truncated logs
    Mutant(
        "takes-no-epoch-from-a-commit",
        L,
        "known is None or at.offset > known.until or (is_compared and at.leader_epoch > known.epoch)",
        "False",
        "a committed offset has the leader epoch with which it was committed",
    ),
    Mutant(
        "believes-foreign-epochs",
        L,
        "if at is None or at.stream is None or at.leader_epoch is None",
        "if at is None or at.leader_epoch is None",
        "a wrong leader epoch in another consumer's commit is no truncation",
    ),
    Mutant(
        "ignores-new-leaders",
        L,
        "known.epoch != leader and tp in positions",
        "known.epoch > leader and tp in positions",
        "a new leader is asked whether it has what was read",
    ),
    Mutant(
        "stays-behind-a-truncation",
        L,
        "self._moved[tp] = end",
        "self._moved[tp] = self._positions[tp]",
        "the records that replaced truncated ones are read",
    ),
    # --- partitions
    Mutant(
        "rereads-a-batch-durable-while-away",
        P,
        "memory.pending = (start, end)",
        "pass",
        "a batch that became durable while its partition was unassigned is not read again",
    ),
    Mutant(
        "accepts-an-older-commit",
        P,
        "offset = max(offset, known) if truncated_after is None else known",
        "pass",
        "the stream's own position takes precedence over an older commit",
    ),
    Mutant(
        "undoes-a-rewind",
        P,
        "if isinstance(memory, Memory) and is_older(committed, memory):",
        "if isinstance(memory, Memory):",
        "a commit that is newer than the remembered position counts, even if it moves back",
    ),
    Mutant(
        "adopts-nothing",
        P,
        "self._set_known(tp, Known(partition.slot, at, is_new=True), Cause.FOREIGN_COMMIT)",
        "self._set_known(tp, Known(partition.slot, at), ev.CommittedOffsetsRead)",
        "a foreign commit is committed under the stream's name before it is read",
    ),
    Mutant(
        "ignores-a-pending-batch",
        P,
        "return end if start <= at < end else at",
        "return at",
        "a pending batch is applied as if the committed offset had preceded it",
    ),
    Mutant(
        "keeps-the-plan-over-a-reset",
        P,
        "self.reset_number, self._in_flight = number, {}",
        "self.reset_number = number",
        "a plan from before a reset is void",
    ),
    Mutant(
        "keeps-positions-over-a-reset",
        P,
        "return None if memory is None else VoidedMemory(memory.without_last_batch)",
        "return memory",
        "positions remembered from before a reset are void",
    ),
    Mutant(
        "plans-uncommitted-offsets-of-assigned-partitions-only",
        P,
        "if isinstance(memory := each.memory, Memory) and uncommitted_offset(memory) is not None:",
        "if False:",
        "the plan contains uncommitted positions of unassigned partitions",
    ),
    Mutant(
        "plans-without-marking-in-flight",
        P,
        "if start < end:\n                partition.until = end",
        "pass",
        "a partition that the batch in flight reads is not released",
    ),
    Mutant(
        "counts-no-duplicates",
        P,
        "return end - min(self.offset, self._base)",
        "return 0",
        "possible duplicates are counted",
    ),
    Mutant(
        "ignores-the-batch-of-a-returning-partition",
        P,
        "if end is not None:  # it is",
        "if False:  # it is",
        "a partition assigned again during a batch is released only when the batch is durable",
    ),
    Mutant(
        "undoes-a-rewind-before-its-batch",
        P,
        "put_back = committed.seq == last.seq - 1 and last.start is not None and at < last.start",
        "put_back = False",
        "a commit of the stream that was moved back before the batch in flight counts",
    ),
    Mutant(
        "believes-a-commit-of-a-former-topic",
        L,
        'if ids.setdefault(tp.topic, at.topic_id) == at.topic_id or present == "":',
        "if ids.setdefault(tp.topic, at.topic_id):",
        "an offset that was committed for a deleted topic is no position in the new one",
    ),
    Mutant(
        "learns-ids-with-the-first-check-only",
        L,
        "if name in self._disputed or name not in self.topic_ids}",
        "if name in self._disputed}",
        "a topic that is recreated before the first batch with it is no longer the one of the position",
    ),
    Mutant(
        "keeps-a-pending-batch-over-a-foreign-commit",
        P,
        "at = Position(\n            offset,\n            first=offset,\n            followed=",
        "at = Position(\n            end if getattr(memory, 'pending', 0) and is_inside else offset,\n"
        "            first=offset,\n            followed=",
        "a foreign commit inside a pending batch counts, as the sink may have skipped that batch",
    ),
    Mutant(
        "takes-a-commit-below-what-is-durable-for-a-rewind",
        P,
        "is_inside = durable_to is not None",
        "is_inside = False",
        "a foreign commit of records that this stream has read and not committed is no move back",
    ),
    Mutant(
        "takes-a-lost-host-for-a-normal-stop",
        "protocol/run.py",
        "uncommitted=committed != BatchKey.of(offset))",
        "uncommitted=False)",
        "Kafka has the last batch of a former run for certain only if that run stopped with all offsets committed",
    ),
    Mutant(
        "keeps-the-batch-over-a-foreign-commit",
        P,
        "self._update_known(tp, partition, Cause.FOREIGN_COMMIT, is_new=True)",
        "at.offset = end; self._update_known(tp, partition, Cause.FOREIGN_COMMIT, is_new=True)",
        "a foreign commit inside the batch in flight counts as well",
    ),
    Mutant(
        "waits-for-every-leader",
        "protocol/lookups.py",
        "return {tp for tp, each in self._silent.items() if each.since_ms <= until_ms and tp in ours}",
        "return set()",
        "a partition without a leader does not hold up the others",
    ),
    # --- plan
    Mutant(
        "plans-no-uncommitted-offsets",
        "protocol/planner.py",
        "uncommitted = {tp: at for tp, at in elsewhere.items() if tp not in until}",
        "uncommitted = {}",
        "the plan contains uncommitted positions",
    ),
    Mutant(
        "plans-without-reset-number",
        "protocol/planner.py",
        "reset_number=partitions.reset_number,",
        "reset_number=0,",
        "a plan contains the reset number of its run",
    ),
    Mutant(
        "hides-a-rewind",
        "protocol/planner.py",
        "followed=frozenset(tp for tp, at in jumps.items() if at.followed),",
        "followed=frozenset(),",
        "the plan reports to the sink which positions followed a foreign commit",
    ),
    Mutant(
        "overlaps-ranges",
        "protocol/planner.py",
        "ranges={tp: (backlogs[tp][0], end) for tp, end in until.items()},",
        "ranges={tp: (max(0, backlogs[tp][0] - 1), end) for tp, end in until.items()},",
        "the next range starts where the last one ended",
    ),
    # --- run and slots
    Mutant(
        "commits-at-the-next-trigger-only",
        M,
        "if plan is not None and self.state is RunState.READING and batch.seq == plan.seq",
        "if plan is not None and plan.seq < 0",
        "a batch that the sink has marked is durable between two triggers",
    ),
    Mutant(
        "drains-at-the-next-trigger-only",
        M,
        "idle = self.is_draining and self.state is RunState.OPEN",
        "idle = False",
        "a drain request between two triggers is served",
    ),
    Mutant(
        "holds-nothing",
        S,
        "if partition.until is not None:\n            return True",
        "if partition.until is not None:\n            return False",
        "revocations wait for the batch",
    ),
    Mutant(
        "releases-before-the-commit",
        S,
        "return tp in self._partitions.due and (self._commits.includes(tp) or at.offset != at.committed)",
        "return False",
        "revocations wait until offsets are committed",
    ),
    Mutant(
        "releases-unresolved-partitions",
        S,
        "return uncommitted_offset(partition.memory) is not None or self._partitions.is_in_flight(tp)",
        "return False",
        "a partition without a known position is held if its offsets may not be committed",
    ),
    Mutant(
        "holds-without-budget",
        S,
        "if now_ms - revoking.since_ms >= self._rules.hold_budget_ms:",
        "if now_ms < 0:",
        "a hold has a budget",
    ),
    Mutant(
        "loses-without-counting",
        S,
        "self._counts.possible_duplicates += twice",
        "pass",
        "duplicates of lost partitions are counted",
    ),
    Mutant(
        "never-rejoins",
        S,
        "self._wake_at_ms[slot.number] = self._out.now_ms + pause_ms(slot.failures)\n        "
        'slot.failures += 1\n        self._out.log(f"the member of slot {slot.number} failed',
        'slot.failures += 1\n        self._out.log(f"the member of slot {slot.number} failed',
        "a slot whose member failed joins again",
    ),
    Mutant(
        "never-retries-a-commit",
        E,
        "self._state = Backoff(until_ms=now_ms + pause_ms(self._failures))",
        "self._state = Backoff(until_ms=now_ms + 10**9)",
        "a failed commit is retried",
    ),
    Mutant(
        "plans-revoked-partitions",
        M,
        "found.pop(tp, None)",
        "pass",
        "a partition that is being revoked is not planned",
    ),
    Mutant(
        "keeps-the-position",
        P,
        "at.offset, at.lost_from, partition.until = partition.until, None, None",
        "at.lost_from, partition.until = None, None",
        "a durable batch moves its partitions to its end",
    ),
    Mutant(
        "commits-ahead",
        P,
        "offsets[tp], slots[tp] = at.offset, slot",
        "offsets[tp], slots[tp] = at.offset + 1, slot",
        "committed offsets are never ahead of durable rows",
    ),
    Mutant(
        "reads-beyond-the-end",
        "protocol/planner.py",
        "backlogs = {tp: (at, max(at, ends.get(tp, at)))",
        "backlogs = {tp: (at, max(at, ends.get(tp, at)) + 1)",
        "a batch ends at the log end",
    ),
    # --- shells
    Mutant(
        "does-not-read-back",
        "kafka/group_offsets.py",
        "            if not late:\n                return",
        "            return",
        "a partition is released when a plain read shows its offset",
    ),
    Mutant(
        "reports-all-as-committed",
        "runtime/offset_commits.py",
        "done = {tp: offset for tp, offset in command.offsets.items() if command.slots[tp] not in skipped}",
        "done = dict(command.offsets)",
        "offsets of absent slots do not count as committed",
    ),
    Mutant(
        "aborts-its-commits",
        "kafka/committer.py",
        "owned.transaction = Transaction.COMMITTING",
        "pass",
        "the transaction of the offsets is committed",
    ),
    Mutant(
        "keeps-a-forgotten-id",
        "kafka/committer.py",
        "error.code() in FORGOTTEN or not",
        "not",
        "an id that the coordinator has forgotten is taken over again",
    ),
    Mutant(
        "stops-at-a-failed-commit",
        "runtime/request_thread.py",
        "            self._on_failure(request, exc)",
        "            raise",
        "a failed commit does not stop the request thread",
    ),
    Mutant(
        "stops-the-clock",
        "runtime/coordinator.py",
        "                self._handle(ev.Tick())",
        "                pass",
        "deadlines are checked while other threads wait for brokers",
    ),
    # --- the sink's decision
    Mutant(
        "writes-rows-twice",
        "delta/ledger_decision.py",
        "        _add(found.drop, tp, start, min(recorded, end))",
        "        pass",
        "rows that the table has are dropped",
    ),
    Mutant(
        "ignores-a-reset-that-the-sink-reports",
        "protocol/run.py",
        "        if event.void_by > self.partitions.reset_number:",
        "        if False:",
        "a batch of which the sink wrote nothing is not committed",
    ),
    Mutant(
        "writes-void-plans",
        "delta/ledger_decision.py",
        "    void = batch.reset_number < known.reset_number",
        "    void = False",
        "a plan made before a reset writes nothing",
    ),
    # --- placement
    Mutant(
        "moves-uncommitted-slots",
        LE,
        "        for slot, agent in self._misplaced():\n            if self._slots.is_fully_committed(slot):",
        "        for slot, agent in self._misplaced():\n            if True:",
        "a slot moves only when all its positions are committed",
        agents=True,
    ),
    Mutant(
        "keeps-silent-agents",
        H,
        "if silent_ms >= self._rules.lease_ms:",
        "if silent_ms < 0:",
        "an agent without heartbeats for a lease is lost",
        agents=True,
    ),
    Mutant(
        "joins-before-its-transactional-id",
        "runtime/coordinator.py",
        "before_join=self._requests.await_transactional_id,",
        "before_join=lambda: None,",
        "members join after the run has its transactional id, or knows that it cannot get it now",
    ),
    Mutant(
        "keeps-two-agents-of-an-executor",
        H,
        "for twin in [agent for agent in self.all.values() if agent.executor == event.executor]:",
        "for twin in []:",
        "a newer agent of an executor replaces the older one",
        agents=True,
    ),
    Mutant(
        "leaves-slots-on-lost-agents",
        S,
        "            self._change(slot, Cause.AGENT_LOST, ClosedState())\n            self.join(slot)",
        "            self._change(slot, Cause.AGENT_LOST, ClosedState())",
        "a slot whose agent is lost joins again elsewhere",
        agents=True,
    ),
    Mutant(
        "never-returns-to-a-full-group",
        S,
        "self._wake_at_ms[slot.number] = self._out.now_ms + FULL_PAUSE_MS",
        "self._wake_at_ms[slot.number] = self._out.now_ms + 1_000 * FULL_PAUSE_MS",
        "a member that a full group refused joins again",
        agents=True,
    ),
    Mutant(
        "leaves-slots-where-they-cannot-join",
        LE,
        "slot.unassigned_since_ms is not None and now_ms >= self._recall_ms(slot):",
        "slot.unassigned_since_ms is not None and now_ms < 0:",
        "a slot that cannot join from an agent joins from the stream reader",
        agents=True,
    ),
    Mutant(
        "takes-no-instance-id-over",
        S,
        "takes_over=slot.may_be_alive and not self._rules.classic,",
        "takes_over=False,",
        "the instance id of a vanished member is taken over",
        agents=True,
    ),
    Mutant(
        "places-members-against-the-option",
        LE,
        'return self._rules.member_host != "driver" and self._slots.static and self.transactional',
        "return self._slots.static and self.transactional",
        "members stay in the stream reader with memberHost=driver",
        agents=True,
    ),
    Mutant(
        "accepts-agents-of-earlier-runs",
        H,
        "if not event.fresh or event.agent in self._ended:",
        "if False:",
        "an agent that another run accepted is dismissed",
        agents=True,
    ),
    Mutant(
        "forgets-pending-changes",
        "agents/messages.py",
        "                for number, change in self._pending:\n",
        "                for number, change in ():\n",
        "a new connection starts with the changes that are not acknowledged",
        agents=True,
    ),
    Mutant(
        "outlives-its-lease",
        "agents/hosted_members.py",
        "if self._end_reason is None and silent_ms >= self._lease_ms:",
        "if self._end_reason is None and silent_ms < 0:",
        "an agent that receives nothing for a lease closes its members",
        agents=True,
    ),
    Mutant(
        "forgets-identities",
        "agents/connected_agents.py",
        "self._identity = identity",
        "pass",
        "offsets of a placed slot are committed under the identity that its member reported",
        agents=True,
    ),
    Mutant(
        "places-where-transactions-are-refused",
        LE,
        'return self._rules.member_host != "driver" and self._slots.static and self.transactional',
        'return self._rules.member_host != "driver" and self._slots.static',
        "slots are placed only where the brokers accept transactions",
        agents=True,
    ),
    Mutant(
        "leaves-slots-without-transactions",
        LE,
        "        if not self.transactional:\n            self._recall_all()\n",
        "",
        "slots are recalled where transactions are refused from now on",
        agents=True,
    ),
]

FOUND_BY: dict[str, tuple[str, int]] = {
    "keeps-a-forgotten-id": ("cooperative", 46),
    "takes-no-epoch-from-a-commit": ("cooperative", 197),
    "believes-a-commit-of-a-former-topic": ("eager", 43),
    "learns-ids-with-the-first-check-only": ("consumer", 591),
    "believes-foreign-epochs": ("eager", 21),
    "ignores-new-leaders": ("cooperative", 2),
    "stays-behind-a-truncation": ("cooperative", 2),
    "forgets-pending-changes": ("calm-cooperative", 0),
    "rereads-a-batch-durable-while-away": ("eager", 19),
    "accepts-an-older-commit": ("eager", 0),
    "undoes-a-rewind": ("eager", 47),
    "adopts-nothing": ("eager", 13),
    "ignores-a-pending-batch": ("cooperative", 2),
    "keeps-the-plan-over-a-reset": ("consumer", 41),
    "keeps-positions-over-a-reset": ("consumer", 104),
    "plans-uncommitted-offsets-of-assigned-partitions-only": ("cooperative", 33),
    "plans-without-marking-in-flight": ("cooperative", 0),
    "counts-no-duplicates": ("eager", 16),
    "ignores-the-batch-of-a-returning-partition": ("eager", 2),
    "plans-no-uncommitted-offsets": ("cooperative", 33),
    "plans-without-reset-number": ("eager", 2),
    "ignores-a-reset-that-the-sink-reports": ("cooperative", 101_586),
    "hides-a-rewind": ("cooperative", 213),
    "overlaps-ranges": ("cooperative", 0),
    "commits-at-the-next-trigger-only": ("eager", 9),
    "drains-at-the-next-trigger-only": ("eager", 24),
    "takes-a-commit-below-what-is-durable-for-a-rewind": ("cooperative", 9),
    "takes-a-lost-host-for-a-normal-stop": ("cooperative", 9),
    "holds-nothing": ("eager", 0),
    "releases-before-the-commit": ("eager", 2),
    "releases-unresolved-partitions": ("eager", 75),
    "holds-without-budget": ("eager", 6),
    "loses-without-counting": ("eager", 16),
    "never-rejoins": ("eager", 7),
    "never-retries-a-commit": ("eager", 19),
    "plans-revoked-partitions": ("eager", 2),
    "keeps-the-position": ("cooperative", 0),
    "commits-ahead": ("cooperative", 0),
    "reads-beyond-the-end": ("cooperative", 0),
    "does-not-read-back": ("eager", 2),
    "reports-all-as-committed": ("cooperative", 32),
    "aborts-its-commits": ("eager", 1),
    "stops-at-a-failed-commit": ("eager", 5),
    "stops-the-clock": ("consumer", 0),
    "writes-rows-twice": ("eager", 1),
    "writes-void-plans": ("eager", 14),
    "moves-uncommitted-slots": ("calm-consumer", 0),
    "joins-before-its-transactional-id": ("eager", 0),
    "keeps-silent-agents": ("calm-cooperative", 0),
    "keeps-two-agents-of-an-executor": ("calm-cooperative", 1),
    "leaves-slots-on-lost-agents": ("calm-cooperative", 0),
    "never-returns-to-a-full-group": ("consumer", 30),
    "leaves-slots-where-they-cannot-join": ("eager", 32),
    "takes-no-instance-id-over": ("calm-consumer", 2),
    "places-members-against-the-option": ("consumer", 4),
    "accepts-agents-of-earlier-runs": ("eager", 2),
    "outlives-its-lease": ("eager", 39),
    "forgets-identities": ("calm-consumer", 0),
    "undoes-a-rewind-before-its-batch": ("consumer", 150),
    "keeps-a-pending-batch-over-a-foreign-commit": ("eager", 4),
    "keeps-the-batch-over-a-foreign-commit": ("consumer", 4),
    "waits-for-every-leader": ("consumer", 122),
    "places-where-transactions-are-refused": ("eager", 3),
    "leaves-slots-without-transactions": ("eager", 1),
}
"""A history that finds each mutant, by protocol and seed."""


History = tuple[str, int]
"""A protocol, which may have the prefix :data:`CALM`, and a seed."""


def histories(mutant: Mutant, *, more: int = 0) -> list[History]:
    """Return the history known to find this mutant, then all of the quick run, then ``more`` seeds."""
    quick = [(f"{CALM}{protocol}", seed) for protocol in PROTOCOLS for seed in range(CALM_SEEDS * mutant.agents)]
    quick += [(protocol, seed) for protocol in PROTOCOLS for seed in range(AGENT_SEEDS if mutant.agents else SEEDS)]
    quick += [(protocol, SEEDS + seed) for seed in range(more) for protocol in PROTOCOLS]
    known = [FOUND_BY[mutant.name]] if mutant.name in FOUND_BY else []  # none for a new mutant
    return [*known, *quick]


def first_failed(mutant: Mutant, played: Sequence[History]) -> tuple[History, Failed] | None:
    """Play histories with a broken rule; return the first that fails."""
    with broken(mutant):
        for protocol, seed in played:
            try:
                if protocol.startswith(CALM):
                    play_calm(seed, protocol.removeprefix(CALM))
                else:
                    run(seed, protocol=protocol, agents=mutant.agents)
            except Failed as failed:
                return (protocol, seed), failed
    return None


def find() -> int:
    for mutant in MUTANTS:
        found = first_failed(mutant, histories(mutant, more=FIND_SEEDS))
        line = f'("{found[0][0]}", {found[0][1]})' if found else "in no history"
        print(f'    "{mutant.name}": {line},', flush=True)  # noqa: T201
    return 0


def main(arguments: list[str]) -> int:
    """Run histories with one mutant; return 1 if a history finds it."""
    if arguments == ["find"]:
        return find()
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    if not arguments or arguments[0] not in by_name:
        sys.stderr.write(f"{__doc__}\nNAME is one of {', '.join(by_name)}\n")
        return 2
    mutant = by_name[arguments[0]]
    pairs = list(zip(arguments[1::2], map(int, arguments[2::2]), strict=True))
    found = first_failed(mutant, pairs or [FOUND_BY[mutant.name]])
    if found is None:
        return 0
    (protocol, seed), failed = found
    sys.stdout.write(f"found by {protocol} {seed}: {str(failed).splitlines()[0]}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
