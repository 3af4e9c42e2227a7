"""Encoded messages decode to equal messages, frames are received whole; anything else is refused."""

import json
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from channel_helpers import CODEC, SOON_S, Everything, Inner, Ping
from hypothesis import given
from hypothesis import strategies as st

from spark_group_source.agents.channel.wire import (
    FRAME_BYTES_MAX,
    Codec,
    WireError,
    body_length,
    frame,
    receive_frame,
)
from spark_group_source.model import OffsetRange, TopicPartition

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
longs = st.integers(-(2**63), 2**63 - 1)
partitions = st.builds(TopicPartition, texts, longs)
inners = st.builds(Inner, number=longs, text=st.none() | texts)
messages = st.builds(
    Everything,
    text=texts,
    number=longs,
    yes=st.booleans(),
    maybe=st.none() | longs,
    either=inners | st.builds(Ping, number=longs, load=texts),
    inner=inners,
    inners=st.lists(inners, max_size=3).map(tuple),
    ranges=st.lists(st.builds(OffsetRange, partitions, longs, longs), max_size=5).map(tuple),
    assigned=st.lists(partitions, max_size=5).map(tuple),
    offsets=st.dictionaries(partitions, st.none() | longs, max_size=5),
    topics=st.dictionaries(texts, texts, max_size=5),
)
documents = st.recursive(
    st.none() | st.booleans() | longs | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=20,
)


@given(messages)
def test_a_message_decodes_to_an_equal_message(message: Everything) -> None:
    again = CODEC.decode(CODEC.encode(message))
    assert again == message
    for field in fields(Everything):  # True == 1, and a named tuple is equal to a plain one
        assert type(getattr(again, field.name)) is type(getattr(message, field.name))
    assert all(type(r) is OffsetRange and type(r.tp) is TopicPartition for r in again.ranges)


@given(st.binary(max_size=200))
def test_garbage_raises_WireError_only(data: bytes) -> None:
    with pytest.raises(WireError):
        CODEC.decode(data)


@given(documents)
def test_json_that_is_not_a_message_is_refused(document: Any) -> None:
    for body in (document, ["Everything", document], [document, []], ["Ping", document]):
        data = json.dumps(body).encode()
        try:
            found = CODEC.decode(data)
        except WireError:
            continue
        assert json.loads(CODEC.encode(found)) == body  # a valid message by chance


@given(messages, st.data())
def test_a_message_with_one_changed_value_is_refused_or_decodes_to_another_message(
    message: Everything, data: Any
) -> None:
    body = json.loads(CODEC.encode(message))
    at = data.draw(st.integers(0, len(body[1]) - 1))
    body[1][at] = data.draw(documents)
    try:
        found = CODEC.decode(json.dumps(body).encode())
    except WireError:
        return
    assert CODEC.decode(CODEC.encode(found)) == found


@pytest.mark.parametrize(
    "data",
    [
        b'["Ping",[1.0,""]]',
        b'["Ping",[true,""]]',
        b'["Ping",[9223372036854775808,""]]',
        b'["Ping",[1]]',
        b'["Ping",[1,"",2]]',
        b'["Ping",{"number":1,"load":""}]',
        b'["Ping",[1,"\\ud800"]]',
        b'[0,"Ping",[1,""]]',
        b'["Other",[]]',
        b'["Ping",[NaN,""]]',
        b'["Ping",[1,""]] ]',
        b"\xff\xfe",
        b"[" * 100_000,
        b"1" * 10_000,
        b"",
    ],
)
def test_almost_valid_messages_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        CODEC.decode(data)


def test_a_duplicate_key_is_refused() -> None:
    good = json.loads(CODEC.encode(Everything()))
    names = [field.name for field in fields(Everything)]
    for name, twice in (
        ("topics", [["a", "b"], ["a", "c"]]),
        ("offsets", [["orders", [[1, 5], [1, 6]]]]),
    ):
        body = json.loads(json.dumps(good))
        body[1][names.index(name)] = twice
        with pytest.raises(WireError, match="twice"):
            CODEC.decode(json.dumps(body).encode())


def test_invalid_messages_are_not_encoded() -> None:
    for wrong in (
        replace(Everything(), number=True),
        replace(Everything(), text="\ud800"),
        replace(Everything(), number=2**63),
        replace(Everything(), either=Everything()),  # type: ignore[arg-type]
        replace(Everything(), offsets={"a": 1}),  # type: ignore[dict-item]
        "text",
    ):
        with pytest.raises(WireError):
            CODEC.encode(wrong)
    with pytest.raises(WireError, match=f"limit is {FRAME_BYTES_MAX}"):
        CODEC.encode(Ping(load="x" * FRAME_BYTES_MAX))


@pytest.mark.parametrize("topic", ["orders", "orders" * 40])
def test_all_partitions_of_a_large_topic_fit_one_message(topic: str) -> None:
    tps = [TopicPartition(topic, p) for p in range(100_000)]
    for message in (Everything(assigned=tuple(tps)), Everything(assigned=tuple(reversed(tps)))):
        assert CODEC.decode(CODEC.encode(message)) == message
    long = Everything(ranges=tuple(OffsetRange(tp, 10**12, 10**12 + 10**5) for tp in tps[:20_000]))
    assert CODEC.decode(CODEC.encode(long)) == long


def test_an_error_is_one_short_line() -> None:
    with pytest.raises(WireError) as refused:
        CODEC.decode(json.dumps(["x\n" * 10_000, []]).encode())
    assert len(str(refused.value)) < 200 and "\n" not in str(refused.value)


def test_an_unsupported_field_type_is_refused_when_the_codec_is_created() -> None:
    @dataclass(frozen=True)
    class Wrong:
        anything: Any

    with pytest.raises(TypeError, match="cannot be sent"):
        Codec([Wrong])


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=10), st.data())
def test_frames_are_received_whole_however_the_stream_is_split(bodies: list[bytes], data: Any) -> None:
    stream = b"".join(frame(body) for body in bodies)
    parts = []
    while stream:
        at = data.draw(st.integers(1, len(stream)))
        parts.append(stream[:at])
        stream = stream[at:]
    one, other = socket.socketpair()
    with one, other:
        sender = threading.Thread(target=lambda: deque(map(one.sendall, parts)))
        sender.start()
        assert [receive_frame(other, 300, time.monotonic() + SOON_S) for _ in bodies] == bodies
        sender.join()


@pytest.mark.parametrize("length", [0, 301, 2**32 - 1])
def test_an_invalid_frame_length_is_refused(length: int) -> None:
    with pytest.raises(WireError, match="limit is 300"):
        body_length(length.to_bytes(4, "big"), 300)
