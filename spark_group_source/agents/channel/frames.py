"""Messages behind their length, on a blocking socket.

Runs in: executor processes, tasks, agents. Deliberately absent: what the messages are, and proofs (``proof``).
"""

import socket
import time
from typing import Final

from spark_group_source.agents.channel.codec import WireError

HEAD_BYTES: Final = 4
_PART_BYTES: Final = 1 << 20


def framed(body: bytes) -> bytes:
    """A body behind its length."""
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def length_of(head: bytes, bytes_max: int) -> int:
    """The length of the body behind this head.

    Raises:
        WireError: it is 0, or above ``bytes_max``: known before a byte of the body is kept.
    """
    length = int.from_bytes(head, "big")
    if not 0 < length <= bytes_max:
        raise WireError(f"a frame of {length} bytes; the maximum is {bytes_max}")
    return length


def limit(connection: socket.socket, until_s: float) -> None:
    """Let the next call on a socket end by then, a time of ``time.monotonic``.

    Raises:
        TimeoutError: that is over.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left_s)


def receive(connection: socket.socket, bytes_max: int, until_s: float) -> bytes:
    """The body of the next frame.

    Raises:
        WireError: its length is not valid.
        OSError: the connection ended, or the time.
    """
    return exactly(connection, length_of(exactly(connection, HEAD_BYTES, until_s), bytes_max), until_s)


def exactly(connection: socket.socket, size: int, until_s: float) -> bytes:
    """So many bytes. Raises OSError: the connection ended, or the time."""
    found = bytearray()
    while len(found) < size:
        limit(connection, until_s)
        part = connection.recv(min(_PART_BYTES, size - len(found)))
        if not part:
            raise ConnectionResetError("closed by the other end")
        found += part
    return bytes(found)
