"""What ``spark-group describe`` shows: a group as Kafka sees it, beside the ledger and the runs of this host.

Runs in: a terminal, the user's driver. Deliberately absent: changing anything (``reset`` does), and Spark: a ledger is
passed in by whoever has a session.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from spark_group_source.cli import html
from spark_group_source.errors import GroupError
from spark_group_source.group.expiry import Clock, Expiry, GroupState, expiries, near
from spark_group_source.group.names import committed_ms, parse_note
from spark_group_source.host import runs
from spark_group_source.kafka import CommittedOffset, GroupAdmin, GroupDescription, GroupMember
from spark_group_source.model import TopicPartition

DEAD = "dead"
"""Kafka's word for a group that it has nothing of."""


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
    expires: str = ""
    """What the brokers' retention of the offset is counted from now (``expiry.Clock``); empty without an offset."""
    expires_after_ms: int | None = None
    """It is kept until then at least, in milliseconds since the epoch; None where nothing counts, or it is not known
    since when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One moment of a group. ``runs``: the statistics of this host's queries in it, and of one whose checkpoint was
    named.

    ``retention_ms``: how long its coordinator keeps offsets that nobody needs; None where it may not be asked.
    ``expiring``: partitions whose offset may go in the last quarter of that.
    """

    group: str
    state: str
    protocol: str
    assignor: str
    coordinator: str = ""
    members: tuple[GroupMember, ...]
    partitions: tuple[PartitionRow, ...]
    runs: tuple[dict[str, Any], ...]
    retention_ms: int | None = None
    expiring: tuple[str, ...] = ()

    @property
    def lag(self) -> int:
        """Records behind, over all partitions that have a commit."""
        return sum(row.lag or 0 for row in self.partitions)

    def _repr_html_(self) -> str:
        lags: dict[str, int] = {}
        for row in self.partitions:
            lags[row.member] = lags.get(row.member, 0) + (row.lag or 0)
        names = [(m.instance_id or m.member_id, m) for m in self.members]
        members = ((name, m.client_id, m.host, len(m.partitions), lags.get(name, 0)) for name, m in names)
        partitions = (
            (row.topic, str(row.partition), row.committed, row.end, row.lag, row.ledger, row.member, row.stream)
            for row in self.partitions
        )
        columns = ("topic", "partition", "committed", "end", "lag", "ledger", "member", "stream")
        title = f"{self.group}: {self.state or 'unknown'}, {len(self.members)} members, lag {self.lag:,}"
        return html.table(title, ("member", "client", "host", "partitions", "lag"), members) + html.table(
            "partitions", columns, partitions
        )

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
            "coordinator": self.coordinator,
            "lag": self.lag,
            "members": members,
            "partitions": [asdict(row) for row in self.partitions],
            "runs": list(self.runs),
            "offsets_retention_ms": self.retention_ms,
            "offsets_expiring": list(self.expiring),
        }


def not_there(group: str, then: str = "spark-group list shows those that are there") -> GroupError:
    """The error for a group that Kafka has nothing of; ``then``: what to do."""
    return GroupError(
        f"there is no group {group!r}: it has no members and no committed offsets. It was never used, or it was "
        f"deleted, or its offsets expired; {then}",
        group=group,
    )


def describe(
    admin: GroupAdmin,
    group: str,
    ledger: Mapping[TopicPartition, int] | None = None,
    *,
    offsets: bool = True,
    elsewhere: Sequence[dict[str, Any]] = (),
) -> GroupReport:
    """Ask the cluster about a group.

    Args:
        ledger: the table's next offsets, where a table is of interest.
        offsets: False leaves the partitions out, and the questions for them.
        elsewhere: what runs on other hosts said of themselves.

    Raises:
        GroupError: there is no such group, neither at Kafka nor in the ledger nor among the runs of this host.
    """
    found = look(admin, group, ledger, offsets=offsets, elsewhere=elsewhere)
    if found is None:
        raise not_there(group)
    return found


def look(
    admin: GroupAdmin,
    group: str,
    ledger: Mapping[TopicPartition, int] | None = None,
    *,
    offsets: bool = True,
    elsewhere: Sequence[dict[str, Any]] = (),
) -> GroupReport | None:
    """What :func:`describe` returns, or None: there is no such group, or not any more."""
    described = admin.group(group)
    committed = admin.committed(group) if offsets or described.state == DEAD else {}
    here = runs.read(group)
    mine = {(doc["stream"], doc["pid"]) for doc in here}
    running = (*here, *(doc for doc in elsewhere if (doc["stream"], doc["pid"]) not in mine))
    if described.state == DEAD and not (described.members or committed or ledger or running):
        return None
    owner = {tp: m.instance_id or m.member_id for m in described.members for tp in m.partitions}
    tps = sorted(committed.keys() | owner.keys() | (ledger or {}).keys()) if offsets else []
    ends = admin.latest(tps)
    retention_ms = _retention_ms(admin, group) if committed else None
    expiry = _expiries(described, committed, retention_ms)
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
                expires=expiry[tp].clock.value if tp in expiry else "",
                expires_after_ms=expiry[tp].earliest_ms if tp in expiry else None,
            )
        )
    return GroupReport(
        group=group,
        state=described.state,
        protocol=described.protocol,
        assignor=described.assignor,
        coordinator=described.coordinator,
        members=described.members,
        partitions=tuple(rows),
        runs=running,
        retention_ms=retention_ms,
        expiring=tuple(map(str, near(expiry, now_ms=int(time.time() * 1000), retention_ms=retention_ms))),
    )


def _expiries(
    group: GroupDescription, committed: Mapping[TopicPartition, CommittedOffset], retention_ms: int | None
) -> dict[TopicPartition, Expiry]:
    seen = GroupState(
        state=group.state,
        protocol=group.protocol,
        members=len(group.members),
        simple=group.simple,
        topics=frozenset(tp.topic for member in group.members for tp in member.partitions),
    )
    times = {tp: committed_ms(at.metadata) for tp, at in committed.items()}
    return expiries(seen, times, retention_ms=retention_ms)


def _retention_ms(admin: GroupAdmin, group: str) -> int | None:
    try:
        return admin.retention_ms(group)
    except GroupError:  # not allowed, or not answered: the rest can be shown all the same
        return None


def expiry_text(report: GroupReport) -> list[str]:
    """What is to be said of the end of the group's offsets, a line each; nothing where all of them are kept."""
    counted: dict[str, list[PartitionRow]] = {}
    for row in report.partitions:
        if row.expires and row.expires != Clock.NONE.value:
            counted.setdefault(row.expires, []).append(row)
    if not counted:
        return []
    kept = "a time that is not told" if report.retention_ms is None else f"{report.retention_ms / 3_600_000:g} h"
    lines = []
    for clock, rows in counted.items():
        known = [row.expires_after_ms for row in rows if row.expires_after_ms is not None]
        first = f", the first not before {_moment(min(known))}" if known else ", since when is not known"
        lines.append(f"{len(rows)} offsets are kept for {kept}, counted from {clock}{first}")
    if report.expiring:
        lines.append(f"about to expire: {', '.join(report.expiring)}")
    return lines


def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(timespec="seconds")
