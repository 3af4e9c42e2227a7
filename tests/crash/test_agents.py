"""G1, G3, G7, B34, B65: members beside executors, and what happens to them when agents, executors or the driver die."""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka.admin import AdminClient
from conftest import Produce, TopicFactory, await_until, committed_of, end_offsets_of
from delta_files import living_rows
from streams import numbered, options_of

from crash.running import BATCH_S, START_S, job
from crash.standalone import package_as_zip, python_without_package, standalone
from spark_group_source.executor.agent.home import agents
from spark_group_source.host import runs
from spark_group_source.local.broker import Broker

PARTITIONS = 4
SESSION_MS = 15_000
"""Not so short that a busy machine ends it."""
END_S = 10
"""No agent outlives its executor, its run or its application by more."""

pytestmark = [
    pytest.mark.crash,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(2 * START_S + 4 * BATCH_S),
]


class Watched:
    """A job whose two members live beside its two executors."""

    def __init__(
        self, home: Path, admin: AdminClient, produce: Produce, topic: str, group: str, protocol: str, servers: str
    ) -> None:
        self.home, self.admin, self._produce, self.topic, self.group = home, admin, produce, topic, group
        self._sent = 0
        more: dict[str, Any] = {"minPartitions": PARTITIONS, "groupMembers": 2, "memberHost": "executor"}
        if protocol == "classic":
            more["kafka__session__timeout__ms"] = SESSION_MS
        given = options_of(servers, group, protocol=protocol, **more)
        self._given = {name: text for name, text in given.items() if not name.endswith(("servers", "group.id"))}
        self._servers = servers
        self.process: Any = None

    @contextlib.contextmanager
    def running(self, **more: str) -> Iterator[None]:
        before = set(living())
        given = {"servers": self._servers, "group": self.group, "topic": self.topic, **self._given, **more}
        with job(self.home, **given) as self.process:
            yield
        await_until(lambda: set(living()) <= before, END_S, what="the end of every agent of the job")

    def send(self) -> None:
        """Two records to each partition."""
        self._produce(self.topic, numbered(self._sent, self._sent + 2 * PARTITIONS - 1, PARTITIONS))
        self._sent += 2 * PARTITIONS

    def await_(self, holds: Any, what: str, within_s: float = BATCH_S) -> None:
        await_until(lambda: holds() or self.process.poll() is not None, within_s, what=what)
        assert self.process.poll() is None, (self.home / "log").read_text(errors="replace")[-4000:]

    def await_rows(self, within_s: float = BATCH_S) -> None:
        """All that was sent is in the table, once."""
        self.await_(lambda: len(self.rows()) == self._sent, "the rows", within_s)
        assert set(self.rows().values()) == {1}

    def await_committed(self) -> None:
        ends = end_offsets_of(self.admin, self.topic)
        self.await_(lambda: committed_of(self.admin, self.group) == ends, "the group's offsets")

    def rows(self) -> Counter[tuple[int, int]]:
        if not (self.home / "table" / "_delta_log").exists():
            return Counter()
        found = living_rows(self.home / "table", ["partition", "offset"])
        return Counter((row["partition"], row["offset"]) for row in found)

    @property
    def run(self) -> dict[str, Any]:
        """Its statistics."""
        return next(iter(runs.read(self.group)), {})

    def lent(self) -> bool:
        """Both slots live at agents, and have what they had."""
        run = self.run
        return bool(run) and all(run["hosts"]) and sum(run["assigned"]) == PARTITIONS

    def await_lent(self) -> None:
        self.await_spread(self.lent, "both slots at agents")
        self.await_rows()
        self.await_committed()

    def await_spread(self, holds: Callable[[], object], what: str) -> None:
        """Batches go on meanwhile: slots move between two of them."""

        def moved() -> object:
            if len(self.rows()) == self._sent:
                self.send()
            return holds()

        self.await_(moved, what)


def living() -> list[int]:
    """Agents of this user."""
    found = []
    for lock in agents().glob("*/lock"):
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            pid = int(lock.read_text())
            if "spark-group-agent" in psutil.Process(pid).cmdline():
                found.append(pid)
    return found


@pytest.fixture
def watched(
    request: pytest.FixtureRequest,
    broker: Broker,
    admin: AdminClient,
    topic: TopicFactory,
    produce: Produce,
    group_id: str,
    tmp_path: Path,
) -> Watched:
    protocol = request.param
    return Watched(tmp_path, admin, produce, topic(PARTITIONS), group_id, protocol, broker.bootstrap_servers)


@pytest.mark.parametrize("watched", ["classic", pytest.param("consumer", marks=pytest.mark.soak)], indirect=True)
def test_members_live_beside_executors_and_survive_each_of_their_deaths(watched: Watched) -> None:
    with watched.running():
        watched.send()
        watched.await_rows(START_S)
        watched.await_lent()
        before = watched.run
        assert before["recalls"] == 0 and before["lost"] == 0

        victim = living()[0]
        os.kill(victim, signal.SIGKILL)
        watched.send()
        watched.await_rows()
        watched.await_lent()
        after = watched.run
        assert victim not in living()
        if watched_classic(watched):
            assert after["generation"] == before["generation"], "a rebalance"

        said = {int(path.name.split("-")[0]): path for path in agents().iterdir()}
        executor = next(pid for pid in said if psutil.pid_exists(pid))
        agent = int((said[executor] / "lock").read_text())
        psutil.Process(executor).kill()
        watched.send()
        await_until(lambda: not psutil.pid_exists(agent), END_S, what="the end of the agent of an executor that died")
        watched.await_rows()
        watched.await_committed()
        if watched_classic(watched):
            assert watched.run["generation"] == before["generation"], "a rebalance"


@pytest.mark.parametrize("watched", ["classic"], indirect=True)
def test_no_agent_outlives_a_driver_that_is_killed(watched: Watched) -> None:
    with watched.running():
        watched.send()
        watched.await_rows(START_S)
        watched.await_lent()
        mine = living()
        assert len(mine) == 2
        watched.process.kill()
        watched.process.wait(30)
        await_until(lambda: not set(mine) & set(living()), END_S, what="the end of the agents")


@pytest.mark.soak
@pytest.mark.parametrize("watched", ["classic"], indirect=True)
def test_B65_members_follow_the_workers_of_a_cluster_that_knows_the_package_by_py_files_alone(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hosts() -> list[str]:
        """How many slots each agent has."""
        run = watched.run
        return sorted(run["hosts"]) if run and sum(run["assigned"]) == PARTITIONS else []

    python = str(python_without_package(watched.home))
    monkeypatch.setenv("PYSPARK_PYTHON", python)
    with standalone(watched.home / "cluster", workers=1) as cluster:
        package = str(package_as_zip(watched.home))
        with watched.running(master=cluster.url, py_files=package, python=python):
            watched.send()
            watched.await_rows(START_S)
            watched.await_lent()
            (first,) = set(hosts())
            before = watched.run

            cluster.add_worker()
            watched.await_spread(lambda: len(set(hosts())) == 2, "a slot at the new worker's executor")

            cluster.workers[0].kill()
            for child in psutil.Process(cluster.workers[0].pid).children(recursive=True):
                child.kill()
            watched.await_spread(lambda: hosts() and first not in hosts() and all(hosts()), "both at the one left")
            watched.await_rows()
            watched.await_committed()
            assert watched.run["generation"] == before["generation"], "a rebalance"


def watched_classic(watched: Watched) -> bool:
    return watched._given.get("kafka.group.protocol", "classic") == "classic"
