"""One range of a reading task, compared with what brokers say of it: first of its topic, then of its log.

Runs in: executor workers. Deliberately absent: what follows from the answers (``ranges``).

Nothing here waits: records of all ranges are read meanwhile, also of this one.
"""

import time

from spark_group_source.executor.asking import Asking
from spark_group_source.executor.client import Client
from spark_group_source.executor.patience import Patience
from spark_group_source.executor.records import Bounds, Event
from spark_group_source.executor.topics import Topics
from spark_group_source.model import TopicPartition


class Inquiry:
    """Begins with a question about the topic, whose answer ``topics`` has then."""

    def __init__(self, client: Client, tp: TopicPartition, topics: Topics, patience: Patience) -> None:
        self.tp = tp
        self._client, self._topics, self._patience = client, topics, patience
        self._asked_s = time.monotonic()
        self._bounds: Asking[Bounds] | None = None
        topics.ask(client, {tp.topic})

    @property
    def topic_is_told(self) -> bool:
        return self._topics.last(self.tp.topic, self._asked_s) is not None

    def bounds(self) -> Bounds | Event | None:
        """Of its log, as its leader tells them; an event if it failed, None if they are not here yet."""
        if self._bounds is None:
            self._bounds = bounds_asked(self._client, self.tp)
        taken = self._bounds.take(0.0)
        if taken is None:
            return None
        self.heard(answered=not isinstance(taken[0], Event))
        return taken[0]

    def heard(self, *, answered: bool) -> None:
        """There is an answer, or none yet although it was waited for."""
        self._patience.asked(self._asked_s, time.monotonic(), answered=answered)

    def end(self) -> None:
        if self._bounds is not None:
            self._bounds.give_up()


def bounds_asked(client: Client, tp: TopicPartition) -> Asking[Bounds]:
    return Asking(client, lambda: client.ask_bounds(tp))
