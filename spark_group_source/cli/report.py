"""What ``spark-group describe`` and ``watch`` show: a group as Kafka sees it, beside the ledger and the runs of this
host; as a value, and as tables.

Runs in: a terminal, the user's driver. Deliberately absent: changing anything (``reset`` does), and Spark: a ledger is
passed in by whoever has a session.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spark_group_source.cli.shared import cells, table_of
from spark_group_source.errors import GroupError
from spark_group_source.host import run_files
from spark_group_source.kafka import GroupAdmin, GroupDescription, GroupMember
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import parse_note

DEAD = "dead"
"""Kafka's word for a group that it has nothing of."""
NOBODY = "nobody"
NEAR = 0.75
"""An offset nears its end when so much of the retention is over."""
BAR = 20
"""Characters of the longest bar of a lag."""


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
    """What the brokers' retention of the offset is counted from now (:class:`Clock`); empty without an offset."""
    expires_after_ms: int | None = None
    """It is kept until then at least, in milliseconds since the epoch; None where nothing counts, or it is not known
    since when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport(JupyterMixin):
    """One moment of a group; notebooks show it as tables. ``runs``: the statistics of this host's queries in it, and of
    one whose checkpoint was named.

    ``offsets_retention_ms``: how long its coordinator keeps offsets that nobody needs; None where it may not be asked.
    ``offsets_expiring``: partitions whose offset may go in the last quarter of that.
    """

    group: str
    state: str
    protocol: str
    assignor: str
    coordinator: str = ""
    members: tuple[GroupMember, ...]
    partitions: tuple[PartitionRow, ...]
    runs: tuple[dict[str, Any], ...]
    offsets_retention_ms: int | None = None
    offsets_expiring: tuple[str, ...] = ()

    @property
    def lag(self) -> int:
        """Records behind, over all partitions that have a commit."""
        return sum(row.lag or 0 for row in self.partitions)

    def __rich__(self) -> RenderableType:
        return picture(self)

    def as_dict(self) -> dict[str, Any]:
        members = [{**asdict(m), "partitions": sorted(map(str, m.partitions))} for m in self.members]
        return {**asdict(self), "lag": self.lag, "members": members}


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
) -> GroupReport:
    """Ask the cluster about a group.

    Args:
        ledger: the table's next offsets, where a table is of interest.
        offsets: False leaves the partitions out, and the questions for them.

    Raises:
        GroupError: there is no such group, neither at Kafka nor in the ledger nor among the runs of this host.
    """
    found = look(admin, group, ledger, offsets=offsets)
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
    """What :func:`describe` returns, or None: there is no such group, or not any more.

    Args:
        elsewhere: what runs on other hosts said of themselves.
    """
    described = admin.describe_group(group)
    committed = admin.committed(group) if offsets or described.state == DEAD else {}
    here = run_files.read(group)
    mine = {(doc["stream"], doc["pid"]) for doc in here}
    running = (*here, *(doc for doc in elsewhere if (doc["stream"], doc["pid"]) not in mine))
    if described.state == DEAD and not (described.members or committed or ledger or running):
        return None
    owner = {tp: name_of(m) for m in described.members for tp in m.partitions}
    tps = sorted(committed.keys() | owner.keys() | (ledger or {}).keys()) if offsets else []
    ends = admin.latest(tps)
    retention_ms = _retention_ms(admin, group) if committed else None
    times = {tp: parse_note(at.metadata).at_ms for tp, at in committed.items()}
    expiry = expiries(described, times, retention_ms=retention_ms)
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
        offsets_retention_ms=retention_ms,
        offsets_expiring=tuple(map(str, near(expiry, now_ms=int(time.time() * 1000), retention_ms=retention_ms))),
    )


class Clock(Enum):
    """What the retention of an offset is counted from: ``offsets.retention.minutes``, 7 days unless set (KIP-211,
    KIP-496; ``ClassicGroup`` and ``ConsumerGroup.offsetExpirationCondition`` of Kafka 4.2). An offset that is committed
    again begins anew, also when it stands where it stood. Who subscribes to what, and when somebody left, Kafka's APIs
    do not say."""

    NONE = "kept"  # a member has a partition of the topic, so it is subscribed
    COMMIT = "its last commit"
    EMPTY = "the last member's leaving"
    NOT_STABLE = "nothing, while the group rebalances"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """What is known of one offset's end. Times are milliseconds since the epoch.

    ``earliest_ms``: it does not go before; None where the time of its last commit is not known, or nothing counts.
    """

    clock: Clock
    earliest_ms: int | None = None


def clock_of(group: GroupDescription) -> Clock:
    """What counts for the offsets of topics of which no member has a partition."""
    if group.simple or group.protocol == "consumer":
        return Clock.COMMIT
    if not group.members:
        return Clock.EMPTY
    return Clock.COMMIT if group.state == "stable" else Clock.NOT_STABLE


def expiries(
    group: GroupDescription, committed_ms: Mapping[TopicPartition, int | None], *, retention_ms: int | None
) -> dict[TopicPartition, Expiry]:
    """What is known of the end of each offset of a group.

    Args:
        committed_ms: when each was committed, as its note says (``names.parse_note``); None: nobody wrote that down,
            as Kafka does not tell it.
        retention_ms: of the group's coordinator; None where it may not be asked for.
    """
    subscribed = {tp.topic for member in group.members for tp in member.partitions}
    newest = max((at for at in committed_ms.values() if at is not None), default=None)
    found = {}
    for tp, at in committed_ms.items():
        clock = Clock.NONE if tp.topic in subscribed else clock_of(group)
        # A member committed the newest one, so the last of them left after it.
        since = at if clock is Clock.COMMIT else newest if clock is Clock.EMPTY else None
        earliest_ms = None if since is None or retention_ms is None else since + retention_ms
        found[tp] = Expiry(clock=clock, earliest_ms=earliest_ms)
    return found


def near(
    expiries: Mapping[TopicPartition, Expiry], *, now_ms: int, retention_ms: int | None
) -> Collection[TopicPartition]:
    """The offsets that may go within the last quarter of their retention; one whose time is not known is not among
    them, which says nothing."""
    if retention_ms is None:
        return []
    soon_ms = now_ms + (1 - NEAR) * retention_ms
    known = {tp: expiry.earliest_ms for tp, expiry in expiries.items() if expiry.earliest_ms is not None}
    return sorted(tp for tp, earliest_ms in known.items() if earliest_ms <= soon_ms)


def _retention_ms(admin: GroupAdmin, group: str) -> int | None:
    try:
        return admin.retention_ms(group)
    except GroupError:  # not allowed, or not answered: the rest can be shown all the same
        return None


def name_of(member: GroupMember) -> str:
    """What a member is called: the same after a restart where it is static."""
    return member.instance_id or member.member_id


def spans(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def heading(report: GroupReport, per_s: float | None = None) -> Text:
    """A group in one line; ``per_s``: records committed a second, where that is known."""
    return Text.assemble(
        "group ",
        (report.group, "bold"),
        f": {report.state or 'unknown'}, {report.protocol or 'no'} protocol",
        f", {report.assignor}" if report.assignor else "",
        f", {len(report.members)} members, lag ",
        (f"{report.lag:,}", "bold green" if report.lag == 0 else "bold yellow"),
        "" if per_s is None else f", {per_s:,.0f} records/s",
    )


def members_table(report: GroupReport, *, assignment: bool = True) -> Table:
    """The members with the number and lag of their partitions; with ``assignment`` also which they are."""
    table = table_of("member", "client", "host", "partitions", "lag", *(["assignment"] if assignment else []))
    lags: dict[str, int] = {}
    for row in report.partitions:
        lags[row.member] = lags.get(row.member, 0) + (row.lag or 0)
    for m in sorted(report.members, key=name_of):
        topics: dict[str, list[int]] = {}
        for tp in m.partitions:
            topics.setdefault(tp.topic, []).append(tp.partition)
        assigned = ["; ".join(f"{topic} {spans(numbers)}" for topic, numbers in sorted(topics.items()))]
        lag = lags.get(name_of(m), 0) if report.partitions else None
        shown = (name_of(m), m.client_id, m.host, len(m.partitions), lag, *(assigned if assignment else []))
        table.add_row(*cells(shown))
    if unowned := lags.get("", 0):
        table.add_row(*cells((NOBODY, "", "", "", unowned)), style="red")
    return table


def partitions_table(report: GroupReport, *, rows_max: int | None = None, bars: bool = False) -> RenderableType:
    """The partitions by their names; of more than ``rows_max`` those with most lag."""
    chosen = sorted(report.partitions, key=lambda row: -(row.lag or 0))[:rows_max]
    longest = max((row.lag or 0 for row in chosen), default=0)
    with_ledger = ["ledger"] if any(row.ledger is not None for row in report.partitions) else []
    numbers = ["committed", "end", "lag", *with_ledger]
    table = table_of("topic", "partition", *numbers, *([""] if bars else []), "member", "stream")
    for column in table.columns[2 : 2 + len(numbers)]:
        column.justify = "right"
    for row in sorted(chosen, key=lambda row: (row.topic, row.partition)):
        values = [row.topic, str(row.partition), *(getattr(row, name) for name in numbers)]
        bar = [Text("█" * -(-BAR * (row.lag or 0) // longest) if longest else "")] if bars else []
        table.add_row(*cells(values), *bar, *cells((row.member, row.stream)))
    left = len(report.partitions) - len(chosen)
    return Group(table, Text(f"and {left} partitions with less lag")) if left else table


def picture(
    report: GroupReport,
    *,
    events: Sequence[str] = (),
    per_s: float | None = None,
    silent: str = "",
    rows_max: int | None = None,
    bars: bool = False,
) -> RenderableType:
    """One look at a group.

    Args:
        events: what happened, the newest last.
        per_s: records committed a second; None: not known.
        silent: why this is an old look; empty: it is not.
        rows_max: partitions that have room; None: all.
        bars: draw the lag of each partition.
    """
    parts: list[RenderableType] = [heading(report, per_s)]
    if silent:
        parts.append(Text(f"not answered: {silent}", style="bold red"))
    parts += [members_table(report), partitions_table(report, rows_max=rows_max, bars=bars)]
    if events:
        parts.append(Panel(Text("\n".join(events)), title="what happened", title_align="left"))
    return Group(*parts)


def expiry_text(report: GroupReport) -> list[str]:
    """What is to be said of the end of the group's offsets, a line each; nothing where all of them are kept."""
    counted: dict[str, list[PartitionRow]] = {}
    for row in report.partitions:
        if row.expires and row.expires != Clock.NONE.value:
            counted.setdefault(row.expires, []).append(row)
    if not counted:
        return []
    retention_ms = report.offsets_retention_ms
    kept = "a time that is not told" if retention_ms is None else f"{retention_ms / 3_600_000:g} h"
    lines = []
    for clock, rows in counted.items():
        known = [row.expires_after_ms for row in rows if row.expires_after_ms is not None]
        first = f", the first not before {_moment(min(known))}" if known else ", since when is not known"
        lines.append(f"{len(rows)} offsets are kept for {kept}, counted from {clock}{first}")
    if report.offsets_expiring:
        lines.append(f"about to expire: {', '.join(report.offsets_expiring)}")
    return lines


def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(timespec="seconds")
