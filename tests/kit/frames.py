"""A fake of Spark for the sink's tests, without a JVM: DataFrames of pyarrow, and the session calls of the sink.

Runs in: tests. Deliberately absent: SQL, queries, Delta's classes. Tables are real: ``deltalake`` writes the log, and a
DataFrame writes real Parquet files like Spark's tasks. :class:`DeltaSession` also appends like Delta's own writer.
``tests/delta/test_fakes.py`` compares the commits and rows with those that Spark leaves. :func:`without_ranges`
and those about topics replace functions of their names in :mod:`spark_group_source.delta`, which need a JVM.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql.types import StructType

from spark_group_source.model import OffsetRange

TYPES = {"string": pa.string(), "int": pa.int32(), "long": pa.int64(), "bigint": pa.int64()}
NAMES = {pa.string(): "string", pa.int32(): "integer", pa.int64(): "long"}


class Frame:
    """The part of a DataFrame that a sink uses."""

    def __init__(self, session: "Session", rows: pa.Table) -> None:
        self.sparkSession, self.rows = session, rows

    @property
    def schema(self) -> Any:
        fields = [{"name": f.name, "type": NAMES[f.type], "nullable": True, "metadata": {}} for f in self.rows.schema]
        return StructType.fromJson({"type": "struct", "fields": fields})

    def select(self, *columns: str) -> "Frame":
        return Frame(self.sparkSession, self.rows.select([column.strip("`") for column in columns]))

    def persist(self, level: object) -> "Frame":
        return self

    def unpersist(self) -> None:
        pass

    def coalesce(self, partitions: int) -> "Frame":
        return self

    @property
    def write(self) -> "_Writer":
        return _Writer(self.rows)


_ESCAPED = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{\[\]^]""")
"""The characters of a value that Spark escapes in the name of a partition's folder."""


class _Writer:
    def __init__(self, rows: pa.Table) -> None:
        self._rows, self._by = rows, list[str]()
        self._options: dict[str, Any] = {}

    def format(self, name: str) -> "_Writer":
        assert name == "delta"
        return self

    def option(self, name: str, value: object) -> "_Writer":
        self._options[name] = value
        return self

    def options(self, **options: object) -> "_Writer":
        self._options |= options
        return self

    def mode(self, mode: str) -> "_Writer":
        return self

    def partitionBy(self, *columns: str) -> "_Writer":
        self._by = list(columns)
        return self

    def parquet(self, folder: str) -> None:
        root = Path(folder.removeprefix("file:"))
        root.mkdir(parents=True)
        if not self._by:
            pq.write_table(self._rows, root / "part-00000.parquet")
            return
        (by,) = self._by
        for value in sorted(set(self._rows[by].to_pylist())):
            place = root / f"{by}={_ESCAPED.sub(lambda found: f'%{ord(found[0]):02X}', str(value))}"
            place.mkdir()
            mask = pa.array([found == value for found in self._rows[by].to_pylist()])
            pq.write_table(self._rows.filter(mask).drop_columns([by]), place / "part-00000.parquet")

    def save(self, table: str) -> None:
        """Append like Delta with ``txnAppId`` and ``txnVersion``: a number that is used is skipped without an error."""
        application, number = self._options["txnAppId"], self._options["txnVersion"]
        opened = DeltaTable(table)
        used = opened.transaction_version(application)
        if used is not None and used >= number:
            return
        properties = CommitProperties(
            custom_metadata={"userMetadata": self._options["userMetadata"]},
            app_transactions=[Transaction(application, number)],
        )
        write_deltalake(opened, self._rows, mode="append", commit_properties=properties)


RUN_ID = "run"
"""The property of a test's session with the id of the run whose batch this thread has; Spark keeps it elsewhere."""


class Session:
    """A classic session with the local file system and without Delta Lake."""

    def __init__(self) -> None:
        self.properties: dict[str, str] = {}
        """Local properties that Spark sets in the thread of a batch."""
        self.sparkContext = SimpleNamespace(getLocalProperty=self.properties.get)
        run = SimpleNamespace(runId=lambda: self.properties[RUN_ID])

        def current(query_id: str) -> SimpleNamespace | None:
            return run if RUN_ID in self.properties else None

        self._jsparkSession = SimpleNamespace(
            sessionState=lambda: SimpleNamespace(newHadoopConf=lambda: None),
            sharedState=lambda: SimpleNamespace(activeStreamingQueries=lambda: SimpleNamespace(get=current)),
        )
        system = SimpleNamespace(getProperty=lambda name: "17")
        self._jvm = SimpleNamespace(
            org=SimpleNamespace(apache=SimpleNamespace(hadoop=SimpleNamespace(fs=SimpleNamespace(Path=_HadoopPath)))),
            java=SimpleNamespace(
                lang=SimpleNamespace(System=system), util=SimpleNamespace(UUID=SimpleNamespace(fromString=str))
            ),
            io=SimpleNamespace(delta=SimpleNamespace(package=None, tables=SimpleNamespace(DeltaTable=None))),
        )
        self.conf = _Conf()

    def createDataFrame(self, rows: Sequence[tuple[Any, ...]], schema: Any) -> Frame:
        if not isinstance(schema, str):
            schema = ",".join(f"{field.name} {field.dataType.simpleString()}" for field in schema.fields)
        columns = [column.split() for column in schema.split(",")]
        arrays = [pa.array([row[number] for row in rows], TYPES[kind]) for number, (_, kind) in enumerate(columns)]
        return Frame(self, pa.table(arrays, names=[name for name, _ in columns]))


class DeltaSession(Session):
    """A session that also appends with Delta's documented options for idempotent writes."""

    def __init__(self) -> None:
        super().__init__()
        self._jvm.io.delta.tables.DeltaTable = type("JavaClass", (), {})()
        self.read = SimpleNamespace(format=lambda name: SimpleNamespace(load=self._load))

    def _load(self, table: str) -> Frame:
        columns = {"integer": "int"}
        fields = json.loads(DeltaTable(table).schema().to_json())["fields"]
        return self.createDataFrame([], ",".join(f"{f['name']} {columns.get(f['type'], f['type'])}" for f in fields))


class _Conf:
    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def get(self, key: str, default: str | None = "INT96") -> str | None:
        return self._values.get(key, default)

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def unset(self, key: str) -> None:
        self._values.pop(key, None)


class _HadoopPath:
    """A path, its file system and an open file: three classes of Hadoop in one."""

    def __init__(self, text: str) -> None:
        self._path = Path(text.removeprefix("file:")).absolute()

    def getFileSystem(self, conf: object) -> "_HadoopPath":
        return self

    def makeQualified(self, path: "_HadoopPath") -> "_HadoopPath":
        return path

    def toString(self) -> str:
        return f"file:{self._path}"

    def exists(self, path: "_HadoopPath") -> bool:
        return path._path.exists()

    def open(self, path: "_HadoopPath") -> "_HadoopPath":
        return path

    def readAllBytes(self) -> bytes:
        return self._path.read_bytes()

    def close(self) -> None:
        pass


def without_ranges(df: Frame, drop: Sequence[OffsetRange], table: str) -> Frame:
    """The rows of a batch, except those in the given ranges."""
    keep = [
        not any(
            (row["topic"], row["partition"]) == r.tp and r.start <= row["offset"] < r.end  # a null topic is in no range
            for r in drop
        )
        for row in df.rows.to_pylist()
    ]
    return Frame(df.sparkSession, df.rows.filter(pa.array(keep, pa.bool_())))


def other_topics(rows: Frame, topics: Sequence[str]) -> list[str]:
    """The topics of the rows that are none of these."""
    return sorted({"null" if found is None else found for found in rows.rows["topic"].to_pylist()} - {*topics})


def rows_of(rows: Frame, topics: Sequence[str]) -> Frame:
    """The rows that have these topics."""
    keep = [found in topics for found in rows.rows["topic"].to_pylist()]
    return Frame(rows.sparkSession, rows.rows.filter(pa.array(keep, pa.bool_())))
