"""Waits: each one of the product has a bound; the wait functions of the tests end a hang, not a slow progress."""

from itertools import count
from types import SimpleNamespace

import kafka_helpers
import pytest
import waits
from kafka_helpers import await_progress


def test_a_wait_continues_while_progress_is_made_within_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s, checks = count(), count(1)
    monkeypatch.setattr(kafka_helpers, "time", SimpleNamespace(monotonic=lambda: next(clock_s)))
    seen = 0

    def twentieth() -> bool:
        nonlocal seen
        seen = next(checks)
        return seen == 20

    assert await_progress(twentieth, lambda: seen // 2, 3)


def test_a_wait_without_progress_fails_with_what_it_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rows did not hold while nothing changed for 0 s; .*progress: 3"):
        await_progress(lambda: False, lambda: 3, 0, what="rows")
    assert "--- MainThread" in capsys.readouterr().err


def test_a_condition_that_becomes_true_at_the_time_limit_succeeds() -> None:
    assert await_progress(lambda: "there", lambda: 0, 0) == "there"


def test_every_call_that_waits_has_a_bound() -> None:
    assert {wait.name for wait in waits.waits() if not wait.bound} == waits.UNBOUNDED.keys()


def test_every_bound_that_a_caller_gives_is_described() -> None:
    assert {wait.name for wait in waits.waits() if wait.bound and not wait.constants} == waits.GIVEN.keys()


def test_every_named_time_has_a_meaning() -> None:
    known = waits.bounds()
    assert [name for name in waits.times() if not known[name].meaning] == []
