"""When a run sends its requests: the pauses after failures, outages of the brokers, and the schedule of offset commits.

Runs in: the stream reader (inside ``run``), tests. Deliberately absent: the requests, the meaning of responses
(``kafka``), which offsets are committed (``run``, ``partitions``) and how (``runtime.offset_commits``).

The run waits for an outage to end (``brokerTimeoutMs``). The outage is logged once when it starts and once when it
ends. In between, requests are retried after growing pauses with jitter, so that the streams of a cluster that recovers
do not all retry at once.

Offsets are committed by one request at a time. After a failed commit the next one waits. The offsets of a slot whose
member is not in the group at the moment are left out for a while.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from zlib import crc32

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.model import TopicPartition

RETRY_PAUSES_MS = (100, 200, 500, 1_000, 2_000, 5_000)
"""Pauses before a failed request is repeated. A broker's fail-over takes seconds, so the last one repeats."""
RETRY_PAUSE_MS_MAX = 2_000
"""The longest pause between two requests of Spark's call: this soon after an outage the query reads again."""
JITTER_SHARE = 0.25
"""The jitter of a pause, as a share of it in both directions."""
ABSENT_WARNING_MS = 5_000
"""How long a slot may be out of the group before a warning: a rebalance takes less."""
ABSENT_PAUSE_MS_MAX = 2_000
"""The longest pause before the offsets of such a slot are tried again."""


def pause_ms(failures: int) -> int:
    """The pause after this many failures in a row."""
    return RETRY_PAUSES_MS[min(failures, len(RETRY_PAUSES_MS) - 1)]


# --- outages ----------------------------------------------------------------------------------------------------------

LATE_MS = 10_000
"""A request that takes so long has met an outage that ended before it failed."""


class Requester(Enum):
    """The sender of requests."""

    CALL = "call"  # a step of Spark's call
    LOOKUP = "lookup"  # the lookup of a position


@dataclass(slots=True)
class _Unanswered:
    """The unanswered requests of one sender."""

    since_ms: int
    """When the first of them was sent."""
    error: BrokerUnavailable
    """How the last of them failed."""
    tries: int = 0
    retry_at_ms: int = 0
    """The earliest time of the next request."""


class Outage:
    """The outages of one run, one at a time."""

    def __init__(self) -> None:
        self._unanswered: dict[Requester, _Unanswered] = {}
        self.ended_ms = 0
        """When the last outage ended, on the run's clock; 0 before the first."""
        self._late_since_ms: int | None = None
        """When the first of the requests was sent whose answers have all been late since."""

    @property
    def since_ms(self) -> int | None:
        """When the oldest unanswered request was sent; None if all were answered."""
        return min((pending.since_ms for pending in self._unanswered.values()), default=None)

    def request_failed(self, requester: Requester, error: BrokerUnavailable, *, name: str, now_ms: int) -> bool:
        """A request timed out.

        Args:
            error: how it failed; its ``waited_ms`` is how long the request took.
            name: the stream or group; it makes the jitter of this run different from that of others.

        Returns:
            Whether an outage starts with it.
        """
        starts = not self._unanswered
        waited_ms = error.fields.get("waited_ms", 0)
        pending = self._unanswered.get(requester)
        if pending is None:
            began_ms = now_ms - (waited_ms if isinstance(waited_ms, int) else 0)
            pending = self._unanswered[requester] = _Unanswered(began_ms, error)
        pause = min(pause_ms(pending.tries), RETRY_PAUSE_MS_MAX)
        draw = crc32(f"{name} {pending.tries}".encode()) / 2**32
        pending.error, pending.retry_at_ms = error, now_ms + int(pause * (1 + JITTER_SHARE * (2 * draw - 1)))
        pending.tries += 1
        return starts

    def end_requests(self, requester: Requester, *, now_ms: int) -> int | None:
        """A request was answered, or the requester sends no further one. Returns the duration of the outage if it ends
        with it, else None."""
        since_ms = self.since_ms
        if self._unanswered.pop(requester, None) is None or self._unanswered or since_ms is None:
            return None
        self.ended_ms = now_ms
        return now_ms - since_ms

    def ends_with_answer(self, took_ms: int, bound_ms: int, *, now_ms: int) -> bool:
        """Whether an answer has met an outage that ended before its request failed: it is late. Brokers that answer so
        late for ``bound_ms`` or longer are only slow."""
        if took_ms < LATE_MS:
            self._late_since_ms = None
            return False
        if self._late_since_ms is None:
            self._late_since_ms = now_ms - took_ms
        if now_ms - self._late_since_ms >= bound_ms:
            return False
        self.ended_ms = now_ms
        return True

    def is_unanswered(self, requester: Requester) -> bool:
        """Whether the requester's last request was not answered."""
        return requester in self._unanswered

    def retry_at_ms(self, requester: Requester) -> int:
        """The earliest time of the next request."""
        pending = self._unanswered.get(requester)
        return 0 if pending is None else pending.retry_at_ms

    def error_after(self, requester: Requester, bound_ms: int, *, now_ms: int) -> BrokerUnavailable | None:
        """The error that ends the run if the outage has lasted for ``bound_ms`` or longer; 0 means no bound."""
        pending = self._unanswered.get(requester)
        if pending is None or not bound_ms or (waited_ms := now_ms - pending.since_ms) < bound_ms:
            return None
        return BrokerUnavailable(
            f"the brokers have not answered for {waited_ms / 1000:.0f} s, in {pending.tries} attempts, so the query "
            f"cannot continue. The last attempt: {pending.error}",
            **{**pending.error.fields, "waited_ms": waited_ms},
        )


# --- offset commits ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Idle:
    """No commit is on its way: the next one may be ordered at any time."""


@dataclass(frozen=True, slots=True)
class Committing:
    """A commit is on its way."""

    offsets: Mapping[TopicPartition, int]
    slots: frozenset[int]
    """The slots whose members hold its partitions."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """A commit failed: the next one may be ordered from ``until_ms`` on."""

    until_ms: int


@dataclass(slots=True)
class _AbsentSlot:
    """A slot whose offsets were left out of a commit, because its member is not in the group at the moment."""

    since_ms: int
    """When its offsets were left out first."""
    retry_at_ms: int | None = None
    """When its offsets are tried again; None: with the next commit."""
    reason: str = ""
    """Kafka's last answer about its member."""
    warned: bool = False


class CommitSchedule:
    """Decides when a commit may be ordered, and for which slots."""

    def __init__(self) -> None:
        self._state: Idle | Committing | Backoff = Idle()
        self._failures = 0
        """Commits that failed in a row."""
        self._durable_at_ms: int | None = None
        """When the last batch became durable; None once all its offsets are committed."""
        self.last_failure = ""
        """Why the last commit failed or left out slots; empty if it included all offsets."""
        self._absent: dict[int, _AbsentSlot] = {}

    @property
    def is_committing(self) -> bool:
        """Whether a commit is on its way."""
        return isinstance(self._state, Committing)

    def includes(self, tp: TopicPartition) -> bool:
        """Whether the commit on its way includes a partition."""
        return isinstance(self._state, Committing) and tp in self._state.offsets

    @property
    def excluded_slots(self) -> set[int]:
        """Slots whose offsets the next commit must leave out."""
        return {slot for slot, absent in self._absent.items() if absent.retry_at_ms is not None}

    @property
    def may_commit(self) -> bool:
        """Whether a commit may be ordered now."""
        return isinstance(self._state, Idle)

    def batch_durable(self, now_ms: int | None) -> None:
        """A batch became durable: the commit latency counts from here. None: it left nothing to commit."""
        self._durable_at_ms = now_ms

    def started(self, offsets: Mapping[TopicPartition, int], slots: Iterable[int]) -> None:
        """A commit of these offsets was ordered, in the names of these slots' members."""
        self._state = Committing(offsets, frozenset(slots))

    def succeeded(self, now_ms: int, *, left_out: Mapping[int, str], all_committed: bool) -> int | None:
        """The commit succeeded, but for the offsets of the slots in ``left_out``, which may be all of its slots: then
        a later failure counts as one more in a row.

        Args:
            left_out: the slots whose offsets were left out, and why.
            all_committed: whether Kafka has all durable offsets now.

        Returns:
            The milliseconds since the last batch became durable, if all its offsets are committed with this commit.
        """
        committed_slots = self._committing_slots() - left_out.keys()
        for slot in committed_slots:
            self.slot_is_back(slot)
        self.last_failure = "; ".join(sorted(set(left_out.values())))
        for slot, reason in left_out.items():
            self._leave_out(slot, reason, now_ms)
        self._state = Idle()
        if committed_slots:
            self._failures = 0
        if not all_committed or self._durable_at_ms is None:
            return None
        took_ms, self._durable_at_ms = now_ms - self._durable_at_ms, None
        return took_ms

    def failed(self, now_ms: int, reason: str) -> None:
        """The commit failed, and the next attempt may succeed."""
        self.last_failure = reason
        self._state = Backoff(until_ms=now_ms + pause_ms(self._failures))
        self._failures += 1

    def slot_is_back(self, slot: int) -> None:
        """The slot has an assignment, or its offsets were committed: its next offsets may be committed at once."""
        self._absent.pop(slot, None)

    def newly_absent(self, now_ms: int) -> list[tuple[int, str]]:
        """Slots that are absent for long, with the reason. Each is returned once."""
        late = [
            (slot, absent)
            for slot, absent in self._absent.items()
            if now_ms - absent.since_ms >= ABSENT_WARNING_MS and not absent.warned
        ]
        for _, absent in late:
            absent.warned = True
        return [(slot, absent.reason) for slot, absent in late]

    def deadlines_ms(self) -> list[int]:
        """When :meth:`tick` is due."""
        due = [absent.retry_at_ms for absent in self._absent.values() if absent.retry_at_ms is not None]
        return due + ([self._state.until_ms] if isinstance(self._state, Backoff) else [])

    def tick(self, now_ms: int) -> None:
        """End the pauses that are over."""
        if isinstance(self._state, Backoff) and now_ms >= self._state.until_ms:
            self._state = Idle()
        for absent in self._absent.values():
            if absent.retry_at_ms is not None and now_ms >= absent.retry_at_ms:
                absent.retry_at_ms = None

    def _committing_slots(self) -> frozenset[int]:
        return self._state.slots if isinstance(self._state, Committing) else frozenset()

    def _leave_out(self, slot: int, reason: str, now_ms: int) -> None:
        absent = self._absent.setdefault(slot, _AbsentSlot(now_ms))
        absent.reason = reason
        absent.retry_at_ms = now_ms + min(ABSENT_PAUSE_MS_MAX, max(pause_ms(0), now_ms - absent.since_ms))
