"""The names by which a stream is known to Kafka, and the note beside each offset that it commits.

Runs in: the stream reader, the command line, tests. Deliberately absent: asking Kafka.

A stream is ``<group>.<stream id>`` as a committing process and ``<group>.<stream id>.<slot>`` as a static member. The
note beside a committed offset (Kafka calls it metadata) says who committed it:

- ``spark-group:<stream>:<seq>:<epoch>``, with ``:followed`` behind it where the position came from a commit that no
  stream made: a stream, when its batch ``seq`` was durable; ``:at=<ms since the epoch>`` is when, which Kafka keeps
  to itself;
- ``spark-group-reset:<epoch>``: ``spark-group reset``. The *epoch* counts the resets of a group. Plans that were made
  before the newest one are void, and every later commit carries its number on;
- anything else: somebody else.
"""

import re
from typing import NamedTuple

STREAM_PREFIX = "spark-group"
RESET_PREFIX = "spark-group-reset"
FOLLOWED = "followed"
CUT = "cut"
AT = "at"
NOT_A_NAME = r"[^\w.:]"
"""What does not belong into the name of a host."""


class Note(NamedTuple):
    """Who committed an offset. ``stream`` is None, and ``seq`` -1, for an operator and for anyone who is not ours.

    ``followed``: the position came from a commit that no stream made. ``cut``: where the stream stood before it went
    back, because the log had been cut. ``at_ms``: when it was committed, by the host's clock; None: the note does not
    say.
    """

    stream: str | None = None
    seq: int = -1
    epoch: int = 0
    followed: bool = False
    cut: int | None = None
    at_ms: int | None = None


def note_text(
    stream: str, seq: int, epoch: int = 0, *, followed: bool = False, cut: int | None = None, at_ms: int | None = None
) -> str:
    """The note of a stream's commit."""
    words = [STREAM_PREFIX, stream, str(seq), str(epoch)]
    if followed:
        words.append(FOLLOWED)
    if cut is not None:
        words.append(f"{CUT}={cut}")
    if at_ms is not None:
        words.append(f"{AT}={at_ms}")
    return ":".join(words)


def reset_text(epoch: int) -> str:
    """The note of an operator's reset."""
    return f"{RESET_PREFIX}:{epoch}"


def parse_note(text: str) -> Note:
    """Read a note. Whatever is not one of ours is somebody else's: no text is an error."""
    prefix, *parts = text.split(":")
    try:
        if prefix == RESET_PREFIX and len(parts) == 1:
            return Note(epoch=int(parts[0]))
        if prefix == STREAM_PREFIX and len(parts) >= 3 and parts[0]:
            stream, seq, epoch, *words = parts
            more = dict(word.split("=", 1) for word in words if "=" in word)
            cut, at_ms = (int(more[name]) if name in more else None for name in (CUT, AT))
            return Note(stream, int(seq), int(epoch), followed=FOLLOWED in words, cut=cut, at_ms=at_ms)
    except ValueError:
        pass
    return Note()


def transactional_id(group: str, stream: str) -> str:
    return f"{group}.{stream}"


def instance_id(group: str, stream: str, slot: int) -> str:
    return f"{group}.{stream}.{slot}"


def is_place(group: str, stream: str, instance_id: str) -> bool:
    """Whether an instance id is that of a slot of the stream."""
    before, _, number = instance_id.rpartition(".")
    return before == transactional_id(group, stream) and number.isdecimal()


def client_id(stream: str, slot: int, host: str = "") -> str:
    """``host``: the name of the agent where the member lives, if it is lent to one."""
    at = f"-at-{re.sub(NOT_A_NAME, '_', host)}" if host else ""
    return f"spark-group-{stream}{at}-{slot}"


def slot_of(stream: str, client_id: str) -> int | None:
    """The slot of this stream whose member has, or had, that client id, wherever it lived: a classic broker goes on to
    show the first one when a place is taken over."""
    before, _, number = client_id.rpartition("-")
    ours = before == f"spark-group-{stream}" or before.startswith(f"spark-group-{stream}-at-")
    return int(number) if ours and number.isdecimal() else None
