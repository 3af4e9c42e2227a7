"""The driver's shell around a run: threads, Kafka and the clock on one side, Spark's calls on the other.

Runs in: the stream reader, one for each run of a query. Deliberately absent: decisions and flags (``group``), Spark,
Delta. Every thread brings its events through :meth:`Coordinator._handle`, which feeds the run under one lock and
passes its commands on without waiting; what takes time is done by one worker thread and comes back as another event.

Threads: Spark's (does the run's steps), one per slot (``member``), the worker (lookups and the echo), the clock (hands
in what is due by time, and publishes). The life of a batch::

    latest(start)   start is durable -> echo, held revocations go, new assignments come in -> ranges of the next batch
    ...             Spark writes them down, tasks read them, the sink commits
    latest(end)     the next boundary
"""

import logging
from collections.abc import Callable, Mapping
from typing import assert_never

from spark_group_source.agents.connected_agents import ConnectedAgents, PlacedMembers
from spark_group_source.agents.remote_member import RemoteMember
from spark_group_source.errors import BrokerUnavailable, InvariantBroken, SourceError
from spark_group_source.host import run_files
from spark_group_source.kafka import Admin, Environment, EpochEnds, is_incremental
from spark_group_source.members.member import Member
from spark_group_source.members.slot_member import SlotMember
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.rules import Rules
from spark_group_source.protocol.run import Run
from spark_group_source.runtime.offset_commits import in_whose_name
from spark_group_source.runtime.request_thread import Worker

log = logging.getLogger(__name__)

HOLD_SHARE = 0.8
"""Of max.poll.interval.ms, which is the group's rebalance timeout: how long a revocation may be held. The rest is for
the commit, the member's answer and the time that passed at the broker before we heard of it."""
LEASE_SHARE = 0.6
"""Of the session timeout: how long an agent may be silent. The next member takes its place over before the group, which
may have heard of it later than we did, gives that to others."""
CLOSE_S_MAX = 8.0
"""How long the members of an ending run may take to close."""
TICK_S = 0.25
"""How often the clock looks whether a deadline of the run has passed, and publishes what changed: the worker and
Spark's thread may wait for brokers meanwhile."""
WAIT_S = 0.5
"""While waiting for the group: how often to look whether Spark is still there."""


class Coordinator:
    """One run's members, positions and commits. Methods are called by Spark's thread alone.

    Args:
        options: the query's options.
        environment: threads, time and Kafka's clients.
        publisher: where the run's statistics go, and where it is asked to drain.
    """

    def __init__(
        self, options: Options, *, environment: Environment | None = None, publisher: run_files.Publisher | None = None
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
        self._questions = Questions(options, self._admin, epoch_ends, self._environment.now_ms)
        self._run = Run(rules_of(options))
        self._changed = self._environment.condition()
        self._publishing = self._environment.condition()
        self._members: dict[int, SlotMember] = {}
        self._ended: list[SlotMember] = []
        self._worker = Worker(
            options,
            self._admin,
            environment=self._environment,
            topics=self._questions.topics,
            handle=self._handle,
        )
        self._clock = self._environment.condition()
        self._over = False
        self.agents = ConnectedAgents(
            environment=self._environment,
            lease_ms=self._run.rules.lease_ms,
            incremental=is_incremental(options.consumer_settings()),
            known_as=self._worker.known_as,
            handle=self._handle,
        )
        """Where agents and their channels meet this run."""
        self._publisher = publisher or run_files.Publisher(options.group_id, options.bootstrap_servers)

    # --- Spark's calls ----------------------------------------------------------------------------------------------

    def prepare_available_now(self) -> None:
        """Fix the end of an AvailableNow run: records that come later are left for the next one."""
        self._call(ev.TargetRequested())

    def latest(self, start: StreamOffset, *, unlimited: bool = False) -> StreamOffset:
        """The boundary between two batches: ``start`` is durable; what comes next?

        Args:
            unlimited: Trigger.Once, which takes all there is.

        Returns:
            The offset that ends the next batch, or ``start`` itself when there is nothing to read.

        Raises:
            SourceError: the run cannot go on.
        """
        drain = self._publisher.is_drain_requested
        end = self._call(
            ev.NextBatchRequested(start=start, unlimited=unlimited, drain=drain, name=self._environment.new_id())
        )
        if end is not start:  # a listener may look as soon as the batch is done, before the clock publishes
            self._publish()
        return end

    def replay(self, end: StreamOffset) -> None:
        """A batch that ends at ``end`` is about to be read; join the group if this is the first word of the stream."""
        self._call(ev.BatchStarted(offset=end))

    def ends(self) -> Mapping[TopicPartition, int]:
        """The end offsets seen last."""
        return self._run.lookout.ends

    def placed_members(self) -> list[PlacedMembers]:
        """What is held beside executors now."""
        with self._changed:
            hosts = self._run.lending.hosts.all
            at = [(m.agent, m.held) for m in self._members.values() if isinstance(m, RemoteMember)]
            return [PlacedMembers(host, hosts[host].executor, held) for host, held in at if host in hosts]

    def read(self, told: ev.TaskReported) -> None:
        """What a task read. Any thread."""
        self._handle(told)

    def died(self, exc: BaseException) -> None:
        """What this run needs has ended. Any thread."""
        self._handle(ev.InternalFailure(error=InvariantBroken(f"a thread of the stream reader does not run: {exc!r}")))

    def close(self) -> None:
        """End the run: bring the last offsets to Kafka and close the members, in bounded time."""
        stream = self._run.stream
        self._call(ev.StopRequested(durable=self._publisher.durable_seq(stream) if stream else -1))
        self._end(leave=False)

    # --- one call ---------------------------------------------------------------------------------------------------

    def _call(self, event: ev.Event) -> StreamOffset:
        """Do what the run says, step by step, until it has an answer."""
        self._handle(event)
        while True:
            step = self._proceed()
            match step:
                case ev.ReturnOffset():
                    return step.offset
                case ev.RaiseError():
                    raise step.error
                case ev.Wait():
                    if self._environment.orphaned():
                        raise SystemExit("the driver is gone")
                case ev.CloseMembers():
                    self._handle(ev.MembersClosing(leave=step.leave))
                    self._end(leave=step.leave)
                case ev.ListTopics() | ev.ReadTarget() | ev.ReadLogEnds() | ev.DescribeGroup():
                    answer = self._ask(step)
                    self._handle(answer)
                    if isinstance(answer, ev.RequestFailed):  # the clock does not run before the members join
                        self._publish()
                case _:
                    assert_never(step)

    def _ask(self, step: ev.BrokerQuery) -> ev.Event:
        try:
            match step:
                case ev.ListTopics():
                    return ev.TopicsListed(topics=self._questions.topics())
                case ev.ReadTarget():
                    return self._questions.target()
                case ev.ReadLogEnds():
                    return self._questions.look(step)
                case ev.DescribeGroup():
                    return self._questions.group()
                case _:
                    assert_never(step)
        except BrokerUnavailable as exc:
            return ev.RequestFailed(error=exc)
        except SourceError as exc:
            return ev.InternalFailure(error=exc)

    def _proceed(self) -> ev.Step:
        """The next step. A wait is begun here, under the lock: no event can slip in between."""
        with self._changed:
            now_ms = self._environment.now_ms()
            step, commands = self._run.proceed(now_ms=now_ms)
            for command in commands:
                self._carry_out(command)
            if isinstance(step, ev.Wait) and step.until_ms > now_ms:
                self._changed.wait(min((step.until_ms - now_ms) / 1000, WAIT_S))
        return step

    # --- events in, commands out ------------------------------------------------------------------------------------

    def _handle(self, event: ev.Event) -> None:
        """Feed the run and pass its commands on. Any thread; never raises, waits for nothing but the lock."""
        with self._changed:
            for command in self._run.handle(event, now_ms=self._environment.now_ms()):
                self._carry_out(command)
            self._changed.notify_all()

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.Join():
                self._join(command)
            case ev.Release() | ev.Subscribe():
                if (member := self._members.get(command.slot)) is not None:
                    member.order(command)
            case ev.Leave():
                if (member := self._members.get(command.slot)) is not None:
                    member.order(command)
                    self._retire(command.slot)
            case ev.AcceptAgent():
                self.agents.admit(command.agent)
            case ev.DismissAgent():
                self.agents.dismiss(command.agent, command.reason)
            case ev.CommitOffsets():  # now: later a slot may have another member of the same name
                self._worker.order(in_whose_name(command, self._members.get))
            case ev.FetchCommittedOffsets() | ev.ResolveStarts() | ev.CheckReplaced():
                self._worker.order(command)
            case ev.LogLine():
                level = logging.WARNING if command.warn else logging.INFO
                log.log(level, "group %s: %s", self._options.group_id, command.text)
            case ev.Fail():
                log.error("the run ends: %s", command.error)
            case _:
                assert_never(command)

    def _join(self, join: ev.Join) -> None:
        if not self._members and not self._ended:
            stream, slots = self._run.stream, len(self._run.slots.all)
            log.info("stream %s of group %s: joining with %d members", stream, self._options.group_id, slots)
            self._worker.start(stream)
            self._environment.spawn("clock", self._tick, died=self.died)
        self._retire(join.slot)
        self._worker.lent |= bool(join.agent)
        member = self._members[join.slot] = self.agents.create_member(join) if join.agent else self._at_home(join)
        member.start()

    def _at_home(self, join: ev.Join) -> Member:
        return Member(
            join,
            self._options.member_settings(),
            environment=self._environment,
            known_as=self._worker.known_as,
            report=self._report,
            before=self._worker.await_shut_out,
        )

    def _report(self, event: ev.Event) -> None:
        """What a member reports. That it has ended matters only where the slot's next one waits for it."""
        if not isinstance(event, ev.MemberEnded) or self._run.awaits_end(event.slot):
            self._handle(event)

    def _retire(self, slot: int) -> None:
        self._ended = [member for member in self._ended if not member.wait_ended(0)]
        if (member := self._members.pop(slot, None)) is not None:
            self._ended.append(member)

    def _end(self, *, leave: bool) -> None:
        """Every thread ends now, whatever the run believes of it; one that does not ends with its session."""
        deadline_ms = self._environment.now_ms() + int(CLOSE_S_MAX * 1000)
        self._worker.stop()
        with self._clock:
            self._over = True
            self._clock.notify_all()
        members = [*self._members.values(), *self._ended]
        self._members.clear()
        self._ended.clear()
        for member in members:
            member.order(ev.Leave(slot=member.slot, leave=leave))  # who was told before goes as it was told
        for member in members:
            if not member.wait_ended(max(0, deadline_ms - self._environment.now_ms()) / 1000):
                log.warning("a member did not close in time; its place in the group ends with its session")
        self.agents.end("the run has ended")
        self._publisher.close()

    def _tick(self) -> None:
        """The thread of the clock, from the first join to the end of the run."""
        while True:
            with self._clock:
                if not self._over:
                    self._clock.wait(TICK_S)
                if self._over:
                    return
            with self._changed:
                due_ms = self._run.next_deadline_ms()
            if due_ms is not None and self._environment.now_ms() >= due_ms:
                self._handle(ev.Tick())
            self._publish()

    def _publish(self) -> None:
        with self._publishing:
            with self._changed:
                statistics, drained = self._run.statistics(), self._run.drained
            self._publisher.publish(statistics, drained=drained)


class Questions:
    """Asks for one query.

    Args:
        options: which topics, and how far a partition may be read.
        admin, epoch_ends: the questions to the cluster.
        now_ms: a clock for durations.
    """

    def __init__(self, options: Options, admin: Admin, epoch_ends: EpochEnds, now_ms: Callable[[], int]) -> None:
        self._options = options
        self._admin = admin
        self._epoch_ends = epoch_ends
        self._now_ms = now_ms
        self._committed = options.isolation_level == "read_committed"

    def topics(self) -> dict[str, int]:
        """The subscribed topics and their partition counts.

        Raises:
            TopicMissing: ``subscribe`` names one that does not exist.
        """
        if self._options.topic_pattern is None:
            found = self._admin.require(self._options.topics)
        else:
            found = self._admin.topics(self._options.is_subscribed)
        return {name: topic.partitions for name, topic in sorted(found.items())}

    def target(self) -> ev.TargetRead:
        """Where every partition of the subscription ends now. A new one that not every broker knows yet is waited for:
        without its end the run leaves it to the next one, and says so."""
        tps = [TopicPartition(topic, p) for topic, count in self.topics().items() for p in range(count)]
        ends = self._admin.latest_of_all(tps, committed=self._committed)
        if left := [tp for tp in tps if tp not in ends]:
            text = "partitions left to the next run, because no broker told their end yet: %d, such as %s"
            log.warning(text, len(left), left[0])
        return ev.TargetRead(ends=ends)

    def look(self, question: ev.ReadLogEnds) -> ev.LogEndsRead:
        """Ask what is asked, in the order of its fields."""
        began_ms = self._now_ms()
        ends, leader_epochs = self._admin.ends(question.ends, committed=self._committed)
        epoch_ends = self._epoch_ends.ask(question.epoch_ends)
        topics = self._admin.describe(question.topics)
        firsts = self._admin.earliest(question.firsts, whole=False)
        log_ends = self._admin.latest(question.log_ends, committed=False, whole=False)
        return ev.LogEndsRead(
            ends=ends,
            leader_epochs=leader_epochs,
            epoch_ends=epoch_ends,
            firsts=firsts,
            log_ends=log_ends,
            topic_ids={name: topic.id for name, topic in topics.items()},
            took_ms=self._now_ms() - began_ms,
        )

    def group(self) -> ev.GroupDescribed:
        """Who is in the group."""
        found = self._admin.group(self._options.group_id)
        given: dict[str, frozenset[TopicPartition]] = {}
        for member in found.members:
            given[member.client_id] = given.get(member.client_id, frozenset()) | frozenset(member.partitions)
        return ev.GroupDescribed(state=found.state, given=given)


def rules_of(options: Options) -> Rules:
    """What the options say to the protocol."""
    return Rules(
        group=options.group_id,
        servers=options.bootstrap_servers,
        slots=1 if options.group_members == "auto" else options.group_members,
        auto_slots=options.group_members == "auto" and options.member_host != "driver",
        hold_budget_ms=int(options.max_poll_interval_ms * HOLD_SHARE),
        joining_budget_ms=options.max_poll_interval_ms + options.session_timeout_ms,
        broker_timeout_ms=options.broker_timeout_ms,
        classic=options.group_protocol == "classic",
        lease_ms=int(options.session_timeout_ms * LEASE_SHARE),
        member_host=options.member_host,
        leave_on_stop=options.leave_on_stop,
        starting=options.starting,
        fail_on_data_loss=options.fail_on_data_loss,
        max_offsets=options.max_offsets_per_trigger,
        min_offsets=options.min_offsets_per_trigger,
        max_delay_ms=options.max_trigger_delay_ms,
    )
