"""The coordinator of one query run: it connects Spark's calls, Kafka, threads and the clock to the ``Run``.

Runs in: the stream reader, once per query run. Deliberately absent: decisions and their state (``protocol``), Spark,
Delta. Every thread passes its events to :meth:`Coordinator._handle`, which feeds the run under one lock and dispatches
the resulting commands without blocking. Lookups, commits and replacement checks run on the request thread, topic lists,
log ends and group descriptions on Spark's thread; their answers are further events.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import assert_never

from spark_group_source.agents.connected_agents import ConnectedAgents, PlacedMembers
from spark_group_source.errors import BrokerUnavailable, InvariantBroken, SourceError
from spark_group_source.host import run_files
from spark_group_source.kafka.admin import Admin, EpochEnds
from spark_group_source.kafka.environment import Environment
from spark_group_source.members import Member, SlotMember
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.run import LEADER_MS_MAX, Run
from spark_group_source.runtime.offset_commits import commit_order
from spark_group_source.runtime.request_thread import RequestThread

log = logging.getLogger(__name__)

CLOSE_S_MAX = 8.0
"""The longest wait for a run's members to close."""
TICK_S = 0.25
"""The interval at which the clock thread checks the run's deadlines and run files, and publishes statistics. The
request thread and Spark's thread may be blocked on brokers meanwhile."""
WAIT_S = 0.5
"""While a step waits for the group: the interval at which it checks that Spark's JVM is alive."""


class Coordinator:
    """Owns the members, positions and offset commits of one query run. Only Spark's thread calls its methods, except
    where stated.

    Args:
        announces_end: whether Spark calls ``latest()`` once more after the last batch of an AvailableNow run.
    """

    def __init__(
        self,
        options: Options,
        *,
        announces_end: bool = True,
        environment: Environment | None = None,
        publisher: run_files.Publisher | None = None,
    ) -> None:
        self._options = options
        self._environment = environment or Environment()
        self._admin = Admin(
            options.admin_settings(),
            environment=self._environment,
            retries=options.fetch_offset_retries,
            retry_interval_s=options.fetch_offset_retry_interval_ms / 1000,
        )
        epoch_ends = EpochEnds(options.admin_settings(), environment=self._environment)
        self._queries = BrokerQueries(options, self._admin, epoch_ends, self._environment.now_ms)
        self._run = Run(options.rules(announces_end=announces_end))
        self._changed = self._environment.condition()  # guards the run and the members; notified at every event
        self._publishing = self._environment.condition()  # keeps published statistics in order
        self._members: dict[int, SlotMember] = {}  # by slot: the current member
        self._retired: list[SlotMember] = []  # former members whose threads may still run
        self._requests = RequestThread(
            options,
            self._admin,
            environment=self._environment,
            topics=partial(self._queries.topics, retry=False),
            may_find_topics=lambda: options.topic_pattern is not None or bool(self._run.slots.missing_topics),
            handle=self._handle,
        )
        self._clock = self._environment.condition()
        self._is_shut_down = False
        self.agents = ConnectedAgents(
            environment=self._environment,
            lease_ms=self._run.rules.lease_ms,
            incremental=self._run.rules.cooperative,
            own_member_ids=self._requests.own_member_ids,
            handle=self._handle,
        )
        """The agents that are connected to this run, and the members placed on them."""
        self._publisher = publisher or run_files.Publisher(options.group_id, options.connection)

    # --- Spark's calls ----------------------------------------------------------------------------------------------

    def prepare_available_now(self) -> None:
        """Fix the end offsets of an AvailableNow run: records appended later are left to the next run."""
        self._call(ev.TargetRequested())

    def latest(self, start: StreamOffset, *, unlimited: bool = False, after_batch: bool = False) -> StreamOffset:
        """Pass the boundary between two batches and plan the next one.

        Args:
            start: the end offset of the last batch, which is durable.
            unlimited: ignore all limits of a batch (Trigger.Once).
            after_batch: the query has run a batch since the last call.

        Returns:
            The end offset of the next batch, or the object ``start`` itself when there is nothing to read.

        Raises:
            SourceError: the run cannot continue.
        """
        self._read_run_files()
        end = self._call(
            ev.NextBatchRequested(
                start=start,
                unlimited=unlimited,
                new_stream=self._environment.new_id(),
                void_by=self._publisher.void_by(start.stream, start.seq),
                committed=self._publisher.committed_mark(start.stream),
                after_batch=after_batch,
            )
        )
        if end is not start:  # a listener may read the statistics right after the batch, before the next tick
            self._publish()
        return end

    def start_batch(self, end: StreamOffset) -> None:
        """Prepare for reading the batch that ends at ``end``; join the group if this is the run's first call."""
        self._call(ev.BatchStarted(offset=end))
        if self._run.last_batch >= 0:  # the sink must find it
            self._publish()

    def log_ends(self) -> Mapping[TopicPartition, int]:
        """Return the log end offsets that were read last."""
        return self._run.data_loss.ends

    def placed_members(self) -> list[PlacedMembers]:
        """Return the partitions of the members that agents run now."""
        with self._changed:
            agents = self._run.placement.agents.all
            placed = [member for member in self._members.values() if member.agent in agents]
            return [PlacedMembers(member.agent, agents[member.agent].executor, member.partitions) for member in placed]

    def record_task(self, report: ev.TaskReported) -> None:
        """Record what a task read. Any thread."""
        self._handle(report)

    def fail(self, exc: BaseException) -> None:
        """Fail the run because one of its threads died. Any thread."""
        self._handle(ev.InternalFailure(error=InvariantBroken(f"a thread of the stream reader died: {exc!r}")))

    def close(self) -> None:
        """Stop the run: commit the last offsets and close the members, in bounded time."""
        self._read_run_files()
        try:
            self._call(ev.StopRequested())
        finally:
            self._shut_down(leave=False)

    # --- the steps of one call --------------------------------------------------------------------------------------

    def _call(self, event: ev.Event) -> StreamOffset:
        """Feed ``event`` and execute the run's steps until one returns an offset or raises."""
        self._handle(event)
        while True:
            step = self._next_step()
            match step:
                case ev.ReturnOffset():
                    return step.offset
                case ev.RaiseError():
                    raise step.error
                case ev.Wait():
                    if not isinstance(event, ev.StopRequested) and self._environment.is_orphaned():
                        raise SystemExit("the driver JVM exited")
                case ev.CloseMembers():
                    self._handle(ev.MembersClosing(leave=step.leave))
                    self._shut_down(leave=step.leave)
                case _:
                    answer = self._queries.answer(step)
                    self._handle(answer)
                    if isinstance(answer, ev.RequestFailed):  # the clock thread starts with the first join only
                        self._publish()

    def _next_step(self) -> ev.Step:
        """Return the run's next step. A wait happens in here, under the lock, so that no event is missed."""
        with self._changed:
            now_ms = self._environment.now_ms()
            step, commands = self._run.proceed(now_ms=now_ms)
            for command in commands:
                self._execute(command)
            if isinstance(step, ev.Wait) and step.until_ms > now_ms:
                self._changed.wait(min((step.until_ms - now_ms) / 1000, WAIT_S))
        return step

    # --- events and commands ----------------------------------------------------------------------------------------

    def _handle(self, event: ev.Event) -> None:
        """Feed the run and dispatch its commands. Any thread; never raises, blocks on the lock only."""
        with self._changed:
            for command in self._run.handle(event, now_ms=self._environment.now_ms()):
                self._execute(command)
            self._changed.notify_all()

    def _execute(self, command: ev.Command) -> None:
        match command:
            case ev.Join():
                self._join(command)
            case ev.Release() | ev.Subscribe():
                if (member := self._members.get(command.slot)) is not None:
                    member.submit(command)
            case ev.Leave():
                if (member := self._members.get(command.slot)) is not None:
                    member.submit(command)
                    self._retire(command.slot)
            case ev.AcceptAgent():
                self.agents.admit(command.agent)
            case ev.DismissAgent():
                self.agents.dismiss(command.agent, command.reason)
            case ev.CommitOffsets():  # captures the members now: a slot may have a new one later
                self._requests.submit(commit_order(command, self._members.get))
            case ev.FetchCommittedOffsets() | ev.ResolveStarts() | ev.CheckReplaced():
                self._requests.submit(command)
            case ev.LogLine():
                level = logging.WARNING if command.warn else logging.INFO
                log.log(level, "group %s: %s", self._options.group_id, command.text)
            case ev.Fail():
                log.error("group %s: the run fails: %s", self._options.group_id, command.error)
            case _:
                assert_never(command)

    def _join(self, join: ev.Join) -> None:
        """Start a member for a slot, and the run's threads with the first one."""
        if not self._members and not self._retired:  # the first join of the run
            stream, slots = self._run.stream, len(self._run.slots.all)
            log.info("group %s: joining; stream=%s members=%d", self._options.group_id, stream, slots)
            self._requests.start(stream)
            self._environment.spawn("clock", self._run_clock, died=self.fail)
        self._retire(join.slot)
        self._requests.has_placed_members |= bool(join.agent)
        member = self._members[join.slot] = self.agents.create_member(join) if join.agent else self._local_member(join)
        member.start()

    def _local_member(self, join: ev.Join) -> Member:
        return Member(
            join,
            self._options.member_settings(),
            environment=self._environment,
            own_member_ids=self._requests.own_member_ids,
            report=self._handle,
            before_join=self._requests.await_transactional_id,
        )

    def _retire(self, slot: int) -> None:
        """Keep a slot's former member until its thread has ended."""
        self._retired = [member for member in self._retired if not member.wait_ended(0)]
        if (member := self._members.pop(slot, None)) is not None:
            self._retired.append(member)

    def _shut_down(self, *, leave: bool) -> None:
        """Stop every thread, whatever the run's state. The membership of a member that does not close in time ends with
        its session."""
        deadline_ms = self._environment.now_ms() + int(CLOSE_S_MAX * 1000)
        self._requests.stop()
        with self._clock:
            self._is_shut_down = True
            self._clock.notify_all()
        members = [*self._members.values(), *self._retired]
        self._members.clear()
        self._retired.clear()
        for member in members:
            member.submit(ev.Leave(slot=member.slot, leave=leave))  # an earlier Leave takes precedence
        for member in members:
            if not member.wait_ended(max(0, deadline_ms - self._environment.now_ms()) / 1000):
                log.warning(
                    "group %s: the member of slot %d did not close within %.0f s; its membership ends with its session",
                    self._options.group_id,
                    member.slot,
                    CLOSE_S_MAX,
                )
        self.agents.end("the run has ended")
        with self._publishing:  # else the clock thread could write the files again after they are removed
            self._publisher.close(self._run.committed_offset, seq=self._run.seq)

    def _run_clock(self) -> None:
        """Run the clock thread, from the first join until the run is shut down."""
        while True:
            with self._clock:
                if not self._is_shut_down:
                    self._clock.wait(TICK_S)
                if self._is_shut_down:
                    return
            with self._changed:
                due_ms = self._run.next_deadline_ms()
            if due_ms is not None and self._environment.now_ms() >= due_ms:
                self._handle(ev.Tick())
            self._read_run_files()
            self._publish()

    def _read_run_files(self) -> None:
        """Report a drain request, and the durable mark of the batch in flight. Spark's next call may be as far away as
        the trigger, so the clock reads them too."""
        if not self._run.is_draining and self._publisher.is_drain_requested:
            log.info("group %s: a drain was requested; the run plans no more batches", self._options.group_id)
            self._handle(ev.DrainRequested())
        plan = self._run.plan
        if plan is not None and (batch := self._publisher.durable_mark(plan.stream)).seq == plan.seq:
            self._handle(ev.BatchMarked(batch=batch))

    def _publish(self) -> None:
        with self._publishing:
            with self._changed:
                statistics, drained, last_batch = self._run.statistics(), self._run.is_drained, self._run.last_batch
                committed = self._run.is_gathered and self._run.all_committed
            self._publisher.publish(statistics, drained=drained, last_batch=last_batch, committed=committed)


class BrokerQueries:
    """Answers the broker queries of one run, on Spark's thread; the request thread lists topics with it as well."""

    def __init__(self, options: Options, admin: Admin, epoch_ends: EpochEnds, now_ms: Callable[[], int]) -> None:
        self._options = options
        self._admin = admin
        self._epoch_ends = epoch_ends
        self._now_ms = now_ms
        self._committed = options.isolation_level == "read_committed"

    def answer(self, query: ev.BrokerQuery) -> ev.Event:
        """Send a query, and return its result or its failure."""
        try:
            match query:
                case ev.ListTopics():
                    return ev.TopicsListed(topics=self.topics())
                case ev.ReadTarget():
                    return self.read_target()
                case ev.ReadLogEnds():
                    return self.read_log_ends(query)
                case ev.DescribeGroup():
                    return self.describe_group()
                case _:
                    assert_never(query)
        except BrokerUnavailable as exc:
            return ev.RequestFailed(error=exc)
        except SourceError as exc:
            return ev.InternalFailure(error=exc)

    def topics(self, *, retry: bool = True) -> dict[str, int]:
        """Return the subscribed topics that exist, and their partition counts.

        Args:
            retry: ask several times for named topics that a broker reports missing, because a start depends on the
                answer. A list that is followed by others does not: the next one corrects it.
        """
        if self._options.topic_pattern is not None:
            found = self._admin.matching_topics(self._options.is_subscribed)
        else:
            find = self._admin.existing_topics if retry else self._admin.describe_topics
            found = find(self._options.topics)
        return {name: topic.partitions for name, topic in sorted(found.items())}

    def read_target(self) -> ev.TargetRead:
        """Read the end offset of every subscribed partition.

        Waits for a new partition that some brokers do not know yet, and at most :data:`LEADER_MS_MAX` for one without a
        leader. A partition whose end is still unknown is left to the next run, with a warning.
        """
        began_ms = self._now_ms()
        tps = [TopicPartition(topic, p) for topic, count in self.topics().items() for p in range(count)]
        ends = self._admin.latest_of_existing(tps, committed=self._committed)
        while self._now_ms() - began_ms < LEADER_MS_MAX and (missing := set(tps) - ends.keys()):
            if not (existing := self._admin.existing_partitions(missing)):
                break
            ends |= self._admin.latest_of_existing(existing | ends.keys(), committed=self._committed)
        if unanswered := [tp for tp in tps if tp not in ends]:
            log.warning(
                "group %s: no broker returned the end offsets of %d partitions, such as %s; the next run reads them",
                self._options.group_id,
                len(unanswered),
                unanswered[0],
            )
        return ev.TargetRead(ends=ends)

    def read_log_ends(self, query: ev.ReadLogEnds) -> ev.LogEndsRead:
        """Send the requests of ``query`` in the order of its fields: end offsets always come first."""
        started_ms = self._now_ms()
        ends, leader_epochs = self._admin.latest_with_epochs(query.ends, committed=self._committed)
        epoch_ends = self._epoch_ends.read(query.epoch_ends)
        topics = self._admin.describe_topics(query.topics)
        firsts = self._admin.earliest(query.firsts, require_all=False)
        log_ends = self._admin.latest(query.log_ends, committed=False, require_all=False)
        return ev.LogEndsRead(
            ends=ends,
            leader_epochs=leader_epochs,
            epoch_ends=epoch_ends,
            firsts=firsts,
            log_ends=log_ends,
            topic_ids={name: topic.id for name, topic in topics.items()},
            took_ms=self._now_ms() - started_ms,
        )

    def describe_group(self) -> ev.GroupDescribed:
        """Describe the group: its state, and the partitions of each client id."""
        started_ms = self._now_ms()
        found = self._admin.describe_group(self._options.group_id)
        assigned: dict[str, frozenset[TopicPartition]] = {}
        for member in found.members:
            assigned[member.client_id] = assigned.get(member.client_id, frozenset()) | frozenset(member.partitions)
        return ev.GroupDescribed(state=found.state, assigned=assigned, took_ms=self._now_ms() - started_ms)
