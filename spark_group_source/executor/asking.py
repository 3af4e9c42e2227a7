"""A question that is asked again until somebody answers.

Runs in: executor workers and agents. Deliberately absent: what the answer means (``ranges``, ``answers``).

librdkafka sends a question to the broker that it was told as the controller, or as the leader, and may not hear for
minutes that this one is dead. So an overdue question is sent again, after a look at who the brokers are; the former
one goes on waiting, for the broker may only be slow. The first answer of any of them counts.
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from spark_group_source.executor.client import Client
from spark_group_source.executor.records import Event

OVERDUE_S = 1.0
"""After so long without an answer it is sent again. Each one ends after :data:`client.ANSWER_S_MAX`, so that at most
six are on their way."""

T = TypeVar("T")


class Asking(Generic[T]):
    """One question from now on, to a client that belongs to this thread.

    Args:
        send: sends it, and tells the number under which the client knows it.
    """

    def __init__(self, client: Client, send: Callable[[], int]) -> None:
        self._client, self._send = client, send
        self._sent: dict[int, float] = {}
        self._due_s = 0.0
        self._again()

    def _again(self) -> None:
        now_s = time.monotonic()
        self._sent[self._send()] = now_s
        self._due_s = now_s + OVERDUE_S

    def take(self, wait_s: float) -> tuple[T | Event, float] | None:
        """An answer and when it was asked for; an event where one of the askings failed; None if none is here yet."""
        until_s = time.monotonic() + wait_s
        while True:
            now_s = time.monotonic()
            found = self._client.answer(self._sent, max(0.0, min(until_s, self._due_s) - now_s))
            if found is not None:
                number, told = found
                asked_s = self._sent.pop(number)
                if not isinstance(told, Event):
                    self.give_up()
                return cast("T | Event", told), asked_s  # each kind of question has its kind of answer
            now_s = time.monotonic()
            if now_s >= self._due_s:
                self._client.look_for_brokers()
                self._again()
            elif now_s >= until_s:
                return None

    def give_up(self) -> None:
        """No answer is wanted any more."""
        self._client.give_up(self._sent)
        self._sent = {}
