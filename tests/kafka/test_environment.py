"""The real environment: every failure of a thread is reported."""

import logging
import os
import threading
import time
from typing import NoReturn

import pytest
from confluent_kafka import KafkaError, KafkaException

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.kafka.environment import ID_DIGITS, Environment, LibraryLog, create_client

JOIN_S = 120.0


def _raise(exc: BaseException) -> NoReturn:
    raise exc


@pytest.mark.parametrize("exc", [ValueError("v"), KeyboardInterrupt("k")])
def test_every_exception_of_a_thread_is_reported(exc: BaseException) -> None:
    died: list[BaseException] = []
    thread = Environment().spawn("t", lambda: _raise(exc), died=died.append)
    thread.join(JOIN_S)
    assert (died, thread.is_alive()) == ([exc], False)


def test_a_thread_that_returns_or_exits_is_not_reported() -> None:
    died: list[BaseException] = []
    for run in (lambda: None, lambda: _raise(SystemExit())):
        Environment().spawn("t", run, died=died.append).join(JOIN_S)
    assert died == []


def test_a_thread_that_cannot_be_started_is_reported_before_spawn_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    none_left = RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", lambda self: _raise(none_left))
    died: list[BaseException] = []
    thread = Environment().spawn("t", lambda: None, died=died.append)
    assert died == [none_left]
    assert not thread.is_alive()  # it cannot be joined: that raises for a thread that was not started


def test_a_process_detects_the_end_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment()
    assert not environment.is_orphaned()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert Environment().is_orphaned() is False and environment.is_orphaned()


def test_each_id_is_a_new_one_of_the_same_length() -> None:
    ids = {Environment().new_id() for _ in range(2)}
    assert [len(id_) for id_ in ids] == [ID_DIGITS] * 2


def test_clocks_are_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic_ns", lambda: 90_000_000_000_000_000)
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_999_999)
    environment = Environment()
    assert (environment.now_ms(), environment.wall_ms()) == (90_000_000_000, 1_700_000_000_123)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="the platform has no such clock")
def test_the_time_of_a_suspended_machine_counts_since_its_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "clock_gettime_ns", {time.CLOCK_BOOTTIME: 7_000_000, time.CLOCK_MONOTONIC: 0}.get)
    assert Environment().boot_ms() == 7


@pytest.mark.parametrize("tripped", [False, True])
def test_a_token_function_without_a_token_counts_as_unanswered(tripped: bool) -> None:
    """The library raises SystemError when it logs a line while raising; the reason is its cause."""
    no_token = KafkaException(KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED, "OAuth token not set within 10 s"))

    def make(settings: object) -> NoReturn:
        if tripped:
            raise SystemError("<class 'logging.LogRecord'> returned a result with an exception set") from no_token
        raise no_token

    with pytest.raises(BrokerUnavailable, match="json:loads returned no token"):
        create_client(make, {"oauth_cb": "json:loads"})
    with pytest.raises(KafkaException):
        create_client(make, {})


@pytest.mark.parametrize(
    ("level", "facility", "shown"),
    [
        (logging.WARNING, "SESSTMOUT", True),
        (logging.ERROR, "FAIL", False),
        (logging.WARNING, "CONFWARN", False),
        (logging.INFO, "SESSTMOUT", False),
    ],
)
def test_the_log_shows_what_the_library_warns_of_and_the_query_does_not_report(
    level: int, facility: str, shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    LibraryLog().log(level, "%s [%s] %s", facility, "this client", "text")
    ours = [record.levelno for record in caplog.records if "[this client]" in record.getMessage()]
    assert ours == [logging.INFO if shown else logging.DEBUG]
