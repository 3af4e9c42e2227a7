"""What faults cost: random ones against two queries and an ordinary consumer, and how long everything needs afterwards.

``python -m tests.bench faults [--seed N] [--seconds N] [--kinds refuse kill ...]``
``python -m tests.bench faults --deaths N [--seed N]``: leader, coordinator and controller are killed in turn
``python -m tests.bench faults --restarts S``: every broker in turn in order, and then all of them for so many seconds
``python -m tests.bench faults --outage S [S ...]``: so many seconds, of one broker of three and of all

Kafka's own elections wait for its metadata log on the disk: with ``TMPDIR=/dev/shm`` other writers do not hold them up.

Prints each fault with the time from its end until both groups have committed everything that was produced by then, and
the account: nothing may be lost or doubled. The same seed draws the same faults; what they meet differs.
"""

import argparse
import itertools
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from faults.deaths import Deaths, Restarts
from faults.outages import Outage
from faults.soak import SETTINGS, Soak
from kit.faulty_cluster import KINDS, FaultyCluster

from spark_group_source.local.conf import local_spark_settings
from spark_group_source.source import KafkaGroupDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEEDS = 2**32


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench faults")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(SEEDS))
    parser.add_argument("--seconds", type=float, default=120.0, help="how long new faults begin")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--deaths", type=int, default=0, help="kill so many nodes, instead of random faults")
    parser.add_argument("--restarts", type=float, default=0.0, help="stop all for so many seconds, after each in turn")
    parser.add_argument("--outage", type=float, nargs="+", default=[], help="outages of so many seconds, instead")
    given = parser.parse_args(arguments)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    with tempfile.TemporaryDirectory(prefix="spark-group-faults-") as scratch:
        builder = SparkSession.builder.master("local[2]").appName("faults")
        patient = {"spark.python.authenticate.socketTimeout": "120s"}  # of Spark for processes that it starts
        for key, value in (local_spark_settings(scratch) | patient).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        spark.dataSource.register(KafkaGroupDataSource)
        try:
            with FaultyCluster(nodes=3, settings=SETTINGS) as cluster:
                return _run(spark, cluster, Path(scratch), given)
        finally:
            spark.stop()


def _run(spark: "SparkSession", cluster: FaultyCluster, folder: Path, given: argparse.Namespace) -> int:
    """Returns whether anything was lost or doubled."""
    if given.outage:
        wrong = 0
        for lasts_s, nodes in itertools.product(given.outage, ([1], list(cluster.broker.nodes))):
            home = folder / f"{lasts_s:.0f}-{len(nodes)}"
            wrong += Outage(spark, cluster, home, nodes=nodes, lasts_s=lasts_s, say=print).run()
        return int(wrong > 0)
    if given.restarts:
        account = Restarts(spark, cluster, folder, seed=given.seed, down_s=given.restarts, say=print).run()
    elif given.deaths:
        deaths = Deaths(spark, cluster, folder, seed=given.seed, count=given.deaths, say=print)
        account = deaths.run()
        print(deaths.table())
    else:
        account = Soak(spark, cluster, folder, seed=given.seed, for_s=given.seconds, say=print, kinds=given.kinds).run()
    return int(bool(account.lost or account.doubled))
