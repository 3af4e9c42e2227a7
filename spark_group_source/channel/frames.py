"""A stream of bytes cut into messages, each behind its length.

Runs in: the stream reader, executor processes, tasks. Deliberately absent: sockets, and what the messages are.
"""

from typing import Final

from spark_group_source.channel.kinds import WireError

_LENGTH: Final = 4


def framed(body: bytes) -> bytes:
    """A body behind its length."""
    return len(body).to_bytes(_LENGTH, "big") + body


class Frames:
    """Cuts a stream of bytes into the bodies that :func:`framed` made.

    Args:
        bytes_max: the longest body that is taken. May be changed between two frames.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next body, or None when more bytes are needed.

        Raises:
            WireError: it says that it is empty, or longer than may be: known before a byte of it is kept.
        """
        if len(self._buffer) < _LENGTH:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH], "big")
        if not 0 < length <= self.bytes_max:
            raise WireError(f"a frame of {length} bytes; {self.bytes_max} are the most")
        end = _LENGTH + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH:end])
        del self._buffer[:end]  # cheap: a bytearray only moves its start
        return body
