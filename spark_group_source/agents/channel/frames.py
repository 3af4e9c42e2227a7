"""Send and receive length-prefixed frames on a blocking socket.

Runs in: executor workers, agents. Deliberately absent: the frames' contents, and authentication (``handshake``).
"""

import socket
import time
from typing import Final

from spark_group_source.agents.channel.codec import WireError

HEAD_BYTES: Final = 4
"""Length prefix of a frame, big-endian."""
_RECEIVE_BYTES: Final = 1 << 20


def frame(body: bytes) -> bytes:
    """Prepend its length to a body."""
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def body_length(head: bytes, bytes_max: int) -> int:
    """Decode a length prefix.

    Raises:
        WireError: the length is 0 or above ``bytes_max``; nothing of the body has been received yet.
    """
    length = int.from_bytes(head, "big")
    if not 0 < length <= bytes_max:
        raise WireError(f"a frame of {length} bytes; the limit is {bytes_max}")
    return length


def set_deadline(connection: socket.socket, until_s: float) -> None:
    """Let the socket's next call time out at ``until_s``, on the clock of ``time.monotonic``.

    Raises:
        TimeoutError: the deadline has passed.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left_s)


def receive_frame(connection: socket.socket, bytes_max: int, until_s: float) -> bytes:
    """Receive the body of the next frame.

    Raises:
        WireError: the frame's length is invalid.
        OSError: the connection was closed, or the deadline passed.
    """
    return receive_exactly(
        connection, body_length(receive_exactly(connection, HEAD_BYTES, until_s), bytes_max), until_s
    )


def receive_exactly(connection: socket.socket, size: int, until_s: float) -> bytes:
    """Receive ``size`` bytes.

    Raises:
        OSError: the connection was closed, or the deadline passed.
    """
    received = bytearray()
    while len(received) < size:
        set_deadline(connection, until_s)
        part = connection.recv(min(_RECEIVE_BYTES, size - len(received)))
        if not part:
            raise ConnectionResetError("closed by the peer")
        received += part
    return bytes(received)
