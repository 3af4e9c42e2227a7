"""Which Spark, Python, Java and Delta Lake fit, and whether they are what is here.

Runs in: the planner (at ``load()``), the user's driver, the command line. Deliberately absent: the libraries that pip
installs with this package; their versions are in pyproject.toml.

Spark is not a dependency of this package: it is the environment, and installing this package changes nothing of it. So
what pip would refuse is refused here, in one line. A Spark fits if it has the classes that the source derives from; its
version is not compared.
"""

import importlib
import importlib.util
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from spark_group_source.errors import SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK: Final = "4.2"
"""The Spark that all tests run on and that :data:`DELTA` is released for."""
DELTA: Final = "4.4"
PYTHON_MIN, PYTHON_MAX = (3, 11), (3, 13)
JAVA: Final = ("17", "21")

FEATURES: Final = {
    "pyspark.sql.datasource": ("DataSource", "DataSourceStreamReader", "InputPartition"),
    "pyspark.sql.streaming.datasource": ("ReadAllAvailable", "ReadLimit", "ReadMaxRows", "SupportsTriggerAvailableNow"),
}
"""What the source needs of a Spark, by module: older ones lack the second one."""

FITS: Final = (
    f"this release is for Spark {SPARK} and newer, Python {'.'.join(map(str, PYTHON_MIN))} to "
    f"{'.'.join(map(str, PYTHON_MAX))}, Java {' or '.join(JAVA)}, Delta Lake {DELTA}"
)


def check() -> None:
    """Refuse a Python or a Spark that does not fit. Opens nothing.

    Raises:
        SetupError: one line: what is here, what would fit, and what to install.
    """
    trouble = problem()
    if trouble is not None:
        raise SetupError(trouble)


def problem() -> str | None:
    """What :func:`check` would say, or None."""
    python = sys.version_info[:2]
    if not PYTHON_MIN <= python <= PYTHON_MAX:
        return f"Python {python[0]}.{python[1]} ({sys.executable}) does not fit: {FITS}"
    if importlib.util.find_spec("pyspark") is None:
        return f"there is no pyspark: {FITS}. pip install 'spark-group-source[local]' brings Spark and Delta Lake"
    missing = _missing()
    if missing is not None:
        remedy = f"pip install 'pyspark=={SPARK}.*', or take a platform that has it"
        return f"Spark {_version()} has no {missing}: {FITS}. {remedy}"
    return None


def _missing() -> str | None:
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


def _version() -> str:
    """Of Spark, for messages; a platform may not say it."""
    try:
        return str(getattr(sys.modules.get("pyspark"), "__version__", None) or metadata.version("pyspark"))
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def check_session(spark: "SparkSession") -> None:
    """Refuse the Java or the Delta Lake of a driver, where they can be seen: not on Spark Connect, and not where a
    platform has Delta's classes under other names.

    Raises:
        SetupError: as :func:`check`.
    """
    jvm: Any = getattr(spark, "_jvm", None) if hasattr(spark, "_jsparkSession") else None
    if jvm is None:
        return
    java = str(jvm.java.lang.System.getProperty("java.specification.version"))
    if java not in JAVA:
        raise SetupError(f"Java {java} does not fit: {FITS}. Set JAVA_HOME to one of them and start Spark again")
    delta = jvm.io.delta.package
    if type(delta).__name__ == "JavaClass" and not str(delta.VERSION()).startswith(f"{DELTA}."):
        raise SetupError(
            f"Delta Lake {delta.VERSION()} does not fit: {FITS}. Take the jars of "
            f"io.delta:delta-spark_{SPARK}_2.13:{DELTA}.0"
        )
