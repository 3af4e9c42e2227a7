"""When a member's part of a commit is stale."""

from dataclasses import dataclass
from typing import Any

import pytest

from spark_group_source.kafka import Identity
from spark_group_source.members import MemberCommit
from spark_group_source.model import TopicPartition

A, B = TopicPartition("orders", 0), TopicPartition("orders", 1)
WHO, LATER = Identity(4, "m", b"4"), Identity(5, "m", b"5")


@dataclass
class Holder:
    """A member with the attributes that are checked."""

    identity: Identity | None
    partitions: tuple[TopicPartition, ...]


@pytest.mark.parametrize(
    ("ordered_as", "identity", "held", "why"),
    [
        (WHO, WHO, (A, B), None),
        (WHO, WHO, (A,), "the member has released partitions since"),
        (WHO, LATER, (A, B), "the member has rejoined since"),
        (None, WHO, (A, B), "the member is not in the group at the moment"),
    ],
)
def test_G3_offsets_are_committed_only_while_their_member_is_unchanged_and_owns_them(
    ordered_as: Identity | None, identity: Identity | None, held: tuple[TopicPartition, ...], why: str | None
) -> None:
    member: Any = Holder(identity, held)
    assert MemberCommit(member, ordered_as, {A: 10, B: 20}).stale_reason == why
