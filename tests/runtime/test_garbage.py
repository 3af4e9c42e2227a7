"""The collector looks at nothing twice, and still finds what became garbage."""

import gc
import weakref

import pytest

from spark_group_source.agents import control_server


class Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thawed() -> object:
    yield
    gc.unfreeze()


def test_what_lives_is_set_aside_and_what_is_garbage_is_not() -> None:
    kept, dropped = Circle(), Circle()
    gone = weakref.ref(dropped)
    del dropped
    control_server.set_aside()
    assert gone() is None
    assert gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())


def test_what_was_set_aside_and_became_garbage_is_found_within_the_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Circle()
    gone = weakref.ref(late)
    control_server.set_aside()
    del late
    control_server.set_aside()
    assert gone() is not None
    monkeypatch.setattr(control_server, "LOOK_AGAIN_S", 0.0)
    control_server.set_aside()
    assert gone() is None
