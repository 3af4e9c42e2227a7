"""Queries of ``format("kafka-group")`` for tests: in Spark (:class:`Job`), or without Spark (:class:`Engine`).

Runs in: tests. Deliberately absent: fixtures (``conftest``) and assertions about rows. State is read from Kafka's admin
API, plain consumers and the checkpoint's files.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest
from confluent_kafka import Consumer
from kafka_helpers import Record, await_progress
from reading import read as read_batches

from spark_group_source.kafka.environment import Environment
from spark_group_source.options.table import Options
from spark_group_source.protocol.offsets import StreamOffset, parse
from spark_group_source.runtime.coordinator import Coordinator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

PROTOCOLS = ("classic", "consumer")
END_S = 600
"""Time limit of a run that should end by itself."""
LOOK_S = 1
MEMBER_HOST = os.environ.get("MEMBER_HOST", "driver")
"""``MEMBER_HOST=executor make test``: sets memberHost for every query whose test does not. The default is driver,
because agents start after seconds, and most queries of tests are finished by then."""

LONG_SESSION_MS = 60_000
"""The session timeout of members that a test neither kills nor freezes, so that a stalled machine does not end their
sessions: the longest one that the brokers accept for KIP-848."""

MATRIX_KAFKA = os.environ.get("MATRIX_KAFKA", "")
"""The brokers' version in `make matrix`; empty: the usual one."""
HAS_CONSUMER_PROTOCOL = not MATRIX_KAFKA.startswith("3.")
"""Kafka 3.7 to 3.9 have it as a preview only."""

Sink = Callable[["DataFrame", int], None]


class SourceRow(NamedTuple):
    """The columns of a row that tests check."""

    topic: str
    partition: int
    offset: int
    value: str | None


def options_of(servers: str, group: str, *, protocol: str = "classic", **more: object) -> dict[str, str]:
    """Options with short timeouts. Names in ``more`` have ``__`` for the dot: ``kafka__isolation__level``."""
    if protocol == "consumer" and not HAS_CONSUMER_PROTOCOL:
        pytest.skip(f"Kafka {MATRIX_KAFKA} has no group.protocol=consumer")
    quick = {"kafka.session.timeout.ms": "6000", "kafka.heartbeat.interval.ms": "500"} if protocol == "classic" else {}
    quick["memberHost"] = MEMBER_HOST
    return {
        "kafka.bootstrap.servers": servers,
        "kafka.group.id": group,
        "kafka.group.protocol": protocol,
        "kafka.topic.metadata.refresh.interval.ms": "500",
        "fetchOffset.retryIntervalMs": "200",
        **quick,
        **named(more),
    }


def named(more: Mapping[str, object]) -> dict[str, str]:
    """Options from keyword arguments: ``__`` becomes a dot, and Python's True becomes true."""
    texts = {True: "true", False: "false"}
    return {
        name.replace("__", "."): texts[value] if isinstance(value, bool) else str(value) for name, value in more.items()
    }


# --- in Spark -------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A query with its checkpoint, for any number of runs; ``batches`` has the rows of every batch."""

    spark: "SparkSession"
    options: dict[str, str]
    checkpoint: Path
    batches: list[tuple[int, list[SourceRow]]] = field(default_factory=list)
    on_batch: Callable[[int], None] = lambda number: None
    """Called in every batch after its rows were read."""

    def load(self, **more: object) -> "DataFrame":
        return self.spark.readStream.format("kafka-group").options(**{**self.options, **named(more)}).load()

    def start(self, **trigger: Any) -> "StreamingQuery":
        """Start the query; ``trigger`` as in ``writeStream.trigger``."""
        return self.start_frame(self.load(), **trigger)

    def start_frame(self, frame: "DataFrame", **trigger: Any) -> "StreamingQuery":
        return self.start_into(self._keep, frame, **trigger)

    def start_into(self, sink: Sink, frame: "DataFrame | None" = None, **trigger: Any) -> "StreamingQuery":
        """Start the query with another sink; its rows are not in ``batches``."""
        loaded = self.load() if frame is None else frame
        writer = loaded.writeStream.foreachBatch(sink).option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(**trigger) if trigger else writer).start()

    @contextlib.contextmanager
    def running(self, **trigger: Any) -> Iterator["StreamingQuery"]:
        query = self.start(**trigger)
        try:
            yield query
        finally:
            query.stop()

    def run(self, **more: object) -> list[SourceRow]:
        """Run with AvailableNow until the end; return the rows of this run, or raise the query's error."""
        before = len(self.batches)
        self.run_into(self._keep, self.load(**more), availableNow=True)
        return rows_of(self.batches[before:])

    def run_into(self, sink: Sink, frame: "DataFrame | None" = None, **trigger: Any) -> None:
        """Run until the end with another sink; raise the query's error."""
        query = self.start_into(sink, frame, **trigger)
        try:
            await_progress(
                lambda: query.awaitTermination(LOOK_S),
                lambda: (query.status, last_progress(query)),
                what="the end of the run",
            )
        finally:
            query.stop()

    @property
    def rows(self) -> list[SourceRow]:
        return rows_of(self.batches)

    @property
    def values(self) -> list[str]:
        return values_of(self.rows)

    def _keep(self, frame: "DataFrame", number: int) -> None:
        found = frame.selectExpr("topic", "partition", "offset", "string(value) value").collect()
        self.batches.append((number, [SourceRow(*row) for row in found]))
        self.on_batch(number)


def rows_of(batches: Sequence[tuple[int, list[SourceRow]]]) -> list[SourceRow]:
    return [row for _, rows in batches for row in rows]


def values_of(rows: Sequence[SourceRow]) -> list[str]:
    """The values, sorted, because the order of partitions is undefined."""
    return sorted(str(row.value) for row in rows)


def numbered(first: int, last: int, partitions: int = 1, *, at_ms: int | None = None) -> list[Record]:
    """Records with the numbers from ``first`` to ``last`` as values, distributed round-robin to the partitions."""
    return [Record(str(n).encode(), partition=n % partitions, timestamp_ms=at_ms) for n in range(first, last + 1)]


def texts(first: int, last: int) -> list[str]:
    """The values of :func:`numbered`, in the order of :func:`values_of`."""
    return sorted(str(n) for n in range(first, last + 1))


# --- checkpoints ----------------------------------------------------------------------------------------------------


def planned(checkpoint: Path) -> dict[int, StreamOffset]:
    """The planned offset of each batch in the checkpoint."""
    found = {}
    for path in (checkpoint / "offsets").glob("[0-9]*"):
        found[int(path.name)] = parse(path.read_text().splitlines()[2])
    return dict(sorted(found.items()))


def remove_entry(checkpoint: Path, log: str, number: int) -> None:
    """Remove a file of ``offsets`` or ``commits``, as if the driver had died before writing it."""
    (checkpoint / log / str(number)).unlink()
    (checkpoint / log / f".{number}.crc").unlink(missing_ok=True)


# --- without Spark ---------------------------------------------------------------------------------------------------


class Engine:
    """Calls a coordinator like Spark does, one call at a time; every offset is converted to JSON and back.

    Args:
        options: as a user writes them.
        log: the offsets planned by earlier runs, as in a checkpoint; all are durable.
        environment: replaces the real clock and clients.
    """

    def __init__(
        self, options: Mapping[str, str], log: Sequence[str] = (), *, environment: Environment | None = None
    ) -> None:
        self.options = Options.parse(dict(options))
        self.coordinator = Coordinator(self.options, environment=environment)
        self.log = list(log)
        self.rows: list[SourceRow] = []

    @property
    def start(self) -> StreamOffset:
        return parse(self.log[-1]) if self.log else StreamOffset.initial(self.options.group_id)

    def run(self) -> None:
        """Trigger until there are no records to read."""
        while self.step() is not None:
            pass

    def plan(self) -> StreamOffset | None:
        """Call ``latestOffset`` with the last durable offset; None if there are no records to read."""
        start = self.start
        end = self.coordinator.latest(start)
        return None if end is start else parse(end.to_json())

    def read(self, end: StreamOffset) -> list[SourceRow]:
        batches = read_batches(
            self.options.consumer_settings(),
            end.batch(),
            topic_ids=end.topic_ids,
            leader_epochs=end.leader_epochs,
            fail_on_data_loss=self.options.fail_on_data_loss,
            progress_timeout_s=20,
        )
        return [
            SourceRow(row["topic"], row["partition"], row["offset"], row["value"].decode())
            for batch in batches
            for row in batch.to_pylist()
        ]

    def step(self) -> StreamOffset | None:
        """Run one trigger: plan and read a batch, and mark it durable."""
        end = self.plan()
        if end is not None:
            self.rows += self.read(end)
            self.log.append(end.to_json())
        return end

    def close(self) -> None:
        self.coordinator.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class QueryWithoutSpark:
    """A query for any number of runs, like :class:`Job` but without Spark: each run is an :class:`Engine`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        self.log: list[str] = []
        """The checkpoint: the offset of each batch; all are durable."""
        self.rows: list[SourceRow] = []

    @contextlib.contextmanager
    def running(self, **more: object) -> Iterator[Engine]:
        with Engine({**self.options, **named(more)}, self.log) as engine:
            yield engine
        self.log = engine.log
        self.rows += engine.rows

    def run(self, **more: object) -> list[str]:
        """Run with AvailableNow until the end; return the values that were read."""
        with self.running(**more) as engine:
            engine.coordinator.prepare_available_now()
            engine.run()
        return values_of(engine.rows)


# --- other processes ------------------------------------------------------------------------------------------------


class OtherMember:
    """An ordinary consumer in the same group that polls in its own thread; it never commits."""

    def __init__(self, servers: str, group: str, topics: Sequence[str], protocol: str = "classic") -> None:
        quick = {"session.timeout.ms": LONG_SESSION_MS, "heartbeat.interval.ms": 500} if protocol == "classic" else {}
        self.partitions: set[tuple[str, int]] = set()
        self.rebalances = 0
        self.values: list[str] = []
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": group,
                "group.protocol": protocol,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "log_level": 3,
                **quick,
            }
        )
        self._consumer.subscribe(list(topics), on_assign=self._assigned, on_revoke=self._revoked)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stopping.is_set():
            message = self._consumer.poll(0.05)
            if message is not None and message.error() is None:
                self.values.append((message.value() or b"").decode())
        self._consumer.close()

    def _assigned(self, consumer: Any, partitions: list[Any]) -> None:
        self.partitions |= {(p.topic, p.partition) for p in partitions}
        self.rebalances += 1

    def _revoked(self, consumer: Any, partitions: list[Any]) -> None:
        self.partitions -= {(p.topic, p.partition) for p in partitions}
        self.rebalances += 1

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(300)

    def __enter__(self) -> "OtherMember":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def descendants(pid: int) -> dict[int, str]:
    """Descendants of a process, with their command lines; none of a process that has ended."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                found[child.pid] = " ".join(child.cmdline())
    return found


def readers_below(pid: int | None = None) -> list[int]:
    """The stream readers of a driver (default: this process), one per running query."""
    return [
        child for child, args in descendants(pid or os.getpid()).items() if "python_streaming_source_runner" in args
    ]


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def last_progress(query: "StreamingQuery") -> dict[str, Any]:
    progress = query.lastProgress
    return json.loads(progress.json) if progress is not None else {}
