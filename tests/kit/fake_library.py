"""Shared parts of the fake clients: errors, partitions, and requests that wait for their answers.

Runs in: tests. Errors are objects of the library, with the codes, flags and texts of librdkafka 2.16 (observed with its
mock cluster and with real brokers). Deliberately absent: the contents of requests.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kit.environment import Future
from kit.kafka_group import Code, Entry
from kit.misfortune import RequestKind
from kit.wire import PendingRequest, Serve
from kit.world import Process, the_thread
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import parse_note

if TYPE_CHECKING:
    from kit.cluster import Cluster

NO_OFFSET = -1001
"""OFFSET_INVALID: no offset is committed."""


@dataclass(slots=True)
class Answered:
    """A partition of an answer. Unlike the library's own class, its error can be set."""

    topic: str
    partition: int
    offset: int = NO_OFFSET
    metadata: str | None = None
    leader_epoch: int | None = None
    error: KafkaError | None = None


class Library:
    """One client: its process, its library thread, and its settings."""

    def __init__(self, process: Process, cluster: "Cluster", settings: Mapping[str, Any], kind: str) -> None:
        self.process, self.cluster, self.world = process, cluster, process.world
        self.settings = settings
        self.number = cluster.client_number(process, kind)
        self.thread = f"{kind}{self.number}"
        self.was_sent = False  # the last request of :meth:`answer`: a broker may have received it

    def answer(self, kind: RequestKind, serve: Serve, *, timeout_ms: int, timed_out: Callable[[], KafkaError]) -> Any:
        """Send a request and wait for the answer, on the current thread.

        Raises:
            KafkaException: the answer is an error.
        """
        the_thread(self.world)
        future = Future(self.world)
        request = PendingRequest(self, kind, serve, future.set_result, timeout_ms=timeout_ms, timed_out=timed_out)
        answer = future.result()
        self.was_sent = request.was_sent
        if isinstance(answer, KafkaError):
            raise KafkaException(answer)
        return answer

    def partial_error(self, kind: RequestKind) -> KafkaError | None:
        code = self.cluster.misfortune.partial(self.process.draws(f"{self.thread}/{kind.value}/parts"), kind)
        return KafkaError(code) if code else None

    def entries(self, partitions: Iterable[KafkaPartition]) -> dict[TopicPartition, Entry]:
        """Convert the offsets of a commit into the coordinator's form."""
        return {
            from_kafka(p): Entry(
                p.offset, parse_note(p.metadata or "").stream, self.process.name, 0, p.metadata or "", p.leader_epoch
            )
            for p in partitions
        }


def from_kafka(partition: Any) -> TopicPartition:
    return TopicPartition(partition.topic, partition.partition)


def to_kafka(tps: Iterable[TopicPartition]) -> list[KafkaPartition]:
    """Sorted, so that a seed always produces the same history."""
    return [KafkaPartition(tp.topic, tp.partition) for tp in sorted(tps)]


def refusal(code: Code | int, text: str = "", **flags: bool) -> KafkaError:
    """A broker's error; ``text`` is put before the library's text."""
    number = code.value if isinstance(code, Code) else code
    words = KafkaError(number).str()
    return KafkaError(number, f"{text}: {words}" if text else words, **flags)
