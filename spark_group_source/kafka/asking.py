"""Asking the brokers until they have answered: retries, and who is believed.

Runs in: wherever ``kafka`` does. Deliberately absent: what an error code means (``answers``), and outages that last: a
question ends within seconds, and whoever asked it decides what then.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.answers import Meaning, Request, meaning
from spark_group_source.kafka.translation import Asker, translate

log = logging.getLogger(__name__)

CONFIRM_S = 1.0
"""The wait before who was refused asks once more: brokers that start, and permissions that were just given, refuse for
a moment."""
ASK_S_MAX = 10.0
"""No retry begins later than this after the question."""

T = TypeVar("T")


def until_answered(
    request: Request,
    op: str,
    ask: Callable[[], T],
    *,
    asker: Asker,
    now_ms: Callable[[], int],
    pause: Callable[[float], None],
    retries: int = 0,
    retry_interval_s: float = 1.0,
) -> T:
    """Ask, and ask again what passes.

    Args:
        request, op: what is asked, for the judge and in words.
        ask: one try; raises KafkaException. It is called again at once after the pause.
        asker: for the message. Beside its error, a KafkaException may name the topic or group.
        now_ms, pause: the clock.
        retries: how often what was not answered is asked again, but not later than :data:`ASK_S_MAX`.

    Raises:
        BrokerUnavailable: not answered.
        AccessDenied: refused twice in a row.
        GroupError: the request cannot succeed.
    """
    started_ms = now_ms()
    refused = tries = 0
    while True:
        try:
            return ask()
        except KafkaException as exc:
            error: KafkaError = exc.args[0]
            waited_s = (now_ms() - started_ms) / 1000
            name = exc.args[1] if len(exc.args) > 1 else ""
            failure = translate(error, request=request, op=op, asker=asker, name=name, waited_s=waited_s)
            tries += 1
            what = meaning(request, error.code(), error.str())
            refused = refused + 1 if what is Meaning.REFUSED else 0
            again = tries <= retries and waited_s < ASK_S_MAX
            if not (refused == 1 or (what is Meaning.AGAIN and again)):
                raise failure from exc
            log.info("%s failed (%s); asking again", op, error.str())
            pause(CONFIRM_S if refused else retry_interval_s)
