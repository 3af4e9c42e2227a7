"""A session of an agent and the stream reader: changes arrive in order and once, over any number of connections.

Runs in: the stream reader, agents. Deliberately absent: connections, and the contents of changes.

A connection delivers messages in order and complete until it ends, so nothing is sent twice over one connection. After
a reconnect each end first sends the changes that the other end has not received, then new changes as they happen.

The ends exchange changes and not the current state of the members: a member that lost its partitions and was assigned
the same ones while the connection was down must not look like one that kept them.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from spark_group_source.kafka import Environment

PENDING_MAX = 10_000
"""Changes that the other end has not received. Beyond this the session overflows and has to end."""

ChangeT = TypeVar("ChangeT")


class Session(Generic[ChangeT]):
    """One end of a session. Any thread.

    Args:
        environment: locks.
    """

    def __init__(self, environment: Environment) -> None:
        self._lock = environment.condition()
        self._send: Callable[[int, ChangeT], object] | None = None
        """Sends over the current connection; None while there is none."""
        self._pending: deque[tuple[int, ChangeT]] = deque()
        """Numbered changes that the other end has not acknowledged."""
        self._last_number = 0
        self.received = 0
        """Number of the last change of the other end that was received here."""
        self.overflowed = False
        """Whether a change was dropped because :data:`PENDING_MAX` were pending."""

    def connect(self, send: Callable[[int, ChangeT], object] | None) -> None:
        """Use a new connection, or none. ``send`` takes a change's number and the change, and never waits."""
        with self._lock:
            self._send = send
            if send is not None:
                for number, change in self._pending:
                    send(number, change)

    def add(self, change: ChangeT) -> None:
        """Send a change to the other end, now or after the next reconnect."""
        with self._lock:
            if len(self._pending) >= PENDING_MAX:
                self.overflowed = True
                return
            self._last_number += 1
            self._pending.append((self._last_number, change))
            if self._send is not None:
                self._send(self._last_number, change)

    def receive(self, number: int) -> bool:
        """Note that the other end's change with this number arrived. Returns whether it is new: after a reconnect a
        change may arrive again."""
        with self._lock:
            if number != self.received + 1:
                return False
            self.received = number
            return True

    def acknowledge(self, number: int) -> None:
        """The other end has received all changes up to this number."""
        with self._lock:
            while self._pending and self._pending[0][0] <= number:
                self._pending.popleft()
