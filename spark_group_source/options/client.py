"""The ``kafka.*`` options: whose they are, and which Kafka client gets which.

Runs in: every process. Deliberately absent: the full list of setting names (only the client library knows it: ``kafka``
builds its clients at ``load()`` to have unknown names and bad values refused) and the translation of Java's names and
stores (``java``).
"""

from collections.abc import Mapping
from typing import Any, Final

from spark_group_source.errors import OptionError
from spark_group_source.options.callables import CALLABLES, TOKEN_CALLABLE
from spark_group_source.options.java import translate

MASK: Final = "***"
_SECRET_WORDS: Final = ("password", "passphrase", "secret", "token", "key", "jaas", "pem", "credential")
_SECRET_NAMES: Final = frozenset({"sasl.oauthbearer.config", "sasl.kerberos.kinit.cmd"})

# The defaults of the client library, for the checks below when only one of two related settings is given.
SESSION_TIMEOUT_MS: Final = 45_000
HEARTBEAT_INTERVAL_MS: Final = 3_000
MAX_POLL_INTERVAL_MS: Final = 300_000

_OFFSETS_ARE_OURS = "offsets are committed only after their rows are durable"
_BYTES_ONLY = "key and value always arrive as bytes; decode them with DataFrame functions"
_SLOTS_ARE_OURS = "the source names its members so that they survive restarts; set groupMembers for their number"
_NO_CALLABLE = "it takes a function, and options are text"

REFUSED: Final[Mapping[str, str]] = {
    "auto.offset.reset": "use startingOffsets; a position that is gone must never be replaced silently",
    "enable.auto.commit": _OFFSETS_ARE_OURS,
    "auto.commit.enable": _OFFSETS_ARE_OURS,
    "auto.commit.interval.ms": _OFFSETS_ARE_OURS,
    "enable.auto.offset.store": _OFFSETS_ARE_OURS,
    "offset.store.method": _OFFSETS_ARE_OURS,
    "offset.store.path": _OFFSETS_ARE_OURS,
    "offset.store.sync.interval.ms": _OFFSETS_ARE_OURS,
    "key.deserializer": _BYTES_ONLY,
    "value.deserializer": _BYTES_ONLY,
    "interceptor.classes": "interceptors may change records, so that a replay would differ",
    "interceptors": "interceptors may change records, so that a replay would differ",
    "enable.partition.eof": "the source needs it to find the end of a range",
    "group.instance.id": _SLOTS_ARE_OURS,
    "group.protocol.type": "the source joins as a consumer",
    "transactional.id": "the source names its transactions after the group, so that an old driver is fenced",
    "metadata.broker.list": "use kafka.bootstrap.servers",
    "topic.blacklist": "use subscribePattern",
    "default_topic_conf": _NO_CALLABLE,
    "opaque": _NO_CALLABLE,
    "enabled_events": _NO_CALLABLE,
    "log.queue": "the source serves the client's log itself",
}
"""Settings that no value makes right, and why."""

RECONNECT: Final[Mapping[str, str]] = {"reconnect.backoff.max.ms": "1000"}
"""As in Java's clients. With librdkafka's own 10 s a node that is back was found up to 12 s later."""

CONNECTION: Final = (
    "api.", "broker.", "client.", "connections.", "debug", "enable.metrics.", "enable.sasl.", "enable.ssl.", "https.",
    "log.", "metadata.", "oauth", "plugin.", "receive.", "reconnect.", "retry.", "sasl.", "security.", "socket.",
    "ssl.", "statistics.", "topic.metadata.",
)  # fmt: skip
"""How the names of settings begin that every client gets: of the connection, and of who connects. Those of consumers
go to consumers alone. A setting of producers reaches no producer, so it cannot change how offsets are committed."""

_INT32_MAX: Final = 2**31 - 1


def is_secret(name: str) -> bool:
    """Whether the value of this setting must not be shown. Rather one too many: a path to a key is masked as well."""
    bare = name.lower().removeprefix("kafka.")
    return bare in _SECRET_NAMES or any(word in bare for word in _SECRET_WORDS)


def without_secrets(text: str, settings: Mapping[str, str]) -> str:
    """A text of the client library's about these settings, with every value that could be a secret taken out."""
    for name, value in settings.items():
        if value and is_secret(name):
            text = text.replace(value, MASK)
    return text


def principal(settings: Mapping[str, Any]) -> str:
    """Who the brokers take a client with these settings for, in words."""
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
        given: without group.id, bootstrap.servers, group.protocol and isolation.level, which are options of their own.

    Returns:
        The settings, without a name from :data:`REFUSED`.

    Raises:
        OptionError: a setting is the source's own, or cannot be translated. Whether librdkafka knows the others and
            takes their values is found out at ``load()`` (``kafka.settings``).
    """
    for name in given:
        _refuse_owned(name)
    settings = translate(given)
    _check_token_callable(settings)
    return settings


def number_ms(settings: Mapping[str, str], name: str, default: int) -> int:
    """A time in ``settings``, or the default.

    Raises:
        OptionError: it is not a whole number of milliseconds, 1 or more.
    """
    text = settings.get(name)
    if text is None:
        return default
    if not text.strip().isdecimal() or not 1 <= int(text) <= _INT32_MAX:
        raise OptionError(f"option 'kafka.{name}' is {text!r}; it must be a whole number of milliseconds, 1 or more")
    return int(text)


def _refuse_owned(name: str) -> None:
    if not name:
        raise OptionError("option 'kafka.' has no name behind the dot; write for example kafka.bootstrap.servers")
    reason = REFUSED.get(name, _NO_CALLABLE if name.endswith("_cb") and name not in CALLABLES else "")
    if reason:
        raise OptionError(f"option 'kafka.{name}' cannot be set, whatever the value: {reason}", option=f"kafka.{name}")


def _check_token_callable(settings: Mapping[str, str]) -> None:
    if TOKEN_CALLABLE not in settings:
        return
    mechanism = settings.get("sasl.mechanism", "")
    if mechanism.strip().upper() != "OAUTHBEARER":
        raise OptionError(
            f"option 'kafka.{TOKEN_CALLABLE}' gives tokens, but kafka.sasl.mechanism is {mechanism or 'not set'}; it "
            "must be OAUTHBEARER, with kafka.security.protocol SASL_SSL",
            option="kafka.sasl.mechanism",
        )
    if settings.get("sasl.oauthbearer.method", "").strip().lower() == "oidc":
        raise OptionError(
            f"option 'kafka.{TOKEN_CALLABLE}' gives tokens, and kafka.sasl.jaas.config or "
            "kafka.sasl.oauthbearer.method asks an endpoint for them; give one of the two",
            option=f"kafka.{TOKEN_CALLABLE}",
        )


def check_heartbeats(settings: Mapping[str, str]) -> None:
    """Refuse heartbeats that come later than the session ends, which librdkafka takes: brokers would drop the member.

    Raises:
        OptionError: that, or one of the times of the classic protocol is no number.
    """
    session = number_ms(settings, "session.timeout.ms", SESSION_TIMEOUT_MS)
    heartbeat = number_ms(settings, "heartbeat.interval.ms", HEARTBEAT_INTERVAL_MS)
    number_ms(settings, "max.poll.interval.ms", MAX_POLL_INTERVAL_MS)
    if heartbeat >= session:
        raise OptionError(
            f"kafka.heartbeat.interval.ms ({heartbeat}) must be below kafka.session.timeout.ms ({session}); a third "
            "of it is usual"
        )
