"""Random histories of a table without a JVM; ``python -m tests.table_histories FROM TO`` plays more of them."""

import os
import time

import pytest
from kit.frames import DeltaSession
from table_changes import ByFiles
from table_histories import play

SOAK = 500
LOST_AFTER_A_RESET = 1_795_837_773
"""A reset to the ledger of a restored table, whose offsets Kafka loses before the query starts: its checkpoint is
behind the rows that are missing."""
CIRCLES = (213, 377, 479)
"""Histories in which the commands of one refusal led to another one, and those of that one back."""
BEHIND_A_RESTORE = 971
"""A batch is committed behind a RESTORE that brought its records back: the next batch is refused."""
BEHIND_AN_OVERWRITE = 1_795_843_290
"""The same, behind an overwrite with an old version."""


@pytest.mark.parametrize("seed", [*range(24), *CIRCLES, BEHIND_A_RESTORE, BEHIND_AN_OVERWRITE, LOST_AFTER_A_RESET])
def test_each_record_is_in_the_table_once_or_the_command_of_the_refusal_leads_there(seed: int) -> None:
    play(seed, DeltaSession(), ByFiles())


@pytest.mark.soak
def test_each_record_is_in_the_table_once_after_500_histories() -> None:
    first = int(os.environ.get("SOAK_SEED", str(int(time.time()))))
    for seed in range(first, first + SOAK):
        play(seed, DeltaSession(), ByFiles())
