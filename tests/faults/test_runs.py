"""Runs whose broker is unreachable for 6 s, in each phase of a batch: none stops, each record is read once.

Without Spark; the phase in which tasks read is in ``test_reading``. Runs use the proxies; the producer, ordinary
consumers and the judge bypass them.
"""

import threading

import pytest
from confluent_kafka.admin import AdminClient
from kafka_helpers import await_until, create_topic
from kit.faulty_cluster import Fault, FaultyCluster
from rebalance.accounts import Flow, stays
from rebalance.conftest import GroupScene
from rebalance.runs import Run

pytestmark = [pytest.mark.broker, pytest.mark.slow]

FAULT_S = 6.0
RESETS, RESET_PAUSE_S = 20, 0.4
PARTITIONS = 4
SESSION_MS = 45_000
"""Kafka's default: members survive the faults here."""
REFUSED = Fault("refuse", 1)


class FaultScene(GroupScene):
    """A group of one strategy whose runs use the proxies of a cluster."""

    def __init__(self, request: pytest.FixtureRequest, group: str, cluster: FaultyCluster, strategy: str) -> None:
        super().__init__(request, group)
        self.cluster, self.strategy = cluster, strategy
        self.admin = AdminClient({"bootstrap.servers": cluster.direct_servers, "log_level": 0})
        self.name = create_topic(self.admin, f"t-{group}", PARTITIONS)

    @property
    def servers(self) -> str:
        return self.cluster.direct_servers

    def started(self) -> Run:
        options = self.run_options(self.name, self.strategy, session_ms=SESSION_MS, fetchOffset__retryIntervalMs=1000)
        return Run({**options, "kafka.bootstrap.servers": self.cluster.bootstrap_servers})

    def flow(self) -> Flow:
        return Flow(self.servers, self.name, PARTITIONS)


RANGE, CONSUMER = (pytest.param(each, marks=pytest.mark.full) for each in ("range", "consumer"))
"""The second protocol of a phase, in `make test-all`."""


@pytest.fixture
def scene(request: pytest.FixtureRequest, group_id: str, faulty: FaultyCluster) -> FaultScene:
    return FaultScene(request, group_id, faulty, request.param)


def endures(run: Run) -> None:
    """Wait for the fault's duration and heal it; the run continues."""

    def alive() -> bool:
        run.check()
        return True

    stays(alive, FAULT_S, "the run")


@pytest.mark.parametrize("scene", ["range", CONSUMER], indirect=True)
def test_connections_refused_between_the_sink_and_the_offset_commit(scene: FaultScene) -> None:
    """The batch is durable, and its offsets cannot be committed."""
    with scene.started() as run, scene.flow() as flow:
        run.await_partitions(PARTITIONS)
        run.hold()
        with scene.cluster.suffering(REFUSED):
            run.let_go()
            run.await_(lambda: run.statistics["uncommitted_partitions"] > 0, "a commit that waits")
            endures(run)
            assert run.statistics["uncommitted_partitions"] > 0
        flow.stop()
        scene.assert_once([scene.name], [run])
        scene.await_committed(scene.name)


@pytest.mark.parametrize("scene", ["consumer", RANGE], indirect=True)
def test_connections_refused_while_a_revocation_is_held(scene: FaultScene) -> None:
    """Partitions are revoked during a batch; when it is durable, their offsets cannot be committed."""
    with scene.started() as run, scene.flow() as flow:
        run.await_partitions(PARTITIONS)
        run.hold()
        with scene.ordinary(scene.name, strategy=scene.strategy, session_ms=SESSION_MS) as other:
            await_until(lambda: "ordinary" in scene.describe().members, what="the other in the group")
            with scene.cluster.suffering(REFUSED):
                run.let_go()
                endures(run)
            other.await_partitions(PARTITIONS // 2)
            other.close()
            flow.stop()
            scene.assert_once([scene.name], [run], [other])
            scene.await_committed(scene.name)


@pytest.mark.parametrize("scene", ["consumer", RANGE], indirect=True)
def test_connections_refused_at_the_start(scene: FaultScene) -> None:
    with scene.cluster.suffering(REFUSED):
        run = scene.started()
        endures(run)
    with run, scene.flow() as flow:
        run.await_partitions(PARTITIONS)
        flow.stop()
        scene.assert_once([scene.name], [run])
        scene.await_committed(scene.name)


@pytest.mark.parametrize("scene", ["range", CONSUMER], indirect=True)
def test_connections_reset_repeatedly(scene: FaultScene) -> None:
    """A request to the coordinator may stay unanswered after a reset, although the broker is reachable at once."""
    pause = threading.Event()
    with scene.started() as run, scene.flow() as flow:
        run.await_(lambda: run.records, "the first records")
        for _ in range(RESETS):
            scene.cluster.proxies[1].reset()
            pause.wait(RESET_PAUSE_S)
            run.check()
        flow.stop()
        scene.assert_once([scene.name], [run])
        scene.await_committed(scene.name)


@pytest.mark.soak
@pytest.mark.parametrize("node", [1, 2, 3])
def test_a_run_starts_while_one_node_of_three_cannot_be_reached(
    node: int, faulty_three: FaultyCluster, request: pytest.FixtureRequest, group_id: str
) -> None:
    scene = FaultScene(request, group_id, faulty_three, "consumer")
    with scene.cluster.suffering(Fault("refuse", node)), scene.started() as run, scene.flow() as flow:
        endures(run)
        scene.cluster.heal()
        flow.stop()
        scene.assert_once([scene.name], [run])
