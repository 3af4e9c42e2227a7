"""``spark-group letters``: show the bad records in a dead-letter table, and replay those of a sink.

Runs in: a terminal. Deliberately absent: what is bad (:mod:`dead_letters`).
"""

import importlib
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from spark_group_source.cli import common
from spark_group_source.cli.common import JsonOption, console, table_of
from spark_group_source.cli.report import counted
from spark_group_source.errors import OptionError

if TYPE_CHECKING:
    from spark_group_source.delta.sink import DeltaSink

letters_app = typer.Typer(no_args_is_help=True, help="The bad records in a dead-letter table.")


@letters_app.command("show")
def show(
    table: Annotated[str, typer.Argument(help="A dead-letter table, by path or name.")], as_json: JsonOption = False
) -> None:
    """Show how many records violate each rule, how many of them were not replayed, and the first one of these."""
    with common.session() as spark:
        from pyspark.sql import functions as F

        from spark_group_source.delta import dead_letters, table_names, table_writer

        writer = table_writer.open_existing(spark, table)
        if missing := sorted(dead_letters.COLUMNS.keys() - {field.name for field in writer.schema().fields}):
            raise OptionError(
                f"table {table} is no dead-letter table: it lacks the column {missing[0]}. Name the table that "
                "DeadLetters of the sink has",
                table=table,
            )
        is_left, at = F.col("replay").isNull(), F.struct("topic", "partition", "offset")
        found = (
            table_names.read(spark, writer.table)
            .groupBy("table", "error_class", "error")
            .agg(F.count("*"), F.count_if(is_left), F.coalesce(F.min(F.when(is_left, at)), F.min(at)))
            .orderBy("table", "error_class", "error")
            .collect()
        )
    shown = [
        {
            "table": row[0],
            "class": row[1],
            "error": row[2],
            "records": row[3],
            "left": row[4],
            "first": f"{row[5][0]}-{row[5][1]} offset {row[5][2]}",
        }
        for row in found
    ]
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
    elif shown:
        console.print(table_of(*shown[0], rows=[tuple(one.values()) for one in shown]))
    else:
        console.print(f"table {table} has no records")


@letters_app.command("replay")
def replay(
    sink: Annotated[
        str, typer.Argument(help="MODULE:NAME of the DeltaSink, which the current folder or PYTHONPATH has.")
    ],
) -> None:
    """Write the records that are good by the sink's present transform and rules into its table, each once."""
    found = _sink(sink)
    with common.session(avro=True) as spark:  # its transform may need them
        run = found.open_replay(spark)
        written = run.run()
    of_all = f" of {counted(written + run.left, 'record')}" if run.left else ""
    of_all = of_all or f" record{'' if written == 1 else 's'}"
    text = f"{written:,}{of_all} written to table {found.table}"
    if run.left:
        why = f"the first bad one is {run.first_bad}" if run.first_bad else "the transform returns no row for them"
        text += f"; {run.left:,} left: {why}"
    typer.echo(text)


def _sink(text: str) -> "DeltaSink":
    """Import a sink.

    Raises:
        UsageError: it cannot be imported, or is no DeltaSink.
    """
    from spark_group_source.delta.sink import DeltaSink

    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in module.split(".")):
        raise common.UsageError(f"{text} cannot be imported. Name the DeltaSink as MODULE:NAME")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name or "sink")
    except (ImportError, AttributeError) as exc:
        raise common.UsageError(f"{text} cannot be imported: {exc}. Name the DeltaSink as MODULE:NAME") from exc
    if not isinstance(found, DeltaSink):
        raise common.UsageError(f"{text} is {type(found).__name__}; it must be a DeltaSink")
    return found
