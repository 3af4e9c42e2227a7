"""Casts values of a batch to the types of a table, and tells which of them would be others then.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: what
happens to a row with such a value (:mod:`dead_letters`, :mod:`merge`).
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from spark_group_source.delta import table_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_EXACT = frozenset({"tinyint", "smallint", "int", "bigint", "decimal"})
_TEXT = frozenset({"string", "char", "varchar"})


class Cast(NamedTuple):
    """How a column gets the table's type."""

    column: str
    """The table's name of the column."""
    text: str
    """The value with the table's type, in SQL; null if it has none."""
    is_same: str
    """Whether the value has that type and is not another one then."""


def casts_of(schema: "StructType", rows: "DataFrame", *, keys: Collection[str] = ()) -> dict[str, Cast]:
    """Return the columns of the rows whose types differ from the table's. Nested types are Delta's to refuse.

    Numbers are compared with whole and decimal ones: 1.9 is no INT. A DOUBLE is rounded to a FLOAT, as it is by Delta.

    Args:
        schema: the table's columns.
        keys: columns whose values must be the same in any type: two keys of a day must not become one date. Text only
            has to be of the type.
    """
    # Delta compares names without their case.
    types = {field.name.lower(): (field.name, field.dataType.simpleString()) for field in rows.schema.fields}
    casts = {}
    for field in schema.fields:
        kind = field.dataType.simpleString()
        name, former = types.get(field.name.lower(), (field.name, kind))
        if kind != former and "<" not in kind + former:
            value = table_names.quoted(name)
            text = f"try_cast({value} AS {table_names.sql_type(field.dataType)})"
            of_kind, of_value = (each.partition("(")[0] for each in (kind, former))
            is_exact = of_kind in _EXACT and of_value in _EXACT | {"float", "double"}
            is_exact |= name in keys and of_value not in _TEXT
            # Cast back, as Spark compares a FLOAT and a DECIMAL as doubles, and 1.1 is another one in each.
            is_same = f"try_cast({text} AS {former}) = {value}" if is_exact else f"{text} IS NOT NULL"
            casts[name] = Cast(field.name, text, is_same)
    return casts
