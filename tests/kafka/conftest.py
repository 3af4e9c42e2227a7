"""A manual environment, and the clients that use it."""

import pytest
from manual_environment import ManualEnvironment

from spark_group_source.kafka import GroupOffsets

SETTINGS = {"bootstrap.servers": "b"}


@pytest.fixture
def environment() -> ManualEnvironment:
    return ManualEnvironment()


@pytest.fixture
def offsets(environment: ManualEnvironment) -> GroupOffsets:
    return GroupOffsets(SETTINGS, group="g", environment=environment)
