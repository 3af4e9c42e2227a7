"""``spark-group ledger`` and ``spark-group letters``: what :class:`DeltaSink` keeps beside the rows of a table.

``ledger`` shows the ledgers in a table, compares them with its rows, and carries one over; they are also read here for
``spark-group exporter --table``. ``letters`` shows the bad records in a dead-letter table, and replays those of a sink.

Runs in: a terminal, the exporter. Deliberately absent: moving a ledger (``spark-group reset --table``), and which
records are bad (:mod:`dead_letters`).
"""

import importlib
import json
import logging
import os
import sys
from contextlib import nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spark_group_source.cli import common
from spark_group_source.cli.common import ConfigOption, GroupOption, JsonOption, cells, console, table_of
from spark_group_source.cli.report import counted
from spark_group_source.errors import GroupError, LedgerConflict, OptionError
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from spark_group_source.delta.ledger_format import Ledger
    from spark_group_source.delta.sink import DeltaSink
    from spark_group_source.delta.table_history import Commit, LogFiles, TableHistory
    from spark_group_source.delta.verification import Finding
    from spark_group_source.metrics.groups import LedgerSnapshot

log = logging.getLogger(__name__)

NOT_COMPARED = 3
"""The exit code of ``verify`` if it could not compare the table."""

TableArgument = Annotated[str, typer.Argument(help="A Delta table, by path or name.")]

ledger_app = typer.Typer(no_args_is_help=True, help="The ledgers in a Delta table.")
letters_app = typer.Typer(no_args_is_help=True, help="The bad records in a dead-letter table.")


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
        by = f" by {one['by']}" if one["kind"] == "group" else ""
        written = one["written"] or "before the history"
        console.print(f"{_name(one['group'])}{commits}: written {written}{by}", highlight=False)
        if (replaced := one["replaced"]) is not None:
            to = "" if replaced["restored_to"] is None else f" to version {replaced['restored_to']}"
            console.print(
                f"version {replaced['version']} of the table ({replaced['operation']}{to}) replaced rows of the group: "
                "its next batch is refused until a reset with --table moves it",
                highlight=False,
            )
        shown = table_of("topic", "partition", "next offset")
        for topic, offsets in one["topics"].items():
            for partition, offset in offsets.items():
                shown.add_row(*cells((topic, partition, offset)))
        if one["topics"]:
            console.print(shown)
    if not found:
        console.print(f"the log of table {table} has no ledger: no group wrote to it, or only before the log begins")


@ledger_app.command("verify")
def verify(
    table: TableArgument,
    rows_per_record: Annotated[
        int,
        typer.Option(
            "--rows-per-record",
            min=0,
            help="How many rows the transform of a group writes for a record at most; 0: any number.",
        ),
    ] = 1,
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(
            "--bootstrap-servers", "--bootstrap-server", help="host:port, …; compares topic ids and ends of logs, too."
        ),
    ] = None,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the rows of a table with the ledgers of its groups. Exit code 1: they differ; 3: not compared."""
    if command_config is not None and bootstrap_servers is None:
        raise common.UsageError("--command-config needs --bootstrap-servers")
    with (
        common.failures_exit(NOT_COMPARED),
        # first, because a wrong setting is found here, and the comparison takes long
        nullcontext()
        if bootstrap_servers is None
        else common.admin_of(bootstrap_servers, "-", command_config) as admin,
    ):
        from spark_group_source.delta import verification

        with common.session() as spark:
            found = verification.verify(spark, table, rows_per_record=rows_per_record)
        findings, notes, is_compared = list(found.findings), list(found.notes), bool(found.groups)
        if not found.groups:
            notes.append("no group has a ledger in this table, so there is nothing to compare its rows with")
        if admin is not None:
            try:
                differences, left_out = compare_with_kafka(admin, found.ledgers)
                findings += differences
                is_compared &= not left_out
                if left_out:
                    notes.append(
                        f"{counted(len(left_out), 'partition')}, such as {min(left_out)}, not compared with Kafka: no "
                        "broker reports the end of the log"
                    )
            except GroupError as exc:
                is_compared = False
                notes.append(f"topics are not compared with Kafka: {exc}")
    if as_json:
        shown = found._asdict() | {"notes": notes, "findings": [one._asdict() for one in findings]}
        del shown["ledgers"]
        typer.echo(json.dumps(shown, indent=2))
    else:
        for one in findings:
            where = "" if one.version is None else f" (version {one.version})"
            typer.echo(f"{one.kind}: {one.text}{where}")
        for note in notes:
            typer.echo(f"note: {note}")
        verdict = counted(len(findings), "difference") if findings else "no differences"
        sizes = (len(found.groups), "group"), (found.commits, "commit"), (found.rows, "row")
        typer.echo(f"{', '.join(counted(*size) for size in sizes)}: {verdict}")
    if findings or not is_compared:
        raise typer.Exit(1 if findings else NOT_COMPARED)


@ledger_app.command("copy")
def copy(
    source: Annotated[str, typer.Argument(help="The table that was cloned.")],
    table: Annotated[str, typer.Argument(help="Its clone.")],
    group: GroupOption,
    version: Annotated[
        int | None, typer.Option("--version", min=0, help="The cloned version, if the clone's log lacks it.")
    ] = None,
    execute: common.ExecuteOption = False,
) -> None:
    """Copy a group's ledger into a clone of its table, as it was in the cloned version."""
    from spark_group_source.delta import ledger_store, table_writer

    with common.session() as spark:
        made = None
        if version is None:
            clone = ledger_store.find_clone(table_writer.open_existing(spark, table).history())
            if clone is None:
                raise OptionError(
                    f"the log of table {table} has no CLONE; add --version, the cloned version of {source}"
                )
            version, made = clone.version, clone.made
        found = ledger_store.transfer_ledger(
            spark, source, group, table, group, version=version, decided_at=made, execute=execute
        )
    _show_transfer(found, table, execute)


@ledger_app.command("rename")
def rename(
    table: TableArgument,
    group: GroupOption,
    to: Annotated[str, typer.Option("--to", help="The group's new name.")],
    execute: common.ExecuteOption = False,
) -> None:
    """Copy a group's ledger to the group's new name. The ledger of the former name stays in the log."""
    from spark_group_source.delta import ledger_store

    with common.session() as spark:
        found = ledger_store.transfer_ledger(spark, table, group, table, to, execute=execute)
    _show_transfer(found, table, execute)


def _show_transfer(ledger: "Ledger", table: str, execute: bool) -> None:
    from spark_group_source.delta import table_names

    rows = [(tp.topic, str(tp.partition), offset) for tp, offset in sorted(ledger.offsets.items())]
    console.print(table_of("topic", "partition", "next offset", rows=rows))
    if not execute:
        typer.echo(common.NOT_EXECUTED)
        return
    typer.echo(f"table {table} has this ledger of group {ledger.group}. Move the group there, before its query starts:")
    typer.echo(f"    {table_names.reset_command(ledger.group, table, '--to-ledger')}")


def compare_with_kafka(
    admin: GroupAdmin, ledgers: "Mapping[str, Ledger]"
) -> "tuple[list[Finding], set[TopicPartition]]":
    """Return a finding for each topic that was deleted and recreated since the ledger, and for each partition whose
    next offset is behind the end of its log; and the partitions that could not be compared."""
    from spark_group_source.delta.verification import Finding

    topics = admin.existing_topics({name for ledger in ledgers.values() for name in ledger.topics})
    ends = admin.latest_of_existing({tp for ledger in ledgers.values() for tp in ledger.offsets}, committed=False)
    findings, left_out = list[Finding](), set[TopicPartition]()
    for group, ledger in ledgers.items():
        for name, topic in ledger.topics.items():
            if name in topics and not topic.is_same(topics[name].id):
                text = f"group {group}: topic {name} has id {topics[name].id} in Kafka and id {topic.id} in the ledger"
                findings.append(Finding("topic", f"{text}; it was deleted and recreated since the last batch"))
        for tp, n in ledger.offsets.items():
            present = topics.get(tp.topic)
            if present is None or not ledger.topics[tp.topic].is_same(present.id) or tp.partition >= present.partitions:
                continue
            if tp not in ends:
                left_out.add(tp)
            elif n > ends[tp]:
                text = f"group {group}: the next offset of {tp} is {n} in the ledger, and its log ends at {ends[tp]}"
                findings.append(Finding("topic", text))
    return findings, left_out


def _name(key: str) -> str:
    """What has a ledger: a group, or the dead letters of a table by its id."""
    from spark_group_source.delta.table_history import INTERNAL_KEY

    if (internal := INTERNAL_KEY.fullmatch(key)) is None:
        return f"group {key}"
    of = "replay of bad records from" if internal[1] == "replay" else "dead letters of"
    return f"{of} the table with id {internal[2]}"


def _shown(history: "TableHistory") -> list[dict[str, Any]]:
    from spark_group_source.delta import ledger_store
    from spark_group_source.delta.table_history import INTERNAL_KEY

    found = ledger_store.read_ledgers(history)
    last: dict[str, Commit] = {}
    for commit in history.commits():
        last |= {group: commit for group in found.keys() - last.keys() if commit.ledger_entry(group)}
        if len(last) == len(found):
            break
    shown = []
    for group, ledger in found.items():
        internal = INTERNAL_KEY.fullmatch(group)
        replaced = None if internal or ledger is None else _replaced(history, group)
        kind = "group" if internal is None else internal[1]
        shown.append(_group(group, ledger, last.get(group)) | {"kind": kind, "replaced": replaced})
    return shown


def _replaced(history: "TableHistory", group: str) -> dict[str, Any] | None:
    """The commit because of which the next batch of a group is refused; None: there is none."""
    from spark_group_source.delta import replaced_rows
    from spark_group_source.delta.table_history import LedgerExpired

    try:
        newest = history.ledger(group)
        found = None if newest is None else replaced_rows.find_unsettled(history, newest)
    except (LedgerExpired, LedgerConflict):
        return None
    names = ("version", "operation", "restored_to")
    return None if found is None else {name: getattr(found, name) for name in names}


def _group(group: str, ledger: "Ledger | None", commit: "Commit | None") -> dict[str, Any]:
    written_ms = None if commit is None else commit.written_ms
    at = None if written_ms is None else datetime.fromtimestamp(written_ms / 1000).astimezone()
    shown: dict[str, Any] = {
        "group": group,
        "number": None,
        "version": None if commit is None else commit.version,
        "written": None if at is None else f"{at:%Y-%m-%d %H:%M:%S%z}",
        "by": "older than the table's log",
        "reset": None,
        "streams": {},
        "topics": {},
    }
    if ledger is None or commit is None:
        return shown
    entry = commit.ledger_entry(group) or {}
    newest = list(ledger.streams.items())[-1:]  # the stream that wrote last
    batches = [] if "reason" in entry else [f"batch {batch.seq} of stream {stream}" for stream, batch in newest]
    return shown | {
        "number": ledger.number,
        "by": ", ".join(batches) or "an operator",
        "reset": ledger.reset_number,
        "streams": {stream: batch.seq for stream, batch in ledger.streams.items()},
        "topics": {
            name: {str(p): n for p, n in sorted(topic.offsets.items())} for name, topic in ledger.topics.items()
        },
    }


# --- metrics ---------------------------------------------------------------------------------------------------------


def ledger_reader(tables: "Iterable[str]") -> "Callable[[], tuple[LedgerSnapshot, ...]]":
    """Return a function that reads the ledgers of some tables, again only what the tables' logs have in addition. It
    leaves out a ledger that cannot be read. Without Spark: a table must have a local path and a log that ``deltalake``
    can open.

    Raises:
        OptionError: a table's log cannot be opened.
    """
    opened = [_Table(table) for table in tables]
    return lambda: tuple(found for table in opened for found in table.read_if_possible())


class _Table:
    def __init__(self, table: str) -> None:
        from spark_group_source.delta import table_names

        self._table = table_names.canonical(table)
        self._is_failing = False
        try:
            self._open()
        except FileNotFoundError:
            raise OptionError(
                f"--table {table}: there is no Delta table at a local path whose log can be opened"
            ) from None

    def _open(self) -> None:
        """Open the table's log. Raises FileNotFoundError if there is none."""
        from spark_group_source.delta import table_names, table_writer

        opened = table_writer.open_log(self._table, self._table, None) if table_names.is_path(self._table) else None
        if opened is None:
            raise FileNotFoundError("there is no Delta table")
        self._log: LogFiles = opened
        self._version = -1
        """Up to which version of the table the log was read."""
        self._written_ms: dict[str, int] = {}
        """When each group committed last."""
        self._ledgers: dict[str, Ledger] = {}
        """As they were in that version."""
        self._unsettled: set[str] = set()
        """The groups whose next batch is refused since then."""

    def read_if_possible(self) -> "list[LedgerSnapshot]":
        """Read the ledgers; none if the log cannot be read now, of which the begin and the end are logged."""
        from deltalake.exceptions import DeltaError

        try:
            found = self.read()
        except (DeltaError, OSError, ValueError) as exc:  # ValueError: another writer is writing a commit
            if not self._is_failing:
                reason = str(exc).partition("\n")[0]
                log.warning("the log of table %s cannot be read; no metrics of its ledgers: %s", self._table, reason)
            self._is_failing = True
            return []
        if self._is_failing:
            log.warning("the log of table %s is read again", self._table)
        self._is_failing = False
        return found

    def read(self) -> "list[LedgerSnapshot]":
        from spark_group_source.delta import table_names
        from spark_group_source.delta.table_history import INTERNAL_KEY, LedgerExpired, TableHistory
        from spark_group_source.metrics.groups import LedgerSnapshot

        if self._is_failing:  # the table may have been deleted and created again
            self._open()
        history = TableHistory(self._log)
        if history.version < max(0, self._version):
            raise FileNotFoundError("the table was deleted or replaced")
        for commit in history.commits(after=self._version):
            for group in (entry["group"] for entry in commit.entries):
                if not INTERNAL_KEY.fullmatch(group):
                    self._written_ms[group] = max(self._written_ms.get(group, 0), commit.written_ms or 0)
        self._version = history.version
        properties = self._log.opened.metadata().configuration
        retention = properties.get(table_names.LOG_RETENTION, table_names.LOG_RETENTION_DEFAULT)
        retention_ms = table_names.interval_ms(retention)
        found = []
        for group, written_ms in sorted(self._written_ms.items()):
            known = self._ledgers.get(group)
            try:
                ledger = history.ledger(group, known)
                is_unsettled = ledger is not None and self._is_unsettled(history, ledger, known)
            except (LedgerExpired, LedgerConflict) as exc:
                log.warning("group %s: its ledger in table %s cannot be read: %s", group, self._table, exc)
                continue
            if ledger is not None and ledger.offsets:
                (self._unsettled.add if is_unsettled else self._unsettled.discard)(group)
                self._ledgers[group] = ledger.at_version(history.version)
                found.append(
                    LedgerSnapshot(
                        group=group,
                        table=self._table,
                        offsets=ledger.offsets,
                        expires_ms=written_ms + retention_ms,
                        retention_ms=retention_ms,
                        is_unsettled=is_unsettled,
                    )
                )
        return found

    def _is_unsettled(self, history: "TableHistory", ledger: "Ledger", known: "Ledger | None") -> bool:
        """Return whether the next batch of a group is refused. Only commits that are newer than its known ledger are
        read, if it was not refused then. Raises LedgerExpired."""
        from spark_group_source.delta import replaced_rows

        if known is not None and known.table_version == history.version:
            return ledger.group in self._unsettled
        try:
            settled = None if ledger.group in self._unsettled else known
            replaced_rows.refuse_replaced_rows(history, ledger, known=settled)
        except LedgerConflict:
            return True
        return False


# --- letters ----------------------------------------------------------------------------------------------------------


@letters_app.command("show")
def show_letters(
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
                "DeadLetters of the sink has"
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
    found = _import_sink(sink)
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


def _import_sink(text: str) -> "DeltaSink":
    """Import a sink. Raises UsageError if it cannot be imported, or is no DeltaSink."""
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
