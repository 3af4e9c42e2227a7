"""What a task makes of each answer of a broker, with librdkafka itself and brokers that answer as the test says.

Nothing is lost on a client's word. Rows of the table wait at the same time, each with a cluster of its own.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
from confluent_kafka import Producer, TopicCollection
from confluent_kafka.admin import AdminClient
from kafka_words import await_until
from kit.fake_reader import FakeChunk, Message
from kit.mock_cluster import Api, MockCluster
from reading import read as read_batches

from spark_group_source.answers import Meaning, Request, meaning
from spark_group_source.errors import AccessDenied, DataLoss, GroupError, TopicMissing
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.reader import fetch, intake, range_reader, read_counts, read_errors, records, requests
from spark_group_source.reader.broker_checks import Patience
from spark_group_source.reader.records import Event
from spark_group_source.reader.requests import ANSWER_S_MAX, PendingRequest

TP = TopicPartition("orders", 0)
COUNT = 20
GRACE_S = 0.3
LONG_S = 300
"""A grace that no test outlives: what is believed at all then is believed too early."""
OUTAGE_S = 2.5
"""A deadline that an outage outlasts. Before it a first question about the brokers was not answered."""
DEADLINE_S = 60
"""Without any progress, on a machine that is busy."""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_errors, "GRACE_S", GRACE_S)
    monkeypatch.setattr(range_reader, "TRIAGE_AFTER_S", 0.1)
    monkeypatch.setattr(requests, "ANSWER_S_MAX", 1.0)


@pytest.fixture(autouse=True)
def no_client_is_kept() -> Iterator[None]:
    yield
    fetch.close_idle()


@contextmanager
def orders() -> Iterator[MockCluster]:
    with MockCluster() as made:
        made.create_topic("orders")
        produce(made)
        yield made


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with orders() as made:
        yield made
        fetch.close_idle()


def each(codes: Iterable[int], play: Callable[[MockCluster, int], None]) -> None:
    """Play all rows at once. What failed says of which."""

    def row(code: int) -> None:
        with orders() as cluster:
            play(cluster, code)

    with ThreadPoolExecutor(len(rows := list(codes))) as pool:
        played = {code: pool.submit(row, code) for code in rows}
    failed = {code: error for code, one in played.items() if (error := one.exception())}
    for code, error in failed.items():
        error.add_note(f"This was the row of {code}.")
    if failed:
        raise BaseExceptionGroup(f"the rows of {sorted(failed)}", list(failed.values()))


@contextmanager
def as_soon_as(holds: Callable[[], bool], call: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Something that happens while the block waits; it is over when the block ends."""

    def happen() -> None:
        await_until(holds, DEADLINE_S, what="the moment for what happens meanwhile")
        call(*arguments)

    with ThreadPoolExecutor(1) as pool:
        happening = pool.submit(happen)
        yield
        happening.result()


def over(wait_s: float) -> Callable[[], bool]:
    """Whether that time is over."""
    end_s = time.monotonic() + wait_s
    return lambda: time.monotonic() >= end_s


def produce(cluster: MockCluster, count: int = COUNT) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    for at in range(count):
        producer.produce("orders", b"%d" % at, partition=0)
    assert producer.flush(10) == 0


def make_anew(cluster: MockCluster, count: int = COUNT) -> None:
    cluster.delete_topic("orders")
    cluster.create_topic("orders")
    produce(cluster, count)


def topic_id(cluster: MockCluster) -> str:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    return str(admin.describe_topics(TopicCollection(["orders"]))["orders"].result(10).topic_id)


Read = Callable[..., list[int]]


def rows_of(cluster: MockCluster, start: int = 0, end: int = COUNT, **options: Any) -> list[int]:
    """The offsets that were read."""
    settings = {**servers(cluster), "reconnect.backoff.max.ms": "200"}
    found = read_batches(settings, [OffsetRange(TP, start, end)], **{"deadline_s": DEADLINE_S, **options})
    return [offset for batch in found for offset in batch.column("offset").to_pylist()]


def servers(cluster: MockCluster) -> dict[str, str]:
    return {"bootstrap.servers": cluster.bootstrap_servers}


@pytest.fixture
def read(cluster: MockCluster) -> Read:
    """``read(start=0, end=COUNT, **options)`` -> the offsets."""
    return partial(rows_of, cluster)


# --- the table, row by row


PASSES = (-1, 3, 5, 6, 7, 8, 9, 13, 14, 41, 56, 74, 75, 78, 89, 100, 103)
"""What brokers answer a fetch or a question for offsets with, and that passes."""
OF_FETCH = (1, 2, 70, 71, 106, 109)
"""And a fetch alone; the last two are known to no table."""


def test_a_fetch_that_is_answered_with_a_passing_error_is_repeated() -> None:
    def play(cluster: MockCluster, code: int) -> None:
        assert meaning(Request.FETCH, code) is Meaning.AGAIN
        cluster.push_partition_errors(TP, Api.FETCH, [code, code])
        assert rows_of(cluster) == list(range(COUNT))

    each(PASSES + OF_FETCH, play)


def test_B33_bounds_that_are_answered_with_a_passing_error_are_asked_again() -> None:
    """The range lies beyond the log's end, so that its bounds are asked for, beyond the grace; then the log grows."""

    def play(cluster: MockCluster, code: int) -> None:
        cluster.push_request_errors(Api.LIST_OFFSETS, [code] * 3_000)
        grace = over(2 * GRACE_S)
        with as_soon_as(lambda: grace() and cluster.asked(Api.LIST_OFFSETS) >= 4, produce, cluster, 5):
            assert rows_of(cluster, end=COUNT + 5) == list(range(COUNT + 5))

    each(PASSES, play)


def test_a_refusal_that_passes_is_none() -> None:
    """librdkafka stops to fetch at the first 29, and tells it once: a fresh client finds out that it is over."""

    def play(cluster: MockCluster, code: int) -> None:
        cluster.push_partition_errors(TP, Api.FETCH, [code])
        assert rows_of(cluster) == list(range(COUNT))

    each([29, 30, 31], play)


def test_a_refusal_that_stays_ends_the_task_after_a_second_try() -> None:
    def play(cluster: MockCluster, code: int) -> None:
        cluster.push_partition_errors(TP, Api.FETCH, [code] * 3_000)
        started = time.monotonic()
        with pytest.raises(AccessDenied, match="orders"):
            rows_of(cluster)
        assert time.monotonic() - started >= GRACE_S

    each([29, 30, 31], play)


def test_a_refusal_is_not_remembered(cluster: MockCluster, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_errors, "GRACE_S", 0)  # a second one would be believed at once
    cluster.push_partition_errors(TP, Api.FETCH, [29])
    assert read() == list(range(COUNT))
    cluster.push_partition_errors(TP, Api.FETCH, [29])
    assert read() == list(range(COUNT))


@pytest.mark.parametrize("code", [17, 35, 42])
def test_what_asking_again_cannot_help_ends_the_task(cluster: MockCluster, read: Read, code: int) -> None:
    cluster.push_partition_errors(TP, Api.FETCH, [code] * 50)
    with pytest.raises(GroupError, match="was refused"):
        read()


# --- gone


def test_metadata_that_refuses_or_knows_no_such_topic_is_believed_over_the_grace() -> None:
    believed = {29: AccessDenied, 31: AccessDenied, 3: TopicMissing, 100: TopicMissing}

    def play(cluster: MockCluster, code: int) -> None:
        planned = {"orders": topic_id(cluster)}
        cluster.set_topic_error("orders", code)
        started = time.monotonic()
        with pytest.raises(believed[code], match="orders") as caught:
            rows_of(cluster, topic_ids=planned)
        assert time.monotonic() - started >= GRACE_S
        if believed[code] is TopicMissing:
            assert caught.value.fields == {"topics": ["orders"]}

    each(believed, play)


def test_what_metadata_says_for_a_moment_only_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_errors, "GRACE_S", LONG_S)

    def play(cluster: MockCluster, code: int) -> None:
        planned = {"orders": topic_id(cluster)}
        cluster.set_topic_error("orders", code)
        cluster.forget_requests()
        with as_soon_as(lambda: cluster.asked(Api.METADATA) >= 6, cluster.set_topic_error, "orders", 0):
            assert rows_of(cluster, topic_ids=planned) == list(range(COUNT))

    each([3, 100, 5, 29], play)


def test_a_broker_that_cannot_be_reached_has_not_lost_anything(
    cluster: MockCluster, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    """To librdkafka the partitions of such a broker are unknown (-190), at once."""
    assert read(0, 5) == [0, 1, 2, 3, 4]
    cluster.set_broker_down(1)
    with caplog.at_level(logging.WARNING), as_soon_as(over(4 * GRACE_S), cluster.set_broker_up, 1):
        assert read(fail_on_data_loss=False) == list(range(COUNT))
    assert "data loss" not in caplog.text


def test_an_outage_that_is_longer_than_the_deadline_is_waited_for(cluster: MockCluster, read: Read) -> None:
    """The deadline is for records that do not come from brokers that answer."""
    cluster.set_broker_down(1)
    with as_soon_as(over(2 * OUTAGE_S), cluster.set_broker_up, 1):
        assert read(deadline_s=OUTAGE_S, silence_s=DEADLINE_S) == list(range(COUNT))


def test_a_question_about_topics_does_not_wait_for_a_controller_that_is_dead() -> None:
    """librdkafka asks the broker that it was told as the controller, also when another one is by now."""
    with MockCluster(2) as cluster:
        cluster.create_topic("orders")
        cluster.set_leader(TP, 1)
        cluster.set_controller(2)
        produce(cluster)
        read = partial(rows_of, cluster, topic_ids={"orders": topic_id(cluster)})
        assert read(0, 5) == [0, 1, 2, 3, 4]
        cluster.set_broker_down(2)
        cluster.set_controller(1)
        assert read(5, COUNT) == list(range(5, COUNT))
        fetch.close_idle()


@dataclass
class Requests:
    """What a client receives: answers by the number of the request, the others never."""

    answered: dict[int, records.Bounds | Event]
    sent: int = 0
    looked: int = 0
    given_up: list[int] = field(default_factory=list)

    def send(self) -> tuple[int, ...]:
        self.sent += 1
        return (self.sent,)

    def receive(self, wait_s: float) -> None: ...

    def answers(self, numbers: Sequence[int]) -> list[Any]:
        return [self.answered[number] for number in numbers if number in self.answered]

    def failure(self, event: Any) -> None: ...

    def give_up(self, numbers: Iterable[int]) -> None:
        self.given_up += numbers

    def look_for_brokers(self) -> None:
        self.looked += 1


def test_a_question_is_sent_again_and_the_first_answer_of_any_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that does not answer is dead or slow: another one is asked, and this one's answer is still good."""
    clock = Clock()
    monkeypatch.setattr(requests, "time", clock)
    asked: Any = Requests({})
    question: PendingRequest[Any] = PendingRequest(asked, asked.send, itemgetter(0), asked.look_for_brokers)
    assert (question.take(0), asked.sent, asked.looked) == (None, 1, 0)
    for seconds in (1, 2):
        clock.now_s += requests.OVERDUE_S
        assert (question.take(0), asked.sent, asked.looked) == (None, 1 + seconds, seconds)
    failure = Event(requests.NO_ANSWER, "no answer in time", TP, -1)
    asked.answered = {1: failure}
    assert question.take(0) == (failure, 0.0)
    asked.answered = {2: records.Bounds(0, 9)}
    assert question.take(0) == (records.Bounds(0, 9), requests.OVERDUE_S)
    assert asked.given_up == [1, 2, 3]


@dataclass
class Clock:
    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_the_deadline_stands_still_in_an_outage_and_goes_on_after_it() -> None:
    patience = Patience(10, 60)
    patience.progress(100)
    assert (patience.left_s(104), patience.waited_s(104)) == (6, 4)
    patience.asked(104, 104, answered=False)
    assert (patience.left_s(124), patience.waited_s(124)) == (40, 20)
    patience.asked(130, 130, answered=False)
    assert patience.left_s(164) == 0
    patience.asked(150, 150, answered=True)
    assert (patience.left_s(152), patience.waited_s(152)) == (4, 6)
    patience.asked(152, 152, answered=True)
    assert patience.left_s(156) == 0


def test_one_bound_that_is_refused_is_no_bound(cluster: MockCluster) -> None:
    """librdkafka's own call for both would tell [20,20) here, and the records before it as lost."""
    client = fetch.open_client(servers(cluster))

    def bounds() -> object:
        answer = client.ask_bounds(TP).take(2 * ANSWER_S_MAX)
        assert answer is not None
        return answer[0]

    def told() -> None:
        """A busy machine may need more than one bound of a question for the first answer of a client."""
        await_until(lambda: bounds() == (0, COUNT, -1), DEADLINE_S, what="bounds")

    told()
    for _ in range(4):
        cluster.push_request_errors(Api.LIST_OFFSETS, [6])
        assert isinstance(bounds(), Event)
        cluster.clear_request_errors(Api.LIST_OFFSETS)
    told()
    client.close()


# --- another topic of that name, a shorter log


def test_a_topic_made_anew_is_data_loss_even_if_its_log_covers_the_plan(cluster: MockCluster, read: Read) -> None:
    planned = {"orders": topic_id(cluster)}
    assert read(0, 5, topic_ids=planned) == [0, 1, 2, 3, 4]
    make_anew(cluster)
    with pytest.raises(DataLoss, match="made anew") as caught:
        read(5, COUNT, topic_ids=planned)
    assert caught.value.fields["expected"] == 5
    assert read(5, COUNT, topic_ids={"orders": topic_id(cluster)}) == list(range(5, COUNT))


def test_a_topic_made_anew_is_skipped_in_full_and_counted(
    cluster: MockCluster, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    planned = {"orders": topic_id(cluster)}
    make_anew(cluster)
    with caplog.at_level(logging.WARNING):
        assert read(5, COUNT, topic_ids=planned, fail_on_data_loss=False) == []
    assert caplog.text.count("data loss") == 1
    assert "15 planned offsets were skipped, failOnDataLoss is false: orders-0[5,20) (15)" in caplog.text


@pytest.mark.parametrize("loss_fails", [True, False])
def test_a_topic_made_anew_while_it_is_read_is_found_at_the_end(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch, loss_fails: bool
) -> None:
    monkeypatch.setattr(intake, "BATCH_ROWS_MAX", 5)
    monkeypatch.setattr(range_reader, "PROOF_S", 0)
    planned = {"orders": topic_id(cluster)}
    wanted = [OffsetRange(TP, 0, COUNT)]
    found = read_batches(
        servers(cluster), wanted, topic_ids=planned, fail_on_data_loss=loss_fails, deadline_s=DEADLINE_S
    )
    assert next(found).num_rows == 5
    make_anew(cluster)
    with pytest.raises(DataLoss, match="made anew while it was read"):
        list(found)


@pytest.mark.parametrize(("proof_s", "asked"), [(1000, 1), (0, 2)])
def test_how_often_a_small_task_asks_for_its_topic(
    cluster: MockCluster, read: Read, monkeypatch: pytest.MonkeyPatch, proof_s: float, asked: int
) -> None:
    monkeypatch.setattr(range_reader, "PROOF_S", proof_s)
    monkeypatch.setattr(requests, "OVERDUE_S", DEADLINE_S)  # none is sent again, however slow the machine is
    planned = {"orders": topic_id(cluster)}
    read(0, 1)  # the client and its connections
    cluster.forget_requests()
    assert read(topic_ids=planned) == list(range(COUNT))
    assert cluster.asked(Api.METADATA) == asked


def test_B38_records_that_aged_out_fail_the_task_with_their_place(cluster: MockCluster, read: Read) -> None:
    cluster.delete_records(TP, 8)
    with pytest.raises(DataLoss, match="failOnDataLoss=false") as caught:
        read(3, 12)
    assert caught.value.fields == {"topic": "orders", "partition": 0, "expected": 3, "available": (8, COUNT)}
    assert not caught.value.retriable


def test_B39_a_start_past_the_logs_end_gives_nothing(cluster: MockCluster, read: Read) -> None:
    assert read(COUNT + 2, COUNT + 5, fail_on_data_loss=False) == []
    with pytest.raises(DataLoss) as caught:
        read(COUNT + 2, COUNT + 5)
    assert (caught.value.fields["expected"], caught.value.fields["available"]) == (COUNT + 2, (0, COUNT))


def test_B39_a_topic_made_anew_with_fewer_records_is_data_loss(cluster: MockCluster, read: Read) -> None:
    """Also where brokers have no topic ids."""
    assert read() == list(range(COUNT)), "the kept client has seen the longer log"
    make_anew(cluster, 2)
    with pytest.raises(DataLoss) as caught:
        read(5, 10)
    assert caught.value.fields["available"] == (0, 2)
    assert read(5, 10, fail_on_data_loss=False) == []


def test_a_topic_deleted_after_it_was_read(cluster: MockCluster, read: Read) -> None:
    assert read() == list(range(COUNT))
    cluster.delete_topic("orders")
    with pytest.raises(TopicMissing):
        read(0, COUNT + 5)


def test_B33_a_log_that_is_short_is_believed_after_the_grace(
    cluster: MockCluster, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    with pytest.raises(DataLoss) as caught:
        read(0, COUNT + 5)
    assert time.monotonic() - started >= GRACE_S
    assert caught.value.fields["available"] == (0, COUNT)
    assert read(10, COUNT + 5, fail_on_data_loss=False) == list(range(10, COUNT))
    assert f"orders-0[{COUNT},{COUNT + 5}) (5)" in caplog.text


def test_B37_records_that_aged_out_and_an_end_that_is_missing_are_one_warning(
    cluster: MockCluster, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.delete_records(TP, 4)
    counts = read_counts.Tally()
    assert read(0, COUNT + 2, fail_on_data_loss=False, tally=counts) == list(range(4, COUNT))
    assert caplog.text.count("data loss") == 1
    assert "6 planned offsets" in caplog.text
    assert counts.lost == (OffsetRange(TP, 0, 4), OffsetRange(TP, COUNT, COUNT + 2))
    assert counts.brokers == {TP: COUNT - 4}
    assert read(0, 4, fail_on_data_loss=False) == []


# --- what was skipped, by itself


def test_what_was_skipped_is_joined_where_they_touch() -> None:
    lost = read_counts.Tally()
    lost.skip(TP, 5, 7, "why")
    lost.skip(TP, 0, 5, "why")
    lost.skip(TP, 7, 7, "nothing")
    lost.skip(TP, 9, 10, "why")
    lost.skip(TP._replace(partition=1), 10, 12, "why")
    assert [(str(one.range), one.range.size) for one in lost.joined()] == [
        ("orders-0[0,7)", 7),
        ("orders-0[9,10)", 1),
        ("orders-1[10,12)", 2),
    ]


# --- leader epochs


def test_epochs_that_leader_and_records_count_in_different_ways_conclude_nothing(
    cluster: MockCluster, read: Read
) -> None:
    """The mock's answers have no leader epoch, its records have one: others that speak Kafka's protocol may, too."""
    assert read(0, COUNT, leader_epochs={TP: -1}) == list(range(COUNT))


@pytest.mark.parametrize(("epochs", "rows"), [((1, 1, 2, 2), 4), ((1, 2, 3, 3), 2), ((3, 3, 3, 3), 0), ((-1,) * 4, 4)])
def test_a_record_of_a_later_leader_was_not_planned(epochs: Sequence[int], rows: int) -> None:
    chunk: Any = FakeChunk([Message(TP, 10 + at, epoch=epoch) for at, epoch in enumerate(epochs)])
    later = None if rows == 4 else intake.LaterLeader(10 + rows, 3)
    assert intake.next_rows(chunk, chunk.runs[0], 10, 99, 2) == (0, rows, 10 + rows, later)
