"""What the consumer of a member is made with, wherever it lives.

Runs in: the stream reader, agents. Deliberately absent: the names of one member (``Join`` has them).
"""

from spark_group_source.options.table import Options

TOPICS_EVERY_S = 30.0
"""How often a pattern is matched against the cluster's topics; ``kafka.topic.metadata.refresh.interval.ms`` sets it."""


def topics_every_s(options: Options) -> float:
    """How often members and worker look for new topics and partitions."""
    own = dict(options.settings).get("topic.metadata.refresh.interval.ms")
    return TOPICS_EVERY_S if own is None else int(own) / 1000


def member_settings(options: Options) -> dict[str, str]:
    """librdkafka's settings, with group.id."""
    refresh_ms = str(int(topics_every_s(options) * 1000))
    return {"topic.metadata.refresh.interval.ms": refresh_ms, **options.consumer_settings()}
