"""Random histories of a table that are in order, and one fault in each: what ``verify`` says of both.

Runs in: ``tests.bench ledgers``. No Kafka: batches are planned here, and handed to sinks as ``foreachBatch`` does. A
history has batches of two groups by both ways, replays, deleted checkpoints, positions that followed another member,
resets, a RESTORE that was settled, and what others do to a table. The same seed draws the same history.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
from delta_files import living_files
from sink_source import SCHEMA, Ranges, offset
from sink_words import Query, actions, commits, records

from spark_group_source.delta import notes, verified
from spark_group_source.delta.kept import read_ledger, set_ledger
from spark_group_source.delta.ledger import Ledger
from spark_group_source.delta.sink import Tier
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 2
TIERS: tuple[Tier, ...] = ("transaction", "writer-options")
RECORDS_MAX = 6
"""Of a partition in a batch."""


class Writer:
    """The queries of one group, which reads a topic of its own."""

    def __init__(self, spark: "SparkSession", root: Path, group: str, chance: random.Random) -> None:
        self.group, self.topic = group, f"topic-{group}"
        self.at = dict.fromkeys(range(PARTITIONS), 0)
        self.epoch = 0
        self._spark, self._root, self._random = spark, root, chance
        self._queries = 0
        self.query, self.batch = self._anew(), -1

    def _anew(self) -> Query:
        self._queries += 1
        return Query(self._spark, self._root, f"{self.group}-{self._queries}")

    def write(self, table: Path, *, back: int = 0, ahead: int = 0, followed: bool = False) -> None:
        """A batch; ``back`` and ``ahead``: how far from the ledger it begins."""
        ranges: Ranges = {}
        for partition, at in self.at.items():
            start = max(at - back, 0) + ahead
            ranges[self.topic, partition] = (start, max(start, at) + self._random.randint(0, RECORDS_MAX))
        self.batch += 1
        planned = offset(
            self.batch,
            ranges,
            group=self.group,
            stream=self.query.id,
            epoch=self.epoch,
            followed=list(ranges) if followed else [],
        )
        for _ in range(self._random.choice((1, 1, 1, 2))):  # the second is a replay after a restart
            sink = self.query.sink(table, tier=self._random.choice(TIERS), checkpoint=str(self.query.root))
            self.query.run(sink, self.batch, planned)
        self.at = {partition: end for (_, partition), (_, end) in ranges.items()}

    def lose_checkpoint(self, table: Path) -> None:
        self.query, self.batch = self._anew(), -1
        self.write(table, back=self._random.randint(0, 5))

    def reset(self, table: Path, at: dict[int, int]) -> None:
        self.at, self.epoch = at, self.epoch + 1
        offsets = {TopicPartition(self.topic, p): n for p, n in at.items()}
        ids = {self.topic: "id-1"}
        set_ledger(self._spark, str(table), self.group, offsets, reason="r", topic_ids=ids, epoch=self.epoch)


class History:
    """One table."""

    def __init__(self, spark: "SparkSession", root: Path, seed: int) -> None:
        self.spark, self.table, self.seed = spark, root / "table", seed
        self._random = random.Random(seed)
        self.writers = [Writer(spark, root, group, self._random) for group in ("etl", "other")]
        self.steps: Counter[str] = Counter()
        self._foreign = 0

    def tell(self, steps: int) -> None:
        for writer in self.writers:
            writer.write(self.table)
        its: list[Callable[[], str]] = [self._ours] * 6 + [self._others] * 3 + [self._reset, self._restore]
        for _ in range(steps):
            self.steps[self._random.choice(its)()] += 1

    def _ours(self) -> str:
        writer = self._random.choice(self.writers)
        kind = self._random.choice(("batch", "batch", "batch", "checkpoint lost", "followed"))
        if kind == "checkpoint lost":
            writer.lose_checkpoint(self.table)
        else:
            writer.write(self.table, followed=kind == "followed", ahead=3 * (kind == "followed"))
        return kind

    def _others(self) -> str:
        name = f"delta.`{self.table}`"
        kind = self._random.choice(("append", "OPTIMIZE", "property", "DELETE"))
        if kind == "append":
            self._foreign += 1
            self._append(records(self._foreign, self._foreign + 1, topic="foreign"))
        elif kind == "OPTIMIZE":
            self.spark.sql(f"OPTIMIZE {name}")
        elif kind == "property":
            self.spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('their.own' = '{self._random.random()}')")
        else:
            self.spark.sql(f"DELETE FROM {name} WHERE topic = 'foreign'")
        return kind

    def _reset(self) -> str:
        writer = self._random.choice(self.writers)
        writer.reset(self.table, {partition: at + 2 for partition, at in writer.at.items()})
        return "reset"

    def _restore(self) -> str:
        """Of the last commits one, and each group goes on where the table stands."""
        last = len(commits(self.table)) - 1
        to = self._random.randint(min(max(last - 3, 3), last), last)
        self.spark.sql(f"RESTORE TABLE delta.`{self.table}` TO VERSION AS OF {to}")
        for writer in self.writers:
            there = read_ledger(self.spark, str(self.table), writer.group)
            assert there is not None
            writer.reset(self.table, {tp.partition: at for tp, at in there.offsets.items()})
        return "RESTORE"

    def kinds(self) -> list[str]:
        return [found.kind for found in verified.verify(self.spark, str(self.table)).findings]

    # --- faults -----------------------------------------------------------------------------------------------------

    def faults(self) -> dict[str, Callable[[], None]]:
        """By what they are to be called; those that this history lets be found."""
        faults = {
            "doubled": self._double,
            "gap": lambda: self.writers[0].write(self.table, ahead=3),
            "ledger": lambda: self._noted(0, Ledger(group="etl", number=1_000)),
            "overlap": lambda: self._noted(-1, None),
            "behind": self._behind,
            "restore": self._restored,
        }
        return faults if self.steps["DELETE"] or self.steps["RESTORE"] else {**faults, "missing": self._remove}

    def _ours_of(self) -> list[Path]:
        """Files with a group's rows and nobody else's."""
        found = []
        for file in living_files(self.table):
            topics = set(pyarrow.parquet.ParquetFile(file).read(["topic"])["topic"].to_pylist())
            found += [file] * (bool(topics) and "foreign" not in topics)
        return found

    def _double(self) -> None:
        file = self._random.choice(self._ours_of())
        copy = file.with_name("copy-" + file.name)
        copy.write_bytes(file.read_bytes())
        (add,) = [a for c in commits(self.table) for a in actions(c, "add") if a["path"] == file.name][-1:]
        self._inject({"add": {**add, "path": copy.name}})

    def _remove(self) -> None:
        file = self._random.choice(self._ours_of())
        self._inject({"remove": {"path": file.name, "deletionTimestamp": 1, "dataChange": True}})

    def _noted(self, begins: int, ledger: Ledger | None) -> None:
        """A batch with a note that was never written so."""
        writer = self.writers[0]
        ranges = {(writer.topic, p): (at + begins, at + 5) for p, at in writer.at.items()}
        planned = offset(writer.batch + 1, ranges, epoch=writer.epoch, followed=list(ranges))
        self._inject(note=notes.text([planned], [ledger] if ledger else []))

    def _behind(self) -> None:
        writer = self.writers[0]
        self._append(records(writer.at[0] + 50, writer.at[0] + 51, topic=writer.topic))

    def _restored(self) -> None:
        self.writers[0].write(self.table, ahead=0)
        before = len(commits(self.table)) - 2
        self.writers[0].write(self.table)
        self.spark.sql(f"RESTORE TABLE delta.`{self.table}` TO VERSION AS OF {before}")

    def _append(self, rows: list[Any]) -> None:
        self.spark.createDataFrame(rows, SCHEMA).write.format("delta").mode("append").save(str(self.table))

    def _inject(self, *lines: dict[str, Any], note: str | None = None) -> None:
        info: dict[str, Any] = {"timestamp": 1, "operation": "WRITE", "operationParameters": {"mode": "Append"}}
        info |= {"operationMetrics": {}} if note is None else {"operationMetrics": {}, "userMetadata": note}
        text = "\n".join(json.dumps(line) for line in [{"commitInfo": info}, *lines])
        (self.table / "_delta_log" / f"{len(commits(self.table)):020}.json").write_text(text + "\n")


def judged(spark: "SparkSession", root: Path, seed: int, steps: int) -> tuple[str, list[str]]:
    """A history and its fault: what it was, and what ``verify`` got wrong."""
    history = History(spark, root, seed)
    history.tell(steps)
    found = history.kinds()
    wrong = [f"seed {seed}: a history in order ({dict(history.steps)}) has {found}"] if found else []
    faults = history.faults()
    kind = sorted(faults)[seed % len(faults)]
    faults[kind]()
    found = history.kinds()
    wrong += [] if kind in found else [f"seed {seed}: {kind} is not found, but {found}"]
    return kind, wrong
