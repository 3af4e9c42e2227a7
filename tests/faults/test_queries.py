"""A real Spark query whose broker is unreachable for 6 s continues; its table has every row once.

``test_runs`` covers each phase of a batch, without Spark.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient
from kafka_helpers import await_until, create_topic
from kit.faulty_cluster import Fault, FaultyCluster
from rebalance.accounts import Flow, assert_once, await_committed, stays
from rebalance.conftest import make_options

from faults.soak import SESSION_MS, Query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow]

FAULT_S = 6.0
PARTITIONS = 4


@pytest.mark.proves("G10", level="spark")
def test_a_query_survives_a_refusing_broker_with_every_row_once(
    spark: "SparkSession", faulty: FaultyCluster, judge: AdminClient, group_id: str, tmp_path: Path
) -> None:
    name = create_topic(judge, f"t-{group_id}", PARTITIONS)
    options = make_options(faulty.bootstrap_servers, group_id, name, "consumer", session_ms=SESSION_MS)
    query = Query(spark, options, tmp_path)

    def alive() -> bool:
        query.check()
        return True

    with query.running(), Flow(faulty.direct_servers, name, PARTITIONS) as flow:
        await_until(lambda: alive() and query.records, what="the first rows")
        with faulty.suffering(Fault("refuse", 1)):
            stays(alive, FAULT_S, "the query")
        flow.stop()
        assert_once(judge, [name], [query])
        await_committed(judge, group_id, [name])
        query.check()
