"""Measure the recovery of two queries and an ordinary consumer from random faults.

``python -m tests.bench faults [--seed N] [--seconds N] [--kinds refuse kill ...]``

Kafka's elections wait for writes of its metadata log: set ``TMPDIR=/dev/shm`` to exclude delays of the disk.

Prints each fault with the time from its end until both groups have committed everything that was produced by then, and
the account: nothing may be lost or duplicated. The same seed gives the same faults, at other moments of the queries.
"""

import argparse
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from faults.soak import SETTINGS, Soak
from kit.faulty_cluster import KINDS, FaultyCluster

from spark_group_source.local.conf import local_spark_settings
from spark_group_source.source import KafkaGroupDataSource

SEEDS = 2**32


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench faults")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(SEEDS))
    parser.add_argument("--seconds", type=float, default=120.0, help="how long new faults begin")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    given = parser.parse_args(arguments)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    with tempfile.TemporaryDirectory(prefix="spark-group-faults-") as scratch:
        builder = SparkSession.builder.master("local[2]").appName("faults")
        patient = {"spark.python.authenticate.socketTimeout": "120s"}  # Spark's limit for the start of its processes
        spark = builder.config(map={**local_spark_settings(scratch), **patient}).getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        spark.dataSource.register(KafkaGroupDataSource)
        try:
            with FaultyCluster(nodes=3, settings=SETTINGS) as cluster:
                soak = Soak(
                    spark, cluster, Path(scratch), seed=given.seed, for_s=given.seconds, report=print, kinds=given.kinds
                )
                account = soak.run()
                return int(bool(account.lost or account.doubled))
        finally:
            spark.stop()
