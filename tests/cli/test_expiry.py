"""When committed offsets expire; ``tests/kafka/test_expiry.py`` tests the same on a real broker."""

import pytest
from kit.harness import tps

from spark_group_source.cli.report import RetentionStart, expiries, expiring_soon, retention_start
from spark_group_source.kafka.translation import GroupDescription, GroupMember
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import Note, note_text, parse_note, reset_text

A, B, C = tps("orders", 0, 1, 2)
OLD = TopicPartition("former", 0)
DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS
STATES = ("stable", "empty", "preparing_rebalancing", "completing_rebalancing", "assigning", "reconciling")


def seen(
    state: str = "stable", protocol: str = "classic", members: int = 1, *topics: str, simple: bool = False
) -> GroupDescription:
    owned = tuple(TopicPartition(topic, 0) for topic in topics)
    each = tuple(GroupMember(f"m{i}", "", "", "", () if i else owned) for i in range(members))
    return GroupDescription(state, protocol, "", each, simple=simple)


# --- Kafka's rules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("state", STATES)
def test_offsets_of_subscribed_topics_do_not_expire(state: str, protocol: str) -> None:
    found = expiries(seen(state, protocol, 1, "orders"), {A: 0, B: None}, retention_ms=WEEK_MS)
    assert found == dict.fromkeys((A, B), (RetentionStart.NONE, None))


@pytest.mark.parametrize(
    ("group", "clock"),
    [
        (seen("stable", "classic", 2, "orders"), RetentionStart.COMMIT),
        (seen("preparing_rebalancing", "classic", 2, "orders"), RetentionStart.NOT_STABLE),
        (seen("completing_rebalancing", "classic", 2, "orders"), RetentionStart.NOT_STABLE),
        (seen("unknown", "consumer", 2, "orders"), RetentionStart.COMMIT),
        (seen("reconciling", "consumer", 2, "orders"), RetentionStart.COMMIT),
        (seen("empty", "classic", 0), RetentionStart.EMPTY),
        (seen("empty", "consumer", 0), RetentionStart.COMMIT),
        (seen("empty", "classic", 0, simple=True), RetentionStart.COMMIT),
    ],
)
def test_retention_start_of_topics_without_subscriber(group: GroupDescription, clock: RetentionStart) -> None:
    assert retention_start(group) is clock
    assert expiries(group, {OLD: 0}, retention_ms=None)[OLD][0] is clock


def test_offsets_of_an_empty_classic_group_expire_after_newest_commit() -> None:
    found = expiries(seen("empty", "classic", 0), {A: 0, B: DAY_MS, C: None}, retention_ms=WEEK_MS)
    later = RetentionStart.EMPTY, DAY_MS + WEEK_MS
    assert found == dict.fromkeys((A, B, C), later), "the last member committed the newest one, and left after that"


def test_offsets_of_an_empty_kip848_group_expire_one_by_one() -> None:
    found = expiries(seen("empty", "consumer", 0), {A: 0, B: DAY_MS, C: None}, retention_ms=WEEK_MS)
    assert [found[tp][1] for tp in (A, B, C)] == [WEEK_MS, DAY_MS + WEEK_MS, None]
    assert expiring_soon(found, now_ms=WEEK_MS - DAY_MS, retention_ms=WEEK_MS) == [A]


def test_G10_unknown_commit_times_give_no_expiry() -> None:
    unknown = expiries(seen("empty", "consumer", 0), {A: None}, retention_ms=WEEK_MS)
    assert unknown[A][1] is None and not expiring_soon(unknown, now_ms=10 * WEEK_MS, retention_ms=WEEK_MS)
    unlimited = expiries(seen("empty", "consumer", 0), {A: 0}, retention_ms=None)
    assert unlimited[A][1] is None and not expiring_soon(unlimited, now_ms=10 * WEEK_MS, retention_ms=None)
    members = expiries(seen("stable", "classic", 1, "orders"), {OLD: 0, A: 0}, retention_ms=WEEK_MS)
    assert members[OLD] == (RetentionStart.COMMIT, WEEK_MS), "a member may subscribe to it all the same"
    assert members[A] == (RetentionStart.NONE, None)


def test_commit_metadata_contains_commit_time() -> None:
    text = note_text(Note("s", 4, 2, followed=True, truncated_after=9, at_ms=1_700_000_000_123))
    rest = parse_note(note_text(Note("s", 4, 2, followed=True, truncated_after=9)))
    assert parse_note(text) == rest._replace(at_ms=1_700_000_000_123)
    assert parse_note(note_text(Note("s", 4, at_ms=5))).at_ms == 5
    assert parse_note(note_text(Note("s", 4, at_ms=5, topic_id="rMJ-q_4"))).topic_id == "rMJ-q_4"
    assert parse_note("spark-group:s:4:2:later=a=b:at=5").at_ms == 5, "words of a later version are ignored"
    for other in (note_text(Note("s", 4)), reset_text(1), "", "at=5", "x:y:1:2:at=5", "spark-group:s:1:2:at=x"):
        assert parse_note(other).at_ms is None and not parse_note(other).followed
