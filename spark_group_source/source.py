"""``format("kafka-group")``: the classes that Spark's Python data source API calls.

Runs in: the planner (``DataSource``), the stream reader (:class:`GroupStreamReader`), executor workers (its ``read``).
Deliberately absent: decisions; calls are passed on. The reader is built in three processes and pickled between them, so
it has options only and opens nothing before Spark requests its first offset. No other module imports
pyspark.sql.datasource.
"""

import atexit
import logging
import math
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from spark_group_source import compatibility
from spark_group_source.errors import ChannelBroken, CheckpointMismatch, OptionError
from spark_group_source.model import Piece
from spark_group_source.options.table import Options
from spark_group_source.protocol.offsets import StreamOffset, parse
from spark_group_source.protocol.planner import pack
from spark_group_source.reader.records import spark_ddl

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_group_source.agents.connected_agents import PlacedMembers
    from spark_group_source.agents.control_server import ControlServer
    from spark_group_source.agents.task import PlannedTask
    from spark_group_source.host.run_files import LoadLock, Publisher
    from spark_group_source.metrics.endpoint import Endpoint
    from spark_group_source.runtime.coordinator import Coordinator


FORMAT = "kafka-group"
LOG_LEVEL_ENV = "SPARK_GROUP_LOG_LEVEL"
"""The environment variable with the log level of the stream reader."""
LOAD_WAIT_S = 15.0
"""How long to wait for the previous run of the same load(), which commits its last offsets and closes its members."""
METRICS_WAIT_S = 12.0
"""How long to wait until metricsPort is free: the previous run of the query may take some seconds to stop."""


class RangesPartition(InputPartition):
    """Spark's input partition: the piece that one task reads. Where tasks connect to the stream reader it also has the
    task's number in the plan."""

    def __init__(self, piece: Piece, task: "PlannedTask | None" = None) -> None:
        super().__init__(None)
        self.piece, self.task = piece, task


class KafkaGroupDataSource(compatibility.CheckedPickle, DataSource):
    """The data source behind ``spark.readStream.format("kafka-group")``.

    Raises:
        OptionError: from ``load()``: an option is missing, unknown, or has a value that cannot work.
        SetupError: from ``load()``: Python, Spark or a library is missing, or has an unsupported version.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        compatibility.check()
        super().__init__(dict(options))
        self._parsed = Options.parse(self.options)
        self._path = tuple(sys.path)
        self._load = uuid.uuid4().hex
        """The id of this load(); Spark pickles the instance for every query that reads it."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        from spark_group_source.kafka import check_settings

        check_settings(self._parsed)
        return spark_ddl(self._parsed.include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark's signature
        raise OptionError(
            f'format("{FORMAT}") is a streaming source: use spark.readStream. To read up to the current end, use '
            "trigger(availableNow=True)"
        )

    def streamReader(self, schema: StructType) -> "GroupStreamReader":  # noqa: ARG002 - Spark's signature
        return GroupStreamReader(self._parsed, self._path, self._load)


class GroupStreamReader(compatibility.CheckedPickle, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream reader; ``runtime.coordinator`` runs the batches.

    Args:
        options: the query's.
        path: the planner's module search path. It has the modules of --py-files, which Spark 4.2 passes to the planner
            and to executors, but not to the stream reader on the planner's host.
        load: the id of the load(), of which only one query may run at a time; empty: not checked.
    """

    def __init__(self, options: Options, path: Sequence[str] = (), load: str = "") -> None:
        self._options = options
        self._path = tuple(path)
        self._load = load
        self._lock: LoadLock | None = None
        self._coordinator: Coordinator | None = None
        """None before Spark requests the first offset; so are the next two."""
        self._control_server: ControlServer | None = None
        """None if the run needs none, or cannot listen."""
        self._endpoint: Endpoint | None = None
        """None without metricsPort."""

    def __getstate__(self) -> dict[str, Any]:
        unopened = dict.fromkeys(("_lock", "_coordinator", "_control_server", "_endpoint"))
        return {"_options": self._options, "_path": self._path, "_load": self._load, **unopened}

    # --- in the stream reader process -------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        return StreamOffset.initial(self._options.group_id).to_json_dict()

    def getDefaultReadLimit(self) -> ReadLimit:
        # Limits are options. A finite limit here only distinguishes a normal trigger from Once (ReadAllAvailable).
        return ReadMaxRows(2**63 - 1)

    def prepareForTriggerAvailableNow(self) -> None:
        self._running_coordinator().prepare_available_now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        parsed = self._parse(start)
        coordinator = self._running_coordinator()
        latest = coordinator.latest(parsed, unlimited=isinstance(limit, ReadAllAvailable))
        if self._control_server is not None and latest is not parsed:
            self._control_server.prefetch_after(latest, coordinator.placed_members())
        return start if latest is parsed else latest.to_json_dict()  # nothing to read: Spark must get its own start

    def reportLatestOffset(self) -> dict[str, Any] | None:
        ends: dict[str, dict[str, int]] = {}
        for tp, end in sorted(self._running_coordinator().log_ends().items()):
            ends.setdefault(tp.topic, {})[str(tp.partition)] = end
        return ends or None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:  # noqa: ARG002
        parsed = self._parse(end)
        coordinator = self._running_coordinator()
        coordinator.replay(parsed)
        if self._control_server is not None:
            return self._planned_tasks(self._control_server, parsed, coordinator.placed_members())
        tasks = pack(
            parsed.batch(),
            min_partitions=self._options.min_partitions,
            max_records=self._options.max_records_per_partition,
        )
        return [RangesPartition(Piece.of(ranges, parsed.topic_ids, parsed.leader_epochs)) for ranges in tasks]

    def _planned_tasks(
        self, server: "ControlServer", batch: StreamOffset, placed: "list[PlacedMembers]"
    ) -> Sequence[InputPartition]:
        from spark_group_source.agents.task import PlannedTask

        plan = server.plan_tasks(batch, placed)
        late = plan.binding == "late"  # the task's claim is answered with its piece
        return [
            RangesPartition(
                Piece.of(() if late else piece.ranges, batch.topic_ids, batch.leader_epochs),
                PlannedTask(
                    server.addresses,
                    server.secret,
                    server.run,
                    plan.name,
                    number,
                    late,
                    uses_agents=self._options.member_host != "driver",
                ),
            )
            for number, piece in enumerate(plan.pieces)
        ]

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Spark calls it one batch late, and latestOffset() already has the batch's offset."""

    def stop(self) -> None:
        if self._coordinator is not None:
            # Spark closes the socket and sends SIGTERM at the same time: the signal must not interrupt this method.
            # A handler instead of SIG_IGN, which every process started from here would inherit.
            signal.signal(signal.SIGTERM, lambda *_: None)
            if self._endpoint is not None:
                self._endpoint.stop()  # first, because the query's next run may wait for the port
            self._coordinator.close()
            if self._control_server is not None:
                self._control_server.stop()
        if self._lock is not None:
            self._lock.release()

    def _running_coordinator(self) -> "Coordinator":
        """Return the run's coordinator. The first call starts it, with what the options need beside it."""
        if self._coordinator is None:
            from spark_group_source.host.run_files import LoadLock, Publisher
            from spark_group_source.runtime.coordinator import Coordinator

            _prepare_process()
            sys.path += [entry for entry in self._path if entry not in sys.path]
            if self._load and self._lock is None:
                lock = LoadLock(self._load)
                lock.acquire(wait_s=LOAD_WAIT_S)
                self._lock = lock
            publisher = Publisher(self._options.group_id, self._options.connection)
            if self._options.metrics_port is not None:
                self._endpoint = _start_metrics(self._options, publisher)
            coordinator = Coordinator(self._options, publisher=publisher)
            if self._options.member_host != "driver" or not self._options.fail_on_data_loss:
                self._control_server = _start_control_server(self._options, coordinator)
            self._coordinator = coordinator
            atexit.register(self.stop)  # in case SIGTERM arrives before stop() has replaced its handler
        return self._coordinator

    def _parse(self, document: Mapping[str, Any]) -> StreamOffset:
        offset = parse(document)
        if offset.group != self._options.group_id:
            raise CheckpointMismatch(
                f"the checkpoint belongs to group {offset.group!r}, but kafka.group.id is {self._options.group_id!r}. "
                f"Use a new checkpointLocation, or set kafka.group.id back to {offset.group!r}",
                found=offset.group,
                wanted=self._options.group_id,
            )
        return offset

    # --- in an executor worker --------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        assert isinstance(partition, RangesPartition)
        options = self._options.on_executor(os.environ)
        from spark_group_source.reader.range_reader import ReadOptions, read_ranges

        read = ReadOptions(
            options.consumer_settings(),
            include_headers=options.include_headers,
            fail_on_data_loss=options.fail_on_data_loss,
            progress_timeout_s=options.poll_timeout_ms / 1000,
            outage_timeout_s=options.broker_timeout_ms / 1000 or math.inf,
        )
        if partition.task is None:  # the modules of agents are not imported, which would delay a worker's first task
            return read_ranges(partition.piece, read)
        from spark_group_source.agents.task import read_piece

        return read_piece(options, partition.piece, partition.task, read)


def _start_control_server(options: Options, coordinator: "Coordinator") -> "ControlServer | None":
    """Start the server that agents and tasks connect to. Returns None if it cannot listen and is not required."""
    from spark_group_source.agents.control_server import ControlServer

    server = ControlServer(
        options, agents=coordinator.agents, died=coordinator.fail, on_task_report=coordinator.record_task
    )
    try:
        server.start()
    except ChannelBroken as exc:
        if options.member_host == "executor":
            raise OptionError(f"memberHost is executor, and {exc}", option="memberHost") from exc
        logging.getLogger(__name__).warning(
            "group %s: cannot listen for agents and tasks; members stay in the stream reader, and records that tasks "
            "skip are not counted: %s",
            options.group_id,
            exc,
        )
        return None
    return server


def _start_metrics(options: Options, publisher: "Publisher") -> "Endpoint":
    """Start the endpoint that serves the run's metrics to Prometheus."""
    try:
        from spark_group_source.metrics import endpoint, run
    except ImportError as exc:
        raise OptionError(
            f"metricsPort needs the package prometheus-client on the driver's host ({exc}). Run there: `pip install "
            "prometheus-client`",
            option="metricsPort",
        ) from exc
    from spark_group_source.kafka import Environment

    environment = Environment()
    server = endpoint.Endpoint(
        endpoint.MetricsCollector(run.METRICS, lambda: publisher.last, now_ms=environment.now_ms),
        host=options.metrics_host or "",
        port=options.metrics_port or 0,
        option="metricsPort",
        wait_s=METRICS_WAIT_S,
        environment=environment,
    )
    publisher.metrics_port = server.port
    level = logging.INFO if options.metrics_port else logging.WARNING  # the log is how users find out a free port
    logging.getLogger(__name__).log(level, "group %s: serving metrics on port %d", options.group_id, server.port)
    return server


def _prepare_process() -> None:
    """Configure the stream reader's process: logging, and a handler of SIGTERM, with which Spark ends every query.
    Without a handler the process would end without calling ``stop()``."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(
        level=os.environ.get(LOG_LEVEL_ENV, "WARNING"),
        format="%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s",
    )
