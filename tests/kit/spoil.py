"""What a broken network card, or a server that is none, does to Kafka's answers: lengths and bytes that are wrong.

Runs in: tests, on a proxy's thread. Deliberately absent: what an answer holds. Only its frame is known: four bytes of
length, four of the number of the question, and the rest.

Bytes of one answer are wrong as a whole, or one bit in a large one. A few wrong bytes in a small answer can make it
another one, with another offset: Kafka has checksums for records only, so nobody could tell.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Harm = Literal["length", "garbage", "flip"]
LENGTH_BYTES = 4
NUMBER_BYTES = 4
LARGE = 100_000
"""An answer of so many bytes holds records, behind less than :data:`FRONT` bytes of its own."""
FRONT = 1_000


@dataclass
class Spoil:
    """Makes one :class:`Spoiler` for each connection. ``harmed`` counts answers, of all of them.

    Args:
        seed: the same harm to the same answers.
        share: of the answers that are harmed.
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
        return f"{' and '.join(self.harms)} in {self.share:.0%} of the answers, seed {self.seed}"


class Spoiler:
    """Takes a connection's bytes as they come and gives as many back."""

    def __init__(self, orders: Spoil, draw: random.Random) -> None:
        self._orders, self._random = orders, draw
        self._prefix = b""
        self._at = self._size = 0
        """In the body of an answer, and how long that is."""
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
        """An answer of this size begins. Returns what is told of its length."""
        self._at, self._size, self._change = 0, size, _same
        told = size
        harm = self._random.choice(self._orders.harms)
        if size > 0 and self._random.random() < self._orders.share and (harm != "flip" or size > LARGE):
            self._orders.harmed += 1
            if harm == "length":
                near = [size + self._random.randrange(1, 1000), self._random.randrange(size)]
                told = self._random.choice([0, -1, 2**31 - 1, self._random.randrange(-(2**31), 2**31), *near])
            elif harm == "garbage":
                self._change = lambda at, byte: self._random.randrange(256) if at >= NUMBER_BYTES else byte
            else:
                where, bit = self._random.randrange(FRONT, size), 1 << self._random.randrange(8)
                self._change = lambda at, byte: byte ^ bit if at == where else byte
        return told.to_bytes(LENGTH_BYTES, signed=True)


def _same(_at: int, byte: int) -> int:
    return byte
