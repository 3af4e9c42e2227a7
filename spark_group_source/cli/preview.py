"""``spark-group run --check`` and ``--dry-run``: what a run would read and write.

Runs in: the user's driver. Deliberately absent: a member of the group, commits, writes. The rows of ``--dry-run`` are
read by the code of a task, in this process.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spark_group_source.cli.common import console, table_of
from spark_group_source.delta import checkpoint as checkpoints
from spark_group_source.delta.checkpoint import CheckpointFiles
from spark_group_source.delta.table_history import LedgerExpired
from spark_group_source.delta.table_writer import TableWriter
from spark_group_source.kafka import GroupAdmin, GroupDescription, Topic
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.table import Options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

SHOWN_MAX = 20
"""How many partitions, topics and problems are listed; more are counted."""
ROWS_MAX = 1_000
"""How many rows ``--dry-run`` shows at most."""
UNANSWERED = "unknown"
"""In place of an origin."""
VALUE_CHARS_MAX = 60
"""How much of a value is shown."""


class Start(NamedTuple):
    """Where a run would start to read a partition."""

    tp: TopicPartition
    at: int | None
    """None: unknown."""
    end: int | None
    """The end of the log; None: no leader answered."""
    origin: str
    """Why there: ``checkpoint``, ``committed offset`` or ``starting options``; UNANSWERED if no broker told it."""
    log_start: int | None

    @property
    def range(self) -> OffsetRange | None:
        """What there is to read; None: unknown."""
        if self.at is None or self.end is None:
            return None
        return OffsetRange(self.tp, self.at, max(self.at, self.end))

    def problem(self, options: Options) -> str | None:
        """Return why a run would fail here."""
        if self.origin == UNANSWERED:
            return f"no broker has answered where {self.tp} starts; run the command again"
        if self.end is None:
            return f"{self.tp} has no leader that answers"
        if self.at is None:
            return (
                f"{self.tp} has no record as recent as the starting timestamp; set "
                "startingOffsetsByTimestampStrategy=latest to start at its end"
            )
        lost = self.log_start is not None and self.at < self.log_start
        if not options.fail_on_data_loss or not (lost or self.at > self.end):
            return None
        return (
            f"{self.tp} starts at offset {self.at} (by {self.origin}), and its log has {self.log_start} to {self.end}: "
            "the run ends with DataLoss, unless failOnDataLoss is false"
        )


@dataclass(frozen=True)
class Plan:
    """What a run would read."""

    options: Options
    group: GroupDescription
    topics: dict[str, Topic]
    starts: list[Start]
    checkpoint: str
    """What the checkpoint says, in words."""

    @property
    def problems(self) -> list[str]:
        """Why the run would fail."""
        if not self.topics:
            return [f"no topic matches the pattern {self.options.topic_pattern}"]
        return [found for start in self.starts if (found := start.problem(self.options))]

    def piece(self, rows_max: int) -> Piece:
        """Return ranges with up to so many records of each partition."""
        known = [start.range for start in self.starts if start.range is not None and start.range.size]
        ranges = [r._replace(end=min(r.end, r.start + rows_max)) for r in known[:rows_max]]
        return Piece.of(ranges, {name: topic.id for name, topic in self.topics.items()}, {})

    def text(self) -> RenderableType:
        """Return the plan for people."""
        per_origin = Counter(start.origin for start in self.starts)
        starts = [f"{n} {origin if origin == UNANSWERED else f'by {origin}'}" for origin, n in per_origin.items()]
        left = sum(start.range.size for start in self.starts if start.range is not None)
        names = [f"{name} ({topic.partitions})" for name, topic in sorted(self.topics.items())]
        more = [f"and {len(names) - SHOWN_MAX} more"] if len(names) > SHOWN_MAX else []
        members = f"{len(self.group.members)} members" if self.group.members else "no members"
        facts = {
            "group": f"{self.options.group_id} at {self.options.bootstrap_servers}: {members}",
            "topics": ", ".join(names[:SHOWN_MAX] + more) or "none",
            "checkpoint": self.checkpoint,
            "starts": ", ".join(starts) or "nowhere",
            "to read": f"{left:,} offsets",
        }
        longest = sorted(self.starts, key=lambda start: -(start.range.size if start.range else 0))[:SHOWN_MAX]
        rows = [(s.tp.topic, str(s.tp.partition), s.at, s.end, s.origin) for s in longest]
        shown = table_of("TOPIC", "PARTITION", "START", "END", "BY", rows=rows, narrow=True)
        hidden = len(self.starts) - len(longest)
        return Group(facts_table(facts), shown, Text(f"and {hidden} more partitions" if hidden else ""))


def facts_table(facts: dict[str, str]) -> Table:
    """Return names and values, one fact a line."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, value in facts.items():
        grid.add_row(Text(name), Text(value, overflow="fold"))
    return grid


def plan(options: Options, files: CheckpointFiles, root: str) -> Plan:
    """Ask the brokers and the checkpoint what a run would read.

    Args:
        root: the query's ``checkpointLocation``.

    Raises:
        TopicMissing, BrokerUnavailable, AccessDenied: by the brokers.
        CheckpointMismatch, OptionError: the checkpoint is not one of this group, or the starting options do not name
            the topics' partitions.
    """
    admin = GroupAdmin(options.admin_settings(), retries=0)
    try:
        by_pattern = options.topic_pattern is not None
        topics = admin.matching_topics(options.is_subscribed) if by_pattern else admin.require_topics(options.topics)
        tps = [TopicPartition(name, n) for name, topic in sorted(topics.items()) for n in range(topic.partitions)]
        text, positions = _checkpoint(files, root, options.group_id)
        return Plan(
            options, admin.describe_group(options.group_id), topics, _starts(admin, options, tps, positions), text
        )
    finally:
        admin.close()


def _checkpoint(files: CheckpointFiles, root: str, group: str) -> tuple[str, dict[TopicPartition, int]]:
    """Return what a checkpoint says, and where the query goes on by it."""
    planned = checkpoints.batch_numbers(files, f"{root}/offsets")
    if not planned:
        return f"{root} is new", {}
    last = max(planned)
    if last in checkpoints.batch_numbers(files, f"{root}/commits"):
        return f"{root}: continues after batch {last}", dict(checkpoints.positions(files, root, group).offsets)
    found = checkpoints.positions(files, root, group, last)
    return f"{root}: batch {last} was planned and is not finished, so it runs again", dict(found.offsets)


def _starts(
    admin: GroupAdmin, options: Options, tps: list[TopicPartition], positions: dict[TopicPartition, int]
) -> list[Start]:
    if not tps:
        return []
    stable = options.isolation_level == "read_committed"
    read = admin.read_offsets(options.group_id, tps)
    committed = {tp: at.offset for tp, at in read.items() if at is not None}
    new = [tp for tp in tps if tp not in positions and tp in read and tp not in committed]
    starting = {tp: options.starting.of(tp) for tp in new} if positions else options.starting.resolve(tps)
    by_options, _ = admin.starting_offsets({tp: starting[tp] for tp in new}, committed=stable)
    ends = admin.latest(tps, committed=stable, require_all=False)
    log_starts = admin.earliest(tps, require_all=False)

    def start(tp: TopicPartition) -> Start:
        for at, origin in ((positions.get(tp), "checkpoint"), (committed.get(tp), "committed offset")):
            if at is not None:
                return Start(tp, at, ends.get(tp), origin, log_starts.get(tp))
        if tp not in by_options:
            return Start(tp, None, ends.get(tp), UNANSWERED, log_starts.get(tp))
        by_option = by_options[tp]
        if by_option is None and options.starting.no_match == "latest":
            by_option = ends.get(tp)
        return Start(tp, by_option, ends.get(tp), "starting options", log_starts.get(tp))

    return [start(tp) for tp in tps]


class TablePlan(NamedTuple):
    """What a run would write to."""

    facts: dict[str, str]
    problems: list[str]


def table_plan(table: TableWriter, rows: "DataFrame", group: str) -> TablePlan:
    """Compare the rows that a run writes with the table.

    Args:
        rows: with the columns of the sink's transform.
    """
    columns = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in rows.schema.fields)
    if not table.exists():
        by = f", partitioned by {', '.join(table.partition_by)}" if table.partition_by else ""
        return TablePlan({"table": f"{table.table} is created by the first batch{by}", "columns": columns}, [])
    known = {field.name.lower() for field in table.schema().fields}
    new = [field.name for field in rows.schema.fields if field.name.lower() not in known]
    problems = []
    if new and not table.merge_schema:
        problems.append(f"table {table.table} lacks the columns {', '.join(new)}: give --merge-schema to add them")
    reason = table.reason_not_native(rows)
    history = table.history()
    try:
        has_ledger = f"with{'' if history.ledger(group) else 'out'} a ledger of group {group}"
    except LedgerExpired:
        has_ledger = f"whose log does not reach back to the ledger of group {group}"
    facts = {
        "table": f"{table.table}, version {history.version}, {has_ledger}",
        "columns": columns,
        "written": "natively" if reason is None else f"by Delta's writer options: {reason}",
    }
    if new and table.merge_schema:
        facts["new columns"] = ", ".join(new)
    return TablePlan(facts, problems)


def rows_of(plan: Plan, rows_max: int) -> "list[pa.RecordBatch]":
    """Read the first records of a run as a task does, which does not join the group."""
    from spark_group_source.source import GroupStreamReader, RangesPartition

    batches = GroupStreamReader(plan.options).read(RangesPartition(plan.piece(rows_max)))
    try:
        return list(_first(batches, rows_max))
    finally:
        batches.close()  # type: ignore[attr-defined]  # a generator


def _first(batches: "Iterator[pa.RecordBatch]", rows_max: int) -> "Iterator[pa.RecordBatch]":
    left = rows_max
    for batch in batches:
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left <= 0:
            return


def show_rows(spark: "SparkSession", plan: Plan, transform: "Callable[[DataFrame], DataFrame]", rows_max: int) -> None:
    """Print the first rows of a run, each value on a line of its own."""
    import pyarrow as pa

    if found := rows_of(plan, rows_max):
        transform(spark.createDataFrame(pa.Table.from_batches(found))).show(rows_max, VALUE_CHARS_MAX, vertical=True)
    else:
        console.print("there are no records to read")


def check(plan: Plan, table: TableWriter, rows: "DataFrame") -> tuple[RenderableType, list[str]]:
    """Return a run's plan for people, and why it would fail."""
    of_table = table_plan(table, rows, plan.options.group_id)
    text = Group(plan.text(), facts_table(of_table.facts))
    return text, plan.problems + of_table.problems
