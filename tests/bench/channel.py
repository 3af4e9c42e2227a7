"""The cost of the control channel for a stream reader with many agents, and how long tasks wait for their pieces.

``python -m tests.bench channel [--agents N ...] [--batches N]``

The real server and claims run in this process; two other processes simulate agents over loopback sockets. Each agent
has 10 slots with 20 partitions each and starts 20 tasks a batch, each of which claims its piece and reports its end:
first as fast as Spark's driver starts tasks, then one task of every agent in the same instant. ``late`` is the delay of
the simulators' timers at p99: on a busy machine claims are delayed by as much. The last row adds hostile connections:
half-open and slow ones, garbage, and frames that are too long.
"""

import argparse
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from spark_group_source.agents.channel.client import ChannelClient
from spark_group_source.agents.channel.server import ChannelLimits, ChannelPeer, ChannelServer
from spark_group_source.agents.channel.wire import Secret
from spark_group_source.agents.control_server import freeze_objects
from spark_group_source.agents.messages import CODEC, Claim, ClaimGranted, ClaimRefused, TaskEnded
from spark_group_source.model import Piece, TopicPartition
from spark_group_source.protocol.claims import Claims, PlannedPiece, TaskPlan
from spark_group_source.protocol.offsets import StreamOffset

AGENTS = (5, 50, 500)
SLOTS_EACH, PARTITIONS_EACH, TASKS_EACH = 10, 200, 20
RECORDS = 5_000
"""Of each partition: ten partitions are worth a task."""
TASKS_PER_S = 2_000
"""The most that Spark's driver starts; smaller clusters get a proportional rate."""
SIMULATORS = 2
SIMULATOR_S_MAX = 300
"""Bound of a simulator process."""
STRANGERS, STRANGERS_PER_S = 200, 200
"""Connections that stay half open, and further ones per second that send garbage."""
P99_MS_MAX, CORES_MAX = 50.0, 0.5
"""Targets, for 500 agents on 2 cores that also run the simulators."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="channel")
    parser.add_argument("--agents", type=int, nargs="*", default=AGENTS)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--simulate", choices=["agents", "strangers"], help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.simulate:
        signal.alarm(SIMULATOR_S_MAX)
        (_simulate if chosen.simulate == "agents" else _disturb)(json.loads(sys.stdin.readline()))
        return 0
    table = Table(title="claims over the control channel: as Spark starts tasks | all agents at once")
    missed = []
    for agents, disturbed in [*((agents, False) for agents in chosen.agents), (max(chosen.agents), True)]:
        found = StreamReader(agents, disturbed=disturbed).run(chosen.batches)
        for column in found.cells if not table.columns else ():
            table.add_column(column, justify="right", no_wrap=True)
        table.add_row(*found.cells.values())
        if found.p99_ms > P99_MS_MAX or (found.cores > CORES_MAX and not disturbed):
            missed.append(f"{agents} agents: p99 {found.p99_ms:.0f} ms, {found.cores:.2f} cores")
    console = Console(width=170)
    console.print(table)
    for text in missed:
        console.print(f"[red]missed[/red]: {text}")
    return bool(missed)


class Found(NamedTuple):
    """The results for one size. ``cells``: by column. Times of claims are measured by the simulators."""

    p99_ms: float
    cores: float
    cells: dict[str, str]


class StreamReader:
    """The stream reader's part: claims behind a server, and the simulators that it starts."""

    def __init__(self, agents: int, *, disturbed: bool = False) -> None:
        self._agents, self._disturbed = agents, disturbed
        self._claims = Claims("bench")
        self._died: list[BaseException] = []
        self._secret = Secret.new()
        self._server = ChannelServer(
            CODEC,
            self._secret,
            on_message=self._on_message,
            on_closed=lambda *_: None,
            died=self._died.append,
            hosts=["127.0.0.1"],
            limits=ChannelLimits(),
        )

    def run(self, batches: int) -> Found:
        me = psutil.Process()
        memory = me.memory_info().rss
        port = self._server.start()
        simulators = [self._start_simulator(port, number) for number in range(SIMULATORS)]
        strangers = [_started("strangers", {"port": port})] if self._disturbed else []
        try:
            for simulator in (*simulators, *strangers):
                _line(simulator)
            plan_ms: list[float] = []
            steady: list[float] = []
            late: list[float] = []
            cpu_s = took_s = 0.0
            for seq in range(batches):
                plan, spent_ms = self._plan(seq)
                plan_ms.append(spent_ms)
                cpu_before_s, before_s = time.process_time(), time.monotonic()
                for part in self._both(simulators, plan, len(plan.pieces), self._per_s()):
                    steady += part["took_ms"]
                    late += part["late_ms"]
                cpu_s += time.process_time() - cpu_before_s
                took_s += time.monotonic() - before_s
            threads = me.num_threads()
            burst: list[float] = []
            for seq in range(batches):
                plan, _ = self._plan(batches + seq)
                for part in self._both(simulators, plan, self._agents, 0):
                    burst += part["took_ms"]
            memory = me.memory_info().rss - memory
            refused = self._server.refused
        finally:
            for simulator in (*simulators, *strangers):
                simulator.kill()
                simulator.wait()
            assert self._server.stop()
        assert not self._died
        counts = {"agents": 1, "slots": SLOTS_EACH, "partitions": PARTITIONS_EACH, "tasks": TASKS_EACH}
        cells = {name: f"{self._agents * each:,}" for name, each in counts.items()}
        cells["agents"] += ", strangers" * self._disturbed
        p99_ms, cores = _at(steady, 0.99), cpu_s / took_s
        cells |= {
            "plan": f"{min(plan_ms):.0f} ms",
            "claims/s": f"{len(steady) / took_s:,.0f}",
            "p50": f"{_at(steady, 0.5):.1f} ms",
            "p99": f"{p99_ms:.1f} ms",
            "late": f"{_at(late, 0.99):.1f} ms",
            "cores": f"{cores:.2f}",
            "us each": f"{cpu_s / len(steady) * 1e6:.0f}",
            "| p50": f"| {_at(burst, 0.5):.0f} ms",
            "at once: p99": f"{_at(burst, 0.99):.0f} ms",
            "refused": f"{refused:,}",
            "memory": f"+{memory / 1e6:.0f} MB",
            "threads": str(threads),
        }
        return Found(p99_ms, cores, cells)

    def _per_s(self) -> float:
        return TASKS_PER_S * self._agents / max(AGENTS)

    def _both(
        self, simulators: "list[subprocess.Popen[str]]", plan: TaskPlan, tasks: int, per_s: float
    ) -> list[dict[str, list[float]]]:
        order = {"plan": plan.name, "tasks": tasks, "per_s": per_s, "agents": self._agents}
        for number, simulator in enumerate(simulators):
            _tell(simulator, {**order, "from": number})
        return [_line(simulator) for simulator in simulators]

    def _on_message(self, peer: ChannelPeer, message: Any) -> None:
        match message:
            case Claim():
                answer = self._claims.claim(message.plan, message.task, message.executor)
                if isinstance(answer, PlannedPiece):
                    peer.send(ClaimGranted(Piece(answer.ranges, {"orders": "a-topic-id-of-kafka-22"})))
                else:
                    peer.send(ClaimRefused(reason=answer))
            case TaskEnded():
                self._claims.ended(message.plan, message.task, message.executor)

    def _plan(self, seq: int) -> tuple[TaskPlan, float]:
        count = self._agents * PARTITIONS_EACH
        at = seq * RECORDS
        ranges = {TopicPartition("orders", p): (at, at + RECORDS) for p in range(count)}
        placed = {tp: str(tp.partition % self._agents) for tp in ranges}
        offset = StreamOffset(group="bench", stream="9f2c", seq=seq, ranges=ranges)
        started = time.process_time()
        plan = self._claims.plan_tasks(offset, placed)
        spent_ms = (time.process_time() - started) * 1000
        freeze_objects()
        return plan, spent_ms

    def _start_simulator(self, port: int, number: int) -> "subprocess.Popen[str]":
        agents = list(range(number, self._agents, SIMULATORS))
        return _started("agents", {"port": port, "secret": self._secret.to_hex(), "agents": agents})


def _started(role: str, given: dict[str, Any]) -> "subprocess.Popen[str]":
    simulator = subprocess.Popen(
        [sys.executable, "-m", "tests.bench", "channel", "--simulate", role],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    _tell(simulator, given)
    return simulator


def _tell(simulator: "subprocess.Popen[str]", what: object) -> None:
    assert simulator.stdin is not None
    simulator.stdin.write(json.dumps(what) + "\n")
    simulator.stdin.flush()


def _line(simulator: "subprocess.Popen[str]") -> Any:
    """The next output of a simulator; one that runs too long ends by itself."""
    assert simulator.stdout is not None
    while not (line := simulator.stdout.readline()).startswith("{"):  # skip the benchmark's heading
        assert line, "a simulator ended"
    return json.loads(line)


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


# --- in the simulators ----------------------------------------------------------------------------------------------


def _simulate(given: dict[str, Any]) -> None:
    address, secret = ("127.0.0.1", given["port"]), Secret.from_hex(given["secret"])
    agents = {str(executor): ChannelClient([address], CODEC, secret, SIMULATOR_S_MAX) for executor in given["agents"]}
    with ThreadPoolExecutor(len(agents)) as pool:
        print("{}", flush=True)
        for line in sys.stdin:
            order, began_s = json.loads(line), time.monotonic()
            played = [
                pool.submit(
                    _tasks, agents[executor], executor, order, began_s, first=number * SIMULATORS + order["from"]
                )
                for number, executor in enumerate(agents)
            ]
            found = [one.result() for one in played]
            print(json.dumps({what: [ms for one in found for ms in one[what]] for what in found[0]}), flush=True)


def _tasks(
    client: ChannelClient, executor: str, order: dict[str, Any], began_s: float, *, first: int
) -> dict[str, list[float]]:
    """Run the tasks of one executor at their times: the driver starts tasks in turn, over all executors.

    Returns:
        In ms: how long each task waited for its piece, and how late it started.
    """
    found: dict[str, list[float]] = {"took_ms": [], "late_ms": []}
    for task in range(first, order["tasks"], order["agents"]):
        if order["per_s"]:
            due_s = began_s + task / order["per_s"]
            if (wait_s := due_s - time.monotonic()) > 0:
                time.sleep(wait_s)
                found["late_ms"].append((time.monotonic() - due_s) * 1000)
        started_s = time.monotonic()
        piece = client.request(Claim(plan=order["plan"], task=task, executor=executor), SIMULATOR_S_MAX)
        found["took_ms"].append((time.monotonic() - started_s) * 1000)
        assert isinstance(piece, ClaimGranted), piece
        client.send(TaskEnded(plan=order["plan"], task=task, executor=executor))
    return found


def _disturb(given: dict[str, Any]) -> None:
    """Open hostile connections: some send nothing or single bytes, the others garbage."""
    where = ("127.0.0.1", given["port"])
    print("{}", flush=True)
    kept: list[socket.socket] = []
    kinds = (
        os.urandom(2_000),
        struct.pack(">I", 2**31),
        struct.pack(">I", 400) + b"{" * 400,
        b"GET / HTTP/1.1\r\n\r\n",
    )
    for n in range(STRANGERS_PER_S * SIMULATOR_S_MAX):
        time.sleep(1 / STRANGERS_PER_S)
        each = socket.create_connection(where, timeout=5)
        try:
            each.sendall(kinds[n % len(kinds)] if n % 4 else b"")
            for slow in kept[n % 10 :: 10]:
                slow.send(b"\0")
        except OSError:  # closed by the server, as expected
            pass
        kept.append(each)
        if len(kept) > STRANGERS:
            kept.pop(0).close()
