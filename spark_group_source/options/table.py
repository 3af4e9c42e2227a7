"""Every option of ``format("kafka-group")``: one table, read into one frozen :class:`Options`.

Runs in: every process. Deliberately absent: anything that asks a broker (a topic that is missing, a setting name that
the client library does not know) and anything of Spark; a mapping of texts comes in. Names are those of Spark's own
Kafka connector wherever it has one, and like there they may be written in any case.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

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
from spark_group_source.options.values import (
    did_you_mean,
    flag,
    members,
    memory_bytes,
    non_empty,
    one_of,
    pattern,
    servers,
    time_ms,
    topics,
    variable,
    whole,
)

GROUP_MEMBERS_MAX: Final = 1_000
MIN_PARTITIONS_MAX: Final = 100_000
DAY_MS: Final = 86_400_000
VALUE_SHOWN_CHARS_MAX: Final = 200
INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
"""The broker's own topics: a pattern never matches them."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table. ``parse`` raises ValueError with what would be right; ``unit`` says what the value is."""

    name: str
    field: str
    parse: Callable[[str], object]
    unit: str
    doc: str
    default: object = None
    default_text: str = ""
    """What the documents show when ``default`` alone does not tell."""

    def shown_default(self) -> str:
        if self.default_text or self.default is None:
            return self.default_text or "none"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


OPTIONS: Final[tuple[Option, ...]] = (
    Option("kafka.bootstrap.servers", "bootstrap_servers", servers, "host:port, …", default_text="required",
           doc="Brokers to ask first."),
    Option("kafka.group.id", "group_id", non_empty, "name", default_text="required",
           doc="The consumer group that the query joins. Its committed offsets are where a new query starts."),
    Option("subscribe", "topics", topics, "topic, …", default=(), default_text="this or subscribePattern",
           doc="Topics to read; a topic named twice is read once."),
    Option("subscribePattern", "topic_pattern", pattern, "regex", default_text="this or subscribe",
           doc="Topics to read: a Python regular expression that must match the whole name. The broker's internal "
               "topics never match."),
    Option("startingOffsets", "starting_offsets", parse_offsets, "earliest, latest or JSON", default_text="earliest",
           doc="Where a partition starts for which the group has no committed offset. JSON names every partition: "
               "`{\"orders\":{\"0\":23,\"1\":-1,\"2\":-2}}`, -1 is latest and -2 is earliest. Partitions that appear "
               "later start at earliest."),
    Option("startingTimestamp", "starting_timestamp_ms", whole(0), "ms since the epoch",
           doc="Start at the first record that is not older. Wins over the two other starting options."),
    Option("startingOffsetsByTimestamp", "starting_timestamps", parse_timestamps, "JSON, ms since the epoch",
           doc="The same for each partition: `{\"orders\":{\"0\":1700000000000}}`. Wins over startingOffsets."),
    Option("startingOffsetsByTimestampStrategy", "starting_no_match", one_of("error", "latest"), "error or latest",
           default="error", doc="When no record is young enough: fail, or start at the end."),
    Option("maxOffsetsPerTrigger", "max_offsets_per_trigger", whole(1), "offsets per batch",
           doc="At most this many, shared fairly: every partition with a backlog gets an equal share."),
    Option("minOffsetsPerTrigger", "min_offsets_per_trigger", whole(1), "offsets per batch",
           doc="Wait for this many, but no longer than maxTriggerDelay. The first batch does not wait."),
    Option("maxTriggerDelay", "max_trigger_delay_ms", time_ms, "time", default=900_000, default_text="15m",
           doc="The longest wait for minOffsetsPerTrigger, such as `10s`, `15m` or `1h`; a plain number is in ms."),
    Option("minPartitions", "min_partitions", whole(1, MIN_PARTITIONS_MAX), "tasks per batch",
           doc="Split the largest ranges until a batch has this many tasks, if it has that many offsets."),
    Option("maxRecordsPerPartition", "max_records_per_partition", whole(1), "offsets per task",
           doc="No task reads more than this."),
    Option("failOnDataLoss", "fail_on_data_loss", flag, "true or false", default=True,
           doc="Fail when records that were still to be read are gone; else warn and go on with those that are left."),
    Option("includeHeaders", "include_headers", flag, "true or false", default=False,
           doc="Add the column `headers`."),
    Option("groupMembers", "group_members", members(GROUP_MEMBERS_MAX), "members or auto", default="auto",
           doc="How many members of the group this query is, 1 to 1000. auto: one for each executor that takes part, "
               "where members live beside executors, else 1."),
    Option("memberHost", "member_host", one_of("auto", "executor", "driver"), "auto, executor or driver",
           default="auto",
           doc="Where the members live: in the stream reader on the driver's host, or beside executors, each in an "
               "agent that reads ahead between batches. auto: beside executors where agents can run, else on the "
               "driver's host; executor: the query fails where the stream reader cannot listen for them."),
    Option("coordinatorPort", "coordinator_port", whole(0, 65_535), "port", default=0, default_text="any free one",
           doc="Where the stream reader listens: for agents and tasks when members live beside executors, for what "
               "tasks skipped when failOnDataLoss is false."),
    Option("coordinatorHost", "coordinator_host", non_empty, "name or address",
           default_text="all addresses of the driver's host",
           doc="How executors reach the stream reader's host."),
    Option("agentMemory", "agent_memory_bytes", memory_bytes(1 << 20, 1 << 40), "size", default=64 << 20,
           default_text="64m", doc="What each agent may hold of records that it read ahead."),
    Option("clientRackEnv", "client_rack_env", variable, "name of a variable",
           doc="The environment variable that says on each executor in which rack or zone it is: its clients are given "
               "that as `client.rack`, and read from the replica there if brokers select replicas by rack (KIP-392). "
               "Where it is not set, `kafka.client.rack` counts."),
    Option("metricsPort", "metrics_port", whole(0, 65_535), "port",
           doc="Where the stream reader, on the driver's host, serves Prometheus the run's [metrics](metrics.md), "
               "without a password. Each query needs one of its own: 0 takes any free one and says in the log and in "
               "the statistics which. One that stays taken is refused when the query starts."),
    Option("metricsHost", "metrics_host", non_empty, "name or address",
           default_text="all addresses of the driver's host",
           doc="Where metricsPort listens; `127.0.0.1`: for this host alone."),
    Option("leaveOnStop", "leave_on_stop", one_of("auto", "always", "never"), "auto, always or never",
           default="auto",
           doc="Whether the members leave the group when the query stops. auto: an AvailableNow or Once run leaves, a "
               "continuous one keeps its place for a restart within the session timeout."),
    Option("kafka.group.protocol", "group_protocol", one_of("classic", "consumer"), "classic or consumer",
           default="classic",
           doc="How members and broker talk. With `consumer` the broker decides session timeout, heartbeats and "
               "assignment."),
    Option("kafka.isolation.level", "isolation_level", one_of("read_committed", "read_uncommitted"),
           "read_committed or read_uncommitted", default="read_committed",
           doc="Whether records of aborted and open transactions are left out. Spark's own connector reads them by "
               "default."),
    Option("kafkaConsumer.pollTimeoutMs", "poll_timeout_ms", whole(1, DAY_MS), "ms", default=120_000,
           doc="How long a task waits for records that should be there, of brokers that answer, before it fails."),
    Option("brokerTimeoutMs", "broker_timeout_ms", whole(0), "ms", default=600_000,
           doc="How long a running query, or a task, waits for brokers that do not answer before it fails; 0 is for "
               "ever. A query that starts waits 20 s."),
    Option("fetchOffset.numRetries", "fetch_offset_retries", whole(0, 1_000), "retries", default=3,
           doc="How often a question to the broker about offsets is repeated at once; brokerTimeoutMs says how long it "
               "is repeated in all."),
    Option("fetchOffset.retryIntervalMs", "fetch_offset_retry_interval_ms", whole(0, DAY_MS), "ms", default=1_000,
           doc="The wait between two such questions."),
    Option("kafka.*", "settings", str, "Kafka client setting", default=(), default_text="the client's",
           doc="Passed on to the Kafka client (librdkafka). Java's names, JAAS texts and PEM or PKCS#12 stores are "
               "translated; settings that are the source's own are refused. `kafka.oauth_cb` is "
               "`package.module:function`, a Python function that gives tokens."),
)  # fmt: skip
"""All options, in the order of ``docs/options.md``."""

_BY_NAME: Final = {row.name.lower(): row for row in OPTIONS if row.name != "kafka.*"}
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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Options:
    """The options of one query, checked. Frozen, pickles, shows secrets as ``***``; a field for each row."""

    bootstrap_servers: str
    group_id: str
    topics: tuple[str, ...] = ()
    topic_pattern: str | None = None
    starting_offsets: StartAt | PartitionValues | None = None
    starting_timestamp_ms: int | None = None
    starting_timestamps: PartitionValues | None = None
    starting_no_match: NoMatch = "error"
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_ms: int = 900_000
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False
    group_members: int | Literal["auto"] = "auto"
    member_host: Literal["auto", "executor", "driver"] = "auto"
    coordinator_port: int = 0
    coordinator_host: str | None = None
    agent_memory_bytes: int = 64 << 20
    client_rack_env: str | None = None
    metrics_port: int | None = None
    metrics_host: str | None = None
    leave_on_stop: Literal["auto", "always", "never"] = "auto"
    group_protocol: Literal["classic", "consumer"] = "classic"
    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    poll_timeout_ms: int = 120_000
    broker_timeout_ms: int = 600_000
    fetch_offset_retries: int = 3
    fetch_offset_retry_interval_ms: int = 1_000
    settings: tuple[tuple[str, str], ...] = ()
    """The translated ``kafka.*`` settings, sorted; a tuple, so that nobody changes them."""
    notes: tuple[str, ...] = ()
    """What was translated with a difference or dropped: to be logged once per query. Holds no secret."""

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
        settings, notes = client_settings.prepare(kafka, group_protocol=values.get("group_protocol", "classic"))
        return cls(**values, settings=tuple(sorted(settings.items())), notes=notes)

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

    def admin_settings(self) -> dict[str, str]:
        """Settings of an admin client: connection, security and what every client has."""
        common = self._common()
        return {name: common[name] for name in common if name not in client_settings.CONSUMER_ONLY} | {
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
        return shown | {f"kafka.{name}": client_settings.masked(name, value) for name, value in self.settings}

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={_short(text)}' for name, text in self.describe().items())})"


def render_markdown(names: Collection[str] | None = None) -> str:
    """The table of options as the documents show it, ending in a newline; ``names``: only these."""
    lines = ["| option | value | default | meaning |", "|---|---|---|---|"]
    rows = [row for row in OPTIONS if names is None or row.name in names]
    lines += [f"| `{row.name}` | {row.unit} | {row.shown_default()} | {row.doc} |" for row in rows]
    return "\n".join(lines) + "\n"


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
    for name, field in (("startingOffsets", "starting_offsets"), ("startingOffsetsByTimestamp", "starting_timestamps")):
        spec = values.get(field)
        if spec is None or isinstance(spec, StartAt) or topics_of(spec) == subscribed:
            continue
        raise OptionError(
            f"option {name!r} must name the subscribed topics and no other: "
            f"specified {sorted(topics_of(spec))}, subscribed {sorted(subscribed)}",
            option=name,
        )


def _short(text: str) -> str:
    return text if len(text) <= VALUE_SHOWN_CHARS_MAX else text[:VALUE_SHOWN_CHARS_MAX] + "…"
