"""``spark-group run --check`` and ``--dry-run``: what a run would read and write.

Runs in: the user's driver. Deliberately absent: a member of the group, commits, writes. The rows of ``--dry-run`` are
read by the code of a task, in this process.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spark_group_source.cli.common import FINAL, RETRIABLE, console, table_of
from spark_group_source.cli.report import counted
from spark_group_source.delta import checkpoint as checkpoints
from spark_group_source.delta.checkpoint import CheckpointFiles, PlannedBatch
from spark_group_source.delta.table_history import LedgerExpired
from spark_group_source.delta.table_writer import TableWriter
from spark_group_source.errors import OptionError, SourceError
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.translation import GroupDescription, Topic
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import GRACE_MS, DataLossDetector, LeaderEpochs
from spark_group_source.protocol.identifiers import parse_note
from spark_group_source.protocol.lookups import PositionLookups
from spark_group_source.protocol.offsets import StreamOffset, parse
from spark_group_source.protocol.outbox import Outbox
from spark_group_source.protocol.partitions import Partitions
from spark_group_source.protocol.planner import Planner
from spark_group_source.protocol.statistics import Statistics

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from spark_group_source.delta.sink import DeltaSink

SHOWN_MAX = 20
"""How many partitions, topics and problems are listed; more are counted."""
ROWS_MAX = 1_000
"""How many rows ``--dry-run`` shows at most."""
UNANSWERED = "unknown"
"""In place of an origin."""
RECREATED = "recreated topic"
"""The origin of the first record of a topic that was deleted and recreated."""
LOG_START = "log start"
"""The origin of the first record that is left, where those from the position on are lost."""
NEW_STREAM = "new"
"""In place of the id of a stream that has no batch yet."""
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
    """Why there: ``checkpoint``, ``committed offset``, ``starting options``, RECREATED or LOG_START; UNANSWERED if no
    broker told it."""
    log_start: int | None
    refusal: str = ""
    """Why a run would not start there."""

    @property
    def range(self) -> OffsetRange | None:
        """What there is to read; None: unknown."""
        if self.at is None or self.end is None:
            return None
        return OffsetRange(self.tp, self.at, max(self.at, self.end))

    @property
    def is_unanswered(self) -> bool:
        """Whether only brokers that did not answer keep a run from starting here: the next check may succeed."""
        return not self.refusal and (self.origin == UNANSWERED or self.end is None)

    def problem(self, options: Options) -> str | None:
        """Return why a run would fail here."""
        if self.refusal:
            return self.refusal
        if self.origin == UNANSWERED:
            return f"no broker has answered where {self.tp} starts; run the command again"
        if self.end is None:
            return f"{self.tp} has no leader that answers"
        if self.at is None:
            return None
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
    batch: StreamOffset
    """The next batch that is written: one that runs again, or what a run would plan now."""
    root: str
    """The query's ``checkpointLocation``."""
    last: "CheckpointBatch | None"
    """The last batch in it; None: it is new."""
    deleted: tuple[str, ...] = ()
    """Topics that the checkpoint has positions of, that the query subscribes to, and that do not exist."""

    def exit_code(self, problems: Sequence[str]) -> int:
        """Return the exit code of a check.

        Args:
            problems: why the run would fail, with those of :attr:`problems`.
        """
        unanswered = {start.problem(self.options) for start in self.starts if start.is_unanswered}
        if not problems:
            return 0
        return RETRIABLE if unanswered.issuperset(problems) else FINAL

    @property
    def problems(self) -> list[str]:
        """Why the run would fail."""
        deleted = self.deleted if self.options.fail_on_data_loss else ()
        lost = [f"topic {name} was read and does not exist: the run ends with TopicMissing" for name in deleted]
        found = (start.problem(self.options) for start in self.starts)
        return list(dict.fromkeys([*lost, *filter(None, found)]))

    def next_batch(self) -> PlannedBatch:
        """Return the next batch as a sink gets it; without a ``root`` if the checkpoint does not have it."""
        number = 0 if self.last is None else self.last.number + (not self.runs_again)
        root = self.root if self.runs_again else ""
        return PlannedBatch(query_id="", batch_id=number, offsets=(self.batch,), root=root)

    @property
    def runs_again(self) -> bool:
        """Whether the checkpoint has the next batch."""
        return self.last is not None and self.batch == self.last.offset

    def piece(self, rows_max: int | None = None) -> Piece:
        """Return what a run reads first; with ``rows_max``, at most so many offsets of so many partitions."""
        ranges = [start.range for start in self.starts if start.range is not None and start.range.size]
        if rows_max is not None:
            ranges = [r._replace(end=min(r.end, r.start + rows_max)) for r in ranges[:rows_max]]
        return Piece.of(ranges, {name: topic.id for name, topic in self.topics.items()}, {})

    def text(self) -> RenderableType:
        """Return the plan for people."""
        per_origin = Counter(start.origin for start in self.starts)
        starts = [f"{n} {origin if origin == UNANSWERED else f'by {origin}'}" for origin, n in per_origin.items()]
        left = sum(start.range.size for start in self.starts if start.range is not None)
        names = [f"{name} ({topic.partitions})" for name, topic in sorted(self.topics.items())]
        more = [f"and {len(names) - SHOWN_MAX} more"] if len(names) > SHOWN_MAX else []
        members = counted(len(self.group.members), "member") if self.group.members else "no members"
        missing = sorted(set(self.options.topics) - self.topics.keys())
        pattern = None if self.topics else self.options.topic_pattern
        facts = {
            "group": f"{self.options.group_id} at {self.options.bootstrap_servers}: {members}",
            "topics": ", ".join(names[:SHOWN_MAX] + more) or "none",
            **({"missing": f"{', '.join(missing)}: read when they are created"} if missing else {}),
            **({"pattern": f"no topic matches {pattern}: read when they are created"} if pattern else {}),
            "checkpoint": f"{self.root} is new" if self.last is None else f"{self.root}: {self.last.text}",
            "starts": ", ".join(starts) or "nowhere",
            "to read": counted(left, "offset"),
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
        BrokerUnavailable, AccessDenied: by the brokers.
        CheckpointMismatch, OptionError: the checkpoint is not one of this group, or the starting options do not name
            the topics' partitions.
    """
    with closing(GroupAdmin(options.admin_settings(), retries=0)) as admin:
        by_pattern = options.topic_pattern is not None
        if by_pattern:
            topics = admin.matching_topics(options.is_subscribed)
        else:
            topics = admin.existing_topics(options.topics)
        last = read_last_batch(files, root, options.group_id)
        deleted: list[str] = []
        if last is not None:
            if by_pattern:  # matched with one list, which may lack a topic for a moment
                topics |= admin.existing_topics(last.offset.unlisted_topics(topics, options.is_subscribed))
            deleted = last.offset.unlisted_topics(topics, options.is_subscribed)
        starts, batch = find_starts(admin, options, topics, last)
        return Plan(options, admin.describe_group(options.group_id), topics, starts, batch, root, last, tuple(deleted))


class CheckpointBatch(NamedTuple):
    """The last batch in a query's checkpoint."""

    number: int
    offset: StreamOffset
    runs_again: bool
    """Whether it was planned and is not finished."""

    @property
    def text(self) -> str:
        """Return what the query does with it."""
        if self.runs_again:
            return f"batch {self.number} was planned and is not finished, so it runs again"
        return f"continues after batch {self.number}"


def read_last_batch(files: CheckpointFiles, root: str, group: str) -> CheckpointBatch | None:
    """Read the last batch of a checkpoint; None if it is new.

    Raises:
        CheckpointMismatch, OptionError: it is damaged, or not one of this group.
    """
    planned = checkpoints.batch_numbers(files, f"{root}/offsets")
    if not planned:
        return None
    number, lines = checkpoints.batch_lines(files, root, max(planned))
    ours = [parse(line) for line in lines.values() if checkpoints.is_kafka_group(line)]
    found = next((offset for offset in ours if offset.group == group), None)
    if found is None:
        raise OptionError(f"batch {number} in {root} has no partition of group {group!r}")
    return CheckpointBatch(number, found, number not in checkpoints.batch_numbers(files, f"{root}/commits"))


def find_starts(
    admin: GroupAdmin, options: Options, topics: Mapping[str, Topic], last: CheckpointBatch | None
) -> tuple[list[Start], StreamOffset]:
    """Return where a run would start to read each partition, and its next batch. The code of a run decides.

    Args:
        topics: the subscribed topics that exist.

    Raises:
        OptionError: ``startingOffsets`` do not name exactly the partitions.
    """
    tps = [TopicPartition(name, n) for name, topic in sorted(topics.items()) for n in range(topic.partitions)]
    if not tps:
        return [], StreamOffset.initial(options.group_id)
    stable = options.isolation_level == "read_committed"
    statistics, out = Statistics(group=options.group_id), Outbox()
    partitions = Partitions(statistics)
    lookups = PositionLookups(options.rules(), partitions, statistics, out)
    data_loss = DataLossDetector(options.rules(), LeaderEpochs())
    if last is None:
        stream, lookups.known = NEW_STREAM, {name: topic.partitions for name, topic in topics.items()}
        options.starting.resolve(tps)
    else:
        stream = last.offset.stream
        lookups.restore(last.offset, replay=last.runs_again)
        partitions.restore(last.offset, replay=last.runs_again, uncommitted=True)
        data_loss.restore(last.offset)
    remembered = set(partitions.remembered())
    for tp in tps:
        partitions.assign(tp, 0)
    lookups.order(data_loss)
    committed: dict[TopicPartition, ev.Committed | None] = {}
    unknown: set[TopicPartition] = set()
    refusal: SourceError | None = None
    for command in out.commands:  # which grow by what the answers lead to
        match command:
            case ev.FetchCommittedOffsets():
                wanted = [*command.partitions, *command.notes_only]
                for tp, found in admin.read_offsets(options.group_id, wanted).items():
                    note = {} if found is None else parse_note(found.metadata)._asdict()
                    committed[tp] = None if found is None else ev.Committed(offset=found.offset, **note)
                numbers = [at.reset_number for at in committed.values() if at is not None]
                offsets = {tp: committed[tp] for tp in command.partitions if tp in committed}
                unknown |= set(tps) - offsets.keys()
                answer = ev.CommittedOffsetsRead(
                    offsets=offsets,
                    reset_number=max(numbers, default=0),
                    topic_ids={n: t.id for n, t in topics.items()},
                )
                data_loss.compare_ids(answer, now_ms=0)
                former, _ = data_loss.compare_ids(answer, now_ms=GRACE_MS)  # a preview believes one answer
                lookups.see_recreated({tp.topic for tp in former})
                answer = replace(answer, offsets=offsets | dict.fromkeys(former))
                lookups.committed_read(answer, stream)
                data_loss.learn_ids(answer, partitions.reset_number, lookups.without_offset(answer.offsets))
                lookups.order(data_loss)  # all again, after a reset that the checkpoint does not know
            case ev.ResolveStarts():
                resolved, epochs = admin.starting_offsets(command.starts, committed=stable)
                unknown |= command.starts.keys() - resolved.keys()
                refusal = lookups.starts_resolved(ev.StartsResolved(offsets=resolved, leader_epochs=epochs))
    ends = admin.latest(tps, committed=stable, require_all=False)
    log_starts = admin.earliest(tps, require_all=False)
    is_void = last is not None and partitions.reset_number > last.offset.reset_number
    again = None if last is None or not last.runs_again or is_void else last.offset

    partitions.apply_commits(partitions.due_commit(stream, frozenset()).offsets, now_ms=0)
    recreated = {
        name for name, topic in topics.items() if topic.id and data_loss.topic_ids.get(name, topic.id) != topic.id
    }
    firsts: dict[TopicPartition, int] = {}
    if not options.fail_on_data_loss:
        positions = {tp: -1 if tp.topic in recreated else at for tp, at in partitions.plannable().items()}
        firsts = {tp: first for tp, at in positions.items() if at < (first := log_starts.get(tp, 0))}
        missing = ev.RecordsMissing(offsets=firsts, reason="", topics=tuple(sorted(recreated)))
        partitions.skip_missing(missing)
        lookups.records_missing(missing)

    def start(tp: TopicPartition) -> Start:
        refused = ""
        if tp.topic in recreated and options.fail_on_data_loss:
            text = f"topic {tp.topic} was deleted and recreated"
            refused = f"{text}: the run ends with DataLoss, unless failOnDataLoss is false"
        if again is not None and tp in again.ranges:
            return Start(tp, again.ranges[tp][0], ends.get(tp), "checkpoint", log_starts.get(tp), refused)
        at, by = partitions.position(tp), committed.get(tp)
        if tp in firsts:
            origin = RECREATED if tp.topic in recreated else LOG_START
        elif by is not None and (last is None or by.stream != stream) and at == by.offset:
            origin = "committed offset"
        elif tp in remembered:
            origin = "checkpoint"
        else:
            origin = UNANSWERED if tp in unknown else "starting options"
        if at is None and refusal is not None and origin != UNANSWERED:
            refused = str(refusal)
        return Start(tp, at, ends.get(tp), origin, log_starts.get(tp), refused)

    ours = Planner(options.rules()).plan(
        partitions.plannable(),
        ends,
        {name: topic.id for name, topic in topics.items()},
        lambda _: {},
        stream=stream,
        partitions=partitions,
        lookups=lookups,
        first=True,
        unlimited=True,
        now_ms=0,
    )
    assert ours is not None, "the first batch of a run is planned without records, too"
    return [start(tp) for tp in tps], again or ours


def table_plan(table: TableWriter, rows: "DataFrame", group: str, name: str) -> tuple[dict[str, str], list[str]]:
    """Compare the rows that a run writes with the table. Returns facts about what it would write to, and problems.

    Args:
        rows: with the columns of the sink's transform.
        name: the table as the user wrote it.
    """
    columns = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in rows.schema.fields)
    written, wanted = {field.name.lower() for field in rows.schema.fields}, [by.lower() for by in table.partition_by]
    problems = [f"--partition-by {by}: a run writes no such column" for by in wanted if by not in written]
    if not table.exists():
        by = f", partitioned by {', '.join(table.partition_by)}" if table.partition_by else ""
        return {"table": f"{name} is created by the first batch{by}", "columns": columns}, problems
    new = table.lacking(rows)
    partitions = table.partition_columns()
    if wanted and partitions is not None and wanted != [by.lower() for by in partitions]:
        problems.append(
            f"table {name} is partitioned by {', '.join(partitions) or 'nothing'}: leave out --partition-by, which is "
            "for a new table"
        )
    if new and not table.merge_schema:
        problems.append(f"table {name} lacks the columns {', '.join(new)}: give --merge-schema to add them")
    reason = table.reason_not_native(rows)
    history = table.history()
    try:
        has_ledger = f"with{'' if history.ledger(group) else 'out'} a ledger of group {group}"
    except LedgerExpired:
        has_ledger = f"whose log does not reach back to the ledger of group {group}"
    facts = {
        "table": f"{name}, version {history.version}, {has_ledger}",
        "columns": columns,
        "written": "natively" if reason is None else f"by Delta's writer options: {reason}",
    }
    if new and table.merge_schema:
        facts["new columns"] = ", ".join(new)
    return facts, problems


def rows_of(plan: Plan, rows_max: int) -> "list[pa.RecordBatch]":
    """Read the first records of a run as a task does, which does not join the group. The first offsets may have none,
    as in a compacted log: then all are read, up to the last wanted record."""
    short, whole = plan.piece(rows_max), plan.piece()
    found = _rows_of(plan, short, rows_max)
    return found if whole == short or sum(map(len, found)) >= rows_max else _rows_of(plan, whole, rows_max)


def _rows_of(plan: Plan, piece: Piece, rows_max: int) -> "list[pa.RecordBatch]":
    from spark_group_source.source import GroupStreamReader, RangesPartition

    batches = GroupStreamReader(plan.options).read(RangesPartition(piece))
    found, left = [], rows_max
    try:
        for batch in batches:
            found.append(batch.slice(0, left))
            left -= batch.num_rows
            if left <= 0:
                break
        return found
    finally:
        batches.close()  # type: ignore[attr-defined]  # a generator


def show_rows(spark: "SparkSession", plan: Plan, transform: "Callable[[DataFrame], DataFrame]", rows_max: int) -> None:
    """Print the first rows of a run, each value on a line of its own."""
    import pyarrow as pa

    if found := rows_of(plan, rows_max):
        transform(spark.createDataFrame(pa.Table.from_batches(found))).show(rows_max, VALUE_CHARS_MAX, vertical=True)
    else:
        console.print("there are no records to read")


def check(plan: Plan, sink: "DeltaSink", rows: "DataFrame") -> tuple[RenderableType, list[str]]:
    """Return a run's plan for people, and why it would fail.

    Args:
        rows: with the columns of the sink's transform.
    """
    facts, problems = table_plan(sink.new_writer(rows.sparkSession), rows, plan.options.group_id, sink.table)
    text = Group(plan.text(), facts_table(facts))
    refusal = sink.refusal_of(rows, plan.next_batch()) if plan.batch.ranges else None
    return text, plan.problems + problems + ([] if refusal is None else [refusal])
