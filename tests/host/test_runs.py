"""What runs of one host tell each other by files: what is durable, who else is there."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_group_source.errors import GroupError, OptionError
from spark_group_source.host import run_files
from spark_group_source.protocol.statistics import Statistics

STREAM = "9f2c0d1e2a3b"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's runs publish. It is not there yet."""
    monkeypatch.setattr(run_files, "directory", lambda: tmp_path / "runs")
    return tmp_path / "runs"


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
def other_run(directory: Path, *, driver: int, state: str = "planned", group: str = "etl") -> Iterator[int]:
    """The file of a living run in another process; its process id."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        doc = {"pid": process.pid, "driver": driver, "drained": False, **statistics(state=state).as_dict()}
        (directory / f"{process.pid}.json").write_text(json.dumps({**doc, "group": group}))
        yield process.pid
        assert process.stdin is not None
        process.stdin.close()


# --- durable marks --------------------------------------------------------------------------------------------------


def test_a_run_reads_which_batch_its_sink_has_and_removes_the_mark_at_its_end(directory: Path) -> None:
    run = run_files.Publisher("etl")
    run.publish(statistics())
    assert run_files.durable_seq(STREAM) == -1
    run_files.mark_durable(STREAM, 7)
    run_files.mark_durable(STREAM, 8)
    assert (run_files.durable_seq(STREAM), run_files.durable_seq("other")) == (8, -1)
    run.close()
    assert run_files.durable_seq(STREAM) == -1
    assert list(directory.iterdir()) == []


def test_where_a_run_serves_its_metrics_stands_in_its_statistics(directory: Path) -> None:
    run = run_files.Publisher("etl")
    run.metrics_port = 9464
    run.publish(statistics())
    assert [doc["metrics_port"] for doc in run_files.read("etl")] == [9464]
    found = run_files.snapshot("etl", STREAM)
    assert found is not None and found == run.last and found.metrics_port == 9464
    run.close()


def test_a_sink_without_a_run_beside_it_leaves_nothing(directory: Path) -> None:
    run_files.mark_durable(STREAM, 7)
    assert not directory.exists()


@pytest.mark.parametrize("stream", ["", "../9f2c", "a/b", ".", "a.json"])
def test_a_stream_that_is_no_name_is_no_file(directory: Path, stream: str) -> None:
    directory.mkdir(mode=0o700)
    run_files.mark_durable(stream, 7)
    assert run_files.durable_seq(stream) == -1
    assert list(directory.iterdir()) == []


def somebody_elses(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> Path:
    """What stands where this user's runs publish, made by another user. Returns where its files really are."""
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
def test_a_directory_of_another_user_can_neither_stall_a_run_nor_tell_it_anything(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    run_files._say_once.cache_clear()
    real = somebody_elses(directory, tmp_path, monkeypatch, kind)
    (real / f"{os.getpid()}.json").write_text("not ours to remove")
    (real / f"{STREAM}.durable").write_text("7")
    run = run_files.Publisher("etl")
    (real / f"{os.getpid()}.drain").touch()
    with other_run(real, driver=os.getppid()):
        assert not run.drain_asked
        assert run_files.read("etl") == []
        assert run_files.snapshot("etl", STREAM) is None
        with pytest.raises(GroupError, match=r"is not this user's alone.*TMPDIR"):
            run_files.drain("etl")
    run.publish(statistics())
    run.close()
    run_files.mark_durable(STREAM, 9)
    assert run_files.durable_seq(STREAM) == -1 and (real / f"{STREAM}.durable").read_text() == "7"
    assert (real / f"{os.getpid()}.json").read_text() == "not ours to remove"
    assert (real / f"{os.getpid()}.drain").exists()
    said = [record.getMessage() for record in caplog.records if str(directory) in record.getMessage()]
    assert len(said) == 1 and "TMPDIR" in said[0], "once, with what settles it"


def test_the_directory_is_for_this_user_only_and_links_in_it_are_replaced_and_not_followed(
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
    run_files.mark_durable(STREAM, 7)
    assert (tmp_path / "precious").read_text() == "keep"
    assert run_files.durable_seq(STREAM) == 7


def test_a_mark_that_cannot_be_written_or_read_is_no_error(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    (directory / f"{STREAM}.durable").mkdir()
    run_files.mark_durable(STREAM, 7)
    assert run_files.durable_seq(STREAM) == -1
    (directory / f"{STREAM}.durable").rmdir()
    (directory / f"{STREAM}.durable").write_text("seven")
    assert run_files.durable_seq(STREAM) == -1


@pytest.mark.parametrize("trouble", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_takes_nothing_costs_statistics_and_marks_and_nothing_else(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: int
) -> None:
    run = run_files.Publisher("etl")
    run.publish(statistics(seq=3))
    run_files.mark_durable(STREAM, 3)

    def full(path: Path, text: str) -> None:
        path.touch()
        raise OSError(trouble, os.strerror(trouble))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        for seq in (4, 5):
            run.publish(statistics(seq=seq))
            run_files.mark_durable(STREAM, seq)
    assert caplog.text.count("cannot be written") == 1
    assert list(directory.glob("*.part")) == [], "nothing half written is left"
    assert run_files.durable_seq(STREAM) == 3, "no batch is said to be durable that was not said to be"
    assert [doc["seq"] for doc in run_files.read("etl")] == [3]
    run.publish(statistics(seq=5), drained=True)
    run_files.mark_durable(STREAM, 5)
    assert caplog.text.count("written to") == 2 and "again" in caplog.text
    assert [(doc["seq"], doc["drained"]) for doc in run_files.read("etl")] == [(5, True)]


# --- one load() ------------------------------------------------------------------------------------------------------

HOLDS = """
import sys
from pathlib import Path
from spark_group_source.host import run_files
run_files.directory = lambda: Path(sys.argv[1])
load = run_files.Load("a1")
load.hold(wait_s=0)
print("holds", flush=True)
sys.stdin.read()
load.release() if sys.argv[2] == "in order" else __import__("os")._exit(1)
"""


@contextlib.contextmanager
def holder(directory: Path, end: str = "in order") -> Iterator[subprocess.Popen[str]]:
    """Another process that runs the stream of this load(), until its input ends."""
    arguments = [sys.executable, "-c", HOLDS, str(directory), end]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "holds\n"
        yield process
        process.stdin.close()


def test_two_streams_of_one_load_are_refused(directory: Path) -> None:
    with holder(directory) as process:
        with pytest.raises(OptionError, match=rf"process {process.pid},.*Each stream needs its own load\(\)"):
            run_files.Load("a1").hold(wait_s=0)
        other = run_files.Load("b2")
        other.hold(wait_s=0)
        other.release()


@pytest.mark.parametrize("end", ["in order", "killed"])
def test_a_former_run_of_the_load_is_waited_for_however_it_ends(directory: Path, end: str) -> None:
    load = run_files.Load("a1")
    with holder(directory, end) as process:
        assert process.stdin is not None
        process.stdin.close()
        load.hold(wait_s=60)
    with pytest.raises(OptionError, match=f"process {os.getpid()}"):
        run_files.Load("a1").hold(wait_s=0)
    load.release()
    assert list(directory.glob("*.load")) == []


def test_where_the_files_cannot_be_used_every_stream_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").write_text("no directory")
    monkeypatch.setattr(run_files, "directory", lambda: tmp_path / "runs")
    for _ in range(2):
        run_files.Load("a1").hold(wait_s=0)
