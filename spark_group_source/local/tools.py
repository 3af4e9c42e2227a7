"""Kafka's own ``kafka-consumer-groups``, from the jars beside the local broker.

Runs in: the demo, tests that compare ``spark-group`` with it. Deliberately absent: Kafka's other commands.
"""

import os
import re
import subprocess

from spark_group_source.local.jars import java_path, kafka_tools_jars

TOOL_S = 60
COMMAND = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
QUICK = ("-Xshare:auto", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dlog4j2.level=OFF")


def kafka_consumer_groups(servers: str, *arguments: str) -> str:
    """Run ``kafka-consumer-groups.sh --bootstrap-server SERVERS …`` and return its output with errors.

    Raises:
        subprocess.TimeoutExpired: after 60 s.
        SetupError: Java is missing, or the tool's jars cannot be downloaded.
    """
    class_path = os.pathsep.join(map(str, kafka_tools_jars()))
    command = [str(java_path()), *QUICK, "-cp", class_path, COMMAND, "--bootstrap-server", servers, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=False)
    return done.stdout + done.stderr


def shown(printed: str) -> list[dict[str, str]]:
    """Parse the printed table: a dict for each line, keyed by column name (``CLIENT-ID``, ``#PARTITIONS``)."""
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
