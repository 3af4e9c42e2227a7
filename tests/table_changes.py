"""What users do to a Delta table, by ``deltalake`` without a JVM and by Spark's statements, with the same names.

Runs in: tests. Deliberately absent: the product, and what a change means for it. ``tests/delta/test_fakes.py`` compares
what the product reads of the commits that both leave, and the rows.
"""

import json
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JJavaError
from pyspark.errors import IllegalArgumentException
from sink_helpers import clone_of, rewrite

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MISSING_FILES: tuple[type[Exception], ...] = (DeltaError, FileNotFoundError, IllegalArgumentException)
"""Raised, among others, where ``VACUUM`` deleted files of the version that a change reads."""

RETENTION_CHECK = "spark.databricks.delta.retentionDurationCheck.enabled"
"""The setting with which ``VACUUM`` refuses to delete files that are not old yet."""


class Changes(Protocol):
    """Changes of a table. ``at`` is a partition and the range of offsets of the changed rows; ``version`` is one whose
    rows a change brings back."""

    def delete(self, table: Path, topic: str, at: tuple[int, int, int]) -> None: ...
    def update(self, table: Path, topic: str, at: tuple[int, int, int]) -> None: ...
    def merge(self, table: Path, topic: str, at: tuple[int, int, int]) -> None: ...
    def optimize(self, table: Path) -> None: ...
    def vacuum(self, table: Path) -> None: ...
    def restore(self, table: Path, version: int) -> None: ...
    def restore_to_time(self, table: Path, version: int) -> None: ...
    def overwrite(self, table: Path, version: int) -> None: ...
    def replace(self, table: Path, version: int) -> None: ...
    def clone(self, table: Path, version: int, clone: Path) -> None: ...


def _where(topic: str, at: tuple[int, int, int]) -> str:
    partition, start, end = at
    return f"topic = '{topic}' AND partition = {partition} AND offset >= {start} AND offset < {end}"


def written_ms(table: Path, version: int) -> int:
    """When a version was written: Delta takes the time of its file."""
    return (table / "_delta_log" / f"{version:020}.json").stat().st_mtime_ns // 1_000_000


class ByFiles:
    """Changes by ``deltalake``. What it cannot do (REPLACE, CLONE) is made of its commits."""

    def delete(self, table: Path, topic: str, at: tuple[int, int, int]) -> None:
        DeltaTable(table).delete(_where(topic, at))

    def update(self, table: Path, topic: str, at: tuple[int, int, int]) -> None:
        DeltaTable(table).update(predicate=_where(topic, at), updates={"value": "value || '!'"})

    def merge(self, table: Path, topic: str, at: tuple[int, int, int]) -> None:
        rows, (partition, start, end) = DeltaTable(table).to_pyarrow_table(), at
        found = pc.and_(pc.equal(rows["topic"], topic), pc.equal(rows["partition"], partition))
        found = pc.and_(found, pc.and_(pc.greater_equal(rows["offset"], start), pc.less(rows["offset"], end)))
        merger = DeltaTable(table).merge(rows.filter(found), "s.value = t.value", source_alias="s", target_alias="t")
        merger.when_matched_delete("t.offset % 2 = 0").when_matched_update({"value": "t.value || '!'"}).execute()

    def optimize(self, table: Path) -> None:
        DeltaTable(table).optimize.compact()

    def vacuum(self, table: Path) -> None:
        DeltaTable(table).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)

    def restore(self, table: Path, version: int) -> None:
        DeltaTable(table).restore(version)

    def restore_to_time(self, table: Path, version: int) -> None:
        DeltaTable(table).restore(version)
        rewrite(table, DeltaTable(table).version(), "commitInfo", _as_restore_to_time)

    def overwrite(self, table: Path, version: int) -> None:
        write_deltalake(table, DeltaTable(table, version=version).to_pyarrow_table(), mode="overwrite")

    def replace(self, table: Path, version: int) -> None:
        self.overwrite(table, version)
        made = DeltaTable(table).version()
        definition: dict[str, Any] = {}
        for commit in sorted((table / "_delta_log").glob("*.json"))[: made + 1]:
            for action in map(json.loads, commit.read_text().splitlines()):
                definition = action.get("metaData", definition)
        if not definition:  # only a checkpoint has it
            return
        rewrite(table, made, "commitInfo", _as_replace)
        with (table / "_delta_log" / f"{made:020}.json").open("a") as file:
            file.write(json.dumps({"metaData": {**definition, "id": str(uuid.uuid4())}}) + "\n")

    def clone(self, table: Path, version: int, clone: Path) -> None:
        clone_of(table, version, clone)


def _as_restore_to_time(info: dict[str, Any]) -> None:
    info["operationParameters"] = {"version": None, "timestamp": "2026-01-01 00:00:00.0"}  # in an unknown time zone


def _as_replace(info: dict[str, Any]) -> None:
    info |= {"operation": "CREATE OR REPLACE TABLE AS SELECT", "operationParameters": {"isManaged": "false"}}


class ByStatements:
    """Changes by Spark's statements for Delta."""

    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark
        spark.conf.set(RETENTION_CHECK, "false")

    def _run(self, text: str, table: Path) -> None:
        self._spark.sql(text.replace("$T", f"delta.`{table}`"))

    def delete(self, table: Path, topic: str, at: tuple[int, int, int]) -> None:
        self._run(f"DELETE FROM $T WHERE {_where(topic, at)}", table)

    def update(self, table: Path, topic: str, at: tuple[int, int, int]) -> None:
        self._run(f"UPDATE $T SET value = value || '!' WHERE {_where(topic, at)}", table)

    def merge(self, table: Path, topic: str, at: tuple[int, int, int]) -> None:
        source = f"(SELECT value FROM $T WHERE {_where(topic, at)}) AS s"
        then = "WHEN MATCHED AND t.offset % 2 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET value = t.value || '!'"
        self._run(f"MERGE INTO $T AS t USING {source} ON s.value = t.value {then}", table)

    def optimize(self, table: Path) -> None:
        self._run("OPTIMIZE $T", table)

    def vacuum(self, table: Path) -> None:
        self._run("VACUUM $T RETAIN 0 HOURS", table)

    def restore(self, table: Path, version: int) -> None:
        self._run(f"RESTORE TABLE $T TO VERSION AS OF {version}", table)

    def restore_to_time(self, table: Path, version: int) -> None:
        at = datetime.fromtimestamp(written_ms(table, version) / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        self._run(f"RESTORE TABLE $T TO TIMESTAMP AS OF '{at}Z'", table)

    def overwrite(self, table: Path, version: int) -> None:
        old = self._spark.read.format("delta").option("versionAsOf", version).load(str(table))
        try:
            old.write.format("delta").mode("overwrite").save(str(table))
        except Py4JJavaError as exc:
            if "FILE_NOT_EXIST" not in str(exc):
                raise
            raise FileNotFoundError(f"files of version {version} do not exist") from exc

    def replace(self, table: Path, version: int) -> None:
        self._run(f"CREATE OR REPLACE TABLE $T USING delta AS SELECT * FROM $T VERSION AS OF {version}", table)

    def clone(self, table: Path, version: int, clone: Path) -> None:
        self._run(f"CREATE TABLE delta.`{clone}` SHALLOW CLONE $T VERSION AS OF {version}", table)
