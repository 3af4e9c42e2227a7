"""What brokers told a reading task about its topics, and whether they are the planned ones.

Runs in: executor workers. Deliberately absent: what follows from it (``ranges``), asking again (``asking``).

Kafka gives every topic an id of its own, also if one of the same name was there before (KIP-516). librdkafka follows a
name: when a topic is deleted and made anew it goes on with the new one at the same offsets, and does not tell. An id
that is the planned one at some time was so ever since the plan, so one question after the last rows came covers all of
them. A question before the first rows keeps most of what is wrong from being read at all.
"""

from collections.abc import Collection, Mapping

from spark_group_source.answers import Meaning, Request, meaning
from spark_group_source.executor.asking import Asking
from spark_group_source.executor.client import Client
from spark_group_source.executor.records import Event, Told, TopicTold


class Topics:
    """The topics of one reader.

    Args:
        planned: their ids; one that is missing or empty is not compared.
    """

    def __init__(self, planned: Mapping[str, str]) -> None:
        self._planned = {name: id_ for name, id_ in planned.items() if id_}
        self._told: dict[str, tuple[TopicTold, float]] = {}
        self._asking: Asking[Told] | None = None

    def compared(self, names: Collection[str]) -> set[str]:
        """Those of them that have a planned id."""
        return self._planned.keys() & names

    @property
    def is_asked(self) -> bool:
        """Whether a question is on its way."""
        return self._asking is not None

    def ask(self, client: Client, names: Collection[str]) -> None:
        """Send a question, instead of one that may be on its way."""
        if self._asking is not None:
            self._asking.give_up()
        wanted = sorted(names)
        self._asking = Asking(client, lambda: client.ask_topics(wanted))

    def forget_question(self) -> None:
        """Its client is gone."""
        self._asking = None

    def take(self, wait_s: float) -> Told | Event | None:
        """The answer; an event if asking failed, and goes on; None if it is not here yet, or nothing was asked."""
        taken = self._asking.take(wait_s) if self._asking is not None else None
        if taken is None:
            return None
        told, asked_s = taken
        if not isinstance(told, Event):
            self._asking = None
            self._told.update({name: (topic, asked_s) for name, topic in told.items()})
        return told

    def last(self, name: str, since_s: float) -> TopicTold | None:
        """What was told last, if that was asked at ``since_s`` or later."""
        told, asked_s = self._told.get(name, (None, 0.0))
        return told if told and asked_s >= since_s else None

    def is_other(self, name: str, topic: TopicTold) -> bool:
        """Whether a topic that is there is not the planned one. Brokers before 2.8 have no ids."""
        return bool(topic.id) and topic.id != self._planned.get(name, topic.id)

    def was_planned(self, name: str, since_s: float) -> bool:
        """Whether it was the planned one as long as it was there."""
        topic = self.last(name, since_s)
        return topic is not None and (
            meaning(Request.TOPICS, topic.code) is Meaning.GONE or self.is_planned(name, since_s)
        )

    def is_planned(self, name: str, since_s: float) -> bool:
        topic = self.last(name, since_s)
        return topic is not None and topic.code == 0 and not self.is_other(name, topic)
