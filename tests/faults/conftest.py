"""What the tests of faults share: clusters behind proxies. A test begins and ends with everything healed."""

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
    """Three nodes, a proxy before each."""
    yield three_nodes
    three_nodes.heal()


@pytest.fixture
def judge(faulty: FaultyCluster) -> AdminClient:
    """Asks the node past its proxy."""
    return AdminClient({"bootstrap.servers": faulty.direct_servers, "log_level": 0})
