"""The protocol's rules that follow from a query's options."""

import pytest

from spark_group_source.options.table import Options

QUERY = {"kafka.bootstrap.servers": "b", "kafka.group.id": "g", "subscribe": "a"}
PATTERN = {name: value for name, value in QUERY.items() if name != "subscribe"}


@pytest.mark.parametrize(
    ("given", "classic", "cooperative"),
    [
        ({"kafka.partition.assignment.strategy": "range"}, True, False),
        ({"kafka.partition.assignment.strategy": "cooperative-sticky"}, True, True),
        ({"kafka.group.protocol": "consumer"}, False, True),
    ],
)
def test_the_groups_protocol_decides_how_it_rebalances_and_is_stored(
    given: dict[str, str], classic: bool, cooperative: bool
) -> None:
    """With cooperative-sticky Kafka's record of a group has each topic name a third time."""
    rules = Options.parse(QUERY | given).rules()
    assert (rules.classic, rules.cooperative) == (classic, cooperative)


def test_a_pattern_is_a_rule_and_named_topics_are_not() -> None:
    named = Options.parse(QUERY).rules()
    assert (named.named_topics, named.matches) == (("a",), None)
    rules = Options.parse({**PATTERN, "subscribePattern": "orders|new.*|__.*"}).rules()
    matches = rules.matches
    assert matches is not None and not rules.named_topics
    topics = ("orders", "orders-2", "newest", "a-new", "__consumer_offsets")
    assert list(filter(matches, topics)) == ["orders", "newest"]
