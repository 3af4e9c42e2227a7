"""What a reading task asks brokers of its topics and ranges, and how long it waits for them.

Runs in: executor workers. Deliberately absent: what follows from the answers (``ranges``), sending a question again
(``questions``).

Kafka gives every topic an id of its own, also if one of the same name was there before (KIP-516). librdkafka follows a
name: when a topic is deleted and made anew it goes on with the new one at the same offsets, and does not report it. An
id that is the planned one at some time was so ever since the plan, so one question after the last rows came covers all
of them. A question before the first rows keeps most of what is wrong from being read at all.
"""

import time
from collections.abc import Collection, Mapping
from enum import Enum

from spark_group_source.answers import Meaning, Request, meaning
from spark_group_source.model import TopicPartition
from spark_group_source.reader.native_client import NativeClient
from spark_group_source.reader.records import Bounds, Event, Told, TopicTold
from spark_group_source.reader.requests import PendingRequest


class TopicCheck(Enum):
    """What is known of a topic since some moment."""

    UNCHECKED = "no answer since then"
    TROUBLED = "brokers answered with an error that passes, or refused"
    PLANNED = "it is the planned one"
    OTHER = "it was deleted and made anew"
    GONE = "it does not exist"


class Topics:
    """The topics of one reader; one question about them at a time.

    Args:
        planned: their ids; one that is missing or empty is not compared.
    """

    def __init__(self, planned: Mapping[str, str]) -> None:
        self._planned = {name: id_ for name, id_ in planned.items() if id_}
        self._told: dict[str, tuple[TopicTold, float]] = {}
        self._question: PendingRequest[Told] | None = None

    def compared(self, names: Collection[str]) -> set[str]:
        """Those of them that have a planned id."""
        return self._planned.keys() & names

    @property
    def is_asked(self) -> bool:
        """Whether a question is open."""
        return self._question is not None

    def ask(self, client: NativeClient, names: Collection[str]) -> None:
        """Send a question, instead of one that may be open."""
        if self._question is not None:
            self._question.give_up()
        self._question = client.ask_topics(sorted(names))

    def forget_question(self) -> None:
        """Its client is closed."""
        self._question = None

    def take(self, wait_s: float) -> Told | Event | None:
        """The answer; an event if a request failed, and the question goes on; None if it is not here yet, or nothing
        was asked."""
        taken = self._question.take(wait_s) if self._question is not None else None
        if taken is None:
            return None
        told, asked_s = taken
        if not isinstance(told, Event):
            self._question = None
            self._told.update({name: (topic, asked_s) for name, topic in told.items()})
        return told

    def check(self, name: str, since_s: float) -> TopicCheck:
        """What the last answer says, if it was asked for at ``since_s`` or later. Brokers before 2.8 have no ids."""
        topic, asked_s = self._told.get(name, (None, 0.0))
        if topic is None or asked_s < since_s:
            return TopicCheck.UNCHECKED
        match meaning(Request.TOPICS, topic.code):
            case Meaning.GOOD:
                other = topic.id and topic.id != self._planned.get(name, topic.id)
                return TopicCheck.OTHER if other else TopicCheck.PLANNED
            case Meaning.GONE:
                return TopicCheck.GONE
        return TopicCheck.TROUBLED


class Patience:
    """When one reader gives up. An outage is no fault of the records: while questions are not answered the first clock
    stands still, and a longer bound counts.

    Args:
        deadline_s: without progress for so long, while brokers answer.
        silence_s: without an answer for so long.
    """

    def __init__(self, deadline_s: float, silence_s: float) -> None:
        self._deadline_s, self._silence_s = deadline_s, silence_s
        self._progress_s = 0.0
        self._silent_s: float | None = None

    def progress(self, now_s: float) -> None:
        """A record came, or a position moved."""
        self._progress_s, self._silent_s = now_s, None

    def asked(self, sent_s: float, now_s: float, *, answered: bool) -> None:
        """A question about a range was answered now, or given up."""
        if not answered:
            self._silent_s = sent_s if self._silent_s is None else self._silent_s
        elif self._silent_s is not None:
            self._progress_s += now_s - self._silent_s
            self._silent_s = None

    def left_s(self, now_s: float) -> float:
        """Until it ends."""
        if self._silent_s is None:
            return self._progress_s + self._deadline_s - now_s
        return self._silent_s + self._silence_s - now_s

    def waited_s(self, now_s: float) -> float:
        """Without progress, or without an answer."""
        return now_s - (self._progress_s if self._silent_s is None else self._silent_s)


class Inquiry:
    """One range, compared with what brokers say of it: first of its topic, whose answer ``topics`` has then, and then
    of its log. Nothing here waits: records of all ranges are read meanwhile, also of this one."""

    def __init__(self, client: NativeClient, tp: TopicPartition, topics: Topics, patience: Patience) -> None:
        self.tp = tp
        self._client, self._topics, self._patience = client, topics, patience
        self._asked_s = time.monotonic()
        self._bounds: PendingRequest[Bounds] | None = None
        topics.ask(client, {tp.topic})

    @property
    def topic(self) -> TopicCheck:
        """What was answered since this inquiry began."""
        return self._topics.check(self.tp.topic, self._asked_s)

    def bounds(self) -> Bounds | Event | None:
        """Of its log, as its leader reports them; an event if a request failed, None if they are not here yet."""
        if self._bounds is None:
            self._bounds = self._client.ask_bounds(self.tp)
        taken = self._bounds.take(0.0)
        if taken is None:
            return None
        self.note(answered=not isinstance(taken[0], Event))
        return taken[0]

    def note(self, *, answered: bool) -> None:
        """There is an answer, or none yet although it was waited for."""
        self._patience.asked(self._asked_s, time.monotonic(), answered=answered)

    def end(self) -> None:
        if self._bounds is not None:
            self._bounds.give_up()
