"""What ours writes beside a commit of a table, and what any commit says of itself.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line, tests.
Deliberately absent: any I/O (:mod:`history` and :mod:`told` find commits), and what follows from them.

The note is the ``userMetadata`` of the commit: the offsets of the batch, then the ledger of each of its groups as it is
after that commit::

    [{"group":"etl","seq":17,"stream":"9f2c","topics":{...},"v":1},
     {"group":"etl","ledger":{...},"read":41,"v":1}]

``read`` is the version of the table that the writer had decided by, where Delta would not tell. An operator's note is
one such ledger, with the ``reason``. Former releases wrote the offsets alone.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from spark_group_source.delta.entries import VERSION, Ledger
from spark_group_source.group.offsets import StreamOffset, parse

STREAMING = "STREAMING UPDATE"
"""The operation of a commit that went through Delta's classes."""


def text(
    offsets: Sequence[StreamOffset], ledgers: Iterable[Ledger], *, read: int | None = None, reason: str | None = None
) -> str:
    """The note of a commit. Its separators are fixed, since :func:`mark` and :func:`beginning` are looked for."""
    texts = [offset.to_json() for offset in offsets]
    more = "" if read is None else f',"read":{read}'
    more += "" if reason is None else f',"reason":{json.dumps(reason)}'
    texts += [f"{{{mark(led.group)[:-1]}{led.to_json()}{more},{json.dumps('v')}:{VERSION}}}" for led in ledgers]
    return texts[0] if len(texts) == 1 else "[" + ",".join(texts) + "]"


def mark(group: str) -> str:
    """Stands in every note with the ledger of the group, and in no other."""
    return f'"group":{json.dumps(group)},"ledger":{{'


def beginning(offsets: Sequence[StreamOffset]) -> str:
    """How the note of a batch begins. That of a former release is :func:`text` without a ledger."""
    return "[" + ",".join(offset.to_json() for offset in offsets) + ","


def docs(note: str | None) -> tuple[dict[str, Any], ...]:
    """The parts of a note; none, if it is somebody else's."""
    try:
        found = json.loads(note or "[]")
    except ValueError:
        return ()
    return tuple(
        doc for doc in (found if isinstance(found, list) else [found]) if isinstance(doc, dict) and "group" in doc
    )


class Commit(NamedTuple):
    """One commit of a table.

    ``read`` is the version that its writer knew; ``restored_to`` the version that a ``RESTORE`` went back to.
    """

    version: int
    read: int
    docs: tuple[dict[str, Any], ...] = ()
    restored_to: int | None = None
    operation: str = ""

    @classmethod
    def of(cls, version: int, read: int | None, operation: str, note: str | None, restored_to: int | None) -> "Commit":
        found = docs(note)
        known = [doc["read"] for doc in found if isinstance(doc.get("read"), int)]
        return cls(version, min([version - 1 if read is None else read, *known]), found, restored_to, operation)

    def has_ledger(self, group: str) -> bool:
        """Whether it wrote the ledger of a group, in whatever place."""
        kept = self.operation == STREAMING or any("ledger" in doc for doc in self.docs)
        return kept and any(doc["group"] == group for doc in self.docs)

    def ledger(self, group: str) -> Ledger | None:
        """The ledger in its note.

        Raises:
            LedgerConflict: it is damaged or of a newer release.
        """
        for doc in self.docs:
            if doc["group"] == group and "ledger" in doc:
                return Ledger.from_json(group, json.dumps(doc["ledger"]), table_version=self.version)
        return None

    def batch(self, group: str) -> list[StreamOffset]:
        """What a batch had of a group."""
        return [parse(doc) for doc in self.docs if doc["group"] == group and "ledger" not in doc]
