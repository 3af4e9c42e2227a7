"""Every option of ``format("kafka-group")``: one table, read into one frozen :class:`Options`.

Runs in: every process. Deliberately absent: anything that asks a broker (a missing topic, a setting that librdkafka
does not know) and anything of Spark. The input is a mapping of texts. Option names are those of Spark's own Kafka
connector wherever it has one, and case does not matter.

A reader of one value raises ValueError with what would be right; :meth:`Options.parse` adds the option's name and,
unless it is secret, the value.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, NamedTuple

from spark_group_source.errors import OptionError
from spark_group_source.model import StartAt
from spark_group_source.options import client as client_settings
from spark_group_source.options.starting import (
    NoMatch,
    PartitionValues,
    StartingPosition,
    parse_offsets,
    parse_timestamps,
    start_at,
    topics_of,
)

GROUP_MEMBERS_MAX: Final = 1_000
MIN_PARTITIONS_MAX: Final = 100_000
DAY_MS: Final = 86_400_000
TOPICS_EVERY_S: Final = 30.0
"""How often a pattern is matched against the cluster's topics; ``kafka.topic.metadata.refresh.interval.ms`` sets it."""
VALUE_SHOWN_CHARS_MAX: Final = 200
INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
"""The broker's own topics: a pattern never matches them."""


_BATCH_ONLY = (
    "this source is for streaming queries, which have no end; for a bounded run use trigger(availableNow=True)"
)
REFUSED: Final[Mapping[str, str]] = {
    "assign": "membership in the group decides which partitions are read; use subscribe or subscribePattern",
    "groupIdPrefix": "the query joins the group that kafka.group.id names; there are no generated groups",
    "groupId": "write kafka.group.id",
    "endingOffsets": _BATCH_ONLY,
    "endingOffsetsByTimestamp": _BATCH_ONLY,
    "endingTimestamp": _BATCH_ONLY,
    "path": "load() takes no path here; name the topics with subscribe",
    "topic": "it belongs to writing; name the topics to read with subscribe",
}
"""Options that other sources have and this one cannot follow, and why."""
_REFUSED_BY_NAME: Final = {name.lower(): (name, reason) for name, reason in REFUSED.items()}


class Option(NamedTuple):
    """One row of the table."""

    name: str
    field: str
    parse: Callable[[str], object]
    """Raises ValueError with what would be right."""
    unit: str
    """What the value is."""
    default: str
    """As the documents show it."""
    doc: str


def _option(
    name: str, parse: Callable[[str], object], unit: str, *, doc: str, default: object = ..., shown: str = ""
) -> Any:  # Any: a field of a dataclass, whatever its type
    """A field of :class:`Options`; ``shown``: the default in the documents where the value alone does not tell."""
    text = str(default).lower() if isinstance(default, bool) else str(default)
    row = {"row": Option(name, "", parse, unit, shown or ("none" if default is None else text), doc)}
    return field(metadata=row) if default is ... else field(default=default, metadata=row)


INT64_MAX: Final = 2**63 - 1

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_MEMORY = re.compile(r"([0-9]{1,19})([kmg]?)b?")
_MEMORY_SHIFTS: Final[Mapping[str, int]] = {"": 0, "k": 10, "m": 20, "g": 30}
_TIME = re.compile(r"([0-9]{1,19})([a-z]+)?")
_TIME_UNITS_US: Final[Mapping[str, int]] = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}


def whole(at_least: int, at_most: int = INT64_MAX) -> Callable[[str], int]:
    """A reader of whole numbers within [at_least, at_most]."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = at_least - 1
        if not at_least <= number <= at_most:
            raise ValueError(f"it must be a whole number from {at_least} to {at_most}")
        return number

    return parse


def one_of(*words: str) -> Callable[[str], str]:
    """A reader of one of these words, in any case."""

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"it must be {' or '.join(words)}{did_you_mean(word, words)}")
        return word

    return parse


def flag(text: str) -> bool:
    """true or false, in any case."""
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise ValueError("it must be true or false")
    return word == "true"


def non_empty(text: str) -> str:
    """Any text but blanks, without the blanks around it."""
    if not text.strip():
        raise ValueError("it must not be empty")
    return text.strip()


def variable(text: str) -> str:
    """The name of an environment variable."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text.strip()):
        raise ValueError("it must be the name of an environment variable, such as RACK")
    return text.strip()


def servers(text: str) -> str:
    """A list of brokers, without blanks."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ValueError("it must be a comma-separated list of host:port")
    return ",".join(items)


def topic_names(text: str) -> tuple[str, ...]:
    """A list of topics in the order given, each once. A name that the client would read as a pattern is refused."""
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    if not names:
        raise ValueError("it must name at least one topic")
    for name in names:
        if not _TOPIC_NAME.fullmatch(name) or name in (".", ".."):
            raise ValueError(
                f"{name!r} is not a topic name (letters, digits, '.', '_' and '-', at most 249); "
                "for a pattern use subscribePattern"
            )
    return names


def pattern(text: str) -> str:
    """A regular expression that Python can compile."""
    if not text.strip():
        raise ValueError("it must not be empty")
    try:
        re.compile(text.strip())
    except (re.error, OverflowError) as exc:
        raise ValueError(f"it must be a regular expression as Python's re reads it ({exc})") from None
    return text.strip()


def time_ms(text: str) -> int:
    """Milliseconds from a time as Spark writes it: a number and us, ms, s, m, min, h or d; no unit is ms."""
    match = _TIME.fullmatch(text.strip().lower())
    unit_us = _TIME_UNITS_US.get(match[2] or "ms") if match else None
    if match is None or unit_us is None or int(match[1]) * unit_us // 1_000 > INT64_MAX:
        raise ValueError("it must be a time such as 500ms, 10s, 15m, 1h or 1d; a plain number is milliseconds")
    return int(match[1]) * unit_us // 1_000


def members(at_most: int) -> Callable[[str], int | str]:
    """A reader of a number from 1 on, or the word auto."""
    number = whole(1, at_most)

    def parse(text: str) -> int | str:
        try:
            return "auto" if text.strip().lower() == "auto" else number(text)
        except ValueError as exc:
            raise ValueError(f"{exc}, or auto") from None

    return parse


def memory_bytes(at_least: int, at_most: int) -> Callable[[str], int]:
    """A reader of sizes as Spark writes them: a number and k, m or g; no unit is bytes."""

    def parse(text: str) -> int:
        match = _MEMORY.fullmatch(text.strip().lower())
        size = int(match[1]) << _MEMORY_SHIFTS[match[2] or ""] if match else -1
        if not at_least <= size <= at_most:
            raise ValueError(f"it must be a size such as 512k, 64m or 1g, from {at_least} to {at_most} bytes")
        return size

    return parse


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest known name, or an empty text. Case does not count."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Options:
    """The options of one query, checked: a field for each row of the table, in the order of ``docs/options.md``.
    Frozen, pickles, shows secrets as ``***``."""

    # fmt: off
    bootstrap_servers: str = _option(
        "kafka.bootstrap.servers", servers, "host:port, …", shown="required",
        doc="Brokers to ask first.")
    group_id: str = _option(
        "kafka.group.id", non_empty, "name", shown="required",
        doc="The consumer group that the query joins. Its committed offsets are where a new query starts.")
    topics: tuple[str, ...] = _option(
        "subscribe", topic_names, "topic, …", default=(), shown="this or subscribePattern",
        doc="Topics to read; a topic named twice is read once.")
    topic_pattern: str | None = _option(
        "subscribePattern", pattern, "regex", default=None, shown="this or subscribe",
        doc="Topics to read: a Python regular expression that must match the whole name. The broker's internal "
        "topics never match.")
    starting_offsets: StartAt | PartitionValues | None = _option(  # noqa: RUF009 - a field, not a value
        "startingOffsets", parse_offsets, "earliest, latest or JSON", default=None, shown="earliest",
        doc="Where a partition starts for which the group has no committed offset. JSON names every partition: "
        "`{\"orders\":{\"0\":23,\"1\":-1,\"2\":-2}}`, -1 is latest and -2 is earliest. Partitions that appear "
        "later start at earliest.")
    starting_timestamp_ms: int | None = _option(
        "startingTimestamp", whole(0), "ms since the epoch", default=None,
        doc="Start at the first record that is not older. Wins over the two other starting options.")
    starting_timestamps: PartitionValues | None = _option(  # noqa: RUF009 - a field, not a value
        "startingOffsetsByTimestamp", parse_timestamps, "JSON, ms since the epoch", default=None,
        doc="The same for each partition: `{\"orders\":{\"0\":1700000000000}}`. Wins over startingOffsets.")
    starting_no_match: NoMatch = _option(  # noqa: RUF009 - a field, not a value
        "startingOffsetsByTimestampStrategy", one_of("error", "latest"), "error or latest", default="error",
        doc="When no record is young enough: fail, or start at the end.")
    max_offsets_per_trigger: int | None = _option(
        "maxOffsetsPerTrigger", whole(1), "offsets per batch", default=None,
        doc="At most this many, shared fairly: every partition with a backlog gets an equal share.")
    min_offsets_per_trigger: int | None = _option(
        "minOffsetsPerTrigger", whole(1), "offsets per batch", default=None,
        doc="Wait for this many, but no longer than maxTriggerDelay. The first batch does not wait.")
    max_trigger_delay_ms: int = _option(
        "maxTriggerDelay", time_ms, "time", default=900_000, shown="15m",
        doc="The longest wait for minOffsetsPerTrigger, such as `10s`, `15m` or `1h`; a plain number is in ms.")
    min_partitions: int | None = _option(
        "minPartitions", whole(1, MIN_PARTITIONS_MAX), "tasks per batch", default=None,
        doc="Split the largest ranges until a batch has this many tasks, if it has that many offsets.")
    max_records_per_partition: int | None = _option(
        "maxRecordsPerPartition", whole(1), "offsets per task", default=None,
        doc="No task reads more than this.")
    fail_on_data_loss: bool = _option(
        "failOnDataLoss", flag, "true or false", default=True,
        doc="Fail when records that were still to be read are gone; else warn and go on with those that are left.")
    include_headers: bool = _option(
        "includeHeaders", flag, "true or false", default=False,
        doc="Add the column `headers`.")
    group_members: int | Literal["auto"] = _option(
        "groupMembers", members(GROUP_MEMBERS_MAX), "members or auto", default="auto",
        doc="How many members of the group this query is, 1 to 1000. auto: one for each executor that takes part, "
        "where members live beside executors, else 1.")
    member_host: Literal["auto", "executor", "driver"] = _option(
        "memberHost", one_of("auto", "executor", "driver"), "auto, executor or driver", default="auto",
        doc="Where the members live: in the stream reader on the driver's host, or beside executors, each in an "
        "agent that reads ahead between batches. auto: beside executors where agents can run, else on the "
        "driver's host; executor: the query fails where the stream reader cannot listen for them.")
    coordinator_port: int = _option(
        "coordinatorPort", whole(0, 65_535), "port", default=0, shown="any free one",
        doc="Where the stream reader listens: for agents and tasks when members live beside executors, for what "
        "tasks skipped when failOnDataLoss is false.")
    coordinator_host: str | None = _option(
        "coordinatorHost", non_empty, "name or address", default=None,
        shown="address towards the brokers, then host name",
        doc="How executors reach the stream reader's host.")
    agent_memory_bytes: int = _option(
        "agentMemory", memory_bytes(1 << 20, 1 << 40), "size", default=64 << 20, shown="64m",
        doc="What each agent may hold of records that it read ahead.")
    client_rack_env: str | None = _option(
        "clientRackEnv", variable, "name of a variable", default=None,
        doc="The environment variable that says on each executor in which rack or zone it is: its clients are given "
        "that as `client.rack`, and read from the replica there if brokers select replicas by rack (KIP-392). "
        "Where it is not set, `kafka.client.rack` counts.")
    metrics_port: int | None = _option(
        "metricsPort", whole(0, 65_535), "port", default=None,
        doc="Where the stream reader, on the driver's host, serves Prometheus the run's [metrics](metrics.md), "
        "without a password. Each query needs one of its own: 0 takes any free one and says in the log and in "
        "the statistics which. One that stays taken is refused when the query starts.")
    metrics_host: str | None = _option(
        "metricsHost", non_empty, "name or address", default=None, shown="all addresses of the driver's host",
        doc="Where metricsPort listens; `127.0.0.1`: for this host alone.")
    leave_on_stop: Literal["auto", "always", "never"] = _option(
        "leaveOnStop", one_of("auto", "always", "never"), "auto, always or never", default="auto",
        doc="Whether the members leave the group when the query stops. auto: an AvailableNow or Once run leaves, a "
        "continuous one keeps its place for a restart within the session timeout.")
    group_protocol: Literal["classic", "consumer"] = _option(
        "kafka.group.protocol", one_of("classic", "consumer"), "classic or consumer", default="classic",
        doc="How members and broker talk. With `consumer` the broker decides session timeout, heartbeats and "
        "assignment.")
    isolation_level: Literal["read_committed", "read_uncommitted"] = _option(
        "kafka.isolation.level", one_of("read_committed", "read_uncommitted"), "read_committed or read_uncommitted",
        default="read_committed",
        doc="Whether records of aborted and open transactions are left out. Spark's own connector reads them by "
        "default.")
    poll_timeout_ms: int = _option(
        "kafkaConsumer.pollTimeoutMs", whole(1, DAY_MS), "ms", default=120_000,
        doc="How long a task waits for records that should be there, of brokers that answer, before it fails.")
    broker_timeout_ms: int = _option(
        "brokerTimeoutMs", whole(0), "ms", default=600_000,
        doc="How long a running query, or a task, waits for brokers that do not answer before it fails; 0 is for "
        "ever. A query that starts waits 20 s.")
    fetch_offset_retries: int = _option(
        "fetchOffset.numRetries", whole(0, 1_000), "retries", default=3,
        doc="How often a question to the broker about offsets is repeated at once; brokerTimeoutMs says how long it "
        "is repeated in all.")
    fetch_offset_retry_interval_ms: int = _option(
        "fetchOffset.retryIntervalMs", whole(0, DAY_MS), "ms", default=1_000,
        doc="The wait between two such questions.")
    settings: tuple[tuple[str, str], ...] = _option(
        "kafka.*", str, "Kafka client setting", default=(), shown="the client's",
        doc="Passed on to the Kafka client (librdkafka). Java's names, JAAS texts and PEM or PKCS#12 stores are "
        "translated; settings that are the source's own are refused. `kafka.oauth_cb` is "
        "`package.module:function`, a Python function that gives tokens.")
    # fmt: on

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "Options":
        """Check all options.

        Args:
            given: names in any case, as Spark hands them over; values are text.

        Raises:
            OptionError: an option is unknown, refused, missing, has a wrong value, or contradicts another. The message
                shows the value (never a secret one) and says what would be right; ``fields``: option.
        """
        values: dict[str, Any] = {}
        kafka: dict[str, str] = {}
        for name, text in _unique(given).items():
            row = _BY_NAME.get(name.lower())
            if row is not None:
                values[row.field] = _parsed(row, text)
            elif name.lower().startswith("kafka."):
                kafka[name.lower().removeprefix("kafka.")] = text
            else:
                raise _unknown(name)
        _check_required(values)
        _check_together(values)
        settings = client_settings.prepare(kafka)
        if values.get("group_protocol") != "consumer":  # else the broker has them, and librdkafka refuses them here
            client_settings.check_heartbeats(settings)
        return cls(**values, settings=tuple(sorted(settings.items())))

    @property
    def starting(self) -> StartingPosition:
        """Where partitions without a committed offset start: the timestamp for all wins over the timestamps for each,
        and those over startingOffsets."""
        no_match = self.starting_no_match
        if self.starting_timestamp_ms is not None:
            return StartingPosition(everywhere=StartAt("time", self.starting_timestamp_ms), no_match=no_match)
        if self.starting_timestamps is not None:
            each = tuple((tp, StartAt("time", at_ms)) for tp, at_ms in self.starting_timestamps)
            return StartingPosition(each=each, no_match=no_match)
        offsets = self.starting_offsets
        if offsets is None:
            return StartingPosition()
        if isinstance(offsets, StartAt):
            return StartingPosition(everywhere=offsets)
        return StartingPosition(each=tuple((tp, start_at(offset)) for tp, offset in offsets))

    def wants(self, topic: str) -> bool:
        """Whether the query reads this topic; a pattern must match the whole name, and never an internal topic."""
        if self.topic_pattern is None:
            return topic in self.topics
        return topic not in INTERNAL_TOPICS and re.fullmatch(self.topic_pattern, topic) is not None

    @property
    def session_timeout_ms(self) -> int:
        """After this silence the broker takes a member's partitions (``consumer``: what brokers use by default)."""
        return client_settings.number_ms(dict(self.settings), "session.timeout.ms", client_settings.SESSION_TIMEOUT_MS)

    @property
    def max_poll_interval_ms(self) -> int:
        """The longest time between two polls of a member, and the group's rebalance timeout."""
        return client_settings.number_ms(
            dict(self.settings), "max.poll.interval.ms", client_settings.MAX_POLL_INTERVAL_MS
        )

    def on_executor(self, environ: Mapping[str, str]) -> "Options":
        """The same for clients on an executor with this environment."""
        rack = environ.get(self.client_rack_env or "", "").strip()
        if not rack:
            return self
        return replace(self, settings=tuple(sorted({**dict(self.settings), "client.rack": rack}.items())))

    def consumer_settings(self) -> dict[str, str]:
        """Settings of every consumer, a member or one that only reads ranges; without group.instance.id.

        Nothing is committed, stored or reset by the client itself: a position that is out of range is an error.
        """
        return self._common() | {
            "bootstrap.servers": self.bootstrap_servers,
            "group.id": self.group_id,
            "group.protocol": self.group_protocol,
            "isolation.level": self.isolation_level,
            "enable.auto.commit": "false",
            "enable.auto.offset.store": "false",
            "auto.offset.reset": "error",
        }

    @property
    def topics_every_s(self) -> float:
        """How often members and worker look for new topics and partitions."""
        own = dict(self.settings).get("topic.metadata.refresh.interval.ms")
        return TOPICS_EVERY_S if own is None else int(own) / 1000

    def member_settings(self) -> dict[str, str]:
        """Settings of the consumer of a member, wherever it lives; its own names come with ``Join``."""
        refresh_ms = str(int(self.topics_every_s * 1000))
        return {"topic.metadata.refresh.interval.ms": refresh_ms, **self.consumer_settings()}

    def admin_settings(self) -> dict[str, str]:
        """Settings of an admin client: the connection and who connects."""
        common = self._common()
        return {name: value for name, value in common.items() if name.startswith(client_settings.CONNECTION)} | {
            "bootstrap.servers": self.bootstrap_servers
        }

    def producer_settings(self) -> dict[str, str]:
        """Settings of the producer that commits offsets; without transactional.id, which belongs to the stream."""
        return self.admin_settings()

    def _common(self) -> dict[str, str]:
        own = dict(self.settings)
        return own if any(name.startswith("reconnect.") for name in own) else {**own, **client_settings.RECONNECT}

    def describe(self) -> dict[str, str]:
        """Every option that is set, secrets masked: safe in a log."""
        shown = {row.name: str(getattr(self, row.field)) for row in OPTIONS if row.field != "settings"}
        shown = {name: text for name, text in shown.items() if text not in ("None", "()")}
        return shown | {
            f"kafka.{name}": client_settings.MASK if client_settings.is_secret(name) else value
            for name, value in self.settings
        }

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={_short(text)}' for name, text in self.describe().items())})"


OPTIONS: Final = tuple(f.metadata["row"]._replace(field=f.name) for f in fields(Options) if f.metadata)
"""All rows."""
_BY_NAME: Final = {row.name.lower(): row for row in OPTIONS if row.name != "kafka.*"}


def _unique(given: Mapping[str, str]) -> dict[str, str]:
    """Options as they came, unless one stands there twice in different cases."""
    seen: dict[str, str] = {}
    for name in given:
        if name.lower() in seen:
            raise OptionError(f"option {name!r} is given twice, also as {seen[name.lower()]!r}", option=name)
        seen[name.lower()] = name
    return dict(given)


def _parsed(row: Option, text: str) -> object:
    try:
        return row.parse(text)
    except ValueError as exc:
        raise OptionError(f"option {row.name!r} is {_short(text)!r}; {exc}", option=row.name) from None


def _unknown(name: str) -> OptionError:
    """The error for a name outside the table; the value is not shown, for it may be a misplaced secret."""
    refused = _REFUSED_BY_NAME.get(name.lower())
    if refused is not None:
        return OptionError(f"option {refused[0]!r} is not supported: {refused[1]}", option=refused[0])
    names = [row.name for row in OPTIONS if row.name != "kafka.*"]
    hint = did_you_mean(name, names)
    if not hint and "." in name:
        hint = f"; settings of the Kafka client are written with a prefix: 'kafka.{name}'"
    return OptionError(f"unknown option {name!r}{hint}", option=name)


def _check_required(values: Mapping[str, Any]) -> None:
    if "bootstrap_servers" not in values:
        raise OptionError("option 'kafka.bootstrap.servers' is required: the brokers, as host:port, …")
    if "group_id" not in values:
        raise OptionError(
            "option 'kafka.group.id' is required: the consumer group that the query joins. Use one that no other "
            "query or application has, unless they are meant to share the topics"
        )
    if ("topics" in values) == ("topic_pattern" in values):
        both = "topics" in values
        raise OptionError(
            f"exactly one of subscribe and subscribePattern is required; {'both' if both else 'neither'} is given"
        )


def _check_together(values: Mapping[str, Any]) -> None:
    low, high = values.get("min_offsets_per_trigger"), values.get("max_offsets_per_trigger")
    if low is not None and high is not None and low > high:
        raise OptionError(f"minOffsetsPerTrigger ({low}) must not be above maxOffsetsPerTrigger ({high})")
    if "topics" not in values:
        return
    subscribed = set(values["topics"])
    for name, values_of in (
        ("startingOffsets", "starting_offsets"),
        ("startingOffsetsByTimestamp", "starting_timestamps"),
    ):
        spec = values.get(values_of)
        if spec is None or isinstance(spec, StartAt) or topics_of(spec) == subscribed:
            continue
        raise OptionError(
            f"option {name!r} must name the subscribed topics and no other: "
            f"specified {sorted(topics_of(spec))}, subscribed {sorted(subscribed)}",
            option=name,
        )


def _short(text: str) -> str:
    return text if len(text) <= VALUE_SHOWN_CHARS_MAX else text[:VALUE_SHOWN_CHARS_MAX] + "…"
