"""Corruption of Kafka's responses, as by a defective network card or a server of another protocol: wrong lengths and
bytes.

Runs in: tests, on a proxy's thread. Deliberately absent: the contents of responses. Only the frame is known: four bytes
of length, four of the correlation id, and the rest.

A response is corrupted as a whole, or by one bit if it is large. A few wrong bytes in a small response can turn it into
another valid one, with another offset: Kafka has checksums for records only, so no client could detect it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Harm = Literal["length", "garbage", "flip"]
LENGTH_BYTES = 4
NUMBER_BYTES = 4
LARGE = 100_000
"""A response of at least this size contains records, after less than :data:`FRONT` bytes."""
FRONT = 1_000


@dataclass
class Spoil:
    """Creates one :class:`Spoiler` per connection. ``harmed`` counts corrupted responses of all connections.

    Args:
        seed: determines which responses are corrupted, and how.
        share: the fraction of responses that is corrupted.
    """

    seed: int
    harms: tuple[Harm, ...]
    share: float
    harmed: int = 0
    made: int = 0

    def __call__(self) -> "Spoiler":
        self.made += 1
        return Spoiler(self, random.Random(self.seed + self.made))

    def __str__(self) -> str:
        return f"{' and '.join(self.harms)} in {self.share:.0%} of the responses, seed {self.seed}"


class Spoiler:
    """Receives the bytes of a connection and returns as many."""

    def __init__(self, orders: Spoil, draw: random.Random) -> None:
        self._orders, self._random = orders, draw
        self._prefix = b""
        self._at = self._size = 0
        """The position in the body of the current response, and the body's size."""
        self._change: Callable[[int, int], int] = _same

    def __call__(self, data: bytes) -> bytes:
        out = bytearray()
        while data:
            if self._at == self._size:
                taken, data = data[: LENGTH_BYTES - len(self._prefix)], data[LENGTH_BYTES - len(self._prefix) :]
                self._prefix += taken
                if len(self._prefix) == LENGTH_BYTES:
                    out += self._begin(int.from_bytes(self._prefix, signed=True))
                    self._prefix = b""
                continue
            taken, data = data[: self._size - self._at], data[self._size - self._at :]
            if self._change is _same:
                out += taken
            else:
                out += bytes(self._change(self._at + i, byte) for i, byte in enumerate(taken))
            self._at += len(taken)
        return bytes(out)

    def _begin(self, size: int) -> bytes:
        """Start a response of this size. Returns the length field to send."""
        self._at, self._size, self._change = 0, size, _same
        declared = size
        harm = self._random.choice(self._orders.harms)
        if size > 0 and self._random.random() < self._orders.share and (harm != "flip" or size > LARGE):
            self._orders.harmed += 1
            if harm == "length":
                near = [size + self._random.randrange(1, 1000), self._random.randrange(size)]
                declared = self._random.choice([0, -1, 2**31 - 1, self._random.randrange(-(2**31), 2**31), *near])
            elif harm == "garbage":
                self._change = lambda at, byte: self._random.randrange(256) if at >= NUMBER_BYTES else byte
            else:
                where, bit = self._random.randrange(FRONT, size), 1 << self._random.randrange(8)
                self._change = lambda at, byte: byte ^ bit if at == where else byte
        return declared.to_bytes(LENGTH_BYTES, signed=True)


def _same(_at: int, byte: int) -> int:
    return byte
