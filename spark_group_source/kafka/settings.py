"""A check at ``load()`` that the client library accepts the user's settings.

Runs in: the planner, at ``load()``. Deliberately absent: the split of the options into settings (``options.client``).
"""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaException

from spark_group_source.errors import OptionError
from spark_group_source.kafka.environment import Environment
from spark_group_source.options.client import CALLABLES, import_callables, mask_secrets
from spark_group_source.options.java import RENAMED
from spark_group_source.options.table import Options

NEVER_JOINS = {"group.id": "spark-group-source-reader", "group.protocol": "classic", "enable.auto.commit": "false"}
"""Settings of consumers that join no group. The library requires a group id; readers of committed offsets override
it."""
COORDINATOR_IDLE = {"connections.max.idle.ms": "5000"}
"""Settings of clients that send requests to coordinators. After a connection reset librdkafka may wait for a state
change that never comes, beyond the call's timeout (its issues 5456 and 5511); closing an idle connection is such a
change."""


def check_settings(options: Options) -> None:
    """Check the settings before anything is started.

    Raises:
        OptionError: the library refuses a setting (the message contains its text, without secrets), or a function
            cannot be imported.
    """
    environment = Environment()
    try:
        environment.consumer(_checkable(options.consumer_settings())).close()
        environment.producer(_checkable(options.producer_settings()))
    except KafkaException as exc:
        text = mask_secrets(exc.args[0].str(), dict(options.settings)).strip()
        # "from None": the cause may contain a secret.
        raise OptionError(f"the Kafka client (librdkafka) refuses an option: {text}{_hint(text)}") from None


def _hint(text: str) -> str:
    """Return the remedy for the library's error, which names only the setting."""
    if text.startswith("No such configuration property"):
        return ". If it is a setting of Java clients only, remove it: librdkafka has no equivalent"
    if "Unsupported partition.assignment.strategy" in text or "same protocol type" in text:
        return ". Use range and roundrobin in any order, or cooperative-sticky alone (or Java's names of these)"
    origin = next((java for java, name in RENAMED.items() if f'"{name}"' in text), None)
    return "" if origin is None else f" (kafka.{origin} is the same setting)"


def _checkable(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings without the functions, which a client would call when it is created."""
    known = import_callables(settings)
    return {name: value for name, value in known.items() if name not in CALLABLES} | {"log_level": 0}
