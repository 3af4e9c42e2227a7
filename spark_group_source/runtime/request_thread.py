"""The request thread: executes the run's blocking requests (lookups, offset commits, replacement checks) in order.

Runs in: the stream reader. Deliberately absent: decisions. Requests are the protocol's commands, and every result
returns as an event. No failed request ends the thread before the run is stopped.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, Queue

from spark_group_source.errors import (
    AccessDenied,
    BrokerUnavailable,
    CommitFailed,
    Fenced,
    GroupError,
    InvariantBroken,
    OptionError,
    SourceError,
)
from spark_group_source.kafka.admin import Admin
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.group_offsets import GroupOffsets
from spark_group_source.kafka.translation import CommittedOffset
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.runtime import offset_commits

log = logging.getLogger(__name__)

WAKE_S = 0.5
"""The longest wait for a request: the thread checks at least this often whether topics are due. Also the pause after an
unexpected error, so that one that repeats does not keep a CPU busy."""
PREPARE_EVERY_S = 5.0
"""The interval between attempts to take over the transactional id. The first commit tries as well."""
QUEUE_MAX = 10_000
"""Queued requests: at most one lookup per slot and one offset commit, far fewer than this."""
OWN_MEMBER_IDS_MAX = 2_000
"""The latest member ids of this run that are kept, to distinguish its own members from foreign ones."""
TRANSACTIONAL_ID_S_MAX = 2.0
"""The longest wait of members for the transactional id before they join. Taking it over takes milliseconds; after this
the members join without it, because sessions of the previous run may expire meanwhile."""

QueuedRequest = ev.FetchCommittedOffsets | ev.ResolveStarts | ev.CheckReplaced | offset_commits.CommitOrder


class RequestThread:
    """Executes the protocol's requests, one after the other.

    Args:
        topics: lists the subscribed topics that exist, and their partition counts; may raise GroupError.
        may_find_topics: whether there may be subscribed topics that the run does not know: the topics are listed again.
        handle: receives each event; never raises.
    """

    def __init__(
        self,
        options: Options,
        admin: Admin,
        *,
        environment: Environment,
        topics: Callable[[], Mapping[str, int]],
        may_find_topics: Callable[[], bool],
        handle: Callable[[ev.Event], None],
    ) -> None:
        self._options, self._admin, self._environment = options, admin, environment
        self._topics, self._may_find_topics, self._handle = topics, may_find_topics, handle
        self._offsets = GroupOffsets(options.admin_settings(), group=options.group_id, environment=environment)
        self._commits: offset_commits.OffsetCommits | None = None
        self.own_member_ids: deque[str] = deque(maxlen=OWN_MEMBER_IDS_MAX)
        """The member ids that the run's members have or had, appended to by the members."""
        self.has_placed_members = False
        """Whether a member of the run was ever placed on an agent."""
        self._is_prepared = self._is_stopped = False
        self._first_attempt: Future[None] = environment.future()  # done after the first try for the transactional id
        self._prepare_at_ms = 0.0  # not before this
        self._topics_every_ms = options.topic_refresh_s * 1000
        self._topics_at_ms = 0.0  # when the topics are listed next
        self._queue: Queue[QueuedRequest | None] = environment.queue(QUEUE_MAX)

    def start(self, stream: str) -> None:
        """Start the thread, with commits fenced by the stream id. A thread that cannot be started is reported before
        this returns."""
        self._commits = offset_commits.OffsetCommits(
            self._options,
            self._admin,
            stream=stream,
            offsets=self._offsets,
            environment=self._environment,
            own_member_ids=self.own_member_ids,
            has_placed_members=lambda: self.has_placed_members,
            handle=self._handle,
        )
        self._topics_at_ms = self._environment.now_ms() + self._topics_every_ms
        self._environment.spawn("requests", self._run, died=self._died)

    def await_transactional_id(self) -> None:
        """Wait until older drivers of this stream are fenced, or it is known that this is not possible now.

        Members join after it. If they joined earlier, they would take over the static memberships of an older driver
        that is not fenced yet: it would find that it is not replaced, and take the memberships back.
        """
        with contextlib.suppress(TimeoutError):
            self._first_attempt.result(timeout=TRANSACTIONAL_ID_S_MAX)

    def submit(self, request: QueuedRequest) -> None:
        """Queue a request; never blocks."""
        self._queue.put_nowait(request)

    def stop(self) -> None:
        """Stop after the current request and drop the queued ones. No request of this run may follow."""
        self._is_stopped = True
        if self._commits is None:
            self._admin.close()
        else:
            self._queue.put_nowait(None)  # wakes the thread

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._safely(self._prepare)
        self._first_attempt.set_result(None)
        while not self._is_stopped:
            self._safely(self._process_next)
        self._safely(self._close)

    def _safely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as exc:
            group = self._options.group_id
            log.warning("group %s: unexpected error in the request thread; the query fails", group, exc_info=exc)
            error = InvariantBroken(f"unexpected error in the request thread: {exc!r}")
            self._handle(ev.InternalFailure(error=error))
            self._environment.pause(WAKE_S)

    def _died(self, exc: BaseException) -> None:
        self._handle(ev.InternalFailure(error=InvariantBroken(f"the request thread died: {exc!r}")))

    def _process_next(self) -> None:
        try:
            request = self._queue.get(timeout=WAKE_S)
        except Empty:
            pass
        else:
            if request is None:
                return
            try:
                self._execute(request)
            except SourceError as exc:
                self._on_failure(request, exc)
        self._run_due_tasks()  # also when the queue is never empty

    def _close(self) -> None:
        self._offsets.close()
        self._admin.close()

    def _run_due_tasks(self) -> None:
        assert self._commits is not None
        for client in (self._offsets, self._admin, self._commits):
            client.serve()
        if not self._is_prepared and self._environment.now_ms() >= self._prepare_at_ms:
            self._prepare()
        if self._environment.now_ms() >= self._topics_at_ms and self._may_find_topics():
            self._topics_at_ms = self._environment.now_ms() + self._topics_every_ms
            try:
                self._handle(ev.TopicsChanged(topics=tuple(self._topics())))
            except GroupError as exc:
                log.warning("group %s: cannot list the topics; retrying: %s", self._options.group_id, exc)

    def _execute(self, request: QueuedRequest) -> None:
        assert self._commits is not None
        match request:
            case ev.FetchCommittedOffsets():
                self._commits.finish_transaction()
                self._handle(self._read_committed(request))
            case ev.ResolveStarts():
                committed = self._options.isolation_level == "read_committed"
                starts, epochs = self._admin.starting_offsets(request.starts, committed=committed)
                self._handle(ev.StartsResolved(offsets=starts, leader_epochs=epochs, requested=tuple(request.starts)))
            case ev.CheckReplaced():
                self._handle(
                    self._commits.check_replaced(request.slot, self._any_partition, confirmed=request.confirmed)
                )
            case offset_commits.CommitOrder():
                self._handle(self._commits.commit(request))

    def _read_committed(self, order: ev.FetchCommittedOffsets) -> ev.CommittedOffsetsRead:
        wall_ms, now_ms = self._environment.wall_ms(), self._environment.now_ms()
        # A topic that is not subscribed any more may be refused: nothing of it is read.
        optional = {tp for tp in order.notes_only if not self._options.is_subscribed(tp.topic)}
        topics = self._admin.describe_topics(order.topics)
        read = self._offsets.read(order.partitions + order.notes_only, optional=optional)
        found = {tp: parse_committed(at, wall_ms=wall_ms, now_ms=now_ms) for tp, at in read.items()}
        reset_number = max((at.reset_number for at in found.values() if at is not None), default=0)
        offsets = {tp: found[tp] for tp in order.partitions if tp in found}
        silent = tuple(tp for tp in order.notes_only if tp not in found)
        return ev.CommittedOffsetsRead(
            offsets=offsets,
            requested=order.partitions,
            reset_number=reset_number if order.notes_only else None,
            unanswered=silent,
            topic_ids={name: topic.id for name, topic in topics.items()},
        )

    def _on_failure(self, request: QueuedRequest, exc: SourceError) -> None:
        if isinstance(exc, Fenced):
            self._handle(ev.Replaced(reason=str(exc)))
        elif isinstance(request, offset_commits.CommitOrder) and not isinstance(exc, AccessDenied | OptionError):
            self._handle(ev.OffsetCommitFailed(reason=str(exc)))
        elif isinstance(request, ev.FetchCommittedOffsets) and isinstance(exc, BrokerUnavailable):
            self._handle(ev.LookupFailed(partitions=request.partitions, error=exc))
        else:
            self._handle(ev.InternalFailure(error=exc))

    def _prepare(self) -> None:
        """Take over the transactional id. Lookups come later, so that an older driver cannot commit after them."""
        assert self._commits is not None
        self._is_prepared = self._commits.prepare()
        # After the attempt, which may take longer than the interval: other requests go on in between.
        self._prepare_at_ms = self._environment.now_ms() + PREPARE_EVERY_S * 1000

    def _any_partition(self) -> TopicPartition:
        """Return a partition of the first subscribed topic that exists, for a request that must name one."""
        topic = next(iter(self._topics()), None)
        if topic is None:
            raise CommitFailed("no subscribed topic exists now, and the check for a newer run must name a partition")
        return TopicPartition(topic, 0)


def parse_committed(at: CommittedOffset | None, *, wall_ms: int, now_ms: int) -> ev.Committed | None:
    """Parse a committed offset's metadata.

    Args:
        wall_ms, now_ms: this moment, by the wall clock and by the run's monotonic clock. The clock of the host that
            committed may have been ahead: a time in the future counts as now.
    """
    if at is None:
        return None
    note = identifiers.parse_note(at.metadata)
    at_ms = None if note.at_ms is None else min(note.at_ms - wall_ms, 0) + now_ms
    return ev.Committed(offset=at.offset, leader_epoch=at.leader_epoch, **note._replace(at_ms=at_ms)._asdict())
