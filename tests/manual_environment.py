"""An environment that a test controls step by step: no threads, a scripted clock, scripted clients.

Runs in: tests. Deliberately absent: any behaviour of Kafka; a client returns what the test specified (the fakes in
``kit`` behave like Kafka). Each wait runs the next line of :attr:`ManualEnvironment.script` instead.
"""

import queue
import struct
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import FunctionType
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.kafka.consumer import MemberConsumer
from spark_group_source.kafka.environment import Environment
from spark_group_source.model import TopicPartition

WALL_MS = 7
"""The constant wall clock of these processes."""
A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)


def refusal(code: int, *, retriable: bool = False, abort: bool = False, fatal: bool = False) -> KafkaException:
    return KafkaException(KafkaError(code, None, fatal, retriable, abort))


def metadata(generation: int, member: str = "m") -> bytes:
    """A consumer's group metadata, as the library serialises it."""
    return b"CGMDv2:" + struct.pack("=i", generation) + b"g\0" + member.encode() + b"\0" + b"\1"


def member_consumer(
    settings: Mapping[str, str],
    environment: Environment,
    on_assigned: Callable[[tuple[TopicPartition, ...], int], None] = lambda *_: None,
) -> MemberConsumer:
    """The consumer of a member that releases partitions at once."""
    return MemberConsumer(
        settings,
        environment=environment,
        own_member_ids=deque(),
        on_assigned=on_assigned,
        on_revoked=lambda _: None,
        on_lost=lambda _: None,
    )


NOT_A_MEMBER = metadata(-1, "")


def sent(member: bytes) -> int:
    """Return the generation of a member's metadata."""
    return int(struct.unpack_from("=i", member, 7)[0])


class ManualEnvironment(Environment):
    """A spawned thread waits in :attr:`spawned` until the test runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.clock_ms = 1_000
        self.suspended_ms = 0  # how long the machine was suspended
        self.script: deque[Callable[[], object]] = deque()
        self.spawned: list[tuple[str, Callable[[], None]]] = []
        self.consumers: list[ManualConsumer] = []
        self.producers: list[ManualProducer] = []
        self.admins: list[ManualAdmin] = []
        self.answers: dict[str, deque[Any]] = {}
        """By method of a client: the values that its next calls return, or errors that they raise."""
        self.reporting: Any = None
        """The client to which "error" belongs; None: any."""
        self.calls: list[tuple[str, Any]] = []
        """Every call of a producer and an admin client, and the calls of a consumer that a test may check."""

    def will(self, call: str, *answers: Any) -> None:
        self.answers.setdefault(call, deque()).extend(answers)

    def called(self, *names: str) -> list[Any]:
        return [name if len(names) != 1 else what for name, what in self.calls if not names or name in names]

    def answer(self, call: str, what: Any = None, otherwise: Any = None) -> Any:
        self.calls.append((call, what))
        found = self.answers[call].popleft() if self.answers.get(call) else otherwise
        if isinstance(found, BaseException):
            raise found
        return found() if isinstance(found, FunctionType) else found

    def report_errors(self, client: Any) -> None:
        """A client runs its error callback with what :meth:`will` has for "error"."""
        while self.answers.get("error") and self.reporting in (None, client):
            client.settings["error_cb"](self.answers["error"].popleft())

    def wait(self, wait_s: float) -> None:
        self.clock_ms += int(wait_s * 1000)
        assert self.script, "a thread waits, but the script has no more lines"
        self.script.popleft()()

    def run(self, *script: Callable[[], object]) -> None:
        """Run the last spawned thread to its end; each line is run where the thread would wait."""
        self.script.extend(script)
        self.spawned.pop()[1]()
        assert not self.script, "the thread ended early"

    def now_ms(self) -> int:
        return self.clock_ms

    def boot_ms(self) -> int:
        return self.clock_ms + self.suspended_ms

    def wall_ms(self) -> int:
        return WALL_MS

    def pause(self, wait_s: float) -> None:
        self.clock_ms += int(wait_s * 1000)

    def queue(self, size_max: int) -> "queue.Queue[Any]":
        return _Queue(self, size_max)

    def future(self) -> "Future[Any]":
        return _Future(self)

    def spawn(self, name: str, run: Callable[[], None], *, died: Callable[[BaseException], None]) -> Any:
        self.spawned.append((name, run))

    def consumer(self, settings: Mapping[str, Any]) -> "ManualConsumer":
        self.answer("Consumer", settings)
        self.consumers.append(ManualConsumer(self, settings))
        return self.consumers[-1]

    def producer(self, settings: Mapping[str, Any]) -> "ManualProducer":
        self.answer("Producer", settings)
        self.producers.append(ManualProducer(self, settings))
        return self.producers[-1]

    def admin(self, settings: Mapping[str, Any]) -> "ManualAdmin":
        self.admins.append(ManualAdmin(self, settings))
        return self.admins[-1]


class _Queue(queue.Queue[Any]):
    def __init__(self, environment: ManualEnvironment, size_max: int) -> None:
        super().__init__(size_max)
        self._environment = environment

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if block and timeout is not None and self.empty():
            self._environment.wait(timeout)
        return super().get(block=False)


class _Future(Future[Any]):
    def __init__(self, environment: ManualEnvironment) -> None:
        super().__init__()
        self._environment = environment

    def result(self, timeout: float | None = None) -> Any:
        if not self.done() and timeout is not None:
            self._environment.wait(timeout)
        return super().result(0)


class ManualConsumer:
    """The callbacks are called by lines of the script (``assign_callback`` and others), inside ``poll``."""

    def __init__(self, environment: ManualEnvironment, settings: Mapping[str, Any]) -> None:
        self.environment, self.settings = environment, settings
        self.metadata = NOT_A_MEMBER
        self.member_id = ""
        self.callbacks: dict[str, Callable[[Any, list[Any]], None]] = {}

    def subscribe(self, topics: list[str], **callbacks: Callable[[Any, list[Any]], None]) -> None:
        self.environment.answer("subscribe", tuple(topics))
        self.callbacks = callbacks

    def poll(self, timeout: float) -> Any:
        if timeout == 0 and not self.callbacks:  # it does not join
            self.environment.report_errors(self)
            return None
        self.environment.wait(timeout)
        return self.environment.answer("poll")

    def assign_callback(self, *tps: TopicPartition, generation: int = 1, member: str = "m") -> None:
        self.metadata = metadata(generation, member)
        self.callbacks["on_assign"](self, list(tps))

    def revoke_callback(self, *tps: TopicPartition) -> None:
        self.callbacks["on_revoke"](self, list(tps))

    def lose_callback(self, *tps: TopicPartition) -> None:
        self.metadata = NOT_A_MEMBER
        self.callbacks["on_lost"](self, list(tps))

    def consumer_group_metadata(self) -> bytes:
        return self.metadata

    def assign(self, partitions: list[Any]) -> None:
        assert not partitions

    def incremental_assign(self, partitions: list[Any]) -> None:
        assert not partitions

    def incremental_unassign(self, partitions: list[Any]) -> None:
        assert not partitions
        self.environment.answer("incremental_unassign")

    def unassign(self) -> None:
        self.environment.answer("unassign")

    def unsubscribe(self) -> None:
        self.environment.answer("unsubscribe")

    def memberid(self) -> str:
        return self.member_id

    def commit(self, *, offsets: list[Any], asynchronous: bool) -> list[Any]:
        self.environment.answer("commit", [(p.topic, p.partition, p.offset, p.metadata) for p in offsets])
        return offsets

    def committed(self, partitions: list[Any], timeout: float) -> list[Any]:
        self.environment.calls.append(("committed timeout", timeout))
        found: list[Any] = self.environment.answer("committed", [(p.topic, p.partition) for p in partitions], [])
        return found

    def list_topics(self, topic: str, timeout: float) -> Any:
        return self.environment.answer("list_topics", topic)

    def close(self) -> None:
        self.environment.answer("close")


class ManualProducer:
    """Records each call; for offsets, the generation of the member and the committed offsets."""

    def __init__(self, environment: ManualEnvironment, settings: Mapping[str, Any]) -> None:
        self.environment, self.settings = environment, settings

    def init_transactions(self, timeout: float) -> None:
        self.environment.answer("init_transactions")

    def poll(self, timeout: float) -> None:
        self.environment.report_errors(self)

    def begin_transaction(self) -> None:
        self.environment.answer("begin_transaction")

    def send_offsets_to_transaction(self, offsets: list[Any], member: bytes, timeout: float) -> None:
        entries = {TopicPartition(p.topic, p.partition): (p.offset, p.metadata, p.leader_epoch) for p in offsets}
        self.environment.answer("send_offsets", (sent(member), entries))

    def commit_transaction(self, timeout: float) -> None:
        self.environment.answer("commit_transaction")

    def abort_transaction(self, timeout: float) -> None:
        self.environment.answer("abort_transaction")


class ManualAdmin:
    """Returns completed futures, or those of the test."""

    def __init__(self, environment: ManualEnvironment, settings: Mapping[str, Any]) -> None:
        self.environment, self.settings = environment, settings
        self.bounds_s: list[float] = []
        """One entry per request for offsets."""
        self.topic_bounds_s: list[float] = []

    def poll(self, timeout: float) -> None:
        self.environment.report_errors(self)
        self.environment.clock_ms += int(timeout * 1000)

    def describe_topics(self, topics: Any, **bounds: float) -> dict[str, "Future[Any]"]:
        self.topic_bounds_s.append(bounds["request_timeout"])
        return self._done(self.environment.answer("describe_topics", None, {}))

    def list_offsets(self, request: Mapping[Any, Any], **how: Any) -> dict[Any, "Future[Any]"]:
        self.environment.calls.append(("isolation", how["isolation_level"].name))
        self.bounds_s.append(how["request_timeout"])
        requested = {TopicPartition(p.topic, p.partition): spec for p, spec in request.items()}
        found: Mapping[TopicPartition, Any] = self.environment.answer("list_offsets", requested, {})
        by_ours = {TopicPartition(p.topic, p.partition): p for p in request}
        return self._done({by_ours[tp]: at for tp, at in found.items()})

    def describe_consumer_groups(self, groups: list[str], **bounds: float) -> dict[str, "Future[Any]"]:
        return self._done(self.environment.answer("describe_consumer_groups", tuple(groups), {}))

    def describe_configs(self, resources: list[Any], **bounds: float) -> dict[Any, "Future[Any]"]:
        (broker,) = resources
        return self._done({broker: self.environment.answer("describe_configs", broker.name, {})})

    def alter_consumer_group_offsets(self, groups: list[Any], **bounds: float) -> dict[str, "Future[Any]"]:
        return self._done(self.environment.answer("alter_consumer_group_offsets", groups, {}))

    def delete_consumer_groups(self, groups: list[str], **bounds: float) -> dict[str, "Future[Any]"]:
        return self._done(self.environment.answer("delete_consumer_groups", tuple(groups), {}))

    def list_consumer_groups(self, **bounds: float) -> "Future[Any]":
        return self._done({0: self.environment.answer("list_consumer_groups")})[0]

    def list_topics(self, **bounds: float) -> Any:
        """The client fetches the leaders."""
        return self.environment.answer("list_topics")

    @staticmethod
    def _done(answers: Mapping[Any, Any]) -> dict[Any, "Future[Any]"]:
        futures: dict[Any, Future[Any]] = {}
        for key, answer in answers.items():
            if hasattr(answer, "result"):
                futures[key] = answer
                continue
            futures[key] = Future()
            if isinstance(answer, BaseException):
                futures[key].set_exception(answer)
            else:
                futures[key].set_result(answer)
        return futures
