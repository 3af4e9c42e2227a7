"""G7: members follow executors that Spark adds and removes, also without a worker daemon."""

from pathlib import Path

import psutil
import pytest
from confluent_kafka.admin import AdminClient
from kafka_helpers import Produce, TopicFactory
from streams import descendants

from crash.placed_job import PlacedJob, Target, living
from crash.running import HANG_S
from crash.standalone import package_as_zip, python_without_package, standalone
from spark_group_source.agents.agent_folder import agents_directory
from spark_group_source.local.broker import Broker

PARTITIONS = 4
SESSION_MS = 60_000
"""Longer than the start of an application."""
ALLOCATED = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "1",
    "spark.dynamicAllocation.maxExecutors": "3",
    # Tasks wait for a core in every batch; longer only when a test holds them.
    "spark.dynamicAllocation.schedulerBacklogTimeout": "20s",
    "spark.dynamicAllocation.executorIdleTimeout": "20s",
    # Delta caches and shuffles the state of its log.
    "spark.dynamicAllocation.cachedExecutorIdleTimeout": "20s",
    "spark.dynamicAllocation.shuffleTracking.timeout": "20s",
    "spark.executor.cores": "1",
}

pytestmark = [
    pytest.mark.crash,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(HANG_S),
]


@pytest.fixture
def watched(
    broker: Broker, admin: AdminClient, topic: TopicFactory, produce: Produce, group_id: str, tmp_path: Path
) -> PlacedJob:
    where = Target(admin, produce, topic(PARTITIONS), PARTITIONS, group_id, broker.bootstrap_servers)
    more = {"groupMembers": "auto", "kafka__session__timeout__ms": SESSION_MS}
    return PlacedJob(tmp_path, where, "classic", broker.bootstrap_servers, **more)


def test_members_are_placed_on_executors_without_a_worker_daemon(watched: PlacedJob) -> None:
    """Each task then has its own Python process, which the executor starts and Spark waits 10 s for: too short for a
    busy machine."""
    with watched.running(spark={"spark.python.use.daemon": "false", "spark.master": "local[2]"}):
        watched.send()
        watched.await_rows()
        watched.await_placed()
        (_,) = living()
        (executor,) = {psutil.Process(int(path.name.split("-")[0])) for path in agents_directory().iterdir()}
        assert "org.apache.spark.deploy.SparkSubmit" in executor.cmdline()
        assert not any("pyspark.daemon" in command for command in descendants(executor.pid).values())
        assert watched.run["recalls"] == 0


def test_members_follow_executors_from_one_to_three_and_back_and_a_restart_has_three(
    watched: PlacedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hosts() -> list[str]:
        """Where each slot is placed, once each has partitions and all are assigned."""
        run = watched.run
        return run["agents"] if run and all(run["assigned"]) and sum(run["assigned"]) == PARTITIONS else []

    def spread_over(executors: int) -> bool:
        return len(set(hosts())) == executors == len(living()) and all(hosts())

    python = str(python_without_package(watched.home))
    monkeypatch.setenv("PYSPARK_PYTHON", python)
    with standalone(watched.home / "cluster", workers=3) as cluster:
        package = str(package_as_zip(watched.home))
        how = {"master": cluster.url, "py_files": package, "python": python, "spark": ALLOCATED}
        with watched.running(**how):
            watched.send()
            watched.await_rows()
            watched.await_spread(lambda: spread_over(1), "the only slot on the first executor")
            assert len(hosts()) == 1

            watched.forget_reports()
            watched.hold(0)  # tasks wait for a core, so Spark adds executors
            watched.send()
            watched.await_(lambda: len({one["executor"] for one in watched.reports()}) == 3, "three executors")
            watched.release()
            watched.await_spread(lambda: spread_over(3), "a slot on each of three executors")
            watched.await_rows()
            before = watched.run["generation"]

            watched.await_(lambda: len(living()) == 1, "the removal of two executors")
            watched.await_spread(lambda: spread_over(1), "all slots on the remaining executor")
            watched.await_rows()
            watched.await_committed()
            assert len(hosts()) == 3 and watched.run["generation"] == before, "a rebalance"
            watched.process.kill()
            watched.process.wait(300)
        with watched.running(**how):
            watched.send()
            watched.await_rows()
            assert len(watched.run["agents"]) == 3
            watched.await_committed()
            assert watched.run["generation"] == before, "a rebalance"
