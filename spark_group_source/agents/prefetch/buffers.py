"""What an agent holds: records that were read ahead, by the offsets that they are known to be all records of.

Runs in: agents. Deliberately absent: a clock, threads, a lock, sockets, Kafka; Arrow batches are taken as they are.

A **piece** is a stretch of offsets [start, end) of one partition, complete: every record in it that a reader of this
isolation level sees is among the piece's rows. It may have none: aborted, compacted. Rows lie in **blocks**, one Arrow
batch each, which pieces of several partitions share. A block's memory is counted until its last piece is gone, and so
is a fixed price of each block and piece, for what Python and Arrow need besides.

Each record is served once. Pieces that are taken are counted until they are freed.

Shares: each of ``n`` partitions is sure of half the memory divided by n. What is more than that goes to whoever comes
first, as long as the shares of all others are left.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from spark_group_source.agents.task_messages import Ahead
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.reader.records import Ints, RowSlice

ROW_BYTES = 48
"""At most what a row takes besides key, value, headers and the topic's name: ends of three texts, four numbers, the
bits for nulls, and the end of its headers."""
BLOCK_BYTES = 4_096
PIECE_BYTES = 256
UNKNOWN = -1
"""A leader epoch that nobody told."""


@dataclass(slots=True, eq=False)
class Block:
    """One Arrow batch, and how many pieces have rows in it."""

    batch: pa.RecordBatch
    bytes: int
    pieces: int = 0


@dataclass(slots=True, eq=False)
class Piece:
    """The offsets [start, end), and their records: the rows [first, last) of a block."""

    start: int
    end: int
    block: Block | None
    first: int
    last: int
    bytes: int
    """Its part of the partition's share."""
    number: int
    """Of the block that proved it, counted over all."""
    price: int = PIECE_BYTES
    """What it counts for by itself: one that was cut in two still counts once."""

    def rows(self) -> pa.RecordBatch | None:
        if self.block is None:
            return None
        return self.block.batch.slice(self.first, self.last - self.first)


class Reached(NamedTuple):
    """How far a cut came: the rows of ``cut`` are all records of [start, end)."""

    cut: RowSlice
    held: "Held"
    turn: int
    start: int
    end: int
    bytes: int
    """What was reserved for them."""


class Taken(NamedTuple):
    """What is served of the range in this place: [its start, until), complete."""

    place: int
    until: int
    pieces: Sequence[Piece]


@dataclass(slots=True)
class Held:
    """One partition that is read ahead."""

    topic_id: str
    epoch: int
    told: int
    """The position that was told last."""
    position: int
    """The next offset to read."""
    turn: int
    """Another one whenever the position was set from outside: what was read for a former turn is not next."""
    pieces: list[Piece]
    bytes: int = 0
    needs: int = 0
    """What the next record takes, if it was too large for the room that there was."""
    halted: bool = False
    """Reading it met trouble: not before something new is told."""
    forgotten: bool = False


class Buffers:
    """The pieces of all partitions. Not for several threads at once.

    Args:
        memory_bytes: what blocks, pieces and reservations may take together.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.partitions: dict[TopicPartition, Held] = {}
        self.used = 0
        """Bytes of blocks and pieces, those that were taken and not yet freed included."""
        self.reserved = 0
        self.number = 0
        """Of the last block."""
        self._owed = 0
        """What the partitions' shares still lack."""
        self._turns = 0

    # --- what is told

    def follow(self, ahead: Ahead) -> None:
        """Read on from there."""
        for tp in self.partitions.keys() - ahead.positions.keys():
            self._forget(tp)
        for tp, position in ahead.positions.items():
            held = self.partitions.get(tp)
            epoch = ahead.leader_epochs.get(tp, held.epoch if held else UNKNOWN)
            topic_id = ahead.topic_ids.get(tp.topic, "")
            if held is None or (held.topic_id, held.epoch) != (topic_id, epoch) or position < held.told:
                self._forget(tp)
                self.partitions[tp] = Held(topic_id, epoch, position, position, self._turn(), [])
                continue
            held.told = position
            self._drop_below(held, min(position, ahead.keep.get(tp, position)))
            if held.position < position or held.halted:
                held.position, held.turn = max(held.position, position), self._turn()
                held.halted, held.needs = False, 0
        share = self._share
        self._owed = sum(max(0, share - held.bytes) for held in self.partitions.values())

    def drop(self, topic: str) -> None:
        """It is not what it was: nothing of it is held, and nothing read, before something new is told."""
        for tp, held in self.partitions.items():
            if tp.topic == topic:
                self._clear(held)
                held.halted = True

    def drop_all(self) -> None:
        for held in self.partitions.values():
            self._clear(held)

    def halt(self, tp: TopicPartition) -> None:
        if tp in self.partitions:
            self.partitions[tp].halted = True

    def _turn(self) -> int:
        self._turns += 1
        return self._turns

    def _forget(self, tp: TopicPartition) -> None:
        if tp in self.partitions:
            held = self.partitions.pop(tp)
            held.forgotten = True
            self._clear(held)

    def _clear(self, held: Held) -> None:
        pieces, held.pieces = held.pieces, []
        self._free(held, pieces)
        held.turn = self._turn()

    def _drop_below(self, held: Held, offset: int) -> None:
        at = self._split(held, offset)
        self._free(held, held.pieces[:at])
        del held.pieces[:at]

    # --- what is read

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - self.used - self.reserved

    @property
    def _share(self) -> int:
        return self.memory_bytes // (2 * max(1, len(self.partitions)))

    def room(self, tp: TopicPartition) -> int:
        """Bytes that may be reserved for a partition now."""
        own = max(0, self._share - self.partitions[tp].bytes)
        return max(0, min(self.free_bytes, max(own, self.free_bytes - (self._owed - own))))

    def is_full(self, tp: TopicPartition) -> bool:
        """Whether it is not worth reading on: an eighth of its share is not left, or not what its next record needs."""
        return not self._fits(tp, self._share // 8)

    def has_room_again(self, tp: TopicPartition) -> bool:
        """Whether a partition that was full is read again: half its share is left, so that it does not stop at once."""
        return self._fits(tp, self._share // 2)

    def _fits(self, tp: TopicPartition, least: int) -> bool:
        needs = self.partitions[tp].needs
        return self.room(tp) >= max(least, needs) or (not self.used + self.reserved and needs <= self.memory_bytes)

    def reserve(self, tp: TopicPartition, sizes: Ints) -> tuple[int, int]:
        """Room for the first of these rows, in order, without a gap.

        Args:
            sizes: bytes of key, value and headers.

        Returns:
            How many rows there is room for, and the bytes that are reserved for them.
        """
        held = self.partitions[tp]
        ends = np.cumsum(sizes + (ROW_BYTES + 4 * len(tp.topic))) + (BLOCK_BYTES + PIECE_BYTES)
        count = int(np.searchsorted(ends, self.room(tp), side="right"))
        if not count and not self.used + self.reserved and ends[0] <= self.memory_bytes:
            count = 1  # larger than any share; there is nothing beside it
        left = ends[count:]
        held.needs = int(left[0] - (ends[count - 1] - BLOCK_BYTES - PIECE_BYTES if count else 0)) if len(left) else 0
        wanted = int(ends[count - 1]) if count else 0
        self.reserved += wanted
        self._count(held, wanted)
        return count, wanted

    def add(self, batch: pa.RecordBatch, parts: Sequence[Reached]) -> None:
        """Take in rows that room was reserved for.

        Args:
            batch: the rows of all parts, one after the other.
        """
        self.number += 1
        block = Block(batch, batch.get_total_buffer_size() + BLOCK_BYTES)
        first = 0
        for part in parts:
            last = first + part.cut.last - part.cut.first
            self.reserved -= part.bytes
            held = part.held
            if self.partitions.get(part.cut.tp) is held and held.turn == part.turn:
                held.pieces.append(Piece(part.start, part.end, block, first, last, part.bytes, self.number))
                held.position = part.end
                self._use(block)
            else:
                self._count(held, -part.bytes)
            first = last

    def cancel(self, parts: Iterable[Reached]) -> None:
        """These rows will not come."""
        for part in parts:
            self.reserved -= part.bytes
            self._count(part.held, -part.bytes)

    def advance(self, tp: TopicPartition, turn: int, position: int) -> None:
        """No record is left below this position."""
        held = self.partitions.get(tp)
        if held is None or held.turn != turn or position <= held.position:
            return
        self.number += 1
        last = held.pieces[-1] if held.pieces else None
        if last is not None and last.end == held.position:
            last.end, last.number = position, self.number
        elif self.free_bytes >= PIECE_BYTES:
            held.pieces.append(Piece(held.position, position, None, 0, 0, 0, self.number))
            self.used += PIECE_BYTES
        held.position = position

    def _use(self, block: Block) -> None:
        if not block.pieces:
            self.used += block.bytes
        block.pieces += 1
        self.used += PIECE_BYTES

    # --- what is served

    def numbers(self, ranges: Sequence[OffsetRange]) -> dict[str, int]:
        """Of each topic the number of the last block that serving these ranges would need."""
        found: dict[str, int] = {}
        for r in ranges:
            held = self.partitions.get(r.tp)
            for piece in self._run(held, r) if held else ():
                found[r.tp.topic] = max(found.get(r.tp.topic, 0), piece.number)
        return found

    def take(
        self,
        ranges: Sequence[OffsetRange],
        topic_ids: Mapping[str, str],
        epochs: Mapping[TopicPartition, int],
        confirmed: Mapping[str, int],
    ) -> list[Taken]:
        """Hand out what is held of the beginnings of these ranges; it has to be freed.

        Args:
            topic_ids, epochs: what the plan says of them; what was read for others is not served.
            confirmed: up to which block each topic is known to have been the planned one.
        """
        found = []
        for place, r in enumerate(ranges):
            held = self.partitions.get(r.tp)
            told = topic_ids.get(r.tp.topic, ""), epochs.get(r.tp, UNKNOWN)
            if held is None or (held.topic_id, held.epoch) != told or r.tp.topic not in confirmed:
                continue
            first = self._split(held, r.start)
            self._split(held, r.end)
            run = self._run(held, r)
            good = next((n for n, piece in enumerate(run) if piece.number > confirmed[r.tp.topic]), len(run))
            if good:
                pieces = held.pieces[first : first + good]
                del held.pieces[first : first + good]
                self._count(held, -sum(piece.bytes for piece in pieces))
                found.append(Taken(place, pieces[-1].end, pieces))
        return found

    def free(self, pieces: Iterable[Piece]) -> None:
        """What was taken is not needed any more."""
        for piece in pieces:
            self.used -= piece.price
            if piece.block is not None:
                piece.block.pieces -= 1
                if not piece.block.pieces:
                    self.used -= piece.block.bytes
                piece.block = None

    def _free(self, held: Held, pieces: Sequence[Piece]) -> None:
        self._count(held, -sum(piece.bytes for piece in pieces))
        self.free(pieces)

    def _count(self, held: Held, more: int) -> None:
        if not held.forgotten:
            self._owed += max(0, self._share - held.bytes - more) - max(0, self._share - held.bytes)
        held.bytes += more

    def _run(self, held: Held, r: OffsetRange) -> list[Piece]:
        """The pieces that hold the beginning of a range, without a gap."""
        at = _first_ending_after(held.pieces, r.start)
        run: list[Piece] = []
        reached = r.start
        while at < len(held.pieces) and held.pieces[at].start <= reached < r.end:
            run.append(held.pieces[at])
            reached, at = held.pieces[at].end, at + 1
        return run

    def _split(self, held: Held, offset: int) -> int:
        """Cut the piece that has this offset inside. Returns which piece is the first that ends after it."""
        at = _first_ending_after(held.pieces, offset)
        if at == len(held.pieces) or held.pieces[at].start >= offset:
            return at
        piece, block = held.pieces[at], held.pieces[at].block
        left = Piece(piece.start, offset, None, 0, 0, 0, piece.number, price=0)
        if block is not None:
            offsets = block.batch.column("offset").slice(piece.first, piece.last - piece.first).to_numpy()
            middle = piece.first + int(np.searchsorted(offsets, offset))
            if middle > piece.first:
                left.block, left.first, left.last = block, piece.first, middle
                left.bytes = piece.bytes * (middle - piece.first) // (piece.last - piece.first)
                block.pieces += 1
            if middle == piece.last:
                piece.block = None
                block.pieces -= 1
            piece.first, piece.bytes = middle, piece.bytes - left.bytes
        piece.start = offset
        held.pieces.insert(at, left)
        return at + 1


def _first_ending_after(pieces: Sequence[Piece], offset: int) -> int:
    low, high = 0, len(pieces)
    while low < high:
        middle = (low + high) // 2
        if pieces[middle].end <= offset:
            low = middle + 1
        else:
            high = middle
    return low
