"""How the brokers' answers before a batch show lost records."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from kit.harness import tps
from kit.run_harness import RunHarness

from spark_group_source.errors import BrokerUnavailable, DataLoss, GroupError, TopicMissing
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import (
    EARLIER_MS,
    GRACE_MS,
    SILENT_MS_MAX,
    TOPICS_MS,
    DataLossDetector,
    LeaderEpochs,
)
from spark_group_source.protocol.offsets import StreamOffset, parse
from spark_group_source.protocol.rules import Rules, StartingPosition

A, B = tps("orders", 0, 1)
OTHER = tps("payments", 0)[0]

Offsets = Mapping[TopicPartition, int]


def test_only_what_was_read_behind_a_position_is_kept() -> None:
    """In a checkpoint the position itself says how far a partition was read."""
    epochs = LeaderEpochs()
    epochs.remember(
        StreamOffset(group="etl", stream="s", seq=0, ranges={A: (0, 10), B: (0, 10)}, leader_epochs={A: 3, B: 3})
    )
    assert epochs.read_to({A: 10, B: 4, OTHER: 0}) == {B: 10}


class Brokers:
    """Answers the requests of a check from dictionaries, and stores the requests."""

    def __init__(self, *, fail: bool = True) -> None:
        self.rules = Rules(group="GROUP", starting=StartingPosition(), fail_on_data_loss=fail)
        self.known_epochs = LeaderEpochs()
        self.detector = DataLossDetector(self.rules, self.known_epochs)
        self.ends = {A: 100, B: 100, OTHER: 100}
        self.log_ends = dict(self.ends)
        self.firsts = dict.fromkeys(self.ends, 0)
        self.leaders = dict.fromkeys(self.ends, 3)
        self.epoch_ends: dict[TopicPartition, int | None] = {}
        self.ids = {"orders": "id-1", "payments": "id-2"}
        self.requests: list[ev.ReadLogEnds] = []
        self.reset_after_requests: int | None = None
        self.now_ms = 10_000

    def check(
        self, positions: Offsets, *, after_ms: int = 100, reset_number: int = 0, revoked: TopicPartition | None = None
    ) -> list[str]:
        """One check, in which a partition may be revoked. Returns its warnings."""
        self.now_ms += after_ms
        self.detector.learn_ids(ev.CommittedOffsetsRead(offsets={}), reset_number, without_offset=())
        request: ev.ReadLogEnds | None = self.detector.begin(positions, self.now_ms)
        self.requests = []
        while request is not None:
            self.requests.append(request)
            if len(self.requests) == self.reset_after_requests:
                self.detector.learn_ids(ev.CommittedOffsetsRead(offsets={}), reset_number + 1, without_offset=())
            request = self.detector.take(
                ev.LogEndsRead(
                    ends={tp: self.ends[tp] for tp in request.ends if tp in self.ends},
                    leader_epochs={tp: self.leaders.get(tp, 3) for tp in request.ends if tp in self.ends},
                    epoch_ends={tp: self.epoch_ends[tp] for tp in request.epoch_ends if tp in self.epoch_ends},
                    firsts={tp: self.firsts[tp] for tp in request.firsts if tp in self.firsts},
                    log_ends={tp: self.log_ends[tp] for tp in request.log_ends if tp in self.log_ends},
                    topic_ids={name: self.ids[name] for name in request.topics if name in self.ids},
                    took_ms=3,
                )
            )
            assert len(self.requests) <= 3
        self.detector.settle({tp: at for tp, at in positions.items() if tp != revoked})
        return self.detector.warnings

    def confirm(self, positions: Offsets) -> list[str]:
        """A check that finds a suspicion only, and one after the grace period. Returns the warnings of the latter."""
        assert (self.check(positions), self.error(), moved(self.detector)) == ([], None, {})
        assert self.detector.has_suspicions and not self.detector.is_complete(SILENT_MS_MAX)
        return self.check(positions, after_ms=GRACE_MS)

    def error(self) -> GroupError | None:
        return self.detector.error

    def plan(self, ranges: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """Plan a batch after the check: the checkpoint stores its epochs."""
        positions = {tp: start for tp, (start, _) in ranges.items()}
        epochs = self.detector.leader_epochs(positions)
        read_to = self.known_epochs.read_to({tp: end for tp, (_, end) in ranges.items()})
        offset = StreamOffset(group="etl", ranges=ranges, leader_epochs=epochs, read_to=read_to, topic_ids=self.ids)
        self.checkpoint = replace(offset, stream="s", seq=0).to_json()
        self.known_epochs.remember(offset)

    def restart(self) -> None:
        """Another run continues from the checkpoint."""
        self.known_epochs = LeaderEpochs()
        self.detector = DataLossDetector(self.rules, self.known_epochs)
        self.detector.restore(parse(self.checkpoint))

    def elect(self, tp: TopicPartition, epoch: int, has: int | None, end: int) -> None:
        """Elect a leader that has the records below ``has``; its log ends at ``end``."""
        self.leaders[tp], self.epoch_ends[tp] = epoch, has
        self.shrink(tp, end)

    def shrink(self, tp: TopicPartition, end: int) -> None:
        self.ends[tp] = self.log_ends[tp] = end

    def recreate(self, topic: str, end: int = 10) -> None:
        self.ids[topic] += "-again"
        for tp in [tp for tp in self.ends if tp.topic == topic]:
            self.shrink(tp, end)


def moved(detector: DataLossDetector) -> Offsets:
    return {} if detector.records_missing is None else detector.records_missing.offsets


# --- requests --------------------------------------------------------------------------------------------------------


def test_first_check_requests_everything_and_an_idle_check_only_the_ends() -> None:
    brokers = Brokers()
    brokers.check({A: 100, B: 90})
    assert brokers.requests == [ev.ReadLogEnds(ends=(A, B)), ev.ReadLogEnds(topics=("orders",), firsts=(A, B))]
    assert brokers.detector.took_ms == 6
    brokers.check({A: 100, B: 100})
    assert brokers.requests == [ev.ReadLogEnds(ends=(A, B))]
    assert brokers.detector.took_ms == 3
    assert brokers.detector.ends == {A: 100, B: 100}


@pytest.mark.proves("G10", level="core")
def test_recreated_topic_with_as_many_records_as_were_read_is_found_while_there_is_nothing_to_read() -> None:
    brokers = Brokers(fail=False)
    brokers.check({A: 100})
    brokers.recreate("orders", end=100)
    brokers.check({A: 100}, after_ms=TOPICS_MS - 1)
    assert brokers.requests == [ev.ReadLogEnds(ends=(A,))]
    brokers.check({A: 100}, after_ms=1)
    assert brokers.detector.has_suspicions
    (logged,) = brokers.check({A: 100}, after_ms=GRACE_MS)
    assert "topic orders was deleted and recreated" in logged and moved(brokers.detector) == {A: 0}


def test_topic_id_is_requested_when_there_are_records_to_read() -> None:
    brokers = Brokers()
    brokers.check({A: 100})
    brokers.check({A: 90})
    assert brokers.requests == [ev.ReadLogEnds(ends=(A,)), ev.ReadLogEnds(topics=("orders",))]
    assert (brokers.error(), brokers.detector.records_missing, brokers.detector.has_suspicions) == (None, None, False)


# --- missing topics --------------------------------------------------------------------------------------------------


@pytest.mark.proves("G10", level="core")
def test_missing_topic_is_an_error_after_the_grace_period() -> None:
    brokers = Brokers()
    brokers.check({A: 100})
    del brokers.ids["orders"], brokers.ends[A]
    brokers.check({A: 100})
    assert brokers.error() is None and brokers.detector.has_suspicions
    brokers.check({A: 100}, after_ms=GRACE_MS - 1)
    assert brokers.error() is None
    brokers.check({A: 100}, after_ms=1)
    error = brokers.error()
    assert isinstance(error, TopicMissing)
    assert error.fields == {"topics": ["orders"]}
    assert "topic orders does not exist any more. Remove it from the subscription" in str(error)


@pytest.mark.parametrize("found_missing", [True, False])
def test_missing_topic_is_found_after_its_partitions_are_revoked(found_missing: bool) -> None:
    brokers = Brokers()
    brokers.check({A: 100, OTHER: 100})
    del brokers.ids["orders"], brokers.ends[A]
    if found_missing:
        brokers.check({A: 100, OTHER: 100})
    brokers.check({OTHER: 100}, after_ms=GRACE_MS - 1)
    assert brokers.error() is None and brokers.detector.has_suspicions
    brokers.check({}, after_ms=1 if found_missing else GRACE_MS)
    assert isinstance(brokers.error(), TopicMissing)


def test_topic_that_moves_to_another_member_is_requested_once() -> None:
    brokers = Brokers()
    brokers.check({A: 100, OTHER: 100})
    brokers.check({OTHER: 100})
    assert brokers.requests == [ev.ReadLogEnds(ends=(OTHER,)), ev.ReadLogEnds(topics=("orders", "payments"))]
    brokers.check({OTHER: 100})
    assert brokers.requests == [ev.ReadLogEnds(ends=(OTHER,))]
    assert brokers.error() is None and not brokers.detector.has_suspicions


def test_revoked_topic_is_not_checked_for_long() -> None:
    for comes_back in (True, False):
        brokers = Brokers(fail=False)
        id_ = brokers.ids.pop("orders")
        brokers.check({A: 90, OTHER: 100})
        if comes_back:
            brokers.ids["orders"] = f"{id_}-again"
        logged = [text for _ in range(3) for text in brokers.check({OTHER: 100}, after_ms=GRACE_MS)]
        assert logged == (
            [] if comes_back else ["topic orders does not exist any more; the query continues without it"]
        )
        assert brokers.requests == [ev.ReadLogEnds(ends=(OTHER,))] and not brokers.detector.has_suspicions


def test_grace_period_starts_again_after_a_topic_is_back() -> None:
    brokers = Brokers()
    id_ = brokers.ids.pop("orders")
    brokers.check({A: 90})
    brokers.ids["orders"] = id_
    brokers.check({A: 90})
    assert not brokers.detector.has_suspicions
    del brokers.ids["orders"]
    brokers.check({A: 90}, after_ms=GRACE_MS)
    assert brokers.error() is None and brokers.detector.has_suspicions


def test_missing_topic_is_one_warning_without_failOnDataLoss() -> None:
    brokers = Brokers(fail=False)
    del brokers.ids["orders"], brokers.ends[A]
    logged = [text for _ in range(5) for text in brokers.check({A: 100, OTHER: 90}, after_ms=GRACE_MS)]
    assert logged == ["topic orders does not exist any more; the query continues without it"]
    assert brokers.error() is None and not brokers.detector.has_suspicions
    assert brokers.detector.is_complete(SILENT_MS_MAX)  # the check does not wait for its partitions


# --- recreated topics ------------------------------------------------------------------------------------------------


def test_recreated_topic_is_data_loss() -> None:
    brokers = Brokers()
    brokers.check({A: 100})
    brokers.recreate("orders")
    brokers.confirm({A: 100})
    error = brokers.error()
    assert isinstance(error, DataLoss)
    assert "topic orders was deleted and recreated, its old records are lost" in str(error)
    assert error.fields == {"topic": "orders", "partition": 0, "expected": 100, "available": 10}


def test_topic_recreated_between_two_runs_is_found_by_the_id_in_the_checkpoint() -> None:
    brokers = Brokers()
    brokers.detector.topic_ids = {"orders": "id-in-the-checkpoint"}
    brokers.confirm({A: 5})
    assert isinstance(brokers.error(), DataLoss)


def test_recreated_topic_continues_at_its_first_record_without_failOnDataLoss() -> None:
    brokers = Brokers(fail=False)
    brokers.check({A: 90, B: 100, OTHER: 100})
    brokers.recreate("orders")
    brokers.firsts |= {A: 2, B: 3}
    logged = brokers.confirm({A: 90, B: 100, OTHER: 100})
    assert brokers.detector.records_lost == 10
    assert logged == ["data loss: topic orders was deleted and recreated, its old records are lost"]
    assert moved(brokers.detector) == {A: 2, B: 3}
    assert (
        brokers.detector.records_missing is not None
        and "continues with its new records" in brokers.detector.records_missing.reason
    )
    assert brokers.detector.topic_ids["orders"] == "id-1-again"
    assert brokers.check({A: 2, B: 3, OTHER: 100}) == []
    assert brokers.detector.records_missing is None


def test_partition_of_a_recreated_topic_without_a_leader_starts_at_its_first_record_when_it_has_one() -> None:
    """The others are read at once."""
    brokers = Brokers(fail=False)
    brokers.check({A: 100, B: 4})
    brokers.recreate("orders")
    del brokers.firsts[B], brokers.ends[B]
    brokers.confirm({A: 100, B: 4})
    assert moved(brokers.detector) == {A: 0, B: 0}
    assert brokers.check({A: 0, B: 0}) == []
    assert brokers.detector.ends == {A: 10}
    assert not brokers.detector.is_complete(SILENT_MS_MAX) and brokers.detector.is_complete(100)
    brokers.firsts[B], brokers.ends[B] = 3, 10
    (logged,) = brokers.check({A: 10, B: 0})
    assert "orders-1 from 0 on are lost: it starts at 3 now" in logged and moved(brokers.detector) == {B: 3}


def test_nothing_is_read_of_a_topic_with_another_id_before_its_first_record_is_known() -> None:
    """It may be recreated after its ends were read, so they are those of the deleted topic."""
    brokers = Brokers(fail=False)
    brokers.check({A: 90, OTHER: 90})
    brokers.ids["orders"] = "id-new"
    brokers.check({A: 90, OTHER: 90})
    assert (moved(brokers.detector), brokers.detector.ends) == ({}, {OTHER: 100})
    brokers.check({A: 90, OTHER: 100}, after_ms=GRACE_MS)
    assert (moved(brokers.detector), brokers.detector.ends) == ({A: 0}, {OTHER: 100})


@pytest.mark.proves("G10", level="core")
@pytest.mark.parametrize("fail", [True, False])
def test_a_broker_that_does_not_know_yet_that_a_topic_was_recreated_is_not_believed(fail: bool) -> None:
    """Its answers have the id of the deleted topic, and come between those of other brokers."""
    brokers = Brokers(fail=fail)
    brokers.check({A: 90})
    brokers.firsts[A], brokers.log_ends[A] = 95, 80
    for _ in range(5):
        brokers.ids["orders"] = "id-0"
        assert brokers.check({A: 90}, after_ms=GRACE_MS) == [] and brokers.detector.ends == {}
        brokers.ids["orders"] = "id-1"
        assert brokers.check({A: 90}) == [] and brokers.detector.ends == {A: 100}
    assert (brokers.error(), brokers.detector.records_missing) == (None, None)


def test_a_log_that_grows_below_the_position_is_reported_once() -> None:
    brokers = Brokers(fail=False)
    warnings = []
    for end in range(10, 20):
        brokers.shrink(A, end)
        warnings += brokers.check({A: 1_000}, after_ms=GRACE_MS)
    assert len(warnings) == 1
    brokers.shrink(A, 1_000)
    brokers.check({A: 1_000})
    brokers.shrink(A, 20)
    assert [len(brokers.check({A: 1_000}, after_ms=GRACE_MS)) for _ in range(3)] == [0, 1, 0]


def test_empty_topic_id_is_ignored() -> None:
    brokers = Brokers()
    brokers.check({A: 90})
    brokers.ids["orders"] = ""
    brokers.check({A: 90})
    assert (brokers.error(), brokers.detector.records_missing, brokers.detector.has_suspicions) == (None, None, False)
    assert brokers.detector.topic_ids == {"orders": "id-1"}
    brokers.ids["orders"] = "id-1-again"
    brokers.confirm({A: 90})
    assert isinstance(brokers.error(), DataLoss)


# --- deleted records -------------------------------------------------------------------------------------------------


def test_new_partition_with_deleted_records_is_data_loss() -> None:
    brokers = Brokers()
    brokers.firsts[A] = 30
    brokers.check({A: 20, B: 20})
    error = brokers.error()
    assert isinstance(error, DataLoss)
    assert "the records of orders-0 from 20 on are lost: it starts at 30 now" in str(error)
    assert error.fields == {"topic": "orders", "partition": 0, "expected": 20, "available": 30}


def test_records_that_a_partition_lost_are_counted_once_although_it_was_revoked_during_the_check() -> None:
    brokers = Brokers(fail=False)
    brokers.firsts[A] = 30
    brokers.check({A: 20, B: 20}, revoked=A)
    assert (brokers.detector.records_lost, moved(brokers.detector)) == (0, {})
    brokers.check({B: 20})
    brokers.check({A: 20, B: 20})
    assert (brokers.detector.records_lost, moved(brokers.detector)) == (10, {A: 30})


def test_new_partition_continues_at_its_first_record_without_failOnDataLoss() -> None:
    brokers = Brokers(fail=False)
    brokers.firsts[A] = 30
    logged = brokers.check({A: 20, B: 20})
    assert logged == ["data loss: the records of orders-0 from 20 on are lost: it starts at 30 now"]
    assert moved(brokers.detector) == {A: 30}
    assert brokers.detector.records_missing is not None
    assert brokers.detector.records_missing.reason == "1 partitions continue at their first record"
    assert brokers.detector.records_lost == 10


def test_missing_first_record_is_requested_again() -> None:
    brokers = Brokers()
    del brokers.firsts[A]
    brokers.check({A: 20, B: 20})
    assert brokers.error() is None
    brokers.firsts[A] = 30
    brokers.check({A: 20, B: 20})
    assert brokers.requests[1].firsts == (A,)
    assert isinstance(brokers.error(), DataLoss)


def test_partition_is_checked_again_when_it_is_assigned_again() -> None:
    brokers = Brokers()
    brokers.check({A: 100, B: 100})
    brokers.check({B: 100})
    brokers.firsts[A] = 30
    brokers.check({A: 20, B: 100})
    assert isinstance(brokers.error(), DataLoss)


def test_short_log_is_data_loss_after_the_grace_period() -> None:
    brokers = Brokers()
    brokers.check({A: 100})
    brokers.shrink(A, 80)
    brokers.check({A: 100})
    assert brokers.requests[1].log_ends == (A,)
    assert brokers.error() is None and brokers.detector.has_suspicions
    brokers.check({A: 100}, after_ms=GRACE_MS - 1)
    assert brokers.error() is None and brokers.detector.has_suspicions
    brokers.check({A: 100}, after_ms=1)
    error = brokers.error()
    assert isinstance(error, DataLoss)
    assert "orders-0 ends at 80, before the position 100: its last records are lost, and new records below" in str(
        error
    )
    assert """--group GROUP --to-offsets '{"orders": {"0": 80}}' --execute`""" in str(error)
    assert error.fields == {"topic": "orders", "partition": 0, "expected": 100, "available": 80}


def test_last_stable_offset_below_the_position_is_no_data_loss() -> None:
    """A new leader may report that, while the log itself has its old length."""
    brokers = Brokers()
    brokers.ends[A] = 80
    for _ in range(3):
        brokers.check({A: 100}, after_ms=GRACE_MS)
        assert (brokers.error(), brokers.detector.has_suspicions) == (None, False)


def test_short_log_is_one_warning_without_failOnDataLoss() -> None:
    brokers = Brokers(fail=False)
    brokers.shrink(A, 80)
    logged = [text for _ in range(5) for text in brokers.check({A: 100}, after_ms=GRACE_MS)]
    text = (
        "orders-0 ends at 80, before the position 100: its last records are lost, and new records below 100 are skipped"
    )
    assert logged == [f"data loss: {text}"]
    assert not brokers.detector.has_suspicions


def test_suspicion_ends_when_the_log_has_grown_or_the_partition_is_revoked() -> None:
    for moment in ("long enough", "left"):
        brokers = Brokers()
        brokers.shrink(A, 80)
        brokers.check({A: 100, B: 100})
        if moment == "left":
            brokers.check({B: 100})
        else:
            brokers.shrink(A, 100)
            brokers.check({A: 100, B: 100})
        assert not brokers.detector.has_suspicions
        brokers.shrink(A, 80)
        brokers.check({A: 100, B: 100}, after_ms=GRACE_MS)
        assert brokers.error() is None and brokers.detector.has_suspicions


def test_suspicion_ends_when_the_partition_comes_back_at_a_position_that_the_leader_has() -> None:
    """It was lost and came back between two checks, at the commit of another stream. The first low answer of a later
    leader is a suspicion again."""
    brokers = read_up_to_100()
    brokers.elect(A, 4, has=60, end=300)
    brokers.check({A: 100})
    brokers.known_epochs.learn(committed(300, 4), {A: 300}.get, "s1")
    brokers.check({A: 300})
    brokers.elect(A, 5, has=250, end=310)
    brokers.check({A: 300}, after_ms=GRACE_MS)
    assert brokers.error() is None and brokers.detector.has_suspicions


# --- missing answers -------------------------------------------------------------------------------------------------


def test_check_without_an_end_is_incomplete_and_nothing_else() -> None:
    brokers = Brokers()
    brokers.check({A: 100, B: 100})
    assert brokers.detector.is_complete(SILENT_MS_MAX)
    del brokers.ends[A]
    for _ in range(3):
        brokers.check({A: 100, B: 100}, after_ms=GRACE_MS)
        assert (brokers.error(), brokers.detector.records_missing, brokers.detector.has_suspicions) == (
            None,
            None,
            False,
        )
        assert not brokers.detector.is_complete(SILENT_MS_MAX)


def test_missing_answer_neither_confirms_nor_ends_a_suspicion() -> None:
    brokers = Brokers()
    brokers.shrink(A, 80)
    brokers.check({A: 100})
    del brokers.ends[A], brokers.log_ends[A]
    brokers.check({A: 100}, after_ms=GRACE_MS)
    assert brokers.error() is None
    brokers.shrink(A, 80)
    brokers.check({A: 100})
    assert isinstance(brokers.error(), DataLoss)


def test_partition_without_a_leader_is_logged_at_the_start_and_at_the_end() -> None:
    brokers, positions = Brokers(), {A: 50, B: 50}
    brokers.check(positions)
    del brokers.ends[B]
    assert brokers.check(positions) == []
    (text,) = brokers.check(positions, after_ms=SILENT_MS_MAX)
    assert "the end of 1 partitions, such as orders-1" in text
    assert brokers.check(positions, after_ms=SILENT_MS_MAX) == []
    assert brokers.detector.ends == {A: 100}
    brokers.ends[B] = 100
    assert brokers.check(positions) == ["the brokers report the end of every partition again"]
    assert brokers.check(positions) == []


# --- truncated logs --------------------------------------------------------------------------------------------------


def read_up_to_100(*, fail: bool = True) -> Brokers:
    """A was planned up to 100, which a leader of epoch 3 reported."""
    brokers = Brokers(fail=fail)
    brokers.check({A: 90})
    brokers.plan({A: (90, 100)})
    return brokers


def test_epoch_end_is_requested_only_from_a_new_leader() -> None:
    brokers = read_up_to_100()
    brokers.shrink(A, 200)
    brokers.check({A: 100})
    assert [request.epoch_ends for request in brokers.requests] == [{}, {}]
    brokers.elect(A, 4, has=150, end=200)
    brokers.check({A: 100})
    assert brokers.requests[1].epoch_ends == {A: 3}
    assert (brokers.error(), brokers.detector.ends, brokers.detector.has_suspicions) == (None, {A: 200}, False)
    brokers.check({A: 100})
    assert [request.epoch_ends for request in brokers.requests] == [{}, {}], "the new leader is confirmed"


def test_truncated_log_that_has_grown_again_is_data_loss_after_the_grace_period() -> None:
    brokers = read_up_to_100()
    brokers.elect(A, 5, has=60, end=200)
    brokers.check({A: 100, B: 90})
    assert brokers.error() is None and brokers.detector.has_suspicions
    assert brokers.detector.ends == {B: 100}, "A is not read while the suspicion is open"
    brokers.check({A: 100, B: 90}, after_ms=GRACE_MS)
    error = brokers.error()
    assert isinstance(error, DataLoss)
    assert (error.fields["topic"], error.fields["partition"]) == ("orders", 0)
    assert (error.fields["expected"], error.fields["available"]) == (100, 60)
    assert "the log of orders-0 was truncated at 60, below the position 100" in str(error)


@pytest.mark.parametrize(
    ("end", "first", "continues_at"),
    [(200, 0, 60), (70, 0, 60), (200, 80, 80)],
    ids=["grown again", "still shorter", "first records deleted"],
)
def test_partition_continues_where_its_log_was_truncated_without_failOnDataLoss(
    end: int, first: int, continues_at: int
) -> None:
    brokers = read_up_to_100(fail=False)
    brokers.elect(A, 5, has=60, end=end)
    brokers.firsts[A] = first
    brokers.check({A: 100})
    (logged,) = brokers.check({A: 100}, after_ms=GRACE_MS)
    assert f"truncated at {continues_at}" in logged and f"The log ends at {end} now" in logged
    found = brokers.detector.records_missing
    assert found is not None and found.offsets == {A: continues_at} and found.truncated == {A: 3}
    brokers.plan({A: (continues_at, end)})
    assert brokers.check({A: end}) == [] and brokers.detector.records_missing is None


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("limit", [60, 50], ids=["at once", "in two batches"])
def test_a_partition_that_was_moved_back_is_read_up_to_the_truncation_first(limit: int, restarts: bool) -> None:
    """Another consumer's commit moved it from 100 to 40. The sink has the records up to 100, and those from 60 on are
    others now."""
    brokers = read_up_to_100(fail=False)
    brokers.elect(A, 4, has=60, end=200)
    brokers.check({A: 40})
    assert brokers.detector.ends == {}, "a suspicion"
    for start, end in [(40, limit), (limit, 60)]:
        if start < end:
            brokers.check({A: start}, after_ms=GRACE_MS)
            assert (brokers.detector.ends, brokers.detector.records_missing) == ({A: 60}, None)
            brokers.plan({A: (start, end)})
    if restarts:
        brokers.restart()
        brokers.check({A: 60})
    (logged,) = brokers.check({A: 60}, after_ms=GRACE_MS)
    assert "truncated at 60, below the position 100" in logged
    found = brokers.detector.records_missing
    assert found is not None and found.offsets == {A: 60} and found.truncated == {A: 3}
    brokers.plan({A: (60, 200)})
    assert brokers.check({A: 200}) == [] and brokers.detector.records_missing is None


def test_G4_partition_that_was_moved_back_while_it_had_no_leader_is_read_up_to_the_truncation_by_the_next_run() -> None:
    """No plan of this run compares it with a leader, and the next one would take the records from 60 on for those that
    the sink has."""
    brokers = read_up_to_100(fail=False)
    brokers.check({B: 90})
    brokers.plan({A: (40, 40), B: (90, 90)})
    brokers.elect(A, 4, has=60, end=200)
    brokers.restart()
    brokers.check({A: 40})
    assert brokers.detector.ends == {}, "a suspicion"
    brokers.check({A: 40}, after_ms=GRACE_MS)
    assert (brokers.detector.ends, brokers.detector.records_missing) == ({A: 60}, None)


def test_G4_start_at_an_end_of_the_log_is_compared_with_the_next_leader() -> None:
    """It truncated the log before a batch read the partition."""
    brokers = Brokers(fail=False)
    starts = ev.StartsResolved(offsets={A: 100, B: 90}, leader_epochs={A: 3, B: 3})
    brokers.known_epochs.learn_starts(starts, {A: 100, B: 95}.get)
    brokers.elect(A, 4, has=60, end=200)
    brokers.check({A: 100, B: 95})
    assert brokers.requests[1].epoch_ends == {A: 3}, "B does not start where the log ended"
    brokers.check({A: 100, B: 95}, after_ms=GRACE_MS)
    assert moved(brokers.detector) == {A: 60}


@pytest.mark.proves("G10", level="core")
def test_truncated_log_is_found_in_the_check_that_finds_a_recreated_topic() -> None:
    brokers = read_up_to_100(fail=False)
    brokers.check({A: 100, OTHER: 90})
    brokers.elect(A, 4, has=60, end=200)
    brokers.recreate("payments")
    brokers.check({A: 100, OTHER: 90})
    truncated, recreated = brokers.check({A: 100, OTHER: 90}, after_ms=GRACE_MS)
    assert moved(brokers.detector) == {A: 60, OTHER: 0}
    assert "the log of orders-0 was truncated at 60" in truncated and "topic payments" in recreated


def test_unread_offsets_of_a_truncated_log_are_counted() -> None:
    brokers = read_up_to_100(fail=False)
    brokers.shrink(A, 130)
    brokers.check({A: 100})
    brokers.elect(A, 5, has=60, end=61)
    brokers.check({A: 100})
    brokers.check({A: 100}, after_ms=GRACE_MS)
    assert brokers.detector.records_lost == 30


def test_partition_is_not_read_before_its_new_leader_has_answered() -> None:
    brokers = read_up_to_100()
    brokers.elect(A, 4, has=None, end=200)
    del brokers.epoch_ends[A]
    brokers.check({A: 100})
    assert brokers.detector.ends == {} and not brokers.detector.is_complete(SILENT_MS_MAX)
    brokers.epoch_ends[A] = 150
    brokers.check({A: 100})
    assert brokers.detector.ends == {A: 200}


def test_leader_with_an_earlier_epoch_is_doubted_anew_when_its_partition_is_assigned_again() -> None:
    """Meanwhile it may have learned that it was replaced."""
    brokers = read_up_to_100()
    brokers.elect(A, 2, has=100, end=200)
    for _ in range(2):
        (warning,) = brokers.check({A: 100, B: 100}, after_ms=EARLIER_MS)
        assert "a former leader answered for 1 partitions, such as orders-0" in warning
        assert brokers.detector.ends == {B: 100}
        brokers.check({B: 100})


def test_log_that_may_be_truncated_is_not_reported_as_short() -> None:
    brokers = read_up_to_100()
    brokers.elect(A, 5, has=60, end=80)
    brokers.check({A: 100})
    del brokers.epoch_ends[A]
    assert brokers.check({A: 100}, after_ms=GRACE_MS) == []
    assert brokers.error() is None


def test_new_leader_without_an_epoch_end_is_accepted() -> None:
    brokers = read_up_to_100()
    brokers.elect(A, 4, has=None, end=200)
    brokers.check({A: 100})
    assert (brokers.error(), brokers.detector.ends) == (None, {A: 200})


def test_position_beyond_the_plan_has_no_known_epoch() -> None:
    brokers = read_up_to_100()
    brokers.elect(A, 4, has=60, end=200)
    brokers.check({A: 150})
    assert brokers.requests[1].epoch_ends == {}
    assert brokers.detector.leader_epochs({A: 150}) == {A: 4}


def test_epochs_of_a_recreated_topic_start_again() -> None:
    brokers = read_up_to_100(fail=False)
    brokers.recreate("orders", end=10)
    brokers.leaders[A] = 0
    brokers.confirm({A: 100})
    assert moved(brokers.detector) == {A: 0}
    brokers.check({A: 0})
    assert brokers.requests[1].epoch_ends == {}


@pytest.mark.parametrize("has_ids", [True, False], ids=["", "brokers before 2.8"])
def test_epochs_start_again_after_a_reset(has_ids: bool) -> None:
    """Before the reset the topic may have been another one of that name."""
    brokers = read_up_to_100()
    if not has_ids:
        brokers.detector.topic_ids = {}
    brokers.leaders[A] = 0
    assert brokers.check({A: 100}, reset_number=1) == []


def test_a_reset_during_a_check_leaves_partitions_with_a_new_leader_open() -> None:
    brokers = read_up_to_100()
    brokers.elect(A, 4, has=60, end=200)
    brokers.reset_after_requests = 2
    brokers.check({A: 100})
    assert (brokers.error(), brokers.detector.ends) == (None, {})
    brokers.reset_after_requests = None
    brokers.check({A: 100}, reset_number=1)
    assert (brokers.error(), brokers.detector.ends) == (None, {A: 200})


def test_plan_has_the_epoch_of_the_leader_that_reported_its_end() -> None:
    brokers = read_up_to_100()
    assert brokers.detector.leader_epochs({A: 90}) == {A: 3}
    brokers.elect(A, 4, has=100, end=100)
    brokers.check({A: 100})
    assert brokers.detector.leader_epochs({A: 100}) == {A: 4}
    del brokers.ends[A]
    brokers.check({A: 100})
    assert brokers.detector.leader_epochs({A: 100}) == {A: 4}, "a missing answer keeps the known epoch"
    brokers.shrink(B, 50)
    brokers.check({B: 60})
    assert brokers.detector.leader_epochs({B: 60}) == {}, "a position beyond the end is not of this leader's log"


# --- epochs of committed offsets ------------------------------------------------------------------------------------


def committed(offset: int, epoch: int | None) -> dict[TopicPartition, ev.Committed | None]:
    return {A: ev.Committed(offset=offset, leader_epoch=epoch, stream="s2"), B: None}


def test_a_committed_offset_has_the_epoch_with_which_it_was_committed() -> None:
    """By another stream of the group. The plans of this stream know nothing of the partition."""
    brokers = Brokers()
    brokers.known_epochs.learn(committed(100, 2), {A: 100, B: 90}.get, "s1")
    brokers.elect(A, 4, has=60, end=200)
    brokers.check({A: 100, B: 90})
    assert brokers.requests[1].epoch_ends == {A: 2}
    brokers.check({A: 100, B: 90}, after_ms=GRACE_MS)
    assert "the log of orders-0 was truncated at 60, below the position 100" in str(brokers.error())


@pytest.mark.parametrize("epoch", [0, 5], ids=["none", "of an earlier leader"])
def test_the_epoch_of_a_foreign_commit_is_not_believed(epoch: int) -> None:
    """Some clients commit a wrong one: the leader of epoch 6 would seem to have truncated the log at 60."""
    brokers = read_up_to_100()
    foreign = {A: ev.Committed(offset=150, leader_epoch=epoch)}
    brokers.known_epochs.learn(foreign, {A: 150}.get, "s1")
    assert brokers.known_epochs.of({A: 150}) == {}
    brokers.elect(A, 6, has=60, end=200)
    brokers.check({A: 150})
    assert brokers.requests[1].epoch_ends == {}
    assert (brokers.error(), brokers.detector.ends) == (None, {A: 200})


@pytest.mark.parametrize(
    ("offset", "epoch", "stream", "expected"),
    [(100, 5, "s1", 5), (90, 2, "s2", 3), (90, 5, "s2", 5), (90, 5, "s1", 3), (95, 5, "s2", 3), (90, None, "s2", 3)],
    ids=["newer", "older", "newer below a plan", "below this stream's plan", "not the position", "without epoch"],
)
def test_the_newest_known_epoch_of_a_position_counts(
    offset: int, epoch: int | None, stream: str, expected: int
) -> None:
    """A plan up to 100 has epoch 3. Whoever committed with a later epoch has compared the log since; but another stream
    ("s2", as seen from "s1") only up to where it was."""
    brokers = read_up_to_100()
    at = 90 if offset == 95 else offset
    brokers.known_epochs.learn(committed(offset, epoch), {A: at}.get, stream)
    assert brokers.known_epochs.of({A: at}) == {A: expected}


def test_the_epoch_of_an_uncommitted_position_is_in_the_offset() -> None:
    """The next run needs it if it gets the partition."""
    brokers = read_up_to_100()
    del brokers.ends[A]
    brokers.check({B: 100})
    offset = StreamOffset(
        group="etl",
        stream="s",
        seq=1,
        ranges={B: (100, 100)},
        uncommitted={A: 100},
        leader_epochs=brokers.detector.leader_epochs({A: 100, B: 100}),
    )
    assert offset.leader_epochs == {A: 3, B: 3}
    next_run = Brokers()
    next_run.detector.restore(parse(offset.to_json()))
    assert next_run.known_epochs.of({A: 100, B: 100}) == {A: 3, B: 3}


@pytest.mark.parametrize("fail", [True, False])
@pytest.mark.parametrize("epoch_end", [None, 200])
def test_an_answer_of_a_former_leader_makes_no_truncation(fail: bool, epoch_end: int | None) -> None:
    """It has the records of epoch 7 up to 80; those from 80 on were written in epoch 8, and are read up to 100. The
    epoch's end may be the answer of the present leader."""
    brokers = Brokers(fail=fail)
    brokers.leaders[A] = 8
    brokers.check({A: 0})
    brokers.plan({A: (0, 100)})
    brokers.elect(A, 7, epoch_end, 80)
    (logged,) = brokers.check({A: 100})
    assert "a former leader answered for 1 partitions, such as orders-0; they wait" in logged
    assert brokers.check({A: 100}, after_ms=GRACE_MS) == []
    assert A not in brokers.detector.ends, "nothing is read from it"
    brokers.elect(A, 8, 80, 200)
    for _ in range(2):
        assert brokers.check({A: 100}, after_ms=GRACE_MS) == []
    assert (brokers.error(), moved(brokers.detector), brokers.detector.ends) == (None, {}, {A: 200})


def test_an_earlier_leader_epoch_is_believed_after_a_while() -> None:
    """The known one is of a deleted topic; a commit names a topic without its id."""
    brokers = Brokers(fail=False)
    brokers.leaders[A] = 8
    brokers.check({A: 0})
    brokers.plan({A: (0, 100)})
    brokers.elect(A, 0, None, 120)
    brokers.check({A: 100})
    assert brokers.detector.ends == {}
    brokers.check({A: 100}, after_ms=EARLIER_MS)
    assert brokers.detector.ends == {A: 120}


def test_a_former_leader_is_doubted_again_after_the_present_one_has_answered() -> None:
    """Also if that answer was the end that is read already, so that nothing else was requested."""
    brokers = Brokers(fail=False)
    brokers.leaders[A] = 8
    brokers.check({A: 0})
    brokers.plan({A: (0, 100)})
    for _ in range(2):
        brokers.elect(A, 7, None, 80)
        brokers.check({A: 100}, after_ms=EARLIER_MS)
        assert brokers.detector.ends == {}
        brokers.elect(A, 8, None, 100)
        assert brokers.check({A: 100}) == [] and brokers.detector.ends == {A: 100}


class Failing(RunHarness):
    """The next request for these topics, or for first records alone, fails."""

    fails = ""

    def answer(self, step: ev.Step) -> ev.Event:
        is_due = isinstance(step, ev.ReadLogEnds) and {"topics": step.topics, "firsts": not step.topics and step.firsts}
        if is_due and is_due.get(self.fails):
            self.fails = ""
            return ev.RequestFailed(error=BrokerUnavailable("no broker", servers="b:9092", waited_ms=1))
        return super().answer(step)


@pytest.mark.parametrize("fails", ["", "topics"])
def test_partition_without_a_leader_is_logged_although_a_later_request_of_the_check_fails(fails: str) -> None:
    run = Failing()
    run.ends = {A: 10, B: 10}
    run.batch()
    run.leaderless, run.ends[A] = {B}, 11
    run.batch()
    run.pass_time(SILENT_MS_MAX)
    run.fails, run.ends[A] = fails, 12
    run.batch()
    assert len([text for text in run.warned() if "no broker reports the end of 1 partitions" in text]) == 1


def test_loss_is_logged_once_although_a_later_request_of_the_check_fails_again_and_again() -> None:
    run = Failing(topics={"orders": 1}, fail_on_data_loss=False)
    run.ends = {A: 100}
    run.batch()
    run.latest()
    run.ids, run.ends = {"orders": "id-new"}, {A: 5}
    run.latest()
    run.pass_time(GRACE_MS)
    answer = run.answer
    failures = [0]

    def fails_ten_times(step: ev.Step) -> ev.Event:
        if isinstance(step, ev.ReadLogEnds) and step.firsts and not step.topics and failures[0] < 10:
            failures[0], run.fails = failures[0] + 1, "firsts"
        return answer(step)

    run.answer = fails_ten_times  # type: ignore[method-assign]
    run.latest()
    assert failures == [10]
    assert len([text for text in run.warned() if text.startswith("data loss: ")]) == 1


@pytest.mark.parametrize("fails", ["", "firsts"])
def test_missing_topic_is_forgotten_although_a_later_request_of_the_check_fails(fails: str) -> None:
    """It asks where a recreated topic starts."""
    run = Failing(topics={"orders": 1, "payments": 1}, fail_on_data_loss=False)
    run.ends = {A: 10, OTHER: 10}
    run.batch()
    run.latest()
    run.pass_time(100)
    run.ids, run.ends = {"orders": "id-new"}, {A: 5}
    run.lost(OTHER)
    run.latest()
    run.pass_time(GRACE_MS)
    run.fails = fails
    run.latest()
    assert not run.fails
    assert any("topic payments does not exist any more" in text for text in run.warned())
    assert OTHER not in set(run.run.partitions.remembered())


class Epochs(RunHarness):
    """The leader of A has an epoch; ``hook`` runs when it reports where an epoch ends."""

    leader = 8
    has: Mapping[int, int] = {}  # where the records of each epoch end
    hook: Callable[[], None] | None = None

    def answer(self, step: ev.Step) -> ev.Event:
        found = super().answer(step)
        if isinstance(step, ev.ReadLogEnds) and isinstance(found, ev.LogEndsRead):
            found = replace(
                found,
                leader_epochs={tp: self.leader if tp == A else 3 for tp in found.ends},
                epoch_ends={tp: self.has[epoch] for tp, epoch in step.epoch_ends.items()},
            )
            if step.epoch_ends and self.hook is not None:
                self.hook()
        return found


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_truncation_is_found_again_if_the_partition_is_lost_during_the_check(is_lost: bool) -> None:
    run = Epochs(fail_on_data_loss=False)
    run.ends = {A: 50, B: 5}
    for _ in range(2):
        run.batch()
    run.pass_time(100)
    run.silent = {ev.CommitOffsets}  # the commit of 100 is not answered
    run.ends = {A: 100, B: 5}
    run.batch()
    run.leader, run.has, run.ends = 9, {8: 60, 9: 120}, {A: 120, B: 6}
    run.batch()  # the suspicion
    lost: list[TopicPartition] = []

    def lose() -> None:
        if is_lost and not lost:
            lost.append(A)
            run.lost(A)

    run.hook = lose
    read = []
    for _ in range(4):
        run.ends[B] += 1
        run.pass_time(GRACE_MS)
        read.append(run.batch().ranges.get(A))
        if lost == [A]:
            run.assigned(A)
            lost.append(A)
            run.pass_time(100)
    assert (60, 120) in read


def test_G4_a_position_where_the_log_was_truncated_survives_a_crash_before_its_commit() -> None:
    """The partition is lost then, and the next batch reads others. Kafka has the position from before, without an
    epoch: from there on, records of the present log would be skipped."""
    run = Epochs(fail_on_data_loss=False)
    run.committed = {A: ev.Committed(offset=100), B: ev.Committed(offset=5)}
    run.ends = {A: 100, B: 6}
    run.batch()
    run.pass_time(100)
    run.ends[B] = 7
    run.batch()
    run.leader, run.has, run.ends = 9, {8: 80}, {A: 80, B: 8}
    run.batch()
    run.pass_time(GRACE_MS)
    run.silent, run.ends[B] = {ev.CommitOffsets}, 9
    assert run.batch().truncated_after == {A: 8}
    run.lost(A)
    run.feed(ev.OffsetCommitFailed(reason="NOT_COORDINATOR"))
    run.ends[B] = 10
    planned = run.batch()
    assert (planned.uncommitted, planned.truncated_after) == ({A: 80}, {A: 8})

    again = Epochs(fail_on_data_loss=False)
    again.start, again.committed = parse(planned.to_json()), run.committed
    assert again.committed[A].offset == 100
    again.leader, again.has, again.ends = 9, {8: 80, 9: 130}, {A: 130, B: 10}
    assert again.batch().ranges[A] == (80, 130)


@pytest.mark.parametrize(
    ("known", "notes", "present", "former", "unclear"),
    [
        ({"orders": "id-2"}, {A: "id-1"}, [None], set(), {A}),
        ({"orders": "id-2"}, {A: "id-1"}, ["id-2"], set(), {A}),
        ({"orders": "id-2"}, {A: "id-1"}, ["id-1", "id-2"], set(), {A}),
        ({"orders": "id-2"}, {A: "id-1"}, ["id-1", "id-2", "id-1"], set(), {A}),
        ({"orders": "id-1"}, {A: "id-2"}, ["id-1", "id-2", "id-1"], set(), {A}),
        ({"orders": "id-2"}, {A: "id-1"}, ["id-2", "id-2"], {A}, set()),
        ({"orders": "id-1"}, {A: "id-2"}, ["id-1", "id-2"], set(), {A}),
        ({"orders": "id-1"}, {A: "id-2"}, ["id-2", "id-2"], set(), set()),
        ({"orders": "id-1"}, {A: "id-2"}, [""], set(), set()),
        ({}, {A: "id-1", B: "id-2"}, ["id-2", "id-2"], {A}, set()),
        ({}, {B: "id-1", A: "id-2"}, ["id-2", "id-2"], {B}, set()),
    ],
    ids=[
        "the present id is not known",
        "one answer",
        "a broker that did not know the new topic yet",
        "and again",
        "the same with a newer topic",
        "a commit of a deleted topic",
        "a broker that did not know the newest topic yet",
        "a newer topic",
        "brokers without ids",
        "a deleted topic's note first",
        "a deleted topic's note last",
    ],
)
@pytest.mark.parametrize("reset_number", [0, 1], ids=["", "after a reset that the sink has reported"])
def test_a_commit_with_another_topic_id_counts_as_the_present_id_says(
    known: dict[str, str],
    notes: dict[TopicPartition, str],
    present: list[str | None],
    former: set[TopicPartition],
    unclear: set[TopicPartition],
    reset_number: int,
) -> None:
    """The present id counts when two answers, two seconds apart, have the same. The checkpoint's ids say nothing of
    positions behind a reset."""
    detector = Brokers().detector
    detector.topic_ids = dict(known)
    offsets = {tp: ev.Committed(offset=50, topic_id=id_, reset_number=reset_number) for tp, id_ in notes.items()}
    found: tuple[set[TopicPartition], set[TopicPartition]] = set(), set()
    for n, id_ in enumerate(present):
        answer = ev.CommittedOffsetsRead(offsets=offsets, topic_ids={} if id_ is None else {"orders": id_})
        found = detector.compare_ids(answer, now_ms=n * GRACE_MS)
    is_void = bool(reset_number and known)
    assert found == ((set(), set()) if is_void else (former, unclear))
