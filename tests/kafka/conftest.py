"""A manual environment, and the clients that use it."""

import pytest
from manual_environment import ManualEnvironment

from spark_group_source.kafka.admin import Admin
from spark_group_source.kafka.committer import TransactionalCommitter
from spark_group_source.kafka.group_offsets import GroupOffsets

SETTINGS = {"bootstrap.servers": "b"}


@pytest.fixture
def environment() -> ManualEnvironment:
    return ManualEnvironment()


@pytest.fixture
def offsets(environment: ManualEnvironment) -> GroupOffsets:
    return GroupOffsets(SETTINGS, group="g", environment=environment)


@pytest.fixture
def scripted_admin(environment: ManualEnvironment) -> Admin:
    """A client without retries, except confirmations."""
    return Admin(SETTINGS, environment=environment, retries=0)


@pytest.fixture
def committer(environment: ManualEnvironment) -> TransactionalCommitter:
    return TransactionalCommitter(SETTINGS, group="g", transactional_id="g.s", environment=environment)
