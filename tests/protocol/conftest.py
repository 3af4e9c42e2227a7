"""Fixtures for the group protocol; its invariants are checked after every event and once more at the end."""

from collections.abc import Iterator

import pytest
from kit.contradictions import require_consistent
from kit.harness import GroupHarness


@pytest.fixture
def group() -> Iterator[GroupHarness]:
    """A run with one slot that was just born: slot 0's member joins."""
    harness = GroupHarness()
    harness.start_stream()
    yield harness
    require_consistent(harness.run)


@pytest.fixture
def pair() -> Iterator[GroupHarness]:
    """A run with two slots that was just born."""
    harness = GroupHarness(slots=2)
    harness.start_stream()
    yield harness
    require_consistent(harness.run)


@pytest.fixture
def fresh() -> Iterator[GroupHarness]:
    """A run that has no stream yet."""
    harness = GroupHarness()
    yield harness
    require_consistent(harness.run)
