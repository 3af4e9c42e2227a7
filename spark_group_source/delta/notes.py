"""What ours writes beside a commit of a table, and what any commit says of itself.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line, tests.
Deliberately absent: any I/O (:mod:`history` finds commits), and what follows from them.

The note is the ``userMetadata`` of the commit: the offsets of the batch, then the ledger of each of its groups as it is
after that commit::

    [{"group":"etl","seq":17,"stream":"9f2c","topics":{...},"v":1},
     {"group":"etl","ledger":{...},"read":41,"v":1}]

``read`` is the version of the table that the writer decided by. An operator's note is one such ledger, with the
``reason``.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spark_group_source.delta.entries import VERSION, Ledger
from spark_group_source.group.offsets import StreamOffset, parse


def text(offsets: Sequence[StreamOffset], ledgers: Iterable[Ledger], *, read: int, reason: str | None = None) -> str:
    """The note of a commit."""
    texts = [offset.to_json() for offset in offsets]
    for ledger in ledgers:
        more = "" if reason is None else f',"reason":{json.dumps(reason)}'
        group = json.dumps(ledger.group)
        texts.append(f'{{"group":{group},"ledger":{ledger.to_json()},"read":{read}{more},"v":{VERSION}}}')
    return texts[0] if len(texts) == 1 else "[" + ",".join(texts) + "]"


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

    ``read`` is the version that its writer knew, ``note`` its ``userMetadata``. ``restore`` has the parameters of a
    ``RESTORE``, and is None for every other operation.
    """

    version: int
    read: int
    note: str | None = None
    docs: tuple[dict[str, Any], ...] = ()
    restore: Mapping[str, Any] | None = None
    operation: str = ""

    @classmethod
    def of(
        cls, version: int, read: int | None, operation: str, note: str | None, restore: Mapping[str, Any] | None = None
    ) -> "Commit":
        found = docs(note)
        known = [doc["read"] for doc in found if isinstance(doc.get("read"), int)]
        return cls(version, min([version - 1 if read is None else read, *known]), note, found, restore, operation)

    def has_ledger(self, group: str) -> bool:
        """Whether it wrote the ledger of a group."""
        return any(doc["group"] == group and "ledger" in doc for doc in self.docs)

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
