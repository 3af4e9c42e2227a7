"""Retries of requests, and the confirmation of refusals.

Runs in: wherever ``kafka`` does. Deliberately absent: the meaning of error codes (``error_codes``), and long outages: a
request ends within seconds, and its caller decides what follows.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.error_codes import Meaning, Request, meaning
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.translation import ClientInfo, refusal_of_connection, translate

log = logging.getLogger(__name__)

CONFIRM_S = 1.0
"""The pause before a refused request is repeated once: a starting broker, or one with a new ACL, refuses for a
moment."""
RETRY_S_MAX = 10.0
"""No retry starts later than this after the first attempt."""

CONFIRMED = frozenset({Meaning.REFUSED, Meaning.GONE})
"""Meanings that are believed when they are returned twice in a row."""

T = TypeVar("T")


class RefusalWatch:
    """Records refusals that a client reports for its connections: a refused login does not end pending requests."""

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
        """Forget the refusal."""
        self.error = None


class Retry:
    """Sends a request and retries transient failures.

    Args:
        retries: the maximum number of retries after a transient failure, within :data:`RETRY_S_MAX`.
        interval_s: the pause before such a retry, at most :data:`RETRY_S_MAX`.
        pause: replaces the environment's pause.
    """

    def __init__(
        self,
        client_info: ClientInfo,
        environment: Environment,
        *,
        retries: int = 0,
        interval_s: float = 1.0,
        pause: Callable[[float], None] | None = None,
    ) -> None:
        self._client_info, self._environment = client_info, environment
        self._retries, self._interval_s = retries, min(interval_s, RETRY_S_MAX)
        self._pause = pause or environment.pause

    def __call__(self, request: Request, op: str, send: Callable[[], T]) -> T:
        """Send the request until it is answered.

        Args:
            request: the kind of request, which decides what an error code means.
            op: the operation, for error messages.
            send: sends once and returns the answer. It raises KafkaException, whose arguments may include the topic or
                group after the error.

        Raises:
            BrokerUnavailable: not answered.
            AccessDenied: refused twice in a row.
            GroupError: the request cannot succeed, or the topic or group does not exist, reported twice in a row.
        """
        started_ms = self._environment.now_ms()
        attempts = 0
        last: Meaning | None = None
        while True:
            try:
                return send()
            except KafkaException as exc:
                error: KafkaError = exc.args[0]
                waited_s = (self._environment.now_ms() - started_ms) / 1000
                what = meaning(request, error.code(), error.str())
                attempts += 1
                if what in CONFIRMED:
                    retry = what is not last
                else:
                    retry = what is Meaning.RETRY and attempts <= self._retries and waited_s < RETRY_S_MAX
                last = what
                if not retry:
                    name = exc.args[1] if len(exc.args) > 1 else ""
                    raise translate(
                        error, request=request, op=op, client_info=self._client_info, name=name, waited_s=waited_s
                    ) from exc
                log.info("%s failed; retrying: %s", op, error.str())
                self._pause(CONFIRM_S if what in CONFIRMED else self._interval_s)
