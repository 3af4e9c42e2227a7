"""Requests about topics, groups, offsets and leader epochs, each with a timeout.

Runs in: the stream reader, the user's driver (CLI). Deliberately absent: state of the group (every answer is fresh),
and conclusions from the answers (``protocol``).
"""

import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import OFFSET_END, IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka import admin as kafka_admin

from spark_group_source import command_line
from spark_group_source.error_codes import Meaning, Request, is_token_missing, meaning
from spark_group_source.errors import BrokerUnavailable, TopicMissing
from spark_group_source.kafka.environment import NEVER_JOINS, Environment
from spark_group_source.kafka.retry import RefusalWatch, Retry
from spark_group_source.kafka.translation import (
    ClientInfo,
    GroupDescription,
    GroupMember,
    Topic,
    from_kafka,
    request_batches,
    to_kafka,
)
from spark_group_source.model import StartAt, TopicPartition, topic_id
from spark_group_source.options.client import refused_setting

REQUEST_TIMEOUT_S = 6.0
"""The timeout of a request, including the search for the right broker. A client keeps sending to a broker that died, so
the next request is sent by a new client."""
FIRST_TIMEOUT_S, FIRST_TRIES = 2.0, 2
"""The timeout of the first requests. After this many slow requests in a row the cluster counts as slow, and the full
timeout applies until a request is fast again."""
ANSWER_S_MAX = REQUEST_TIMEOUT_S + 1.0
"""The longest wait for a future; the library's own timeout comes first."""
ERROR_POLL_S = 0.2
"""While a request is pending: the interval at which refused credentials are checked for."""
MISSING_RETRIES = 3
MISSING_PAUSE_S = 1.0
"""The number of retries, and the pause between them, when brokers report that a topic does not exist."""
OLD_CLIENTS_MAX = 3
"""Replaced clients that are kept for a while, because other threads may wait for their answers."""
SHORT_TIMEOUT_S, AFTER_RENEWAL_S = 1.5, 10.0
"""The timeout of requests in the first AFTER_RENEWAL_S of a new client, which replaced one that was not fully answered:
the new client may find the right broker, and a partial answer is returned only after the timeout of the rest. If that
is too short, the retry has the full timeout."""
RENEW_EVERY_S = 2.0
"""The shortest interval between new clients after partial answers. A client that knew the old leader may never find the
new one."""
RETENTION_SETTING = "offsets.retention.minutes"
AMBIGUOUS_CODES = frozenset({KafkaError._NOENT, KafkaError._UNKNOWN_PARTITION})
"""The library's errors both for partitions that do not exist and for those whose leader it does not know or reach."""
NO_MATCH = -1
"""The offset that brokers return when no record is as recent as a timestamp. The library returns -1001, without an
error, when no broker answered in time."""

COORDINATOR_TIMEOUT_S = 3_600.0
"""The library's timeout of a request to the group's coordinator. It is far beyond ours so that the library never times
out first: if the coordinator comes back after that, the library aborts the whole process (librdkafka 2.16). This module
stops waiting after :data:`REQUEST_TIMEOUT_S` and drops the late answer."""

Bound = Mapping[str, float]
COORDINATOR_BOUND: Bound = {"request_timeout": COORDINATOR_TIMEOUT_S}

T = TypeVar("T")
K = TypeVar("K")
Offsets = dict[TopicPartition, int]

# The library's type stubs lack OffsetSpec and ConfigResource.
_OffsetSpec: Any = kafka_admin.OffsetSpec  # type: ignore[attr-defined]
_ConfigResource: Any = kafka_admin.ConfigResource  # type: ignore[attr-defined]


class Missing:
    """An answer: the topic, partition or group does not exist."""


class Admin:
    """Sends requests about topics, groups and offsets. Any thread may call it; each request has a timeout.

    Args:
        config_file: the file of ``--command-config`` from which they are, for the commands that messages print.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        *,
        config_file: str | None = None,
        environment: Environment | None = None,
        retries: int = 3,
        retry_interval_s: float = 1.0,
    ) -> None:
        self._environment = environment or Environment()
        self._servers = settings["bootstrap.servers"]
        self._client_info = ClientInfo.of(settings)
        self.connection = command_line.connection(settings, config_file)
        """The arguments with which commands connect to the same brokers, for those that messages print."""
        self._retries = retries
        self._retry = Retry(
            self._client_info, self._environment, retries=retries, interval_s=retry_interval_s, pause=self.pause
        )
        self._settings = settings
        self._refusal = RefusalWatch()
        self._token_error: KafkaError | None = None  # the client's last error about a missing token
        self._renewed_ms: float = -math.inf
        self._clients = 0  # how many were created
        self._slow = 0  # requests in a row that took longer than FIRST_TIMEOUT_S
        self._old_clients: deque[Any] = deque(maxlen=OLD_CLIENTS_MAX)
        # Old clients are kept because a garbage-collected AdminClient fails its pending futures.
        try:
            self._client = self._new_client()
        except KafkaException as exc:
            # "from None": the cause may contain a secret.
            raise refused_setting(exc.args[0].str(), settings) from None

    def matching_topics(self, is_wanted: Callable[[str], bool]) -> dict[str, Topic]:
        """Return all topics whose name ``is_wanted`` accepts."""
        return self.describe_topics([name for name in self.list_topics() if is_wanted(name)])

    def list_topics(self) -> dict[str, Any]:
        """Return the library's object for every topic that the user may describe; each has ``partitions``."""
        op = "listing topics"
        listed = self._request(Request.TOPICS, op, lambda _: self._client.list_topics(timeout=REQUEST_TIMEOUT_S))
        found: dict[str, Any] = listed.topics
        return found

    def describe_topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return the named topics, without those that a broker reports missing. It may not know a new one yet."""
        names = sorted(set(names))
        if not names:
            return {}
        topics = TopicCollection(names)
        op = "describing topics"
        answers = self._collect(Request.TOPICS, op, lambda bound: self._client.describe_topics(topics, **bound))
        return {
            name: Topic(topic_id(str(found.topic_id)), len(found.partitions))
            for name, found in answers.items()
            if not isinstance(found, Missing)
        }

    def existing_topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return the named topics that exist. Retries those reported missing: for a moment a broker may not know a new
        topic, and a broker that has just started knows none."""
        return self._retry_missing(set(names), self.describe_topics)

    def existing_partitions(self, tps: Iterable[TopicPartition]) -> set[TopicPartition]:
        """Return the partitions that exist, as :meth:`existing_topics`: a broker may not know yet that a topic has
        grown."""

        def find(wanted: set[TopicPartition]) -> dict[TopicPartition, None]:
            topics = self.describe_topics(tp.topic for tp in wanted)
            counts = {name: topic.partitions for name, topic in topics.items()}
            return {tp: None for tp in wanted if tp.partition < counts.get(tp.topic, 0)}

        return set(self._retry_missing(set(tps), find))

    def require_topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return all of the named topics.

        Raises:
            TopicMissing: the message lists the topics that do not exist.
        """
        names = list(names)
        found = self.existing_topics(names)
        missing = sorted(set(names) - found.keys())
        if missing:
            raise TopicMissing(
                f"topic {', '.join(missing)} does not exist on {self._servers}. Create it first, or correct its name",
                topics=missing,
            )
        return found

    def latest(self, tps: Iterable[TopicPartition], *, committed: bool = True, require_all: bool = True) -> Offsets:
        """Return the end offset of each partition, without those that a broker reports missing.

        Args:
            committed: return the last stable offset instead of the high watermark.
            require_all: fail if a partition is unanswered (its leader moves, or is unavailable). With False such
                partitions are left out, provided that another one was answered or a broker reports that they have no
                leader: nothing is left then if none has.
        """
        return self._offsets(tps, _OffsetSpec.latest(), committed=committed, require_all=require_all)

    def latest_of_existing(self, tps: Iterable[TopicPartition], *, committed: bool) -> Offsets:
        """:meth:`latest` for partitions that should exist: asks several times for those that are missing or have no
        leader, and then leaves them out."""
        wanted = set(tps)
        return self._retry_missing(wanted, lambda _: self.latest(wanted, committed=committed, require_all=False))

    def latest_with_epochs(self, tps: Iterable[TopicPartition], *, committed: bool) -> tuple[Offsets, Offsets]:
        """Return the end offsets of the answered partitions, and the leader epochs where leaders returned them."""
        found = self._list_offsets(dict.fromkeys(tps, _OffsetSpec.latest()), committed=committed, require_all=False)
        epochs = {tp: epoch for tp, at in found.items() if (epoch := at.leader_epoch) is not None and epoch >= 0}
        return {tp: at.offset for tp, at in found.items()}, epochs

    def earliest(self, tps: Iterable[TopicPartition], *, require_all: bool = True) -> dict[TopicPartition, int]:
        """Return the log start offset of each partition. Missing and unanswered ones: as in :meth:`latest`."""
        return self._offsets(tps, _OffsetSpec.earliest(), require_all=require_all)

    def offsets_at_time(
        self, times: Mapping[TopicPartition, int], *, require_all: bool = True
    ) -> dict[TopicPartition, int | None]:
        """Return the first offset whose timestamp is at or after the given ms since the epoch; None: there is none."""
        specs = {tp: _OffsetSpec.for_timestamp(at_ms) for tp, at_ms in times.items()}
        found = self._list_offsets(specs, require_all=require_all, offset_min=NO_MATCH)
        return {tp: at.offset if at.offset >= 0 else None for tp, at in found.items()}

    def starting_offsets(
        self, starts: Mapping[TopicPartition, StartAt], *, committed: bool
    ) -> tuple[dict[TopicPartition, int | None], Offsets]:
        """Resolve starting positions to offsets, with one request per kind. Unanswered partitions are left out,
        and that may be all of them.

        Args:
            committed: "latest" is the last stable offset.

        Returns:
            The offsets (None: no record is as recent as the timestamp), and the leader epochs of ends, where leaders
            returned them.
        """
        found: dict[TopicPartition, int | None] = {tp: at.value for tp, at in starts.items() if at.kind == "offset"}
        earliest = [tp for tp, at in starts.items() if at.kind == "earliest"]
        latest = [tp for tp, at in starts.items() if at.kind == "latest"]
        times = {tp: at.value for tp, at in starts.items() if at.kind == "time"}
        epochs: Offsets = {}

        def find_ends() -> Offsets:
            ends, of_leaders = self.latest_with_epochs(latest, committed=committed)
            epochs.update(of_leaders)
            return ends

        for find in (  # the partitions of one kind may all lack a leader
            lambda: self.earliest(earliest, require_all=False),
            find_ends,
            lambda: self.offsets_at_time(times, require_all=False),
        ):
            with contextlib.suppress(BrokerUnavailable):
                found.update(find())
        return found, epochs

    def describe_group(self, group: str) -> GroupDescription:
        """Describe the group. A group that never existed is described as dead, without members."""
        found = self._collect(
            Request.GROUP,
            "describing the group",
            lambda _: self._client.describe_consumer_groups([group], **COORDINATOR_BOUND),
        )[group]
        if isinstance(found, Missing):
            return GroupDescription("dead", "", "", ())
        node = found.coordinator
        return GroupDescription(
            found.state.name.lower(),
            found.type.name.lower(),
            found.partition_assignor,
            tuple(
                GroupMember(
                    m.member_id,
                    m.client_id,
                    m.group_instance_id or "",
                    m.host,
                    from_kafka(m.assignment.topic_partitions),
                )
                for m in found.members
            ),
            f"{node.host}:{node.port} ({node.id})" if node else "",
            found.is_simple_consumer_group,
            node.id if node else -1,
        )

    def retention_ms(self, broker: int) -> int | None:
        """Return how long a broker keeps the offsets of the inactive groups that it coordinates
        (``offsets.retention.minutes``); None if it does not return the setting.

        Raises:
            AccessDenied: the user needs DescribeConfigs on the cluster, refused twice.
        """
        resource = _ConfigResource(_ConfigResource.Type.BROKER, str(broker))
        op = "reading the retention of offsets"
        found = self._collect(Request.CONFIGS, op, lambda bound: self._client.describe_configs([resource], **bound))[
            resource
        ]
        entry = None if isinstance(found, Missing) else found.get(RETENTION_SETTING)
        return int(entry.value) * 60_000 if entry is not None and entry.value else None

    def close(self) -> None:
        """Destroy the clients, on the calling thread. No request may follow. (If a client were destroyed on its own
        thread, where a late answer runs the garbage collection, the library would abort the whole process.)"""
        self._old_clients.clear()
        self._client = None

    def pause(self, wait_s: float) -> None:
        """Pause between two requests, and serve the client's callbacks."""
        self._environment.pause(wait_s)
        self._client.poll(0)

    def _retry_missing(self, wanted: set[K], find: Callable[[set[K]], dict[K, T]]) -> dict[K, T]:
        """Find all wanted items, or those found after :data:`MISSING_RETRIES`."""
        found = find(wanted)
        for _ in range(MISSING_RETRIES):
            if found.keys() >= wanted:
                break
            self.pause(MISSING_PAUSE_S)
            found |= find(wanted - found.keys())
        return found

    def _offsets(
        self, tps: Iterable[TopicPartition], spec: Any, *, committed: bool = False, require_all: bool
    ) -> Offsets:
        found = self._list_offsets(dict.fromkeys(tps, spec), committed=committed, require_all=require_all)
        return {tp: at.offset for tp, at in found.items()}

    def _list_offsets(
        self, specs: Mapping[TopicPartition, Any], *, committed: bool = False, require_all: bool, offset_min: int = 0
    ) -> dict[TopicPartition, Any]:
        """Return the library's answer for each partition, without missing partitions. A smaller offset than
        ``offset_min`` counts as unanswered."""
        if not specs:
            return {}
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        requests = [{to_kafka(tp): specs[tp] for tp in batch} for batch in request_batches(specs)]

        def send(bound: Bound) -> dict[Any, Any]:
            """Send once. The library's errors are the same for missing partitions and for those whose leader it does
            not know, so a second request finds out which partitions exist."""
            answers: dict[Any, Any] = {}
            failed: dict[Any, KafkaException] = {}
            futures: dict[Any, Future[Any]] = {}
            for request in requests:
                futures |= self._client.list_offsets(request, isolation_level=level, **bound)
            for partition, future in futures.items():
                try:
                    answer = self._answer(Request.OFFSETS, future, partition.topic)
                    if not isinstance(answer, Missing) and answer.offset < offset_min:
                        raise _no_answer()
                    answers[partition] = answer
                except KafkaException as exc:
                    if self._refusal.error is not None:
                        raise
                    failed[partition] = exc
            if not require_all:  # a new client would not find a leader either
                failed = {p: exc for p, exc in failed.items() if exc.args[0].code() != KafkaError.LEADER_NOT_AVAILABLE}
            if failed and answers and not require_all:
                if self._environment.now_ms() >= self._renewed_ms + RENEW_EVERY_S * 1000:
                    self._renew()
                return answers
            if not failed:
                return answers
            ambiguous = {p: exc for p, exc in failed.items() if exc.args[0].code() in AMBIGUOUS_CODES}
            errors = [exc for p, exc in failed.items() if p not in ambiguous]
            errors = errors or self._of_existing(ambiguous, bound, leaderless=require_all)
            if errors:
                raise errors[0]
            return answers

        answers = self._request(Request.OFFSETS, "listing offsets", send)
        return {TopicPartition(p.topic, p.partition): at for p, at in answers.items() if not isinstance(at, Missing)}

    def _of_existing(
        self, failed: Mapping[Any, KafkaException], bound: Bound, *, leaderless: bool
    ) -> list[KafkaException]:
        """Return the errors of those partitions that exist according to a broker; ``leaderless``: also of those that
        have no leader according to it."""
        topics = TopicCollection(sorted({p.topic for p in failed}))
        futures = self._client.describe_topics(topics, **bound)
        answers = self._answers(Request.TOPICS, futures)
        existing = {name: topic.partitions for name, topic in answers.items() if not isinstance(topic, Missing)}
        leaders = {(name, each.id): each.leader for name, partitions in existing.items() for each in partitions}

        def is_there(p: Any) -> bool:
            if not existing.get(p.topic):  # a topic without any known partition may have any number
                return p.topic in existing
            return (p.topic, p.partition) in leaders and (leaderless or leaders[p.topic, p.partition] is not None)

        return [exc for p, exc in failed.items() if is_there(p)]

    def _collect(
        self, request: Request, op: str, send: Callable[[Bound], Mapping[Any, "Future[Any]"]]
    ) -> dict[Any, Any]:
        """Send a request and collect its answers; :class:`Missing` for what does not exist."""
        return self._request(request, op, lambda bound: self._answers(request, send(bound)))

    def _answers(self, request: Request, futures: Mapping[Any, "Future[Any]"]) -> dict[Any, Any]:
        return {name: self._answer(request, future, name) for name, future in futures.items()}

    def _answer(self, request: Request, future: "Future[Any]", name: str = "") -> Any:
        """Wait for one answer; ``name``: the topic or group that it is about."""
        deadline_ms = self._environment.now_ms() + ANSWER_S_MAX * 1000
        while True:
            try:
                return future.result(timeout=ERROR_POLL_S)
            except KafkaException as exc:
                if meaning(request, exc.args[0].code()) is Meaning.GONE:
                    return Missing()
                raise KafkaException(exc.args[0], name) from exc
            except TimeoutError:
                self._client.poll(0)  # runs the error callback
                self._refusal.check()
                if self._environment.now_ms() > deadline_ms:
                    raise _no_answer() from None

    def _timeout_s(self) -> float:
        """The timeout of the next request that is not a short one."""
        return FIRST_TIMEOUT_S if self._slow < FIRST_TRIES and self._retries > 0 else REQUEST_TIMEOUT_S

    def _request(self, request: Request, op: str, send: Callable[[Bound], T]) -> T:
        """Send a request with retries, each by a new client.

        The timeout is short at first if the last client was replaced a moment ago, and then full; otherwise it depends
        on how long the last requests took (:meth:`_timeout_s`).
        """
        is_short = False

        def send_once() -> T:
            nonlocal is_short
            sent_ms = self._environment.now_ms()
            is_new = sent_ms < self._renewed_ms + AFTER_RENEWAL_S * 1000
            is_short = is_new and not is_short and self._retries > 0  # never twice in a row
            try:
                answer = send({"request_timeout": SHORT_TIMEOUT_S if is_short else self._timeout_s()})
                if not is_short:  # with a short timeout, the answer may leave out a slow leader's partitions
                    took_ms = self._environment.now_ms() - sent_ms
                    self._slow = self._slow + 1 if took_ms >= FIRST_TIMEOUT_S * 1000 else 0
                return answer
            except KafkaException as exc:
                self._slow += not is_short
                self._client.poll(0)  # runs the error callback
                transient = meaning(request, exc.args[0].code()) is Meaning.RETRY
                # Blocking requests, such as list_topics, do not report why no connection came about.
                cause = (self._refusal.error or self._token_error) if transient else None
                self._renew()
                # Without the traceback, whose frames of the library would keep the client alive after close().
                exc.with_traceback(None)
                if cause is None:
                    raise
                raise KafkaException(cause) from exc

        answer = self._retry(request, op, send_once)
        self._forget_errors()  # errors of the meantime are obsolete: the request succeeded
        return answer

    def serve(self) -> None:
        """Handle what the library reports between requests; otherwise that takes more and more memory during an
        outage."""
        for client in (self._client, *self._old_clients):
            client.poll(0)

    def _on_error(self, error: KafkaError) -> None:
        self._refusal(error)
        if is_token_missing(error.code(), error.str()):
            self._token_error = error

    def _renew(self) -> None:
        """Replace the client by a new one.

        A client that failed keeps sending to the leader, controller or coordinator that it knows, although that broker
        is unavailable or has lost the role. It also reports a refusal only once in 30 s.
        """
        self._forget_errors()
        self._renewed_ms = self._environment.now_ms()
        self._old_clients.append(self._client)
        self._client = self._new_client()

    def _forget_errors(self) -> None:
        self._refusal.clear()
        self._token_error = None

    def _new_client(self) -> Any:
        number = self._clients = self._clients + 1

        def on_error(error: KafkaError) -> None:
            if number == self._clients:  # an old one may have a token that has expired, or a replaced certificate
                self._on_error(error)

        return self._environment.admin({**self._settings, "error_cb": on_error})


def _no_answer() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer"))


# --- ends of leader epochs ------------------------------------------------------------------------------------------

EPOCHS_S_MAX = 6.0
"""The timeout of one read of any number of partitions, including the search for their leaders."""
POLL_S = 0.1
"""The longest poll while the errors of a read arrive."""
BEYOND = 2**60
"""A position beyond every log."""
_END = re.compile(r"broker end offset is (-?\d+) \(offset leader epoch (-?\d+)\)")


class EpochEnds:
    """Reads the end offsets of leader epochs: Kafka's OffsetForLeaderEpoch request (KIP-320). One thread uses it; it
    keeps no connection open between reads.

    librdkafka sends this request in one case only: before a consumer reads from a position that was set with a leader
    epoch. So the consumer here, which joins no group, is assigned the end of the log and seeks to a position beyond
    every log, with the epoch in question. The leader returns the end offset of that epoch; the library finds the
    position beyond it and reports an error, whose text contains the end offset. A broker without this request gets a
    fetch of that position instead, which is out of range. Only a seek always sends the request before a fetch: after an
    assignment of the position the library may fetch first.
    """

    def __init__(self, settings: Mapping[str, str], *, environment: Environment) -> None:
        self._environment = environment
        self._retry = Retry(ClientInfo.of(settings), environment)
        self._refusal = RefusalWatch()
        # "error" makes the library report the end offset that it found.
        self._settings = {**settings, **NEVER_JOINS, "auto.offset.reset": "error", "error_cb": self._refusal}

    def read(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Read where the records of each leader epoch and of earlier ones end. Unanswered partitions are left out.

        Returns:
            The end offset; None: the leader does not know the epoch, or not this request (Kafka before 2.0).

        Raises:
            BrokerUnavailable: no partition was answered in time.
            AccessDenied: refused twice.
        """
        if not epochs:
            return {}
        return self._retry(Request.OFFSETS, "reading the ends of leader epochs", lambda: self._read(epochs))

    def _read(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        self._refusal.clear()
        consumer = self._environment.consumer(self._settings)
        try:
            consumer.assign([to_kafka(tp, OFFSET_END) for tp in epochs])
            for tp, epoch in epochs.items():
                consumer.seek(KafkaPartition(tp.topic, tp.partition, BEYOND, leader_epoch=epoch))
            return self._answers(consumer, epochs)
        finally:
            with contextlib.suppress(KafkaException, RuntimeError):
                consumer.close()

    def _answers(self, consumer: Any, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        found: dict[TopicPartition, int | None] = {}
        deadline_ms = self._environment.now_ms() + EPOCHS_S_MAX * 1000
        while len(found) < len(epochs) and self._environment.now_ms() < deadline_ms:
            message = consumer.poll(POLL_S)
            self._refusal.check()
            error = None if message is None else message.error()
            if error is None or error.code() != KafkaError._AUTO_OFFSET_RESET:
                continue
            tp = TopicPartition(message.topic(), message.partition())
            if text := _END.search(error.str()):
                end, epoch = int(text[1]), int(text[2])
                found[tp] = end if end >= 0 and epoch >= 0 else None
            elif message.offset() == BEYOND:  # other errors are of the read before the seek
                found[tp] = None
        if not found:
            raise _no_answer()
        return found
