"""Every option of ``format("kafka-group")``: one table, parsed into one frozen :class:`Options`.

Runs in: every process. Deliberately absent: checks that need a broker (a missing topic, a setting that librdkafka does
not know), the position that follows from all starting options (``protocol.rules``), and anything of Spark. The input
maps option names to text. Options that Spark's Kafka connector also has use its names; names are case-insensitive.

The parser of a value raises ValueError with the expected format; :meth:`Options.parse` adds the option's name and,
unless it may be secret, the value.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, NamedTuple

from spark_group_source import command_line
from spark_group_source.errors import OptionError
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition
from spark_group_source.options import client as client_settings
from spark_group_source.protocol.rules import NoMatch, Rules, StartingPosition

GROUP_MEMBERS_MAX: Final = 1_000
MIN_PARTITIONS_MAX: Final = 100_000
DAY_MS: Final = 86_400_000
"""The largest value of an option that is a time-out."""
TOPIC_REFRESH_S: Final = 30.0
"""How often topics and partitions are refreshed, unless ``kafka.topic.metadata.refresh.interval.ms`` is set."""
VALUE_SHOWN_CHARS_MAX: Final = 200
HOLD_SHARE: Final = 0.8
"""The longest hold of a revocation, as a fraction of max.poll.interval.ms (the group's rebalance timeout). The
remainder covers the commit, the member's response, and the time between the rebalance at the broker and the
callback."""
LEASE_SHARE: Final = 0.6
"""The lease of an agent, as a fraction of the session timeout: without a heartbeat for longer it counts as lost. The
next member of its slots must join with the same instance id before the broker's session timeout reassigns the
partitions."""
SINGLE_BATCH: Final[Mapping[str, Literal["no", "maybe", "yes"]]] = {
    "auto": "maybe",
    "availableNow": "yes",
    "processingTime": "no",
}
"""By the option ``trigger``: :attr:`Rules.single_batch` where Spark does not pass the trigger to the source."""
COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
"""The columns of Spark's Kafka source, in its order."""
INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
"""Kafka's internal topics: ``subscribePattern`` never matches them."""


_BATCH_ONLY = "it applies to batch queries; to read up to the current end, use trigger(availableNow=True)"
REFUSED: Final[Mapping[str, str]] = {
    "assign": "Kafka assigns the partitions to the group's members; use subscribe or subscribePattern",
    "groupIdPrefix": "group ids are not generated; set kafka.group.id",
    "groupId": "use kafka.group.id",
    "endingOffsets": _BATCH_ONLY,
    "endingOffsetsByTimestamp": _BATCH_ONLY,
    "endingTimestamp": _BATCH_ONLY,
    "path": "load() takes no path for this source; set the topics with subscribe",
    "topic": "it applies to writing; set the topics to read with subscribe",
}
"""Options of other sources that this source does not support, with the reason or the alternative."""
_REFUSED_BY_NAME: Final = {name.lower(): (name, reason) for name, reason in REFUSED.items()}


class Option(NamedTuple):
    """One row of the table."""

    name: str
    """The option's name, as users write it."""
    field: str
    """The attribute of :class:`Options`."""
    parse: Callable[[str], object]
    """Parses the value. Raises ValueError with the expected format."""
    unit: str
    """The format or unit of the value, for the docs."""
    default: str
    """The default, for the docs."""
    doc: str
    """The meaning, for the docs."""


def _option(
    name: str, parse: Callable[[str], object], unit: str, *, doc: str, default: object = ..., shown: str = ""
) -> Any:  # Any: a field of a dataclass, whatever its type
    """Declare a field of :class:`Options`; without a ``default`` it is required. ``shown``: the default as the docs
    print it, if the value is not self-explanatory."""
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


def integer(at_least: int, at_most: int = INT64_MAX) -> Callable[[str], int]:
    """A parser for integers in [at_least, at_most]."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = at_least - 1
        if not at_least <= number <= at_most:
            raise ValueError(f"it must be an integer from {at_least} to {at_most}")
        return number

    return parse


def one_of(*words: str) -> Callable[[str], str]:
    """A parser for one of these words, case-insensitive."""
    known = {word.lower(): word for word in words}

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in known:
            raise ValueError(f"it must be {' or '.join(words)}{did_you_mean(word, words)}")
        return known[word]

    return parse


def column_names(text: str) -> tuple[str, ...]:
    """Parse a list of columns, case-insensitive; returns them in the order of :data:`COLUMNS`."""
    known = {name.lower(): name for name in COLUMNS}
    words = [word.strip().lower() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise ValueError(
                f"it must be a comma-separated list of {', '.join(COLUMNS)}{did_you_mean(word, known.values())}"
            )
    return tuple(name for word, name in known.items() if word in words)


def boolean(text: str) -> bool:
    """Parse true or false, case-insensitive."""
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise ValueError("it must be true or false")
    return word == "true"


def non_empty(text: str) -> str:
    """Parse a text that is not blank; surrounding blanks are removed."""
    if not text.strip():
        raise ValueError("it must not be empty")
    return text.strip()


def host(text: str) -> str:
    """Parse the name or the address of a host, as Python's sockets accept it."""
    name = non_empty(text)
    try:
        name.encode("idna")
    except UnicodeError:
        raise ValueError(
            "it must be a host name or an address: each part of a name between dots has 1 to 63 characters"
        ) from None
    return name


def environment_variable(text: str) -> str:
    """Parse the name of an environment variable."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text.strip()):
        raise ValueError("it must be the name of an environment variable, such as RACK")
    return text.strip()


def broker_list(text: str) -> str:
    """Parse a comma-separated list of brokers; blanks are removed."""
    items = list(filter(None, (item.strip() for item in text.split(","))))
    if not items:
        raise ValueError("it must be a comma-separated list of host:port")
    return ",".join(items)


def topic_names(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of topics; duplicates are removed. Refuses names that the client would treat as a
    pattern."""
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    if not names:
        raise ValueError("it must name at least one topic")
    for name in names:
        if not _TOPIC_NAME.fullmatch(name) or name in (".", ".."):
            raise ValueError(
                f"{name!r} is not a topic name (at most 249 letters, digits, '.', '_' and '-'); "
                "for a pattern use subscribePattern"
            )
    return names


def regex(text: str) -> str:
    """Parse a regular expression of Python's ``re``."""
    pattern = non_empty(text)
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as exc:
        raise ValueError(f"it must be a regular expression in Python's syntax ({exc})") from None
    return pattern


def duration_ms(text: str) -> int:
    """Parse a duration in Spark's format, a number and us, ms, s, m, min, h or d; the default unit is ms."""
    match = _TIME.fullmatch(text.strip().lower())
    unit_us = _TIME_UNITS_US.get(match[2] or "ms") if match else None
    if match is None or unit_us is None or int(match[1]) * unit_us // 1_000 > INT64_MAX:
        raise ValueError("it must be a duration such as 500ms, 10s, 15m, 1h or 1d; a plain number is milliseconds")
    return int(match[1]) * unit_us // 1_000


def member_count(text: str) -> int | str:
    """Parse an integer from 1 to :data:`GROUP_MEMBERS_MAX`, or the word auto."""
    try:
        return "auto" if text.strip().lower() == "auto" else integer(1, GROUP_MEMBERS_MAX)(text)
    except ValueError as exc:
        raise ValueError(f"{exc}, or auto") from None


def memory_bytes(at_least: int, at_most: int) -> Callable[[str], int]:
    """A parser for sizes in Spark's format, a number and k, m or g; the default unit is bytes."""

    def parse(text: str) -> int:
        match = _MEMORY.fullmatch(text.strip().lower())
        size = int(match[1]) << _MEMORY_SHIFTS[match[2] or ""] if match else -1
        if not at_least <= size <= at_most:
            raise ValueError(f"it must be a size such as 512k, 64m or 1g, from {at_least} to {at_most} bytes")
        return size

    return parse


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the most similar known name, or an empty text. Case-insensitive."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


# --- the starting options --------------------------------------------------------------------------------------------

LATEST_OFFSET = -1
"""In the JSON of ``startingOffsets``: the end of the log."""
EARLIEST_OFFSET = -2
"""In the JSON of ``startingOffsets``: the start of the log."""
PARTITION_MAX = 2**31 - 1

PartitionValues = tuple[tuple[TopicPartition, int], ...]


def start_at(offset: int) -> StartAt:
    """Return the position that a number in the JSON of ``startingOffsets`` means."""
    if offset == EARLIEST_OFFSET:
        return EARLIEST
    return LATEST if offset == LATEST_OFFSET else StartAt("offset", offset)


def parse_offsets(text: str) -> StartAt | PartitionValues:
    """Parse ``startingOffsets``: earliest, latest (in any case) or ``{"topic":{"0":23,"1":-1}}``.

    Raises:
        ValueError: has the expected format. Numbers below -2 are refused, because the Kafka client gives them other
            meanings (-1000 is the committed offset).
    """
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return EARLIEST if word == "earliest" else LATEST
    if not word.startswith("{"):
        raise ValueError('it must be earliest, latest or JSON such as {"topic":{"0":23,"1":-1}}')
    return _parse_partition_json(
        text, at_least=EARLIEST_OFFSET, meaning="an offset, or -1 for latest, or -2 for earliest"
    )


def parse_timestamps(text: str) -> PartitionValues:
    """Parse ``startingOffsetsByTimestamp``: ``{"topic":{"0":1700000000000}}``, in milliseconds since the epoch.

    Raises:
        ValueError: has the expected format. Negative times are refused, because Kafka gives them other meanings.
    """
    return _parse_partition_json(text, at_least=0, meaning="milliseconds since the epoch, 0 or more")


def topics_of(values: PartitionValues) -> set[str]:
    """Return the topics that a per-partition JSON names."""
    return {tp.topic for tp, _ in values}


def _parse_partition_json(text: str, *, at_least: int, meaning: str) -> PartitionValues:
    try:
        doc = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as exc:
        raise ValueError(f"it is not JSON ({exc.msg} at character {exc.pos + 1})") from None
    if not isinstance(doc, dict) or not doc:
        raise ValueError('it must be JSON such as {"topic":{"0":23,"1":-1}}')
    found: dict[TopicPartition, int] = {}
    for topic, entry in doc.items():
        if not isinstance(entry, dict) or not entry:
            raise ValueError(f'topic {topic!r} must have partitions, such as {{"0":23}}')
        for number, value in entry.items():
            tp = TopicPartition(topic, _partition(topic, number))
            # Only a JSON integer is accepted: bool is a subclass of int, and 1.0 == 1.
            if type(value) is not int or not at_least <= value <= INT64_MAX:
                raise ValueError(f"partition {tp} has {value!r}; it must be {meaning}")
            found[tp] = value
    return tuple(sorted(found.items()))


def _partition(topic: str, number: str) -> int:
    if not number.isdecimal() or str(int(number)) != number or int(number) > PARTITION_MAX:
        raise ValueError(f"topic {topic!r} has partition {number!r}; it must be an integer such as 0")
    return int(number)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; refuse duplicate keys, of which ``json`` would silently drop one."""
    doc = dict(pairs)
    if len(doc) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {duplicate!r} twice")
    return doc


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Options:
    """The checked options of one query: one field for each row of the table, in the order of ``docs/options.md``.
    Frozen and picklable; ``repr`` masks secrets as ``***``."""

    # fmt: off
    bootstrap_servers: str = _option(
        "kafka.bootstrap.servers", broker_list, "host:port, …", shown="required",
        doc="The brokers to connect to first; the others are discovered.")
    group_id: str = _option(
        "kafka.group.id", non_empty, "name", shown="required",
        doc="The consumer group that the query joins. A new query starts at the group's committed offsets.")
    topics: tuple[str, ...] = _option(
        "subscribe", topic_names, "topic, …", default=(), shown="this or subscribePattern",
        doc="The topics to read. Those that do not exist yet are named in a warning, and read from their first record "
        "when they have been created.")
    topic_pattern: str | None = _option(
        "subscribePattern", regex, "regex", default=None, shown="this or subscribe",
        doc="The topics to read: a Python regular expression that must match the whole name. Kafka's internal topics "
        "never match.")
    starting_offsets: StartAt | PartitionValues | None = _option(  # noqa: RUF009 - a field, not a value
        "startingOffsets", parse_offsets, "earliest, latest or JSON", default=None, shown="earliest",
        doc="Where a partition without a committed offset starts. JSON must name every partition, for example "
        "`{\"orders\":{\"0\":23,\"1\":-1,\"2\":-2}}`; -1 is latest and -2 is earliest. Partitions that are added "
        "later start at earliest.")
    starting_timestamp_ms: int | None = _option(
        "startingTimestamp", integer(0), "ms since the epoch", default=None,
        doc="Partitions without a committed offset start at the first record with this timestamp or a later one. "
        "Overrides startingOffsets and startingOffsetsByTimestamp.")
    starting_timestamps: PartitionValues | None = _option(  # noqa: RUF009 - a field, not a value
        "startingOffsetsByTimestamp", parse_timestamps, "JSON, ms since the epoch", default=None,
        doc="The same with a timestamp for each partition, for example `{\"orders\":{\"0\":1700000000000}}`. Overrides "
        "startingOffsets.")
    starting_no_match: NoMatch = _option(  # noqa: RUF009 - a field, not a value
        "startingOffsetsByTimestampStrategy", one_of("error", "latest"), "error or latest", default="error",
        doc="What to do if a partition has no record at or after the timestamp: fail, or start at the end of the log.")
    max_offsets_per_trigger: int | None = _option(
        "maxOffsetsPerTrigger", integer(1), "offsets per batch", default=None,
        doc="The maximum size of a batch, shared equally between the partitions that have a backlog.")
    max_bytes_per_trigger: int | None = _option(
        "maxBytesPerTrigger", memory_bytes(1, INT64_MAX), "size", default=None,
        doc="A soft maximum of a batch's keys, values and included headers, for example `512m`. Sizes are estimates: "
        "the mean size of the topic's records that tasks read in the last batch. A record of a topic that this run has "
        "not read yet counts as 1 MiB, so the first batch is small. Offsets without a record, as in a compacted log, "
        "count like records. At least one record is read. With "
        "maxOffsetsPerTrigger, the smaller limit applies. Tasks report sizes to the stream reader (coordinatorHost); "
        "without reports every record counts as 1 MiB.")
    min_offsets_per_trigger: int | None = _option(
        "minOffsetsPerTrigger", integer(1), "offsets per batch", default=None,
        doc="A batch waits until this many offsets are available, at most for maxTriggerDelay. The first batch does "
        "not wait.")
    max_trigger_delay_ms: int = _option(
        "maxTriggerDelay", duration_ms, "duration", default=900_000, shown="15m",
        doc="The longest wait for minOffsetsPerTrigger, for example `10s`, `15m` or `1h`; a plain number is in ms.")
    min_partitions: int | None = _option(
        "minPartitions", integer(1, MIN_PARTITIONS_MAX), "tasks per batch", default=None,
        doc="The minimum number of tasks: the largest ranges are split until a batch has this many tasks.")
    max_records_per_partition: int | None = _option(
        "maxRecordsPerPartition", integer(1), "offsets per task", default=None,
        doc="The maximum number of offsets that one task reads.")
    fail_on_data_loss: bool = _option(
        "failOnDataLoss", boolean, "true or false", default=True,
        doc="Whether the query fails if records were deleted before it read them. If false, it logs a warning and "
        "continues with the remaining records.")
    include_headers: bool = _option(
        "includeHeaders", boolean, "true or false", default=False,
        doc="Whether the rows have the column `headers`.")
    columns: tuple[str, ...] = _option(
        "columns", column_names, "comma-separated names", default=(), shown="all, without headers",
        doc="The columns of the rows. Spark reads every column of a Python source, so a query is faster if it names "
        "those that it uses. `DeltaSink` needs `topic`, `partition` and `offset` to leave out rows that the table has.")
    group_members: int | Literal["auto"] = _option(
        "groupMembers", member_count, "members or auto", default="auto",
        doc="The number of group members that this query has, 1 to 1000. auto: one for each executor with an agent if "
        "members run beside executors, but only as many as fit into the record of a classic group with long lists of "
        "topics; otherwise 1.")
    member_host: Literal["auto", "executor", "driver"] = _option(
        "memberHost", one_of("auto", "executor", "driver"), "auto, executor or driver", default="auto",
        doc="Where the members run: in the stream reader on the driver's host, or in agents beside executors, which "
        "prefetch records between batches. auto: in agents if they can run, otherwise, and in local mode, on the "
        "driver's host; executor: in agents, and the query fails if the stream reader cannot listen for them.")
    coordinator_port: int = _option(
        "coordinatorPort", integer(0, 65_535), "port", default=0, shown="any free port",
        doc="The port on which the stream reader listens for agents and tasks. With memberHost=driver, and with auto "
        "in local mode, it is used only if failOnDataLoss is false or maxBytesPerTrigger is set, for the reports of "
        "tasks.")
    coordinator_host: str | None = _option(
        "coordinatorHost", host, "name or address", default=None,
        shown="the address that connects to the brokers, then the host name; 127.0.0.1 in local mode",
        doc="The address at which executors connect to the stream reader.")
    agent_memory_bytes: int = _option(
        "agentMemory", memory_bytes(1 << 20, 1 << 40), "size", default=64 << 20, shown="64m",
        doc="The maximum memory of each agent for prefetched records.")
    client_rack_env: str | None = _option(
        "clientRackEnv", environment_variable, "name of a variable", default=None,
        doc="The environment variable that has each executor's rack or zone. Its value becomes `client.rack` of the "
        "executor's clients, which then fetch from the nearest replica if the brokers support it (KIP-392). Executors "
        "without the variable use `kafka.client.rack`.")
    metrics_port: int | None = _option(
        "metricsPort", integer(0, 65_535), "port", default=None,
        doc="The port on the driver's host at which the stream reader serves the run's [metrics](metrics.md) to "
        "Prometheus, without authentication. Each query needs its own port; 0 picks a free one and reports it in the "
        "log and in the statistics. The query does not start if the port stays in use.")
    metrics_host: str | None = _option(
        "metricsHost", host, "name or address", default=None, shown="all IPv4 addresses of the driver's host",
        doc="The address on which metricsPort listens; `127.0.0.1` allows only local connections.")
    leave_on_stop: Literal["auto", "always", "never"] = _option(
        "leaveOnStop", one_of("auto", "always", "never"), "auto, always or never", default="auto",
        doc="Whether the members leave the group when the query stops. auto: AvailableNow and Once runs leave; a "
        "continuous query keeps its static memberships, so that a restart within the session timeout causes no "
        "rebalance.")
    trigger: Literal["auto", "availableNow", "processingTime"] = _option(
        "trigger", one_of("auto", "availableNow", "processingTime"), "auto, availableNow or processingTime",
        default="auto",
        doc="The query's trigger. Spark 4.0 and 4.1 do not pass it to a Python source, and run only one batch with "
        "`availableNow`. availableNow: this batch reads everything; maxOffsetsPerTrigger and "
        "maxBytesPerTrigger are ignored. processingTime: the first batch of a run does not wait for late partitions. "
        "auto: it waits for them, and if the run ends after it, a warning reports what these limits left. Newer Sparks "
        "pass the trigger, and another one than this is refused; `Once` counts as availableNow.")
    group_protocol: Literal["classic", "consumer"] = _option(
        "kafka.group.protocol", one_of("classic", "consumer"), "classic or consumer", default="classic",
        doc="The group protocol. With `consumer` (KIP-848) the broker controls session timeout, heartbeats and "
        "assignment.")
    isolation_level: Literal["read_committed", "read_uncommitted"] = _option(
        "kafka.isolation.level", one_of("read_committed", "read_uncommitted"), "read_committed or read_uncommitted",
        default="read_committed",
        doc="With read_committed, records of aborted transactions are skipped, and a partition is read up to its "
        "oldest open transaction. Spark's Kafka connector has read_uncommitted as default.")
    poll_timeout_ms: int = _option(
        "kafkaConsumer.pollTimeoutMs", integer(1, DAY_MS), "ms", default=120_000,
        doc="How long a task waits for records, while brokers respond, before it fails.")
    broker_timeout_ms: int = _option(
        "brokerTimeoutMs", integer(0), "ms", default=600_000,
        doc="How long a running query or a task waits for brokers that do not respond before it fails; 0 waits "
        "forever. A task waits at least kafkaConsumer.pollTimeoutMs, a query that starts 20 s.")
    fetch_offset_retries: int = _option(
        "fetchOffset.numRetries", integer(0, 1_000), "retries", default=3,
        doc="How often a failed offset request is repeated after a pause of fetchOffset.retryIntervalMs, within 10 s; "
        "after that it is sent again and again until brokerTimeoutMs.")
    fetch_offset_retry_interval_ms: int = _option(
        "fetchOffset.retryIntervalMs", integer(0, DAY_MS), "ms", default=1_000,
        doc="The pause between two attempts of an offset request; at most 10 s.")
    settings: tuple[tuple[str, str], ...] = _option(
        "kafka.*", str, "Kafka client setting", default=(), shown="the client's",
        doc="Passed to the Kafka client (librdkafka). Java's names, JAAS texts, PEM trust stores, and PEM or PKCS#12 "
        "key stores are translated; settings that the source controls are refused. `kafka.oauth_cb` names a Python "
        "function that returns tokens, as `package.module:function`.")
    # fmt: on

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> "Options":
        """Check and parse all options.

        Args:
            given: option names in any case, as Spark passes them; values are text.

        Raises:
            OptionError: an option is unknown, refused, missing, wrong, or contradicts another one. The message has the
                value (never a secret) and the expected format; ``fields``: option.
        """
        values: dict[str, Any] = {}
        kafka: dict[str, str] = {}
        _refuse_duplicates(given)
        for name, text in given.items():
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
        client_settings.check_integers(settings)
        if values.get("group_protocol") != "consumer":  # there the broker controls them, and librdkafka refuses them
            client_settings.check_heartbeats(settings)
        client_settings.setting_ms(settings, "max.poll.interval.ms", client_settings.MAX_POLL_INTERVAL_MS)
        return cls(**values, settings=tuple(sorted(settings.items())))

    @property
    def starting(self) -> StartingPosition:
        """Where partitions without a committed offset start. startingTimestamp overrides startingOffsetsByTimestamp,
        which overrides startingOffsets."""
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

    def rules(self, *, announces_end: bool = True) -> Rules:
        """What the protocol gets from the options.

        Args:
            announces_end: whether Spark asks once more after the last batch of an AvailableNow run (4.2 and newer).
        """
        return Rules(
            group=self.group_id,
            connection=self.connection,
            named_topics=self.topics,
            matches=None if self.topic_pattern is None else self.is_subscribed,
            slots=1 if self.group_members == "auto" else self.group_members,
            auto_slots=self.group_members == "auto" and self.member_host != "driver",
            hold_budget_ms=int(self.max_poll_interval_ms * HOLD_SHARE),
            joining_budget_ms=self.max_poll_interval_ms + self.session_timeout_ms,
            broker_timeout_ms=self.broker_timeout_ms,
            classic=self.group_protocol == "classic",
            cooperative=client_settings.is_incremental(self.consumer_settings()),
            lease_ms=int(self.session_timeout_ms * LEASE_SHARE),
            member_host=self.member_host,
            leave_on_stop=self.leave_on_stop,
            starting=self.starting,
            fail_on_data_loss=self.fail_on_data_loss,
            max_offsets=self.max_offsets_per_trigger,
            max_bytes=self.max_bytes_per_trigger,
            min_offsets=self.min_offsets_per_trigger,
            max_delay_ms=self.max_trigger_delay_ms,
            single_batch="no" if announces_end else SINGLE_BATCH[self.trigger],
        )

    @property
    def tasks_report_sizes(self) -> bool:
        """Whether every task reports what it read: a limit of the batch needs the sizes of records."""
        return self.max_bytes_per_trigger is not None

    def is_subscribed(self, topic: str) -> bool:
        """Whether the query subscribes to this topic. A pattern must match the whole name, and never an internal
        topic."""
        if self.topic_pattern is None:
            return topic in self.topics
        return topic not in INTERNAL_TOPICS and re.fullmatch(self.topic_pattern, topic) is not None

    @property
    def row_columns(self) -> tuple[str, ...]:
        """The columns of the rows, in the order of :data:`COLUMNS`."""
        return self.columns or (COLUMNS if self.include_headers else COLUMNS[:-1])

    @property
    def session_timeout_ms(self) -> int:
        """The session timeout of the members; with the consumer protocol, the brokers' default."""
        return client_settings.setting_ms(dict(self.settings), "session.timeout.ms", client_settings.SESSION_TIMEOUT_MS)

    @property
    def max_poll_interval_ms(self) -> int:
        """The maximum time between two polls of a member, which is also the group's rebalance timeout."""
        return client_settings.setting_ms(
            dict(self.settings), "max.poll.interval.ms", client_settings.MAX_POLL_INTERVAL_MS
        )

    def on_executor(self, environ: Mapping[str, str]) -> "Options":
        """Return the options for clients on an executor: ``client.rack`` is set from its environment."""
        rack = environ.get(self.client_rack_env or "", "").strip()
        if not rack:
            return self
        return replace(self, settings=tuple(sorted({**dict(self.settings), "client.rack": rack}.items())))

    def consumer_settings(self) -> dict[str, str]:
        """Settings of every consumer, both of members and of range readers; without group.instance.id.

        The client never commits, stores or resets offsets itself: a position out of range is an error.
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
    def topic_refresh_s(self) -> float:
        """How often the members and the request thread refresh topics and partitions; infinite: never."""
        own_ms = dict(self.settings).get("topic.metadata.refresh.interval.ms")
        if own_ms is None:
            return TOPIC_REFRESH_S
        return int(own_ms) / 1000 if int(own_ms) > 0 else math.inf

    def member_settings(self) -> dict[str, str]:
        """Settings of a member's consumer, in the stream reader or in an agent; its group.instance.id comes with
        ``Join``."""
        refresh_ms = str(int(TOPIC_REFRESH_S * 1000))
        return {"topic.metadata.refresh.interval.ms": refresh_ms, **self.consumer_settings()}

    def admin_settings(self) -> dict[str, str]:
        """Settings of an admin client: connection and authentication."""
        common = self._common()
        return {name: value for name, value in common.items() if name.startswith(client_settings.CONNECTION)} | {
            "bootstrap.servers": self.bootstrap_servers
        }

    @property
    def connection(self) -> command_line.Connection:
        """The arguments with which commands connect to the brokers, for those that messages print."""
        return command_line.connection(self.admin_settings())

    def producer_settings(self) -> dict[str, str]:
        """Settings of the producer that commits offsets; without transactional.id, which is the stream's."""
        own = {name: value for name, value in self.settings if name == client_settings.TRANSACTION_TIMEOUT}
        return self.admin_settings() | own

    def _common(self) -> dict[str, str]:
        own = dict(self.settings)
        return own if any(name.startswith("reconnect.") for name in own) else {**own, **client_settings.RECONNECT}

    def describe(self) -> dict[str, str]:
        """Return every option that is set, with secrets masked; safe to log."""
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


def _refuse_duplicates(given: Mapping[str, str]) -> None:
    """Refuse an option that is given twice, in different cases."""
    seen: dict[str, str] = {}
    for name in given:
        if name.lower() in seen:
            raise OptionError(f"option {name!r} is given twice, also as {seen[name.lower()]!r}", option=name)
        seen[name.lower()] = name


def _parsed(row: Option, text: str) -> object:
    try:
        return row.parse(text)
    except ValueError as exc:
        raise OptionError(f"option {row.name!r} is {_short(text)!r}; {exc}", option=row.name) from None


def _unknown(name: str) -> OptionError:
    """Build the error for an unknown name. It does not show the value, which may be a misplaced secret."""
    refused = _REFUSED_BY_NAME.get(name.lower())
    if refused is not None:
        return OptionError(f"option {refused[0]!r} is not supported: {refused[1]}", option=refused[0])
    names = [row.name for row in OPTIONS if row.name != "kafka.*"]
    hint = did_you_mean(name, names)
    if not hint and "." in name:
        hint = f"; settings of the Kafka client need the prefix 'kafka.': 'kafka.{name}'"
    return OptionError(f"unknown option {name!r}{hint}", option=name)


def _check_required(values: Mapping[str, Any]) -> None:
    if "bootstrap_servers" not in values:
        raise OptionError("option 'kafka.bootstrap.servers' is required: a comma-separated list of host:port")
    if "group_id" not in values:
        raise OptionError(
            "option 'kafka.group.id' is required: the consumer group that the query joins. Use a group of its own, "
            "unless the query is to share the topics with the group's other members"
        )
    if ("topics" in values) == ("topic_pattern" in values):
        both = "topics" in values
        raise OptionError(
            f"exactly one of subscribe and subscribePattern is required; {'both are' if both else 'neither is'} given"
        )


def _check_together(values: Mapping[str, Any]) -> None:
    low, high = values.get("min_offsets_per_trigger"), values.get("max_offsets_per_trigger")
    if low is not None and high is not None and low > high:
        raise OptionError(f"minOffsetsPerTrigger ({low}) must not be above maxOffsetsPerTrigger ({high})")
    columns = values.get("columns")
    if columns and values.get("include_headers") is not None and values["include_headers"] != ("headers" in columns):
        raise OptionError(
            f"includeHeaders is {str(values['include_headers']).lower()}, but columns is {','.join(columns)}; name "
            "headers in columns to read them, and leave out includeHeaders",
            option="columns",
        )
    if "topics" not in values:
        return
    subscribed = set(values["topics"])
    if values.get("starting_timestamp_ms") is not None:
        return  # it applies, whatever the others are
    times, offsets = values.get("starting_timestamps"), values.get("starting_offsets")
    spec, name = (offsets, "startingOffsets") if times is None else (times, "startingOffsetsByTimestamp")
    if spec is not None and not isinstance(spec, StartAt) and (others := topics_of(spec) - subscribed):
        raise OptionError(
            f"option {name!r} names topics that are not subscribed: {sorted(others)}; subscribed {sorted(subscribed)}",
            option=name,
        )


def _short(text: str) -> str:
    return text if len(text) <= VALUE_SHOWN_CHARS_MAX else text[:VALUE_SHOWN_CHARS_MAX] + "…"
