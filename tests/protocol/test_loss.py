"""What the brokers say of the partitions of the next batch, and what of it means that records are gone."""

from collections.abc import Mapping

import pytest
from kit.harness import tps

from spark_group_source.errors import DataLoss, GroupError, TopicMissing
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import GRACE_MS, SILENT_MS_MAX, DataLossDetector
from spark_group_source.protocol.offsets import StreamOffset

A, B = tps("orders", 0, 1)
OTHER = tps("payments", 0)[0]

Offsets = Mapping[TopicPartition, int]


class Brokers:
    """Answers looks from dictionaries, and remembers the questions."""

    def __init__(self, *, fail: bool = True) -> None:
        self.lookout = DataLossDetector(fail_on_data_loss=fail)
        self.ends = {A: 100, B: 100, OTHER: 100}
        self.log_ends = dict(self.ends)
        self.firsts = dict.fromkeys(self.ends, 0)
        self.leaders = dict.fromkeys(self.ends, 3)
        self.epoch_ends: dict[TopicPartition, int | None] = {}
        self.ids = {"orders": "id-1", "payments": "id-2"}
        self.questions: list[ev.ReadLogEnds] = []
        self.now_ms = 10_000

    def look(self, positions: Offsets, *, after_ms: int = 100) -> list[str]:
        """One look. Returns what is to be said of it."""
        self.now_ms += after_ms
        question: ev.ReadLogEnds | None = self.lookout.begin(positions, self.now_ms)
        self.questions = []
        while question is not None:
            self.questions.append(question)
            question = self.lookout.take(
                ev.LogEndsRead(
                    ends={tp: self.ends[tp] for tp in question.ends if tp in self.ends},
                    leader_epochs={tp: self.leaders.get(tp, 3) for tp in question.ends if tp in self.ends},
                    epoch_ends={tp: self.epoch_ends[tp] for tp in question.epoch_ends if tp in self.epoch_ends},
                    firsts={tp: self.firsts[tp] for tp in question.firsts if tp in self.firsts},
                    log_ends={tp: self.log_ends[tp] for tp in question.log_ends if tp in self.log_ends},
                    topic_ids={name: self.ids[name] for name in question.topics if name in self.ids},
                    took_ms=3,
                )
            )
            assert len(self.questions) <= 3
        return self.lookout.warnings

    def error(self) -> GroupError | None:
        return self.lookout.error

    def plan(self, ranges: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """A batch is planned after the look: what the checkpoint remembers."""
        positions = {tp: start for tp, (start, _) in ranges.items()}
        epochs = self.lookout.leader_epochs(positions)
        self.lookout.heights.remember(StreamOffset(group="etl", ranges=ranges, leader_epochs=epochs))

    def elect(self, tp: TopicPartition, epoch: int, has: int | None, end: int) -> None:
        """Another leader, which has the records below ``has`` and goes on to ``end``."""
        self.leaders[tp], self.epoch_ends[tp] = epoch, has
        self.shrink(tp, end)

    def shrink(self, tp: TopicPartition, end: int) -> None:
        self.ends[tp] = self.log_ends[tp] = end

    def make_again(self, topic: str, end: int = 10) -> None:
        self.ids[topic] += "-again"
        for tp in [tp for tp in self.ends if tp.topic == topic]:
            self.shrink(tp, end)


def gone(lookout: DataLossDetector) -> Offsets:
    return {} if lookout.gone is None else lookout.gone.offsets


# --- the questions ---------------------------------------------------------------------------------------------------


def test_the_first_look_asks_everything_about_what_came_and_an_idle_one_only_the_ends() -> None:
    brokers = Brokers()
    brokers.look({A: 100, B: 90})
    assert brokers.questions == [ev.ReadLogEnds(ends=(A, B)), ev.ReadLogEnds(topics=("orders",), firsts=(A, B))]
    assert brokers.lookout.took_ms == 6
    brokers.look({A: 100, B: 100})
    assert brokers.questions == [ev.ReadLogEnds(ends=(A, B))]
    assert brokers.lookout.took_ms == 3
    assert brokers.lookout.ends == {A: 100, B: 100}


def test_where_there_is_something_to_read_it_asks_whether_it_is_the_same_topic() -> None:
    brokers = Brokers()
    brokers.look({A: 100})
    brokers.look({A: 90})
    assert brokers.questions == [ev.ReadLogEnds(ends=(A,)), ev.ReadLogEnds(topics=("orders",))]
    assert (brokers.error(), brokers.lookout.gone, brokers.lookout.suspects) == (None, None, False)


# --- topics that are missing -----------------------------------------------------------------------------------------


@pytest.mark.proves("G10", level="core")
def test_a_missing_topic_is_a_suspicion_first_and_believed_when_it_is_still_missing() -> None:
    brokers = Brokers()
    brokers.look({A: 100})
    del brokers.ids["orders"], brokers.ends[A]
    brokers.look({A: 100})
    assert brokers.error() is None and brokers.lookout.suspects
    brokers.look({A: 100}, after_ms=GRACE_MS - 1)
    assert brokers.error() is None
    brokers.look({A: 100}, after_ms=1)
    error = brokers.error()
    assert isinstance(error, TopicMissing)
    assert error.fields == {"topics": ["orders"]}
    assert "topic orders does not exist any more. Take it out of the subscription" in str(error)


@pytest.mark.parametrize("seen_missing", [True, False])
def test_a_topic_whose_partitions_the_group_gives_up_meanwhile_is_missed_all_the_same(seen_missing: bool) -> None:
    brokers = Brokers()
    brokers.look({A: 100, OTHER: 100})
    del brokers.ids["orders"], brokers.ends[A]
    if seen_missing:
        brokers.look({A: 100, OTHER: 100})
    brokers.look({OTHER: 100}, after_ms=GRACE_MS - 1)
    assert brokers.error() is None and brokers.lookout.suspects
    brokers.look({}, after_ms=1 if seen_missing else GRACE_MS)
    assert isinstance(brokers.error(), TopicMissing)


def test_a_topic_that_goes_to_another_member_is_asked_for_once() -> None:
    brokers = Brokers()
    brokers.look({A: 100, OTHER: 100})
    brokers.look({OTHER: 100})
    assert brokers.questions == [ev.ReadLogEnds(ends=(OTHER,)), ev.ReadLogEnds(topics=("orders", "payments"))]
    brokers.look({OTHER: 100})
    assert brokers.questions == [ev.ReadLogEnds(ends=(OTHER,))]
    assert brokers.error() is None and not brokers.lookout.suspects


def test_a_topic_that_was_given_away_and_missed_for_a_moment_is_forgotten() -> None:
    for comes_back in (True, False):
        brokers = Brokers(fail=False)
        id_ = brokers.ids.pop("orders")
        brokers.look({A: 90, OTHER: 100})
        if comes_back:
            brokers.ids["orders"] = f"{id_}-again"
        said = [text for _ in range(3) for text in brokers.look({OTHER: 100}, after_ms=GRACE_MS)]
        assert said == ([] if comes_back else ["topic orders does not exist any more; the query goes on without it"])
        assert brokers.questions == [ev.ReadLogEnds(ends=(OTHER,))] and not brokers.lookout.suspects


def test_a_topic_that_comes_back_is_suspected_anew_the_next_time() -> None:
    brokers = Brokers()
    id_ = brokers.ids.pop("orders")
    brokers.look({A: 90})
    brokers.ids["orders"] = id_
    brokers.look({A: 90})
    assert not brokers.lookout.suspects
    del brokers.ids["orders"]
    brokers.look({A: 90}, after_ms=GRACE_MS)
    assert brokers.error() is None and brokers.lookout.suspects


def test_without_failing_a_missing_topic_is_told_of_once() -> None:
    brokers = Brokers(fail=False)
    del brokers.ids["orders"], brokers.ends[A]
    said = [text for _ in range(5) for text in brokers.look({A: 100, OTHER: 90}, after_ms=GRACE_MS)]
    assert said == ["topic orders does not exist any more; the query goes on without it"]
    assert brokers.error() is None and not brokers.lookout.suspects
    assert brokers.lookout.complete  # its partitions are not waited for


# --- topics that were made again -------------------------------------------------------------------------------------


def test_a_topic_that_was_made_again_is_lost_data() -> None:
    brokers = Brokers()
    brokers.look({A: 100})
    brokers.make_again("orders")
    brokers.look({A: 100})
    error = brokers.error()
    assert isinstance(error, DataLoss)
    assert "topic orders was deleted and made again: its former records are gone" in str(error)
    assert error.fields == {"topic": "orders", "partition": 0, "expected": 100, "available": 10}


def test_a_topic_that_was_made_again_while_no_run_was_there_shows_by_the_checkpoints_id() -> None:
    brokers = Brokers()
    brokers.lookout.topic_ids = {"orders": "id-of-the-checkpoint"}
    brokers.look({A: 5})
    assert isinstance(brokers.error(), DataLoss)


def test_without_failing_a_topic_that_was_made_again_goes_on_at_its_new_beginning() -> None:
    brokers = Brokers(fail=False)
    brokers.look({A: 90, B: 100, OTHER: 100})
    brokers.make_again("orders")
    brokers.firsts |= {A: 2, B: 3}
    said = brokers.look({A: 90, B: 100, OTHER: 100})
    assert brokers.lookout.records_lost == 10
    assert said == ["data loss: topic orders was deleted and made again: its former records are gone"]
    assert gone(brokers.lookout) == {A: 2, B: 3}
    assert brokers.lookout.gone is not None and "its new ones follow" in brokers.lookout.gone.reason
    assert brokers.lookout.topic_ids["orders"] == "id-1-again"
    assert brokers.look({A: 2, B: 3, OTHER: 100}) == []
    assert brokers.lookout.gone is None


def test_a_beginning_that_was_not_told_is_asked_for_again_before_the_topic_is_read() -> None:
    brokers = Brokers(fail=False)
    brokers.look({A: 100, B: 4})
    brokers.make_again("orders")
    del brokers.firsts[B]
    brokers.look({A: 100, B: 4})
    assert gone(brokers.lookout) == {}
    assert brokers.lookout.ends == {}  # or B would be read on from the middle of the new topic
    assert not brokers.lookout.complete
    brokers.firsts[B] = 0
    brokers.look({A: 100, B: 4})
    assert gone(brokers.lookout) == {A: 0, B: 0}


def test_an_empty_id_concludes_nothing_and_does_not_replace_one() -> None:
    brokers = Brokers()
    brokers.look({A: 90})
    brokers.ids["orders"] = ""
    brokers.look({A: 90})
    assert (brokers.error(), brokers.lookout.gone, brokers.lookout.suspects) == (None, None, False)
    assert brokers.lookout.topic_ids == {"orders": "id-1"}
    brokers.ids["orders"] = "id-1-again"
    brokers.look({A: 90})
    assert isinstance(brokers.error(), DataLoss)


# --- records that are gone -------------------------------------------------------------------------------------------


def test_a_partition_whose_next_records_are_gone_when_it_comes_is_lost_data() -> None:
    brokers = Brokers()
    brokers.firsts[A] = 30
    brokers.look({A: 20, B: 20})
    error = brokers.error()
    assert isinstance(error, DataLoss)
    assert "the records of orders-0 from 20 on are gone: it begins at 30 now" in str(error)
    assert error.fields == {"topic": "orders", "partition": 0, "expected": 20, "available": 30}


def test_without_failing_it_goes_on_at_the_first_record_that_is_left() -> None:
    brokers = Brokers(fail=False)
    brokers.firsts[A] = 30
    said = brokers.look({A: 20, B: 20})
    assert said == ["data loss: the records of orders-0 from 20 on are gone: it begins at 30 now"]
    assert gone(brokers.lookout) == {A: 30}
    assert brokers.lookout.gone is not None
    assert brokers.lookout.gone.reason == "1 partitions go on at their first record that is left"
    assert brokers.lookout.records_lost == 10


def test_a_beginning_that_was_not_told_is_asked_for_again() -> None:
    brokers = Brokers()
    del brokers.firsts[A]
    brokers.look({A: 20, B: 20})
    assert brokers.error() is None
    brokers.firsts[A] = 30
    brokers.look({A: 20, B: 20})
    assert brokers.questions[1].firsts == (A,)
    assert isinstance(brokers.error(), DataLoss)


def test_a_partition_that_left_is_looked_at_again_when_it_comes_back() -> None:
    brokers = Brokers()
    brokers.look({A: 100, B: 100})
    brokers.look({B: 100})
    brokers.firsts[A] = 30
    brokers.look({A: 20, B: 100})
    assert isinstance(brokers.error(), DataLoss)


def test_a_log_that_is_shorter_than_what_was_read_of_it_is_a_suspicion_first() -> None:
    brokers = Brokers()
    brokers.look({A: 100})
    brokers.shrink(A, 80)
    brokers.look({A: 100})
    assert brokers.questions[1].log_ends == (A,)
    assert brokers.error() is None and brokers.lookout.suspects
    brokers.look({A: 100}, after_ms=GRACE_MS - 1)
    assert brokers.error() is None and brokers.lookout.suspects
    brokers.look({A: 100}, after_ms=1)
    error = brokers.error()
    assert isinstance(error, DataLoss)
    assert "orders-0 ends at 80, before the position 100: its last records were lost" in str(error)
    assert error.fields == {"topic": "orders", "partition": 0, "expected": 100, "available": 80}


def test_a_last_stable_offset_before_the_position_is_no_loss() -> None:
    """A leader that just changed may say so, while the log itself is as long as it was."""
    brokers = Brokers()
    brokers.ends[A] = 80
    for _ in range(3):
        brokers.look({A: 100}, after_ms=GRACE_MS)
        assert (brokers.error(), brokers.lookout.suspects) == (None, False)


def test_without_failing_a_short_log_is_told_of_once() -> None:
    brokers = Brokers(fail=False)
    brokers.shrink(A, 80)
    said = [text for _ in range(5) for text in brokers.look({A: 100}, after_ms=GRACE_MS)]
    assert said == ["data loss: orders-0 ends at 80, before the position 100: its last records were lost"]
    assert not brokers.lookout.suspects


def test_a_suspicion_ends_when_the_log_is_long_enough_or_the_partition_left() -> None:
    for moment in ("long enough", "left"):
        brokers = Brokers()
        brokers.shrink(A, 80)
        brokers.look({A: 100, B: 100})
        if moment == "left":
            brokers.look({B: 100})
        else:
            brokers.shrink(A, 100)
            brokers.look({A: 100, B: 100})
        assert not brokers.lookout.suspects
        brokers.shrink(A, 80)
        brokers.look({A: 100, B: 100}, after_ms=GRACE_MS)
        assert brokers.error() is None and brokers.lookout.suspects


# --- silence ---------------------------------------------------------------------------------------------------------


def test_an_end_that_was_not_told_concludes_nothing_but_that_the_look_is_not_complete() -> None:
    brokers = Brokers()
    brokers.look({A: 100, B: 100})
    assert brokers.lookout.complete
    del brokers.ends[A]
    for _ in range(3):
        brokers.look({A: 100, B: 100}, after_ms=GRACE_MS)
        assert (brokers.error(), brokers.lookout.gone, brokers.lookout.suspects) == (None, None, False)
        assert not brokers.lookout.complete


def test_silence_neither_confirms_a_suspicion_nor_ends_it() -> None:
    brokers = Brokers()
    brokers.shrink(A, 80)
    brokers.look({A: 100})
    del brokers.ends[A], brokers.log_ends[A]
    brokers.look({A: 100}, after_ms=GRACE_MS)
    assert brokers.error() is None
    brokers.shrink(A, 80)
    brokers.look({A: 100})
    assert isinstance(brokers.error(), DataLoss)


def test_a_partition_without_a_leader_is_told_of_once_when_it_lasts_and_when_it_is_over() -> None:
    brokers, positions = Brokers(), {A: 50, B: 50}
    brokers.look(positions)
    del brokers.ends[B]
    assert brokers.look(positions) == []
    (text,) = brokers.look(positions, after_ms=SILENT_MS_MAX)
    assert "where 1 partitions end, such as orders-1" in text
    assert brokers.look(positions, after_ms=SILENT_MS_MAX) == []
    assert brokers.lookout.ends == {A: 100}
    brokers.ends[B] = 100
    assert brokers.look(positions) == ["the end of every partition is told again"]
    assert brokers.look(positions) == []


# --- logs that were cut ----------------------------------------------------------------------------------------------


def read_up_to_100(*, fail: bool = True) -> Brokers:
    """A was planned up to 100, which a leader of epoch 3 told."""
    brokers = Brokers(fail=fail)
    brokers.look({A: 90})
    brokers.plan({A: (90, 100)})
    return brokers


def test_a_log_is_asked_for_only_when_its_leader_is_another_one() -> None:
    brokers = read_up_to_100()
    brokers.shrink(A, 200)
    brokers.look({A: 100})
    assert [question.epoch_ends for question in brokers.questions] == [{}, {}]
    brokers.elect(A, 4, has=150, end=200)
    brokers.look({A: 100})
    assert brokers.questions[1].epoch_ends == {A: 3}
    assert (brokers.error(), brokers.lookout.ends, brokers.lookout.suspects) == (None, {A: 200}, False)
    brokers.look({A: 100})
    assert [question.epoch_ends for question in brokers.questions] == [{}, {}], "it was proven"


def test_a_log_that_shrank_and_grew_again_is_lost_data_when_it_was_told_twice() -> None:
    brokers = read_up_to_100()
    brokers.elect(A, 5, has=60, end=200)
    brokers.look({A: 100, B: 90})
    assert brokers.error() is None and brokers.lookout.suspects
    assert brokers.lookout.ends == {B: 100}, "nothing of it is read while that is open"
    brokers.look({A: 100, B: 90}, after_ms=GRACE_MS)
    error = brokers.error()
    assert isinstance(error, DataLoss)
    assert (error.fields["topic"], error.fields["partition"]) == ("orders", 0)
    assert (error.fields["expected"], error.fields["available"]) == (100, 60)
    assert "the log of orders-0 was cut at 60, below the position 100" in str(error)


@pytest.mark.parametrize(
    ("end", "first", "goes_on"),
    [(200, 0, 60), (70, 0, 60), (200, 80, 80)],
    ids=["it grew again", "it is still shorter", "its beginning aged out"],
)
def test_without_failing_it_goes_on_where_the_log_was_cut(end: int, first: int, goes_on: int) -> None:
    brokers = read_up_to_100(fail=False)
    brokers.elect(A, 5, has=60, end=end)
    brokers.firsts[A] = first
    brokers.look({A: 100})
    (said,) = brokers.look({A: 100}, after_ms=GRACE_MS)
    assert f"cut at {goes_on}" in said and f"It ends at {end} now" in said
    found = brokers.lookout.gone
    assert found is not None and found.offsets == {A: goes_on} and found.truncated == {A}
    brokers.plan({A: (goes_on, end)})
    assert brokers.look({A: end}) == [] and brokers.lookout.gone is None


def test_offsets_that_were_seen_and_never_read_count_as_lost_when_their_log_is_cut() -> None:
    brokers = read_up_to_100(fail=False)
    brokers.shrink(A, 130)
    brokers.look({A: 100})
    brokers.elect(A, 5, has=60, end=61)
    brokers.look({A: 100})
    brokers.look({A: 100}, after_ms=GRACE_MS)
    assert brokers.lookout.records_lost == 30


def test_a_leader_that_was_not_heard_proves_nothing_and_nothing_is_read() -> None:
    brokers = read_up_to_100()
    brokers.elect(A, 4, has=None, end=200)
    del brokers.epoch_ends[A]
    brokers.look({A: 100})
    assert brokers.lookout.ends == {} and not brokers.lookout.complete
    brokers.epoch_ends[A] = 150
    brokers.look({A: 100})
    assert brokers.lookout.ends == {A: 200}


def test_a_leader_that_cannot_say_concludes_nothing() -> None:
    brokers = read_up_to_100()
    brokers.elect(A, 4, has=None, end=200)
    brokers.look({A: 100})
    assert (brokers.error(), brokers.lookout.ends) == (None, {A: 200})


def test_what_others_read_beyond_a_plan_is_of_no_known_leader() -> None:
    brokers = read_up_to_100()
    brokers.elect(A, 4, has=60, end=200)
    brokers.look({A: 150})
    assert brokers.questions[1].epoch_ends == {}
    assert brokers.lookout.leader_epochs({A: 150}) == {A: 4}


def test_the_epochs_of_a_topic_that_was_made_again_begin_anew() -> None:
    brokers = read_up_to_100(fail=False)
    brokers.make_again("orders", end=10)
    brokers.leaders[A] = 0
    brokers.look({A: 100})
    assert gone(brokers.lookout) == {A: 0}
    brokers.look({A: 0})
    assert brokers.questions[1].epoch_ends == {}


def test_a_plan_has_the_epoch_of_the_leader_that_told_its_end() -> None:
    brokers = read_up_to_100()
    assert brokers.lookout.leader_epochs({A: 90}) == {A: 3}
    brokers.elect(A, 4, has=100, end=100)
    brokers.look({A: 100})
    assert brokers.lookout.leader_epochs({A: 100}) == {A: 4}
    del brokers.ends[A]
    brokers.look({A: 100})
    assert brokers.lookout.leader_epochs({A: 100}) == {A: 4}, "who is silent keeps what is known"
    brokers.shrink(B, 50)
    brokers.look({B: 60})
    assert brokers.lookout.leader_epochs({B: 60}) == {}, "a position beyond the end is not of this leader's log"
