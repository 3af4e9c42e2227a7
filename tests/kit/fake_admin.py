"""``confluent_kafka.admin.AdminClient`` over the simulated Kafka: requests whose answers are futures.

Runs in: tests. While no broker is reachable, a client's errors are its own guesses, and some are raised at once.
Deliberately absent: creating and deleting topics (``Cluster`` does it), settings of topics and groups.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from confluent_kafka import ConsumerGroupState, ConsumerGroupType, IsolationLevel, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kit.cluster import Log, Topic
from kit.environment import Future
from kit.fake_library import NO_OFFSET, Answered, Library, from_kafka, refusal, to_kafka
from kit.kafka_group import Code
from kit.misfortune import RequestKind
from kit.wire import Partly, PendingRequest, Reply, Serve
from kit.world import Process, the_thread, to_ms

if TYPE_CHECKING:
    from kit.cluster import Cluster

REQUEST_S = 60.0
"""socket.timeout.ms, for requests without a timeout."""
ANSWERED_BEFORE_MS = 300
"""How long before its timeout a request is answered of which one leader is silent."""
EARLIEST, LATEST = -2, -1
"""As OffsetSpec numbers them."""

Futures = dict[Any, Future]


class FakeAdmin:
    """One admin client. Any thread may call it."""

    def __init__(self, process: Process, cluster: "Cluster", settings: Mapping[str, Any]) -> None:
        self._library = Library(process, cluster, settings, "admin")
        self._cluster, self._world = cluster, process.world
        self._draws = process.draws(self._library.thread)

    def poll(self, timeout: float = -1.0) -> int:
        """Run callbacks: there are none."""
        del timeout
        return 0

    def list_topics(self, topic: str | None = None, timeout: float = -1.0) -> Any:
        del topic

        def serve(reply: Reply) -> None:
            found = {
                name: SimpleNamespace(topic=name, partitions={p.id: p for p in topic.partitions})
                for name, topic in self._known().items()
            }
            reply(SimpleNamespace(topics=found))

        return self._library.answer(
            RequestKind.TOPICS,
            serve,
            timeout_ms=to_ms(timeout if timeout > 0 else REQUEST_S),
            timed_out=lambda: refusal(KafkaError._TRANSPORT, "Failed to get metadata"),
        )

    def describe_topics(self, topics: Any, *, request_timeout: float = REQUEST_S, **_: Any) -> Futures:
        names: list[str] = topics.topic_names

        def serve(reply: Reply) -> None:
            known = self._known()
            reply({name: known.get(name) for name in names})

        def one(name: str, found: dict[str, Any]) -> Any:
            return found[name] or refusal(KafkaError.UNKNOWN_TOPIC_OR_PART)

        text = "Failed while waiting for controller"
        return self._futures(RequestKind.DESCRIBE, names, serve, one, request_timeout, text)

    def list_offsets(
        self,
        partitions: Mapping[KafkaPartition, Any],
        *,
        isolation_level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
        request_timeout: float = REQUEST_S,
        **_: Any,
    ) -> Futures:
        committed = isolation_level is IsolationLevel.READ_COMMITTED
        specs = {p: spec._value for p, spec in partitions.items()}

        def serve(reply: Reply) -> None:
            found = {p: self._offset(p, value, committed) for p, value in specs.items()}
            codes = {each.code() if isinstance(each, KafkaError) else 0 for each in found.values()}
            if codes == {KafkaError.LEADER_NOT_AVAILABLE}:  # the client finds no broker for the request
                no_leaders = refusal(KafkaError._NOENT, "Failed to query partition leaders: No leaders found")
                found = dict.fromkeys(found, no_leaders)
            if KafkaError._TIMED_OUT in codes:  # the answers of the other leaders wait with it
                self._world.at(max(0, to_ms(request_timeout) - ANSWERED_BEFORE_MS), lambda: reply(found))
            else:
                reply(found)

        if self._library.process.cut_off() and self._draws.chance(0.7):
            error = KafkaError(KafkaError._NOENT, "Failed to query partition leaders: No leaders found")
            return {p: self._failed(error) for p in specs}
        return self._futures(RequestKind.OFFSETS, list(specs), serve, lambda p, found: found[p], request_timeout, "")

    def describe_consumer_groups(
        self, group_ids: Sequence[str], *, request_timeout: float = REQUEST_S, **_: Any
    ) -> Futures:
        def serve(reply: Reply) -> None:
            reply({name: self._group(name) for name in group_ids})

        return self._futures(
            RequestKind.GROUP, list(group_ids), serve, lambda name, found: found[name], request_timeout, ""
        )

    def alter_consumer_group_offsets(
        self, request: Sequence[Any], *, request_timeout: float = REQUEST_S, **_: Any
    ) -> Futures:
        (wanted,) = request
        entries = self._library.entries(wanted.topic_partitions)

        def serve(reply: Reply) -> None:
            there = {tp: entry for tp, entry in entries.items() if self._cluster.log(tp) is not None}
            reply((self._cluster.group(wanted.group_id).commit("", -1, there), there.keys()))

        def one(_: str, answer: Any) -> Any:
            code, there = answer
            answers = []
            for p in wanted.topic_partitions:
                number = (code if from_kafka(p) in there else Code.UNKNOWN_TOPIC).value
                answers.append(Answered(p.topic, p.partition, p.offset, error=KafkaError(number) if number else None))
            return SimpleNamespace(group_id=wanted.group_id, topic_partitions=answers)

        return self._futures(RequestKind.ALTER, [wanted.group_id], serve, one, request_timeout, "")

    # --- at the broker ----------------------------------------------------------------------------------------------

    def _known(self) -> dict[str, Any]:
        now = self._world.now_ms
        return {
            name: SimpleNamespace(name=name, topic_id=topic.id, partitions=self._partitions(topic))
            for name, topic in sorted(self._cluster.topics.items())
            if topic.known_from_ms <= now
        }

    def _partitions(self, topic: Topic) -> list[Any]:
        now = self._world.now_ms
        return [
            SimpleNamespace(id=p, leader=SimpleNamespace(id=1) if log.leader_from_ms <= now or log.is_silent else None)
            for p, log in enumerate(topic.logs)
        ]

    def _offset(self, partition: KafkaPartition, value: int, committed: bool) -> Any:
        topic, log = self._cluster.topics.get(partition.topic), self._cluster.log(from_kafka(partition))
        if topic is None or topic.known_from_ms > self._world.now_ms:
            return refusal(KafkaError.UNKNOWN_TOPIC_OR_PART)
        if log is None:
            return refusal(KafkaError._UNKNOWN_PARTITION)
        if log.leader_from_ms > self._world.now_ms:
            return refusal(KafkaError._TIMED_OUT if log.is_silent else KafkaError.LEADER_NOT_AVAILABLE)
        if log.serves_from_ms > self._world.now_ms:
            codes = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.NOT_LEADER_FOR_PARTITION)
            return refusal(self._draws.choice(codes))
        epoch = log.epoch if self._cluster.reports_epochs else None
        return SimpleNamespace(offset=_offset_of(log, value, committed), timestamp=-1, leader_epoch=epoch)

    def _group(self, name: str) -> Any:
        found = self._cluster.groups.get(name)
        if found is None:
            return refusal(KafkaError.GROUP_ID_NOT_FOUND)
        state, given = found.describe()
        return SimpleNamespace(
            group_id=name,
            state=ConsumerGroupState[state],
            type=ConsumerGroupType.CONSUMER if found.protocol == "consumer" else ConsumerGroupType.CLASSIC,
            partition_assignor="uniform",
            is_simple_consumer_group=False,
            coordinator=SimpleNamespace(id=1, host="kafka", port=9092),
            members=[
                SimpleNamespace(
                    member_id=member.id,
                    client_id=member.client_id,
                    group_instance_id=member.instance,
                    host="/127.0.0.1",
                    assignment=SimpleNamespace(topic_partitions=to_kafka(given[member.id])),
                )
                for member in found.members.values()
            ],
        )

    # --- futures ----------------------------------------------------------------------------------------------------

    def _futures(
        self,
        kind: RequestKind,
        keys: Iterable[Any],
        serve: Serve,
        one: Callable[[Any, Any], Any],
        timeout_s: float,
        text: str,
    ) -> Futures:
        """Send one request; return a future for each part of its answer."""
        me = the_thread(self._world)
        if stall_ms := self._cluster.stalls_ms.pop(me, 0):
            me.block(stall_ms)
        futures = {key: Future(self._world) for key in keys}

        def settle(answer: Any) -> None:
            for key, future in futures.items():
                error = self._library.partial_error(kind) if isinstance(answer, Partly) else None
                whole = answer.answer if isinstance(answer, Partly) else answer
                part = error or (whole if isinstance(whole, KafkaError) else one(key, whole))
                if (
                    kind is RequestKind.OFFSETS
                    and isinstance(part, KafkaError)
                    and part.code() == KafkaError._TIMED_OUT
                ):
                    part = self._out_of_time(part)
                if isinstance(part, KafkaError):
                    future.set_exception(KafkaException(part))
                else:
                    future.set_result(part)

        PendingRequest(
            self._library,
            kind,
            serve,
            settle,
            timeout_ms=to_ms(timeout_s),
            timed_out=lambda: refusal(KafkaError._TIMED_OUT, text),
        )
        return futures

    def _out_of_time(self, error: KafkaError) -> Any:
        """A client that knew the leader reports no error: the future succeeds."""
        knew = self._draws.chance(0.5)
        return SimpleNamespace(offset=NO_OFFSET, timestamp=-1, leader_epoch=None) if knew else error

    def _failed(self, error: KafkaError) -> Future:
        future = Future(self._world)
        future.set_exception(KafkaException(error))
        return future


def _offset_of(log: Log, value: int, committed: bool) -> int:
    if value == EARLIEST:
        return log.first
    assert value == LATEST, "offsets of times are not simulated"
    return log.stable if committed else log.end
