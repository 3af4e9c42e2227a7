"""What the fakes of the client library's clients share: errors, partitions, and questions that wait for their answer.

Runs in: tests. Errors are the library's own objects, with the codes, flags and texts that librdkafka 2.16 gives them
(seen with its mock cluster and with real brokers). Deliberately absent: what is asked.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kit.environment import Future
from kit.kafka_group import Code, Entry
from kit.misfortune import Ask
from kit.wire import PendingRequest, Serve
from kit.world import Process, the_thread
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import parse_note

if TYPE_CHECKING:
    from kit.cluster import Cluster

NO_OFFSET = -1001
"""OFFSET_INVALID: nothing was committed."""


@dataclass(slots=True)
class Answered:
    """A partition in an answer, as the library's own, whose error cannot be set."""

    topic: str
    partition: int
    offset: int = NO_OFFSET
    metadata: str | None = None
    error: KafkaError | None = None


class Library:
    """One client: the process it is in, the library's thread behind it, and its settings."""

    def __init__(self, process: Process, cluster: "Cluster", settings: Mapping[str, Any], kind: str) -> None:
        self.process, self.cluster, self.world = process, cluster, process.world
        self.settings = settings
        self.number = cluster.client_number(process, kind)
        self.thread = f"{kind}{self.number}"

    def answer(self, ask: Ask, serve: Serve, *, timeout_ms: int, timed_out: Callable[[], KafkaError]) -> Any:
        """Ask and wait, on the thread that runs.

        Raises:
            KafkaException: an error was the answer.
        """
        the_thread(self.world)
        future = Future(self.world)
        PendingRequest(self, ask, serve, future.set_result, timeout_ms=timeout_ms, timed_out=timed_out)
        answer = future.result()
        if isinstance(answer, KafkaError):
            raise KafkaException(answer)
        return answer

    def partial_error(self, ask: Ask) -> KafkaError | None:
        code = self.cluster.misfortune.partial(self.process.draws(f"{self.thread}/{ask.value}/parts"), ask)
        return KafkaError(code) if code else None

    def entries(self, partitions: Iterable[KafkaPartition]) -> dict[TopicPartition, Entry]:
        """What is to be committed, in the coordinator's form."""
        return {
            to_ours(p): Entry(p.offset, parse_note(p.metadata or "").stream, self.process.name, 0, p.metadata or "")
            for p in partitions
        }


def to_ours(partition: Any) -> TopicPartition:
    return TopicPartition(partition.topic, partition.partition)


def to_kafka(tps: Iterable[TopicPartition]) -> list[KafkaPartition]:
    """In order, so that a seed always tells the same story."""
    return [KafkaPartition(tp.topic, tp.partition) for tp in sorted(tps)]


def refusal(code: Code | int, text: str = "", **flags: bool) -> KafkaError:
    """An error of a broker's; ``text`` stands before its words."""
    number = code.value if isinstance(code, Code) else code
    words = KafkaError(number).str()
    return KafkaError(number, f"{text}: {words}" if text else words, **flags)
