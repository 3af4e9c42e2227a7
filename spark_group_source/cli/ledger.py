"""``spark-group ledger show`` and ``verify``: what a table holds of its groups, and whether that fits its rows.

Runs in: a terminal. Deliberately absent: Kafka, and setting a ledger (``spark-group reset --table``).
"""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from spark_group_source.cli.group import console, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TableArgument = Annotated[str, typer.Argument(help="A Delta table, by path or name.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]

ledger_app = typer.Typer(no_args_is_help=True, help="What a Delta table holds of its groups.")


@ledger_app.command("show")
def show(table: TableArgument, as_json: JsonOption = False) -> None:
    """Show the ledger of each group in a table: who wrote it last, when, and where it stands."""
    with session(True) as spark:
        assert spark is not None
        found = _shown(spark, table)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    columns = ("group", "commits", "written", "by", "reset", "topic", "partition", "next offset")
    shown = Table(*columns)
    for one in found:
        head = (one["group"], str(one["number"]), one["written"] or "before the history", one["by"], str(one["epoch"]))
        for topic, offsets in one["topics"].items():
            for partition, offset in offsets.items():
                shown.add_row(*head, topic, partition, str(offset))
                head = ("", "", "", "", "")
        if not one["topics"]:
            shown.add_row(*head, "", "", "")
    console.print(shown if found else f"no group ever wrote to {table}")


@ledger_app.command("verify")
def verify(table: TableArgument, as_json: JsonOption = False) -> None:
    """Compare the ledgers of a table, the batches in its history, and its rows; exit 1 if something does not fit."""
    from spark_group_source.delta import verified

    with session(True) as spark:
        assert spark is not None
        found = verified.verify(spark, table)
    if as_json:
        typer.echo(json.dumps({**found._asdict(), "findings": [one._asdict() for one in found.findings]}, indent=2))
    else:
        for one in found.findings:
            where = "" if one.version is None else f" (version {one.version})"
            typer.echo(f"{one.kind}: {one.text}{where}")
        for note in found.notes:
            typer.echo(f"note: {note}")
        verdict = f"{len(found.findings)} things do not fit" if found.findings else "all of it fits"
        typer.echo(f"{len(found.groups)} groups, {found.commits} commits, {found.rows:,} rows: {verdict}")
    if found.findings:
        raise typer.Exit(1)


def _shown(spark: "SparkSession", table: str) -> list[dict[str, Any]]:
    from spark_group_source.delta import doors, kept, names, notes

    found = kept.ledgers(spark, table)
    history = spark.sql(f"DESCRIBE HISTORY {names.sql_name(names.canonical(table))}")
    at = {row["version"]: row["timestamp"] for row in history.select("version", "timestamp").collect()}
    last: dict[str, notes.Commit] = {}
    for commit in doors.existing(spark, table).begin().past.commits():
        for one in found:
            if one.group not in last and commit.has_ledger(one.group):
                last[one.group] = commit
    shown = []
    for one in found:
        topics: dict[str, dict[str, int]] = {}
        for tp, offset in sorted(one.offsets.items()):
            topics.setdefault(tp.topic, {})[str(tp.partition)] = offset
        written = last.get(one.group)
        shown.append(
            {
                "group": one.group,
                "number": one.number,
                "version": None if written is None else written.version,
                "written": None if written is None else str(at[written.version]),
                "by": f"batch {one.seq} of stream {one.stream}" if one.stream else "an operator",
                "epoch": one.epoch,
                "queries": dict(one.queries),
                "topics": topics,
            }
        )
    return shown
