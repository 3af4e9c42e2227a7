"""Responses with wrong lengths and bytes: readers and requests get the right result, or an error that names the
brokers. No process crashes, and no record is skipped, duplicated or changed. Seeded; the long test prints its seed."""

import json
import os
import secrets
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka_helpers import STALLED_S, await_progress, create_topic, end_offsets_of, produce_to, size_of
from kit.faulty_cluster import FaultyCluster
from kit.proxy import Conditions, Direction
from kit.spoil import Spoil
from rebalance.accounts import measured

from faults import spoiled_process

pytestmark = [pytest.mark.broker, pytest.mark.slow]

TOPIC = "spoiled"
PARTITIONS, RECORDS = 2, 2_000
RESULTS, SOAK_RESULTS = 20, 100
QUERY_S = 30.0
SEED = 5
SEEDS = 2**32


@pytest.fixture(scope="module")
def ends(one_node: FaultyCluster) -> dict[int, int]:
    """Records in batches as large as the broker accepts, so that nearly every byte of them is under a checksum."""
    create_topic(AdminClient({"bootstrap.servers": one_node.direct_servers, "log_level": 0}), TOPIC, PARTITIONS)
    producer = Producer(
        {"bootstrap.servers": one_node.direct_servers, "log_level": 0, "linger.ms": 200, "batch.size": 900_000}
    )
    for partition in range(PARTITIONS):
        values = [spoiled_process.value(partition, offset) for offset in range(RECORDS)]
        produce_to(producer, TOPIC, values, partition=partition)
    judge = AdminClient({"bootstrap.servers": one_node.direct_servers, "log_level": 0})
    return {tp.partition: end for tp, end in end_offsets_of(judge, TOPIC).items()}


def suffered(
    cluster: FaultyCluster,
    ends: dict[int, int],
    spoil: Spoil,
    folder: Path,
    *,
    results: int = RESULTS,
    needed: str = "",
    **settings: str,
) -> Counter[str]:
    """The results of a process while responses are corrupted, and the count of each.

    Args:
        folder: for its output.
        results: it runs until it has this many results, and a response was corrupted,
        needed: and this result is among them.
    """
    given = {
        "servers": cluster.bootstrap_servers,
        "topic": TOPIC,
        "ends": ends,
        "settings": settings,
    }
    cluster.proxies[1].set_conditions(Conditions(spoil=spoil), Direction.TO_CLIENT)
    output, errors = folder / "output", folder / "errors"
    with output.open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, str(Path(spoiled_process.__file__)), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
        )

    def found() -> Counter[str]:
        return Counter(map(json.loads, output.read_text().rpartition("\n")[0].splitlines()))

    def enough() -> bool:
        got = found()
        return spoil.harmed > 0 and got.total() >= results and (not needed or got[needed] > 0)

    try:
        await_progress(lambda: enough() or process.poll() is not None, lambda: size_of(output), what="enough results")
        process.communicate(timeout=STALLED_S)
    finally:
        process.kill()
        process.wait()
        cluster.heal()
    measured(f"{spoil}: {spoil.harmed} answers harmed; {found()}")
    assert process.returncode == 0, (
        f"the process ended with {process.returncode} ({spoil}): {errors.read_text()[-3000:]}"
    )
    return found()


def assert_harmless(results: Counter[str]) -> None:
    known = {f"{turn}: {result}" for turn in ("read", "describe") for result in ("right", "named")}
    assert results.keys() <= known, results
    assert any(results.get(one) for one in known), results


def test_a_flipped_bit_among_records_never_becomes_a_row(
    faulty: FaultyCluster, ends: dict[int, int], tmp_path: Path
) -> None:
    assert_harmless(suffered(faulty, ends, Spoil(SEED, ("flip",), 0.3), tmp_path, needed="read: right"))


def test_corrupted_responses_end_in_the_right_result_or_an_error_that_names_the_brokers(
    faulty: FaultyCluster, ends: dict[int, int], tmp_path: Path
) -> None:
    assert_harmless(suffered(faulty, ends, Spoil(SEED, ("length", "garbage"), 0.1), tmp_path))


@pytest.mark.soak
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_corrupted_responses_for_a_long_time(
    share: float, faulty: FaultyCluster, ends: dict[int, int], tmp_path: Path
) -> None:
    seed = int(os.environ.get("FAULT_SEED") or secrets.randbelow(SEEDS))
    spoil = Spoil(seed, ("length", "garbage", "flip"), share)
    assert_harmless(suffered(faulty, ends, spoil, tmp_path, results=SOAK_RESULTS))
