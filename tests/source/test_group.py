"""The query as a member of its group: what it commits and when, replays among other members, restarts, old drivers."""

import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported without saying so
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from conftest import ADMIN_S, await_until
from scenes import Scene
from streams import (
    PROTOCOLS,
    Engine,
    Outsider,
    describe,
    forget,
    numbered,
    planned,
    texts,
    values_of,
)

from spark_group_source import drain
from spark_group_source.errors import CommitFailed, Fenced, GroupError
from spark_group_source.group.names import note_text
from spark_group_source.kafka import Identity, MemberStale, OffsetCommitter, Runtime
from spark_group_source.kafka.committer import memberless
from spark_group_source.model import TopicPartition

pytestmark = pytest.mark.spark

Shares = Sequence[tuple[Identity, Mapping[TopicPartition, int]]]
Notes = Mapping[TopicPartition, str]


def patient(scene: Scene, protocol: str = "classic", **more: object) -> dict[str, str]:
    """Options of a group whose members are not thrown out while a test pauses."""
    if protocol == "classic":
        return scene.options(protocol, kafka__session__timeout__ms=30_000, **more)
    entry = ConfigEntry("consumer.session.timeout.ms", "30000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.GROUP, scene.group, incremental_configs=[entry])
    for done in scene.admin.incremental_alter_configs([resource]).values():
        done.result(ADMIN_S)
    return scene.options(protocol, **more)


# --- the group shows what is durable --------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B50_the_group_shows_lag_0_when_idle_when_stopped_and_when_a_bounded_run_has_ended(
    protocol: str, scene: Scene
) -> None:
    name = scene.topic(4)
    scene.produce(name, numbered(0, 9, 3))  # nothing in the last partition
    one = scene.job(protocol, subscribe=name, groupMembers=2)
    with one.running() as query:
        query.processAllAvailable()
        await_until(lambda: scene.committed() == scene.end_offsets(name), what="lag 0 while idle")
        scene.produce(name, numbered(10, 15, 3))
        query.processAllAvailable()
    await_until(lambda: scene.committed() == scene.end_offsets(name), what="lag 0 after stop()")
    scene.produce(name, numbered(16, 20, 3))
    one.run()
    assert scene.committed() == scene.end_offsets(name)
    assert one.values == texts(0, 20)


@pytest.mark.proves("G2", level="kafka")
def test_G2_kafka_is_never_ahead_of_what_the_sink_has(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 4))
    with Engine(patient(scene, subscribe=name)) as engine:
        engine.step()
        assert scene.committed().get(TopicPartition(name, 0), 0) == 0
        scene.produce(name, numbered(5, 9))
        in_flight = engine.plan()
        assert in_flight is not None
        await_until(lambda: scene.committed() == {TopicPartition(name, 0): 5}, what="the first batch in Kafka")
    assert scene.committed() == {TopicPartition(name, 0): 5}  # the batch in flight was never durable


def refused_commits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Commits are refused until the event is cleared."""
    real, broken = OffsetCommitter.commit, threading.Event()
    broken.set()

    def commit(self: OffsetCommitter, shares: Shares, notes: Notes) -> None:
        if broken.is_set():
            raise CommitFailed("the coordinator is moving")
        real(self, shares, notes)

    monkeypatch.setattr(OffsetCommitter, "commit", commit)
    return broken


def test_B47_a_refused_commit_costs_no_rows_and_the_next_one_covers_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 5, 2))
    broken = refused_commits(monkeypatch)
    with Engine(patient(scene, subscribe=name)) as engine:
        engine.step()
        scene.produce(name, numbered(6, 9), partition=0)
        engine.step()
        await_until(lambda: "the coordinator is moving" in caplog.text, what="the warning")
        assert values_of(engine.rows) == texts(0, 9)
        assert scene.committed() == {}
        broken.clear()
        engine.step()
        await_until(lambda: scene.committed() == scene.end_offsets(name), what="both batches in Kafka")


def test_a_drain_is_not_done_before_kafka_has_the_offsets(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 3))
    broken = refused_commits(monkeypatch)
    monkeypatch.setattr("spark_group_source.group.machine.ECHO_MS_MAX", 500)
    with Engine(patient(scene, subscribe=name)) as engine:
        engine.step()
        with pytest.raises(GroupError, match="did not end its batch within 0 s"):
            drain(scene.group, timeout_s=0)  # asks, and goes
        assert engine.plan() is None
        with pytest.raises(GroupError, match="did not end its batch within 1 s"):
            drain(scene.group, timeout_s=1)
        broken.clear()
        await_until(lambda: engine.plan() is None and scene.committed() == scene.end_offsets(name), what="the offsets")
        engine.plan()
        assert drain(scene.group) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_where_transactions_are_not_allowed_the_members_commit_what_they_hold(
    protocol: str, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = scene.topic(4)
    scene.produce(name, numbered(0, 7, 4))

    def refuse(self: OffsetCommitter) -> None:
        raise KafkaException(KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED))

    monkeypatch.setattr(OffsetCommitter, "_own", refuse)
    with Engine(patient(scene, protocol, subscribe=name, groupMembers=2)) as engine:
        engine.run()
        await_until(lambda: scene.committed() == scene.end_offsets(name), what="the first offsets")
        scene.produce(name, numbered(8, 11, 4))
        engine.run()
        await_until(lambda: scene.committed() == scene.end_offsets(name), what="the next offsets")
        assert values_of(engine.rows) == texts(0, 11)
        assert engine.coordinator._run.statistics().commits_failed == 0


def test_B48_the_last_of_several_batches_is_committed_for_all_of_them(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = scene.topic()
    real, slow, sent = OffsetCommitter.commit, threading.Event(), []

    def commit(self: OffsetCommitter, shares: Shares, notes: Notes) -> None:
        sent.append({tp: offset for _, offsets in shares for tp, offset in offsets.items()})
        slow.wait(30)
        real(self, shares, notes)

    monkeypatch.setattr(OffsetCommitter, "commit", commit)
    with Engine(patient(scene, subscribe=name)) as engine:
        for n in range(4):
            scene.produce(name, numbered(n, n))
            engine.step()  # planning does not wait for the commit
        assert values_of(engine.rows) == texts(0, 3)
        assert engine.plan() is None
        slow.set()
        await_until(lambda: scene.committed() == scene.end_offsets(name), what="the last batch in Kafka")
    assert [offsets[TopicPartition(name, 0)] for offsets in sent] == [0, 4]


# --- replays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B44_G1_a_planned_batch_has_the_same_rows_after_a_crash_though_another_member_has_its_partitions(
    protocol: str, scene: Scene
) -> None:
    name = scene.topic(4)
    scene.produce(name, numbered(0, 7, 4))
    one = scene.job(protocol, subscribe=name)
    one.run()
    scene.produce(name, numbered(8, 15, 4))
    one.run()
    last, plans = max(planned(one.checkpoint)), planned(one.checkpoint)
    forget(one.checkpoint, "commits", last)
    scene.produce(name, numbered(16, 19, 4))
    with Outsider(scene.servers, scene.group, [name], protocol) as other:
        await_until(lambda: len(other.partitions) == 4, what="another member with everything")
        one.run()
        await_until(lambda: other.partitions, what="the other member again with some")
    first, again = [rows for number, rows in one.batches if number == last]
    assert sorted(again) == sorted(first)
    assert planned(one.checkpoint)[last] == plans[last]


@pytest.mark.proves("G1", level="spark")
def test_B44_G1_batch_0_is_replayed_as_it_was_planned_although_latest_has_moved(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    one = scene.job(subscribe=name)
    one.run()
    forget(one.checkpoint, "commits", 0)
    scene.produce(name, numbered(4, 5, 2))
    one.options["startingOffsets"] = "latest"
    one.run()
    assert [(number, values_of(rows)) for number, rows in one.batches] == [
        (0, texts(0, 3)),
        (0, texts(0, 3)),
        (1, texts(4, 5)),
    ]


# --- restarts and ends ----------------------------------------------------------------------------------------------


@pytest.mark.proves("G7", level="kafka")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_G7_a_restart_within_the_session_timeout_rebalances_nobody(protocol: str, scene: Scene) -> None:
    name = scene.topic(6)
    scene.produce(name, numbered(0, 11, 6))
    given = patient(scene, protocol, subscribe=name, groupMembers=2)
    with Outsider(scene.servers, scene.group, [name], protocol) as other:

        def shared() -> bool:
            members = describe(scene.admin, scene.group).members
            return len(members) == 3 and all(len(has) == 2 for has in members.values()) and len(other.partitions) == 2

        with Engine(given) as first:
            first.step()
            await_until(lambda: first.step() is None and shared(), what="two partitions for each of three members")
            first.run()
            before = describe(scene.admin, scene.group)
        rebalances = other.rebalances
        assert len(describe(scene.admin, scene.group).members) == 3  # the places are kept
        scene.produce(name, numbered(12, 23, 6))
        with Engine(given, first.log) as second:
            await_until(lambda: second.step() is None and len(second.rows) >= 8, what="the rows of our four partitions")
            after = describe(scene.admin, scene.group)
        assert after == before
        assert other.rebalances == rebalances
        ours = {(row.topic, row.partition) for row in second.rows}
        assert ours.isdisjoint(other.partitions) and len(ours) == 4


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_available_now_run_leaves_the_group_and_a_stopped_one_keeps_its_places(protocol: str, scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    one = scene.job(protocol, subscribe=name, groupMembers=2)
    one.run()
    assert describe(scene.admin, scene.group).members == {}
    with one.running() as query:
        query.processAllAvailable()
        during = describe(scene.admin, scene.group)
    assert len(during.members) == 2
    assert describe(scene.admin, scene.group).members.keys() == during.members.keys()


def test_leaveOnStop_always_gives_the_places_back_at_once(scene: Scene) -> None:
    with Engine(patient(scene, subscribe=scene.topic(2), groupMembers=2, leaveOnStop="always")) as engine:
        engine.step()
        assert len(describe(scene.admin, scene.group).members) == 2
    assert describe(scene.admin, scene.group).members == {}


def test_leaveOnStop_never_keeps_the_places_of_a_bounded_run(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    one = scene.job(subscribe=name, leaveOnStop="never")
    one.run()
    assert one.values == texts(0, 3)
    assert len(describe(scene.admin, scene.group).members) == 1


@pytest.mark.parametrize("bounded", [False, True])
def test_a_run_that_comes_back_to_its_place_with_more_topics_reads_them_at_once(bounded: bool, scene: Scene) -> None:
    """The broker gives a static member that is replaced what its place had, and no more until a rebalance."""
    first = scene.topic(2)
    second = scene.topic(2, name=f"{first}-more")
    for name in (first, second):
        scene.produce(name, numbered(0, 3, 2))
    with Engine(patient(scene, subscribe=first)) as before:
        before.run()
    with Engine(patient(scene, subscribe=f"{first},{second}"), before.log) as after:
        if bounded:
            after.coordinator.prepare_available_now()
            after.run()
        else:
            await_until(lambda: after.step() is not None, what="records of the topic that came in addition")
            after.run()
        assert {row.topic for row in after.rows} == {second}
        assert values_of(after.rows) == texts(0, 3)


# --- old drivers ----------------------------------------------------------------------------------------------------


class LateId(Runtime):
    """The transactional id is taken over late: after a member of the group was made, or after this long without one."""

    LATE_S = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.joined = threading.Event()
        self.joined_before: bool | None = None

    def consumer(self, settings: Mapping[str, Any]) -> Any:
        if "group.instance.id" in settings:
            self.joined.set()
        return super().consumer(settings)

    def producer(self, settings: Mapping[str, Any]) -> Any:
        return _LateProducer(super().producer(settings), self)


class _LateProducer:
    def __init__(self, producer: Any, runtime: LateId) -> None:
        self._producer, self._runtime = producer, runtime

    def init_transactions(self, timeout_s: float) -> None:
        self._runtime.joined_before = self._runtime.joined.wait(self._runtime.LATE_S)
        self._producer.init_transactions(timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B51_members_join_when_an_older_driver_can_commit_no_more(protocol: str, scene: Scene) -> None:
    """Else it asks at once who has its place, hears that nobody replaced it, and takes the place back."""
    runtime = LateId()
    with Engine(patient(scene, protocol, subscribe=scene.topic()), runtime=runtime) as engine:
        engine.step()
        assert runtime.joined.is_set()
        assert runtime.joined_before is False


def test_B51_an_old_driver_is_told_so_and_moves_no_offset_backwards(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    given = patient(scene, subscribe=name)
    with Engine(given) as old:
        old.step()
        old.step()
        scene.produce(name, numbered(4, 7, 2))
        in_flight = old.plan()
        assert in_flight is not None
        with Engine(given, old.log) as new:
            new.step()
            scene.produce(name, numbered(8, 9, 2))
            new.run()
            everything = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
            await_until(lambda: scene.committed() == everything, what="the new driver's offsets")
            old.log.append(in_flight.to_json())  # its sink had the batch after all

            def fenced() -> bool:
                try:
                    old.plan()
                except Fenced as exc:
                    return "This run stops; nothing of it was committed after that" in str(exc)
                return False

            await_until(fenced, what="the end of the old driver")
            assert scene.committed() == everything
            scene.produce(name, ["more"])
            new.run()
            assert values_of(new.rows) == sorted([*texts(4, 9), "more"])  # and the new one goes on undisturbed


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B51_a_commit_of_the_old_driver_is_refused_by_the_broker(protocol: str, scene: Scene) -> None:
    tp = TopicPartition(scene.topic(), 0)
    settings: dict[str, Any] = Engine(patient(scene, protocol, subscribe=tp.topic)).options.producer_settings()
    old = OffsetCommitter(settings, group=scene.group, transactional_id=f"{scene.group}.s", runtime=Runtime())
    nobody = memberless(settings, scene.group, runtime=Runtime())
    old.commit([(nobody, {tp: 3})], {tp: note_text("s", 1)})
    new = OffsetCommitter(settings, group=scene.group, transactional_id=f"{scene.group}.s", runtime=Runtime())
    new.commit([(nobody, {tp: 5})], {tp: note_text("s", 2)})
    with pytest.raises(Fenced):
        old.commit([(nobody, {tp: 4})], {tp: note_text("s", 2)})
    assert scene.committed() == {tp: 5}


@pytest.mark.proves("G6", level="kafka")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_G6_a_commit_in_the_name_of_a_member_that_is_out_is_refused_by_the_broker(protocol: str, scene: Scene) -> None:
    """An order that a freeze or a rebalance overtook moves no offset of the partition's next owner."""
    tp = TopicPartition(scene.topic(), 0)
    scene.produce(tp.topic, numbered(0, 4))
    with Engine(patient(scene, protocol, subscribe=tp.topic, leaveOnStop="always")) as engine:
        engine.step()
        engine.plan()
        await_until(lambda: scene.committed() == {tp: 5}, what="the echo")
        identity = engine.coordinator._members[0].identity
        assert identity is not None and identity.generation > 0
        settings: dict[str, Any] = engine.options.producer_settings()
        transactional_id = f"{scene.group}.other"
        committer = OffsetCommitter(settings, group=scene.group, transactional_id=transactional_id, runtime=Runtime())
        committer.commit([(identity, {tp: 5})], {tp: note_text("s", 1)})
        older = identity._replace(metadata=_of_generation(identity.metadata, identity.generation - 1))
        with pytest.raises(MemberStale) as stale:
            committer.commit([(identity, {tp: 5}), (older, {tp: 3})], {tp: note_text("s", 1)})
        assert (stale.value.thrown_out, stale.value.share) == (False, 1)
        engine.close()
    if protocol == "classic":  # a static member of KIP-848 keeps its place
        with pytest.raises(MemberStale) as out:
            committer.commit([(identity, {tp: 3})], {tp: note_text("s", 2)})
        assert out.value.thrown_out
    assert scene.committed() == {tp: 5}


def _of_generation(metadata: Any, generation: int) -> bytes:
    raw = bytes(metadata)
    return raw[:7] + struct.pack("=i", generation) + raw[11:]


# --- sharing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B57_partitions_move_to_and_from_an_ordinary_member_between_batches_without_loss_or_repetition(
    protocol: str, scene: Scene
) -> None:
    name = scene.topic(4)
    scene.produce(name, numbered(0, 7, 4))
    with Engine(patient(scene, protocol, subscribe=name)) as engine:
        engine.step()
        with Outsider(scene.servers, scene.group, [name], protocol) as other:
            await_until(lambda: engine.step() is None and len(other.partitions) == 2, what="half of the partitions")
            assert all(offset == 2 for offset in scene.committed().values())  # before they left
            scene.produce(name, numbered(8, 15, 4))
            await_until(lambda: engine.step() is None and len(other.values) == 4, what="the other member's rows")
            assert sorted([*other.values, *values_of(engine.rows)]) == texts(0, 15)
        # it goes without a commit: what it read is ours again
        await_until(lambda: engine.step() is None and len(engine.rows) >= 16, what="everything once more ours")
        assert values_of(engine.rows) == texts(0, 15)
