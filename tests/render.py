"""Render tables of the documents from the code: ``python -m tests.render``."""

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import typer

from spark_group_source import error_codes, errors
from spark_group_source.cli import app as cli
from spark_group_source.metrics import groups as group_metrics
from spark_group_source.metrics import run as run_metrics
from spark_group_source.metrics.endpoint import Metric
from spark_group_source.options.table import OPTIONS as ALL_OPTIONS
from spark_group_source.protocol import states
from spark_group_source.protocol.states import AgentState, PartitionState, RunState, SlotState

sys.path.insert(0, str(Path(__file__).parent))  # `python -m tests.render` does not have it there
import proofs
import waits
from matrix import results

ROOT = Path(__file__).resolve().parent.parent
STATES = ROOT / "docs/states.md"
OPTIONS = ROOT / "docs/options.md"
ANSWERS = ROOT / "docs/answers.md"
CLI = ROOT / "docs/cli.md"
METRICS = ROOT / "docs/metrics.md"
ERRORS = ROOT / "docs/errors.md"
GUARANTEES = ROOT / "docs/guarantees.md"
COMPATIBILITY = ROOT / "docs/compatibility.md"
WAITS = ROOT / "docs/waits.md"

Table = Mapping[Any, Enum]  # keys: a state of its own kind, and a cause
DRAWN: tuple[tuple[str, type[Enum], Table], ...] = (
    ("run", RunState, states.RUN),
    ("slot", SlotState, states.SLOTS),
    ("partition", PartitionState, states.PARTITIONS),
    ("agent", AgentState, states.AGENTS),
)
BOXES: dict[type[Enum], tuple[str, tuple[Enum, ...]]] = {
    SlotState: ("has a consumer", (SlotState.JOINING, SlotState.ASSIGNED, SlotState.REVOKING)),
}
"""States that are drawn in one box: a change from all of them is one arrow."""


def blocks() -> dict[Path, dict[str, str]]:
    """The rendered text between ``<!-- name -->`` and ``<!-- /name -->`` of each document."""
    return {
        OPTIONS: {"options": options_table()},
        ANSWERS: {"error codes": error_code_rows()},
        CLI: {"exit codes": exit_codes(), "commands": commands()},
        METRICS: {
            "run metrics": metrics_table(run_metrics.METRICS),
            "group metrics": metrics_table(group_metrics.METRICS),
        },
        GUARANTEES: {"proofs": proofs.table()},
        COMPATIBILITY: {
            "matrix of Spark": results.spark_table(results.Results()),
            "matrix of Kafka": results.broker_table(results.Results()),
            "installed beside": results.installed_table(results.Results()),
        },
        WAITS: {"waits": waits.call_rows(), "times": waits.time_rows()},
        ERRORS: {"errors": "\n".join(map(section, kinds(errors.SourceError)))},
        STATES: {f"{name} states": f"{diagram(kind, table)}\n{rows(kind, table)}" for name, kind, table in DRAWN},
    }


def options_table() -> str:
    """One row for each option."""
    lines = ["| option | value | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {row.unit} | {row.default} | {row.doc} |" for row in ALL_OPTIONS]
    return "\n".join(lines) + "\n"


def metrics_table(metrics: Sequence[Metric[Any]]) -> str:
    """One row for each metric."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels) or '-'} | {m.doc} |" for m in metrics
    ]
    return "\n".join(lines) + "\n"


def error_code_rows() -> str:
    """The meaning of each error code, and its exceptions by request."""
    names = {code: name for name, code in error_codes.CODES.items()}
    lines = ["| meaning | codes |", "|---|---|"]
    for what in error_codes.Meaning:
        meant = sorted(
            (code for code, means in error_codes.MEANINGS.items() if means is what),
            key=lambda code: (code < 0, abs(code)),
        )
        codes = ", ".join(f"`{names[code]}`" for code in meant)
        lines.append(f"| {what.value} | {'every other code' if what is error_codes.Meaning.RETRY else codes} |")
    lines += ["", "| request | code | meaning for this request |", "|---|---|---|"]
    lines += [
        f"| {request.value} | `{names[code]}` | {what.value} |"
        for (request, code), what in error_codes.EXCEPTIONS.items()
    ]
    return "\n".join(lines) + "\n"


def exit_codes() -> str:
    """One row for each exit code of ``spark-group``."""
    return (
        "\n".join(["| code | means |", "|---|---|", *(f"| {c} | {text} |" for c, text in cli.EXIT_CODES.items())])
        + "\n"
    )


def commands() -> str:
    """One row for each command: its first sentence and its options."""
    lines = ["| command | what it does | options |", "|---|---|---|"]
    for name, command in sorted(_leaves(typer.main.get_command(cli.app), "")):
        shown = [one for one in command.params if one.name != "help" and not getattr(one, "hidden", False)]
        options = ", ".join(f"`{one.opts[0] if one.opts[0].startswith('-') else one.name.upper()}`" for one in shown)
        text = " ".join((command.help or "").split("\n\n")[0].split())
        lines.append(f"| `{name}` | {text} | {options} |")
    return "\n".join(lines) + "\n"


def _leaves(command: Any, name: str) -> list[tuple[str, Any]]:
    """The subcommands of a command, without hidden ones."""
    below: dict[str, Any] = getattr(command, "commands", {})
    if not below:
        return [(name, command)]
    return [found for word, one in below.items() if not one.hidden for found in _leaves(one, f"{name} {word}".strip())]


def rows(kind: type[Enum], table: Table) -> str:
    """One row for each state: its comment in the code, and the changes that leave it."""
    lines = ["| state | meaning | changes |", "|---|---|---|"]
    meanings = dict(re.findall(r"^    (\w+) = \".*?\"  # (.*)$", inspect.getsource(kind), re.MULTILINE))
    for state in kind:
        exits = [f"{states.name_of(cause)} → `{to.value}`" for (at, cause), to in table.items() if at is state]
        lines.append(f"| `{state.value}` | {meanings[state.name]} | {', '.join(exits) or 'none'} |")
    return "\n".join(lines) + "\n"


def kinds(base: type[errors.SourceError]) -> list[type[errors.SourceError]]:
    """The subclasses of a class, depth first, in the order of the file."""
    found = [cls for cls in base.__subclasses__() if cls.__module__ == errors.__name__]
    return [each for cls in found for each in (cls, *kinds(cls))]


def section(cls: type[errors.SourceError]) -> str:
    """An error: its cause, its remedy, and whether it is retriable."""
    cause = re.sub(r"``([^`]*)``", r"`\1`", " ".join((cls.__doc__ or "").split()))
    remedy = re.sub(r"`docs/(\w+\.md)`", r"[\1](\1)", cls.remedy)
    again = "Yes." if cls.retriable else "No."
    return f"## {cls.__name__}\n\n{cause}\n\n**What to do.** {remedy}\n\n**Retriable.** {again}\n"


def diagram(kind: type[Enum], table: Table) -> str:
    """The table as a Mermaid diagram, without the changes that most states have."""
    starts: dict[tuple[type, Enum], set[Enum]] = {}
    for (at, cause), to in table.items():
        if at is not to:
            starts.setdefault((cause, to), set()).add(at)
    box, inside = BOXES.get(kind, ("", ()))
    arrows: dict[tuple[str, str], list[str]] = {}
    left_out = []
    for (cause, to), states_before in starts.items():
        if len(states_before) * 2 > len(kind):
            left_out.append(f"{states.name_of(cause)} → `{to.value}`")
            continue
        out_of_box = bool(inside) and to not in inside and states_before >= set(inside)
        befores = [at.value for at in kind if at in states_before - (set(inside) if out_of_box else set())]
        for before in [*befores, *(["box"] if out_of_box else [])]:
            arrows.setdefault((before, to.value), []).append(states.name_of(cause))
    node = {state.value: state.value.replace(" ", "_") for state in kind} | {"box": "box"}
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {node[next(iter(kind)).value]}"]
    lines += [f'    state "{name}" as {id_}' for name, id_ in node.items() if name != id_]
    if inside:
        lines += [f'    state "{box}" as box {{', *(f"        {node[state.value]}" for state in inside), "    }"]
    lines += [f"    {node[before]} --> {node[to]}: {', '.join(causes)}" for (before, to), causes in arrows.items()]
    same = "changes that keep the state"
    most = f"{', '.join(left_out)} (possible in most states), and {same}" if left_out else same
    return "\n".join([*lines, "```", "", f"Not drawn: {most}.", ""])


def filled(text: str, name: str, content: str) -> str:
    """The text with the content of one block replaced."""
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    assert block.search(text), f"there is no block {name}"
    return block.sub(partial(_between, content), text)


def _between(content: str, found: re.Match[str]) -> str:
    return f"{found[1]}{content}{found[2]}"


def main() -> None:
    for path, contents in blocks().items():
        text = path.read_text()
        for name, content in contents.items():
            text = filled(text, name, content)
        path.write_text(text)


if __name__ == "__main__":
    main()
