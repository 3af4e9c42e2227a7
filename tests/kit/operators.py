"""Operators that stop all consumers, move the offsets of the group, and start the consumers again.

Runs in: tests. They use Kafka's own tool (offsets alone), or the product's ``spark-group reset``, which moves Kafka
first, then the ledger of a table, and run the commands that its errors print. Deliberately absent: typing errors.
"""

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import typer

from kit.books import Reader
from kit.cluster import Cluster
from kit.environment import SimulatedEnvironment
from kit.invariants import Invariants
from kit.sinks import SimulatedWriter, Table
from kit.world import Process, World
from spark_group_source.cli import common, reset
from spark_group_source.delta import table_writer
from spark_group_source.errors import GroupError, SourceError
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import parse_note

GROUP_EMPTY_MS_MAX = 90_000
"""Time after which every session has ended."""
LOOK_S = 0.5
TRIES_MAX = 50
PRINTED = re.compile(r"^ {4}spark-group reset (.*)$", re.MULTILINE)
"""A command that an error prints, and its options."""
SERVERS = "kafka:9092"
NO_SPARK: Any = SimpleNamespace()

Targets = dict[TopicPartition, int]


class MachineDied(Exception):
    """The operator's machine has died between Kafka and the table."""


class WatchedAdmin(GroupAdmin):
    """The product's admin client, which reports the moves of resets.

    Args:
        truth: receives them.
    """

    def __init__(self, truth: Invariants, environment: SimulatedEnvironment) -> None:
        super().__init__({"bootstrap.servers": SERVERS}, environment=environment, retries=10)
        self._truth = truth
        self.dies = False  # after the next move

    def move_committed(
        self, group: str, offsets: Mapping[TopicPartition, int], *, notes: Mapping[TopicPartition, str] | None = None
    ) -> None:
        if not notes:
            super().move_committed(group, offsets)
            return
        self._truth.resets(max(parse_note(note).reset_number for note in notes.values()))
        try:
            super().move_committed(group, offsets, notes=notes)
        except GroupError:
            self._truth.half_done(offsets)  # a request without an answer may still be executed later
            raise
        if self.dies:
            self.dies = False
            self._truth.half_done(offsets)
            raise MachineDied


class Operator:
    """An operator, who makes one change at a time.

    Args:
        stop: makes all members leave the group.
        start: makes them join again.
        tables: those of the group's queries.
    """

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        truth: Invariants,
        group: str,
        *,
        stop: Callable[[], None],
        start: Callable[[], None],
        tables: Sequence[Table] = (),
    ) -> None:
        self._process = Process(world, "operator")
        self._world, self._cluster, self._truth, self._group = world, cluster, truth, group
        self._stop, self._start, self._tables = stop, start, tables
        self._environment = SimulatedEnvironment(self._process, cluster)
        self._admin = WatchedAdmin(truth, self._environment)
        self.busy = False
        self.moves = 0
        self.refused = 0  # resets that would have kept an offset of a former topic
        truth.reads_as(self._process.name, Reader(self._process.name, self._process.name))
        truth.operator = self._process.name

    def begin(
        self,
        act: Callable[[], None],
        *,
        stop: Callable[[], None] | None = None,
        start: Callable[[], None] | None = None,
        is_patient: bool = True,
    ) -> bool:
        """Stop all consumers, act, and start them again. Returns False if a change is in progress already.

        Args:
            stop, start: other ways to do that.
            is_patient: whether to wait until the group is empty.
        """
        if self.busy:
            return False
        self.busy = True
        self._process.spawn("operator", lambda: self._work(act, stop or self._stop, start or self._start, is_patient))
        return True

    def _work(
        self, act: Callable[[], None], stop: Callable[[], None], start: Callable[[], None], is_patient: bool
    ) -> None:
        stop()
        until_ms = self._world.now_ms + GROUP_EMPTY_MS_MAX
        while is_patient and self._cluster.group(self._group).members:
            self._truth.require(self._world.now_ms < until_ms, "a member of no simulated process stays in the group")
            self._environment.pause(LOOK_S)
            if stop != self._stop:
                stop()  # a frozen process may have continued meanwhile
        for _ in range(TRIES_MAX):
            try:
                act()
                break
            except SourceError as exc:
                self._world.note(f"operator: {exc}")
                self._environment.pause(LOOK_S)
        self.moves += 1
        self.busy = False
        start()

    # --- changes, on the operator's thread -------------------------------------------------------------------------

    def by_kafkas_tool(self, draw: Callable[[Targets], Targets]) -> None:
        """``kafka-consumer-groups.sh --reset-offsets``: offsets without a note.

        Args:
            draw: makes the new offsets from the committed ones.
        """
        committed = self._admin.committed(self._group)
        targets = draw({tp: at.offset for tp, at in committed.items()})
        if targets:
            self._world.note(f"operator: moves {_text(targets)}")
            self._admin.move_committed(self._group, targets)

    def by_reset(self, draw: Callable[[Targets], Targets], tables: Sequence[Table], *, halfway: bool = False) -> None:
        """``spark-group reset --to-offsets``, once for each table, or once without a table.

        Args:
            halfway: whether the operator's machine dies between Kafka and the table.
        """
        committed = self._admin.committed(self._group)
        if targets := draw({tp: at.offset for tp, at in committed.items()}):
            self._reset_to(("--to-offsets", _json(targets)), tables, halfway=halfway)

    def to(self, position: str, tables: Sequence[Table]) -> None:
        """``spark-group reset`` to what this option names, once for each table."""
        self._reset_to((position,), tables)

    def settle(self, table: Table, tables: Sequence[Table]) -> None:
        """Resolve a LedgerConflict as its message proposes: continue at the table's offsets, or write the rows again.

        The offsets of one table may be behind those of another table of the group, so all tables are reset to them.
        """
        held = {} if table.ledger is None else dict(table.ledger.offsets)
        if not self._admin.committed(self._group):  # all topics were deleted: the command needs their names
            if topics := self._admin.existing_topics(tp.topic for tp in held):
                self._reset_to(("--to-earliest", *(word for name in topics for word in ("--topic", name))), tables)
        elif self._process.draws("settles").chance(0.5):
            self.by_reset(lambda committed: {tp: at for tp, at in held.items() if tp in committed}, tables)
        else:
            self.to("--to-current", tables)

    def _reset_to(self, position: tuple[str, ...], tables: Sequence[Table], *, halfway: bool = False) -> None:
        words_of_tables: list[tuple[str, ...]] = [("--table", table.log.table) for table in tables]
        for of_table in words_of_tables or [()]:
            self._admin.dies = halfway and bool(of_table)
            words: tuple[str, ...] = ("--group", self._group, "--bootstrap-servers", SERVERS, *position, *of_table)
            with contextlib.suppress(MachineDied):
                self._complete((*words, "--execute"))

    def _complete(self, words: tuple[str, ...]) -> None:
        """Run ``spark-group reset`` until it succeeds: after a refusal the command for recreated topics before it, and
        after a failure behind Kafka the one that completes it.

        Raises:
            SourceError: it was refused, or fails again and again.
        """
        for tries in range(TRIES_MAX):
            try:
                self._run(words)
                return
            except GroupError as exc:
                self._world.note(f"operator: {exc}")
                completing = PRINTED.findall("\n".join(getattr(exc, "__notes__", ())))
                first = [options for options in PRINTED.findall(str(exc)) if "--to-earliest " in options]
                if completing:
                    (words,) = (tuple(shlex.split(options)) for options in completing)
                elif first:
                    self.refused += 1
                    self._run(tuple(shlex.split(first[0])))
                elif tries == TRIES_MAX - 1:
                    raise
                self._environment.pause(LOOK_S)

    def _run(self, words: tuple[str, ...]) -> None:
        """Run ``spark-group reset`` with these options."""
        self._world.note(f"operator: spark-group reset {shlex.join(words)}")
        given: dict[str, Any] = {"topic": []}
        each = iter(words)
        for word in each:
            name = word.removeprefix("--").replace("-", "_")
            if name in ("execute", "to_earliest", "to_current", "to_ledger", "to_further"):
                given[name] = True
            elif name == "topic":
                given[name].append(next(each))
            else:
                given[name] = next(each)
        with (
            patch.object(common, "admin_of", self._with_admin),
            patch.object(common, "session", lambda: contextlib.nullcontext(NO_SPARK)),
            patch.object(table_writer, "open_existing", self._open),
            patch.object(typer, "echo", lambda _: None),
        ):
            reset.reset_command(**given, as_json=True)

    @contextlib.contextmanager
    def _with_admin(self, *_: Any) -> Iterator[WatchedAdmin]:
        yield self._admin

    def _open(self, _: Any, name: str) -> SimulatedWriter:
        (table,) = [table for table in self._tables if table.log.table == name]
        return SimulatedWriter(table)


def _json(offsets: Targets) -> str:
    by_topic: dict[str, dict[str, int]] = {}
    for tp, at in sorted(offsets.items()):
        by_topic.setdefault(tp.topic, {})[str(tp.partition)] = at
    return json.dumps(by_topic)


def _text(offsets: Targets) -> str:
    return ", ".join(f"{tp}={at}" for tp, at in sorted(offsets.items()))
