"""The faults of a history: one after the other, with kinds and times drawn from the seed.

Runs in: tests. Deliberately absent: the world without faults (``scene``), and failures of single requests
(``misfortune``).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kit.cluster import Cluster, Log
from kit.operators import Operator
from kit.ordinary_member import OrdinaryMember
from kit.scene import SLOW_MS, TRIGGERS, Scene
from kit.spark import Checkpoint, Query, SparkRun
from kit.world import Process
from spark_group_source.model import TopicPartition

PAUSE_MS = (500, 9_000)
"""The pause between two faults."""
FROZEN_MS = (200, 3_000, 9_000, 14_000)
"""From shorter to longer than a session."""
OUTAGES_MS = (300, 2_000, 2_000, 6_000, 6_000, 16_000, 45_000)
"""Up to longer than every timeout."""
OTHERS_MAX = 3
PARTITIONS_MAX = 12


@dataclass(frozen=True)
class Kind:
    """One kind of fault: a method of :class:`Faults`.

    Args:
        choose: draws the target; None: there is none, and nothing happens.
        apply: applies the fault to the target; False: nothing happened.
        weight: how often it is drawn, compared with kinds of weight 1.
    """

    choose: Callable[[Any], Any]
    apply: Callable[[Any, Any], bool | None]
    weight: int = 1

    @property
    def name(self) -> str:
        return self.apply.__name__

    def happens(self, faults: "Faults") -> bool:
        target = self.choose(faults)
        return target is not None and self.apply(faults, target) is not False


def of(choose: Callable[[Any], Any], *, weight: int = 1) -> Callable[[Callable[[Any, Any], bool | None]], Kind]:
    return lambda apply: Kind(choose, apply, weight)


class Faults:
    """The faults of one history. ``happened``: the count of each kind."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.world = scene, scene.world
        self.happened: Counter[str] = Counter()
        self.draws = self.world.draws("fault 0")  # those of the current fault
        self.pause_ms = PAUSE_MS
        self._begun = 0
        self._kinds = [kind for kind in Faults.kinds() for _ in range(kind.weight)]

    @classmethod
    def kinds(cls) -> list[Kind]:
        """The kinds that this class adds."""
        return [kind for kind in vars(cls).values() if isinstance(kind, Kind)]

    def begin(self) -> None:
        if self.scene.is_calm:
            return
        pace = self.world.draws("faults")
        kind = pace.choice(self._kinds)
        self._begun += 1
        self.draws = self.world.draws(f"fault {self._begun}")
        if kind.happens(self):
            self.happened[kind.name] += 1
        self.world.at(pace.between(*self.pause_ms), self.begin)

    # --- targets ----------------------------------------------------------------------------------------------------

    def _query(self) -> Query:
        return self.draws.choice(self.scene.queries)

    def _run(self) -> SparkRun | None:
        run = self._query().runs[-1]
        return run if run.healthy else None

    def _other(self) -> OrdinaryMember | None:
        living = [other for other in self.scene.others if other.process.alive and not other.process.frozen]
        return self.draws.choice(living) if living else None

    def _scene(self) -> Scene:
        return self.scene

    def _cluster(self) -> Cluster:
        return self.scene.cluster

    def _operator(self) -> Operator:
        return self.scene.operator

    def _partition(self) -> tuple[TopicPartition, Log] | None:
        tps = self.scene.partitions()
        if not tps:
            return None
        tp = self.draws.choice(tps)
        log = self.scene.cluster.log(tp)
        return None if log is None else (tp, log)

    def _records(self) -> tuple[TopicPartition, Log] | None:
        found = self._partition()
        return None if found is None or found[1].first == found[1].end else found

    def _freeze(self, process: Process) -> None:
        process.freeze()
        self.world.at(self.draws.choice(FROZEN_MS) + self.draws.between(0, 2_000), process.thaw)

    def _cut_off(self, process: Process) -> None:
        """The process reaches no broker, while all others do."""
        process.cut(self.draws.choice(OUTAGES_MS))

    # --- queries ----------------------------------------------------------------------------------------------------

    @of(_run)
    def kill_driver(self, run: SparkRun) -> None:
        run.kill()

    @of(_run)
    def freeze_driver(self, run: SparkRun) -> None:
        self._freeze(run.process)

    @of(_run)
    def replace_driver(self, run: SparkRun) -> None:
        """The driver is presumed dead and started again elsewhere; then the first one continues: a zombie."""
        query = run.query
        self._freeze(run.process)
        start: Callable[[], None] = lambda: self.scene.start(query) if query.runs[-1] is run else None  # noqa: E731
        self.world.at(self.draws.between(10, 4_000), start)

    @of(_run)
    def stop_driver(self, run: SparkRun) -> None:
        run.stop()

    @of(_query)
    def slow_sink(self, query: Query) -> None:
        """For a while the sink takes longer than the hold budget of a revocation."""
        usual = query.habits
        query.habits = replace(usual, sink_ms_max=20_000)

        def usual_again() -> None:
            if not self.scene.is_calm:
                query.habits = replace(query.habits, sink_ms_max=usual.sink_ms_max)

        self.world.at(15_000, usual_again)

    # --- ordinary consumers -----------------------------------------------------------------------------------------

    @of(_other)
    def kill_other(self, other: OrdinaryMember) -> None:
        other.end()

    @of(_other)
    def freeze_other(self, other: OrdinaryMember) -> None:
        self._freeze(other.process)

    @of(_other)
    def leave_other(self, other: OrdinaryMember) -> None:
        other.leave()

    @of(_scene, weight=2)
    def add_other(self, scene: Scene) -> bool:
        if sum(other.process.alive for other in scene.others) >= OTHERS_MAX:
            return False
        scene.start_other()
        return True

    # --- brokers, and queries again ---------------------------------------------------------------------------------

    @of(_cluster)
    def lose_broker(self, cluster: Cluster) -> None:
        """No broker is reachable for a while; the next coordinator restarts every session."""
        cluster.unreachable(self.draws.choice(OUTAGES_MS))

    @of(_run)
    def cut_off(self, run: SparkRun) -> None:
        self._cut_off(run.process)

    @of(_run)
    def drain(self, run: SparkRun) -> bool:
        """An operator drains the query, and then stops it."""
        if run.publisher.drain:
            return False
        run.publisher.drain = True
        self.world.note(f"{run.process.name}: a drain was requested")
        self.world.at(self.draws.between(3_000, 15_000), run.stop)
        return True

    @of(_run)
    def break_member(self, run: SparkRun) -> bool:
        """A fatal error ends one member; the other slots of its query continue."""
        return self._breaks(run.process)

    def _breaks(self, process: Process) -> bool:
        consumers = list(self.scene.cluster.consumers.get(process.name, ()))
        self.draws.shuffle(consumers)
        broken = any(consumer.breaks() for consumer in consumers)
        self.world.note(f"{process.name}: {'a' if broken else 'no'} member breaks")
        return broken

    @of(_query)
    def spare_threads(self, query: Query) -> None:
        """The system can start only a few threads when the query is started next."""
        query.threads_left = self.draws.between(0, 5)

    @of(_query)
    def lose_checkpoint(self, query: Query) -> bool:
        """The checkpoint is deleted and the query restarted."""
        if not query.checkpoint.offsets or self.scene.operator.busy:
            return False
        query.checkpoint = Checkpoint(f"{query.checkpoint.query_id}+")
        self.scene.truth.checkpoints_lost += 1
        self.world.note(f"the checkpoint of query {query.name} is lost")
        for run in query.runs:
            run.kill()
        return True

    @of(_query)
    def change_trigger(self, query: Query) -> None:
        """From its next start the query runs with another trigger."""
        query.habits = replace(query.habits, trigger=self.draws.choice(TRIGGERS))

    # --- operators --------------------------------------------------------------------------------------------------

    @of(_operator)
    def rewind(self, operator: Operator) -> bool:
        """An operator resets offsets with Kafka's own tool."""
        targets = partial(self.scene.targets, self.draws)
        return operator.begin(lambda: operator.by_kafkas_tool(targets))

    @of(_operator)
    def reset(self, operator: Operator) -> bool:
        """An operator runs spark-group reset, with all tables."""
        draws = self.draws
        targets, halfway = partial(self.scene.targets, draws), draws.chance(0.15)

        def act() -> None:
            operator.by_reset(targets, self.scene.tables, halfway=halfway)
            if draws.chance(0.3):
                operator.by_reset(targets, self.scene.tables)

        return operator.begin(act)

    # --- topics -----------------------------------------------------------------------------------------------------

    @of(_scene)
    def grow_topic(self, scene: Scene) -> bool:
        if len(scene.partitions()) >= PARTITIONS_MAX or not scene.cluster.topics:
            return False
        topic = self.draws.choice(sorted(scene.cluster.topics))
        for tp in scene.cluster.grow(topic, slow_ms=self.draws.choice(SLOW_MS)):
            scene.truth.add_partition(tp, 0)
        return True

    @of(_partition)
    def hold_records(self, found: tuple[TopicPartition, Log]) -> bool:
        """A producer's transaction stays open: under read_committed nothing after its start is read."""
        tp, log = found
        if log.held is not None:
            return False
        log.held = log.end
        self.world.at(self.draws.between(500, 20_000), lambda: self.scene.release(tp))
        return True

    @of(_records)
    def age_log(self, found: tuple[TopicPartition, Log]) -> None:
        """Retention deletes records, read or not."""
        self.scene.age(found[0], self.draws)

    @of(_records)
    def shrink_log(self, found: tuple[TopicPartition, Log]) -> None:
        """A leader without the last records is elected."""
        tp, log = found
        self.scene.truncate(tp, log.end - self.draws.between(1, 8))

    @of(_scene)
    def delete_topic(self, scene: Scene) -> bool:
        """The topic is deleted, and recreated after a while."""
        if scene.deleted or self.draws.chance(0.5):
            return False
        topic = self.draws.choice(sorted(scene.cluster.topics))
        scene.delete(topic)
        self.world.at(self.draws.choice([10, 1_500, 8_000]), lambda: scene.make_again(topic))
        return True

    @of(_scene)
    def new_topic(self, scene: Scene) -> bool:
        """A topic is created that matches the pattern."""
        patterns = any("subscribePattern" in query.habits.options for query in scene.queries)
        if not patterns or len(scene.partitions()) >= PARTITIONS_MAX:
            return False
        name = f"new{self.happened['new_topic']}"
        scene.cluster.create(name, self.draws.randint(1, 2), slow_ms=self.draws.choice(SLOW_MS))
        for tp in scene.partitions():
            if tp.topic == name:
                scene.truth.add_partition(tp, 0)
        return True
