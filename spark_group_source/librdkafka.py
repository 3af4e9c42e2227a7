"""librdkafka through ctypes: loading the library, declaring its functions, and the base class of its clients.

Runs in: executor workers, the stream reader, a terminal; wherever ``reader`` and ``kafka`` call C functions.
Deliberately absent: requests and their responses (each caller declares its functions), and callbacks from C into
Python: errors, log lines and token refreshes are polled as events. The package confluent_kafka is not imported, because
loading it is slow; ``aws_iam`` is the exception.
"""

import ctypes as c
import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spark_group_source.errors import OptionError, SetupError
from spark_group_source.model import TopicPartition
from spark_group_source.options.client import TOKEN_CALLABLE, UserFunction, refused_setting

log = logging.getLogger(__name__)

POINTER, POINTERS, TEXT = c.c_void_p, c.POINTER(c.c_void_p), c.c_char_p
INT, INT64, SIZE = c.c_int, c.c_int64, c.c_size_t

Signatures = Mapping[str, Sequence[Any]]
"""Functions by name without ``rd_kafka_``: the type of the result, then the types of the arguments."""


class Partition(c.Structure):
    """``rd_kafka_topic_partition_t``."""

    _fields_ = [
        ("topic", c.c_char_p),
        ("partition", c.c_int32),
        ("offset", c.c_int64),
        ("metadata", c.c_void_p),
        ("metadata_size", c.c_size_t),
        ("opaque", c.c_void_p),
        ("err", c.c_int),
        ("private", c.c_void_p),
    ]


class PartitionList(c.Structure):
    """``rd_kafka_topic_partition_list_t``."""

    _fields_ = [("cnt", c.c_int), ("size", c.c_int), ("elems", c.POINTER(Partition))]


PARTITIONS = c.POINTER(PartitionList)

CLIENT: Signatures = {
    "err2str": (TEXT, INT),
    "conf_new": (POINTER,),
    "conf_destroy": (None, POINTER),
    "conf_set": (INT, POINTER, TEXT, TEXT, TEXT, SIZE),
    "conf_set_events": (None, POINTER, INT),
    "new": (POINTER, INT, POINTER, TEXT, SIZE),
    "destroy_flags": (None, POINTER, INT),
    "set_log_queue": (INT, POINTER, POINTER),
    "queue_new": (POINTER, POINTER),
    "queue_get_main": (POINTER, POINTER),
    "queue_destroy": (None, POINTER),
    "queue_poll": (POINTER, POINTER, INT),
    "event_type": (INT, POINTER),
    "event_error": (INT, POINTER),
    "event_error_string": (TEXT, POINTER),
    "event_config_string": (TEXT, POINTER),
    "event_log": (INT, POINTER, c.POINTER(TEXT), c.POINTER(TEXT), c.POINTER(INT)),
    "event_destroy": (None, POINTER),
    "oauthbearer_set_token": (INT, POINTER, TEXT, INT64, TEXT, c.POINTER(TEXT), SIZE, TEXT, SIZE),
    "oauthbearer_set_token_failure": (INT, POINTER, TEXT),
    "topic_partition_list_new": (PARTITIONS, INT),
    "topic_partition_list_add": (c.POINTER(Partition), PARTITIONS, TEXT, c.c_int32),
    "topic_partition_list_destroy": (None, PARTITIONS),
    "AdminOptions_new": (POINTER, POINTER, INT),
    "AdminOptions_set_request_timeout": (INT, POINTER, INT, TEXT, SIZE),
    "AdminOptions_destroy": (None, POINTER),
    "error_code": (INT, POINTER),
    "error_string": (TEXT, POINTER),
}
"""The functions that every client needs: settings, events, tokens, partition lists, errors."""

OLDEST = 0x020E_00_00
"""The oldest librdkafka, as ``rd_kafka_version()`` returns it: 2.14.0. In 2.13 ``rd_kafka_position()`` is one offset
too high after records were taken from a queue in batches."""
PACKAGE = "confluent-kafka>=2.14,<3"
"""The packages with a supported library."""

PRODUCER, CONSUMER = 0, 1
_EVENT_LOG, _EVENT_ERROR, _EVENT_TOKEN = 0x4, 0x8, 0x100
_NO_CONSUMER_CLOSE = 8
_ANY_OPERATION = 0
TEXT_BYTES = 512
"""The size of buffers for error texts."""
ERRORS_MAX = 100
"""The maximum number of errors of one client that are kept until they are read."""
TOKEN_S_MAX = 10.0
"""How long a new client waits for librdkafka to request the first token. Connections fail if there is none by then."""
POLL_MS = 100
"""How often events are polled while the caller waits for a response."""
_AWS_MARKER, _AWS_IAM = "sasl.oauthbearer.metadata.authentication.type", "aws_iam"


class Library:
    """librdkafka's functions as attributes, named without ``rd_kafka_``.

    Raises:
        SetupError: the library is not installed, or does not export one of the functions.
    """

    def __init__(self, signatures: Signatures) -> None:
        rdkafka = _loaded()
        for name, (result, *arguments) in signatures.items():
            call = getattr(rdkafka, f"rd_kafka_{name}", None)
            if call is None:
                raise SetupError(
                    f"{rdkafka._name} does not export rd_kafka_{name}. Install the wheel of confluent-kafka on "
                    f"every executor: `pip install --only-binary :all: '{PACKAGE}'`"
                )
            call.restype, call.argtypes = result, arguments
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:  # Any: ctypes functions, set by name above
        raise AttributeError(name)


@functools.cache
def _loaded() -> c.CDLL:
    rdkafka = c.CDLL(str(extension()))
    if rdkafka.rd_kafka_version() < OLDEST:
        rdkafka.rd_kafka_version_str.restype = TEXT
        raise SetupError(
            f"librdkafka {text(rdkafka.rd_kafka_version_str())} in {rdkafka._name} is too old: the position of a "
            f"partition may be ahead of its records, which a task would leave out. Run `pip install '{PACKAGE}'`"
        )
    return rdkafka


def extension() -> Path:
    """Return the path of confluent_kafka's extension module, which loads librdkafka; does not import the package.

    Raises:
        SetupError: confluent_kafka is not installed.
    """
    package = importlib.util.find_spec("confluent_kafka")
    for folder in (package.submodule_search_locations or []) if package else []:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:  # another Python's may be beside this one's
            if (path := Path(folder) / f"cimpl{suffix}").exists():
                return path
    raise SetupError(f"confluent_kafka is not installed in this Python: `pip install '{PACKAGE}'`")


def text(raw: bytes | None) -> str:
    """Decode a C string; None is an empty text."""
    return (raw or b"").decode(errors="replace")


class Client:
    """A librdkafka client whose events are polled. One thread at a time.

    Args:
        lib: the declared functions, including those of :data:`CLIENT`.
        kind: :data:`PRODUCER` or :data:`CONSUMER`.
        settings: librdkafka's; may have a function that returns tokens (``oauth_cb``, ``aws_iam``).

    Raises:
        OptionError: librdkafka refuses a setting, or the token function cannot be imported.
    """

    def __init__(self, lib: Library, kind: int, settings: Mapping[str, str]) -> None:
        self.lib = lib
        self.rk: int | None = None
        """The handle; None after :meth:`close`, and in a forked child, which has none of the client's threads."""
        own, self._token = token_source(settings)
        self._is_token_requested = False
        why = c.create_string_buffer(TEXT_BYTES)
        conf = lib.conf_new()
        lib.conf_set_events(conf, _EVENT_ERROR | _EVENT_LOG | (_EVENT_TOKEN if self._token else 0))
        for name, value in {**own, "log.queue": "true"}.items():
            if lib.conf_set(conf, name.encode(), value.encode(), why, len(why)):
                lib.conf_destroy(conf)
                raise refused_setting(text(why.value), settings)
        self.rk = lib.new(kind, conf, why, len(why))
        if not self.rk:
            lib.conf_destroy(conf)
            raise refused_setting(text(why.value), settings)
        lib.set_log_queue(self.rk, None)  # to the main queue, like errors and token refreshes
        self._main = lib.queue_get_main(self.rk)
        self.errors: deque[tuple[int, str]] = deque(maxlen=ERRORS_MAX)
        """Errors of the client as a whole that :meth:`serve` polled: librdkafka's code and text."""
        _clients.add(self)
        until_s = time.monotonic() + TOKEN_S_MAX
        while self._token is not None and not self._is_token_requested and time.monotonic() < until_s:
            self.serve(POLL_MS)

    def serve(self, wait_ms: int = 0) -> None:
        """Handle all events of the main queue: log lines are logged, tokens are refreshed, errors are kept."""
        lib = self.lib
        while event := lib.queue_poll(self._main, wait_ms):
            wait_ms = 0
            kind = lib.event_type(event)
            if kind == _EVENT_ERROR:
                self.errors.append((int(lib.event_error(event)), text(lib.event_error_string(event))))
            elif kind == _EVENT_LOG:
                facility, line, level = c.c_char_p(), c.c_char_p(), c.c_int()
                lib.event_log(event, c.byref(facility), c.byref(line), c.byref(level))
                quiet = level.value > 4 or facility.value == b"CONFWARN"  # a setting of another kind of client
                log.log(logging.DEBUG if quiet else logging.INFO, "%s: %s", text(facility.value), text(line.value))
            elif kind == _EVENT_TOKEN and self._token is not None:
                self._set_token(self._token, text(lib.event_config_string(event)))
            lib.event_destroy(event)

    def _set_token(self, function: Callable[[str], Any], argument: str) -> None:
        self._is_token_requested = True
        why = c.create_string_buffer(TEXT_BYTES)
        try:
            token, expires_s, *more = function(argument)
            principal = str(more[0]) if more else ""
            pairs = [str(word).encode() for pair in (more[1].items() if len(more) > 1 else ()) for word in pair]
            extensions = (c.c_char_p * len(pairs))(*pairs)
            until_ms = int(expires_s * 1000)
            failed = self.lib.oauthbearer_set_token(
                self.rk, token.encode(), until_ms, principal.encode(), extensions, len(pairs), why, len(why)
            )
            failure = text(why.value) if failed else ""
        except Exception as exc:  # noqa: BLE001 - a function of the user
            failure = f"the token function raised {type(exc).__name__}: {exc}"
        if failure:
            self.lib.oauthbearer_set_token_failure(self.rk, failure.encode())

    def partitions(self, positions: Iterable[tuple[TopicPartition, int]]) -> Any:  # Any: a ctypes pointer
        """Return a new list of partitions with offsets; the caller destroys it."""
        found = self.lib.topic_partition_list_new(16)
        for tp, offset in positions:
            self.lib.topic_partition_list_add(found, tp.topic.encode(), tp.partition).contents.offset = offset
        return found

    def admin_options(self, timeout_s: float) -> Any:  # Any: a C pointer
        """Return new options for an admin request; the caller destroys them."""
        why = c.create_string_buffer(TEXT_BYTES)
        options = self.lib.AdminOptions_new(self.rk, _ANY_OPERATION)
        self.lib.AdminOptions_set_request_timeout(options, round(timeout_s * 1000), why, len(why))
        return options

    def close(self) -> None:
        """Stop the client's threads, without leaving a group: it is not in one. Does nothing the second time."""
        rk, self.rk = self.rk, None
        if rk:
            self.lib.queue_destroy(self._main)
            self.lib.destroy_flags(rk, _NO_CONSUMER_CLOSE)


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _forget_clients() -> None:
    for client in _clients:
        client.rk = None


os.register_at_fork(after_in_child=_forget_clients)


def token_source(settings: Mapping[str, str]) -> tuple[dict[str, str], Callable[[str], Any] | None]:
    """Split settings into those that librdkafka knows, and the Python function that returns its tokens, if there is
    one.

    Raises:
        OptionError: the function cannot be imported in this process.
    """
    own = dict(settings)
    if TOKEN_CALLABLE in own:
        return own, UserFunction(own.pop(TOKEN_CALLABLE))
    if own.get(_AWS_MARKER, "").strip().lower() != _AWS_IAM:
        return own, None
    del own[_AWS_MARKER]
    own.pop("sasl.oauthbearer.method", None)
    extensions = own.pop("sasl.oauthbearer.extensions", None)
    try:
        aws = importlib.import_module("confluent_kafka._oauthbearer.aws.aws_autowire")
        return own, aws.create_handler(own.get("sasl.oauthbearer.config", ""), extensions)
    except (ImportError, ValueError, RuntimeError) as exc:
        raise OptionError(
            f"kafka.{_AWS_MARKER} is {_AWS_IAM}, but tokens cannot be created here ({type(exc).__name__}: {exc}). Run "
            "`pip install 'confluent-kafka[oauthbearer-aws]'` on every executor, or set kafka.oauth_cb to a function",
            names=[_AWS_MARKER],
        ) from None
