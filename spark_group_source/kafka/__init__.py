"""The group's side of Kafka: requests about topics, offsets and groups, the fenced offset commit, members' consumers.

Runs in: the stream reader, agents, the user's driver (CLI). Deliberately absent: reading records (``reader``), and
decisions (``protocol``). Besides ``reader`` and ``local`` only this package imports confluent_kafka; here Kafka's
errors become this package's exceptions.
"""

from spark_group_source.kafka.admin import Admin, EpochEnds
from spark_group_source.kafka.committer import TransactionalCommitter
from spark_group_source.kafka.consumer import MemberConsumer, RefusedOnce, take_over_membership
from spark_group_source.kafka.environment import Empty, Environment, Queue, Thread, check_settings
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.group_offsets import GroupOffsets
from spark_group_source.kafka.record_times import RecordTime, RecordTimes
from spark_group_source.kafka.translation import (
    GROUP_STATES,
    CommittedOffset,
    GroupDescription,
    GroupMember,
    ListedGroup,
    MemberStale,
    Notes,
    OffsetNote,
    Topic,
)
from spark_group_source.model import Identity

__all__ = [
    "GROUP_STATES",
    "Admin",
    "CommittedOffset",
    "Empty",
    "Environment",
    "EpochEnds",
    "GroupAdmin",
    "GroupDescription",
    "GroupMember",
    "GroupOffsets",
    "Identity",
    "ListedGroup",
    "MemberConsumer",
    "MemberStale",
    "Notes",
    "OffsetNote",
    "Queue",
    "RecordTime",
    "RecordTimes",
    "RefusedOnce",
    "Thread",
    "Topic",
    "TransactionalCommitter",
    "check_settings",
    "take_over_membership",
]
