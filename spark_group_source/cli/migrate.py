"""``spark-group migrate``: move a job from Spark's own Kafka connector to this source, or back.

Runs in: a terminal. Deliberately absent: the files of a checkpoint (``delta.checkpoint``), and what a group commits
(``reset``).

The connector's offset is JSON, ``{"orders":{"0":23,"1":5}}``: the end of the batch for every partition that the source
knows (``JsonUtils`` and ``KafkaSourceOffset`` of Spark). A new batch starts where the last one ended, so the next
reader starts at the end of the last finished batch.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from spark_group_source import command_line
from spark_group_source.cli import common, group_reset
from spark_group_source.cli.common import ConfigOption, GroupOption, JsonOption, ServersOption, TableOption, console
from spark_group_source.cli.group_reset import Scope, in_scope, partitions_of, refuse_unanswered, topics_of
from spark_group_source.cli.report import DEAD, counted, group_with_members, missing_group
from spark_group_source.cli.reset import TopicsOption, scope_of
from spark_group_source.errors import CheckpointMismatch, OptionError
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import EARLIEST_OFFSET

if TYPE_CHECKING:
    from spark_group_source.delta.checkpoint import CheckpointFiles

NO_OFFSET = "-"
"""Entry of a source that has no offset yet."""


class Progress(NamedTuple):
    """Position of a query of Spark's own Kafka connector."""

    batch: int
    """Number of the last finished batch."""
    offsets: dict[TopicPartition, int]
    """The next offset of each partition after that batch."""
    source: dict[TopicPartition, str]
    """The query's source that reads each partition."""
    others: int = 0
    """Number of other sources in the query."""
    stateful: bool = False
    """Whether the checkpoint contains state: aggregations, deduplication, stream joins."""


def migrate(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    from_checkpoint: Annotated[
        str | None,
        typer.Option("--from-checkpoint", metavar="DIR", help="The checkpointLocation of a query of format('kafka')."),
    ] = None,
    to_checkpoint: Annotated[
        bool, typer.Option("--to-checkpoint", help="Print startingOffsets for a query of format('kafka').")
    ] = False,
    source: Annotated[
        list[str] | None,
        typer.Option("--source", help="With --from-checkpoint: only this source of the query, such as 0; repeatable."),
    ] = None,
    topic: TopicsOption = None,
    table: TableOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", dir_okay=False, help="With --to-checkpoint: write the JSON to this file.")
    ] = None,
    execute: common.ExecuteOption = False,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take over the position of a stopped query of Spark's Kafka connector, or export the group's for that connector.

    With --from-checkpoint the group's offsets are set to the query's last finished batch. With --to-checkpoint the
    group's offsets are printed as the connector's option startingOffsets; with --table the table's ledger is used too,
    for a query that was stopped before its last offsets were committed.
    """
    if (from_checkpoint is None) != to_checkpoint:
        raise common.UsageError("give exactly one of --from-checkpoint and --to-checkpoint")
    there = {"--source": bool(source), "--execute": execute}
    back = {"--table": table is not None, "--out": out is not None}
    if wrong := [name for name, given in (there if to_checkpoint else back).items() if given]:
        raise common.UsageError(f"{wrong[0]} cannot be used with --{'to' if to_checkpoint else 'from'}-checkpoint")
    scope = scope_of(topic or [])
    with common.admin_of(bootstrap_servers, group, command_config) as admin:
        if from_checkpoint is None:
            text = json.dumps(_starting_offsets(admin, group, table, scope))
            if out is None:
                typer.echo(text)
            else:
                _write(out, f"{text}\n")
            return
        with common.checkpoint_files(from_checkpoint) as (files, root):
            found = progress(files, root, source or [], to_brokers=admin.connection)
        done = group_reset.reset(admin, group, group_reset.Targets(group_offsets(admin, found, scope)), execute=execute)
    if as_json:
        more = {"batch": found.batch, "stateful": found.stateful, "other_sources": found.others}
        typer.echo(json.dumps(done.as_dict() | more, indent=2))
        return
    console.print(done)
    typer.echo(f"the query's last finished batch is {found.batch}")
    if found.stateful:
        typer.echo("the query keeps state in its checkpoint, which is not moved: the new query starts without it")
    if found.others:
        moved = "which is not moved" if found.others == 1 else "which are not moved"
        typer.echo(f"the query has {counted(found.others, 'other source')}, {moved}")
    typer.echo(
        f"moved {counted(len(done.moves), 'partition')} of group {group}; start the new query with this kafka.group.id "
        "and a new checkpointLocation"
        if execute
        else "stop the old query, then add --execute"
    )


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise OptionError(f"--out {out} cannot be written: {exc.strerror}. Nothing was changed") from None


def progress(
    files: "CheckpointFiles",
    root: str,
    sources: Collection[str] = (),
    *,
    to_brokers: command_line.Connection = command_line.UNKNOWN,
) -> Progress:
    """The position of a checkpoint's query.

    Args:
        sources: only these sources of the query, by number, or by name if they have names.
        to_brokers: the arguments with which the command in an error connects.

    Raises:
        OptionError: the checkpoint has another format, or none of those sources.
        CheckpointMismatch: the last batch is not finished, or the offsets are unreadable or contradict each other.
    """
    from spark_group_source.delta.checkpoint import batch_lines

    number, lines = batch_lines(files, root, all_finished=True)
    if unknown := sorted(set(sources) - lines.keys()):
        raise OptionError(f"{root} has no source {unknown[0]!r}; it has {', '.join(sorted(lines))}")
    found = Progress(number, {}, {}, stateful=bool(files.names(f"{root}/state")))
    others = 0
    for source, line in sorted(lines.items()):
        if (sources and source not in sources) or line == NO_OFFSET:
            continue
        offsets = _offsets(line, root, to_brokers)
        if offsets is None:
            others += 1
            continue
        for tp, at in offsets.items():
            if found.offsets.setdefault(tp, at) != at:
                raise CheckpointMismatch(
                    f"{root}: sources {found.source[tp]} and {source} both read {tp}, up to {found.offsets[tp]} and up "
                    f"to {at}. A group has one offset for each partition: migrate one source at a time, each to its "
                    f"own group, with --source {found.source[tp]} and --source {source}"
                )
            found.source.setdefault(tp, source)
    if not found.offsets:
        why = f"it has {others} other sources" if others else "the query has read no partition yet"
        raise OptionError(f"{root} has no position of Spark's Kafka connector: {why}")
    return found._replace(others=others)


def _offsets(line: str, root: str, to_brokers: command_line.Connection) -> dict[TopicPartition, int] | None:
    """The connector's offset; None for another source, or one without an offset yet."""
    from spark_group_source.delta.checkpoint import is_kafka_group

    if is_kafka_group(line):
        try:
            group = str(json.loads(line)["group"])
        except ValueError as exc:
            raise CheckpointMismatch(f"{root}: the offset of its kafka-group source is damaged") from exc
        back = command_line.spark_group("reset", to_brokers, group, "--to-checkpoint", root, "--execute")
        raise OptionError(
            f"{root} is the checkpoint of a kafka-group query: its group {group!r} has its offsets. To move the "
            f"group back to the checkpoint: {command_line.in_sentence(back)}"
        )
    try:
        doc = json.loads(line)
        if not isinstance(doc, dict) or not all(isinstance(entry, dict) for entry in doc.values()):
            return None
        found = {TopicPartition(topic, int(p)): at for topic, entry in doc.items() for p, at in entry.items()}
    except ValueError:
        return None
    return found if all(type(at) is int and at >= 0 for at in found.values()) else None


def group_offsets(admin: GroupAdmin, found: Progress, scope: Scope) -> dict[TopicPartition, int]:
    """The offsets to commit: the query's position, and the first record of partitions that it had not discovered yet.

    An offset before the first existing record is kept: `failOnDataLoss` decides what the new query does.

    Raises:
        OptionError: a partition of the query or of ``scope`` does not exist, or ends before the query's offset.
        BrokerUnavailable: a partition exists, but its leader does not know it yet.
    """
    _require_read(scope, {tp.topic for tp in found.offsets}, "the checkpoint")
    offsets = {tp: at for tp, at in found.offsets.items() if in_scope(tp, scope)}
    topics = topics_of(admin, scope) if scope else admin.existing_topics({tp.topic for tp in offsets})
    every = {TopicPartition(name, p) for name, topic in topics.items() for p in range(topic.partitions)}
    every -= {tp for tp in every if not in_scope(tp, scope)}
    first, end = admin.earliest(every), admin.latest(every, committed=False)  # the connector reads uncommitted records
    refuse_unanswered(admin, every - (first.keys() & end.keys()))
    for tp, at in sorted(offsets.items()):
        if tp not in end or at > end[tp]:
            is_now = f"ends at {end[tp]}: the topic was" if tp in end else "does not exist: the topic was deleted or"
            raise OptionError(
                f"the checkpoint has offset {at} of {tp}, which {is_now} recreated, or this is another cluster. To "
                "leave it out, select the other topics with --topic"
            )
    return first | offsets


def _require_read(scope: Scope, known: Collection[str], where: str) -> None:
    """Raise OptionError for a topic of the scope that is not known."""
    if unread := sorted(scope.keys() - set(known)):
        raise OptionError(
            f"{where} has no offset of topic {', '.join(unread)}; it has {', '.join(sorted(known)) or 'none'}. Correct "
            "--topic, or leave it out"
        )


def _starting_offsets(admin: GroupAdmin, group: str, table: str | None, scope: Scope) -> dict[str, dict[str, int]]:
    """``startingOffsets`` of every partition of the group's topics."""
    described = admin.describe_group(group)
    if described.members:
        raise group_with_members(
            group,
            f"has {counted(len(described.members), 'member')}, so its offsets may still change",
            f"Drain its queries (`{command_line.spark_group('drain', (), group)}`), stop them",
        )
    committed = admin.committed(group)
    ledger = group_reset.NO_LEDGER
    if table is not None:
        from spark_group_source.delta.ledger_store import require_ledger

        with common.session() as spark:
            ledger = require_ledger(spark, table, group, topics={tp.topic for tp in committed})
    if described.state == DEAD and not committed and table is None:
        raise missing_group(admin, group)
    known = {tp.topic for tp in (*committed, *ledger.offsets)}
    _require_read(scope, known, f"group {group!r}")
    partitions_of(admin, group, scope)  # refuses partitions that do not exist
    topics = admin.existing_topics(known)
    group_reset.refuse_former_topics(admin, group, committed, ledger, topics, table)
    offsets: Mapping[TopicPartition, int] = group_reset.plan_reset({}, committed, ledger, topics).offsets
    found: dict[str, dict[str, int]] = {}
    for name, there in sorted(topics.items()):
        for tp in (TopicPartition(name, p) for p in range(there.partitions)):
            if in_scope(tp, scope):
                found.setdefault(name, {})[str(tp.partition)] = offsets.get(tp, EARLIEST_OFFSET)
    return found
