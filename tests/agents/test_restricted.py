"""Tasks on platforms that restrict executors: they read from the brokers, and one of them logs the reason.

Processes stand for an executor, its worker daemon and its workers. The restrictions are the operating system's, the
channel is real, and the broker is librdkafka's mock. Each task checks that it has read all records of its piece.
"""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import restricted
from channel_helpers import RecordingServer
from confluent_kafka import Producer
from kit.mock_cluster import MockCluster
from restricted import NO_EXEC, NO_PROC, OTHER_USER, READ_ONLY

from spark_group_source.agents.channel.server import ChannelPeer
from spark_group_source.agents.channel.wire import Secret
from spark_group_source.agents.messages import CODEC, Claim, ClaimGranted
from spark_group_source.model import Piece

HANG_S = 300
UNREACHED_S = 2.0
"""How long tasks try to reach a stream reader that they cannot reach."""
WORKERS, TASKS = 3, 3
RECORDS = 20
PROGRAM = Path(__file__).with_name("restricted_tasks.py")
EXECUTOR = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
Address = tuple[str, int]


class Tasks:
    """Runs all tasks of one executor, and keeps what they report.

    Args:
        folder: the temporary folder of the executor.
        servers: brokers with a topic ``orders``, whose first partition has :data:`RECORDS` records.
    """

    def __init__(self, folder: Path, servers: str) -> None:
        self.folder, self._servers = folder, servers
        folder.chmod(0o777)
        self.environment = {**os.environ, "TMPDIR": str(folder)}
        self.agents: list[int] = []
        """For each task, how many agents its worker has started so far."""
        self.log = ""

    def run(
        self,
        address: Address,
        secret: Secret,
        *restrictions: str,
        executor: Sequence[str] = (),
        writable: Sequence[Path] = (),
        wait: bool = False,
        threads: int | None = None,
        users: bool = False,
        connect_s: float = HANG_S,
    ) -> None:
        """Run the tasks to their end.

        Args:
            restrictions: of the daemon and its workers.
            executor: restrictions of the executor, and of all that it starts.
            writable, wait, threads, users, connect_s: as in ``restricted`` and in the program.
        """
        for restriction in (*restrictions, *executor, *([OTHER_USER] if users else ())):
            if reason := restricted.obstacle(restriction):
                pytest.skip(reason)
        task = {"run": "run", "plan": "r.1", "number": 0, "late": False}
        task |= {"addresses": [address], "secret": secret.to_hex()}
        options = {"kafka.bootstrap.servers": self._servers, "kafka.group.id": "g", "subscribe": "orders"}
        given = {"task": task, "options": options, "workers": WORKERS, "tasks": TASKS, "records": RECORDS}
        given |= {"wait": wait, "threads": threads, "users": users, "connect_s": connect_s}
        daemon = restricted.command(restrictions, str(PROGRAM), json.dumps(given), writable=writable)
        found = subprocess.run(
            restricted.command(executor, "-c", EXECUTOR, *daemon),
            env=self.environment,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_S,
        )
        assert found.returncode == 0, found.stderr
        self.agents, self.log = [int(line) for line in found.stdout.split()], found.stderr
        assert len(self.agents) == WORKERS * TASKS, "every task reads its piece"


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with MockCluster() as cluster:
        cluster.create_topic("orders")
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
        for _ in range(RECORDS):
            producer.produce("orders", b"value", partition=0)
        assert producer.flush(HANG_S) == 0
        yield cluster.bootstrap_servers


@pytest.fixture
def tasks(tmp_path: Path, servers: str) -> Tasks:
    return Tasks(tmp_path, servers)


@pytest.fixture
def reader() -> Iterator[tuple[Address, Secret]]:
    """A stream reader that answers claims."""

    def answers(peer: ChannelPeer, message: Any) -> None:
        if isinstance(message, Claim):
            peer.send(ClaimGranted(Piece()))

    with RecordingServer(codec=CODEC) as there:
        there.server._on_message = answers
        yield ("127.0.0.1", there.port), there.secret


def test_an_unrestricted_executor_starts_one_agent(tasks: Tasks, reader: tuple[Address, Secret]) -> None:
    tasks.run(*reader)
    assert tasks.agents == [1] * TASKS + [0] * (WORKERS - 1) * TASKS
    assert tasks.log == ""


# --- no agent can be started ------------------------------------------------------------------------------------------


def test_an_executor_that_may_not_start_processes(tasks: Tasks, reader: tuple[Address, Secret]) -> None:
    tasks.run(*reader, NO_EXEC)
    assert_reason(tasks, "no agent runs on this executor: [Errno 1] Operation not permitted")


def test_an_executor_without_proc(tasks: Tasks, reader: tuple[Address, Secret]) -> None:
    tasks.run(*reader, NO_PROC)
    assert_reason(tasks, "no agent runs on this executor: this task's executor cannot be determined (no /proc?)")


def test_tasks_that_run_as_another_user_than_their_executor(tasks: Tasks, reader: tuple[Address, Secret]) -> None:
    """Each user would start an agent of its own for the same executor, and each agent would replace the others."""
    tasks.run(*reader, OTHER_USER)
    assert_reason(tasks, f"no agent runs on this executor: the executor runs as user {os.geteuid()}, and this task as")


def test_workers_that_each_run_as_another_user(tasks: Tasks, reader: tuple[Address, Secret]) -> None:
    """They share no folder in which one could note that it has logged the reason: every user of the host could write
    to it."""
    tasks.run(*reader, users=True)
    assert sum(tasks.agents) == 0
    assert tasks.log.count("\n") == tasks.log.count("no agent runs on this executor: the executor runs as") == WORKERS
    assert len(set(tasks.log.splitlines())) == WORKERS, "each line names its user"


def test_a_pids_limit_that_an_agent_exceeds(tasks: Tasks, reader: tuple[Address, Secret]) -> None:
    """The agent is started, and ends because it cannot start its threads. It is not started again at once."""
    tasks.run(*reader, executor=[OTHER_USER], threads=1, wait=True)
    assert tasks.agents == [1] * TASKS + [0] * (WORKERS - 1) * TASKS
    assert_logged_once(tasks, "no agent runs on this executor: the agent in", "can't start new thread")


# --- where files can be written ---------------------------------------------------------------------------------------


def test_a_read_only_root_with_one_writable_temporary_folder(tasks: Tasks, reader: tuple[Address, Secret]) -> None:
    tasks.run(*reader, READ_ONLY, writable=[tasks.folder])
    assert sum(tasks.agents) == TASKS, tasks.log
    assert tasks.log == ""


def test_a_read_only_root_where_only_the_folder_of_spark_is_writable(
    tasks: Tasks, reader: tuple[Address, Secret]
) -> None:
    """As on Kubernetes with readOnlyRootFilesystem."""
    del tasks.environment["TMPDIR"]
    tasks.environment["SPARK_LOCAL_DIRS"] = f"{tasks.folder},/other"
    tasks.run(*reader, READ_ONLY, writable=[tasks.folder])
    assert sum(tasks.agents) == TASKS, tasks.log
    assert tasks.log == ""


def test_a_read_only_root_without_a_writable_folder(tasks: Tasks, reader: tuple[Address, Secret]) -> None:
    """The workers share no folder in which they could note that the reason is logged."""
    tasks.run(*reader, READ_ONLY)
    assert sum(tasks.agents) == 0
    assert tasks.log.count("\n") == WORKERS
    assert tasks.log.count("Read-only file system") == WORKERS


# --- the stream reader cannot be reached ------------------------------------------------------------------------------


def test_executors_whose_connections_to_the_driver_are_refused(tasks: Tasks) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        tasks.run(bound.getsockname(), Secret.new(), connect_s=UNREACHED_S)
    assert_reason(tasks, "this executor does not reach the stream reader", "Connection refused")


def test_executors_whose_packets_to_the_driver_are_dropped(tasks: Tasks) -> None:
    with dropping() as address:
        tasks.run(address, Secret.new(), connect_s=UNREACHED_S)
    assert_reason(tasks, "this executor does not reach the stream reader", "no answer in time")


@contextlib.contextmanager
def dropping() -> Iterator[Address]:
    """An address that answers nothing: the kernel drops connections to a queue that is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()


def assert_reason(tasks: Tasks, *texts: str) -> None:
    """No agent was started, and the reason is the only line in the executor's log."""
    assert tasks.agents == [0] * WORKERS * TASKS
    assert_logged_once(tasks, *texts)


def assert_logged_once(tasks: Tasks, *texts: str) -> None:
    assert tasks.log.count("\n") == 1, tasks.log
    assert all(text in tasks.log for text in texts), tasks.log
