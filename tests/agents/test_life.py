"""How an agent comes and goes, as a real process; of Kafka it needs nothing for that."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import agent_words
import pytest
from conftest import await_until

from spark_group_source.agents import agent_folder as homes
from spark_group_source.agents import processes, start
from spark_group_source.agents.agent_folder import LOG_BYTES_MAX, Home
from spark_group_source.agents.prefetch import near
from spark_group_source.agents.processes import Process, Watch
from spark_group_source.agents.start import Order
from spark_group_source.host.run_files import directory

STARTED_S = 20
SECRET = "hush-hush-hush"

WORKER = """
import json, sys
import agent_words
from spark_group_source.agents import start
start._BEGIN = agent_words.BEGIN
home = start.start(start.Order(**json.loads(sys.argv[1])))
sys.stdout.write(f"{home.path if home else None}\\n")
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
while os.wait()[0] and sys.stdin.read(1):  # as Spark's daemon: until its executor is gone
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
    """A process that stands in for an executor's JVM, and starts this command as its daemon or worker. Its own command
    line has ``conf``."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{EXECUTOR}# {conf}", "-c", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tempfile.gettempdir(),  # Python looks for modules where it is started
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def order(**given: object) -> str:
    return json.dumps({"run": "run", "settings": {}} | given)


def homes_told(process: subprocess.Popen[str], count: int) -> set[str]:
    assert process.stdout is not None
    return {process.stdout.readline().strip() for _ in range(count)}


# ------------------------------------------------------------------------------------------------------ which executor


def test_workers_of_one_executor_start_one_agent() -> None:
    with executor(FORKING, order(), "8") as jvm:
        (place,) = homes_told(jvm, 8)
        agent_words.await_ready(home := Home(Path(place)))
        assert home.path.name.startswith(f"{jvm.pid}-"), "it belongs to the parent of their daemon"
        assert agent_words.living() == [home.pid]


@pytest.mark.parametrize(
    ("command", "conf"),
    [
        ((FORKING, order(), "1"), ""),
        ((WORKER, order()), ""),
        ((WORKER, order()), "spark.python.daemon.module=pyspark.daemon"),
    ],
    ids=["daemon", "no daemon", "no daemon, but its name"],
)
def test_an_agent_outlives_its_worker_and_ends_with_its_executor(command: tuple[str, ...], conf: str) -> None:
    with executor(*command, conf=conf) as jvm:
        (place,) = homes_told(jvm, 1)
        agent_words.await_ready(home := Home(Path(place)))
        assert home.path.name.startswith(f"{jvm.pid}-")
        agent = Process.of(home.pid)
        assert agent is not None
        parent = int(Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != jvm.pid, "its worker has ended"
        assert os.getsid(agent.pid) == agent.pid
        jvm.kill()
        agent_words.await_ended(agent.pid)
    assert not home.path.exists()


def test_runs_and_executors_have_an_agent_each(agent: Callable[..., Home]) -> None:
    first, second = agent(run="one"), agent(run="two")
    with executor(WORKER, order(run="one")) as jvm:
        (place,) = homes_told(jvm, 1)
        agent_words.await_ready(Home(Path(place)))
        assert len(agent_words.living()) == len({first.pid, second.pid, Home(Path(place)).pid}) == 3


def test_the_end_of_a_process_is_seen_without_help_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = Process.of(child.pid)
        assert process is not None
        watch = Watch(process)
        assert not watch.wait_ended(0)
        child.kill()
        await_until(lambda: watch.wait_ended(0.05), 10, what="the end of the process")  # its parent has not looked yet
    assert not Process(os.getpid(), process.started - 1).lives(), "another process with the same number"


def test_where_no_executor_can_be_seen_tasks_read_directly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_stat", lambda _: None)
    assert [start.start(Order("run", {})) for _ in range(2)] == [None, None]
    assert caplog.text.count("no agent can be started here, tasks read directly") == 1


# ------------------------------------------------------------------------------------------------------------ secrets


def test_secrets_are_seen_nowhere_and_its_folders_are_closed_to_others(agent: Callable[..., Home]) -> None:
    home = agent(settings={"sasl.password": SECRET}, given={"secret": SECRET})
    for folder in (directory(), homes.agents(), home.path):
        assert folder.stat().st_mode & 0o077 == 0
    for name in ("cmdline", "environ"):
        assert SECRET.encode() not in Path(f"/proc/{home.pid}/{name}").read_bytes()
    agent_words.state(home)
    files = [path for path in directory().rglob("*") if path.is_file()]
    assert home.log in files
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    assert os.readlink(f"/proc/{home.pid}/fd/0") == "/dev/null"
    assert SECRET not in repr(Order("run", {"sasl.password": SECRET}))


def test_settings_may_be_longer_than_a_pipe_is(agent: Callable[..., Home]) -> None:
    agent(settings={"ssl.ca.pem": "x" * (1 << 20)})


# ---------------------------------------------------------------------------------------------------------- its start


@pytest.mark.parametrize("kind", ["zip", "folder"])
def test_the_agent_has_the_package_that_its_task_has(tmp_path: Path, kind: str) -> None:
    """``--py-files`` puts an archive into the path of tasks; a wheel, or an unpacked archive, a folder."""
    package = Path(near.__file__).parents[2]
    place = tmp_path / "package.zip" if kind == "zip" else tmp_path / "unpacked"
    if kind == "zip":
        with zipfile.ZipFile(place, "w") as archive:
            for path in package.rglob("*.py"):
                archive.write(path, path.relative_to(package.parent))
    else:
        shutil.copytree(package, place / package.name)
    (tmp_path / "agent_words.py").write_bytes(Path(agent_words.__file__).read_bytes())
    told = order(given={"members": "Noted", "folder": str(tmp_path)})
    # The tests' own folder comes behind: the hosted class needs words of it.
    places = os.pathsep.join([str(place), *map(str, (tmp_path, Path(agent_words.__file__).parent))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", places)
        with executor(WORKER, told) as jvm:
            homes_told(jvm, 1)
            found = await_until(lambda: tmp_path / "package" if (tmp_path / "package").exists() else None, STARTED_S)
            assert found is not None
            await_until(found.read_text, STARTED_S)
            assert found.read_text().startswith(str(place))


def test_an_agent_that_cannot_start_is_said_once_and_not_tried_at_once(caplog: pytest.LogCaptureFixture) -> None:
    here = Process.of(os.getpid())
    broken = Order("run", {}, given={"members": "Nothing"})
    home = start.start(broken, here)
    assert home is not None
    await_until(lambda: agent_words.has_let_go(home), STARTED_S, what="the end of the agent")
    said = home.log.read_text()
    home.tries.write_text(json.dumps([9, time.time()]))  # the longest pause: this machine may be slow
    for _ in range(2):
        start.start(broken, here)
    assert home.log.read_text() == said, "none was started"
    assert caplog.text.count("KeyError: 'Nothing'") == 1
    assert "tasks read directly" in caplog.text
    home.tries.write_text(json.dumps([1, 0.0]))  # long ago
    start.start(Order("run", {}), here)
    agent_words.await_ready(home)


def test_an_agent_that_was_killed_is_followed_by_another(agent: Callable[..., Home]) -> None:
    home = agent()
    first = home.pid
    os.kill(first, signal.SIGKILL)
    agent_words.await_ended(first)
    home.tries.unlink(missing_ok=True)  # as one that stayed for a while does

    def answers() -> bool:
        start.start(Order("run", {}), Process.of(os.getpid()))  # one task after the other
        return agent_words.state(home) is not None

    await_until(answers, STARTED_S, what="an answer of another agent")
    assert home.pid != first


def test_a_place_that_others_can_write_to_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    directory().mkdir(mode=0o700)
    directory().chmod(0o777)
    assert start.start(Order("run", {}), Process.of(os.getpid())) is None
    assert "others can write to it" in caplog.text


def test_what_killed_agents_left_is_removed_by_the_next_one(agent: Callable[..., Home]) -> None:
    with executor(WORKER, order()) as jvm:
        (place,) = homes_told(jvm, 1)
        agent_words.await_ready(left := Home(Path(place)))
        os.kill(left.pid, signal.SIGKILL)
        await_until(lambda: agent_words.has_let_go(left), STARTED_S, what="the end of the agent")
    assert left.path.exists()
    agent()
    assert not left.path.exists()


def test_a_folder_with_a_long_name_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: Callable[..., Home]
) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    home = agent()
    assert len(str(home.path)) > 108, "what fits into an address"


# ------------------------------------------------------------------------------------------------------------ its end


@pytest.mark.parametrize("how", ["bye", "folder", "SIGTERM"])
def test_an_agent_ends_when_it_is_not_wanted(agent: Callable[..., Home], how: str) -> None:
    home = agent()
    pid = home.pid
    if how == "bye":
        agent_words.bye(home)
    elif how == "folder":
        home.remove()
    else:
        os.kill(pid, signal.SIGTERM)
    agent_words.await_ended(pid)
    assert not home.path.exists()


def test_an_agent_ends_with_what_it_hosts(agent: Callable[..., Home], tmp_path: Path) -> None:
    home = agent(given={"members": "Noted", "folder": str(tmp_path)})
    pid = home.pid
    await_until((tmp_path / "started").exists, STARTED_S, what="what it hosts: it serves a moment before")
    assert not (tmp_path / "stopped").exists()
    (tmp_path / "over").touch()
    agent_words.await_ended(pid)
    assert (tmp_path / "stopped").exists()


def test_an_agent_whose_end_hangs_is_gone_all_the_same(agent: Callable[..., Home]) -> None:
    home = agent(given={"members": "Hanging"})
    pid = home.pid
    agent_words.bye(home)
    agent_words.await_ended(pid)


def test_what_an_agent_says_is_bounded(agent: Callable[..., Home]) -> None:
    home = agent(given={"members": "Talkative"})
    assert home.log.stat().st_size <= LOG_BYTES_MAX
    await_until(lambda: "is ready" in home.log.read_text(), STARTED_S, what="the last that it said")
