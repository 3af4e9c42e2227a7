"""A group's state for ``spark-group describe`` and ``watch``: Kafka's view, the ledger and the runs of this host, as a
value and as tables.

Runs in: a terminal, the user's driver. Deliberately absent: changes (``reset``), and Spark: callers with a session pass
a ledger.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.jupyter import JupyterMixin
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spark_group_source import command_line
from spark_group_source.cli.common import RETRIABLE, cells, table_of
from spark_group_source.errors import GroupError
from spark_group_source.host import run_files
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.translation import GroupDescription, GroupMember
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import parse_note

if TYPE_CHECKING:
    from spark_group_source.delta.table_history import TableHistory

DEAD = "dead"
"""State of a group that has neither members nor offsets."""
UNASSIGNED = "unassigned"
EXPIRING_SHARE = 0.75
"""An offset expires soon when this share of its retention is over."""
TABLES_SHOWN_MAX = 20
"""Tables of a run that are listed; more are counted."""
NARROW = 100
"""Terminals with fewer columns get narrower tables."""
TOPIC_MIN = 6
"""Columns that a table leaves for a topic at least; longer names are wrapped."""
SHORT_CHARS = 11
"""Length of a shortened id."""
BAR = 20
"""Length in characters of the longest lag bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRow:
    """One partition of the group; None for missing values."""

    topic: str
    partition: int
    committed: int | None
    """The group's committed offset: the next one to read."""
    end: int | None
    """The last stable offset, as for consumers with ``read_committed``."""
    lag: int | None
    """Offsets between ``committed`` and ``end``; None without a committed offset."""
    ledger: int | None
    """The next offset in the table's ledger; None also if no table was named."""
    member: str
    """Instance id or member id of the owner; empty: unassigned."""
    stream: str
    """Id of the stream that committed last; empty: another client or an operator."""
    expires: str = ""
    """From when the offset's retention counts (:class:`RetentionStart`); empty without an offset."""
    expires_after_ms: int | None = None
    """Earliest expiry in milliseconds since the epoch; None if it does not expire now, or the time is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport(JupyterMixin):
    """A snapshot of a group; notebooks show it as tables.

    ``state``, ``protocol``, ``assignor``, ``coordinator``: as in
    :class:`~spark_group_source.kafka.translation.GroupDescription`.
    ``runs``: statistics of this host's queries in the group, and of the query with the given checkpoint.
    ``offsets_retention_ms``: the retention of the group's coordinator; None if the user may not read it.
    ``offsets_expiring``: partitions whose offsets may expire within the last quarter of the retention.
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
        """Sum of the lags of all partitions with a committed offset, without those whose end is unknown."""
        return sum(row.lag or 0 for row in self.partitions)

    @property
    def unknown_ends(self) -> int:
        """Partitions with a committed offset whose end no broker returned, as those without a leader."""
        return sum(row.committed is not None and row.end is None for row in self.partitions)

    @property
    def without_offset(self) -> int:
        """Partitions without a committed offset, such as those of a member that has not committed yet."""
        return sum(row.committed is None for row in self.partitions)

    def __rich__(self) -> RenderableType:
        return group_view(self)

    def as_dict(self) -> dict[str, Any]:
        """The report as ``describe --json`` prints it; the partitions of members are texts, such as ``orders-0``.
        ``lag`` leaves out the partitions that ``unknown_ends`` and ``without_offset`` count."""
        members = [{**asdict(m), "partitions": sorted(map(str, m.partitions))} for m in self.members]
        counts = {"lag": self.lag, "unknown_ends": self.unknown_ends, "without_offset": self.without_offset}
        return {**asdict(self), **counts, "members": members}


def missing_group(admin: GroupAdmin, group: str, then: str = "") -> GroupError:
    """The error for a group that does not exist; ``then``: the remedy, by default the command that lists groups."""
    list_groups = command_line.spark_group("list", admin.connection)
    then = then or f"to see the existing groups: {command_line.in_sentence(list_groups)}"
    return GroupError(
        f"group {group!r} does not exist: it has no members and no committed offsets. It was never used, it was "
        f"deleted, its offsets expired, or the name is that of a share group or a streams group; {then}"
    )


def group_with_members(group: str, has_members: str, stop: str) -> GroupError:
    """The error of a command that needs a group without members: they leave, so a retry can help.

    Args:
        has_members: what they are in the way of, as "has 2 members, ...".
        stop: how they are stopped, as the beginning of a sentence.
    """
    exc = GroupError(
        f"group {group!r} {has_members}. {stop}, and run this command again: the memberships of a stopped continuous "
        "query end within its session timeout (45 s by default)"
    )
    exc.failure_code = RETRIABLE  # type: ignore[attr-defined]
    return exc


def counted(count: int, noun: str) -> str:
    """``1 member`` or ``2,000 members``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def no_group(group: str) -> GroupReport:
    """The snapshot of a group that does not exist."""
    return GroupReport(group=group, state=DEAD, protocol="", assignor="", members=(), partitions=(), runs=())


def ledgers_in(
    history: "TableHistory", groups: Collection[str], warn: Callable[[str], None]
) -> dict[str, dict[TopicPartition, int]]:
    """The next offsets in the ledgers of groups that have one in a table; ``warn`` is called for each expired one."""
    from spark_group_source.delta.ledger_store import read_ledgers

    found = read_ledgers(history, groups)
    for group in [group for group, ledger in found.items() if ledger is None]:
        warn(f"the ledger of group {group} is older than the log of table {history.table}")
    return {group: ledger.offsets for group, ledger in found.items() if ledger is not None}


def read_group(
    admin: GroupAdmin,
    group: str,
    ledger: Mapping[TopicPartition, int] | None = None,
    *,
    offsets: bool = True,
    expiry: bool = True,
    elsewhere: Sequence[dict[str, Any]] = (),
) -> GroupReport | None:
    """Read a group from the cluster; None if it exists neither in Kafka nor in the ledger nor among the runs.

    Args:
        ledger: the next offsets of a table, or None.
        offsets: False leaves out the partitions and their requests.
        expiry: False leaves out when offsets expire, which needs a request that many users may not send.
        elsewhere: statistics of runs on other hosts.
    """
    described = admin.describe_group(group)
    committed = admin.committed(group, stable=False) if offsets or described.state == DEAD else {}
    here = run_files.read(group)
    mine = {(doc["stream"], doc["pid"]) for doc in here}
    running = (*here, *(doc for doc in elsewhere if (doc["stream"], doc["pid"]) not in mine))
    if described.state == DEAD and not (described.members or committed or ledger or running):
        return None
    owner = {tp: m.name for m in described.members for tp in m.partitions}
    ledger = ledger or {}
    tps = sorted(committed.keys() | owner.keys() | ledger.keys()) if offsets else []
    ends = admin.latest(tps, require_all=False)
    retention_ms = _retention_ms(admin, described.coordinator_id) if committed and expiry else None
    notes = {tp: parse_note(at.metadata) for tp, at in committed.items()}
    times = {tp: note.at_ms for tp, note in notes.items()}
    expiring = expiries(described, times, retention_ms=retention_ms) if expiry else {}
    rows = []
    for tp in tps:
        at = committed.get(tp)
        end = ends.get(tp)
        expiry_of = expiring.get(tp)
        rows.append(
            PartitionRow(
                topic=tp.topic,
                partition=tp.partition,
                committed=None if at is None else at.offset,
                end=end,
                lag=None if at is None or end is None else max(0, end - at.offset),
                ledger=ledger.get(tp),
                member=owner.get(tp, ""),
                stream="" if at is None else notes[tp].stream or "",
                expires="" if expiry_of is None else expiry_of.counts_from.value,
                expires_after_ms=None if expiry_of is None else expiry_of.earliest_ms,
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
        offsets_expiring=tuple(
            map(str, expiring_soon(expiring, now_ms=int(time.time() * 1000), retention_ms=retention_ms))
        ),
    )


class RetentionStart(Enum):
    """From when an offset's retention counts: ``offsets.retention.minutes``, 7 days by default (KIP-211, KIP-496;
    ``ClassicGroup`` and ``ConsumerGroup.offsetExpirationCondition`` of Kafka 4.2). Each commit restarts it, also one of
    the same offset. Kafka's APIs report neither subscriptions nor when a member left."""

    NONE = "kept"  # a member owns a partition of the topic, so the topic is subscribed
    COMMIT = "its last commit"
    EMPTY = "the time the last member left"
    NOT_STABLE = "nothing, while the group rebalances"


def retention_start(group: GroupDescription) -> RetentionStart:
    """From when the retention counts for topics of which no member owns a partition."""
    if group.simple or group.protocol == "consumer":
        return RetentionStart.COMMIT
    if not group.members:
        return RetentionStart.EMPTY
    return RetentionStart.COMMIT if group.state == "stable" else RetentionStart.NOT_STABLE


class Expiry(NamedTuple):
    """When an offset expires."""

    counts_from: RetentionStart
    """From when its retention counts."""
    earliest_ms: int | None
    """The earliest expiry in milliseconds since the epoch; None if the commit time is not known, or the retention does
    not count now."""


def expiries(
    group: GroupDescription, committed_ms: Mapping[TopicPartition, int | None], *, retention_ms: int | None
) -> dict[TopicPartition, Expiry]:
    """When each offset of a group expires.

    Args:
        committed_ms: commit time of each offset from its metadata (``identifiers.parse_note``); None if the metadata
            does not contain it, because Kafka does not report it.
        retention_ms: of the group's coordinator; None if the user may not read it.
    """
    subscribed = {tp.topic for member in group.members for tp in member.partitions}
    newest = max((at for at in committed_ms.values() if at is not None), default=None)
    found = {}
    for tp, at in committed_ms.items():
        clock = RetentionStart.NONE if tp.topic in subscribed else retention_start(group)
        # A member made the newest commit, so the last member left after it.
        since = at if clock is RetentionStart.COMMIT else newest if clock is RetentionStart.EMPTY else None
        earliest_ms = None if since is None or retention_ms is None else since + retention_ms
        found[tp] = Expiry(clock, earliest_ms)
    return found


def expiring_soon(
    expiries: Mapping[TopicPartition, Expiry], *, now_ms: int, retention_ms: int | None
) -> list[TopicPartition]:
    """The offsets that may expire within the last quarter of their retention. Offsets with an unknown time are not
    included."""
    if retention_ms is None:
        return []
    soon_ms = now_ms + (1 - EXPIRING_SHARE) * retention_ms
    return sorted(tp for tp, at in expiries.items() if at.earliest_ms is not None and at.earliest_ms <= soon_ms)


def _retention_ms(admin: GroupAdmin, coordinator: int) -> int | None:
    if coordinator < 0:  # the group has none, or does not exist
        return None
    try:
        return admin.retention_ms(coordinator)
    except GroupError:  # refused or timed out: the rest can still be shown
        return None


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
    """A group in one line; ``per_s``: committed records per second, or None."""
    left_out = {"whose end is unknown": report.unknown_ends, "without a committed offset": report.without_offset}
    is_known = not any(left_out.values())
    return Text.assemble(
        "group ",
        (report.group, "bold"),
        f": {report.state or 'unknown'}, {report.protocol or 'no'} protocol",
        f", {report.assignor}" if report.assignor else "",
        f", {counted(len(report.members), 'member')}, lag ",
        (f"{report.lag:,}", "bold green" if report.lag == 0 and is_known else "bold yellow"),
        *(f" without {counted(count, 'partition')} {which}" for which, count in left_out.items() if count),
        "" if per_s is None else f", {per_s:,.0f} records/s",
    )


def members_table(report: GroupReport, *, assignment: bool = True) -> Table:
    """The members with number and lag of their partitions; with ``assignment`` also the partitions."""
    table = table_of("member", "client", "host", "partitions", "lag", *(["assignment"] if assignment else []))
    lags: dict[str, int] = {}
    for row in report.partitions:
        lags[row.member] = lags.get(row.member, 0) + (row.lag or 0)
    for m in sorted(report.members, key=lambda member: member.name):
        topics: dict[str, list[int]] = {}
        for tp in m.partitions:
            topics.setdefault(tp.topic, []).append(tp.partition)
        assigned = ["; ".join(f"{topic} {spans(numbers)}" for topic, numbers in sorted(topics.items()))]
        lag = lags.get(m.name, 0) if report.partitions else None
        shown = (m.name, m.client_id, m.host, len(m.partitions), lag, *(assigned if assignment else []))
        table.add_row(*cells(shown))
    if unowned := lags.get("", 0):
        table.add_row(*cells((UNASSIGNED, "", "", "", unowned)), style="red")
    return table


@dataclass(frozen=True)
class ByWidth:
    """One of two renderables: the narrow one in terminals with fewer columns."""

    narrow: RenderableType
    wide: RenderableType
    columns: int = NARROW

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.narrow if options.max_width < self.columns else self.wide


def lines_of(columns: Sequence[str], rows: Iterable[Sequence[Text]]) -> Text:
    """The rows of a table as text, one row a line: a terminal may be too narrow for any table."""
    named = ([(name, cell.plain) for name, cell in zip(columns, row, strict=True)] for row in rows)
    return Text("\n".join(", ".join(f"{name} {text}" for name, text in row if text != "-") for row in named))


def _shortened(id_: str) -> str:
    """An id without its middle: its end has the number of the slot."""
    return id_ if len(id_) <= SHORT_CHARS else f"{id_[:3]}…{id_[4 - SHORT_CHARS :]}"


def partitions_table(report: GroupReport, *, rows_max: int | None = None, bars: bool = False) -> RenderableType:
    """The partitions by name; if there are more than ``rows_max``, those with the largest lag.

    In a narrow terminal ids are shortened, and streams and bars are left out. If the numbers do not fit either, the
    rows are lines of text: a table would leave digits out.
    """
    return ByWidth(
        _partitions_table(report, rows_max=rows_max, narrow=True),
        _partitions_table(report, rows_max=rows_max, bars=bars),
    )


def _partitions_table(
    report: GroupReport, *, rows_max: int | None, bars: bool = False, narrow: bool = False
) -> RenderableType:
    chosen = sorted(report.partitions, key=lambda row: -(row.lag or 0))[:rows_max]
    longest = max((row.lag or 0 for row in chosen), default=0)
    with_ledger = ["ledger"] if any(row.ledger is not None for row in report.partitions) else []
    numbers = ["committed", "end", "lag", *with_ledger]
    ids = ["member"] if narrow else ["member", "stream"]
    columns = ["topic", "partition", *numbers, *([""] if bars else []), *ids]
    table = table_of(*columns, narrow=narrow)
    for column in table.columns[1 : 2 + len(numbers)]:
        column.justify, column.no_wrap = "right", True  # a wrapped number cannot be read
    rows = []
    for row in sorted(chosen, key=lambda row: (row.topic, row.partition)):
        values = [row.topic, str(row.partition), *(getattr(row, name) for name in numbers)]
        if narrow:
            values = [value if value is None else str(value) for value in values]
        bar = [Text("█" * -(-BAR * (row.lag or 0) // longest) if longest else "")] if bars else []
        rows.append([*cells(values), *bar, *cells((_shortened(row.member),) if narrow else (row.member, row.stream))])
        table.add_row(*rows[-1])
    shown: RenderableType = table
    if narrow:
        texts = zip(columns, *([cell.plain for cell in row] for row in rows), strict=True)
        widths = [1 + max(map(len, column)) for column in texts]
        shown = ByWidth(lines_of(columns, rows), table, 1 + TOPIC_MIN + sum(widths[1:]))
    left = len(report.partitions) - len(chosen)
    return Group(shown, Text(f"and {counted(left, 'partition')} with less lag")) if left else shown


def group_view(
    report: GroupReport,
    *,
    events: Sequence[str] = (),
    per_s: float | None = None,
    silent: str = "",
    rows_max: int | None = None,
    bars: bool = False,
) -> RenderableType:
    """The whole view of a group.

    Args:
        events: recent events, the newest last.
        per_s: committed records per second; None: not known.
        silent: why the view is outdated; empty: it is not.
        rows_max: the largest number of partitions to show; None: all.
        bars: draw the lag of each partition.
    """
    parts: list[RenderableType] = [heading(report, per_s)]
    if silent:
        parts.append(Text(f"no answer: {silent}", style="bold red"))
    parts += [members_table(report), partitions_table(report, rows_max=rows_max, bars=bars)]
    parts += [Text(line) for run in report.runs for line in written_lines(run)]
    if events:
        parts.append(Panel(Text("\n".join(events)), title="events", title_align="left"))
    return Group(*parts)


def written_lines(run: Mapping[str, Any]) -> list[str]:
    """Whether a run is drained, and what its sinks wrote, one line for each table."""
    tables = run.get("tables", {})
    drained = f"the query in process {run['pid']} is drained: it reads nothing until it is stopped and started again"
    lines = []
    for table, rows in sorted(tables.items())[:TABLES_SHOWN_MAX]:
        counts = [f"{count:,} {kind}" for kind, count in rows.items() if count]
        lines.append(f"table {table}: {', '.join(counts) or 'nothing written'}")
    if left := len(tables) - len(lines):
        lines.append(f"and {counted(left, 'more table')}")
    return [drained, *lines] if run.get("drained") else lines


def expiry_text(report: GroupReport) -> list[str]:
    """One line for each way in which offsets of the group expire; no line if all are kept."""
    by_clock: dict[str, list[PartitionRow]] = {}
    for row in report.partitions:
        if row.expires and row.expires != RetentionStart.NONE.value:
            by_clock.setdefault(row.expires, []).append(row)
    if not by_clock:
        return []
    retention_ms = report.offsets_retention_ms
    kept = "an unknown time" if retention_ms is None else f"{retention_ms / 3_600_000:g} h"
    lines = []
    for clock, rows in by_clock.items():
        known = [row.expires_after_ms for row in rows if row.expires_after_ms is not None]
        first = f", the first not before {_moment(min(known))}" if known else ", start not known"
        verb = "is" if len(rows) == 1 else "are"
        lines.append(f"{counted(len(rows), 'offset')} {verb} kept for {kept}, counted from {clock}{first}")
    if report.offsets_expiring:
        lines.append(f"about to expire: {', '.join(report.offsets_expiring)}")
    return lines


def _moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(timespec="seconds")
