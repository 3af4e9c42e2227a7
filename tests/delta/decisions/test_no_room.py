"""A full or read-only disk under the table or the checkpoint: the batch fails, and is written once after the repair."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sink_helpers import Query, commits, next_offsets, one, records, rows
from sink_source import offset

from spark_group_source.delta.native_writer import NativeWriter
from spark_group_source.host import run_files

DISK_KIB = 2048


class Disk:
    """A small file system that can be filled or made read-only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ballast = root / "ballast"

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def forbid(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.root)], check=True)

    def mend(self) -> None:
        subprocess.run(["mount", "-o", "remount,rw", str(self.root)], check=True)
        self._ballast.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    root = tmp_path / "disk"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_KIB}k", "tmpfs", str(root)]
    if (tried := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"needs the right to mount a small file system: {tried.stderr.strip()}")
    try:
        yield Disk(root)
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of durable marks."""
    (tmp_path / "runs").mkdir(mode=0o700)
    monkeypatch.setattr(run_files, "directory", lambda: tmp_path / "runs")


@pytest.mark.parametrize(
    ("trouble", "message"), [("fill", "No space left on device"), ("forbid", "Read-only file system")]
)
@pytest.mark.parametrize("when", ["rows", "log"])
def test_a_batch_that_cannot_be_written_is_written_once_after_the_repair(
    query: Query,
    created: Path,
    disk: Disk,
    marks: None,
    monkeypatch: pytest.MonkeyPatch,
    trouble: str,
    message: str,
    when: str,
) -> None:
    table = disk.root / "table"
    subprocess.run(["cp", "-r", str(created), str(table)], check=True)
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    real, strike = NativeWriter._files, getattr(disk, trouble)

    def files(self: NativeWriter, rows: Any) -> list[Any]:
        found = real(self, rows)
        strike()
        return found

    with monkeypatch.context() as patch:
        if when == "log":
            patch.setattr(NativeWriter, "_files", files)
        else:
            strike()
        for _ in range(2):
            with pytest.raises(Exception, match=message):
                query.run(sink, 1, offset(1, one(10, 20)))
    assert run_files.durable_mark("s1").seq == 0, "the batch must not be reported as durable"
    assert len(commits(table)) == 2 and next_offsets(table) == {("orders", 0): 10}
    disk.mend()
    query.run(sink, 1, offset(1, one(10, 20)))
    query.run(query.sink(table), 2, offset(2, one(20, 30)))
    assert rows(table) == records(0, 30)
    assert run_files.durable_mark("s1").seq == 2


@pytest.mark.parametrize("place", ["table", "log", "checkpoint"])
def test_a_file_in_place_of_a_folder_is_reported_by_name_and_changes_nothing(
    query: Query, table: Path, tmp_path: Path, place: str
) -> None:
    """To the sink this looks like a missing permission; tests that run as root have every permission."""
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    query.plan(1, offset(1, one(10, 20)))
    folder = {"table": table, "log": table / "_delta_log", "checkpoint": query.root / "offsets"}[place]
    folder.rename(tmp_path / "away")
    folder.write_text("a file")
    message = "there is no .*/offsets/1" if place == "checkpoint" else "/table.*Not a directory"
    with pytest.raises(Exception, match=f"(?s){message}"):
        sink(query.rows(offset(1, one(10, 20))), 1)
    folder.unlink()
    (tmp_path / "away").rename(folder)
    assert len(commits(table)) == 2 and next_offsets(table) == {("orders", 0): 10}
    query.run(sink, 1, offset(1, one(10, 20)))
    assert rows(table) == records(0, 20)
