"""Requests that are repeated until brokers have answered: retries, and which answers are believed.

Runs in: wherever ``kafka`` does. Deliberately absent: what an error code means (``error_codes``), and outages that
last: a question ends within seconds, and whoever asked it decides what then."""

import logging
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.error_codes import Meaning, Request, Suspicions, meaning
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.translation import Asker, refusal_of_connection, translate

log = logging.getLogger(__name__)

CONFIRM_S = 1.0
"""The wait before a request that was refused is repeated once: brokers that start, and permissions that were just
given, refuse for a moment."""
ASK_S_MAX = 10.0
"""No retry begins later than this after the question."""

TWICE = frozenset({Meaning.REFUSED, Meaning.GONE})
"""What is believed when it is reported the second time in a row."""

T = TypeVar("T")


class RefusalWatch:
    """Notes what a client reports of its connections: a login that brokers refuse ends no pending request."""

    def __init__(self) -> None:
        self.error: KafkaError | None = None

    def __call__(self, error: KafkaError) -> None:
        """The client's error callback."""
        self.error = refusal_of_connection(error) or self.error

    def check(self) -> None:
        """Raise the refusal as a KafkaException, if there was one."""
        if self.error is not None:
            raise KafkaException(self.error) from None

    def clear(self) -> None:
        self.error = None


class Retry:
    """Asks, and asks again what passes.

    Args:
        asker: for the message of what ends it.
        environment: the clock.
        retries: how often what was not answered is asked again, but not later than :data:`ASK_S_MAX`.
        interval_s: the pause before that.
        pause: lets time pass in the environment's place.
    """

    def __init__(
        self,
        asker: Asker,
        environment: Environment,
        *,
        retries: int = 0,
        interval_s: float = 1.0,
        pause: Callable[[float], None] | None = None,
    ) -> None:
        self._asker, self._environment, self._retries, self._interval_s = asker, environment, retries, interval_s
        self._pause = pause or environment.pause

    def __call__(self, request: Request, op: str, ask: Callable[[], T]) -> T:
        """The answer.

        Args:
            request, op: what is asked, for the judge and in words.
            ask: one try; raises KafkaException, which may name the topic or group beside its error. It is called again
                at once after the pause.

        Raises:
            BrokerUnavailable: not answered.
            AccessDenied: refused twice in a row.
            GroupError: the request cannot succeed, or what it is about is not there, reported twice in a row.
        """
        started_ms = self._environment.now_ms()
        suspicions = Suspicions()
        tries = 0
        while True:
            try:
                return ask()
            except KafkaException as exc:
                error: KafkaError = exc.args[0]
                waited_s = (self._environment.now_ms() - started_ms) / 1000
                what = meaning(request, error.code(), error.str())
                suspicions.clear(*(TWICE - {what}))
                tries += 1
                again = what is Meaning.RETRY and tries <= self._retries and waited_s < ASK_S_MAX
                if not (not suspicions.report(what) if what in TWICE else again):
                    name = exc.args[1] if len(exc.args) > 1 else ""
                    asker = self._asker
                    raise translate(error, request=request, op=op, asker=asker, name=name, waited_s=waited_s) from exc
                log.info("%s failed (%s); asking again", op, error.str())
                self._pause(CONFIRM_S if what in TWICE else self._interval_s)
