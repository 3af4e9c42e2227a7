"""Operators that stop all consumers, move the offsets of the group, and start the consumers again.

Runs in: tests. They use Kafka's own tool (offsets alone) or ``spark-group reset``, with the product's plan
(``cli.reset``): Kafka first, then the ledgers of the tables. Deliberately absent: typing errors, and resets of groups
with members, which Kafka refuses.
"""

from collections.abc import Callable, Sequence
from functools import partial

from kit.books import Reader
from kit.cluster import Cluster
from kit.environment import SimulatedEnvironment
from kit.invariants import Invariants
from kit.sinks import Table
from kit.world import Process, World
from spark_group_source.cli import reset
from spark_group_source.errors import GroupError
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.model import EARLIEST, TopicPartition

GROUP_EMPTY_MS_MAX = 90_000
"""Time after which every session has ended."""
LOOK_S = 0.5
TRIES_MAX = 50

Targets = dict[TopicPartition, int]


class Operator:
    """An operator, who makes one change at a time.

    Args:
        stop: makes all members leave the group.
        start: makes them join again.
    """

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        truth: Invariants,
        group: str,
        *,
        stop: Callable[[], None],
        start: Callable[[], None],
    ) -> None:
        self._process = Process(world, "operator")
        self._world, self._cluster, self._truth, self._group = world, cluster, truth, group
        self._stop, self._start = stop, start
        self._environment = SimulatedEnvironment(self._process, cluster)
        self._admin = GroupAdmin({"bootstrap.servers": "kafka:9092"}, environment=self._environment, retries=10)
        self.busy = False
        self.moves = 0
        truth.reads_as(self._process.name, Reader(self._process.name, self._process.name))
        truth.operator = self._process.name

    def begin(self, act: Callable[[], None]) -> bool:
        """Stop all consumers, act, and start them again. Returns False if a change is in progress already."""
        if self.busy:
            return False
        self.busy = True
        self._process.spawn("operator", partial(self._work, act))
        return True

    def _work(self, act: Callable[[], None]) -> None:
        self._stop()
        until_ms = self._world.now_ms + GROUP_EMPTY_MS_MAX
        while self._cluster.group(self._group).members:
            self._truth.require(self._world.now_ms < until_ms, "a member of no simulated process stays in the group")
            self._environment.pause(LOOK_S)
        for _ in range(TRIES_MAX):
            try:
                act()
                break
            except GroupError as exc:
                self._world.note(f"operator: {exc}")
                self._environment.pause(LOOK_S)
        self.moves += 1
        self.busy = False
        self._start()

    # --- changes, on the operator's thread -------------------------------------------------------------------------

    def by_kafkas_tool(self, draw: Callable[[Targets], Targets]) -> None:
        """``kafka-consumer-groups.sh --reset-offsets``: offsets without a note.

        Args:
            draw: makes the new offsets from the committed ones.
        """
        committed = self._admin.committed(self._group)
        targets = draw({tp: at.offset for tp, at in committed.items()})
        if targets:
            self._world.note(f"operator: moves {_text(targets)}")
            self._admin.move_committed(self._group, targets)

    def by_reset(self, draw: Callable[[Targets], Targets], tables: Sequence[Table], *, halfway: bool = False) -> None:
        """``spark-group reset``, once for each table, or once without a table.

        Args:
            halfway: whether the operator's machine dies between Kafka and the table.
        """
        targets: Targets | None = None
        for table in tables or [None]:  # type: ignore[list-item]
            ledger = None if table is None else table.ledger
            committed = self._admin.committed(self._group)
            if targets is None:
                targets = draw({tp: at.offset for tp, at in committed.items()})
            if not targets:
                return
            known = [*targets, *committed, *({} if ledger is None else ledger.offsets)]
            topics = self._admin.existing_topics(tp.topic for tp in known)
            former = reset.of_former_topics(committed, ledger, topics)
            # Refused: the operator runs the command for recreated topics first.
            targets |= {tp: 0 for tp, at in former.items() if targets.get(tp, at) == at}
            plan = reset.plan_reset(targets, committed, ledger, topics)
            self._world.note(f"operator: reset {plan.reset_number} to {_text(targets)}: {_text(plan.offsets)}")
            self._truth.resets(plan.reset_number)
            try:
                self._admin.move_committed(self._group, plan.offsets, notes=plan.notes)
            except GroupError:
                self._truth.half_done(plan.offsets)  # a request without an answer may still be executed later
                raise
            if table is not None and halfway:
                self._truth.half_done(plan.offsets)
            elif table is not None:
                ids = {tp.topic: topics[tp.topic].id for tp in plan.offsets}
                gone = {tp.topic for tp in known} - topics.keys()
                table.set_ledger(plan.offsets, topic_ids=ids, reset_number=plan.reset_number, deleted=gone)

    def settle(self, table: Table, tables: Sequence[Table]) -> None:
        """Resolve a LedgerConflict as its message proposes: continue at the table's offsets, or write the rows again.

        The offsets of one table may be behind those of another table of the group, so all tables are reset to them.
        """
        held = {} if table.ledger is None else dict(table.ledger.offsets)
        if not self._admin.committed(self._group):  # all topics were deleted: the command needs their names
            scope = dict.fromkeys(self._admin.existing_topics(tp.topic for tp in held), frozenset[int]())
            tps = reset.partitions_of(self._admin, self._group, scope)
            first = dict(reset.resolve(self._admin, self._group, dict.fromkeys(tps, EARLIEST)).offsets)
            self.by_reset(lambda _: first, tables)
        elif self._process.draws("settles").chance(0.5):
            self.by_reset(lambda committed: {tp: at for tp, at in held.items() if tp in committed}, tables)
        else:
            self.by_reset(lambda committed: committed, tables)


def _text(offsets: Targets) -> str:
    return ", ".join(f"{tp}={at}" for tp, at in sorted(offsets.items()))
