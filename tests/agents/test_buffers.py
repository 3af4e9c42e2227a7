"""What the buffers of an agent promise, against a model that remembers single offsets."""

import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spark_group_source.agents.prefetch.buffers import BLOCK_BYTES, PIECE_BYTES, Buffers, Piece, Reached, Taken
from spark_group_source.agents.task_messages import Ahead
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.reader.records import RowSlice

A, B = TopicPartition("a", 0), TopicPartition("b", 0)
MEMORY = 64 << 10
FAR = 1 << 40
GONE = 99


def record(topic_id: str, epoch: int, tp: TopicPartition, offset: int) -> int:
    """The size of the record that stands there; 0 for none: a marker, or compacted."""
    draw = zlib.crc32(f"{topic_id} {epoch} {tp.topic} {offset}".encode()) % 16
    return 0 if draw < 4 else 40 * draw


def batch_of(offsets: list[int], sizes: list[int]) -> pa.RecordBatch:
    return pa.record_batch(
        {"offset": pa.array(offsets, pa.int64()), "value": pa.array([b"v" * size for size in sizes], pa.binary())}
    )


def offsets_of(pieces: list[Piece] | Any) -> list[int]:
    return [
        offset
        for piece in pieces
        if (batch := piece.rows()) is not None
        for offset in batch.column("offset").to_pylist()
    ]


def fill(buffers: Buffers, tp: TopicPartition, *sizes: int) -> int:
    """Read one record of each size; returns how many there was room for."""
    held = buffers.partitions[tp]
    count, room = buffers.reserve(tp, np.array(sizes, dtype=np.int64))
    if count:
        start = held.position
        offsets = list(range(start, start + count))
        part = Reached(RowSlice(tp, 0, count), held, held.turn, start, start + count, room)
        buffers.add(batch_of(offsets, list(sizes[:count])), [part])
    return count


def take(buffers: Buffers, *ranges: OffsetRange) -> list[Taken]:
    found = buffers.take(ranges, {}, {}, {r.tp.topic: FAR for r in ranges})
    buffers.free(piece for one in found for piece in one.pieces)
    return found


def test_each_record_is_served_once_and_its_memory_is_free_then() -> None:
    buffers = Buffers(MEMORY)
    buffers.follow(Ahead({A: 0}))
    fill(buffers, A, 10, 10, 10, 10)
    (first,) = buffers.take([OffsetRange(A, 1, 3)], {}, {}, {"a": FAR})
    assert (first.until, offsets_of(first.pieces)) == (3, [1, 2])
    assert take(buffers, OffsetRange(A, 1, 3)) == []
    assert [one.until for one in take(buffers, OffsetRange(A, 0, 1), OffsetRange(A, 3, 9))] == [1, 4]
    assert buffers.used > BLOCK_BYTES, "what was taken and not freed still counts"
    buffers.free(first.pieces)
    assert buffers.used == 0


def test_a_full_partition_leaves_the_others_their_shares() -> None:
    buffers = Buffers(1 << 20)
    buffers.follow(Ahead({A: 0, B: 0}))
    while fill(buffers, A, *[1000] * 10):
        pass
    assert buffers.is_full(A)
    assert buffers.used > (1 << 20) * 0.7, "what nobody else needs yet is used"
    assert buffers.room(B) >= (1 << 20) // 4 - 1
    assert fill(buffers, B, *[1000] * 100) == 100


def test_a_record_that_is_larger_than_any_share_is_held_when_there_is_nothing_else() -> None:
    buffers = Buffers(1 << 20)
    buffers.follow(Ahead({A: 0, B: 0}))
    assert fill(buffers, B, 1000) == 1
    assert fill(buffers, A, 900_000, 900_000) == 0
    assert not buffers.has_room_again(A)
    take(buffers, OffsetRange(B, 0, 1))
    assert buffers.has_room_again(A)
    assert fill(buffers, A, 900_000, 900_000) == 1
    assert buffers.used <= 1 << 20


def test_a_record_larger_than_all_memory_is_never_held() -> None:
    buffers = Buffers(1 << 20)
    buffers.follow(Ahead({A: 0}))
    assert fill(buffers, A, 2 << 20) == 0
    assert buffers.is_full(A)
    assert not buffers.has_room_again(A)
    buffers.follow(Ahead({A: 1}))
    assert buffers.has_room_again(A)


def test_what_is_not_confirmed_is_not_served() -> None:
    buffers = Buffers(MEMORY)
    buffers.follow(Ahead({A: 0}))
    fill(buffers, A, 10, 10)
    known = buffers.number
    fill(buffers, A, 10)
    wanted = [OffsetRange(A, 0, 9)]
    assert buffers.numbers(wanted) == {"a": buffers.number}
    assert buffers.take(wanted, {}, {}, {}) == []
    assert [one.until for one in buffers.take(wanted, {}, {}, {"a": known})] == [2]


@pytest.mark.parametrize("told", [{"topic_ids": {"a": "other"}}, {"leader_epochs": {A: 8}}])
def test_another_topic_or_leader_drops_what_is_held(told: dict[str, Any]) -> None:
    buffers = Buffers(MEMORY)
    same: dict[str, Any] = {"topic_ids": {"a": "id"}, "leader_epochs": {A: 7}}
    buffers.follow(Ahead({A: 0}, **same))
    fill(buffers, A, 10, 10)
    buffers.follow(Ahead({A: 1}, keep={A: 0}, **same))
    assert buffers.used
    buffers.follow(Ahead({A: 1}, keep={A: 0}, **(same | told)))
    assert buffers.used == 0
    assert buffers.partitions[A].position == 1


def test_a_request_for_another_topic_or_leader_is_not_served() -> None:
    buffers = Buffers(MEMORY)
    buffers.follow(Ahead({A: 0}, topic_ids={"a": "id"}, leader_epochs={A: 7}))
    fill(buffers, A, 10)
    wanted, known = [OffsetRange(A, 0, 1)], {"a": FAR}
    assert not buffers.take(wanted, {"a": "other"}, {A: 7}, known)
    assert not buffers.take(wanted, {"a": "id"}, {A: 8}, known)
    assert buffers.take(wanted, {"a": "id"}, {A: 7}, known)


def test_offsets_without_a_record_are_held_without_memory_for_rows() -> None:
    buffers = Buffers(MEMORY)
    buffers.follow(Ahead({A: 0}))
    fill(buffers, A, 10)
    buffers.advance(A, buffers.partitions[A].turn, 5)
    assert [one.until for one in take(buffers, OffsetRange(A, 0, 2))] == [2]
    assert buffers.used == PIECE_BYTES
    assert [one.until for one in take(buffers, OffsetRange(A, 2, 9))] == [5]
    assert buffers.used == 0


def test_what_was_left_out_is_not_held() -> None:
    buffers = Buffers(MEMORY)
    buffers.follow(Ahead({A: 0}))
    fill(buffers, A, 10)
    buffers.follow(Ahead({A: 7}, keep={A: 0}))
    buffers.advance(A, buffers.partitions[A].turn, 9)
    assert [one.until for one in take(buffers, OffsetRange(A, 0, 9))] == [1]
    assert [one.until for one in take(buffers, OffsetRange(A, 7, 9))] == [9]


class Books(RuleBasedStateMachine):
    """Reading, plans and requests in any order, an addition late by any other step."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers = Buffers(MEMORY)
        self.ids = {"a": "1", "b": "1"}
        self.epochs = {A: 1, B: 1}
        self.covered: dict[TopicPartition, set[int]] = {}
        self.begun: list[tuple[pa.RecordBatch, list[Reached]]] = []
        self.lent: list[Piece] = []

    @rule(
        each=st.fixed_dictionaries({tp: st.sampled_from([0, 0, 1, 7, 15, 30, 60, -5, GONE]) for tp in (A, B)}),
        keep=st.integers(0, 30),
        anew=st.sampled_from([*[""] * 8, "id", "epoch"]),
    )
    def tell(self, each: dict[TopicPartition, int], keep: int, anew: str) -> None:
        steps = {tp: step for tp, step in each.items() if step != GONE}
        if anew == "id":
            self.ids["a"] += "1"
        elif anew == "epoch":
            self.epochs[B] += 1
        before = self.buffers.partitions
        told = {tp: held.told for tp, held in before.items()}
        positions = {tp: max(0, told.get(tp, 0) + step) for tp, step in steps.items()}
        for tp in before:
            dropped = (tp == A and anew == "id") or (tp == B and anew == "epoch")
            if tp not in positions or positions[tp] < told[tp] or dropped:
                self.covered[tp] = set()
            else:
                self.covered[tp] = {at for at in self.covered[tp] if at >= positions[tp] - keep}
        kept = {tp: position - keep for tp, position in positions.items()}
        ids, epochs = dict(self.ids), dict(self.epochs)
        self.buffers.follow(Ahead(positions, keep=kept, topic_ids=ids, leader_epochs=epochs))
        for tp, position in positions.items():
            self.covered.setdefault(tp, set())
            assert self.buffers.partitions[tp].position >= position

    @rule(counts=st.fixed_dictionaries({}, optional={A: st.integers(1, 40), B: st.integers(1, 40)}))
    def begin(self, counts: dict[TopicPartition, int]) -> None:
        """One poll, with records of one partition or both."""
        if self.begun:
            return  # one thread reads
        parts: list[Reached] = []
        offsets: list[int] = []
        sizes: list[int] = []
        for tp, count in counts.items():
            held = self.buffers.partitions.get(tp)
            if held is None or held.halted:
                continue
            there = {at: self.size(tp, at) for at in range(held.position, held.position + count)}
            there = {at: size for at, size in there.items() if size}
            if not there:
                continue
            fit, room = self.buffers.reserve(tp, np.array(list(there.values()), dtype=np.int64))
            if fit:
                found = list(there)[:fit]
                cut = RowSlice(tp, len(offsets), len(offsets) + fit)
                parts.append(Reached(cut, held, held.turn, held.position, found[-1] + 1, room))
                offsets += found
                sizes += [there[at] for at in found]
        if parts:
            self.begun.append((batch_of(offsets, sizes), parts))

    def size(self, tp: TopicPartition, at: int) -> int:
        return record(self.ids[tp.topic], self.epochs[tp], tp, at)

    @rule()
    def end(self) -> None:
        while self.begun:
            batch, parts = self.begun.pop()
            for part in parts:
                held = self.buffers.partitions.get(part.cut.tp)
                if held is part.held and held.turn == part.turn:
                    self.covered[part.cut.tp] |= set(range(part.start, part.end))
            self.buffers.add(batch, parts)

    @rule(tp=st.sampled_from([A, B]), count=st.integers(1, 20))
    def gap(self, tp: TopicPartition, count: int) -> None:
        """The log's end, behind offsets without a record."""
        held = self.buffers.partitions.get(tp)
        if held is None or self.begun or self.buffers.free_bytes < PIECE_BYTES:
            return
        until = held.position
        while until < held.position + count and not self.size(tp, until):
            until += 1
        self.covered[tp] |= set(range(held.position, until))
        self.buffers.advance(tp, held.turn, until)
        assert held.position == until

    @rule(
        tp=st.sampled_from([A, B]),
        back=st.integers(0, 60),
        length=st.integers(1, 60),
        stale=st.sampled_from(["", "", "", "id", "epoch", "confirmed"]),
    )
    def serve(self, tp: TopicPartition, back: int, length: int, stale: str) -> None:
        held = self.buffers.partitions.get(tp)
        start = max(0, held.position - back) if held else 0
        wanted = OffsetRange(tp, start, start + length)
        ids = {tp.topic: "0" if stale == "id" else self.ids[tp.topic]}
        epochs = {tp: 0 if stale == "epoch" else self.epochs[tp]}
        found = self.buffers.take([wanted], ids, epochs, {} if stale == "confirmed" else {tp.topic: FAR})
        until = start
        while until < wanted.end and until in self.covered.get(tp, ()) and held is not None and not stale:
            until += 1
        assert [one.until for one in found] == ([until] if until > start else [])
        for one in found:
            self.covered[tp] -= set(range(start, until))
            assert offsets_of(one.pieces) == [at for at in range(start, until) if self.size(tp, at)]
            self.lent += one.pieces

    @rule(count=st.integers(1, 50))
    def free(self, count: int) -> None:
        self.buffers.free(self.lent[:count])
        del self.lent[:count]

    @rule()
    def drop(self) -> None:
        self.buffers.drop("a")
        if A in self.covered:
            self.covered[A] = set()

    @invariant()
    def memory_is_bounded_and_exactly_counted(self) -> None:
        pieces = [p for held in self.buffers.partitions.values() for p in held.pieces] + self.lent
        blocks = {id(p.block): p.block for p in pieces if p.block is not None}
        assert self.buffers.used == sum(b.bytes for b in blocks.values()) + sum(p.price for p in pieces)
        assert self.buffers.used + self.buffers.reserved <= MEMORY
        assert self.buffers.reserved == sum(part.bytes for _, parts in self.begun for part in parts)
        for held in self.buffers.partitions.values():
            waiting = sum(part.bytes for _, parts in self.begun for part in parts if part.held is held)
            assert all(p.block is None or p.first < p.last for p in held.pieces), "memory is kept for no row"
            assert held.bytes == sum(p.bytes for p in held.pieces) + waiting

    @invariant()
    def every_partition_is_sure_of_its_share(self) -> None:
        share = MEMORY // (2 * max(1, len(self.buffers.partitions)))
        lacking = {tp: max(0, share - held.bytes) for tp, held in self.buffers.partitions.items()}
        for tp, own in lacking.items():
            others = sum(lacking.values()) - own
            free = MEMORY - self.buffers.used - self.buffers.reserved
            assert self.buffers.room(tp) == max(0, min(free, max(own, free - others)))

    @invariant()
    def what_is_held_is_what_was_covered(self) -> None:
        for tp, held in self.buffers.partitions.items():
            assert {at for piece in held.pieces for at in range(piece.start, piece.end)} == self.covered[tp]


Books.TestCase.settings = settings(max_examples=100, stateful_step_count=60)
TestBooks = Books.TestCase
