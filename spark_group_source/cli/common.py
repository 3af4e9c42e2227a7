"""Code that several commands use: options, settings files, the admin client, a local Spark session, tables.

Runs in: a terminal. Deliberately absent: the commands.
"""

import io
import logging
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from spark_group_source.errors import OptionError
from spark_group_source.kafka.environment import check_settings
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.local.conf import numbered_lines, pairs_in
from spark_group_source.options.table import Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_group_source.delta.checkpoint import CheckpointFiles
    from spark_group_source.delta.table_history import TableHistory

FINAL, USAGE, RETRIABLE = 1, 2, 75
"""Exit codes of errors: a retry cannot help, the options are wrong, a retry can help (EX_TEMPFAIL of sysexits.h)."""

COLUMNS_IN_FILES = 10_000
"""The width of output that is no terminal's: a program that reads it would find ids that are folded or shortened."""


class _Output(Console):
    """Decides at each print whether the output is a terminal's: stdout may be redirected after the import. A width that
    was set, or that rich knows of a notebook, is kept."""

    @property
    def size(self) -> ConsoleDimensions:
        found = super().size
        is_given = self._width is not None or "COLUMNS" in os.environ
        return found if self.is_terminal or is_given else ConsoleDimensions(COLUMNS_IN_FILES, found.height)

    @size.setter
    def size(self, new: tuple[int, int]) -> None:
        self._width, self._height = new


console = _Output(markup=False, emoji=False)
"""Prints names of groups and tables as they are, also such as ``etl[a]`` or ``shop:fire:1``."""
progress_console = Console(markup=False, emoji=False, stderr=True)
"""Shows what a command waits for: not on stdout, which may be read by a program."""


def replace_unprintable() -> None:
    """Let stdout print a question mark for a character that its encoding lacks. By default Python raises an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class UsageError(OptionError):
    """Options of a command are wrong or contradict each other; ``spark-group`` exits with code 2."""


@contextmanager
def settings_exit() -> Iterator[None]:
    """Let a wrong setting of the user's file exit as a wrong option does."""
    try:
        yield
    except OptionError as exc:
        raise UsageError(str(exc), **exc.fields) from None


@contextmanager
def failures_exit(code: int) -> Iterator[None]:
    """Let an error exit with this code, for a command whose code 1 has another meaning. Wrong options exit with 2."""
    try:
        yield
    except Exception as exc:
        exc.failure_code = code  # type: ignore[attr-defined]
        raise


VARIABLE = re.compile(r"\$\{(\w+)\}")

GroupOption = Annotated[str, typer.Option("--group", help="The consumer group.")]
ServersOption = Annotated[str, typer.Option("--bootstrap-servers", "--bootstrap-server", help="host:port, …")]
TableOption = Annotated[
    str | None, typer.Option("--table", help="A Delta table, by path or name; includes its ledger.")
]
CheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint", metavar="DIR", help="The checkpointLocation of a query on another host.")
]
ExecuteOption = Annotated[
    bool, typer.Option("--execute", help="Do it; without this the command only shows what it would do.")
]
NOT_EXECUTED = "nothing was changed; add --execute to do it"
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--command-config",
        exists=True,
        dir_okay=False,
        help="File of client settings (security), one name=value a line; ${NAME} is read from the environment.",
    ),
]


@contextmanager
def admin_of(
    servers: str, group: str, config: Path | None = None, options: Mapping[str, str] | None = None
) -> Iterator[GroupAdmin]:
    """An admin client with the settings of ``--command-config``, which is closed at the end: one that is left to the
    garbage collection may be destroyed on its own thread, and the library then aborts the process.

    Args:
        group: the group whose offsets are requested; "-" for none.
        options: settings with the names of the source's options.

    Raises:
        UsageError: a setting cannot be used. Nothing is sent to a broker without a setting that was meant for it.
    """
    file = None if config is None else str(config.absolute())
    found = options_of(servers, group, config, options)
    if config is not None or options:
        with settings_exit():
            check_settings(found)
    with closing(GroupAdmin(found.admin_settings(), config_file=file, retries=0)) as admin:
        yield admin


def options_of(
    servers: str, group: str, config: Path | None = None, options: Mapping[str, str] | None = None
) -> Options:
    """The client settings of ``--command-config``, checked and translated like those of a query. In the file they
    may have the prefix ``kafka.``, as in a file of ``spark-group run --option-file``.

    Raises:
        UsageError: a setting, the group or the servers cannot be used.
    """
    with settings_exit():
        found = {} if config is None else settings_in(config)
    if twice := [name for name in found if f"kafka.{name}" in found]:
        raise UsageError(
            f"{config} has both {twice[0]} and kafka.{twice[0]}, which are one setting; remove one of them"
        )
    given = {f"kafka.{name.removeprefix('kafka.')}": value for name, value in found.items()}
    own = {"kafka.bootstrap.servers": servers, "kafka.group.id": group, "subscribe": "-"}
    with settings_exit():
        return Options.parse({**given, **(options or {}), **own})


def text_of(path: Path) -> str:
    """The text of a file. Raises OptionError if it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")  # Windows programs put a mark at the beginning
    except (OSError, UnicodeError) as exc:
        raise OptionError(f"{path} cannot be read: {exc}") from None


def settings_in(path: Path) -> dict[str, str]:
    """The ``name=value`` lines of a file; ``#`` starts a comment line, ``${NAME}`` is read from the environment.

    Raises:
        OptionError: the file cannot be read or a line is invalid. The message contains no value.
    """
    try:
        found = pairs_in(text_of(path), str(path))
    except ValueError as exc:
        raise OptionError(str(exc)) from None
    for name, value in found.items():
        if absent := [word for word in VARIABLE.findall(value) if word not in os.environ]:
            raise OptionError(f"{path}: {name} uses the variable {absent[0]}, which is not set in the environment")
        # A secret that was read from a file often ends with a newline.
        found[name] = VARIABLE.sub(lambda match: os.environ[match[1]].rstrip("\r\n"), value)
    return found


def spark_error(exc: Exception) -> str:
    """The first line of an error of Spark; of one that py4j raises, that of its first cause in the JVM."""
    text = ""
    java: Any = getattr(exc, "java_exception", None)
    try:
        while java is not None:
            text, java = str(java.toString()), java.getCause()
    except Exception:  # noqa: BLE001  # the JVM may be gone; its stack trace is in the message
        causes = re.findall(r"^(?:Caused by)?: (.+)$", str(exc), re.MULTILINE)
        text = causes[-1] if causes else ""
    return next(iter((text or str(exc)).strip().splitlines()), type(exc).__name__)


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and Ctrl-C set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; a second one ends it at once. For pyspark's start of a JVM: if Python
    gives up in the middle, it deletes the folder in which the JVM writes its port, and the JVM would not end."""
    if threading.current_thread() is not threading.main_thread():  # Python calls handlers of signals on that one only
        yield
        return
    is_interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True

    former = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:  # pyspark installs a handler that cancels Spark's jobs
            signal.signal(signal.SIGINT, former)
    if is_interrupted:
        raise KeyboardInterrupt


def table_of(*columns: str, rows: Iterable[Sequence[object]] = (), narrow: bool = False) -> Table:
    """A table whose long cells are wrapped, not truncated. Values are not interpreted as markup.

    Args:
        narrow: without lines between the columns.
    """
    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0)) if narrow else Table(*columns)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(values: Iterable[object]) -> list[Text]:
    """Values as table cells: numbers with commas, a dash for no value."""
    return [Text("-" if v in (None, "") else f"{v:,}" if type(v) is int else str(v)) for v in values]


@contextmanager
def session(*, avro: bool = False) -> "Iterator[SparkSession]":
    """A local Spark session that can read checkpoints and read and write Delta tables.

    Args:
        avro: whether it has Spark's functions for Avro, too.
    """
    from pyspark.sql import SparkSession

    logging.getLogger("py4j").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="spark-group-") as scratch:
        builder = SparkSession.builder.master("local[1]").appName("spark-group")
        builder = builder.config(map={**session_settings(scratch, avro=avro)})
        spark: SparkSession | None = None
        try:
            with progress_console.status("starting Spark ..."), interrupts_deferred():
                spark = builder.getOrCreate()
            yield spark
        finally:
            if spark is not None:
                spark.stop()


_JOINED = {
    "spark.jars": ",",
    "spark.sql.extensions": ",",
    "spark.driver.extraJavaOptions": " ",
    "spark.executor.extraJavaOptions": " ",
}
"""Settings that both may have, and what is between the two values."""


def session_settings(scratch: str, *, avro: bool = False) -> dict[str, str]:
    """The settings of :func:`session` without those that the user's ``spark-defaults.conf`` has, because Spark would
    prefer these. A time zone is left out as well: a sink's transform may depend on that of its query."""
    from spark_group_source.local.conf import local_spark_settings

    ours, folder = local_spark_settings(scratch, avro=avro), spark_conf_folder()
    ours.pop("spark.sql.session.timeZone", None)
    file = None if folder is None else folder / "spark-defaults.conf"
    text = file.read_text(encoding="utf-8") if file is not None and file.is_file() else ""
    for _, line in numbered_lines(text):
        key, *value = re.split(r"\s*[=:\s]\s*", line, maxsplit=1)  # as Java reads properties
        if key in ours and not key.startswith("spark.pyspark."):
            own = ours.pop(key)
            if key in _JOINED:
                ours[key] = _JOINED[key].join([own, *value])
    return ours


def spark_conf_folder() -> Path | None:
    """The folder with the user's settings of Spark; None if no environment variable names it."""
    home = os.environ.get("SPARK_HOME")
    folder = os.environ.get("SPARK_CONF_DIR") or (f"{home}/conf" if home else None)
    return None if folder is None else Path(folder)


@contextmanager
def table_history(table: str) -> "Iterator[TableHistory]":
    """The history of a Delta table that must exist. Spark is started only if the table's log cannot be opened directly:
    for a table by name, in a remote file system, or whose catalog manages the commits."""
    from spark_group_source.delta import table_names, table_writer
    from spark_group_source.delta.table_history import TableHistory

    name = table_names.canonical(table)
    log = table_writer.open_log(name, name, None) if table_names.is_path(name) else None
    if log is not None:
        yield TableHistory(log)
        return
    with session() as spark:
        yield table_writer.open_existing(spark, name).history()


@contextmanager
def checkpoint_files(root: str, spark: "SparkSession | None" = None) -> "Iterator[tuple[CheckpointFiles, str]]":
    """Access to the files of a checkpoint, and its path. Spark is started only if Python cannot read them.

    Args:
        spark: the caller's session, which is used instead of a new one: a second :func:`session` would be the same one
            and would stop it.
    """
    from spark_group_source.delta.checkpoint import local_files, spark_files
    from spark_group_source.delta.native_writer import local_path

    path = local_path(root)
    if path is not None:
        yield local_files(), str(Path(path))
        return
    with session() if spark is None else nullcontext(spark) as found:
        yield spark_files(found), root.rstrip("/")
