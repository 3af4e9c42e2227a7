"""The ledger of a group: which records of the group a table holds, as JSON in the table's commits.

Runs in: the user's driver, the command line, tests. Deliberately absent: any I/O, and what the ledger means for a batch
(:mod:`ledger_decision`).

Each commit of a group has the group's ledger after that commit in its note (:mod:`table_history`)::

    {"former": {}, "number": 41, "reset": 2, "streams": {"9f2c": [17, "<digest>"]},
     "topics": {"orders": {"id": "<topic id>", "offsets": {"0": 250, "1": 40}}}, "v": 1, "void": []}

Delta deletes the ledger together with its commit (``delta.logRetentionDuration``). The ledger does *not* follow the
rows: after ``RESTORE``, ``REPLACE`` or ``DELETE`` it still says what was written. ``spark-group reset`` with
``--table`` moves it back.

``number`` counts the group's commits in the table. It is the version of the commit's ``SetTransaction`` for the
application ``spark-group-source.<group>``: of two commits with one number Delta lets one through.

``streams`` has the last batch of each stream: its number, and a digest that no other batch has. A replay is recognised
by them.

``reset`` is the number of the group's newest reset, as in the notes beside Kafka's offsets
(:mod:`spark_group_source.protocol.identifiers`). A batch that was planned before that reset is *void*: its positions
are older than the reset, so none of its rows is written, and the source continues where the reset says. ``void`` names
the streams that had such a batch since.

A topic that was deleted and recreated has other records at the same offsets, and another id. Ids have no order: a
stream that does not know the new id yet may still plan batches with the former one. So ``former`` keeps, by id, the
offsets of topics whose name another topic has now, or that a reset found deleted, and a batch is compared with the
offsets under the id by which it was planned.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from spark_group_source import command_line
from spark_group_source.delta import table_names
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

VERSION = 1

APP_PREFIX = "spark-group-source."
"""Precedes the group in the application id whose ``SetTransaction`` counts the group's commits."""

STREAMS_MAX = 50
"""How many streams that are not void are kept; the one that wrote least recently is removed first. A replay of its last
batch is then compared by its offsets, like a new batch."""

FORMER_MAX = 1000
"""How many former topics are kept; the one that became former first is removed first."""

DIGEST_CHARS = 16

SHOWN_CHARS_MAX = 200
"""How much of a damaged ledger an error shows."""


class LedgerDamaged(LedgerConflict):
    """The ledger cannot be read: which records the table holds is unknown."""


class LedgerTopic(NamedTuple):
    """The records of one topic that a table holds."""

    name: str
    id: str
    """The topic id; empty where brokers do not report ids (before 2.8): then every topic of that name is the same."""
    offsets: dict[int, int]
    """The next offset to write of every partition that was ever read, by partition."""

    def is_same(self, id_: str) -> bool:
        """Return whether a topic of this name with that id is this topic."""
        return not self.id or not id_ or self.id == id_


class RecordedBatch(NamedTuple):
    """The newest batch of a stream in the table."""

    seq: int
    """Its number in the stream."""
    digest: str
    """A digest of its offset, which distinguishes two batches of one number."""

    @classmethod
    def of(cls, offset: StreamOffset) -> "RecordedBatch":
        return cls(offset.seq, hashlib.sha256(offset.to_json().encode()).hexdigest()[:DIGEST_CHARS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The records of one group that a table holds."""

    group: str
    topics: Mapping[str, LedgerTopic] = field(default_factory=dict)
    """The present topics by name, in the order in which they were first read."""
    former: Mapping[str, LedgerTopic] = field(default_factory=dict)
    """The former topics by id, in the order in which they became former."""
    streams: Mapping[str, RecordedBatch] = field(default_factory=dict)
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

    def to_json(self) -> str:
        """Return the JSON text; all numbers are integers."""
        doc = {
            "former": {id_: {"name": topic.name, "offsets": topic.offsets} for id_, topic in self.former.items()},
            "number": self.number,
            "reset": self.reset_number,
            "streams": self.streams,
            "topics": {name: {"id": topic.id, "offsets": topic.offsets} for name, topic in self.topics.items()},
            "v": VERSION,
            "void": sorted(self.void),
        }
        return json.dumps(doc, separators=(",", ":"))

    @classmethod
    def from_json(cls, group: str, text: str, *, table: str = "TABLE", table_version: int = -1) -> "Ledger":
        """Read the JSON text.

        Args:
            table: where it was found, for the message of an error.
            table_version: the version of the table that has it.

        Raises:
            LedgerDamaged: it cannot be read. No value is assumed in its place.
            LedgerConflict: a newer release wrote it.
        """
        try:
            doc = json.loads(text)
            if doc["v"] != VERSION:
                raise LedgerConflict(
                    f"the ledger of group {group!r} in table {table} has format version {doc['v']!r}, and this release "
                    f"reads version {VERSION}. Run the release that wrote it, or a newer one",
                    group=group,
                    found=doc["v"],
                )
            return cls(
                group=group,
                topics={name: _topic(name, str(entry["id"]), entry) for name, entry in doc["topics"].items()},
                former={id_: _topic(str(entry["name"]), id_, entry) for id_, entry in doc["former"].items()},
                streams={
                    stream: RecordedBatch(_number(seq), str(digest)) for stream, (seq, digest) in doc["streams"].items()
                },
                void=frozenset(map(str, doc["void"])),
                reset_number=_number(doc["reset"]),
                number=_number(doc["number"]),
                table_version=table_version,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            command = table_names.reset_command(group, table, "--to-current")
            raise LedgerDamaged(
                f"the ledger of group {group!r} in version {table_version} of table {table} is damaged ({exc!r}): "
                f"{text[:SHOWN_CHARS_MAX]}. Which records the table holds is unknown, so nothing is written. Stop the "
                "query, write a new ledger with this command (or with another position of reset), and start the query "
                "with the same checkpoint:"
                + command_line.alternatives({"continue at the group's offsets in Kafka": command}),
                group=group,
            ) from exc

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
        """Return the ledger with a batch as the newest one of its stream.

        Args:
            void: whether the batch was planned before the newest reset.
        """
        streams = {stream: batch for stream, batch in self.streams.items() if stream != offset.stream}
        streams[offset.stream] = RecordedBatch.of(offset)
        known_void = self.void | {offset.stream} if void else self.void
        # A void stream is kept: its next batch is refused, and only the last one distinguishes that from a replay.
        evicted = [stream for stream in streams if stream not in known_void][:-STREAMS_MAX]
        return replace(self, streams={s: b for s, b in streams.items() if s not in evicted}, void=known_void)

    # --- topics -------------------------------------------------------------------------------------------------------

    def knows_topic(self, name: str, id_: str) -> bool:
        """Return whether a topic is the present one of its name, a former one, or the first of its name."""
        return name not in self.topics or self.topics[name].is_same(id_) or id_ in self.former

    def offsets_of(self, name: str, id_: str) -> Mapping[int, int]:
        """Return the next offsets of a topic by partition; none for a new topic."""
        present = self.topics.get(name)
        if present is not None and present.is_same(id_):
            return present.offsets
        return self.former[id_].offsets if id_ in self.former else {}

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
        """Return the ledger with other next offsets of some partitions.

        Args:
            ids: the ids of the topics that have their names now, where known.
        """
        names = {tp.topic: None for tp in offsets} | dict.fromkeys(ids)
        topics = {
            name: LedgerTopic(name, ids.get(name, ""), dict(self.offsets_of(name, ids.get(name, "")))) for name in names
        }
        for tp, n in offsets.items():
            topics[tp.topic].offsets[tp.partition] = n
        return self.with_topics(topics.values(), present=True)

    def after_reset(
        self,
        reset_number: int,
        offsets: Mapping[TopicPartition, int],
        ids: Mapping[str, str] = MappingProxyType({}),
        deleted: Iterable[str] = (),
    ) -> "Ledger":
        """Return the ledger as ``spark-group reset`` sets it.

        Args:
            reset_number: the number of the reset: batches that were planned before it are void.
            offsets, ids: as in :meth:`with_offsets`.
            deleted: topics that no longer exist; they become former ones. One without an id is kept, because it could
                be a new topic of that name.
        """
        moved = self.with_offsets(offsets, ids)
        topics, former = dict(moved.topics), dict(moved.former)
        for name in deleted:
            if name in topics and (id_ := topics[name].id):
                former[id_] = topics.pop(name)
        return replace(moved, topics=topics, former=_newest(former), reset_number=reset_number, void=frozenset())


def _newest(former: Mapping[str, LedgerTopic]) -> dict[str, LedgerTopic]:
    return dict(list(former.items())[-FORMER_MAX:])


def _topic(name: str, id_: str, entry: Mapping[str, Any]) -> LedgerTopic:
    return LedgerTopic(name, id_, {int(p): _number(n) for p, n in entry["offsets"].items()})


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"number {value!r}")
    return value
