"""An executor needs spark_group_source, confluent_kafka, numpy, pyarrow and pyspark, and no other package."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer
from kit.mock_cluster import MockCluster
from pyspark import cloudpickle
from pyspark.sql.types import StructType

from spark_group_source import KafkaGroupDataSource
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.source import RangesPartition

ROOT = Path(__file__).resolve().parents[2]
TASK_S = 600
COUNT = 7
NEEDED = ("spark_group_source", "confluent_kafka", "numpy", "pyarrow", "pyspark", "py4j")
"""docs/install.md names these packages; py4j comes with pyspark."""

BLOCKED = """
import json, sys
from importlib.machinery import PathFinder
needed = {*json.loads(sys.argv[1]), *sys.stdlib_module_names}
class Installed:
    def find_spec(self, name, path=None, target=None):
        is_there = name.partition(".")[0] in needed or name.startswith("_sysconfigdata")
        return PathFinder.find_spec(name, path, target) if is_there else None
sys.meta_path = [Installed() if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""Begins a program in which every package that is not in its first argument is missing."""

TASK = (
    BLOCKED
    + """
import pickle
import pyspark.sql.worker.plan_data_source_read  # what Spark's worker imports for a source
reader, partition = pickle.load(sys.stdin.buffer)
values = [value for batch in reader.read(partition) for value in batch.column("value").to_pylist()]
print(json.dumps(values, default=bytes.decode))
"""
)

AGENT = (
    BLOCKED
    + """
import spark_group_source.agents.main, spark_group_source.agents.task
print(json.dumps("confluent_kafka" in sys.modules))
"""
)


def run(program: str, needed: tuple[str, ...] = NEEDED, given: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-c", program, json.dumps(needed)],
        input=given, cwd=ROOT, capture_output=True, timeout=TASK_S, check=False,
    )  # fmt: skip


def test_a_task_reads_with_the_packages_of_an_executor_only() -> None:
    with MockCluster() as cluster:
        cluster.create_topic("orders")
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
        for at in range(COUNT):
            producer.produce("orders", b"%d" % at, partition=0)
        assert producer.flush(300) == 0
        options = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "kafka.group.id": "g", "subscribe": "orders"}
        reader = KafkaGroupDataSource(options).streamReader(StructType())
        partition = RangesPartition(Piece((OffsetRange(TopicPartition("orders", 0), 0, COUNT),)))
        ended = run(TASK, given=bytes(cloudpickle.dumps((reader, partition))))
    assert ended.returncode == 0, ended.stderr.decode()
    assert json.loads(ended.stdout) == [str(at) for at in range(COUNT)]


def test_an_agent_starts_with_the_packages_of_an_executor_only() -> None:
    ended = run(AGENT)
    assert ended.returncode == 0, ended.stderr.decode()
    assert json.loads(ended.stdout) is True


@pytest.mark.parametrize("name", ["confluent_kafka", "numpy", "pyarrow"])
def test_an_executor_without_a_needed_package_reports_which(name: str) -> None:
    reader = KafkaGroupDataSource(
        {"kafka.bootstrap.servers": "localhost:1", "kafka.group.id": "g", "subscribe": "orders"}
    ).streamReader(StructType())
    program = BLOCKED + "import pickle\npickle.load(sys.stdin.buffer)"
    ended = run(program, tuple(set(NEEDED) - {name}), bytes(cloudpickle.dumps(reader)))
    assert f"has no package {name}. Install spark-group-source" in ended.stderr.decode()
