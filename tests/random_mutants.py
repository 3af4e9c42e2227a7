"""Break the product's decisions at random places, and see whether a test fails.

``python -m tests.random_mutants map``: run the quick tests once, and store which test executes which line
``python -m tests.random_mutants run [--seed S] [--count N]``: run N mutants; another call continues
``python -m tests.random_mutants show [--seed S]``: what was found, and the mutants that no test found

A mutant is one changed expression or statement in :data:`FILES`. The same seed and the same code give the same mutants.
Only tests that execute the changed line run, the fastest first, and the first failure ends the run. The changed module
exists in the memory of the test process; no file changes. Results are in ``build/mutants``.

A survivor is a missing test, or it is equivalent: no input can distinguish it. Equivalent ones are listed with the
reason in ``tests/equivalent_mutants.toml``, by file and changed text, after the text of the line if that is not enough.
"""

import argparse
import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import random
import subprocess
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # the tests' modules are found as by pytest
PACKAGE = ROOT / "spark_group_source"
STATE = ROOT / "build" / "mutants"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.toml"

FILES = (
    "protocol/*.py",
    "runtime/*.py",
    "kafka/*.py",
    "delta/ledger_decision.py",
    "delta/ledger_format.py",
    "delta/replaced_rows.py",
    "reader/range_reader.py",
)
"""Where decisions are, in the package."""
TESTS = (
    "tests/protocol",
    "tests/model",
    "tests/options",
    "tests/cli",
    "tests/delta/decisions",
    "tests/kafka",
    "tests/members",
    "tests/reader",
    "tests/runtime",
    "tests/simulation/test_simulation.py",
)
QUICK = "not jvm and not slow and not soak and not full"
PAUSE_S, TIMES_SLOWER = 60, 5
"""Time limit of a test with a mutant: how much longer than for the map it may take, with a pause of a busy machine. A
mutant whose test exceeds it counts as found: it hangs."""
FOUND, SURVIVED, TIMEOUT, UNTESTED = "found", "survived", "timeout", "no test"
PYTEST_FAILED, PYTEST_PASSED = 1, 0

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {ast.Add: "-", ast.Sub: "+", ast.BitOr: "&", ast.BitAnd: "|"}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGGERS = ("log", "logging")


@dataclass(frozen=True, slots=True)
class RandomMutant:
    """One change of a module's text."""

    file: str
    line: int
    start: int
    """First byte of the changed text in the file."""
    end: int
    old: str
    new: str

    @property
    def module(self) -> str:
        return "spark_group_source." + self.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    def source(self) -> str:
        text = (PACKAGE / self.file).read_bytes()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()

    def line_text(self) -> str:
        return (PACKAGE / self.file).read_text().splitlines()[self.line - 1].strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {' '.join(self.old.split())}  ->  {' '.join(self.new.split())}"


class Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Loads one module from a mutant's source."""

    def __init__(self, mutant: RandomMutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        return importlib.util.spec_from_loader(fullname, self) if fullname == self._mutant.module else None

    def is_package(self, fullname: str) -> bool:
        del fullname
        return self._mutant.file.endswith("__init__.py")

    def get_source(self, fullname: str) -> str:
        del fullname
        return self._mutant.source()


# --- mutants ----------------------------------------------------------------------------------------------------------


def mutants_of(file: str) -> Iterator[RandomMutant]:
    """Every mutant of a module, in the order of its text."""
    text = (PACKAGE / file).read_bytes()
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def mutant(node: ast.expr | ast.stmt, new: str) -> RandomMutant:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
        return RandomMutant(file, node.lineno, start, end, text[start:end].decode(), new)

    for node in _decisions(ast.parse(text)):
        for new in _changes(node):
            yield mutant(node, new)


def _decisions(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The nodes that decide something: not annotations, messages, or what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.arg | ast.Import | ast.ImportFrom | ast.Raise | ast.Assert | ast.JoinedStr):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(tree, ast.Module) and isinstance(node, ast.Assign | ast.AnnAssign):  # bounds and types
            continue
        if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_log(node.value)):
            continue
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from _decisions(ast.Expression(node.value))
            continue
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.FunctionDef | ast.ClassDef):  # `slots=True` decides nothing
            node.decorator_list = []
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        yield from _decisions(node)


def _is_log(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in LOGGERS


def _changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    """The texts that may replace a node's text."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield f"({ast.unparse(left)} {COMPARISONS[type(op)]} {ast.unparse(right)})"
        case ast.BoolOp(op=op, values=values):
            yield f"({(' or ' if isinstance(op, ast.And) else ' and ').join(f'({ast.unparse(v)})' for v in values)})"
            for left_out in values:
                rest = [value for value in values if value is not left_out]
                yield ast.unparse(ast.BoolOp(op, rest) if len(rest) > 1 else rest[0]).join("()")
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.IfExp(body=body, orelse=orelse):
            yield f"({ast.unparse(body)})"
            yield f"({ast.unparse(orelse)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield f"({ast.unparse(left)} {OPERATORS[type(op)]} {ast.unparse(right)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            yield SWAPPED[name] + ast.unparse(node)[len(name) :]
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return None"


def all_mutants() -> list[RandomMutant]:
    files = sorted(path.relative_to(PACKAGE).as_posix() for glob in FILES for path in PACKAGE.glob(glob))
    return [mutant for file in files for mutant in mutants_of(file)]


# --- which tests execute which line -----------------------------------------------------------------------------------


class LineMap:
    """A plugin of pytest that records the lines that each test executes, and its duration."""

    def __init__(self) -> None:
        import coverage

        self._coverage = coverage.Coverage(
            data_file=None, include=[str(PACKAGE / glob) for glob in FILES], concurrency=["thread", "greenlet"]
        )
        self._duration_s: dict[str, float] = {}
        self._coverage.start()  # before any module is imported, so that the lines which execute at import are known

    def pytest_runtest_setup(self, item: Any) -> None:
        self._coverage.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._duration_s[report.nodeid] = self._duration_s.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        tests = sorted(self._duration_s)
        number = {test: n for n, test in enumerate(tests)}
        lines: dict[str, dict[str, list[int]]] = {}
        for file in data.measured_files():
            by_line = data.contexts_by_lineno(file)
            lines[Path(file).relative_to(PACKAGE).as_posix()] = {
                str(line): sorted(number[name] for name in names if name in number) for line, names in by_line.items()
            }
        STATE.mkdir(parents=True, exist_ok=True)
        (STATE / "map.json").write_text(
            json.dumps({"tests": tests, "duration_s": [self._duration_s[test] for test in tests], "lines": lines})
        )


def make_map() -> int:
    import pytest

    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", QUICK, "--rootdir", str(ROOT), *TESTS]
    return int(pytest.main(arguments, plugins=[LineMap()]))


def tests_of(mutant: RandomMutant, found: dict[str, Any]) -> dict[str, float]:
    """The tests that execute the line, the fastest first, and the time limit of each in seconds. A default executes at
    import: all tests of its module."""
    lines = found["lines"].get(mutant.file, {})
    numbers = lines.get(str(mutant.line))
    if numbers == []:
        numbers = set().union(*lines.values()) or range(len(found["tests"]))  # or of all, as that of an event
    took_s = found["duration_s"]
    ordered = sorted(numbers or (), key=lambda n: took_s[n])
    return {found["tests"][n]: PAUSE_S + TIMES_SLOWER * took_s[n] for n in ordered}


# --- runs -------------------------------------------------------------------------------------------------------------


def run(seed: int, count: int) -> int:
    """Run mutants that have no result yet."""
    if not (STATE / "map.json").exists():
        sys.stderr.write("error: no map of lines to tests; run `python -m tests.random_mutants map`\n")
        return 2
    found = json.loads((STATE / "map.json").read_text())
    chosen = random.Random(seed).sample(all_mutants(), count)
    done = {tuple(result["mutant"].values()) for result in results(seed)}
    with _results_file(seed).open("a") as file:
        for n, mutant in enumerate(chosen):
            if tuple(asdict(mutant).values()) in done:
                continue
            outcome, took_s = _play(mutant, tests_of(mutant, found))
            print(f"{n + 1}/{count} {outcome} after {took_s:.0f} s: {mutant}", flush=True)
            file.write(json.dumps({"mutant": asdict(mutant), "outcome": outcome}) + "\n")
            file.flush()
    return 0


def _play(mutant: RandomMutant, tests: Mapping[str, float]) -> tuple[str, float]:
    if not tests:
        return UNTESTED, 0.0
    began_s = time.monotonic()
    given = json.dumps({"mutant": asdict(mutant), "tests": tests})
    command = [sys.executable, "-m", "tests.random_mutants", "play"]
    limit_s = PAUSE_S + sum(tests.values())
    try:
        played = subprocess.run(
            command, cwd=ROOT, input=given, capture_output=True, text=True, check=False, timeout=limit_s
        )
        outcome = SURVIVED if played.returncode == PYTEST_PASSED else FOUND
    except subprocess.TimeoutExpired:
        outcome = TIMEOUT
    return outcome, time.monotonic() - began_s


class Limits:
    """A plugin of pytest that gives each test its time limit."""

    def __init__(self, limit_s: Mapping[str, float]) -> None:
        self._limit_s = limit_s

    def pytest_itemcollected(self, item: Any) -> None:
        import pytest

        item.add_marker(pytest.mark.timeout(self._limit_s[item.nodeid]), append=False)


def play() -> int:
    """Run the tests on standard input with the mutant's module in place of the product's."""
    given = json.load(sys.stdin)
    sys.meta_path.insert(0, Finder(RandomMutant(**given["mutant"])))
    import pytest

    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", QUICK, "--rootdir", str(ROOT)]
    return int(pytest.main([*arguments, *given["tests"]], plugins=[Limits(given["tests"])]))


def _results_file(seed: int) -> Path:
    return STATE / f"seed-{seed}.jsonl"


def results(seed: int) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in _results_file(seed).read_text().splitlines()]
    return []


def show(seed: int) -> int:
    """Print what was found, and each survivor."""
    equivalent = tomllib.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    counts: Counter[str] = Counter()
    survivors: dict[str, list[str]] = defaultdict(list)
    for result in results(seed):
        mutant, outcome = RandomMutant(**result["mutant"]), result["outcome"]
        change = f"{' '.join(mutant.old.split())} -> {' '.join(mutant.new.split())}"
        of_file = equivalent.get(mutant.file, {})
        known = of_file.get(change) or of_file.get(f"{mutant.line_text()}: {change}")
        counts["equivalent" if outcome == SURVIVED and known else outcome] += 1
        if outcome in (SURVIVED, UNTESTED) and not known:
            survivors[outcome].append(str(mutant))
    for outcome, mutants in survivors.items():
        print(f"{outcome}:", *sorted(mutants), sep="\n  ")
    total = counts.total() - counts["equivalent"]
    killed = counts[FOUND] + counts[TIMEOUT]
    print(f"seed {seed}: {killed} of {total} found ({killed / max(total, 1):.0%}); {dict(counts)}")
    return 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["map", "run", "show", "play"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    given = parser.parse_args(arguments)
    match given.command:
        case "map":
            return make_map()
        case "run":
            return run(given.seed, given.count)
        case "play":
            return play()
    return show(given.seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
