"""Prefetching from a real Kafka by a real agent: tasks get the rows of a direct read, whatever happens to the agent."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import agent_helpers
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from conftest import Produce, Record, TopicFactory, await_until
from kafka_helpers import ADMIN_S, await_markers
from reading import read as read_batches
from reading import read_with_agent

from spark_group_source.agents.agent_folder import AgentFolder
from spark_group_source.agents.messages import ClaimGranted, PrefetchPositions, ServedRanges
from spark_group_source.agents.prefetch import client
from spark_group_source.errors import TopicMissing
from spark_group_source.local.broker import Broker
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.table import COLUMNS
from spark_group_source.reader.range_reader import ReadCounts
from spark_group_source.reader.records import arrow_schema

Row = dict[str, Any]
StartAgent = Callable[..., AgentFolder]
COMMITTED = {"isolation.level": "read_committed"}


@pytest.fixture
def settings(broker: Broker) -> dict[str, str]:
    return {"bootstrap.servers": broker.bootstrap_servers, **COMMITTED}


def all_of(ends: Mapping[TopicPartition, int]) -> list[OffsetRange]:
    return [OffsetRange(tp, 0, end) for tp, end in ends.items()]


def rows_of(batches: Iterator[Any], columns: Sequence[str] = COLUMNS[:-1]) -> list[Row]:
    found: list[Row] = []
    for batch in batches:
        assert batch.schema.equals(arrow_schema(columns))
        batch.validate(full=True)
        found += batch.to_pylist()
    last: dict[tuple[str, int], int] = {}
    for row in found:
        tp = row["topic"], row["partition"]
        assert last.get(tp, -1) < row["offset"], "in the order of offsets"
        last[tp] = row["offset"]
    return sorted(found, key=lambda row: (row["topic"], row["partition"], row["offset"]))


def ids_of(admin: AdminClient, name: str) -> dict[str, str]:
    from confluent_kafka import TopicCollection

    described = admin.describe_topics(TopicCollection([name]))[name].result(ADMIN_S)
    return {name: str(described.topic_id)}


# ----------------------------------------------------------------------------------------------------- the same rows


def plain_records(name: str, produce: Produce, servers: str) -> None:
    headers = (("h", b"1"), ("h", None), ("", b""))
    produce(
        name,
        [
            Record(None, None, 0),
            Record(b"", b"", 0, headers=headers),
            Record(b"v", None, 0, timestamp_ms=1),
            Record(None, b"k", 1, headers=(("täg", b"\x00\xff"),)),
            *(Record(b"%d" % i, b"k" * (i % 40), i % 3, headers=headers if i % 5 else ()) for i in range(3_000)),
        ],
    )


def transactions(name: str, produce: Produce, servers: str) -> None:
    """Committed and aborted ones in turns; the log ends with an abort."""
    producer = Producer({"bootstrap.servers": servers, "transactional.id": f"tx-{os.urandom(4).hex()}"})
    producer.init_transactions(ADMIN_S)
    for number in range(12):
        producer.begin_transaction()
        for i in range(50):
            producer.produce(name, f"{number}:{i}".encode(), partition=number % 3)
        producer.flush(ADMIN_S)
        if number % 2:
            producer.abort_transaction(ADMIN_S)
        else:
            producer.commit_transaction(ADMIN_S)


def large_records(name: str, produce: Produce, servers: str) -> None:
    produce(name, [Record(os.urandom(size), b"k", size % 3) for size in (900_000, 10, 990_001, 800_000, 3, 1, 700_002)])


def few_of_each(name: str, produce: Produce, servers: str) -> None:
    produce(name, [Record(b"%d" % i, None, i % 300) for i in range(900)])


KINDS = {"plain": (3, plain_records), "transactions": (3, transactions), "large": (3, large_records),
         "many": (300, few_of_each)}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("plain", COLUMNS), ("plain", COLUMNS[1:5]), *((kind, COLUMNS[:-1]) for kind in KINDS if kind != "plain")],
    ids=str,
)
def test_prefetched_rows_are_those_of_a_direct_read(
    topic: TopicFactory,
    produce: Produce,
    end_offsets: Callable[[str], dict[TopicPartition, int]],
    admin: AdminClient,
    settings: dict[str, str],
    reader: StartAgent,
    kind: str,
    columns: tuple[str, ...],
) -> None:
    partitions, fill = KINDS[kind]
    name = topic(partitions, config={"retention.ms": "-1"})
    fill(name, produce, settings["bootstrap.servers"])
    await_markers(admin, name)
    ends, ids = end_offsets(name), ids_of(admin, name)
    folder = reader(columns=columns)
    agent_helpers.prefetch(folder, PrefetchPositions(dict.fromkeys(ends, 0), topic_ids=ids))
    agent_helpers.await_prefetched(folder, ends)
    reading = read_batches(settings, all_of(ends), topic_ids=ids, columns=columns)
    direct = rows_of(reading, columns)
    batches, rest, _ = client.request_buffered(folder, Piece(tuple(all_of(ends)), ids, {}), columns, ReadCounts())
    assert rest == [], "also if the log ends without a record"
    assert rows_of(iter(batches), columns) == direct
    assert direct, "the comparison is not empty"
    # The agent frees the last range a moment after the task has received everything.
    await_until(lambda: agent_helpers.state_of(folder).used_bytes == 0, agent_helpers.END_S, what="free memory")


def test_each_task_gets_the_rows_of_its_ranges_only(
    topic: TopicFactory, produce: Produce, settings: dict[str, str], reader: StartAgent
) -> None:
    """Two tasks share a partition, the later half is read first, and the agent has not buffered all of it. A range is
    read once more, as by a retry or a second action."""
    name = topic(2)
    tps = [TopicPartition(name, p) for p in range(2)]
    for tp in tps:
        produce(name, [str(i) for i in range(1_000)], partition=tp.partition)
    folder = reader()
    agent_helpers.prefetch(folder, PrefetchPositions({tps[0]: 100, tps[1]: 0}))
    agent_helpers.await_prefetched(folder, dict.fromkeys(tps, 1_000))
    tasks = [
        [OffsetRange(tps[0], 500, 900), OffsetRange(tps[1], 10, 20)],
        [OffsetRange(tps[0], 100, 500)],
        [OffsetRange(tps[0], 0, 100), OffsetRange(tps[1], 20, 1_000)],
        [OffsetRange(tps[0], 100, 500)],
    ]
    found = []
    for ranges in tasks:
        counts = ReadCounts()
        rows = rows_of(read_with_agent(folder, settings, ranges, counts=counts))
        assert rows == rows_of(read_batches(settings, ranges))
        found.append(
            (agent_helpers.state_of(folder).rows, counts.rows_from_memory.total(), counts.rows_from_brokers.total())
        )
    assert found == [(410, 410, 0), (810, 400, 0), (1_790, 980, 100), (1_790, 0, 400)], (
        "rows served by the agent, read from it, and from brokers"
    )


def test_a_stream_is_prefetched_batch_after_batch(
    topic: TopicFactory, produce: Produce, settings: dict[str, str], reader: StartAgent
) -> None:
    name = topic(3)
    tps = [TopicPartition(name, p) for p in range(3)]
    at = dict.fromkeys(tps, 0)
    folder, seen = reader(), []
    agent_helpers.prefetch(folder, PrefetchPositions(at))
    for plan in range(1, 12):
        produce(name, [Record(b"%d:%d" % (plan, i), partition=i % 3) for i in range(300)])
        until = {tp: position + 100 for tp, position in at.items()}
        agent_helpers.prefetch(folder, PrefetchPositions(until, keep=at))
        seen += rows_of(read_with_agent(folder, settings, [OffsetRange(tp, at[tp], until[tp]) for tp in tps]))
        at = until
    assert len(seen) == len({(row["partition"], row["offset"]) for row in seen}) == 3_300
    agent_helpers.prefetch(folder, PrefetchPositions(at))
    # Nothing below the next plan is buffered; what a task has received is freed a moment later.
    await_until(lambda: agent_helpers.state_of(folder).used_bytes == 0, agent_helpers.END_S, what="free memory")


# ------------------------------------------------------------------------------------------------- when something ends


def many(topic: TopicFactory, produce: Produce, reader: StartAgent) -> tuple[AgentFolder, list[OffsetRange]]:
    """An agent with 8 MB of records: more than a socket buffers."""
    name = topic(2)
    tps = [TopicPartition(name, p) for p in range(2)]
    for tp in tps:
        produce(name, [b"%d" % i + os.urandom(1_000) for i in range(4_000)], partition=tp.partition)
    folder = reader()
    agent_helpers.prefetch(folder, PrefetchPositions(dict.fromkeys(tps, 0)))
    agent_helpers.await_prefetched(folder, dict.fromkeys(tps, 4_000))
    return folder, [OffsetRange(tp, 0, 4_000) for tp in tps]


def test_no_row_is_lost_or_duplicated_when_the_agent_is_killed_while_it_serves(
    topic: TopicFactory,
    produce: Produce,
    settings: dict[str, str],
    reader: StartAgent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, ranges = many(topic, produce, reader)
    answered: list[ServedRanges] = []
    receive = client.receive

    def killing(*arguments: Any) -> Any:
        answered.append(receive(*arguments))  # its rows follow
        os.kill(agent_helpers.pid_of(folder), signal.SIGKILL)
        return answered[0]

    monkeypatch.setattr(client, "receive", killing)
    rows = rows_of(read_with_agent(folder, settings, ranges))
    assert rows == rows_of(read_batches(settings, ranges))
    assert len(rows) == 8_000
    assert [answer.rows for answer in answered] == [8_000]


def test_memory_is_freed_when_a_task_dies_while_it_is_served(
    topic: TopicFactory, produce: Produce, settings: dict[str, str], reader: StartAgent
) -> None:
    folder, ranges = many(topic, produce, reader)
    answer = agent_helpers.exchange(folder, ClaimGranted(Piece(tuple(ranges))))
    assert (
        isinstance(answer, ServedRanges) and answer.rows == 8_000
    )  # and its connection is closed, with the rows in it
    await_until(lambda: agent_helpers.state_of(folder).used_bytes == 0, agent_helpers.END_S, what="free memory")
    assert len(rows_of(read_with_agent(folder, settings, ranges))) == 8_000


# ------------------------------------------------------------------------------------------------------------- memory


def test_huge_records_stay_within_the_memory_limit(
    topic: TopicFactory, produce: Produce, settings: dict[str, str], reader: StartAgent
) -> None:
    name = topic(3)
    ends = {TopicPartition(name, p): 20 for p in range(3)}
    for tp in ends:
        produce(name, [os.urandom(900_000) for _ in range(20)], partition=tp.partition)
    folder = reader(buffer_bytes=6_000_000)
    agent_helpers.prefetch(folder, PrefetchPositions(dict.fromkeys(ends, 0)))
    looks: list[int] = []

    def full() -> bool:
        looks.append(agent_helpers.state_of(folder).used_bytes)
        return looks[-1] > 4_500_000

    await_until(full, agent_helpers.READY_S, what="a full buffer")
    at = dict.fromkeys(ends, 0)
    rows: list[Row] = []
    for _ in range(100):  # freed records make room for more
        until = {tp: min(20, position + 3) for tp, position in at.items()}
        rows += rows_of(read_with_agent(folder, settings, [OffsetRange(tp, at[tp], until[tp]) for tp in ends]))
        at = until
        agent_helpers.prefetch(folder, PrefetchPositions(at))
        full()
        if at == ends:
            break
    assert max(looks) <= 6_000_000
    assert len(rows) == 60
    assert agent_helpers.state_of(folder).rows > 0


def test_a_full_agent_is_idle(topic: TopicFactory, produce: Produce, reader: StartAgent) -> None:
    """It neither fetches records without room again and again, nor polls for room."""
    tp = TopicPartition(topic(), 0)
    produce(tp.topic, [os.urandom(10_000) for _ in range(1_000)], partition=0)
    folder = reader(buffer_bytes=2_000_000)
    agent_helpers.prefetch(folder, PrefetchPositions({tp: 0}))
    await_until(
        lambda: agent_helpers.state_of(folder).used_bytes > 1_800_000, agent_helpers.READY_S, what="a full buffer"
    )

    def ticks() -> int:
        fields = Path(f"/proc/{agent_helpers.pid_of(folder)}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def rested() -> bool:
        before = ticks()
        threading.Event().wait(2.0)
        return ticks() - before <= 10  # of 200

    await_until(rested, what="two seconds with a twentieth of a core at most")


# ------------------------------------------------------------------------------------ recreated topics, errors


def test_records_of_a_deleted_topic_are_not_served_for_the_recreated_one(
    topic: TopicFactory, produce: Produce, admin: AdminClient, settings: dict[str, str], reader: StartAgent
) -> None:
    name = topic()
    tp = TopicPartition(name, 0)
    produce(name, [f"old {i}" for i in range(50)], partition=0)
    old = ids_of(admin, name)
    folder = reader()
    agent_helpers.prefetch(folder, PrefetchPositions({tp: 0}, topic_ids=old))
    agent_helpers.await_prefetched(folder, {tp: 50})
    admin.delete_topics([name])[name].result(ADMIN_S)
    await_until(lambda: admin.list_topics(name, timeout=ADMIN_S).topics[name].error, what="deletion")
    topic(name=name)
    produce(name, [f"new {i}" for i in range(80)], partition=0)
    new = ids_of(admin, name)
    wanted = [OffsetRange(tp, 0, 50)]
    for planned in (old, new):
        piece = Piece(tuple(wanted), planned, {})
        assert client.request_buffered(folder, piece, COLUMNS[:-1], ReadCounts()) == ([], wanted, False)
    assert agent_helpers.state_of(folder).used_bytes == 0, "the buffer of the deleted topic is dropped"
    agent_helpers.prefetch(folder, PrefetchPositions({tp: 0}, topic_ids=new))
    agent_helpers.await_prefetched(folder, {tp: 80})
    rows = rows_of(read_with_agent(folder, settings, [OffsetRange(tp, 0, 80)], topic_ids=new))
    assert [row["value"].decode() for row in rows] == [f"new {i}" for i in range(80)]
    assert agent_helpers.state_of(folder).rows == 80


def test_a_partition_with_an_error_is_prefetched_again_from_the_next_position(
    topic: TopicFactory, produce: Produce, reader: StartAgent, settings: dict[str, str]
) -> None:
    """A position that the log does not have. Whether records are lost is for the task that reads it to decide."""
    tp = TopicPartition(topic(), 0)
    produce(tp.topic, [str(i) for i in range(10)], partition=0)
    folder = reader()
    agent_helpers.prefetch(folder, PrefetchPositions({tp: 50}))
    await_until(lambda: "out of range" in folder.log.read_text().lower(), agent_helpers.READY_S, what="the error")
    agent_helpers.prefetch(folder, PrefetchPositions({tp: 5}))
    agent_helpers.await_prefetched(folder, {tp: 10})
    gone = OffsetRange(TopicPartition(f"{tp.topic}-gone", 0), 0, 5)
    agent_helpers.prefetch(folder, PrefetchPositions({tp: 5, gone.tp: 0}))
    with pytest.raises(TopicMissing):
        rows_of(read_with_agent(folder, settings, [OffsetRange(tp, 5, 10), gone]))
