"""The offset's JSON gives back what was put in, for every offset that a run can write."""

import json

from hypothesis import given, settings
from kit.strategies import stream_offsets

from spark_group_source.delta.checkpoint import is_ours
from spark_group_source.group.offsets import StreamOffset, parse
from spark_group_source.model import TopicPartition


@settings(derandomize=True, max_examples=200, deadline=None)
@given(stream_offsets())
def test_an_offset_survives_its_json_and_the_text_is_canonical(offset: StreamOffset) -> None:
    text = offset.to_json()
    again = parse(text)
    assert again == offset or (again.ranges, again.seq) == (offset.ranges, offset.seq)
    assert again.to_json() == text
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text
    assert {topic: count for topic, count in again.known.items() if count} == {
        topic: count for topic, count in offset.known.items() if count
    }


def test_a_topic_that_was_known_but_never_held_is_still_known_after_a_restart() -> None:
    """Else its partitions would count as new ones, and start at their beginning whatever ``startingOffsets`` says."""
    held = TopicPartition("orders", 0)
    offset = StreamOffset(
        group="etl",
        stream="9f2c",
        seq=0,
        topic_ids={"orders": "x"},
        known={"orders": 1, "payments": 3},
        ranges={held: (5, 5)},
    )
    assert parse(offset.to_json()) == offset


@given(stream_offsets())
def test_the_sink_tells_every_offset_of_this_source_from_another_sources(offset: StreamOffset) -> None:
    assert is_ours(offset.to_json())
    assert is_ours(json.dumps(offset.to_json_dict()))


def test_an_offset_of_kafkas_own_connector_is_not_ours_whatever_its_topics_are_called() -> None:
    for topics in (["group"], ["cut", "group"], ["began", "cut", "group"], ["epoch", "group"], ["orders"]):
        assert not is_ours(json.dumps({topic: {"0": 5} for topic in topics}, separators=(",", ":")))
