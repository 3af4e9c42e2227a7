"""The project's settings files, in a checkout and in an installed package.

Runs in: tests, the demo, the command line. Deliberately absent: the source's own options (``options``).
"""

import contextlib
import hashlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from spark_group_source.local.jars import avro_jars, contains_delta, delta_jars

log = logging.getLogger(__name__)

DELTA_SETTINGS: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}

AVRO_LIMITS: Final = (
    "-Dorg.apache.avro.limits.string.maxLength=67108864 "
    "-Dorg.apache.avro.limits.bytes.maxLength=67108864 "
    "-Dorg.apache.avro.limits.collectionItems.maxLength=10000000"
)
"""Java options that bound what Avro allocates for one value. It trusts the lengths in a value: without them a broken
record of 20 bytes takes 2 GB, and ends the executor."""

_PACKAGE = Path(__file__).resolve().parent.parent


def conf_path(name: str) -> Path:
    """The settings file ``name`` of ``conf/``, which is inside the package in a wheel and beside it in a checkout.

    Raises:
        FileNotFoundError: it is in neither place.
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
    """Parse lines of keys and values; ``#`` starts a comment line. A line that ends with a backslash continues in the
    next one, as in the files of Kafka's tools; any other backslash is part of a value.

    Args:
        where: the file name for errors.

    Raises:
        ValueError: a line has no value, or a key appears twice. The message contains no value.
    """
    found: dict[str, str] = {}
    for number, line in numbered_lines(text):
        if not line or line.startswith("#"):
            continue
        key, has_value, value = line.partition(separator)
        if not has_value or not key.strip():
            raise ValueError(f"{where}, line {number}: must be key{separator}value")
        if key.strip() in found:
            raise ValueError(f"{where}, line {number}: {key.strip()!r} appears twice")
        found[key.strip()] = value.strip()
    return found


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with the number of its first part: one that ends with a backslash continues in the next one."""
    parts = enumerate(map(str.strip, text.splitlines()), start=1)
    for number, first in parts:
        line = first
        while not line.startswith("#") and (len(line) - len(line.rstrip("\\"))) % 2 == 1:
            line = line[:-1] + next(parts, (0, ""))[1]
        yield number, line


def delta_settings() -> dict[str, str]:
    """The jars and settings by which a session has Delta Lake; empty if it has no release for the installed Spark.

    Raises:
        SetupError: Delta's jars cannot be downloaded.
    """
    jars = delta_jars()
    if not jars and not contains_delta():
        log.warning(
            'Delta Lake has no release for the installed Spark: the session has no format("delta"), and DeltaSink '
            "writes natively, outside local file systems with storage_options only"
        )
        return {}
    return DELTA_SETTINGS | ({"spark.jars": ",".join(map(str, jars))} if jars else {})


def linked_spark_home(parent: Path) -> Path:
    """A ``SPARK_HOME`` in ``parent`` with links to the pyspark that pip installed.

    Python processes of such a Spark import the installed modules. With the installed ``SPARK_HOME`` they find
    ``pyspark.zip`` first, and each process compiles every module that it imports, which takes a second or two.

    Raises:
        OSError: ``parent`` cannot be written, or pyspark is part of an unpacked Spark, which has a ``SPARK_HOME``.
    """
    import pyspark

    installed = Path(pyspark.__file__).parent
    if not (installed / "jars").is_dir():
        raise FileNotFoundError(f"{installed} has no jars: set SPARK_HOME")
    home = parent / f"spark-home-{hashlib.sha256(str(installed).encode()).hexdigest()[:8]}"
    home.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "conf", "jars"):
        with contextlib.suppress(FileExistsError):
            (home / name).symlink_to(installed / name)
    return home


def local_spark_settings(scratch: str | Path, *, avro: bool = False) -> dict[str, str]:
    """Settings for a Spark session on this machine with Delta Lake: ``conf/spark-defaults.conf``, jars and directories.

    They take effect only in the first session of a process, which starts the JVM. Where Delta Lake has no release for
    the installed Spark, the session has none.

    Args:
        scratch: an existing directory for the warehouse and temporary files.
        avro: whether the session has Spark's functions for Avro, too, which ``decode.avro`` needs, and AVRO_LIMITS.

    Raises:
        SetupError: jars cannot be downloaded.
    """
    delta = delta_settings()
    jars = ",".join([*filter(None, [delta.get("spark.jars")]), *map(str, avro_jars() if avro else ())])
    return (
        read_conf("spark-defaults.conf")
        | delta
        | ({"spark.jars": jars} if jars else {})
        | ({"spark.executor.extraJavaOptions": AVRO_LIMITS} if avro else {})
        | {
            # Also the temporary directory: a killed JVM would leave files in /tmp. Quoted, as paths may contain spaces.
            "spark.driver.extraJavaOptions": (
                f'"-Dlog4j2.configurationFile={conf_path("log4j2.properties")}" "-Djava.io.tmpdir={scratch}"'
                + (f" {AVRO_LIMITS}" if avro else "")
            ),
            "spark.sql.warehouse.dir": str(Path(scratch) / "warehouse"),
            "spark.pyspark.python": sys.executable,
            "spark.pyspark.driver.python": sys.executable,
        }
    )
