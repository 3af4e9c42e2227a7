"""Moving a group on purpose: Kafka's committed offsets, and with a table its ledger, to the same place.

Runs in: a terminal, the user's driver. Deliberately absent: words of the command line (``move``), and the Spark session
(the caller passes one where a ledger is to be moved too).

A reset has a number, which is written beside every offset of the group and into the ledger (``group.names``). What was
planned before it is void: a batch that a stopped query has in its checkpoint can no longer be taken back, but neither
the sink nor the source goes by it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.text import Text

from spark_group_source.cli.report import DEAD, not_there
from spark_group_source.cli.shared import table_of
from spark_group_source.delta.ledger import Ledger, LedgerDamaged
from spark_group_source.errors import GroupError, OptionError
from spark_group_source.group import names
from spark_group_source.kafka import CommittedOffset, GroupAdmin, Topic
from spark_group_source.model import StartAt, TopicPartition
from spark_group_source.options.starting import EARLIEST_OFFSET, LATEST_OFFSET

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    if not tps and admin.group(group).state == DEAD:
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
    there = admin.require(scope)
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
        found = admin.at_time(dict.fromkeys(tps, to.value))
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

    epoch: int
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
    notes = {tp: names.parse_note(at.metadata) for tp, at in committed.items()}
    epoch = 1 + max([note.epoch for note in notes.values()] + [0 if ledger is None else ledger.epoch])
    offsets = {tp: at.offset for tp, at in committed.items()}
    if ledger is not None:
        for tp, at in ledger.offsets.items():
            if tp.topic in topics and ledger.topic_ids.get(tp.topic) in (None, "", topics[tp.topic].id):
                note = notes.get(tp)
                if note is not None and note.epoch > ledger.epoch:
                    continue
                offsets[tp] = at if _of_void_batch(note, ledger) else max(at, offsets.get(tp, 0))
    offsets |= targets
    offsets = {
        tp: at for tp, at in offsets.items() if tp.topic in topics and tp.partition < topics[tp.topic].partitions
    }
    texts = dict.fromkeys(offsets, names.reset_text(epoch))
    for tp in offsets.keys() & notes.keys() - targets.keys():
        note = notes[tp]
        if note.stream is not None:
            texts[tp] = names.note_text(note.stream, note.seq, epoch, followed=note.followed, cut=note.cut)
    return Reset(epoch, offsets, texts)


def _of_void_batch(note: names.Note | None, ledger: Ledger) -> bool:
    """Whether the stream that made a commit had a batch left out for a reset that it did not know of."""
    return note is not None and note.stream in ledger.void and note.epoch < ledger.epoch


def reset(
    admin: GroupAdmin,
    group: str,
    targets: Mapping[TopicPartition, int],
    *,
    spark: "SparkSession | None" = None,
    table: str | None = None,
    execute: bool,
) -> GroupReset:
    """What a reset to these offsets does; with ``execute`` it is done, as of :func:`move`."""
    committed = admin.committed(group)
    moves = tuple(
        Move(tp.topic, tp.partition, committed[tp].offset if tp in committed else None, at)
        for tp, at in sorted(targets.items())
    )
    number = move(admin, group, targets, spark=spark, table=table) if execute else None
    return GroupReset(group, moves, number)


def move(
    admin: GroupAdmin,
    group: str,
    targets: Mapping[TopicPartition, int],
    *,
    spark: "SparkSession | None",
    table: str | None,
) -> int:
    """Bring the group to the targets and then, with a table, its ledger too. Returns the number of the reset.

    Kafka goes first: it refuses while the group is active. If the table does not follow (this process dies, Delta
    refuses), a query stops where it would write something twice, and says so; another reset settles it, because its
    number is higher. The other way round every batch would be void, as the source had never heard of the reset.

    Raises:
        GroupError: the group has members; stop them first.
        OptionError: there is nothing to move.
        LedgerConflict: the table's ledger is of a newer release.
    """
    if not targets:
        raise OptionError(f"group {group!r} has no offsets to move; name the topics with --topic")
    described = admin.group(group)
    if described.members or described.state in ACTIVE:
        raise GroupError(
            f"group {group!r} is {described.state} with {len(described.members)} members: Kafka moves offsets only of "
            "an inactive group. Stop its queries and consumers, and wait for their session timeout",
            group=group,
        )
    ledger = None if spark is None or table is None else _ledger(spark, table, group)
    committed = admin.committed(group)
    known = [*targets, *committed, *({} if ledger is None else ledger.offsets)]
    topics = admin.existing(tp.topic for tp in known)
    reset = plan(targets, committed, ledger, topics)
    admin.move_committed(group, reset.offsets, notes=reset.notes)
    if spark is not None and table is not None:
        from spark_group_source.delta.kept import set_ledger

        ids = {tp.topic: topics[tp.topic].id for tp in reset.offsets}
        reason = f"spark-group reset {reset.epoch}"
        gone = {tp.topic for tp in known} - topics.keys()
        set_ledger(spark, table, group, reset.offsets, reason=reason, topic_ids=ids, epoch=reset.epoch, deleted=gone)
    return reset.epoch


def _ledger(spark: "SparkSession", table: str, group: str) -> Ledger | None:
    """The ledger, or None where there is none or nobody can read it: then it is written anew."""
    from spark_group_source.delta.kept import read_ledger

    try:
        return read_ledger(spark, table, group)
    except LedgerDamaged:
        return None
