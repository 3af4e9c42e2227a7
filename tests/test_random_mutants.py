"""The tool that breaks the product at random places: what it changes, and that a result is one."""

import random
from pathlib import Path

import pytest
import random_mutants
from random_mutants import FOUND, SURVIVED, UNTESTED, RandomMutant

MODULE = '''
"""A text, which is no decision."""
BOUND = 5

@dataclass(slots=True)
class Kept:
    is_empty: bool

def decide(a: int | None, b: int) -> bool:
    """Another text."""
    log.info("skipped: %s", a + b)
    if a is None or not b < 3:
        raise ValueError(f"{a + b}")
    return min(a, b) + 1 == b
'''


def test_mutants_change_decisions_and_neither_texts_nor_bounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODULE)
    monkeypatch.setattr(random_mutants, "PACKAGE", tmp_path)
    assert [(mutant.old, mutant.new) for mutant in random_mutants.mutants_of("m.py")] == [
        ("a is None or not b < 3", "((a is None) and (not b < 3))"),
        ("a is None or not b < 3", "(not b < 3)"),
        ("a is None or not b < 3", "(a is None)"),
        ("a is None", "(a is not None)"),
        ("not b < 3", "(b < 3)"),
        ("b < 3", "(b <= 3)"),
        ("3", "4"),
        ("return min(a, b) + 1 == b", "return None"),
        ("min(a, b) + 1 == b", "(min(a, b) + 1 != b)"),
        ("min(a, b) + 1", "(min(a, b) - 1)"),
        ("min(a, b)", "max(a, b)"),
        ("1", "2"),
    ]


def test_mutants_of_the_product_are_valid_python() -> None:
    for mutant in random.Random(7).sample(random_mutants.all_mutants(), 40):
        compile(mutant.source(), mutant.file, "exec")


FAILS = "tests/model/test_offset_json.py::test_offset_survives_its_json_and_the_text_is_canonical"
PASSES = "tests/test_waits.py::test_every_call_that_waits_has_a_bound"  # does not execute the line


@pytest.mark.parametrize(
    ("limit_s", "outcome"),
    [({FAILS: 60.0}, FOUND), ({PASSES: 60.0}, SURVIVED), ({PASSES: 0.001}, FOUND), ({}, UNTESTED)],
)
def test_a_mutant_is_found_if_a_test_fails_or_exceeds_its_time_limit(limit_s: dict[str, float], outcome: str) -> None:
    file = "protocol/offsets.py"
    mutant = next(mutant for mutant in random_mutants.mutants_of(file) if mutant.new == "return None")
    assert isinstance(mutant, RandomMutant)
    assert random_mutants._play(mutant, limit_s)[0] == outcome


def test_a_default_is_tested_by_all_tests_of_its_module_and_a_line_that_none_executes_by_none() -> None:
    lines = {"1": [], "5": [0, 1], "6": [1]}
    found = {"tests": ["slow", "fast"], "duration_s": [2.0, 1.0], "lines": {"m.py": lines, "events.py": {"1": []}}}
    given = {n: [*random_mutants.tests_of(RandomMutant("m.py", n, 0, 0, "", ""), found)] for n in (1, 2, 5, 6)}
    assert given == {1: ["fast", "slow"], 2: [], 5: ["fast", "slow"], 6: ["fast"]}
    assert [*random_mutants.tests_of(RandomMutant("events.py", 1, 0, 0, "", ""), found)] == ["fast", "slow"]
