"""What goes wrong in a history: one fault after the other, of a kind and at a time that the seed draws.

Runs in: tests. Deliberately absent: the world without them (``scene``), and how questions to the brokers fail one by
one (``misfortune``).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kit.cluster import Cluster, Log
from kit.operators import Operator, Targets
from kit.ordinary_member import OrdinaryMember
from kit.scene import SLOW_MS, TRIGGERS, Scene
from kit.spark import Checkpoint, Query, SparkRun
from kit.world import Draws, Process
from spark_group_source.model import TopicPartition

PAUSE_MS = (500, 9_000)
"""Between two faults."""
FROZEN_MS = (200, 3_000, 9_000, 14_000)
"""Shorter and longer than a session."""
OUTAGES_MS = (300, 2_000, 2_000, 6_000, 6_000, 16_000, 45_000)
"""Up to longer than every time-out."""
OTHERS_MAX = 3
PARTITIONS_MAX = 12


@dataclass(frozen=True)
class Kind:
    """One kind of fault: a method of :class:`Faults`, which draws what it befalls.

    Args:
        choose: the target; None: there is none, and nothing happens.
        befall: what happens to it; False: nothing did.
        weight: how often it is drawn, beside those of weight 1.
    """

    choose: Callable[[Any], Any]
    befall: Callable[[Any, Any], bool | None]
    weight: int = 1

    @property
    def name(self) -> str:
        return self.befall.__name__

    def happens(self, faults: "Faults") -> bool:
        target = self.choose(faults)
        return target is not None and self.befall(faults, target) is not False


def of(choose: Callable[[Any], Any], *, weight: int = 1) -> Callable[[Callable[[Any, Any], bool | None]], Kind]:
    return lambda befall: Kind(choose, befall, weight)


class Faults:
    """The faults of one history. ``happened``: how often each kind did."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.world = scene, scene.world
        self.happened: Counter[str] = Counter()
        self.draws = self.world.draws("fault 0")  # those of the fault that begins
        self.pause_ms = PAUSE_MS
        self._begun = 0
        self._kinds = [kind for kind in Faults.kinds() for _ in range(kind.weight)]

    @classmethod
    def kinds(cls) -> list[Kind]:
        """Those that this class adds."""
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

    # --- what they befall -------------------------------------------------------------------------------------------

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
        """It reaches no broker, while all others do."""
        process.cut_off_until_ms = self.world.now_ms + self.draws.choice(OUTAGES_MS)
        self.world.note(f"{process.name}: cut off until {process.cut_off_until_ms}")

    # --- queries ----------------------------------------------------------------------------------------------------

    @of(_run)
    def kill_driver(self, run: SparkRun) -> None:
        run.kill()

    @of(_run)
    def freeze_driver(self, run: SparkRun) -> None:
        self._freeze(run.process)

    @of(_run)
    def replace_driver(self, run: SparkRun) -> None:
        """Taken for dead, it is started again elsewhere; then the first one goes on: a zombie."""
        query = run.query
        self._freeze(run.process)
        start: Callable[[], None] = lambda: self.scene.start(query) if query.runs[-1] is run else None  # noqa: E731
        self.world.at(self.draws.between(10, 4_000), start)

    @of(_run)
    def stop_driver(self, run: SparkRun) -> None:
        run.stop()

    @of(_query)
    def slow_sink(self, query: Query) -> None:
        """The sink takes longer than a revocation may be held, for a while."""
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
        """No broker for a while; the next coordinator starts every session anew."""
        cluster.unreachable(self.draws.choice(OUTAGES_MS))

    @of(_run)
    def cut_off(self, run: SparkRun) -> None:
        self._cut_off(run.process)

    @of(_run)
    def drain(self, run: SparkRun) -> bool:
        """An operator lets the query end its batch, and stops it then."""
        if run.publisher.drain:
            return False
        run.publisher.drain = True
        self.world.note(f"{run.process.name}: asked to drain")
        self.world.at(self.draws.between(3_000, 15_000), run.stop)
        return True

    @of(_run)
    def break_member(self, run: SparkRun) -> bool:
        """A fatal error ends one member; the other slots of its query go on."""
        return self._breaks(run.process)

    def _breaks(self, process: Process) -> bool:
        consumers = list(self.scene.cluster.consumers.get(process.name, ()))
        self.draws.shuffle(consumers)
        broken = any(consumer.breaks() for consumer in consumers)
        self.world.note(f"{process.name}: {'a' if broken else 'no'} member breaks")
        return broken

    @of(_query)
    def spare_threads(self, query: Query) -> None:
        """The machine has few threads to give when the query is started the next time."""
        query.threads_left = self.draws.between(0, 5)

    @of(_query)
    def lose_checkpoint(self, query: Query) -> bool:
        """Somebody deletes it, and starts the query again."""
        if not query.checkpoint.offsets or self.scene.operator.busy:
            return False
        query.checkpoint = Checkpoint(f"{query.checkpoint.query_id}+")
        self.world.note(f"the checkpoint of query {query.name} is lost")
        for run in query.runs:
            run.kill()
        return True

    @of(_query)
    def change_trigger(self, query: Query) -> None:
        """From its next start the query is run in another way."""
        query.habits = replace(query.habits, trigger=self.draws.choice(TRIGGERS))

    # --- operators --------------------------------------------------------------------------------------------------

    @of(_operator)
    def rewind(self, operator: Operator) -> bool:
        """By Kafka's own tool."""
        targets = partial(self._targets, self.draws)
        return operator.begin(lambda: operator.by_kafkas_tool(targets))

    @of(_operator)
    def reset(self, operator: Operator) -> bool:
        """By spark-group reset, with all tables."""
        draws = self.draws
        targets, halfway = partial(self._targets, draws), draws.chance(0.15)

        def act() -> None:
            operator.by_reset(targets, self.scene.tables, halfway=halfway)
            if draws.chance(0.3):
                operator.by_reset(targets, self.scene.tables)

        return operator.begin(act)

    def _targets(self, draws: Draws, committed: Targets) -> Targets:
        """Some partitions, mostly a little back."""
        targets = {}
        for tp, at in sorted(committed.items()):
            log = self.scene.cluster.log(tp)
            if log is None or draws.chance(0.4):
                continue
            to = at - draws.between(0, 30) if draws.chance(0.8) else at + draws.between(0, 5)
            targets[tp] = min(max(to, log.first), log.end)
        return targets

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
        """A producer's transaction stays open: under read_committed nothing behind its beginning is read."""
        tp, log = found
        if log.held is not None:
            return False
        log.held = log.end
        self.world.at(self.draws.between(500, 20_000), lambda: self.scene.release(tp))
        return True

    @of(_records)
    def age_log(self, found: tuple[TopicPartition, Log]) -> None:
        """Retention takes records, read or not."""
        tp, log = found
        self.scene.cluster.age(tp, self.draws.between(log.first, log.end))
        self.world.note(f"{tp} begins at {log.first} now")
        self.scene.truth.gone(tp, log.first)

    @of(_records)
    def shrink_log(self, found: tuple[TopicPartition, Log]) -> None:
        """A leader was elected that does not have the last records."""
        tp, log = found
        self.scene.cluster.shrink(tp, log.end - self.draws.between(1, 8))
        self.world.note(f"{tp} ends at {log.end} now")
        self.scene.truth.shrunk(tp, log.end)

    @of(_scene)
    def delete_topic(self, scene: Scene) -> bool:
        """Deleted, and after a while made again."""
        if scene.deleted or self.draws.chance(0.5):
            return False
        topic = self.draws.choice(sorted(scene.cluster.topics))
        scene.delete(topic)
        self.world.at(self.draws.choice([10, 1_500, 8_000]), lambda: scene.make_again(topic))
        return True

    @of(_scene)
    def new_topic(self, scene: Scene) -> bool:
        """One that a pattern matches."""
        patterns = any("subscribePattern" in query.habits.options for query in scene.queries)
        if not patterns or len(scene.partitions()) >= PARTITIONS_MAX:
            return False
        name = f"new{self.happened['new_topic']}"
        scene.cluster.create(name, self.draws.randint(1, 2), slow_ms=self.draws.choice(SLOW_MS))
        for tp in scene.partitions():
            if tp.topic == name:
                scene.truth.add_partition(tp, 0)
        return True
