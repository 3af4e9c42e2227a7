"""What the shells need of the machine that they run on: time, threads, and the client library's own clients.

Runs in: the stream reader, the user's driver (CLI). Deliberately absent: decisions, and Kafka's words. Everything in
``driver`` and ``kafka`` that waits, starts a thread or makes a client does it through one :class:`Environment`. The
simulation has another one with the same methods, under which the same code runs with simulated time and brokers.
"""

import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, Queue
from typing import Any, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka import admin as kafka_admin

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.options.callables import TOKEN_CALLABLE, import_callables

__all__ = ["Empty", "Environment", "Queue", "Thread"]

log = logging.getLogger(__name__)

ID_DIGITS = 12
"""Of a stream's id: it names one stream among those of a group, no more."""

# The library's stubs know neither callbacks nor loggers among the settings.
_AdminClient: Any = kafka_admin.AdminClient


class Thread(Protocol):
    """A thread that :meth:`Environment.spawn` made."""

    def join(self, timeout_s: float) -> None:
        """Wait for its end, not longer than that."""

    def is_alive(self) -> bool:
        """Whether it runs; False also for one that could not be started."""


class Environment:
    """The real one. Any thread may call anything here."""

    def __init__(self) -> None:
        self._parent = os.getppid()

    # --- time and threads -------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """Milliseconds since some moment; never goes back."""
        return time.monotonic_ns() // 1_000_000

    def wall_ms(self) -> int:
        """Milliseconds since the epoch, by this host's clock: for what others read, never for durations."""
        return time.time_ns() // 1_000_000

    def pause(self, wait_s: float) -> None:
        """Let time pass: for pauses between two questions, of a bounded number."""
        threading.Event().wait(max(wait_s, 0.0))

    def condition(self) -> threading.Condition:
        """A condition whose lock the same thread may take again."""
        return threading.Condition(threading.RLock())

    def queue(self, size_max: int) -> "Queue[Any]":
        """A queue between threads: ``get`` raises :class:`Empty`, and ``put_nowait`` Full beyond ``size_max``."""
        return Queue(size_max)

    def future(self) -> "Future[Any]":
        """A place for one answer; ``result(timeout=)`` raises TimeoutError."""
        return Future()

    def spawn(self, name: str, run: Callable[[], None], *, died: Callable[[BaseException], None]) -> Thread:
        """Start a thread that does not keep the process alive.

        Args:
            name: as the log shows it.
            run: what it does.
            died: is given whatever leaves ``run`` (except SystemExit), on that thread; or, on this one and before this
                returns, why the thread cannot be started.
        """
        thread = _Thread(name, run, died)
        thread.start()
        return thread

    # --- this process -----------------------------------------------------------------------------------------------

    def orphaned(self) -> bool:
        """Whether the process that started this one is gone."""
        return os.getppid() != self._parent

    def new_id(self) -> str:
        """A name that nobody else has."""
        return uuid.uuid4().hex[:ID_DIGITS]

    # --- the library's clients --------------------------------------------------------------------------------------

    def consumer(self, settings: Mapping[str, Any]) -> Any:
        """A ``confluent_kafka.Consumer``."""
        return made(Consumer, settings)

    def producer(self, settings: Mapping[str, Any]) -> Any:
        """A ``confluent_kafka.Producer``."""
        return made(Producer, settings)

    def admin(self, settings: Mapping[str, Any]) -> Any:
        """A ``confluent_kafka.admin.AdminClient``."""
        return made(_AdminClient, settings)


class LibraryLog:
    """librdkafka's log. For DEBUG alone are lost connections, which the query itself reports: in an outage each client
    would add twenty lines a second; and settings that do not concern the client, which each new client repeats."""

    def log(self, level: int, text: str, *parts: object) -> None:
        quiet = bool(parts) and parts[0] in ("FAIL", "ERROR", "CONFWARN")
        log.log(logging.INFO if level >= logging.WARNING and not quiet else logging.DEBUG, text, *parts)


def made(make: Callable[[dict[str, Any]], Any], settings: Mapping[str, Any]) -> Any:
    """A client of the library's. Functions that the settings name are imported in this process.

    Raises:
        KafkaException: the library refuses the settings.
        OptionError: a function cannot be imported here.
        BrokerUnavailable: the function for tokens gave none; the library waits 10 s for the first one.
    """
    given = {"logger": LibraryLog(), **import_callables(settings)}
    try:
        return make(given)
    except (KafkaException, SystemError) as failed:
        # A line of the log that comes while the package raises trips it: what it raised is the cause then.
        exc = failed if isinstance(failed, KafkaException) else failed.__cause__
        if not isinstance(exc, KafkaException):
            raise
        if TOKEN_CALLABLE in given and exc.args[0].code() == KafkaError.SASL_AUTHENTICATION_FAILED:
            function = given[TOKEN_CALLABLE]
            raise BrokerUnavailable(
                f"kafka.{TOKEN_CALLABLE}: {function.name} gave no token: {function.failure or exc.args[0].str()}. It "
                "must return (token, seconds since the epoch when it expires)",
                op="asking for a token",
            ) from None
        raise exc from None


class _Thread:
    def __init__(self, name: str, run: Callable[[], None], died: Callable[[BaseException], None]) -> None:
        self._run, self._died = run, died
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)
        self._started = False

    def start(self) -> None:
        try:
            self._thread.start()
            self._started = True
        except RuntimeError as exc:  # the system has no more threads to give
            self._died(exc)

    def join(self, timeout_s: float) -> None:
        if self._started:
            self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        return self._started and self._thread.is_alive()

    def _guarded(self) -> None:
        try:
            self._run()
        except SystemExit:
            pass
        except:  # noqa: E722 - what the library lets through from a callback is not even a BaseException
            exc: object = sys.exc_info()[1]
            log.exception("thread %s died", self._thread.name)
            self._died(exc if isinstance(exc, BaseException) else RuntimeError(repr(exc)))
