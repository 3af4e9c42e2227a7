"""``spark-group reset``: moving a group on purpose. Kafka's committed offsets, and with a table its ledger, go to the
same place; the command has the words of Kafka's own tool.

Runs in: a terminal, the user's driver. Deliberately absent: the Spark session (the caller passes one where a ledger is
to be moved too).

A reset has a number, which is written beside every offset of the group and into the ledger (``group.names``). What was
planned before it is void: a batch that a stopped query has in its checkpoint can no longer be taken back, but neither
the sink nor the source goes by it.

A plan may be written down as ``kafka-consumer-groups --export`` writes it and ``--from-file`` reads it: a line is
``topic,partition,offset``, without a header; Kafka's tool puts the group before it where it is told of several groups
(KIP-222, and ``CsvUtils`` of Kafka's tools).
"""

import contextlib
import csv
import io
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.text import Text

from spark_group_source.cli import shared
from spark_group_source.cli.report import DEAD, not_there
from spark_group_source.cli.shared import (
    ConfigOption,
    GroupOption,
    JsonOption,
    ServersOption,
    TableOption,
    console,
    table_of,
)
from spark_group_source.delta.ledger_format import Ledger, LedgerDamaged
from spark_group_source.errors import GroupError, OptionError
from spark_group_source.kafka import CommittedOffset, GroupAdmin, Topic
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition
from spark_group_source.options.starting import EARLIEST_OFFSET, LATEST_OFFSET, parse_offsets
from spark_group_source.protocol import identifiers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TopicsOption = Annotated[
    list[str] | None,
    typer.Option("--topic", metavar="NAME[:0,1]", help="Only this topic, or these partitions of it; repeatable."),
]
DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?=\d)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d{1,9})?)S)?)?")

ACTIVE = frozenset({"stable", "preparing_rebalancing", "completing_rebalancing", "assigning", "reconciling"})
"""States in which Kafka refuses to move a group's offsets, because its members go on from where they are."""


Scope = Mapping[str, frozenset[int]]
"""Topics, and of each the partitions that are meant; none named: all of it. An empty scope is all that a group has."""


class Shift(NamedTuple):
    """So many offsets further than the group is; negative: back."""

    by: int


class Offsets(NamedTuple):
    """An offset for each partition (-1 latest, -2 earliest). ``written``: somebody wrote them down, and a partition
    that does not exist is an error; else it is left out."""

    each: Mapping[TopicPartition, int]
    written: bool = True


To = StartAt | Shift | Offsets | Literal["current"]
"""Where a group is to go."""


@dataclass(frozen=True, slots=True)
class Move:
    """One partition of a :class:`GroupReset`; ``now`` is None where the group has no offset yet."""

    topic: str
    partition: int
    now: int | None
    then: int


@dataclass(frozen=True, slots=True)
class GroupReset(JupyterMixin):
    """What a reset does, or did; notebooks show it as a table. ``number``: how many resets the group had then; None:
    nothing was changed."""

    group: str
    moves: tuple[Move, ...]
    number: int | None

    def as_dict(self) -> dict[str, Any]:
        rows = [asdict(one) for one in self.moves]
        return {"group": self.group, "executed": self.number is not None, "reset": self.number, "partitions": rows}

    def __rich__(self) -> RenderableType:
        done = "nothing was changed" if self.number is None else f"done, reset #{self.number}"
        rows = [(one.topic, str(one.partition), one.now, one.then) for one in self.moves]
        table = table_of("topic", "partition", "now", "then", rows=rows)
        return Group(Text(f"group {self.group}: {done}"), table)


def find(admin: GroupAdmin, group: str, to: To, scope: Scope) -> dict[TopicPartition, int]:
    """The offset that each partition is to get. Partitions that are gone are left out.

    Raises:
        OptionError: a partition that was named does not exist, or has no committed offset to go on from.
        GroupError: there is no such group, and no topics are named.
    """
    if isinstance(to, Offsets):
        chosen = {tp: at for tp, at in to.each.items() if in_scope(tp, scope)}
        found = named_targets(admin, chosen)
        if to.written and (gone := sorted(chosen.keys() - found.keys())):
            raise OptionError(f"partition {gone[0]} does not exist; create the topic, or leave the partition out")
        return found
    tps = partitions_of(admin, group, scope)
    if not tps and admin.describe_group(group).state == DEAD:
        raise not_there(group, "to begin it somewhere, name the topics with --topic")
    if isinstance(to, StartAt):
        return targets(admin, tps, to)
    committed = admin.committed(group)
    if to == "current":  # where it never committed the end, as in Kafka's own tool
        return named_targets(admin, {tp: committed[tp].offset if tp in committed else LATEST_OFFSET for tp in tps})
    if without := [tp for tp in tps if tp not in committed]:
        raise OptionError(f"--shift-by {to.by}: group {group!r} has no committed offset of {without[0]} to go on from")
    return named_targets(admin, {tp: max(0, committed[tp].offset + to.by) for tp in tps})


def partitions_of(admin: GroupAdmin, group: str, scope: Scope) -> list[TopicPartition]:
    """The partitions to move: those of the scope, or all that the group ever committed.

    Raises:
        OptionError: a topic does not have a partition that was named.
    """
    if not scope:
        return sorted(admin.committed(group))
    there = admin.require_topics(scope)
    for name, wanted in scope.items():
        if beyond := sorted(p for p in wanted if p >= there[name].partitions):
            raise OptionError(f"topic {name} has no partition {beyond[0]}; it has 0 to {there[name].partitions - 1}")
    return [
        TopicPartition(name, p) for name, topic in there.items() for p in sorted(scope[name]) or range(topic.partitions)
    ]


def in_scope(tp: TopicPartition, scope: Scope) -> bool:
    """Whether a partition is meant."""
    return not scope or (tp.topic in scope and (not scope[tp.topic] or tp.partition in scope[tp.topic]))


def targets(admin: GroupAdmin, tps: Iterable[TopicPartition], to: StartAt) -> dict[TopicPartition, int]:
    """Where a word, an offset or a time means for each partition. Partitions that are gone are left out."""
    tps = list(tps)
    if to.kind == "time":
        found = admin.offsets_at_time(dict.fromkeys(tps, to.value))
        end = admin.latest(tp for tp, at in found.items() if at is None)
        return {tp: at for tp, at in (found | end).items() if at is not None}
    number = {"earliest": EARLIEST_OFFSET, "latest": LATEST_OFFSET}.get(to.kind, to.value)
    return named_targets(admin, dict.fromkeys(tps, number))


def named_targets(admin: GroupAdmin, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """The same for an offset each (-1 latest, -2 earliest); one that is outside the log becomes its nearest end."""
    first, end = admin.earliest(offsets), admin.latest(offsets)
    words = {EARLIEST_OFFSET: first, LATEST_OFFSET: end}
    return {
        tp: words[at][tp] if at in words else min(max(at, first[tp]), end[tp])
        for tp, at in offsets.items()
        if tp in first and tp in end
    }


class Reset(NamedTuple):
    """One reset of a group: its number, and what it commits. ``offsets`` has every partition that the group ever had,
    because each of them must say that plans of before are void."""

    reset_number: int
    offsets: dict[TopicPartition, int]
    notes: dict[TopicPartition, str]


def plan(
    targets: Mapping[TopicPartition, int],
    committed: Mapping[TopicPartition, CommittedOffset],
    ledger: Ledger | None,
    topics: Mapping[str, Topic],
) -> Reset:
    """The reset that brings a group to ``targets`` and leaves every other partition where it stands.

    A partition that is not moved keeps its note, with the new number: nobody moved it, so a sink that has more of it
    than Kafka knows leaves that out instead of refusing it. Where ``ledger`` is further than Kafka, the last commit of
    a run was lost; the table decides. It decides as well where a stream committed that had not heard of the last reset
    and whose batch the sink left out: Kafka is further then by records that are not in the table. It does not where it
    has not heard of the reset that Kafka's offset knows, as after one with another table of the group.

    Args:
        committed: what the group committed so far.
        ledger: of the table that is reset too, if there is one.
        topics: those that exist now. Partitions of others are left out: Kafka would refuse all for one of them.
    """
    notes = {tp: identifiers.parse_note(at.metadata) for tp, at in committed.items()}
    reset_number = 1 + max(
        [note.reset_number for note in notes.values()] + [0 if ledger is None else ledger.reset_number]
    )
    offsets = {tp: at.offset for tp, at in committed.items()}
    if ledger is not None:
        for tp, at in ledger.offsets.items():
            if tp.topic in topics and ledger.topics[tp.topic].is_same(topics[tp.topic].id):
                note = notes.get(tp)
                if note is not None and note.reset_number > ledger.reset_number:
                    continue
                offsets[tp] = at if _of_void_batch(note, ledger) else max(at, offsets.get(tp, 0))
    offsets |= targets
    offsets = {
        tp: at for tp, at in offsets.items() if tp.topic in topics and tp.partition < topics[tp.topic].partitions
    }
    texts = dict.fromkeys(offsets, identifiers.reset_text(reset_number))
    for tp in offsets.keys() & notes.keys() - targets.keys():
        note = notes[tp]
        if note.stream is not None:
            texts[tp] = identifiers.note_text(
                note.stream, note.seq, reset_number, followed=note.followed, truncated_from=note.truncated_from
            )
    return Reset(reset_number, offsets, texts)


def _of_void_batch(note: identifiers.Note | None, ledger: Ledger) -> bool:
    """Whether the stream that made a commit had a batch left out for a reset that it did not know of."""
    return note is not None and note.stream in ledger.void and note.reset_number < ledger.reset_number


def reset(
    admin: GroupAdmin,
    group: str,
    targets: Mapping[TopicPartition, int],
    *,
    spark: "SparkSession | None" = None,
    table: str | None = None,
    execute: bool,
) -> GroupReset:
    """What a reset to these offsets does; with ``execute`` the group goes there and then, with a table, its ledger.

    Kafka goes first: it refuses while the group is active. If the table does not follow (this process dies, Delta
    refuses), a query stops where it would write something twice, and says so; another reset settles it, because its
    number is higher. The other way round every batch would be void, as the source had never heard of the reset.

    Raises:
        GroupError: the group has members; stop them first.
        OptionError: there is nothing to move.
        LedgerConflict: the table's ledger is of a newer release.
    """
    if execute:
        _require_movable(admin, group, targets)
    committed = admin.committed(group)
    moves = tuple(
        Move(tp.topic, tp.partition, committed[tp].offset if tp in committed else None, at)
        for tp, at in sorted(targets.items())
    )
    if not execute:
        return GroupReset(group, moves, None)
    from spark_group_source.delta import ledger_store

    ledger = None
    if spark is not None and table is not None:
        with contextlib.suppress(LedgerDamaged):  # nobody can read it: it is written anew
            ledger = ledger_store.read_ledger(spark, table, group)
    known = [*targets, *committed, *({} if ledger is None else ledger.offsets)]
    topics = admin.existing_topics(tp.topic for tp in known)
    found = plan(targets, committed, ledger, topics)
    admin.move_committed(group, found.offsets, notes=found.notes)
    if spark is not None and table is not None:
        ids = {tp.topic: topics[tp.topic].id for tp in found.offsets}
        gone = {tp.topic for tp in known} - topics.keys()
        reason = f"spark-group reset {found.reset_number}"
        ledger_store.set_ledger(
            spark,
            table,
            group,
            found.offsets,
            reason=reason,
            topic_ids=ids,
            reset_number=found.reset_number,
            deleted=gone,
        )
    return GroupReset(group, moves, found.reset_number)


def _require_movable(admin: GroupAdmin, group: str, targets: Mapping[TopicPartition, int]) -> None:
    if not targets:
        raise OptionError(f"group {group!r} has no offsets to move; name the topics with --topic")
    described = admin.describe_group(group)
    if described.members or described.state in ACTIVE:
        raise GroupError(
            f"group {group!r} is {described.state} with {len(described.members)} members: Kafka moves offsets only of "
            "an inactive group. Stop its queries and consumers, and wait for their session timeout",
            group=group,
        )


# --- the command -----------------------------------------------------------------------------------------------------


def reset_command(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    topic: TopicsOption = None,
    all_topics: Annotated[
        bool, typer.Option("--all-topics", help="All that the group has; so it is without --topic, too.")
    ] = False,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record still there.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="To the end: skip what is there.")] = False,
    to_current: Annotated[bool, typer.Option("--to-current", help="To where the group is, for --export.")] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0, help="To this offset.")] = None,
    to_offsets: Annotated[str | None, typer.Option("--to-offsets", help='JSON: {"orders":{"0":23,"1":-1}}')] = None,
    to_datetime: Annotated[str | None, typer.Option("--to-datetime", help="ISO 8601 with its zone.")] = None,
    by_duration: Annotated[
        str | None, typer.Option("--by-duration", metavar="PnDTnHnMnS", help="To so long ago, such as PT1H30M.")
    ] = None,
    shift_by: Annotated[
        int | None, typer.Option("--shift-by", help="So many offsets further; a negative number goes back.")
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option("--from-file", exists=True, dir_okay=False, help="To what a CSV of --export says; Kafka's too."),
    ] = None,
    to_ledger: Annotated[bool, typer.Option("--to-ledger", help="To what the table of --table holds.")] = False,
    to_checkpoint: Annotated[
        str | None, typer.Option("--to-checkpoint", help="To the last finished batch of a query's checkpointLocation.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=0, help="With --to-checkpoint: to where this batch began."),
    ] = None,
    table: TableOption = None,
    execute: Annotated[bool, typer.Option("--execute", help="Do it; without this it is only shown.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show it; so it is without --execute, too.")] = False,
    export: Annotated[bool, typer.Option("--export", help="Print the plan as CSV and nothing else.")] = False,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a stopped group's offsets; with --table the table's ledger moves along, so that nothing is refused later.

    The queries go on with the checkpoints they have.
    """
    to = parse_to(
        {
            "--to-earliest": to_earliest,
            "--to-latest": to_latest,
            "--to-current": to_current,
            "--to-offset": to_offset,
            "--to-offsets": to_offsets,
            "--to-datetime": to_datetime,
            "--by-duration": by_duration,
            "--shift-by": shift_by,
            "--from-file": from_file,
            "--to-ledger": to_ledger,
            "--to-checkpoint": to_checkpoint,
        },
        group,
    )
    if to_ledger and table is None:
        raise OptionError("--to-ledger needs --table: the Delta table whose ledger is meant")
    if batch is not None and to_checkpoint is None:
        raise OptionError("--batch needs --to-checkpoint: the checkpoint that has the batch")
    _contradict({"--execute": execute, "--dry-run": dry_run})
    _contradict({"--export": export, "--json": as_json})
    _contradict({"--topic": bool(topic), "--all-topics": all_topics})
    scope = scope_of(topic or [])
    admin = shared.admin_of(bootstrap_servers, group, command_config)
    with shared.session(table is not None) as spark:
        if to == "checkpoint":
            from spark_group_source.delta.checkpoint import positions

            with shared.checkpoint_files(str(to_checkpoint)) as (files, root):
                to = Offsets(positions(files, root, group, batch), written=False)
        elif to == "ledger":
            from spark_group_source.delta.ledger_store import require_ledger

            assert spark is not None
            to = Offsets(require_ledger(spark, str(table), group).offsets, written=False)
        targets = find(admin, group, to, scope)
        new = not admin.committed(group) and admin.describe_group(group).state == DEAD
        done = reset(admin, group, targets, spark=spark, table=table, execute=execute)
    if export:
        typer.echo(plan_text(targets), nl=False)
    elif as_json:
        typer.echo(json.dumps(done.as_dict(), indent=2))
        return
    else:
        console.print(done)
    if new:
        typer.echo(f"there is no group {group} yet; this begins it", err=export)
    text = f"moved {len(done.moves)} partitions of group {group}; this was its reset {done.number}"
    typer.echo(text if execute else "nothing was changed; add --execute to do it", err=export)


def _contradict(given: Mapping[str, bool]) -> None:
    if all(given.values()):
        raise OptionError(f"{' and '.join(given)} contradict each other; give one of them")


def parse_to(given: Mapping[str, Any], group: str) -> To | Literal["ledger", "checkpoint"]:
    """Where the group is to go, by the one option that was given.

    Args:
        given: all options that name a place, each with its value.
        group: whose lines of a file are meant.

    Raises:
        OptionError: none or several are given, or the value of the one cannot be read.
    """
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(chosen) != 1:
        raise OptionError(f"say where to: exactly one of {', '.join(given)}")
    ((name, value),) = chosen.items()
    match name:
        case "--to-earliest":
            return EARLIEST
        case "--to-latest":
            return LATEST
        case "--to-current":
            return "current"
        case "--to-ledger":
            return "ledger"
        case "--to-checkpoint":
            return "checkpoint"
        case "--to-offset":
            return StartAt("offset", value)
        case "--to-offsets":
            return Offsets(_named(value))
        case "--to-datetime":
            return StartAt("time", _moment_ms(value))
        case "--by-duration":
            return StartAt("time", max(0, int(time.time() * 1000) - duration_ms(value)))
        case "--shift-by":
            return Shift(value)
        case _:
            return Offsets(read_plan(value, group))


def scope_of(texts: Sequence[str]) -> dict[str, frozenset[int]]:
    """``NAME`` or ``NAME:0,1``, as Kafka's own tool takes them."""
    found: dict[str, frozenset[int]] = {}
    for text in texts:
        name, colon, numbers = text.partition(":")
        each = [number.strip() for number in numbers.split(",")] if colon else []
        if not name or not all(number.isdecimal() for number in each):
            raise OptionError(f"--topic is {text!r}; write NAME, or NAME:0,1 for some of its partitions")
        if name in found and not (each and found[name]):
            raise OptionError(f"--topic names {name} twice, once with all of its partitions")
        found[name] = found.get(name, frozenset()) | {int(number) for number in each}
    return found


def _named(text: str) -> dict[TopicPartition, int]:
    try:
        named = parse_offsets(text)
    except ValueError as exc:
        raise OptionError(f"--to-offsets: {exc}") from None
    if isinstance(named, StartAt):
        raise OptionError("--to-offsets takes JSON; for a word use --to-earliest or --to-latest")
    return dict(named)


def _moment_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(f"--to-datetime is {text!r}; write it as 2026-01-31T12:00:00+00:00") from None
    if moment.tzinfo is None:
        raise OptionError(f"--to-datetime {text!r} has no zone; add one, such as +00:00")
    return int(moment.timestamp() * 1000)


def duration_ms(text: str) -> int:
    """Milliseconds of a duration as Kafka's own tool reads it (``java.time.Duration``): ISO 8601 without years and
    months, whose lengths differ."""
    found = DURATION.fullmatch(text.strip().upper())
    if found is None or not any(found.groups()):
        raise OptionError(f"--by-duration is {text!r}; write it as PnDTnHnMnS, such as PT1H30M or P7D")
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return round(((days * 24 + hours) * 60 + minutes) * 60_000 + seconds * 1000)


# --- a plan in a file ------------------------------------------------------------------------------------------------


def plan_text(offsets: Mapping[TopicPartition, int]) -> str:
    """The lines of a plan, for one group."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for tp, offset in sorted(offsets.items()):
        lines.writerow((tp.topic, tp.partition, offset))
    return text.getvalue()


def read_plan(path: Path, group: str) -> dict[TopicPartition, int]:
    """The plan in a file; of a file with several groups, the lines of this one.

    Raises:
        OptionError: a line cannot be read, stands there twice, or none is of this group.
    """
    found: dict[TopicPartition, int] = {}
    for number, row in enumerate(csv.reader(path.read_text(encoding="utf-8").splitlines()), 1):
        if not row:
            continue
        whose, *rest = row if len(row) == 4 else (group, *row)
        numbers = [cell.strip() for cell in rest[1:]]
        if len(rest) != 3 or not all(cell.isdecimal() for cell in numbers):
            raise OptionError(
                f"{path}, line {number}: {','.join(row)!r} is not topic,partition,offset, as "
                "kafka-consumer-groups --export writes it"
            )
        tp = TopicPartition(rest[0].strip(), int(numbers[0]))
        if whose.strip() != group:
            continue
        if tp in found:
            raise OptionError(f"{path}, line {number}: {tp} stands there twice")
        found[tp] = int(numbers[1])
    if not found:
        raise OptionError(f"{path} has no line of group {group!r}")
    return found
