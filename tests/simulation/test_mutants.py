"""The simulation finds broken rules: each one-line change of the product's code fails in a history of the quick run."""

import subprocess
import sys
from pathlib import Path

import pytest
from simulation.mutants import FOUND_BY, MUTANTS, Mutant, histories

ROOT = Path(__file__).resolve().parent.parent.parent
MUTANTS_MIN = 30
FOUND, NOT_FOUND = 1, 0
RUN_S_MAX = 1_000


def test_mutants_have_distinct_rules_and_known_histories() -> None:
    assert len(MUTANTS) >= MUTANTS_MIN
    assert len({mutant.rule for mutant in MUTANTS}) == len(MUTANTS)
    assert FOUND_BY.keys() == {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_found(mutant: Mutant) -> None:
    """Run the history that is known to find the mutant, then the quick run."""
    played = subprocess.run(
        [sys.executable, "-m", "tests.simulation.mutants", mutant.name, *histories(mutant.name)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S_MAX,
    )
    assert played.returncode in (FOUND, NOT_FOUND), played.stderr
    assert played.returncode == FOUND, f"no history failed, although this rule is broken: {mutant.rule}"
    assert played.stdout.startswith("found by "), played.stdout
