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


def test_living_objects_are_frozen_and_garbage_is_collected() -> None:
    kept, dropped = Circle(), Circle()
    gone = weakref.ref(dropped)
    del dropped
    control_server.freeze_objects()
    assert gone() is None
    assert gc.get_freeze_count() > 0
    assert not any(each is kept for each in gc.get_objects())


def test_frozen_cyclic_garbage_is_collected_within_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Circle()
    gone = weakref.ref(late)
    control_server.freeze_objects()
    del late
    control_server.freeze_objects()
    assert gone() is not None
    monkeypatch.setattr(control_server, "UNFREEZE_S", 0.0)
    control_server.freeze_objects()
    assert gone() is None
