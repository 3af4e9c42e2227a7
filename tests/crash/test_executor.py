"""B64, G7: an executor that dies in the middle of a batch is the business of Spark alone.

With memberHost=driver; ``test_agents`` has the same for members beside executors, in an application that is there.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka.admin import AdminClient
from conftest import Produce, TopicFactory, committed_of, end_offsets_of
from delta_files import living_rows
from kafka_words import await_progress
from streams import numbered, options_of

from crash.running import HANG_S, job, progress_of
from spark_group_source.host import runs
from spark_group_source.local.broker import Broker

PARTITIONS = 4


@pytest.mark.crash
@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.timeout(HANG_S)
def test_B64_G7_an_executor_that_is_lost_in_a_batch_costs_no_row_and_no_rebalance(
    broker: Broker, admin: AdminClient, topic: TopicFactory, produce: Produce, group_id: str, tmp_path: Path
) -> None:
    name = topic(PARTITIONS)
    given = options_of(broker.bootstrap_servers, group_id, minPartitions=PARTITIONS)  # a task for each
    del given["kafka.bootstrap.servers"], given["kafka.group.id"]
    produce(name, numbered(0, 7, PARTITIONS))
    with job(tmp_path, servers=broker.bootstrap_servers, group=group_id, topic=name, **given) as process:

        def awaiting(holds: Any, what: str) -> Any:
            found = await_progress(
                lambda: holds() or process.poll() is not None, lambda: progress_of(tmp_path, process), what=what
            )
            assert process.poll() is None, (tmp_path / "log").read_text(errors="replace")[-4000:]
            return found

        def rows() -> Counter[tuple[int, int]]:
            if not (tmp_path / "table" / "_delta_log").exists():
                return Counter()
            found = living_rows(tmp_path / "table", ["partition", "offset"])
            return Counter((row["partition"], row["offset"]) for row in found)

        def said() -> list[dict[str, int]]:
            found = [json.loads(path.read_text()) for path in (tmp_path / "said").glob("*") if not path.suffix]
            return [{"executor": one["executor"], "partition": row[1]} for one in found for row in one["rows"]]

        awaiting(lambda: len(rows()) == 8, "the first batch in the table")
        awaiting(lambda: committed_of(admin, group_id) == end_offsets_of(admin, name), "its offsets")
        before = _rebalances(group_id)
        for path in (tmp_path / "said").iterdir():
            path.unlink()
        (tmp_path / "hold").touch()
        produce(name, numbered(8, 15, PARTITIONS))
        # Each executor has one core: both are in a task of the batch.
        awaiting(lambda: len({one["executor"] for one in said()}) == 2, "two busy executors")
        lost, begun = said()[0]["executor"], said()[0]["partition"]
        psutil.Process(lost).kill()
        (tmp_path / "hold").unlink()
        awaiting(lambda: len(rows()) == 16, "the batch in the table")
        assert set(rows().values()) == {1}
        awaiting(lambda: committed_of(admin, group_id) == end_offsets_of(admin, name), "the group's offsets")
        assert _rebalances(group_id) == before
        assert begun in {one["partition"] for one in said() if one["executor"] != lost}, "another one read its range"


def _rebalances(group: str) -> list[tuple[int, int, int]]:
    """Generation, rebalances and lost partitions of the group's run."""
    return [(doc["generation"], doc["rebalances"], doc["lost"]) for doc in runs.read(group)]
