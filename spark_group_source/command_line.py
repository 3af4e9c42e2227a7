"""Commands of ``spark-group`` in messages: complete, quoted for the shell, without secrets.

Runs in: every process. Deliberately absent: running a command, deciding which one helps, and commands about a table
(``delta.table_names``).
"""

import shlex
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

Connection: TypeAlias = tuple[str, ...]
"""The arguments with which a command connects to the brokers."""

CONFIG_FILE: Final = "client.properties"
"""Printed for ``--command-config`` where the brokers need security settings: their values must not be printed."""
KAFKA_CONFIG_FILE: Final = "admin.properties"
"""The same for Kafka's own tools, which know Java's settings only."""
UNKNOWN_SERVERS: Final = "HOST:PORT"
"""Printed for ``--bootstrap-servers`` where they are not known."""
UNKNOWN: Final[Connection] = ("--bootstrap-servers", UNKNOWN_SERVERS)


def connection(settings: Mapping[str, str], config_file: str | None = None) -> Connection:
    """Return the arguments with which a command connects like a client with these settings.

    Args:
        settings: librdkafka settings with ``bootstrap.servers``.
        config_file: the file that was passed as ``--command-config``; None: :data:`CONFIG_FILE` if the brokers need
            security settings, else no file.
    """
    servers = ("--bootstrap-servers", settings["bootstrap.servers"])
    if config_file is None and settings.get("security.protocol", "plaintext").strip().lower() != "plaintext":
        config_file = CONFIG_FILE
    return servers if config_file is None else (*servers, "--command-config", config_file)


def spark_group(command: str, to: Connection, group: str | None = None, *more: str) -> str:
    """Return a command of ``spark-group``.

    Args:
        group: the consumer group; None: the command has no ``--group``.
    """
    return shlex.join(("spark-group", command, *to, *(() if group is None else ("--group", group)), *more))


def in_sentence(command: str) -> str:
    """Return a command as part of a sentence, with what must be replaced or provided."""
    note = _note([command])
    return f"`{command}`{f' ({note})' if note else ''}"


def alternatives(commands: Mapping[str, str]) -> str:
    """Return lines with one command for each purpose, to be appended to a message that ends with a colon."""
    lines = [f"\n  to {purpose}:\n    {command}" for purpose, command in commands.items()]
    return "".join(lines) + _note_line(commands.values())


def sequence(commands: Iterable[str]) -> str:
    """Return lines with commands in the order in which they are run, to be appended like :func:`alternatives`."""
    commands = list(commands)
    return "".join(f"\n    {command}" for command in commands) + _note_line(commands)


def _note_line(commands: Iterable[str]) -> str:
    note = _note(commands)
    return f"\n  ({note})" if note else ""


def _note(commands: Iterable[str]) -> str:
    words = {word for command in commands for word in command.split()}
    if CONFIG_FILE in words:
        return f"{CONFIG_FILE} contains the query's kafka.* options without this prefix, one name=value a line"
    if KAFKA_CONFIG_FILE in words:
        return f"{KAFKA_CONFIG_FILE} contains the security settings of a Java client, one name=value a line"
    if UNKNOWN_SERVERS in words:
        return f"{UNKNOWN_SERVERS} are the bootstrap servers; if they need credentials, add --command-config"
    return ""
