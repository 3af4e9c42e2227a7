"""The tests that prove each guarantee, by level, from the ``proves`` marks in the tests.

The level is the part that is real. ``core``: one decision. ``simulation``: a whole group in simulated time. ``kafka``:
a real broker. ``spark``: also a real Spark. Deliberately absent: whether the tests pass (``make prove G=3`` runs them).
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
LEVELS = ("core", "simulation", "kafka", "spark")
GUARANTEES = {
    "G1": "replay",
    "G2": "commit",
    "G3": "boundary",
    "G4": "exactly once",
    "G5": "no gaps",
    "G6": "fencing",
    "G7": "calm",
    "G8": "bounds",
    "G9": "secrets",
    "G10": "facts",
}
NOT_AT: Mapping[tuple[str, str], str] = {
    ("G1", "simulation"): "Kafka and the reader decide which rows a range has; the simulation only counts offsets",
    ("G4", "kafka"): "only Spark writes the table",
    ("G6", "spark"): "fencing happens between members, producers and brokers, without Spark",
    ("G7", "core"): "rebalances are the broker's decision; the simulation has a whole group",
    ("G9", "simulation"): "the simulated group has no credentials",
    (
        "G10",
        "simulation",
    ): "timeouts and wrong client errors are part of the histories of G2 to G6; a wrong conclusion would lose records",
}
"""Levels at which a guarantee is not proven, and the reason."""


class Proof(NamedTuple):
    """One marked test."""

    guarantee: str
    level: str
    path: str
    test: str


def proofs() -> Iterator[Proof]:
    """Every ``proves`` mark in the tests, in the order of the files."""
    for file in sorted(TESTS.rglob("test_*.py")):
        text = file.read_text()
        if "mark.proves(" not in text:
            continue
        for function in ast.parse(text).body:
            if isinstance(function, ast.FunctionDef):
                for mark in function.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.proves":
                        guarantee = ast.literal_eval(mark.args[0])
                        level = next(ast.literal_eval(k.value) for k in mark.keywords if k.arg == "level")
                        yield Proof(guarantee, level, str(file.relative_to(TESTS)), function.name)


def table() -> str:
    """One row for each guarantee, one column for each level."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for proof in proofs():
        found[proof.guarantee, proof.level].append(f"`{proof.path}`: `{proof.test}`")
    lines = [f"| | {' | '.join(LEVELS)} |", f"|---|{'---|' * len(LEVELS)}"]
    for guarantee, name in GUARANTEES.items():
        cells = [
            "<br>".join(found[guarantee, level]) or f"not proven here: {NOT_AT.get((guarantee, level), '?')}"
            for level in LEVELS
        ]
        lines.append(f"| {guarantee} {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
