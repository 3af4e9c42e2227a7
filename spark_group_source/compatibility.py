"""Supported versions of Spark, Python, Java and Delta Lake, and checks of the installed ones.

Runs in: the planner (at ``load()``), the user's driver, the command line. Deliberately absent: the libraries that pip
installs with this package; their versions are in pyproject.toml.

Spark is not a dependency of this package, so that installing it never changes the environment's Spark. Therefore this
module refuses what pip would refuse, with one line. A Spark is supported if it has the classes that the source uses;
its version is not compared."""

import importlib
import importlib.util
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from spark_group_source.errors import SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK: Final = "4.2"
"""The Spark version that all tests use and that :data:`DELTA` is released for."""
DELTA: Final = "4.4"
"""The supported Delta Lake version."""
PYTHON_MIN, PYTHON_MAX = (3, 11), (3, 13)
JAVA: Final = ("17", "21")

FEATURES: Final = {
    "pyspark.sql.datasource": ("DataSource", "DataSourceStreamReader", "InputPartition"),
    "pyspark.sql.streaming.datasource": ("ReadAllAvailable", "ReadLimit", "ReadMaxRows", "SupportsTriggerAvailableNow"),
}
"""The classes of Spark that the source uses, by module. Older versions of Spark lack the second module."""

REQUIREMENTS: Final = (
    f"this release is for Spark {SPARK} and newer, Python {'.'.join(map(str, PYTHON_MIN))} to "
    f"{'.'.join(map(str, PYTHON_MAX))}, Java {' or '.join(JAVA)}, Delta Lake {DELTA}"
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
    missing = _missing_feature()
    if missing is not None:
        remedy = f"Install a supported version, for example `pip install 'pyspark=={SPARK}.*'`, or use another platform"
        return f"Spark {_spark_version()} has no {missing}: {REQUIREMENTS}. {remedy}"
    return None


def _missing_feature() -> str | None:
    """The first of :data:`FEATURES` that this Spark lacks."""
    for module, names in FEATURES.items():
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
    """Refuse an unsupported Java or Delta Lake of a driver. Does nothing on Spark Connect, where neither is visible,
    and does not check Delta Lake on a platform that has its classes under other names.

    Raises:
        SetupError: as in :func:`check`.
    """
    jvm: Any = getattr(spark, "_jvm", None) if hasattr(spark, "_jsparkSession") else None
    if jvm is None:
        return
    java = str(jvm.java.lang.System.getProperty("java.specification.version"))
    if java not in JAVA:
        raise SetupError(
            f"Java {java} is not supported: {REQUIREMENTS}. Set JAVA_HOME to a supported Java and restart Spark"
        )
    delta = jvm.io.delta.package
    if type(delta).__name__ == "JavaClass" and not str(delta.VERSION()).startswith(f"{DELTA}."):
        raise SetupError(
            f"Delta Lake {delta.VERSION()} is not supported: {REQUIREMENTS}. Use the jars of "
            f"io.delta:delta-spark_{SPARK}_2.13:{DELTA}.0"
        )
