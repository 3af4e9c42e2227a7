"""What ``spark-group watch`` shows: what changed between two looks at a group, and the picture of one.

Runs in: a terminal. Deliberately absent: asking, waiting, the terminal itself (``watch``): everything here is a
function of reports.
"""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spark_group_source.cli.report import GroupReport, PartitionRow
from spark_group_source.kafka import GroupMember

NOBODY = "nobody"
BAR = 20
"""Characters of the longest bar of a lag."""


def changes(before: GroupReport, after: GroupReport) -> list[str]:
    """What an operator would say of the time between two looks: of the state, members, partitions, queries."""
    said = []
    if before.state != after.state:
        said.append(f"the group is {after.state or 'unknown'}, it was {before.state or 'unknown'}")
    was, now = ({_name(member) for member in report.members} for report in (before, after))
    said += [f"{name} joined" for name in sorted(now - was)]
    said += [f"{name} left" for name in sorted(was - now)]
    owners = {(row.topic, row.partition): row.member for row in before.partitions}
    moves: dict[tuple[str, str, str], list[int]] = {}
    for row in after.partitions:
        former = owners.get((row.topic, row.partition), "")
        if former != row.member:
            moves.setdefault((row.topic, former or NOBODY, row.member or NOBODY), []).append(row.partition)
    said += [
        f"{topic} {spans(partitions)}: {former} → {new}" for (topic, former, new), partitions in sorted(moves.items())
    ]
    rebalances = _rebalances(before), _rebalances(after)
    for pid in rebalances[1].keys() & rebalances[0].keys():
        (count, _), (new_count, reason) = rebalances[0][pid], rebalances[1][pid]
        if new_count > count:
            said.append(f"rebalance {new_count} of the query in process {pid}{': ' + reason if reason else ''}")
    return said


def rate(before: GroupReport, after: GroupReport, elapsed_s: float) -> float:
    """Records a second that were committed between two looks; a reset backwards counts as none."""
    at = {(row.topic, row.partition): row.committed for row in before.partitions}
    moved = 0
    for row in after.partitions:
        former = at.get((row.topic, row.partition))
        if former is not None and row.committed is not None:
            moved += max(0, row.committed - former)
    return moved / elapsed_s if elapsed_s > 0 else 0.0


def spans(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def picture(
    report: GroupReport, *, events: Sequence[str], per_s: float | None, silent: str = "", rows_max: int = 1_000
) -> RenderableType:
    """One look at a group.

    Args:
        events: what happened, the newest last.
        per_s: records committed a second; None: not known yet.
        silent: why this is an old look; empty: it is not.
        rows_max: partitions that have room; those with most lag are shown.
    """
    head = Text.assemble(
        (report.group, "bold"),
        f"  {report.state or 'unknown'}, {report.protocol or 'no'} protocol, {len(report.members)} members, lag ",
        (f"{report.lag:,}", "bold green" if report.lag == 0 else "bold yellow"),
        "" if per_s is None else f", {per_s:,.0f} records/s",
    )
    parts: list[RenderableType] = [head]
    if silent:
        parts.append(Text(f"not answered: {silent}", style="bold red"))
    parts += [_members(report), _partitions(report, rows_max)]
    if events:
        parts.append(Panel(Text("\n".join(events)), title="what happened", title_align="left"))
    return Group(*parts)


def _members(report: GroupReport) -> Table:
    table = Table("member", "client", "host", "partitions", "lag", title="members", title_justify="left")
    lags: dict[str, int] = {}
    for row in report.partitions:
        lags[row.member] = lags.get(row.member, 0) + (row.lag or 0)
    for member in sorted(report.members, key=_name):
        topics: dict[str, list[int]] = {}
        for tp in member.partitions:
            topics.setdefault(tp.topic, []).append(tp.partition)
        has = "; ".join(f"{topic} {spans(numbers)}" for topic, numbers in sorted(topics.items()))
        table.add_row(_name(member), member.client_id, member.host, has or "-", f"{lags.get(_name(member), 0):,}")
    if unowned := lags.get("", 0):
        table.add_row(NOBODY, "-", "-", "-", f"{unowned:,}", style="red")
    return table


def _partitions(report: GroupReport, rows_max: int) -> RenderableType:
    """Those with most lag, in the order of their names."""
    chosen = sorted(report.partitions, key=lambda row: -(row.lag or 0))[:rows_max]
    longest = max((row.lag or 0 for row in chosen), default=0)
    table = Table(
        "topic", "partition", "committed", "end", "lag", "", "member", title="partitions", title_justify="left"
    )
    for row in sorted(chosen, key=lambda row: (row.topic, row.partition)):
        numbers = ["-" if number is None else f"{number:,}" for number in (row.committed, row.end, row.lag)]
        table.add_row(row.topic, str(row.partition), *numbers, _bar(row, longest), row.member or NOBODY)
    for column in table.columns[1:5]:
        column.justify = "right"
    left = len(report.partitions) - len(chosen)
    return Group(table, Text(f"and {left} partitions with less lag")) if left else table


def _bar(row: PartitionRow, longest: int) -> str:
    return "█" * -(-BAR * (row.lag or 0) // longest) if longest else ""


def _name(member: GroupMember) -> str:
    return member.instance_id or member.member_id


def _rebalances(report: GroupReport) -> dict[int, tuple[int, str]]:
    return {run["pid"]: (run["rebalances"], str(run["reason"])) for run in report.runs}
