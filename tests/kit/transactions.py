"""Kafka's transaction coordinator, for transactions that hold nothing but a group's offsets.

Runs in: tests. A transactional id has an epoch: whoever takes the id over raises it, and shuts out all who have an
older one (KIP-98). Deliberately absent: records in transactions, producer ids (the epoch tells producers apart).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kit.kafka_group import Code, Entry, Group
from kit.world import World
from spark_group_source.model import TopicPartition

MARKER_MS_MAX = 60
"""From "the transaction is committed" until a plain read shows it."""
TRANSACTION_MS = 60_000
"""transaction.timeout.ms unless set: after it the coordinator aborts what nobody ends."""


@dataclass
class _Transaction:
    epoch: int = 0
    groups: dict[int, Group] = field(default_factory=dict)  # that it may have sent offsets to; by identity
    open: bool = False
    ending: bool = False
    committed: bool | None = None  # how the last one ended
    number: int = 0
    by: list[str] = field(default_factory=list)  # who asked for it, each time


class Transactions:
    """The coordinator of every transactional id."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.answered: set[str] = set()  # whose question for an id is over, also without an answer
        self._known: dict[str, _Transaction] = {}

    def init(self, id_: str, by: str = "") -> tuple[Code, int]:
        """Take the id over: OK and the new epoch, or CONCURRENT while an older transaction is being ended."""
        found = self._known.setdefault(id_, _Transaction())
        found.by.append(by)
        if found.open:
            found.epoch += 1  # whoever has it open is shut out now
            self._end(id_, found, commit=False)
        if found.ending:
            return Code.CONCURRENT, 0
        found.epoch += 1
        found.committed = None
        return Code.OK, found.epoch

    def add(self, id_: str, epoch: int, group: Group, *, timeout_ms: int = TRANSACTION_MS) -> Code:
        """The transaction will hold offsets of this group. Nobody may take longer to end it than ``timeout_ms``."""
        if (code := self._check(id_, epoch)) is not Code.OK:
            return code
        found = self._known[id_]
        found.groups[id(group)] = group
        if not found.open:
            found.open, found.number = True, found.number + 1
            number = found.number
            self._world.at(timeout_ms, lambda: self._expire(id_, number))
        return Code.OK

    def send(
        self,
        id_: str,
        epoch: int,
        group: Group,
        who: tuple[str, int, str | None],
        entries: Mapping[TopicPartition, Entry],
    ) -> Code:
        """Offsets, in the name of a member (id, generation, instance id) or of none. What comes when the transaction is
        over is refused, as by brokers since 3.8 (KIP-890: they ask the transaction's coordinator)."""
        found = self._known.get(id_)
        if found is None or found.epoch != epoch:
            return Code.FENCED_PRODUCER
        if not found.open:
            return Code.INVALID_TXN_STATE
        member, generation, instance = who
        return group.send(id_, member, generation, entries, instance=instance)

    def end(self, id_: str, epoch: int, *, commit: bool, done: Callable[[Code], None]) -> None:
        """Commit or abort. What was ended already in the same way is answered as if it were now."""
        code = self._check(id_, epoch)
        found = self._known.get(id_)
        if code is Code.CONCURRENT and found is not None and found.committed is commit:
            code = Code.OK
        elif code is Code.OK and found is not None:
            if found.open:
                self._end(id_, found, commit=commit)
            elif found.committed is not commit:
                code = Code.INVALID_TXN_STATE
        done(code)

    def taken_twice(self, by: str) -> bool:
        """Whether a process shut itself out: its first request came late, after the one that it sent in its place."""
        return any(found.by[-2:] == [by, by] for found in self._known.values())

    def _check(self, id_: str, epoch: int) -> Code:
        found = self._known.get(id_)
        if found is None:
            return Code.UNKNOWN_PRODUCER
        if found.epoch != epoch:
            return Code.FENCED_PRODUCER
        return Code.CONCURRENT if found.ending else Code.OK

    def _expire(self, id_: str, number: int) -> None:
        found = self._known.get(id_)
        if found is not None and found.open and found.number == number:
            self._world.note(f"transactions: {id_} took too long")
            found.epoch += 1
            self._end(id_, found, commit=False)

    def _end(self, id_: str, found: _Transaction, *, commit: bool) -> None:
        found.open, found.ending, found.committed = False, True, commit

        def marked() -> None:
            if self._world.now_ms < self._world.down_until_ms:
                self._world.at(MARKER_MS_MAX, marked)
                return
            for group in found.groups.values():
                group.finish(id_, commit=commit)
            found.groups, found.ending = {}, False

        self._world.at(self._world.draws(f"transactions/{id_}").between(0, MARKER_MS_MAX), marked)
