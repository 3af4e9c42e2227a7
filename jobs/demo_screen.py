"""How the demo looks: a live picture in a terminal, lines of text elsewhere, and the final screen in both.

Runs in: ``demo.py``. Deliberately absent: finding anything out; a :class:`View` is filled by ``demo.py``.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NamedTuple, Self

from demo_proof import Check, Evidence
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

TITLE: Final = "A PySpark job as a member of a Kafka consumer group, exactly once into Delta Lake"
WIDTH_MAX: Final = 100
REFRESH_HZ: Final = 4
LINE_EVERY_S: Final = 2.0
"""Without a terminal: pause between two states of the line with numbers."""
COLOURS: Final = {"job": "cyan", "ordinary": "yellow"}


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
    lives_at: str


@dataclass(slots=True)
class View:
    """What is known at one moment; numbers are of orders."""

    partitions: int
    produced: int = 0
    table: int = 0
    commits: int = 0
    ordinary: int = 0
    lag: int = 0
    generation: int | None = None
    executors: list[int] = field(default_factory=list)
    """Beside which of the job's executors its members live, by process id; empty unless all of them do."""
    members: list[tuple[str, str, list[int]]] = field(default_factory=list)
    """(kind, name, partitions)"""
    described: list[Described] = field(default_factory=list)
    """The group while both were in it."""
    now: str = ""
    events: list[tuple[float, str]] = field(default_factory=list)

    def owned(self, kind: str) -> list[int]:
        return sorted(p for member, _, partitions in self.members if member == kind for p in partitions)


class Screen:
    """Shows a view until it is left. ``tell`` adds an event, ``doing`` says what happens now."""

    def __init__(self, view: View, *, subtitle: str) -> None:
        terminal = Console()
        # Output that goes to a file or a pipe is not cut to the width of a terminal that is not there.
        self.console = terminal if terminal.is_terminal and terminal.width <= WIDTH_MAX else Console(width=WIDTH_MAX)
        self._view, self._subtitle = view, subtitle
        self._began_s = time.monotonic()
        self._told_s = 0.0
        self._line = 0  # characters that stand there and are to be written over
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._picture, console=self.console, refresh_per_second=REFRESH_HZ,
                          transient=True) if self.console.is_terminal else None  # fmt: skip

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self.console.print(self._head())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._over("")

    def tell(self, text: str) -> None:
        at_s = time.monotonic() - self._began_s
        self._view.events.append((at_s, text))
        if self._live is None:
            self._over("")
            self.console.print(self._event(at_s, text), soft_wrap=True)

    def doing(self, text: str) -> None:
        self._view.now = text

    def tick(self) -> None:
        """Without a terminal: one line with the numbers, which changes now and then."""
        if self._live is None and time.monotonic() - self._told_s >= LINE_EVERY_S:
            self._told_s, v = time.monotonic(), self._view
            numbers = f"{v.produced:,} produced, {v.table:,} in the table, {v.ordinary:,} ordinary, lag {v.lag:,}"
            self._over(f"          {numbers}: {v.now}")

    def _over(self, text: str) -> None:
        """Write over the line that stands there; nothing else may be printed before it is empty again."""
        erased = f"\r{' ' * self._line}\r" if self._line else ""
        self.console.file.write(erased + text)
        self.console.file.flush()
        self._line = len(text)

    def final(self, evidence: Evidence, checks: Sequence[Check]) -> None:
        """The screen that stays. Call it after the live picture has ended."""
        parts: list[Text | Table | str] = []
        if self._live is not None:
            parts += [self._head(), *(self._event(*event) for event in self._view.events), ""]
        else:
            parts.append("")
        parts += [_described(self._view), ""] if self._view.described else []
        parts += [_offsets(evidence), ""]
        for found in checks:
            mark, style = (" ✔ ", "bold green") if found.holds else (" ✘ ", "bold red")
            parts.append(Text.assemble((mark, style), (found.text, "" if found.holds else "red")))
        held = bool(checks) and all(found.holds for found in checks)
        end = " PROVEN: each order once, through a rebalance, a hand-over and kill -9 twice" if held else " NOT PROVEN"
        parts += ["", Text(end, "bold green" if held else "bold red")]
        self.console.print(Group(*parts), highlight=False)

    def _head(self) -> Text:
        return Text.assemble((f" {TITLE}\n", "bold"), (f" {self._subtitle}\n", "dim"))

    def _event(self, at_s: float, text: str) -> Text:
        line = Text.assemble((f" {at_s:5.1f} s  ", "dim"), text)
        line.highlight_words(["kill -9"], "bold red")
        line.highlight_words(["ordinary consumer"], COLOURS["ordinary"])
        return line

    def _picture(self) -> Group:
        view = self._view
        now = Text(f" {view.now}", "bold")
        spin = Table.grid()
        spin.add_row(" ", self._spinner, now)
        events = [self._event(*event) for event in view.events]
        panel = Panel(Group(_numbers(view), "", _members(view)), border_style="dim")
        return Group(self._head(), panel, *events, "", spin)


def _numbers(view: View) -> Table:
    table = Table.grid(expand=True)
    names = ("produced", "in the table", "ordinary consumer", "lag", "generation")
    for _ in names:
        table.add_column(justify="center")
    table.add_row(*(Text(name, "dim") for name in names))
    table.add_row(
        Text(f"{view.produced:,}", "bold"),
        Text(f"{view.table:,}", f"bold {COLOURS['job']}") + Text(f" in {view.commits} commits", "dim"),
        Text(f"{view.ordinary:,}", f"bold {COLOURS['ordinary']}"),
        Text(f"{view.lag:,}", "bold green" if view.lag < 1_000 else "bold red"),
        Text("–" if view.generation is None else str(view.generation), "bold"),
    )
    return table


def _members(view: View) -> Table:
    table = Table.grid(padding=(0, 2))
    for kind, name, mine in view.members:
        row = Text()
        for p in range(view.partitions):
            row.append(f" {p} ", f"bold black on {COLOURS[kind]}" if p in mine else "dim")
        table.add_row(Text(name, COLOURS[kind]), row)
    if not view.members:
        table.add_row(Text("the group has no members", "dim"))
    return table


def _described(view: View) -> Table:
    """``kafka-consumer-groups --describe --members --verbose`` beside ``spark-group describe``."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1))
    names = (" kafka-consumer-groups: member", "host", "assigned", "spark-group describe", "lives at")
    for name in names:
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
        cells = (f"{offsets[p]:,}" if p in offsets else "–" for p in sorted(evidence.ends))
        table.add_row(name, *cells)
    return table
