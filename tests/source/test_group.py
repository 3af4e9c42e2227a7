"""A run as a member of its group, without Spark: offset commits, replays, restarts, transactions, time limits."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Producer
from kafka_helpers import ADMIN_S, await_markers, await_until
from rebalance.accounts import describe
from rebalance.ordinary import OrdinaryConsumer
from scenes import Scene
from streams import PROTOCOLS, Engine, OtherMember, numbered, texts, values_of

from spark_group_source.errors import InvariantBroken, RebalanceTimeout
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol.offsets import parse

BUDGET_MS = 4000
REFUSAL = "can't start new thread"


# --- offset commits --------------------------------------------------------------------------------------------------


@pytest.mark.proves("G2", level="kafka")
def test_G2_committed_offsets_are_never_ahead_of_the_sink(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 4))
    with Engine(scene.patient(subscribe=name)) as engine:
        engine.step()
        assert scene.committed().get(TopicPartition(name, 0), 0) == 0
        scene.produce(name, numbered(5, 9))
        in_flight = engine.plan()
        assert in_flight is not None
        await_until(lambda: scene.committed() == {TopicPartition(name, 0): 5}, what="the first batch in Kafka")
    assert scene.committed() == {TopicPartition(name, 0): 5}  # the batch in flight is not durable


@pytest.mark.proves("G2", level="kafka")
def test_G2_once_with_another_sink_logs_that_its_last_offsets_are_not_committed(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 4))
    given = scene.options(subscribe=name)
    with Engine(given) as once:
        end = once.coordinator.latest(once.start, unlimited=True)
        once.rows += once.read(end)
        once.log.append(end.to_json())
    assert "committed at the next start" in caplog.text
    assert values_of(once.rows) == texts(0, 4)
    with Engine(given, once.log) as again:
        assert again.step() is None
        await_until(lambda: scene.committed() == scene.end_offsets(name), what="the offsets of the run before")


# --- replays and restarts ------------------------------------------------------------------------------------------


def test_G1_a_replayed_batch_has_the_same_rows_while_another_member_has_its_partitions(scene: Scene) -> None:
    name = scene.topic(4)
    scene.produce(name, numbered(0, 7, 4))
    one = scene.played(subscribe=name)
    with one.running() as dying:
        end = dying.plan()
        assert end is not None
        first = dying.read(end)
    assert values_of(first) == texts(0, 7)
    scene.produce(name, numbered(8, 11, 4))
    with OtherMember(scene.servers, scene.group, [name]) as other:
        await_until(lambda: len(other.partitions) == 4, what="another member with everything")
        with one.running() as again:
            again.coordinator.start_batch(parse(end.to_json()))
            assert sorted(again.read(end)) == sorted(first)


@pytest.mark.proves("G7", level="kafka")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_G7_a_restart_within_the_session_timeout_causes_no_rebalance(protocol: str, scene: Scene) -> None:
    name = scene.topic(6)
    scene.produce(name, numbered(0, 11, 6))
    given = scene.patient(protocol, subscribe=name, groupMembers=2)
    with OtherMember(scene.servers, scene.group, [name], protocol) as other:

        def shared() -> bool:
            members = describe(scene.admin, scene.group).members
            return len(members) == 3 and all(len(has) == 2 for has in members.values()) and len(other.partitions) == 2

        with Engine(given) as first:
            first.step()
            await_until(lambda: first.step() is None and shared(), what="two partitions for each of three members")
            first.run()
            before = describe(scene.admin, scene.group)
        rebalances = other.rebalances
        assert len(describe(scene.admin, scene.group).members) == 3  # the static memberships are kept
        scene.produce(name, numbered(12, 23, 6))
        with Engine(given, first.log) as second:
            await_until(lambda: second.step() is None and len(second.rows) >= 8, what="the rows of our four partitions")
            after = describe(scene.admin, scene.group)
        assert (after.state, after.members) == (before.state, before.members)
        assert other.rebalances == rebalances
        ours = {(row.topic, row.partition) for row in second.rows}
        assert ours.isdisjoint(other.partitions) and len(ours) == 4


@pytest.mark.parametrize(("given", "bounded", "members"), [("auto", True, 0), ("never", True, 2), ("always", False, 0)])
def test_members_leave_at_the_end_of_a_run_according_to_leaveOnStop(
    given: str, bounded: bool, members: int, scene: Scene
) -> None:
    with Engine(scene.patient(subscribe=scene.topic(2), groupMembers=2, leaveOnStop=given)) as engine:
        if bounded:
            engine.coordinator.prepare_available_now()
        engine.run()
    assert len(describe(scene.admin, scene.group).members) == members


# --- transactions ---------------------------------------------------------------------------------------------------


def test_only_committed_records_are_read_and_the_committed_offset_is_after_the_markers(scene: Scene) -> None:
    """Even if a batch has only aborted records or a marker. Records after the start of an open transaction are not
    read."""
    name = scene.topic()
    producer = Producer({"bootstrap.servers": scene.servers, "transactional.id": name, "log_level": 3})
    producer.init_transactions(ADMIN_S)
    for number, end in enumerate(("commit", "abort", "commit")):
        producer.begin_transaction()
        for n in range(5):
            producer.produce(name, f"{number}-{n}".encode(), partition=0)
        producer.flush(ADMIN_S)
        getattr(producer, f"{end}_transaction")(ADMIN_S)
    await_markers(scene.admin, name)
    one = scene.played(subscribe=name, maxOffsetsPerTrigger=3)
    assert one.run() == [f"{t}-{n}" for t in (0, 2) for n in range(5)]
    assert scene.committed() == scene.end_offsets(name) == {TopicPartition(name, 0): 18}
    assert [sum(r.size for r in parse(line).batch()) for line in one.log] == [3] * 6
    producer.begin_transaction()
    producer.produce(name, b"open", partition=0)
    producer.flush(ADMIN_S)
    scene.produce(name, ["behind"])
    assert one.run() == []
    producer.commit_transaction(ADMIN_S)
    await_markers(scene.admin, name)
    assert one.run() == ["behind", "open"]


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.proves("G8", level="kafka")
def test_G8_an_available_now_run_fails_within_its_budget_if_the_group_does_not_stabilize(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member does not release a revoked partition (KIP-848): the assignment is not complete."""
    name = scene.topic(4)
    scene.produce(name, numbered(0, 3, 4))
    rules = Options.rules
    monkeypatch.setattr(Options, "rules", lambda *of, **also: replace(rules(*of, **also), joining_budget_ms=BUDGET_MS))
    monkeypatch.setattr("spark_group_source.protocol.run.SETTLE_MS_MAX", 500)  # the first batch does not wait for all
    given = scene.options("consumer", subscribe=name)
    with OrdinaryConsumer(scene.servers, scene.group, [name], scene.folder / "other", strategy="consumer") as other:
        other.await_partitions(4)
        await_until(lambda: len(other.processed()) == 4, what="all records at the other member")
        with Engine(given) as engine:
            engine.coordinator.prepare_available_now()
            other.do("stall")
            with pytest.raises(RebalanceTimeout, match="reached a stable assignment") as found:
                await_until(lambda: engine.step() is None, what="an end")
        assert scene.group in str(found.value) and "spark-group describe" in str(found.value)
        waited_ms: Any = found.value.fields["waited_ms"]
        assert waited_ms >= BUDGET_MS


@pytest.mark.parametrize("name", ["requests", "slot-0.1"])
def test_G8_a_thread_that_cannot_start_fails_the_run(name: str, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == name:
            raise RuntimeError(REFUSAL)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with Engine(scene.options(subscribe=scene.topic())) as engine, pytest.raises(InvariantBroken, match=REFUSAL):
        await_until(lambda: engine.step() is None and False, what="the end of the run")
