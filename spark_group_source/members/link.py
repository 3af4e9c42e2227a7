"""Messages that arrive once and in order, however often the channel below is cut: numbers, and what was not heard yet.

Runs in: the stream reader, agents. Deliberately absent: channels, and what the messages say. Each side keeps what the
other has not heard, sends it again on a new channel, and takes nothing but the next number.
"""

from collections import deque
from collections.abc import Callable

from spark_group_source.kafka import Runtime
from spark_group_source.members.messages import Order, Report, Told

UNHEARD_MAX = 10_000
"""Messages that the other side has not heard; beyond this it is given up: it would know of nothing that matters."""

Send = Callable[[Told], object]


class Link:
    """One side. Any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.condition()
        self._send: Send | None = None
        self._unheard: deque[Told] = deque()
        self._last = 0  # number of the last message that was told
        self._mark = 0  # the same, when it was last heard what the other side has
        self.heard = 0
        """The number of the last message that was taken."""
        self.broken = False
        """More was told than is kept: the other side misses something."""

    def connect(self, send: Send | None, *, heard: int = 0) -> None:
        """There is a new channel, or none. ``heard``: what the other side has."""
        with self._lock:
            self._send = send
            self._drop(heard)
            self._again()

    def tell(self, body: Order | Report) -> None:
        with self._lock:
            if len(self._unheard) >= UNHEARD_MAX:
                self.broken = True
                return
            self._last += 1
            told = Told(number=self._last, body=body)
            self._unheard.append(told)
            if self._send is not None:
                self._send(told)

    def take(self, told: Told) -> Order | Report | None:
        """What it says, if it is the next one: one that came before, or comes too early, says nothing."""
        with self._lock:
            if told.number != self.heard + 1:
                return None
            self.heard = told.number
            return told.body

    def other_heard(self, heard: int) -> None:
        """The other side says now and then what it has. What it should have had the last time is sent again."""
        with self._lock:
            self._drop(heard)
            if self._unheard and self._unheard[0].number <= self._mark:
                self._again()
            self._mark = self._last

    def _drop(self, heard: int) -> None:
        while self._unheard and self._unheard[0].number <= heard:
            self._unheard.popleft()

    def _again(self) -> None:
        if self._send is not None:
            for told in self._unheard:
                self._send(told)
