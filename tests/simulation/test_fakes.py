"""The simulated Kafka and the fakes of its clients in cases that take too long on a real broker or cannot be forced
there: frozen and dead processes, missing responses, topics that are created and deleted."""

from typing import Any

import pytest
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]
from kit.fake_library import NO_OFFSET
from kit.kafka_group import Books, Code, Entry
from kit.misfortune import Misfortune
from kit.transactions import TRANSACTION_MS
from simulation.stage import CLASSIC, FLAVOURS, Stage, Watched, played, refused

from spark_group_source.kafka.admin import EpochEnds
from spark_group_source.model import TopicPartition

FROZEN_MS = 20_000


def freeze(play: Stage, stage: Stage) -> None:
    """Freeze a process for longer than a session, as seen from another one."""
    stage.process.freeze()
    play.environment.pause(FROZEN_MS / 1000)


# --- members ---------------------------------------------------------------------------------------------------------


@played(*FLAVOURS)
def test_losses_are_reported_to_a_process_frozen_longer_than_a_session(play: Stage) -> None:
    topic, away = play.topic(4), play.elsewhere()
    frozen, living = Watched(away, topic, "frozen"), Watched(play, topic, "living")
    play.until(lambda: len(frozen.owned) == 2 and len(living.owned) == 2, "share for both")
    lost = tuple(sorted(frozen.owned))
    freeze(play, away)
    assert living.owned == {0, 1, 2, 3}
    assert frozen.count("lost") == 0
    away.process.thaw()
    play.until(lambda: ("lost", lost) in frozen.callbacks, "report of the loss")
    play.until(lambda: len(frozen.owned) == 2 and len(living.owned) == 2, "share for both again")


@played(*CLASSIC)
def test_an_idle_static_member_replaces_its_successor_after_a_freeze(play: Stage) -> None:
    topic, away = play.topic(1), play.elsewhere()
    holder = Watched(play, topic, "holder", instance="h")
    play.until(lambda: holder.owned == {0}, "assignment")
    idle = Watched(away, topic, "idle", instance="i")
    play.until(lambda: idle.count("assigned") > 0, "callback")
    count = len(idle.callbacks)
    freeze(play, away)
    successor = Watched(play, topic, "successor", instance="i")
    play.until(lambda: successor.count("assigned") > 0, "take-over")
    away.process.thaw()
    play.until(lambda: successor.failed is not None, "fencing of the successor")
    assert idle.failed is None
    assert [kind for kind, _ in idle.callbacks[count:] if kind != "assigned"] == (
        ["lost"] if play.flavour == "range" else []
    )
    assert ("lost", ()) in idle.callbacks or play.flavour != "range"


@played("consumer")
def test_kip_848_fences_a_frozen_static_member(play: Stage) -> None:
    topic, away = play.topic(1), play.elsewhere()
    frozen = Watched(away, topic, "frozen", instance="i")
    play.until(lambda: frozen.owned == {0}, "assignment")
    away.process.freeze()
    refused_ = Watched(play, topic, "newcomer", instance="i")
    play.until(lambda: refused_.failed is not None, "refusal")
    play.environment.pause(FROZEN_MS / 1000)
    successor = Watched(play, topic, "successor", instance="i")
    play.until(lambda: successor.owned == {0}, "take-over")
    away.process.thaw()
    play.until(lambda: frozen.failed is not None, "fencing")
    assert frozen.count("lost") == 1 and successor.failed is None


@played(*FLAVOURS)
def test_a_holder_fenced_in_its_callback_is_notified_afterwards_or_never(play: Stage) -> None:
    topic = play.topic(2)
    one = Watched(play, topic, "one", hold_s=25)
    play.until(lambda: one.owned == {0, 1}, "assignment")
    play.cluster.group(play.group).rebalance_ms = 5_000
    Watched(play, topic, "two")
    play.until(lambda: one.count("revoked") > 0, "revocation")
    member = one.identity[0]
    play.cluster.group(play.group).remove(play.cluster.group(play.group).members[member or ""], "tried out")
    play.environment.pause(20)
    assert one.count("lost") == 0 and len(one.owned) == 2
    play.until(lambda: len(one.owned) < 2, "end of the hold")
    play.environment.pause(3)
    assert one.count("lost") == (1 if play.flavour == "consumer" else 0)
    if play.flavour == "cooperative-sticky":  # it keeps the other partition, as another member
        assert one.identity[0] != member and one.identity[0] is not None
        assert ("assigned", ()) in one.callbacks


@played("consumer")
def test_kip_848_reports_no_empty_assignment(play: Stage) -> None:
    topic = play.topic(1)
    one = Watched(play, topic, "one")
    play.until(lambda: one.owned == {0}, "assignment")
    two = Watched(play, topic, "two")
    play.until(lambda: two.identity[1][7:11] > b"\0\0\0\0", "epoch")
    play.environment.pause(3)
    assert two.callbacks == []


@played(*FLAVOURS)
def test_a_full_group_refuses_a_static_member_that_returns_until_its_former_session_ends(play: Stage) -> None:
    """Real brokers: ``tests/kafka/test_expiry.py``."""
    topic, group = play.topic(1), play.cluster.group(play.group)
    group.size_max = 1
    former = Watched(play, topic, "former", instance="i")
    play.until(lambda: former.owned == {0}, "assignment")
    former.stop()
    member = Watched(play, topic, "member", instance="i")
    play.until(lambda: group.refusals > 0, "refusal")
    if play.flavour == "consumer":  # its library gives up
        play.until(lambda: member.failed is not None, "fatal error")
        assert member.failed is not None and "reached maximum size" in member.failed.str()
        play.environment.pause(FROZEN_MS / 1000)
        member = Watched(play, topic, "next", instance="i")
    play.until(lambda: member.owned == {0}, "assignment")
    assert play.environment.now_ms() >= group.session_ms and len(group.members) == 1


@played(*CLASSIC)
def test_a_rebalance_of_a_full_group_removes_the_member_that_joins_last(play: Stage) -> None:
    topic, group = play.topic(2), play.cluster.group(play.group)
    members = [Watched(play, topic, name) for name in ("one", "two")]
    play.until(lambda: all(len(member.owned) == 1 for member in members), "share for both")
    group.size_max = 1
    group.on_topics_changed()
    play.until(lambda: len(group.members) == 1 and group.refusals > 0, "removal of the other one")


@played(*FLAVOURS)
def test_a_dead_process_keeps_its_partitions_until_its_session_ends(play: Stage) -> None:
    topic, away = play.topic(2), play.elsewhere()
    Watched(away, topic, "dying"), (living := Watched(play, topic, "living"))
    play.until(lambda: len(living.owned) == 1, "share")
    play.environment.pause(2)
    away.process.kill()
    began_ms = play.environment.now_ms()
    play.until(lambda: living.owned == {0, 1}, "share of the dead one")
    assert 4_000 < play.environment.now_ms() - began_ms < 12_000


@played("range")
def test_a_join_replaces_the_retry_of_a_refused_join(play: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both, an eager member would send the second join while it still owns partitions."""
    monkeypatch.setattr("kit.classic_client.JOIN_AGAIN_MS", (2_000, 2_000))
    play.cluster.create("u", 1)
    topic, consumer, group = play.topic(1), play.environment.consumer(play.settings()), play.cluster.group(play.group)
    consumer.subscribe([topic])
    play.until(lambda: bool(group.members), "join")
    group.remove(next(iter(group.members.values())), "tried out")
    play.environment.pause(0.1)
    assigned = list[Any]()

    def assign(consumer: Any, partitions: list[Any]) -> None:
        consumer.assign([])
        assigned.extend(partitions)

    consumer.subscribe([topic, "u"], on_assign=assign)  # joins immediately
    play.until(lambda: consumer.poll(0.1) is None and len(assigned) == 2, "assignment")
    rebalances = group.rebalances
    play.environment.pause(5)
    assert group.rebalances == rebalances


# --- transactions ----------------------------------------------------------------------------------------------------


def begun(stage: Stage) -> tuple[Any, bytes]:
    """Return a producer in a transaction, and the metadata of a consumer outside the group."""
    producer = stage.producer("g.s")
    producer.init_transactions(30)
    producer.begin_transaction()
    return producer, b"CGMDv2:\xff\xff\xff\xff" + stage.group.encode() + b"\0\0\1"


@played("range")
def test_an_open_transaction_of_a_dead_process_hides_offsets_until_it_ends(play: Stage) -> None:
    topic, away = play.topic(1), play.elsewhere()
    requested = [KafkaPartition(topic, 0)]

    def begins() -> None:
        producer, metadata = begun(away)
        producer.send_offsets_to_transaction([KafkaPartition(topic, 0, 9)], metadata, 5)
        away.process.kill()

    away.process.spawn("begins", begins)
    play.until(lambda: not away.process.alive, "death")
    assert play.committed(requested, stable=False) == [(-1001, "")]
    error = refused(lambda: play.committed(requested, stable=True))
    assert error.code() == KafkaError._TIMED_OUT
    play.producer("g.s").init_transactions(30)  # the next run of the stream initializes the id
    assert play.committed(requested, stable=True) == [(-1001, "")]


@played("range")
def test_a_commit_that_timed_out_is_retried(play: Stage) -> None:
    topic = play.topic(1)
    producer, metadata = begun(play)
    producer.send_offsets_to_transaction([KafkaPartition(topic, 0, 9)], metadata, 5)
    play.cluster.unreachable(8_000)
    error = refused(lambda: producer.commit_transaction(5))
    assert (error.code(), error.retriable(), error.fatal()) == (KafkaError._TIMED_OUT, True, False)
    conflict = refused(lambda: producer.abort_transaction(5))
    assert conflict.code() == KafkaError._CONFLICT
    producer.commit_transaction(5)
    assert play.committed([KafkaPartition(topic, 0)], stable=True) == [(9, "")]


@played("range")
def test_an_abort_ends_a_transaction_whose_beginning_was_not_answered(play: Stage) -> None:
    topic = play.topic(1)
    producer, metadata = begun(play)
    play.cluster.misfortune = Misfortune(false_errors=1.0)
    entries = [KafkaPartition(topic, 0, 9)]
    error = refused(lambda: producer.send_offsets_to_transaction(entries, metadata, 5))
    assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
    play.cluster.misfortune = Misfortune()
    producer.abort_transaction(5)
    play.environment.pause(TRANSACTION_MS / 1000 + 1)  # the broker has no transaction that it would abort by itself
    producer.begin_transaction()
    producer.send_offsets_to_transaction(entries, metadata, 5)
    producer.commit_transaction(5)
    assert play.committed(entries, stable=True) == [(9, "")]


@played("range")
def test_a_transaction_that_no_broker_heard_of_is_aborted_without_a_request(play: Stage) -> None:
    """Brokers would refuse to abort a transaction that they do not have."""
    entries = [KafkaPartition(play.topic(1), 0, 9)]
    producer, metadata = begun(play)
    producer.send_offsets_to_transaction(entries, metadata, 5)
    producer.commit_transaction(5)
    producer.begin_transaction()
    play.cluster.unreachable(8_000)
    error = refused(lambda: producer.send_offsets_to_transaction(entries, metadata, 5))
    assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT_QUEUE, True)
    producer.abort_transaction(5)
    producer.begin_transaction()


@played("range")
def test_a_transaction_for_a_deleted_topic_requires_an_abort(play: Stage) -> None:
    topic = play.topic(1)
    producer, metadata = begun(play)
    play.cluster.delete(topic)
    began_ms = play.environment.now_ms()
    entries = [KafkaPartition(topic, 0, 9)]
    error = refused(lambda: producer.send_offsets_to_transaction(entries, metadata, 5))
    assert (error.code(), error.txn_requires_abort()) == (KafkaError.UNKNOWN_TOPIC_OR_PART, True)
    assert play.environment.now_ms() - began_ms >= 5_000
    producer.abort_transaction(5)
    producer.begin_transaction()


@played("range")
def test_a_producer_without_transaction_permission_fails_immediately(play: Stage) -> None:
    play.cluster.transactions_allowed = False
    error = refused(lambda: play.producer("g.s").init_transactions(30))
    assert error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED and error.fatal()


# --- requests --------------------------------------------------------------------------------------------------------


def ends(play: Stage, *tps: TopicPartition) -> dict[TopicPartition, int]:
    """Return the end offset of each partition, or the error code."""
    admin = play.environment.admin({"bootstrap.servers": play.servers})
    requested = {KafkaPartition(tp.topic, tp.partition): OffsetSpec.latest() for tp in tps}
    futures = admin.list_offsets(requested, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=10)
    found = {}
    for p, future in futures.items():
        try:
            found[TopicPartition(p.topic, p.partition)] = future.result(timeout=20).offset
        except KafkaException as exc:
            found[TopicPartition(p.topic, p.partition)] = exc.args[0].code()
    return found


@played("range")
def test_a_log_is_trimmed_and_truncated_and_hides_uncommitted_records(play: Stage) -> None:
    tp = TopicPartition(play.topic(1), 0)
    log = play.cluster.log(tp)
    assert log is not None
    play.cluster.produce(tp, 20)
    assert ends(play, tp) == {tp: 20}
    log.held = 15
    assert ends(play, tp) == {tp: 15}
    play.cluster.age(tp, 12)
    play.cluster.shrink(tp, 14)
    assert (log.first, log.end) == (12, 14)
    assert ends(play, tp) == {tp: 14}


@played("range")
def test_leader_epochs_end_where_a_later_leader_continues(play: Stage) -> None:
    tp = TopicPartition(play.topic(1), 0)
    log = play.cluster.log(tp)
    assert log is not None
    epoch_ends = EpochEnds({"bootstrap.servers": play.servers}, environment=play.environment)
    play.cluster.produce(tp, 20)
    log.elect()
    play.cluster.produce(tp, 5)
    assert epoch_ends.read({tp: 0}) == {tp: 20}
    assert epoch_ends.read({tp: 1}) == {tp: 25}
    play.cluster.shrink(tp, 18)
    play.cluster.produce(tp, 30)
    assert log.epoch == 2
    assert epoch_ends.read({tp: 0}) == epoch_ends.read({tp: 1}) == {tp: 18}
    assert epoch_ends.read({tp: 3}) == {tp: None}


@played("range")
def test_a_topic_is_listed_before_it_is_served_and_a_recreated_one_has_a_new_id(play: Stage) -> None:
    name = play.topic(1)
    tp = TopicPartition(name, 0)
    not_there = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.NOT_LEADER_FOR_PARTITION}

    def described() -> tuple[str, int] | None:
        admin = play.environment.admin({"bootstrap.servers": play.servers})
        try:
            found = admin.describe_topics(TopicCollection([name]), request_timeout=10)[name].result(timeout=20)
        except KafkaException as exc:
            return None if exc.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART else pytest.fail(str(exc))
        return str(found.topic_id), len(found.partitions)

    first = described()
    assert first is not None and first[1] == 1
    (new,) = play.cluster.grow(name, slow_ms=3_000)
    assert ends(play, tp, new)[tp] == 0
    assert ends(play, new)[new] in not_there
    play.environment.pause(3)
    assert ends(play, new) == {new: 0}
    play.cluster.delete(name)
    assert described() is None
    play.cluster.create(name, 1, slow_ms=1_000)
    assert described() is None
    play.environment.pause(1)
    second = described()
    assert second is not None and second[0] != first[0]
    assert ends(play, tp)[tp] in not_there
    assert ends(play, new)[new] == KafkaError._UNKNOWN_PARTITION


@played("range")
def test_requests_without_a_reachable_broker_get_local_errors_of_the_library(play: Stage) -> None:
    tp = TopicPartition(play.topic(1), 0)
    admin = play.environment.admin({"bootstrap.servers": play.servers})
    play.cluster.unreachable(500_000)
    assert {code for _ in range(20) for code in ends(play, tp).values()} == {
        KafkaError._NOENT,
        KafkaError._TIMED_OUT,
        NO_OFFSET,
    }
    assert refused(lambda: admin.list_topics(timeout=2)).code() == KafkaError._TRANSPORT
    requested = [KafkaPartition(tp.topic, tp.partition, 1)]
    assert refused(lambda: play.committed(requested, stable=True)).code() == KafkaError._TIMED_OUT
    consumer = play.environment.consumer(play.settings())
    error = refused(lambda: consumer.commit(offsets=requested, asynchronous=False))
    assert error.code() == KafkaError._WAIT_COORD


@played("range")
def test_every_misfortune_happens_and_stops_when_it_is_switched_off(play: Stage) -> None:
    tps = [TopicPartition(play.topic(3), p) for p in range(3)]
    seen: set[int] = set()
    play.cluster.misfortune = Misfortune(0.1, 0.1, 0.1, 0.1, 0.1, 0.3)
    for _ in range(60):
        found = ends(play, *tps)
        assert found.keys() == set(tps)
        seen.update(found.values())
    assert {0, NO_OFFSET, KafkaError._TIMED_OUT, KafkaError._NOENT, KafkaError.NOT_LEADER_FOR_PARTITION} <= seen
    play.cluster.misfortune = Misfortune()
    for _ in range(60):
        assert ends(play, *tps) == dict.fromkeys(tps, 0)


@played("range")
def test_offsets_that_arrive_after_their_transaction_ended_are_refused(play: Stage) -> None:
    play.topic(1)
    transactions, group = play.cluster.transactions, play.cluster.group(play.group)
    _, epoch = transactions.init("t")
    late = ("t", epoch, group, ("", -1, None), {TopicPartition("t", 0): Entry(5, "s", "p", 0)})
    assert transactions.add("t", epoch, group) is Code.OK
    assert transactions.send(*late) is Code.OK
    transactions.end("t", epoch, commit=False, done=lambda _: None)
    assert transactions.send(*late) is Code.INVALID_TXN_STATE
    play.environment.pause(1)
    assert group.offsets == {}


@played("range")
def test_a_commit_may_succeed_although_the_response_is_an_error(play: Stage) -> None:
    entries = [KafkaPartition(play.topic(1), 0, 3, "note")]
    consumer = play.environment.consumer(play.settings())
    play.cluster.misfortune = Misfortune(false_errors=1.0)
    assert refused(lambda: consumer.commit(offsets=entries, asynchronous=False))
    play.cluster.misfortune = Misfortune()
    assert play.committed(entries, stable=True) == [(3, "note")]


@played("range")
def test_an_operator_moves_offsets_only_while_the_group_has_no_members(play: Stage) -> None:
    from confluent_kafka import ConsumerGroupTopicPartitions

    topic = play.topic(1)
    entries = [KafkaPartition(topic, 0, 7, "moved"), KafkaPartition("nope", 0, 7)]

    def move() -> list[KafkaError | None]:
        admin = play.environment.admin({"bootstrap.servers": play.servers})
        request = [ConsumerGroupTopicPartitions(play.group, entries)]
        answer = admin.alter_consumer_group_offsets(request)[play.group].result(timeout=20)
        return [p.error and p.error.code() for p in answer.topic_partitions]

    assert move() == [None, KafkaError.UNKNOWN_TOPIC_OR_PART]
    assert play.committed(entries[:1], stable=True) == [(7, "moved")]
    one = Watched(play, topic, "one")
    play.until(lambda: bool(one.owned), "assignment")
    assert move() == [KafkaError.UNKNOWN_MEMBER_ID, KafkaError.UNKNOWN_TOPIC_OR_PART]
    one.stop("leave")
    assert move()[0] is None


@pytest.mark.parametrize("play", [("range", False)], indirect=True)
def test_a_broken_rule_ends_the_history_although_the_application_swallows_errors(play: Stage) -> None:
    class Strict(Books):
        def assigned(self, *_: object) -> None:
            raise AssertionError("a rule")

    play.cluster.books = Strict()
    topic = play.topic(1)

    def script() -> None:
        consumer = play.environment.consumer(play.settings())
        consumer.subscribe([topic])
        while True:
            try:
                consumer.poll(0.1)
            except AssertionError:
                play.environment.pause(1)

    with pytest.raises(AssertionError, match="a rule"):
        play.play(script)
