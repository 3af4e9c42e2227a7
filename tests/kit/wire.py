"""A request of the application to the brokers: in transit, answered, delayed, duplicated or lost.

Runs in: tests. Deliberately absent: the brokers' answers (``cluster``), and their interpretation by each client.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError

from kit.misfortune import Luck, RequestKind
from kit.world import REQUEST_TIMEOUT_MS

if TYPE_CHECKING:
    from kit.fake_library import Library

Reply = Callable[[Any], None]
Serve = Callable[[Reply], None]

RECONNECT_MS = 250
"""The interval between attempts to reach a broker."""


class Partly:
    """An answer of which parts are to be replaced by errors."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


class PendingRequest:
    """One request. ``settle`` is called once, on the library's thread, with the answer or a KafkaError.

    Args:
        library: the client that sends it.
        serve: runs at a broker, and calls its argument with the answer, now or later.
        timeout_ms: the library's timeout; after it ``timed_out`` is the answer.

    Attributes:
        was_sent: whether a broker may have received it: the client was connected at some time.
    """

    def __init__(
        self,
        library: "Library",
        kind: RequestKind,
        serve: Serve,
        settle: Callable[[Any], None],
        *,
        timeout_ms: int,
        timed_out: Callable[[], KafkaError],
    ) -> None:
        self._process, self._thread, self._world = library.process, library.thread, library.world
        self._misfortune, self._late_commits_ms = library.cluster.misfortune, library.cluster.late_commits_ms
        self._kind, self._serve, self._settle = kind, serve, settle
        self._timeout_ms, self._timed_out = timeout_ms, timed_out
        self._settled = self._armed = self._answered = False
        self.was_sent = False
        self._draws = library.process.draws(f"{library.thread}/{kind.value}")
        world, draws = self._world, self._draws
        luck = self._misfortune.draw(draws, kind)
        if luck is not None:
            world.note(lambda: f"{library.process.name}: {kind.value}: {luck.value}")
        if luck is Luck.NEVER:
            self.was_sent = True
            self._arm()
            if draws.chance(0.5):
                world.at(self._latency(), self._served_in_vain)
        elif luck is Luck.REFUSED:
            error = self._error(self._misfortune.refusal(draws, kind))
            patience_ms = min(timeout_ms, self._misfortune.late_ms_max)
            self._answer(error, late_ms=draws.between(0, patience_ms) if error.code() == KafkaError._TIMED_OUT else 0)
        else:
            self._send(luck)

    def _send(self, luck: Luck | None) -> None:
        if self._settled:
            return
        world, is_cut_off = self._world, self._process.cut_off()
        self.was_sent |= not is_cut_off
        if is_cut_off or self._draws.chance(world.loss):
            self._arm()
            delay_ms = RECONNECT_MS if is_cut_off else REQUEST_TIMEOUT_MS
            self._process.later(self._thread, delay_ms, lambda: self._send(luck))
            return
        delay_ms = self._latency()
        if self._kind in (RequestKind.COMMIT, RequestKind.SEND):
            delay_ms += self._late_commits_ms.pop(self._process.name, 0)
        if luck is Luck.LATE and self._draws.chance(0.5):
            delay_ms += self._draws.between(200, self._misfortune.late_ms_max)
        world.at(delay_ms, lambda: self._arrived(luck))

    def _arrived(self, luck: Luck | None) -> None:
        """Arrive at the broker."""
        draws = self._draws
        if self._settled and self._kind is RequestKind.COMMIT:
            return  # it timed out, and its connection was closed: it does not arrive after a newer one
        if self._process.cut_off():
            self._arm()
            self._process.later(self._thread, RECONNECT_MS, lambda: self._send(luck))
            return
        if luck is Luck.TWICE:
            self._arm()
            self._serve(_drop)
            self._process.later(self._thread, draws.between(1, REQUEST_TIMEOUT_MS), lambda: self._send(None))
            return

        def reply(answer: Any) -> None:
            if luck is Luck.FALSE_ERROR and not isinstance(answer, KafkaError):
                answer = self._error(self._misfortune.false_error(draws, self._kind))
            elif luck is Luck.PARTLY:
                answer = Partly(answer)
            elif luck is Luck.LATE:
                self._answer(answer, late_ms=draws.between(0, self._misfortune.late_ms_max))
                return
            self._answer(answer)

        self._serve(reply)
        if not self._answered:
            self._arm()

    def _answer(self, answer: Any, *, late_ms: int = 0) -> None:
        self._answered = True
        if late_ms:
            self._arm()
        self._process.later(self._thread, self._latency() + late_ms, lambda: self._end(answer))

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._process.later(self._thread, self._timeout_ms, lambda: self._end(self._timed_out()))

    def _end(self, answer: Any) -> None:
        if not self._settled:
            self._settled = True
            self._settle(answer)

    def _served_in_vain(self) -> None:
        if not self._process.cut_off():
            self._serve(_drop)

    def _error(self, code: int) -> KafkaError:
        return self._timed_out() if code == KafkaError._TIMED_OUT else KafkaError(code)

    def _latency(self) -> int:
        return self._draws.between(1, self._world.delay_ms_max)


def _drop(_: Any) -> None:
    """Ignore the answer."""
