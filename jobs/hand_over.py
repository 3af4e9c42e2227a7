"""Hand a consumer group over between an ordinary consumer application and a Spark job, without a pause.

Runs in: an operator's shell. Deliberately absent: starting the Spark job (``group_to_delta.py``, or your own) and
everything that knows this package: what it uses is Kafka's admin API, and a signal to a process.

::

    python jobs/hand_over.py --bootstrap-servers kafka:9092 --group etl --to spark-group --stop 4711

Both are members of one group, so each partition has one reader at any time and the next begins where the last one
committed. The steps: start the newcomer with the same group id; wait until it has partitions (``--to`` is how its
members' client ids begin) and commits what it read from them, since a Spark job's first batch takes its time; end the
other in order, so that it commits and leaves (``--stop`` is its process id, which gets SIGTERM); wait until the
newcomer has all. The other way round is the same with the names exchanged.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

LOOK_S = 0.1
"""Pause between two looks at the group."""
ANSWER_S = 10.0
LIBRARY_S = 3600.0
"""The client library's own timeout, out of reach: an answer that comes after it ends the process."""


@dataclass(frozen=True)
class Shares:
    """Who has how many partitions of the group."""

    state: str
    partitions: tuple[TopicPartition, ...]
    others: int
    members: int

    @property
    def newcomer(self) -> int:
        return len(self.partitions)


def main(
    bootstrap_servers: Annotated[str, typer.Option(help="Brokers to ask first: host:port,…")],
    group: Annotated[str, typer.Option(help="The group that both are members of.")],
    to: Annotated[str, typer.Option(help="How the newcomer's client ids begin; spark-group for the Spark job.")],
    stop: Annotated[int | None, typer.Option(help="Process to end (SIGTERM) once the newcomer has partitions.")] = None,
    wait_s: Annotated[float, typer.Option(help="Bound of each wait.")] = 120.0,
) -> None:
    """Wait for the newcomer, end the other in order, wait until the newcomer has everything."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    offsets = Offsets(bootstrap_servers, group)
    started_s = time.monotonic()
    both = _wait(admin, group, to, lambda now: now.newcomer > 0, wait_s, f"partitions at {to}…")
    _say(started_s, f"{to}… has {both.newcomer} partitions, others have {both.others}")
    _wait(admin, group, to, lambda now: offsets.moved(now.partitions), wait_s, f"commit of {to}…")
    _say(started_s, f"{to}… commits what it reads")
    if stop is not None:
        os.kill(stop, signal.SIGTERM)
        _say(started_s, f"process {stop} was asked to end")
    else:
        _say(started_s, "end the other application now, in order (it must commit and leave)")
    done = _wait(admin, group, to, lambda now: now.members > 0 and not now.others, wait_s, "all partitions there")
    _say(started_s, f"{to}… has all {done.newcomer} partitions; the group is {done.state}")


class Offsets:
    """What the group has committed, asked through a consumer that never joins it."""

    def __init__(self, servers: str, group: str) -> None:
        self._consumer = Consumer({"bootstrap.servers": servers, "group.id": group})
        self._before: dict[TopicPartition, int] = {}

    def moved(self, partitions: Sequence[TopicPartition]) -> bool:
        """Whether one of them was committed since it was first asked about, or none has anything to read."""
        try:
            now = self._consumer.committed(list(partitions), timeout=ANSWER_S)
            behind = [tp for tp in now if tp.offset < self._consumer.get_watermark_offsets(tp, timeout=ANSWER_S)[1]]
        except KafkaException:
            return False
        return not behind or any(tp.offset > self._before.setdefault(tp, tp.offset) for tp in now)


def shares(admin: AdminClient, group: str, to: str) -> Shares | None:
    """Ask the group; None while it cannot answer."""
    try:
        found = admin.describe_consumer_groups([group], request_timeout=LIBRARY_S)[group].result(ANSWER_S)
    except (KafkaException, TimeoutError):
        return None
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
    while True:
        now = shares(admin, group, to)
        if now is not None and now.state == "stable" and holds(now):
            return now
        if time.monotonic() > deadline_s:
            typer.echo(f"no {what} within {wait_s:.0f} s; the group: {now}", err=True)
            raise typer.Exit(1)
        pause.wait(LOOK_S)


def _say(started_s: float, text: str) -> None:
    typer.echo(f"{time.monotonic() - started_s:6.1f} s  {text}")


if __name__ == "__main__":
    typer.run(main)
