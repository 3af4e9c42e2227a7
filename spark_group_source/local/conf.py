"""Where the project's settings files are, in a checkout and in an installed package.

Runs in: tests, the demo, the command line. Deliberately absent: the source's own options (``options``).
"""

import sys
from pathlib import Path

from spark_group_source.local.jars import delta_jars

_PACKAGE = Path(__file__).resolve().parent.parent


def conf_path(name: str) -> Path:
    """The settings file ``name`` of ``conf/``: the wheel carries it inside the package, a checkout beside it.

    Raises:
        FileNotFoundError: neither place has it.
    """
    places = [_PACKAGE / "conf" / name, _PACKAGE.parent / "conf" / name]
    for path in places:
        if path.is_file():
            return path
    raise FileNotFoundError(f"settings file {name!r} is in neither {places[0].parent} nor {places[1].parent}")


def read_conf(name: str) -> dict[str, str]:
    """Read a file of ``key=value`` (Java properties) or ``key value`` (Spark defaults) lines; ``#`` starts a comment.

    Raises:
        FileNotFoundError: see :func:`conf_path`.
        ValueError: a line has a key without a value, or a key stands twice.
    """
    separator = " " if name.endswith(".conf") else "="
    settings: dict[str, str] = {}
    for number, line in enumerate(conf_path(name).read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        key, found, value = text.partition(separator)
        if not found or key.strip() in settings:
            raise ValueError(f"{name}:{number}: {'no value in' if not found else 'second'} {text!r}")
        settings[key.strip()] = value.strip()
    return settings


def local_spark_settings(scratch: str | Path) -> dict[str, str]:
    """Settings of a Spark session on this machine that can write Delta tables: ``conf/spark-defaults.conf`` and more.

    They take effect only in the first session of a process: the JVM starts with it.

    Args:
        scratch: an existing directory for the warehouse and Spark's own files.

    Raises:
        SetupError: Delta's jars cannot be downloaded.
    """
    return read_conf("spark-defaults.conf") | {
        "spark.jars": ",".join(map(str, delta_jars())),
        # The temporary directory too: Spark's default of /tmp keeps what a killed JVM leaves.
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={conf_path('log4j2.properties')} -Djava.io.tmpdir={scratch}"
        ),
        "spark.sql.warehouse.dir": str(Path(scratch) / "warehouse"),
        "spark.pyspark.python": sys.executable,
        "spark.pyspark.driver.python": sys.executable,
    }
