"""Fixtures for the group protocol; its invariants are checked after every event and once more at the end."""

from collections.abc import Iterator

import pytest
from kit.harness import GroupHarness


@pytest.fixture
def group() -> Iterator[GroupHarness]:
    """A run with one slot that was just born: slot 0's member joins."""
    harness = GroupHarness()
    harness.start_stream()
    yield harness
    harness.run.check()


@pytest.fixture
def pair() -> Iterator[GroupHarness]:
    """A run with two slots that was just born."""
    harness = GroupHarness(slots=2)
    harness.start_stream()
    yield harness
    harness.run.check()


@pytest.fixture
def fresh() -> Iterator[GroupHarness]:
    """A run that has no stream yet."""
    harness = GroupHarness()
    yield harness
    harness.run.check()
