"""How the demo looks: a line for each event, on a terminal with what happens now below them, and the final screen.

Runs in: ``demo.py``. Deliberately absent: finding anything out; a :class:`View` is filled by ``demo.py``.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from demo_proof import Check, Evidence
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

TITLE: Final = "A PySpark job as a member of a Kafka consumer group, exactly once into Delta Lake"
WIDTH_MAX: Final = 100


def shown(partitions: Sequence[int]) -> str:
    """Sorted numbers, those in a row as 0-3."""
    runs: list[list[int]] = []
    for p in partitions:
        if runs and runs[-1][-1] == p - 1:
            runs[-1][1:] = [p]
        else:
            runs.append([p])
    return " ".join("-".join(map(str, run)) for run in runs) or "none"


class Described(NamedTuple):
    """A member by instance id, or else client id: what Kafka's tool shows of it, then what ours does."""

    name: str
    host: str
    assigned: str
    partitions: str
    placed_on: str


@dataclass(slots=True)
class View:
    """What is known at one moment; numbers are of orders."""

    partitions: int
    produced: int = 0
    table: int = 0
    ordinary: int = 0
    lag: int = 0
    generation: int | None = None
    executors: list[int] = field(default_factory=list)
    """Beside which of the job's executors its members live, by process id; empty unless all of them do."""
    owned: dict[str, list[int]] = field(default_factory=lambda: {"job": [], "ordinary": []})
    """The partitions of the job's members, and of the ordinary consumer."""
    described: list[Described] = field(default_factory=list)
    """The group while both were in it."""


class Screen:
    """``tell`` prints an event; ``doing`` shows the current step: on a terminal below the events, with numbers."""

    def __init__(self, view: View, *, subtitle: str) -> None:
        terminal = Console()
        # Output to a file or a pipe is not truncated to a terminal width.
        self.console = terminal if terminal.is_terminal and terminal.width <= WIDTH_MAX else Console(width=WIDTH_MAX)
        self._view, self._subtitle, self._now = view, subtitle, ""
        self._began_s = time.monotonic()
        self._status = self.console.status("") if self.console.is_terminal else None

    def __enter__(self) -> Self:
        self.console.print(Text.assemble((f" {TITLE}\n", "bold"), (f" {self._subtitle}\n", "dim")))
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, text: str) -> None:
        line = Text.assemble((f" {time.monotonic() - self._began_s:5.1f} s  ", "dim"), text)
        line.highlight_words(["kill -9"], "bold red")
        line.highlight_words(["ordinary consumer"], "yellow")
        self.console.print(line, soft_wrap=True)

    def doing(self, text: str) -> None:
        if self._status is None and text != self._now:
            self.console.print(f"          … {text}", soft_wrap=True, highlight=False)
        self._now = text
        self.tick()

    def tick(self) -> None:
        """Update the numbers on a terminal."""
        if self._status is not None:
            v = self._view
            numbers = f"{v.produced:,} produced, {v.table:,} in the table, {v.ordinary:,} ordinary, lag {v.lag:,}"
            self._status.update(Text.assemble((self._now, "bold"), "\n", (numbers, "dim")))

    def final(self, evidence: Evidence, checks: Sequence[Check]) -> bool:
        """Print the result; returns whether all checks pass."""
        parts: list[Text | Table | str] = [""]
        parts += [_described(self._view), ""] if self._view.described else []
        parts += [_offsets(evidence), ""]
        for found in checks:
            mark, style = (" ✔ ", "bold green") if found.holds else (" ✘ ", "bold red")
            parts.append(Text.assemble((mark, style), (found.text, "" if found.holds else "red")))
        held = bool(checks) and all(found.holds for found in checks)
        end = " PROVEN: each order once, through two rebalances and two kill -9" if held else " NOT PROVEN"
        parts += ["", Text(end, "bold green" if held else "bold red")]
        self.console.print(Group(*parts), highlight=False)
        return held


def _described(view: View) -> Table:
    """``kafka-consumer-groups --describe --members --verbose`` beside ``spark-group describe``."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1))
    for name in (" kafka-consumer-groups: member", "host", "assigned", "spark-group describe", "placed on"):
        table.add_column(name)
    for row in view.described:
        table.add_row(f" {row.name}", *row[1:])
    return table


def _offsets(evidence: Evidence) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1))
    table.add_column(" partition")
    for p in sorted(evidence.ends):
        table.add_column(str(p), justify="right")
    for name, offsets in (
        (" end of the log", evidence.ends),
        (" committed to Kafka", evidence.committed),
        (" in the table's log", evidence.ledger),
    ):
        table.add_row(name, *(f"{offsets[p]:,}" if p in offsets else "–" for p in sorted(evidence.ends)))
    return table
