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
    """A settings file of ``conf/``: ``key=value`` (Java properties) or ``key value`` (Spark defaults) lines.

    Raises:
        FileNotFoundError: see :func:`conf_path`.
        ValueError: see :func:`pairs_in`.
    """
    return pairs_in(conf_path(name).read_text(encoding="utf-8"), name, " " if name.endswith(".conf") else "=")


def pairs_in(text: str, where: str, separator: str = "=") -> dict[str, str]:
    """The keys and values of lines; ``#`` starts a comment line.

    Args:
        where: the file, for errors.

    Raises:
        ValueError: a line has a key without a value, or a key is there twice. The message shows no value.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        key, has_value, value = line.partition(separator)
        if not has_value or not key.strip():
            raise ValueError(f"{where}, line {number}: write key{separator}value")
        if key.strip() in found:
            raise ValueError(f"{where}, line {number}: {key.strip()!r} is there twice")
        found[key.strip()] = value.strip()
    return found


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
