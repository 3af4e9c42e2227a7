"""Shared fixtures: a real Kafka, a Spark session with Delta, and helpers for topics, records and offsets.

Every process is started on demand and once per test worker. A test that starts a JVM uses the fixture ``jvm``, or one
of the markers below: ``make unit`` skips these tests, and other tests have no Java."""

import contextlib
import functools
import gc
import itertools
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import proofs
import pytest
import quick_spark
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from hypothesis import settings
from kafka_helpers import (
    ADMIN_S,
    SASL_PASSWORD,
    SASL_USER,
    Offsets,
    Produce,
    Record,
    TopicFactory,
    await_until,
    committed_of,
    create_topic,
    end_offsets_of,
    produce_to,
)
from kafka_tool import kafka_tools_jars
from kit.broker_cluster import BrokerCluster
from kit.spark_kafka import spark_kafka_jars
from rich.console import ConsoleDimensions
from scenes import WIDTH, Scene

from spark_group_source.cli import common
from spark_group_source.errors import SetupError
from spark_group_source.local import jars
from spark_group_source.local.conf import local_spark_settings
from spark_group_source.local.jars import delta_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Produce", "Record", "TopicFactory", "await_until"]

# No deadlines: the time of an example depends on the machine, and other tests run concurrently.
settings.register_profile("concurrent", deadline=None)
settings.load_profile("concurrent")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in the background of a shell; processes that tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's Python workers; default: python3

# A fixed width. The default is COLUMNS at import time, which readline sets to 80 in workers of pytest-xdist.
common.console.size = ConsoleDimensions(WIDTH, 25)

JVM_MARKERS = ("broker", "spark", "crash")
"""Markers of tests that start JVMs without the fixture ``jvm``."""

ROOT = Path(__file__).resolve().parent.parent

VERSIONS = "tests/matrix/test_smoke.py"

LANES = ("versions", "cluster", "security")
"""Groups of tests that run one after another in one worker, because they share expensive processes; the longest first.
"versions" has other Sparks, and waits for their downloads first."""

SPARK_WORKERS, SPARK_WORKERS_OF_ALL = 2, 3
"""How many workers run the tests that start the installed Spark, in `make test` and in `make test-all`. Each has a
session that its tests share, and takes the next file when it is free."""
LONG_SPARK = ("tests/delta/", "tests/crash/")
"""Where the longest of them are: those begin first."""

SHARED_JAVA_OPTIONS = ("-Xms256m", "-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
"""For the broker that all workers share; at the end it has the topics of all tests."""

JAVA_HOME = os.environ.get("JAVA_HOME")
NO_JAVA_HOME = "/no/java/here/ask/for/the/fixture/jvm"
"""JAVA_HOME of tests that start no JVM. It appears in the error of a test that does."""

_numbers = itertools.count(1)

if MATRIX_KAFKA := os.environ.get("MATRIX_KAFKA"):  # `make matrix`: the version of all brokers of these tests
    jars.KAFKA_COORDINATES = (f"org.apache.kafka:kafka_{jars.SCALA}:{MATRIX_KAFKA}", *jars.KAFKA_COORDINATES[1:])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove", choices=list(proofs.GUARANTEES), help="run only the tests that prove this guarantee")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that need a JVM, and run long tests first, so that workers finish at about the same time."""
    if (guarantee := config.getoption("prove")) is not None:
        proving = [i for i in items if any(mark.args == (guarantee,) for mark in i.iter_markers("proves"))]
        config.hook.pytest_deselected(items=[item for item in items if item not in proving])
        items[:] = proving
    for item in items:
        if "jvm" in getattr(item, "fixturenames", ()) or any(map(item.get_closest_marker, JVM_MARKERS)):
            item.add_marker("jvm")
        _check_levels(item)
    items.sort(key=lambda item: (_order(_file(item.nodeid)), item.get_closest_marker("slow") is None))


def _order(file: str) -> int:
    if _starts_spark(file):
        return 0 if file.startswith(LONG_SPARK) else 1
    lane = _lane(file)
    return 2 + (len(LANES) if lane is None else LANES.index(lane))


def _check_levels(item: pytest.Item) -> None:
    """Check that a test starts the processes of its proof's level: Spark, a broker, or none."""
    spark = any(map(item.get_closest_marker, ("spark", "crash")))
    real = ("spark",) if spark else ("kafka",) if item.get_closest_marker("jvm") else ("core", "simulation")
    for mark in item.iter_markers("proves"):
        if mark.kwargs["level"] not in real:
            raise pytest.UsageError(
                f"{item.nodeid} starts processes of the levels {real}, but proves {mark.args[0]} at another"
            )


def _file(nodeid: str) -> str:
    return nodeid.split("::", maxsplit=1)[0]


@functools.cache
def _starts_spark(file: str) -> bool:
    """Whether tests of a file start the installed Spark, from its text: the scheduler of pytest-xdist knows only
    names."""
    text = (ROOT / file).read_text()
    return file != VERSIONS and ("mark.spark" in text or "mark.crash" in text)


@functools.cache
def _lane(file: str) -> str | None:
    """The lane of a file's tests, from its text."""
    if file == VERSIONS:
        return "versions"
    if file.startswith("tests/faults/") or re.search(r"\bcluster: ", (ROOT / file).read_text()):
        return "cluster"
    return "security" if file.startswith("tests/security/") else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print failures immediately: a run that is killed at its time limit prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)  # no longrepr of this type: the worker crashed
        why = f"\n{crash.path}:{crash.lineno}: {crash.message}" if crash else ""
        sys.stderr.write(f"\n{report.when} failed after {report.duration:.0f} s: {report.nodeid}{why}\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign each file that starts Spark to one of few workers, each lane to one worker, and other tests one by one to
    idle workers, in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    sparks = SPARK_WORKERS if "not full" in config.option.markexpr else SPARK_WORKERS_OF_ALL

    class Lanes(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = _file(nodeid)
            return file if _starts_spark(file) else _lane(file) or nodeid

        def _assign_work_unit(self, node: Any) -> None:
            may_have_spark = node in self.nodes[:sparks]
            scope = next((s for s in self.workqueue if may_have_spark or not s.endswith(".py")), None)
            if scope is None:  # only files that start Spark are left
                node.shutdown()
                return
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # otherwise the lane with the most tests starts first
    return Lanes(config, log)


_shared: list[BrokerCluster] = []
"""The broker that all test workers use, in the process that starts them."""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start one Kafka for all workers before the first worker, unless no test needs it. It ends with this process. Also
    download the jars, so that no test waits for them."""
    if "not jvm" in node.config.option.markexpr:
        return
    if not _shared:
        for resolve in (delta_jars, kafka_tools_jars, spark_kafka_jars):
            resolve()
        _shared.append(BrokerCluster(sasl={SASL_USER: SASL_PASSWORD}, java_options=SHARED_JAVA_OPTIONS))
        _shared[0].start()
    node.workerinput["servers"] = _shared[0].bootstrap_servers, _shared[0].sasl_bootstrap_servers


def pytest_unconfigure() -> None:
    while _shared:
        _shared.pop().stop()


# Threads of admin clients run Python code, in which garbage may be collected. If that destroys an admin client in its
# own thread, librdkafka aborts the process.
gc.disable()
COLLECT_EVERY_S = 5.0
_collected_s = [0.0]


def pytest_collection_finish() -> None:
    """Exclude everything imported so far from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Between two tests it is this thread that collects."""
    result = yield
    if time.monotonic() - _collected_s[0] >= COLLECT_EVERY_S:
        gc.collect()
        _collected_s[0] = time.monotonic()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hide Java from tests that are not marked to start a JVM."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("jvm") is None:
            patch.setenv("JAVA_HOME", NO_JAVA_HOME)
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def fast_spark_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make every Spark that a test starts, in this process or another, start in half the CPU time."""
    if not any(item.get_closest_marker("jvm") for item in request.session.items):
        yield
        return
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as java:  # the first test that uses this fixture may have no Java
            java.setenv("JAVA_HOME", JAVA_HOME) if JAVA_HOME else java.delenv("JAVA_HOME", raising=False)
            stack.enter_context(quick_spark.prepared())
        yield


@pytest.fixture(scope="session")
def jvm() -> None:
    """Used by every fixture and test that starts a JVM."""


def _unique(request: pytest.FixtureRequest, kind: str) -> str:
    test = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60].strip("-")
    return f"{kind}-{test}-{os.getpid()}-{next(_numbers)}"


class SharedBroker(NamedTuple):
    """The addresses of the broker that all workers share."""

    bootstrap_servers: str
    sasl_bootstrap_servers: str


@pytest.fixture(scope="session")
def broker(jvm: None, request: pytest.FixtureRequest) -> Iterator[BrokerCluster | SharedBroker]:
    """One Kafka node for all tests in all workers. Tests that kill or pause a node use ``cluster`` or their own."""
    servers = getattr(request.config, "workerinput", {}).get("servers")
    if servers is not None:
        yield SharedBroker(*servers)
        return
    with BrokerCluster(sasl={SASL_USER: SASL_PASSWORD}) as started:
        yield started


@pytest.fixture(scope="session")
def cluster(jvm: None) -> Iterator[BrokerCluster]:
    """Three Kafka nodes. A test may stop, kill and pause them, and must restore them."""
    with BrokerCluster(nodes=3) as started:
        yield started


@pytest.fixture(scope="session")
def admin(broker: SharedBroker) -> AdminClient:
    """Kafka's admin client, for the whole run: a client that is garbage collected drops pending responses."""
    patient = {"socket.timeout.ms": ADMIN_S * 1000}  # its requests have no limit of their own
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 3, **patient})


@pytest.fixture(scope="session")
def producer(broker: SharedBroker) -> Producer:
    return Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 2, "acks": "all", "log_level": 3})


@pytest.fixture
def topic(admin: AdminClient, request: pytest.FixtureRequest) -> TopicFactory:
    """``topic(partitions=1, config=None, name=None)`` creates a new topic and returns its name."""

    def create(partitions: int = 1, *, config: Mapping[str, str] | None = None, name: str | None = None) -> str:
        return create_topic(admin, name or _unique(request, "t"), partitions, config=config)

    return create


@pytest.fixture
def group_id(request: pytest.FixtureRequest) -> str:
    """The id of a consumer group that no other test uses."""
    return _unique(request, "g")


@pytest.fixture
def scene(jvm: None, request: pytest.FixtureRequest, group_id: str) -> Scene:
    """The test's group, with Kafka and Spark."""
    return Scene(request, group_id)


@pytest.fixture(scope="session")
def produce(producer: Producer) -> Produce:
    """``produce(topic, records, partition=None)`` -> [(partition, offset)] after all are acknowledged.

    A record is a value (bytes or text) or a :class:`Record`.
    """

    def write(
        topic: str, records: Iterable[bytes | str | Record], *, partition: int | None = None
    ) -> list[tuple[int, int]]:
        return produce_to(producer, topic, records, partition=partition)

    return write


@pytest.fixture(scope="session")
def committed(admin: AdminClient) -> Callable[[str], Offsets]:
    """``committed(group)`` -> the committed offset of each partition."""
    return lambda group: committed_of(admin, group)


@pytest.fixture(scope="session")
def end_offsets(admin: AdminClient) -> Callable[[str], Offsets]:
    """``end_offsets(topic)`` -> the next offset of each partition."""
    return lambda topic: end_offsets_of(admin, topic)


@pytest.fixture(scope="session")
def spark(jvm: None, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator["SparkSession"]:
    """One local session with Delta for the whole run. Its JVM ends with this process, whose pipe it reads. With tests
    marked full it has Spark's defaults."""
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    scratch: Path = tmp_path_factory.mktemp("spark")
    builder = SparkSession.builder.master("local[2]").appName("tests")
    try:
        settings = local_spark_settings(scratch, avro=True)
    except SetupError:  # no release for this Spark: what needs it says so
        settings = local_spark_settings(scratch)
    quick = quick_spark.SMALL_STATEMENTS if "not full" in pytestconfig.option.markexpr else {}
    session = builder.config(map={**settings, **quick}).getOrCreate()
    session.sparkContext.setLogLevel("WARN")
    # PySpark's logger of failed statements would set its format for pytest's handler, for all later tests.
    PySparkLogger.addHandler = logging.Logger.addHandler  # type: ignore[assignment, method-assign]
    yield session
    for query in session.streams.active:
        query.stop()
    session.stop()
