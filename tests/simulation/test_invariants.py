"""The rules of the simulation in two rare cases: topics that are deleted and recreated, and older runs of a stream that
continue after newer ones have ended.

``test_mutants`` checks what the rules find in the product's code.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from kit.books import Cause, Reader
from kit.classic_group import ClassicGroup
from kit.invariants import Invariants, Violation
from kit.kafka_client import Client, Op, client_class
from kit.kafka_group import Code, Entry
from kit.world import Process, World

from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import Note, note_text
from spark_group_source.protocol.offsets import StreamOffset

TP = TopicPartition("orders", 0)
TPS = frozenset({TP})


class Silent:
    """An application without rebalance operations."""

    def rebalance(self, op: Op) -> None:
        raise NotImplementedError

    def renamed(self) -> None: ...
    def full(self) -> None: ...

    def dead(self, code: Code) -> None:
        raise NotImplementedError


class Scene:
    """A group with one partition, and consumers to which the test assigns it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.truth = Invariants(world)
        self.group = ClassicGroup(world, {TP.topic: 1}, self.truth)
        self.truth.add_partition(TP, 0)
        self._committed: Entry | None = None

    def member(self, name: str, *, stream: str = "") -> tuple[Reader, Client]:
        """A consumer in the group: of a run of ``stream``, or an ordinary one."""
        process = Process(self.world, name)
        reader = Reader(name, stream or name, counted=(lambda: 0) if stream else None)
        self.truth.reads_as(name, reader)
        client = client_class(self.group)(process, "main", name, self.group, Silent(), self.truth, instance=None)
        client.member = self.group.new_member(name, None, name).id
        return reader, client

    def assign(self, client: Client) -> None:
        for member in self.group.members.values():
            member.assigned = {TP} if member.id == client.member else set()
        self.truth.assigned(TPS, client)

    def commit(self, reader: Reader, offset: int, *, seq: int = 0) -> None:
        old = self._committed
        stream, note = (None, "") if reader.counted is None else (reader.party, note_text(Note(reader.party, seq)))
        self._committed = Entry(offset, stream, reader.name, 1 if old is None else old.order + 1, note)
        self.truth.committed(TP, old, self._committed)

    def delete_topic(self) -> None:
        self.truth.deleted(TP)
        self._committed = None

    def recreate_topic(self, records: int) -> None:
        self.truth.made_again(TP)
        self.truth.produce(TP, records)


@pytest.fixture
def scene() -> Iterator[Scene]:
    world = World(1)
    yield Scene(world)
    world.close()


def offset(reader: Reader, seq: int, start: int, end: int) -> StreamOffset:
    return StreamOffset(group="g", stream=reader.party, seq=seq, ranges={TP: (start, end)})


def test_a_consumer_assigned_while_the_topic_is_deleted_may_lose_records_of_the_new_one(scene: Scene) -> None:
    """The group coordinator detects a deletion late. Records that the consumer processed without a commit are read
    again."""
    (first, lost), (second, successor) = scene.member("first"), scene.member("second")
    scene.delete_topic()
    scene.assign(lost)
    scene.recreate_topic(5)
    scene.truth.processed_by(first, {TP: (0, 5)})
    scene.truth.lost(TPS, lost)
    scene.assign(successor)
    scene.truth.processed_by(second, {TP: (0, 5)})
    assert scene.truth.causes == {Cause.REPORTED: 5}


def test_the_partition_of_a_deleted_topic_may_have_had_two_consumers(scene: Scene) -> None:
    """A frozen consumer does not know yet that it lost the partition when the topic is recreated."""
    (first, frozen), (second, successor) = scene.member("first"), scene.member("second")
    scene.delete_topic()
    scene.assign(frozen)
    scene.assign(successor)
    scene.recreate_topic(5)
    scene.truth.processed_by(first, {TP: (0, 5)})
    scene.truth.processed_by(second, {TP: (0, 5)})
    assert scene.truth.causes == {Cause.UNREPORTED: 5}


def test_committed_records_of_a_recreated_topic_are_not_processed_twice(scene: Scene) -> None:
    (first, lost), (second, successor) = scene.member("first"), scene.member("second")
    scene.delete_topic()
    scene.assign(lost)
    scene.recreate_topic(5)
    scene.truth.processed_by(first, {TP: (0, 5)})
    scene.commit(first, 5)
    scene.truth.lost(TPS, lost)
    scene.assign(successor)
    with pytest.raises(Violation, match="offset 0 was processed by first and again by second"):
        scene.truth.processed_by(second, {TP: (0, 5)})


def replayed(scene: Scene) -> tuple[Reader, Client]:
    """A run that replayed a batch [9, 13) of the former topic."""
    former, _ = scene.member("a.1", stream="a")
    scene.truth.produce(TP, 13)
    scene.truth.planned(former, offset(former, 0, 0, 13))
    scene.truth.ended(former)
    scene.delete_topic()
    scene.recreate_topic(20)
    run, client = scene.member("a.2", stream="a")
    scene.assign(client)
    scene.truth.replaying(run, offset(run, 0, 9, 13))
    scene.truth.processed_by(run, {TP: (9, 13)}, table="t")
    return run, client


def restarted(scene: Scene) -> tuple[Reader, Client]:
    """A run that replayed a batch [9, 13) of the former topic, and has planned [0, 3) of the new one since."""
    run, client = replayed(scene)
    scene.truth.planned(run, offset(run, 1, 0, 3))
    scene.commit(run, 0)
    return run, client


def test_a_replay_of_the_former_topic_need_not_be_committed(scene: Scene) -> None:
    """Another stream has committed the beginning of the new topic, where this one continues."""
    other, _ = scene.member("other", stream="b")
    _, client = replayed(scene)
    scene.commit(other, 0)
    scene.truth.released(TPS, client)


def test_a_replay_of_the_former_topic_does_not_count_as_read_of_the_new_one(scene: Scene) -> None:
    """Also if the table already has the rows of the new batch and drops them."""
    run, client = restarted(scene)
    scene.truth.processed_by(run, {}, table="t")
    scene.truth.durable(run, offset(run, 1, 0, 3))
    scene.commit(run, 3)
    scene.truth.released(TPS, client)


def test_a_partition_of_a_recreated_topic_is_not_released_before_its_batch_is_committed(scene: Scene) -> None:
    run, client = restarted(scene)
    scene.truth.processed_by(run, {TP: (0, 3)})
    with pytest.raises(Violation, match="let orders-0 go at 3, but Kafka has 0"):
        scene.truth.released(TPS, client)


def successor(scene: Scene, *, seq: int, has_committed: bool = False) -> Reader:
    """The third run of a stream. The second one was killed after batch 1 [0, 10), and before its commit unless it
    ``has_committed``. Then another member committed 4, and the first run, which was frozen, commits 4 again with
    ``seq`` in its note.
    """
    scene.truth.produce(TP, 20)
    (first, zombie), (second, killed) = scene.member("a.1", stream="a"), scene.member("a.2", stream="a")
    other, ordinary = scene.member("other")
    scene.assign(killed)
    scene.truth.planned(second, offset(second, 1, 0, 10))
    scene.truth.processed_by(second, {TP: (0, 10)})
    scene.truth.durable(second, offset(second, 1, 0, 10))
    if has_committed:
        scene.commit(second, 10, seq=1)
    scene.truth.ended(second)
    scene.assign(ordinary)
    if not has_committed:
        scene.truth.processed_by(other, {TP: (0, 4)})
    scene.commit(other, 4)
    scene.truth.released(TPS, ordinary)
    scene.assign(zombie)
    scene.commit(first, 4, seq=seq)
    scene.truth.ended(first)
    scene.world.run_until(scene.world.now_ms + 1)
    third, client = scene.member("a.3", stream="a")
    scene.assign(client)
    return third


@pytest.mark.parametrize("seq", [0, 1])
def test_a_run_continues_after_its_durable_batch_where_an_older_run_committed_inside_it(scene: Scene, seq: int) -> None:
    third = successor(scene, seq=seq)
    scene.truth.planned(third, offset(third, 2, 10, 20))
    assert scene.truth.causes == {Cause.DEAD: 4}


@pytest.mark.parametrize(("has_committed", "start"), [(False, 11), (True, 10)])
def test_a_run_skips_no_record_from_the_committed_offset_on(scene: Scene, has_committed: bool, start: int) -> None:
    """Neither after the batch, nor inside it if Kafka had the batch before: then the group was moved back."""
    third = successor(scene, seq=1, has_committed=has_committed)
    with pytest.raises(Violation, match="its last range ended at 4"):
        scene.truth.planned(third, offset(third, 2, start, 20))


@pytest.mark.parametrize("replaced", [True, False])
def test_a_run_that_does_not_know_the_next_owner_begins_where_it_resolved_its_start(
    scene: Scene, replaced: bool
) -> None:
    scene.truth.starts_at_the_end = True
    scene.truth.produce(TP, 10)
    (first, cut_off), (second, successor) = (scene.member(name, stream=name[0]) for name in ("a.1", "b.1"))
    first.known = second.known = {TP.topic: 1}
    scene.assign(cut_off)
    if replaced:
        scene.assign(successor)
    scene.commit(second, 5)
    if replaced:
        scene.truth.planned(first, offset(first, 0, 2, 10))
    else:
        with pytest.raises(Violation, match="its last range ended at None"):
            scene.truth.planned(first, offset(first, 0, 2, 10))


@pytest.mark.parametrize("had_it", [True, False])
def test_a_run_that_has_a_partition_again_begins_where_it_resolved_its_start(scene: Scene, had_it: bool) -> None:
    """Nobody committed in between, so the log end at which the next owner started is not known to it."""
    scene.truth.starts_at_the_end = True
    scene.truth.produce(TP, 5)
    (first, mine), (second, other) = (scene.member(name, stream=name[0]) for name in ("a.1", "b.1"))
    first.known = second.known = {TP.topic: 1}
    if had_it:
        scene.assign(mine)
    scene.assign(other)
    scene.truth.produce(TP, 5)
    scene.truth.planned(second, offset(second, 0, 10, 10))
    scene.truth.ended(second)
    scene.assign(mine)
    if had_it:
        scene.truth.planned(first, offset(first, 0, 5, 10))
    else:
        with pytest.raises(Violation, match="its last range ended at None"):
            scene.truth.planned(first, offset(first, 0, 5, 10))


@pytest.mark.parametrize("moved_by", ["operator", "b", "a"])
def test_a_query_that_fails_on_data_loss_goes_back_in_a_truncated_log_only_to_a_foreign_commit(
    scene: Scene, moved_by: str
) -> None:
    scene.truth.produce(TP, 3)
    query, client = scene.member("a.1", stream="a")
    operator, _ = scene.member("operator")
    other, _ = scene.member("b.1", stream="b")
    scene.truth.operator, query.fails_on_loss = operator.name, True
    scene.assign(client)
    scene.commit(query, 0)
    scene.truth.planned(query, offset(query, 0, 0, 3))
    scene.truth.shrunk(TP, 0)
    scene.commit({"operator": operator, "b": other, "a": query}[moved_by], 0)
    if moved_by != "a":
        scene.truth.planned(query, offset(query, 1, 0, 2))
    else:
        with pytest.raises(Violation, match="although it must fail on data loss"):
            scene.truth.planned(query, offset(query, 1, 0, 2))


@pytest.mark.parametrize(("party", "start", "explained"), [("b", 4, True), ("a", 4, False), ("b", 3, False)])
def test_only_a_query_that_did_not_write_the_records_may_take_an_ordinary_commit_for_a_rewind(
    scene: Scene, party: str, start: int, explained: bool
) -> None:
    scene.truth.produce(TP, 10)
    writer, client = scene.member("a.1", stream="a")
    other, ordinary = scene.member("other")
    scene.assign(client)
    scene.truth.planned(writer, offset(writer, 0, 0, 10))
    scene.truth.processed_by(writer, {TP: (0, 10)}, table="t")
    scene.truth.ended(writer)
    scene.assign(ordinary)
    scene.truth.processed_by(other, {TP: (0, 4)})
    scene.commit(other, 4)
    assert scene.truth.explains([TP], {TP: start}, party) == explained


@pytest.mark.parametrize("before", ["another stream", "nobody"])
def test_a_replay_behind_the_commit_of_another_stream_may_take_an_ordinary_commit_for_a_rewind(
    scene: Scene, before: str
) -> None:
    """The former run planned [0, 10), another stream committed 0, and the replay wrote the rows: Kafka never has it."""
    scene.truth.produce(TP, 10)
    (former, killed), (stranger, client) = scene.member("a.1", stream="a"), scene.member("b.1", stream="b")
    scene.assign(killed)
    scene.commit(former, 0)
    scene.truth.planned(former, offset(former, 0, 0, 10))
    scene.truth.ended(former)
    if before == "another stream":
        scene.assign(client)
        scene.commit(stranger, 0)
    scene.world.now_ms += 1
    replay, _ = scene.member("a.2", stream="a")
    replay.began_ms, replay.replays = scene.world.now_ms, 0
    scene.truth.processed_by(replay, {TP: (0, 10)}, table="t")
    other, ordinary = scene.member("other")
    scene.assign(ordinary)
    scene.truth.processed_by(other, {TP: (0, 4)})
    scene.commit(other, 4)
    assert scene.truth.explains([TP], {TP: 4}, "a") == (before == "another stream")


def test_an_ordinary_consumer_whose_commit_is_inside_what_it_processed_goes_on_at_the_end(scene: Scene) -> None:
    """Its later records, for which it loses the partition before their commit, are read again."""
    scene.truth.produce(TP, 10)
    other, ordinary = scene.member("other")
    scene.commit(other, 0)
    scene.assign(ordinary)
    scene.truth.processed_by(other, {TP: (0, 4)})
    scene.commit(other, 4)
    scene.truth.processed_by(other, {TP: (4, 10)})
    scene.truth.released(TPS, ordinary)
    second, client = scene.member("second")
    scene.assign(client)
    scene.truth.processed_by(second, {TP: (4, 10)})
    assert scene.truth.causes == {Cause.UNREPORTED: 6}


def test_a_run_goes_on_where_it_ended_after_an_older_run_was_assigned_a_foreign_commit(scene: Scene) -> None:
    scene.truth.produce(TP, 20)
    (_, zombie), (second, client) = scene.member("a.1", stream="a"), scene.member("a.2", stream="a")
    second.number = 1
    other, ordinary = scene.member("other")
    scene.assign(client)
    scene.truth.planned(second, offset(second, 0, 0, 5))
    scene.truth.processed_by(second, {TP: (0, 5)})
    scene.assign(ordinary)
    scene.truth.processed_by(other, {TP: (0, 8)})
    scene.commit(other, 8)
    scene.assign(zombie)
    scene.truth.planned(second, offset(second, 1, 5, 10))


@pytest.mark.parametrize(("is_zombie", "refused"), [(True, True), (False, True), (True, False)])
def test_a_stream_goes_on_where_it_ended_if_a_zombie_replaced_the_commit_of_an_operator(
    scene: Scene, is_zombie: bool, refused: bool
) -> None:
    """The zombie followed the operator, under the number of an earlier batch. Brokers that refuse transactions accept
    its commit, and the newest run takes it for an earlier one."""
    scene.truth.produce(TP, 20)
    runs = [scene.member(f"a.{number}", stream="a") for number in range(3)]
    for number, (run, _) in enumerate(runs):
        run.number, run.began_ms, run.alive = number, 4 * number, number == 0
    (zombie, former), (second, client), (third, last) = runs
    operator, _ = scene.member("operator")
    scene.truth.operator, scene.truth.refuses_transactions = operator.name, refused
    scene.assign(former)
    planned = offset(zombie, 3, 0, 10)
    scene.truth.planned(zombie, planned)
    scene.truth.processed_by(zombie, {TP: (0, 10)})
    scene.truth.durable(zombie, planned)
    scene.commit(zombie, 10, seq=3)
    scene.commit(operator, 4)
    second.alive, scene.world.now_ms = True, 5
    scene.assign(client)
    scene.commit(zombie if is_zombie else second, 4, seq=4)
    zombie.alive = second.alive = False
    third.alive, scene.world.now_ms = True, 9
    scene.assign(last)
    if is_zombie and refused:
        scene.truth.planned(third, offset(third, 6, 10, 12))
    else:
        with pytest.raises(Violation, match="its last range ended at 4"):
            scene.truth.planned(third, offset(third, 6, 10, 12))


@pytest.mark.parametrize("stops", [True, False])
def test_a_run_goes_on_where_it_ended_although_one_that_stops_was_assigned_a_foreign_commit(
    scene: Scene, stops: bool
) -> None:
    """A run that does not stop decides where the stream goes on."""
    scene.truth.produce(TP, 20)
    (first, client), (second, late) = scene.member("a.1", stream="a"), scene.member("a.2", stream="a")
    second.number = 1
    other, ordinary = scene.member("other")
    scene.assign(client)
    scene.truth.planned(first, offset(first, 0, 0, 5))
    scene.truth.processed_by(first, {TP: (0, 5)})
    scene.assign(ordinary)
    scene.commit(other, 4)
    second.closing = stops
    scene.assign(late)
    second.alive = False
    if stops:
        scene.truth.planned(first, offset(first, 1, 5, 10))
    else:
        with pytest.raises(Violation, match="its last range ended at 4"):
            scene.truth.planned(first, offset(first, 1, 5, 10))


def test_a_truncated_log_that_is_read_again_before_a_loss_is_reported_may_be_read_twice(scene: Scene) -> None:
    """An agent has closed its member, and its run plans from where the log was truncated below its position."""
    scene.truth.produce(TP, 5)
    query, client = scene.member("a.1", stream="a")
    agent = Process(scene.world, "agent")
    scene.truth.reads_for(agent.name, query)
    client.process = agent
    scene.assign(client)
    scene.truth.planned(query, offset(query, 0, 0, 5))
    scene.truth.processed_by(query, {TP: (0, 5)})
    scene.commit(query, 5)
    scene.truth.shrunk(TP, 3)
    scene.truth.produce(TP, 7)
    scene.truth.lost(TPS, client)
    scene.truth.intends(query, {TP: (3, 10)})
    scene.truth.planned(query, offset(query, 1, 3, 10))
    scene.truth.processed_by(query, {TP: (3, 10)})
    second, other = scene.member("b.1", stream="b")
    scene.assign(other)
    scene.truth.processed_by(second, {TP: (3, 10)})
    assert scene.truth.causes[Cause.REPORTED] == 5


def test_a_range_that_follows_a_commit_at_an_earlier_truncation_is_part_of_a_reported_loss(scene: Scene) -> None:
    scene.truth.produce(TP, 5)
    query, client = scene.member("a.1", stream="a")
    second, other = scene.member("b.1", stream="b")
    scene.truth.shrunk(TP, 3)
    scene.truth.produce(TP, 7)
    scene.assign(client)
    scene.truth.planned(query, offset(query, 0, 0, 3))
    scene.truth.processed_by(query, {TP: (0, 3)})
    scene.commit(query, 3)
    scene.truth.planned(query, offset(query, 1, 3, 10))
    scene.truth.processed_by(query, {TP: (3, 10)})
    scene.truth.lost(TPS, client)
    scene.assign(other)
    scene.commit(second, 3)
    scene.truth.released(TPS, other)
    scene.assign(client)
    scene.commit(query, 3, seq=1)
    scene.truth.intends(query, {TP: (3, 10)})
    scene.truth.planned(query, offset(query, 2, 3, 10))
    scene.truth.processed_by(query, {TP: (3, 10)})
    assert scene.truth.causes[Cause.REPORTED] == 7


@pytest.mark.parametrize("fails", [False, True])
def test_a_new_stream_goes_back_if_the_log_is_truncated_below_its_start(scene: Scene, fails: bool) -> None:
    """It has committed the end of the log as its start, and has planned nothing."""
    scene.truth.starts_at_the_end = True
    scene.truth.produce(TP, 9)
    query, client = scene.member("a.1", stream="a")
    query.fails_on_loss, query.known = fails, {TP.topic: 1}
    scene.assign(client)
    scene.commit(query, 9, seq=-1)
    scene.truth.shrunk(TP, 5)
    scene.truth.produce(TP, 9)
    if not fails:
        scene.truth.planned(query, offset(query, 0, 5, 14))
    else:
        with pytest.raises(Violation, match="its last range ended at None"):
            scene.truth.planned(query, offset(query, 0, 5, 14))


@pytest.mark.parametrize("resets", [True, False])
def test_a_stream_that_must_fail_on_data_loss_goes_back_after_a_reset(scene: Scene, resets: bool) -> None:
    """The reset made its batch void. Nothing was committed, and the log was truncated where the batch starts."""
    scene.truth.produce(TP, 4)
    scene.truth.shrunk(TP, 0)
    scene.truth.produce(TP, 8)
    query, client = scene.member("a.1", stream="a")
    query.fails_on_loss = True
    scene.assign(client)
    planned = offset(query, 0, 0, 4)
    scene.truth.planned(query, planned)
    if resets:
        scene.truth.last = lambda: [planned]
        scene.truth.resets(1)
        scene.truth.planned(query, replace(offset(query, 1, 0, 8), reset_number=1))
    else:
        with pytest.raises(Violation, match="it must fail on data loss"):
            scene.truth.planned(query, offset(query, 1, 0, 8))


def test_a_stream_that_planned_nothing_of_a_recreated_topic_may_not_know_it_yet(scene: Scene) -> None:
    """It followed another consumer in the new topic, whose partition the former topic did not have. When it knows, it
    starts at the beginning."""
    query, client = scene.member("a.1", stream="a")
    other, _ = scene.member("other")
    added = TopicPartition(TP.topic, 1)
    scene.delete_topic()
    scene.recreate_topic(8)
    scene.truth.add_partition(added, 0)
    scene.truth.produce(added, 8)
    scene.truth.planned(query, replace(offset(query, 0, 0, 0), ranges={added: (0, 0)}))
    scene.truth.processed_by(other, {added: (0, 6)})
    scene.truth.committed(added, None, Entry(6, None, other.name, 1, ""))
    scene.world.now_ms += 1
    scene.truth.assigned(frozenset({added}), client)
    scene.truth.planned(query, replace(offset(query, 1, 6, 6), ranges={added: (6, 6)}))
    scene.truth.planned(query, replace(offset(query, 2, 0, 8), ranges={added: (0, 8)}))
    with pytest.raises(Violation, match="its last range ended at 8"):
        scene.truth.planned(query, replace(offset(query, 3, 2, 8), ranges={added: (2, 8)}))


def test_a_start_that_a_killed_query_had_not_committed_may_be_decided_again(scene: Scene) -> None:
    scene.truth.starts_at_the_end = True
    scene.truth.produce(TP, 9)
    (first, killed), (second, client) = (scene.member(name, stream=name[0]) for name in ("a.1", "b.1"))
    first.known = second.known = {TP.topic: 1}
    scene.assign(killed)
    scene.truth.planned(first, offset(first, 0, 9, 9))
    scene.truth.ended(first)
    scene.truth.produce(TP, 3)
    scene.assign(client)
    scene.commit(second, 12)
    assert scene.truth.explains([TP], {TP: 12}, "b")
    assert not scene.truth.explains([TP], {TP: 12}, "c")


@pytest.mark.parametrize("is_ordinary", [True, False])
def test_a_stream_reads_what_replaced_truncated_records_and_an_ordinary_consumer_waits_behind_it(
    scene: Scene, is_ordinary: bool
) -> None:
    scene.truth.reports_epochs = True
    scene.truth.produce(TP, 4)
    reader, client = scene.member("a.1", stream="a")
    scene.assign(client)
    scene.truth.planned(reader, offset(reader, 0, 0, 4))
    scene.truth.processed_by(reader, {TP: (0, 4)})
    scene.commit(reader, 4)
    scene.truth.shrunk(TP, 0)
    scene.truth.produce(TP, 2)
    _, other = scene.member("other", stream="" if is_ordinary else "b")
    scene.assign(other)
    if is_ordinary:
        scene.truth.finish()
    else:
        with pytest.raises(Violation, match="offset 0 replaces a truncated record, and was never read"):
            scene.truth.finish()


@pytest.mark.parametrize("replays", [1, 2])
def test_a_partition_may_leave_when_an_older_run_wrote_the_batch_that_this_one_replays(
    scene: Scene, replays: int
) -> None:
    scene.truth.produce(TP, 10)
    (first, _), (second, client) = (scene.member(name, stream="a") for name in ("a.1", "a.2"))
    second.number = 1
    scene.truth.planned(first, offset(first, 1, 0, 10))
    scene.assign(client)
    scene.truth.replaying(second, offset(second, replays, 0, 10))
    scene.truth.durable(first, offset(first, 1, 0, 10))
    if replays == 1:
        scene.truth.released(TPS, client)
    else:
        with pytest.raises(Violation, match="let orders-0 go in the middle of a batch"):
            scene.truth.released(TPS, client)


@pytest.mark.parametrize("order", ["before", "read", "late"])
def test_a_run_may_replace_only_a_late_commit_of_an_ordinary_consumer(scene: Scene, order: str) -> None:
    """A run that has the partition, and has read its committed offset, cannot know of a commit that was under way."""
    other, its_consumer = scene.member("other")
    query, client = scene.member("a.1", stream="a")
    scene.truth.produce(TP, 5)
    scene.assign(its_consumer)
    scene.truth.processed_by(other, {TP: (0, 5)})
    scene.commit(other, 3)
    if order != "before":
        scene.truth.lost(TPS, its_consumer)
        scene.assign(client)
        scene.truth.told(query, {TP: 3})
        scene.world.now_ms += 1
    scene.commit(other, 5)
    if order == "before":
        scene.truth.released(TPS, its_consumer)
        scene.assign(client)
    if order == "read":
        scene.truth.told(query, {TP: 5})
    if order != "late":
        with pytest.raises(Violation, match="committed orders-0 at 3, but other had committed it at 5 since"):
            scene.commit(query, 3)
        return
    scene.commit(query, 3)
    scene.truth.planned(query, offset(query, 0, 3, 5))
    scene.truth.processed_by(query, {TP: (3, 5)})
    assert scene.truth.causes == {Cause.UNREPORTED: 2}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_that_was_replaced_counts_no_duplicates_of_a_loss_that_is_reported_to_it(
    scene: Scene, replaced: bool
) -> None:
    query, client = scene.member("a.1", stream="a")
    _, its_consumer = other = scene.member("other")
    scene.truth.produce(TP, 5)
    scene.assign(client)
    scene.truth.planned(query, offset(query, 0, 0, 5))
    scene.truth.processed_by(query, {TP: (0, 5)})
    scene.assign(its_consumer)
    scene.truth.processed_by(other[0], {TP: (0, 5)})
    scene.truth.lost(TPS, client)
    query.closing = replaced
    scene.truth.loss_reported(query, TPS)
    if replaced:
        scene.truth.ended(query)
        return
    with pytest.raises(Violation, match="caused 5 offsets to be read twice, and counted 0"):
        scene.truth.ended(query)


@pytest.mark.parametrize("committed", [False, True])
def test_an_offset_that_an_operator_moves_into_the_last_batch_is_dropped_only_if_kafka_had_not_that_batch(
    scene: Scene, committed: bool
) -> None:
    query, client = scene.member("a.1", stream="a")
    operator, _ = scene.member("operator")
    scene.truth.operator = operator.name
    scene.truth.produce(TP, 5)
    scene.assign(client)
    scene.truth.planned(query, offset(query, 0, 0, 5))
    scene.truth.processed_by(query, {TP: (0, 5)})
    scene.truth.durable(query, offset(query, 0, 0, 5))
    if committed:
        scene.commit(query, 5)
    scene.commit(operator, 2)
    scene.commit(query, 2)  # it follows the operator; the next run has only its checkpoint
    if not committed:
        scene.commit(query, 5, seq=1)
        return
    with pytest.raises(Violation, match="committed orders-0 at 5, but only what is below 2 was processed"):
        scene.commit(query, 5, seq=1)
