"""The prefetch buffers, against a model of single offsets."""

import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spark_group_source.agents.messages import PrefetchPositions
from spark_group_source.agents.prefetch.buffers import (
    BATCH_BYTES,
    RANGE_BYTES,
    AcceptedRows,
    BufferedRange,
    PrefetchBuffers,
    TakenRanges,
)
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.reader.records import RowSlice

A, B = TopicPartition("a", 0), TopicPartition("b", 0)
MEMORY = 64 << 10
FAR = 1 << 40
GONE = 99


def record(topic_id: str, epoch: int, tp: TopicPartition, offset: int) -> int:
    """The size of the record at this offset; 0 for none: a marker, or compacted."""
    draw = zlib.crc32(f"{topic_id} {epoch} {tp.topic} {offset}".encode()) % 16
    return 0 if draw < 4 else 40 * draw


def batch_of(offsets: list[int], sizes: list[int]) -> pa.RecordBatch:
    return pa.record_batch(
        {"offset": pa.array(offsets, pa.int64()), "value": pa.array([b"v" * size for size in sizes], pa.binary())}
    )


def offsets_of(ranges: list[BufferedRange] | Any) -> list[int]:
    return [
        offset for each in ranges if (batch := each.rows()) is not None for offset in batch.column("offset").to_pylist()
    ]


def fill(buffers: PrefetchBuffers, tp: TopicPartition, *sizes: int) -> int:
    """Buffer one record of each size; returns how many had room."""
    partition = buffers.partitions[tp]
    count, reserved = buffers.reserve(tp, np.array(sizes, dtype=np.int64))
    if count:
        start = partition.position
        offsets = list(range(start, start + count))
        rows = AcceptedRows(RowSlice(tp, 0, count), partition, partition.seek, start, start + count, reserved)
        buffers.add(batch_of(offsets, list(sizes[:count])), [rows])
    return count


def take(buffers: PrefetchBuffers, *ranges: OffsetRange) -> list[TakenRanges]:
    found, _ = buffers.take(ranges, {}, {}, {r.tp.topic: FAR for r in ranges}, FAR)
    buffers.free(each for one in found for each in one.ranges)
    return found


def test_each_record_is_served_once_and_then_its_memory_is_freed() -> None:
    buffers = PrefetchBuffers(MEMORY)
    buffers.follow(PrefetchPositions({A: 0}))
    fill(buffers, A, 10, 10, 10, 10)
    (first,), _ = buffers.take([OffsetRange(A, 1, 3)], {}, {}, {"a": FAR}, FAR)
    assert (first.until, offsets_of(first.ranges)) == (3, [1, 2])
    assert take(buffers, OffsetRange(A, 1, 3)) == []
    assert [one.until for one in take(buffers, OffsetRange(A, 0, 1), OffsetRange(A, 3, 9))] == [1, 4]
    assert buffers.used_bytes > BATCH_BYTES, "ranges that were taken and not freed still count"
    buffers.free(first.ranges)
    assert buffers.used_bytes == 0


def test_what_is_taken_at_once_has_a_bound_in_bytes() -> None:
    buffers = PrefetchBuffers(MEMORY)
    buffers.follow(PrefetchPositions({A: 0, B: 0}))
    for tp in (A, A, B):
        fill(buffers, tp, 4_000)
    size = buffers.partitions[A].ranges[0].bytes
    wanted, checked = [OffsetRange(A, 0, 9), OffsetRange(B, 0, 9)], {"a": FAR, "b": FAR}

    def take_up_to(bytes_max: int) -> tuple[list[tuple[int, int]], bool]:
        found, is_cut = buffers.take(wanted, {}, {}, checked, bytes_max)
        return [(one.request_index, one.until) for one in found], is_cut

    assert take_up_to(size - 1) == ([(0, 1)], True), "a range above the bound is taken alone"
    wanted[0] = OffsetRange(A, 1, 9)
    assert take_up_to(2 * size - 1) == ([(0, 2)], True)
    assert take_up_to(2 * size) == ([(1, 1)], False)


def test_a_full_partition_leaves_the_others_their_shares() -> None:
    buffers = PrefetchBuffers(1 << 20)
    buffers.follow(PrefetchPositions({A: 0, B: 0}))
    while fill(buffers, A, *[1000] * 10):
        pass
    assert buffers.is_full(A)
    assert buffers.used_bytes > (1 << 20) * 0.7, "memory that no other partition needs yet is used"
    assert buffers.room(B) >= (1 << 20) // 4 - 1
    assert fill(buffers, B, *[1000] * 100) == 100


def test_a_record_larger_than_any_share_is_buffered_alone() -> None:
    buffers = PrefetchBuffers(1 << 20)
    buffers.follow(PrefetchPositions({A: 0, B: 0}))
    assert fill(buffers, B, 1000) == 1
    assert fill(buffers, A, 900_000, 900_000) == 0
    assert not buffers.has_room_again(A)
    take(buffers, OffsetRange(B, 0, 1))
    assert buffers.has_room_again(A)
    assert fill(buffers, A, 900_000, 900_000) == 1
    assert buffers.used_bytes <= 1 << 20


def test_a_record_larger_than_all_memory_is_not_buffered() -> None:
    buffers = PrefetchBuffers(1 << 20)
    buffers.follow(PrefetchPositions({A: 0}))
    assert fill(buffers, A, 2 << 20) == 0
    assert buffers.is_full(A)
    assert not buffers.has_room_again(A)
    buffers.follow(PrefetchPositions({A: 1}))
    assert buffers.has_room_again(A)


def test_records_whose_topic_id_is_not_checked_are_not_served() -> None:
    buffers = PrefetchBuffers(MEMORY)
    buffers.follow(PrefetchPositions({A: 0}))
    fill(buffers, A, 10, 10)
    checked = buffers.last_arrival
    fill(buffers, A, 10)
    wanted = [OffsetRange(A, 0, 9)]
    assert buffers.last_arrivals(wanted) == {"a": buffers.last_arrival}
    assert buffers.take(wanted, {}, {}, {}, FAR) == ([], False)
    assert [one.until for one in buffers.take(wanted, {}, {}, {"a": checked}, FAR)[0]] == [2]


@pytest.mark.parametrize("changed", [{"topic_ids": {"a": "other"}}, {"leader_epochs": {A: 8}}])
def test_another_topic_id_or_leader_epoch_drops_the_buffer(changed: dict[str, Any]) -> None:
    buffers = PrefetchBuffers(MEMORY)
    same: dict[str, Any] = {"topic_ids": {"a": "id"}, "leader_epochs": {A: 7}}
    buffers.follow(PrefetchPositions({A: 0}, **same))
    fill(buffers, A, 10, 10)
    buffers.follow(PrefetchPositions({A: 1}, keep={A: 0}, **same))
    assert buffers.used_bytes
    buffers.follow(PrefetchPositions({A: 1}, keep={A: 0}, **(same | changed)))
    assert buffers.used_bytes == 0
    assert buffers.partitions[A].position == 1


def test_a_request_for_another_topic_id_or_leader_epoch_is_not_served() -> None:
    buffers = PrefetchBuffers(MEMORY)
    buffers.follow(PrefetchPositions({A: 0}, topic_ids={"a": "id"}, leader_epochs={A: 7}))
    fill(buffers, A, 10)
    wanted, known = [OffsetRange(A, 0, 1)], {"a": FAR}
    assert not buffers.take(wanted, {"a": "other"}, {A: 7}, known, FAR)[0]
    assert not buffers.take(wanted, {"a": "id"}, {A: 8}, known, FAR)[0]
    assert buffers.take(wanted, {"a": "id"}, {A: 7}, known, FAR)[0]


def test_offsets_without_a_record_take_no_memory_for_rows() -> None:
    buffers = PrefetchBuffers(MEMORY)
    buffers.follow(PrefetchPositions({A: 0}))
    fill(buffers, A, 10)
    buffers.advance(A, buffers.partitions[A].seek, 5)
    assert [one.until for one in take(buffers, OffsetRange(A, 0, 2))] == [2]
    assert buffers.used_bytes == RANGE_BYTES
    assert [one.until for one in take(buffers, OffsetRange(A, 2, 9))] == [5]
    assert buffers.used_bytes == 0


def test_skipped_offsets_are_not_buffered() -> None:
    buffers = PrefetchBuffers(MEMORY)
    buffers.follow(PrefetchPositions({A: 0}))
    fill(buffers, A, 10)
    buffers.follow(PrefetchPositions({A: 7}, keep={A: 0}))
    buffers.advance(A, buffers.partitions[A].seek, 9)
    assert [one.until for one in take(buffers, OffsetRange(A, 0, 9))] == [1]
    assert [one.until for one in take(buffers, OffsetRange(A, 7, 9))] == [9]


class BuffersModel(RuleBasedStateMachine):
    """Fetching, plans and requests in any order; any step may come between accepting rows and adding them."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers = PrefetchBuffers(MEMORY)
        self.ids = {"a": "1", "b": "1"}
        self.epochs = {A: 1, B: 1}
        self.covered: dict[TopicPartition, set[int]] = {}
        self.accepted: list[tuple[pa.RecordBatch, list[AcceptedRows]]] = []
        self.taken: list[BufferedRange] = []

    @rule(
        each=st.fixed_dictionaries({tp: st.sampled_from([0, 0, 1, 7, 15, 30, 60, -5, GONE]) for tp in (A, B)}),
        keep=st.integers(0, 30),
        recreated=st.sampled_from([*[""] * 8, "id", "epoch"]),
    )
    def follow(self, each: dict[TopicPartition, int], keep: int, recreated: str) -> None:
        steps = {tp: step for tp, step in each.items() if step != GONE}
        if recreated == "id":
            self.ids["a"] += "1"
        elif recreated == "epoch":
            self.epochs[B] += 1
        before = self.buffers.partitions
        requested = {tp: partition.requested for tp, partition in before.items()}
        positions = {tp: max(0, requested.get(tp, 0) + step) for tp, step in steps.items()}
        for tp in before:
            dropped = (tp == A and recreated == "id") or (tp == B and recreated == "epoch")
            if tp not in positions or positions[tp] < requested[tp] or dropped:
                self.covered[tp] = set()
            else:
                self.covered[tp] = {at for at in self.covered[tp] if at >= positions[tp] - keep}
        kept = {tp: position - keep for tp, position in positions.items()}
        ids, epochs = dict(self.ids), dict(self.epochs)
        self.buffers.follow(PrefetchPositions(positions, keep=kept, topic_ids=ids, leader_epochs=epochs))
        for tp, position in positions.items():
            self.covered.setdefault(tp, set())
            assert self.buffers.partitions[tp].position >= position

    @rule(counts=st.fixed_dictionaries({}, optional={A: st.integers(1, 40), B: st.integers(1, 40)}))
    def accept(self, counts: dict[TopicPartition, int]) -> None:
        """Accept the rows of one poll, of one partition or both."""
        if self.accepted:
            return  # one thread fetches
        accepted: list[AcceptedRows] = []
        offsets: list[int] = []
        sizes: list[int] = []
        for tp, count in counts.items():
            partition = self.buffers.partitions.get(tp)
            if partition is None or partition.halted:
                continue
            sizes_at = {at: self.size(tp, at) for at in range(partition.position, partition.position + count)}
            sizes_at = {at: size for at, size in sizes_at.items() if size}
            if not sizes_at:
                continue
            fit, reserved = self.buffers.reserve(tp, np.array(list(sizes_at.values()), dtype=np.int64))
            if fit:
                found = list(sizes_at)[:fit]
                row_slice = RowSlice(tp, len(offsets), len(offsets) + fit)
                end = found[-1] + 1
                accepted.append(AcceptedRows(row_slice, partition, partition.seek, partition.position, end, reserved))
                offsets += found
                sizes += [sizes_at[at] for at in found]
        if accepted:
            self.accepted.append((batch_of(offsets, sizes), accepted))

    def size(self, tp: TopicPartition, at: int) -> int:
        return record(self.ids[tp.topic], self.epochs[tp], tp, at)

    @rule()
    def add(self) -> None:
        while self.accepted:
            batch, accepted = self.accepted.pop()
            for rows in accepted:
                partition = self.buffers.partitions.get(rows.row_slice.tp)
                if partition is rows.partition and partition.seek == rows.seek:
                    self.covered[rows.row_slice.tp] |= set(range(rows.start, rows.end))
            self.buffers.add(batch, accepted)

    @rule(tp=st.sampled_from([A, B]), count=st.integers(1, 20))
    def advance(self, tp: TopicPartition, count: int) -> None:
        """Advance over offsets without a record, as at the log's end."""
        partition = self.buffers.partitions.get(tp)
        if partition is None or self.accepted or self.buffers.free_bytes < RANGE_BYTES:
            return
        until = partition.position
        while until < partition.position + count and not self.size(tp, until):
            until += 1
        self.covered[tp] |= set(range(partition.position, until))
        self.buffers.advance(tp, partition.seek, until)
        assert partition.position == until

    @rule(
        tp=st.sampled_from([A, B]),
        back=st.integers(0, 60),
        length=st.integers(1, 60),
        stale=st.sampled_from(["", "", "", "id", "epoch", "unchecked"]),
    )
    def take(self, tp: TopicPartition, back: int, length: int, stale: str) -> None:
        partition = self.buffers.partitions.get(tp)
        start = max(0, partition.position - back) if partition else 0
        wanted = OffsetRange(tp, start, start + length)
        ids = {tp.topic: "0" if stale == "id" else self.ids[tp.topic]}
        epochs = {tp: 0 if stale == "epoch" else self.epochs[tp]}
        found, _ = self.buffers.take([wanted], ids, epochs, {} if stale == "unchecked" else {tp.topic: FAR}, FAR)
        until = start
        while until < wanted.end and until in self.covered.get(tp, ()) and partition is not None and not stale:
            until += 1
        assert [one.until for one in found] == ([until] if until > start else [])
        for one in found:
            self.covered[tp] -= set(range(start, until))
            assert offsets_of(one.ranges) == [at for at in range(start, until) if self.size(tp, at)]
            self.taken += one.ranges

    @rule(count=st.integers(1, 50))
    def free(self, count: int) -> None:
        self.buffers.free(self.taken[:count])
        del self.taken[:count]

    @rule()
    def drop_topic(self) -> None:
        self.buffers.drop_topic("a")
        if A in self.covered:
            self.covered[A] = set()

    @invariant()
    def memory_is_bounded_and_exactly_counted(self) -> None:
        ranges = [r for partition in self.buffers.partitions.values() for r in partition.ranges] + self.taken
        batches = {id(r.batch): r.batch for r in ranges if r.batch is not None}
        batch_bytes = sum(batch.bytes for batch in batches.values())
        assert self.buffers.used_bytes == batch_bytes + sum(r.overhead for r in ranges)
        assert self.buffers.used_bytes + self.buffers.reserved_bytes <= MEMORY
        accepted = [rows for _, batch in self.accepted for rows in batch]
        assert self.buffers.reserved_bytes == sum(rows.bytes for rows in accepted)
        for partition in self.buffers.partitions.values():
            reserved = sum(rows.bytes for rows in accepted if rows.partition is partition)
            assert all(r.batch is None or r.first < r.last for r in partition.ranges), "memory without a row"
            assert partition.bytes == sum(r.bytes for r in partition.ranges) + reserved

    @invariant()
    def every_partition_has_its_share(self) -> None:
        share = MEMORY // (2 * max(1, len(self.buffers.partitions)))
        unused = {tp: max(0, share - partition.bytes) for tp, partition in self.buffers.partitions.items()}
        for tp, own in unused.items():
            others = sum(unused.values()) - own
            free = MEMORY - self.buffers.used_bytes - self.buffers.reserved_bytes
            assert self.buffers.room(tp) == max(0, min(free, max(own, free - others)))

    @invariant()
    def buffered_offsets_are_those_of_the_model(self) -> None:
        for tp, partition in self.buffers.partitions.items():
            assert {at for r in partition.ranges for at in range(r.start, r.end)} == self.covered[tp]


BuffersModel.TestCase.settings = settings(max_examples=100, stateful_step_count=60)
TestBuffersModel = BuffersModel.TestCase
