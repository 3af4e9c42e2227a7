"""Random histories of a table without a JVM; ``python -m tests.table_histories FROM TO`` plays more of them."""

import os
import time

import pytest
from kit.frames import DeltaSession
from table_changes import ByFiles
from table_histories import play

SOAK = 500


@pytest.mark.parametrize("seed", range(32))
def test_each_record_is_in_the_table_once_or_the_command_of_the_refusal_leads_there(seed: int) -> None:
    play(seed, DeltaSession(), ByFiles())


@pytest.mark.soak
def test_each_record_is_in_the_table_once_after_500_histories() -> None:
    first = int(os.environ.get("SOAK_SEED", str(int(time.time()))))
    for seed in range(first, first + SOAK):
        play(seed, DeltaSession(), ByFiles())
