"""The simulated Kafka: topics with their logs, groups, transactions, and whether brokers can be reached.

Runs in: tests. What the fakes of the client library talk to (``SimulatedEnvironment``). Deliberately absent: brokers of
their own, records (only where a log begins and ends), compaction.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kit.kafka_group import Books, Group
from kit.misfortune import Misfortune
from kit.transactions import Transactions
from kit.world import Process, Thread, World
from spark_group_source.model import TopicPartition

UPDATE_MS = (50, 5_000)
"""Time from a change of topics until the members of a group know it."""
REPORTS_EPOCHS_SHARE = 0.8
"""Share of the histories whose brokers report leader epochs; in the others only a short log shows a truncation."""


@dataclass(slots=True)
class Log:
    """One partition. Offsets are of the next record; ``held`` is where an open transaction of records starts."""

    first: int = 0
    end: int = 0
    held: int | None = None
    serves_from_ms: int = 0  # until then metadata has the partition, but no broker serves it
    leader_from_ms: int = 0  # until then it has no leader, as all brokers with its log are down
    is_silent: bool = False  # metadata still has its leader meanwhile, which does not answer
    epoch: int = 0  # of its leader
    begins: dict[int, int] = field(default_factory=dict)  # leader epochs after the first, and where each begins

    @property
    def stable(self) -> int:
        """The last stable offset."""
        return self.end if self.held is None else min(self.held, self.end)

    def elect(self) -> None:
        """Another leader continues at the end of the log."""
        self.epoch += 1
        self.begins = {epoch: at for epoch, at in self.begins.items() if at < self.end} | {self.epoch: self.end}

    def epoch_of(self, offset: int) -> int:
        """The epoch of the leader that wrote this record."""
        return max((epoch for epoch, at in self.begins.items() if at <= offset), default=0)

    def epoch_end(self, epoch: int) -> int | None:
        """Where the records of this leader epoch and of earlier ones end; None: no leader had it yet."""
        later = [at for other, at in self.begins.items() if other > epoch]
        return None if epoch > self.epoch else min(later, default=self.end)


@dataclass(slots=True)
class Topic:
    """A topic as it is now. When it is recreated, it has another id."""

    id: str
    known_from_ms: int = 0  # until then no broker knows it
    logs: list[Log] = field(default_factory=list)


class Cluster:
    """Everything that outlives the processes.

    Args:
        kind: the protocol of groups that are made on demand.
        books: receives what really happens; None where a test checks it itself.
    """

    def __init__(self, world: World, kind: type[Group], books: Books | None = None) -> None:
        self.world = world
        self.kind = kind
        self.books: Books = books or Books()
        self.topics: dict[str, Topic] = {}
        self.groups: dict[str, Group] = {}
        self.transactions = Transactions(world)
        self.transactions_allowed = True
        self.had_transactions = True  # whether they were allowed at the start
        self.misfortune = Misfortune()
        self.reports_epochs = world.draws("epochs").chance(REPORTS_EPOCHS_SHARE)
        self.offsets_max: int | None = None  # of one commit request; None: no limit
        self.commits_refused = 0  # because of their size
        self.denied_until_ms: dict[str, int] = {}  # by topic: until then the queries' user may not read it
        self.denials = 0
        self.stalls_ms: dict[Thread, int] = {}  # by thread: how long its next request through an admin client waits
        self.silent_until_ms = 0  # until then the leader of a partition does not answer
        self.late_commits_ms: dict[str, int] = {}  # by process: how long its next offset commit is on its way
        self.producers: Counter[str] = Counter()  # how many each process made
        self.consumers: dict[str, list[Any]] = {}  # that each process made
        self._created = 0
        self._clients: Counter[tuple[str, str]] = Counter()

    # --- topics -----------------------------------------------------------------------------------------------------

    def create(self, name: str, partitions: int, *, first: int = 0, slow_ms: int = 0) -> None:
        """Create a topic; for ``slow_ms`` metadata does not have it, and then for as long again no broker serves it."""
        self._created += 1
        known_ms = self.world.now_ms + slow_ms
        self.topics[name] = Topic(f"{name}-id{self._created}", known_ms)
        self._add(name, partitions, first, known_ms + slow_ms)

    def grow(self, name: str, count: int = 1, *, slow_ms: int = 0) -> list[TopicPartition]:
        """Add partitions, which no broker serves for ``slow_ms``."""
        return self._add(name, count, 0, self.world.now_ms + slow_ms)

    def delete(self, name: str) -> None:
        """Delete a topic, with its records and committed offsets."""
        gone = [TopicPartition(name, p) for p in range(len(self.topics.pop(name).logs))]
        for group in self.groups.values():
            group.forget(gone)
        self._update_groups()

    def _add(self, name: str, count: int, first: int, serves_from_ms: int) -> list[TopicPartition]:
        logs = self.topics[name].logs
        begin = len(logs)
        logs += [Log(first, first, serves_from_ms=serves_from_ms) for _ in range(count)]
        self._update_groups()
        return [TopicPartition(name, begin + p) for p in range(count)]

    def _update_groups(self) -> None:
        for group in self.groups.values():
            if self.world.now_ms == 0:
                group.set_topics(self.counts())
            else:
                delay_ms = self.world.draws("topics are heard of").between(*UPDATE_MS)
                self.world.at(delay_ms, lambda group=group: group.set_topics(self.counts()))  # type: ignore[misc]

    def counts(self) -> dict[str, int]:
        return {name: len(topic.logs) for name, topic in self.topics.items()}

    def log(self, tp: TopicPartition) -> Log | None:
        topic = self.topics.get(tp.topic)
        return topic.logs[tp.partition] if topic is not None and tp.partition < len(topic.logs) else None

    def partitions(self) -> list[TopicPartition]:
        return [TopicPartition(name, p) for name, count in sorted(self.counts().items()) for p in range(count)]

    def led_partitions(self) -> list[TopicPartition]:
        """The partitions that have a leader."""
        topics, now_ms = sorted(self.topics.items()), self.world.now_ms
        return [
            TopicPartition(name, p)
            for name, topic in topics
            for p, log in enumerate(topic.logs)
            if log.leader_from_ms <= now_ms
        ]

    def is_leaderless(self, tp: TopicPartition) -> bool:
        log = self.log(tp)
        return log is not None and log.leader_from_ms > self.world.now_ms

    # --- records ----------------------------------------------------------------------------------------------------

    def produce(self, tp: TopicPartition, count: int) -> None:
        self._log(tp).end += count

    def age(self, tp: TopicPartition, first: int) -> None:
        """Delete the records below ``first``, as retention does."""
        log = self._log(tp)
        log.first = min(max(log.first, first), log.end)

    def shrink(self, tp: TopicPartition, end: int) -> None:
        """Elect a leader that does not have the records from ``end`` on."""
        log = self._log(tp)
        log.end = max(min(log.end, end), log.first)
        log.elect()

    def _log(self, tp: TopicPartition) -> Log:
        log = self.log(tp)
        if log is None:
            raise KeyError(tp)
        return log

    def is_too_large(self, offsets: int) -> bool:
        """Whether a commit of so many offsets does not fit into the coordinator's log."""
        refused = self.offsets_max is not None and offsets > self.offsets_max
        self.commits_refused += refused
        return refused

    def is_denied(self, topics: Iterable[str]) -> bool:
        """Whether the user of the queries lacks the right to read one of these topics."""
        denied = any(self.denied_until_ms.get(topic, 0) > self.world.now_ms for topic in topics)
        self.denials += denied
        return denied

    # --- groups, and reaching them ----------------------------------------------------------------------------------

    def group(self, name: str) -> Group:
        if name not in self.groups:
            self.groups[name] = self.kind(self.world, self.counts(), self.books)
        return self.groups[name]

    def led_since_ms(self, tp: TopicPartition) -> int:
        """Since when the partition has a leader, if that is long ago; else when it will have one."""
        log = self.log(tp)
        return 0 if log is None else log.leader_from_ms

    def is_silent(self, tp: TopicPartition) -> bool:
        """Whether the leader of the partition does not answer."""
        log = self.log(tp)
        return log is not None and log.is_silent and log.leader_from_ms > self.world.now_ms

    def unreachable(self, ms: int) -> None:
        """Let no broker answer for so long; sessions start again afterwards."""
        self.world.note(f"no broker can be reached for {ms} ms")
        if self.world.now_ms >= self.world.down_until_ms:
            self.world.down_from_ms = self.world.now_ms
        self.world.down_until_ms = max(self.world.down_until_ms, self.world.now_ms + ms)

    def client_number(self, process: Process, kind: str) -> int:
        """A number that distinguishes one client of the library from the others in its process."""
        self._clients[process.name, kind] += 1
        return self._clients[process.name, kind]

    # --- clients of the library -------------------------------------------------------------------------------------

    def consumer(self, process: Process, settings: Mapping[str, Any]) -> Any:
        from kit.fake_consumer import FakeConsumer

        consumer = FakeConsumer(process, self, settings)
        self.consumers.setdefault(process.name, []).append(consumer)
        return consumer

    def producer(self, process: Process, settings: Mapping[str, Any]) -> Any:
        from kit.fake_producer import FakeProducer

        self.producers[process.name] += 1
        return FakeProducer(process, self, settings)

    def admin(self, process: Process, settings: Mapping[str, Any]) -> Any:
        from kit.fake_admin import FakeAdmin

        return FakeAdmin(process, self, settings)
