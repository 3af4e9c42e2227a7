"""Records that are produced while members join and leave, and the account at the end: each is processed once.

Runs in: tests. The produced records are read from Kafka's admin API; the processed ones from the runs' sinks and the
ordinary consumers' files.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient
from delta_files import living_rows
from kafka_helpers import (
    ADMIN_S,
    POLL_S,
    Offsets,
    await_progress,
    await_until,
    committed_of,
    end_offsets_of,
)

from rebalance.ordinary import OrdinaryConsumer
from spark_group_source.model import TopicPartition

ANSWER_S = 5
FLOW_PAUSE_S = 0.05
Record = tuple[str, int, int]
T = TypeVar("T")
MOVING_CODES = frozenset(
    {
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
    }
)
"""Errors of Kafka while a broker is down or a group's coordinator moves."""


class Recorded(Protocol):
    """A run, in this process or in one of its own."""

    @property
    def records(self) -> list[Record]: ...


class Flow:
    """Produce records at an even pace to every partition of ``topic``, until the block ends.

    Args:
        value: of the record with this number.
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        partitions: int,
        *,
        per_s: int = 200,
        value: Callable[[int], bytes] = lambda number: b"%d" % number,
    ) -> None:
        self.topic, self.partitions, self.per_s, self._value = topic, partitions, per_s, value
        self.sent = 0
        self.failed: list[KafkaError] = []
        self._left = 0
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                "enable.idempotence": True,
                "reconnect.backoff.max.ms": 1000,
                "log_level": 2,
            }
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flow", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(FLOW_PAUSE_S):
            for _ in range(max(1, int(self.per_s * FLOW_PAUSE_S))):
                value, partition = self._value(self.sent), self.sent % self.partitions
                self._producer.produce(self.topic, value, partition=partition, on_delivery=self._delivered)
                self.sent += 1
            self._producer.poll(0)
        self._left = self._producer.flush(ADMIN_S)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failed.append(error)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        assert not self._left, f"{self._left} records were not delivered"
        assert not self.failed, f"the producer failed: {self.failed[:3]}"

    def __enter__(self) -> "Flow":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def produced(admin: AdminClient, topics: Iterable[str]) -> set[Record]:
    """Every record in the topics: they hold plain records from offset 0, so the end offsets are enough."""
    return {
        (tp.topic, tp.partition, offset)
        for topic in topics
        for tp, end in with_retries(partial(end_offsets_of, admin, topic)).items()
        for offset in range(end)
    }


def await_all_processed(
    admin: AdminClient,
    topics: Sequence[str],
    runs: Sequence[Recorded],
    ordinary: Sequence[OrdinaryConsumer] = (),
) -> None:
    """Wait until everything produced was processed; fail when nothing is processed for long."""

    def missing() -> set[Record]:
        for run in runs:
            if (check := getattr(run, "check", None)) is not None:
                check()
        seen = {record for run in runs for record in run.records}
        seen |= {record for member in ordinary for record in member.processed()}
        return produced(admin, topics) - seen

    left: set[Record] = set()

    def done() -> bool:
        nonlocal left
        left = missing()
        return not left

    try:
        await_progress(done, lambda: len(left), what="everything processed")
    except BaseException as exc:
        exc.add_note(f"{len(left)} records are missing, the first: {sorted(left)[:5]}")
        raise


def assert_once(
    admin: AdminClient,
    topics: Sequence[str],
    runs: Sequence[Recorded],
    ordinary: Sequence[OrdinaryConsumer] = (),
    *,
    twice: Iterable[Record] = (),
    counted: int = 0,
) -> None:
    """Assert that everything produced was processed, and each record once.

    Args:
        twice: records that may be processed twice: a member was killed or expelled before it could commit them.
        counted: the number of further duplicates that a run's own statistics allow.
    """
    await_all_processed(admin, topics, runs, ordinary)
    counts = Counter(record for run in runs for record in run.records)
    counts.update(record for member in ordinary for record in member.processed())
    doubled = {record for record, count in counts.items() if count > 1}
    unjustified = sorted(doubled - set(twice))
    who = [name for name, party in parties(runs, ordinary) if unjustified and unjustified[0] in party]
    assert len(unjustified) <= counted, f"{len(unjustified)} records were processed twice: {unjustified[:5]}, by {who}"
    assert counts.keys() == produced(admin, topics)


def records_in(table: Path) -> list[Record]:
    """The records in a Delta table with the source's columns."""
    rows = living_rows(table, ["topic", "partition", "offset"])
    return [(row["topic"], row["partition"], row["offset"]) for row in rows]


def parties(runs: Sequence[Recorded], ordinary: Sequence[OrdinaryConsumer]) -> list[tuple[str, set[Record]]]:
    found = [(f"run {i}", set(run.records)) for i, run in enumerate(runs)]
    return found + [(f"ordinary {i}", set(member.processed())) for i, member in enumerate(ordinary)]


def await_committed(admin: AdminClient, group: str, topics: Sequence[str]) -> None:
    """Assert G2: the committed offsets reach the end of what was produced, and not beyond."""
    at: Offsets = {}

    def committed() -> bool:
        nonlocal at
        at = {tp: o for tp, o in with_retries(lambda: committed_of(admin, group)).items() if tp in ends}
        return at == ends

    ends = {
        tp: end for topic in topics for tp, end in with_retries(partial(end_offsets_of, admin, topic)).items() if end
    }
    await_progress(committed, lambda: at, what="the group's offsets at the ends")


def stays(holds: Callable[[], object], for_s: float, what: str) -> None:
    """Assert continuously, for ``for_s`` seconds, that a condition holds."""
    pause = threading.Event()
    for _ in range(int(for_s / POLL_S)):
        assert holds(), f"{what} did not stay so"
        pause.wait(POLL_S)


def with_retries(request: Callable[[], T], within_s: float = ADMIN_S) -> T:
    """Return an answer of Kafka's admin API; retry while a broker is down."""
    answer: list[T] = []

    def once() -> bool:
        try:
            answer.append(request())
        except TimeoutError:
            return False
        except KafkaException as exc:
            if exc.args[0].code() not in MOVING_CODES:
                raise
            return False
        return True

    await_until(once, within_s, what="an answer of Kafka's admin API")
    return answer[0]


def measured(text: str) -> None:
    """Print a figure: visible with `pytest -s`, or in the report of a failure."""
    print(text)  # noqa: T201


class GroupView(NamedTuple):
    """A group as Kafka's admin API describes it."""

    state: str
    coordinator: int
    members: dict[str, set[TopicPartition]]
    """Partitions by instance id, else by client id."""
    clients: dict[str, str]
    """Client id by member id."""

    def of(self, client: str) -> set[TopicPartition]:
        return next((tps for name, tps in self.members.items() if client in name), set())


def describe(admin: AdminClient, group: str) -> GroupView:
    """Describe a group; retry while its coordinator moves or loads."""
    return with_retries(lambda: described(admin, group))


def described(admin: AdminClient, group: str) -> GroupView:
    """Describe a group once. The library's own timeout is out of reach, because a late answer after it aborts the whole
    process."""
    found: Any = admin.describe_consumer_groups([group], request_timeout=3600)[group].result(ANSWER_S)
    return GroupView(
        found.state.name.lower(),
        found.coordinator.id if found.coordinator is not None else -1,
        {
            m.group_instance_id or m.client_id: {
                TopicPartition(tp.topic, tp.partition) for tp in m.assignment.topic_partitions
            }
            for m in found.members
        },
        {m.member_id: m.client_id for m in found.members},
    )
