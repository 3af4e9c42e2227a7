"""What both ends of a connection say and ask in the same way, and the questions that were not answered yet.

Runs in: the stream reader, executor processes, tasks. Deliberately absent: sending.
"""

import threading
from concurrent.futures import Future
from typing import Any, Final

from spark_group_source.channel.wire import Envelope
from spark_group_source.errors import ChannelBroken

OPEN_MAX: Final = 10_000
"""Questions of one end that may wait: each has a thread that waits for it, so that far fewer do."""


class Talking:
    """One end of a connection, as those who use it see it. Any thread."""

    def __init__(self) -> None:
        self._questions = Questions()

    def send(self, message: Any) -> bool:
        """Say something. False: the connection has ended.

        Raises:
            WireError: this is no message of the channel.
        """
        return self._post(Envelope(message))

    def answer(self, asks: int, message: Any) -> bool:
        """Answer the question with this number; like :meth:`send`."""
        return self._post(Envelope(message, answers=asks))

    def request(self, message: Any, within_s: float) -> Any:
        """Ask, and wait for the answer; not on the thread that takes answers.

        Raises:
            ChannelBroken: none came in time, or the connection ended.
        """
        number, answer = self._questions.ask()
        if not self._post(Envelope(message, asks=number)):
            self._questions.end("it is closed")
        return self._questions.wait(number, answer, within_s)

    def _post(self, envelope: Envelope) -> bool:
        """Send it; False: the connection has ended."""
        raise NotImplementedError


class Questions:
    """Those of one end of a connection. Any thread may call anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, Future[Any]] = {}
        self._ended: str | None = None

    def ask(self) -> "tuple[int, Future[Any]]":
        """The number of a new question, and where its answer comes in.

        Raises:
            ChannelBroken: the connection ended, or too many wait.
        """
        with self._lock:
            if self._ended is not None:
                raise ChannelBroken(f"the control channel is closed: {self._ended}")
            if len(self._open) >= OPEN_MAX:
                raise ChannelBroken(f"{OPEN_MAX} questions are not answered yet")
            self._last += 1
            answer: Future[Any] = Future()
            self._open[self._last] = answer
            return self._last, answer

    def wait(self, number: int, answer: "Future[Any]", within_s: float) -> Any:
        """The answer.

        Raises:
            ChannelBroken: none came in time, or the connection ended.
        """
        try:
            return answer.result(timeout=within_s)
        except TimeoutError:
            raise ChannelBroken(f"no answer within {within_s:.1f} s", waited_ms=int(within_s * 1000)) from None
        finally:
            with self._lock:
                self._open.pop(number, None)

    def answered(self, number: int, message: Any) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        with self._lock:
            answer = self._open.pop(number, None)
        if answer is not None:
            answer.set_result(message)

    def end(self, reason: str) -> None:
        """The connection ended: nobody waits any longer."""
        with self._lock:
            self._ended = self._ended or reason  # the first one is why
            waiting, self._open = list(self._open.values()), {}
        for answer in waiting:
            answer.set_exception(ChannelBroken(f"the control channel was closed: {reason}"))
