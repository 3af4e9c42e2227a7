"""A whole group for a few simulated minutes: drivers with the real machine, ordinary consumers, Kafka, and misfortune.

Runs in: tests. One seed is one history: :func:`run` raises :class:`Failed` with the story, and running the seed again
tells the same story. First up to a minute and a half of faults, then calm, in which everything must come to rest: each
record processed, each offset committed.

Deliberately absent (not modelled): agents and slots that are lent, changed subscriptions and deleted topics, log
retention, an operator's reset, ``startingOffsets=latest``, several groups, clocks that jump, and time inside the
machine (an event takes none).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from spark_group_source.group.machine import GroupMachine
from spark_group_source.model import TopicPartition
from spark_group_source.testing.classic_group import ClassicGroup, CooperativeGroup
from spark_group_source.testing.consumer_group import ConsumerGroup
from spark_group_source.testing.invariants import Cause, Invariants, Violation
from spark_group_source.testing.kafka_group import Group
from spark_group_source.testing.ordinary_member import OrdinaryMember
from spark_group_source.testing.spark_driver import Checkpoint, Habits, SparkDriver
from spark_group_source.testing.world import World

FAULTS_MS = (30_000, 90_000)
"""How long faults go on, drawn by the seed."""
CALM_MS_MAX = 120_000
"""By then everything must have come to rest: sessions end, places are taken again, the backlog is read."""
PRODUCE_EVERY_MS = 150
PROTOCOLS: dict[str, type[Group]] = {"eager": ClassicGroup, "cooperative": CooperativeGroup, "consumer": ConsumerGroup}


class Failed(AssertionError):
    """A rule was broken. The message is the rule, the end of the story, and how to run it again."""


@dataclass(frozen=True)
class Outcome:
    """What a history was made of, to see that the seeds are worth running."""

    seed: int
    protocol: str
    processed: int
    twice: int
    causes: dict[Cause, int]
    rebalances: int
    faults: dict[str, int]
    overruns: int
    holds: int
    runs: int
    steps: int


@dataclass
class _Query:
    """One query: its checkpoint, its habits, and the processes that ran it. The last one is the one meant to."""

    name: str
    habits: Habits
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    runs: list[SparkDriver] = field(default_factory=list)


def run(seed: int, *, machine: type[GroupMachine] = GroupMachine, protocol: str | None = None) -> Outcome:
    """Play one history.

    Raises:
        Failed: a rule did not hold.
    """
    simulation = Simulation(seed, machine, protocol)
    try:
        return simulation.play()
    except Violation as exc:
        raise Failed(
            f"{exc}\n\nthe story of seed {seed} ({simulation.protocol}):\n{simulation.world.story()}\n\n{exc}\n"
            f"again: python -m tests.simulation {seed}"
        ) from exc


class Simulation:
    """One history."""

    def __init__(self, seed: int, machine: type[GroupMachine], protocol: str | None = None) -> None:
        self.seed = seed
        self.world = world = World(seed)
        self.protocol = world.random.choice(sorted(PROTOCOLS))
        self.protocol = protocol or self.protocol
        self._machine = machine
        self._truth = Invariants(world)
        topics = {"orders": world.random.randint(1, 5), "payments": world.random.randint(1, 3)}
        self._group = PROTOCOLS[self.protocol](world, topics, self._truth)
        for tp in self._group.partitions():
            self._truth.add_partition(tp, world.random.choice([0, 0, 7]))
        self._queries = [_Query(name, self._habits()) for name in ("a", "b")[: world.random.choice([1, 1, 2])]]
        self._others: list[OrdinaryMember] = []
        self._faults: dict[str, int] = {}
        self._producing = True
        self._calm = False
        world.loss = world.random.choice([0.0, 0.0, 0.02, 0.1])
        world.delay_ms_max = world.random.choice([5, 15, 80])

    def _habits(self) -> Habits:
        random = self.world.random
        return Habits(
            slots=random.randint(1, 3),
            transactional=random.random() < 0.7,
            max_offsets=random.choice([None, 20, 5]),
            sink_ms_max=random.choice([50, 800, 3_000]),
            crash=random.choice([0.0, 0.0, 0.01, 0.04]),
        )

    def play(self) -> Outcome:
        world = self.world
        for query in self._queries:
            self._start(query)
        for _ in range(world.random.choice([0, 1, 1, 2])):
            self._start_other()
        self._produce()
        self._misfortune()
        world.run_until(world.between(*FAULTS_MS))
        self._begin_calm()
        # Some records after the last fault show that everything works again.
        world.run_until(world.now_ms + 10_000)
        self._producing = False
        world.run_until(world.now_ms + CALM_MS_MAX, stop=self._truth.finished)
        self._truth.finish()
        return self._outcome()

    # --- what goes on -----------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        if self._producing:
            tp = self.world.random.choice(self._group.partitions())
            self._truth.produce(tp, self.world.random.randint(1, 6))
            self.world.at(self.world.between(1, PRODUCE_EVERY_MS), self._produce)

    def _start(self, query: _Query) -> None:
        driver = SparkDriver(
            self.world,
            self._group,
            self._truth,
            query.checkpoint,
            query=query.name,
            number=len(query.runs) + 1,
            habits=query.habits,
            machine=self._machine,
            on_end=lambda ended: self._on_end(query, ended),
        )
        query.runs.append(driver)
        driver.start()

    def _on_end(self, query: _Query, ended: SparkDriver) -> None:
        """Whoever runs the queries starts one again that ended, at once or after more than a session."""
        if ended is query.runs[-1]:
            delay_ms = self.world.random.choice([100, 1_500, 4_000, 12_000])
            self.world.at(delay_ms, lambda: None if ended is not query.runs[-1] else self._start(query))

    def _start_other(self) -> None:
        other = OrdinaryMember(self.world, self._group, self._truth, name=f"other{len(self._others) + 1}")
        self._others.append(other)
        other.start()

    def _begin_calm(self) -> None:
        world = self.world
        world.note("--- calm ---")
        self._calm = True
        world.loss, world.down_until_ms = 0.0, world.now_ms
        # A static member that was replaced between "this partition moves" and its own rejoin never gives it back: under
        # the cooperative protocol that partition has no owner until the next rebalance, here as in a real Kafka.
        self._group.on_topics_changed()
        for query in self._queries:
            query.habits = Habits(slots=query.habits.slots, transactional=query.habits.transactional, sink_ms_max=100)
            for driver in query.runs:
                driver.habits = query.habits
                if driver.process.alive and driver.process.frozen:
                    driver.process.thaw()
        for other in self._others:
            if other.process.alive and other.process.frozen:
                other.process.thaw()

    # --- misfortune -------------------------------------------------------------------------------------------------

    def _misfortune(self) -> None:
        if self._calm:
            return
        faults = [
            self._kill_driver,
            self._freeze_driver,
            self._replace_driver,
            self._stop_driver,
            self._break_member,
            self._slow_sink,
            self._kill_other,
            self._freeze_other,
            self._leave_other,
            self._add_other,
            self._add_other,
            self._lose_broker,
            self._grow_topic,
        ]
        fault = self.world.random.choice(faults)
        if fault():
            name = fault.__name__.strip("_")
            self._faults[name] = self._faults.get(name, 0) + 1
        self.world.at(self.world.between(500, 9_000), self._misfortune)

    def _driver(self) -> SparkDriver | None:
        driver = self.world.random.choice(self._queries).runs[-1]
        return driver if driver.process.alive and not driver.process.frozen else None

    def _other(self) -> OrdinaryMember | None:
        living = [other for other in self._others if other.process.alive and not other.process.frozen]
        return self.world.random.choice(living) if living else None

    def _kill_driver(self) -> bool:
        if (driver := self._driver()) is None:
            return False
        driver.end("killed")
        return True

    def _stop_driver(self) -> bool:
        if (driver := self._driver()) is None:
            return False
        driver.stop(leave=self.world.chance(0.5))
        return True

    def _freeze_driver(self) -> bool:
        if (driver := self._driver()) is None:
            return False
        self._freeze(driver.process.freeze, driver.process.thaw)
        return True

    def _replace_driver(self) -> bool:
        """Taken for dead, it is started again elsewhere; then the first one goes on: a zombie."""
        query = self.world.random.choice(self._queries)
        driver = query.runs[-1]
        if not driver.process.alive or driver.process.frozen:
            return False
        self._freeze(driver.process.freeze, driver.process.thaw)
        self.world.at(
            self.world.between(10, 4_000), lambda: None if driver is not query.runs[-1] else self._start(query)
        )
        return True

    def _freeze(self, freeze: Callable[[], None], thaw: Callable[[], None]) -> None:
        freeze()
        ms = self.world.random.choice([200, 3_000, 9_000, 14_000])
        self.world.at(ms + self.world.between(0, 2_000), thaw)

    def _break_member(self) -> bool:
        if (driver := self._driver()) is None:
            return False
        driver.break_member()
        return True

    def _slow_sink(self) -> bool:
        """The sink takes longer than a revocation may be held, for a while."""
        if (driver := self._driver()) is None:
            return False
        usual = driver.habits
        driver.habits = Habits(**{**vars(usual), "sink_ms_max": 20_000})

        def usual_again() -> None:
            if not self._calm:
                driver.habits = usual

        self.world.at(15_000, usual_again)
        return True

    def _add_other(self) -> bool:
        if sum(other.process.alive for other in self._others) >= 3:
            return False
        self._start_other()
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

    def _lose_broker(self) -> bool:
        """No coordinator for a while; the next one starts every session anew."""
        self.world.down_until_ms = self.world.now_ms + self.world.random.choice([300, 2_000, 6_000])
        return True

    def _grow_topic(self) -> bool:
        if len(self._group.partitions()) >= 12:
            return False
        topic = self.world.random.choice(sorted(self._group.topics))
        self._truth.add_partition(TopicPartition(topic, self._group.topics[topic]), 0)
        self._group.grow(topic)
        return True

    def _outcome(self) -> Outcome:
        runs = [driver for query in self._queries for driver in query.runs]
        return Outcome(
            seed=self.seed,
            protocol=self.protocol,
            processed=self._truth.processed,
            twice=self._truth.twice,
            causes=dict(self._truth.causes),
            rebalances=self._group.rebalances,
            faults=self._faults,
            overruns=sum(driver.machine.statistics().overruns for driver in runs),
            holds=sum(driver.holds for driver in runs),
            runs=len(runs),
            steps=self.world.steps,
        )
