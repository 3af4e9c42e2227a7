"""How a table is named, here and in SQL.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line.
Deliberately absent: whether it is there.
"""

import os
import re
from typing import TYPE_CHECKING, Any

from spark_group_source.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RETENTION = "delta.setTransactionRetentionDuration"
"""The property by which a table forgets the numbers of applications."""


def canonical(table: str | os.PathLike[str]) -> str:
    """A table as this package names it: a path, or a name in the catalog. SQL's form delta.`/path` is a path too.

    Raises:
        OptionError: there is nothing left to name.
    """
    text = os.fspath(table)
    quoted = re.fullmatch(r"delta\.`(.+)`", text, flags=re.IGNORECASE)
    text = quoted[1] if quoted else text
    if isinstance(table, os.PathLike) and "/" not in text:
        text = "./" + text
    if not text.strip():
        raise OptionError("the table is empty: give a path (it has a slash in it) or a table name")
    return text


def is_path(table: str) -> bool:
    """A table is named by its path if there is a slash in it; everything else is a name in the catalog."""
    return "/" in table


def require_apart(table: str, checkpoint: str) -> None:
    """A table and a query's checkpoint need a folder each: Delta takes one with files of others for no table.

    Raises:
        OptionError: they are one folder.
    """
    if is_path(table) and _place(table) == _place(checkpoint):
        raise OptionError(
            f"the table and the query's checkpoint are one folder, {table}: give the query a checkpointLocation of its "
            "own, and remove what the query left in that folder if the table was never there",
            checkpoint=checkpoint,
        )


def _place(path: str) -> str:
    local = re.sub("^file:/*", "/", path)
    return local.rstrip("/") if re.match(r"[a-zA-Z][\w+.-]*:", local) else os.path.abspath(local)


def qualified(spark: "SparkSession", table: str) -> str:
    """A relative path as Hadoop completes it, on a local file system with the driver's working directory: SQL takes
    absolute ones only. Everything else, and on Spark Connect all, as it is."""
    absolute = table.startswith("/") or re.match(r"[a-zA-Z][\w+.-]*:", table) is not None
    return table if not is_path(table) or absolute else location(spark, table) or table


def location(spark: "SparkSession", table: str) -> str | None:
    """Where a path leads, with its file system; None on Spark Connect, where Hadoop's settings cannot be reached."""
    if not hasattr(spark, "_jsparkSession"):
        return None
    jvm: Any = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(table)
    system = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
    return str(system.makeQualified(path).toString())


def sql_name(table: str) -> str:
    """The table as SQL writes it."""
    return "delta.`" + table.replace("`", "``") + "`" if is_path(table) else table


def quoted(column: str) -> str:
    """The name of a column as SQL writes it."""
    return "`" + column.replace("`", "``") + "`"


def read(spark: "SparkSession", table: str) -> "DataFrame":
    """The rows of the table."""
    return spark.read.format("delta").load(table) if is_path(table) else spark.table(table)


def no_table(spark: "SparkSession", table: str) -> str:
    """That there is no such table."""
    return (
        f"there is no Delta table {table!r}. A path has a slash in it; a name is looked up in the catalog, now "
        f"{spark.catalog.currentCatalog()}.{spark.catalog.currentDatabase()}"
    )
