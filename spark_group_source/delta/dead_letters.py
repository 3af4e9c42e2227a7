"""DeadLetters: rows that a table must not have go to another one, with the records that they come from.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: what is
decided about a batch (:mod:`ledger_decision`), the commit of the good rows (:mod:`sink`).

The bad records of a batch are committed before its good rows, so a crash in between leaves them in the dead-letter
table only. The next attempt reads there which records of its ranges are bad, and keeps to that, even if the code or the
table's constraints have changed: each record is in one of the two tables. The commits of a table's bad records have
``SetTransaction`` numbers of their own, so of two writers one commits first and the other decides again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from spark_group_source.delta import table_names
from spark_group_source.delta.table_writer import TableWriter

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ERROR, _CLASS = "_bad_record_error", "_bad_record_class"
_CHECK = "delta.constraints."


class Rule(NamedTuple):
    """What each row of a table must fulfil."""

    error_class: str
    """``RULE``, ``CAST``, ``NOT_NULL`` or ``CHECK``."""
    name: str
    expression: str
    """In SQL. A row is good if it is true, so not if it is null."""


# --- what is bad ------------------------------------------------------------------------------------------------------


def flag(named: Mapping[str, str], table: TableWriter, rows: "DataFrame") -> "DataFrame":
    """Return the rows with the types of the table, and with the first rule that a row violates; null in a good row."""
    from pyspark.sql import functions as F

    casts = {} if table.merge_schema else _casts(table, rows)
    cast_rules = [
        Rule("CAST", name, f"{table_names.quoted(name)} IS NULL OR {cast} IS NOT NULL") for name, cast in casts.items()
    ]
    cast_rows = rows.withColumns(_violated(cast_rules))
    if casts:
        cast_rows = cast_rows.withColumns({name: F.expr(cast) for name, cast in casts.items()})
    rules = [Rule("RULE", name, text) for name, text in named.items()]
    return cast_rows.withColumns(_violated([*rules, *_constraints(table, cast_rows)], F.col))


def _violated(rules: Sequence[Rule], former: "Callable[[str], Column] | None" = None) -> "dict[str, Column]":
    """Return the columns with the text and the class of the first rule that a row violates.

    Args:
        former: returns a column of an earlier call, for other rules, which come first; None: there was none.
    """
    from pyspark.sql import functions as F

    is_bad = [~F.coalesce(F.expr(rule.expression), F.lit(False)) for rule in rules]
    found = {
        _ERROR: [F.when(bad, f"{rule.name}: {rule.expression}") for bad, rule in zip(is_bad, rules, strict=True)],
        _CLASS: [F.when(bad, rule.error_class) for bad, rule in zip(is_bad, rules, strict=True)],
    }
    none = F.lit(None).cast("string")
    return {name: F.coalesce(*([former(name)] if former else []), *each, none) for name, each in found.items()}


def _casts(table: TableWriter, rows: "DataFrame") -> dict[str, str]:
    """Return in SQL the columns whose types differ from the table's, with its types; null for a value that has none.
    Nested types are Delta's to refuse."""
    types = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
    of_table = {field.name: field.dataType.simpleString() for field in table.schema().fields if field.name in types}
    return {
        name: f"try_cast({table_names.quoted(name)} AS {kind})"
        for name, kind in of_table.items()
        if kind != types[name] and "<" not in kind + types[name]
    }


def _constraints(table: TableWriter, rows: "DataFrame") -> list[Rule]:
    """Return the constraints of a table on columns that these rows have. One on others is Delta's to check: their
    values may be generated."""
    columns = set(rows.columns)
    rules = [
        Rule("NOT_NULL", field.name, f"{table_names.quoted(field.name)} IS NOT NULL")
        for field in table.schema().fields
        if field.name in columns and not field.nullable
    ]
    for key, text in sorted(table.properties().items()):
        if key.startswith(_CHECK) and _is_known(rows, text):
            rules.append(Rule("CHECK", key.removeprefix(_CHECK), text))
    return rules


def _is_known(rows: "DataFrame", expression: str) -> bool:
    """Return whether the rows have all columns of an expression."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F

    try:
        return len(rows.select(F.expr(expression)).schema) == 1
    except AnalysisException:
        return False
