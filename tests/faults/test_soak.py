"""Random faults for a long time: no loss, no duplicates, no stopped query.

``FAULT_SEED`` and ``FAULT_SOAK_S`` set the seed and the duration; the seed is printed.
"""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kit.faulty_cluster import FaultyCluster
from rebalance.accounts import measured

from faults.soak import Soak

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.soak]

SOAK_S = 900.0
SEEDS = 2**32


def test_faults_for_a_long_time(spark: "SparkSession", faulty_three: FaultyCluster, tmp_path: Path) -> None:
    seed = int(os.environ.get("FAULT_SEED") or secrets.randbelow(SEEDS))
    for_s = float(os.environ.get("FAULT_SOAK_S") or SOAK_S)
    account = Soak(spark, faulty_three, tmp_path, seed=seed, for_s=for_s, report=measured).run()
    assert account.struck, "no fault began"
    assert not account.lost, f"{account}: the first lost: {account.lost[:5]}"
    assert not account.doubled, f"{account}: the first doubled: {account.doubled[:5]}"
