"""The exporter: sweeps over groups at an interval, and serves the results as metrics.

Runs in: the process of ``spark-group exporter``, on its main thread. Deliberately absent: membership: it sends requests
of an operator, and reads records with a consumer that is only assigned partitions. Kafka is read at the exporter's own
interval, independent of scrapes. All values of a scrape are from one sweep, so that they are consistent.

An unanswered request yields no value, and no old one is kept: a group that did not answer has no numbers in this sweep,
neither has a partition that an answer left out, and a partition whose next record was not read in time has no age.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from spark_group_source.errors import GroupError
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.group_offsets import NO_TIME, GroupOffsets, RecordTime, RecordTimes
from spark_group_source.kafka.translation import GROUP_STATES, GroupDescription, GroupMember
from spark_group_source.metrics.endpoint import Endpoint, Metric, MetricsCollector, Sample, since_s
from spark_group_source.model import TopicPartition

log = logging.getLogger(__name__)

SEARCH_EVERY_MS = 60_000
"""The interval at which a group's offsets of all partitions are read; in between, only those of partitions where it had
an offset and of its members' partitions."""
OPEN_GROUPS_MAX = 50
"""Groups whose connections stay open between sweeps; those of further groups are opened in each sweep."""
SETTLED_STATES = ("stable", "empty")
"""States in which the assignment is final: then it is compared with that of the last sweep."""
Key = tuple[TopicPartition, int]
"""A partition and a group's committed offset: groups with the same committed offset share its record."""


# --- the result of a sweep --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSnapshot:
    """One partition of a group in the last sweep."""

    committed: int
    """The committed offset."""
    end: int | None
    """The end offset; None: unknown."""
    age_s: float | None
    """The age of the next record; None: unknown."""

    @property
    def lag(self) -> int | None:
        """Offsets between ``committed`` and ``end``; None: unknown."""
        return None if self.end is None else max(0, self.end - self.committed)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """One group in the last sweep. If it did not answer, only ``unreachable_since_ms`` and the counters are set."""

    group: str
    unreachable_since_ms: int | None = None
    """Since when it has not answered, on the exporter's clock; None: it answered."""
    state: str = ""
    """Kafka's name of the state in lower case."""
    members: tuple[GroupMember, ...] = ()
    partitions: Mapping[TopicPartition, PartitionSnapshot] = field(default_factory=dict)
    """The partitions with a committed offset."""
    rebalances: int = 0
    """Sweeps with another assignment than the sweep before, since the start of the exporter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """The ledger of a group in a table."""

    group: str
    table: str
    offsets: Mapping[TopicPartition, int]
    """The next offset of each partition."""
    expires_ms: int
    """When Delta may delete the group's last commit from the table's log, in ms since 1970."""
    retention_ms: int
    """How long the table keeps its log."""
    is_unsettled: bool
    """Whether rows that it counts were removed by a ``RESTORE``, so that the next batch is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The result of a sweep."""

    groups: tuple[GroupSnapshot, ...]
    """By name, those that did not answer included."""
    unreachable_since_ms: int | None
    """Since when no request has been answered, on the exporter's clock; None: requests are answered."""
    took_s: float
    """How long the sweep took."""
    ended_s: float
    """When it ended, since the epoch."""
    records_read: int
    """Next records that were looked for, since the start of the exporter."""
    ledgers: tuple[LedgerSnapshot, ...] = ()
    """The ledgers of the tables that the exporter reads."""


# --- sweeps -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _GroupState:
    """What is kept of a group between sweeps, and its answers in the current sweep."""

    is_asked: bool = False
    """Whether this sweep has asked for it."""
    described: GroupDescription | None = None
    """Its description in this sweep; None: unanswered."""
    committed: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Its committed offsets in this sweep."""
    asked_ms: int = -1
    """When it was last asked; -1: never."""
    silent_since_ms: int | None = None
    """Since when it has not answered; None: it answered in the last sweep."""
    tps: Collection[TopicPartition] = ()
    """The partitions where it had an offset in the last search of all partitions."""
    searched_ms: int | None = None
    """The listing of topics that the last search used; None: there was none."""
    owned: Mapping[str, frozenset[TopicPartition]] | None = None
    """The last settled assignment, by instance id or member id; None: unknown."""
    rebalances: int = 0
    """As in :class:`GroupSnapshot`."""
    offsets: GroupOffsets | None = None
    """Its open connection; None: closed."""


class GroupSweeper:
    """Sweeps over groups. One thread uses it.

    Args:
        settings: librdkafka settings of an admin client.
        groups: the groups; None: all that the user may describe.
        isolation_level: that of their consumers; decides end offsets and which records they read.
        bound_s: a sweep in which a request failed asks for no further group after this. One without a failure asks for
            all groups, however long that takes. Then the ages of records are read for at most this time.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        groups: Collection[str] | None,
        *,
        isolation_level: str,
        bound_s: float,
        environment: Environment | None = None,
    ) -> None:
        self._settings, self._groups, self._bound_ms = settings, groups, round(bound_s * 1000)
        self._environment = environment or Environment()
        self._admin = GroupAdmin(settings, environment=self._environment, retries=0)
        self._times = RecordTimes(settings, isolation_level=isolation_level, environment=self._environment)
        self._committed_only = isolation_level == "read_committed"
        self._ages = RecordAges()
        self._watched: dict[str, _GroupState] = {name: _GroupState() for name in groups or ()}
        self._all: tuple[TopicPartition, ...] = ()
        self._listed_ms: int | None = None
        self._silent_since_ms: int | None = None
        self._records_read = 0
        self._failures: dict[str, str] = {}

    def sweep(self) -> SweepResult:
        """Sweep once. Failed and unanswered requests are logged, never raised."""
        started_ms = self._environment.now_ms()
        until_ms = started_ms + self._bound_ms
        self._failures = {}
        for watched in self._watched.values():
            watched.is_asked, watched.described, watched.committed = False, None, {}
        if reached := self._attempt("the cluster", self._list):
            for name in sorted(self._watched, key=lambda name: (self._watched[name].asked_ms, name)):
                if self._failures and self._environment.now_ms() >= until_ms:
                    break
                self._attempt(f"group {name}", partial(self._read_group, name))
        else:  # clients that nobody uses in an outage would take more and more memory for what they report
            self._close_readers()
        wall_ms = self._environment.wall_ms()
        tps = {tp for watched in self._watched.values() for tp in watched.committed}
        ends: dict[TopicPartition, int] = {}
        if tps:
            self._attempt(
                "end offsets",
                lambda: ends.update(self._admin.latest(tps, committed=self._committed_only, require_all=False)),
            )
        self._read_ages(ends, self._environment.now_ms() + self._bound_ms)
        self._update_silence(reached, started_ms)
        return SweepResult(
            groups=tuple(self._snapshot(name, ends, wall_ms) for name in sorted(self._watched) if self._is_known(name)),
            unreachable_since_ms=self._silent_since_ms,
            took_s=(self._environment.now_ms() - started_ms) / 1000,
            ended_s=self._environment.wall_ms() / 1000,
            records_read=self._records_read,
        )

    def close(self) -> None:
        """Close every connection."""
        self._close_readers()
        self._admin.close()

    def _close_readers(self) -> None:
        """Close the connections of clients that open new ones when they are used."""
        for watched in self._watched.values():
            if watched.offsets is not None:
                watched.offsets.close()
        self._times.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    def _attempt(self, what: str, request: Callable[[], object]) -> bool:
        """Run a request; return whether it succeeded. A failure is kept for the log."""
        try:
            request()
        except GroupError as exc:
            self._failures[what] = str(exc)
            return False
        return True

    def _list(self) -> None:
        """List the groups and partitions of the cluster."""
        if self._groups is None:
            names = {listed.group for listed in self._admin.groups()}
            for name in self._watched.keys() - names:
                self._forget(name)
            self._watched |= {name: _GroupState() for name in names - self._watched.keys()}
        now_ms = self._environment.now_ms()
        if self._listed_ms is None or now_ms >= self._listed_ms + SEARCH_EVERY_MS:
            listed = self._admin.list_topics()
            self._all = tuple(TopicPartition(name, p) for name, topic in listed.items() for p in topic.partitions)
            self._listed_ms = now_ms

    def _forget(self, name: str) -> None:
        if (offsets := self._watched.pop(name).offsets) is not None:
            offsets.close()

    def _read_group(self, name: str) -> None:
        """Read the description and the committed offsets of a group."""
        watched = self._watched[name]
        watched.is_asked, watched.asked_ms = True, self._environment.now_ms()
        described = self._admin.describe_group(name)
        owned = {tp for member in described.members for tp in member.partitions}
        searching = watched.searched_ms is None or watched.searched_ms != self._listed_ms
        tps = owned.union(self._all if searching else watched.tps)
        offsets = watched.offsets or GroupOffsets(self._settings, group=name, environment=self._environment)
        try:
            # Members may own partitions of topics that this user may not describe: no values of these.
            read = offsets.read(tps, stable=False, optional=tps) if tps else {}
        finally:
            open_now = sum(other.offsets is not None for other in self._watched.values())
            if watched.offsets is None and open_now >= OPEN_GROUPS_MAX:
                offsets.close()
            else:
                watched.offsets = offsets
        committed = {tp: at.offset for tp, at in read.items() if at is not None}
        if tps <= read.keys():
            watched.searched_ms, watched.tps = self._listed_ms, committed.keys()
        watched.described, watched.committed = described, committed

    def _read_ages(self, ends: Mapping[TopicPartition, int], until_ms: int) -> None:
        """Read the next records of partitions with lag, except those still known."""
        behind: dict[Key, int] = {
            (tp, at): ends[tp]
            for watched in self._watched.values()
            for tp, at in watched.committed.items()
            if at < ends.get(tp, at)
        }
        now_ms = self._environment.now_ms()
        firsts: dict[TopicPartition, int] = {}
        if known := self._ages.known(behind, now_ms=now_ms):
            self._attempt("log start offsets", lambda: firsts.update(self._admin.earliest(known, require_all=False)))
        missing = self._ages.missing(behind, firsts, now_ms=now_ms)
        read: dict[Key, RecordTime | None] = {}

        def read_all() -> None:
            for offsets in _rounds(missing):
                found = self._times.read(offsets, until_ms=until_ms)
                read.update({(tp, offsets[tp]): record for tp, record in found.items()})

        self._attempt("timestamps of records", read_all)
        self._records_read += len(read)
        self._ages.update(read, behind, missing, now_ms=now_ms)

    # --- results ----------------------------------------------------------------------------------------------------

    def _update_silence(self, reached: bool, started_ms: int) -> None:
        """Update since when the cluster and each group have not answered; log when that starts and when it ends."""
        all_ = self._watched.values()
        silent = not reached or (bool(all_) and all(one.is_asked and one.described is None for one in all_))
        if silent and self._silent_since_ms is None:
            self._silent_since_ms = started_ms
            log.warning("no request was answered; no lag is exported until one is: %s", self._failed())
        elif not silent and self._silent_since_ms is not None:
            log.warning(
                "requests are answered again after %d s", (self._environment.now_ms() - self._silent_since_ms) // 1000
            )
            self._silent_since_ms = None
        for name, watched in self._watched.items():
            if watched.described is not None:
                watched.silent_since_ms = None
                self._count_rebalance(watched, watched.described)
            elif watched.silent_since_ms is None and (watched.is_asked or not reached):
                watched.silent_since_ms = started_ms
                if not silent:
                    log.warning(
                        "group %s: not answered; it has no values in this sweep: %s",
                        name,
                        self._failed(f"group {name}"),
                    )

    def _failed(self, what: str = "") -> str:
        """Return the failure of a request, or of any."""
        return self._failures.get(what) or next(iter(self._failures.values()), "the sweep ran out of time")

    def _count_rebalance(self, watched: _GroupState, described: GroupDescription) -> None:
        if described.state not in SETTLED_STATES:
            return
        # A static member that rejoins has another member id, and the same partitions.
        owned = {m.name: frozenset(m.partitions) for m in described.members}
        watched.rebalances += watched.owned is not None and owned != watched.owned
        watched.owned = owned

    def _is_known(self, name: str) -> bool:
        """Whether the group answered in this sweep, or has been silent since it was last asked. Others have no values:
        nothing is known of them."""
        watched = self._watched[name]
        return watched.described is not None or watched.silent_since_ms is not None

    def _snapshot(self, name: str, ends: Mapping[TopicPartition, int], wall_ms: int) -> GroupSnapshot:
        watched = self._watched[name]
        if watched.described is None:
            since_ms = watched.silent_since_ms
            return GroupSnapshot(group=name, unreachable_since_ms=since_ms, rebalances=watched.rebalances)
        return GroupSnapshot(
            group=name,
            state=watched.described.state,
            members=watched.described.members,
            rebalances=watched.rebalances,
            partitions={
                tp: PartitionSnapshot(committed=at, end=ends.get(tp), age_s=self._age_s(tp, at, ends.get(tp), wall_ms))
                for tp, at in watched.committed.items()
            },
        )

    def _age_s(self, tp: TopicPartition, committed: int, end: int | None, wall_ms: int) -> float | None:
        if end is None:
            return None
        return 0.0 if committed >= end else self._ages.age_s(tp, committed, wall_ms=wall_ms)


def _rounds(keys: Iterable[Key]) -> list[dict[TopicPartition, int]]:
    """Split the keys into rounds with each partition once: a consumer has one position per partition."""
    rounds: list[dict[TopicPartition, int]] = []
    for tp, at in keys:
        free = next((one for one in rounds if tp not in one), None)
        if free is None:
            rounds.append(free := {})
        free[tp] = at
    return rounds


# --- the ages of records ---------------------------------------------------------------------------------------------


READ_AGAIN_MS = 300_000
"""A known timestamp is read again after this: compaction may have removed the record, without a sign."""


@dataclass(frozen=True, slots=True)
class _Known:
    record: RecordTime | None
    """None: there was no record before ``end``."""
    end: int
    """The partition's end offset when it was read."""
    read_ms: int
    """When it was read."""


class RecordAges:
    """The next records that were read, by partition and committed offset."""

    def __init__(self) -> None:
        self._known: dict[Key, _Known] = {}

    def known(self, behind: Iterable[Key], *, now_ms: int) -> set[TopicPartition]:
        """Return the partitions with a known record, whose log start offsets show whether the record still exists."""
        return {key[0] for key in behind if (known := self._fresh(key, now_ms)) is not None and known.record}

    def missing(self, behind: Mapping[Key, int], firsts: Mapping[TopicPartition, int], *, now_ms: int) -> list[Key]:
        """Return the keys whose record must be read, those never read before first.

        Args:
            behind: the end offset of the partition, by key.
            firsts: the log start offsets of the partitions from :meth:`known`; an unanswered one is read again.
        """
        missing = []
        for key, end in behind.items():
            known = self._fresh(key, now_ms)
            if known is None or not _is_valid(known, end, firsts.get(key[0])):
                missing.append(key)
        return sorted(missing, key=lambda key: key in self._known)

    def update(
        self, read: Mapping[Key, RecordTime | None], behind: Mapping[Key, int], missing: Iterable[Key], *, now_ms: int
    ) -> None:
        """Add the records that were read. Forget missing ones that were not read, and keys without lag."""
        unanswered = set(missing) - read.keys()
        self._known = {key: k for key, k in self._known.items() if key in behind and key not in unanswered}
        self._known |= {key: _Known(record, behind[key], now_ms) for key, record in read.items()}

    def age_s(self, tp: TopicPartition, committed: int, *, wall_ms: int) -> float | None:
        """Return the age of the next record in seconds; 0: there is none; None: unknown."""
        known = self._known.get((tp, committed))
        if known is None or (known.record is not None and known.record.timestamp_ms == NO_TIME):
            return None
        return 0.0 if known.record is None else max(0, wall_ms - known.record.timestamp_ms) / 1000

    def _fresh(self, key: Key, now_ms: int) -> _Known | None:
        known = self._known.get(key)
        return known if known is not None and now_ms < known.read_ms + READ_AGAIN_MS else None


def _is_valid(known: _Known, end: int, first: int | None) -> bool:
    """Whether a known result still holds: the record is still in the log, or nothing was appended since there was
    none."""
    if known.record is None:
        return end <= known.end
    return first is not None and first <= known.record.offset


# --- the exporter -----------------------------------------------------------------------------------------------------


class Exporter:
    """Sweeps at an interval, until it is stopped, and serves the last result.

    Args:
        interval_s: between the starts of two sweeps; a sweep that takes longer is followed at once.
        host, port: as of :class:`Endpoint`.

    Raises:
        OptionError: it cannot listen on this address.
    """

    def __init__(
        self,
        sweeps: GroupSweeper,
        *,
        interval_s: float,
        host: str,
        port: int,
        read_ledgers: Callable[[], tuple[LedgerSnapshot, ...]] = tuple,
        environment: Environment | None = None,
    ) -> None:
        self._sweeps, self._interval_s, self._read_ledgers = sweeps, interval_s, read_ledgers
        self._environment = environment or Environment()
        self.last: SweepResult | None = None
        collector = MetricsCollector(METRICS, lambda: self.last, now_ms=self._environment.now_ms)
        self._endpoint = Endpoint(collector, host=host, port=port, option="--port", environment=self._environment)
        self.port = self._endpoint.port

    def sweep(self) -> SweepResult:
        """Sweep once, and serve the result from now on."""
        ledgers = self._read_ledgers()  # before Kafka's offsets: a batch in between would look as if Kafka were behind
        self.last = seen = replace(self._sweeps.sweep(), ledgers=ledgers)
        return seen

    def run(self, stop: threading.Event) -> None:
        """Sweep every interval until ``stop`` is set."""
        while not stop.is_set():
            started_ms = self._environment.now_ms()
            self.sweep()
            stop.wait(max(0.0, self._interval_s - (self._environment.now_ms() - started_ms) / 1000))

    def close(self) -> None:
        """Free the port, and close every connection."""
        self._endpoint.stop()
        self._sweeps.close()


# --- the table -------------------------------------------------------------------------------------------------------


PREFIX = "kafka_group_"

_Row = Metric[SweepResult]


def _metric(name: str, read: Callable[[SweepResult, int], float], doc: str) -> _Row:
    return Metric(PREFIX + name, (), lambda seen, now_ms: [((), read(seen, now_ms))], doc)


def _by_group(name: str, read: Callable[[GroupSnapshot, int], float], doc: str, *, always: bool = False) -> _Row:
    """``always``: also for groups that did not answer."""
    return Metric(
        PREFIX + name,
        ("group",),
        lambda seen, now_ms: [
            ((one.group,), read(one, now_ms)) for one in seen.groups if always or one.unreachable_since_ms is None
        ],
        doc,
    )


def _by_partition(name: str, read: Callable[[PartitionSnapshot], float | None], doc: str) -> _Row:
    def samples(seen: SweepResult, _now_ms: int) -> Iterator[Sample]:
        for group in seen.groups:
            for tp, at in group.partitions.items():
                if (value := read(at)) is not None:
                    yield (group.group, tp.topic, str(tp.partition)), value

    return Metric(PREFIX + name, ("group", "topic", "partition"), samples, doc)


def _states(seen: SweepResult, _now_ms: int) -> Iterator[Sample]:
    for group in seen.groups:
        if group.unreachable_since_ms is None:
            for state in dict.fromkeys((*GROUP_STATES, group.state)):
                yield (group.group, state), float(state == group.state)


def _members(seen: SweepResult, _now_ms: int) -> Iterator[Sample]:
    for group in seen.groups:
        for m in group.members:
            yield (group.group, m.name, m.client_id, m.host), len(m.partitions)


def _by_ledger(name: str, read: Callable[[LedgerSnapshot, SweepResult], float | None], doc: str) -> _Row:
    def samples(seen: SweepResult, _now_ms: int) -> Iterator[Sample]:
        for ledger in seen.ledgers:
            if (value := read(ledger, seen)) is not None:
                yield (ledger.group, ledger.table), value

    return Metric(PREFIX + name, ("group", "table"), samples, doc)


def _ahead(ledger: LedgerSnapshot, seen: SweepResult) -> int | None:
    """Offsets by which a ledger is ahead of Kafka; None if the group did not answer."""
    of = next((group for group in seen.groups if group.group == ledger.group), None)
    if of is None or of.unreachable_since_ms is not None:
        return None
    return sum(max(0, n - of.partitions[tp].committed) for tp, n in ledger.offsets.items() if tp in of.partitions)


METRICS: tuple[_Row, ...] = (
    _by_group("up", lambda group, _: float(group.unreachable_since_ms is None),
              "1 if the group answered in the last sweep, else 0: then only the next two have values.",
              always=True),
    _by_group("unreachable_seconds", lambda group, now_ms: since_s(group.unreachable_since_ms, now_ms),
              "How long the group has not answered; 0 if it answers.", always=True),
    _by_group("rebalances_seen_total", lambda group, _: group.rebalances,
              "Sweeps in which the settled group had another assignment than in the sweep before. A partition "
              "that moved and returned between two sweeps is not counted.", always=True),
    Metric(PREFIX + "state", ("group", "state"), _states,
           "1 for the group's state in Kafka, 0 for every other state."),
    _by_group("members", lambda group, _: len(group.members), "Members of the group."),
    Metric(PREFIX + "member_partitions", ("group", "member", "client", "host"), _members,
           "Partitions assigned to a member. `member`: its instance id, or else its member id."),
    _by_partition("committed_offset", lambda p: p.committed,
                  "The committed offset: the next one that the group reads."),
    _by_partition("end_offset", lambda p: p.end,
                  "The end offset for the group's consumers; with `read_committed` the last stable offset: where "
                  "the first open transaction starts."),
    _by_partition("lag_records", lambda p: p.lag,
                  "`end_offset` - `committed_offset`. Includes control records and records removed by compaction."),
    _by_partition("lag_seconds", lambda p: p.age_s,
                  "Age of the next record of the group, by its timestamp; 0 if there is none. No value if the record "
                  "was not read in time or has no timestamp."),
    _by_group("lag_unknown_partitions", lambda group, _: sum(p.age_s is None for p in group.partitions.values()),
              "Partitions without `lag_seconds` in the last sweep."),
    _by_ledger("ledger_ahead_offsets", _ahead,
               "With `--table`: offsets by which the table's ledger is ahead of the group's committed offsets."),
    _by_ledger("ledger_expires_seconds", lambda ledger, _: ledger.expires_ms / 1000 - time.time(),
               "With `--table`: time until Delta may delete the group's last commit, and its ledger, from the table's "
               "log (`delta.logRetentionDuration`)."),
    _by_ledger("ledger_retention_seconds", lambda ledger, _: ledger.retention_ms / 1000,
               "With `--table`: how long the table keeps its log."),
    _by_ledger("ledger_unsettled", lambda ledger, _: float(ledger.is_unsettled),
               "With `--table`: 1 if a `RESTORE`, `REPLACE` or overwrite replaced rows of the group and no reset has "
               "settled it: the next batch is refused."),
    _metric("exporter_unreachable_seconds", lambda seen, now_ms: since_s(seen.unreachable_since_ms, now_ms),
            "How long no broker has answered the exporter; 0 if brokers answer."),
    _metric("exporter_sweep_seconds", lambda seen, _: seen.took_s, "Duration of the last sweep."),
    _metric("exporter_sweep_timestamp_seconds", lambda seen, _: seen.ended_s,
            "When the last sweep ended, since the epoch."),
    _metric("exporter_records_read_total", lambda seen, _: seen.records_read,
            "Reads of a next record. A record that is still known is not read again."),
)  # fmt: skip
"""All metrics of the exporter, in the order of ``docs/metrics.md``."""
