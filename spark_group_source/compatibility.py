"""Supported versions of Spark, Python, Java and Delta Lake, and checks of what is installed in each process.

Runs in: Spark's planning worker (at ``load()``), the user's driver, the command line; every process that unpickles the
source. Deliberately absent: the libraries that pip installs with this package; their versions are in pyproject.toml.

Spark is not a dependency of this package, so that installing it never changes the environment's Spark. Therefore this
module refuses what pip would refuse, with one line. A Spark is supported if it has the classes that the source uses. No
other module compares versions of Spark.

Executors check that they have this package, in the driver's version: see :class:`CheckedPickle`."""

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import re
import socket
import sys
import types
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import spark_group_source
from spark_group_source.errors import SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

SPARK: Final = "4.2"
"""The Spark version that all tests use."""
SPARK_TESTED: Final = ("4.0", "4.1", "4.2", "4.3")
"""The versions of Spark that the tests of ``tests/matrix`` use."""
DELTA: Final = "4.4"
"""The Delta Lake version that all tests use. Any version that runs on a supported Spark has what the sink uses."""
DELTA_TESTED: Final = ("4.0", "4.1", "4.4")
"""The versions of Delta Lake that the tests of ``tests/matrix`` use."""
DELTA_SPARK: Final = ("4.0", "4.1", "4.2")
"""The versions of Spark that :data:`DELTA` is released for."""
AVRO: Final = "4.2.0"
AVRO_OF_SPARK: Final = {"4.0": "4.0.0", "4.1": "4.1.1"}
"""By Spark's version: a release of ``spark-avro``, of which Maven does not have all that the index of Python packages
has of Spark: for 4.1 one, for 4.3 none. :data:`AVRO` works with all others."""
PYTHON_MIN, PYTHON_MAX = (3, 11), (3, 14)
JAVA_TESTED: Final = ("17", "21", "25")
"""The versions of Java that the tests of ``tests/matrix`` use. Spark 4 starts on none before 17."""
PACKAGES: Final = ("spark_group_source", "confluent_kafka", "numpy", "pyarrow")
"""The packages without which no process can read or plan."""

FEATURES: Final = {"pyspark.sql.datasource": ("DataSource", "DataSourceStreamReader", "InputPartition")}
"""The classes of Spark that the source uses, by module. Spark 3.5 lacks the module."""
ADMISSION_CONTROL: Final = {
    "pyspark.sql.streaming.datasource": ("ReadAllAvailable", "ReadLimit", "ReadMaxRows", "SupportsTriggerAvailableNow")
}
"""The same for Sparks that pass the batch's start and the trigger to the source: Spark 4.2 and newer. Spark 4.0 and 4.1
lack the module."""

REQUIREMENTS: Final = (
    f"this release is for Spark {SPARK_TESTED[0]} and newer, Python {'.'.join(map(str, PYTHON_MIN))} to "
    f"{'.'.join(map(str, PYTHON_MAX))}, Java {JAVA_TESTED[0]} and newer, Delta Lake {DELTA_TESTED[0]} and newer"
)


def check() -> None:
    """Refuse an unsupported Python or Spark. Opens nothing.

    Raises:
        SetupError: one line with the installed version, the supported ones, and what to install.
    """
    found = problem()
    if found is not None:
        raise SetupError(found)


def problem() -> str | None:
    """Return the message of the error that :func:`check` would raise, or None."""
    python = sys.version_info[:2]
    if not PYTHON_MIN <= python <= PYTHON_MAX:
        return f"Python {python[0]}.{python[1]} ({sys.executable}) is not supported: {REQUIREMENTS}"
    if importlib.util.find_spec("pyspark") is None:
        return (
            f"pyspark is not installed: {REQUIREMENTS}. Install Spark and Delta Lake with "
            f"`pip install 'pyspark[sql]=={SPARK}.0' 'delta-spark=={DELTA}.0'`"
        )
    missing = _missing_feature(FEATURES) or (_missing_feature(ADMISSION_CONTROL) if has_admission_control() else None)
    if missing is not None:
        remedy = f"Install a supported version, for example `pip install 'pyspark=={SPARK}.*'`, or use another platform"
        return f"Spark {_spark_version()} has no {missing}: {REQUIREMENTS}. {remedy}"
    for name in PACKAGES:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            return (
                f"{sys.executable} has no package {name}: {REQUIREMENTS}. Install it there with "
                f"`pip install {name.replace('_', '-')}`, or install this package with all that it requires"
            )
    _log_untested(
        "Spark",
        _spark_version(),
        spark_minor(),
        SPARK_TESTED,
        "; it has the classes that the source uses, so it is accepted",
    )
    return None


def has_admission_control() -> bool:
    """Whether this Spark passes the batch's start and the trigger to a Python source, and calls it again after the last
    batch of an AvailableNow run."""
    try:
        importlib.import_module(*ADMISSION_CONTROL)
    except ImportError:
        return False
    return True


def spark_minor() -> str:
    """The installed Spark's version without its patch number, such as ``4.2``; empty if it is unknown."""
    numbers = re.match(r"\d+\.\d+", _spark_version())
    return numbers[0] if numbers else ""


@functools.cache
def _log_untested(name: str, version: str, minor: str, tested: tuple[str, ...], more: str = "") -> None:
    """Log once that this version is accepted although no test uses it."""
    if minor not in tested:
        log.warning(
            "%s %s is not tested with this release, which is tested with %s %s%s",
            name,
            version,
            name,
            ", ".join(tested),
            more,
        )


def _missing_feature(features: Mapping[str, Sequence[str]]) -> str | None:
    """The first of these classes that this Spark lacks."""
    for module, names in features.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            return module
        for name in names:
            if not hasattr(found, name):
                return f"{module}.{name}"
    return None


def _spark_version() -> str:
    """The version of Spark for messages; not every platform reports it."""
    try:
        return str(getattr(sys.modules.get("pyspark"), "__version__", None) or metadata.version("pyspark"))
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def check_session(spark: "SparkSession") -> None:
    """Log once that a driver's Java or Delta Lake is not tested. Does nothing on Spark Connect, where neither is
    visible, nor for Delta Lake on a platform that has its classes under other names."""
    jvm: Any = getattr(spark, "_jvm", None) if hasattr(spark, "_jsparkSession") else None
    if jvm is None:
        return
    java = str(jvm.java.lang.System.getProperty("java.specification.version"))
    _log_untested("Java", java, java, JAVA_TESTED)
    delta = jvm.io.delta.package
    if type(delta).__name__ == "JavaClass":
        version = str(delta.VERSION())
        _log_untested("Delta Lake", version, ".".join(version.split(".")[:2]), DELTA_TESTED)


def has_delta_release() -> bool:
    """Whether Delta Lake has a release for the installed Spark."""
    return (spark_minor() or SPARK) in DELTA_SPARK


def on_databricks() -> bool:
    """Whether this process runs in a Databricks runtime, which sets this variable in all of its processes."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def delta_coordinate() -> str:
    """The Maven coordinate of :data:`DELTA` for the installed Spark, as ``group:artifact:version``.

    Raises:
        SetupError: Delta Lake has no release for it.
    """
    if not has_delta_release():
        raise SetupError(
            f"Delta Lake {DELTA} has no release for Spark {_spark_version()}: its releases are for Spark "
            f"{', '.join(DELTA_SPARK)}. Use one of them, or DeltaSink without Delta Lake in the session"
        )
    return f"io.delta:delta-spark_{spark_minor() or SPARK}_2.13:{DELTA}.0"


def avro_coordinate() -> str:
    """The Maven coordinate of Spark's Avro functions for the installed Spark, as ``group:artifact:version``."""
    return f"org.apache.spark:spark-avro_2.13:{AVRO_OF_SPARK.get(spark_minor() or SPARK, AVRO)}"


# --- executors ------------------------------------------------------------------------------------------------------


class CheckedPickle:
    """Base of classes that Spark pickles: unpickling checks the packages of the process first.

    A task starts by unpickling the reader, which imports this package. If the import fails, Spark shows a stack trace
    of its own serializer. So the reader is pickled as bytes, together with a function that Spark pickles by value, like
    every function of a program's main module. The function reports what is missing before it unpickles the bytes.

    Outside tasks it also sets the module search path of the process that pickled it. That of
    Spark's planning worker has the modules of ``--py-files``. Spark passes these to it and to tasks, but not to the
    stream reader on the same host.

    Raises:
        SetupError: when unpickled where a package is missing, or has another version than on the driver.
    """

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        from pyspark import cloudpickle

        state = self.__getstate__()
        content = cloudpickle.dumps((type(self), state))
        return _BY_VALUE, (spark_group_source.__version__, PACKAGES, tuple(sys.path), content)


def _unpickle(version: str, packages: Sequence[str], path: Sequence[str], content: bytes) -> Any:
    """Check the packages, then unpickle. It runs where this module may be missing, so it uses only its arguments."""
    import importlib.util
    import pickle
    import socket
    import sys

    from pyspark import TaskContext

    is_task = TaskContext.get() is not None
    if not is_task:  # on the host that pickled it
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    where = f"{sys.executable} on {socket.gethostname()}"
    problem = ""
    for name in packages:
        if not problem and name not in sys.modules and importlib.util.find_spec(name) is None:
            problem = (
                f"{where} has no package {name}. Install spark-group-source on every executor, or ship it with "
                "spark-submit --archives or --py-files"
            )
    if not problem:
        import spark_group_source as package

        installed = package.__version__
        if installed != version:
            problem = (
                f"{where} has spark-group-source {installed}, but the driver has {version}. Install the same version "
                "on the driver and on every executor"
            )
    if problem:
        # The package may be missing, so this class only has the name of its SetupError.
        raise type("SetupError", (ImportError,), {"__module__": "spark_group_source.errors"})(problem)
    kind, state = pickle.loads(content)
    found = object.__new__(kind)
    found.__dict__.update(state)
    if is_task:
        from spark_group_source.compatibility import acknowledge_at_once

        acknowledge_at_once()  # the executor's TCP still holds back the task's partition
    return found


_BY_VALUE = types.FunctionType(_unpickle.__code__, {"__builtins__": __builtins__, "__name__": "__main__"}, "unpickle")
_BY_VALUE.__module__ = "__main__"


def acknowledge_at_once() -> None:
    """Acknowledge what this process received on its TCP connections.

    Spark sends a task's reader to the Python worker, then its partition. The executor's TCP holds the second back until
    the first is acknowledged (RFC 896; Spark does not set TCP_NODELAY), which Linux delays by 40 ms because it expects
    an answer to send it with (RFC 1122, 4.2.3.2): most of a small task's time. One early acknowledgement is harmless,
    so no connection is left out. Does nothing without Linux or /proc, and on Unix sockets.
    """
    if not hasattr(socket, "TCP_QUICKACK") or socket.getdefaulttimeout() is not None:
        return  # Python would make the connections non-blocking
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # no socket, or no TCP
                connection = socket.socket(fileno=int(name))
                try:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                finally:
                    connection.detach()  # it belongs to others
