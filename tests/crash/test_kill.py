"""G2, G4: the driver is killed at random moments; each record is in the table once, and Kafka is never ahead of it."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from kafka_helpers import TopicFactory
from kit.object_store import object_store

from crash.killed import Hammer, Way, needs_delta
from spark_group_source.local.broker import Broker

JOINED_MIN = 0.3
"""Share of the runs that must have joined the group, so that the kills prove something."""
S3_KILLS = 4


def kill_and_prove(
    kills: int, seed: int, *, broker: Broker, topic: str, group: str, home: Path, way: Way = "native", **more: Any
) -> None:
    hammer = Hammer(broker, home, way=way, group=group, topic=topic, seed=seed, **more)
    account = hammer.run(kills=kills)
    assert not account.wrong, account
    assert account.joined >= kills * JOINED_MIN, account


@pytest.mark.proves("G4", level="spark")
@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(1_800)  # five starts of Spark, some minutes each on one core
@pytest.mark.parametrize(("kills", "seed"), [(3, 1)])
def test_G4_rows_are_in_the_table_or_that_of_bad_records_once_after_kills_with_the_native_writer(
    broker: Broker, topic: TopicFactory, group_id: str, tmp_path: Path, kills: int, seed: int
) -> None:
    one: dict[str, Any] = {"broker": broker, "topic": topic(4), "group": group_id, "home": tmp_path}
    kill_and_prove(kills, seed, **one, has_bad_records=True)


@pytest.mark.full
@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("way", [pytest.param("options", marks=needs_delta), "connect"])
def test_G4_rows_are_in_the_table_or_that_of_bad_records_once_after_kills(
    broker: Broker, topic: TopicFactory, group_id: str, tmp_path: Path, way: Way
) -> None:
    kill_and_prove(5, 3, broker=broker, topic=topic(4), group=group_id, home=tmp_path, way=way, has_bad_records=True)


@pytest.mark.full
@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("way", ["options", "connect"])
def test_G4_merged_table_has_the_latest_change_of_each_key_after_kills(
    broker: Broker, topic: TopicFactory, group_id: str, tmp_path: Path, way: Way
) -> None:
    kill_and_prove(5, 4, broker=broker, topic=topic(4), group=group_id, home=tmp_path, way=way, is_merged=True)


@pytest.mark.soak
@pytest.mark.crash
@pytest.mark.parametrize("way", ["native", "options"])
def test_G4_rows_are_in_the_table_once_after_a_hundred_kills(
    broker: Broker, topic: TopicFactory, group_id: str, tmp_path: Path, way: Way
) -> None:
    seed = int(os.environ.get("SOAK_SEED", str(int(time.time()))))
    kill_and_prove(100, seed, broker=broker, topic=topic(4), group=group_id, home=tmp_path, way=way)


@pytest.mark.full
@pytest.mark.crash
@pytest.mark.timeout(1_800)
def test_G4_rows_are_in_a_table_on_s3_once_after_kills_of_two_applications(
    broker: Broker, topic: TopicFactory, group_id: str, tmp_path: Path
) -> None:
    """The checkpoints are on S3, too."""
    with object_store() as store:
        more: dict[str, Any] = {"applications": 2, "store": store}
        hammer = Hammer(broker, tmp_path, way="native", group=group_id, topic=topic(4), seed=2, **more)
        account = hammer.run(kills=S3_KILLS, lost_checkpoints=0)
    assert not account.wrong, account
    assert account.joined > 2 and account.commits > 1, account  # how many depends on the machine
