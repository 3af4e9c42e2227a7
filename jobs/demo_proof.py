"""The checks of the demo: they read the table's files, not the job's output.

Runs in: ``demo.py``, tests. Deliberately absent: Spark and DeltaSink. The transaction log and the Parquet files are
read here by hand, so that the proof does not rest on the code that it is about.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq

Offsets = Mapping[int, int]
"""Partition -> the next offset."""


class DeltaLog:
    """A Delta table without deletion vectors, read from its JSON commits. ``refresh`` reads new commits."""

    def __init__(self, table: Path) -> None:
        self._table = table
        self._next = 0
        self._rows: dict[str, int] = {}
        self._ledgers: dict[str, dict[str, dict[int, int]]] = {}

    @property
    def rows(self) -> int:
        return sum(self._rows.values())

    def refresh(self) -> None:
        while (path := self._table / "_delta_log" / f"{self._next:020d}.json").is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._apply(json.loads(line))
            self._next += 1

    def _apply(self, action: dict[str, Any]) -> None:
        if add := action.get("add"):
            self._rows[unquote(add["path"])] = json.loads(add["stats"])["numRecords"]
        elif remove := action.get("remove"):
            self._rows.pop(unquote(remove["path"]), None)
        elif (note := action.get("commitInfo", {}).get("userMetadata", "")).startswith(("[{", "{")):
            docs = json.loads(note)
            for doc in docs if isinstance(docs, list) else [docs]:
                if "ledger" in doc:
                    self._add(doc["group"], doc["ledger"])

    def _add(self, group: str, ledger: dict[str, Any]) -> None:
        """Keep the group's newest ledger. That of the demo's few partitions is not compressed."""
        found: dict[str, dict[int, int]] = {}
        for topic, entry in ledger["topics"].items():
            offsets = found.setdefault(topic, {})
            for run in filter(None, entry["offsets"].split(";")):
                first, *numbers = map(int, run.split(","))
                offsets |= dict(enumerate(numbers, first))
        self._ledgers[group] = found

    def ledger(self, group: str, topic: str) -> dict[int, int]:
        """The ledger after the group's last commit."""
        return self._ledgers.get(group, {}).get(topic, {})

    def column(self, name: str) -> list[Any]:
        """All values of a column, from every file of the table."""
        return [v for path in self._rows for v in pq.read_table(self._table / path, columns=[name])[name].to_pylist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence. Orders are numbered 1 to ``produced``; Kafka acknowledged each one."""

    produced: int
    table: Sequence[int]
    """The order of every row in the table."""
    ordinary: Sequence[int]
    """The order of every record that the ordinary consumer processed."""
    ends: Offsets
    committed: Offsets
    ledger: Offsets
    ordinary_last: Offsets = field(default_factory=dict)
    """The offsets after the last records that the ordinary consumer processed."""


@dataclass(frozen=True, slots=True)
class Check:
    holds: bool
    text: str


def check(evidence: Evidence) -> list[Check]:
    """All checks of the demo, with their numbers."""
    return [_complete(evidence), _once(evidence), _ledger(evidence), _lag(evidence)]


def _complete(e: Evidence) -> Check:
    found, wanted = set(e.table) | set(e.ordinary), set(range(1, e.produced + 1))
    text = (
        f"every order arrived: {e.produced:,} produced = {len(e.table):,} in the table + {len(e.ordinary):,} ordinary"
    )
    if found == wanted and len(e.table) + len(e.ordinary) == e.produced:
        return Check(e.produced > 0, text)
    sums = f"{e.produced:,} produced, {len(e.table):,} in the table, {len(e.ordinary):,} ordinary"
    return Check(False, f"not every order arrived: {sums}; {_some('missing', wanted - found)}, "
                 f"{_some('never produced', found - wanted)}")  # fmt: skip


def _once(e: Evidence) -> Check:
    counts = Counter(e.table)
    counts.update(e.ordinary)
    twice = {order for order, count in counts.items() if count > 1}
    if twice:
        return Check(False, f"not once each: {_some('orders twice', twice)}")
    return Check(True, f"no order arrived twice: {len(counts):,} distinct order numbers in both")


def _ledger(e: Evidence) -> Check:
    """Compare Kafka's offset with the ledger, or with the ordinary consumer where that one read the partition last."""
    ordinary = {p for p, n in e.ordinary_last.items() if n > e.ledger.get(p, 0)}
    wrong = []
    for p in e.ends:
        recorded = e.ordinary_last[p] if p in ordinary else e.ledger.get(p)
        if recorded is None or recorded != e.committed.get(p):
            wrong.append(f"partition {p}: committed {e.committed.get(p)}, recorded {recorded}")
    if wrong or not e.ends:
        return Check(False, f"the group's offsets differ from the table's: {'; '.join(wrong) or 'no partitions'}")
    job = len(e.ends) - len(ordinary)
    return Check(
        True, f"Kafka's committed offset = the offset in the table's last commit, on {job} of {job} partitions"
    )


def _lag(e: Evidence) -> Check:
    lag = {p: end - e.committed.get(p, 0) for p, end in e.ends.items()}
    if any(lag.values()):
        return Check(False, f"the group's lag is not zero: {lag}")
    return Check(True, f"the group's lag is 0 at the end of all {len(lag)} partitions")


def _some(what: str, orders: set[int]) -> str:
    first = ", ".join(map(str, sorted(orders)[:5]))
    return f"{len(orders):,} {what}" + (f" ({first}{', …' if len(orders) > 5 else ''})" if orders else "")
