"""``spark-group ledger``: show the ledgers in a table, and compare them with its rows.

Runs in: a terminal. Deliberately absent: Kafka, and changing a ledger (``spark-group reset --table``).
"""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from spark_group_source.cli import common
from spark_group_source.cli.common import JsonOption, console

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

    from spark_group_source.delta.ledger_format import Ledger
    from spark_group_source.delta.table_history import Commit

TableArgument = Annotated[str, typer.Argument(help="A Delta table, by path or name.")]

ledger_app = typer.Typer(no_args_is_help=True, help="The ledgers in a Delta table.")


@ledger_app.command("show")
def show(table: TableArgument, as_json: JsonOption = False) -> None:
    """Show the ledger of each group in a table: next offsets, last writer and time."""
    with common.session(True) as spark:
        assert spark is not None
        found = _shown(spark, table)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    columns = ("group", "commits", "written", "by", "reset", "topic", "partition", "next offset")
    shown = Table(*columns)
    for one in found:
        number, reset_number = ("" if one[key] is None else str(one[key]) for key in ("number", "reset"))
        head = (one["group"], number, one["written"] or "before the history", one["by"], reset_number)
        for topic, offsets in one["topics"].items():
            for partition, offset in offsets.items():
                shown.add_row(*head, topic, partition, str(offset))
                head = ("", "", "", "", "")
        if not one["topics"]:
            shown.add_row(*head, "", "", "")
    console.print(shown if found else f"no group has written to {table}")


@ledger_app.command("verify")
def verify(table: TableArgument, as_json: JsonOption = False) -> None:
    """Compare the rows of a table with the ledgers of its groups; exit code 1 if they differ."""
    from spark_group_source.delta import ledger_store

    with common.session(True) as spark:
        assert spark is not None
        found = ledger_store.verify(spark, table)
    if as_json:
        typer.echo(json.dumps({**found._asdict(), "findings": [one._asdict() for one in found.findings]}, indent=2))
    else:
        for one in found.findings:
            where = "" if one.version is None else f" (version {one.version})"
            typer.echo(f"{one.kind}: {one.text}{where}")
        for note in found.notes:
            typer.echo(f"note: {note}")
        verdict = f"{len(found.findings)} differences" if found.findings else "no differences"
        typer.echo(f"{len(found.groups)} groups, {found.commits} commits, {found.rows:,} rows: {verdict}")
    if found.findings:
        raise typer.Exit(1)


def _shown(spark: "SparkSession", table: str) -> list[dict[str, Any]]:
    from spark_group_source.delta import ledger_store, table_names, table_writer

    history = table_writer.open_existing(spark, table).history()
    found = ledger_store.read_ledgers(history)
    last: dict[str, Commit] = {}
    for commit in history.commits():
        last |= {group: commit for group in found.keys() - last.keys() if commit.ledger_entry(group)}
        if len(last) == len(found):
            break
    described = spark.sql(f"DESCRIBE HISTORY {table_names.sql_name(history.table)}")
    at = {row["version"]: str(row["timestamp"]) for row in described.select("version", "timestamp").collect()}
    return [_group(group, ledger, last.get(group), at) for group, ledger in found.items()]


def _group(group: str, ledger: "Ledger | None", commit: "Commit | None", at: "Mapping[int, str]") -> dict[str, Any]:
    version = None if commit is None else commit.version
    written = None if version is None else at.get(version)
    if ledger is None or commit is None:
        gone = "older than the table's log"
        return {"group": group, "number": None, "version": version, "written": written, "by": gone} | {
            "reset": None, "streams": {}, "topics": {}
        }  # fmt: skip
    entry = commit.ledger_entry(group) or {}
    newest = list(ledger.streams.items())[-1:]  # the stream that wrote last
    batches = [] if "reason" in entry else [f"batch {batch.seq} of stream {stream}" for stream, batch in newest]
    return {
        "group": group,
        "number": ledger.number,
        "version": version,
        "written": written,
        "by": ", ".join(batches) or "an operator",
        "reset": ledger.reset_number,
        "streams": {stream: batch.seq for stream, batch in ledger.streams.items()},
        "topics": {
            name: {str(p): n for p, n in sorted(topic.offsets.items())} for name, topic in ledger.topics.items()
        },
    }
