"""Helpers for topics, records and offsets of a real Kafka, and for waiting.

Runs in: tests. Deliberately absent: fixtures (``conftest.py``), which bind these helpers to the broker of the test
run. It is a module of its own because every ``conftest.py`` has the same name, and a type must not be defined twice.
"""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
)
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs re-export these without saying so
    AdminClient,
    NewTopic,
    OffsetSpec,
)

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.kafka.admin import EpochEnds
from spark_group_source.model import TopicPartition

T = TypeVar("T")

ADMIN_S = 300
"""Limit of one request to Kafka's admin API, and of delivering the records of one ``produce``."""
SASL_USER, SASL_PASSWORD = "etl", "open-sesame-5b21"
"""The user that the shared test broker accepts at ``broker.sasl_bootstrap_servers``."""

POLL_S = 0.02
"""Pause between two checks of :func:`await_until` and :func:`await_progress`."""

STALLED_S = 600.0
"""Limit for detecting a hang: even on a busy machine, a log line or a commit happens within it."""

STACK_LINES_MAX = 6
"""Frames of each thread in the report of a condition that did not come true."""

NOT_SERVED_YET = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    }
)
"""Kafka's error codes for a partition between its creation and its leader's first response."""


class Record(NamedTuple):
    """A record to produce. ``partition`` None lets the producer choose by key; ``timestamp_ms`` None means now."""

    value: bytes | None = None
    key: bytes | None = None
    partition: int | None = None
    timestamp_ms: int | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class TopicFactory(Protocol):
    def __call__(
        self, partitions: int = 1, *, config: Mapping[str, str] | None = None, name: str | None = None
    ) -> str: ...


class Produce(Protocol):
    def __call__(
        self, topic: str, records: Iterable[bytes | str | Record], *, partition: int | None = None
    ) -> list[tuple[int, int]]: ...


Offsets = dict[TopicPartition, int]


def sasl(password: str) -> dict[str, str]:
    """Return the options of a query that authenticates as :data:`SASL_USER`."""
    login = "org.apache.kafka.common.security.plain.PlainLoginModule"
    return {
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": f'{login} required username="{SASL_USER}" password="{password}";',
    }


def await_until(predicate: Callable[[], T], deadline_s: float = STALLED_S, *, what: str = "") -> T:
    """Call ``predicate`` until its result is true, and return it; fail the test after ``deadline_s``."""
    return _await(predicate, lambda: None, deadline_s, what, "within")


def await_progress(
    condition: Callable[[], T], progress: Callable[[], object], stalled_s: float = STALLED_S, *, what: str = ""
) -> T:
    """Call ``condition`` until its result is true, and return it, however long it takes.

    Args:
        progress: anything that compares unequal after each step towards the condition: the length of a log, rows,
            members. A tuple combines several.
        stalled_s: the test fails, with the stacks of its threads, when ``progress`` has not changed for so long.
    """
    return _await(condition, progress, stalled_s, what, "while nothing changed for")


def size_of(*files: Path) -> int:
    """Return the total bytes of these files, as the progress of processes that log to them; a missing file counts as
    0."""
    total = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # not written yet, or removed meanwhile
            total += file.stat().st_size
    return total


def contents_of(files: Iterable[Path]) -> dict[Path, bytes]:
    """Return the contents of the regular files among these, without those that a process removes meanwhile."""
    found = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            if file.is_file():
                found[file] = file.read_bytes()
    return found


def _await(condition: Callable[[], T], progress: Callable[[], object], bound_s: float, what: str, bound: str) -> T:
    pause = threading.Event()
    at = progress()
    end_s = time.monotonic() + bound_s
    while True:
        last = condition()
        if last:
            return last
        if (now := progress()) != at:
            at, end_s = now, time.monotonic() + bound_s
        elif time.monotonic() >= end_s:
            name = what or getattr(condition, "__name__", "the condition")
            sys.stderr.write(_stacks())
            pytest.fail(f"{name} did not hold {bound} {bound_s} s; last: {last!r}; progress: {at!r}")
        pause.wait(POLL_S)


def _stacks() -> str:
    """Return the stacks of all threads of this process, to find what a condition waits for."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        f"--- {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame)[-STACK_LINES_MAX:])}"
        for ident, frame in sys._current_frames().items()
    )


def create_topic(
    admin: AdminClient, name: str, partitions: int = 1, *, config: Mapping[str, str] | None = None, replicas: int = -1
) -> str:
    """Create a topic and return its name once every partition is served by its leader."""
    new = NewTopic(name, num_partitions=partitions, replication_factor=replicas, config=dict(config or {}))
    admin.create_topics([new])[name].result(ADMIN_S)
    await_served(admin, name, partitions)
    return name


def await_served(admin: AdminClient, name: str, partitions: int) -> None:
    """Wait until every partition is served by its leader.

    Metadata names a leader before that broker serves the partition. A record sent in between is refused, sent again,
    and may end up behind the records that were sent after it.
    """

    def served() -> bool:
        metadata = admin.list_topics(name, timeout=ADMIN_S).topics[name]
        if metadata.error is not None or len(metadata.partitions) != partitions:
            return False
        try:
            return len(end_offsets_of(admin, name)) == partitions
        except KafkaException as exc:
            if exc.args[0].code() not in NOT_SERVED_YET:
                raise
            return False

    await_until(served, ADMIN_S, what=f"a leader that serves every partition of {name}")


def produce_to(
    producer: Producer, topic: str, records: Iterable[bytes | str | Record], *, partition: int | None = None
) -> list[tuple[int, int]]:
    """Write records in order and return (partition, offset) of each, in the same order, when all are acknowledged."""
    placed: dict[int, tuple[int, int]] = {}
    errors: list[KafkaError] = []

    def delivery(number: int) -> Callable[[KafkaError | None, Message], None]:
        def report(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                errors.append(error)
            else:
                placed[number] = (message.partition(), message.offset())  # type: ignore[assignment]  # delivered

        return report

    count = 0
    for given in records:
        record = given if isinstance(given, Record) else Record(given.encode() if isinstance(given, str) else given)
        where = record.partition if record.partition is not None else partition
        options: dict[str, Any] = {} if where is None else {"partition": where}  # Any: each option has its own type
        if record.timestamp_ms is not None:
            options["timestamp"] = record.timestamp_ms
        if record.headers:
            options["headers"] = list(record.headers)
        while True:
            try:
                producer.produce(topic, value=record.value, key=record.key, on_delivery=delivery(count), **options)
                break
            except BufferError:  # the producer's queue is full: let it send
                producer.poll(1)
        count += 1
    left = producer.flush(ADMIN_S)
    if errors or left:
        raise KafkaException(errors[0]) if errors else TimeoutError(f"{left} records not delivered in {ADMIN_S} s")
    return [placed[number] for number in range(count)]


def committed_of(admin: AdminClient, group: str) -> Offsets:
    """Return the group's committed offsets (waits for pending transactions)."""
    return {tp: offset for tp, (offset, _) in noted_of(admin, group).items()}


def noted_of(admin: AdminClient, group: str) -> dict[TopicPartition, tuple[int, str]]:
    """Return the group's committed offsets with their notes.

    A plain consumer reads them, because librdkafka's admin client ends the process with a segmentation fault if the
    group's coordinator is moving or loading, or cannot write in time.
    """
    metadata = admin.list_topics(timeout=ADMIN_S)
    servers = ",".join(f"{broker.host}:{broker.port}" for broker in metadata.brokers.values())
    partitions = [KafkaTopicPartition(name, p) for name, topic in metadata.topics.items() for p in topic.partitions]
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "enable.auto.commit": False, "log_level": 0})
    try:
        found = consumer.committed(partitions, timeout=ADMIN_S)
    finally:
        consumer.close()
    return {TopicPartition(at.topic, at.partition): (at.offset, at.metadata or "") for at in found if at.offset >= 0}


def set_committed(admin: AdminClient, group: str, topic: str, offsets: Mapping[int, int]) -> None:
    """Set offsets (partition -> offset) of a group without members, as ``kafka-consumer-groups --reset-offsets``
    does."""
    entries = [KafkaTopicPartition(topic, p, offset) for p, offset in offsets.items()]
    admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, entries)])[group].result(ADMIN_S)


def end_offsets_of(admin: AdminClient, topic: str, isolation: IsolationLevel | None = None) -> Offsets:
    """Return the end offset of every partition of the topic; with an isolation level, as its readers see it."""
    partitions = admin.list_topics(topic, timeout=ADMIN_S).topics[topic].partitions
    specs = {KafkaTopicPartition(topic, p): OffsetSpec.latest() for p in partitions}
    futures = admin.list_offsets(specs, isolation_level=isolation or IsolationLevel.READ_UNCOMMITTED)
    return {TopicPartition(tp.topic, tp.partition): future.result(ADMIN_S).offset for tp, future in futures.items()}


def epoch_ends_of(ends: EpochEnds, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
    """Read the ends of leader epochs until every partition is answered: on a busy machine one read may leave
    partitions out, or have no answer."""
    found: dict[TopicPartition, int | None] = {}

    def are_answered() -> bool:
        with contextlib.suppress(BrokerUnavailable):
            found.update(ends.read({tp: epoch for tp, epoch in epochs.items() if tp not in found}))
        return found.keys() == epochs.keys()

    await_until(are_answered, what="an answer for each partition")
    return found


def await_markers(admin: AdminClient, topic: str) -> None:
    """Wait until the topic has no open transaction: a broker writes the markers after it has confirmed the
    transaction."""

    def ended() -> bool:
        return end_offsets_of(admin, topic, IsolationLevel.READ_COMMITTED) == end_offsets_of(admin, topic)

    await_until(ended, ADMIN_S, what=f"markers of all transactions in {topic}")
