"""Downloads the jars of the demo and most tests, and halves the time in which brokers start.

Runs in: ``.ci/setup``. Deliberately absent: the jars that only single tests need.

Loading several thousand classes takes most of the time of a start. A broker that is started and stopped here once
stores them in the cache folder as a class data sharing archive, which later JVMs map into memory.
"""

import os
import sys
import tempfile
from pathlib import Path

from spark_group_source.errors import SourceError
from spark_group_source.local.broker import JAVA_OPTIONS, Broker, class_archive
from spark_group_source.local.jars import cache_dir, delta_jars, java_path, kafka_jars


def main() -> None:
    """Download and prepare what is not there yet."""
    kafka = kafka_jars()
    for name, found in (("Kafka", kafka), ("Delta Lake", delta_jars())):
        print(f"{name}: {len(found)} jars" + (f" in {found[0].parent}" if found else ""))
    archive = class_archive(java_path(), os.pathsep.join(map(str, kafka)))
    if archive.is_file():
        return
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".prepare-") as scratch:
        unfinished = Path(scratch) / "classes.jsa"
        options = (*JAVA_OPTIONS, f"-XX:ArchiveClassesAtExit={unfinished}")
        with Broker(java_options=options, data_dir=Path(scratch) / "broker"):
            pass  # a clean stop: the JVM writes the archive at its end
        if unfinished.is_file():  # the storage tool wrote one too, and the node replaced it
            unfinished.replace(archive)


if __name__ == "__main__":
    try:
        main()
    except SourceError as exc:
        sys.exit(str(exc))
