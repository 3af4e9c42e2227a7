"""Commands that an error message prints for an operator: complete, quoted for the shell, each on a line of its own.

Runs in: the user's driver, the command line. Deliberately absent: running a command, and deciding which one helps.

The sink knows no brokers, so the bootstrap servers are those that a run of the group on this host has published.
"""

import shlex
from collections.abc import Iterable, Mapping

from spark_group_source.delta import table_names
from spark_group_source.host import run_files

UNKNOWN_SERVERS = "HOST:PORT"
"""Printed for ``--bootstrap-servers`` where no run of the group on this host has published its servers."""


def reset(group: str, table: str, *position: str) -> str:
    """Return the ``spark-group reset`` that moves Kafka's offsets and the ledger of a table to one position.

    Args:
        position: the option that names the position, with its value: ``"--to-ledger"``.
    """
    servers = run_files.bootstrap_servers(group) or UNKNOWN_SERVERS
    words = ("--bootstrap-servers", servers, "--group", group, *position, "--table", table, "--execute")
    return shlex.join(("spark-group", "reset", *words))


def restore(table: str, version: int) -> str:
    """Return the SQL statement that restores a table to a version."""
    return f"RESTORE TABLE {table_names.sql_name(table)} TO VERSION AS OF {version}"


def alternatives(commands: Mapping[str, str]) -> str:
    """Return lines with one command for each purpose, to be appended to a message that ends with a colon."""
    return "".join(f"\n  to {purpose}:\n    {command}" for purpose, command in commands.items())


def sequence(commands: Iterable[str]) -> str:
    """Return lines with commands in the order in which they are run, to be appended like :func:`alternatives`."""
    return "".join(f"\n    {command}" for command in commands)
