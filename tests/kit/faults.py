"""What goes wrong in a history: one fault after the other, of a kind and at a time that the seed draws.

Runs in: tests. Deliberately absent: the world without them (``scene``), and how questions to the brokers fail one by
one (``misfortune``).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kit.cluster import Log
from kit.operators import Targets
from kit.ordinary_member import OrdinaryMember
from kit.scene import SLOW_MS, TRIGGERS, Scene
from kit.spark import Checkpoint, Query, SparkRun
from kit.world import Draws
from spark_group_source.model import TopicPartition

PAUSE_MS = (500, 9_000)
"""Between two faults."""
FROZEN_MS = (200, 3_000, 9_000, 14_000)
"""Shorter and longer than a session."""
OUTAGES_MS = (300, 2_000, 2_000, 6_000, 6_000, 16_000, 45_000)
"""Up to longer than every time-out."""
OTHERS_MAX = 3
PARTITIONS_MAX = 12


class Faults:
    """The faults of one history. ``happened``: how often each kind did."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.world = scene, scene.world
        self.happened: dict[str, int] = {}
        self.draws = self.world.draws("fault 0")  # those of the fault that begins
        self._begun = 0
        self.pause_ms = PAUSE_MS
        self._kinds: list[Callable[[], bool]] = [
            self._kill_driver,
            self._freeze_driver,
            self._replace_driver,
            self._stop_driver,
            self._slow_sink,
            self._kill_other,
            self._freeze_other,
            self._leave_other,
            self._add_other,
            self._add_other,
            self._lose_broker,
            self._cut_off,
            self._drain,
            self._break_member,
            self._spare_threads,
            self._lose_checkpoint,
            self._change_trigger,
            self._rewind,
            self._reset,
            self._grow_topic,
            self._hold_records,
            self._age_log,
            self._shrink_log,
            self._delete_topic,
            self._new_topic,
        ]

    def begin(self) -> None:
        if self.scene.is_calm:
            return
        pace = self.world.draws("faults")
        fault = pace.choice(self._kinds)
        self._begun += 1
        self.draws = self.world.draws(f"fault {self._begun}")
        if fault():
            name = fault.__name__.strip("_")
            self.happened[name] = self.happened.get(name, 0) + 1
        self.world.at(pace.between(*self.pause_ms), self.begin)

    def end(self) -> None:
        """No new ones; what has its own end takes it."""

    # --- queries ----------------------------------------------------------------------------------------------------

    def _run(self) -> SparkRun | None:
        run = self.draws.choice(self.scene.queries).runs[-1]
        return run if run.healthy else None

    def _kill_driver(self) -> bool:
        if (run := self._run()) is None:
            return False
        run.kill()
        return True

    def _stop_driver(self) -> bool:
        if (run := self._run()) is None:
            return False
        run.stop()
        return True

    def _freeze_driver(self) -> bool:
        if (run := self._run()) is None:
            return False
        self._freeze(run.process.freeze, run.process.thaw)
        return True

    def _replace_driver(self) -> bool:
        """Taken for dead, it is started again elsewhere; then the first one goes on: a zombie."""
        if (run := self._run()) is None:
            return False
        query: Query = run.query
        self._freeze(run.process.freeze, run.process.thaw)
        start: Callable[[], None] = lambda: self.scene.start(query) if query.runs[-1] is run else None  # noqa: E731
        self.world.at(self.draws.between(10, 4_000), start)
        return True

    def _freeze(self, freeze: Callable[[], None], thaw: Callable[[], None]) -> None:
        freeze()
        self.world.at(self.draws.choice(FROZEN_MS) + self.draws.between(0, 2_000), thaw)

    def _slow_sink(self) -> bool:
        """The sink takes longer than a revocation may be held, for a while."""
        query = self.draws.choice(self.scene.queries)
        usual = query.habits
        query.habits = replace(usual, sink_ms_max=20_000)

        def usual_again() -> None:
            if not self.scene.is_calm:
                query.habits = replace(query.habits, sink_ms_max=usual.sink_ms_max)

        self.world.at(15_000, usual_again)
        return True

    def _cut_off(self) -> bool:
        """One driver reaches no broker, while all others do."""
        if (run := self._run()) is None:
            return False
        run.process.cut_off_until_ms = self.world.now_ms + self.draws.choice(OUTAGES_MS)
        self.world.note(f"{run.process.name}: cut off until {run.process.cut_off_until_ms}")
        return True

    def _drain(self) -> bool:
        """An operator lets the query end its batch, and stops it then."""
        if (run := self._run()) is None or run.publisher.drain:
            return False
        run.publisher.drain = True
        self.world.note(f"{run.process.name}: asked to drain")
        self.world.at(self.draws.between(3_000, 15_000), run.stop)
        return True

    def _break_member(self) -> bool:
        """A fatal error ends one member; the other slots of its query go on."""
        if (run := self._run()) is None:
            return False
        consumers = list(self.scene.cluster.consumers.get(run.process.name, ()))
        self.draws.shuffle(consumers)
        broken = next((consumer for consumer in consumers if consumer.breaks()), None)
        self.world.note(f"{run.process.name}: {'no' if broken is None else 'a'} member breaks")
        return broken is not None

    def _spare_threads(self) -> bool:
        """The machine has few threads to give when the query is started the next time."""
        query = self.draws.choice(self.scene.queries)
        query.threads_left = self.draws.between(0, 5)
        return True

    def _lose_checkpoint(self) -> bool:
        """Somebody deletes it, and starts the query again."""
        query = self.draws.choice(self.scene.queries)
        if not query.checkpoint.offsets or self.scene.operator.busy:
            return False
        query.checkpoint = Checkpoint(f"{query.checkpoint.query_id}+")
        self.world.note(f"the checkpoint of query {query.name} is lost")
        for run in query.runs:
            run.kill()
        return True

    def _change_trigger(self) -> bool:
        """From its next start the query is run in another way."""
        query = self.draws.choice(self.scene.queries)
        query.habits = replace(query.habits, trigger=self.draws.choice(TRIGGERS))
        return True

    # --- ordinary consumers -----------------------------------------------------------------------------------------

    def _other(self) -> OrdinaryMember | None:
        living = [other for other in self.scene.others if other.process.alive and not other.process.frozen]
        return self.draws.choice(living) if living else None

    def _add_other(self) -> bool:
        if sum(other.process.alive for other in self.scene.others) >= OTHERS_MAX:
            return False
        self.scene.start_other()
        return True

    def _kill_other(self) -> bool:
        if (other := self._other()) is None:
            return False
        other.end()
        return True

    def _freeze_other(self) -> bool:
        if (other := self._other()) is None:
            return False
        self._freeze(other.process.freeze, other.process.thaw)
        return True

    def _leave_other(self) -> bool:
        if (other := self._other()) is None:
            return False
        other.leave()
        return True

    # --- operators ---------------------------------------------------------------------------------------------------

    def _rewind(self) -> bool:
        """By Kafka's own tool."""
        operator, targets = self.scene.operator, partial(self._targets, self.draws)
        return operator.begin(lambda: operator.by_kafkas_tool(targets))

    def _reset(self) -> bool:
        """By spark-group reset, with all tables."""
        operator, draws = self.scene.operator, self.draws
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

    # --- the cluster ------------------------------------------------------------------------------------------------

    def _lose_broker(self) -> bool:
        """No broker for a while; the next coordinator starts every session anew."""
        self.scene.cluster.unreachable(self.draws.choice(OUTAGES_MS))
        return True

    def _grow_topic(self) -> bool:
        scene = self.scene
        if len(scene.partitions()) >= PARTITIONS_MAX or not scene.cluster.topics:
            return False
        topic = self.draws.choice(sorted(scene.cluster.topics))
        for tp in scene.cluster.grow(topic, slow_ms=self.draws.choice(SLOW_MS)):
            scene.truth.add_partition(tp, 0)
        return True

    def _hold_records(self) -> bool:
        """A producer's transaction stays open: under read_committed nothing behind its beginning is read."""
        scene = self.scene
        tps = scene.partitions()
        if not tps:
            return False
        tp = self.draws.choice(tps)
        log = scene.cluster.log(tp)
        if log is None or log.held is not None:
            return False
        log.held = log.end
        self.world.at(self.draws.between(500, 20_000), lambda: scene.release(tp))
        return True

    def _log(self) -> tuple[TopicPartition, Log] | None:
        tps = self.scene.partitions()
        if not tps:
            return None
        tp = self.draws.choice(tps)
        log = self.scene.cluster.log(tp)
        return None if log is None or log.first == log.end else (tp, log)

    def _age_log(self) -> bool:
        """Retention takes records, read or not."""
        if (found := self._log()) is None:
            return False
        tp, log = found
        self.scene.cluster.age(tp, self.draws.between(log.first, log.end))
        self.world.note(f"{tp} begins at {log.first} now")
        self.scene.truth.gone(tp, log.first)
        return True

    def _shrink_log(self) -> bool:
        """A leader was elected that does not have the last records."""
        if (found := self._log()) is None:
            return False
        tp, log = found
        self.scene.cluster.shrink(tp, log.end - self.draws.between(1, 8))
        self.world.note(f"{tp} ends at {log.end} now")
        self.scene.truth.shrunk(tp, log.end)
        return True

    def _delete_topic(self) -> bool:
        """Deleted, and after a while made again."""
        scene = self.scene
        if scene.deleted or self.draws.chance(0.5):
            return False
        topic = self.draws.choice(sorted(scene.cluster.topics))
        scene.delete(topic)
        self.world.at(self.draws.choice([10, 1_500, 8_000]), lambda: scene.make_again(topic))
        return True

    def _new_topic(self) -> bool:
        """One that a pattern matches."""
        scene = self.scene
        patterns = any("subscribePattern" in query.habits.options for query in scene.queries)
        if not patterns or len(scene.partitions()) >= PARTITIONS_MAX:
            return False
        name = f"new{self.happened.get('new_topic', 0)}"
        scene.cluster.create(name, self.draws.randint(1, 2), slow_ms=self.draws.choice(SLOW_MS))
        for tp in scene.partitions():
            if tp.topic == name:
                scene.truth.add_partition(tp, 0)
        return True
