"""The ``kafka.*`` options: which ones are refused, which Kafka client gets which, and functions that they name.

Runs in: every process. Deliberately absent: the list of all setting names, which only the client library has (``kafka``
builds its clients at ``load()``, which refuses unknown names and bad values), the translation of Java's names and
stores (``java``), and pickled functions. Options are text: a setting whose value is a function contains its name, and
each process that makes a client imports the function.
"""

import logging
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from spark_group_source.errors import OptionError
from spark_group_source.options.java import RENAMED, translate

log = logging.getLogger(__name__)

MASK: Final = "***"
_SECRET_WORDS: Final = ("password", "passphrase", "secret", "token", "key", "jaas", "pem", "credential")
_SECRET_NAMES: Final = frozenset({"sasl.oauthbearer.config", "sasl.kerberos.kinit.cmd"})

# Defaults of the client library, for checks of two related settings of which only one is set.
SESSION_TIMEOUT_MS: Final = 45_000
"""The default of ``kafka.session.timeout.ms``."""
HEARTBEAT_INTERVAL_MS: Final = 3_000
"""The default of ``kafka.heartbeat.interval.ms``."""
MAX_POLL_INTERVAL_MS: Final = 300_000
"""The default of ``kafka.max.poll.interval.ms``."""

_OFFSETS = "the source commits offsets itself, after their rows are durable"
_DESERIALIZER = "key and value are always binary; decode them with DataFrame functions"
_INSTANCE_ID = "the source sets it for each member; set groupMembers for the number of members"
_CALLBACK = "its value is a Python object, and options are text"
_INTERCEPTOR = "an interceptor can change records, and a replayed batch must have the same rows"

REFUSED: Final[Mapping[str, str]] = {
    "auto.offset.reset": "use startingOffsets; an offset that is out of range must fail instead of being reset",
    "enable.auto.commit": _OFFSETS,
    "auto.commit.enable": _OFFSETS,
    "auto.commit.interval.ms": _OFFSETS,
    "enable.auto.offset.store": _OFFSETS,
    "offset.store.method": _OFFSETS,
    "offset.store.path": _OFFSETS,
    "offset.store.sync.interval.ms": _OFFSETS,
    "key.deserializer": _DESERIALIZER,
    "value.deserializer": _DESERIALIZER,
    "interceptor.classes": _INTERCEPTOR,
    "interceptors": _INTERCEPTOR,
    "enable.partition.eof": "the source needs it to detect the end of a range",
    "group.instance.id": _INSTANCE_ID,
    "group.protocol.type": "the source joins as a consumer",
    "transactional.id": "the source derives it from the group and the checkpoint, so that Kafka fences an old driver",
    "metadata.broker.list": "use kafka.bootstrap.servers",
    "topic.blacklist": "use subscribePattern",
    "default_topic_conf": _CALLBACK,
    "opaque": _CALLBACK,
    "enabled_events": _CALLBACK,
    "log.queue": "the source reads the client's log itself",
    "logger": "the source reads the client's log itself",
    "default.topic.config": _CALLBACK,
}
"""Settings that are refused with any value, and the reason."""

RECONNECT: Final[Mapping[str, str]] = {"reconnect.backoff.max.ms": "1000"}
"""The default of Java's clients. With librdkafka's 10 s a restarted broker was reconnected up to 12 s late."""

TOKEN_CALLABLE: Final = "oauth_cb"
"""Called with ``sasl.oauthbearer.config`` or an empty text. Returns (token, expiry in seconds since the epoch[,
principal, extensions]), as confluent_kafka defines it."""

CONNECTION: Final = (
    "api.", "broker.", "client.", "connections.", "debug", "enable.metrics.", "enable.sasl.", "enable.ssl.", "https.",
    "log.", "metadata.", "oauth", "plugin.", "reconnect.", "retry.", "sasl.", "security.", "socket.", "ssl.",
    "statistics.", "topic.metadata.",
)  # fmt: skip
"""Prefixes of settings that every client gets: connection and authentication. Other settings go to consumers only; the
producer that commits offsets gets only :data:`TRANSACTION_TIMEOUT` of them, so no setting can change how offsets are
committed."""
TRANSACTION_TIMEOUT: Final = "transaction.timeout.ms"
"""Brokers may permit less than the timeout that is used without it (``transaction.max.timeout.ms``)."""

_READ_HERE: Final = (
    "connections.max.idle.ms", "message.max.bytes", "socket.timeout.ms", "topic.metadata.refresh.interval.ms",
    TRANSACTION_TIMEOUT,
)  # fmt: skip
"""Integers that not only the client library reads."""
_INTEGERS: Final = re.compile(r"\.(ms|bytes|kbytes|messages|max|count)$")
_NOT_CHECKED: Final = (
    "heartbeat.interval.ms", "linger.ms", "max.poll.interval.ms", "queue.buffering.max.ms", "session.timeout.ms",
)  # fmt: skip
"""Names like those of integers: :func:`setting_ms` checks these, or they may have a fraction."""
_INT32_MAX: Final = 2**31 - 1


def is_secret(name: str) -> bool:
    """Whether the value of this setting must be masked. Errs on the safe side: a path to a key is masked as well."""
    bare = name.lower().removeprefix("kafka.")
    return bare in _SECRET_NAMES or any(word in bare for word in _SECRET_WORDS)


def mask_secrets(text: str, settings: Mapping[str, str]) -> str:
    """Mask every value of a secret setting in a text of the client library."""
    for name, value in settings.items():
        if value and is_secret(name):
            text = text.replace(value, MASK)
    return text


def refused_setting(words: str, settings: Mapping[str, str]) -> OptionError:
    """Return the error for a setting that the client library refuses when a client is created: the library's words in
    one line, without secrets."""
    words = " ".join(mask_secrets(words, settings).split())
    names = sorted(name for name in settings if f'"{name}"' in words)
    return OptionError(f"the Kafka client (librdkafka) refuses an option: {words}{_hint(words)}", names=names)


def _hint(text: str) -> str:
    """Return the remedy for the library's error, which names only the setting."""
    if text.startswith("No such configuration property"):
        return ". If it is a setting of Java clients only, remove it: librdkafka has no equivalent"
    if "Unsupported partition.assignment.strategy" in text or "same protocol type" in text:
        return ". Use range and roundrobin in any order, or cooperative-sticky alone (or Java's names of these)"
    origin = next((java for java, name in RENAMED.items() if f'"{name}"' in text), None)
    return "" if origin is None else f" (kafka.{origin} is the same setting)"


def principal(settings: Mapping[str, Any]) -> str:
    """Describe the principal that brokers see for a client with these settings."""
    if settings.get("sasl.mechanism", "").strip().upper() == "OAUTHBEARER":
        return "the subject of the token"
    if not str(settings.get("security.protocol", "")).strip().lower().startswith("sasl"):
        known = any(name.startswith(("ssl.certificate.", "ssl.keystore.")) for name in settings)
        return "the subject of the client's certificate" if known else "User:ANONYMOUS"
    name = settings.get("sasl.username") or settings.get("sasl.kerberos.principal")
    return f"User:{name}" if name else "the user"


def prepare(given: Mapping[str, str]) -> dict[str, str]:
    """Turn the user's ``kafka.*`` options (names without the prefix) into settings of the client library.

    Args:
        given: without group.id, bootstrap.servers, group.protocol and isolation.level, which are separate options.

    Returns:
        The settings, without a name from :data:`REFUSED`.

    Raises:
        OptionError: a setting is refused, or cannot be translated. librdkafka checks the remaining names and values at
            ``load()`` (``kafka.environment``).
    """
    for name in given:
        _check_allowed(name)
    settings = translate(given)
    _check_token_callable(settings)
    return settings


def check_integers(settings: Mapping[str, str]) -> None:
    """Refuse values that the client would accept, and read as another number: of 0x10 or 64m it takes what it knows.

    Raises:
        OptionError: a value is no decimal integer.
    """
    for name, text in settings.items():
        looks_so = _INTEGERS.search(name) and re.match(r"\s*[+-]?[0-9]", text) and name not in _NOT_CHECKED
        if (name in _READ_HERE or looks_so) and not re.fullmatch(r"\s*[+-]?(0|[1-9][0-9]{0,9})\s*", text):
            raise OptionError(
                f"option 'kafka.{name}' is {text!r}; it must be a decimal integer", option=f"kafka.{name}"
            )


def setting_ms(settings: Mapping[str, str], name: str, default: int) -> int:
    """Return a setting in milliseconds, or the default.

    Raises:
        OptionError: the value is not a positive integer.
    """
    text = settings.get(name)
    if text is None:
        return default
    if not text.strip().isdecimal() or not 1 <= int(text) <= _INT32_MAX:
        raise OptionError(f"option 'kafka.{name}' is {text!r}; it must be a positive integer, in milliseconds")
    return int(text)


def is_incremental(settings: Mapping[str, str]) -> bool:
    """Whether rebalances are incremental (cooperative-sticky, KIP-848); else a member gives up all partitions in
    each."""
    return settings.get("group.protocol") == "consumer" or "cooperative" in settings.get(
        "partition.assignment.strategy", ""
    )


def _check_allowed(name: str) -> None:
    if not name:
        raise OptionError("option 'kafka.' has no name after the dot; use for example kafka.bootstrap.servers")
    reason = REFUSED.get(name, _CALLBACK if name.endswith("_cb") and name != TOKEN_CALLABLE else "")
    if reason:
        raise OptionError(f"option 'kafka.{name}' cannot be set to any value: {reason}", option=f"kafka.{name}")


def _check_token_callable(settings: Mapping[str, str]) -> None:
    if TOKEN_CALLABLE not in settings:
        return
    mechanism = settings.get("sasl.mechanism", "")
    if mechanism.strip().upper() != "OAUTHBEARER":
        raise OptionError(
            f"option 'kafka.{TOKEN_CALLABLE}' returns OAuth tokens, but kafka.sasl.mechanism is "
            f"{mechanism or 'not set'}; it must be OAUTHBEARER, with kafka.security.protocol SASL_SSL",
            option="kafka.sasl.mechanism",
        )
    if settings.get("sasl.oauthbearer.method", "").strip().lower() == "oidc":
        raise OptionError(
            f"option 'kafka.{TOKEN_CALLABLE}' returns tokens, and kafka.sasl.jaas.config or "
            "kafka.sasl.oauthbearer.method requests them from an endpoint; set only one of the two",
            option=f"kafka.{TOKEN_CALLABLE}",
        )


def check_heartbeats(settings: Mapping[str, str]) -> None:
    """Refuse a heartbeat interval that is not below the session timeout: librdkafka accepts it, but brokers would
    remove the member.

    Raises:
        OptionError: the interval is too long, or one of the two is not a positive integer.
    """
    session = setting_ms(settings, "session.timeout.ms", SESSION_TIMEOUT_MS)
    heartbeat = setting_ms(settings, "heartbeat.interval.ms", HEARTBEAT_INTERVAL_MS)
    if heartbeat >= session:
        raise OptionError(
            f"kafka.heartbeat.interval.ms ({heartbeat}) must be below kafka.session.timeout.ms ({session}), usually a "
            "third of it"
        )


# --- functions of the user --------------------------------------------------------------------------------------------


def import_callable(name: str) -> Callable[..., Any]:
    """Import the function that :data:`TOKEN_CALLABLE` names.

    Args:
        name: ``package.module:function``; the part after the colon may have dots.

    Raises:
        OptionError: the function cannot be imported here, or is not callable; the message says what to do.
    """
    module, _, path = name.strip().partition(":")
    if not module or not path:
        raise _refused(name, "it must be package.module:function")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as exc:
        raise _refused(
            name,
            f"{sys.executable} cannot import it ({type(exc).__name__}: {exc}). Ship its file with spark-submit "
            "--py-files (in a notebook: spark.addArtifacts(…, pyfile=True) or sparkContext.addPyFile(…)), or install "
            "its package on the driver and on every executor. For spark-group, add it to PYTHONPATH",
        ) from exc
    if not callable(found):
        raise _refused(name, f"it is of type {type(found).__name__}, but must be a function")
    return found  # type: ignore[no-any-return]  # a module's attribute


class UserFunction:
    """A function of the user that the client calls. The client does not report why a call failed; ``failure`` does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = import_callable(name)
        self.failure = ""
        """The exception of the last call; empty if it succeeded."""

    def __call__(self, *arguments: Any) -> Any:
        try:
            found = self._function(*arguments)
        except Exception as exc:
            self.failure = f"{type(exc).__name__}: {exc}"
            log.warning("kafka.%s: %s raised %s", TOKEN_CALLABLE, self.name, self.failure)
            raise
        self.failure = ""
        return found


def _refused(name: str, why: str) -> OptionError:
    return OptionError(f"option 'kafka.{TOKEN_CALLABLE}' is {name!r}; {why}", option=f"kafka.{TOKEN_CALLABLE}")
