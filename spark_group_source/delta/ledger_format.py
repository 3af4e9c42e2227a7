"""The ledger of a group: which records of the group a table holds, as JSON in the table's commits.

Runs in: the user's driver, the command line, tests. Deliberately absent: any I/O, and what the ledger means for a batch
(:mod:`ledger_decision`).

Each commit of a group has the group's whole ledger after that commit in its note (:mod:`table_history`); "Ledger note"
in ``docs/formats.md`` explains each member. The ledger does *not* follow the rows: after ``RESTORE``, ``REPLACE`` or
``DELETE`` it still says what was written.

- ``streams`` has the last batch of each stream, by which a replay is recognised.
- ``reset``: a batch that was planned before the group's newest reset is *void*: its positions are older than the reset,
  so none of its rows is written. ``void`` names the streams that had such a batch since.
- ``former``: a topic that was deleted and recreated has other records at the same offsets, and another id. A stream
  that does not know the new id yet may still plan batches with the former one, so a batch is compared with the offsets
  under the id by which it was planned.
- ``new``: a ``RESTORE`` may lead back to the first offset of a partition.
"""

import base64
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from spark_group_source import command_line
from spark_group_source.errors import LedgerConflict
from spark_group_source.host import run_files
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import BatchKey, StreamOffset

VERSION = 1

APP_PREFIX = "spark-group-source."
"""Precedes the group in the application id whose ``SetTransaction`` counts the group's commits."""

STREAMS_MAX = 50
"""How many streams that are not void are kept; the one that wrote least recently is removed first. A replay of its last
batch is then compared by its offsets, like a new batch."""

FORMER_MAX = 1000
"""How many former topics are kept; the one that became former first is removed first."""

SHOWN_CHARS_MAX = 200
"""How much of a damaged ledger an error shows."""

PLAIN_CHARS_MAX = 4_000
"""Longest JSON of all topics that is not compressed. That of 10,000 partitions has 110 KB, and each commit has it."""

COMPRESSED = "zlib:"
"""Precedes compressed JSON in base64."""

LATER_MAX = 2
"""How many later leader epochs a ledger keeps of a partition: each of them takes as many bytes as the offset."""

_RUNS = re.compile(r"(?:\d+(?:,-?\d+)+(?:;(?=\d)|$))*")


class LedgerDamaged(LedgerConflict):
    """The ledger cannot be read: which records the table holds is unknown."""


class LaterRows(NamedTuple):
    """Rows of a partition that were read under later leader epochs than the others."""

    epoch: int
    """All of them were read under this leader epoch, or under later ones."""
    start: int
    """Where they begin; they end where the rows of the partition end."""


@dataclass(slots=True, kw_only=True)
class LedgerPartition:
    """The records of one partition that a table holds."""

    offset: int | None = None
    """The next offset to write; None if the table has no rows of the partition."""
    epoch: int = 0
    """The earliest leader epoch under which rows from the present log were read, which is that of the first range, or
    of the newest truncation that the offset follows; 0 if it is unknown."""
    gone: int | None = None
    """If the log was truncated: the last leader epoch that was known before the newest truncation. What the log has of
    such epochs ends there."""
    ahead: int | None = None
    """If the offset followed a truncation back to below rows of the present log, which another stream had read before:
    the end of these rows. They begin where those in ``later`` do."""
    later: tuple[LaterRows, ...] = ()
    """The rows that were read under later leader epochs than ``epoch``, at most LATER_MAX, the newest last. Each of
    them has an offset and an epoch above those of the one before."""

    @property
    def end(self) -> int:
        """The offset after the last row."""
        return max(self.offset or 0, self.ahead or 0)


_UNKNOWN = LedgerPartition()


class LedgerTopic(NamedTuple):
    """The records of one topic that a table holds."""

    name: str
    id: str
    """The topic id; empty where brokers do not report ids (before 2.8): then every topic of that name is the same."""
    partitions: Mapping[int, LedgerPartition] = MappingProxyType({})
    """What is known of every partition that was ever read, by number. They are not changed."""

    @property
    def offsets(self) -> dict[int, int]:
        """The next offset to write of every partition, by number."""
        return {p: rows.offset for p, rows in self.partitions.items() if rows.offset is not None}

    def partition(self, number: int) -> LedgerPartition:
        """Return a copy of what is known of one partition."""
        return replace(self.partitions.get(number, _UNKNOWN))

    def with_partitions(self, changed: Mapping[int, LedgerPartition]) -> "LedgerTopic":
        """Return the topic with other members of some partitions."""
        partitions = {**self.partitions, **changed}
        return self._replace(partitions={p: rows for p, rows in partitions.items() if rows != _UNKNOWN})

    def is_same(self, id_: str) -> bool:
        """Return whether a topic of this name with that id is this topic."""
        return not self.id or not id_ or self.id == id_


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The records of one group that a table holds."""

    group: str
    topics: Mapping[str, LedgerTopic] = field(default_factory=dict)
    """The present topics by name, in the order in which they were first read."""
    former: Mapping[str, LedgerTopic] = field(default_factory=dict)
    """The former topics by id, in the order in which they became former."""
    streams: Mapping[str, BatchKey] = field(default_factory=dict)
    """The newest batch of each stream, in the order in which the streams wrote last."""
    void: frozenset[str] = frozenset()
    """The streams that had a void batch since the newest reset."""
    reset_number: int = 0
    """The number of the newest reset that the table knows; 0: the group was never reset."""
    number: int = 0
    """The ``SetTransaction`` number of the group's newest commit; 0: there is none."""
    table_version: int = -1
    """The version of the table for which this ledger is known to be the newest; -1: none."""

    @property
    def offsets(self) -> dict[TopicPartition, int]:
        """The next offset of every partition of the present topics."""
        return {TopicPartition(name, p): n for name, topic in self.topics.items() for p, n in topic.offsets.items()}

    # --- JSON ---------------------------------------------------------------------------------------------------------

    def to_json_dict(
        self,
        before: "Ledger | None" = None,
        starts: Mapping[TopicPartition, int] = MappingProxyType({}),
        *,
        now_ms: int = 0,
    ) -> dict[str, Any]:
        """Return the ledger as JSON in the commit that writes it, whose ranges begin at ``starts``. The time, in ms
        since 1970, distinguishes the commits of two writers with one number and equal ledgers."""
        new = self._new(before, starts)
        return {
            "number": self.number,
            "reset": self.reset_number,
            "streams": dict(self.streams),
            "v": VERSION,
            "void": sorted(self.void),
            **({"new": _packed(new)} if new else {}),
            "former": _packed({i: {"name": topic.name, **_numbers_of(topic)} for i, topic in self.former.items()}),
            "topics": _packed({name: {"id": topic.id, **_numbers_of(topic)} for name, topic in self.topics.items()}),
            "written": now_ms,
        }

    def _new(self, before: "Ledger | None", starts: Mapping[TopicPartition, int]) -> dict[str, str]:
        """Return the partitions that were not in the ledger before, with the number of offsets that they moved."""
        found = {}
        for name, topic in self.topics.items():
            known = {} if before is None else before.offsets_of(name, topic.id)
            new = {p: n - starts.get(TopicPartition(name, p), n) for p, n in topic.offsets.items() if p not in known}
            if new:
                found[name] = _runs(new)
        return found

    @classmethod
    def from_json(
        cls, group: str, doc: Mapping[str, Any], *, table: str = "TABLE", table_version: int = -1
    ) -> "Ledger":
        """Read a ledger from its parsed JSON in a version of a table.

        Raises:
            LedgerDamaged: it cannot be read. No value is assumed in its place.
            LedgerConflict: a newer release wrote it.
        """
        try:
            if doc["v"] != VERSION:
                raise LedgerConflict(
                    f"the ledger of group {group!r} in table {table} has format version {doc['v']!r}, and this release "
                    f"reads version {VERSION}. Run the release that wrote it, or a newer one",
                    group=group,
                    found=doc["v"],
                )
            _number(doc["written"])  # no member may be damaged, this one neither
            first_offsets(doc)  # for RESTORE
            streams = {stream: BatchKey(_number(seq), str(digest)) for stream, (seq, digest) in doc["streams"].items()}
            return cls(
                group=group,
                topics={name: _topic(name, str(each["id"]), each) for name, each in _unpacked(doc["topics"]).items()},
                former={id_: _topic(str(each["name"]), id_, each) for id_, each in _unpacked(doc["former"]).items()},
                streams=streams,
                void=frozenset(map(str, doc["void"])),
                reset_number=_number(doc["reset"]),
                number=_number(doc["number"]),
                table_version=table_version,
            )
        except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as exc:
            raise _damaged(group, table, table_version, doc, exc) from exc

    # --- a commit -----------------------------------------------------------------------------------------------------

    def with_next_number(self) -> "Ledger":
        """Return the ledger as the group's next commit stores it."""
        return replace(self, number=self.number + 1, table_version=-1)

    def at_version(self, version: int) -> "Ledger":
        """Return the ledger as known to be the newest in a version of the table."""
        return replace(self, table_version=version)

    def has_same_content(self, other: "Ledger | None") -> bool:
        """Return whether both hold the same offsets and the same reset, whichever batch wrote them."""
        return other is not None and self._content() == other._content()

    def _content(self) -> tuple[object, ...]:
        return self.topics, self.former, self.reset_number, self.void

    def with_batch(self, offset: StreamOffset, *, void: bool) -> "Ledger":
        """Return the ledger with a batch as the newest one of its stream."""
        streams = {stream: batch for stream, batch in self.streams.items() if stream != offset.stream}
        streams[offset.stream] = BatchKey.of(offset)
        known_void = self.void | {offset.stream} if void else self.void
        # A void stream is kept: its next batch is refused, and only the last one distinguishes that from a replay.
        evicted = [stream for stream in streams if stream not in known_void][:-STREAMS_MAX]
        return replace(self, streams={s: b for s, b in streams.items() if s not in evicted}, void=known_void)

    # --- topics -------------------------------------------------------------------------------------------------------

    def knows_topic(self, name: str, id_: str) -> bool:
        """Return whether a topic is the present one of its name, a former one, or the first of its name."""
        return name not in self.topics or self.topics[name].is_same(id_) or id_ in self.former

    def topic(self, name: str, id_: str) -> LedgerTopic:
        """Return the present or former topic of this name and id; one without offsets for a new topic."""
        present = self.topics.get(name)
        if present is not None and present.is_same(id_):
            return present._replace(id=id_)
        return self.former.get(id_) or LedgerTopic(name, id_)

    def offset_of(self, tp: TopicPartition, id_: str) -> int | None:
        """Return the next offset of a partition under an id of its topic; None if it is new."""
        return self.topic(tp.topic, id_).partition(tp.partition).offset

    def offsets_of(self, name: str, id_: str) -> Mapping[int, int]:
        """Return the next offsets of a topic by partition; none for a new topic."""
        return self.topic(name, id_).offsets

    def with_topics(self, changed: Iterable[LedgerTopic], *, present: bool = False) -> "Ledger":
        """Return the ledger with other offsets of some topics. A new topic takes over the name from a former one.

        Args:
            present: whether the topics exist under their names now: a former one becomes the present one again.
        """
        topics, former = dict(self.topics), dict(self.former)
        for topic in changed:
            now = topics.get(topic.name)
            if now is not None and not now.is_same(topic.id):
                if topic.id in former and not present:
                    former[topic.id] = topic
                    continue
                former[now.id] = now
            former.pop(topic.id, None)
            topics[topic.name] = topic if topic.id or now is None else topic._replace(id=now.id)
        return replace(self, topics=topics, former=_newest(former))

    def with_offsets(
        self, offsets: Mapping[TopicPartition, int], ids: Mapping[str, str] = MappingProxyType({})
    ) -> "Ledger":
        """Return the ledger with other next offsets of some partitions. Of those that move it forgets which rows are
        ``later`` or ``ahead``: a restored cluster may have earlier epochs.

        Args:
            ids: the ids of the topics that have their names now, where known.
        """
        names = {tp.topic: None for tp in offsets} | dict.fromkeys(ids)
        topics = {name: self.topic(name, ids.get(name, "")) for name in names}
        moved: dict[str, dict[int, LedgerPartition]] = {name: {} for name in names}
        for tp, n in offsets.items():
            rows = topics[tp.topic].partition(tp.partition)
            if rows.offset != n:
                moved[tp.topic][tp.partition] = replace(rows, offset=n, ahead=None, later=())
        changed = [topic.with_partitions(moved[name]) for name, topic in topics.items()]
        return self.with_topics(changed, present=True)

    def after_reset(
        self,
        reset_number: int,
        offsets: Mapping[TopicPartition, int],
        ids: Mapping[str, str] = MappingProxyType({}),
        deleted: Iterable[str] = (),
    ) -> "Ledger":
        """Return the ledger as ``spark-group reset`` sets it. Batches that a truncation overtook are void, and a
        restored cluster may have earlier epochs, so it forgets which ones are ``gone``.

        Args:
            offsets, ids: as in :meth:`with_offsets`.
            deleted: topics that no longer exist; they become former ones. One without an id is kept, because it could
                be a new topic of that name.
        """
        moved = self.with_offsets(offsets, ids)
        topics = {
            name: topic.with_partitions({p: replace(rows, gone=None) for p, rows in topic.partitions.items()})
            for name, topic in moved.topics.items()
        }
        former = dict(moved.former)
        for name in deleted:
            if name in topics and (id_ := topics[name].id):
                former[id_] = topics.pop(name)
        return replace(moved, topics=topics, former=_newest(former), reset_number=reset_number, void=frozenset())


def _newest(former: Mapping[str, LedgerTopic]) -> dict[str, LedgerTopic]:
    return dict(list(former.items())[-FORMER_MAX:])


# --- JSON -------------------------------------------------------------------------------------------------------------


def first_offsets(doc: Mapping[str, Any]) -> dict[TopicPartition, int]:
    """Return where the rows start of each partition that is new to the ledger in a commit."""
    found: dict[TopicPartition, int] = {}
    new = _unpacked(doc.get("new", {}))
    topics = _unpacked(doc["topics"]) if new else {}
    for name, text in new.items():
        offsets = _parse_runs(topics[name]["offsets"])
        found |= {TopicPartition(name, p): offsets[p] - moved for p, moved in _parse_runs(text).items()}
    return found


def _damaged(group: str, table: str, version: int, doc: object, why: Exception) -> LedgerDamaged:
    there = run_files.connection(group)  # table_names.reset_command would add an import level
    command = command_line.spark_group("reset", there, group, "--to-current", "--table", table, "--execute")
    return LedgerDamaged(
        f"the ledger of group {group!r} in version {version} of table {table} is damaged ({why!r}): "
        f"{json.dumps(doc, separators=(',', ':'))[:SHOWN_CHARS_MAX]}. Which records the table holds is unknown, so "
        "nothing is written. Stop the query, write a new ledger with this command (or with another position of reset), "
        "and start the query with the same checkpoint:"
        + command_line.alternatives({"continue at the group's offsets in Kafka": command}),
        group=group,
    )


def topic_names(doc: Mapping[str, Any]) -> frozenset[str]:
    """Return the topics of a ledger's JSON; none if it is damaged."""
    try:
        return frozenset(_unpacked(doc["topics"]))
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error):
        return frozenset()


def _packed(topics: Mapping[str, Any]) -> Mapping[str, Any] | str:
    """Return a JSON object; if it is long, its text compressed and in base64."""
    text = json.dumps(topics, separators=(",", ":"))
    if len(text) <= PLAIN_CHARS_MAX:
        return topics
    return COMPRESSED + base64.b64encode(zlib.compress(text.encode())).decode()


def _unpacked(topics: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """The inverse of :func:`_packed`."""
    if not isinstance(topics, str):
        return dict(topics.items())
    text = zlib.decompress(base64.b64decode(topics.removeprefix(COMPRESSED), validate=True))
    return dict(json.loads(text).items())


def _runs(numbers: Mapping[int, int]) -> str:
    """Return numbers by partition as text: runs ``<first partition>,<number>,<number>...``, separated by semicolons."""
    text, last = "", None
    for p, n in sorted(numbers.items()):
        text += f",{n}" if p - 1 == last else f";{p},{n}"
        last = p
    return text[1:]


def _parse_runs(text: str) -> dict[int, int]:
    """The inverse of :func:`_runs`."""
    if not _RUNS.fullmatch(text):
        raise ValueError("numbers of partitions")
    numbers: dict[int, int] = {}
    for run in filter(None, text.split(";")):
        first, *values = map(int, run.split(","))
        numbers |= dict(enumerate(values, first))
    return numbers


def _numbers_of(topic: LedgerTopic) -> dict[str, Any]:
    rows = topic.partitions
    numbers = {
        "epochs": {p: of.epoch for p, of in rows.items() if of.epoch},
        "gone": {p: of.gone for p, of in rows.items() if of.gone is not None},
        "ahead": {p: of.ahead for p, of in rows.items() if of.ahead is not None},
    }
    later = []
    for n in range(1, max((len(of.later) for of in rows.values()), default=0) + 1):  # the newest ones first
        of_epochs = {p: of.later[-n] for p, of in rows.items() if n <= len(of.later)}
        later.append([_runs({p: each[i] for p, each in of_epochs.items()}) for i in (0, 1)])
    found: dict[str, Any] = {name: _runs(of) for name, of in numbers.items() if of}
    return {**found, **({"later": later} if later else {}), "offsets": _runs(topic.offsets)}


def _topic(name: str, id_: str, entry: Mapping[str, Any]) -> LedgerTopic:
    offsets = {p: _number(n) for p, n in _parse_runs(entry["offsets"]).items()}
    later: dict[int, tuple[LaterRows, ...]] = {}
    for epochs, starts in entry.get("later", ()):  # the newest ones first
        start_of = _parse_runs(starts)
        later |= {p: (LaterRows(n, start_of[p]), *later.get(p, ())) for p, n in _parse_runs(epochs).items()}
    epoch, gone, ahead = (_parse_runs(entry.get(of, "")) for of in ("epochs", "gone", "ahead"))
    partitions = {
        p: LedgerPartition(
            offset=offsets.get(p), epoch=epoch.get(p, 0), gone=gone.get(p), ahead=ahead.get(p), later=later.get(p, ())
        )
        for p in offsets | epoch | gone | ahead | later
    }
    return LedgerTopic(name, id_, partitions)


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"number {value!r}")
    return value
