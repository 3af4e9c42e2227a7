"""Takes a place of the group from a member that vanished, where the KIP-848 protocol alone has no word for that.

Runs in: the thread of a slot (``members.member``). Deliberately absent: knowing that it vanished (``group``).

The broker keeps the place of a static KIP-848 member that does not say that it goes, until its session ends; then it
divides the partitions anew, and again when the next member comes: two rebalances, and partitions that nobody has for as
long as a session lasts. But to a static member of the classic protocol it gives the place at once, with all that the
place has, and from such a one it is given to any. So a classic consumer joins in between, for a moment. Nothing of the
group changes by that. Who had the place, if it lives, is told that it is out, and refused when it joins again.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from spark_group_source.errors import GroupError
from spark_group_source.kafka.consumer import MemberConsumer
from spark_group_source.kafka.runtime import Runtime

log = logging.getLogger(__name__)

TAKE_MS_MAX = 10_000
"""How long it may take; then the place is free when its session ends."""
POLL_S = 0.1
_OF_CONSUMER_PROTOCOL = ("group.remote.assignor",)
"""Settings that a classic consumer refuses."""


def take_place(
    settings: Mapping[str, str],
    topics: Sequence[str],
    *,
    runtime: Runtime,
    known_as: deque[str],
    over: Callable[[], bool],
) -> None:
    """Whatever comes of it, the next KIP-848 member tells by whether it is given the place.

    Args:
        settings: of the member that is to have the place, with group.instance.id.
        topics: its subscription; it has to be that of the place, or the group divides anew.
        over: whether nobody wants the place any more.

    Raises:
        GroupError: it did not get the place.
    """
    given: list[int] = []
    classic = {name: text for name, text in settings.items() if name not in _OF_CONSUMER_PROTOCOL}
    consumer = MemberConsumer(
        classic | {"group.protocol": "classic"},
        runtime=runtime,
        known_as=known_as,
        on_assigned=lambda _, generation: given.append(generation),
        on_revoked=lambda _: None,
        on_lost=lambda _: None,
    )
    try:
        consumer.subscribe(topics)
        until_ms = runtime.now_ms() + TAKE_MS_MAX
        while not given and not over() and runtime.now_ms() < until_ms:
            consumer.poll(POLL_S)
    finally:
        consumer.close(leave=False)
    if not given:
        raise GroupError(f"the place was not taken from the member that vanished within {TAKE_MS_MAX} ms")
    log.info("took the place %s from a member that vanished", settings.get("group.instance.id"))
