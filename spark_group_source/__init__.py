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


def __getattr__(name: str) -> Any:
    if name in ("DeadLetters", "DeltaSink", "DeltaSinks", "GroupListener", "KafkaGroupDataSource", "Merge"):
        from spark_group_source import compatibility

        compatibility.check()  # a missing or unsupported Spark lacks what the next lines import
    if name == "DeadLetters":
        from spark_group_source.delta.dead_letters import DeadLetters

        return DeadLetters
    if name == "Merge":
        from spark_group_source.delta.merge import Merge

        return Merge
    if name == "DeltaSink":
        from spark_group_source.delta.sink import DeltaSink

        return DeltaSink
    if name == "DeltaSinks":
        from spark_group_source.delta.topic_sinks import DeltaSinks

        return DeltaSinks
    if name == "GroupListener":
        from spark_group_source.host.listener import GroupListener

        return GroupListener
    if name == "KafkaGroupDataSource":
        from spark_group_source.source import KafkaGroupDataSource

        return KafkaGroupDataSource
    if name == "decode":
        return importlib.import_module("spark_group_source.decode")
    if name in ("describe", "reset"):
        from spark_group_source.cli import functions

        return getattr(functions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
