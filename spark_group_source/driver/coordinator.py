"""The driver's shell around the group machine: threads, Kafka and the clock on one side, Spark's calls on the other.

Runs in: the stream reader, one for each run of a query. Deliberately absent: decisions (``group``), Spark, Delta. Every
thread brings its events through :meth:`Coordinator._handle`, which feeds the machine under one lock and passes its
commands on without waiting; what takes time is done by one worker thread and comes back as another event.

Threads: Spark's (plans batches), one per slot (``member``), the worker (lookups and the echo). The life of a batch::

    latest(start)   start is durable -> echo, held revocations go, new assignments come in -> ranges of the next batch
    ...             Spark writes them down, tasks read them, the sink commits
    latest(end)     the next boundary
"""

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping

from spark_group_source.driver.member import Member, Share
from spark_group_source.driver.planning import Planner
from spark_group_source.driver.worker import Commit, Worker, topics_every_s
from spark_group_source.errors import (
    InvariantBroken,
    RebalanceTimeout,
    SourceError,
)
from spark_group_source.group import events as ev
from spark_group_source.group.machine import GroupMachine
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.group.states import Phase
from spark_group_source.host import runs as progress
from spark_group_source.kafka import Admin
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options

log = logging.getLogger(__name__)

HOLD_SHARE = 0.8
"""Of max.poll.interval.ms, which is the group's rebalance timeout: how long a revocation may be held. The rest is for
the commit, the member's answer and the time that passed at the broker before we heard of it."""
CLOSE_S_MAX = 8.0
"""How long an ending run may take to bring its last offsets to Kafka and to close its members."""
ECHO_S_MAX = 60.0
"""How long a run that ends or drains waits for its offsets to be committed."""
SETTLE_S_MAX = 10.0
"""How long the first batch of a run waits for a rebalance that is going on; then it takes what it has."""
PATIENCE_S = 10.0
"""How long an assignment may take before the log says why that can be."""
WAIT_S = 0.5
"""While waiting for the group: how often to look whether Spark is still there."""
IDLE_LOAD_MAX = 0.04
"""Share of the time that an idle query may spend asking for new records; it sets the pause between two questions."""
IDLE_PAUSES_S = (0.1, 1.0)
"""Shortest and longest of these pauses: the latency of a new record, and the cost of many partitions."""


class Coordinator:
    """One run's members, positions and commits. Methods are called by Spark's thread alone.

    Args:
        options: the query's options.
        clock_ms: for durations; monotonic.
    """

    def __init__(
        self, options: Options, *, clock_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000
    ) -> None:
        self._options = options
        self._clock_ms = clock_ms
        self._admin = Admin(
            options.admin_settings(),
            retries=options.fetch_offset_retries,
            retry_interval_s=options.fetch_offset_retry_interval_ms / 1000,
        )
        self._planner = Planner(options, self._admin)
        self._founding_budget_ms = options.max_poll_interval_ms + options.session_timeout_ms
        self._machine = GroupMachine(
            group=options.group_id,
            slots=options.group_members,
            hold_budget_ms=int(options.max_poll_interval_ms * HOLD_SHARE),
            founding_budget_ms=self._founding_budget_ms,
        )
        self._changed = threading.Condition(threading.RLock())
        self._members: dict[int, Member] = {}
        self._ended: list[Member] = []
        self._worker = Worker(
            options,
            self._admin,
            self._planner,
            handle=self._handle,
            fail=self._stop_with,
            thrown_out=self._thrown_out,
            until_deadline_s=self._until_deadline_s,
            published=self._publish,
        )
        self._failure: SourceError | None = None
        self._plan: StreamOffset | None = None
        self._asked_at_s = 0.0
        self._ask_took_s = 0.0
        self._idle = self._drained = False
        self._once = False
        self._returning = True
        self._closed = False
        self._parent = os.getppid()
        self._progress = progress.Publisher(options.group_id)
        for note in options.notes:
            log.warning("%s", note)

    # --- Spark's calls ----------------------------------------------------------------------------------------------

    def prepare_available_now(self) -> None:
        """Fix the end of an AvailableNow run: records that come later are left for the next one."""
        self._planner.take_target()

    def latest(self, start: StreamOffset, *, unlimited: bool = False) -> StreamOffset:
        """The boundary between two batches: ``start`` is durable; what comes next?

        Args:
            unlimited: Trigger.Once, which takes all there is.

        Returns:
            The offset that ends the next batch, or ``start`` itself when there is nothing to read.

        Raises:
            SourceError: the run cannot go on.
        """
        self._once |= unlimited
        if self._closed:
            return start
        self._boundary(start)
        if self._plan is not None and self._plan.seq == start.seq + 1:
            return self._plan  # asked again for a batch that was planned already
        if self._progress.drain_asked:
            self._drain()
            return start
        founding = start.is_initial or self._ends
        self._wait_until(lambda: self._machine.founded if founding else self._machine.resolved, "an assignment")
        if start.is_initial:
            self._settle()
        elif self._returning:  # "nothing to read" must not mean "nothing assigned yet"; after a while it may
            self._wait(lambda: self._failure is not None or self._machine.founded, SETTLE_S_MAX)
            self._raise_failure()
        self._returning = False
        settled = self._ends and self._settled()
        planned = self._next_batch(start, unlimited)
        while planned is None and self._ends and not settled:
            self._idle, settled = True, self._settled()
            planned = self._next_batch(start, unlimited)
        self._idle = planned is None
        if planned is None and self._planner.at_target:
            self._finish()
        return planned or start

    def replay(self, end: StreamOffset) -> None:
        """A batch that ends at ``end`` is about to be read; join the group if this is the first word of the stream."""
        if self._machine.phase is not Phase.NEW or self._closed:
            return
        self._planner.adopt(end)
        self._start(ev.Replay(offset=end, topics=tuple(self._planner.topics())))

    def commit(self, end: StreamOffset) -> None:
        """Spark's own word that ``end`` is durable. It comes a batch late, so it only repeats what latest() heard."""
        if self._machine.phase is not Phase.NEW and not self._closed:
            self._handle(ev.Durable(offset=end))

    def ends(self) -> Mapping[TopicPartition, int]:
        """The end offsets seen last."""
        return self._planner.ends

    def close(self) -> None:
        """End the run: bring the last offsets to Kafka and close the members, within :data:`CLOSE_S_MAX`."""
        if self._closed:
            return
        deadline_s = time.monotonic() + CLOSE_S_MAX
        if self._machine.phase not in (Phase.NEW, Phase.CLOSED):
            self._wait(lambda: self._machine.echoed or self._failure is not None, CLOSE_S_MAX / 2)
        rule = self._options.leave_on_stop
        leave = rule == "always" or (rule == "auto" and self._ends)
        self._end_members(leave=leave, deadline_s=deadline_s)

    # --- one boundary -----------------------------------------------------------------------------------------------

    def _boundary(self, start: StreamOffset) -> None:
        self._raise_failure()
        if self._machine.phase is not Phase.NEW:
            if not start.is_initial:
                self._handle(ev.Durable(offset=start))
        elif start.is_initial:
            topics = self._planner.found()
            self._start(ev.Born(stream=uuid.uuid4().hex[:12], known=topics, topics=tuple(topics)))
        else:
            self._planner.adopt(start)
            self._start(ev.Durable(offset=start, topics=tuple(self._planner.topics())))

    def _next_batch(self, start: StreamOffset, unlimited: bool) -> StreamOffset | None:
        self._rest()
        self._raise_failure()
        asked_s = time.monotonic()
        look = self._planner.look(self._machine_plannable())
        self._asked_at_s, self._ask_took_s = (time.monotonic(), time.monotonic() - asked_s)
        if look.moved:
            self._handle(ev.Moved(offsets=look.moved, reason=look.reason))
        with self._changed:  # what left or came since the look is not in the plan, or waits for the next
            planned = self._planner.cut(
                look,
                self._machine.plannable(),
                start,
                stream=self._machine.stream,
                foreign=self._machine.foreign(),
                known=self._machine.known(),
                now_ms=self._clock_ms(),
                unlimited=unlimited,
            )
            if planned is not None:
                self._handle(ev.Planned(offset=planned))
                self._raise_failure()
                self._plan = planned
        return planned

    def _machine_plannable(self) -> dict[TopicPartition, int]:
        with self._changed:
            return self._machine.plannable()

    def _rest(self) -> None:
        """An idle query asks no more often than it can afford; new records are always looked for after the call."""
        if not self._idle:
            return
        shortest, longest = IDLE_PAUSES_S
        pause_s = min(max(self._ask_took_s / IDLE_LOAD_MAX, shortest), longest)
        # Not a wait for the clock alone: a failure or an assignment ends it.
        generation = self._machine.statistics().rebalances
        self._wait(
            lambda: self._failure is not None or self._machine.statistics().rebalances != generation,
            self._asked_at_s + pause_s - time.monotonic(),
        )

    def _settle(self) -> None:
        """Give a first assignment a moment to become whole: a stream's first batch then reads all its partitions."""
        deadline_s = time.monotonic() + SETTLE_S_MAX
        while not self._settled() and time.monotonic() < deadline_s:
            self._wait(lambda: self._failure is not None, IDLE_PAUSES_S[0])
            self._raise_failure()

    @property
    def _ends(self) -> bool:
        """Whether this run ends by itself: AvailableNow or Once."""
        return self._once or self._planner.at_target

    def _settled(self) -> bool:
        """Whether we have all that the group means to give us now, so that "nothing to read" can be believed.

        The members alone cannot tell: an assignment may still be on its way (KIP-848 gives partitions one by one), and
        members of a killed run of this stream may still have some, which will be ours when their session ends.
        """
        clients = {self._client_id(slot) for slot in range(self._options.group_members)}
        group = self._admin.group(self._options.group_id)
        ours = [member for member in group.members if member.client_id in clients]
        given = {tp for member in ours for tp in member.partitions}
        with self._changed:
            return (
                self._machine.founded
                and group.state == "stable"
                and len(ours) == self._options.group_members
                and given == self._machine.held()
            )

    @property
    def _static(self) -> bool:
        """Static members survive a restart without a rebalance, but under KIP-848 they cannot leave: there a run that
        ends has dynamic ones."""
        return self._options.group_protocol == "classic" or not self._ends

    def _client_id(self, slot: int) -> str:
        return f"spark-group-{self._machine.stream}-{slot}"

    def _drain(self) -> None:
        """Plan nothing more: whoever asked for it learns when all that is durable is at Kafka."""
        if not self._drained:
            self._drained = self._wait_echoed()  # the worker publishes it
        self._wait(lambda: self._failure is not None, IDLE_PAUSES_S[1])
        self._raise_failure()

    def _wait_echoed(self) -> bool:
        done = self._wait(lambda: self._machine.echoed or self._failure is not None, ECHO_S_MAX)
        self._raise_failure()
        if not done:
            log.warning("the group's offsets were not committed within %.0f s; the next start does it", ECHO_S_MAX)
        return done

    def _finish(self) -> None:
        self._wait_echoed()
        if self._options.leave_on_stop != "never":
            self._end_members(leave=True, deadline_s=time.monotonic() + CLOSE_S_MAX)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _wait_until(self, holds: Callable[[], bool], what: str) -> None:
        budget_s = self._founding_budget_ms / 1000

        def done() -> bool:
            return self._failure is not None or holds()

        patience_s = min(PATIENCE_S, budget_s)
        if not self._wait(done, patience_s):
            log.warning(
                "group %s has not given %s to all %d members after %.0f s; waiting up to %.0f s. Another member may "
                "be in a long batch. A query that uses one load() twice, as a self-join does, is two streams that wait "
                "for each other: give each side a load() with a group of its own",
                *(self._options.group_id, what, self._options.group_members, patience_s, budget_s),
            )
        if not self._wait(done, budget_s - patience_s):
            raise RebalanceTimeout(
                f"group {self._options.group_id!r} gave {what} for none or not all of {self._options.group_members} "
                f"members within {budget_s:.0f} s. `spark-group describe` shows who is in the group. The last events:\n"
                f"{self._machine.story()}",
                group=self._options.group_id,
                waited_ms=self._founding_budget_ms,
            )
        self._raise_failure()

    def _wait(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not holds():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, WAIT_S))
                if os.getppid() != self._parent:
                    raise SystemExit("the driver is gone")
        return True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- events in, commands out ------------------------------------------------------------------------------------

    def _start(self, first: ev.Born | ev.Durable | ev.Replay) -> None:
        self._handle(first)
        self._raise_failure()
        log.info("stream %s of group %s: joining with %d members", *self._name())
        self._worker.start(self._machine.stream)

    def _name(self) -> tuple[str, str, int]:
        return self._machine.stream, self._options.group_id, self._options.group_members

    def _handle(self, event: ev.Event) -> None:
        """Feed the machine and pass its commands on. Any thread; never raises, waits for nothing but the lock."""
        with self._changed:
            try:
                for command in self._machine.handle(event, now_ms=self._clock_ms()):
                    self._carry_out(command)
            except InvariantBroken as exc:
                log.error("%s", exc)
                self._failure = self._failure or exc
            self._changed.notify_all()

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.Join():
                self._retire(command.slot)
                member = Member(
                    command,
                    self._member_settings(command.slot),
                    report=self._handle,
                    fail=self._stop_with,
                    replaced=self._worker.replaced,
                )
                self._members[command.slot] = member
                member.start()
            case ev.Release() | ev.Subscribe():
                if (member_ := self._members.get(command.slot)) is not None:
                    member_.order(command)
            case ev.Leave():
                if (member_ := self._members.get(command.slot)) is not None:
                    member_.order(command)
                    self._retire(command.slot)
            case ev.FetchCommitted() | ev.ResolveStarts():
                self._worker.order(command)
            case ev.Echo():
                self._worker.order(Commit(command, self._shares(command)))
            case ev.Say():
                log.log(
                    logging.WARNING if command.warn else logging.INFO,
                    "group %s: %s",
                    self._options.group_id,
                    command.text,
                )
            case ev.Fail():
                self._failure = self._failure or command.error

    def _shares(self, echo: ev.Echo) -> tuple[Share, ...]:
        """In whose name each offset is committed, as of now: later a slot may have another member of the same name."""
        by_slot: dict[int, dict[TopicPartition, int]] = {}
        for tp, offset in echo.offsets.items():
            by_slot.setdefault(echo.slots[tp], {})[tp] = offset
        members = {slot: self._members[slot] for slot in by_slot}
        return tuple(Share(members[slot], members[slot].identity, offsets) for slot, offsets in by_slot.items())

    def _thrown_out(self, member: Member, reason: str) -> None:
        """The broker does not know it any more, and it may not have heard: it starts anew."""
        member.order(ev.Leave(slot=member.slot, leave=False))
        self._handle(ev.MemberFailed(slot=member.slot, client=member.client, reason=reason))

    def _retire(self, slot: int) -> None:
        self._ended = [member for member in self._ended if not member.wait_ended(0)]
        if (member := self._members.pop(slot, None)) is not None:
            self._ended.append(member)

    def _member_settings(self, slot: int) -> dict[str, str]:
        stream = self._machine.stream
        return {
            "topic.metadata.refresh.interval.ms": str(int(topics_every_s(self._options) * 1000)),
            **self._options.consumer_settings(),
            "client.id": self._client_id(slot),
            **({"group.instance.id": f"{self._options.group_id}.{stream}.{slot}"} if self._static else {}),
        }

    def _end_members(self, *, leave: bool, deadline_s: float) -> None:
        self._closed = True
        self._handle(ev.Closing(leave=leave))
        self._worker.stop()
        for member in [*self._members.values(), *self._ended]:
            member.order(ev.Leave(slot=0, leave=leave))
            if not member.wait_ended(max(0.0, deadline_s - time.monotonic())):
                log.warning("a member did not close in time; its place in the group ends with its session")
        self._publish()
        self._progress.close()

    def _stop_with(self, error: SourceError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _until_deadline_s(self) -> float | None:
        with self._changed:
            due_ms = self._machine.next_deadline_ms()
        return None if due_ms is None else (due_ms - self._clock_ms()) / 1000

    def _publish(self) -> None:
        with self._changed:
            statistics = self._machine.statistics()
        self._progress.publish(statistics, drained=self._drained)
