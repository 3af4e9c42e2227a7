"""What takes time: lookups and the echo, done one after the other on a thread of their own.

Runs in: the stream reader. Deliberately absent: deciding; orders are the machine's commands, and every answer goes back
as an event.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from spark_group_source.driver.member import Member, Share
from spark_group_source.driver.planning import Planner
from spark_group_source.errors import AccessDenied, CommitFailed, Fenced, GroupError, InvariantBroken, SourceError
from spark_group_source.group import events as ev
from spark_group_source.kafka import Admin, GroupOffsets, MemberStale, OffsetCommitter
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options

log = logging.getLogger(__name__)

WAKE_S = 0.5
"""The longest the worker sleeps: publishes statistics and looks for changed topics at least this often."""
TOPICS_EVERY_S = 30.0
"""How often a pattern is matched against the cluster's topics; ``kafka.topic.metadata.refresh.interval.ms`` sets it."""
WORK_MAX = 10_000
"""Orders waiting: at most a lookup for each slot and one echo, far below this."""
MEMBER_COMMIT_S_MAX = 10.0
"""How long a member may take to commit where transactions are not allowed."""
PROBE_S_MAX = 10.0
"""How long a member that lost its partitions waits for the word that this run was not replaced; then it rejoins."""
METADATA_PREFIX = "spark-group"


@dataclass(frozen=True, slots=True)
class _Probe:
    partition: TopicPartition
    done: "Future[bool]"


@dataclass(frozen=True, slots=True)
class Commit:
    """An echo, and in whose name."""

    echo: ev.Echo
    shares: tuple[Share, ...]


Order = ev.FetchCommitted | ev.ResolveStarts | Commit


class Worker:
    """Carries out what the machine ordered.

    Args:
        options, admin, planner: the run's.
        handle: takes each event; never raises.
        fail: ends the run with this error.
        thrown_out: told of a member that the broker does not know, and the broker's answer.
        until_deadline_s: seconds to the machine's next deadline, or None.
        published: called after each piece of work.
    """

    def __init__(
        self,
        options: Options,
        admin: Admin,
        planner: Planner,
        *,
        handle: Callable[[ev.Event], None],
        fail: Callable[[SourceError], None],
        thrown_out: Callable[[Member, str], None],
        until_deadline_s: Callable[[], float | None],
        published: Callable[[], None],
    ) -> None:
        self._options, self._admin, self._planner = options, admin, planner
        self._handle, self._fail, self._thrown_out = handle, fail, thrown_out
        self._until_deadline_s, self._published = until_deadline_s, published
        self._offsets = GroupOffsets(options.admin_settings(), group=options.group_id)
        self._committer: OffsetCommitter | None = None
        self._prepared = False
        self._orders: queue.Queue[Order | _Probe | None] = queue.Queue(WORK_MAX)
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._topics_every_s = topics_every_s(options)
        self._topics_at_s = 0.0

    def start(self, stream: str) -> None:
        """Begin, with commits fenced by the stream's id."""
        self._committer = OffsetCommitter(
            self._options.producer_settings(),
            group=self._options.group_id,
            transactional_id=f"{self._options.group_id}.{stream}",
        )
        self._topics_at_s = time.monotonic() + self._topics_every_s
        self._thread.start()

    def order(self, order: Order) -> None:
        """Put an order in the queue; never waits."""
        self._orders.put_nowait(order)

    def replaced(self, partition: TopicPartition) -> bool:
        """Whether a newer driver of this stream has taken over, as far as Kafka says within :data:`PROBE_S_MAX`.

        Args:
            partition: any of the group; nothing is committed for it.
        """
        done: Future[bool] = Future()
        self._orders.put_nowait(_Probe(partition, done))
        try:
            return done.result(timeout=PROBE_S_MAX)
        except TimeoutError:
            return False

    def stop(self) -> None:
        """End after the order in hand; what is still waiting is dropped."""
        self._orders.put_nowait(None)

    def _run(self) -> None:
        while True:
            due_s = self._until_deadline_s()
            try:
                order = self._orders.get(timeout=WAKE_S if due_s is None else min(WAKE_S, max(due_s, 0.001)))
            except queue.Empty:
                self._on_time(due_s)
                continue
            if order is None:
                self._offsets.close()
                return
            if isinstance(order, _Probe):
                order.done.set_result(self._fenced(order.partition))
                continue
            try:
                self._do(order)
            except SourceError as exc:
                self._on_failure(order, exc)
            except Exception as exc:  # noqa: BLE001 - whatever it is, the run must end with it and not hang
                self._fail(InvariantBroken(f"{exc!r} while doing {type(order).__name__}"))
            self._published()

    def _on_time(self, due_s: float | None) -> None:
        if due_s is not None and due_s <= WAKE_S:
            self._handle(ev.Tick())
        if not self._prepared:
            self._prepare()
        if self._options.topic_pattern is not None and time.monotonic() >= self._topics_at_s:
            self._topics_at_s = time.monotonic() + self._topics_every_s
            try:
                self._handle(ev.TopicsSeen(topics=tuple(self._planner.topics())))
            except GroupError as exc:
                log.warning("the topics could not be listed: %s", exc)
        self._published()

    def _prepare(self) -> None:
        """Shut out an older driver of this stream that may still be there, frozen: before the first echo, which may be
        long in coming, and after the first lookups, which a batch waits for."""
        self._prepared = True
        try:
            if self._committer is not None:
                self._committer.prepare()
        except SourceError as exc:
            log.info("the commits' transactions are not ready: %s", exc)  # the first commit says what that means

    def _fenced(self, partition: TopicPartition) -> bool:
        try:
            if self._committer is not None:
                self._committer.probe(partition)
        except Fenced:
            return True
        except SourceError as exc:
            log.info("whether this run was replaced is not known: %s", exc)
        return False

    def _do(self, order: Order) -> None:
        match order:
            case ev.FetchCommitted():
                found = self._offsets.read(order.partitions)
                self._handle(
                    ev.CommittedRead(
                        offsets={
                            tp: ev.Committed(offset=found[tp].offset, stream=stream_of(found[tp].metadata))
                            if tp in found
                            else None
                            for tp in order.partitions
                        }
                    )
                )
            case ev.ResolveStarts():
                self._handle(ev.StartsResolved(offsets=self._planner.starts(order.initial, order.new)))
            case Commit():
                self._echo(order)
                self._handle(ev.EchoDone(offsets=order.echo.offsets))

    def _echo(self, order: Commit) -> None:
        offsets = order.echo.offsets
        note = f"{METADATA_PREFIX}:{order.echo.stream}:{order.echo.seq}"
        try:
            self._commit(order.shares, note)
        except MemberStale:
            raise
        except CommitFailed:
            left = self._still_there(offsets)
            if len(left) == len(offsets):
                raise
            log.warning("%d partitions are gone, and their offsets with them", len(offsets) - len(left))
            shares = (replace(s, offsets={tp: at for tp, at in s.offsets.items() if tp in left}) for s in order.shares)
            self._commit([share for share in shares if share.offsets], note)

    def _still_there(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Without what was deleted: Kafka takes no offsets for it, and all of a commit or nothing."""
        topics = self._admin.describe(tp.topic for tp in offsets)
        return {
            tp: offset
            for tp, offset in offsets.items()
            if tp.topic in topics and tp.partition < topics[tp.topic].partitions
        }

    def _commit(self, shares: Sequence[Share], note: str) -> None:
        known = [(share.identity, share.offsets) for share in shares if share.identity is not None]
        if len(known) < len(shares):
            raise MemberStale("a member with partitions is not in the group at the moment")
        try:
            if self._committer is not None:
                self._committer.commit(known, note)
        except AccessDenied as exc:
            log.warning("transactions are not allowed here (%s): the members commit their offsets instead", exc)
            self._committer = None
        except MemberStale as exc:
            if exc.thrown_out:
                self._thrown_out(shares[exc.share].member, str(exc))
            raise
        if self._committer is None:
            for share in shares:
                self._commit_by_member(share, note)
        self._offsets.wait_shown({tp: offset for share in shares for tp, offset in share.offsets.items()})

    def _commit_by_member(self, share: Share, note: str) -> None:
        try:
            share.member.commit(share, note).result(timeout=MEMBER_COMMIT_S_MAX)
        except TimeoutError:
            raise CommitFailed(f"the member did not commit within {MEMBER_COMMIT_S_MAX:.0f} s") from None

    def _on_failure(self, order: Order, exc: SourceError) -> None:
        if isinstance(exc, Fenced):
            self._fail(
                Fenced(
                    f"a newer driver commits for this stream of group {self._options.group_id!r} now ({exc}). "
                    "This run stops; nothing of it was committed after that",
                    group=self._options.group_id,
                )
            )
        elif isinstance(order, Commit):
            self._handle(ev.EchoFailed(reason=str(exc), stale=isinstance(exc, MemberStale)))
        elif isinstance(exc, GroupError) and exc.retriable:
            partitions = order.partitions if isinstance(order, ev.FetchCommitted) else order.initial + order.new
            self._handle(ev.LookupFailed(partitions=partitions, reason=str(exc)))
        else:
            self._fail(exc)


def topics_every_s(options: Options) -> float:
    """How often members and worker look for new topics and partitions."""
    own = dict(options.settings).get("topic.metadata.refresh.interval.ms")
    return TOPICS_EVERY_S if own is None else int(own) / 1000


def stream_of(metadata: str) -> str | None:
    """The stream that wrote a committed offset, from the text beside it; None when it was not one of ours."""
    prefix, _, rest = metadata.partition(":")
    stream, _, seq = rest.partition(":")
    return stream if prefix == METADATA_PREFIX and stream and seq else None
