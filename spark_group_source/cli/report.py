"""What ``spark-group describe`` shows: a group as Kafka sees it, beside the ledger and the runs of this host.

Runs in: a terminal, the user's driver. Deliberately absent: changing anything (``reset`` does), and Spark: a ledger is
passed in by whoever has a session.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from spark_group_source.group.names import parse_note
from spark_group_source.host import runs
from spark_group_source.kafka import GroupAdmin, GroupMember
from spark_group_source.model import TopicPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRow:
    """One partition of the group; None where there is no such value."""

    topic: str
    partition: int
    committed: int | None
    end: int | None
    lag: int | None
    """Records between committed and end; of a partition without a commit: None."""
    ledger: int | None
    member: str
    """The instance id of who has it now, or the member id; empty: nobody."""
    stream: str
    """The stream that committed last; empty: another kind of client, or an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One moment of a group. ``runs``: the statistics of this host's queries in it."""

    group: str
    state: str
    protocol: str
    assignor: str
    members: tuple[GroupMember, ...]
    partitions: tuple[PartitionRow, ...]
    runs: tuple[dict[str, Any], ...]

    @property
    def lag(self) -> int:
        """Records behind, over all partitions that have a commit."""
        return sum(row.lag or 0 for row in self.partitions)

    def as_dict(self) -> dict[str, Any]:
        members = [
            {**asdict(m), "partitions": sorted(f"{tp.topic}-{tp.partition}" for tp in m.partitions)}
            for m in self.members
        ]
        return {
            "group": self.group,
            "state": self.state,
            "protocol": self.protocol,
            "assignor": self.assignor,
            "lag": self.lag,
            "members": members,
            "partitions": [asdict(row) for row in self.partitions],
            "runs": list(self.runs),
        }


def describe(admin: GroupAdmin, group: str, ledger: Mapping[TopicPartition, int] | None = None) -> GroupReport:
    """Ask the cluster about a group.

    Args:
        ledger: the table's next offsets, where a table is of interest.
    """
    described = admin.group(group)
    committed = admin.committed(group)
    owner = {tp: m.instance_id or m.member_id for m in described.members for tp in m.partitions}
    tps = sorted(committed.keys() | owner.keys() | (ledger or {}).keys())
    ends = admin.latest(tps)
    rows = []
    for tp in tps:
        at = committed.get(tp)
        end = ends.get(tp)
        rows.append(
            PartitionRow(
                topic=tp.topic,
                partition=tp.partition,
                committed=None if at is None else at.offset,
                end=end,
                lag=None if at is None or end is None else max(0, end - at.offset),
                ledger=(ledger or {}).get(tp),
                member=owner.get(tp, ""),
                stream="" if at is None else parse_note(at.metadata).stream or "",
            )
        )
    return GroupReport(
        group=group,
        state=described.state,
        protocol=described.protocol,
        assignor=described.assignor,
        members=described.members,
        partitions=tuple(rows),
        runs=tuple(runs.read(group)),
    )
