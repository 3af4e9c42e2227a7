"""G1, G3, G7, G9: members on agents, and the death of agents, executors and the driver.

The tests without the mark ``soak`` share one application, in their order; the last one kills it.
"""

import base64
import contextlib
import json
import os
import signal
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from confluent_kafka.admin import AdminClient
from kafka_helpers import (
    ADMIN_S,
    SASL_PASSWORD,
    Produce,
    Record,
    TopicFactory,
    await_progress,
    committed_of,
    contents_of,
    create_topic,
    sasl,
)
from kit.broker_cluster import BrokerCluster
from rebalance.accounts import describe
from rich.console import Console
from streams import descendants
from typer.testing import CliRunner

from crash.placed_job import PlacedJob, Target, arguments, by_executor, environment, living
from crash.running import HANG_S
from crash.standalone import package_as_zip, python_without_package, standalone
from spark_group_source.agents.agent_folder import agents_directory
from spark_group_source.cli.app import app
from spark_group_source.host.run_files import snapshot

PARTITIONS = 4
CHURN_S = 20

pytestmark = [
    pytest.mark.crash,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(HANG_S),
]

# --- one application ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary directory for this module's agents and runs only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="module")
def shared(
    broker: BrokerCluster, admin: AdminClient, produce: Produce, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlacedJob]:
    """A job with a password, a user interface and an event log. Its two members are placed on its two executors, which
    run two tasks at a time; each partition is read by two tasks."""
    home = tmp_path_factory.mktemp("agents")
    (home / "events").mkdir()
    name = f"agents-{os.getpid()}"
    where = Target(admin, produce, create_topic(admin, name, 2), 2, name, broker.bootstrap_servers)
    more = sasl(SASL_PASSWORD) | {"minPartitions": "4", "secret_file": f"{home}/secret"}
    job = PlacedJob(home, where, "classic", broker.sasl_bootstrap_servers, **more)
    spark = {
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"{home}/events",
        "spark.eventLog.compress": "false",
    }
    with job.running(cores="2", spark=spark):
        job.send()
        job.await_rows()
        job.await_placed()
        yield job


def test_describe_shows_where_each_slot_is_placed_and_the_source_of_its_rows(
    shared: PlacedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.forget_reports()
    shared.hold(shared.sent // 2)
    shared.send()
    shared.await_(shared.reports, "a batch in the middle of which its tasks wait")
    shared.send(20)
    shared.await_(lambda: sum(shared.run["buffered_rows"]) > 0 < sum(shared.run["buffered_bytes"]), "prefetched rows")
    shared.release()
    shared.await_spread(lambda: sum(shared.run["rows_from_memory"]) > 0, "rows from an agent's memory")
    shared.await_rows()
    shared.await_(
        lambda: sum(shared.run["rows_from_memory"] + shared.run["rows_from_brokers"]) == shared.sent,
        "reports of every row, once",
    )
    monkeypatch.setattr("spark_group_source.cli.group.console", Console(width=300))
    shown = CliRunner().invoke(app, ["describe", "--group", shared.group, "--bootstrap-servers", shared.where.servers])
    assert shown.exit_code == 0, shown.output
    run = snapshot(shared.group, shared.run["stream"])
    assert run is not None
    lines = [[cell.strip() for cell in line.split("│")] for line in shown.output.splitlines()]
    slots = [line[1:-1] for line in lines if len(line) == 11 and line[1].isdigit()]
    assert [[line[3], line[6], line[7], line[8]] for line in slots] == [
        [run.agents[n], *map(str, (run.rows_from_memory[n], run.rows_from_brokers[n], run.slot_recalls[n]))]
        for n in range(2)
    ]


def test_two_tasks_of_one_partition_on_one_executor_read_separate_ranges(shared: PlacedJob) -> None:
    def found() -> bool:
        tasks: dict[tuple[int, int, int], set[int]] = {}
        for one in shared.reports():
            for _, partition, _ in one["rows"]:
                tasks.setdefault((one["stage"], one["executor"], partition), set()).add(one["task"])
        return any(len(numbers) > 1 for numbers in tasks.values())

    shared.forget_reports()
    shared.await_spread(found, "two tasks of one batch, at one executor, that read of one partition")
    shared.await_rows()
    read = Counter(tuple(row) for one in shared.reports() for row in one["rows"])
    assert set(read.values()) == {1}, "no row was read by two tasks"


def test_workers_are_forked_without_a_client_and_are_not_members(shared: PlacedJob) -> None:
    def used_again() -> bool:
        """Whether some worker has a client, and some worker was used for two batches. The worker that reports a row is
        not the one that read it: Spark uses separate workers, and mixes them for the next batch."""
        read = {(one["worker"], one["stage"]) for one in shared.reports()}
        return len(read) > len({worker for worker, _ in read}) and any(one["clients"] for one in shared.reports())

    shared.await_spread(used_again, "workers that are reused")
    shared.await_rows()
    assert {one["clients of the daemon"] for one in shared.reports()} == {0}
    assert set(describe(shared.where.admin, shared.group).members) == instance_ids(shared)


def test_G9_no_secret_is_in_a_log_process_list_event_log_page_or_plan(shared: PlacedJob) -> None:
    secret = (shared.home / "secret").read_text()
    hidden = {"the run's secret": forms(bytes.fromhex(secret)), "the password": forms(SASL_PASSWORD.encode())}
    (shared.home / "explain").touch()
    shared.await_(lambda: not (shared.home / "explain").exists(), "the query's plans in its log")

    driver, placed = shared.process.pid, by_executor()
    executors = [Path(psutil.Process(pid).cwd()) for pid in placed]
    assert len(executors) == 2
    shown = {"arguments": arguments(), "the driver's log": shared.log.encode()}
    shown |= {f"the environment of {pid}": environment(pid) for pid in [driver, *descendants(driver), *placed.values()]}
    files = [path for folder in executors for path in folder.glob("std*")] + [*agents_directory().glob("*/log")]
    for folder in ("events", "checkpoint", "table/_delta_log"):
        files += (shared.home / folder).rglob("*")
    shown |= {str(path): text for path, text in contents_of(files).items()}
    shown |= pages((shared.home / "ui").read_text())

    found = [(name, what) for name, text in shown.items() for what in hidden if any(f in text for f in hidden[what])]
    assert found == []
    # The searched texts are the right ones.
    assert b"MicroBatchScan" in shown["the driver's log"] and b"kafka-group" in shown["the driver's log"]
    assert any(b"spark-group-agent" in text for text in shown.values())
    assert sum(b"SparkListenerTaskEnd" in text for text in shown.values()) >= 1
    assert sum(name.endswith("stderr") and bool(text) for name, text in shown.items()) == 2
    assert all(shown[f"the environment of {pid}"] for pid in placed.values())


@pytest.mark.full
def test_G7_an_agent_frozen_past_its_lease_ends_after_its_members_are_placed_elsewhere(shared: PlacedJob) -> None:
    shared.await_placed()
    before, members = shared.run, describe(shared.where.admin, shared.group).members
    executor = shared.executors()[0]
    frozen = by_executor()[executor]
    os.kill(frozen, signal.SIGSTOP)
    try:
        shared.await_spread(lambda: executor not in shared.executors() and moved(shared), "its slots elsewhere")
        shared.await_rows()
    finally:
        os.kill(frozen, signal.SIGCONT)
    await_progress(
        lambda: frozen not in living(), shared.progress, what="the end of an agent whose members are replaced"
    )
    shared.send()
    shared.await_rows()
    shared.await_committed()
    after = shared.run
    assert (after["generation"], after["partitions_lost"] > 0) == (before["generation"], True), "a rebalance"
    assert sum(after["slot_recalls"]) == after["recalls"] > before["recalls"]
    assert describe(shared.where.admin, shared.group).members.keys() == members.keys() == instance_ids(shared)


@pytest.mark.proves("G1", level="spark")
@pytest.mark.proves("G7", level="spark")
def test_G7_losing_an_executor_in_a_batch_loses_no_row_and_causes_no_rebalance(
    shared: PlacedJob,
) -> None:
    shared.await_placed()
    before, offset = shared.run, shared.sent // 2
    shared.forget_reports()
    shared.hold(offset)
    shared.send()
    shared.await_(lambda: set(shared.executors()) & {one["executor"] for one in shared.reports()}, "a busy executor")
    lost = next(one["executor"] for one in shared.reports() if one["executor"] in shared.executors())
    agent = by_executor()[lost]
    psutil.Process(lost).kill()
    await_progress(lambda: not psutil.pid_exists(agent), living, what="the end of a dead executor's agent")
    shared.release()
    shared.await_spread(lambda: lost not in shared.executors() and moved(shared), "its slots elsewhere")
    shared.await_rows()
    shared.await_committed()
    its_rows = {tuple(row) for one in shared.reports() if one["executor"] == lost for row in one["rows"]}
    others = {tuple(row) for one in shared.reports() if one["executor"] != lost for row in one["rows"]}
    assert its_rows and its_rows <= others, "another executor read its ranges"
    assert shared.run["generation"] == before["generation"], "a rebalance"
    assert set(describe(shared.where.admin, shared.group).members) == instance_ids(shared)


def test_agents_end_when_the_driver_is_killed(shared: PlacedJob) -> None:
    shared.await_spread(living, "an agent")
    mine = living()
    shared.process.kill()
    shared.process.wait(300)
    await_progress(lambda: not set(mine) & set(living()), living, what="the end of the agents")


def has(job: PlacedJob, rows: set[tuple[str, int, int]]) -> bool:
    return rows <= job.rows().keys()


def moved(job: PlacedJob) -> bool:
    """Whether its members have all partitions, wherever they are placed."""
    assigned: list[int] = job.run["assigned"]
    return sum(assigned) == job.where.partitions


def instance_ids(job: PlacedJob) -> set[str]:
    """The instance ids of its members."""
    return {f"{job.group}.{job.run['stream']}.{slot}" for slot in range(2)}


def forms(secret: bytes) -> set[bytes]:
    """A secret as other texts may contain it: as it is, in base64 at each of three alignments, in the escapes of Python
    and JSON."""
    shifted = {base64.b64encode(b"\0" * n + secret)[-(-n * 8 // 6) : -4] for n in range(3)}
    digits = secret.hex().encode()
    return {secret, digits, digits.upper(), repr(secret)[2:-1].encode(), *shifted}


def pages(ui: str) -> dict[str, bytes]:
    """The pages of a running application's user interface, in HTML and as JSON."""

    def get(path: str) -> bytes:
        with urllib.request.urlopen(f"{ui}{path}", timeout=ADMIN_S) as answer:
            found: bytes = answer.read()
        return found

    ((application,),) = [[one["id"] for one in json.loads(get("/api/v1/applications"))]]
    rest = f"/api/v1/applications/{application}"
    executions = json.loads(get(f"{rest}/sql?details=true&planDescription=true&length=20"))
    stages = json.loads(get(f"{rest}/stages"))
    paths = ["/environment/", "/jobs/", "/stages/", "/executors/", "/SQL/", "/StreamingQuery/"]
    paths += [f"/SQL/execution/?id={executions[-1]['id']}", f"/stages/stage/?id={stages[0]['stageId']}&attempt=0"]
    paths += [f"{rest}/{name}" for name in ("environment", "jobs", "stages", "allexecutors")]
    paths += [f"{rest}/sql?details=true&planDescription=true&length=200", f"{rest}/stages/{stages[0]['stageId']}"]
    found = {path: get(path) for path in paths}
    assert all(found.values())
    return found


# --- longer ones ----------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_members_follow_the_workers_of_a_cluster_that_gets_the_package_by_py_files(
    broker: BrokerCluster,
    admin: AdminClient,
    topic: TopicFactory,
    produce: Produce,
    group_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = Target(admin, produce, topic(PARTITIONS), PARTITIONS, group_id, broker.bootstrap_servers)
    watched = PlacedJob(tmp_path, where, "classic", broker.bootstrap_servers)

    def hosts() -> list[str]:
        """Where each slot is placed, once all partitions are assigned."""
        run = watched.run
        return sorted(run["agents"]) if run and sum(run["assigned"]) == PARTITIONS else []

    python = str(python_without_package(watched.home))
    monkeypatch.setenv("PYSPARK_PYTHON", python)
    with standalone(watched.home / "cluster", workers=1) as cluster:
        package = str(package_as_zip(watched.home))
        with watched.running(master=cluster.url, py_files=package, python=python):
            watched.send()
            watched.await_rows()
            watched.await_placed()
            (first,) = set(hosts())
            before = watched.run

            cluster.add_worker()
            watched.await_spread(lambda: len(set(hosts())) == 2, "a slot on the new worker's executor")

            executors = psutil.Process(cluster.workers[0].pid).children(recursive=True)
            cluster.workers[0].kill()
            for process in executors:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its worker
                    process.kill()
            watched.await_spread(
                lambda: hosts() and first not in hosts() and all(hosts()), "both slots on the remaining executor"
            )
            watched.await_rows()
            watched.await_committed()
            assert watched.run["generation"] == before["generation"], "a rebalance"


@pytest.mark.soak
def test_topics_that_are_created_and_deleted_lose_and_duplicate_no_row(
    broker: BrokerCluster, admin: AdminClient, topic: TopicFactory, produce: Produce, group_id: str, tmp_path: Path
) -> None:
    """Deleted topics are read to their ends before, so every missing row is a failure."""
    name = topic(2)
    where = Target(admin, produce, name, 2, group_id, broker.bootstrap_servers)
    more = {"subscribePattern": f"{name}.*", "failOnDataLoss": False}
    watched = PlacedJob(tmp_path, where, "classic", broker.bootstrap_servers, **more)
    expected: list[tuple[str, int, int]] = []

    def records(topic: str, partitions: int) -> Iterable[Record]:
        return (Record(b"x", partition=p % partitions) for p in range(4 * partitions))

    with watched.running():
        watched.send()
        watched.await_rows()
        watched.await_placed()
        end_s, number = time.monotonic() + CHURN_S, 0
        alive: list[str] = []
        while time.monotonic() < end_s:
            number += 1
            partitions = 1 + number % 3
            alive.append(create_topic(admin, f"{name}-{number}", partitions))
            written = produce(alive[-1], records(alive[-1], partitions))
            expected += [(alive[-1], partition, offset) for partition, offset in written]
            watched.send()
            if len(alive) == 3:
                first = alive.pop(0)
                mine = {row for row in expected if row[0] == first}
                watched.await_(partial(has, watched, mine), f"the rows of {first}")
                admin.delete_topics([first])[first].result(ADMIN_S)
        total = watched.sent + len(expected)
        watched.await_(lambda: len(watched.rows()) >= total, "every row")
        rows = watched.rows()
        assert (len(rows), set(rows.values())) == (total, {1})
        assert set(expected) <= rows.keys()
        assert number >= 5, "something came and went"
        watched.await_(
            lambda: sum(at for tp, at in committed_of(admin, group_id).items() if tp.topic == name) == watched.sent,
            "the offsets of the topic that stayed",
        )
