"""What brokers told a reading task about its topics, and whether they are the planned ones.

Runs in: executor workers. Deliberately absent: what follows from it (``ranges``), a clock.

Kafka gives every topic an id of its own, also if one of the same name was there before (KIP-516). librdkafka follows a
name: when a topic is deleted and made anew it goes on with the new one at the same offsets, and does not tell. An id
that is the planned one at some time was so ever since the plan, so one question after the last rows came covers all of
them. A question before the first rows keeps most of what is wrong from being read at all.
"""

from collections.abc import Collection, Mapping

from spark_group_source.answers import Meaning, Request, meaning
from spark_group_source.executor.client import Client
from spark_group_source.executor.questions import ANSWER_S_MAX
from spark_group_source.executor.records import Event, Told, TopicTold

OVERDUE_S = 1.0
"""An answer that takes longer may never come: librdkafka sends the question to the broker that it was told as the
controller, and may not hear for minutes that this one is dead. The next one is given twice the time, up to
``ANSWER_S_MAX``."""


class Topics:
    """The topics of one reader.

    Args:
        planned: their ids; one that is missing or empty is not compared.
    """

    def __init__(self, planned: Mapping[str, str]) -> None:
        self._planned = {name: id_ for name, id_ in planned.items() if id_}
        self._told: dict[str, tuple[TopicTold, float]] = {}
        self._names: list[str] = []
        self._asked_s: float | None = None
        self._overdue_s = OVERDUE_S

    def compared(self, names: Collection[str]) -> set[str]:
        """Those of them that have a planned id."""
        return self._planned.keys() & names

    @property
    def is_asked(self) -> bool:
        """Whether a question is on its way."""
        return self._asked_s is not None

    def ask(self, client: Client, names: Collection[str], now_s: float) -> None:
        """Send a question, instead of one that may be on its way."""
        self._names = sorted(names)
        client.ask_topics(self._names)
        self._asked_s = now_s

    def forget_question(self) -> None:
        """Its client is gone."""
        self._asked_s = None

    def take(self, client: Client, wait_s: float, now_s: float) -> Told | Event | None:
        """The answer; an event if there is none; None if it is not here yet, or nothing was asked."""
        if self._asked_s is None:
            return None
        first_s = min(wait_s, max(0.0, self._asked_s + self._overdue_s - now_s))
        told = client.topics_told(first_s)
        if told is None and now_s + first_s >= self._asked_s + self._overdue_s:
            client.look_for_brokers()
            self.ask(client, self._names, now_s + first_s)  # the former question goes on waiting for the dead one
            self._overdue_s = min(2 * self._overdue_s, ANSWER_S_MAX)  # or the broker is slow
            told = client.topics_told(wait_s - first_s)
        if told is None:
            return None
        self._overdue_s = OVERDUE_S
        asked_s, self._asked_s = self._asked_s, None
        if not isinstance(told, Event):
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
