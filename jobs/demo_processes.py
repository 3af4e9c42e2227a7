"""Processes of the demo besides the broker: the producer of orders, the job, the ordinary consumer.

Runs in: ``demo.py``. Deliberately absent: the order in which things happen (``demo.py``). Each child is the leader of a
process group of its own, and only that group is ever signalled; a child ends with this process, also if that is killed.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from confluent_kafka import KafkaError, Message, Producer

from spark_group_source.local.conf import linked_spark_home

JOBS = Path(__file__).resolve().parent
CONF = JOBS.parent / "conf"
SCHEMA = "order_id BIGINT, customer STRING, item STRING, quantity INT, amount DOUBLE, ordered_at TIMESTAMP"

STOP_S = 30
"""Bound of a clean stop of a child, which is killed afterwards."""
KILL_S = 10
"""Bound between a kill signal and the end of a process group."""
FLUSH_S = 60
"""Bound of the delivery of the last orders."""
TICK_S = 0.02
LOG_TAIL_LINES = 25
PR_SET_PDEATHSIG = 1

ITEMS = {"espresso": 2.4, "flat white": 3.8, "croissant": 2.9, "bagel": 4.5, "orange juice": 4.2, "beans 1 kg": 24.0}


class Orders:
    """Produces orders at a steady rate, numbered from 1, until :meth:`finish`. ``hold`` pauses it."""

    def __init__(self, bootstrap_servers: str, topic: str, rate: int) -> None:
        self._producer = Producer(
            {"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "linger.ms": 20, "log_level": 0}
        )
        self._topic, self._rate = topic, rate
        self._finish = threading.Event()
        self._thread = threading.Thread(target=self._run, name="orders", daemon=True)
        self._random = random.Random(7)
        self._made = 0
        self.hold = False
        self.acknowledged = 0
        self.error: str | None = None

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> int:
        """Stop producing; returns how many orders there are, each acknowledged.

        Raises:
            RuntimeError: an order was not delivered.
        """
        self._finish.set()
        if self._thread.is_alive():
            self._thread.join(FLUSH_S)
        left = self._producer.flush(FLUSH_S)
        if left or self.error or self.acknowledged != self._made:
            raise RuntimeError(f"{self._made - self.acknowledged} orders were not delivered: {self.error}")
        return self._made

    def _run(self) -> None:
        due, last_s = 0.0, time.monotonic()
        while not self._finish.wait(TICK_S):
            now_s = time.monotonic()
            due += 0.0 if self.hold else (now_s - last_s) * self._rate
            last_s = now_s
            while self._made < int(due):
                self._produce(self._made + 1)
            self._producer.poll(0)

    def _produce(self, number: int) -> None:
        order = self._order(number)
        try:
            self._producer.produce(
                self._topic,
                json.dumps(order).encode(),
                key=str(order["customer"]).encode(),
                on_delivery=self._delivered,
            )
            self._made = number
        except BufferError:  # the producer's queue is full: let it send
            self._producer.poll(0.1)

    def _order(self, number: int) -> dict[str, object]:
        item, quantity = self._random.choice(list(ITEMS)), self._random.randint(1, 4)
        return {
            "order_id": number,
            "customer": f"c{self._random.randint(1, 500):03d}",
            "item": item,
            "quantity": quantity,
            "amount": round(quantity * ITEMS[item], 2),
            "ordered_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is None:
            self.acknowledged += 1
        else:
            self.error = str(error)


class Child:
    """A process that this one started, and all that come from it: ends it in order (SIGTERM), at once (SIGKILL), and
    never any other.

    Args:
        env: the ``TMPDIR`` in it is no other process's, where the child's own ones have sessions of their own.
    """

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        self.stopping = False
        self._mark = b"TMPDIR=%b\0" % env["TMPDIR"].encode() if env.get("TMPDIR") != os.environ.get("TMPDIR") else None
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=dict(env),
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  # one call into libc
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def pids(self) -> list[int]:
        """All its processes; only the first one outside Linux."""
        return [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if self._has(stat)] or (
            [self._process.pid] if self.running else []
        )

    def _has(self, stat: Path) -> bool:
        try:  # after the name in parentheses: state, parent, group, session
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if state == "Z" or int(session) == self._process.pid:
                return state != "Z"
            return self._mark is not None and self._mark in stat.with_name("environ").read_bytes()
        except (OSError, ValueError):
            return False

    def stop(self) -> int:
        """Stop it cleanly; returns the exit status."""
        self.stopping = True
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        return self._process.returncode

    def kill(self) -> None:
        """Send SIGKILL to all processes and wait until they have ended."""
        self.stopping = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # Spark's worker daemons and the agents have groups of their own.
        deadline_s = time.monotonic() + KILL_S
        while time.monotonic() < deadline_s and (left := [pid for pid in self.pids if pid != self._process.pid]):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(TICK_S)
        self._process.wait(KILL_S)

    def tail(self) -> str:
        """The last lines of its log."""
        with contextlib.suppress(OSError), self.log.open(encoding="utf-8", errors="replace") as lines:
            return "".join(deque(lines, LOG_TAIL_LINES))
        return ""


def start_job(directory: Path, options: Mapping[str, str], *, log: str) -> Child:
    """``jobs/group_to_delta.py`` as a user starts it: plain Python, Spark's settings from ``conf/``. Its cluster is a
    master, two workers and two executors on this machine."""
    scratch = directory / "tmp"
    # The second compiler and the parallel collector pay off after minutes, and cost three JVMs a part of their start.
    java = f"-Djava.io.tmpdir={scratch} -XX:-UsePerfData -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    submit = ["--master", "local-cluster[2,1,1024]", "--conf", f"spark.driver.extraJavaOptions={java}"]
    submit += ["--conf", f"spark.executor.extraJavaOptions={java}", "--conf", "spark.executor.memory=512m"]
    env = os.environ | {
        "SPARK_HOME": os.environ.get("SPARK_HOME") or str(linked_spark_home(scratch)),
        "SPARK_CONF_DIR": str(CONF),
        "SPARK_LOCAL_DIRS": str(scratch),
        "TMPDIR": str(scratch),
        "PYSPARK_SUBMIT_ARGS": shlex.join([*submit, "pyspark-shell"]),
        "PYSPARK_PYTHON": sys.executable,
    }
    return Child([*job_command(options)], directory / log, env)


def job_command(options: Mapping[str, str]) -> list[str]:
    command = [sys.executable, str(JOBS / "group_to_delta.py")]
    for name, value in options.items():
        ours = re.fullmatch("[a-z-]+", name)  # else it is one of the source
        command += [f"--{name}", value] if ours else ["--option", f"{name}={value}"]
    return command


def start_consumer(directory: Path, options: Mapping[str, str]) -> Child:
    command = [sys.executable, str(JOBS / "demo_consumer.py")]
    for name, value in options.items():
        command += [f"--{name}", value]
    return Child(command, directory / "consumer.log", os.environ)


def _die_with_parent() -> None:
    """Runs in the child before exec: it gets SIGKILL when the demo is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
