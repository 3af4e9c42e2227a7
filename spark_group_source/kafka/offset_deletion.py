"""Deleting committed offsets of a group, also of one with members (KIP-496): librdkafka's call, by ctypes.

Runs in: a terminal, the user's driver. Deliberately absent: which partitions (``cli.offsets``), and what their answers
mean (``answers``). The Python client has no such call, librdkafka has: a client of its own is made for one question,
used by the thread that asks, and destroyed.

No C code calls back into Python: errors, log lines and the wish for a token are polled as events.
"""

import ctypes as c
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.answers import CODES, Meaning, Request, meaning
from spark_group_source.errors import GroupError, OptionError
from spark_group_source.kafka.asking import CONFIRM_S, until_answered
from spark_group_source.kafka.runtime import Runtime
from spark_group_source.kafka.translation import Asker, refusal_of_connection
from spark_group_source.librdkafka import CLIENT, INT, PARTITIONS, POINTER, POINTERS, SIZE, TEXT, Signatures, calls
from spark_group_source.model import TopicPartition
from spark_group_source.options.callables import CALLABLES, TOKEN_CALLABLE, Named, needs_python
from spark_group_source.options.client import without_secrets

log = logging.getLogger(__name__)

ANSWER_S_MAX = 10.0
"""How long one answer is waited for, including the search for the group's coordinator."""
REQUEST_TIMEOUT_MS = 3_600_000
"""The library's own timeout, far beyond ours: see ``admin.COORDINATOR_TIMEOUT_S``. The client is destroyed before."""
POLL_MS = 100
"""How often events of the client are looked at while the answer is awaited."""
TIMES_GONE = 2
"""How often a broker must say that there is no such group."""
RESPONSE_ERROR = "OffsetDelete response error: "
TEXT_BYTES = 512

_PRODUCER = 0
_ANY_OPERATION = 0
_EVENT_LOG, _EVENT_ERROR, _EVENT_TOKEN = 0x4, 0x8, 0x100

_CALLS: Signatures = {
    **CLIENT,
    "destroy": (None, POINTER),
    "event_config_string": (TEXT, POINTER),
    "oauthbearer_set_token": (INT, POINTER, TEXT, c.c_int64, TEXT, c.POINTER(TEXT), SIZE, TEXT, SIZE),
    "oauthbearer_set_token_failure": (INT, POINTER, TEXT),
    "DeleteConsumerGroupOffsets_new": (POINTER, TEXT, PARTITIONS),
    "DeleteConsumerGroupOffsets_destroy": (None, POINTER),
    "DeleteConsumerGroupOffsets": (None, POINTER, POINTERS, SIZE, POINTER, POINTER),
    "event_DeleteConsumerGroupOffsets_result": (POINTER, POINTER),
    "DeleteConsumerGroupOffsets_result_groups": (POINTERS, POINTER, c.POINTER(SIZE)),
    "group_result_error": (POINTER, POINTER),
    "group_result_partitions": (PARTITIONS, POINTER),
}


def delete_offsets(
    settings: Mapping[str, str],
    group: str,
    tps: Collection[TopicPartition],
    *,
    runtime: Runtime | None = None,
    retries: int = 0,
) -> dict[TopicPartition, int]:
    """Ask the group's coordinator to forget committed offsets. It may be asked twice: what is gone stays gone.

    Args:
        settings: librdkafka settings of an admin client.
        group: the consumer group; it may have members.
        tps: at least one partition.
        retries: how often what was not answered is asked again.

    Returns:
        The broker's code for each partition: 0 where the group has no offset of it now, ``GROUP_SUBSCRIBED_TO_TOPIC``
        where a member subscribes to the topic. Partitions that the answer leaves out were not answered.

    Raises:
        BrokerUnavailable: no answer within :data:`ANSWER_S_MAX`. The offsets may be deleted all the same: look.
        AccessDenied: the user needs Delete on the group, told twice.
        GroupError: the broker refuses the whole request: there is no such group, or members of another kind (as those
            of Kafka Connect) are in it.
        OptionError: the client refuses a setting, or it is one that only the Python client understands.
    """
    runtime = runtime or Runtime()

    def ask() -> dict[TopicPartition, int]:
        for _ in range(TIMES_GONE):
            try:
                return _ask_once(settings, group, tps)
            except KafkaException as exc:
                if meaning(Request.DELETE, exc.args[0].code()) is not Meaning.GONE:
                    raise
                runtime.pause(CONFIRM_S)
        raise no_such_group(settings, group)

    return until_answered(
        Request.DELETE,
        "deleting committed offsets",
        ask,
        asker=Asker.of(settings, group=group),
        now_ms=runtime.now_ms,
        pause=runtime.pause,
        retries=retries,
    )


def _ask_once(settings: Mapping[str, str], group: str, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    client = _Client(settings)
    try:
        return client.delete(group, tps)
    finally:
        client.close()


class _Client:
    """A client for one question. One thread makes it, asks and closes it."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._lib = lib = _library()
        self._token = Named(TOKEN_CALLABLE, settings[TOKEN_CALLABLE]) if TOKEN_CALLABLE in settings else None
        given = {name: value for name, value in settings.items() if name not in CALLABLES}
        if needs_python(given):
            raise OptionError(
                "deleting offsets takes a login that librdkafka can do by itself; name a function for tokens in "
                "oauth_cb instead of sasl.oauthbearer.metadata.authentication.type"
            )
        why = c.create_string_buffer(TEXT_BYTES)
        conf = lib["conf_new"]()
        lib["conf_set_events"](conf, _EVENT_LOG | _EVENT_ERROR | (_EVENT_TOKEN if self._token else 0))
        for name, value in {**given, "log.queue": "true"}.items():
            if lib["conf_set"](conf, name.encode(), value.encode(), why, len(why)):
                lib["conf_destroy"](conf)
                raise _refused_setting(why.value, settings)
        self._rk = lib["new"](_PRODUCER, conf, why, len(why))
        if not self._rk:
            lib["conf_destroy"](conf)
            raise _refused_setting(why.value, settings)
        lib["set_log_queue"](self._rk, None)  # to the main queue, where errors and wishes for tokens arrive too
        self._main = lib["queue_get_main"](self._rk)
        self._queue = lib["queue_new"](self._rk)
        self._refused: KafkaError | None = None

    def delete(self, group: str, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        lib, why = self._lib, c.create_string_buffer(TEXT_BYTES)
        partitions = lib["topic_partition_list_new"](len(tps))
        for tp in tps:
            lib["topic_partition_list_add"](partitions, tp.topic.encode(), tp.partition)
        options = lib["AdminOptions_new"](self._rk, _ANY_OPERATION)
        lib["AdminOptions_set_request_timeout"](options, REQUEST_TIMEOUT_MS, why, len(why))
        question = c.c_void_p(lib["DeleteConsumerGroupOffsets_new"](group.encode(), partitions))
        lib["DeleteConsumerGroupOffsets"](self._rk, c.byref(question), 1, options, self._queue)  # it copies all three
        lib["DeleteConsumerGroupOffsets_destroy"](question)
        lib["AdminOptions_destroy"](options)
        lib["topic_partition_list_destroy"](partitions)
        event = self._awaited()
        try:
            return self._codes(event)
        finally:
            lib["event_destroy"](event)

    def close(self) -> None:
        """End the client's threads. What was not answered by now is wanted by nobody."""
        self._lib["queue_destroy"](self._queue)
        self._lib["queue_destroy"](self._main)
        self._lib["destroy"](self._rk)

    def _awaited(self) -> int:
        until_s = time.monotonic() + ANSWER_S_MAX
        while time.monotonic() < until_s:
            if event := self._lib["queue_poll"](self._queue, POLL_MS):
                return int(event)
            self._serve()
            if self._refused is not None:
                raise KafkaException(self._refused)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer"))

    def _codes(self, event: int) -> dict[TopicPartition, int]:
        lib, count = self._lib, c.c_size_t()
        if code := lib["event_error"](event):
            raise KafkaException(_said(code, _text(lib["event_error_string"](event))))
        result = lib["event_DeleteConsumerGroupOffsets_result"](event)
        found: dict[TopicPartition, int] = {}
        for told in lib["DeleteConsumerGroupOffsets_result_groups"](result, c.byref(count))[: count.value]:
            if (error := lib["group_result_error"](told)) and (code := lib["error_code"](error)):
                raise KafkaException(KafkaError(code, _text(lib["error_string"](error))))
            partitions = lib["group_result_partitions"](told).contents
            for at in partitions.elems[: partitions.cnt]:
                found[TopicPartition(at.topic.decode(), at.partition)] = at.err
        return {tp: code for tp, code in found.items() if code >= 0}  # below 0 nobody has answered

    # --- what the client says meanwhile -----------------------------------------------------------------------------

    def _serve(self) -> None:
        lib = self._lib
        while event := lib["queue_poll"](self._main, 0):
            kind = lib["event_type"](event)
            if kind == _EVENT_ERROR:
                error = KafkaError(lib["event_error"](event), _text(lib["event_error_string"](event)))
                self._refused = refusal_of_connection(error) or self._refused
            elif kind == _EVENT_LOG:
                facility, line, level = c.c_char_p(), c.c_char_p(), c.c_int()
                lib["event_log"](event, c.byref(facility), c.byref(line), c.byref(level))
                log.log(logging.DEBUG, "%s: %s", _text(facility.value), _text(line.value))
            elif kind == _EVENT_TOKEN and self._token is not None:
                self._give_token(self._token, _text(lib["event_config_string"](event)))
            lib["event_destroy"](event)

    def _give_token(self, function: Callable[[str], Any], argument: str) -> None:
        why = c.create_string_buffer(TEXT_BYTES)
        try:
            token, expires_s, *more = function(argument)
            principal = str(more[0]) if more else ""
            pairs = [str(text).encode() for pair in (more[1].items() if len(more) > 1 else ()) for text in pair]
            extensions = (c.c_char_p * len(pairs))(*pairs)
            set_token = self._lib["oauthbearer_set_token"]
            until_ms = int(expires_s * 1000)
            failed = set_token(
                self._rk, token.encode(), until_ms, principal.encode(), extensions, len(pairs), why, len(why)
            )
            text = _text(why.value) if failed else ""
        except Exception as exc:  # noqa: BLE001 - a function of the user's
            text = f"the function for tokens raised {type(exc).__name__}: {exc}"
        if text:
            self._lib["oauthbearer_set_token_failure"](self._rk, text.encode())


def _said(code: int, text: str) -> KafkaError:
    """What a broker says of the whole request is told under a code of the library's, and as text behind these words."""
    words = text.partition(RESPONSE_ERROR)[2]
    told = [known for known in CODES.values() if known > 0 and KafkaError(known).str() == words] if words else []
    return KafkaError(told[0]) if told else KafkaError(code, text)


def no_such_group(settings: Mapping[str, str], group: str) -> GroupError:
    return GroupError(f"there is no group {group!r} on {settings['bootstrap.servers']}", group=group)


def _library() -> dict[str, Any]:
    try:
        return calls(_CALLS)
    except ImportError as exc:
        raise OptionError(
            f"offsets cannot be deleted with this confluent_kafka: {exc}; install 2.16 or newer"
        ) from None


def _refused_setting(why: bytes, settings: Mapping[str, str]) -> OptionError:
    return OptionError(f"the Kafka client refuses a setting: {without_secrets(_text(why), settings)}")


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")


def name_of(code: int) -> str:
    """The name of a broker's code, as in ``docs/answers.md``."""
    return next((name for name, value in CODES.items() if value == code), f"error {code}")
