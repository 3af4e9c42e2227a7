"""Kafka consumer groups as a PySpark streaming source, exactly once into Delta.

Runs in: every process. Deliberately absent: opening a connection, a file or a session on import. Names that need
pyspark are imported on first access, if the installed Spark is supported."""

import importlib
from typing import TYPE_CHECKING, Any

from spark_group_source.errors import (
    AccessDenied,
    BadRecords,
    BrokerUnavailable,
    ChannelBroken,
    CheckpointMismatch,
    CommitFailed,
    DataLoss,
    DrainTimeout,
    Fenced,
    GroupError,
    InvariantBroken,
    LedgerConflict,
    OptionError,
    ReadTimeout,
    RebalanceTimeout,
    RegistryUnavailable,
    SetupError,
    SourceError,
    TopicMissing,
)
from spark_group_source.host.run_files import drain
from spark_group_source.protocol.statistics import Statistics

if TYPE_CHECKING:
    from spark_group_source import decode
    from spark_group_source.cli.functions import describe, reset
    from spark_group_source.delta.dead_letters import DeadLetters
    from spark_group_source.delta.merge import Merge
    from spark_group_source.delta.sink import DeltaSink
    from spark_group_source.delta.topic_sinks import DeltaSinks
    from spark_group_source.host.listener import GroupListener
    from spark_group_source.source import KafkaGroupDataSource

__all__ = [
    "AccessDenied",
    "BadRecords",
    "BrokerUnavailable",
    "ChannelBroken",
    "CheckpointMismatch",
    "CommitFailed",
    "DataLoss",
    "DeadLetters",
    "DeltaSink",
    "DeltaSinks",
    "DrainTimeout",
    "Fenced",
    "GroupError",
    "GroupListener",
    "InvariantBroken",
    "KafkaGroupDataSource",
    "LedgerConflict",
    "Merge",
    "OptionError",
    "ReadTimeout",
    "RebalanceTimeout",
    "RegistryUnavailable",
    "SetupError",
    "SourceError",
    "Statistics",
    "TopicMissing",
    "decode",
    "describe",
    "drain",
    "reset",
]

__version__ = "0.1.0"


_MODULES_OF_NAMES = {
    "DeadLetters": "delta.dead_letters",
    "DeltaSink": "delta.sink",
    "DeltaSinks": "delta.topic_sinks",
    "GroupListener": "host.listener",
    "KafkaGroupDataSource": "source",
    "Merge": "delta.merge",
    "describe": "cli.functions",
    "reset": "cli.functions",
}
"""The modules of the names that are imported on first access."""
_NEEDS_SPARK = frozenset({"DeadLetters", "DeltaSink", "DeltaSinks", "GroupListener", "KafkaGroupDataSource", "Merge"})
"""The names whose modules import pyspark."""


def __getattr__(name: str) -> Any:
    if name == "decode":
        return importlib.import_module("spark_group_source.decode")
    if name not in _MODULES_OF_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _NEEDS_SPARK:
        from spark_group_source import compatibility

        compatibility.check()  # a missing or unsupported Spark lacks what the module imports
    return getattr(importlib.import_module(f"spark_group_source.{_MODULES_OF_NAMES[name]}"), name)
