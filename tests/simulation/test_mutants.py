"""The simulation finds broken rules: each one-line break of the shipped code fails in some history of the quick run."""

import subprocess
import sys
from pathlib import Path

import pytest
from simulation.mutants import FOUND_BY, MUTANTS, Mutant, histories

ROOT = Path(__file__).resolve().parent.parent.parent
MUTANTS_MIN = 30
FOUND, NOT_FOUND = 1, 0
RUN_S_MAX = 200


def test_there_are_many_and_each_names_its_rule() -> None:
    assert len(MUTANTS) >= MUTANTS_MIN
    assert len({mutant.rule for mutant in MUTANTS}) == len(MUTANTS)
    assert FOUND_BY.keys() == {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_found(mutant: Mutant) -> None:
    """First in the history that is known to find it, then in all of the quick run."""
    played = subprocess.run(
        [sys.executable, "-m", "tests.simulation.mutants", mutant.name, *histories(mutant.name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S_MAX,
    )
    assert played.returncode in (FOUND, NOT_FOUND), played.stderr
    assert played.returncode == FOUND, f"nothing failed, although this is broken: {mutant.rule}"
    assert played.stdout.startswith("found by "), played.stdout
