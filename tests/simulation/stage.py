"""Runs a script of threads and Kafka clients in the simulation or with a real broker.

The same script on both validates the fakes.
"""

import contextlib
import functools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from kafka_helpers import TopicFactory
from kit.classic_group import ClassicGroup, CooperativeGroup
from kit.cluster import Cluster
from kit.consumer_group import ConsumerGroup
from kit.environment import SimulatedEnvironment
from kit.kafka_group import Group
from kit.world import Process, World

from spark_group_source.kafka.environment import Environment

SESSION_MS = 6_000
"""The shortest session timeout that a broker accepts by default."""
PATIENCE_S = 300.0
"""Bound of a wait: it ends a hang. A busy broker needs a minute for rebalances of a large group."""
POLL_S = 0.1
FLAVOURS: Mapping[str, type[Group]] = {
    "range": ClassicGroup,
    "cooperative-sticky": CooperativeGroup,
    "consumer": ConsumerGroup,
}
CLASSIC = ("range", "cooperative-sticky")


class Stage:
    """A broker, a group of one flavour, and threads.

    Args:
        servers, make_topic: of a real broker; without them the script runs in the simulation.
        world, cluster: of another stage in the simulation, to which this stage adds a process.
    """

    def __init__(
        self,
        flavour: str,
        group: str,
        *,
        servers: str = "",
        make_topic: TopicFactory | None = None,
        world: World | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.flavour, self.group, self.simulated = flavour, group, not servers
        self.servers = servers or "simulated:9092"
        self._make_topic = make_topic
        self.world = world or World(7)
        self.cluster = cluster or Cluster(self.world, FLAVOURS[flavour])
        self.process = Process(self.world, "p" if world is None else "q")
        self.environment: Environment = (
            SimulatedEnvironment(self.process, self.cluster) if self.simulated else Environment()
        )

    def elsewhere(self) -> "Stage":
        """Return a stage for another process of the same world."""
        return Stage(self.flavour, self.group, world=self.world, cluster=self.cluster)

    def topic(self, partitions: int) -> str:
        if self._make_topic is not None:
            return self._make_topic(partitions)
        self.cluster.create("t", partitions)
        self.cluster.group(self.group).session_ms = SESSION_MS
        return "t"

    def play(self, script: Callable[[], None]) -> None:
        """Run a script to its end."""
        if not self.simulated:
            script()
            return
        thread = self.process.spawn("script", script)
        self.world.run_until(1_000_000, stop=lambda: not thread.is_alive())
        assert not thread.is_alive()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline_ms = self.environment.now_ms() + PATIENCE_S * 1000
        while not holds():
            assert self.environment.now_ms() < deadline_ms, f"no {what} within {PATIENCE_S:.0f} s"
            self.environment.pause(0.05)

    def settings(self, client_id: str = "c", instance: str | None = None, **more: str) -> dict[str, Any]:
        found = {
            "bootstrap.servers": self.servers,
            "group.id": self.group,
            "client.id": client_id,
            "enable.auto.commit": "false",
            "log_level": 0,
            **({} if instance is None else {"group.instance.id": instance}),
        }
        if self.flavour == "consumer":
            return found | {"group.protocol": "consumer"} | more
        return (
            found
            | {
                "group.protocol": "classic",
                "partition.assignment.strategy": self.flavour,
                "session.timeout.ms": str(SESSION_MS),
                "heartbeat.interval.ms": "1000",
                "max.poll.interval.ms": "30000",
            }
            | more
        )

    def producer(self, transactional_id: str) -> Any:
        settings = {"bootstrap.servers": self.servers, "transactional.id": transactional_id, "log_level": 0}
        return self.environment.producer(settings)

    def committed(self, tps: list[KafkaPartition], *, stable: bool) -> list[tuple[int, str]]:
        """Return the offset and note of each partition, as read by a consumer that never joins."""
        level = "read_committed" if stable else "read_uncommitted"
        settings = {"bootstrap.servers": self.servers, "group.id": self.group, "isolation.level": level}
        reader = self.environment.consumer({**settings, "group.protocol": "classic", "enable.auto.commit": "false"})
        try:
            return [(p.offset, p.metadata or "") for p in reader.committed(tps, timeout=10)]
        finally:
            reader.close()


class Watched:
    """A consumer on a thread of its own, with a log of its callbacks.

    Args:
        hold_s: how long it holds a revocation.
        before_release: called inside the callback, at the end of that time.
        client_id: its client.id, if that is not ``name``.
    """

    def __init__(
        self,
        stage: Stage,
        topic: str,
        name: str,
        *,
        instance: str | None = None,
        hold_s: float = 0.0,
        before_release: Callable[[Any], None] | None = None,
        client_id: str = "",
    ) -> None:
        self._client_id = client_id or name
        self.stage, self.name, self.hold_s, self.before_release = stage, name, hold_s, before_release
        self.callbacks: list[tuple[str, tuple[int, ...]]] = []
        self.owned: set[int] = set()
        self.failed: KafkaError | None = None
        self.ended = False
        self.identity: tuple[str | None, bytes] = (None, b"")
        self._topic, self._instance = topic, instance
        self._incremental = stage.flavour != "range"
        self._how = ""
        self._died: list[BaseException] = []
        stage.environment.spawn(name, self._run, died=self._died.append)

    def stop(self, how: str = "close") -> None:
        """Close it ("close"), leave first ("leave"), or only drop it ("drop")."""
        self._how = how
        self.stage.until(lambda: self.ended or bool(self._died), f"end of {self.name}")
        assert not self._died, self._died

    @property
    def generation(self) -> int:
        """The generation in :attr:`identity`, a native int32 after ``CGMDv2:``; -1 before the first poll."""
        return -1 if not self.identity[1] else int(struct.unpack_from("=i", self.identity[1], 7)[0])

    def count(self, kind: str) -> int:
        return sum(called == kind for called, _ in self.callbacks)

    def _run(self) -> None:
        consumer = self.stage.environment.consumer(self.stage.settings(self._client_id, self._instance))
        consumer.subscribe([self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)
        while not self._how and self.failed is None:
            self._poll(consumer)
        if self._how == "leave":
            consumer.unsubscribe()
            for _ in range(10):
                self._poll(consumer)
        if self._how != "drop":
            # The binding raises SystemError when a callback's error was still pending; the consumer is closed.
            with contextlib.suppress(SystemError):
                consumer.close()
        self.ended = True

    def _poll(self, consumer: Any) -> None:
        message = consumer.poll(POLL_S)
        if message is not None and message.error().code() == KafkaError._FATAL:
            self.failed = message.error()
        self.identity = (consumer.memberid(), consumer.consumer_group_metadata())

    def _on_assign(self, consumer: Any, partitions: list[KafkaPartition]) -> None:
        self._record("assigned", consumer, partitions)
        (consumer.incremental_assign if self._incremental else consumer.assign)([])
        self.owned |= {p.partition for p in partitions}

    def _on_revoke(self, consumer: Any, partitions: list[KafkaPartition]) -> None:
        self._record("revoked", consumer, partitions)
        if partitions and self.hold_s:
            self.stage.environment.pause(self.hold_s)
            if self.before_release is not None:
                self.before_release(consumer)
        self._release(consumer, partitions)

    def _on_lost(self, consumer: Any, partitions: list[KafkaPartition]) -> None:
        self._record("lost", consumer, partitions)
        self._release(consumer, partitions)

    def _release(self, consumer: Any, partitions: list[KafkaPartition]) -> None:
        self.owned -= {p.partition for p in partitions}
        if self._incremental:
            consumer.incremental_unassign([])
        else:
            consumer.unassign()

    def _record(self, kind: str, consumer: Any, partitions: list[KafkaPartition]) -> None:
        self.identity = (consumer.memberid(), consumer.consumer_group_metadata())
        self.callbacks.append((kind, tuple(sorted(p.partition for p in partitions))))


def played(*flavours: str, broker: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a script, which runs on a thread of the stage ``play``: once for each flavour of the group in the
    simulation, and with ``broker`` also on a real one."""
    params = [pytest.param((flavour, False), id=flavour) for flavour in flavours]
    if broker:
        real = pytest.mark.broker
        params += [pytest.param((flavour, True), id=f"{flavour}-broker", marks=real) for flavour in flavours]

    def mark(script: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(script)
        def test(play: Stage, **more: Any) -> None:
            play.play(lambda: script(play, **more))

        marked: Callable[..., None] = pytest.mark.parametrize("play", params, indirect=True)(test)
        return marked

    return mark


def refused(act: Callable[[], Any]) -> KafkaError:
    """Return the error with which a call fails."""
    try:
        act()
    except KafkaException as exc:
        error: KafkaError = exc.args[0]
        return error
    raise AssertionError("the call was accepted")
