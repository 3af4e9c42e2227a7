"""The group's coordinator is killed in every phase of a rebalance, and becomes unreachable (G2, G3, G8).

A classic group has four phases: members join, one of them computes the assignment, the others fetch it (sync), then the
group is stable. Each test brings the group into one phase, verified by Kafka, and kills the coordinator's broker. All
tests share one cluster of three nodes; the killed one is restarted before the next test. The stable phase is in every
test run; the three transient phases, a minute each, are in `make soak`.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # missing in the stubs
from kafka_helpers import ADMIN_S, await_until, create_topic
from kit.broker_cluster import BrokerCluster

from rebalance.accounts import Flow, GroupView, described, measured, stays, with_retries
from rebalance.conftest import GroupScene
from rebalance.ordinary import OrdinaryConsumer
from rebalance.runs import Run

pytestmark = [pytest.mark.broker, pytest.mark.slow]
soak = partial(pytest.param, marks=pytest.mark.soak)

PARTITIONS = 6
SESSION_MS = 10_000


class ClusterScene(GroupScene):
    """One group on the cluster: a run, ordinary consumers, and records that are produced."""

    def __init__(self, request: pytest.FixtureRequest, group: str, strategy: str) -> None:
        super().__init__(request, group)
        self.strategy = strategy
        self.cluster: BrokerCluster = request.getfixturevalue("cluster")
        self.broker = self.cluster
        self.admin = self.client()
        self.name = f"t-{group}"
        self.others: list[OrdinaryConsumer] = []
        self.clients: list[AdminClient] = []
        self.killed: int | None = None
        self.killed_at_s = 0.0

    def client(self) -> AdminClient:
        """A new client, which knows no old coordinator."""
        return AdminClient({"bootstrap.servers": self.cluster.bootstrap_servers, "log_level": 0})

    def run_of(self, topic: str, session_ms: int = SESSION_MS) -> Run:
        return Run(self.run_options(topic, self.strategy, session_ms=session_ms, fetchOffset__numRetries=20))

    def member(self, stack: ExitStack) -> OrdinaryConsumer:
        name = f"ordinary-{len(self.others)}"
        more: dict[str, Any] = {"session_ms": SESSION_MS, "log_level": 2, "client__id": name}
        self.others.append(stack.enter_context(self.ordinary(self.name, strategy=self.strategy, **more)))
        return self.others[-1]

    def shared(self, stack: ExitStack) -> tuple[Run, Flow]:
        """An ordinary consumer had all partitions, and the run has half of them now."""
        create_topic(self.admin, self.name, PARTITIONS)
        self.member(stack).await_partitions(PARTITIONS)
        run = stack.enter_context(self.run_of(self.name))
        flow = stack.enter_context(Flow(self.servers, self.name, PARTITIONS))
        run.await_partitions(PARTITIONS // 2)
        return run, flow

    def look(self) -> GroupView:
        """Describe the group; after a failure with a new client, which finds a moved coordinator at once."""

        def found() -> GroupView | None:
            try:
                return described(self.admin, self.group)
            except (KafkaException, TimeoutError):
                self.clients.append(self.admin)  # kept: a garbage-collected client drops its pending requests
                self.admin = self.client()
                self.admin.poll(0.5)
                return None

        view = await_until(found, what="the group's coordinator")
        assert view is not None
        return view

    @property
    def state(self) -> str:
        return self.look().state

    def await_state(self, state: str) -> None:
        await_until(lambda: self.state == state, what=f"the state {state}")

    def kill_coordinator(self) -> None:
        self.killed = self.look().coordinator
        self.cluster.kill(self.killed)
        self.killed_at_s = time.monotonic()

    def revive(self) -> None:
        if self.killed is not None:
            self.cluster.start_node(self.killed)
            self.killed = None

    def settle(self, phase: str, run: Run, flow: Flow) -> None:
        """Assert that all are members again, share the partitions and continue; everything was processed once."""
        count = len(self.others) + 1

        def whole() -> bool:
            run.check()
            group = self.look()
            given = [tp for tps in group.members.values() for tp in tps]
            return (
                group.state == "stable"
                and len(group.clients) == count
                and len(given) == len(set(given)) == PARTITIONS
                and run.partitions == group.of("spark-group") | group.of(f"{self.group}.")
            )

        await_until(whole, what="the group's recovery")
        whole_s = time.monotonic() - self.killed_at_s
        seen = len(run.planned)
        run.await_(lambda: len(run.planned) > seen + 1, "batches afterwards")
        measured(f"{self.strategy}, killed while {phase}: the group was whole after {whole_s:.1f} s")
        flow.stop()
        twice = {record for member in self.others for record in member.unconfirmed()}
        # An expelled member loses its uncommitted records; the number of possible duplicates is counted.
        self.assert_once([self.name], [run], self.others, twice=twice, counted=run.statistics["possible_duplicates"])
        self.await_committed(self.name)
        assert run.statistics["hold_overruns"] == 0


@pytest.fixture
def scene(jvm: None, request: pytest.FixtureRequest, group_id: str) -> Iterator[ClusterScene]:
    made = ClusterScene(request, group_id, getattr(request, "param", "range"))
    yield made
    made.revive()
    admin = made.client()
    await_until(lambda: _in_sync(admin), what="all replicas in sync")


def _in_sync(admin: AdminClient) -> bool:
    topics = with_retries(lambda: admin.list_topics(timeout=ADMIN_S)).topics.values()
    return all(len(p.isrs) == len(p.replicas) for topic in topics for p in topic.partitions.values())


@pytest.mark.soak
def test_the_coordinator_dies_while_members_join(scene: ClusterScene) -> None:
    """The run holds its revocation for the batch in flight, so the join cannot complete."""
    with ExitStack() as stack:
        run, flow = scene.shared(stack)
        run.hold()
        scene.member(stack)
        scene.await_state("preparing_rebalancing")
        scene.kill_coordinator()
        run.let_go()
        scene.settle("members joined", run, flow)


@pytest.mark.soak
def test_the_coordinator_dies_while_the_assignment_is_computed(scene: ClusterScene) -> None:
    """The leader (the first member) has joined, waits for the others, and is killed before its response: the join
    completes, and no member computes the assignment."""
    with ExitStack() as stack:
        run, flow = scene.shared(stack)
        leader = scene.others[0]
        run.hold()
        scene.member(stack)
        scene.await_state("preparing_rebalancing")
        leader.await_event("revoked", count=len(leader.events_of("assigned")))
        stays(lambda: scene.state == "preparing_rebalancing", 1.0, "the join")  # the leader's request is in transit
        leader.freeze()
        run.let_go()
        scene.await_state("completing_rebalancing")
        scene.kill_coordinator()
        leader.thaw()
        scene.settle("the leader computed the assignment", run, flow)


@pytest.mark.soak
def test_the_coordinator_dies_while_members_fetch_their_assignment(scene: ClusterScene) -> None:
    """The newcomer has joined and is killed: the assignment is computed, and one member has not fetched it."""
    with ExitStack() as stack:
        run, flow = scene.shared(stack)
        run.hold()
        newcomer = scene.member(stack)
        scene.await_state("preparing_rebalancing")
        await_until(lambda: len(scene.look().clients) == 3, what="the newcomer")
        stays(lambda: scene.state == "preparing_rebalancing", 1.0, "the join")
        newcomer.freeze()
        run.let_go()
        scene.await_state("stable")
        run.await_partitions(2)
        assert not newcomer.joined
        scene.kill_coordinator()
        newcomer.thaw()
        scene.settle("members fetched their assignment", run, flow)


@pytest.mark.parametrize(
    "scene", [*(soak(each) for each in ("range", "cooperative-sticky")), "consumer"], indirect=True
)
def test_the_coordinator_of_a_stable_group_dies_in_the_middle_of_a_batch(scene: ClusterScene) -> None:
    with ExitStack() as stack:
        run, flow = scene.shared(stack)
        scene.await_state("stable")
        generation = run.statistics["generation"]
        run.hold()
        scene.kill_coordinator()
        run.let_go()
        scene.settle("the group was stable", run, flow)
        assert run.statistics["generation"] == generation, "the places are in the log: no rebalance was needed"


@pytest.mark.soak
@pytest.mark.parametrize("scene", ["consumer"], indirect=True)
def test_the_coordinator_dies_while_partitions_move_under_KIP_848(scene: ClusterScene) -> None:
    """The run holds partitions that the broker has assigned to the newcomer."""
    with ExitStack() as stack:
        create_topic(scene.admin, scene.name, PARTITIONS)
        run = stack.enter_context(scene.run_of(scene.name))
        flow = stack.enter_context(Flow(scene.servers, scene.name, PARTITIONS))
        run.await_partitions(PARTITIONS)
        run.hold()
        newcomer = scene.member(stack)
        run.await_(lambda: "revoking" in run.statistics["slots"], "Kafka to revoke partitions")
        scene.kill_coordinator()
        assert not newcomer.partitions
        run.let_go()
        scene.settle("partitions moved", run, flow)


@pytest.mark.parametrize("scene", ["range", soak("consumer")], indirect=True)
def test_reading_continues_and_commits_wait_while_the_coordinator_is_unreachable(scene: ClusterScene) -> None:
    name = create_topic(scene.admin, f"{scene.name}-probe", 1)
    with scene.run_of(name) as run:
        run.await_partitions(1)
        coordinator = scene.describe().coordinator
    others = [node for node in scene.cluster.nodes if node != coordinator]
    new = NewTopic(scene.name, num_partitions=2, replica_assignment=[others, others[::-1]])  # its records are elsewhere
    scene.admin.create_topics([new])[scene.name].result(ADMIN_S)
    # A session that outlasts the coordinator's absence, also on a slow machine.
    with scene.run_of(scene.name, 6 * SESSION_MS) as run, Flow(scene.servers, scene.name, 2) as flow:
        run.await_partitions(2)
        run.await_(lambda: len(run.planned) > 3, "batches")
        assert scene.describe().coordinator == coordinator
        scene.kill_coordinator()
        seen = len(run.records)
        run.await_(lambda: run.statistics["uncommitted_partitions"] > 0, "a commit that waits")
        run.await_(lambda: len(run.records) > seen + 200, "records while the coordinator is away")
        scene.revive()
        flow.stop()
        scene.admin = scene.client()
        scene.assert_once([scene.name], [run])
        scene.await_committed(scene.name)
        assert run.statistics["possible_duplicates"] == 0
