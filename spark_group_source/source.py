"""``format("kafka-group")``: the classes that Spark's Python data source API calls.

Runs in: Spark's planning worker (``DataSource``), the stream reader (:class:`GroupStreamReader`), executor workers (its
``read``). Deliberately absent: decisions; calls are passed on. The reader is built in three processes and pickled
between them, so it has options only and opens nothing before Spark requests its first offset. No other module imports
pyspark.sql.datasource.

Spark 4.2 and newer call an :class:`AdmissionControlReader`, which receives the start of the next batch. Spark 4.0 and
4.1 pass no argument; a :class:`PlainReader` concludes the start from the order of their calls.
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
from pyspark.sql.types import StructType

from spark_group_source import compatibility
from spark_group_source.errors import ChannelBroken, CheckpointMismatch, OptionError, SetupError
from spark_group_source.model import Piece
from spark_group_source.options.table import Options
from spark_group_source.protocol.offsets import StreamOffset, parse
from spark_group_source.protocol.planner import pack
from spark_group_source.reader.records import require_own_schema, spark_ddl

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
        self._load = uuid.uuid4().hex
        """The id of this load(); Spark pickles the instance for every query that reads it."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        from spark_group_source.kafka.environment import check_settings

        check_settings(self._parsed)
        return spark_ddl(self._parsed.row_columns)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark's signature
        raise OptionError(
            f'format("{FORMAT}") is a streaming source: use spark.readStream. To read up to the current end, use '
            "trigger(availableNow=True)"
        )

    def streamReader(self, schema: StructType) -> "GroupStreamReader":
        require_own_schema(schema, self._parsed.row_columns)
        reader = AdmissionControlReader if compatibility.has_admission_control() else PlainReader
        return reader(self._parsed, self._load)


class GroupStreamReader(compatibility.CheckedPickle, DataSourceStreamReader):
    """The stream reader, apart from ``latestOffset()``; ``runtime.coordinator`` runs the batches.

    Args:
        options: the query's.
        load: the id of the load(), of which only one query may run at a time; empty: not checked.
    """

    def __init__(self, options: Options, load: str = "") -> None:
        self._options = options
        self._load = load
        self._lock: LoadLock | None = None
        self._ran_batch = False
        """Whether the query has run a batch since the last request of an offset."""
        self._coordinator: Coordinator | None = None
        """None before Spark requests the first offset; so are the next two."""
        self._control_server: ControlServer | None = None
        """None if the run needs none, or cannot listen."""
        self._endpoint: Endpoint | None = None
        """None without metricsPort."""

    def __getstate__(self) -> dict[str, Any]:
        unopened = dict.fromkeys(("_lock", "_coordinator", "_control_server", "_endpoint"))
        return {"_options": self._options, "_load": self._load, "_ran_batch": False, **unopened}

    # --- in the stream reader process -------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        return StreamOffset.initial(self._options.group_id).to_json_dict()

    def _plan_after(self, start: dict[str, Any], *, unlimited: bool) -> dict[str, Any]:
        """Plan the batch after ``start``, which is durable. Returns ``start`` itself if there is nothing to read."""
        parsed = self._parse(start)
        coordinator = self._running_coordinator()
        latest = coordinator.latest(parsed, unlimited=unlimited, after_batch=self._ran_batch)
        self._ran_batch = False
        if self._control_server is not None and latest is not parsed:
            self._control_server.prefetch_after(latest, coordinator.placed_members())
        return start if latest is parsed else latest.to_json_dict()  # nothing to read: Spark must get its own start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:  # noqa: ARG002
        parsed = self._parse(end)
        coordinator = self._running_coordinator()
        coordinator.start_batch(parsed)
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
                    uses_agents=server.uses_agents,
                ),
            )
            for number, piece in enumerate(plan.pieces)
        ]

    def commit(self, end: dict[str, Any]) -> None:  # noqa: ARG002
        """Note that the query runs a batch: an idle source must not delay the other sources of the query.

        Nothing is committed: Spark calls it one batch late, and latestOffset() already has the batch's offset.
        """
        self._ran_batch = True

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
            from spark_group_source.agents.agent_folder import is_local_mode
            from spark_group_source.host.run_files import LoadLock, Publisher
            from spark_group_source.runtime.coordinator import Coordinator

            _prepare_process()
            if self._load and self._lock is None:
                lock = LoadLock(self._load)
                lock.acquire(wait_s=LOAD_WAIT_S)
                self._lock = lock
            publisher = Publisher(self._options.group_id, self._options.connection)
            if self._options.metrics_port is not None:
                self._endpoint = _start_metrics(self._options, publisher)
            announces_end = not isinstance(self, PlainReader)
            coordinator = Coordinator(self._options, announces_end=announces_end, publisher=publisher)
            tasks_report = not self._options.fail_on_data_loss or self._options.tasks_report_sizes
            member_host = self._options.member_host
            local_mode = is_local_mode()
            uses_agents = member_host == "executor" or (member_host == "auto" and not local_mode)
            if uses_agents or tasks_report:
                self._control_server = _start_control_server(
                    self._options, coordinator, local_mode=local_mode, uses_agents=uses_agents
                )
            self._coordinator = coordinator
            atexit.register(self.stop)  # in case SIGTERM arrives before stop() has replaced its handler
        return self._coordinator

    def _parse(self, document: Mapping[str, Any]) -> StreamOffset:
        offset = parse(document)
        if offset.group != self._options.group_id:
            raise CheckpointMismatch(
                f"the checkpoint belongs to group {offset.group!r}, but kafka.group.id is {self._options.group_id!r}. "
                f"Set kafka.group.id back to {offset.group!r}. A query of group {self._options.group_id!r} needs a "
                "checkpointLocation of its own; it starts at the offsets of that group, or at startingOffsets if it "
                "has none"
            )
        return offset

    # --- in an executor worker --------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        assert isinstance(partition, RangesPartition)
        options = self._options.on_executor(os.environ)
        from spark_group_source.reader.range_reader import ReadOptions, read_ranges

        read = ReadOptions(
            options.consumer_settings(),
            columns=options.row_columns,
            fail_on_data_loss=options.fail_on_data_loss,
            progress_timeout_s=options.poll_timeout_ms / 1000,
            outage_timeout_s=options.broker_timeout_ms / 1000 or math.inf,
        )
        if partition.task is None:  # the modules of agents are not imported, which would delay a worker's first task
            return read_ranges(partition.piece, read)
        from spark_group_source.agents.task import read_piece

        return read_piece(options, partition.piece, partition.task, read)


class PlainReader(GroupStreamReader):
    """The stream reader of Spark 4.0 and 4.1, whose ``latestOffset()`` has no arguments.

    The start of the next batch follows from the calls before it:

    - A new query calls ``latestOffset()`` first: it starts at the initial offset.
    - A restarted query first calls ``partitions(o, o)`` with the last offset of its checkpoint. If the batch that ends
      there was not finished, ``partitions(before, o)`` follows and runs it again.
    - Later on the start is the end of the batch before, because Spark requests the next batch after the one before has
      finished.

    So two calls of ``latestOffset()`` without a batch between them are an error, unless there was nothing to read.
    """

    _start: dict[str, Any] | None = None
    """The end of the last batch that Spark started to read, or of the checkpoint; None before the first."""
    _planned: StreamOffset | None = None
    """What ``latestOffset()`` planned and Spark has not started to read."""
    _was_called = False
    """Whether Spark has requested an offset in this run."""

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # the signature of Spark 4.0 and 4.1
        if self._planned is not None:
            raise SetupError(
                f"Spark requested the next batch before it read batch {self._planned.seq}. {_OUT_OF_ORDER}"
            )
        if self._was_called and self._options.trigger == "availableNow":
            raise _other_trigger(self._options)
        self._was_called = True
        start = self.initialOffset() if self._start is None else self._start
        latest = self._plan_after(start, unlimited=False)
        self._planned = None if latest is start else parse(latest)
        return latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        parsed = self._parse(end)
        if start == end:  # the query starts with this checkpoint
            if self._was_called:
                raise SetupError(
                    f"Spark requested an offset before it passed batch {parsed.seq} of the checkpoint. {_OUT_OF_ORDER}"
                )
            self._start = end
            return []
        if self._planned is not None and self._planned != parsed:
            raise SetupError(f"Spark reads batch {parsed.seq}, which is not the planned one. {_OUT_OF_ORDER}")
        self._start, self._planned = end, None
        return super().partitions(start, end)


def _other_trigger(options: Options) -> OptionError:
    return OptionError(
        f"option 'trigger' is {options.trigger!r}, but writeStream has another trigger. Set the option to the query's "
        "trigger, or leave it out",
        option="trigger",
    )


_OUT_OF_ORDER = (
    "Spark 4.0 and 4.1 do this if spark.sql.streaming.triggerAvailableNowWrapper.enabled is true, which is not "
    "supported (set it to false), or if the query never reads the source, as with a filter that is always false"
)


if TYPE_CHECKING or compatibility.has_admission_control():
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

    class AdmissionControlReader(GroupStreamReader, SupportsTriggerAvailableNow):
        """The stream reader of Spark 4.2 and newer."""

        def getDefaultReadLimit(self) -> ReadLimit:
            # Limits are options. A finite limit here only distinguishes a normal trigger from Once (ReadAllAvailable).
            return ReadMaxRows(2**63 - 1)

        _is_available_now = False

        def prepareForTriggerAvailableNow(self) -> None:
            if self._options.trigger == "processingTime":
                raise _other_trigger(self._options)
            self._is_available_now = True
            self._running_coordinator().prepare_available_now()

        def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
            unlimited = isinstance(limit, ReadAllAvailable)
            is_other = {"processingTime": unlimited, "availableNow": not (unlimited or self._is_available_now)}
            if is_other.get(self._options.trigger, False):
                raise _other_trigger(self._options)
            return self._plan_after(start, unlimited=unlimited)

        def reportLatestOffset(self) -> dict[str, Any] | None:
            ends: dict[str, dict[str, int]] = {}
            for tp, end in sorted(self._running_coordinator().log_ends().items()):
                ends.setdefault(tp.topic, {})[str(tp.partition)] = end
            return ends or None


def _start_control_server(
    options: Options, coordinator: "Coordinator", *, local_mode: bool, uses_agents: bool
) -> "ControlServer | None":
    """Start the server that agents and tasks connect to. Returns None if it cannot listen and is not required."""
    from spark_group_source.agents.control_server import ControlServer

    server = ControlServer(
        options,
        local_mode=local_mode,
        uses_agents=uses_agents,
        agents=coordinator.agents,
        died=coordinator.fail,
        on_task_report=coordinator.record_task,
    )
    try:
        server.start()
    except ChannelBroken as exc:
        if options.member_host == "executor":
            raise OptionError(f"memberHost is executor, and {exc}", option="memberHost") from exc
        logging.getLogger(__name__).warning(
            "group %s: cannot listen for agents and tasks; members stay in the stream reader, records that tasks skip "
            "are not counted, and each record counts as 1 MiB for maxBytesPerTrigger: %s",
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
    from spark_group_source.kafka.environment import Environment

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
        level=(os.environ.get(LOG_LEVEL_ENV) or "WARNING").upper(),
        format="%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s",
    )
