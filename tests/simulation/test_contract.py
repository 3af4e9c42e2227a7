"""The contract of the fakes of the client library: the same scripts run in the simulation and with a real broker."""

from collections import deque

import pytest
from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaPartition
from simulation.stage import CLASSIC, FLAVOURS, SESSION_MS, Stage, Watched, played, refused

from spark_group_source.kafka.consumer import take_over_membership

HOLD_S = 8.0
assert HOLD_S * 1000 > SESSION_MS


@played(*FLAVOURS, broker=True)
def test_members_share_partitions_and_a_leaving_member_releases_them(play: Stage) -> None:
    topic = play.topic(4)
    one = Watched(play, topic, "one")
    play.until(lambda: one.owned == {0, 1, 2, 3}, "assignment")
    two = Watched(play, topic, "two")
    play.until(lambda: len(one.owned) == 2 and len(two.owned) == 2, "share for both")
    assert one.owned | two.owned == {0, 1, 2, 3}
    member, metadata = one.identity
    assert member is not None and member.encode() in metadata
    one.stop()
    play.until(lambda: two.owned == {0, 1, 2, 3}, "share of the other")
    two.stop()


@played(*FLAVOURS, broker=True)
def test_offsets_are_committed_in_a_revocation_held_longer_than_a_session(play: Stage) -> None:
    topic = play.topic(2)
    committed: list[str] = []

    def commit(consumer: object) -> None:
        entries = [KafkaPartition(topic, p, 17, "mine") for p in range(2)]
        committed.extend(str(p.error) for p in consumer.commit(offsets=entries, asynchronous=False))  # type: ignore[attr-defined]

    one = Watched(play, topic, "one", hold_s=HOLD_S, before_release=commit)
    play.until(lambda: one.owned == {0, 1}, "assignment")
    began_ms = play.environment.now_ms()
    two = Watched(play, topic, "two")
    play.until(lambda: bool(two.owned), "share of the other")
    assert play.environment.now_ms() - began_ms >= HOLD_S * 1000
    assert committed == ["None", "None"]
    assert one.count("lost") == 0
    assert play.committed([KafkaPartition(topic, p) for p in range(2)], stable=True) == [(17, "mine")] * 2
    one.hold_s = 0
    two.stop()
    one.stop()


@played(*FLAVOURS, broker=True)
def test_a_transaction_commits_for_a_member_and_not_for_a_stale_generation(play: Stage) -> None:
    topic = play.topic(2)
    entries = [KafkaPartition(topic, 0, 5, "note")]
    one = Watched(play, topic, "one")
    play.until(lambda: one.owned == {0, 1}, "assignment")
    before = one.identity[1]
    producer = play.producer(f"{play.group}.s")
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.send_offsets_to_transaction(entries, before, 10)
    assert play.committed(entries, stable=False) == [(-1001, "")]
    producer.commit_transaction(30)
    assert play.committed(entries, stable=True) == [(5, "note")]
    assert play.committed(entries, stable=False) == [(5, "note")]
    two = Watched(play, topic, "two")
    play.until(lambda: bool(two.owned), "share of the other")
    play.until(lambda: one.identity[1] != before, "new generation")
    producer.begin_transaction()
    error = refused(lambda: producer.send_offsets_to_transaction(entries, before, 10))
    assert error.code() == KafkaError.ILLEGAL_GENERATION
    assert error.txn_requires_abort() and not error.fatal()
    producer.abort_transaction(30)
    producer.begin_transaction()
    producer.send_offsets_to_transaction([KafkaPartition(topic, 0, 6, "later")], one.identity[1], 10)
    producer.commit_transaction(30)
    assert play.committed(entries, stable=True) == [(6, "later")]
    two.stop()
    one.stop()


@played("range", broker=True)
def test_a_newer_producer_of_the_transactional_id_fences_the_older_one(play: Stage) -> None:
    topic = play.topic(1)
    unjoined = play.environment.consumer(play.settings())
    metadata = unjoined.consumer_group_metadata()
    unjoined.close()
    old, new = play.producer(f"{play.group}.s"), play.producer(f"{play.group}.s")
    assert refused(old.begin_transaction).code() == KafkaError._STATE
    old.init_transactions(30)
    old.begin_transaction()
    old.send_offsets_to_transaction([KafkaPartition(topic, 0, 1)], metadata, 10)
    new.init_transactions(30)
    error = refused(lambda: old.commit_transaction(30))
    assert error.code() == KafkaError._FENCED and error.fatal()
    assert refused(old.begin_transaction).code() == KafkaError._FENCED
    assert refused(lambda: old.poll(10)).code() == KafkaError._FENCED
    assert old.poll(0) == 0, "it is raised once"
    assert play.committed([KafkaPartition(topic, 0)], stable=True) == [(-1001, "")]
    new.begin_transaction()
    new.send_offsets_to_transaction([KafkaPartition(topic, 0, 2)], metadata, 10)
    new.commit_transaction(30)
    assert play.committed([KafkaPartition(topic, 0)], stable=True) == [(2, "")]


@played(*CLASSIC, broker=True)
def test_a_static_newcomer_replaces_and_fences_the_member_without_a_rebalance(play: Stage) -> None:
    topic = play.topic(2)
    old, other = Watched(play, topic, "old", instance="i"), Watched(play, topic, "other", instance="j")
    play.until(lambda: len(old.owned) == 1 and len(other.owned) == 1, "share for both")
    play.until(lambda: old.callbacks[-1][0] == "assigned", "last round: a cooperative group has two")
    before = [*old.callbacks, *other.callbacks]
    new = Watched(play, topic, "new", instance="i")
    play.until(lambda: new.owned == old.owned, "take-over")
    play.until(lambda: old.failed is not None, "fencing of the old one")
    assert old.failed is not None and "fenced" in old.failed.str().lower()
    assert [*old.callbacks, *other.callbacks] == before
    new.stop("close")  # keeps its static membership
    again = Watched(play, topic, "again", instance="i")
    play.until(lambda: bool(again.owned), "take-over of a closed member's instance id")
    assert [*old.callbacks, *other.callbacks] == before
    again.stop("leave")  # ends its static membership
    play.until(lambda: other.owned == {0, 1}, "share of the member that left")
    other.stop()


@played("consumer", broker=True)
def test_kip_848_refuses_an_instance_id_until_its_holder_closes(play: Stage) -> None:
    topic = play.topic(2)
    old = Watched(play, topic, "old", instance="i")
    play.until(lambda: old.owned == {0, 1}, "assignment")
    new = Watched(play, topic, "new", instance="i")
    play.until(lambda: new.failed is not None, "refusal")
    assert new.failed is not None and "still used by another member" in new.failed.str()
    assert old.failed is None and old.owned == {0, 1}
    old.stop()
    again = Watched(play, topic, "again", instance="i")
    play.until(lambda: again.owned == {0, 1}, "take-over")
    again.stop()


@pytest.mark.parametrize("alone", [False, True])
@played("consumer", broker=True)
def test_kip_848_instance_id_is_taken_over_by_a_classic_join_without_a_rebalance(play: Stage, alone: bool) -> None:
    topic = play.topic(2)
    old = Watched(play, topic, "old", instance="i")
    others = [] if alone else [Watched(play, topic, "other", instance="j")]
    share = 2 - len(others)
    play.until(lambda: len(old.owned) == share and all(len(each.owned) == 1 for each in others), "share for each")
    play.until(lambda: len({each.generation for each in (old, *others)}) == 1, "epoch that all have")
    had = set(old.owned)
    before, generations = [each.callbacks.copy() for each in others], [each.generation for each in others]
    known: deque[str] = deque()
    place = play.settings("taking", "i")
    take_over_membership(place, [topic], environment=play.environment, own_member_ids=known, is_cancelled=lambda: False)
    assert known, "the member id of the take-over is recorded as this process's own"
    new = Watched(play, topic, "new", instance="i")
    play.until(lambda: new.owned == had, "take-over")
    play.until(lambda: old.failed is not None, "fencing of the old one")
    assert old.failed is not None and "still used by another member" in old.failed.str()
    assert old.count("lost") == 1, "its loss is reported, and its next join is refused"
    if play.simulated:  # the clock is a model; a broker's own sessions last 45 s
        play.environment.pause(SESSION_MS / 1000 + 2)  # the sessions of the former holder and of the classic member
    assert new.owned == had and new.count("lost") == 0
    assert [each.callbacks for each in others] == before
    assert [each.generation for each in others] == generations, "the epoch of the group changed"
    for each in (new, *others):
        each.stop()


@played("range", broker=True)
def test_an_eager_member_without_partitions_gets_an_empty_revocation(play: Stage) -> None:
    topic = play.topic(1)
    one = Watched(play, topic, "one")
    play.until(lambda: one.owned == {0}, "assignment")
    two = Watched(play, topic, "two")
    play.until(lambda: two.count("assigned") == 1 and one.count("assigned") == 2, "callback")
    idle = next(each for each in (one, two) if not each.owned)  # member ids decide which one
    three = Watched(play, topic, "three")
    play.until(lambda: three.count("assigned") == 1, "callback")
    assert ("revoked", ()) in idle.callbacks
    for each in (one, two, three):
        each.stop()


@played(*FLAVOURS, broker=True)
def test_a_closed_consumer_accepts_no_calls(play: Stage) -> None:
    topic = play.topic(1)
    consumer = play.environment.consumer(play.settings())
    if play.flavour == "consumer":
        assert consumer.memberid()
    else:
        assert consumer.memberid() is None
        assert consumer.consumer_group_metadata()[7:11] == b"\xff\xff\xff\xff"
    consumer.close()
    for call in (consumer.memberid, consumer.unsubscribe, lambda: consumer.poll(0)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    with pytest.raises(RuntimeError, match="closed"):
        consumer.subscribe([topic])


@played(*CLASSIC, broker=True)
def test_a_group_that_the_broker_cannot_store_gets_no_assignment(play: Stage) -> None:
    """Each member takes 50 kB of the group's record, which may have 1 MiB. The members join again and again."""
    topic, long = play.topic(4), "x" * 25_000
    few = [Watched(play, topic, f"few-{n}", client_id=f"{long}{n}") for n in range(4)]
    play.until(lambda: all(len(one.owned) == 1 for one in few), "assignment")
    stored = few[0].generation
    more = [Watched(play, topic, f"more-{n}", client_id=f"{long}{n}") for n in range(4, 24)]
    play.until(lambda: all(one.generation > stored + 3 for one in more), "further generations")
    assert [one.callbacks for one in more] == [[]] * len(more)
    assert {len(one.owned) for one in few} == {int(play.flavour == "cooperative-sticky")}, "which keep theirs"
    assert not any(one.count("lost") for one in few)
    for one in more:
        one.stop()
    play.until(lambda: all(len(one.owned) == 1 for one in few), "assignment for those that are left")
    for one in few:
        one.stop()
