"""Moves a group's committed offsets in Kafka and, with a table, its ledger to the same position.

Runs in: a terminal, the user's driver. Deliberately absent: the command line (:mod:`reset`), the Spark session (the
caller passes one for a ledger).

A reset has a number, which is stored in the metadata of every committed offset and in the ledger
(``protocol.identifiers``). Plans from before the reset are void: the batch in a stopped query's checkpoint cannot be
removed, but sink and source ignore it.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.text import Text

from spark_group_source import command_line
from spark_group_source.cli import common
from spark_group_source.cli.common import table_of
from spark_group_source.cli.report import DEAD, counted, group_with_members, missing_group
from spark_group_source.delta import table_names
from spark_group_source.delta.ledger_format import Ledger, LedgerDamaged
from spark_group_source.errors import BrokerUnavailable, GroupError, OptionError
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.translation import CommittedOffset, Topic
from spark_group_source.model import LATEST, StartAt, TopicPartition
from spark_group_source.options.table import EARLIEST_OFFSET, start_at
from spark_group_source.protocol import identifiers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ACTIVE = frozenset({"stable", "preparing_rebalancing", "completing_rebalancing", "assigning", "reconciling"})
"""States in which Kafka refuses to move a group's offsets: its members would overwrite them."""

Scope = Mapping[str, frozenset[int]]
"""Topics, each with the selected partitions; none: all partitions. An empty scope selects all that the group has."""

SHOWN_MAX = 5
"""How many clamped partitions are listed."""
NO_LEDGER = Ledger(group="")
"""In place of a table's ledger, if there is no table, or no ledger in it."""


class Shift(NamedTuple):
    """Move by this many offsets; negative: back."""

    by: int


class Offsets(NamedTuple):
    """An offset for each partition (-1 latest, -2 earliest). ``explicit``: the user named them, so a partition that
    does not exist is an error; otherwise it is left out."""

    each: Mapping[TopicPartition, int]
    explicit: bool = True


class Checkpoint(NamedTuple):
    """The end of the last finished batch of a checkpoint; or the start of ``batch``."""

    root: str
    batch: int | None = None


Position = StartAt | Shift | Offsets | Literal["current"]
Destination = Position | Checkpoint | Literal["ledger", "further"]
"""Where a group is moved to."""


@dataclass(frozen=True, slots=True)
class Move:
    """One partition of a :class:`GroupReset`. ``now``: its committed offset; None if the group has none. ``then``: the
    new one."""

    topic: str
    partition: int
    now: int | None
    then: int
    clamped_from: int | None = None
    """The requested offset, if it is outside the log; ``then`` is the nearest end of the log."""
    ledger: int | None = None
    """The next offset in the ledger of the table that is reset too; None: there is none of this partition."""


@dataclass(frozen=True, slots=True)
class GroupReset(JupyterMixin):
    """A planned or executed reset; notebooks show it as a table. ``number``: the reset number; None if nothing was
    changed. ``is_new``: whether the group did not exist before."""

    group: str
    moves: tuple[Move, ...]
    number: int | None
    is_new: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The reset as ``--json`` prints it. ``executed`` is false, and ``reset`` None, if nothing was changed."""
        rows = [asdict(one) for one in self.moves]
        return {"group": self.group, "executed": self.number is not None, "reset": self.number, "partitions": rows}

    def __rich__(self) -> RenderableType:
        done = "nothing was changed" if self.number is None else f"done, reset #{self.number}"
        names = {"now": "before", "ledger": "ledger", "then": "after"}
        if all(one.ledger is None for one in self.moves):
            del names["ledger"]
        rows = [(one.topic, str(one.partition), *(getattr(one, name) for name in names)) for one in self.moves]
        table = table_of("topic", "partition", *names.values(), rows=rows)
        return Group(Text(f"group {self.group}: {done}"), table, Text("\n".join(self.warnings())))

    def warnings(self) -> list[str]:
        """Lines about offsets that were clamped, and about records that the table gets once more."""
        again = sum(max(0, one.ledger - one.then) for one in self.moves if one.ledger is not None)
        twice = f"the table's ledger is {again:,} offsets ahead of the new ones: their records are written again"
        return self.clamped() + ([twice] if again else [])

    def clamped(self) -> list[str]:
        """One line for each partition whose requested offset is outside the log, at most SHOWN_MAX."""
        lines = [
            f"{one.topic}-{one.partition}: offset {wanted:,} is "
            f"{'after the end' if wanted > one.then else 'before the first record'} of the log; clamped to {one.then:,}"
            for one in self.moves
            if (wanted := one.clamped_from) is not None
        ]
        more = [f"and {len(lines) - SHOWN_MAX} more clamped partitions"] if len(lines) > SHOWN_MAX else []
        return lines[:SHOWN_MAX] + more


class Targets(NamedTuple):
    """The new offset of each partition, and the requested offset of each one that was clamped to its log."""

    offsets: Mapping[TopicPartition, int]
    clamped: Mapping[TopicPartition, int] = MappingProxyType({})
    by_commit: Set[TopicPartition] = frozenset()
    """Those whose new offset is that of their commit, or counted from it, and whose topics were not named."""
    named: Set[str] = frozenset()
    """Topics that the user named."""


def resolve_targets(admin: GroupAdmin, group: str, to: Position, scope: Scope, ledger: Ledger = NO_LEDGER) -> Targets:
    """The new offset of each partition. Partitions that do not exist any more are left out.

    Args:
        ledger: of the table that is reset too. Its offset is the current one of a partition whose committed offset is
            of a former topic.

    Raises:
        OptionError: a named partition does not exist, has no committed offset to shift, or none at this position.
        GroupError: the group does not exist, and no topics are named.
    """
    if isinstance(to, Offsets):
        _require_known(scope, to.each.keys())
        starts = {tp: start_at(at) for tp, at in to.each.items() if in_scope(tp, scope)}
    else:
        tps = partitions_of(admin, group, scope)
        if not tps and admin.describe_group(group).state == DEAD:
            raise missing_group(admin, group, "to create it, name the topics with --topic")
        starts = (
            dict.fromkeys(tps, to) if isinstance(to, StartAt) else _starts_by_commits(admin, group, to, tps, ledger)
        )
    found = resolve(admin, group, starts)
    if isinstance(to, Offsets) and to.explicit and (gone := sorted(starts.keys() - found.offsets.keys())):
        raise OptionError(f"partition {gone[0]} does not exist; create the topic, or leave the partition out")
    named = scope.keys() | ({tp.topic for tp in to.each} if isinstance(to, Offsets) and to.explicit else set())
    is_by_commit = not scope and (to == "current" or isinstance(to, Shift))
    return found._replace(by_commit=found.offsets.keys() if is_by_commit else frozenset(), named=named)


def _require_known(scope: Scope, known: Set[TopicPartition]) -> None:
    """Raise OptionError for what is selected and would be left out, because the position has no offset of it."""
    topics = {tp.topic for tp in known}
    selected = (TopicPartition(name, p) for name in topics & scope.keys() for p in scope[name])
    if unknown := [*(scope.keys() - topics), *(str(tp) for tp in selected if tp not in known)]:
        raise OptionError(
            f"this position has no offset of {min(unknown)}, or it does not exist any more, so it cannot be moved "
            "there. Correct the selected topics, or select none"
        )


def _starts_by_commits(
    admin: GroupAdmin, group: str, to: Shift | Literal["current"], tps: Sequence[TopicPartition], ledger: Ledger
) -> dict[TopicPartition, StartAt]:
    committed = admin.committed(group)
    current = {tp: at.offset for tp, at in committed.items()}
    if ledger.topics:
        topics = admin.existing_topics({tp.topic for tp in tps})
        for tp in of_former_topics(committed, NO_LEDGER, topics):
            in_table = ledger.offset_of(tp, topics[tp.topic].id)
            current[tp] = current[tp] if in_table is None else in_table
    if to == "current":  # without a committed offset the end, like Kafka's own tool
        return {tp: StartAt("offset", current[tp]) if tp in current else LATEST for tp in tps}
    if without := [tp for tp in tps if tp not in current]:
        raise OptionError(f"--shift-by {to.by}: group {group!r} has no committed offset of {without[0]} to shift")
    return {tp: StartAt("offset", max(0, current[tp] + to.by)) for tp in tps}


def of_former_topics(
    committed: Mapping[TopicPartition, CommittedOffset], ledger: Ledger, topics: Mapping[str, Topic]
) -> dict[TopicPartition, int]:
    """The committed offsets whose notes have another topic id than the topic has now, and of which the ledger does not
    know better."""

    def is_former(tp: TopicPartition, id_: str) -> bool:
        now = topics[tp.topic].id
        return "" not in (id_, now) and id_ != now and ledger.offset_of(tp, now) is None

    return {
        tp: at.offset
        for tp, at in committed.items()
        if tp.topic in topics
        and tp.partition < topics[tp.topic].partitions
        and is_former(tp, identifiers.parse_note(at.metadata).topic_id)
    }


def refuse_former_topics(
    admin: GroupAdmin,
    group: str,
    committed: Mapping[TopicPartition, CommittedOffset],
    ledger: Ledger,
    topics: Mapping[str, Topic],
    table: str | None,
    *,
    moved: Set[TopicPartition] = frozenset(),
) -> None:
    """Refuse a command that would keep offsets of former topics.

    Args:
        moved: the partitions that get another position.

    Raises:
        GroupError: it would. Its commands name all of these offsets, so that one of them is enough, and no partition
            that was read in the present topic.
    """
    former = of_former_topics(committed, ledger, topics)
    if not former.keys() - moved:
        return
    tp = min(former)
    read = {tp.topic for tp in committed.keys() - former.keys()}
    read |= {name for name, topic in topics.items() if ledger.offsets_of(name, topic.id)}
    of_all = scope_words(
        {name: frozenset(tp.partition for tp in former if tp.topic == name and name in read) for name, _ in former}
    )
    of_table = () if table is None else ("--table", table)

    def command(position: str) -> str:
        return command_line.spark_group("reset", admin.connection, group, position, *of_all, *of_table, "--execute")

    raise GroupError(
        f"topic {tp.topic} has another id ({topics[tp.topic].id}) than when group {group!r} committed offset "
        f"{former[tp]} of {tp}: the topic was deleted and recreated, or this is another cluster. If it was recreated, "
        "records of the new topic would never be read, so nothing was changed. Run one of these commands, then repeat "
        "yours:"
        + command_line.alternatives(
            {
                "read a recreated topic from its first record": command("--to-earliest"),
                "keep offsets that are right in another cluster": command("--to-current"),
            }
        )
    )


def recorded_offsets(
    admin: GroupAdmin, record: Ledger, position: tuple[str, ...], scope: Scope, *, table: str | None, ledger: Ledger
) -> Offsets:
    """The offsets that a ledger or a checkpoint has of the topics that exist now, which Kafka identifies by their ids.

    Args:
        record: the ledger; or the positions of a checkpoint in the form of one.
        position: the option that names the record, with its value.
        table: the table that is reset too.
        ledger: its ledger.

    Raises:
        GroupError: a topic was deleted and recreated since; its offsets in the record say nothing about its records.
    """
    names = [name for name in record.topics if not scope or name in scope]
    topics = admin.existing_topics(names)
    recreated = [name for name, topic in topics.items() if not record.knows_topic(name, topic.id)]
    if recreated:
        in_table = [n for n in recreated if n in ledger.topics and ledger.knows_topic(n, topics[n].id)]
        commands = [
            command_line.spark_group(
                "reset",
                admin.connection,
                record.group,
                *at,
                *scope_words({name: scope.get(name, frozenset()) for name in of}),
                *(() if table is None else ("--table", table)),
                "--execute",
            )
            for at, of in (
                (("--to-earliest",), set(recreated) - set(in_table)),
                (("--to-ledger",), set(in_table)),
                (position, topics.keys() - set(recreated)),
            )
            if of
        ]
        first, more = recreated[0], f" (and {len(recreated) - 1} more topics)" if len(recreated) > 1 else ""
        raise GroupError(
            f"topic {first}{more} was deleted and recreated: the offsets of {' '.join(position)} count records of the "
            f"topic with id {record.topics[first].id}, and in Kafka the topic has id {topics[first].id}. At these "
            "offsets records of the new topic would never be read, so nothing was changed. To read the new topic from "
            "its first record that is not in the table, and the other topics from these offsets:"
            + command_line.sequence(commands)
        )
    return Offsets(
        {
            TopicPartition(name, p): at
            for name, topic in topics.items()
            for p, at in record.offsets_of(name, topic.id).items()
        },
        explicit=False,
    )


def partitions_of(admin: GroupAdmin, group: str, scope: Scope) -> list[TopicPartition]:
    """The partitions to move: those of the scope, or all that the group ever committed.

    Raises:
        OptionError: a named partition does not exist.
    """
    if not scope:
        return sorted(admin.committed(group))
    there = topics_of(admin, scope)
    return [
        TopicPartition(name, p) for name, topic in there.items() for p in sorted(scope[name]) or range(topic.partitions)
    ]


def topics_of(admin: GroupAdmin, scope: Scope) -> dict[str, Topic]:
    """The topics of a scope.

    Raises:
        TopicMissing: a topic does not exist.
        OptionError: a named partition does not exist.
    """
    there = admin.require_topics(scope)
    for name, wanted in scope.items():
        if beyond := sorted(p for p in wanted if p >= there[name].partitions):
            raise OptionError(f"topic {name} has no partition {beyond[0]}; it has 0 to {there[name].partitions - 1}")
    return there


def in_scope(tp: TopicPartition, scope: Scope) -> bool:
    """Whether a partition is selected."""
    return not scope or (tp.topic in scope and (not scope[tp.topic] or tp.partition in scope[tp.topic]))


def resolve(admin: GroupAdmin, group: str, starts: Mapping[TopicPartition, StartAt]) -> Targets:
    """Resolve a position for each partition; an offset outside the log becomes its nearest end. Partitions that do not
    exist any more are left out.

    Latest is the last stable offset, or what the group has read beyond it; so is a time without a record. A named
    offset may be behind the last stable one: a group that reads uncommitted records has such positions while a
    transaction is open.

    Raises:
        BrokerUnavailable: as :func:`refuse_unanswered`.
    """
    named = {tp: at.value for tp, at in starts.items() if at.kind == "offset"}
    earliest = {tp for tp, at in starts.items() if at.kind == "earliest"}
    at_time = admin.offsets_at_time({tp: at.value for tp, at in starts.items() if at.kind == "time"})
    latest = {tp for tp, at in starts.items() if at.kind == "latest"}
    latest |= {tp for tp, at in at_time.items() if at is None}
    first = admin.earliest(earliest | named.keys())
    end = admin.latest(named, committed=False)
    inside = {tp: min(max(at, first[tp]), end[tp]) for tp, at in named.items() if tp in first and tp in end}
    found = {tp: at for tp, at in at_time.items() if at is not None}
    found |= {tp: at for tp, at in first.items() if tp in earliest}
    found |= _latest(admin, group, latest)
    found |= inside
    refuse_unanswered(admin, starts.keys() - found.keys())
    return Targets(found, {tp: named[tp] for tp, at in inside.items() if at != named[tp]})


def _latest(admin: GroupAdmin, group: str, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """The last stable offsets, or those that the group has read beyond them."""
    ends = admin.latest(tps)
    committed = admin.committed(group) if ends else {}
    beyond = [tp for tp, end in ends.items() if tp in committed and committed[tp].offset > end]
    log_ends = admin.latest(beyond, committed=False) if beyond else {}
    stable = {tp: end for tp, end in ends.items() if tp not in beyond}
    return stable | {tp: min(end, committed[tp].offset) for tp, end in log_ends.items()}


def refuse_unanswered(admin: GroupAdmin, missing: Set[TopicPartition]) -> None:
    """Refuse a command for which a broker reported a partition as unknown that exists. A leader does that for a moment
    when the partition was just added, or moved to it; without this check the partition would count as deleted.

    Args:
        missing: the partitions that the answers lack.

    Raises:
        BrokerUnavailable: one of them exists.
    """
    if missing and (existing := admin.existing_partitions(missing)):
        raise BrokerUnavailable(
            f"{min(existing)} exists, but its leader does not know it yet, so its offsets cannot be read and nothing "
            "was changed. Run the command again in a moment"
        )


class PlannedReset(NamedTuple):
    """One reset of a group. ``offsets`` contains every partition that the group ever committed, because the metadata of
    each one must contain the new reset number. ``notes``: that metadata."""

    reset_number: int
    offsets: dict[TopicPartition, int]
    notes: dict[TopicPartition, str]


def plan_reset(
    targets: Mapping[TopicPartition, int],
    committed: Mapping[TopicPartition, CommittedOffset],
    ledger: Ledger,
    topics: Mapping[str, Topic],
) -> PlannedReset:
    """The reset that moves a group to ``targets`` and keeps the position of every other partition.

    A partition that is not moved keeps its metadata, with the new number: a sink that has more of it than Kafka then
    leaves rows out instead of refusing the batch. So does one that stays where it is, of a topic that the table does
    not have: the group may write a table for each topic. The ledger decides about such a partition in two cases: it is
    ahead of Kafka, because a run's last offset commit was lost; or Kafka's offset is of a stream that did not know the
    last reset: the sink left its batch out, or the offset is that of a backup. It does not decide if its reset number
    is older than that of Kafka's offset, as after a reset with another table.

    Args:
        ledger: of the table that is reset too.
        topics: existing topics. Other partitions are left out: Kafka would refuse the whole commit for one of them.
    """
    notes = {tp: identifiers.parse_note(at.metadata) for tp, at in committed.items()}
    reset_number = 1 + max([note.reset_number for note in notes.values()] + [ledger.reset_number])
    former = of_former_topics(committed, NO_LEDGER, topics)  # of those, only the ledger's offsets count
    offsets = {tp: at.offset for tp, at in committed.items() if tp not in former}
    for tp, at in ledger.offsets.items():
        if tp.topic in topics and ledger.topics[tp.topic].is_same(topics[tp.topic].id):
            note = notes.get(tp)
            if note is None or note.reset_number <= ledger.reset_number or tp in former:
                offsets[tp] = at if _is_before_reset(note, ledger) else max(at, offsets.get(tp, 0))
    offsets |= targets
    offsets = {
        tp: at for tp, at in offsets.items() if tp.topic in topics and tp.partition < topics[tp.topic].partitions
    }
    texts = dict.fromkeys(offsets, identifiers.reset_text(reset_number))
    moved = {
        tp
        for tp, at in targets.items()
        if tp not in committed or at != committed[tp].offset or tp.topic in (ledger.topics or topics)
    }
    for tp in offsets.keys() & notes.keys() - moved:
        note = notes[tp]
        if note.stream is not None:
            started = note.started and offsets[tp] == committed[tp].offset
            note = note._replace(reset_number=reset_number, started=started, at_ms=None)
            texts[tp] = identifiers.note_text(note)
    return PlannedReset(reset_number, offsets, texts)


def _is_before_reset(note: identifiers.Note | None, ledger: Ledger) -> bool:
    """Whether this offset was set without knowing the table's last reset: by a stream whose batch the sink left out, or
    before the reset, if Kafka's offsets are those of a backup. Other consumers know no resets."""
    knows_resets = note is not None and (note.stream is not None or note.reset_number > 0)
    return note is not None and knows_resets and note.reset_number < ledger.reset_number


def _of_void_batch(note: identifiers.Note | None, ledger: Ledger) -> bool:
    """Whether the sink left out the batch of this commit. Records before any other one were read."""
    return note is not None and note.stream in ledger.void and _is_before_reset(note, ledger)


def table_version(spark: "SparkSession | None", table: str | None) -> int | None:
    """The version of the table from which a reset is planned; None without a table.

    Raises:
        OptionError: there is no such Delta table.
    """
    if spark is None or table is None:
        return None
    from spark_group_source.delta.table_writer import open_existing

    return open_existing(spark, table).history().version


def ledger_beside(spark: "SparkSession | None", table: str | None, group: str) -> Ledger:
    """The ledger of the table that is reset too; an unreadable one counts as none, because the reset replaces it."""
    if spark is None or table is None:
        return NO_LEDGER
    from spark_group_source.delta import ledger_store

    with contextlib.suppress(LedgerDamaged):
        return ledger_store.read_ledger(spark, table, group, to_reset=True) or NO_LEDGER
    return NO_LEDGER


def move(
    admin: GroupAdmin,
    group: str,
    to: Destination,
    scope: Scope,
    *,
    spark: "SparkSession | None",
    table: str | None,
    execute: bool,
) -> GroupReset:
    """Resolve a destination, and :func:`reset` the group to it. By a ledger only with a table. Raises as both."""
    if execute:
        require_inactive(admin, group)
    since = table_version(spark, table) if execute else None
    again: tuple[str, ...] = ()
    ledger = NO_LEDGER
    match to:
        case Checkpoint(root, batch):
            to = _of_checkpoint(admin, group, root, batch, scope, spark, table)
        case "ledger" | "further":
            assert spark is not None and table is not None
            again = (f"--to-{to}", *scope_words(scope))
            to = (_of_ledger if to == "ledger" else _of_further)(admin, group, table, spark, scope)
        case "current" | Shift():
            ledger = ledger_beside(spark, table, group)
    targets = resolve_targets(admin, group, to, scope, ledger)
    is_new = not admin.committed(group) and admin.describe_group(group).state == DEAD
    return reset(
        admin, group, targets, spark=spark, table=table, since=since, again=again, is_new=is_new, execute=execute
    )


def reset(
    admin: GroupAdmin,
    group: str,
    targets: Targets,
    *,
    spark: "SparkSession | None" = None,
    table: str | None = None,
    since: int | None = None,
    again: tuple[str, ...] = (),
    is_new: bool = False,
    execute: bool,
) -> GroupReset:
    """Plan a reset to these offsets; with ``execute``, move the group and then, with a table, its ledger.

    Kafka is first, because it refuses while the group is active. If the table is not updated afterwards (this process
    dies, Delta refuses), a query fails before it writes rows twice, and another reset with a higher number repairs it.
    In the other order every batch would be void, because the source would not know the reset.

    Args:
        since: the version of the table when the offsets were planned; None without a table.
        again: the options of a position that is read from the table, for the command that completes the reset after a
            failure; empty: the command names the offsets. (A relative position would move the group twice.)
        is_new: whether the group does not exist.

    Raises:
        GroupError: the group has members; stop them first, and retry. Or a topic that is not named has another id than
            when the group committed its offset. If Kafka may have moved offsets before any failure, a note of the
            exception has the command that completes the reset.
        OptionError: there is nothing to move, or rows of the table were replaced meanwhile.
        LedgerConflict: the table's ledger is of a newer release.
    """
    if execute:
        if not targets.offsets:
            raise OptionError(f"group {group!r} has no offsets to move; name the topics with --topic")
        require_inactive(admin, group)
    committed = admin.committed(group)
    ledger = ledger_beside(spark, table, group)
    known = [*targets.offsets, *committed, *ledger.offsets]
    topics = admin.existing_topics(tp.topic for tp in known)
    moved = targets.offsets.keys() - targets.by_commit
    refuse_former_topics(admin, group, committed, ledger, topics, table, moved=moved)
    held = {
        TopicPartition(name, p): n
        for name, topic in topics.items()
        for p, n in ledger.offsets_of(name, topic.id).items()
    }
    moves = tuple(
        Move(*tp, committed[tp].offset if tp in committed else None, at, targets.clamped.get(tp), held.get(tp))
        for tp, at in sorted(targets.offsets.items())
    )
    if not execute:
        return GroupReset(group, moves, None, is_new)
    found = plan_reset(targets.offsets, committed, ledger, topics)
    completion = _completion(admin, group, again or table_names.to_offsets(targets.offsets), table)
    try:
        admin.move_committed(group, found.offsets, notes=found.notes)
    except BaseException as exc:
        if getattr(exc, "fields", {}).get("moved") != 0:
            exc.add_note(f"Offsets of group {group} may be moved in Kafka already. {completion}")
        raise
    if spark is not None and table is not None:
        from spark_group_source.delta import ledger_store

        # With a table for each topic, no batch of this one would move the others' offsets: a later reset to its ledger
        # would read their records again.
        stored = ledger.topics.keys() | targets.named if ledger.topics else {tp.topic for tp in targets.offsets}
        offsets = {tp: at for tp, at in found.offsets.items() if tp.topic in stored}
        ids = {tp.topic: topics[tp.topic].id for tp in offsets}
        gone = {tp.topic for tp in known} - topics.keys()
        reason = f"spark-group reset {found.reset_number}"
        try:
            ledger_store.set_ledger(
                spark,
                table,
                group,
                offsets,
                reason=reason,
                topic_ids=ids,
                reset_number=found.reset_number,
                deleted=gone,
                since=since,
            )
        except BaseException as exc:
            exc.add_note(f"The offsets of group {group} are moved in Kafka already. {completion}")
            raise
    return GroupReset(group, moves, found.reset_number, is_new)


def _completion(admin: GroupAdmin, group: str, position: tuple[str, ...], table: str | None) -> str:
    """The sentence with the command that completes a reset of which Kafka has a part."""
    of_table = () if table is None else ("--table", table)
    command = command_line.spark_group("reset", admin.connection, group, *position, *of_table, "--execute")
    return f"To complete this reset:{command_line.sequence([command])}"


def scope_words(scope: Scope) -> tuple[str, ...]:
    """The options that select these topics and partitions."""
    texts = (f"{name}:{','.join(map(str, sorted(each)))}" if each else name for name, each in sorted(scope.items()))
    return tuple(word for text in texts for word in ("--topic", text))


def require_inactive(admin: GroupAdmin, group: str) -> None:
    """Refuse to move an active group, as Kafka does. A reset checks it also before it reads any position: the batch
    that a run commits last would make that position an older one, and its records would be written again.

    Raises:
        GroupError: the group has members, or its state is one of ACTIVE. Stop its queries and consumers, and retry.
    """
    described = admin.describe_group(group)
    if described.members or described.state in ACTIVE:
        members = counted(len(described.members), "member")
        raise group_with_members(
            group,
            f"is {described.state} with {members}: Kafka moves offsets only of an inactive group",
            "Stop its queries and consumers",
        )


def _of_ledger(admin: GroupAdmin, group: str, table: str, spark: "SparkSession", scope: Scope) -> Offsets:
    """The offsets of a table's ledger. Raises GroupError as :func:`recorded_offsets`."""
    from spark_group_source.delta.ledger_store import require_ledger

    ledger = require_ledger(spark, table, group, topics={tp.topic for tp in admin.committed(group)})
    return recorded_offsets(admin, ledger, ("--to-ledger",), scope, table=table, ledger=ledger)


def _of_further(admin: GroupAdmin, group: str, table: str, spark: "SparkSession", scope: Scope) -> Offsets:
    """The further one of the committed offset and the ledger, for each partition.

    The ledger is the newest one, also if rows that it counts were removed, or the one that fits the rows, if that is
    further. A topic that was recreated since keeps its committed offsets, or starts at its first records; committed
    offsets of the former topic are refused.
    """
    from spark_group_source.delta.ledger_store import counted_ledger

    committed = admin.committed(group)
    ledger = counted_ledger(spark, table, group, {tp.topic for tp in committed})
    topics = admin.existing_topics({tp.topic for tp in [*committed, *ledger.offsets]})
    refuse_former_topics(admin, group, committed, ledger, topics, table)
    former = of_former_topics(committed, NO_LEDGER, topics)  # the ledger has those partitions, or they were refused
    offsets = {tp: at.offset for tp, at in committed.items() if tp.topic in topics and tp not in former}
    for tp, at in ledger.offsets.items():
        if tp.topic not in topics:
            continue
        if not ledger.topics[tp.topic].is_same(topics[tp.topic].id):
            offsets.setdefault(tp, EARLIEST_OFFSET)
        else:
            note = identifiers.parse_note(committed[tp].metadata) if tp in committed else None
            offsets[tp] = at if _of_void_batch(note, ledger) else max(at, offsets.get(tp, 0))
    return Offsets({tp: at for tp, at in offsets.items() if in_scope(tp, scope)}, explicit=False)


def _of_checkpoint(
    admin: GroupAdmin,
    group: str,
    checkpoint: str,
    batch: int | None,
    scope: Scope,
    spark: "SparkSession | None",
    table: str | None,
) -> Offsets:
    from spark_group_source.delta.checkpoint import positions

    with common.checkpoint_files(checkpoint, spark) as (files, root):
        record = positions(files, root, group, batch)
    ledger = ledger_beside(spark, table, group)
    position = ("--to-checkpoint", checkpoint, *(() if batch is None else ("--batch", str(batch))))
    return recorded_offsets(admin, record, position, scope, table=table, ledger=ledger)
