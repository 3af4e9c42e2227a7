"""Admin, GroupAdmin and GroupOffsets, with scripted clients."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Uuid
from confluent_kafka import TopicPartition as KafkaPartition
from manual_environment import A0, A1, ManualAdmin, ManualEnvironment, refusal

from spark_group_source.errors import AccessDenied, BrokerUnavailable, CommitFailed, GroupError
from spark_group_source.kafka import group_admin
from spark_group_source.kafka.admin import Admin, EpochEnds
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.group_offsets import GroupOffsets
from spark_group_source.kafka.retry import RETRY_S_MAX, RefusalWatch
from spark_group_source.kafka.translation import CommittedOffset, ListedGroup
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.run import LEADER_MS_MAX
from spark_group_source.runtime.coordinator import BrokerQueries

SETTINGS = {"bootstrap.servers": "b"}
B0, B1 = TopicPartition("b", 0), TopicPartition("b", 1)


def at(tp: TopicPartition, offset: int, text: str = "", *, error: int | None = None) -> Any:
    """An answer; unlike the library's own object, it can have an error."""
    if error is None:
        return KafkaPartition(tp.topic, tp.partition, offset, text)
    return SimpleNamespace(topic=tp.topic, partition=tp.partition, error=KafkaError(error))


def with_leaders(*leaders: int | None) -> Any:
    """A topic in an answer, with the leader of each partition."""
    return SimpleNamespace(topic_id="i", partitions=[SimpleNamespace(id=p, leader=at) for p, at in enumerate(leaders)])


def info(offset: int, epoch: int | None = None) -> Any:
    return SimpleNamespace(offset=offset, leader_epoch=epoch)


def test_starting_positions_of_one_kind_are_resolved_by_one_request(environment: ManualEnvironment) -> None:
    admin = Admin(SETTINGS, environment=environment)
    environment.will("list_offsets", {A0: info(3)}, {A1: info(9, 6)}, {B1: info(-1)})
    words = {
        A0: EARLIEST,
        A1: LATEST,
        B0: StartAt("offset", 4),
        B1: StartAt("time", 77),
        TopicPartition("c", 0): LATEST,
    }
    assert admin.starting_offsets(words, committed=True) == ({A0: 3, A1: 9, B0: 4, B1: None}, {A1: 6})
    assert [list(requested) for requested in environment.called("list_offsets")] == [
        [A0],
        [A1, TopicPartition("c", 0)],
        [B1],
    ]
    assert environment.called("isolation") == ["READ_UNCOMMITTED", "READ_COMMITTED", "READ_UNCOMMITTED"]


def test_many_partitions_are_requested_in_batches(
    environment: ManualEnvironment, offsets: GroupOffsets, scripted_admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_group_source.kafka.translation.PARTITIONS_PER_REQUEST", 2)
    environment.will("list_offsets", {A0: info(3), A1: info(4)}, {B0: info(5)})
    assert scripted_admin.latest([B0, A1, A0]) == {A0: 3, A1: 4, B0: 5}
    assert [list(requested) for requested in environment.called("list_offsets")] == [[A0, A1], [B0]]
    environment.will("committed", [at(A0, 0), at(A1, -1001)], [at(B0, 7)])
    assert offsets.read([B0, A1, A0]) == {A0: CommittedOffset(0, ""), A1: None, B0: CommittedOffset(7, "")}
    assert environment.called("committed timeout") == [10, 10], "one timeout for all of them"
    environment.will("list_offsets", {A0: info(3), A1: info(4)}, {B0: refusal(KafkaError._TIMED_OUT)})
    with pytest.raises(BrokerUnavailable):
        scripted_admin.latest([A0, A1, B0])
    environment.will("list_offsets", {A0: info(3), A1: info(4)}, {B0: refusal(KafkaError._TIMED_OUT)})
    assert scripted_admin.latest([A0, A1, B0], require_all=False) == {A0: 3, A1: 4}


def test_a_request_is_retried_after_a_pause_and_then_fails(environment: ManualEnvironment) -> None:
    admin = Admin(SETTINGS, environment=environment, retries=2, retry_interval_s=4.0)
    environment.will("list_offsets", *[refusal(KafkaError._TRANSPORT)] * 3)
    with pytest.raises(BrokerUnavailable, match="within 8 s"):
        admin.earliest([A0])
    assert len(environment.called("list_offsets")) == 3
    assert environment.clock_ms == 1_000 + 2 * 4_000
    environment.will("list_offsets", *[refusal(KafkaError._TRANSPORT)] * 4)
    with pytest.raises(BrokerUnavailable, match="within 3 s"):
        Admin(SETTINGS, environment=environment).earliest([A0])


NO_LEADERS = refusal(KafkaError._NOENT)
"""The library's error when none of the requested partitions has a known leader."""


NO_LEADER = refusal(KafkaError.LEADER_NOT_AVAILABLE)
"""A broker's answer for a partition whose brokers are all down."""
UNANSWERED = refusal(KafkaError._TIMED_OUT)
UNKNOWN = refusal(KafkaError._UNKNOWN_PARTITION)
"""The library's error for one such partition beside others."""


def test_a_refused_connection_is_remembered_although_another_one_is_lost() -> None:
    watch = RefusalWatch()
    for code in (KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._TRANSPORT):
        watch(KafkaError(code))
    with pytest.raises(KafkaException, match="SASL_AUTHENTICATION_FAILED"):
        watch.check()
    watch.clear()
    watch.check()


def test_a_blocking_request_reports_why_no_connection_came_about(
    environment: ManualEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reports it to its error callback only."""
    admin = Admin(SETTINGS, environment=environment)
    refused = KafkaError(KafkaError._SSL, "certificate verify failed")
    monkeypatch.setattr(ManualAdmin, "poll", lambda *_: admin._on_error(refused))
    environment.will("list_topics", *[refusal(KafkaError._TRANSPORT)] * 2)
    with pytest.raises(AccessDenied, match="certificate verify failed"):
        admin.list_topics()


def test_a_client_that_was_replaced_refuses_nothing(environment: ManualEnvironment, scripted_admin: Admin) -> None:
    """Its token may have expired, with which it connects again and again."""
    environment.will("list_topics", *[refusal(KafkaError._TRANSPORT)] * 2)
    with pytest.raises(BrokerUnavailable):
        scripted_admin.list_topics()
    environment.reporting = environment.admins[0]
    environment.will("error", KafkaError(KafkaError._AUTHENTICATION, "invalid_token"))
    scripted_admin.serve()
    assert not environment.answers["error"], "the report was taken"
    with pytest.raises(BrokerUnavailable):
        scripted_admin.list_topics()


def test_topics_of_brokers_without_ids_have_none(environment: ManualEnvironment) -> None:
    """The library answers with the text of the zero id."""
    found = [SimpleNamespace(topic_id=Uuid(*id_), partitions=[None]) for id_ in ((0, 0), (0, 7))]
    environment.will("describe_topics", dict(zip(("old", "new"), found, strict=True)))
    topics = Admin(SETTINGS, environment=environment).describe_topics(["old", "new"])
    assert (topics["old"].id, bool(topics["new"].id)) == ("", True)


def test_partitions_that_a_broker_reports_missing_are_left_out(
    environment: ManualEnvironment, scripted_admin: Admin
) -> None:
    gone, one = refusal(KafkaError.UNKNOWN_TOPIC_OR_PART), with_leaders(1)
    environment.will(
        "list_offsets", {A0: NO_LEADERS, B1: NO_LEADERS}, {A0: info(3), B1: UNKNOWN}, {B0: UNKNOWN, B1: UNKNOWN}
    )
    environment.will("describe_topics", {"a": gone, "b": one}, {"b": one}, {"b": one}, {"b": with_leaders()})
    assert scripted_admin.latest([A0, B1]) == {}
    assert scripted_admin.latest([A0, B1]) == {A0: 3}
    with pytest.raises(BrokerUnavailable):
        scripted_admin.latest([B0, B1])
    environment.will("list_offsets", {B0: UNKNOWN})
    with pytest.raises(BrokerUnavailable):
        scripted_admin.latest([B0])  # the broker does not return the partitions of the topic


def test_G10_the_end_of_a_partition_unknown_to_a_broker_is_retried(
    environment: ManualEnvironment,
    scripted_admin: Admin,
) -> None:
    """Else an AvailableNow run leaves it to the next one."""
    options = Options.parse({"kafka.bootstrap.servers": "b", "kafka.group.id": "g", "subscribe": "a,b"})
    environment.will("describe_topics", dict.fromkeys("ab", with_leaders(1)))
    environment.will("list_offsets", *[{A0: info(3), B0: UNKNOWN}] * 2, {A0: info(4), B0: info(5)})
    target = BrokerQueries(
        options, scripted_admin, EpochEnds(SETTINGS, environment=environment), environment.now_ms
    ).read_target()
    assert target.ends == {A0: 4, B0: 5}


def test_G10_a_partition_with_unknown_end_is_left_to_the_next_run_with_a_warning(
    environment: ManualEnvironment, scripted_admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    options = Options.parse({"kafka.bootstrap.servers": "b", "kafka.group.id": "g", "subscribe": "a"})
    gone = refusal(KafkaError.UNKNOWN_TOPIC_OR_PART)
    environment.will("describe_topics", {"a": with_leaders(1, 1)}, *[{"a": gone}] * 9)
    environment.will("list_offsets", *[{A0: info(3), A1: UNKNOWN}] * 9)
    target = BrokerQueries(
        options, scripted_admin, EpochEnds(SETTINGS, environment=environment), environment.now_ms
    ).read_target()
    assert target.ends == {A0: 3}
    assert f"no broker returned the end offsets of 1 partitions, such as {A1}" in caplog.text


@pytest.mark.parametrize("back_after_ms", [10_000, 2 * LEADER_MS_MAX])
@pytest.mark.parametrize(
    ("leaderless", "answer"),
    [({A1}, NO_LEADER), ({A0, A1}, NO_LEADER), ({A1}, UNANSWERED), ({A1}, UNKNOWN)],
    ids=["another one has a leader", "none has a leader", "its leader does not answer", "its leader is unknown"],
)
def test_G10_the_end_of_a_partition_is_awaited_during_the_election_of_its_leader(
    environment: ManualEnvironment,
    scripted_admin: Admin,
    leaderless: set[TopicPartition],
    answer: KafkaException,
    back_after_ms: int,
) -> None:
    """Else an AvailableNow run leaves its records to the next one."""
    options = Options.parse({"kafka.bootstrap.servers": "b", "kafka.group.id": "g", "subscribe": "a"})
    began_ms = environment.now_ms()

    def ends() -> dict[TopicPartition, Any]:
        _, requested = environment.calls[-1]
        is_back = environment.now_ms() - began_ms >= back_after_ms
        return {tp: info(3) if is_back or tp not in leaderless else answer for tp in requested}

    environment.will("describe_topics", *[{"a": with_leaders(None, None)}] * 100)
    environment.will("list_offsets", *[ends] * 100)
    target = BrokerQueries(
        options, scripted_admin, EpochEnds(SETTINGS, environment=environment), environment.now_ms
    ).read_target()
    took_ms, waited_ms = environment.now_ms() - began_ms, min(back_after_ms, LEADER_MS_MAX)
    assert waited_ms <= took_ms <= waited_ms + 5_000
    assert target.ends.keys() == {A0, A1} - (leaderless if back_after_ms > LEADER_MS_MAX else set())


def test_partitions_without_a_leader_are_retried(environment: ManualEnvironment) -> None:
    admin = Admin(SETTINGS, environment=environment, retries=2)
    environment.will("list_offsets", {A0: NO_LEADERS}, {A0: NO_LEADERS}, {A0: info(3)})
    there = {"a": with_leaders(1)}
    environment.will("describe_topics", there, refusal(KafkaError._TRANSPORT))
    assert admin.latest([A0]) == {A0: 3}


def test_bounds_of_logs_are_high_watermarks_without_partitions_that_have_no_leader(
    environment: ManualEnvironment, scripted_admin: Admin
) -> None:
    options = Options.parse({"kafka.bootstrap.servers": "b", "kafka.group.id": "g", "subscribe": "a"})
    stable = SimpleNamespace(offset=3, leader_epoch=None)
    environment.will("list_offsets", {A0: stable}, *({A0: info(at), A1: NO_LEADER} for at in (1, 5)))
    found = BrokerQueries(
        options, scripted_admin, EpochEnds(SETTINGS, environment=environment), environment.now_ms
    ).read_log_ends(ev.ReadLogEnds(ends=(A0,), firsts=(A0, A1), log_ends=(A0, A1)))
    assert (found.ends, found.epoch_ends, found.firsts, found.log_ends) == ({A0: 3}, {}, {A0: 1}, {A0: 5})
    assert environment.called("isolation") == ["READ_COMMITTED", "READ_UNCOMMITTED", "READ_UNCOMMITTED"]


def test_partition_without_a_leader_is_left_out_and_makes_no_new_client(environment: ManualEnvironment) -> None:
    admin = Admin(SETTINGS, environment=environment, retries=3)
    for _ in range(20):
        environment.will("list_offsets", {A0: info(3), A1: NO_LEADER})
        assert admin.latest([A0, A1], require_all=False) == {A0: 3}
        environment.clock_ms += 5_000
    assert len(environment.admins) == 1


def test_starts_of_partitions_without_a_leader_are_left_out_without_a_retry(environment: ManualEnvironment) -> None:
    admin = Admin(SETTINGS, environment=environment, retries=3)
    environment.will("list_offsets", {A1: NO_LEADERS}, {A0: info(3)})
    environment.will("describe_topics", {"a": with_leaders(1, None)})
    assert admin.starting_offsets({A1: EARLIEST, A0: LATEST}, committed=True) == ({A0: 3}, {})
    assert len(environment.admins) == 1


def test_one_unanswered_partition_does_not_hide_the_others(
    environment: ManualEnvironment, offsets: GroupOffsets
) -> None:
    answers = [at(A0, 5, "n"), at(A1, -1001), at(B0, -1001, error=KafkaError.UNKNOWN_TOPIC_OR_PART)]
    environment.will("committed", answers)
    assert offsets.read([A0, A1, B0]) == {A0: CommittedOffset(5, "n"), A1: None}


def test_refused_partition_that_is_not_needed_is_no_error(
    environment: ManualEnvironment, offsets: GroupOffsets
) -> None:
    environment.will("committed", [at(A0, 5), at(A1, -1001, error=KafkaError.TOPIC_AUTHORIZATION_FAILED)])
    assert offsets.read([A0, A1], optional={A1}) == {A0: CommittedOffset(5, ""), A1: None}


def test_partition_that_one_broker_does_not_know_yet_is_requested_again(
    environment: ManualEnvironment, scripted_admin: Admin
) -> None:
    grown = {"a": with_leaders(1, 1)}
    environment.will("describe_topics", {"a": with_leaders(1)}, grown)
    assert scripted_admin.existing_partitions([A0, A1]) == {A0, A1}
    gone = [{"b": with_leaders(1)}] * 4
    environment.will("describe_topics", *gone)
    assert scripted_admin.existing_partitions([B0, B1]) == {B0}


def test_an_error_of_the_whole_request_is_raised(environment: ManualEnvironment, offsets: GroupOffsets) -> None:
    environment.will("committed", *[[at(A0, 5), at(A1, -1001, error=KafkaError.TOPIC_AUTHORIZATION_FAILED)]] * 2)
    with pytest.raises(AccessDenied, match="Describe on the topic 'a'"):
        offsets.read([A0, A1])
    environment.will("committed", refusal(KafkaError._TIMED_OUT))
    with pytest.raises(BrokerUnavailable):
        offsets.read([A0])


def test_after_an_unanswered_read_new_connections_are_opened(
    environment: ManualEnvironment, offsets: GroupOffsets
) -> None:
    """Certificate files may have been replaced since, which a client reads once."""
    environment.will("committed", refusal(KafkaError._TIMED_OUT), [at(A0, 5)])
    with pytest.raises(BrokerUnavailable):
        offsets.read([A0])
    assert offsets.read([A0]) == {A0: CommittedOffset(5, "")}
    assert environment.called("close") == [None] and len(environment.consumers) == 2


def test_a_refused_login_is_the_reason_of_an_unanswered_read(
    environment: ManualEnvironment, offsets: GroupOffsets
) -> None:
    def login_refused() -> None:
        environment.will("error", KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
        raise refusal(KafkaError._TIMED_OUT)

    environment.will("committed", login_refused, login_refused)
    with pytest.raises(AccessDenied, match="wrong password"):
        offsets.read([A0])


def test_reading_back_waits_until_all_offsets_are_visible(
    environment: ManualEnvironment, offsets: GroupOffsets
) -> None:
    hidden = at(A1, -1001, error=KafkaError.UNSTABLE_OFFSET_COMMIT)
    environment.will("committed", [at(A0, 4), at(A1, -1001)], [at(A0, 5), hidden], [at(A0, 5), at(A1, 6)])
    offsets.wait_until_visible({A0: 5, A1: 6})
    assert len(environment.called("committed")) == 3


def test_reading_back_times_out(environment: ManualEnvironment, offsets: GroupOffsets) -> None:
    environment.will("committed", *[[at(A0, 4)]] * 1_000)
    with pytest.raises(CommitFailed, match="a-0: committed offset 5, but a read returns"):
        offsets.wait_until_visible({A0: 5})
    assert environment.clock_ms < 20_000


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            KafkaError._TIMED_OUT,
            "did not confirm the new offsets of group 'g'.*`spark-group describe --bootstrap-servers b --group g`",
        ),
        (KafkaError.NON_EMPTY_GROUP, "refused new offsets of group 'g'"),
    ],
)
def test_an_unanswered_commit_for_a_group_is_not_reported_as_refused(
    environment: ManualEnvironment, code: int, message: str
) -> None:
    environment.will("alter_consumer_group_offsets", {"g": refusal(code)})
    with pytest.raises(CommitFailed, match=message):
        GroupAdmin(SETTINGS, environment=environment).move_committed("g", {A0: 4})


def test_a_deletion_whose_answer_was_lost_is_no_failure_although_the_group_is_gone(
    environment: ManualEnvironment,
) -> None:
    lost, gone = {"g": refusal(KafkaError._TRANSPORT)}, {"g": refusal(KafkaError.GROUP_ID_NOT_FOUND)}
    admin = GroupAdmin(SETTINGS, environment=environment, retries=2)
    environment.will("delete_consumer_groups", lost, gone)
    admin.delete_group("g")
    environment.will("delete_consumer_groups", gone, gone)
    with pytest.raises(GroupError, match="group 'g' does not exist"):
        admin.delete_group("g")


@pytest.mark.parametrize(
    ("code", "is_deleted"), [(KafkaError._AUTHENTICATION, False), (KafkaError.REQUEST_TIMED_OUT, True)]
)
def test_only_a_deletion_without_a_clear_answer_may_have_deleted_the_group(
    environment: ManualEnvironment, code: int, is_deleted: bool
) -> None:
    first, gone = {"g": refusal(code)}, {"g": refusal(KafkaError.GROUP_ID_NOT_FOUND)}
    environment.will("delete_consumer_groups", first, gone, gone)
    with nullcontext() if is_deleted else pytest.raises(GroupError, match="group 'g' does not exist"):
        GroupAdmin(SETTINGS, environment=environment, retries=2).delete_group("g")


def test_the_pause_between_two_attempts_has_a_bound(environment: ManualEnvironment) -> None:
    environment.will("list_offsets", *[refusal(KafkaError._TRANSPORT)] * 2)
    began_ms = environment.clock_ms
    with pytest.raises(BrokerUnavailable):
        Admin(SETTINGS, environment=environment, retries=1, retry_interval_s=86_400.0).earliest([A0])
    assert environment.clock_ms - began_ms == RETRY_S_MAX * 1000


def moved(**codes: int) -> dict[str, Any]:
    """The answer to a move: the error code of each partition, by topic and number; 0: moved."""
    entries = [
        SimpleNamespace(topic=name[0], partition=int(name[1:]), error=KafkaError(code) if code else None)
        for name, code in codes.items()
    ]
    return {"g": SimpleNamespace(topic_partitions=entries)}


def test_a_move_that_failed_in_part_is_reported_as_such(environment: ManualEnvironment) -> None:
    """A part that is too large is split; what was moved remains."""
    offsets = dict.fromkeys((A0, A1), 4)
    too_large, joined = KafkaError.UNKNOWN, KafkaError.UNKNOWN_MEMBER_ID
    environment.will("alter_consumer_group_offsets", moved(a0=too_large, a1=too_large), moved(a0=0), moved(a1=joined))
    with pytest.raises(CommitFailed, match=r"group 'g' \(1 of 2 are moved\), because a member") as failed:
        GroupAdmin(SETTINGS, environment=environment).move_committed("g", offsets)
    assert failed.value.fields["moved"] == 1 and "repeat" not in str(failed.value)
    requests = environment.called("alter_consumer_group_offsets")
    sent = [[(p.partition, p.offset, p.metadata) for p in request.topic_partitions] for (request,) in requests]
    assert sent == [[(0, 4, ""), (1, 4, "")], [(0, 4, "")], [(1, 4, "")]]


def test_the_name_of_a_group_of_another_kind_is_given_as_the_cause(environment: ManualEnvironment) -> None:
    """Kafka's answer about a share group is that no such group exists."""
    environment.will("alter_consumer_group_offsets", moved(a0=KafkaError.GROUP_ID_NOT_FOUND))
    with pytest.raises(CommitFailed, match=r"a-0: .* The name may be that of a share group"):
        GroupAdmin(SETTINGS, environment=environment).move_committed("g", {A0: 4})


def test_partitions_that_were_moved_beside_a_refused_one_are_counted(environment: ManualEnvironment) -> None:
    """The broker decides about each partition of a request."""
    denied = KafkaError.TOPIC_AUTHORIZATION_FAILED
    environment.will("alter_consumer_group_offsets", moved(a0=0, a1=0, b0=denied))
    with pytest.raises(AccessDenied, match=r"\(2 of 3 are moved\): b-0: .* needs Read on the topic 'b'") as failed:
        GroupAdmin(SETTINGS, environment=environment).move_committed("g", dict.fromkeys((A0, A1, B0), 4))
    assert failed.value.fields["moved"] == 2


def test_many_offsets_are_deleted_in_requests_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator writes each request as one batch of at most max.message.bytes, 1 MiB by default."""
    tps, sent = [TopicPartition("t" * 100, p) for p in range(10_000)], list[Any]()

    def delete(_settings: Any, _group: str, some: Any) -> dict[TopicPartition, int]:
        sent.append(some)
        return dict.fromkeys(some, 0)

    monkeypatch.setattr(group_admin, "_delete_once", delete)
    assert GroupAdmin(SETTINGS).delete_offsets("g", tps) == dict.fromkeys(tps, 0)
    assert [tp for some in sent for tp in some] == tps
    assert max(map(len, sent)) * 200 < 1_000_000


def test_a_denied_commit_for_a_group_names_the_missing_permission(environment: ManualEnvironment) -> None:
    environment.will("alter_consumer_group_offsets", {"g": refusal(KafkaError.GROUP_AUTHORIZATION_FAILED)})
    with pytest.raises(
        AccessDenied, match=r"refused new offsets of group 'g'.* needs Read and Describe on the group 'g'"
    ):
        GroupAdmin(SETTINGS, environment=environment).move_committed("g", {A0: 4})


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"offsets.retention.minutes": SimpleNamespace(value="2")}, 120_000),
        ({"offsets.retention.minutes": SimpleNamespace(value=None)}, None),
        ({}, None),
    ],
)
def test_the_retention_of_offsets_is_a_setting_of_a_broker(
    environment: ManualEnvironment, scripted_admin: Admin, settings: dict[str, Any], found: int | None
) -> None:
    environment.will("describe_configs", settings)
    assert scripted_admin.retention_ms(4) == found
    assert environment.called("describe_configs") == ["4"]


def test_a_member_without_an_instance_id_is_described_with_an_empty_one(
    environment: ManualEnvironment, scripted_admin: Admin
) -> None:
    known, none = SimpleNamespace(name="STABLE"), SimpleNamespace(topic_partitions=[])
    members = [
        SimpleNamespace(member_id="m", client_id="c", group_instance_id=id_, host="/h", assignment=none)
        for id_ in ("i", None)
    ]
    group = SimpleNamespace(
        coordinator=None, state=known, type=known, partition_assignor="", members=members, is_simple_consumer_group=True
    )
    environment.will("describe_consumer_groups", {"g": group})
    assert [member.instance_id for member in scripted_admin.describe_group("g").members] == ["i", ""]


def test_a_list_without_the_groups_of_one_broker_is_an_error(environment: ManualEnvironment) -> None:
    state, kind = SimpleNamespace(name="STABLE"), SimpleNamespace(name="CLASSIC")
    valid = [SimpleNamespace(group_id=name, state=state, type=kind) for name in ("b", "a")]
    silent = KafkaError(KafkaError._TIMED_OUT)
    environment.will(
        "list_consumer_groups", *(SimpleNamespace(valid=valid, errors=errors) for errors in ([], [silent]))
    )
    admin = GroupAdmin(SETTINGS, environment=environment, retries=0)
    assert admin.groups() == [ListedGroup("a", "stable", "classic"), ListedGroup("b", "stable", "classic")]
    with pytest.raises(BrokerUnavailable, match="listing groups was not answered"):
        admin.groups()


def test_committed_offsets_require_an_answer_for_every_partition(
    environment: ManualEnvironment,
) -> None:
    """If it were left out, its offsets would seem absent."""
    environment.will("list_topics", SimpleNamespace(topics={"a": SimpleNamespace(partitions={})}))
    with pytest.raises(BrokerUnavailable, match="no partitions of topic a"):
        GroupAdmin(SETTINGS, environment=environment).committed("g")
    environment.will("list_topics", SimpleNamespace(topics={"a": SimpleNamespace(partitions={0: None, 1: None})}))
    environment.will("committed", [at(A0, 5), at(A1, -1001, error=KafkaError.UNSTABLE_OFFSET_COMMIT)])
    with pytest.raises(BrokerUnavailable, match="no answer for 1 partitions, such as a-1: a transaction"):
        GroupAdmin(SETTINGS, environment=environment).committed("g")
    environment.will("list_topics", SimpleNamespace(topics={"a": SimpleNamespace(partitions={0: None})}))
    environment.will("committed", [at(A0, 5)])
    assert GroupAdmin(SETTINGS, environment=environment).committed("g", stable=False) == {A0: CommittedOffset(5, "")}
    levels = [settings["isolation.level"] for settings in environment.called("Consumer")]
    assert levels == ["read_committed", "read_uncommitted"], "which decides whether the coordinator waits"
