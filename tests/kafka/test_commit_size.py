"""Commits of more offsets than the coordinator accepts at once: split into several requests."""

import pytest
from confluent_kafka import KafkaError
from manual_environment import ManualEnvironment, member_consumer, metadata, refusal

from spark_group_source.errors import CommitFailed
from spark_group_source.kafka.committer import TransactionalCommitter
from spark_group_source.kafka.translation import (
    COMMIT_BYTES_MAX,
    COMMITS_UNTIL_LARGER,
    OFFSET_BYTES,
    CommitSizes,
    OffsetNote,
)
from spark_group_source.model import Identity, TopicPartition

ME = Identity(1, "me", metadata(1, "me"))
NOTE = OffsetNote("x" * 60)
TOPIC = "t" * 249
OFFSET = OFFSET_BYTES + len("g") + len(TOPIC) + len(NOTE.text)
TOO_LARGE = refusal(KafkaError.UNKNOWN, abort=True)


def many(count: int) -> dict[TopicPartition, int]:
    return {TopicPartition(TOPIC, p): p + 1 for p in range(count)}


def sizes(environment: ManualEnvironment, call: str) -> list[int]:
    """The number of offsets in each request."""
    return [len(sent[1] if call == "send_offsets" else sent) for sent in environment.called(call)]


def test_many_offsets_are_sent_in_several_requests_of_one_transaction(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    offsets = many(3_000)
    committer.commit([(ME, offsets)], dict.fromkeys(offsets, NOTE))
    assert sum(sizes(environment, "send_offsets")) == 3_000
    assert max(sizes(environment, "send_offsets")) * OFFSET <= COMMIT_BYTES_MAX
    assert len(environment.called("commit_transaction")) == 1


def test_limit_follows_from_the_error_and_is_kept(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    offsets = many(600)
    environment.will("send_offsets", TOO_LARGE, TOO_LARGE)
    committer.commit([(ME, offsets)], dict.fromkeys(offsets, NOTE))
    assert len(environment.called("abort_transaction")) == 2 and len(environment.called("commit_transaction")) == 1
    first, second, *rest = sizes(environment, "send_offsets")
    assert second == first // 2 and max(rest) == second // 2 and sum(rest) == 600
    committer.commit([(ME, offsets)], dict.fromkeys(offsets, NOTE))
    assert len(environment.called("abort_transaction")) == 2


def test_an_abort_that_fails_is_no_reason_to_split_the_offsets(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    """Brokers that answer each request so would be sent the next one at once, without end."""
    offsets = many(600)
    environment.will("send_offsets", TOO_LARGE)
    environment.will("abort_transaction", *[TOO_LARGE] * 10)
    with pytest.raises(CommitFailed):
        committer.commit([(ME, offsets)], dict.fromkeys(offsets, NOTE))
    assert len(environment.called("abort_transaction")) < 10


def test_one_offset_that_is_refused_is_not_split(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    environment.will("send_offsets", TOO_LARGE)
    with pytest.raises(CommitFailed):
        committer.commit([(ME, many(1))], dict.fromkeys(many(1), NOTE))


def test_requests_keep_their_size_after_an_error_that_was_not_about_it() -> None:
    """Brokers answer with an unknown error also for other reasons, for a moment."""
    commits, offsets = CommitSizes("g"), many(64)
    notes = dict.fromkeys(offsets, NOTE)
    refused = next(commits.split(offsets, notes))
    while commits.shrink(KafkaError.UNKNOWN, refused):
        refused = next(commits.split(offsets, notes))
    assert len(refused) == 1
    assert [len(batch) for batch in commits.split(offsets, notes)] == [64]


def test_larger_requests_are_tried_again_after_many_commits() -> None:
    commits, offsets = CommitSizes("g"), many(64)
    notes = dict.fromkeys(offsets, NOTE)
    (whole,) = commits.split(offsets, notes)
    assert commits.shrink(KafkaError.UNKNOWN, whole)
    assert [len(batch) for batch in commits.split(offsets, notes)] == [32, 32]
    for _ in range(COMMITS_UNTIL_LARGER):
        commits.accepted()
    assert [len(batch) for batch in commits.split(offsets, notes)] == [64]


def test_member_splits_its_commit_as_well(environment: ManualEnvironment) -> None:
    consumer = member_consumer({"bootstrap.servers": "b", "group.id": "g"}, environment)
    offsets = many(600)
    environment.will("commit", TOO_LARGE, [], TOO_LARGE)
    consumer.commit(offsets, dict.fromkeys(offsets, NOTE))
    requests = environment.called("commit")
    assert {entry for sent in requests for entry in sent} == {
        (TOPIC, p, at, NOTE.text) for (_, p), at in offsets.items()
    }
    assert len(requests[0]) * OFFSET <= COMMIT_BYTES_MAX
    assert max(map(len, requests[3:])) <= len(requests[0]) // 4
