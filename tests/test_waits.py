"""The waits of the tests themselves: a bound ends a hang, not what goes on."""

from itertools import count
from types import SimpleNamespace

import kafka_words
import pytest
from kafka_words import await_progress


def test_a_wait_goes_on_while_something_changes_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s, looks = count(), count(1)
    monkeypatch.setattr(kafka_words, "time", SimpleNamespace(monotonic=lambda: next(clock_s)))
    seen = 0

    def twentieth() -> bool:
        nonlocal seen
        seen = next(looks)
        return seen == 20

    assert await_progress(twentieth, lambda: seen // 2, 3)


def test_a_wait_ends_when_nothing_changes_and_says_what_it_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rows did not hold while nothing changed for 0 s; .*progress: 3"):
        await_progress(lambda: False, lambda: 3, 0, what="rows")
    assert "--- MainThread" in capsys.readouterr().err


def test_a_condition_that_comes_true_at_the_bound_is_no_hang() -> None:
    assert await_progress(lambda: "there", lambda: 0, 0) == "there"
