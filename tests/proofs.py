"""Which test proves which guarantee at which level: read from the marks ``proves`` in the tests' text.

A level says what is real. ``core``: the decision alone. ``simulation``: a whole group in simulated time. ``kafka``: a
real broker. ``spark``: real Spark as well. Deliberately absent: whether the tests pass (``make prove G=3`` runs them).
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
    ("G1", "simulation"): "which rows a range has is Kafka's and the reader's; the simulation counts offsets",
    ("G4", "kafka"): "the table is written by Spark alone",
    ("G6", "spark"): "fencing is between members, producers and brokers; Spark has no part in it",
    ("G7", "core"): "a rebalance is the broker's answer; the simulation has the whole group",
    ("G9", "simulation"): "the simulated group has no credentials",
    (
        "G10",
        "simulation",
    ): "guesses and silence are in the histories of G2 to G6; a wrong conclusion loses records",
}
"""Levels that a guarantee is not proven at, and why that makes no sense there."""


class Proof(NamedTuple):
    """One marked test."""

    guarantee: str
    level: str
    path: str
    test: str


def proofs() -> Iterator[Proof]:
    """Every mark ``proves`` in the tests, in the order of their files."""
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
            "<br>".join(found[guarantee, level]) or f"not here: {NOT_AT.get((guarantee, level), '?')}"
            for level in LEVELS
        ]
        lines.append(f"| {guarantee} {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
