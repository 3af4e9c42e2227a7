"""One look at groups from outside: offsets, the ages of their next records, members.

Runs in: the exporter. Deliberately absent: the loop and what Prometheus is told (``groups``), and any part in the
group: it asks as an operator does, and reads records with a consumer that is only ever assigned.

Nothing is concluded from silence: a group that did not answer has no numbers in this sweep, a partition that was left
out of an answer none of its own, and one whose next record was not read in time no age.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from spark_group_source.errors import GroupError
from spark_group_source.kafka import (
    Environment,
    GroupAdmin,
    GroupDescription,
    GroupMember,
    GroupOffsets,
    RecordTime,
    RecordTimes,
)
from spark_group_source.kafka.record_times import NO_TIME
from spark_group_source.model import TopicPartition

log = logging.getLogger(__name__)

SEARCH_EVERY_MS = 60_000
"""How often a group is asked for all partitions of the cluster; in between for those where it had an offset, and those
that its members have."""
KEPT_OPEN_MAX = 50
"""Groups whose connections stay open between sweeps; those of further ones are made anew in each."""
AT_REST = ("stable", "empty")
"""States in which the members' partitions are what they will be: then they are compared with those before."""

Key = tuple[TopicPartition, int]
"""A partition and the offset that a group committed of it: groups that stand at the same one share its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSeen:
    """``None``: not known."""

    committed: int
    end: int | None
    age_s: float | None

    @property
    def lag(self) -> int | None:
        return None if self.end is None else max(0, self.end - self.committed)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSeen:
    """One group in the last sweep. Where it was not answered only ``unreachable_since_ms`` and what was counted say
    anything."""

    group: str
    unreachable_since_ms: int | None = None
    """On the exporter's clock; None: it answered."""
    state: str = ""
    members: tuple[GroupMember, ...] = ()
    partitions: Mapping[TopicPartition, PartitionSeen] = field(default_factory=dict)
    rebalances: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a sweep found. ``ended_s``: since the epoch."""

    groups: tuple[GroupSeen, ...]
    unreachable_since_ms: int | None
    took_s: float
    ended_s: float
    records_read: int


@dataclass(slots=True)
class _Watched:
    """What is remembered of a group from one sweep to the next, and what it answered in this one."""

    described: GroupDescription | None = None
    """None: it was not answered."""
    committed: Mapping[TopicPartition, int] = field(default_factory=dict)
    answered_ms: int = -1
    silent_since_ms: int | None = None
    tps: Collection[TopicPartition] = ()
    searched_ms: int | None = None
    owned: Mapping[str, frozenset[TopicPartition]] | None = None
    rebalances: int = 0
    offsets: GroupOffsets | None = None


class Sweeps:
    """Looks at groups, one sweep after the other. One thread uses it.

    Args:
        settings: librdkafka settings of an admin client.
        groups: which ones; None: all that the user may describe.
        isolation_level: of their consumers: where a partition ends for them, and which records they get.
        bound_s: no question of a sweep begins later than this after it began.
        wall_s: the clock that records are dated by.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        groups: Collection[str] | None,
        *,
        isolation_level: str,
        bound_s: float,
        environment: Environment | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._groups, self._bound_ms, self._wall_s = settings, groups, round(bound_s * 1000), wall_s
        self._environment = environment or Environment()
        self._admin = GroupAdmin(settings, environment=self._environment, retries=0)
        self._times = RecordTimes(settings, isolation_level=isolation_level, environment=self._environment)
        self._committed_only = isolation_level == "read_committed"
        self._ages = Ages()
        self._watched: dict[str, _Watched] = {name: _Watched() for name in groups or ()}
        self._all: tuple[TopicPartition, ...] = ()
        self._listed_ms: int | None = None
        self._silent_since_ms: int | None = None
        self._records_read = 0
        self._failures: dict[str, str] = {}

    def sweep(self) -> Seen:
        """Look once. Never raises for what brokers say, or do not."""
        began_ms = self._environment.now_ms()
        until_ms = began_ms + self._bound_ms
        self._failures = {}
        for watched in self._watched.values():
            watched.described, watched.committed = None, {}
        if reached := self._tried("the cluster", self._list):
            for name in sorted(self._watched, key=lambda name: self._watched[name].answered_ms):
                if self._environment.now_ms() >= until_ms:
                    break
                self._tried(f"group {name}", partial(self._ask, name))
        wall_ms = round(self._wall_s() * 1000)
        tps = {tp for watched in self._watched.values() for tp in watched.committed}
        ends: dict[TopicPartition, int] = {}
        if tps:
            self._tried(
                "ends of partitions",
                lambda: ends.update(self._admin.latest(tps, committed=self._committed_only, whole=False)),
            )
        self._read_ages(ends, until_ms)
        self._note_silence(reached, began_ms)
        return Seen(
            groups=tuple(self._seen(name, ends, wall_ms) for name in sorted(self._watched)),
            unreachable_since_ms=self._silent_since_ms,
            took_s=(self._environment.now_ms() - began_ms) / 1000,
            ended_s=self._wall_s(),
            records_read=self._records_read,
        )

    def close(self) -> None:
        """Close every connection."""
        for watched in self._watched.values():
            if watched.offsets is not None:
                watched.offsets.close()
        self._times.close()
        self._admin.close()

    # --- questions --------------------------------------------------------------------------------------------------

    def _tried(self, what: str, ask: Callable[[], object]) -> bool:
        try:
            ask()
        except GroupError as exc:
            self._failures[what] = str(exc)
            return False
        return True

    def _list(self) -> None:
        """Which groups and partitions there are."""
        if self._groups is None:
            names = {listed.group for listed in self._admin.groups()}
            for name in self._watched.keys() - names:
                self._forget(name)
            self._watched |= {name: _Watched() for name in names - self._watched.keys()}
        now_ms = self._environment.now_ms()
        if self._listed_ms is None or now_ms >= self._listed_ms + SEARCH_EVERY_MS:
            listed = self._admin.listed()
            self._all = tuple(TopicPartition(name, p) for name, topic in listed.items() for p in topic.partitions)
            self._listed_ms = now_ms

    def _forget(self, name: str) -> None:
        if (offsets := self._watched.pop(name).offsets) is not None:
            offsets.close()

    def _ask(self, name: str) -> None:
        watched = self._watched[name]
        described = self._admin.group(name)
        owned = {tp for member in described.members for tp in member.partitions}
        searching = watched.searched_ms is None or watched.searched_ms != self._listed_ms
        tps = owned.union(self._all if searching else watched.tps)
        offsets = watched.offsets or GroupOffsets(self._settings, group=name, environment=self._environment)
        try:
            read = offsets.read(tps, stable=False) if tps else {}
        finally:
            open_now = sum(other.offsets is not None for other in self._watched.values())
            if watched.offsets is None and open_now >= KEPT_OPEN_MAX:
                offsets.close()
            else:
                watched.offsets = offsets
        committed = {tp: at.offset for tp, at in read.items() if at is not None}
        if tps <= read.keys():
            watched.searched_ms, watched.tps = self._listed_ms, committed.keys()
        watched.described, watched.committed = described, committed

    def _read_ages(self, ends: Mapping[TopicPartition, int], until_ms: int) -> None:
        behind: dict[Key, int] = {
            (tp, at): ends[tp]
            for watched in self._watched.values()
            for tp, at in watched.committed.items()
            if at < ends.get(tp, at)
        }
        now_ms = self._environment.now_ms()
        firsts: dict[TopicPartition, int] = {}
        if known := self._ages.known(behind, now_ms=now_ms):
            self._tried("beginnings of partitions", lambda: firsts.update(self._admin.earliest(known, whole=False)))
        missing = self._ages.missing(behind, firsts, now_ms=now_ms)
        read: dict[Key, RecordTime | None] = {}

        def read_all() -> None:
            for offsets in _rounds(missing):
                found = self._times.read(offsets, until_ms=until_ms)
                read.update({(tp, offsets[tp]): record for tp, record in found.items()})

        self._tried("times of records", read_all)
        self._records_read += len(read)
        self._ages.take(read, behind, missing, now_ms=now_ms)

    # --- what is told -----------------------------------------------------------------------------------------------

    def _note_silence(self, reached: bool, began_ms: int) -> None:
        """Since when the cluster, and each group, has not answered; said when it begins and when it ends."""
        answered = any(watched.described is not None for watched in self._watched.values())
        silent = not reached or (bool(self._watched) and not answered)
        if silent and self._silent_since_ms is None:
            self._silent_since_ms = began_ms
            log.warning("nothing was answered, and of lag nothing is told until it is: %s", self._failed())
        elif not silent and self._silent_since_ms is not None:
            log.warning(
                "there are answers again, after %d s", (self._environment.now_ms() - self._silent_since_ms) // 1000
            )
            self._silent_since_ms = None
        for name, watched in self._watched.items():
            if watched.described is not None:
                watched.answered_ms, watched.silent_since_ms = self._environment.now_ms(), None
                self._count(watched, watched.described)
            elif watched.silent_since_ms is None:
                watched.silent_since_ms = began_ms
                if not silent:
                    log.warning("group %s was not answered: %s", name, self._failed(f"group {name}"))

    def _failed(self, what: str = "") -> str:
        """Why; of one question, or of any."""
        return self._failures.get(what) or next(iter(self._failures.values()), "the interval was too short to ask")

    def _count(self, watched: _Watched, described: GroupDescription) -> None:
        if described.state not in AT_REST:
            return
        # A static member that comes back in its place has another member id, and nothing moved.
        owned = {m.instance_id or m.member_id: frozenset(m.partitions) for m in described.members}
        watched.rebalances += watched.owned is not None and owned != watched.owned
        watched.owned = owned

    def _seen(self, name: str, ends: Mapping[TopicPartition, int], wall_ms: int) -> GroupSeen:
        watched = self._watched[name]
        if watched.described is None:
            since_ms = watched.silent_since_ms
            return GroupSeen(group=name, unreachable_since_ms=since_ms, rebalances=watched.rebalances)
        return GroupSeen(
            group=name,
            state=watched.described.state,
            members=watched.described.members,
            rebalances=watched.rebalances,
            partitions={
                tp: PartitionSeen(committed=at, end=ends.get(tp), age_s=self._age_s(tp, at, ends.get(tp), wall_ms))
                for tp, at in watched.committed.items()
            },
        )

    def _age_s(self, tp: TopicPartition, committed: int, end: int | None, wall_ms: int) -> float | None:
        if end is None:
            return None
        return 0.0 if committed >= end else self._ages.age_s(tp, committed, wall_ms=wall_ms)


def _rounds(keys: Iterable[Key]) -> list[dict[TopicPartition, int]]:
    """Each partition once in a round: a consumer is at one offset of it."""
    rounds: list[dict[TopicPartition, int]] = []
    for tp, at in keys:
        free = next((one for one in rounds if tp not in one), None)
        if free is None:
            rounds.append(free := {})
        free[tp] = at
    return rounds


# --- which records are read for ages ---------------------------------------------------------------------------------


READ_AGAIN_MS = 300_000
"""A time that is known is read again after this: compaction may have taken the record, which nothing tells."""


@dataclass(frozen=True, slots=True)
class _Known:
    record: RecordTime | None
    end: int
    """Where the partition ended then: of "no record" the bound."""
    read_ms: int


class Ages:
    """The records that were read, one for each partition of a group and its committed offset."""

    def __init__(self) -> None:
        self._known: dict[tuple[TopicPartition, int], _Known] = {}

    def known(self, behind: Mapping[tuple[TopicPartition, int], int], *, now_ms: int) -> set[TopicPartition]:
        """Partitions where a record is known that may be gone since: where do their logs begin?"""
        return {key[0] for key in behind if (known := self._fresh(key, now_ms)) is not None and known.record}

    def missing(
        self,
        behind: Mapping[tuple[TopicPartition, int], int],
        firsts: Mapping[TopicPartition, int],
        *,
        now_ms: int,
    ) -> list[tuple[TopicPartition, int]]:
        """What must be read, those first that were never read.

        Args:
            behind: partition and committed offset -> where the partition ends.
            firsts: where logs begin, of :meth:`known`; one without an answer is read.
        """
        missing = []
        for key, end in behind.items():
            known = self._fresh(key, now_ms)
            if known is None or not _holds(known, end, firsts.get(key[0])):
                missing.append(key)
        return sorted(missing, key=lambda key: key in self._known)

    def take(
        self,
        read: Mapping[tuple[TopicPartition, int], RecordTime | None],
        behind: Mapping[tuple[TopicPartition, int], int],
        missing: Iterable[tuple[TopicPartition, int]],
        *,
        now_ms: int,
    ) -> None:
        """What was read of that; the rest of it is not known any more, and neither is what nobody is behind at now."""
        unanswered = set(missing) - read.keys()
        self._known = {key: k for key, k in self._known.items() if key in behind and key not in unanswered}
        self._known |= {key: _Known(record, behind[key], now_ms) for key, record in read.items()}

    def age_s(self, tp: TopicPartition, committed: int, *, wall_ms: int) -> float | None:
        """Seconds since the next record was made, 0 where there is none; None: not known."""
        known = self._known.get((tp, committed))
        if known is None or (known.record is not None and known.record.timestamp_ms == NO_TIME):
            return None
        return 0.0 if known.record is None else max(0, wall_ms - known.record.timestamp_ms) / 1000

    def _fresh(self, key: tuple[TopicPartition, int], now_ms: int) -> _Known | None:
        known = self._known.get(key)
        return known if known is not None and now_ms < known.read_ms + READ_AGAIN_MS else None


def _holds(known: _Known, end: int, first: int | None) -> bool:
    """Whether what was read is still so: the record is in the log, or nothing came behind what held none."""
    if known.record is None:
        return end <= known.end
    return first is not None and first <= known.record.offset
