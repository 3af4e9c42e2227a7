"""The ledger of a group: what a table holds of it, as text in the table's commits.

Runs in: the user's driver, the command line, tests. Deliberately absent: any I/O, and what follows for a batch
(:mod:`ledger`).

Each commit of a group has the group's ledger as it is after it, in its ``userMetadata`` (:mod:`history`)::

    {"epoch": 2, "former": {}, "number": 41, "streams": {"9f2c": [17, "<digest>"]},
     "topics": {"orders": {"id": "<topic id>", "offsets": {"0": 250, "1": 40}}}, "v": 1, "void": []}

It is as old as the commit: Delta deletes both with the table's log (``delta.logRetentionDuration``). It does *not*
follow the rows: after ``RESTORE``, ``REPLACE`` or a ``DELETE`` the ledger still says what was once written.
``spark-group reset`` with ``--table`` moves it back.

``number`` counts the group's commits in the table: it is the version of the commit's ``SetTransaction`` of the
application ``spark-group-source.<group>``, by which Delta lets one of two writers win that count the same number.

``streams`` has the last batch of each stream, which is how a replay is recognised: its number, and a digest that no
other batch has.

``epoch`` counts the group's resets, as the notes beside Kafka's offsets do (``group.names``). A batch that was planned
before the newest reset is *void*: its positions are those of before, so nothing of it is written, and the source goes
on where the reset says. ``void`` names the streams that had such a batch since.

A topic that was deleted and created again has other records at the same offsets, and another id. Ids have no order: a
batch may come that was planned under the former id, by a stream that does not know the new one. So ``former`` keeps,
by id, the offsets of topics whose name another one has now, or that a reset took for deleted, and a batch is compared
with what was written under the id that it was planned with.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from spark_group_source.errors import LedgerConflict
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

VERSION = 1

APP_PREFIX = "spark-group-source."
"""Begins the name of the application whose ``SetTransaction`` counts the commits of a group."""

STREAMS_MAX = 50
"""How many streams are kept that are not void; the one that wrote longest ago goes first. A replay of its last batch is
compared by its offsets, like a new one."""

FORMER_MAX = 1000
"""How many former topics are kept; the one that became former first goes first."""

DIGEST_CHARS = 16


class LedgerDamaged(LedgerConflict):
    """The ledger's text cannot be read: what the table holds is not known."""


class Topic(NamedTuple):
    """What a table holds of one topic: the next offset to write of every partition ever seen. ``id`` is empty where the
    brokers did not tell one (before 2.8): then nothing can be told, and every topic of that name is the same."""

    name: str
    id: str
    offsets: dict[int, int]

    def is_same(self, id_: str) -> bool:
        """Whether a topic of this name and of this id is the same one."""
        return not self.id or not id_ or self.id == id_


class Batch(NamedTuple):
    """A batch of a stream that the table has: its number, and the digest of its offset."""

    seq: int
    digest: str

    @classmethod
    def of(cls, offset: StreamOffset) -> "Batch":
        return cls(offset.seq, hashlib.sha256(offset.to_json().encode()).hexdigest()[:DIGEST_CHARS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a table holds of one group. ``topics`` are the present ones by name, ``former`` those of before by id; both
    keep the order in which they came. ``table_version`` is the version of the table up to which it is known, or -1."""

    group: str
    topics: Mapping[str, Topic] = field(default_factory=dict)
    former: Mapping[str, Topic] = field(default_factory=dict)
    streams: Mapping[str, Batch] = field(default_factory=dict)
    void: frozenset[str] = frozenset()
    epoch: int = 0
    number: int = 0
    table_version: int = -1

    @property
    def offsets(self) -> dict[TopicPartition, int]:
        """The next offset of every partition of the present topics."""
        return {TopicPartition(name, p): n for name, topic in self.topics.items() for p, n in topic.offsets.items()}

    # --- the text -----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The text; integers only."""
        doc = {
            "epoch": self.epoch,
            "former": {id_: {"name": topic.name, "offsets": topic.offsets} for id_, topic in self.former.items()},
            "number": self.number,
            "streams": self.streams,
            "topics": {name: {"id": topic.id, "offsets": topic.offsets} for name, topic in self.topics.items()},
            "v": VERSION,
            "void": sorted(self.void),
        }
        return json.dumps(doc, separators=(",", ":"))

    @classmethod
    def from_json(cls, group: str, text: str, *, table_version: int = -1) -> "Ledger":
        """Read the text.

        Raises:
            LedgerDamaged: it cannot be read. Nothing is assumed in its place.
            LedgerConflict: it is of a newer release.
        """
        try:
            doc = json.loads(text)
            if doc["v"] != VERSION:
                raise LedgerConflict(
                    f"the ledger of group {group!r} in the table has format version {doc['v']!r}; this release reads "
                    f"version {VERSION}. Run the release that wrote it, or a newer one",
                    group=group,
                    found=doc["v"],
                )
            return cls(
                group=group,
                topics={name: _topic(name, str(one["id"]), one) for name, one in doc["topics"].items()},
                former={id_: _topic(str(one["name"]), id_, one) for id_, one in doc["former"].items()},
                streams={stream: Batch(_number(seq), str(digest)) for stream, (seq, digest) in doc["streams"].items()},
                void=frozenset(map(str, doc["void"])),
                epoch=_number(doc["epoch"]),
                number=_number(doc["number"]),
                table_version=table_version,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise LedgerDamaged(
                f"the ledger of group {group!r} in version {table_version} of the table is damaged ({exc!r}): "
                f"{text[:200]}. Stop the query; `spark-group reset --group {group} --table T` with the position you "
                "want writes it anew, and the query can go on with its checkpoint",
                group=group,
            ) from exc

    # --- a commit -----------------------------------------------------------------------------------------------------

    def written(self) -> "Ledger":
        """The ledger as the next commit of the group has it."""
        return replace(self, number=self.number + 1, table_version=-1)

    def at(self, version: int) -> "Ledger":
        """The ledger as it stands in a version of the table."""
        return replace(self, table_version=version)

    def same(self, other: "Ledger | None") -> bool:
        """Whether both say the same of the same topics, whoever wrote them."""
        return other is not None and self._said() == other._said()

    def _said(self) -> tuple[object, ...]:
        return self.topics, self.former, self.epoch, self.void

    def with_batch(self, offset: StreamOffset, *, void: bool) -> "Ledger":
        """The ledger with a stream's last batch."""
        streams = {stream: batch for stream, batch in self.streams.items() if stream != offset.stream}
        streams[offset.stream] = Batch.of(offset)
        known = self.void | {offset.stream} if void else self.void
        # A void stream stays: it is stopped at its next batch, which only its last one tells from a replay.
        evicted = [stream for stream in streams if stream not in known][:-STREAMS_MAX]
        return replace(self, streams={s: b for s, b in streams.items() if s not in evicted}, void=known)

    # --- topics -------------------------------------------------------------------------------------------------------

    def knows(self, name: str, id_: str) -> bool:
        """Whether a topic is the present one of its name, a former one, or the first of its name."""
        return name not in self.topics or self.topics[name].is_same(id_) or id_ in self.former

    def under(self, name: str, id_: str) -> Mapping[int, int]:
        """The next offsets of a topic by partition; none, if it is new."""
        now = self.topics.get(name)
        if now is not None and now.is_same(id_):
            return now.offsets
        return self.former[id_].offsets if id_ in self.former else {}

    def put(self, changed: Iterable[Topic], *, present: bool = False) -> "Ledger":
        """The ledger with other offsets of some topics. A new one takes the name; the one that had it becomes former.

        Args:
            present: they have their names now, also those that were former ones.
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

    def moved(self, offsets: Mapping[TopicPartition, int], ids: Mapping[str, str] = MappingProxyType({})) -> "Ledger":
        """The ledger with other next offsets of some partitions.

        Args:
            ids: of the topics that have their names now, where known.
        """
        names = {tp.topic: None for tp in offsets} | dict.fromkeys(ids)
        topics = {name: Topic(name, ids.get(name, ""), dict(self.under(name, ids.get(name, "")))) for name in names}
        for tp, n in offsets.items():
            topics[tp.topic].offsets[tp.partition] = n
        return self.put(topics.values(), present=True)

    def after_reset(
        self,
        epoch: int,
        offsets: Mapping[TopicPartition, int],
        ids: Mapping[str, str] = MappingProxyType({}),
        deleted: Iterable[str] = (),
    ) -> "Ledger":
        """The ledger as an operator's reset leaves it.

        Args:
            epoch: the number of the reset: what was planned before is void.
            deleted: topics that do not exist any more; they become former. Of one that has no id nobody could tell a
                new one of that name: it stays.
        """
        moved = self.moved(offsets, ids)
        topics, former = dict(moved.topics), dict(moved.former)
        for name in deleted:
            if name in topics and (id_ := topics[name].id):
                former[id_] = topics.pop(name)
        return replace(moved, topics=topics, former=_newest(former), epoch=epoch, void=frozenset())


def _newest(former: Mapping[str, Topic]) -> dict[str, Topic]:
    return dict(list(former.items())[-FORMER_MAX:])


def _topic(name: str, id_: str, one: Mapping[str, Any]) -> Topic:
    return Topic(name, id_, {int(p): _number(n) for p, n in one["offsets"].items()})


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"number {value!r}")
    return value
