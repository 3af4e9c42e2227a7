"""The offset's JSON gives back what was put in, for every offset that a run can write."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_group_source.delta.checkpoint import is_kafka_group
from spark_group_source.errors import CheckpointMismatch
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset, parse

OFFSET_MAX = 2**63 - 1
"""Kafka's offsets are Java longs."""

topics = st.text("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789._-", min_size=1, max_size=12)
partitions = st.builds(TopicPartition, topics, st.integers(0, 2**31 - 1))
offsets = st.integers(0, OFFSET_MAX)


def ranges(offset: st.SearchStrategy[int] = offsets) -> st.SearchStrategy[tuple[int, int]]:
    """[from, until), often empty."""
    return st.tuples(offset, offset).map(lambda pair: (min(pair), max(pair))) | offset.map(lambda at: (at, at))


@st.composite
def stream_offsets(draw: st.DrawFn) -> StreamOffset:
    """Any offset that a run can write, and the constant before the first."""
    group = draw(st.text(min_size=1, max_size=20))
    if draw(st.integers(0, 9)) == 0:
        return StreamOffset.initial(group)
    read = draw(st.dictionaries(partitions, ranges(), max_size=8))
    named = {tp.topic for tp in read} | draw(st.sets(topics, max_size=2))
    uncommitted = draw(st.dictionaries(partitions, offsets, max_size=3))
    starts = uncommitted | {tp: start for tp, (start, _) in read.items()}
    behind = {tp: start for tp, start in starts.items() if start and draw(st.booleans())}
    return StreamOffset(
        group=group,
        stream=draw(st.text("0123456789abcdef", min_size=1, max_size=12)),
        seq=draw(st.integers(0, OFFSET_MAX)),
        topic_ids={topic: draw(st.text(max_size=22)) for topic in named},
        known={topic: draw(st.integers(0, 10_000)) for topic in named},
        ranges=read,
        followed=frozenset(draw(st.sets(st.sampled_from(sorted(read)), max_size=3))) if read else frozenset(),
        behind=behind,
        started=frozenset(draw(st.sets(partitions, max_size=2))),
        leader_epochs=draw(st.dictionaries(st.sampled_from(sorted(read)), offsets, max_size=3)) if read else {},
        truncated_after=draw(st.dictionaries(partitions, offsets, max_size=2)),
        lost_from=draw(st.dictionaries(partitions, offsets, max_size=2)),
        durable_to=draw(st.dictionaries(partitions, offsets, max_size=2)),
        read_to=draw(st.dictionaries(partitions, offsets, max_size=2)),
        reset_number=draw(st.integers(0, 5)),
        uncommitted=uncommitted,
    )


@settings(derandomize=True, max_examples=200, deadline=None)
@given(stream_offsets())
def test_the_part_of_a_topic_is_what_the_offset_has_of_it(offset: StreamOffset) -> None:
    """As the sink of one topic compares it with its table's ledger."""
    for topic in offset.topic_ids:
        part = offset.of_topics([topic])
        assert (part.group, part.stream, part.seq) == (offset.group, offset.stream, offset.seq)
        assert part.topic_ids == {topic: offset.topic_ids[topic]}
        for name in ("ranges", "followed", "started", "leader_epochs", "truncated_after"):
            of_all = getattr(offset, name)
            assert set(getattr(part, name)) == {tp for tp in of_all if tp.topic == topic}, name


@settings(derandomize=True, max_examples=200, deadline=None)
@given(stream_offsets())
def test_offset_survives_its_json_and_the_text_is_canonical(offset: StreamOffset) -> None:
    text = offset.to_json()
    again = parse(text)
    assert again == offset or (again.ranges, again.seq) == (offset.ranges, offset.seq)
    assert again.to_json() == text
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text
    assert {topic: count for topic, count in again.known.items() if count} == {
        topic: count for topic, count in offset.known.items() if count
    }


@given(stream_offsets())
def test_sink_recognizes_every_offset_of_this_source(offset: StreamOffset) -> None:
    assert is_kafka_group(offset.to_json())
    assert is_kafka_group(json.dumps(offset.to_json_dict()))


def test_offset_of_sparks_connector_is_not_recognized_whatever_its_topics() -> None:
    for topics in (["group"], ["followed", "group"], ["followed", "group", "reset"], ["orders"]):
        for separators in ((",", ":"), (", ", ": ")):
            assert not is_kafka_group(json.dumps({topic: {"0": 5} for topic in topics}, separators=separators))


@pytest.mark.parametrize("text", ['{"group": "g", "at": 5}', '{"group":7}', '{"group": "g", "seq": 3}'])
def test_offset_of_another_python_source_that_begins_with_a_group_is_not_recognized(text: str) -> None:
    assert not is_kafka_group(text)


BYTES_EACH_MAX = 23
"""``docs/formats.md`` states it, for offsets of 10 digits, batches of 1,000 offsets and two leader epochs."""


def test_size_of_an_offset_is_bounded_for_ten_thousand_partitions() -> None:
    tps = [TopicPartition("orders", p) for p in range(10_000)]
    offset = StreamOffset(
        group="etl",
        stream="9f2c0d1e2a3b",
        seq=1_000_000,
        topic_ids={"orders": "x" * 22},
        known={"orders": len(tps)},
        ranges={tp: (9_000_000_000 + tp.partition, 9_000_000_999 + tp.partition) for tp in tps},
        leader_epochs={tp: 7 + tp.partition % 2 for tp in tps},
    )
    as_spark_writes_it = json.dumps(offset.to_json_dict())
    assert len(as_spark_writes_it) <= BYTES_EACH_MAX * len(tps)
    assert parse(as_spark_writes_it) == offset
    connector = json.dumps({"orders": {str(tp.partition): end for tp, (_, end) in offset.ranges.items()}})
    assert len(as_spark_writes_it) <= 1.2 * len(connector)


@pytest.mark.parametrize(
    "damage",
    [
        {"partitions": [[0, 2_000_000_000]]},
        {"partitions": [[1, 0], [0, 1]]},
        {"partitions": [[0, 0]]},
        {"from": [1, "2"]},
        {"from": [1, -2]},
        {"read": [1]},
        {"leaders": [1]},
        {"leaders": "1"},
        {"from": None},
    ],
    ids=str,
)
def test_damaged_ranges_are_refused(damage: dict[str, object]) -> None:
    entry = {"from": [1, 2], "id": "", "known": 2, "leaders": 1, "partitions": [[0, 1]], "read": [0, 0]}
    doc = {"group": "etl", "seq": 0, "stream": "ab", "topics": {"orders": entry}, "v": 1}
    assert len(parse(doc).ranges) == 2
    with pytest.raises(CheckpointMismatch, match="damaged"):
        parse({**doc, "topics": {"orders": {**entry, **damage}}})


@pytest.mark.parametrize("damage", [{"seq": 0.0}, {"seq": -1}, {"stream": 5}, {"reset": 1.0}], ids=str)
def test_damaged_numbers_are_refused(damage: dict[str, object]) -> None:
    with pytest.raises(CheckpointMismatch, match="damaged"):
        parse({"group": "etl", "seq": 0, "stream": "ab", "topics": {}, "v": 1, **damage})
