"""Helpers of the sink's tests: a query's batches without Kafka, and the content of a table's files.

Runs in: tests. Deliberately absent: Delta's own readers. The content of a table is read from the files of its log.
"""

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest
from delta_files import living_files
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import functions as F
from sink_source import SCHEMA, Ranges, rows_of, write_script

from spark_group_source.delta import Writer
from spark_group_source.delta.sink import DeltaSink
from spark_group_source.delta.table_history import Commit
from spark_group_source.delta.table_writer import TableWriter
from spark_group_source.delta.topic_sinks import DeltaSinks
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Row = tuple[str, int, int, str]

_BY_SPARK: dict[str, Any] = {"__name__": "pyspark.sql.utils"}
exec(compile("def call(sink, df, batch_id):\n    sink(df, batch_id)", "/lib/pyspark/sql/utils.py", "exec"), _BY_SPARK)

QUERY_S = 600
"""Longest run of one streaming query in a test, in seconds."""


def one(start: int, end: int, *, topic: str = "orders", partition: int = 0) -> Ranges:
    return {(topic, partition): (start, end)}


def records(start: int, end: int, *, topic: str = "orders", partition: int = 0) -> list[Row]:
    return rows_of([OffsetRange(TopicPartition(topic, partition), start, end)])


def created_table(spark: "SparkSession", folder: Path) -> Path:
    """Create a table as the sink creates it."""
    table = folder / "table"
    TableWriter(spark, str(table)).create(spark.createDataFrame([], SCHEMA))
    return table


def values_from(values: Sequence[bytes | None]) -> "Callable[[DataFrame], DataFrame]":
    """Replace the values of a batch's records, by offset."""

    def replaced(df: "DataFrame") -> "DataFrame":
        texts = F.array(*[F.lit(value) if value is not None else F.lit(None).cast("binary") for value in values])
        return df.withColumn("value", F.get(texts, F.col("offset").cast("int")))

    return replaced


class Query:
    """A query's checkpoint, and its batches, passed to a sink like by ``foreachBatch``."""

    def __init__(self, spark: "SparkSession", root: Path, name: str, writer: Writer = "auto") -> None:
        self.spark, self.root, self.id, self.writer = spark, root / name, f"query-{name}", writer
        (self.root / "offsets").mkdir(parents=True)
        (self.root / "metadata").write_text(json.dumps({"id": self.id}))

    def plan(self, batch_id: int, *lines: StreamOffset | str) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line.to_json_dict()) for line in lines]
        (self.root / "offsets" / str(batch_id)).write_text("\n".join(["v1", '{"batchTimestampMs":0}', *texts]))

    def rows(self, *lines: StreamOffset) -> "DataFrame":
        return self.spark.createDataFrame([r for line in lines for r in rows_of(line.batch())], SCHEMA)

    def run(self, sink: DeltaSink | DeltaSinks, batch_id: int, *lines: StreamOffset) -> None:
        """Plan a batch, and pass it to the sink itself."""
        self.plan(batch_id, *lines)
        _BY_SPARK["call"](sink, self.rows(*lines), batch_id)

    def run_function(self, sinks: Sequence[DeltaSink], batch_id: int, *lines: StreamOffset) -> None:
        """Plan a batch, and pass it to a user's function that calls these sinks."""
        self.plan(batch_id, *lines)
        for sink in sinks:
            sink(self.rows(*lines), batch_id)

    def finish(self, batch_id: int) -> None:
        """Note the batch in the commit log."""
        (self.root / "commits").mkdir(exist_ok=True)
        (self.root / "commits" / str(batch_id)).write_text("v1\n{}")

    def sink(self, table: Path | str, **arguments: Any) -> DeltaSink:
        return DeltaSink(table, **{"checkpoint": str(self.root), "writer": self.writer, **arguments})


NewQuery = Callable[[str], Query]
BeforeNextCommit = Callable[[Callable[[], object]], None]
"""``before_next_commit(action)``: run ``action`` once, before the next commit of a sink."""


def commits(table: Path | str) -> list[list[dict[str, Any]]]:
    """Return the actions of every commit, from the files of the log."""
    files = sorted((Path(table) / "_delta_log").glob("*.json"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def actions(commit: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [action[kind] for action in commit if kind in action]


def rows(table: Path | str) -> list[Any]:
    """Return the rows, from the files that the log lists; a column that a file lacks is None."""
    metadata = [found for commit in commits(table) for found in actions(commit, "metaData")]
    columns = [field["name"] for field in json.loads(metadata[-1]["schemaString"])["fields"]]
    found = [r for path in living_files(Path(table)) for r in pyarrow.parquet.ParquetFile(path).read().to_pylist()]
    return sorted((tuple(r.get(c) for c in columns) for r in found), key=lambda row: [(v is None, v) for v in row])


def notes(commit: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ledgers in a commit's ``userMetadata``."""
    texts = [info["userMetadata"] for info in actions(commit, "commitInfo") if "group" in info.get("userMetadata", "")]
    found = [json.loads(text) for text in texts]
    return [doc for docs in found for doc in (docs if isinstance(docs, list) else [docs]) if "ledger" in doc]


def next_offsets(table: Path | str, group: str = "etl") -> dict[tuple[str, int], int]:
    """Return the ledger of a group from the log's files."""
    ledgers = [doc["ledger"] for commit in commits(table) for doc in notes(commit) if doc["group"] == group]
    topics = ledgers[-1]["topics"] if ledgers else {}
    if isinstance(topics, str):
        topics = json.loads(zlib.decompress(base64.b64decode(topics.removeprefix("zlib:"))))
    return {(topic, p): n for topic, entry in topics.items() for p, n in numbers(entry["offsets"]).items()}


def numbers(text: str) -> dict[int, int]:
    """Return the numbers by partition of a text in a note."""
    found: dict[int, int] = {}
    for run in text.split(";") if text else ():
        first, *each = run.split(",")
        found |= {int(first) + n: int(number) for n, number in enumerate(each)}
    return found


def parquet_files(table: Path) -> set[str]:
    files = (f for f in table.rglob("*.parquet") if "_delta_log" not in f.parts)
    return {str(f.relative_to(table)) for f in files if not f.name.startswith(".")}


def rewrite(table: Path, version: int, kind: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the actions of one kind in a commit."""
    path = table / "_delta_log" / f"{version:020}.json"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if kind in line:
            change(line[kind])
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")


def clone_of(table: Path, version: int, clone: Path) -> Path:
    """Clone a version of a table, as ``CREATE TABLE ... CLONE`` does: rows and columns, no numbers and no notes."""
    DeltaTable.create(clone, DeltaTable(table).schema())
    found = DeltaTable(table, version=version).to_pyarrow_table()
    write_deltalake(clone, found, mode="append")
    log = clone / "_delta_log"
    lines = [line for number in (0, 1) for line in (log / f"{number:020}.json").read_text().splitlines()]
    kept = [action for action in map(json.loads, lines) if "commitInfo" not in action]
    parameters = {"source": f"delta.`file:{table}`", "sourceVersion": version}
    kept.append({"commitInfo": {"timestamp": 1, "operation": "CLONE", "operationParameters": parameters}})
    (log / f"{0:020}.json").write_text("\n".join(map(json.dumps, kept)) + "\n")
    (log / f"{1:020}.json").unlink()
    return clone


def expire_log(table: Path) -> None:
    """Delete the log files that Delta deletes after ``delta.logRetentionDuration``, once there is a checkpoint."""
    DeltaTable(table).alter.set_table_properties({"their.own": "1"}, raise_if_not_exists=False)
    DeltaTable(table).create_checkpoint()
    newest = max((table / "_delta_log").glob("*.checkpoint*.parquet")).name.split(".")[0]
    for file in (table / "_delta_log").glob("*.json"):
        if file.name.split(".")[0] < newest:
            file.unlink()
    assert not any("group" in info.get("userMetadata", "") for c in commits(table) for info in actions(c, "commitInfo"))


def cut_log(table: Path, first: int) -> None:
    """Delete the log files of the versions before this one, as a clean-up does that finds them too old."""
    DeltaTable(table).create_checkpoint()
    for file in (table / "_delta_log").glob("*.json"):
        if int(file.stem) < first:
            file.unlink()


FAR = 1_005
"""More commits than any search reads at once."""


def foreign_commits(table: Path, count: int) -> None:
    info = json.dumps({"commitInfo": {"timestamp": 1, "operation": "OPTIMIZE", "operationParameters": {}}})
    last = DeltaTable(table).version() + 1
    for version in range(last, last + count):
        (table / "_delta_log" / f"{version:020}.json").write_text(info + "\n")


def offsets_in(table: Path) -> list[int]:
    """Read the table itself: the log has no files that list its rows any more."""
    return sorted(DeltaTable(table).to_pyarrow_table()["offset"].to_pylist())


def stream(spark: "SparkSession", tmp_path: Path, script: Sequence[StreamOffset], name: str = "script") -> "DataFrame":
    path = write_script(tmp_path / f"{name}.json", script)
    return spark.readStream.format("scripted-group").option("script", path).load()


def run(df: "DataFrame", sink: Callable[["DataFrame", int], None], checkpoint: Path) -> list[int]:
    """Run every scripted batch; return the number of rows that each batch read."""
    started = df.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    running = started.trigger(availableNow=True).start()
    if not running.awaitTermination(QUERY_S):
        running.stop()
        pytest.fail(f"the query did not end within {QUERY_S} s")
    return [p["numInputRows"] for p in running.recentProgress]


class ListedCommits:
    """Commits from a list."""

    table = "t"

    def __init__(self, *commits: Commit) -> None:
        self._commits = commits

    def newest(self) -> int:
        return self._commits[-1].version

    def commits(self, newest: int, after: int) -> Iterator[Commit]:
        return (commit for commit in reversed(self._commits) if after < commit.version <= newest)

    def number(self, app_id: str) -> int | None:
        return None

    def restored_to(self, restore: Commit) -> int:
        return int(restore.parameters["version"])
