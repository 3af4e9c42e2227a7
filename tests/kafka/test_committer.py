"""The transactional offset commit, with a scripted producer."""

import pytest
from confluent_kafka import KafkaError, KafkaException
from manual_environment import A0, A1, ManualEnvironment, metadata, refusal

from spark_group_source.errors import AccessDenied, CommitFailed, Fenced
from spark_group_source.kafka.committer import TransactionalCommitter
from spark_group_source.kafka.translation import MemberStale, OffsetNote
from spark_group_source.model import Identity, TopicPartition

ONE, TWO = Identity(1, "one", metadata(1, "one")), Identity(2, "two", metadata(2, "two"))
NOTES = {A0: OffsetNote("note 0", 3), A1: OffsetNote("note 1")}
TIMED_OUT = refusal(KafkaError._TIMED_OUT, retriable=True)
FENCED = refusal(KafkaError._FENCED, fatal=True)


def test_offsets_are_committed_with_their_notes_as_their_members(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    committer.commit([(ONE, {A0: 5}), (TWO, {A1: 7})], NOTES)
    assert environment.called("send_offsets") == [(1, {A0: (5, "note 0", 3)}), (2, {A1: (7, "note 1", None)})]
    assert environment.called()[1:] == [
        "init_transactions",
        "begin_transaction",
        *["send_offsets"] * 2,
        "commit_transaction",
    ]


@pytest.mark.parametrize(
    ("code", "expelled"), [(KafkaError.ILLEGAL_GENERATION, False), (KafkaError.UNKNOWN_MEMBER_ID, True)]
)
def test_a_stale_member_is_identified_and_the_transaction_is_aborted(
    environment: ManualEnvironment, committer: TransactionalCommitter, code: int, expelled: bool
) -> None:
    environment.will("send_offsets", None, refusal(code, abort=True))
    with pytest.raises(MemberStale) as stale:
        committer.commit([(ONE, {A0: 5}), (TWO, {A1: 7})], NOTES)
    assert (stale.value.part, stale.value.expelled) == (1, expelled)
    assert environment.called()[-1] == "abort_transaction"
    committer.commit([(ONE, {A0: 5})], NOTES)
    assert len(environment.producers) == 1


def test_G6_an_unanswered_commit_is_finished_by_the_same_producer(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    """A new producer would take the id back from a driver that has replaced this one meanwhile."""
    environment.will("commit_transaction", TIMED_OUT, TIMED_OUT)
    for _ in range(2):
        with pytest.raises(CommitFailed):
            committer.commit([(ONE, {A0: 5})], NOTES)
    assert environment.called()[-2:] == ["commit_transaction"] * 2
    committer.commit([(ONE, {A0: 6})], NOTES)
    assert environment.called()[-4:] == [
        "commit_transaction",
        "begin_transaction",
        "send_offsets",
        "commit_transaction",
    ]
    assert environment.called("init_transactions") == [None]


def test_G6_unanswered_offsets_are_aborted_before_the_next_commit(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    environment.will("send_offsets", refusal(KafkaError._TIMED_OUT, abort=True))
    environment.will("abort_transaction", TIMED_OUT)
    with pytest.raises(CommitFailed):
        committer.commit([(ONE, {A0: 5})], NOTES)
    environment.will("abort_transaction", FENCED)
    for _ in range(2):  # and it stays fenced
        with pytest.raises(Fenced):
            committer.commit([(ONE, {A0: 5})], NOTES)
    assert environment.called("init_transactions") == [None]


def test_G6_a_fenced_process_never_takes_the_id_back(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    environment.will("commit_transaction", FENCED)
    for request in (lambda: committer.commit([(ONE, {A0: 5})], NOTES), committer.prepare, lambda: committer.probe(A0)):
        with pytest.raises(Fenced):
            request()
    assert environment.called("init_transactions") == [None]


BROKEN = {
    "an id that expired while idle": ("send_offsets", refusal(KafkaError.INVALID_PRODUCER_ID_MAPPING, abort=True)),
    "a coordinator that lost its log": ("send_offsets", refusal(KafkaError.UNKNOWN_PRODUCER_ID, abort=True)),
    "a producer that failed for good": ("send_offsets", refusal(KafkaError.UNKNOWN_PRODUCER_ID, fatal=True)),
    "an outage in the middle": ("commit_transaction", refusal(KafkaError.INVALID_TXN_STATE, fatal=True)),
}


@pytest.mark.parametrize("call", BROKEN)
def test_G6_a_failed_producer_is_replaced_only_after_a_proof_of_membership(
    environment: ManualEnvironment, committer: TransactionalCommitter, call: str
) -> None:
    environment.will(*BROKEN[call])
    with pytest.raises(CommitFailed):
        committer.commit([(ONE, {A0: 5})], NOTES)
    assert committer.id_uncertain
    with pytest.raises(CommitFailed, match="may belong to another process"):
        committer.commit([(ONE, {A0: 5})], NOTES)
    with pytest.raises(CommitFailed):
        committer.prepare()
    assert committer.probe(A0) is False
    assert environment.called("init_transactions") == [None]
    committer.regain_id()
    committer.commit([(ONE, {A0: 5})], NOTES)
    assert len(environment.producers) == 2


def test_G6_a_producer_whose_login_is_refused_is_replaced_after_a_proof_of_membership(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    """For example because its certificate has expired; the next one reads the new files."""
    committer.commit([(ONE, {A0: 5})], NOTES)
    environment.will("error", KafkaError(KafkaError._SSL, "certificate expired"))
    committer.serve()
    environment.will("send_offsets", refusal(KafkaError.REBALANCE_IN_PROGRESS, abort=True))
    with pytest.raises(CommitFailed):  # the coordinator has answered: another broker refused the login
        committer.commit([(ONE, {A0: 6})], NOTES)
    committer.commit([(ONE, {A0: 6})], NOTES)
    assert len(environment.producers) == 1
    environment.will("error", KafkaError(KafkaError._SSL, "certificate expired"))
    environment.will("commit_transaction", TIMED_OUT)
    with pytest.raises(CommitFailed, match="the brokers refuse the login: certificate expired"):
        committer.commit([(ONE, {A0: 7})], NOTES)
    assert committer.id_uncertain
    committer.regain_id()
    committer.commit([(ONE, {A0: 7})], NOTES)
    assert len(environment.producers) == 2


@pytest.mark.parametrize(("minutes", "lost"), [(0, False), (2, True)])
@pytest.mark.parametrize("clock", ["clock_ms", "suspended_ms"])
def test_G6_a_transaction_that_expired_in_an_outage_makes_the_id_uncertain(
    environment: ManualEnvironment, committer: TransactionalCommitter, minutes: int, lost: bool, clock: str
) -> None:
    """Also while the machine was suspended, when the monotonic clock stands still."""
    environment.will("commit_transaction", TIMED_OUT)
    with pytest.raises(CommitFailed):
        committer.commit([(ONE, {A0: 5})], NOTES)
    setattr(environment, clock, getattr(environment, clock) + minutes * 60_000)
    environment.will("commit_transaction", FENCED)
    with pytest.raises(CommitFailed if lost else Fenced):
        committer.commit([(ONE, {A0: 5})], NOTES)
    assert committer.id_uncertain == lost


def test_a_producer_is_usable_after_a_refused_commit(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    environment.will("send_offsets", refusal(KafkaError.GROUP_AUTHORIZATION_FAILED, abort=True))
    with pytest.raises(AccessDenied, match="Read and Describe on the group 'g'"):
        committer.commit([(ONE, {A0: 5})], NOTES)
    committer.commit([(ONE, {A0: 5})], NOTES)
    assert len(environment.producers) == 1


def test_a_denied_topic_is_named_although_another_name_ends_like_it(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    """The library's text has the topic only."""
    text = "Failed to commit offsets to transaction on broker b: web-a((null))[0](Broker: Topic authorization failed)"
    denied = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, text, txn_requires_abort=True)
    environment.will("send_offsets", KafkaException(denied))
    offsets = {A0: 5, TopicPartition("web-a", 0): 5}
    with pytest.raises(AccessDenied, match="topic 'web-a'"):
        committer.commit([(ONE, offsets)], dict.fromkeys(offsets, OffsetNote("")))


def test_denied_transactions_raise_access_denied(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    environment.will("init_transactions", refusal(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, fatal=True))
    with pytest.raises(AccessDenied):
        committer.prepare()


def test_a_refused_login_with_a_possibly_expired_token_is_no_denial_of_transactions(
    environment: ManualEnvironment,
) -> None:
    by_token = {"bootstrap.servers": "b", "sasl.mechanism": "OAUTHBEARER"}
    committer = TransactionalCommitter(by_token, group="g", transactional_id="g.s", environment=environment)
    environment.will("init_transactions", refusal(KafkaError._AUTHENTICATION))
    with pytest.raises(CommitFailed):
        committer.prepare()


def test_a_probe_neither_takes_over_the_id_nor_commits(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    assert committer.probe(A0) is False
    assert environment.calls == []
    committer.prepare()
    assert committer.probe(A0) is True
    assert environment.called()[-4:] == ["Consumer", "close", "send_offsets", "abort_transaction"]
    assert environment.called("send_offsets") == [(-1, {A0: (0, None, None)})]


def test_a_probe_of_a_deleted_partition_is_answered(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    committer.prepare()
    environment.will("send_offsets", refusal(KafkaError.UNKNOWN_TOPIC_OR_PART, abort=True))
    assert committer.probe(A0) is True
    environment.will("send_offsets", refusal(KafkaError.UNKNOWN_TOPIC_OR_PART, abort=True))
    environment.will("abort_transaction", FENCED)
    with pytest.raises(Fenced):
        committer.probe(A0)


def test_an_unanswered_probe_raises(environment: ManualEnvironment, committer: TransactionalCommitter) -> None:
    committer.prepare()
    environment.will("send_offsets", refusal(KafkaError._TIMED_OUT, abort=True))
    with pytest.raises(CommitFailed):
        committer.probe(A0)
    environment.will("send_offsets", FENCED)
    with pytest.raises(Fenced):
        committer.probe(A0)


def test_G6_a_proof_of_membership_is_used_at_once_or_not_at_all(
    environment: ManualEnvironment, committer: TransactionalCommitter
) -> None:
    """A process that freezes after the proof would take the id back from its successor with its next commit."""
    environment.will(*BROKEN["an outage in the middle"])
    with pytest.raises(CommitFailed):
        committer.commit([(ONE, {A0: 5})], NOTES)
    environment.will("init_transactions", TIMED_OUT)
    with pytest.raises(CommitFailed):
        committer.regain_id()
    with pytest.raises(CommitFailed, match="may belong to another process"):
        committer.commit([(ONE, {A0: 5})], NOTES)
    committer.regain_id()
    assert not committer.id_uncertain
    committer.commit([(ONE, {A0: 5})], NOTES)
