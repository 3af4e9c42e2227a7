"""Clients that are moved by hand, and what asks through them."""

import pytest
from hand_made import HandRuntime

from spark_group_source.kafka import GroupOffsets

SETTINGS = {"bootstrap.servers": "b"}


@pytest.fixture
def runtime() -> HandRuntime:
    return HandRuntime()


@pytest.fixture
def offsets(runtime: HandRuntime) -> GroupOffsets:
    return GroupOffsets(SETTINGS, group="g", runtime=runtime)
