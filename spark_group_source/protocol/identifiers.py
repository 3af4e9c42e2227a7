"""The names of a stream in Kafka, and the note beside each offset that it commits.

Runs in: the stream reader, the command line, tests. Deliberately absent: requests to Kafka.

A stream commits with the transactional id ``<group>.<stream id>``, and its members have the instance ids
``<group>.<stream id>.<slot>``. The note is the metadata of a committed offset and names the stream or
the reset that committed it (``docs/formats.md``)::

    spark-group:<stream id>:<batch>:<reset number>[:followed][:started][:truncated_after=<epoch>][:at=<ms>][:topic=<id>]
    spark-group-reset:<reset number>

Any other text is a foreign commit. Resets of a group are numbered: plans that were made before the newest one are void,
and every later commit repeats its number.
"""

import re
from typing import NamedTuple

STREAM_PREFIX = "spark-group"
RESET_PREFIX = "spark-group-reset"
FOLLOWED = "followed"
STARTED = "started"
TRUNCATED_AFTER = "truncated_after"
AT = "at"
TOPIC = "topic"
NOT_A_NAME = r"[^\w.:]"
"""Characters that are replaced in the name of an agent."""


class Note(NamedTuple):
    """The parsed note of a committed offset. A foreign commit has no stream and no reset number."""

    stream: str | None = None
    """The id of the stream that committed it; None for an operator's reset and for foreign commits."""
    seq: int = -1
    """The number of its last durable batch at the commit."""
    reset_number: int = 0
    """The number of the group's last reset; 0 before the first."""
    followed: bool = False
    """Whether the position came from a commit that no stream made."""
    started: bool = False
    """Whether the stream starts there although the group read no record before it, and no batch of it was durable."""
    truncated_after: int | None = None
    """The last leader epoch that was known before the log was truncated and the stream went back, or RECREATED; None if
    it did not go back."""
    at_ms: int | None = None
    """When it was committed, in milliseconds since 1970 by the driver's clock; None if unknown."""
    topic_id: str = ""
    """The id of the topic that the stream read; "" if unknown. A commit gives only the name, which may be that of a
    recreated topic by then."""


def note_text(note: Note) -> str:
    """The note of a stream's commit as text; the note has a stream."""
    assert note.stream is not None
    words = [f"{STREAM_PREFIX}:{note.stream}:{note.seq}:{note.reset_number}"]
    if note.followed:
        words.append(FOLLOWED)
    if note.started:
        words.append(STARTED)
    if note.truncated_after is not None:
        words.append(f"{TRUNCATED_AFTER}={note.truncated_after}")
    if note.at_ms is not None:
        words.append(f"{AT}={note.at_ms}")
    if note.topic_id:
        words.append(f"{TOPIC}={note.topic_id}")
    return ":".join(words)


def reset_text(reset_number: int) -> str:
    """The note of an operator's reset."""
    return f"{RESET_PREFIX}:{reset_number}"


def parse_note(text: str) -> Note:
    """Parse a note. Any text is valid: one of another form is a foreign commit."""
    prefix, *parts = text.split(":")
    try:
        if prefix == RESET_PREFIX and len(parts) == 1:
            return Note(reset_number=int(parts[0]))
        if prefix == STREAM_PREFIX and len(parts) >= 3 and parts[0]:
            stream, seq, reset_number, *words = parts
            more = dict(word.split("=", 1) for word in words if "=" in word)
            truncated_after, at_ms = (int(more[name]) if name in more else None for name in (TRUNCATED_AFTER, AT))
            return Note(
                stream,
                int(seq),
                int(reset_number),
                followed=FOLLOWED in words,
                started=STARTED in words,
                truncated_after=truncated_after,
                at_ms=at_ms,
                topic_id=more.get(TOPIC, ""),
            )
    except ValueError:
        pass
    return Note()


def transactional_id(group: str, stream: str) -> str:
    """The transactional id of all runs of a stream: Kafka fences every producer with it but the newest."""
    return f"{group}.{stream}"


def instance_id(group: str, stream: str, slot: int) -> str:
    """The ``group.instance.id`` of a slot's static member (KIP-345), the same in all runs of a stream."""
    return f"{group}.{stream}.{slot}"


def is_instance_id_of(group: str, stream: str, instance_id: str) -> bool:
    """Whether an instance id is that of a slot of the stream."""
    before, _, number = instance_id.rpartition(".")
    return before == transactional_id(group, stream) and number.isdecimal()


def client_id(stream: str, slot: int, agent: str = "") -> str:
    """The client id of a slot's member. ``agent``: the name of the agent on which it is placed, if any."""
    at = f"-at-{re.sub(NOT_A_NAME, '_', agent)}" if agent else ""
    return f"spark-group-{stream}{at}-{slot}"


def slot_of(stream: str, client_id: str) -> int | None:
    """The slot of this stream whose member has, or had, this client id; None if it is not one of this stream. The agent
    in it may be an earlier one: a classic broker keeps showing the first client id of a static member."""
    before, _, number = client_id.rpartition("-")
    ours = before == f"spark-group-{stream}" or before.startswith(f"spark-group-{stream}-at-")
    return int(number) if ours and number.isdecimal() else None
