"""The ledger of a group: what a table holds of it, as text in the table's commits.

Runs in: the user's driver, the command line, tests. Deliberately absent: any I/O, and what follows for a batch
(:mod:`ledger`).

Each commit of a group has the group's ledger as it is after it, in its ``userMetadata`` (:mod:`notes`)::

    {"epoch": 2, "seq": 17, "stream": "9f2c",
     "topics": {"orders": {"id": "<topic id>", "offsets": {"0": 250, "1": 40}}}, "v": 1}

It is as old as the commit: Delta deletes both with the table's log (``delta.logRetentionDuration``). It does *not*
follow the rows: after ``RESTORE``, ``REPLACE`` or a ``DELETE`` the ledger still says what was once written.
``spark-group reset`` with ``--table`` moves it back.

``epoch`` counts the group's resets, as the notes beside Kafka's offsets do (``group.names``). A batch that was planned
before the newest reset is *void*: its positions are those of before, so nothing of it is written, and the source goes
on where the reset says. ``void`` has the number of the last such batch of each stream, since that reset. Both are
absent while there is nothing to say; releases that know neither read the rest.

A topic that was deleted and made again has other records at the same offsets, and another id. Ids have no order: a
batch may come that was planned under the former one, by a stream that has not heard of the new one. So ``former`` keeps
what the table has under former ids, and a batch is compared with what was written under the id that it was planned
with. A reset ends that, as all plans of before are void. It also ends the entries of topics that are deleted: of them
only the ids stay, in ``retired``, so that one that was there all the same is not read from where the table knows
nothing. Releases that do not know these two forget them.

``number`` counts the group's commits in the table: it is the version of the commit's ``SetTransaction`` of the
application ``spark-group-source.<group>``, by which Delta lets one of two writers win that count the same number.
``queries`` has the last batch of each query that wrote.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spark_group_source.errors import LedgerConflict
from spark_group_source.model import TopicPartition

VERSION = 1

APP_PREFIX = "spark-group-source."
"""Begins the name of the application whose ``SetTransaction`` counts the commits of a group."""

QUERIES_MAX = 50
"""How many queries' last batches are kept; the one that wrote longest ago goes first. A replay of its last batch is
still known by its offsets, unless an operator moved the group in between: then it is refused."""

RETIRED_MAX = 1000
"""How many ids of deleted topics are kept; the one that was added first goes first."""

FORMER_MAX = 4
"""How many former topics of one name are kept between two resets; the one that was added first goes first."""


class LedgerDamaged(LedgerConflict):
    """The ledger's text cannot be read: what the table holds is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a table holds of one group: ``offsets`` are the next ones to write, for every partition ever seen.

    ``stream`` and ``seq`` name the batch that wrote it last; an operator's reset leaves ``stream`` empty. ``epoch`` is
    the newest reset that the table knows of, ``void`` the last batch of each stream that was void since. ``former`` has
    the next offsets by name, former id and partition.
    ``table_version`` is the version of the table it was read from, or -1.
    """

    group: str
    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    former: Mapping[str, Mapping[str, Mapping[int, int]]] = field(default_factory=dict)
    retired: tuple[str, ...] = ()
    stream: str = ""
    seq: int = -1
    epoch: int = 0
    void: Mapping[str, int] = field(default_factory=dict)
    number: int = 0
    queries: Mapping[str, int] = field(default_factory=dict)
    table_version: int = -1

    def to_json(self) -> str:
        """The text: keys sorted, integers only; what may be empty is absent then."""
        topics: dict[str, dict[str, Any]] = {}
        for topic in sorted({tp.topic for tp in self.offsets} | set(self.topic_ids)):
            topics[topic] = {"id": self.topic_ids.get(topic, ""), "offsets": {}}
        for tp, offset in sorted(self.offsets.items()):
            topics[tp.topic]["offsets"][str(tp.partition)] = offset
        doc: dict[str, Any] = {"epoch": self.epoch} if self.epoch else {}
        doc |= {"seq": self.seq, "stream": self.stream, "topics": topics, "v": VERSION}
        if self.former:
            doc = {"former": {name: self._former_text(name) for name in sorted(self.former)}} | doc
            doc = dict(sorted(doc.items()))
        if self.retired:
            doc["retired"] = list(self.retired)
            doc = dict(sorted(doc.items()))
        if self.void:
            doc["void"] = dict(sorted(self.void.items()))
        if self.number or self.queries:
            doc["number"], doc["queries"] = self.number, dict(self.queries)
            doc = dict(sorted(doc.items()))
        return json.dumps(doc, separators=(",", ":"))

    def _former_text(self, topic: str) -> list[dict[str, Any]]:
        return [
            {"id": id_, "offsets": {str(p): n for p, n in sorted(offsets.items())}}
            for id_, offsets in self.former[topic].items()
        ]

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
            offsets = {
                TopicPartition(topic, int(partition)): _number(offset)
                for topic, entry in doc["topics"].items()
                for partition, offset in entry["offsets"].items()
            }
            former = {
                str(topic): {str(e["id"]): {int(p): _number(n) for p, n in e["offsets"].items()} for e in listed}
                for topic, listed in doc.get("former", {}).items()
            }
            ids = {topic: str(entry["id"]) for topic, entry in doc["topics"].items()}
            return cls(
                group=group,
                offsets=offsets,
                topic_ids=ids,
                former=former,
                retired=tuple(str(id_) for id_ in doc.get("retired", ())),
                stream=str(doc["stream"]),
                seq=_number(doc["seq"], least=-1),
                epoch=_number(doc.get("epoch", 0)),
                void={str(stream): _number(seq) for stream, seq in doc.get("void", {}).items()},
                number=_number(doc.get("number", 0)),
                queries={str(query): _number(batch) for query, batch in doc.get("queries", {}).items()},
                table_version=table_version,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise LedgerDamaged(
                f"the ledger of group {group!r} in version {table_version} of the table is damaged ({exc!r}): "
                f"{text[:200]}. Stop the query; `spark-group reset --group {group} --table T` with the position you "
                "want writes it anew, and the query can go on with its checkpoint",
                group=group,
            ) from exc

    def written(self, query_id: str = "", batch_id: int = -1) -> "Ledger":
        """The ledger as the next commit of the group has it; without a query it is an operator's."""
        queries = dict(self.queries)
        if query_id:
            queries.pop(query_id, None)
            queries[query_id] = batch_id
        last = dict(list(queries.items())[-QUERIES_MAX:])
        return replace(self, number=self.number + 1, queries=last, table_version=-1)

    def at(self, version: int) -> "Ledger":
        """The ledger as it stands in a version of the table."""
        return replace(self, table_version=version)

    def same(self, other: "Ledger | None") -> bool:
        """Whether both say the same of the same topics, whoever wrote them."""
        return other is not None and self._said() == other._said()

    def _said(self) -> tuple[object, ...]:
        return self.offsets, self.topic_ids, self.former, self.retired, self.epoch, self.void

    def retire(self, topics: Iterable[str]) -> "Ledger":
        """The ledger without these topics, which are deleted. Of one that has no id nobody could tell a new one of that
        name: it stays."""
        gone = {topic: self.topic_ids[topic] for topic in sorted(topics) if self.topic_ids.get(topic)}
        return replace(
            self,
            offsets={tp: n for tp, n in self.offsets.items() if tp.topic not in gone},
            topic_ids={topic: id_ for topic, id_ in self.topic_ids.items() if topic not in gone},
            former={topic: entry for topic, entry in self.former.items() if topic not in gone},
            retired=(*(id_ for id_ in self.retired if id_ not in gone.values()), *gone.values())[-RETIRED_MAX:],
        )

    def knows(self, topic: str, id_: str) -> bool:
        """Whether a topic of this id is the one that the ledger has now, or a former one of that name."""
        return self.is_now(topic, id_) or id_ in self.former.get(topic, {})

    def under(self, ids: Mapping[str, str]) -> dict[str, dict[int, int]]:
        """The next offsets of topics with these ids, by partition."""
        now = {topic for topic, id_ in ids.items() if self.is_now(topic, id_)}
        found = {topic: dict(self.former.get(topic, {}).get(id_, {})) for topic, id_ in ids.items()}
        found |= {topic: {} for topic in now}
        for tp, n in self.offsets.items():
            if tp.topic in now:
                found[tp.topic][tp.partition] = n
        return found

    def put(self, ids: Mapping[str, str], offsets: Mapping[str, Mapping[int, int]]) -> "Ledger":
        """The ledger with other offsets of topics with these ids. An id that is new makes the topic of that name a
        former one."""
        again = {topic for topic, id_ in ids.items() if not self.knows(topic, id_)}
        late = {topic for topic, id_ in ids.items() if topic not in again and not self.is_now(topic, id_)}
        former = dict(self.former)
        for topic, entry in self.under({topic: self.topic_ids[topic] for topic in again}).items():
            kept = {**former.get(topic, {}), self.topic_ids[topic]: entry}
            former[topic] = dict(list(kept.items())[-FORMER_MAX:])
        former |= {topic: {**former[topic], ids[topic]: offsets[topic]} for topic in late}
        stay = {tp: n for tp, n in self.offsets.items() if tp.topic not in again} if again else dict(self.offsets)
        stay |= {TopicPartition(topic, p): n for topic in ids if topic not in late for p, n in offsets[topic].items()}
        named = {topic: id_ for topic, id_ in ids.items() if id_ and topic not in late}
        return replace(self, offsets=stay, topic_ids={**self.topic_ids, **named}, former=former)

    def is_now(self, topic: str, id_: str) -> bool:
        """Whether a topic of this id is the one that the ledger has now."""
        # Brokers before 2.8 have no topic ids, and then nothing can be told: the topic counts as the same.
        now = self.topic_ids.get(topic, "")
        return not now or not id_ or now == id_


def _number(value: object, *, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"number {value!r}")
    return value
