"""Changes that arrive once and in order, whichever connection carries them.

Runs in: the stream reader, agents. Deliberately absent: connections, and what a change says.

A connection keeps the order of what it carries and loses none of it, or it ends. So nothing is sent again over the same
one: when a connection begins, each end sends every change that the other has not taken, and then each as it happens.
These changes, and not a picture of where the members stand, are the state that is exchanged: a member that lost its
partitions and was assigned the same ones while the connection was down must not look like one that kept them.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from spark_group_source.kafka import Environment

KEPT_MAX = 10_000
"""Changes that the other end has not taken; beyond this it is given up: it would know of nothing that matters."""

C = TypeVar("C")


class Session(Generic[C]):
    """One end. Any thread.

    Args:
        environment: locks.
    """

    def __init__(self, environment: Environment) -> None:
        self._lock = environment.condition()
        self._send: Callable[[int, C], object] | None = None
        self._kept: deque[tuple[int, C]] = deque()
        self._last = 0  # number of the last change here
        self.taken = 0
        """The number of the last change of the other end that was taken here."""
        self.broken = False
        """More changes were made than are kept: the other end misses some."""

    def connect(self, send: Callable[[int, C], object] | None) -> None:
        """There is a new connection, or none; ``send`` takes the number of a change and the change, and never waits."""
        with self._lock:
            self._send = send
            if send is not None:
                for number, change in self._kept:
                    send(number, change)

    def tell(self, change: C) -> None:
        """Let the other end know."""
        with self._lock:
            if len(self._kept) >= KEPT_MAX:
                self.broken = True
                return
            self._last += 1
            self._kept.append((self._last, change))
            if self._send is not None:
                self._send(self._last, change)

    def take(self, number: int) -> bool:
        """Whether the other end's change with this number is news: after a reconnect some came before."""
        with self._lock:
            if number != self.taken + 1:
                return False
            self.taken = number
            return True

    def other_took(self, number: int) -> None:
        """The other end has taken all changes up to this number."""
        with self._lock:
            while self._kept and self._kept[0][0] <= number:
                self._kept.popleft()
