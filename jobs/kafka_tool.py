"""``kafka-consumer-groups``: what Kafka's own tool prints of a group, for comparisons.

Runs in: the demo, tests. Deliberately absent: Kafka's other tools.
"""

import os
import re
import subprocess
from pathlib import Path

from spark_group_source.local import jars

COORDINATES = (f"org.apache.kafka:kafka-tools:{jars.KAFKA_VERSION}", jars.KAFKA_COORDINATES[1])
EXCLUDE = tuple(
    f"org.apache.kafka:{artifact}"
    for artifact in ("connect-api", "connect-json", "connect-runtime", "connect-transforms")
)
"""Kafka Connect with a web server; the group tools do not need it."""
TOOL_S = 60
"""Bound of one call of the tool."""
TOOL_CLASS = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
JAVA_OPTIONS = ("-Xshare:auto", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dlog4j2.level=OFF")


def kafka_tools_jars() -> list[Path]:
    """The class path of Kafka's own command line."""
    return jars.resolve(COORDINATES, exclude=EXCLUDE, mb=33)


def kafka_consumer_groups(servers: str, *arguments: str) -> str:
    """Run ``kafka-consumer-groups.sh --bootstrap-server SERVERS …`` and return its output with errors.

    Raises:
        subprocess.TimeoutExpired: after 60 s.
        SetupError: Java is missing, or the tool's jars cannot be downloaded.
    """
    class_path = os.pathsep.join(map(str, kafka_tools_jars()))
    java = [str(jars.java_path()), *JAVA_OPTIONS, "-cp", class_path]
    command = [*java, TOOL_CLASS, "--bootstrap-server", servers, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=False)
    return done.stdout + done.stderr


def parse_group_table(printed: str) -> list[dict[str, str]]:
    """Parse a table of the tool: a dict for each line, keyed by column name (``CLIENT-ID``, ``#PARTITIONS``)."""
    lines = [line for line in printed.splitlines() if line.strip()]
    at = next((number for number, line in enumerate(lines) if line.startswith("GROUP ")), None)
    if at is None:
        return []
    names = list(re.finditer(r"\S+", lines[at]))  # columns are padded, and cells may be empty
    ends = [name.start() for name in names[1:]] + [None]
    return [
        {n.group(): line[n.start() : end].strip() for n, end in zip(names, ends, strict=True)}
        for line in lines[at + 1 :]
    ]
