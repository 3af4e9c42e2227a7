"""Whether the client library accepts the user's settings, found out before anything is started.

Runs in: the planner, at ``load()``. Deliberately absent: which settings are ours (``options.client``).
"""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaException

from spark_group_source.errors import OptionError
from spark_group_source.kafka.environment import Environment
from spark_group_source.options.callables import CALLABLES, import_callables
from spark_group_source.options.client import mask_secrets
from spark_group_source.options.java import RENAMED
from spark_group_source.options.table import Options

NEVER_JOINS = {"group.id": "spark-group-source-reader", "group.protocol": "classic", "enable.auto.commit": "false"}
"""Of consumers that join no group. The library demands a group id; under another one, committed offsets are read."""
COORDINATOR_IDLE = {"connections.max.idle.ms": "5000"}
"""Of clients that ask coordinators. After a connection was reset librdkafka may wait for a change that does not come,
whatever time the call was given (its issues 5456 and 5511); an idle connection that is closed is such a change."""


def check_settings(options: Options) -> None:
    """Refuse settings that the client library does not know, before anything is started.

    Raises:
        OptionError: with the library's own words, in which no secret shows; or a function cannot be imported.
    """
    environment = Environment()
    try:
        environment.consumer(_checkable(options.consumer_settings())).close()
        environment.producer(_checkable(options.producer_settings()))
    except KafkaException as exc:
        text = mask_secrets(exc.args[0].str(), dict(options.settings)).strip()
        # The cause may hold a secret.
        raise OptionError(f"the Kafka client (librdkafka) refuses an option: {text}{_hint(text)}") from None


def _hint(text: str) -> str:
    """What to do about a refusal of the library's, which says only what it refuses."""
    if text.startswith("No such configuration property"):
        return ". Where the name is right and only Java clients know it, remove it: it has no equal here"
    if "Unsupported partition.assignment.strategy" in text or "same protocol type" in text:
        return ". Use range and roundrobin in any order, or cooperative-sticky alone (or Java's names of these)"
    origin = next((java for java, name in RENAMED.items() if f'"{name}"' in text), None)
    return "" if origin is None else f" (kafka.{origin} is the same setting)"


def _checkable(settings: Mapping[str, str]) -> dict[str, Any]:
    """Without the functions: a client calls them when it is made, and nothing is asked for yet."""
    known = import_callables(settings)
    return {name: value for name, value in known.items() if name not in CALLABLES} | {"log_level": 0}
