"""Hand a consumer group over between an ordinary consumer application and a Spark job, without a pause.

Runs in: an operator's shell. Deliberately absent: starting the Spark job (``group_to_delta.py``, or your own), and
imports of this package: it uses Kafka's admin API and a signal.

::

    python jobs/hand_over.py --bootstrap-servers kafka:9092 --group etl --to spark-group --stop 4711

Both are members of one group, so each partition has one reader at any time, and the next reader starts at the committed
offset. Start the new application with the same group id, then this program. It waits until the new application owns
partitions (``--to`` is the prefix of its members' client ids) and commits offsets of them, because the first batch of a
Spark job takes some time. It stops the old application with SIGTERM (``--stop`` is its process id), so that it commits
and leaves, and waits until the new one owns all partitions. The other direction is the same with the names exchanged.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

LOOK_S = 0.1
"""Polling interval for the group."""
ANSWER_S = 10.0
LIBRARY_S = 3600.0
"""Timeout of the client library, never reached: a response after it crashes the process."""


@dataclass(frozen=True)
class Shares:
    """Number of partitions of the new application and of the others."""

    state: str
    partitions: tuple[TopicPartition, ...]
    others: int
    members: int

    @property
    def newcomer(self) -> int:
        return len(self.partitions)


def main(
    bootstrap_servers: Annotated[str, typer.Option(help="Brokers to connect to first: host:port,…")],
    group: Annotated[str, typer.Option(help="The group of both applications.")],
    to: Annotated[str, typer.Option(help="Prefix of the new application's client ids; spark-group for the Spark job.")],
    stop: Annotated[
        int | None, typer.Option(min=1, help="Process to stop (SIGTERM) when the new application commits.")
    ] = None,
    wait_s: Annotated[float, typer.Option(help="Bound of each wait.")] = 120.0,
    config: Annotated[
        Path | None,
        typer.Option(
            "--command-config", exists=True, dir_okay=False, help="File of name=value lines with librdkafka's settings."
        ),
    ] = None,
) -> None:
    """Wait for the new application, stop the old one, wait until the new one owns all partitions."""
    settings: dict[str, Any] = {"bootstrap.servers": bootstrap_servers}
    settings |= {} if config is None else _settings_in(config)
    old = None if stop is None else Process(stop)
    try:
        admin = AdminClient(settings)
        offsets = Offsets(settings, group)
    except KafkaException as exc:
        raise typer.BadParameter(f"--command-config {config}: {exc.args[0].str()}") from None
    started_s = time.monotonic()
    both = _wait(admin, group, to, lambda now: now.newcomer > 0, wait_s, f"partitions at {to}…")
    _say(started_s, f"{to}… has {both.newcomer} partitions, others have {both.others}")
    _wait(admin, group, to, lambda now: offsets.moved(now.partitions), wait_s, f"commit of {to}…")
    _say(started_s, f"{to}… commits what it reads")
    if old is not None:
        _say(started_s, f"sent SIGTERM to process {stop}" if old.terminate() else f"process {stop} has ended already")
    else:
        _say(started_s, "stop the other application now; it must commit and leave the group")
    done = _wait(admin, group, to, lambda now: now.members > 0 and not now.others, wait_s, "all partitions there")
    _say(started_s, f"{to}… has all {done.newcomer} partitions; the group is {done.state}")


def _settings_in(path: Path) -> dict[str, str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines())
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}


class Process:
    """The process to stop. Before anything waits, it must exist and belong to this user.

    On Linux a file descriptor stands for it, because its number may belong to another process after the waits.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._fd = pid, None
        try:
            os.kill(pid, 0)
        except OSError as exc:
            raise typer.BadParameter(f"--stop {pid}: {exc.strerror}") from None
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # some sandboxes lack the call
                self._fd = os.pidfd_open(pid)

    def terminate(self) -> bool:
        """Send SIGTERM. Returns False if the process has ended already."""
        try:
            if self._fd is None:
                os.kill(self._pid, signal.SIGTERM)
            else:
                signal.pidfd_send_signal(self._fd, signal.SIGTERM)
        except ProcessLookupError:
            return False
        return True


class Offsets:
    """The group's committed offsets, read through a consumer that never joins it."""

    def __init__(self, settings: Mapping[str, Any], group: str) -> None:
        self._consumer = Consumer({**settings, "group.id": group})
        self._before: dict[TopicPartition, int] = {}

    def moved(self, partitions: Sequence[TopicPartition]) -> bool:
        """Whether an offset was committed since the first call, or no partition has records to read. Raises
        KafkaException if that cannot be read now. Without partitions the new application reads nothing."""
        if not partitions:
            return False
        now = self._consumer.committed(list(partitions), timeout=ANSWER_S)
        behind = [tp for tp in now if tp.offset < self._consumer.get_watermark_offsets(tp, timeout=ANSWER_S)[1]]
        return not behind or any(tp.offset > self._before.setdefault(tp, tp.offset) for tp in now)


def shares(admin: AdminClient, group: str, to: str) -> Shares:
    """Describe the group. Raises KafkaException or TimeoutError if it is not answered."""
    found = admin.describe_consumer_groups([group], request_timeout=LIBRARY_S)[group].result(ANSWER_S)
    parts = [(m.client_id.startswith(to), m.assignment.topic_partitions) for m in found.members]
    return Shares(
        state=found.state.name.lower(),
        partitions=tuple(TopicPartition(tp.topic, tp.partition) for is_new, tps in parts if is_new for tp in tps),
        others=sum(len(tps) for is_new, tps in parts if not is_new),
        members=sum(is_new for is_new, _ in parts),
    )


def _wait(admin: AdminClient, group: str, to: str, holds: Callable[[Shares], bool], wait_s: float, what: str) -> Shares:
    pause = threading.Event()
    deadline_s = time.monotonic() + wait_s
    now, error = None, ""
    while True:
        try:
            now = shares(admin, group, to)
            if now.state == "stable" and holds(now):
                return now
            error = ""
        except KafkaException as exc:
            error = f"; the last request failed: {exc.args[0].str()}"
        except TimeoutError:
            error = f"; the last request was not answered within {ANSWER_S:.0f} s"
        if time.monotonic() > deadline_s:
            typer.echo(f"no {what} within {wait_s:.0f} s; the group: {now or 'unknown'}{error}", err=True)
            raise typer.Exit(1)
        pause.wait(LOOK_S)


def _say(started_s: float, text: str) -> None:
    typer.echo(f"{time.monotonic() - started_s:6.1f} s  {text}")


# Older releases of typer show the values of variables in a traceback, and the settings have passwords.
app = typer.Typer(pretty_exceptions_show_locals=False)
app.command()(main)

if __name__ == "__main__":
    app()
