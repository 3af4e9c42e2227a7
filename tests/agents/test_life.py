"""The start and the end of an agent as a real process, without Kafka."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import agent_helpers
import pytest
from conftest import await_until
from kafka_helpers import contents_of

from spark_group_source.agents import agent_folder
from spark_group_source.agents.agent_folder import (
    LOG_BYTES_MAX,
    AgentFolder,
    ProcessId,
    agents_directory,
)
from spark_group_source.agents.main import ProcessWatch, open_prefetching_client
from spark_group_source.agents.prefetch import client
from spark_group_source.host.run_files import directory, here

STARTED_S = 600
SECRET = "hush-hush-hush"

WORKER = """
import json, sys
import agent_helpers
from spark_group_source.agents import agent_folder
agent_folder._MAIN = agent_helpers.MAIN
folder = agent_helpers.start_agent(**json.loads(sys.argv[1]))
sys.stdout.write(f"{folder.path if folder else None}\\n")
sys.stdout.flush()
"""
FORKING = f"""
import os, sys
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        try:
            exec({WORKER!r})
        finally:
            os._exit(0)
while os.wait()[0] and sys.stdin.read(1):  # as Spark's daemon: until its executor has ended
    pass
"""
EXECUTOR = """
import subprocess, sys
child = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE)
child.wait()
sys.stdin.read()
"""


@contextlib.contextmanager
def executor(*command: str, conf: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process in place of an executor's JVM, which starts this command as its daemon or worker. Its own command line
    contains ``conf``."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{EXECUTOR}# {conf}", "-c", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tempfile.gettempdir(),  # Python also imports modules from its working directory
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def settings(**more: object) -> str:
    return json.dumps(more)


def folders_of(process: subprocess.Popen[str], count: int) -> set[str]:
    assert process.stdout is not None
    return {process.stdout.readline().strip() for _ in range(count)}


# ------------------------------------------------------------------------------------------------------ which executor


@pytest.mark.parametrize(
    ("command", "workers", "conf"),
    [
        ((FORKING, settings(), "8"), 8, ""),
        ((WORKER, settings()), 1, ""),
        ((WORKER, settings()), 1, "spark.python.daemon.module=pyspark.daemon"),
    ],
    ids=["daemon", "no daemon", "no daemon, but its name"],
)
def test_workers_of_one_executor_start_one_agent_which_outlives_them_and_ends_with_its_executor(
    command: tuple[str, ...], workers: int, conf: str
) -> None:
    with executor(*command, conf=conf) as jvm:
        (place,) = folders_of(jvm, workers)
        agent_helpers.await_ready(folder := AgentFolder(Path(place)))
        assert folder.path.name.startswith(f"{jvm.pid}-"), "the executor is the parent of their daemon"
        assert agent_helpers.living() == [agent_helpers.pid_of(folder)]
        agent = ProcessId.of(agent_helpers.pid_of(folder))
        assert agent is not None
        parent = int(Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != jvm.pid, "its worker has ended"
        assert os.getsid(agent.pid) == agent.pid
        jvm.kill()
        agent_helpers.await_ended(agent.pid)
    assert not folder.path.exists()


def test_runs_and_executors_have_an_agent_each(agent: Callable[..., AgentFolder]) -> None:
    first, second = agent(run="one"), agent(run="two")
    with executor(WORKER, settings(run="one")) as jvm:
        (place,) = folders_of(jvm, 1)
        agent_helpers.await_ready(AgentFolder(Path(place)))
        folders = [first, second, AgentFolder(Path(place))]
        assert len(agent_helpers.living()) == len({agent_helpers.pid_of(folder) for folder in folders}) == 3


def test_the_end_of_a_process_is_detected_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = ProcessId.of(child.pid)
        assert process is not None
        watch = ProcessWatch(process)
        assert not watch.wait_ended(0)
        child.kill()
        await_until(
            lambda: watch.wait_ended(0.05), STARTED_S, what="the end of the process"
        )  # its parent has not waited for it yet
    assert not ProcessId(os.getpid(), process.started - 1).is_alive(), "another process with the same number"


def test_a_process_lives_on_where_no_file_can_be_opened() -> None:
    process = ProcessId.of(os.getppid())
    assert process is not None
    watch = ProcessWatch(process)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # 0 to 2 are open
        assert not process.is_alive(), "its state cannot be read"
        assert not watch.wait_ended(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_prefetching_client_accepts_large_messages() -> None:
    open_prefetching_client({"bootstrap.servers": "127.0.0.1:1", "message.max.bytes": "20000000"}).close()


def test_no_agent_is_started_if_the_executor_cannot_be_determined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_folder, "process_stat", lambda _: None)
    assert [agent_helpers.start_agent() for _ in range(2)] == [None, None]
    assert caplog.text.count("no agent runs on this executor") == 1


# ------------------------------------------------------------------------------------------------------------ secrets


def test_secrets_are_not_visible_and_other_users_cannot_open_the_folders(agent: Callable[..., AgentFolder]) -> None:
    folder = agent(reader_settings={"sasl.password": SECRET}, connection={"secret": SECRET})
    for path in (directory(), agents_directory(), folder.path):
        assert path.stat().st_mode & 0o077 == 0
    for name in ("cmdline", "environ"):
        assert SECRET.encode() not in Path(f"/proc/{agent_helpers.pid_of(folder)}/{name}").read_bytes()
    agent_helpers.state(folder)
    files = contents_of(directory().rglob("*"))
    assert folder.log in files
    assert not any(SECRET.encode() in text for text in files.values())
    assert os.readlink(f"/proc/{agent_helpers.pid_of(folder)}/fd/0") == "/dev/null"


def test_settings_may_be_larger_than_a_pipe(agent: Callable[..., AgentFolder]) -> None:
    agent(reader_settings={"ssl.ca.pem": "x" * (1 << 20)})


# ---------------------------------------------------------------------------------------------------------- its start


def test_the_agent_imports_the_package_of_its_task(tmp_path: Path) -> None:
    """``--py-files`` puts an archive into the path of tasks."""
    package, place = Path(client.__file__).parents[2], tmp_path / "package.zip"
    with zipfile.ZipFile(place, "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, path.relative_to(package.parent))
    (tmp_path / "agent_helpers.py").write_bytes(Path(agent_helpers.__file__).read_bytes())
    given = settings(connection={"kind": "NotingConnection", "folder": str(tmp_path)})
    # The tests' folder comes last: the connection class of the test needs modules of it.
    places = os.pathsep.join([str(place), *map(str, (tmp_path, Path(agent_helpers.__file__).parent))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", places)
        with executor(WORKER, given) as jvm:
            folders_of(jvm, 1)
            found = await_until(lambda: tmp_path / "package" if (tmp_path / "package").exists() else None, STARTED_S)
            assert found is not None
            await_until(found.read_text, STARTED_S)
            assert found.read_text().startswith(str(place))


def test_an_agent_that_fails_to_start_is_logged_once_and_retried_after_a_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = ProcessId.of(os.getpid())
    broken = {"kind": "Nothing"}
    folder = agent_helpers.start_agent(here, connection=broken)
    assert folder is not None
    await_until(lambda: agent_helpers.is_unlocked(folder), STARTED_S, what="the end of the agent")
    log = folder.log.read_text()
    folder.attempts.write_text(json.dumps([9, time.time()]))  # the longest pause
    for _ in range(2):
        agent_helpers.start_agent(here, connection=broken)
    assert folder.log.read_text() == log, "no agent was started"
    assert caplog.text.count("KeyError: 'Nothing'") == 1
    assert "tasks read from the brokers" in caplog.text
    folder.attempts.write_text(json.dumps([1, 0.0]))  # long ago
    agent_helpers.start_agent(here)
    agent_helpers.await_ready(folder)


def test_a_killed_agent_is_replaced(agent: Callable[..., AgentFolder]) -> None:
    folder = agent()
    first = agent_helpers.pid_of(folder)
    os.kill(first, signal.SIGKILL)
    agent_helpers.await_ended(first)
    folder.attempts.unlink(missing_ok=True)  # as an agent does after some seconds

    def answers() -> bool:
        agent_helpers.start_agent(ProcessId.of(os.getpid()))  # as the next task does
        return agent_helpers.state(folder) is not None

    await_until(answers, STARTED_S, what="an answer of another agent")
    assert agent_helpers.pid_of(folder) != first


def test_an_agent_starts_after_one_that_was_killed_before_it_listened(agent: Callable[..., AgentFolder]) -> None:
    folder = AgentFolder.of("run", ProcessId.of(os.getpid()))
    folder.create()
    with socket.socket(socket.AF_UNIX) as listener, folder.socket_path("socket.new") as path:
        listener.bind(path)
    agent_helpers.await_ready(agent())


def test_a_directory_that_other_users_can_write_to_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    directory().mkdir(mode=0o700)
    directory().chmod(0o777)
    assert agent_helpers.start_agent(ProcessId.of(os.getpid())) is None
    assert "other users can write to it" in caplog.text


@pytest.fixture
def ended() -> ProcessId:
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        found = ProcessId.of(process.pid)
    assert found is not None
    return found


def test_folders_of_ended_executors_are_removed_where_no_agent_starts(
    ended: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_folder, "STALE_FOLDERS_MAX", 1)
    used = [agent_folder.open_folder(f"run-{number}", ProcessId.of(os.getpid())) for number in range(5)]
    used.append(agent_folder.open_folder("of an executor that cannot be determined", None))
    left = agent_folder.open_folder("run", ended)
    assert left is not None and left.path.exists()
    used.append(agent_folder.open_folder("next run", ProcessId.of(os.getpid())))
    assert set(agents_directory().iterdir()) == {folder.path for folder in used if folder is not None}
    assert len(used) == 7


@pytest.mark.parametrize("where", ["another-host.lan-4026531836", f"{socket.gethostname()}-4026530000", here()])
def test_a_folder_of_another_host_or_a_living_executor_is_removed_after_a_day_without_a_change(
    where: str, ended: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another host or container, its executor may run, although no process here has its id. Here, no agent may be
    able to run beside an executor that reads for many runs."""
    executor = ProcessId.of(os.getpid()) if where == here() else ended
    with monkeypatch.context() as there:
        there.setattr(agent_folder, "here", lambda: where)
        left = agent_folder.open_folder("run", executor)
    assert left is not None
    left.attempts.touch()
    agent_folder.open_folder("run-1", ProcessId.of(os.getpid()))
    assert left.path.exists()
    past_s = time.time() - agent_folder.UNUSED_S - 1
    os.utime(left.path, (past_s, past_s))
    agent_folder.open_folder("run-2", ProcessId.of(os.getpid()))
    assert left.path.exists(), "a task has counted an attempt since"
    os.utime(left.attempts, (past_s, past_s))
    agent_folder.open_folder("run-3", ProcessId.of(os.getpid()))
    assert not left.path.exists()


def test_the_socket_works_in_a_folder_with_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: Callable[..., AgentFolder]
) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = agent()
    assert len(str(folder.path)) > 108, "the limit of a socket address"


# ------------------------------------------------------------------------------------------------------------ its end


@pytest.mark.parametrize("how", ["folder", "SIGTERM"])
def test_an_agent_ends_on_request(agent: Callable[..., AgentFolder], how: str) -> None:
    folder = agent()
    pid = agent_helpers.pid_of(folder)
    if how == "folder":
        folder.remove()
    else:
        os.kill(pid, signal.SIGTERM)
    agent_helpers.await_ended(pid)
    assert not folder.path.exists()


def test_an_agent_whose_folder_was_removed_does_not_remove_that_of_the_next_one(
    agent: Callable[..., AgentFolder],
) -> None:
    """Programs that clean temporary folders remove old files."""
    folder = agent()
    first = agent_helpers.pid_of(folder)
    os.kill(first, signal.SIGSTOP)
    folder.remove()
    agent()
    (second,) = set(agent_helpers.living()) - {first}
    os.kill(first, signal.SIGCONT)
    agent_helpers.await_ended(first)
    assert agent_helpers.living() == [second]
    agent_helpers.await_ready(folder)
    (folder.path / "socket").unlink()
    agent_helpers.await_ended(second)


def test_the_files_of_an_agent_are_made_new(agent: Callable[..., AgentFolder]) -> None:
    folder = agent()
    files = [folder.path / "lock", folder.path / "socket"]
    for file in files:
        os.utime(file, (1, 1))
    folder.touch()
    assert all(file.stat().st_mtime > 1 for file in files)


def test_the_executor_of_a_driver_is_found_among_threads_with_any_names() -> None:
    """Linux cuts names after 15 bytes, also in the middle of a character."""
    named, ended = threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes("загрузка".encode()[:15])
        named.set()
        ended.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert named.wait(STARTED_S)
        here = ProcessId.of(os.getpid())
        assert here is not None and not here.runs_tasks
    finally:
        ended.set()
        thread.join()


def test_an_agent_ends_when_its_connection_has_ended(agent: Callable[..., AgentFolder], tmp_path: Path) -> None:
    folder = agent(connection={"kind": "NotingConnection", "folder": str(tmp_path)})
    pid = agent_helpers.pid_of(folder)
    await_until((tmp_path / "started").exists, STARTED_S, what="the connection, which starts after the server")
    assert not (tmp_path / "stopped").exists()
    (tmp_path / "over").touch()
    agent_helpers.await_ended(pid)
    assert (tmp_path / "stopped").exists()


def test_an_agent_ends_when_one_of_its_threads_has_failed(agent: Callable[..., AgentFolder], tmp_path: Path) -> None:
    """A thread that serves one task concerns only that task."""
    connection = {"kind": "FailingConnection", "folder": str(tmp_path)}
    prefetching = agent(run="1", connection={**connection, "thread": "prefetcher"})
    serving = agent(run="2", connection={**connection, "thread": "task"})
    pid = agent_helpers.pid_of(prefetching)
    (tmp_path / "fail").touch()
    agent_helpers.await_ended(pid)
    await_until(lambda: "ValueError" in serving.log.read_text(), STARTED_S, what="the failure of the thread")
    agent_helpers.await_ready(serving)


def test_an_agent_whose_end_hangs_exits(agent: Callable[..., AgentFolder]) -> None:
    folder = agent(connection={"kind": "HangingConnection"})
    pid = agent_helpers.pid_of(folder)
    agent_helpers.end(folder)
    agent_helpers.await_ended(pid)


def test_the_log_of_an_agent_is_bounded(agent: Callable[..., AgentFolder]) -> None:
    folder = agent(connection={"kind": "LoggingConnection"})
    assert folder.log.stat().st_size <= LOG_BYTES_MAX
    await_until(lambda: "is ready" in folder.log.read_text(), STARTED_S, what="its last log line")
