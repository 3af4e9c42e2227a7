"""Queries of ``format("kafka-group")`` for tests: in Spark (:class:`Job`), or its part played (:class:`Engine`).

Runs in: tests. Deliberately absent: fixtures (``conftest``) and judgements about rows; what is read back comes from
Kafka's admin API, plain consumers and the checkpoint's files.
"""

import contextlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from confluent_kafka import Consumer
from kafka_words import Record, await_progress
from reading import read as read_batches

from spark_group_source.kafka import Environment
from spark_group_source.options.table import Options
from spark_group_source.protocol.offsets import StreamOffset, parse
from spark_group_source.runtime.coordinator import Coordinator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

PROTOCOLS = ("classic", "consumer")
END_S = 300
"""Bound of a hang in a run that ends by itself."""
LOOK_S = 1
MEMBER_HOST = os.environ.get("MEMBER_HOST", "driver")
"""``MEMBER_HOST=auto make test``: the members of every query whose test does not say where they live. The default here
is the one that says less of a test's timing: agents come after seconds, and most queries of tests are over by then."""

Sink = Callable[["DataFrame", int], None]


class Seen(NamedTuple):
    """What a test looks at of one row."""

    topic: str
    partition: int
    offset: int
    value: str | None


def options_of(servers: str, group: str, *, protocol: str = "classic", **more: object) -> dict[str, str]:
    """Options that make a test quick. Names in ``more`` have ``__`` for the dot: ``kafka__isolation__level``."""
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
    """Options written as keyword arguments: ``__`` stands for the dot, and Python's True for true."""
    texts = {True: "true", False: "false"}
    return {
        name.replace("__", "."): texts[value] if isinstance(value, bool) else str(value) for name, value in more.items()
    }


# --- in Spark -------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """A query and its checkpoint over any number of runs; ``batches`` keeps the rows of every batch that ran."""

    spark: "SparkSession"
    options: dict[str, str]
    checkpoint: Path
    batches: list[tuple[int, list[Seen]]] = field(default_factory=list)
    on_batch: Callable[[int], None] = lambda number: None
    """Called in the middle of every batch, after its rows were read."""

    def load(self, **more: object) -> "DataFrame":
        return self.spark.readStream.format("kafka-group").options(**{**self.options, **named(more)}).load()

    def start(self, **trigger: Any) -> "StreamingQuery":
        """Start the query; ``trigger`` as in ``writeStream.trigger``."""
        return self.start_frame(self.load(), **trigger)

    def start_frame(self, frame: "DataFrame", **trigger: Any) -> "StreamingQuery":
        return self.start_into(self._keep, frame, **trigger)

    def start_into(self, sink: Sink, frame: "DataFrame | None" = None, **trigger: Any) -> "StreamingQuery":
        """Start the query with another sink; ``batches`` does not see its rows."""
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

    def run(self, **more: object) -> list[Seen]:
        """An AvailableNow run to its end; returns the rows of this run, and raises what the query failed with."""
        before = len(self.batches)
        self.run_into(self._keep, self.load(**more), availableNow=True)
        return rows_of(self.batches[before:])

    def run_into(self, sink: Sink, frame: "DataFrame | None" = None, **trigger: Any) -> None:
        """A run to its end, into another sink; raises what the query failed with."""
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
    def rows(self) -> list[Seen]:
        return rows_of(self.batches)

    @property
    def values(self) -> list[str]:
        return values_of(self.rows)

    def _keep(self, frame: "DataFrame", number: int) -> None:
        found = frame.selectExpr("topic", "partition", "offset", "string(value) value").collect()
        self.batches.append((number, [Seen(*row) for row in found]))
        self.on_batch(number)


def rows_of(batches: Sequence[tuple[int, list[Seen]]]) -> list[Seen]:
    return [row for _, rows in batches for row in rows]


def values_of(rows: Sequence[Seen]) -> list[str]:
    """The values, sorted: partitions come in no order."""
    return sorted(str(row.value) for row in rows)


def numbered(first: int, last: int, partitions: int = 1, *, at_ms: int | None = None) -> list[Record]:
    """Records whose values are the numbers from ``first`` to ``last``, dealt out to the partitions in turn."""
    return [Record(str(n).encode(), partition=n % partitions, timestamp_ms=at_ms) for n in range(first, last + 1)]


def texts(first: int, last: int) -> list[str]:
    """The values of :func:`numbered`, in the order of :func:`values_of`."""
    return sorted(str(n) for n in range(first, last + 1))


# --- checkpoints ----------------------------------------------------------------------------------------------------


def planned(checkpoint: Path) -> dict[int, StreamOffset]:
    """The offsets that Spark wrote before it ran each batch."""
    found = {}
    for path in (checkpoint / "offsets").glob("[0-9]*"):
        found[int(path.name)] = parse(path.read_text().splitlines()[2])
    return dict(sorted(found.items()))


def forget(checkpoint: Path, log: str, number: int) -> None:
    """Remove an entry of ``offsets`` or ``commits``, as if the driver had died before it was written."""
    (checkpoint / log / str(number)).unlink()
    (checkpoint / log / f".{number}.crc").unlink(missing_ok=True)


def rewrite(checkpoint: Path, number: int, line: str) -> None:
    """Replace the source's line of an entry of ``offsets``."""
    path = checkpoint / "offsets" / str(number)
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines))
    (checkpoint / "offsets" / f".{number}.crc").unlink(missing_ok=True)


def rename(checkpoint: Path) -> None:
    """Give a copied checkpoint a query id of its own: Spark runs no second query of the same id."""
    (checkpoint / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
    (checkpoint / ".metadata.crc").unlink(missing_ok=True)


# --- Spark's part, played -------------------------------------------------------------------------------------------


class Engine:
    """What Spark does with a coordinator, one call at a time and without Spark: every offset goes through its JSON.

    Args:
        options: as a user writes them.
        log: the offsets that earlier runs planned, as the checkpoint has them; all of them durable.
        environment: another clock or other clients than the real ones.
    """

    def __init__(
        self, options: Mapping[str, str], log: Sequence[str] = (), *, environment: Environment | None = None
    ) -> None:
        self.options = Options.parse(dict(options))
        self.coordinator = Coordinator(self.options, environment=environment)
        self.log = list(log)
        self.rows: list[Seen] = []

    @property
    def start(self) -> StreamOffset:
        return parse(self.log[-1]) if self.log else StreamOffset.initial(self.options.group_id)

    def run(self) -> None:
        """Triggers until there is nothing to read."""
        while self.step() is not None:
            pass

    def plan(self) -> StreamOffset | None:
        """``latestOffset``: what is durable so far, and the next batch; None when there is nothing to read."""
        start = self.start
        end = self.coordinator.latest(start)
        return None if end is start else parse(end.to_json())

    def read(self, end: StreamOffset) -> list[Seen]:
        batches = read_batches(
            self.options.consumer_settings(),
            end.batch(),
            topic_ids=end.topic_ids,
            leader_epochs=end.leader_epochs,
            fail_on_data_loss=self.options.fail_on_data_loss,
            deadline_s=20,
        )
        return [
            Seen(row["topic"], row["partition"], row["offset"], row["value"].decode())
            for batch in batches
            for row in batch.to_pylist()
        ]

    def step(self) -> StreamOffset | None:
        """One trigger: plan, read, and make durable."""
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


class Played:
    """A query over any number of runs, as :class:`Job` has it, but without Spark: each run is an :class:`Engine`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        self.log: list[str] = []
        """Its checkpoint: the offset of each batch, all of them durable."""
        self.rows: list[Seen] = []

    @contextlib.contextmanager
    def running(self, **more: object) -> Iterator[Engine]:
        with Engine({**self.options, **named(more)}, self.log) as engine:
            yield engine
        self.log = engine.log
        self.rows += engine.rows

    def run(self, **more: object) -> list[str]:
        """A run that ends by itself; returns the values that it read."""
        with self.running(**more) as engine:
            engine.coordinator.prepare_available_now()
            engine.run()
        return values_of(engine.rows)


# --- the outside ----------------------------------------------------------------------------------------------------


class Outsider:
    """An ordinary consumer in the same group, polling on a thread of its own; it never commits."""

    def __init__(self, servers: str, group: str, topics: Sequence[str], protocol: str = "classic") -> None:
        quick = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500} if protocol == "classic" else {}
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
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._ending.is_set():
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
        self._ending.set()
        self._thread.join(30)

    def __enter__(self) -> "Outsider":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def descendants(pid: int) -> dict[int, str]:
    """Processes below ``pid``, with their command lines."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has ended meanwhile
            found[child.pid] = " ".join(child.cmdline())
    return found


def readers_below(pid: int | None = None) -> list[int]:
    """The stream readers below a driver (this process): one for each query that runs."""
    return [
        child for child, args in descendants(pid or os.getpid()).items() if "python_streaming_source_runner" in args
    ]


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits for its parent to collect it does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def last_progress(query: "StreamingQuery") -> dict[str, Any]:
    progress = query.lastProgress
    return json.loads(progress.json) if progress is not None else {}
