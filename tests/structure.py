"""The structure of the package in numbers: ``make structure``.

Prints the product's files and lines by package, the import levels and cycles in each package, files with one importer,
and class names that several modules have. Imports for type checkers alone do not count.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "spark_group_source"

Imports = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the package, by its dotted name without the package's own."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports() -> dict[str, set[str]]:
    """Which modules each module imports, anywhere in its file."""
    known = modules()
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for target in _targets(ast.parse(path.read_text())):
            inner = target.removeprefix(f"{PACKAGE.name}.")
            if target != inner and inner in known and inner != name:
                found[name].add(inner)
    return found


def _targets(tree: ast.AST) -> Iterator[str]:
    """What a file imports, each name as a module and as a member of one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from _targets(node)


def folder(name: str) -> str:
    """The package at the top that a module is in; empty for the modules beside them."""
    top = name.split(".", maxsplit=1)[0]
    return top if (PACKAGE / top).is_dir() else ""


def cycles(graph: Imports) -> list[list[str]]:
    """Groups of modules that import each other, directly or not."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a]}
    return sorted(sorted(group) for group in groups)


def _reached(graph: Imports, start: str) -> set[str]:
    found: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += graph[name]
    return found


def levels(graph: Imports) -> dict[str, int]:
    """For each folder the length of its longest chain of imports among its own modules."""
    inside = {a: {b for b in graph[a] if folder(b) == folder(a) != b} for a in graph}
    depth: dict[str, int] = {}

    def of(name: str, above: tuple[str, ...] = ()) -> int:
        if name not in depth:
            if name in above:
                return 0
            depth[name] = 1 + max((of(b, (*above, name)) for b in inside[name]), default=0)
        return depth[name]

    found: dict[str, int] = defaultdict(int)
    for name in graph:
        found[folder(name)] = max(found[folder(name)], of(name))
    return dict(found)


def one_importer(graph: Imports) -> dict[str, str]:
    """Modules that one other module imports, and which; entry points and packages are left out."""
    importers: dict[str, list[str]] = defaultdict(list)
    for name, targets in graph.items():
        for target in targets:
            importers[target].append(name)
    return {name: found[0] for name, found in sorted(importers.items()) if len(found) == 1}


def duplicate_classes() -> dict[str, list[str]]:
    """Public class names that are defined in more than one module."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return {name: where for name, where in sorted(found.items()) if len(where) > 1}


def main() -> int:
    known, graph = modules(), imports()
    lines = {name: len(path.read_text().splitlines()) for name, path in known.items()}
    depth = levels(graph)
    print(f"{len(known)} files, {sum(lines.values()):,} lines")
    files, total = Counter(map(folder, known)), Counter[str]()
    for name, count in lines.items():
        total[folder(name)] += count
    for name in sorted(files):
        print(f"  {name or '(top)':10} {files[name]:3} files {total[name]:6,} lines {depth[name]:2} import levels")
    for title, found in (
        ("import cycles", [" ".join(group) for group in cycles(graph)]),
        ("files with one importer", [f"{name} <- {by}" for name, by in one_importer(graph).items()]),
        ("class names in several modules", [f"{n}: {', '.join(w)}" for n, w in duplicate_classes().items()]),
    ):
        print(f"{title}: {len(found)}")
        for line in found:
            print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
