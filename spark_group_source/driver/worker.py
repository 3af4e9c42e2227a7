"""What takes time: lookups, the echo and the question who is in charge, one after the other on a thread of their own.

Runs in: the stream reader. Deliberately absent: deciding; orders are the core's commands, and every answer goes back
as an event. Nothing that fails here ends the thread: while the run lives, it goes on.
"""

import logging
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from spark_group_source.driver.member import Member, Share
from spark_group_source.errors import AccessDenied, CommitFailed, Fenced, GroupError, InvariantBroken, SourceError
from spark_group_source.group import events as ev
from spark_group_source.group import names
from spark_group_source.kafka import Admin, CommittedOffset, GroupOffsets, MemberStale, OffsetCommitter, Runtime
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options

log = logging.getLogger(__name__)

WAKE_S = 0.5
"""The longest the worker sleeps: publishes statistics and looks for changed topics at least this often. Also its pause
after a failure that nothing explains, so that one that comes at once does not keep a processor busy."""
TOPICS_EVERY_S = 30.0
"""How often a pattern is matched against the cluster's topics; ``kafka.topic.metadata.refresh.interval.ms`` sets it."""
PREPARE_EVERY_S = 5.0
"""How often the transactional id is asked for while the brokers do not give it. The first commit asks as well."""
WORK_MAX = 10_000
"""Orders waiting: at most a lookup for each slot and one echo, far below this."""
MEMBER_COMMIT_S_MAX = 10.0
"""How long a member may take to commit where transactions are not allowed."""
PROBE_S_MAX = 10.0
"""How long a member that lost its place waits for the word that this run was not replaced."""

Probed = ev.NotReplaced | ev.Replaced | ev.ReplacedUnknown


@dataclass(frozen=True, slots=True)
class _Probe:
    done: "Future[bool | None]"


@dataclass(frozen=True, slots=True)
class _Commit:
    """An echo, and in whose name. ``left``: slots that had no member when it was ordered, and why."""

    echo: ev.Echo
    shares: tuple[Share, ...]
    left: Mapping[int, str]


Order = ev.FetchCommitted | ev.ResolveStarts | ev.Echo | ev.AskReplaced
_Work = ev.FetchCommitted | ev.ResolveStarts | ev.AskReplaced | _Commit | _Probe


class Worker:
    """Carries out what the core ordered.

    Args:
        options, admin: the run's.
        runtime: threads, clock and clients.
        topics: lists the subscribed topics and their partition counts; may raise GroupError.
        member: the member of a slot now, if it has one. Called inside :meth:`order`: later the slot may have another
            member of the same name.
        handle: takes each event; never raises.
        until_deadline_s: seconds to the core's next deadline, or None.
        published: called after each piece of work.
    """

    def __init__(
        self,
        options: Options,
        admin: Admin,
        *,
        runtime: Runtime,
        topics: Callable[[], Mapping[str, int]],
        member: Callable[[int], Member | None],
        handle: Callable[[ev.Event], None],
        until_deadline_s: Callable[[], float | None],
        published: Callable[[], None],
    ) -> None:
        self._options, self._admin, self._runtime = options, admin, runtime
        self._topics, self._member, self._handle = topics, member, handle
        self._until_deadline_s, self._published = until_deadline_s, published
        self._offsets = GroupOffsets(options.admin_settings(), group=options.group_id, runtime=runtime)
        self._committer: OffsetCommitter | None = None  # also where transactions are not allowed
        self._prepared = self._denied = self._stopped = False
        self._prepare_at_ms = 0
        self._topics_every_ms = topics_every_s(options) * 1000
        self._topics_at_ms = 0.0
        self._work: queue.Queue[_Work | None] = runtime.queue(WORK_MAX)

    def start(self, stream: str) -> None:
        """Begin, with commits fenced by the stream's id. A thread that cannot be started is reported in here."""
        self._committer = OffsetCommitter(
            self._options.producer_settings(),
            group=self._options.group_id,
            transactional_id=names.transactional_id(self._options.group_id, stream),
            runtime=self._runtime,
        )
        self._topics_at_ms = self._runtime.now_ms() + self._topics_every_ms
        self._runtime.spawn("worker", self._run, died=self._died)

    def order(self, order: Order) -> None:
        """Put an order in the queue; never waits."""
        self._work.put_nowait(self._in_whose_name(order) if isinstance(order, ev.Echo) else order)

    def replaced(self) -> bool | None:
        """Whether a newer driver of this stream has taken over; None: not known within :data:`PROBE_S_MAX`.

        Where transactions are not allowed nobody can tell, and nobody is waited for: False.
        """
        if self._committer is None:
            return False
        if self._stopped:
            return None
        done: Future[bool | None] = self._runtime.future()
        self._work.put_nowait(_Probe(done))
        try:
            return done.result(timeout=PROBE_S_MAX)
        except TimeoutError:
            return None

    def stop(self) -> None:
        """End after the order in hand; what is still waiting is dropped."""
        self._stopped = True
        self._work.put_nowait(None)  # wakes the thread

    def _in_whose_name(self, echo: ev.Echo) -> _Commit:
        by_slot: dict[int, dict[TopicPartition, int]] = {}
        for tp, offset in echo.offsets.items():
            by_slot.setdefault(echo.slots[tp], {})[tp] = offset
        members = {slot: self._member(slot) for slot in by_slot}
        return _Commit(
            echo,
            tuple(Share(m, m.identity, by_slot[slot]) for slot, m in members.items() if m is not None),
            {slot: "the slot has no member" for slot, m in members.items() if m is None},
        )

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._safely(self._prepare)
        while not self._stopped:
            self._safely(self._turn)
        self._safely(self._end)

    def _safely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as exc:
            error = exc if isinstance(exc, SourceError) else InvariantBroken(f"{exc!r} in the worker")
            log.warning("the worker met what it did not expect", exc_info=exc)
            self._handle(ev.Broken(error=error))
            self._runtime.pause(WAKE_S)

    def _died(self, exc: BaseException) -> None:
        self._stopped = True
        self._handle(ev.Broken(error=InvariantBroken(f"the worker does not run: {exc!r}")))

    def _turn(self) -> None:
        due_s = self._until_deadline_s()
        try:
            work = self._work.get(timeout=WAKE_S if due_s is None else min(WAKE_S, max(due_s, 0.001)))
        except queue.Empty:
            self._on_time(due_s)
            return
        if work is None:
            return
        try:
            self._do(work)
        except SourceError as exc:
            self._on_failure(work, exc)
        self._published()

    def _end(self) -> None:
        while not self._work.empty():
            work = self._work.get_nowait()
            if isinstance(work, _Probe):
                work.done.set_result(None)
        self._offsets.close()

    def _on_time(self, due_s: float | None) -> None:
        if due_s is not None and due_s <= WAKE_S:
            self._handle(ev.Tick())
        if not self._prepared and self._runtime.now_ms() >= self._prepare_at_ms:
            self._prepare()
        if self._options.topic_pattern is not None and self._runtime.now_ms() >= self._topics_at_ms:
            self._topics_at_ms = self._runtime.now_ms() + self._topics_every_ms
            try:
                self._handle(ev.TopicsSeen(topics=tuple(self._topics())))
            except GroupError as exc:
                log.warning("the topics could not be listed: %s", exc)
        self._published()

    def _do(self, work: _Work) -> None:
        match work:
            case ev.FetchCommitted():
                found = self._offsets.read(work.partitions)
                offsets = {tp: _committed(at) for tp, at in found.items()}
                self._handle(ev.CommittedRead(offsets=offsets, asked=work.partitions))
            case ev.ResolveStarts():
                committed = self._options.isolation_level == "read_committed"
                starts = self._admin.starts(work.starts, committed=committed)
                self._handle(ev.StartsResolved(offsets=starts, asked=tuple(work.starts)))
            case ev.AskReplaced():
                self._handle(self._probe(work.slot))
            case _Probe():
                work.done.set_result(_is_replaced(self._probe(slot=-1)))
            case _Commit():
                self._echo(work)

    def _on_failure(self, work: _Work, exc: SourceError) -> None:
        if isinstance(exc, Fenced):
            self._handle(ev.Replaced(reason=str(exc)))
        elif isinstance(work, _Commit):
            self._handle(ev.EchoFailed(reason=str(exc), stale=isinstance(exc, MemberStale)))
        elif isinstance(work, ev.FetchCommitted | ev.ResolveStarts) and isinstance(exc, GroupError) and exc.retriable:
            asked = work.partitions if isinstance(work, ev.FetchCommitted) else tuple(work.starts)
            self._handle(ev.LookupFailed(partitions=asked, reason=str(exc)))
        else:
            self._handle(ev.Broken(error=exc))

    # --- who is in charge -------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Shut out an older driver of this stream that may still be there, frozen: before anything is looked up, since
        what it committed later would not be seen."""
        self._prepare_at_ms = int(self._runtime.now_ms() + PREPARE_EVERY_S * 1000)
        try:
            if self._committer is not None:
                self._committer.prepare()
            self._prepared = True
        except SourceError as exc:  # the first commit says what that means
            self._prepared = self._denied = isinstance(exc, AccessDenied)
            log.info("the commits' transactions are not ready: %s", exc)

    def _probe(self, slot: int) -> Probed:
        if self._committer is None:
            return ev.ReplacedUnknown(slot=slot, reason="transactions are not allowed here", final=True)
        try:
            if self._committer.probe(self._any_partition()):
                return ev.NotReplaced(slot=slot)
        except Fenced as exc:
            return ev.Replaced(reason=str(exc))
        except SourceError as exc:
            log.info("whether this run was replaced is not known: %s", exc)
            return ev.ReplacedUnknown(slot=slot, reason=str(exc))
        return ev.ReplacedUnknown(slot=slot, reason="this run does not have its transactional id", final=self._denied)

    def _any_partition(self) -> TopicPartition:
        """One of the first subscribed topic; nothing is committed for it."""
        if self._options.topics:
            return TopicPartition(self._options.topics[0], 0)
        topic = next(iter(self._topics()), None)
        if topic is None:
            raise CommitFailed("no topic matches the pattern now, and the question must name one")
        return TopicPartition(topic, 0)

    # --- the echo ---------------------------------------------------------------------------------------------------

    def _echo(self, order: _Commit) -> None:
        echo = order.echo
        notes = {
            tp: names.note_text(echo.stream, echo.seq, echo.epoch, followed=tp in echo.followed) for tp in echo.offsets
        }
        left = dict(order.left)
        try:
            self._commit(order.shares, notes, left)
        except CommitFailed:
            there = self._still_there(tp for tp in echo.offsets if echo.slots[tp] not in left)
            if not (gone := {tp for tp in echo.offsets if echo.slots[tp] not in left and tp not in there}):
                raise
            log.warning("%d partitions are gone, and their offsets with them", len(gone))
            shares = (replace(s, offsets={tp: at for tp, at in s.offsets.items() if tp in there}) for s in order.shares)
            self._commit([share for share in shares if share.offsets], notes, left)
        # What is gone counts as done: Kafka takes no offset for it.
        done = {tp: offset for tp, offset in echo.offsets.items() if echo.slots[tp] not in left}
        if done:
            self._handle(ev.EchoDone(offsets=done, left=left))
        else:
            self._handle(ev.EchoFailed(reason="; ".join(sorted(set(left.values()))), stale=True))

    def _still_there(self, tps: Iterable[TopicPartition]) -> set[TopicPartition]:
        """Without what was deleted: Kafka takes no offsets for it, and all of a commit or nothing."""
        asked = set(tps)
        topics = self._admin.describe(tp.topic for tp in asked)
        return {tp for tp in asked if tp.topic in topics and tp.partition < topics[tp.topic].partitions}

    def _commit(self, shares: Sequence[Share], notes: Mapping[TopicPartition, str], left: dict[int, str]) -> None:
        """Commit and read back the shares of all members that are what they were; ``left`` takes in the others."""
        while shares := self._still_members(shares, left):
            try:
                self._commit_together(shares, notes)
                break
            except MemberStale as exc:
                self._leave_out(shares[exc.share], exc, left)
        self._offsets.wait_shown({tp: offset for share in shares for tp, offset in share.offsets.items()})

    def _still_members(self, shares: Sequence[Share], left: dict[int, str]) -> list[Share]:
        for share in shares:
            if share.identity is None:
                left.setdefault(share.member.slot, "the member is not in the group at the moment")
            elif share.identity != share.member.identity:
                left.setdefault(share.member.slot, "the member has joined again since")
        return [share for share in shares if share.member.slot not in left]

    def _leave_out(self, share: Share, exc: MemberStale, left: dict[int, str]) -> None:
        member, left[share.member.slot] = share.member, str(exc)
        if exc.thrown_out:  # it may not have heard: it starts anew
            member.order(ev.Leave(slot=member.slot, leave=False))
            self._handle(ev.MemberFailed(slot=member.slot, client=member.client, reason=str(exc)))

    def _commit_together(self, shares: Sequence[Share], notes: Mapping[TopicPartition, str]) -> None:
        try:
            if self._committer is not None:
                known = [(share.identity, share.offsets) for share in shares if share.identity is not None]
                self._committer.commit(known, notes)
                self._prepared = True
        except AccessDenied as exc:
            log.warning("transactions are not allowed here (%s): the members commit their offsets instead", exc)
            self._committer = None
        if self._committer is None:
            for at, share in enumerate(shares):
                self._commit_by_member(at, share, notes)

    def _commit_by_member(self, at: int, share: Share, notes: Mapping[TopicPartition, str]) -> None:
        try:
            share.member.commit(share, notes).result(timeout=MEMBER_COMMIT_S_MAX)
        except TimeoutError:
            raise CommitFailed(f"the member did not commit within {MEMBER_COMMIT_S_MAX:.0f} s") from None
        except MemberStale as exc:
            raise MemberStale(str(exc), thrown_out=exc.thrown_out, share=at) from exc


def topics_every_s(options: Options) -> float:
    """How often members and worker look for new topics and partitions."""
    own = dict(options.settings).get("topic.metadata.refresh.interval.ms")
    return TOPICS_EVERY_S if own is None else int(own) / 1000


def _committed(at: CommittedOffset | None) -> ev.Committed | None:
    if at is None:
        return None
    note = names.parse_note(at.metadata)
    return ev.Committed(offset=at.offset, stream=note.stream, seq=note.seq, epoch=note.epoch, followed=note.followed)


def _is_replaced(probed: Probed) -> bool | None:
    if isinstance(probed, ev.ReplacedUnknown) and not probed.final:
        return None
    return isinstance(probed, ev.Replaced)
