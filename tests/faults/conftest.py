"""Fixtures of the fault tests: clusters behind proxies, healed before and after each test."""

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient
from kit.faulty_cluster import FaultyCluster

from faults.soak import SETTINGS


@pytest.fixture(scope="package")
def one_node(jvm: None) -> Iterator[FaultyCluster]:
    with FaultyCluster(settings=SETTINGS) as started:
        yield started


@pytest.fixture(scope="package")
def three_nodes(jvm: None) -> Iterator[FaultyCluster]:
    with FaultyCluster(nodes=3, settings=SETTINGS) as started:
        yield started


@pytest.fixture
def faulty(one_node: FaultyCluster) -> Iterator[FaultyCluster]:
    """One node behind a proxy."""
    yield one_node
    one_node.heal()


@pytest.fixture
def faulty_three(three_nodes: FaultyCluster) -> Iterator[FaultyCluster]:
    """Three nodes, each behind a proxy."""
    yield three_nodes
    three_nodes.heal()


@pytest.fixture
def judge(faulty: FaultyCluster) -> AdminClient:
    """An admin client that bypasses the proxy."""
    return AdminClient({"bootstrap.servers": faulty.direct_servers, "log_level": 0})
