"""The demo: a real short run, and its checks, which must fail for wrong evidence."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kafka_helpers import await_until

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "jobs" / "demo.py"
DEMO_S = 900
"""Bound on a busy machine; alone the short demo takes about a minute."""


@pytest.fixture
def proof() -> ModuleType:
    import demo_proof

    return demo_proof


@pytest.fixture
def truth(proof: ModuleType) -> Any:
    """Ten orders in two partitions: seven in the table, three processed by the ordinary consumer, all committed."""
    return proof.Evidence(
        produced=10,
        table=[1, 2, 3, 4, 5, 9, 10],
        ordinary=[6, 7, 8],
        ends={0: 6, 1: 4},
        committed={0: 6, 1: 4},
        ledger={0: 6, 1: 4},
        ordinary_last={1: 3},
    )


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def processes_with(directory: Path) -> list[str]:
    """Command lines of living processes that have the directory in them, or in their environment (Linux)."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            mine = str(directory).encode() in path.with_name("environ").read_bytes()
        except OSError:
            continue
        if mine or str(directory) in line:
            lines.append(line)
    return lines


# --- real runs -------------------------------------------------------------------------------------------------------


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.full
@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(DEMO_S + 30)
def test_short_demo_proves_each_order_once_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--seconds", "8", "--rate", "300"]
    env = environment() | {"TMPDIR": str(tmp_path)}

    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEMO_S, env=env, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    for claim in (
        "an ordinary consumer joined",
        "its members moved to the agents of executors",
        "kafka-consumer-groups: member",
        "the ordinary consumer left after",
        "its member rejoined on another agent, no rebalance: job 0-5",
        "kill -9 of the whole job",
        "restarted: the job",
        "the job stopped cleanly",
        "✔ every order arrived",
        "✔ no order arrived twice",
        "✔ Kafka's committed offset = the offset in the table's last commit, on 6 of 6 partitions",
        "✔ the group's lag is 0",
        "PROVEN",
    ):
        assert claim in ended.stdout, ended.stdout
    assert "✘" not in ended.stdout
    assert not list(tmp_path.glob("spark-group-*-*")), "directories were left"
    assert not processes_with(tmp_path)


def _as_in_a_terminal() -> None:
    """Restore the default handler: background processes of a shell ignore Ctrl-C, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(DEMO_S + 30)
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_ctrl_c_stops_everything_the_demo_started(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, str(DEMO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment() | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
        preexec_fn=_as_in_a_terminal,  # noqa: PLW1509 - nothing of it can wait for another thread
    )
    try:
        await_until(lambda: any("group_to_delta" in line for line in processes_with(tmp_path)), 120, what="the job")
        os.killpg(demo.pid, signal.SIGINT)
        shown, _ = demo.communicate(timeout=600)
    finally:
        if demo.poll() is None:
            demo.kill()
            demo.communicate()

    assert demo.returncode == 130, shown
    assert "all processes are stopped" in shown and "Traceback" not in shown
    assert not list(tmp_path.glob("spark-group-*-*"))
    assert not processes_with(tmp_path)


# --- the checks ------------------------------------------------------------------------------------------------------


def test_correct_evidence_passes_the_checks(proof: ModuleType, truth: Any) -> None:
    assert [found.holds for found in proof.check(truth)] == [True] * 4


WRONG_EVIDENCE: dict[str, tuple[dict[str, Any], str]] = {
    "a row is missing": ({"table": [1, 2, 3, 4, 5, 9]}, "1 missing (10)"),
    "a row is there twice": ({"table": [1, 2, 3, 4, 5, 9, 10, 10]}, "1 orders twice (10)"),
    "both have an order": ({"ordinary": [5, 6, 7, 8]}, "1 orders twice (5)"),
    "one twice for one missing": ({"table": [1, 2, 3, 4, 5, 9, 9]}, "1 missing (10)"),
    "a row that was not produced": ({"table": [1, 2, 3, 4, 5, 9, 10, 11]}, "1 never produced (11)"),
    "nothing at all": ({"produced": 0, "table": [], "ordinary": []}, "0 produced"),
    "Kafka is ahead of the table": ({"ledger": {0: 5, 1: 4}}, "partition 0: committed 6, recorded 5"),
    "Kafka is behind the table": ({"committed": {0: 5, 1: 4}}, "partition 0: committed 5, recorded 6"),
    "a partition is not in the table": ({"ledger": {0: 6}, "ordinary_last": {}}, "partition 1: committed 4"),
    "the consumer's commit is not Kafka's": ({"ordinary_last": {1: 5}}, "partition 1: committed 4, recorded 5"),
    "records wait": ({"ends": {0: 7, 1: 4}}, "lag is not zero"),
    "no partitions": ({"ends": {}}, "no partitions"),
}


@pytest.mark.parametrize("case", WRONG_EVIDENCE)
def test_wrong_evidence_fails_the_checks(proof: ModuleType, truth: Any, case: str) -> None:
    import demo_screen
    from rich.console import Console

    changed, message = WRONG_EVIDENCE[case]
    screen = demo_screen.Screen(demo_screen.View(2), subtitle="")
    paper = io.StringIO()
    screen.console = Console(file=paper, width=200)

    wrong = replace(truth, **changed)
    assert screen.final(wrong, proof.check(wrong)) is False
    shown = paper.getvalue()
    assert message in shown and "NOT PROVEN" in shown


def test_partition_last_read_by_the_plain_consumer_is_compared_with_its_commits(proof: ModuleType, truth: Any) -> None:
    checks = proof.check(replace(truth, ledger={0: 6, 1: 1}, ordinary_last={1: 4}))
    assert all(found.holds for found in checks)
    assert "on 1 of 1 partitions" in checks[2].text


def test_delta_log_is_read_with_removals_and_ledger(proof: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "_delta_log"
    log.mkdir()
    add = '{{"add": {{"path": "{}", "stats": "{{\\"numRecords\\": {}}}"}}}}\n'
    note = '{{"commitInfo": {{"userMetadata": {}}}}}\n'

    def ledger(**noted: Any) -> str:
        return note.format(json.dumps(json.dumps([{"group": "g", "ledger": noted}])))

    table = proof.DeltaLog(tmp_path)
    table.refresh()
    assert (table.rows, table.ledger("g", "t")) == (0, {})
    (log / f"{0:020d}.json").write_text(add.format("a%20b", 5) + ledger(topics={"t": {"offsets": "0,5"}}))
    table.refresh()
    assert (table.rows, table.ledger("g", "t")) == (5, {0: 5})
    changed = ledger(topics={"t": {"offsets": "0,7"}})
    (log / f"{1:020d}.json").write_text(add.format("c", 7) + '{"remove": {"path": "a%20b"}}\n' + changed)
    table.refresh()
    assert (table.rows, table.ledger("g", "t")) == (7, {0: 7})
    assert table.ledger("other", "t") == {}
