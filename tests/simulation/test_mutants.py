"""The simulation finds broken rules: each one-line change of the product's code fails in a history of the quick run."""

import pytest
from simulation.mutants import FOUND_BY, MUTANTS, Mutant, first_failed, histories

MUTANTS_MIN = 30


def test_mutants_have_distinct_rules_and_known_histories() -> None:
    assert len(MUTANTS) >= MUTANTS_MIN
    assert len({mutant.rule for mutant in MUTANTS}) == len(MUTANTS)
    assert FOUND_BY.keys() == {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_found(mutant: Mutant) -> None:
    """By the history that is known to find the mutant, or else by the quick run."""
    found = first_failed(mutant, histories(mutant))
    assert found is not None, f"no history failed, although this rule is broken: {mutant.rule}"
