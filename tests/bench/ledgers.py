"""What becomes of a table's ledgers: kills, two applications, races for one number.

``python -m tests.bench ledgers --kills N [--minutes M] [--way W] [--seed S]``: a query is killed N times, or as often
as there is time for, and a tenth of its checkpoints deleted
``python -m tests.bench ledgers --both [--minutes M] ...``: the same for two applications of one group and one table
``python -m tests.bench ledgers --races N [--minutes M]``: two sinks race for the next number N times, by each way and
by both

Every way into a table is taken in turn, unless one is named. The same seed draws the same kills; what they meet
differs. What was written is read back from the files of the table's log.
"""

import argparse
import logging
import math
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import quick_spark
from confluent_kafka.admin import AdminClient
from crash.killed import WAYS, Hammer, Way
from crash.raced import PAIRS, Race
from kafka_words import create_topic

from bench.throughput import session
from spark_group_source.local.broker import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEEDS = 2**32
PARTITIONS = 4
KILLS = 10
"""Of each way, where neither a number nor a time is given: as by ``make bench``, which must end."""
PYTHONS = 45
"""So many of a hundred kills hit a Python process of Spark's; the others take the JVM."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench ledgers")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(SEEDS))
    parser.add_argument("--way", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--both", action="store_true", help="two applications of one group")
    parser.add_argument("--minutes", type=float, default=math.inf, help="the longest time")
    parser.add_argument("--races", type=int, default=0, help="instead of kills")
    parser.add_argument("--pairs", choices=PAIRS, nargs="+", default=list(PAIRS), help="who races")
    given = parser.parse_args(arguments)
    if given.kills is None and given.minutes == math.inf:
        given.kills = KILLS
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory(prefix="spark-group-ledgers-") as scratch, quick_spark.prepared():
        os.environ["SPARK_HOME"] = str(quick_spark.home())
        os.environ["SPARK_SUBMIT_OPTS"] = quick_spark.submit_options()
        if given.races:
            spark = session(Path(scratch))
            logging.getLogger("spark_group_source").setLevel(logging.ERROR)
            try:
                return int(_raced(spark, Path(scratch), given))
            finally:
                spark.stop()
        with Broker() as broker:
            return int(sum(_killed(broker, Path(scratch), way, given) for way in given.way) > 0)


def _killed(broker: Broker, folder: Path, way: Way, given: argparse.Namespace) -> bool:
    """Whether anything was wrong."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    group = f"ledgers-{way}"
    hammer = Hammer(
        broker,
        folder / way,
        way=way,
        group=group,
        topic=create_topic(admin, group, PARTITIONS),
        seed=given.seed,
        applications=2 if given.both else 1,
        pythons=PYTHONS,
        say=_say,
    )
    lost = None if given.kills is None else given.kills // 10
    return bool(hammer.run(kills=given.kills, for_s=60 * given.minutes, lost_checkpoints=lost).wrong)


def _raced(spark: "SparkSession", folder: Path, given: argparse.Namespace) -> bool:
    failed = False
    for name in given.pairs:
        race = Race(spark, folder / name, PAIRS[name])
        _say(f"{name}: {race.run(given.races, 60 * given.minutes)}")
        wrong = race.wrong()
        _say("  " + ("; ".join(wrong) or "each record once, each number once"))
        failed |= bool(wrong)
    return failed


def _say(text: str) -> None:
    print(text, flush=True)
