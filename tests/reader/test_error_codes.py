"""How a task handles each response of a broker, with the real librdkafka and mock brokers.

Nothing counts as lost because of the client's own view alone. Cases of one table run concurrently, each with its own
cluster.
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
from confluent_kafka import KafkaError, Producer, TopicCollection
from confluent_kafka.admin import AdminClient
from kafka_helpers import await_until
from kit.fake_reader import FakeChunk, Message
from kit.mock_cluster import Api, MockCluster
from reading import read as read_batches

from spark_group_source.error_codes import Meaning, Request, meaning
from spark_group_source.errors import AccessDenied, DataLoss, GroupError, ReadTimeout, TopicMissing
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.reader import broker_checks, native_client, range_reader, records
from spark_group_source.reader.broker_checks import ReadDeadline
from spark_group_source.reader.native_client import REQUEST_TIMEOUT_S, PendingRequest
from spark_group_source.reader.records import ClientEvent

TP = TopicPartition("orders", 0)
COUNT = 20
GRACE_S = 0.3
LONG_S = 300
"""A grace period longer than any test: whatever is believed was believed too early."""
OUTAGE_S = 2.5
"""A deadline shorter than the outage, and longer than the first unanswered metadata request."""
DEADLINE_S = 300
"""Without any progress, on a machine that is busy."""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_checks, "GRACE_S", GRACE_S)
    monkeypatch.setattr(range_reader, "CHECK_AFTER_S", 0.1)
    monkeypatch.setattr(native_client, "REQUEST_TIMEOUT_S", 1.0)


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    range_reader.close_idle_clients()


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
        range_reader.close_idle_clients()


def each(codes: Iterable[int], play: Callable[[MockCluster, int], None]) -> None:
    """Run all cases concurrently; a failure names its case."""

    def row(code: int) -> None:
        with orders() as cluster:
            play(cluster, code)

    with ThreadPoolExecutor(len(rows := list(codes))) as pool:
        played = {code: pool.submit(row, code) for code in rows}
    failed = {code: error for code, one in played.items() if (error := one.exception())}
    for code, error in failed.items():
        error.add_note(f"case: code {code}")
    if failed:
        raise BaseExceptionGroup(f"cases {sorted(failed)}", list(failed.values()))


@contextmanager
def as_soon_as(holds: Callable[[], bool], call: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Call a function as soon as a condition holds, while the block runs; wait for it at the end of the block."""

    def happen() -> None:
        await_until(holds, DEADLINE_S, what="the condition")
        call(*arguments)

    with ThreadPoolExecutor(1) as pool:
        happening = pool.submit(happen)
        yield
        happening.result()


def over(wait_s: float) -> Callable[[], bool]:
    """Whether that time is over."""
    end_s = time.monotonic() + wait_s
    return lambda: time.monotonic() >= end_s


def produce(cluster: MockCluster, count: int = COUNT, topic: str = "orders") -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    for at in range(count):
        producer.produce(topic, b"%d" % at, partition=0)
    assert producer.flush(DEADLINE_S) == 0


def recreate(cluster: MockCluster, count: int = COUNT) -> None:
    cluster.delete_topic("orders")
    cluster.create_topic("orders")
    produce(cluster, count)


def topic_id(cluster: MockCluster) -> str:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    return str(admin.describe_topics(TopicCollection(["orders"]))["orders"].result(300).topic_id)


Read = Callable[..., list[int]]


def rows_of(cluster: MockCluster, start: int = 0, end: int = COUNT, **options: Any) -> list[int]:
    """The offsets that were read."""
    settings = {**servers(cluster), "reconnect.backoff.max.ms": "200"}
    found = read_batches(settings, [OffsetRange(TP, start, end)], **{"progress_timeout_s": DEADLINE_S, **options})
    return [offset for batch in found for offset in batch.column("offset").to_pylist()]


def servers(cluster: MockCluster) -> dict[str, str]:
    return {"bootstrap.servers": cluster.bootstrap_servers}


@pytest.fixture
def read(cluster: MockCluster) -> Read:
    """``read(start=0, end=COUNT, **options)`` -> the offsets."""
    return partial(rows_of, cluster)


# --- error codes


PASSES = (-1, 3, 5, 6, 7, 8, 9, 13, 14, 41, 56, 74, 75, 78, 89, 100, 103)
"""Temporary errors of fetch and ListOffsets responses."""
OF_FETCH = (1, 2, 70, 71, 106, 109)
"""Temporary errors of fetch responses only; the last two are in no table."""


def test_fetches_are_repeated_after_a_temporary_error() -> None:
    def play(cluster: MockCluster, code: int) -> None:
        assert meaning(Request.FETCH, code) is Meaning.RETRY
        cluster.push_partition_errors(TP, Api.FETCH, [code, code])
        assert rows_of(cluster) == list(range(COUNT))

    each(PASSES + OF_FETCH, play)


def test_watermark_requests_are_repeated_after_a_temporary_error() -> None:
    """The range ends past the log's end, so its watermarks are requested for longer than the grace period; then the log
    grows."""

    def play(cluster: MockCluster, code: int) -> None:
        cluster.push_request_errors(Api.LIST_OFFSETS, [code] * 3_000)
        grace = over(2 * GRACE_S)
        with as_soon_as(lambda: grace() and cluster.request_count(Api.LIST_OFFSETS) >= 4, produce, cluster, 5):
            assert rows_of(cluster, end=COUNT + 5) == list(range(COUNT + 5))

    each(PASSES, play)


def test_a_temporary_refusal_is_ignored() -> None:
    """librdkafka stops fetching at the first 29 and reports it once; a new client finds out that access works again."""

    def play(cluster: MockCluster, code: int) -> None:
        cluster.push_partition_errors(TP, Api.FETCH, [code])
        assert rows_of(cluster) == list(range(COUNT))

    each([29, 30, 31], play)


def test_a_repeated_refusal_fails_the_task_after_the_grace_period() -> None:
    def play(cluster: MockCluster, code: int) -> None:
        cluster.push_partition_errors(TP, Api.FETCH, [code] * 3_000)
        started = time.monotonic()
        with pytest.raises(AccessDenied, match="orders"):
            rows_of(cluster)
        assert time.monotonic() - started >= GRACE_S

    each([29, 30, 31], play)


def test_a_refusal_is_forgotten_after_records_arrive(
    cluster: MockCluster, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_checks, "GRACE_S", 0)  # a second refusal would be believed at once
    cluster.push_partition_errors(TP, Api.FETCH, [29])
    assert read() == list(range(COUNT))
    cluster.push_partition_errors(TP, Api.FETCH, [29])
    assert read() == list(range(COUNT))


def test_a_refusal_is_not_forgotten_when_another_topic_has_records(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka reports it once, so only a new client finds out that it lasts."""
    refused = TopicPartition("secrets", 0)
    cluster.create_topic("secrets")
    produce(cluster, 1, topic="secrets")
    cluster.push_partition_errors(refused, Api.FETCH, [KafkaError.TOPIC_AUTHORIZATION_FAILED] * 3_000)
    record = broker_checks.RequestFailures.record

    def recorded(self: broker_checks.RequestFailures, request: Request, event: ClientEvent, now_s: float) -> None:
        record(self, request, event, now_s)
        if event.tp == refused:
            produce(cluster, 1)  # the last record of the other topic

    monkeypatch.setattr(broker_checks.RequestFailures, "record", recorded)
    wanted = [OffsetRange(TP, 0, COUNT + 1), OffsetRange(refused, 0, 1)]
    with pytest.raises(AccessDenied, match="'secrets'"):
        list(read_batches(servers(cluster), wanted, progress_timeout_s=DEADLINE_S))


@pytest.mark.parametrize("code", [17, 35, 42])
def test_a_permanent_error_fails_the_task(cluster: MockCluster, read: Read, code: int) -> None:
    cluster.push_partition_errors(TP, Api.FETCH, [code] * 50)
    with pytest.raises(GroupError, match="request refused"):
        read()


# --- missing topics and outages


def test_a_missing_or_refused_topic_is_believed_after_the_grace_period() -> None:
    believed = {29: AccessDenied, 31: AccessDenied, 3: TopicMissing, 100: TopicMissing}

    def play(cluster: MockCluster, code: int) -> None:
        planned = {"orders": topic_id(cluster)}
        cluster.set_topic_error("orders", code)
        started = time.monotonic()
        with pytest.raises(believed[code], match="orders") as caught:
            rows_of(cluster, topic_ids=planned)
        assert time.monotonic() - started >= GRACE_S
        if believed[code] is TopicMissing:
            assert "Set failOnDataLoss=false" in str(caught.value), "the batch keeps the topic without it"
            assert caught.value.fields == {"topics": ["orders"]}

    each(believed, play)


def test_temporary_metadata_errors_are_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_checks, "GRACE_S", LONG_S)

    def play(cluster: MockCluster, code: int) -> None:
        planned = {"orders": topic_id(cluster)}
        cluster.set_topic_error("orders", code)
        cluster.forget_requests()
        with as_soon_as(lambda: cluster.request_count(Api.METADATA) >= 6, cluster.set_topic_error, "orders", 0):
            assert rows_of(cluster, topic_ids=planned) == list(range(COUNT))

    each([3, 100, 5, 29], play)


def test_a_topic_that_brokers_never_confirm_ends_the_wait_for_it(cluster: MockCluster, read: Read) -> None:
    planned = {"orders": topic_id(cluster)}
    assert read(0, 1) == [0]  # the client keeps the topic's leaders
    cluster.set_topic_error("orders", KafkaError.LEADER_NOT_AVAILABLE)
    with pytest.raises(ReadTimeout):
        read(topic_ids=planned, progress_timeout_s=1)


def test_an_unreachable_broker_is_not_data_loss(
    cluster: MockCluster, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    """librdkafka immediately reports the partitions of such a broker as unknown (-190)."""
    assert read(0, 5) == [0, 1, 2, 3, 4]
    cluster.set_broker_down(1)
    with caplog.at_level(logging.WARNING), as_soon_as(over(4 * GRACE_S), cluster.set_broker_up, 1):
        assert read(fail_on_data_loss=False) == list(range(COUNT))
    assert "data loss" not in caplog.text


def test_an_outage_longer_than_the_deadline_is_waited_out(cluster: MockCluster, read: Read) -> None:
    """The deadline applies only while brokers respond."""
    cluster.set_broker_down(1)
    with as_soon_as(over(2 * OUTAGE_S), cluster.set_broker_up, 1):
        assert read(progress_timeout_s=OUTAGE_S, outage_timeout_s=DEADLINE_S) == list(range(COUNT))


def test_a_topic_check_does_not_wait_for_a_dead_controller() -> None:
    """librdkafka sends the request to the last controller it knows, even if another broker is the controller now."""
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
        range_reader.close_idle_clients()


@dataclass
class FakeAdminRequests:
    """Admin requests of which only those in ``answered`` get a response, by number."""

    answered: dict[int, records.Watermarks | ClientEvent]
    sent: int = 0
    refreshed: int = 0
    cancelled: list[int] = field(default_factory=list)

    def send(self) -> tuple[int, ...]:
        self.sent += 1
        return (self.sent,)

    def receive(self, wait_s: float) -> None: ...

    def responses(self, numbers: Sequence[int]) -> list[Any]:
        return [self.answered[number] for number in numbers if number in self.answered]

    def error_of(self, event: Any) -> None: ...

    def cancel(self, numbers: Iterable[int]) -> None:
        self.cancelled += numbers

    def refresh_metadata(self) -> None:
        self.refreshed += 1


def test_an_overdue_request_is_resent_and_the_first_response_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that does not respond is dead or slow: the request is resent, and a late response still counts."""
    clock = Clock()
    monkeypatch.setattr(native_client, "time", clock)
    admin: Any = FakeAdminRequests({})
    pending: PendingRequest[Any] = PendingRequest(admin, admin.send, itemgetter(0), admin.refresh_metadata)
    assert (pending.receive(0), admin.sent, admin.refreshed) == (None, 1, 0)
    for seconds in (1, 2):
        clock.now_s += native_client.RESEND_AFTER_S
        assert (pending.receive(0), admin.sent, admin.refreshed) == (None, 1 + seconds, seconds)
    failure = ClientEvent(native_client.TIMED_OUT, "timed out", TP, -1)
    admin.answered = {1: failure}
    assert pending.receive(0) == (failure, 0.0)
    admin.answered = {2: records.Watermarks(0, 9)}
    assert pending.receive(0) == (records.Watermarks(0, 9), native_client.RESEND_AFTER_S)
    assert admin.cancelled == [1, 2, 3]


@dataclass
class Clock:
    now_s: float = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_the_deadline_is_suspended_during_an_outage() -> None:
    deadline = ReadDeadline(10, 60)
    deadline.note_progress(100)
    assert (deadline.remaining_s(104), deadline.waited_s(104)) == (6, 4)
    deadline.note_request(104, 104, is_answered=False)
    assert (deadline.remaining_s(124), deadline.waited_s(124)) == (40, 20)
    deadline.note_request(130, 130, is_answered=False)
    assert deadline.remaining_s(164) == 0
    deadline.note_request(150, 150, is_answered=True)
    assert (deadline.remaining_s(152), deadline.waited_s(152)) == (4, 6)
    deadline.note_request(152, 152, is_answered=True)
    assert deadline.remaining_s(156) == 0


def test_one_failed_watermark_fails_the_request(cluster: MockCluster) -> None:
    """librdkafka's ``query_watermark_offsets`` would return [20,20) here: the records before it would count as lost."""
    client = range_reader.open_client(servers(cluster))

    def watermarks() -> object:
        received = client.request_watermarks(TP).receive(2 * REQUEST_TIMEOUT_S)
        assert received is not None
        return received[0]

    def watermarks_arrive() -> bool:
        """On a busy machine the first response to a client may take longer than one timeout."""
        return watermarks() == (0, COUNT, -1)

    def one_error_is_returned() -> bool:
        """A request that was resent, and is still on its way, may receive the error of a later one."""
        cluster.push_request_errors(Api.LIST_OFFSETS, [6])
        received = watermarks()
        cluster.clear_request_errors(Api.LIST_OFFSETS)
        assert isinstance(received, ClientEvent) or received == (0, COUNT, -1)
        return isinstance(received, ClientEvent)

    await_until(watermarks_arrive, DEADLINE_S, what="watermarks")
    for _ in range(4):
        await_until(one_error_is_returned, DEADLINE_S, what="an error in place of watermarks")
    await_until(watermarks_arrive, DEADLINE_S, what="watermarks")
    client.close()


# --- recreated topics, short logs


def test_a_recreated_topic_is_data_loss_even_if_its_log_covers_the_plan(
    cluster: MockCluster, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "TOPIC_CHECK_VALID_S", 0)  # mock brokers recreate a topic within a few ms
    planned = {"orders": topic_id(cluster)}
    assert read(0, 5, topic_ids=planned) == [0, 1, 2, 3, 4]
    recreate(cluster)
    with pytest.raises(DataLoss, match="recreated") as caught:
        read(5, COUNT, topic_ids=planned)
    assert caught.value.fields["expected"] == 5
    assert read(5, COUNT, topic_ids={"orders": topic_id(cluster)}) == list(range(5, COUNT))


def test_a_recreated_topic_is_reported_as_such_even_if_its_first_records_were_deleted(
    cluster: MockCluster, read: Read
) -> None:
    """Nothing is concluded from the new log while the old topic may be gone."""
    planned = {"orders": topic_id(cluster)}
    recreate(cluster)
    cluster.delete_records(TP, 8)
    with pytest.raises(DataLoss, match="was deleted and recreated"):
        read(3, 12, topic_ids=planned)


def test_a_recreated_topic_is_skipped_in_full_and_counted(
    cluster: MockCluster, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    planned = {"orders": topic_id(cluster)}
    recreate(cluster)
    with caplog.at_level(logging.WARNING):
        assert read(5, COUNT, topic_ids=planned, fail_on_data_loss=False) == []
    assert caplog.text.count("data loss") == 1
    assert "skipped 15 planned offsets because failOnDataLoss is false: orders-0[5,20) (15)" in caplog.text


def read_5_rows(cluster: MockCluster, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Any]:
    """Read all records, of which the first 5 are handed over; returns the batches of the others."""
    monkeypatch.setattr(records, "BATCH_ROWS_MAX", 5)
    monkeypatch.setattr(range_reader, "TOPIC_CHECK_VALID_S", 0)
    wanted, planned = [OffsetRange(TP, 0, COUNT)], {"orders": topic_id(cluster)}
    found = read_batches(servers(cluster), wanted, topic_ids=planned, progress_timeout_s=DEADLINE_S, **options)
    assert next(found).num_rows == 5
    return found


@pytest.mark.parametrize("loss_fails", [True, False])
def test_a_topic_recreated_while_it_is_read_is_detected_after_the_last_rows(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch, loss_fails: bool
) -> None:
    found = read_5_rows(cluster, monkeypatch, fail_on_data_loss=loss_fails)
    recreate(cluster)
    with pytest.raises(DataLoss, match="recreated while it was read"):
        list(found)


@pytest.mark.parametrize("recreated", [True, False])
def test_a_topic_that_is_missing_after_the_last_rows_may_have_been_recreated(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch, recreated: bool
) -> None:
    """A broker may know of the deletion only, while the leader has records of the new topic."""
    found = read_5_rows(cluster, monkeypatch)
    if not recreated:
        cluster.delete_topic("orders")
        assert sum(batch.num_rows for batch in found) == COUNT - 5
        return
    recreate(cluster)
    cluster.forget_requests()
    cluster.set_topic_error("orders", KafkaError.UNKNOWN_TOPIC_OR_PART)
    knows = as_soon_as(lambda: cluster.request_count(Api.METADATA) >= 2, cluster.set_topic_error, "orders", 0)
    with knows, pytest.raises(DataLoss, match="recreated while it was read"):
        list(found)


@pytest.mark.parametrize(("valid_s", "first", "next_task"), [(1000, 1, 0), (0, 2, 2)])
def test_tasks_of_a_worker_share_topic_checks_while_they_are_valid(
    cluster: MockCluster, read: Read, monkeypatch: pytest.MonkeyPatch, valid_s: float, first: int, next_task: int
) -> None:
    monkeypatch.setattr(range_reader, "TOPIC_CHECK_VALID_S", valid_s)
    for module, name in ((native_client, "RESEND_AFTER_S"), (range_reader, "CHECK_AFTER_S")):
        monkeypatch.setattr(module, name, DEADLINE_S)  # nothing is resent or checked, even on a slow machine
    planned = {"orders": topic_id(cluster)}
    read(0, 1)  # the client and its connections
    for requests_sent in (first, next_task, next_task):
        cluster.forget_requests()
        assert read(topic_ids=planned) == list(range(COUNT))
        assert cluster.request_count(Api.METADATA) == requests_sent


def test_a_shared_topic_check_is_compared_with_the_plan_of_each_task(
    cluster: MockCluster, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "TOPIC_CHECK_VALID_S", 1000)
    former = {"orders": topic_id(cluster)}
    assert read(topic_ids=former) == list(range(COUNT))
    recreate(cluster)
    assert read(topic_ids={"orders": topic_id(cluster)}) == list(range(COUNT))
    with pytest.raises(DataLoss, match="recreated"):
        read(topic_ids=former)


def test_records_deleted_by_retention_fail_the_task_with_their_offsets(cluster: MockCluster, read: Read) -> None:
    cluster.delete_records(TP, 8)
    with pytest.raises(DataLoss, match="failOnDataLoss=false") as caught:
        read(3, 12)
    assert caught.value.fields == {"topic": "orders", "partition": 0, "expected": 3, "available": (8, COUNT)}
    assert not caught.value.retriable


def test_a_range_that_starts_past_the_logs_end_is_data_loss(cluster: MockCluster, read: Read) -> None:
    assert read(COUNT + 2, COUNT + 5, fail_on_data_loss=False) == []
    with pytest.raises(DataLoss) as caught:
        read(COUNT + 2, COUNT + 5)
    assert (caught.value.fields["expected"], caught.value.fields["available"]) == (COUNT + 2, (0, COUNT))


def test_a_recreated_topic_with_fewer_records_is_data_loss(cluster: MockCluster, read: Read) -> None:
    """Even if brokers have no topic ids."""
    assert read() == list(range(COUNT)), "the idle client has read the longer log"
    recreate(cluster, 2)
    with pytest.raises(DataLoss) as caught:
        read(5, 10)
    assert caught.value.fields["available"] == (0, 2)
    assert read(5, 10, fail_on_data_loss=False) == []


def test_a_topic_deleted_between_two_tasks_is_reported_as_missing(cluster: MockCluster, read: Read) -> None:
    assert read() == list(range(COUNT))
    cluster.delete_topic("orders")
    with pytest.raises(TopicMissing):
        read(0, COUNT + 5)


def test_a_short_log_is_believed_after_the_grace_period(
    cluster: MockCluster, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    with pytest.raises(DataLoss) as caught:
        read(0, COUNT + 5)
    assert time.monotonic() - started >= GRACE_S
    assert caught.value.fields["available"] == (0, COUNT)
    assert read(10, COUNT + 5, fail_on_data_loss=False) == list(range(10, COUNT))
    assert f"orders-0[{COUNT},{COUNT + 5}) (5)" in caplog.text


def test_all_skipped_ranges_of_a_task_are_one_warning(
    cluster: MockCluster, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.delete_records(TP, 4)
    counts = range_reader.ReadCounts()
    assert read(0, COUNT + 2, fail_on_data_loss=False, counts=counts) == list(range(4, COUNT))
    assert caplog.text.count("data loss") == 1
    assert "6 planned offsets" in caplog.text
    assert counts.reported.skipped == (OffsetRange(TP, 0, 4), OffsetRange(TP, COUNT, COUNT + 2))
    assert counts.rows_from_brokers == {TP: COUNT - 4}
    assert read(0, 4, fail_on_data_loss=False) == []


# --- skipped ranges


def test_adjacent_skipped_ranges_are_merged() -> None:
    counts = range_reader.ReadCounts()
    counts.skip(TP, 5, 7, "why")
    counts.skip(TP, 0, 5, "why")
    counts.skip(TP, 7, 7, "nothing")
    counts.skip(TP, 9, 10, "why")
    counts.skip(TP._replace(partition=1), 10, 12, "why")
    assert [(str(one.range), one.range.size) for one in counts.merged()] == [
        ("orders-0[0,7)", 7),
        ("orders-0[9,10)", 1),
        ("orders-1[10,12)", 2),
    ]


# --- leader epochs


def test_incomparable_leader_epochs_are_ignored(cluster: MockCluster, read: Read) -> None:
    """Responses of the mock brokers have no leader epoch, but their records do; other implementations of Kafka may do
    the same."""
    assert read(0, COUNT, leader_epochs={TP: -1}) == list(range(COUNT))


@pytest.mark.parametrize(("epochs", "rows"), [((1, 1, 2, 2), 4), ((1, 2, 3, 3), 2), ((3, 3, 3, 3), 0), ((-1,) * 4, 4)])
def test_records_of_a_newer_leader_are_not_planned(epochs: Sequence[int], rows: int) -> None:
    chunk: Any = FakeChunk([Message(TP, 10 + at, epoch=epoch) for at, epoch in enumerate(epochs)])
    later = None if rows == 4 else records.NewerRecord(10 + rows, 3)
    assert records.select_rows(chunk, chunk.partition_rows[0], 10, 99, 2) == (0, rows, 10 + rows, later)
