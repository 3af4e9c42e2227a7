"""What tests share: a real Kafka, a Spark session with Delta, and short words for topics, records and offsets.

Everything that starts a process is made once for each test worker and on demand, so a test that needs neither costs
nothing. Whatever starts a JVM asks for the fixture ``jvm`` (or has a marker that says so): ``make unit`` leaves those
tests out, and for all others there is no Java.
"""

import contextlib
import functools
import gc
import itertools
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
from kafka_words import (
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
from kit.broker_cluster import BrokerCluster
from rich.console import ConsoleDimensions
from scenes import WIDTH, Scene

from spark_group_source.cli import shared
from spark_group_source.local.conf import local_spark_settings
from spark_group_source.local.jars import delta_jars, kafka_tools_jars, spark_kafka_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "ADMIN_S",
    "Offsets",
    "Produce",
    "Record",
    "TopicFactory",
    "await_until",
    "committed_of",
    "create_topic",
    "end_offsets_of",
    "produce_to",
]

# An example's time says something of the machine alone: here others run beside it.
settings.register_profile("beside others", deadline=None)
settings.load_profile("beside others")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as in the background of a shell: what tests start would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's Python workers: else python3 of the PATH

# Else as wide as COLUMNS said when it was imported, which readline sets to 80 for whatever pytest-xdist starts.
shared.console.size = ConsoleDimensions(WIDTH, 25)

JVM_MARKERS = ("broker", "spark", "crash")
"""Markers of tests that start JVMs by themselves, without the fixture ``jvm``."""

ROOT = Path(__file__).resolve().parent.parent

TABLES = ("tests/delta/", "tests/source/", "tests/rebalance/test_spark.py", "tests/security/test_spark.py")
"""Spark tests that share one session; the others share a second one, or start programs with a Spark of their own."""

LANES = ("tables", "programs", "cluster", "security")
"""Tests that run one after another, in one worker, because they share what is dear to start; the longest lane is the
first. Whatever starts a Spark is in one of the first two, so at most two are alive."""

SHARED_JAVA_OPTIONS = ("-Xms256m", "-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
"""Of the broker that all workers use: it has the topics of all tests at the end."""

JAVA_HOME = os.environ.get("JAVA_HOME")
NO_JAVA = "/no/java/here/ask/for/the/fixture/jvm"
"""JAVA_HOME of tests that start no JVM; the error of one that does shows it."""

_numbers = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove", choices=list(proofs.GUARANTEES), help="only the tests that are marked to prove it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs a JVM, and let what takes long begin first: workers then end at about the same time."""
    if (guarantee := config.getoption("prove")) is not None:
        proving = [i for i in items if any(mark.args == (guarantee,) for mark in i.iter_markers("proves"))]
        config.hook.pytest_deselected(items=[item for item in items if item not in proving])
        items[:] = proving
    for item in items:
        if "jvm" in getattr(item, "fixturenames", ()) or any(map(item.get_closest_marker, JVM_MARKERS)):
            item.add_marker("jvm")
        _check_levels(item)
    items.sort(
        key=lambda item: (
            LANES.index(lane) if (lane := _lane(item.nodeid.split("::")[0])) else len(LANES),
            item.get_closest_marker("slow") is None,
        )
    )


def _check_levels(item: pytest.Item) -> None:
    """A test starts what its level of a proof says: Spark, else a broker, else nothing."""
    spark = any(map(item.get_closest_marker, ("spark", "crash")))
    real = ("spark",) if spark else ("kafka",) if item.get_closest_marker("jvm") else ("core", "simulation")
    for mark in item.iter_markers("proves"):
        if mark.kwargs["level"] not in real:
            raise pytest.UsageError(f"{item.nodeid} proves {mark.args[0]} at one of {real}, by what it starts")


@functools.cache
def _lane(file: str) -> str | None:
    """The lane of a file's tests, by what its text says: the process that shares the tests out knows names only."""
    text = (ROOT / file).read_text()
    if "mark.spark" in text or "mark.crash" in text:
        return "tables" if file.startswith(TABLES) else "programs"
    if file.startswith("tests/faults/") or re.search(r"\bcluster: ", text):
        return "cluster"
    return "security" if file.startswith("tests/security/") else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name what fails at once: a run that is ended from outside, as by its time limit, comes to no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        sys.stderr.write(f"\n{report.when} failed after {report.duration:.0f} s: {report.nodeid}\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each lane to one worker; the other tests one by one to whichever is free. Their order is the collection's."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return _lane(nodeid.split("::", maxsplit=1)[0]) or nodeid

    config.option.loadscopereorder = False  # else the lane with the most tests begins first, however short they are
    return Lanes(config, log)


_shared: list[BrokerCluster] = []
"""In the process that starts the test workers: the broker that all of them use."""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start one Kafka for all workers before the first of them, unless no test needs it. It ends with this process,
    however that ends. What is downloaded once for a machine is there then: no test waits for it."""
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


# The threads of admin clients run Python for moments, in which garbage may be collected: an admin client that is
# found there is ended by its own thread, and for that librdkafka ends the process.
gc.disable()
COLLECT_EVERY_S = 5.0
_collected_s = [0.0]


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection looks at it again."""
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
    """A test that starts a JVM must say so: for the others there is none."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("jvm") is None:
            patch.setenv("JAVA_HOME", NO_JAVA)
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every Spark that a test starts, in this process or another, begins in half the CPU time."""
    if not any(item.get_closest_marker("jvm") for item in request.session.items):
        yield
        return
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as java:  # the test that asks for this first may be one that has none
            java.setenv("JAVA_HOME", JAVA_HOME) if JAVA_HOME else java.delenv("JAVA_HOME", raising=False)
            stack.enter_context(quick_spark.prepared())
            home, options = str(quick_spark.home()), quick_spark.submit_options()
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SPARK_HOME", home)
        patch.setenv("SPARK_SUBMIT_OPTS", options)
        yield


@pytest.fixture(scope="session")
def jvm() -> None:
    """Asked for by every fixture and test that starts a JVM."""


def _unique(request: pytest.FixtureRequest, kind: str) -> str:
    test = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60].strip("-")
    return f"{kind}-{test}-{os.getpid()}-{next(_numbers)}"


class SharedBroker(NamedTuple):
    """Where the broker listens that all workers use."""

    bootstrap_servers: str
    sasl_bootstrap_servers: str


@pytest.fixture(scope="session")
def broker(jvm: None, request: pytest.FixtureRequest) -> Iterator[BrokerCluster | SharedBroker]:
    """One Kafka node for all tests, in all workers. A test that kills or pauses a node uses ``cluster``, or its own."""
    servers = getattr(request.config, "workerinput", {}).get("servers")
    if servers is not None:
        yield SharedBroker(*servers)
        return
    with BrokerCluster(sasl={SASL_USER: SASL_PASSWORD}) as started:
        yield started


@pytest.fixture(scope="session")
def cluster(jvm: None) -> Iterator[BrokerCluster]:
    """Three Kafka nodes. A test may stop, kill and pause them, and leaves them as they were."""
    with BrokerCluster(nodes=3) as started:
        yield started


@pytest.fixture(scope="session")
def admin(broker: SharedBroker) -> AdminClient:
    """Kafka's admin client. It lives as long as the run: one that is collected drops the answers still under way."""
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 3})


@pytest.fixture(scope="session")
def producer(broker: SharedBroker) -> Producer:
    return Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 2, "acks": "all", "log_level": 3})


@pytest.fixture
def topic(admin: AdminClient, request: pytest.FixtureRequest) -> TopicFactory:
    """``topic(partitions=1, config=None, name=None)`` creates a topic of its own and returns its name."""

    def create(partitions: int = 1, *, config: Mapping[str, str] | None = None, name: str | None = None) -> str:
        return create_topic(admin, name or _unique(request, "t"), partitions, config=config)

    return create


@pytest.fixture
def group_id(request: pytest.FixtureRequest) -> str:
    """A consumer group that no other test uses."""
    return _unique(request, "g")


@pytest.fixture
def scene(jvm: None, request: pytest.FixtureRequest, group_id: str) -> Scene:
    """The test's group, and all that it uses of Kafka and Spark."""
    return Scene(request, group_id)


@pytest.fixture(scope="session")
def produce(producer: Producer) -> Produce:
    """``produce(topic, records, partition=None)`` -> [(partition, offset)] once all are acknowledged.

    A record is a value (bytes or text) or a :class:`Record`.
    """

    def write(
        topic: str, records: Iterable[bytes | str | Record], *, partition: int | None = None
    ) -> list[tuple[int, int]]:
        return produce_to(producer, topic, records, partition=partition)

    return write


@pytest.fixture(scope="session")
def committed(admin: AdminClient) -> Callable[[str], Offsets]:
    """``committed(group)`` -> the next offset of each partition that the group has committed."""
    return lambda group: committed_of(admin, group)


@pytest.fixture(scope="session")
def end_offsets(admin: AdminClient) -> Callable[[str], Offsets]:
    """``end_offsets(topic)`` -> the next offset of each partition."""
    return lambda topic: end_offsets_of(admin, topic)


@pytest.fixture(scope="session")
def spark(jvm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """One local session with Delta for the whole run. Its JVM ends with this process: it reads our end of a pipe."""
    from pyspark.sql import SparkSession

    scratch: Path = tmp_path_factory.mktemp("spark")
    builder = SparkSession.builder.master("local[2]").appName("tests")
    for key, value in local_spark_settings(scratch).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("WARN")
    yield session
    for query in session.streams.active:
        query.stop()
    session.stop()
