"""How tasks and their agent speak: frames of JSON over a Unix socket, and Arrow's stream format behind an answer.

Runs in: executor workers and agents. Deliberately absent: who may speak (``server``), and pickles.

A frame is 4 bytes of length and a JSON object. A connection carries one request and one answer.
"""

import json
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any

from spark_group_source.model import OffsetRange, TopicPartition

FRAME_BYTES_MAX = 16 << 20
"""100,000 partitions take some 10 MB."""
_LENGTH = struct.Struct(">I")

Frame = dict[str, Any]  # Any: JSON


class WireError(Exception):
    """What came is not what was agreed on, or not all of it came."""


def limit(connection: socket.socket, until_s: float) -> None:
    """Let the next call on a socket end by then.

    Raises:
        TimeoutError: that is over.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is over")
    connection.settimeout(left_s)


def send(connection: socket.socket, frame: Frame, until_s: float) -> None:
    body = json.dumps(frame, separators=(",", ":")).encode()
    if len(body) > FRAME_BYTES_MAX:
        raise WireError(f"a message of {len(body)} bytes is too long")
    limit(connection, until_s)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket, until_s: float) -> Frame:
    """
    Raises:
        WireError: it is no frame.
        OSError: the connection ended, or the time.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, until_s))
    if length > FRAME_BYTES_MAX:
        raise WireError(f"a message of {length} bytes is too long")
    try:
        frame = json.loads(_exactly(connection, length, until_s))
    except ValueError as exc:
        raise WireError(f"not JSON: {exc}") from None
    if not isinstance(frame, dict):
        raise WireError("not an object")
    return frame


def _exactly(connection: socket.socket, size: int, until_s: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        limit(connection, until_s)
        part = connection.recv(min(1 << 20, size - len(found)))
        if not part:
            raise ConnectionResetError(f"the connection ended after {len(found)} of {size} bytes")
        found += part
    return bytes(found)


# --- values


def ranges_out(ranges: Iterable[OffsetRange]) -> list[list[Any]]:
    return [[r.tp.topic, r.tp.partition, r.start, r.end] for r in ranges]


def ranges_in(told: Any) -> list[OffsetRange]:
    return [OffsetRange(TopicPartition(str(t), int(p)), int(s), int(e)) for t, p, s, e in told]


def numbers_out(numbers: Mapping[TopicPartition, int]) -> list[list[Any]]:
    return [[tp.topic, tp.partition, number] for tp, number in numbers.items()]


def numbers_in(told: Any) -> dict[TopicPartition, int]:
    return {TopicPartition(str(t), int(p)): int(number) for t, p, number in told}


def texts_in(told: Any) -> dict[str, str]:
    return {str(name): str(text) for name, text in told.items()}
