"""The real runtime: no thread ends, or fails to begin, without a word."""

import os
import threading
from typing import NoReturn

import pytest

from spark_group_source.kafka import Runtime

JOIN_S = 10.0


def _raise(exc: BaseException) -> NoReturn:
    raise exc


@pytest.mark.parametrize("exc", [ValueError("v"), KeyboardInterrupt("k")])
def test_whatever_ends_a_thread_is_said(exc: BaseException) -> None:
    said: list[BaseException] = []
    thread = Runtime().spawn("t", lambda: _raise(exc), died=said.append)
    thread.join(JOIN_S)
    assert (said, thread.is_alive()) == ([exc], False)


def test_a_thread_that_ends_in_order_or_by_its_own_wish_is_no_death() -> None:
    said: list[BaseException] = []
    for run in (lambda: None, lambda: _raise(SystemExit())):
        Runtime().spawn("t", run, died=said.append).join(JOIN_S)
    assert said == []


def test_a_thread_that_cannot_be_started_is_said_before_spawn_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    none_left = RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", lambda self: _raise(none_left))
    said: list[BaseException] = []
    thread = Runtime().spawn("t", lambda: None, died=said.append)
    assert said == [none_left]
    thread.join(JOIN_S)
    assert not thread.is_alive()


def test_a_process_knows_when_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    assert not runtime.orphaned()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert Runtime().orphaned() is False and runtime.orphaned()


def test_the_lock_of_a_condition_may_be_taken_twice() -> None:
    condition = Runtime().condition()
    with condition, condition:
        condition.notify_all()


def test_ids_are_short_and_differ() -> None:
    runtime = Runtime()
    assert len(runtime.new_id()) == 12
    assert runtime.new_id() != runtime.new_id()
