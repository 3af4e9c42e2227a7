"""The consumer behind a member, with a library that is moved by hand: who it is, and what that means."""

from collections import deque

import pytest
from confluent_kafka import KafkaError
from hand_made import A0, A1, HandConsumer, HandRuntime, metadata

from spark_group_source.errors import GroupError
from spark_group_source.kafka import MemberConsumer

COOPERATIVE = {"bootstrap.servers": "b", "group.id": "g", "partition.assignment.strategy": "cooperative-sticky"}


@pytest.fixture
def runtime() -> HandRuntime:
    return HandRuntime()


def joined(runtime: HandRuntime) -> tuple[MemberConsumer, HandConsumer]:
    consumer = MemberConsumer(
        COOPERATIVE,
        known_as=deque(),
        runtime=runtime,
        on_assigned=lambda partitions, generation: None,
        on_revoked=lambda partitions: None,
        on_lost=lambda partitions: None,
    )
    consumer.subscribe(["a"])
    return consumer, runtime.consumers[-1]


def test_B59_a_member_that_was_thrown_out_and_is_told_of_nothing_new_is_known_again_as_another_one(
    runtime: HandRuntime,
) -> None:
    """A cooperative holder that was thrown out gets an empty assignment while it is nobody; it keeps what it had, and
    comes back under another id with what others read meanwhile."""
    consumer, library = joined(runtime)
    library.assign_callback(A0, A1, member="before")
    library.assign_callback(generation=-1, member="")
    library.metadata = metadata(7, "after")
    consumer.identify()
    assert consumer.identity is None
    runtime.script.append(lambda: None)
    with pytest.raises(GroupError, match="back as another member"):
        consumer.poll(0)


def test_a_place_that_is_still_taken_is_told_apart_by_the_librarys_words(runtime: HandRuntime) -> None:
    consumer, _ = joined(runtime)
    text = "Fatal error: Broker: The instance ID is still used by another member in the consumer group"
    failure = consumer._fatal(KafkaError(KafkaError._FATAL, text))
    assert failure.fields == {"unreleased": True}
