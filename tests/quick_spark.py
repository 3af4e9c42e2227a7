"""Sparks that start in half the CPU time, for tests: whatever starts one does so dozens of times.

- Its JVM leaves out the second compiler, which pays off after minutes only. It keeps as much compiled code as one with
  both: with the default of one compiler, 48 MB, a fifth of the CPU time of a long run goes into removing code.
- Its Python processes import the installed package: this ``SPARK_HOME`` has no ``pyspark.zip``, whose modules each of
  them would compile anew.
- Its classes are mapped into memory from an archive (class data sharing), as those of brokers are
  (``.ci/jars.py``). The first run that needs it makes it, beside its tests: a Spark that begins before it is
  there begins without it.
"""

import contextlib
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from unittest.mock import patch

from spark_group_source.local.conf import DELTA_SETTINGS, linked_spark_home, local_spark_settings
from spark_group_source.local.jars import cache_dir, delta_jars, java_path

OPTIONS = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"
SMALL_STATEMENTS = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
"""Settings with which hundreds of statements over a few rows take a third less CPU time: no classes are generated and
compiled for them, and none is planned anew between its stages."""
MAKE_S = 900
"""Bound of the program that makes the archive."""
END_S = 120


def home() -> Path:
    """What ``SPARK_HOME`` is to be. An archive fits class paths of the same names only, so every run has the same."""
    return linked_spark_home(cache_dir())


def submit(*words: str, jars: Iterable[Path] = ()) -> list[str]:
    """``spark-submit`` with Delta Lake and further jars, as documents give it, but with ``--jars`` in place of
    ``--packages``."""
    settings = [word for name, value in DELTA_SETTINGS.items() for word in ("--conf", f"{name}={value}")]
    command = str(Path(sys.executable).with_name("spark-submit"))
    return [command, "--jars", ",".join(map(str, [*delta_jars(), *jars])), *settings, *words]


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Let whatever starts a Spark start such a one until the block ends. The archive is made meanwhile, if it is not
    there and no other process creates it; a JVM goes on without it where it is missing or does not fit."""
    archive = _archive()
    options = f"{OPTIONS} -XX:SharedArchiveFile={archive} -Xlog:disable -Xlog:all=error:stderr"
    quick = patch.dict(os.environ, SPARK_HOME=str(home()), SPARK_SUBMIT_OPTS=options)
    with archive.with_suffix(".lock").open("w") as lock, quick:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield
            return
        if archive.is_file():
            yield
            return
        maker = subprocess.Popen(
            [sys.executable, __file__],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(maker.pid, signal.SIGKILL)
            maker.wait(END_S)


def make() -> None:
    """Do once what every test's Spark does, and keep the classes that it took."""
    from pyspark.sql import SparkSession

    os.nice(5)  # it is in no hurry
    signal.alarm(MAKE_S)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".prepare-") as scratch:
        unfinished = Path(scratch) / "classes.jsa"
        os.environ |= {
            "SPARK_HOME": str(home()),
            "SPARK_SUBMIT_OPTS": f"{OPTIONS} -XX:ArchiveClassesAtExit={unfinished}",
        }
        settings = local_spark_settings(scratch)
        spark = SparkSession.builder.master("local[2]").config(map={**settings}).getOrCreate()
        table = str(Path(scratch) / "table")
        kind = "delta" if DELTA_SETTINGS.keys() <= settings.keys() else "parquet"
        stream = spark.readStream.format("rate").load().writeStream.format(kind).trigger(availableNow=True)
        stream.option("checkpointLocation", str(Path(scratch) / "checkpoint")).start(table).awaitTermination()
        spark.range(10).write.format(kind).mode("append").option("mergeSchema", "true").save(f"{table}-of-batches")
        spark.read.format(kind).load(f"{table}-of-batches").collect()
        gateway = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
        spark.stop()
        gateway.stdin.close()  # the JVM ends in order, and writes the archive on its way out
        gateway.wait(MAKE_S)
        unfinished.replace(_archive())


def _archive() -> Path:
    return cache_dir() / f"spark-classes-{_digest(f'{java_path().resolve()} {home()}')}.jsa"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


if __name__ == "__main__":
    make()
