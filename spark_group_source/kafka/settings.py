"""Whether the client library accepts the user's settings, found out before anything is started.

Runs in: the planner, at ``load()``. Deliberately absent: which settings are ours (``options.client``).
"""

from confluent_kafka import KafkaException

from spark_group_source.errors import OptionError
from spark_group_source.kafka.runtime import Runtime
from spark_group_source.options.client import without_secrets
from spark_group_source.options.table import Options


def check_settings(options: Options) -> None:
    """Refuse settings that the client library does not know, before anything is started.

    Raises:
        OptionError: with the library's own words, in which no secret shows.
    """
    runtime = Runtime()
    try:
        runtime.consumer({**options.consumer_settings(), "log_level": 0}).close()
        runtime.producer({**options.producer_settings(), "log_level": 0})
    except KafkaException as exc:
        text = without_secrets(exc.args[0].str(), dict(options.settings))
        raise OptionError(f"the Kafka client refuses an option: {text}") from None  # the cause may hold a secret
