"""``spark-group migrate``: a job changes over from Spark's own Kafka connector, or back to it.

Runs in: a terminal. Deliberately absent: the files of a checkpoint (``delta.checkpoint``), and what a group commits
(``reset``).

The connector's offset is JSON, ``{"orders":{"0":23,"1":5}}``: where the batch ends, of every partition that the source
knows (``JsonUtils`` and ``KafkaSourceOffset`` of Spark). A new batch begins where the last one ended, so the end of the
last finished batch is where whoever takes over begins.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from spark_group_source.cli import reset, shared
from spark_group_source.cli.report import DEAD, not_there
from spark_group_source.cli.reset import Scope, TopicsOption, in_scope, scope_of
from spark_group_source.cli.shared import ConfigOption, GroupOption, JsonOption, ServersOption, TableOption, console
from spark_group_source.errors import CheckpointMismatch, GroupError, OptionError
from spark_group_source.kafka import GroupAdmin
from spark_group_source.model import TopicPartition
from spark_group_source.options.starting import EARLIEST_OFFSET

if TYPE_CHECKING:
    from spark_group_source.delta.checkpoint import CheckpointFiles

NO_OFFSET = "-"
"""Stands for a source that has none so far."""


class Progress(NamedTuple):
    """Where a query of Spark's own Kafka connector stands."""

    batch: int
    """The last finished one."""
    offsets: dict[TopicPartition, int]
    source: dict[TopicPartition, str]
    """The source of the query that a partition is of."""
    others: int = 0
    """Sources of other kinds in the query."""
    stateful: bool = False
    """The checkpoint also holds what the query remembers: aggregations, deduplication, joins of streams."""


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
        Path | None, typer.Option("--out", dir_okay=False, help="With --to-checkpoint: write it to this file.")
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Do it; without this it is only shown.")] = False,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take over where a stopped query of Spark's own Kafka connector was, or show that connector where to go on.

    With --from-checkpoint the group's offsets become those of the query's last finished batch. With --to-checkpoint
    they are printed as the connector's option startingOffsets; with --table the table's ledger counts too, where a
    query was stopped before Kafka knew of its last batch.
    """
    if (from_checkpoint is None) != to_checkpoint:
        raise OptionError("say which way: exactly one of --from-checkpoint and --to-checkpoint")
    there = {"--source": bool(source), "--execute": execute}
    back = {"--table": table is not None, "--out": out is not None}
    if wrong := [name for name, given in (there if to_checkpoint else back).items() if given]:
        raise OptionError(f"{wrong[0]} does not go with --{'to' if to_checkpoint else 'from'}-checkpoint")
    scope = scope_of(topic or [])
    admin = shared.admin_of(bootstrap_servers, group, command_config)
    if from_checkpoint is None:
        text = json.dumps(_back(admin, group, table, scope))
        if out is None:
            typer.echo(text)
        else:
            _write(out, f"{text}\n")
        return
    with shared.checkpoint_files(from_checkpoint) as (files, root):
        found = progress(files, root, source or [])
    done = reset.reset(admin, group, targets_of(admin, found, scope), execute=execute)
    if as_json:
        typer.echo(json.dumps(done.as_dict() | {"batch": found.batch}, indent=2))
        return
    console.print(done)
    typer.echo(f"the query's last finished batch is {found.batch}")
    if found.stateful:
        typer.echo(
            "the query keeps state in its checkpoint, which does not move along: the new query begins without it"
        )
    if found.others:
        typer.echo(f"{found.others} sources of other kinds are in the query too; they stay where they are")
    typer.echo(
        f"moved {len(done.moves)} partitions of group {group}; start the new query with this kafka.group.id and a new "
        "checkpointLocation"
        if execute
        else "nothing was changed; stop the old query for good, and add --execute to do it"
    )


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise OptionError(f"--out {out} cannot be written: {exc.strerror}. Nothing was changed") from None


def progress(files: "CheckpointFiles", root: str, sources: Collection[str] = ()) -> Progress:
    """Where the query of a checkpoint stands.

    Args:
        sources: only these sources of the query, by their numbers (or names, where it has some).

    Raises:
        OptionError: this is no such checkpoint, or it has none of those sources.
        CheckpointMismatch: the last batch is not finished, or the offsets cannot be read, or they contradict each
            other.
    """
    from spark_group_source.delta.checkpoint import batch_lines

    number, lines = batch_lines(files, root, all_finished=True)
    if unknown := sorted(set(sources) - lines.keys()):
        raise OptionError(f"{root} has no source {unknown[0]!r}; it has {', '.join(sorted(lines))}", checkpoint=root)
    found = Progress(number, {}, {}, stateful=bool(files.names(f"{root}/state")))
    others = 0
    for source, line in sorted(lines.items()):
        if (sources and source not in sources) or line == NO_OFFSET:
            continue
        offsets = _offsets(line, root)
        if offsets is None:
            others += 1
            continue
        for tp, at in offsets.items():
            if found.offsets.setdefault(tp, at) != at:
                raise CheckpointMismatch(
                    f"{root}: sources {found.source[tp]} and {source} both read {tp}, up to {found.offsets[tp]} and up "
                    f"to {at}. A group has one offset of a partition: take over one at a time, each into a group of "
                    f"its own, with --source {found.source[tp]} and --source {source}",
                    checkpoint=root,
                )
            found.source.setdefault(tp, source)
    if not found.offsets:
        raise OptionError(
            f"{root} has no source of Spark's Kafka connector with a partition, but {others} of other kinds",
            checkpoint=root,
        )
    return found._replace(others=others)


def _offsets(line: str, root: str) -> dict[TopicPartition, int] | None:
    """The connector's offset; None for a source of another kind, or one that has none so far."""
    from spark_group_source.delta.checkpoint import is_kafka_group

    if is_kafka_group(line):
        raise OptionError(
            f"{root} is the checkpoint of a kafka-group query, whose group has its offsets. To move the group to it: "
            "spark-group reset --to-checkpoint",
            checkpoint=root,
        )
    try:
        doc = json.loads(line)
        if not isinstance(doc, dict) or not all(isinstance(entry, dict) for entry in doc.values()):
            return None
        found = {TopicPartition(topic, int(p)): at for topic, entry in doc.items() for p, at in entry.items()}
    except ValueError:
        return None
    return found if all(type(at) is int and at >= 0 for at in found.values()) else None


def targets_of(admin: GroupAdmin, found: Progress, scope: Scope) -> dict[TopicPartition, int]:
    """What the group is to commit: where the query was, and the first record of partitions that it had not seen yet.

    An offset before the first record that is still there stays as it is: `failOnDataLoss` decides what then.

    Raises:
        OptionError: a partition is not there, or ends before that offset.
    """
    offsets = {tp: at for tp, at in found.offsets.items() if in_scope(tp, scope)}
    topics = admin.require_topics({tp.topic for tp in offsets})
    every = {TopicPartition(name, p) for name, topic in topics.items() for p in range(topic.partitions)}
    first, end = admin.earliest(every), admin.latest(every)
    for tp, at in sorted(offsets.items()):
        if tp not in end or at > end[tp]:
            is_now = f"ends at {end[tp]}" if tp in end else "does not exist"
            raise OptionError(
                f"the checkpoint says {at} of {tp}, which {is_now}: the topic was made again since, or this is another "
                "cluster. To leave it out, name the other topics with --topic"
            )
    unseen = {tp: at for tp, at in first.items() if tp not in offsets and in_scope(tp, scope)}
    return offsets | unseen


def _back(admin: GroupAdmin, group: str, table: str | None, scope: Scope) -> dict[str, dict[str, int]]:
    """``startingOffsets`` of every partition of the group's topics."""
    described = admin.describe_group(group)
    if described.members:
        raise GroupError(
            f"group {group!r} has {len(described.members)} members, so its offsets still move. Drain its queries "
            "(spark-group drain), stop them, and do this again",
            group=group,
        )
    committed = admin.committed(group)
    ledger = None
    with shared.session(table is not None) as spark:
        if spark is not None and table is not None:
            from spark_group_source.delta.ledger_store import require_ledger

            ledger = require_ledger(spark, table, group)
    if described.state == DEAD and not committed and ledger is None:
        raise not_there(group)
    known = {tp.topic for tp in (*committed, *(ledger.offsets if ledger else ()))}
    topics = admin.existing_topics(known)
    offsets: Mapping[TopicPartition, int] = reset.plan({}, committed, ledger, topics).offsets
    found: dict[str, dict[str, int]] = {}
    for name, there in sorted(topics.items()):
        for tp in (TopicPartition(name, p) for p in range(there.partitions)):
            if in_scope(tp, scope):
                found.setdefault(name, {})[str(tp.partition)] = offsets.get(tp, EARLIEST_OFFSET)
    return found
