"""What takes time: lookups, the echo and the question who is in charge, one after the other on a thread of their own.

Runs in: the stream reader. Deliberately absent: deciding; orders are the core's commands, and every answer goes back
as an event. Nothing that fails here ends the thread: while the run lives, it goes on.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from spark_group_source.errors import (
    AccessDenied,
    BrokerUnavailable,
    CommitFailed,
    Fenced,
    GroupError,
    InvariantBroken,
    SourceError,
)
from spark_group_source.kafka import Admin, CommittedOffset, Empty, Environment, GroupOffsets, Queue
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.runtime import offset_commits

log = logging.getLogger(__name__)

WAKE_S = 0.5
"""The longest the worker sleeps: it looks for changed topics at least this often. Also its pause after a failure that
nothing explains, so that one that comes at once does not keep a processor busy."""
PREPARE_EVERY_S = 5.0
"""How often the transactional id is asked for while the brokers do not give it. The first commit asks as well."""
WORK_MAX = 10_000
"""Orders waiting: at most a lookup for each slot and one echo, far below this."""
KNOWN_AS_MAX = 2_000
"""Member ids of this run that are kept, to tell its places in the group from another's."""
SHUT_OUT_S_MAX = 2.0
"""How long members wait for the transactional id before they join; it takes milliseconds. Beyond it their places are
worth more: a session may end meanwhile."""

Order = ev.FetchCommittedOffsets | ev.ResolveStarts | ev.CheckReplaced | offset_commits.Order


class Worker:
    """Carries out what the core ordered.

    Args:
        options, admin: the run's.
        environment: threads, clock and clients.
        topics: lists the subscribed topics and their partition counts; may raise GroupError.
        handle: takes each event; never raises.
    """

    def __init__(
        self,
        options: Options,
        admin: Admin,
        *,
        environment: Environment,
        topics: Callable[[], Mapping[str, int]],
        handle: Callable[[ev.Event], None],
    ) -> None:
        self._options, self._admin, self._environment = options, admin, environment
        self._topics, self._handle = topics, handle
        self._offsets = GroupOffsets(options.admin_settings(), group=options.group_id, environment=environment)
        self._commits: offset_commits.OffsetCommits | None = None
        self.known_as: deque[str] = deque(maxlen=KNOWN_AS_MAX)
        """The member ids that the run's members have and had."""
        self.lent = False
        """Whether a slot of the run was ever lent to an agent."""
        self._prepared = self._stopped = False
        self._shut_out: Future[None] = environment.future()
        self._prepare_at_ms = 0.0
        self._topics_every_ms = options.topic_refresh_s * 1000
        self._topics_at_ms = 0.0
        self._work: Queue[Order | None] = environment.queue(WORK_MAX)

    def start(self, stream: str) -> None:
        """Begin, with commits fenced by the stream's id. A thread that cannot be started is reported in here."""
        self._commits = offset_commits.OffsetCommits(
            self._options,
            self._admin,
            stream=stream,
            offsets=self._offsets,
            environment=self._environment,
            known_as=self.known_as,
            lent=lambda: self.lent,
            handle=self._handle,
        )
        self._topics_at_ms = self._environment.now_ms() + self._topics_every_ms
        self._environment.spawn("worker", self._run, died=self._died)

    def await_shut_out(self) -> None:
        """Wait until an older driver of this stream can commit nothing more, or that is known not to be possible now.

        Members join after it. Before it they would take places whose holder asks at once whether it was replaced, hears
        that it was not, and takes them back.
        """
        with contextlib.suppress(TimeoutError):
            self._shut_out.result(timeout=SHUT_OUT_S_MAX)

    def order(self, order: Order) -> None:
        """Put an order in the queue; never waits."""
        self._work.put_nowait(order)

    def stop(self) -> None:
        """End after the order in hand; what is still waiting is dropped. Nobody asks anything of the run's after it."""
        self._stopped = True
        if self._commits is None:
            self._admin.close()
        else:
            self._work.put_nowait(None)  # wakes the thread

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._safely(self._prepare)
        self._shut_out.set_result(None)
        while not self._stopped:
            self._safely(self._turn)
        self._safely(self._end)

    def _safely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as exc:
            error = exc if isinstance(exc, SourceError) else InvariantBroken(f"{exc!r} in the worker")
            log.warning("the worker met what it did not expect", exc_info=exc)
            self._handle(ev.InternalFailure(error=error))
            self._environment.pause(WAKE_S)

    def _died(self, exc: BaseException) -> None:
        self._stopped = True
        self._handle(ev.InternalFailure(error=InvariantBroken(f"the worker does not run: {exc!r}")))

    def _turn(self) -> None:
        try:
            work = self._work.get(timeout=WAKE_S)
        except Empty:
            pass
        else:
            if work is None:
                return
            try:
                self._do(work)
            except SourceError as exc:
                self._on_failure(work, exc)
        self._on_time()  # also when there is always something to do

    def _end(self) -> None:
        self._offsets.close()
        self._admin.close()

    def _on_time(self) -> None:
        if not self._prepared and self._environment.now_ms() >= self._prepare_at_ms:
            self._prepare()
        if self._options.topic_pattern is not None and self._environment.now_ms() >= self._topics_at_ms:
            self._topics_at_ms = self._environment.now_ms() + self._topics_every_ms
            try:
                self._handle(ev.TopicsChanged(topics=tuple(self._topics())))
            except GroupError as exc:
                log.warning("the topics could not be listed: %s", exc)

    def _do(self, work: Order) -> None:
        assert self._commits is not None
        match work:
            case ev.FetchCommittedOffsets():
                self._commits.settle()
                self._handle(self._committed_read(work))
            case ev.ResolveStarts():
                committed = self._options.isolation_level == "read_committed"
                starts = self._admin.starts(work.starts, committed=committed)
                self._handle(ev.StartsResolved(offsets=starts, asked=tuple(work.starts)))
            case ev.CheckReplaced():
                self._handle(self._commits.probe(work.slot, self._any_partition, seen=work.confirmed))
            case offset_commits.Order():
                self._handle(self._commits.echo(work))

    def _committed_read(self, order: ev.FetchCommittedOffsets) -> ev.CommittedOffsetsRead:
        began_ms = self._environment.wall_ms() - self._environment.now_ms()
        read = self._offsets.read(order.partitions + order.beside)
        found = {tp: _committed(at, began_ms) for tp, at in read.items()}
        reset_number = max((at.reset_number for at in found.values() if at is not None), default=0)
        offsets = {tp: found[tp] for tp in order.partitions if tp in found}
        silent = tuple(tp for tp in order.beside if tp not in found)
        known = reset_number if order.beside else None
        return ev.CommittedOffsetsRead(offsets=offsets, asked=order.partitions, reset_number=known, silent=silent)

    def _on_failure(self, work: Order, exc: SourceError) -> None:
        if isinstance(exc, Fenced):
            self._handle(ev.Replaced(reason=str(exc)))
        elif isinstance(work, offset_commits.Order) and not isinstance(exc, AccessDenied):
            self._handle(ev.OffsetCommitFailed(reason=str(exc)))
        elif isinstance(work, ev.FetchCommittedOffsets | ev.ResolveStarts) and isinstance(exc, BrokerUnavailable):
            asked = work.partitions if isinstance(work, ev.FetchCommittedOffsets) else tuple(work.starts)
            self._handle(ev.LookupFailed(partitions=asked, error=exc))
        else:
            self._handle(ev.InternalFailure(error=exc))

    def _prepare(self) -> None:
        """Before anything is looked up, since what an older driver committed later would not be seen."""
        assert self._commits is not None
        self._prepare_at_ms = self._environment.now_ms() + PREPARE_EVERY_S * 1000
        self._prepared = self._commits.prepare()

    def _any_partition(self) -> TopicPartition:
        """One of the first subscribed topic; nothing is committed for it."""
        if self._options.topics:
            return TopicPartition(self._options.topics[0], 0)
        topic = next(iter(self._topics()), None)
        if topic is None:
            raise CommitFailed("no topic matches the pattern now, and the question must name one")
        return TopicPartition(topic, 0)


def _committed(at: CommittedOffset | None, began_ms: int) -> ev.Committed | None:
    """``began_ms``: where the run's clock began."""
    if at is None:
        return None
    note = identifiers.parse_note(at.metadata)
    at_ms = None if note.at_ms is None else note.at_ms - began_ms
    return ev.Committed(offset=at.offset, **note._replace(at_ms=at_ms)._asdict())
