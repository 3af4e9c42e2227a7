"""Kafka's transaction coordinator, for transactions that contain only a group's offsets.

Runs in: tests. A transactional id has an epoch: taking over the id increments it, which fences all producers with an
older epoch (KIP-98). Deliberately absent: records in transactions, producer ids (the epoch identifies a producer; an
id that was forgotten gets another one).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kit.kafka_group import Code, Entry, Group
from kit.world import World
from spark_group_source.model import TopicPartition

MARKER_MS_MAX = 60
"""From the commit of the transaction until a read that is not stable returns the offsets."""
TRANSACTION_MS = 60_000
"""The default of transaction.timeout.ms: after it the coordinator aborts an open transaction."""


@dataclass
class _Transaction:
    epoch: int = 0
    forgotten: bool = False  # the coordinator does not know the id any more
    since: int = 0  # the first epoch since it was last forgotten; producers before it have another producer id
    groups: dict[int, Group] = field(default_factory=dict)  # groups whose offsets it may contain, by identity
    open: bool = False
    ending: bool = False
    committed: bool | None = None  # how the last one ended
    number: int = 0
    by: list[str] = field(default_factory=list)  # the processes that took over the id, in order


class Transactions:
    """The coordinator of all transactional ids."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.answered: set[str] = set()  # processes whose request to take over an id is over, answered or not
        self.asking: set[str] = set()  # processes that wait for the answer to one, maybe a later one
        self._known: dict[str, _Transaction] = {}

    def init(self, id_: str, by: str = "") -> tuple[Code, int]:
        """Take over the id: OK and the new epoch, or CONCURRENT while an older transaction is being ended."""
        found = self._known.setdefault(id_, _Transaction())
        found.by.append(by)
        if found.open:
            found.epoch += 1  # fences the current owner
            self._end(id_, found, commit=False)
        if found.ending:
            return Code.CONCURRENT, 0
        found.epoch += 1
        if found.forgotten:
            found.forgotten, found.since = False, found.epoch
        found.committed = None
        return Code.OK, found.epoch

    def add(self, id_: str, epoch: int, group: Group, *, timeout_ms: int = TRANSACTION_MS) -> Code:
        """Add this group's offsets to the transaction, which expires after ``timeout_ms``."""
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
        """Add offsets as a member (id, generation, instance id) or as none. Offsets that arrive after the end of the
        transaction are refused, as by brokers since 3.8 (KIP-890: they verify with the transaction coordinator)."""
        found = self._known.get(id_)
        if found is None or found.forgotten or epoch < found.since:
            return Code.UNKNOWN_PRODUCER
        if found.epoch != epoch:
            return Code.FENCED_PRODUCER
        if not found.open:
            return Code.INVALID_TXN_STATE
        member, generation, instance = who
        return group.send(id_, member, generation, entries, instance=instance)

    def end(self, id_: str, epoch: int, *, commit: bool, done: Callable[[Code], None]) -> None:
        """Commit or abort. Repeating the same end is answered with success."""
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

    def forget(self) -> bool:
        """Forget the ids without an open transaction, as after their expiration; return whether there is one."""
        idle = [found for found in self._known.values() if not (found.open or found.ending or found.forgotten)]
        for found in idle:
            found.forgotten = True
        return bool(idle)

    def taken_twice(self, by: str) -> bool:
        """Whether a process fenced itself: its first request arrived after the retry that replaced it."""
        return any(found.by[-2:] == [by, by] for found in self._known.values())

    def taken_back(self, by: str) -> bool:
        """Whether another process took over an id after this one, when the coordinator had forgotten it before."""
        return any(found.since and by in found.by and found.by[-1] != by for found in self._known.values())

    def _check(self, id_: str, epoch: int) -> Code:
        found = self._known.get(id_)
        if found is None or found.forgotten or epoch < found.since:
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
