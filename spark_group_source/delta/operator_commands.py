"""Commands about a table in error messages: complete, and quoted for the shell or for SQL.

Runs in: the user's driver, the command line. Deliberately absent: running a command, and deciding which one helps.

The sink knows no brokers, so a command connects with the arguments that a run of the group on this host has published.
"""

from spark_group_source import command_line
from spark_group_source.delta import table_names
from spark_group_source.host import run_files


def reset(group: str, table: str, *position: str) -> str:
    """Return the ``spark-group reset`` that moves Kafka's offsets and the ledger of a table to one position.

    Args:
        position: the option that names the position, with its value: ``"--to-ledger"``.
    """
    there = run_files.connection(group)
    return command_line.spark_group("reset", there, group, *position, "--table", table, "--execute")


def restore(table: str, version: int) -> str:
    """Return the SQL statement that restores a table to a version."""
    return f"RESTORE TABLE {table_names.sql_name(table)} TO VERSION AS OF {version}"
