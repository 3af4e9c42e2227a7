"""``spark-group ledger``: show the ledgers in a table, compare them with its rows, carry one over.

Runs in: a terminal. Deliberately absent: Kafka, and moving a ledger (``spark-group reset --table``).
"""

import json
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spark_group_source.cli import common
from spark_group_source.cli.common import GroupOption, JsonOption, cells, console, table_of
from spark_group_source.errors import OptionError

if TYPE_CHECKING:
    from spark_group_source.delta.ledger_format import Ledger
    from spark_group_source.delta.table_history import Commit, TableHistory

TableArgument = Annotated[str, typer.Argument(help="A Delta table, by path or name.")]

ledger_app = typer.Typer(no_args_is_help=True, help="The ledgers in a Delta table.")


@ledger_app.command("show")
def show(table: TableArgument, as_json: JsonOption = False) -> None:
    """Show the ledger of each group in a table: next offsets, last writer and time.

    Spark is started only for a table by name, or whose log cannot be read directly.
    """
    with common.table_history(table) as history:
        found = _shown(history)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for one in found:
        commits = "" if one["number"] is None else f", commit #{one['number']}, reset #{one['reset']}"
        written = one["written"] or "before the history"
        console.print(f"group {one['group']}{commits}: written {written} by {one['by']}", highlight=False)
        shown = table_of("topic", "partition", "next offset")
        for topic, offsets in one["topics"].items():
            for partition, offset in offsets.items():
                shown.add_row(*cells((topic, partition, offset)))
        if one["topics"]:
            console.print(shown)
    if not found:
        console.print(f"no group has written to {table}")


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


ExecuteOption = Annotated[
    bool, typer.Option("--execute", help="Write the ledger; without this the command only shows it.")
]


@ledger_app.command("copy")
def copy(
    source: Annotated[str, typer.Argument(help="The table that was cloned.")],
    table: Annotated[str, typer.Argument(help="Its clone.")],
    group: GroupOption,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="The cloned version, if the clone's log lacks it.")
    ] = None,
    execute: ExecuteOption = False,
) -> None:
    """Copy a group's ledger into a clone of its table, as it was in the cloned version."""
    from spark_group_source.delta import ledger_transfer, table_writer

    with common.session(True) as spark:
        assert spark is not None
        made = None
        if version is None:
            clone = ledger_transfer.find_clone(table_writer.open_existing(spark, table).history())
            if clone is None:
                raise OptionError(
                    f"the log of table {table} has no CLONE; add --version, the cloned version of {source}"
                )
            version, made = clone.version, clone.made
        found = ledger_transfer.transfer_ledger(
            spark, source, group, table, group, version=version, decided_at=made, execute=execute
        )
    _show_transfer(found, table, execute)


@ledger_app.command("rename")
def rename(
    table: TableArgument,
    group: GroupOption,
    to: Annotated[str, typer.Option("--to", help="The group's new name.")],
    execute: ExecuteOption = False,
) -> None:
    """Copy a group's ledger to the group's new name. The ledger of the former name stays in the log."""
    from spark_group_source.delta import ledger_transfer

    with common.session(True) as spark:
        assert spark is not None
        found = ledger_transfer.transfer_ledger(spark, table, group, table, to, execute=execute)
    _show_transfer(found, table, execute)


def _show_transfer(ledger: "Ledger", table: str, execute: bool) -> None:
    from spark_group_source.delta import table_names

    rows = [(tp.topic, str(tp.partition), offset) for tp, offset in sorted(ledger.offsets.items())]
    console.print(table_of("topic", "partition", "next offset", rows=rows))
    if not execute:
        typer.echo("nothing was changed; add --execute to do it")
        return
    typer.echo(f"table {table} has this ledger of group {ledger.group}. Move the group there, before its query starts:")
    typer.echo(f"    {table_names.reset_command(ledger.group, table, '--to-ledger')}")


def _shown(history: "TableHistory") -> list[dict[str, Any]]:
    from spark_group_source.delta import ledger_store

    found = ledger_store.read_ledgers(history)
    last: dict[str, Commit] = {}
    for commit in history.commits():
        last |= {group: commit for group in found.keys() - last.keys() if commit.ledger_entry(group)}
        if len(last) == len(found):
            break
    return [_group(group, ledger, last.get(group)) for group, ledger in found.items()]


def _group(group: str, ledger: "Ledger | None", commit: "Commit | None") -> dict[str, Any]:
    version = None if commit is None else commit.version
    written_ms = None if commit is None else commit.written_ms
    written = (
        None if written_ms is None else f"{datetime.fromtimestamp(written_ms / 1000).astimezone():%Y-%m-%d %H:%M:%S%z}"
    )
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
