"""Which Spark, Python, Java and Delta Lake this release is made for, and whether they are what is here.

Runs in: the planner (at ``load()``), the user's driver, the command line. Deliberately absent: any import of what is
looked at: a version is read from what pip left beside a package, and another Spark may lack what ours imports.

Spark is nobody's dependency: it is the environment, and installing this package changes nothing of it. So what pip
would refuse is refused here, in one line.
"""

import importlib.util
import re
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from spark_group_source.errors import SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK: Final = "4.2"
"""The data source API and the jars beside it are one thing; another minor version is another API."""
DELTA: Final = "4.4"
PYTHON_MIN, PYTHON_MAX = (3, 11), (3, 13)
JAVA: Final = ("17", "21")

LIBRARIES: Final = {
    "confluent-kafka": ("confluent_kafka", (2, 16), (3,)),
    "pyarrow": ("pyarrow", (18,), (27,)),
    "pandas": ("pandas", (2, 2), (3,)),
}
"""By pip's name: the module, the first version that fits, and the first that does not; as in pyproject.toml."""

FITS: Final = (
    f"this release is for Spark {SPARK}, Python {'.'.join(map(str, PYTHON_MIN))} to "
    f"{'.'.join(map(str, PYTHON_MAX))}, Java {' or '.join(JAVA)}, Delta Lake {DELTA}"
)


def check() -> None:
    """Refuse a Python, a Spark, or a library that does not fit. Takes a few ms, and opens nothing.

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
    spark = version_of("pyspark", "pyspark")
    if spark is None:
        return f"there is no pyspark: {FITS}. pip install 'spark-group-source[local]' brings Spark and Delta Lake"
    if spark and not spark.startswith(f"{SPARK}."):
        return f"Spark {spark} does not fit: {FITS}. pip install 'pyspark=={SPARK}.*', or take a platform that has it"
    for name, (module, first, beyond) in LIBRARIES.items():
        version = version_of(name, module)
        wanted = f"'{name}>={_text(first)},<{_text(beyond)}'"
        if version is None:
            return f"there is no {name} in {sys.executable}: pip install {wanted}, on the driver and on every executor"
        if version and not first <= _numbers(version) < beyond:
            return f"{name} {version} does not fit: pip install {wanted}, on the driver and on every executor"
    return None


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


def version_of(name: str, module: str) -> str | None:
    """The version of a package, of what is loaded before what is installed; empty where it is there and does not say
    (in a zip, on a platform), None where it is not there."""
    loaded = sys.modules.get(module)
    if loaded is not None and hasattr(loaded, "__version__"):
        return str(loaded.__version__)
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "" if importlib.util.find_spec(module) is not None else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
