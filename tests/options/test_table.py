"""The option table: parsing, refused values, suggestions and how options are shown."""

import dataclasses
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_group_source.errors import OptionError
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition
from spark_group_source.options.table import (
    COLUMNS,
    INTERNAL_TOPICS,
    OPTIONS,
    REFUSED,
    Options,
    did_you_mean,
)
from spark_group_source.protocol.rules import StartingPosition

BASE = {"kafka.bootstrap.servers": "broker:9092", "kafka.group.id": "etl"}
ORDERS = BASE | {"subscribe": "orders"}
O0, O1, O2 = (TopicPartition("orders", p) for p in range(3))


def parsed(**more: str) -> Options:
    return Options.parse(ORDERS | {name.replace("__", "."): value for name, value in more.items()})


def refused(given: dict[str, str]) -> str:
    with pytest.raises(OptionError) as caught:
        Options.parse(given)
    return str(caught.value)


# ---- the table


def test_three_options_are_required_and_the_others_have_defaults() -> None:
    options = Options.parse(ORDERS)
    assert (options.bootstrap_servers, options.group_id, options.topics) == ("broker:9092", "etl", ("orders",))
    assert (options.topic_pattern, options.group_members, options.settings) == (None, "auto", ())


def test_every_option_has_a_field_a_unit_a_description_and_a_default() -> None:
    fields = {field.name for field in dataclasses.fields(Options)}
    assert {row.field for row in OPTIONS} == fields
    assert len({row.field for row in OPTIONS}) == len({row.name.lower() for row in OPTIONS}) == len(OPTIONS)
    for row in OPTIONS:
        assert row.unit, row.name
        assert row.default, row.name
        assert re.fullmatch(r"[A-Z`][^|]*\.", row.doc), row.name
    shown = {row.name: row.default for row in OPTIONS}
    assert (shown["maxTriggerDelay"], shown["failOnDataLoss"], shown["minPartitions"]) == ("15m", "true", "none")


def test_option_names_and_keywords_are_case_insensitive() -> None:
    odd = {
        "KAFKA.Bootstrap.Servers": "b:1",
        "kafka.GROUP.id": "etl",
        "SUBSCRIBE": "orders",
        "startingoffsets": "laTest",
    }
    options = Options.parse(odd | {"FAILONDATALOSS": "False", "kafka.Isolation.Level": "READ_UNCOMMITTED"})
    assert options.starting == StartingPosition(everywhere=LATEST)
    assert not options.fail_on_data_loss
    assert options.isolation_level == "read_uncommitted"
    assert Options.parse(ORDERS | {"startingOffsets": "earLiEst"}).starting == StartingPosition(everywhere=EARLIEST)


def test_an_option_given_twice_in_different_cases_is_refused() -> None:
    assert refused(ORDERS | {"Subscribe": "other"}) == "option 'Subscribe' is given twice, also as 'subscribe'"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("maxOffsetPerTrigger", "unknown option 'maxOffsetPerTrigger'; did you mean 'maxOffsetsPerTrigger'?"),
        ("failondatalos", "unknown option 'failondatalos'; did you mean 'failOnDataLoss'?"),
        ("group.id", "unknown option 'group.id'; did you mean 'kafka.group.id'?"),
        ("bootstrap.servers", "unknown option 'bootstrap.servers'; did you mean 'kafka.bootstrap.servers'?"),
        ("sasl.password", "settings of the Kafka client need the prefix 'kafka.': 'kafka.sasl.password'"),
        ("zzz", "unknown option 'zzz'"),
    ],
)
def test_an_unknown_option_is_refused_with_a_suggestion_and_without_its_value(name: str, hint: str) -> None:
    message = refused(ORDERS | {name: "hunter2"})
    assert hint in message
    assert "hunter2" not in message


def test_did_you_mean_suggests_only_similar_names() -> None:
    assert did_you_mean("fetch.min.byte", ["fetch.min.bytes", "acks"]) == "; did you mean 'fetch.min.bytes'?"
    assert did_you_mean("zzz", ["fetch.min.bytes"]) == ""


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_options_of_other_sources_are_refused_with_the_reason(name: str) -> None:
    message = refused(ORDERS | {name.lower(): "x"})
    assert message == f"option {name!r} is not supported: {REFUSED[name]}"


@pytest.mark.parametrize("missing", ["kafka.bootstrap.servers", "kafka.group.id"])
def test_a_missing_required_option_is_named(missing: str) -> None:
    given = {name: value for name, value in ORDERS.items() if name != missing}
    assert refused(given).startswith(f"option {missing!r} is required: ")


# ---- subscription


@pytest.mark.parametrize("given", [{}, {"subscribe": "a", "subscribePattern": "b"}])
def test_exactly_one_of_subscribe_and_subscribePattern_is_required(given: dict[str, str]) -> None:
    message = refused(BASE | given)
    assert message.startswith("exactly one of subscribe and subscribePattern is required")
    assert message.endswith("both are given" if given else "neither is given")


def test_a_pattern_matches_whole_names_and_no_internal_topics() -> None:
    orders = Options.parse(BASE | {"subscribePattern": "orders"})
    assert orders.is_subscribed("orders")
    assert not orders.is_subscribed("orders-eu")
    assert not orders.is_subscribed("my-orders")
    either = Options.parse(BASE | {"subscribePattern": "a|orders"})
    assert not either.is_subscribed("orders-eu")
    everything = Options.parse(BASE | {"subscribePattern": ".*"})
    assert everything.is_subscribed("__audit")
    assert not any(everything.is_subscribed(topic) for topic in INTERNAL_TOPICS)
    assert sorted(INTERNAL_TOPICS) == ["__consumer_offsets", "__share_group_state", "__transaction_state"]


def test_duplicate_topics_are_removed() -> None:
    options = parsed(subscribe=" b, a,b,, a")
    assert options.topics == ("b", "a")
    assert options.is_subscribed("a")
    assert not options.is_subscribed("c")


# ---- starting positions


def test_starting_timestamp_overrides_partition_timestamps_which_override_offsets() -> None:
    given = {"startingOffsets": "latest"}
    assert parsed(**given).starting == StartingPosition(everywhere=LATEST)
    given |= {"startingOffsetsByTimestamp": '{"orders":{"0":5}}'}
    assert parsed(**given).starting == StartingPosition(each=((O0, StartAt("time", 5)),))
    given |= {"startingTimestamp": "7", "startingOffsetsByTimestampStrategy": "LATEST"}
    assert parsed(**given).starting == StartingPosition(everywhere=StartAt("time", 7), no_match="latest")


def test_starting_offsets_per_partition_accept_earliest_and_latest() -> None:
    starting = parsed(startingOffsets='{"orders":{"0":123,"1":-1,"2":-2}}').starting
    assert starting.resolve([O2, O0, O1]) == {O0: StartAt("offset", 123), O1: LATEST, O2: EARLIEST}
    assert starting.of(O1) == LATEST
    assert starting.of(TopicPartition("orders", 3)) == EARLIEST


def test_a_starting_keyword_applies_to_every_partition() -> None:
    starting = parsed(startingOffsets="latest").starting
    assert starting.resolve([O0, O1]) == {O0: LATEST, O1: LATEST}
    assert starting.of(O2) == LATEST


@pytest.mark.parametrize("there", [[O0], [O0, O1, O2], [O0, TopicPartition("other", 1)]])
def test_starting_offsets_must_name_exactly_the_existing_partitions(there: list[TopicPartition]) -> None:
    starting = parsed(startingOffsets='{"orders":{"0":5,"1":-1}}').starting
    with pytest.raises(OptionError) as caught:
        starting.resolve(there)
    assert "specified [orders-0, orders-1]; assigned [" + ", ".join(map(str, there)) + "]" in str(caught.value)
    assert caught.value.fields == {"specified": ["orders-0", "orders-1"], "assigned": [str(tp) for tp in there]}
    assert starting.resolve([O1, O0]) == {O0: StartAt("offset", 5), O1: LATEST}


def test_the_message_about_many_partitions_is_short() -> None:
    with pytest.raises(OptionError) as caught:
        parsed(startingOffsets='{"orders":{"0":1}}').starting.resolve(
            TopicPartition("orders", p) for p in range(10_000)
        )
    assert "orders-19 and 9980 more]" in str(caught.value)


@pytest.mark.parametrize("name", ["startingOffsets", "startingOffsetsByTimestamp"])
def test_starting_offsets_of_other_topics_are_refused_at_load(name: str) -> None:
    message = refused(ORDERS | {name: '{"orders":{"0":1},"other":{"0":1}}'})
    assert "names topics that are not subscribed: ['other']; subscribed ['orders']" in message
    # A topic that does not exist yet cannot be named; the start checks the partitions that exist.
    assert Options.parse(ORDERS | {"subscribe": "orders,a", name: '{"orders":{"0":1}}'}).topics == ("orders", "a")
    assert Options.parse(ORDERS | {name: '{"other":{"0":1}}', "startingTimestamp": "7"}).topics == ("orders",)
    assert Options.parse(BASE | {"subscribePattern": "o.*", name: '{"other":{"0":1}}'}).topics == ()


# ---- words


@pytest.mark.parametrize("word", ["auto", "availableNow", "processingTime"])
def test_a_word_is_accepted_in_any_case(word: str) -> None:
    assert {parsed(trigger=text).trigger for text in (word, word.lower(), word.upper(), f" {word} ")} == {word}


# ---- limits


def test_integers_may_have_surrounding_blanks() -> None:
    assert parsed(minPartitions=" 7 ").min_partitions == 7


def test_the_largest_64_bit_limit_is_accepted() -> None:
    assert parsed(maxOffsetsPerTrigger=str(2**63 - 1)).max_offsets_per_trigger == 2**63 - 1


def test_a_minimum_above_the_maximum_is_refused() -> None:
    message = refused(ORDERS | {"minOffsetsPerTrigger": "11", "maxOffsetsPerTrigger": "10"})
    assert message == "minOffsetsPerTrigger (11) must not be above maxOffsetsPerTrigger (10)"
    assert parsed(minOffsetsPerTrigger="10", maxOffsetsPerTrigger="10").min_offsets_per_trigger == 10


def test_columns_have_the_order_of_sparks_kafka_source() -> None:
    assert parsed(columns="offset, TIMESTAMP,value,offset").row_columns == ("value", "offset", "timestamp")
    assert parsed().row_columns == COLUMNS[:-1]
    assert parsed(includeHeaders="true").row_columns == COLUMNS
    assert parsed(columns="headers,key").row_columns == ("key", "headers")


def test_columns_that_contradict_include_headers_are_refused() -> None:
    message = refused(ORDERS | {"includeHeaders": "true", "columns": "key"})
    assert message.startswith("includeHeaders is true, but columns is key; name headers in columns")
    assert "includeHeaders is false" in refused(ORDERS | {"includeHeaders": "false", "columns": "headers"})
    assert parsed(includeHeaders="true", columns="headers").row_columns == ("headers",)


@pytest.mark.parametrize(
    ("text", "ms"),
    [("15m", 900_000), ("10S", 10_000), ("1h", 3_600_000), ("500ms", 500), ("2min", 120_000), ("1d", 86_400_000),
     ("1999us", 1), (" 7 ", 7), ("0", 0)],
)  # fmt: skip
def test_the_trigger_delay_is_parsed_like_a_spark_duration(text: str, ms: int) -> None:
    assert parsed(maxTriggerDelay=text).max_trigger_delay_ms == ms


# ---- invalid values


WORD_OR_JSON = "it must be earliest, latest or JSON"
WRONG = {
    ("subscribe", "it must name at least one topic"): [" , "],
    ("subscribe", "for a pattern use subscribePattern"): ["^orders.*"],
    ("subscribe", "is not a topic name"): [".."],
    ("subscribePattern", "it must not be empty"): [" "],
    ("subscribePattern", "in Python's syntax"): ["("],
    ("startingOffsets", WORD_OR_JSON): ["newest", ""],
    ("startingOffsets", "it is not JSON"): ["{"],
    ("startingOffsets", "it must be JSON such as"): ["{}"],
    ("startingOffsets", "topic 'orders' must have partitions"): ['{"orders":{}}', '{"orders":5}'],
    ("startingOffsets", "partition orders-0 has True"): ['{"orders":{"0":true}}'],
    ("startingOffsets", "partition orders-0 has 1.0"): ['{"orders":{"0":1.0}}'],
    ("startingOffsets", "partition orders-0 has '7'"): ['{"orders":{"0":"7"}}'],
    ("startingOffsets", "it must be an offset, or -1 for latest, or -2 for earliest"): [
        '{"orders":{"0":9223372036854775808}}', '{"orders":{"0":-3}}', '{"orders":{"0":-1001}}'
    ],
    ("startingOffsets", "it must be an integer such as 0"): [
        '{"orders":{"x":1}}', '{"orders":{"-1":1}}', '{"orders":{"01":1}}', '{"orders":{"2147483648":1}}'
    ],
    ("startingOffsets", "it names '0' twice"): ['{"orders":{"0":1,"0":2}}'],
    ("startingTimestamp", "from 0"): ["-1"],
    ("startingOffsetsByTimestamp", "it must be milliseconds since the epoch, 0 or more"): ['{"orders":{"0":-1}}'],
    ("startingOffsetsByTimestampStrategy", "error or latest"): ["earliest"],
    ("minPartitions", "it must be an integer from 1 to 100000"): ["a", "1.0", "0", "-1", "", "100001"],
    ("maxOffsetsPerTrigger", "from 1 to 9223372036854775807"): [str(2**63), "0"],
    ("maxRecordsPerPartition", "from 1"): ["0"],
    ("maxBytesPerTrigger", "it must be a size such as 512k, 64m or 1g"): ["0", "10 MB", "1.5g", str(2**63)],
    ("maxTriggerDelay", "it must be a duration such as 500ms, 10s, 15m, 1h or 1d"): [
        "", "soon", "1.5s", "-1s", "10 s", "3w", "9" * 19 + "d", "9" * 5_000
    ],
    ("groupMembers", "from 1 to 1000"): ["0", "1001"],
    ("memberHost", "did you mean 'driver'?"): ["drivers"],
    ("leaveOnStop", "auto or always or never"): ["maybe"],
    ("failOnDataLoss", "it must be true or false"): ["yes"],
    ("includeHeaders", "it must be true or false"): ["1"],
    ("columns", "a comma-separated list of key, value, topic"): ["", "key,", "values"],
    ("columns", "did you mean 'timestampType'?"): ["timestamptyp"],
    ("coordinatorHost", "between dots has 1 to 63 characters"): ["driver..svc", "a" * 64],
    ("clientRackEnv", "the name of an environment variable"): ["$RACK"],
    ("kafka.group.protocol", "classic or consumer"): ["streams"],
    ("kafka.isolation.level", "read_committed or read_uncommitted"): ["none"],
    ("kafka.group.id", "it must not be empty"): ["  "],
    ("kafka.bootstrap.servers", "a comma-separated list of host:port"): [" , "],
    ("kafkaConsumer.pollTimeoutMs", "from 1 to 86400000"): ["0"],
    ("fetchOffset.numRetries", "from 0 to 1000"): ["-1"],
}  # fmt: skip
"""Invalid values by option and part of the error."""


def test_blanks_and_empty_entries_of_a_list_of_brokers_are_left_out() -> None:
    """As Kafka's own clients do."""
    assert Options.parse(ORDERS | {"kafka.bootstrap.servers": " a:1, ,b:1,"}).bootstrap_servers == "a:1,b:1"


@pytest.mark.parametrize(
    ("name", "value", "why"), [(name, value, why) for (name, why), values in WRONG.items() for value in values]
)
def test_an_invalid_value_is_refused_with_the_expected_format(name: str, value: str, why: str) -> None:
    message = refused((BASE if name.startswith("subscribe") else ORDERS) | {name: value})
    assert message.startswith(f"option {name!r} is '{value[:100]}")
    assert why in message
    assert len(message) < 600


# ---- the parsed options


FULL = ORDERS | {
    "startingOffsets": '{"orders":{"0":1}}',
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.mechanism": "PLAIN",
    "kafka.sasl.jaas.config": 'a.PlainLoginModule required username="me" password="hunter2";',
    "kafka.ssl.key.password": "hunter2",
    "kafka.ssl.keystore.key": "hunter2",
    "kafka.sasl.oauthbearer.client.secret": "hunter2",
    "kafka.sasl.oauthbearer.config": "token=hunter2",
    "kafka.fetch.max.wait.ms": "100",
}


def test_options_are_picklable_comparable_hashable_and_frozen() -> None:
    options = Options.parse(FULL)
    copy = pickle.loads(pickle.dumps(options))
    assert copy == options
    assert hash(copy) == hash(options)
    assert copy != dataclasses.replace(options, group_members=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.group_id = "other"  # type: ignore[misc]


@pytest.mark.proves("G9", level="core")
def test_G9_secrets_are_masked_in_every_text_form_of_options() -> None:
    options = Options.parse(FULL)
    for shown in (repr(options), str(options), f"{options}", str(options.describe())):
        assert "hunter2" not in shown
    assert "kafka.sasl.password=***" in repr(options)
    assert "kafka.fetch.wait.max.ms=100" in repr(options)
    assert options.consumer_settings()["sasl.password"] == "hunter2"


def test_G9_no_error_shows_a_secret() -> None:
    for name in ("kafka.sasl.jaas.config", "kafka.sasl.jaas", "password", "kafka.group.instance.id", "jaas"):
        assert "hunter2" not in refused(ORDERS | {name: 'password="hunter2'} | {"minPartitions": "x"})


@given(st.dictionaries(st.sampled_from([row.name for row in OPTIONS] + ["kafka.x", "nope"]), st.text(max_size=30)))
def test_any_text_is_parsed_or_refused_with_an_option_error(given_options: dict[str, str]) -> None:
    try:
        options = Options.parse(BASE | given_options)
    except OptionError:
        return
    assert pickle.loads(pickle.dumps(options)) == options
