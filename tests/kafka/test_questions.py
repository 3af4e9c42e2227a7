"""Admin and GroupOffsets, with clients whose answers the test writes down."""

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaPartition
from hand_made import A0, A1, HandRuntime, refusal

from spark_group_source.errors import AccessDenied, BrokerUnavailable, CommitFailed
from spark_group_source.kafka import Admin, CommittedOffset, GroupAdmin, GroupOffsets
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition

SETTINGS = {"bootstrap.servers": "b"}
B0, B1 = TopicPartition("b", 0), TopicPartition("b", 1)


@pytest.fixture
def runtime() -> HandRuntime:
    return HandRuntime()


def at(tp: TopicPartition, offset: int, text: str = "", *, error: int | None = None) -> Any:
    """An answer; the library's own object cannot be given an error."""
    if error is None:
        return KafkaPartition(tp.topic, tp.partition, offset, text)
    return SimpleNamespace(topic=tp.topic, partition=tp.partition, error=KafkaError(error))


def info(offset: int) -> Any:
    return SimpleNamespace(offset=offset)


def test_starts_ask_one_question_for_all_words_of_a_kind(runtime: HandRuntime) -> None:
    admin = Admin(SETTINGS, runtime=runtime)
    runtime.will("list_offsets", {A0: info(3)}, {A1: info(9)}, {B1: info(-1)})
    words = {
        A0: EARLIEST,
        A1: LATEST,
        B0: StartAt("offset", 4),
        B1: StartAt("time", 77),
        TopicPartition("c", 0): LATEST,
    }
    assert admin.starts(words, committed=True) == {A0: 3, A1: 9, B0: 4, B1: None}
    assert [list(asked) for asked in runtime.called("list_offsets")] == [[A0], [A1, TopicPartition("c", 0)], [B1]]
    assert runtime.called("isolation") == ["READ_UNCOMMITTED", "READ_COMMITTED", "READ_UNCOMMITTED"]


def test_a_question_is_asked_again_after_a_pause_and_then_given_up(runtime: HandRuntime) -> None:
    admin = Admin(SETTINGS, runtime=runtime, retries=2, retry_interval_s=4.0)
    runtime.will("list_offsets", *[refusal(KafkaError._TRANSPORT)] * 3)
    with pytest.raises(BrokerUnavailable, match="within 8 s"):
        admin.earliest([A0])
    assert len(runtime.called("list_offsets")) == 3


NO_LEADERS = refusal(KafkaError._NOENT)
"""What the library says where none of the partitions that were asked for has a leader that it knows."""


def test_B41_partitions_none_of_which_exists_are_left_out(runtime: HandRuntime) -> None:
    admin = Admin(SETTINGS, runtime=runtime, retries=0)
    runtime.will("list_offsets", {A0: NO_LEADERS, B1: NO_LEADERS})
    gone = refusal(KafkaError.UNKNOWN_TOPIC_OR_PART)
    runtime.will("describe_topics", {"a": gone, "b": SimpleNamespace(partitions=[0])})
    assert admin.latest([A0, B1]) == {}


def test_partitions_without_a_leader_are_asked_for_again(runtime: HandRuntime) -> None:
    admin = Admin(SETTINGS, runtime=runtime, retries=2)
    runtime.will("list_offsets", {A0: NO_LEADERS}, {A0: NO_LEADERS}, {A0: info(3)})
    there = {"a": SimpleNamespace(partitions=[0])}
    runtime.will("describe_topics", there, refusal(KafkaError._TRANSPORT))
    assert admin.latest([A0]) == {A0: 3}


def test_one_partition_without_an_answer_does_not_hide_the_others(runtime: HandRuntime) -> None:
    offsets = GroupOffsets(SETTINGS, group="g", runtime=runtime)
    answers = [at(A0, 5, "n"), at(A1, -1001), at(B0, -1001, error=KafkaError.UNKNOWN_TOPIC_OR_PART)]
    runtime.will("committed", answers)
    assert offsets.read([A0, A1, B0]) == {A0: CommittedOffset(5, "n"), A1: None}


def test_an_error_of_the_whole_question_is_raised(runtime: HandRuntime) -> None:
    offsets = GroupOffsets(SETTINGS, group="g", runtime=runtime)
    runtime.will("committed", *[[at(A0, 5), at(A1, -1001, error=KafkaError.TOPIC_AUTHORIZATION_FAILED)]] * 2)
    with pytest.raises(AccessDenied, match="Describe on the topic 'a'"):
        offsets.read([A0, A1])
    runtime.will("committed", refusal(KafkaError._TIMED_OUT))
    with pytest.raises(BrokerUnavailable):
        offsets.read([A0])


def test_reading_back_waits_until_all_of_it_shows(runtime: HandRuntime) -> None:
    offsets = GroupOffsets(SETTINGS, group="g", runtime=runtime)
    hidden = at(A1, -1001, error=KafkaError.UNSTABLE_OFFSET_COMMIT)
    runtime.will("committed", [at(A0, 4), at(A1, -1001)], [at(A0, 5), hidden], [at(A0, 5), at(A1, 6)])
    offsets.wait_shown({A0: 5, A1: 6})
    assert len(runtime.called("committed")) == 3


def test_reading_back_gives_up(runtime: HandRuntime) -> None:
    offsets = GroupOffsets(SETTINGS, group="g", runtime=runtime)
    runtime.will("committed", *[[at(A0, 4)]] * 1_000)
    with pytest.raises(CommitFailed, match="a-0 was committed at 5, but the group shows"):
        offsets.wait_shown({A0: 5})
    assert runtime.clock_ms < 20_000


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (KafkaError._TIMED_OUT, "did not answer whether group 'g' was moved .*describe, then do this again"),
        (KafkaError.NON_EMPTY_GROUP, "refused to move group 'g'"),
    ],
)
def test_a_group_that_may_have_been_moved_is_not_called_refused(runtime: HandRuntime, code: int, said: str) -> None:
    runtime.will("alter_consumer_group_offsets", {"g": refusal(code)})
    with pytest.raises(CommitFailed, match=said):
        GroupAdmin(SETTINGS, runtime=runtime).move_committed("g", {A0: 4})


def test_a_topic_without_partitions_is_no_answer_to_what_a_group_has(runtime: HandRuntime) -> None:
    """Left out, its offsets would look like none."""
    runtime.will("list_topics", SimpleNamespace(topics={"a": SimpleNamespace(partitions={})}))
    with pytest.raises(BrokerUnavailable, match="which partitions topic a has"):
        GroupAdmin(SETTINGS, runtime=runtime).committed("g")


def test_a_partition_without_an_answer_is_no_answer_to_what_a_group_has(runtime: HandRuntime) -> None:
    runtime.will("list_topics", SimpleNamespace(topics={"a": SimpleNamespace(partitions={0: None, 1: None})}))
    runtime.will("committed", [at(A0, 5), at(A1, -1001, error=KafkaError.UNSTABLE_OFFSET_COMMIT)])
    with pytest.raises(BrokerUnavailable, match="no answer for 1 partitions, the first a-1"):
        GroupAdmin(SETTINGS, runtime=runtime).committed("g")
