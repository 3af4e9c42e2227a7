"""What a stream reader with many agents pays for its control channel, and how long tasks wait for their pieces.

``python -m tests.bench channel [--agents N ...] [--batches N]``

The real server and claims in this process; the agents are played by two others over loopback sockets. Each agent has 10
slots with 20 partitions each and starts 20 tasks a batch, each of which claims its piece and says when it ended. First
as fast as a driver of Spark starts tasks, then all agents in the same instant. ``late`` is how late timers of the
players were, at p99: on a machine that others keep busy, claims are late by as much. The last row has strangers beside
the agents: half-open and slow connections, garbage, and frames that say that they are too long.
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

from spark_group_source.agents.channel.client import Client
from spark_group_source.agents.channel.codec import Codec
from spark_group_source.agents.channel.handshake import Secret
from spark_group_source.agents.channel.server import Limits, Peer, Server
from spark_group_source.agents.control_server import set_aside
from spark_group_source.agents.task_messages import CLAIM_MESSAGES, Claim, ClaimGranted, ClaimRefused, TaskEnded
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.claims import Claims, Piece, Plan
from spark_group_source.protocol.offsets import StreamOffset

AGENTS = (5, 50, 500)
SLOTS_EACH, PARTITIONS_EACH, TASKS_EACH = 10, 200, 20
RECORDS = 5_000
"""Of each partition: ten partitions are worth a task."""
TASKS_PER_S = 2_000
"""The most that Spark's driver starts; small clusters are played as fast as this for each of their agents' share."""
PLAYERS = 2
PLAYER_S_MAX = 300
"""How long a process that plays agents, or strangers, may live."""
STRANGERS, STRANGERS_PER_S = 200, 200
"""Connections that stay half open, and further ones a second that send what they should not."""
P99_MS_MAX, CORES_MAX = 50.0, 0.5
"""What the project promises, for 500 agents on 2 cores that also play them."""
CODEC = Codec(CLAIM_MESSAGES)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="channel")
    parser.add_argument("--agents", type=int, nargs="*", default=AGENTS)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--play", choices=["agents", "strangers"], help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.play:
        signal.alarm(PLAYER_S_MAX)
        (_play if chosen.play == "agents" else _disturb)(json.loads(sys.stdin.readline()))
        return 0
    table = Table(title="claims over the control channel: as Spark starts tasks | all agents at once")
    missed = []
    for agents, disturbed in [*((agents, False) for agents in chosen.agents), (max(chosen.agents), True)]:
        found = Coordinator(agents, disturbed=disturbed).run(chosen.batches)
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
    """What one size costs. ``cells``: all of it, by column. Times of claims are those of whoever asked."""

    p99_ms: float
    cores: float
    cells: dict[str, str]


class Coordinator:
    """The stream reader's part: claims behind a server, and the players that it starts."""

    def __init__(self, agents: int, *, disturbed: bool = False) -> None:
        self._agents, self._disturbed = agents, disturbed
        self._claims = Claims("bench")
        self._died: list[BaseException] = []
        self._secret = Secret.new()
        self._server = Server(
            CODEC,
            self._secret,
            on_message=self._hear,
            on_closed=lambda *_: None,
            died=self._died.append,
            hosts=["127.0.0.1"],
            limits=Limits(),
        )

    def run(self, batches: int) -> Found:
        me = psutil.Process()
        memory = me.memory_info().rss
        port = self._server.start()
        players = [self._player(port, number) for number in range(PLAYERS)]
        strangers = [_started("strangers", {"port": port})] if self._disturbed else []
        try:
            for player in (*players, *strangers):
                _line(player)
            cut_ms: list[float] = []
            steady: list[float] = []
            late: list[float] = []
            cpu_s = took_s = 0.0
            for seq in range(batches):
                plan, spent_ms = self._plan(seq)
                cut_ms.append(spent_ms)
                cpu_before_s, before_s = time.process_time(), time.monotonic()
                for part in self._both(players, plan, len(plan.pieces), self._per_s()):
                    steady += part["took_ms"]
                    late += part["late_ms"]
                cpu_s += time.process_time() - cpu_before_s
                took_s += time.monotonic() - before_s
            threads = me.num_threads()
            burst: list[float] = []
            for seq in range(batches):
                plan, _ = self._plan(batches + seq)
                for part in self._both(players, plan, self._agents, 0):
                    burst += part["took_ms"]
            memory = me.memory_info().rss - memory
            refused = self._server.refused
        finally:
            for player in (*players, *strangers):
                player.kill()
                player.wait()
            assert self._server.stop()
        assert not self._died
        counts = {"agents": 1, "slots": SLOTS_EACH, "partitions": PARTITIONS_EACH, "tasks": TASKS_EACH}
        cells = {name: f"{self._agents * each:,}" for name, each in counts.items()}
        cells["agents"] += ", strangers" * self._disturbed
        p99_ms, cores = _at(steady, 0.99), cpu_s / took_s
        cells |= {
            "cut": f"{min(cut_ms):.0f} ms",
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
        self, players: "list[subprocess.Popen[str]]", plan: Plan, tasks: int, per_s: float
    ) -> list[dict[str, list[float]]]:
        order = {"plan": plan.name, "tasks": tasks, "per_s": per_s, "agents": self._agents}
        for number, player in enumerate(players):
            _tell(player, {**order, "from": number})
        return [_line(player) for player in players]

    def _hear(self, peer: Peer, message: Any, asks: int) -> None:
        match message:
            case Claim():
                piece = self._claims.claim(message.plan, message.task, message.executor)
                if isinstance(piece, Piece):
                    peer.send(
                        ClaimGranted(ranges=piece.ranges, topic_ids={"orders": "a-topic-id-of-kafka-22"}), answers=asks
                    )
                else:
                    peer.send(ClaimRefused(reason=piece.reason), answers=asks)
            case TaskEnded():
                self._claims.ended(message.plan, message.task, message.executor)

    def _plan(self, seq: int) -> tuple[Plan, float]:
        count = self._agents * PARTITIONS_EACH
        at = seq * RECORDS
        ranges = {TopicPartition("orders", p): (at, at + RECORDS) for p in range(count)}
        lent = {tp: str(tp.partition % self._agents) for tp in ranges}
        offset = StreamOffset(group="bench", stream="9f2c", seq=seq, ranges=ranges)
        started = time.process_time()
        plan = self._claims.cut(offset, lent)
        spent_ms = (time.process_time() - started) * 1000
        set_aside()
        return plan, spent_ms

    def _player(self, port: int, number: int) -> "subprocess.Popen[str]":
        agents = list(range(number, self._agents, PLAYERS))
        return _started("agents", {"port": port, "secret": self._secret.reveal(), "agents": agents})


def _started(role: str, given: dict[str, Any]) -> "subprocess.Popen[str]":
    player = subprocess.Popen(
        [sys.executable, "-m", "tests.bench", "channel", "--play", role],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    _tell(player, given)
    return player


def _tell(player: "subprocess.Popen[str]", what: object) -> None:
    assert player.stdin is not None
    player.stdin.write(json.dumps(what) + "\n")
    player.stdin.flush()


def _line(player: "subprocess.Popen[str]") -> Any:
    """What a player says next; one that is silent too long ends by itself, and so does this."""
    assert player.stdout is not None
    while not (line := player.stdout.readline()).startswith("{"):  # the name of the benchmark is a line too
        assert line, "a player ended"
    return json.loads(line)


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


# --- in the processes that play agents and strangers ----------------------------------------------------------------


def _play(given: dict[str, Any]) -> None:
    address, secret = ("127.0.0.1", given["port"]), Secret.revealed(given["secret"])
    agents = {str(executor): Client([address], CODEC, secret, PLAYER_S_MAX) for executor in given["agents"]}
    with ThreadPoolExecutor(len(agents)) as pool:
        print("{}", flush=True)
        for line in sys.stdin:
            order, began_s = json.loads(line), time.monotonic()
            played = [
                pool.submit(_tasks, agents[executor], executor, order, began_s, first=number * PLAYERS + order["from"])
                for number, executor in enumerate(agents)
            ]
            found = [one.result() for one in played]
            print(json.dumps({what: [ms for one in found for ms in one[what]] for what in found[0]}), flush=True)


def _tasks(
    client: Client, executor: str, order: dict[str, Any], began_s: float, *, first: int
) -> dict[str, list[float]]:
    """The tasks of one executor, each at its time: as the driver starts them, one after the other, over all executors.

    Returns:
        Milliseconds: how long each task waited for its piece, and how late it began.
    """
    found: dict[str, list[float]] = {"took_ms": [], "late_ms": []}
    for task in range(first, order["tasks"], order["agents"]):
        if order["per_s"]:
            due_s = began_s + task / order["per_s"]
            if (wait_s := due_s - time.monotonic()) > 0:
                time.sleep(wait_s)
                found["late_ms"].append((time.monotonic() - due_s) * 1000)
        started_s = time.monotonic()
        piece = client.request(Claim(plan=order["plan"], task=task, executor=executor), PLAYER_S_MAX)
        found["took_ms"].append((time.monotonic() - started_s) * 1000)
        assert isinstance(piece, ClaimGranted), piece
        client.send(TaskEnded(plan=order["plan"], task=task, executor=executor))
    return found


def _disturb(given: dict[str, Any]) -> None:
    """Connections of nobody: some say nothing or a byte at a time, the others what they should not."""
    where = ("127.0.0.1", given["port"])
    print("{}", flush=True)
    kept: list[socket.socket] = []
    kinds = (
        os.urandom(2_000),
        struct.pack(">I", 2**31),
        struct.pack(">I", 400) + b"{" * 400,
        b"GET / HTTP/1.1\r\n\r\n",
    )
    for n in range(STRANGERS_PER_S * PLAYER_S_MAX):
        time.sleep(1 / STRANGERS_PER_S)
        each = socket.create_connection(where, timeout=5)
        try:
            each.sendall(kinds[n % len(kinds)] if n % 4 else b"")
            for slow in kept[n % 10 :: 10]:
                slow.send(b"\0")
        except OSError:  # it was closed, as it should be
            pass
        kept.append(each)
        if len(kept) > STRANGERS:
            kept.pop(0).close()
