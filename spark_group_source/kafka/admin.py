"""Questions about topics, groups and offsets, each with a deadline.

Runs in: the stream reader, the user's driver (CLI). Deliberately absent: any state of the group; every answer is fresh.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Any, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka import admin as kafka_admin

from spark_group_source.error_codes import Meaning, Request, is_token_missing, meaning
from spark_group_source.errors import TopicMissing
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.retry import RefusalWatch, Retry
from spark_group_source.kafka.translation import (
    Asker,
    GroupDescription,
    GroupMember,
    Topic,
    portions,
    to_kafka,
    to_ours,
)
from spark_group_source.model import StartAt, TopicPartition

REQUEST_TIMEOUT_S = 6.0
"""One question to the cluster, including the search for the broker that can answer. A client that asked a broker which
died goes on asking it; the next question is another client's."""
FIRST_TIMEOUT_S, FIRST_TRIES = 2.0, 2
"""So the first questions are given up sooner, and a cluster that is only slow has the whole time from then on, until it
answers sooner again."""
ANSWER_S_MAX = REQUEST_TIMEOUT_S + 1.0
"""How long an answer is waited for: the library's own timeout comes first."""
ERROR_POLL_S = 0.2
"""While an answer is pending: how often to look whether the cluster refused the credentials."""
MISSING_LOOKS = 3
MISSING_PAUSE_S = 1.0
"""How often, and how long apart, brokers are asked again for a topic that they say is not there."""
FORMER_MAX = 3
"""Clients that were given up and are kept for a while, because other threads may wait for their answers."""
AWAY_TIMEOUT_S, TROUBLED_S = 1.5, 10.0
"""One question, so long after one that was not answered, or not by all leaders: another client may know better whom to
ask, and no part of an answer is given before the rest is given up. If that was too short: the whole time again."""
RENEW_EVERY_S = 2.0
"""How often another client is made meanwhile. One that knew the old leader may never ask the new one."""
RETENTION = "offsets.retention.minutes"
GUESSES = frozenset({KafkaError._NOENT, KafkaError._UNKNOWN_PARTITION})
"""What the library says of partitions that are not there, and of those whose leader it does not know or reach."""
NO_MATCH = -1
"""The offset that brokers tell where no record is as young as a time. The library answers -1001, and no error, where no
broker answered it in time."""

COORDINATOR_TIMEOUT_S = 3_600.0
"""The library's own timeout of a question to the group's coordinator, far beyond ours, because the library must never
be the one that gives up: a coordinator that comes back after that makes it abort the whole process (librdkafka 2.16).
We stop waiting after :data:`REQUEST_TIMEOUT_S` and drop the late answer."""

Bound = Mapping[str, float]
COORDINATOR_BOUND: Bound = {"request_timeout": COORDINATOR_TIMEOUT_S}

T = TypeVar("T")
K = TypeVar("K")
Offsets = dict[TopicPartition, int]

# The library's stubs do not know the types of OffsetSpec, and hide ConfigResource.
_OffsetSpec: Any = kafka_admin.OffsetSpec  # type: ignore[attr-defined]
_ConfigResource: Any = kafka_admin.ConfigResource  # type: ignore[attr-defined]


class Missing:
    """A marker among this module's answers: the topic or partition is not there."""


class Admin:
    """Questions about topics and offsets. Any thread may ask; each question has a deadline.

    Args:
        settings: librdkafka settings of an admin client.
        environment: clock and clients; the real ones unless given.
        retries: how often a question that was not answered is asked again.
        retry_interval_s: the wait before it is.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        *,
        environment: Environment | None = None,
        retries: int = 3,
        retry_interval_s: float = 1.0,
    ) -> None:
        self._environment = environment or Environment()
        self._servers = settings["bootstrap.servers"]
        self._asker = Asker.of(settings)
        self._retries = retries
        self._retry = Retry(
            self._asker, self._environment, retries=retries, interval_s=retry_interval_s, pause=self.pause
        )
        self._settings = settings
        self._refusal = RefusalWatch()
        self._tokenless: KafkaError | None = None  # what the client last told of tokens that did not come
        self._renewed_ms: float = -math.inf
        self._slow = 0  # questions in a row that the time of the first ones was too short for
        self._former: deque[Any] = deque(maxlen=FORMER_MAX)
        # The object must outlive every answer: a collected AdminClient fails its pending futures.
        self._client = self._new_client()

    def topics(self, wants: Callable[[str], bool]) -> dict[str, Topic]:
        """Every topic that ``wants`` says yes to, with its id and partition count."""
        return self.describe([name for name in self.listed() if wants(name)])

    def listed(self) -> dict[str, Any]:
        """The library's word of every topic that this user may see; each has ``partitions``."""
        op = "listing topics"
        listed = self._asked(Request.TOPICS, op, lambda _: self._client.list_topics(timeout=REQUEST_TIMEOUT_S))
        found: dict[str, Any] = listed.topics
        return found

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        """The named topics; those that a broker says do not exist are left out. It may not have heard of a new one."""
        names = sorted(set(names))
        if not names:
            return {}
        topics = TopicCollection(names)
        op = "describing topics"
        answers = self._ask(Request.TOPICS, op, lambda bound: self._client.describe_topics(topics, **bound))
        return {
            name: Topic(str(found.topic_id), len(found.partitions))
            for name, found in answers.items()
            if not isinstance(found, Missing)
        }

    def existing(self, names: Iterable[str]) -> dict[str, Topic]:
        """The named topics that exist. One that is told to be missing is asked for again: for a moment a broker may not
        know a new one, and one that just started knows none."""
        return self._looked_for(set(names), self.describe)

    def require(self, names: Iterable[str]) -> dict[str, Topic]:
        """The named topics, all of them.

        Raises:
            TopicMissing: the message lists the ones that do not exist.
        """
        names = list(names)
        found = self.existing(names)
        missing = sorted(set(names) - found.keys())
        if missing:
            raise TopicMissing(
                f"topic {', '.join(missing)} does not exist on {self._servers}. Create it first, or correct its name",
                topics=missing,
            )
        return found

    def latest(self, tps: Iterable[TopicPartition], *, committed: bool = True, whole: bool = True) -> Offsets:
        """Where each log ends. Partitions that a broker says are not there are left out.

        Args:
            committed: at its last stable offset.
            whole: False leaves out those that were not answered, too, if any was: their leader moves, or is away.
        """
        return self._offsets(tps, _OffsetSpec.latest(), committed=committed, whole=whole)

    def latest_of_all(self, tps: Iterable[TopicPartition], *, committed: bool) -> Offsets:
        """The same of partitions that exist, as far as the caller knows: what holds for :meth:`existing` does here."""
        return self._looked_for(set(tps), partial(self.latest, committed=committed))

    def ends(self, tps: Iterable[TopicPartition], *, committed: bool) -> tuple[Offsets, Offsets]:
        """:meth:`latest` of those that were answered, and the leader epochs, where leaders told theirs."""
        found = self._told(dict.fromkeys(tps, _OffsetSpec.latest()), committed=committed, whole=False)
        epochs = {tp: epoch for tp, told in found.items() if (epoch := told.leader_epoch) is not None and epoch >= 0}
        return {tp: told.offset for tp, told in found.items()}, epochs

    def earliest(self, tps: Iterable[TopicPartition], *, whole: bool = True) -> dict[TopicPartition, int]:
        """Where each log begins; who is left out: as in :meth:`latest`."""
        return self._offsets(tps, _OffsetSpec.earliest(), whole=whole)

    def at_time(self, times: Mapping[TopicPartition, int], *, whole: bool = True) -> dict[TopicPartition, int | None]:
        """The first offset whose record is not older than the given milliseconds since the epoch; None: no such one."""
        specs = {tp: _OffsetSpec.for_timestamp(at_ms) for tp, at_ms in times.items()}
        found = self._told(specs, whole=whole, least=NO_MATCH)
        return {tp: told.offset if told.offset >= 0 else None for tp, told in found.items()}

    def starts(self, words: Mapping[TopicPartition, StartAt], *, committed: bool) -> dict[TopicPartition, int | None]:
        """The offset that each of these words stands for, with one question for all of a kind.

        None where no record is as young as the time. Partitions that were not answered are left out.

        Args:
            committed: the latest offset is the last stable one.
        """
        found: dict[TopicPartition, int | None] = {tp: at.value for tp, at in words.items() if at.kind == "offset"}
        found.update(self.earliest((tp for tp, at in words.items() if at.kind == "earliest"), whole=False))
        latest = (tp for tp, at in words.items() if at.kind == "latest")
        found.update(self.latest(latest, committed=committed, whole=False))
        found.update(self.at_time({tp: at.value for tp, at in words.items() if at.kind == "time"}, whole=False))
        return found

    def group(self, group: str) -> GroupDescription:
        """Who is in the group. A group that never was is described as dead, without members."""
        found = self._ask(
            Request.GROUP,
            "describing the group",
            lambda _: self._client.describe_consumer_groups([group], **COORDINATOR_BOUND),
        )[group]
        if isinstance(found, Missing):
            return GroupDescription("dead", "", "", ())
        return GroupDescription(
            found.state.name.lower(),
            found.type.name.lower(),
            found.partition_assignor,
            tuple(
                GroupMember(
                    m.member_id, m.client_id, m.group_instance_id or "", m.host, to_ours(m.assignment.topic_partitions)
                )
                for m in found.members
            ),
            f"{node.host}:{node.port} ({node.id})" if (node := found.coordinator) else "",
            found.is_simple_consumer_group,
            node.id if node else -1,
        )

    def retention_ms(self, group: str) -> int | None:
        """How long the group's coordinator keeps offsets that nobody needs (``offsets.retention.minutes``); None where
        it does not tell.

        Raises:
            AccessDenied: the user needs DescribeConfigs on the cluster, told twice.
        """
        broker = self.group(group).coordinator_id
        if broker < 0:  # there is no such group
            return None
        at = _ConfigResource(_ConfigResource.Type.BROKER, str(broker))
        op = "asking how long offsets are kept"
        found = self._ask(Request.CONFIGS, op, lambda bound: self._client.describe_configs([at], **bound))
        told = found[at].get(RETENTION) if not isinstance(found[at], Missing) else None
        return int(told.value) * 60_000 if told is not None and told.value else None

    def close(self) -> None:
        """No answer is wanted any more; nothing may be asked after it. The clients end here and now, for the library
        ends the whole process where one ends on its own thread: there a late answer lets garbage be collected."""
        self._former.clear()
        self._client = None

    def pause(self, wait_s: float) -> None:
        """Let time pass between two questions, serving the client meanwhile."""
        self._environment.pause(wait_s)
        self._client.poll(0)

    def _looked_for(self, wanted: set[K], find: Callable[[set[K]], dict[K, T]]) -> dict[K, T]:
        """All of it, or what is there after :data:`MISSING_LOOKS`."""
        found = find(wanted)
        for _ in range(MISSING_LOOKS):
            if found.keys() >= wanted:
                break
            self.pause(MISSING_PAUSE_S)
            found |= find(wanted - found.keys())
        return found

    def _offsets(self, tps: Iterable[TopicPartition], spec: Any, *, committed: bool = False, whole: bool) -> Offsets:
        found = self._told(dict.fromkeys(tps, spec), committed=committed, whole=whole)
        return {tp: told.offset for tp, told in found.items()}

    def _told(
        self, specs: Mapping[TopicPartition, Any], *, committed: bool = False, whole: bool, least: int = 0
    ) -> dict[TopicPartition, Any]:
        if not specs:
            return {}
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        requests = [{to_kafka(tp): specs[tp] for tp in portion} for portion in portions(specs)]
        ask = partial(self._list_offsets, requests, level, whole, least)
        answers = self._asked(Request.OFFSETS, "listing offsets", ask)
        return {TopicPartition(p.topic, p.partition): end for p, end in answers.items() if not isinstance(end, Missing)}

    def _list_offsets(
        self, requests: Iterable[dict[Any, Any]], level: IsolationLevel, whole: bool, least: int, bound: Bound
    ) -> dict[Any, Any]:
        """What brokers say is not there is left out. The library says of those what it says of partitions whose leader
        it does not know, so a broker is asked."""
        answers: dict[Any, Any] = {}
        failed: dict[Any, KafkaException] = {}
        futures: dict[Any, Future[Any]] = {}
        for request in requests:
            futures |= self._client.list_offsets(request, isolation_level=level, **bound)
        for partition, future in futures.items():
            try:
                answer = self._answer(Request.OFFSETS, future, partition.topic)
                if not isinstance(answer, Missing) and answer.offset < least:
                    raise _no_answer()
                answers[partition] = answer
            except KafkaException as exc:
                if self._refusal.error is not None:
                    raise
                failed[partition] = exc
        if failed and answers and not whole:
            if self._environment.now_ms() >= self._renewed_ms + RENEW_EVERY_S * 1000:
                self._renew()
            return answers
        if not failed:
            return answers
        guessed = {p: exc for p, exc in failed.items() if exc.args[0].code() in GUESSES}
        wrong = [exc for p, exc in failed.items() if p not in guessed] or self._there(guessed, bound)
        if wrong:
            raise wrong[0]
        return answers

    def _there(self, failed: Mapping[Any, KafkaException], bound: Bound) -> list[KafkaException]:
        """The failures of those partitions that are there, as far as a broker says."""
        topics = TopicCollection(sorted({p.topic for p in failed}))
        futures = self._client.describe_topics(topics, **bound)
        answers = self._answers(Request.TOPICS, futures)
        counts = {  # a topic of which no partition is told may have any
            name: 0 if isinstance(topic, Missing) else len(topic.partitions) or inf for name, topic in answers.items()
        }
        return [exc for p, exc in failed.items() if p.partition < counts[p.topic]]

    def _ask(self, request: Request, op: str, send: Callable[[Bound], Mapping[Any, "Future[Any]"]]) -> dict[Any, Any]:
        """Send a question and collect its answers; what does not exist is answered with :class:`Missing`."""
        return self._asked(request, op, lambda bound: self._answers(request, send(bound)))

    def _answers(self, request: Request, futures: Mapping[Any, "Future[Any]"]) -> dict[Any, Any]:
        return {name: self._answer(request, future, name) for name, future in futures.items()}

    def _answer(self, request: Request, future: "Future[Any]", name: str = "") -> Any:
        """One answer; ``name``: the topic or group that it is about."""
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
        return FIRST_TIMEOUT_S if self._slow < FIRST_TRIES and self._retries > 0 else REQUEST_TIMEOUT_S

    def _asked(self, request: Request, op: str, ask: Callable[[Bound], T]) -> T:
        short = False

        def once() -> T:
            nonlocal short
            troubled = self._environment.now_ms() < self._renewed_ms + TROUBLED_S * 1000
            short = troubled and not short and self._retries > 0
            asked_ms = self._environment.now_ms()
            try:
                answer = ask({"request_timeout": AWAY_TIMEOUT_S if short else self._timeout_s()})
                if not short:  # an answer may leave out what a slow leader was asked
                    self._slow = (
                        self._slow + 1 if self._environment.now_ms() - asked_ms >= FIRST_TIMEOUT_S * 1000 else 0
                    )
                return answer
            except KafkaException as exc:
                self._slow += not short
                self._client.poll(0)  # runs the error callback
                passes = meaning(request, exc.args[0].code()) is Meaning.RETRY
                told = self._tokenless if passes else None
                self._renew()
                raise exc if told is None else KafkaException(told) from exc

        answer = self._retry(request, op, once)
        self._forget_errors()  # whatever was refused meanwhile, it worked
        return answer

    def _on_error(self, error: KafkaError) -> None:
        self._refusal(error)
        if is_token_missing(error.code(), error.str()):
            self._tokenless = error

    def _renew(self) -> None:
        """The next question is asked by another client, which knows nothing yet.

        One that failed goes on asking the leader, controller or coordinator that it knows, for as long as that is away
        or says that it is not any more; and it says only once in half a minute that it was refused.
        """
        self._forget_errors()
        self._renewed_ms = self._environment.now_ms()
        self._former.append(self._client)
        self._client = self._new_client()

    def _forget_errors(self) -> None:
        self._refusal.clear()
        self._tokenless = None

    def _new_client(self) -> Any:
        return self._environment.admin({**self._settings, "error_cb": self._on_error})


def _no_answer() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer"))
