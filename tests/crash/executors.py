"""The job of the tests that kill executors: a group into a Delta table.

Unless it is ``plain``, its tasks report which offsets of which partition they read and where, and wait while a file
``hold`` names an offset that is not above theirs. If there is a file ``explain``, the query's plans and progress are
logged. Arguments, as one JSON object on its standard input: servers, group, topic, home (a directory for table,
checkpoint, scratch and the tasks' reports), options.
"""

import contextlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from spark_group_source import DeltaSink, KafkaGroupDataSource
from spark_group_source.local.conf import local_spark_settings
from spark_group_source.options.table import Options
from spark_group_source.source import AdmissionControlReader, GroupStreamReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.query import StreamingQuery

LOOK_S = 1
HOLD_S_MAX = 120
HOLD_LOOK_S = 0.05
COLUMNS = "topic string, partition int, offset bigint"


class RevealingSource(KafkaGroupDataSource):
    """The source, which also writes the run's secret to the file that the option ``secret_file`` names."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self._secret_file = options["secret_file"]
        super().__init__({name: value for name, value in options.items() if name != "secret_file"})

    def streamReader(self, schema: StructType) -> GroupStreamReader:
        reader = super().streamReader(schema)
        return RevealingReader(reader._options, self._secret_file)


class RevealingReader(AdmissionControlReader):
    """The reader of :class:`RevealingSource`."""

    def __init__(self, options: Options, secret_file: str) -> None:
        super().__init__(options)
        self._secret_file = secret_file

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_secret_file": self._secret_file}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        found = super().partitions(start, end)
        if self._control_server is not None:
            Path(self._secret_file).write_text(self._control_server.secret.to_hex())
        return found


def main(
    servers: str,
    group: str,
    topic: str,
    home: str,
    master: str = "",
    py_files: str = "",
    python: str = "",
    cores: str = "1",
    executors: int = 2,
    plain: bool = False,
    channel: int = 0,
    spark: Mapping[str, str] | None = None,
    **options: str,
) -> None:
    """Run the job.

    Args:
        master: of a cluster whose executors get the package by ``py_files`` and run ``python``.
        cores: of each executor.
        executors: their number, if there is no master.
        plain: the rows are only partition and offset.
        channel: the port of a proxy through which tasks and agents reach the stream reader; 0: there is none.
        spark: more Spark settings.
    """
    builder = SparkSession.builder.master(master or f"local-cluster[{executors},{cores},1024]").appName("executors")
    paths = os.pathsep.join(path for path in sys.path if path)
    own = {"spark.executor.memory": "512m", "spark.task.maxFailures": "4", **(spark or {})}
    if master:
        own |= {"spark.submit.pyFiles": py_files, "spark.pyspark.python": python, "spark.driver.host": "127.0.0.1"}
    else:
        own["spark.executorEnv.PYTHONPATH"] = paths
    session = builder.config(map={**local_spark_settings(f"{home}/scratch"), **own}).getOrCreate()
    if channel:
        session.dataSource.register(_through_proxy(channel))
    elif not plain:  # Spark finds the installed source, and Spark 4.0 refuses to register it again
        session.dataSource.register(RevealingSource if "secret_file" in options else KafkaGroupDataSource)
    which = {"subscribe": topic} if "subscribePattern" not in options else {}
    stream = session.readStream.format("kafka-group").option("kafka.bootstrap.servers", servers)
    stream = stream.option("kafka.group.id", group).options(**which, **options)
    frame = stream.load()
    sink = DeltaSink(f"{home}/table", transform=_only_positions if plain else _slow(home))
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", f"{home}/checkpoint").start()
    (Path(home) / "ui").write_text(session.sparkContext.uiWebUrl or "")
    tests = os.getppid()
    while not query.awaitTermination(LOOK_S) and os.getppid() == tests:  # the job ends with the test run
        if (Path(home) / "explain").exists():
            _explain(frame, query)
            (Path(home) / "explain").unlink()


def _through_proxy(port: int) -> type[KafkaGroupDataSource]:
    class ProxiedSource(KafkaGroupDataSource):
        """The stream reader advertises the proxy's port."""

        def streamReader(self, schema: Any) -> Any:
            from spark_group_source.agents.control_server import ControlServer

            start = ControlServer.start

            def started(server: ControlServer) -> None:
                start(server)
                server.addresses = (("127.0.0.1", port),)

            ControlServer.start = started  # type: ignore[assignment,method-assign]
            return super().streamReader(schema)

    return ProxiedSource


def _explain(frame: DataFrame, query: "StreamingQuery") -> None:
    frame.explain(extended=True)
    query.explain(extended=True)
    print(*(progress.json for progress in query.recentProgress), query.status, sep="\n", flush=True)  # noqa: T201


def _only_positions(df: DataFrame) -> DataFrame:
    return df.select("partition", "offset")


def _slow(home: str) -> Callable[[DataFrame], DataFrame]:
    def report_and_wait(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        daemon, task = os.getppid(), TaskContext.get()
        assert task is not None
        for batch in batches:
            report = {
                "executor": int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1]),
                "worker": os.getpid(),
                "stage": task.stageId(),
                "task": task.partitionId(),
                "clients": _threads_of_clients(os.getpid()),
                "clients of the daemon": _threads_of_clients(daemon),
                "rows": sorted(zip(*(batch.column(n).to_pylist() for n in range(3)), strict=True)),
            }
            path = Path(home) / "reports" / uuid.uuid4().hex
            path.with_suffix(".part").write_text(json.dumps(report))
            path.with_suffix(".part").rename(path)
            last = max(batch.column("offset").to_pylist())
            end_s = time.monotonic() + HOLD_S_MAX
            while _held(Path(home) / "hold", last) and time.monotonic() < end_s:
                threading.Event().wait(HOLD_LOOK_S)
            yield batch

    return lambda df: df.select("topic", "partition", "offset").mapInArrow(report_and_wait, COLUMNS)


def _held(hold: Path, offset: int) -> bool:
    try:
        return offset >= int(hold.read_text() or 0)
    except FileNotFoundError:
        return False


def _threads_of_clients(pid: int) -> int:
    """The number of threads of Kafka clients in a process; librdkafka names its threads."""
    found = 0
    for name in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += name.read_text().startswith("rdk:")
    return found


if __name__ == "__main__":
    main(**json.load(sys.stdin))
