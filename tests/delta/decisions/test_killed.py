"""A driver killed just before and after the commit of a batch. ``tests/crash`` kills whole drivers at any moment."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sink_helpers import Query, actions, commits, next_offsets, one, parquet_files, records, rows
from sink_source import offset

CHILD_S = 600
"""Bound of the child process, in seconds; it needs three."""

CHILD = """
import sys, threading
from pathlib import Path
from kit.frames import Session
from sink_source import offset
from sink_helpers import Query, one
from spark_group_source.delta.native_writer import NativeWriter

root, table, moment = sys.argv[1:]
real = getattr(NativeWriter, moment)

def stop(self, *args, **kwargs):
    real(self, *args, **kwargs)
    print("REACHED", flush=True)
    threading.Event().wait()

setattr(NativeWriter, moment, stop)
query = Query(Session(), Path(root), "q")
query.run(query.sink(table), 1, offset(1, one(10, 20)))
"""


@pytest.mark.parametrize(("moment", "committed"), [("_files", False), ("commit", True)])
def test_a_driver_killed_before_or_after_the_commit_loses_and_doubles_no_record(
    query: Query, table: Path, tmp_path: Path, moment: str, committed: bool
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    argv = [sys.executable, "-c", CHILD, str(tmp_path / "child"), str(table), moment]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as child:
        watchdog = threading.Timer(CHILD_S, child.kill)
        watchdog.start()
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == "REACHED", "the child did not reach the commit"
        finally:
            watchdog.cancel()
            child.send_signal(signal.SIGKILL)
    assert rows(table) == records(0, 20 if committed else 10)
    listed = {action["path"] for commit in commits(table) for action in actions(commit, "add")}
    assert (parquet_files(table) == listed) == committed, "files that are not committed are not part of the table"
    for n in (1, 2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    assert rows(table) == records(0, 30)
    assert next_offsets(table) == {("orders", 0): 30}
    assert [actions(commit, "txn")[0]["version"] for commit in commits(table)[1:]] == [1, 2, 3]
