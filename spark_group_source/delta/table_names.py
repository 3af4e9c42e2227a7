"""The names of a table and of its columns: as users write them, qualified, in SQL, and in commands of error messages.
Also the casts of values to the types of its columns.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line.
Deliberately absent: whether the table exists, what happens to a row with a value that its column cannot have
(:mod:`dead_letters`, :mod:`merge`), running a command, and deciding which one helps.

The sink knows no brokers, so a command connects with the arguments that a run of the group on this host has published.
"""

import json
import os
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source import command_line
from spark_group_source.errors import OptionError
from spark_group_source.host import run_files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType

    from spark_group_source.model import TopicPartition

RETENTION = "delta.setTransactionRetentionDuration"
"""The table property after whose time Delta deletes ``SetTransaction`` numbers."""

LOG_RETENTION = "delta.logRetentionDuration"
"""The table property after whose time Delta deletes commits from the log."""

LOG_RETENTION_DEFAULT = "interval 30 days"

_UNITS = {"week": 604_800_000, "day": 86_400_000, "hour": 3_600_000, "minute": 60_000, "second": 1000}

RECORD_COLUMNS = {"topic": "string", "partition": "int", "offset": "bigint"}
"""The columns that identify the Kafka record of a row, with their types."""

_ROUNDED = frozenset({"float", "double"})
_NUMBERS = frozenset({"boolean", "tinyint", "smallint", "int", "bigint", "decimal"}) | _ROUNDED
_TIMES = frozenset({"date", "timestamp", "timestamp_ntz"})
_TEXT = frozenset({"string", "char", "varchar"})

_SCHEME = r"[a-zA-Z][\w+.-]*:"
_NOT_IN_NAMES = re.compile(r"[ ,;{}()\n\t=]")


def canonical(table: str | os.PathLike[str]) -> str:
    """Return a table as a path or a name in the catalog. SQL's form delta.`/path` becomes a path.

    Raises:
        OptionError: the text is empty, or has a variable that Spark replaces in SQL.
    """
    text = os.fspath(table)
    quoted = re.fullmatch(r"delta\.`(.+)`", text, flags=re.IGNORECASE)
    text = quoted[1] if quoted else text
    if isinstance(table, os.PathLike) and "/" not in text:
        text = "./" + text
    if not text.strip():
        raise OptionError("the table is empty: pass a path (it contains a slash) or a table name")
    if "${" in text:
        raise OptionError(f"the table is {text!r}: Spark replaces ${{...}} in SQL, so choose a path or name without it")
    return text


def comparable(table: str) -> str:
    """Return one text for the spellings of a table: catalogs ignore the case of names, and file systems a last slash.
    The schemes of paths stay, as the default file system is the session's, and relative paths, as on Spark Connect
    another process with another folder compares them, too."""
    if not is_path(table):
        return table.lower()
    return table.rstrip("/") if re.match(_SCHEME, table) else os.path.normpath(table)


def is_path(table: str) -> bool:
    """Return whether a table is named by its path: whether it contains a slash."""
    return "/" in table


def require_separate_folders(table: str, checkpoint: str) -> None:
    """Raise OptionError if a table and a query's checkpoint are one folder, in which Delta finds no table among other
    files, or if the checkpoint is in the table's folder where VACUUM removes its files: it leaves folders of the table
    alone whose names begin with ``_`` or ``.``."""
    if not is_path(table):
        return
    at, own = _absolute(checkpoint), _absolute(table)
    if at == own:
        raise OptionError(
            f"the table and the query's checkpoint are one folder, {table}, in which Delta cannot create a table. Set "
            "another checkpointLocation, and remove the query's files from that folder if it never had the table",
            checkpoint=checkpoint,
        )
    below = at.removeprefix(f"{own}/")
    if below != at and not below.startswith(("_", ".")):
        hidden = f"{table.rstrip('/')}/_checkpoints/{below}"
        raise OptionError(
            f"the query's checkpoint {checkpoint} is in the folder of table {table}, where VACUUM removes its files. "
            f"Nothing was written. Move the checkpoint, for example to {hidden}, and set that checkpointLocation: "
            "VACUUM leaves folders alone whose names begin with an underscore",
            checkpoint=checkpoint,
        )


def _absolute(path: str) -> str:
    local = re.sub("^file:/*", "/", path)
    return local.rstrip("/") if re.match(_SCHEME, local) else os.path.abspath(local)


def qualified(spark: "SparkSession", table: str) -> str:
    """Return a relative path as Hadoop completes it (on a local file system, with the driver's working directory),
    because SQL takes only absolute paths. Other tables, and all tables on Spark Connect, are returned unchanged."""
    is_absolute = table.startswith("/") or re.match(_SCHEME, table) is not None
    return table if not is_path(table) or is_absolute else location(spark, table) or table


def location(spark: "SparkSession", table: str) -> str | None:
    """Return the URI of a path; None on Spark Connect, where Hadoop's settings cannot be reached."""
    if not hasattr(spark, "_jsparkSession"):
        return None
    system, path = hadoop_path(spark, table)
    return str(system.makeQualified(path).toString())


def hadoop_path(spark: "SparkSession", path: str) -> tuple[Any, Any]:
    """Return the Hadoop file system of a path, and the path as Hadoop's class, on classic Spark."""
    jvm: Any = spark._jvm
    found = jvm.org.apache.hadoop.fs.Path(path)
    return found.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()), found


def interval_ms(text: str) -> int:
    """Return the time of an interval as table properties have it, such as ``interval 30 days``, in ms; 0 for a text
    that is not understood."""
    parts = re.findall(r"(\d+)\s+([a-z]+?)s?\b", text.lower())
    rest = re.sub(r"\d+\s+[a-z]+|interval|\s", "", text.lower())
    return 0 if rest else sum(int(n) * _UNITS.get(unit, 0) for n, unit in parts)


def sql_name(table: str) -> str:
    """Return the table as it is written in SQL."""
    return "delta.`" + table.replace("`", "``") + "`" if is_path(table) else table


def quoted(column: str) -> str:
    """Return the name of a column as it is written in SQL."""
    return "`" + column.replace("`", "``") + "`"


def needs_mapping(column: str) -> bool:
    """Return whether Delta accepts the name of a column with column mapping only. ``deltalake`` accepts every name."""
    return _NOT_IN_NAMES.search(column) is not None


def sql_columns(schema: "StructType") -> str:
    """Return the columns of a new table as they are written in SQL: with their comments, and each may be null."""
    return ", ".join(
        f"{quoted(field.name)} {sql_type(field.dataType)}" + _sql_comment(field.metadata.get("comment", ""))
        for field in schema.fields
    )


def _sql_comment(text: str) -> str:
    # Spark replaces ${...} in the text of a statement, also within a literal.
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("$", "\\u0024")
    return f" COMMENT '{escaped}'" if text else ""


def sql_type(kind: "DataType") -> str:
    """Return a type in SQL. ``simpleString()`` does not quote the names of nested fields, and calls TIMESTAMP_LTZ by a
    name that is another type in some sessions."""
    from pyspark.sql.types import ArrayType, MapType, StructType, TimestampType

    match kind:
        case StructType():
            fields = (f"{quoted(f.name)}: {sql_type(f.dataType)}" for f in kind.fields)
            return f"STRUCT<{', '.join(fields)}>"
        case ArrayType():
            return f"ARRAY<{sql_type(kind.elementType)}>"
        case MapType():
            return f"MAP<{sql_type(kind.keyType)}, {sql_type(kind.valueType)}>"
        case TimestampType():
            return "TIMESTAMP_LTZ"
        case _:
            return kind.simpleString()


class Cast(NamedTuple):
    """How a column gets the table's type."""

    column: str
    """The table's name of the column."""
    text: str
    """The value with the table's type, in SQL; null if it has none. A nested value keeps its type."""
    is_same: str
    """Whether the value is null, or has that type and is not another one then."""


def casts_of(schema: "StructType", rows: "DataFrame", *, keys: Collection[str] = ()) -> dict[str, Cast]:
    """Return the columns of the rows whose types differ from the table's.

    Args:
        schema: the table's columns.
        keys: the keys of a merge, whose values must be the same in any type: two DOUBLEs must not become one FLOAT.
            Nested types are compared for a merge only: Delta refuses to append them, and merges changed values.
    """
    casts = {}
    for name, former, field in _pairs(rows.schema, schema):
        value, kind = quoted(name), field.dataType
        is_nested = "<" in kind.simpleString()
        if (is_same := _same(value, former, kind, is_key=name in keys)) and (keys or not is_nested):
            text = value if is_nested else f"try_cast({value} AS {sql_type(kind)})"
            casts[name] = Cast(field.name, text, is_same)
    return casts


def _pairs(rows: "StructType", schema: "StructType") -> "list[tuple[str, DataType, StructField]]":
    """Return the name and type of each column of the rows that the table has, and the table's column."""
    of_rows = {field.name.lower(): field for field in rows.fields}  # Delta compares names without their case
    pairs = [(of_rows.get(field.name.lower()), field) for field in schema.fields]
    return [(found.name, found.dataType, field) for found, field in pairs if found is not None]


def _same(value: str, former: "DataType", kind: "DataType", *, is_key: bool, depth: int = 0) -> str:
    """Return the condition, in SQL, that a value is null or the same one in another type, and so are the values in it.

    Numbers are compared with whole and decimal ones: 1.9 is no INT. A DOUBLE is rounded to a FLOAT, as it is by Delta.
    Text only has to be of the type. A number is no time, as it may have any unit.

    Returns:
        The condition; empty if the types are the same, or if only one of them is nested, which Delta refuses.
    """
    from pyspark.sql.types import ArrayType, MapType, StructType

    def entries(of: MapType) -> ArrayType:
        return ArrayType(StructType().add("key", of.keyType).add("value", of.valueType))

    of_value, of_kind = (each.simpleString().partition("(")[0] for each in (former, kind))
    match former, kind:
        case StructType(), StructType():
            fields = [(f"{value}.{quoted(name)}", of, field.dataType) for name, of, field in _pairs(former, kind)]
            found = filter(None, (_same(*each, is_key=is_key, depth=depth) for each in fields))
            return " AND ".join(f"({condition})" for condition in found)
        case MapType(), MapType():
            return _same(f"map_entries({value})", entries(former), entries(kind), is_key=is_key, depth=depth)
        case ArrayType(), ArrayType():
            item = f"v{depth}"
            of_item = _same(item, former.elementType, kind.elementType, is_key=is_key, depth=depth + 1)
            return of_item and f"coalesce(forall({value}, {item} -> {of_item}), true)"
        case _ if former.simpleString() == kind.simpleString() or "<" in of_value + of_kind:
            return ""
    text = f"try_cast({value} AS {sql_type(kind)})"
    are_known = {of_value, of_kind} <= _NUMBERS | _TIMES
    if are_known and (of_value in _TIMES) != (of_kind in _TIMES):
        is_same = "false"
    elif of_value not in _TEXT and (is_key or (are_known and of_kind not in _ROUNDED)):
        # Cast back, as Spark compares a FLOAT and a DECIMAL as doubles, and 1.1 is another one in each.
        is_same = f"try_cast({text} AS {sql_type(former)}) = {value}"
    else:
        is_same = f"{text} IS NOT NULL"
    return f"{value} IS NULL OR coalesce({is_same}, false)"


def read(spark: "SparkSession", table: str, *, version: int | None = None) -> "DataFrame":
    """Return the rows of the table, or of one of its versions."""
    reader = spark.read if version is None else spark.read.option("versionAsOf", version)
    return reader.format("delta").load(table) if is_path(table) else reader.table(table)


def no_table(spark: "SparkSession", table: str) -> str:
    """Return the message that there is no such table."""
    return (
        f"there is no Delta table {table!r}. A path contains a slash; a name is looked up in "
        f"{spark.catalog.currentCatalog()}.{spark.catalog.currentDatabase()}"
    )


def reset_command(group: str, table: str | None, *position: str) -> str:
    """Return the ``spark-group reset`` that moves Kafka's offsets and the ledger of a table to one position.

    Args:
        table: None: there is no table yet.
        position: the option that names the position, with its value: ``"--to-ledger"``.
    """
    there, named = run_files.connection(group), () if table is None else ("--table", table)
    return command_line.spark_group("reset", there, group, *position, *named, "--execute")


def to_offsets(offsets: "Mapping[TopicPartition, int]") -> tuple[str, str]:
    """Return the position of ``spark-group reset`` that names an offset for each partition."""
    named: dict[str, dict[str, int]] = {}
    for tp, n in sorted(offsets.items()):
        named.setdefault(tp.topic, {})[str(tp.partition)] = n
    return "--to-offsets", json.dumps(named)


def ledger_command(*words: str) -> str:
    """Return a ``spark-group ledger`` command that changes a ledger."""
    return command_line.spark_group("ledger", (), None, *words, "--execute")


def restore_command(table: str, version: int) -> str:
    """Return the SQL statement that restores a table to a version."""
    return f"RESTORE TABLE {sql_name(table)} TO VERSION AS OF {version}"
