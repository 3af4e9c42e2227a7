"""The environment of a process: clocks, threads, and the clients of confluent_kafka.

Runs in: Spark's planning worker (at ``load()``, to check settings), the stream reader, agents, the user's driver (CLI).
Deliberately absent: decisions, the group protocol, and the split of options into settings (``options.client``). All
code that waits, starts a thread or creates a client does it through one :class:`Environment`. The simulation has a
subclass, under which the same code runs with simulated time and brokers.
"""

import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Queue
from typing import Any, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka import admin as kafka_admin

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.options.client import TOKEN_CALLABLE, UserFunction, import_callable, refused_setting
from spark_group_source.options.table import Options

log = logging.getLogger(__name__)

ID_DIGITS = 12
"""The length of a generated id: of a stream, unique in its group, or of an agent, unique in its run."""

NEVER_JOINS = {"group.id": "spark-group-source-reader", "group.protocol": "classic", "enable.auto.commit": "false"}
"""Settings of consumers that join no group. The library requires a group id; readers of committed offsets override
it."""
COORDINATOR_IDLE_MS = 5_000
"""When clients that send requests to coordinators close an idle connection, at the latest. After a connection reset
librdkafka may wait for a state change that never comes, beyond the call's timeout (its issues 5456 and 5511); closing
an idle connection is such a change."""

# The library's type stubs accept neither callbacks nor loggers as settings.
_AdminClient: Any = kafka_admin.AdminClient


class Thread(Protocol):
    """A thread that :meth:`Environment.spawn` started."""

    def join(self, timeout_s: float, /) -> None:
        """Wait until it has ended, at most for the timeout. Only for a thread that could be started."""

    def is_alive(self) -> bool:
        """Whether it runs; False also if it could not be started."""


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Environment:
    """The real environment. Any thread may call its methods."""

    def __init__(self) -> None:
        self._parent = os.getppid()

    # --- time and threads -------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """Return monotonic time in ms; its zero is arbitrary."""
        return time.monotonic_ns() // 1_000_000

    def boot_ms(self) -> int:
        """Return monotonic time in ms that also counts while this machine is suspended, where the platform has that
        clock: to find out that a process did not run. :meth:`now_ms` stops on Linux while the machine is suspended, and
        so do all bounds of waits."""
        return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000

    def wall_ms(self) -> int:
        """Return this host's wall-clock time in ms since the epoch: for stored timestamps, never for durations."""
        return time.time_ns() // 1_000_000

    def pause(self, wait_s: float) -> None:
        """Block the calling thread: for pauses between a bounded number of retries."""
        threading.Event().wait(max(wait_s, 0.0))

    def condition(self) -> threading.Condition:
        """Return a condition with a reentrant lock."""
        return threading.Condition(threading.RLock())

    def queue(self, size_max: int) -> "Queue[Any]":
        """Return a queue: ``get`` raises ``queue.Empty`` after its timeout, ``put_nowait`` raises Full at
        ``size_max``."""
        return Queue(size_max)

    def future(self) -> "Future[Any]":
        """Return a future; its ``result(timeout=)`` raises TimeoutError."""
        return Future()

    def spawn(self, name: str, run: Callable[[], None], *, died: Callable[[BaseException], None]) -> Thread:
        """Start a daemon thread.

        Args:
            name: the thread's name in the log.
            run: the function it runs.
            died: called with every exception that leaves ``run`` (except SystemExit), on that thread. If the thread
                cannot be started, called with the reason on the calling thread before this returns.
        """

        def guarded() -> None:
            try:
                run()
            except SystemExit:
                pass
            except:  # noqa: E722 - a callback error that the library passes on may not be a BaseException
                exc: object = sys.exc_info()[1]
                log.exception("thread %s died", name)
                died(exc if isinstance(exc, BaseException) else RuntimeError(repr(exc)))

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # the system cannot start more threads
            died(exc)
        return thread

    # --- this process -----------------------------------------------------------------------------------------------

    def is_orphaned(self) -> bool:
        """Whether the parent process has ended."""
        return os.getppid() != self._parent

    def new_id(self) -> str:
        """Return a new unique id."""
        return uuid.uuid4().hex[:ID_DIGITS]

    # --- Kafka clients --------------------------------------------------------------------------------------------

    def consumer(self, settings: Mapping[str, Any]) -> Any:
        """Create a ``confluent_kafka.Consumer``."""
        return create_client(Consumer, settings)

    def producer(self, settings: Mapping[str, Any]) -> Any:
        """Create a ``confluent_kafka.Producer``."""
        return create_client(Producer, settings)

    def admin(self, settings: Mapping[str, Any]) -> Any:
        """Create a ``confluent_kafka.admin.AdminClient``."""
        return create_client(_AdminClient, settings)


# --- clients of confluent_kafka -------------------------------------------------------------------------------------


class LibraryLog:
    """Receives librdkafka's log lines.

    Two kinds are logged at DEBUG only: lost connections, which the query reports itself (in an outage each client would
    add 20 lines per second), and unused settings, which each new client repeats.
    """

    def log(self, level: int, text: str, *parts: object) -> None:
        """Log a line as ``Logger.log`` does; the first of ``parts`` is librdkafka's facility, such as FAIL."""
        quiet = bool(parts) and parts[0] in ("FAIL", "ERROR", "CONFWARN")
        log.log(logging.INFO if level >= logging.WARNING and not quiet else logging.DEBUG, text, *parts)


def coordinator_idle(settings: Mapping[str, str]) -> dict[str, str]:
    """Return ``connections.max.idle.ms`` for a client with these settings that sends requests to coordinators:
    :data:`COORDINATOR_IDLE_MS`, or less if the user has set less. 0 would turn it off."""
    own_ms = int(settings.get("connections.max.idle.ms", 0))
    return {"connections.max.idle.ms": str(min(own_ms or COORDINATOR_IDLE_MS, COORDINATOR_IDLE_MS))}


def create_client(constructor: Callable[[dict[str, Any]], Any], settings: Mapping[str, Any]) -> Any:
    """Create a client. A function that the settings name is imported in this process.

    Raises:
        KafkaException: the library refuses the settings.
        OptionError: the function cannot be imported here.
        BrokerUnavailable: the token function returned no token; the library waits 10 s for the first one.
    """
    complete = {"logger": LibraryLog(), **settings}
    if TOKEN_CALLABLE in settings:
        complete[TOKEN_CALLABLE] = UserFunction(settings[TOKEN_CALLABLE])
    try:
        return constructor(complete)
    except (KafkaException, SystemError) as failed:
        # A log line during the constructor's failure causes a SystemError, whose cause is the KafkaException.
        exc = failed if isinstance(failed, KafkaException) else failed.__cause__
        if not isinstance(exc, KafkaException):
            raise
        if TOKEN_CALLABLE in complete and exc.args[0].code() == KafkaError.SASL_AUTHENTICATION_FAILED:
            function = complete[TOKEN_CALLABLE]
            raise BrokerUnavailable(
                f"kafka.{TOKEN_CALLABLE}: {function.name} returned no token: {function.failure or exc.args[0].str()}. "
                "It must return (token, expiry in seconds since the epoch)",
                op="requesting a token",
            ) from None
        raise exc from None


def check_settings(options: Options) -> None:
    """Check the settings before anything is started.

    Raises:
        OptionError: the library refuses a setting (the message contains its text, without secrets), or a function
            cannot be imported.
    """
    environment = Environment()
    consumer = options.consumer_settings()
    producer = options.producer_settings()
    for settings in (consumer, producer):
        settings["log_level"] = "0"
        if TOKEN_CALLABLE in settings:  # a client would call the function when it is created
            import_callable(settings.pop(TOKEN_CALLABLE))
    try:
        environment.consumer(consumer).close()
        environment.producer(producer)
    except KafkaException as exc:
        # "from None": the cause may contain a secret.
        raise refused_setting(exc.args[0].str(), dict(options.settings)) from None
