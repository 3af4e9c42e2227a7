"""Reading ranges from a real Kafka: the rows, the end of a range, data loss, and timeouts."""

import contextlib
import ctypes
import inspect
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import AdminClient
from conftest import Produce, Record, TopicFactory, await_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kafka_helpers import produce_to
from kit.broker_cluster import BrokerCluster
from kit.fake_reader import FakeChunk, FakeClient, FakeRequest, Message
from kit.mock_cluster import MockCluster
from kit.spark_kafka import spark_kafka_jars
from reading import read as read_batches

from spark_group_source.errors import AccessDenied, DataLoss, GroupError, OptionError, ReadTimeout, TopicMissing
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.client import refused_setting
from spark_group_source.options.table import COLUMNS
from spark_group_source.reader import broker_checks, native_client, range_reader, records
from spark_group_source.reader.native_client import NativeClient
from spark_group_source.reader.records import RowSlice, arrow_schema, spark_ddl

Row = dict[str, Any]
Read = Callable[..., list[Row]]

DEADLINE_S = 300.0
"""Without any progress, on a machine that is busy."""
CONNECTOR_S = 900
"""Until Spark has started and read a topic; more than any machine needs."""
NEVER_MS = 600_000
LONG_S = 300.0
"""A deadline longer than any test: a test that waited for it would fail with a ReadTimeout."""


@pytest.fixture
def read(broker: BrokerCluster) -> Read:
    """``read(range, ..., isolation="read_committed", **options)`` -> the rows as dicts, batches checked for schema."""

    def rows(
        *wanted: OffsetRange, isolation: str = "read_committed", columns: Sequence[str] = COLUMNS[:-1], **options: Any
    ) -> list[Row]:
        options.setdefault("progress_timeout_s", DEADLINE_S)
        found: list[Row] = []
        for batch in read_batches(
            {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": isolation},
            wanted,
            columns=columns,
            **options,
        ):
            assert batch.schema.equals(arrow_schema(columns))
            batch.validate(full=True)
            found.extend(batch.to_pylist())
        return found

    return rows


def of(topic: str, start: int, end: int, partition: int = 0) -> OffsetRange:
    return OffsetRange(TopicPartition(topic, partition), start, end)


def offsets(rows: Sequence[Row]) -> list[int]:
    return [row["offset"] for row in rows]


@pytest.fixture
def transactions(broker: BrokerCluster) -> Iterator[Callable[..., None]]:
    """``transactions(topic, values, commit=True)`` writes the values to partition 0 in one transaction."""
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": f"tx-{os.urandom(4).hex()}"}
    )
    producer.init_transactions(DEADLINE_S)

    def write(topic: str, values: Sequence[str], *, commit: bool = True, leave_open: bool = False) -> None:
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value.encode(), partition=0)
        producer.flush(DEADLINE_S)
        if leave_open:
            return
        if commit:
            producer.commit_transaction(DEADLINE_S)
        else:
            producer.abort_transaction(DEADLINE_S)

    yield write
    with contextlib.suppress(Exception):
        producer.abort_transaction(5)


# ------------------------------------------------------------------------------------------------------ schema, ranges


def test_the_schema_is_that_of_sparks_kafka_source() -> None:
    plain = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert arrow_schema(COLUMNS).names == [*plain, "headers"]
    assert arrow_schema(COLUMNS).field("headers").type == records.HEADERS_TYPE
    assert all(field.nullable for field in arrow_schema(COLUMNS))
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
    from pyspark.sql.types import StructType

    # Spark 4.0 has no such parameter: its timestamps always have this zone.
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    for columns in (COLUMNS, plain, ["timestamp"]):
        spark_schema = from_arrow_schema(arrow_schema(columns))
        assert to_arrow_schema(spark_schema, **zone).equals(arrow_schema(columns))
        assert isinstance(spark_schema, StructType)
        names = [part.split()[0] for part in spark_ddl(columns).replace("key: ", "").split(", ")]
        assert [name for name in names if name != "value:"] == spark_schema.names


def test_invalid_ranges_are_refused(read: Read) -> None:
    with pytest.raises(ValueError, match=r"t-0\[5,4\)"):
        read(of("t", 5, 4))
    with pytest.raises(ValueError, match=r"t-0\[0,10\), t-0\[40,50\)"):  # a client is assigned a partition only once
        read(of("t", 40, 50), of("t", 0, 10))
    assert read() == []
    assert read(of("never-asked-for", 7, 7)) == []


# --------------------------------------------------------------------------------------------------------- the rows


def test_every_row_of_several_ranges_is_read_once_and_no_others(
    topic: TopicFactory, produce: Produce, read: Read
) -> None:
    name = topic(3)
    for partition in range(3):
        produce(name, [f"{partition}:{i}" for i in range(100)], partition=partition)
    rows = read(of(name, 10, 20, 0), of(name, 0, 100, 1), of(name, 99, 100, 2))
    by_partition = {p: [row for row in rows if row["partition"] == p] for p in range(3)}
    assert [offsets(by_partition[p]) for p in range(3)] == [list(range(10, 20)), list(range(100)), [99]]
    assert all(row["value"] == f"{row['partition']}:{row['offset']}".encode() for row in rows)
    assert {row["topic"] for row in rows} == {name}


def test_records_fetched_ahead_do_not_affect_the_next_range(topic: TopicFactory, produce: Produce, read: Read) -> None:
    name = topic()
    produce(name, [str(i) for i in range(1000)], partition=0)  # one answer of the broker holds them all
    for start, end in ((0, 5), (5, 10), (10, 12), (3, 7), (12, 1000)):
        assert offsets(read(of(name, start, end))) == list(range(start, end))


def test_ranges_with_committed_and_aborted_transactions_and_markers(
    topic: TopicFactory, read: Read, transactions: Callable[..., None]
) -> None:
    name = topic()
    transactions(name, ["0", "1", "2", "3", "4"])  # 0-4, marker 5
    transactions(name, ["6", "7", "8", "9", "10"], commit=False)  # 6-10, marker 11
    transactions(name, ["12", "13", "14"])  # marker 15
    bounds = range(0, 15, 3)
    batches = [offsets(read(of(name, start, start + 3))) for start in bounds]
    assert batches == [[0, 1, 2], [3, 4], [], [], [12, 13, 14]]
    assert offsets(read(of(name, 0, 16))) == [0, 1, 2, 3, 4, 12, 13, 14]
    assert read(of(name, 5, 6)) == [] == read(of(name, 15, 16))
    assert offsets(read(of(name, 0, 16), isolation="read_uncommitted")) == [*range(5), *range(6, 11), 12, 13, 14]


def test_an_open_transaction_is_waited_for_until_the_deadline(
    topic: TopicFactory, read: Read, transactions: Callable[..., None]
) -> None:
    name = topic()
    transactions(name, ["0", "1"], leave_open=True)
    with pytest.raises(ReadTimeout, match="open transaction"):
        read(of(name, 0, 2), progress_timeout_s=2.0)
    assert offsets(read(of(name, 0, 2), isolation="read_uncommitted")) == [0, 1]


_SPARK_READS = """
import pickle, sys
from pathlib import Path
from pyspark.sql import SparkSession
from spark_group_source.local.conf import local_spark_settings
servers, topics, scratch, jars = sys.argv[1:]
builder = SparkSession.builder.master("local[1]")
for key, value in {**local_spark_settings(scratch), "spark.jars": jars, "spark.sql.extensions": ""}.items():
    if not key.startswith("spark.sql.catalog"):
        builder = builder.config(key, value)
reader = builder.getOrCreate().read.format("kafka").option("kafka.bootstrap.servers", servers)
frame = reader.option("subscribe", topics).option("includeHeaders", "true").load()
table = frame.toArrow()
Path(scratch, "rows").write_bytes(pickle.dumps((table.schema, table.to_pylist())))
"""


def test_every_value_is_that_of_sparks_kafka_source(
    topic: TopicFactory, produce: Produce, broker: BrokerCluster, read: Read, tmp_path: Path
) -> None:
    idle = {"retention.ms": "-1"}
    names = [topic(config=idle), topic(config={**idle, "message.timestamp.type": "LogAppendTime"})]
    headers = (("b", b"1"), ("a", None), ("b", b""), ("b", b"1"), ("ü", b"\x00\xff"))
    written = [
        Record(b"v", b"k", timestamp_ms=1_234_567_890_123, headers=headers),
        Record(None, b"", timestamp_ms=1),
        Record(b"", None, headers=(("", b"no name"),)),
        Record(None, None, timestamp_ms=4_000_000_000),
    ]
    for name in names:
        produce(name, written, partition=0)
    jars = ",".join(map(str, spark_kafka_jars(os.environ.get("MATRIX_CONNECTOR", ""))))  # set by `make matrix`
    command = [sys.executable, "-c", _SPARK_READS, broker.bootstrap_servers, ",".join(names), str(tmp_path), jars]
    subprocess.run(command, check=True, timeout=CONNECTOR_S, env={**os.environ, "PYSPARK_PYTHON": sys.executable})
    schema, expected = pickle.loads((tmp_path / "rows").read_bytes())
    assert [(field.name, field.type) for field in schema] == [(f.name, f.type) for f in arrow_schema(COLUMNS)]
    place = itemgetter("topic", "offset")
    rows = read(*(of(name, 0, len(written)) for name in names), columns=COLUMNS)
    assert sorted(rows, key=place) == sorted(expected, key=place)
    some = ("topic", "offset", "timestamp")
    rows = read(*(of(name, 0, len(written)) for name in names), columns=some)
    assert sorted(rows, key=place) == [{name: row[name] for name in some} for row in sorted(expected, key=place)]


def test_large_records_are_batches_of_their_own(topic: TopicFactory, broker: BrokerCluster) -> None:
    name = topic(config={"max.message.bytes": "20000000"})
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "message.max.bytes": 20_000_000})
    sizes = [1_500_000, 10, 17_000_000, 1_200_000, 3]
    bodies = [os.urandom(size) for size in sizes]
    for body in bodies:
        producer.produce(name, body, partition=0)
    assert producer.flush(DEADLINE_S) == 0
    found = list(
        read_batches({"bootstrap.servers": broker.bootstrap_servers}, [of(name, 0, 5)], progress_timeout_s=DEADLINE_S)
    )
    assert [row["value"] for batch in found for row in batch.to_pylist()] == bodies
    for batch in found:
        assert batch.num_rows == 1 or batch.column("value").nbytes <= 2 * records.BATCH_BYTES_MAX


@pytest.fixture
def lists(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """This librdkafka, or one without functions for lists of messages: then the fallback is used."""
    if request.param == "as expected":
        yield
        return
    monkeypatch.setitem(native_client._LISTS, "no_such_call", (None,))
    native_client.list_calls.cache_clear()
    assert native_client.list_calls() is None
    assert "destroying messages one by one" in caplog.text
    monkeypatch.undo()
    yield
    native_client.list_calls.cache_clear()


@pytest.mark.parametrize("lists", ["as expected", "no calls"], indirect=True)
@pytest.mark.usefixtures("lists")
def test_memory_is_freed_after_every_batch(topic: TopicFactory, produce: Produce, broker: BrokerCluster) -> None:
    name = topic()
    produce(name, (b"%0200d" % i for i in range(50_000)), partition=0)

    def resident_mib() -> int:
        range_reader.close_idle_clients()  # what it had fetched ahead depends on the machine
        ctypes.CDLL(None).malloc_trim(0)
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) // 1024

    def read_all(times: int) -> None:
        for _ in range(times):
            found = read_batches({"bootstrap.servers": broker.bootstrap_servers}, [of(name, 0, 50_000)])
            rows = [batch.num_rows for batch in found]
            assert sum(rows) == 50_000 and max(rows) <= records.BATCH_ROWS_MAX

    read_all(2)
    before_mib = resident_mib()
    read_all(8)  # 80 MiB of values in 400,000 messages
    assert resident_mib() - before_mib < 40


def test_a_finished_range_is_no_longer_fetched(
    topic: TopicFactory, produce: Produce, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = topic(2)
    for partition in range(2):
        produce(name, (b"%0100d" % i for i in range(20_000)), partition=partition)
    client = NativeClient
    dropped: list[TopicPartition] = []
    drop = client.incremental_unassign

    def spy(self: Any, tps: Sequence[TopicPartition]) -> None:
        dropped.extend(tps)
        drop(self, tps)

    monkeypatch.setattr(client, "incremental_unassign", spy)
    rows = read(of(name, 0, 5, 0), of(name, 0, 20_000, 1))
    assert len(rows) == 20_005
    assert dropped == [TopicPartition(name, 0)]


_bytes = st.one_of(st.none(), st.binary(max_size=40), st.binary(min_size=200, max_size=400))
# librdkafka ends a header's name at a NUL.
_headers = st.lists(
    st.tuples(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5),
        st.one_of(st.none(), st.binary(max_size=20)),
    ),
    max_size=4,
)
_records = st.lists(st.tuples(_bytes, _bytes, st.integers(0, 4_000_000_000_000), _headers), min_size=1, max_size=30)


HEADERS_AT = native_client._HEADERS_AT


@pytest.mark.parametrize("headers_at", [HEADERS_AT, 88], ids=["as expected", "elsewhere"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=_records, compression=st.sampled_from(["none", "lz4", "zstd", "gzip", "snappy"]))
def test_any_record_is_read_as_it_was_written(
    written: list[tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]],
    compression: str,
    round_trip: tuple[str, str],
    headers_at: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also with a librdkafka that has headers elsewhere in its messages: then they are read one by one."""
    monkeypatch.setattr(native_client, "_HEADERS_AT", headers_at)
    range_reader.close_idle_clients()
    servers, name = round_trip
    producer = Producer({"bootstrap.servers": servers, "compression.type": compression})
    placed: list[int] = []
    for key, value, stamp_ms, headers in written:
        producer.produce(
            name,
            value,
            key,
            0,
            timestamp=stamp_ms,
            headers=headers,  # type: ignore[arg-type]  # the stub forgets bytes in the list form
            on_delivery=lambda _, message: placed.append(message.offset()),  # type: ignore[arg-type]  # delivered
        )
    assert producer.flush(DEADLINE_S) == 0
    first = min(placed)
    rows: list[Row] = []
    for batch in read_batches({"bootstrap.servers": servers}, [of(name, first, first + len(written))], columns=COLUMNS):
        batch.validate(full=True)
        rows.extend(batch.to_pylist())
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert [
        (
            row["key"],
            row["value"],
            (row["timestamp"] - epoch) // timedelta(milliseconds=1),
            [(h["key"], h["value"]) for h in row["headers"] or []],
        )
        for row in rows
    ] == [
        (key, value, stamp_ms or (row["timestamp"] - epoch) // timedelta(milliseconds=1), headers)
        for (key, value, stamp_ms, headers), row in zip(written, rows, strict=True)
    ]
    assert all(row["headers"] is None or row["headers"] for row in rows)
    if headers_at == HEADERS_AT:
        assert "headers elsewhere" not in caplog.text, "also for empty keys and values"


@pytest.fixture
def round_trip(broker: BrokerCluster, topic: TopicFactory) -> tuple[str, str]:
    # The timestamps are far from now: too far ahead is refused by default, too long ago would be deleted.
    limits = {"message.timestamp.after.max.ms": "9223372036854775807", "retention.ms": "-1"}
    return broker.bootstrap_servers, topic(config=limits)


# ------------------------------------------------------------------------------------------------ how a range ends


def compacted(topic: TopicFactory, produce: Produce, admin: AdminClient, servers: str) -> str:
    """A topic with one key overwritten 100 times and compacted: the last offsets below 100 are gone."""
    name = topic(
        config={
            "cleanup.policy": "compact",
            "segment.ms": "100",
            "min.cleanable.dirty.ratio": "0.001",
            "max.compaction.lag.ms": "100",
            "delete.retention.ms": "0",
        }
    )
    produce(name, [Record(b"idle", b"other")], partition=0)
    produce(name, [Record(str(i).encode(), b"same") for i in range(99)], partition=0)
    held = Consumer({"bootstrap.servers": servers, "group.id": name, "enable.partition.eof": True})

    def is_compacted() -> bool:
        produce(name, [Record(b"roll", b"same")], partition=0)  # rolls the segment, so that it can be compacted
        held.assign([KafkaTopicPartition(name, 0, 0)])
        found: list[int] = []
        while True:
            message = held.poll(DEADLINE_S)
            assert message is not None
            if message.error():
                break
            found.append(message.offset() or 0)
        return not any(90 <= offset < 100 for offset in found)

    await_until(is_compacted, what="compaction")
    held.close()
    return name


def test_a_range_whose_last_offsets_were_compacted_away_is_finished(
    topic: TopicFactory, produce: Produce, admin: AdminClient, broker: BrokerCluster, read: Read
) -> None:
    name = compacted(topic, produce, admin, broker.bootstrap_servers)
    assert offsets(read(of(name, 0, 100), progress_timeout_s=LONG_S)) == [0]
    assert read(of(name, 50, 100), progress_timeout_s=LONG_S) == []


class Silent(FakeClient):
    """A client without records, whose position is 9 from the second time it is read."""

    position_reads = 0

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        self.position_reads += 1
        return dict.fromkeys(tps, 9 if self.position_reads > 1 else -1001)

    def describe_topics(self, names: Sequence[str]) -> FakeRequest:
        return FakeRequest([{"t": records.TopicDescription(0, "", "", 1)}])

    def request_watermarks(self, tp: TopicPartition) -> FakeRequest:
        return FakeRequest([records.Watermarks(0, 100)])


@dataclass
class FixedLease(range_reader.ClientLease):
    """A lease of a fixed client."""

    client: Any

    def renew(self) -> None:
        raise AssertionError


def offsets_by(client: FakeClient, *wanted: OffsetRange, **options: Any) -> Iterator[tuple[int, int]]:
    """(partition, offset) of each row that a reader with this client hands over."""
    epochs, ids = options.pop("leader_epochs", {}), options.pop("topic_ids", {})
    settings = options.pop("settings", {})
    given = range_reader.ReadOptions(settings, **{"progress_timeout_s": LONG_S, "outage_timeout_s": LONG_S, **options})
    reader = range_reader.RangeReader(FixedLease(client), Piece(wanted, ids, epochs), given, range_reader.ReadCounts())
    for batch in reader.batches():
        yield from ((row["partition"], row["offset"]) for row in batch.to_pylist())


T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class DamagedBatch(Silent):
    """Each fetch returns offsets in pairs. The first time the second pair has a wrong checksum: librdkafka reports it
    and continues after it."""

    polls = 0

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 9)

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        self.polls += 1
        at = list(range(3, 9)) if self.reassigned else {1: [1, 2], 2: [5, 6], 3: [7, 8]}.get(self.polls, [])
        codes = {2: min(records.DAMAGED), 4: records.EOF}
        events = [records.ClientEvent(codes[n], "", T0, 9) for n in codes if n == self.polls]
        return FakeChunk([Message(T0, offset) for offset in at], events)


def test_records_after_a_damaged_batch_are_fetched_again_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "CHECK_AFTER_S", 0.01)
    client = DamagedBatch()
    assert list(offsets_by(client, of("t", 1, 9))) == [(0, offset) for offset in range(1, 9)]
    assert client.reassigned == [(T0, 3)]


class Beyond(Silent):
    """A client that returns the last rows of a range together with an error behind its end, and then another range."""

    polls = 0

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        self.polls += 1
        broken = records.ClientEvent(KafkaError._BAD_COMPRESSION, "cannot decompress", T0, 3)
        if self.polls == 1:
            return FakeChunk([Message(T0, 1), Message(T0, 2)], [broken])
        return FakeChunk([Message(T1, 1), Message(T1, 2)], [broken])


def test_an_error_behind_the_end_of_a_range_does_not_fail_the_task() -> None:
    """It concerns the batch that has these records."""
    ranges = of("t", 1, 3), OffsetRange(T1, 1, 3)
    assert list(offsets_by(Beyond(), *ranges)) == [(0, 1), (0, 2), (1, 1), (1, 2)]


SECRET = TopicPartition("secret", 0)


class RefusesOne(Silent):
    """A client that may read the first topic and not the second, which the library reports once."""

    polls = 0

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 1)

    def describe_topics(self, names: Sequence[str]) -> FakeRequest:
        return FakeRequest([{name: records.TopicDescription(0, "", "", 1) for name in ("t", "secret")}])

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        self.polls += 1
        refused = records.ClientEvent(KafkaError.TOPIC_AUTHORIZATION_FAILED, "denied", SECRET, -1)
        events = {1: [refused], 2: [records.ClientEvent(records.EOF, "", T0, 3)]}.get(self.polls, [])
        return FakeChunk([Message(T0, 1)] if self.polls == 1 else [], events)


@dataclass
class RenewedLease(FixedLease):
    """A lease that is renewed with further clients."""

    clients: list[Any]

    def renew(self) -> None:
        self.client = self.clients.pop(0)


def test_a_range_that_ends_as_the_client_is_renewed_is_not_removed_from_the_new_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library refuses to remove a partition that was not assigned; the task would end with that error, instead of
    the one that names the refused topic."""
    monkeypatch.setattr(broker_checks, "GRACE_S", 0)
    second = RefusesOne()
    lease = RenewedLease(RefusesOne(), [second])
    options = range_reader.ReadOptions({}, progress_timeout_s=LONG_S, outage_timeout_s=LONG_S)
    piece = Piece((of("t", 1, 3), OffsetRange(SECRET, 1, 3)), {}, {})
    with pytest.raises(AccessDenied, match="secret"):
        list(range_reader.RangeReader(lease, piece, options, range_reader.ReadCounts()).batches())
    assert second.polls and not lease.clients


class LargeRecords(FakeClient):
    """Each fetch returns one large record."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_max: list[int] = []

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        self.rows_max.append(rows_max)
        return FakeChunk([Message(T0, len(self.rows_max), value=bytes(records.BATCH_BYTES_MAX // 4))])


def test_after_large_records_a_poll_returns_fewer() -> None:
    """The rows of a poll are in memory twice: in the client, and in the batch."""
    client = LargeRecords()
    assert list(islice(offsets_by(client, of("t", 1, 100)), 2)) == [(0, 1), (0, 2)]
    assert client.rows_max[0] > 4 >= client.rows_max[1]


def test_a_position_that_reaches_the_end_without_a_record_finishes_the_range() -> None:
    client = Silent()
    assert list(offsets_by(client, of("t", 5, 9))) == []
    assert client.position_reads == 2


class NoResponse(Silent):
    """Requests get no response. The position moves all the same, some time after the first request."""

    calls = 0

    def describe_topics(self, names: Sequence[str]) -> FakeRequest:
        self.calls += 1
        return FakeRequest([])

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        self.position_reads += self.calls
        return dict.fromkeys(tps, 9 if self.position_reads > 5 else -1001)


def test_a_range_is_read_while_its_check_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader died: the broker that gets the request may be dead as well, and the new leader has the records long
    before the request times out."""
    monkeypatch.setattr(range_reader, "CHECK_AFTER_S", 0.01)
    client = NoResponse()
    assert list(offsets_by(client, of("t", 5, 9))) == []
    assert client.calls == 1


class LateTopic(Silent):
    """The first response about the topic is an error."""

    def __init__(self) -> None:
        super().__init__()
        error, topic = (
            records.TopicDescription(code, "", id_, 1) for code, id_ in ((min(records.DAMAGED), ""), (0, "id"))
        )
        self.responses = [{"t": error}, {"t": topic}]

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        return FakeChunk([Message(T0, 5), Message(T0, 6)])

    def describe_topics(self, names: Sequence[str]) -> FakeRequest:
        return FakeRequest([self.responses.pop(0)])


def test_a_topic_that_is_not_confirmed_is_requested_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []
    monkeypatch.setattr(range_reader._pause, "wait", pauses_s.append)
    assert list(offsets_by(LateTopic(), of("t", 5, 7), topic_ids={"t": "id"})) == [(0, 5), (0, 6)]
    assert pauses_s == [range_reader.TOPIC_REQUEST_PAUSE_S]


class LogEnd(Silent):
    """The log's readable end is reached. The position moves on when a check has begun."""

    polls = checks = 0

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        self.polls += 1
        assert self.polls < 9, "no check"
        return FakeChunk([], [records.ClientEvent(records.EOF, "", T0, 5)] if self.polls == 1 else [])

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 9 if self.checks else -1001)

    def request_watermarks(self, tp: TopicPartition) -> FakeRequest:
        self.checks += 1
        return FakeRequest([])


def test_a_range_is_checked_at_once_when_the_log_ends_before_it() -> None:
    assert list(offsets_by(LogEnd(), of("t", 5, 9))) == []


class FailedCheck(Silent):
    """The log of ``t``-1 ends before the range, and the request of its check fails after a record of ``t``-0 came."""

    polls = 0

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        self.polls += 1
        rows = {2: [Message(T0, 0)], 4: [Message(T1, 5)]}.get(self.polls, [])
        return FakeChunk(rows, [records.ClientEvent(records.EOF, "", T1, 5)] if self.polls == 1 else [])

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, -1001)

    def describe_topics(self, names: Sequence[str]) -> FakeRequest:
        return FakeRequest([None, records.ClientEvent(native_client.TIMED_OUT, "timed out", None, -1)])


def test_the_time_that_the_consumer_of_a_batch_takes_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    for module in (range_reader, broker_checks):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    found = offsets_by(FailedCheck(), of("t", 0, 1), of("t", 5, 6, 1))
    assert next(found) == (0, 0)
    now_s = 2 * LONG_S
    assert list(found) == [(1, 5)]


class OpenTransaction(Silent):
    """The log's readable end is reached, and again after a new assignment. Only the first check gets a response: the
    log has records up to the planned end."""

    polls = checks = 0

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        self.polls += 1
        return FakeChunk([], [records.ClientEvent(records.EOF, "", T0, 5)] if self.polls in (1, 3) else [])

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, -1001)

    def request_watermarks(self, tp: TopicPartition) -> FakeRequest:
        self.checks += 1
        return FakeRequest([records.Watermarks(0, 9)] if self.checks == 1 else [])


def test_a_timeout_names_a_known_open_transaction_while_the_next_check_is_pending() -> None:
    client = OpenTransaction()
    with pytest.raises(ReadTimeout, match=r"t-0 has an open transaction before the planned end"):
        list(offsets_by(client, of("t", 5, 9), progress_timeout_s=0.2, outage_timeout_s=0.2))
    assert client.checks == 2


class OnlyAborted(Silent):
    """Fetches records of aborted transactions, of which librdkafka returns nothing, while the broker responds."""

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, -1001)


@pytest.mark.parametrize(("isolation", "named"), [("read_committed", True), ("read_uncommitted", False)])
def test_a_timeout_while_brokers_respond_names_aborted_transactions_as_a_cause(isolation: str, named: bool) -> None:
    options = {"progress_timeout_s": 0.2, "settings": {"isolation.level": isolation}}
    with pytest.raises(ReadTimeout, match=r"still to read: t-0\[0,9\)") as caught:
        list(offsets_by(OnlyAborted(), of("t", 0, 9), **options))
    assert ("large aborted transaction" in str(caught.value)) == named
    assert ("kafkaConsumer.pollTimeoutMs" in str(caught.value)) == named


class OnlyEarlier(OnlyAborted):
    """Fetches a record before the range each time, as brokers do that return whole batches."""

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        return FakeChunk([Message(T0, 1)])


def test_records_before_a_range_are_no_progress() -> None:
    with pytest.raises(ReadTimeout, match=r"still to read: t-0\[5,9\)"):
        list(offsets_by(OnlyEarlier(), of("t", 5, 9), progress_timeout_s=0.2))


class NewerLeader(Silent):
    """``t``-0 returns offset 0, and one of a newer leader at 1, followed by the log's end. ``t``-1 returns one offset
    per poll. The watermarks of ``t``-0 arrive after ``t``-1 is read.

    Args:
        watermarks: of ``t``-0.
    """

    def __init__(self, watermarks: records.Watermarks) -> None:
        super().__init__()
        self.watermarks = watermarks
        self.polls = 0
        self.request = FakeRequest([])

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        self.polls += 1
        if self.polls == 1 or self.reassigned:
            first = [] if self.reassigned else [Message(T0, 0, epoch=1)]
            messages = [*first, *(Message(T0, at, epoch=2) for at in (1, 2))]
            return FakeChunk(messages, [records.ClientEvent(records.EOF, "", T0, 3)])
        if self.polls == 7:
            self.request.answers = [self.watermarks]
        return FakeChunk([Message(T1, self.polls - 2, epoch=1)] if self.polls < 7 else [])

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, -1001)

    def describe_topics(self, names: Sequence[str]) -> FakeRequest:
        return FakeRequest([{"t": records.TopicDescription(0, "", "", 2)}])

    def request_watermarks(self, tp: TopicPartition) -> FakeRequest:
        assert tp == T0
        return self.request


EPOCHS = {T0: 1, T1: 1}


def test_other_ranges_are_read_while_a_truncation_is_checked() -> None:
    """Records and the log's end of a partition whose log may be truncated are ignored until its leader responds."""
    client = NewerLeader(records.Watermarks(0, 3, 2))
    found: list[tuple[int, int]] = []
    with pytest.raises(DataLoss, match=r"truncated at 1 or below.* have leader epoch 2"):
        found.extend(offsets_by(client, of("t", 0, 3), of("t", 0, 5, 1), leader_epochs=EPOCHS))
    assert found == [(0, 0), *((1, offset) for offset in range(5))]


def test_a_truncated_range_is_skipped_if_data_loss_does_not_fail() -> None:
    client, counts = NewerLeader(records.Watermarks(0, 3, 2)), range_reader.ReadCounts()
    given = range_reader.ReadOptions({}, progress_timeout_s=LONG_S, fail_on_data_loss=False)
    piece = Piece((of("t", 0, 3), of("t", 0, 5, 1)), {}, EPOCHS)
    rows = sum(batch.num_rows for batch in range_reader.RangeReader(FixedLease(client), piece, given, counts).batches())
    assert rows == 6
    counts.complete("etl")
    assert counts.reported.skipped == (of("t", 1, 3),)


def test_records_with_incomparable_leader_epochs_are_read() -> None:
    client = NewerLeader(records.Watermarks(0, 3, 0))
    rows = offsets_by(client, of("t", 0, 3), of("t", 0, 5, 1), leader_epochs=EPOCHS)
    assert sorted(rows) == [*((0, offset) for offset in range(3)), *((1, offset) for offset in range(5))]
    assert client.reassigned == [(T0, 1)]


def test_a_record_that_spark_cannot_store_fails_with_the_command_that_skips_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(*_: object) -> None:
        raise GroupError("the record of t-0 at offset 1 has a wrong timestamp", topic="t", partition=0, offset=1)

    monkeypatch.setattr(FakeChunk, "batch", batch)
    settings = {"bootstrap.servers": "b:1", "group.id": "etl"}
    options = range_reader.ReadOptions(settings, progress_timeout_s=LONG_S, outage_timeout_s=LONG_S)
    piece = Piece((of("t", 0, 3),))
    reader = range_reader.RangeReader(
        FixedLease(NewerLeader(records.Watermarks(0, 3))), piece, options, range_reader.ReadCounts()
    )
    command = "spark-group reset --bootstrap-servers b:1 --group etl --topic t:0 --to-offset 2 --execute"
    with pytest.raises(GroupError, match=command) as caught:
        list(reader.batches())
    assert caught.value.fields == {"topic": "t", "partition": 0, "offset": 1}
    text = str(caught.value)
    assert "leave timestamp out of the option columns" in text, "no record is lost then"
    assert "with those of t-0 before it that are not written yet" in text, "the batch of the record has failed"
    assert "with another sink, start it with a new checkpoint" in text, "the former one has the failed batch's plan"


def test_two_readers_in_one_process_read_their_own_ranges(
    topic: TopicFactory, produce: Produce, broker: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "BATCH_ROWS_MAX", 10)  # so that both are half way at the same time
    name = topic()
    produce(name, [str(i) for i in range(100)], partition=0)
    servers = {"bootstrap.servers": broker.bootstrap_servers}

    def start(first: int, last: int) -> Iterator[int]:
        for batch in read_batches(servers, [of(name, first, last)]):
            yield from batch.column("offset").to_pylist()

    assert list(start(0, 1)) == [0]  # from now on a client is idle
    one, two = start(0, 60), start(30, 100)
    begun = [next(one)], [next(two)]
    assert [*begun[0], *one] == list(range(60))
    assert [*begun[1], *two] == list(range(30, 100))


def test_the_client_is_reused_and_replaced_after_an_error(topic: TopicFactory, produce: Produce, read: Read) -> None:
    name = topic()
    produce(name, ["0", "1", "2"], partition=0)

    def idle() -> list[NativeClient]:
        return list(range_reader.idle_clients.values())

    range_reader.close_idle_clients()
    assert offsets(read(of(name, 0, 3))) == [0, 1, 2]
    first = idle()
    assert len(first) == 1
    assert offsets(read(of(name, 1, 3))) == [1, 2]
    assert idle() == first
    with pytest.raises(GroupError):
        read(of(name, 0, 4), progress_timeout_s=0.2)
    assert idle() == [] and first[0].rk is None, "it is closed"
    assert offsets(read(of(name, 0, 3))) == [0, 1, 2]
    assert idle() != first


def test_a_renewed_client_is_closed_before_the_next_one_is_opened() -> None:
    settings = range_reader._settings({"bootstrap.servers": "127.0.0.1:1"})
    lease = range_reader.ClientLease(range_reader._ClientSettings(settings))
    first = lease.client
    lease.renew()
    assert first.rk is None and lease.client.rk is not None
    lease.release(is_reusable=False)
    assert lease.client not in range_reader.idle_clients.values()


def test_clients_that_were_not_used_for_long_are_closed() -> None:
    """The library would keep what it reports about lost connections until the client is used."""
    unused, recent, next_ = (
        range_reader._ClientSettings(range_reader._settings({"bootstrap.servers": f"127.0.0.1:{port}"}))
        for port in (1, 2, 3)
    )
    range_reader.close_idle_clients()
    leases = [range_reader.ClientLease(settings) for settings in (unused, recent)]
    for lease in leases:
        lease.release(is_reusable=True)
    leases[0].client.used_s -= range_reader.IDLE_S_MAX
    range_reader.ClientLease(next_).release(is_reusable=False)
    assert leases[0].client.rk is None and list(range_reader.idle_clients) == [recent]
    leases[1].client.used_s -= range_reader.IDLE_S_MAX
    assert range_reader.ClientLease(recent).client is leases[1].client, "its own is used again, however late"
    leases[1].release(is_reusable=False)


def test_a_worker_that_runs_tasks_of_many_queries_keeps_the_clients_of_the_last_ones(
    topic: TopicFactory, produce: Produce, broker: BrokerCluster
) -> None:
    name = topic()
    produce(name, ["0"], partition=0)

    def read_for(group: str) -> NativeClient:
        settings = {"bootstrap.servers": broker.bootstrap_servers, "group.id": group}
        assert sum(batch.num_rows for batch in read_batches(settings, [of(name, 0, 1)])) == 1
        return next(reversed(range_reader.idle_clients.values()))

    range_reader.close_idle_clients()
    count = range_reader.IDLE_CLIENTS_MAX
    first, *others = [read_for(f"group-{number}") for number in range(count)]
    assert read_for("group-0") is first, "it is used again"
    newest = read_for(f"group-{count}")
    assert others[0].rk is None, "it was not used longest"
    assert list(range_reader.idle_clients.values()) == [*others[1:], first, newest]


@pytest.mark.parametrize("answers", ["refused", "never"])
def test_a_broker_that_does_not_respond_is_named_within_the_deadline(answers: str) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if answers == "never":
            mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ReadTimeout) as caught:
            list(read_batches({"bootstrap.servers": address}, [of("orders", 7, 9)], progress_timeout_s=2))
    assert int(str(caught.value.fields["waited_ms"])) >= 2_000
    assert address in str(caught.value)
    assert "orders-0[7,9)" in str(caught.value)
    assert answers == "never" or "refused" in str(caught.value) or "brokers are down" in str(caught.value)
    assert caught.value.retriable
    assert caught.value.fields["ranges"] == [("orders", 0, 7, 9)]


def test_a_broker_that_stops_responding_is_a_timeout_and_no_data_loss() -> None:
    with MockCluster() as cluster:
        cluster.create_topic("orders")
        servers = {"bootstrap.servers": cluster.bootstrap_servers}
        produce_to(Producer(servers), "orders", ["0", "1"], partition=0)
        found = read_batches(servers, [of("orders", 0, 9)], progress_timeout_s=2, fail_on_data_loss=False)
        assert next(found).num_rows == 2
        cluster.set_rtt(1, NEVER_MS)
        with pytest.raises(ReadTimeout, match=r"orders-0\[2,9\)"):
            list(found)


# ------------------------------------------------------------------------------------------------------ data loss


def delete_records(admin: AdminClient, name: str, before: int) -> None:
    admin.delete_records([KafkaTopicPartition(name, 0, before)])[KafkaTopicPartition(name, 0)].result(300)


def test_records_deleted_while_the_range_is_read_are_data_loss(
    topic: TopicFactory,
    produce: Produce,
    admin: AdminClient,
    broker: BrokerCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "BATCH_ROWS_MAX", 10)
    name = topic()
    produce(name, [os.urandom(900_000) for _ in range(60)], partition=0)
    reading = read_batches(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "queued.max.messages.kbytes": "2000",  # nothing is fetched far ahead
            "max.partition.fetch.bytes": "1000000",
        },
        [of(name, 0, 60)],
    )
    next(reading)
    delete_records(admin, name, 50)
    with pytest.raises(DataLoss) as caught:
        list(reading)
    assert caught.value.fields["available"] == (50, 60)


@pytest.mark.parametrize("partition", [0, 1])
def test_a_missing_topic_or_partition_is_reported_or_skipped(
    topic: TopicFactory, produce: Produce, read: Read, partition: int, caplog: pytest.LogCaptureFixture
) -> None:
    there = topic()
    produce(there, ["0", "1"], partition=0)
    gone = there if partition else f"{there}-gone"
    with pytest.raises(TopicMissing, match=gone) as caught:
        read(of(gone, 0, 5, partition), of(there, 0, 2), progress_timeout_s=LONG_S)
    assert caught.value.fields == {"topics": [gone]}
    rows = read(of(gone, 0, 5, partition), of(there, 0, 2), fail_on_data_loss=False)
    assert offsets(rows) == [0, 1]
    assert gone in caplog.text


# -------------------------------------------------------------------------------------------- clients and processes


def test_a_thousand_small_ranges_are_read_by_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def counted(given: Mapping[str, str]) -> NativeClient:
        opened.append(given)
        return NativeClient(given)

    range_reader.close_idle_clients()
    monkeypatch.setattr(range_reader, "NativeClient", counted)
    with MockCluster() as cluster:
        cluster.create_topic("orders", 1000)
        servers = {"bootstrap.servers": cluster.bootstrap_servers}
        produce_to(Producer(servers), "orders", [Record(b"%d" % p, partition=p) for p in range(1000)])
        found = read_batches(servers, [of("orders", 0, 1, p) for p in range(1000)], progress_timeout_s=DEADLINE_S)
        rows = [row for batch in found for row in batch.to_pylist()]
        range_reader.close_idle_clients()
    assert sorted((row["partition"], row["value"]) for row in rows) == [(p, b"%d" % p) for p in range(1000)]
    assert len(opened) == 1


def test_an_abandoned_read_releases_its_client(
    topic: TopicFactory, produce: Produce, read: Read, broker: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = NativeClient
    cleared: list[object] = []
    clear = client.clear

    def spy(self: Any) -> None:
        cleared.append(self)
        clear(self)

    monkeypatch.setattr(client, "clear", spy)
    name, other = topic(), topic()
    produce(name, [str(i) for i in range(20_000)], partition=0)
    produce(other, ["0", "1"], partition=0)
    for _ in range(3):
        reading = read_batches(
            {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": "read_committed"},
            [of(name, 0, 20_000)],
        )
        next(reading)
        cleared.clear()
        del reading
        assert len(cleared) == 1  # fetching stops with the reader
        assert offsets(read(of(other, 0, 2))) == [0, 1]
        assert offsets(read(of(name, 100, 103))) == [100, 101, 102]
    assert len(range_reader.idle_clients) >= 1


FORKED = """
import json, os, signal, sys
from spark_group_source.reader import range_reader
from spark_group_source.reader.range_reader import ReadOptions
from spark_group_source.model import OffsetRange, Piece, TopicPartition
given = json.loads(sys.argv[1])
def count():
    wanted = Piece((OffsetRange(TopicPartition(given["topic"], 0), 0, 3),))
    return sum(batch.num_rows for batch in range_reader.read_ranges(wanted, ReadOptions(given["settings"])))
assert count() == 3  # the parent has a client now
child = os.fork()
if child == 0:
    signal.alarm(given["bound_s"])  # ends a child that hangs
    found = 99
    try:
        found = count()
        range_reader.close_idle_clients()
    finally:
        os._exit(found)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert count() == 3
"""
FORKED_S = 600


def test_a_forked_worker_uses_its_own_client(topic: TopicFactory, produce: Produce, broker: BrokerCluster) -> None:
    """In a process without other clients, like Spark's daemon: a fork copies locks in their current state."""
    name = topic()
    produce(name, ["0", "1", "2"], partition=0)
    settings = {"bootstrap.servers": broker.bootstrap_servers}
    given = {"topic": name, "settings": settings, "bound_s": FORKED_S // 2}
    subprocess.run([sys.executable, "-c", FORKED, json.dumps(given)], timeout=FORKED_S, check=True)


def test_settings_of_members_do_not_affect_a_reader(
    topic: TopicFactory, produce: Produce, admin: AdminClient, broker: BrokerCluster
) -> None:
    name = topic()
    produce(name, ["0", "1"], partition=0)
    odd = {
        "bootstrap.servers": broker.bootstrap_servers,
        "group.id": "g",
        "group.instance.id": "i",
        "group.protocol": "consumer",
        "group.remote.assignor": "uniform",
        "session.timeout.ms": "6000",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": "true",
    }
    assert sum(batch.num_rows for batch in read_batches(odd, [of(name, 0, 1)])) == 1
    delete_records(admin, name, 1)
    with pytest.raises(DataLoss):  # and not the earliest record that is left
        list(read_batches(odd, [of(name, 0, 2)], progress_timeout_s=DEADLINE_S))


# ------------------------------------------------------------------------------------------------------ masked secrets


def test_a_refused_setting_is_named_without_its_value() -> None:
    wrong = {"bootstrap.servers": "127.0.0.1:1", "sasl.mechanism": "PLAIN", "sasl.password": "hush", "no.such": "thing"}
    with pytest.raises(OptionError, match=r"no\.such") as caught:
        list(read_batches(wrong, [of("orders", 0, 5)]))
    assert "hush" not in str(caught.value) + repr(caught.value.__cause__)
    assert caught.value.fields == {"names": ["no.such"]}


def test_a_secret_in_librdkafkas_error_is_masked() -> None:
    given = {"ssl.key.password": "hush", "client.id": "etl"}
    refused = refused_setting('cannot use "hush" of "ssl.key.password" for etl', given)
    assert str(refused).endswith('cannot use "***" of "ssl.key.password" for etl')
    assert refused.fields == {"names": ["ssl.key.password"]}


# ------------------------------------------------------------------------------------- private details of librdkafka


def test_timestamps_are_read_one_by_one_if_the_layout_is_unexpected(
    topic: TopicFactory,
    produce: Produce,
    read: Read,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = topic(config={"retention.ms": "-1"})  # these records are old
    produce(name, [Record(b"v", timestamp_ms=1_000 + i) for i in range(5)], partition=0)
    monkeypatch.setattr(native_client, "_STAMP", native_client._OFFSET)
    stamps = [row["timestamp"].microsecond for row in read(of(name, 0, 5))]
    assert stamps == [0, 1000, 2000, 3000, 4000]
    assert "reading timestamps one by one" in caplog.text


def test_a_batch_has_exactly_the_rows_of_its_slices(
    topic: TopicFactory, produce: Produce, broker: BrokerCluster
) -> None:
    name = topic(2)
    for partition in range(2):
        produce(name, [f"{partition}:{i}" for i in range(100)], partition=partition)
    client = native_client.NativeClient({"bootstrap.servers": broker.bootstrap_servers, "group.id": "reader"})
    client.assign([(TopicPartition(name, partition), 0) for partition in range(2)])
    chunk = client.poll(200, 30)
    assert sorted((run.tp.partition, len(run.offsets)) for run in chunk.partition_rows) == [(0, 100), (1, 100)]
    cuts = [RowSlice(run.tp, run.first + 10, run.first + 20) for run in chunk.partition_rows]
    rows = chunk.batch(cuts, columns=COLUMNS[:-1]).to_pylist()
    assert [row["value"].decode() for row in rows] == [f"{c.tp.partition}:{i}" for c in cuts for i in range(10, 20)]
    assert [row["partition"] for row in rows] == [c.tp.partition for c in cuts for _ in range(10)]
    chunk.free()
    chunk.free()
    client.close()
