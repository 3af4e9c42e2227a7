"""Run files: durable marks, statistics, and the lock of a ``load()``."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import restricted
from kafka_helpers import await_until

from spark_group_source.errors import GroupError, OptionError
from spark_group_source.host import run_files
from spark_group_source.protocol.offsets import BatchKey, StreamOffset
from spark_group_source.protocol.statistics import Statistics

STREAM = "9f2c0d1e2a3b"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this test's run files; it does not exist yet."""
    monkeypatch.setattr(run_files, "directory", lambda: tmp_path / "runs")
    return tmp_path / "runs"


def batch(seq: int, *, stream: str = STREAM) -> StreamOffset:
    return StreamOffset(group="etl", stream=stream, seq=seq)


def statistics(*, stream: str = STREAM, seq: int = 3, state: str = "planned") -> Statistics:
    return Statistics(
        group="etl",
        stream=stream,
        seq=seq,
        state=state,
        generation=1,
        assigned=(2,),
        slots=("assigned",),
    )


@contextlib.contextmanager
def other_run(directory: Path, *, driver: int) -> Iterator[int]:
    """Write the file of a live run in another process; yields its process id."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        doc = {"pid": process.pid, "started": run_files._started(process.pid), "driver": driver, "drained": False}
        doc |= {"last_batch": -1, "committed": True, **statistics().as_dict()}
        (directory / run_files._run_file(process.pid).name).write_text(json.dumps(doc))
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()


# --- durable marks --------------------------------------------------------------------------------------------------


def test_a_run_reads_the_durable_mark_and_removes_it_when_it_stops(directory: Path) -> None:
    run = run_files.Publisher("etl")
    run.publish(statistics())
    assert run_files.durable_mark(STREAM).seq == -1
    run_files.mark_durable(batch(7))
    run_files.mark_durable(batch(8))
    assert (run.durable_mark(STREAM), run.durable_mark("other")) == (BatchKey.of(batch(8)), run_files.NO_MARK)
    run.close(seq=8)
    assert run_files.durable_mark(STREAM).seq == -1
    assert list(directory.iterdir()) == []


def test_a_run_that_was_replaced_neither_removes_nor_replaces_the_mark_of_a_later_batch(directory: Path) -> None:
    """Else the new run would commit its batch at the next trigger only."""
    replaced = run_files.Publisher("etl")
    replaced.publish(statistics())
    run_files.mark_durable(batch(8))
    run_files.mark_durable(batch(7))
    replaced.close(seq=7)
    assert run_files.durable_mark(STREAM) == BatchKey.of(batch(8))


def test_a_run_that_stops_with_all_offsets_committed_leaves_a_mark_for_the_next_one(directory: Path) -> None:
    run = run_files.Publisher("etl")
    run.publish(statistics())
    assert run.committed_mark(STREAM) == run_files.NO_MARK
    run.close(batch(7))
    following = run_files.Publisher("etl")
    following.publish(statistics())
    assert (following.committed_mark(STREAM), following.committed_mark("other")) == (
        BatchKey.of(batch(7)),
        run_files.NO_MARK,
    )
    following.close(None)
    assert following.committed_mark(STREAM).seq == 7, "what was committed stays committed"


def test_the_void_mark_names_one_batch_and_stays_for_the_next_run(directory: Path) -> None:
    run = run_files.Publisher("etl")
    run.publish(statistics())
    assert run.void_by(STREAM, 7) == 0
    run_files.mark_void(STREAM, 7, 2)
    run.close()
    following = run_files.Publisher("etl")
    assert [following.void_by(stream, seq) for stream, seq in ((STREAM, 7), (STREAM, 8), ("other", 7), ("", -1))] == [
        2,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("resets", [(1, 2), (2, 1)])
def test_the_void_mark_has_the_last_reset_of_the_tables_whose_batch_is_void(
    directory: Path, resets: tuple[int, int]
) -> None:
    """They were reset one after the other: a batch with the number of an earlier one is void in the other table."""
    directory.mkdir(mode=0o700)
    run_files.mark_void(STREAM, 6, 3)
    for reset_number in resets:
        run_files.mark_void(STREAM, 7, reset_number)
    assert run_files.void_by(STREAM, 7) == 2


def test_rows_of_sinks_are_added_up_and_published_until_the_run_stops(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "_table_rows", {})
    monkeypatch.setattr(run_files, "TABLES_MAX", 2)
    run_files.count_rows(STREAM, "a", {"inserted": 1})
    run = run_files.Publisher("etl")
    run.publish(statistics())
    assert run_files.table_rows(STREAM) == {}, "no run published before"
    for table, rows in (("a", {"inserted": 5, "bad": 0}), ("b", {"inserted": 1}), ("a", {"inserted": 2, "bad": 3})):
        run_files.count_rows(STREAM, table, rows)
    run_files.count_rows(STREAM, "one more", {"inserted": 7})
    expected = {"a": {"inserted": 7, "bad": 3}, "b": {"inserted": 1}}
    run.publish(statistics())
    assert [doc["tables"] for doc in run_files.read("etl")] == [expected] and run.last is not None
    assert run.last.tables == run_files.table_rows(STREAM) == expected
    run.close()
    assert list(directory.iterdir()) == []


def test_the_metrics_port_is_published_with_the_statistics(directory: Path) -> None:
    run = run_files.Publisher("etl")
    run.metrics_port = 9464
    run.publish(statistics())
    assert [doc["metrics_port"] for doc in run_files.read("etl")] == [9464]
    found = run_files.snapshot("etl", STREAM)
    assert found is not None and found == run.last and found.metrics_port == 9464
    run.close()


def test_a_sink_on_a_host_without_a_run_writes_no_file(directory: Path) -> None:
    run_files.mark_durable(batch(7))
    assert not directory.exists()


@pytest.mark.parametrize("stream", ["", "../9f2c", "a/b", ".", "a.json"])
def test_a_stream_id_that_is_not_a_file_name_has_no_mark(directory: Path, stream: str) -> None:
    directory.mkdir(mode=0o700)
    run_files.mark_durable(batch(7, stream=stream))
    assert run_files.durable_mark(stream).seq == -1
    assert list(directory.iterdir()) == []


def foreign_directory(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> Path:
    """Create what another user may create in place of the directory. Returns where its files are."""
    if kind == "link":
        (tmp_path / "real").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "real")
        return tmp_path / "real"
    directory.mkdir(mode=0o700)
    if kind == "writable":
        directory.chmod(0o777)
    else:
        monkeypatch.setattr(os, "getuid", lambda: directory.stat().st_uid + 1)
    return directory


@pytest.mark.parametrize("kind", ["link", "owner", "writable"])
def test_a_directory_of_another_user_is_neither_read_nor_written(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    run_files._warn_once.cache_clear()
    real = foreign_directory(directory, tmp_path, monkeypatch, kind)
    file = real / run_files._run_file(os.getpid()).name
    file.write_text("not ours to remove")
    (real / f"{STREAM}.durable").write_text("7 ab")
    run = run_files.Publisher("etl")
    file.with_suffix(".drain").touch()
    with other_run(real, driver=os.getppid()):
        assert not run.is_drain_requested
        assert run_files.read("etl") == []
        assert run_files.snapshot("etl", STREAM) is None
        with pytest.raises(GroupError, match=r"does not belong to this user only.*TMPDIR"):
            run_files.drain("etl")
    run.publish(statistics())
    run.close()
    run_files.mark_durable(batch(9))
    assert run_files.durable_mark(STREAM).seq == -1 and (real / f"{STREAM}.durable").read_text() == "7 ab"
    assert file.read_text() == "not ours to remove"
    assert file.with_suffix(".drain").exists()
    logged = [record.getMessage() for record in caplog.records if str(directory) in record.getMessage()]
    assert len(logged) == 1 and "TMPDIR" in logged[0], "logged once, with the remedy"


def test_the_directory_is_private_and_links_in_it_are_replaced_and_not_followed(
    directory: Path, tmp_path: Path
) -> None:
    former = os.umask(0)
    try:
        run_files.Publisher("etl").publish(statistics())
    finally:
        os.umask(former)
    assert directory.stat().st_mode & 0o777 == 0o700
    (tmp_path / "precious").write_text("keep")
    (directory / f"{STREAM}.durable").symlink_to(tmp_path / "precious")
    run_files.mark_durable(batch(7))
    assert (tmp_path / "precious").read_text() == "keep"
    assert run_files.durable_mark(STREAM).seq == 7


def test_a_mark_that_cannot_be_written_or_read_raises_no_error(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / f"{STREAM}.durable").mkdir()
    run_files.mark_durable(batch(7))
    assert run_files.durable_mark(STREAM).seq == -1
    (directory / f"{STREAM}.durable").rmdir()
    (directory / f"{STREAM}.durable").write_text("seven")
    assert run_files.durable_mark(STREAM).seq == -1


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_run_goes_on_when_it_cannot_check_whether_to_drain(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    run = run_files.Publisher("etl")
    run.publish(statistics())
    run_files.request_drain(os.getpid())
    assert run.is_drain_requested
    run_files._warn_once.cache_clear()

    def broken(path: Path) -> bool:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", broken)
        assert [run.is_drain_requested for _ in range(2)] == [False, False]
    assert caplog.text.count("cannot be checked") == 1
    run.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_cannot_be_written_affects_statistics_and_marks_only(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    run = run_files.Publisher("etl")
    run.publish(statistics(seq=3))
    run_files.mark_durable(batch(3))

    def full(path: Path, text: str, **_: str) -> None:
        path.touch()
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        for seq in (4, 5):
            run.publish(statistics(seq=seq))
            run_files.mark_durable(batch(seq))
    assert caplog.text.count("cannot be written") == 1
    assert list(directory.glob("*.part")) == [], "no partial file is left"
    assert run_files.durable_mark(STREAM).seq == 3, "the mark is unchanged"
    assert [doc["seq"] for doc in run_files.read("etl")] == [3]
    run.publish(statistics(seq=5), drained=True)
    run_files.mark_durable(batch(5))
    assert caplog.text.count("written to") == 2 and "again" in caplog.text
    assert [(doc["seq"], doc["drained"]) for doc in run_files.read("etl")] == [(5, True)]


def test_the_end_of_a_drain_is_logged_once(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run = run_files.Publisher("etl")
    for seq, drained in ((1, False), (2, True), (3, True)):
        run.publish(statistics(seq=seq), drained=drained)
    assert caplog.text.count("group etl: drained: all offsets are committed, and no batch follows") == 1


@pytest.mark.parametrize("drained", [False, True])
def test_a_run_that_was_killed_before_it_drained_is_not_counted(
    directory: Path, monkeypatch: pytest.MonkeyPatch, drained: bool
) -> None:
    directory.mkdir(mode=0o700)
    with other_run(directory, driver=1) as killed:
        file = run_files._run_file(killed)

        def kill(pid: int) -> None:
            file.write_text(json.dumps(json.loads(file.read_text()) | {"drained": drained}))
            monkeypatch.setattr(run_files, "_is_alive", lambda other, started: other != pid)

        monkeypatch.setattr(run_files, "request_drain", kill)
        if drained:
            assert run_files.drain("etl", timeout_s=0) == 1
        else:
            with pytest.raises(GroupError, match=f"process {killed} was killed during the drain"):
                run_files.drain("etl", timeout_s=0)


def drain_ended(stopped: int, *, is_drained: bool) -> None:
    """A drain of a run that stops when it is requested."""
    if is_drained:
        assert run_files.drain("etl", timeout_s=0) == 1
    else:
        with pytest.raises(GroupError, match=f"process {stopped} ended during the drain"):
            run_files.drain("etl", timeout_s=0)


@pytest.mark.parametrize(
    ("state", "committed", "is_drained"),
    [("open", True, True), ("open", False, False), ("reading", True, False)],
)
def test_a_run_that_stopped_during_the_drain_is_drained_if_it_had_no_batch_left(
    directory: Path, monkeypatch: pytest.MonkeyPatch, state: str, committed: bool, is_drained: bool
) -> None:
    """A run that stops removes its file."""
    directory.mkdir(mode=0o700)
    with other_run(directory, driver=1) as stopped:
        file = run_files._run_file(stopped)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"state": state, "committed": committed}))
        monkeypatch.setattr(run_files, "request_drain", lambda pid: file.unlink())
        drain_ended(stopped, is_drained=is_drained)


@pytest.mark.parametrize(
    ("state", "seq", "is_drained"), [("reading", 3, True), ("reading", 4, False), ("open", 4, True), ("open", 5, False)]
)
def test_a_run_whose_last_batch_was_committed_when_it_stopped_is_drained(
    directory: Path, monkeypatch: pytest.MonkeyPatch, state: str, seq: int, is_drained: bool
) -> None:
    """By the mark that it leaves: batch 4. A batch in flight has the number after that of the run."""
    directory.mkdir(mode=0o700)
    with other_run(directory, driver=1) as stopped:
        file = run_files._run_file(stopped)
        doc = json.loads(file.read_text()) | {"state": state, "seq": seq, "committed": False}
        file.write_text(json.dumps(doc))

        def stop(pid: int) -> None:
            run = run_files.Publisher("etl")
            run.publish(statistics())
            run.close(batch(4))
            file.unlink()

        monkeypatch.setattr(run_files, "request_drain", stop)
        drain_ended(stopped, is_drained=is_drained)


def test_a_run_removes_the_files_of_runs_that_were_killed(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    with other_run(directory, driver=1) as killed:
        left = run_files._run_file(killed)
        run_files.request_drain(killed)
    with other_run(directory, driver=1) as live:
        run_files.Publisher("another group")
        assert [doc["pid"] for doc in run_files.read("etl")] == [live]
    assert not left.exists() and not left.with_suffix(run_files.DRAIN).exists()


def test_a_run_that_ended_is_not_live_although_its_parent_has_not_waited_for_it(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    with other_run(directory, driver=1) as ended:
        os.kill(ended, signal.SIGKILL)
        await_until(lambda: run_files.process_stat(ended)[0] == "Z", what="the end of the process")  # type: ignore[index]
        assert run_files.read("etl") == []


@pytest.mark.parametrize("where", [f"{socket.gethostname()}-4026530000", "another-4026531836"])
def test_runs_of_containers_and_hosts_that_share_the_folder_have_their_own_files(
    directory: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Their process ids are the same; hosts without containers have the same namespace."""
    here = run_files.Publisher("etl")
    here.publish(statistics())
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(run_files, "here", lambda: where)
        there = run_files.Publisher("etl")
        there.publish(statistics(seq=9))
        run_files.request_drain(os.getpid())
        assert there.is_drain_requested
    assert not here.is_drain_requested
    assert [doc["seq"] for doc in run_files.read("etl")] == [3]


def test_a_run_that_was_killed_is_not_live_because_a_thread_has_its_number(directory: Path) -> None:
    """In a container that was restarted the numbers are small, and many threads have them."""
    run = run_files.Publisher("etl")
    run.publish(statistics())
    (file,) = directory.glob("*.json")
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        doc = json.loads(file.read_text()) | {"pid": thread.native_id, "started": 1}
        run_files._run_file(thread.native_id).write_text(json.dumps(doc))
        assert [doc["pid"] for doc in run_files.read("etl")] == [os.getpid()]
    finally:
        ended.set()
        thread.join()


RUN = """
import json, os, sys
import test_run_files as words
from spark_group_source.host import run_files
run_files.LoadLock("load").acquire(wait_s=0)
run = run_files.Publisher("etl")
for seq in (3, 4):
    run.publish(words.statistics(seq=seq))
    run_files.mark_durable(words.batch(seq))
    assert not run.is_drain_requested
json.dump([doc["seq"] for doc in run_files.read("etl")], sys.stdout)
run.close()
"""


@pytest.mark.parametrize(
    ("writable", "published", "lines"), [(True, [4], 0), (False, [], 1)], ids=["Spark's folder", "nothing"]
)
def test_a_read_only_root_is_logged_once_unless_spark_has_a_writable_folder(
    tmp_path: Path, writable: bool, published: list[int], lines: int
) -> None:
    if reason := restricted.obstacle(restricted.READ_ONLY):
        pytest.skip(reason)
    environment = {name: text for name, text in os.environ.items() if name not in ("TMPDIR", "TEMP", "TMP")}
    environment |= {"SPARK_LOCAL_DIRS": f"{tmp_path},/other"} if writable else {}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (Path(__file__).parent, Path(restricted.__file__).parent)))
    run = subprocess.run(
        restricted.command([restricted.READ_ONLY], "-c", RUN, writable=[tmp_path]),
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == published
    assert run.stderr.count("\n") == lines, run.stderr
    assert lines == 0 or "TMPDIR" in run.stderr, "the remedy"


# --- the last batch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_batch", [-1, 2, 4])
def test_a_sink_does_not_wait_for_a_batch_that_is_not_the_last_one(directory: Path, last_batch: int) -> None:
    run_files.mark_durable_and_wait(batch(3))  # no run publishes
    run = run_files.Publisher("etl")
    run.publish(statistics(seq=2), last_batch=last_batch)
    run_files.mark_durable_and_wait(batch(3))
    assert run.durable_mark(STREAM).seq == 3
    run.close()


def test_a_sink_waits_until_the_offsets_of_the_last_batch_are_committed(directory: Path) -> None:
    run = run_files.Publisher("etl")
    run.publish(statistics(seq=2), last_batch=3, committed=True)
    sink = threading.Thread(target=run_files.mark_durable_and_wait, args=(batch(3),))
    sink.start()
    await_until(lambda: run.durable_mark(STREAM) == BatchKey.of(batch(3)), what="the mark")
    for seq, committed in ((2, True), (3, False)):
        run.publish(statistics(seq=seq), last_batch=-1, committed=committed)
        sink.join(3 * run_files.POLL_S)
        assert sink.is_alive(), "the batch is not durable, or its offsets are not committed"
    run.publish(statistics(seq=3), committed=True)
    sink.join(run_files.COMMIT_S)
    assert not sink.is_alive()
    run.close()


# --- one load() ------------------------------------------------------------------------------------------------------

LOCKS = """
import sys
from pathlib import Path
from spark_group_source.host import run_files
run_files.directory = lambda: Path(sys.argv[1])
load = run_files.LoadLock("a1")
load.acquire(wait_s=0)
print("locked", flush=True)
sys.stdin.read()
load.release() if sys.argv[2] == "normally" else __import__("os")._exit(1)
"""


@contextlib.contextmanager
def holder(directory: Path, end: str = "normally") -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock of this load(), until its input ends."""
    arguments = [sys.executable, "-c", LOCKS, str(directory), end]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.stdin.close()


FULL = """
import resource, sys
from pathlib import Path
from spark_group_source.host import run_files
run_files.directory = lambda: Path(sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
run_files.LoadLock("a1").acquire(wait_s=0)
"""


def test_a_load_is_not_locked_on_a_full_disk(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    done = subprocess.run([sys.executable, "-c", FULL, str(directory)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot check whether another stream of the same load() runs" in done.stderr


def test_a_second_stream_of_one_load_is_refused(directory: Path) -> None:
    with holder(directory) as process:
        with pytest.raises(OptionError, match=rf"process {process.pid},.*Call load\(\) for each stream"):
            run_files.LoadLock("a1").acquire(wait_s=0)
        other = run_files.LoadLock("b2")
        other.acquire(wait_s=0)
        other.release()


@pytest.mark.parametrize("end", ["normally", "killed"])
def test_the_lock_is_acquired_when_the_earlier_run_stops_or_is_killed(directory: Path, end: str) -> None:
    load = run_files.LoadLock("a1")
    with holder(directory, end) as process:
        assert process.stdin is not None
        process.stdin.close()
        load.acquire(wait_s=600)
    with pytest.raises(OptionError, match=f"process {os.getpid()}"):
        run_files.LoadLock("a1").acquire(wait_s=0)
    load.release()
    assert list(directory.glob("*.load")) == []


def test_the_holder_of_a_lock_is_named_although_a_killed_run_had_a_longer_id(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / "a1.load").write_text("41940000")
    with holder(directory) as process, pytest.raises(OptionError, match=f"process {process.pid}, "):
        run_files.LoadLock("a1").acquire(wait_s=0)


def test_without_locks_of_the_file_system_every_stream_runs(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on Lustre or NFS without their locks."""

    def flock(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    run_files.LoadLock("a1").acquire(wait_s=0)
    assert "cannot check whether another stream of the same load() runs: [Errno" in caplog.text


def test_without_usable_run_files_every_stream_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").write_text("no directory")
    monkeypatch.setattr(run_files, "directory", lambda: tmp_path / "runs")
    for _ in range(2):
        run_files.LoadLock("a1").acquire(wait_s=0)
