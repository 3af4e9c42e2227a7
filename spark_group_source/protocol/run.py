"""One run of a query as a pure state machine: it turns Kafka's rebalances into changes between micro-batches.

Runs in: the stream reader (under the coordinator's lock), tests. Deliberately absent: clock (``now_ms`` is passed in),
threads, sockets, logs, Kafka, Spark; the positions of partitions (``partitions``), the members (``slots``), the ranges
of a batch (``planner``), lost records (``data_loss``), when requests are sent (``request_schedule``).

Events enter through :meth:`Run.handle`, but for three that the run applies to itself (``Durable``, ``Planned``,
``RecordsMissing``), and everything that must be done outside is returned as commands. An event goes to the part that
it concerns; then the joint rules (:meth:`Run._apply_rules`) run in a fixed order: commit the offsets that are not
committed yet, release the revocations that need not be held any longer, look up the positions of new partitions. The
thread of Spark's call requests one step after another from :meth:`Run.proceed`, until the step is
:class:`ReturnOffset` or :class:`RaiseError`: the coordinator has no state of the protocol.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import assert_never

from spark_group_source.errors import (
    BrokerUnavailable,
    GroupError,
    InvariantBroken,
    OptionError,
    SourceError,
    TopicMissing,
)
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.protocol.data_loss import EARLIER_MS, GRACE_MS, DataLossDetector, LeaderEpochs
from spark_group_source.protocol.group_assignment import GroupAssignment
from spark_group_source.protocol.lookups import POSITION_MS_MAX, PositionLookups
from spark_group_source.protocol.offsets import BatchKey, StreamOffset
from spark_group_source.protocol.outbox import Outbox
from spark_group_source.protocol.partitions import RENEW_CHECK_MS, Partitions
from spark_group_source.protocol.placement import Placement
from spark_group_source.protocol.planner import Planner
from spark_group_source.protocol.request_schedule import CommitSchedule, Outage, Requester
from spark_group_source.protocol.rules import Rules
from spark_group_source.protocol.slots import IN_READER, Slot, Slots, shown
from spark_group_source.protocol.states import BEFORE_PLAN, RUN, AnyCause, Cause, RunState, next_state
from spark_group_source.protocol.statistics import Skips, Statistics

SETTLE_MS_MAX = 10_000
"""How long the first batch of a run waits for a rebalance to complete; then it reads the partitions assigned so far."""
COMMIT_MS_MAX = 60_000
"""How long a run that ends or drains waits until its offsets are committed."""
STOP_COMMIT_MS_MAX = 4_000
"""The same for a run that is stopped: Spark kills its process after some seconds."""
IDLE_LOAD_MAX = 0.04
"""Share of the time that an idle query may spend reading log ends; it sets the pause between two reads."""
IDLE_PAUSES_MS = (100, 1_000)
"""The shortest and the longest of these pauses: they bound the latency of a new record and the load of many partitions.
"""
LEADER_MS_MAX = 30_000
"""How long a run that ends by itself waits for partitions without a leader, while others have one: electing the next
one takes about ten seconds. Then the next run reads them."""
UNSETTLED_MS_MIN = 2 * EARLIER_MS
"""How long a run that ends by itself waits at least until it knows what is left to read: the group may be stable long
since, while a former leader is waited for, which began to answer later."""
START_MS_MAX = 20_000
"""How long brokers may not answer before the members of a run join: a wrong address is reported within 30 s."""


class Run:
    """The state machine of one run of a query."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.state = RunState.NEW
        self.stream = ""
        """The stream id; empty until the run has started: no member joins before that."""
        self.plan: StreamOffset | None = None
        """The batch in flight: planned and not durable. Its partitions are not released. None between batches."""
        self.closed = False
        """Whether the members were ordered to close: from then on their events and Kafka's responses are ignored."""
        self.committed_offset: StreamOffset | None = None
        """The last durable batch, if the run was stopped when Kafka had all positions after it; None otherwise."""
        self.is_draining = False
        """Whether a drain was requested: no further batch is planned."""
        self.static = True
        """Whether the members are static ones; False only for KIP-848 members of a run that ends by itself."""
        self.counts = Statistics(group=rules.group)
        self.partitions = Partitions(self.counts)
        self.planner = Planner(rules)
        self.outage = Outage()
        self._known_epochs = LeaderEpochs()
        self.data_loss = DataLossDetector(rules, self._known_epochs)
        self._out = Outbox()
        self._commits = CommitSchedule()
        self.slots = Slots(
            rules,
            self.partitions,
            self._commits,
            self.counts,
            self._out,
            agent_for=self._agent_for,
            agent_name=self._agent_name,
        )
        self.placement = Placement(rules, self.slots, self.counts, self._out)
        self.lookups = PositionLookups(rules, self.partitions, self.counts, self._out)
        self._assignment = GroupAssignment(rules, self.slots, self.partitions, self._commits, self._out)
        self._skips = Skips()
        self._renew_at_ms: int | None = None
        """When old committed offsets are searched for and renewed; None until the run has started."""
        self._error: SourceError | None = None
        """Why the run failed; None while it has not."""
        # --- Spark's calls
        self._first_call: ev.NextBatchRequested | ev.BatchStarted | None = None
        """The call that started the run; None before it."""
        self._topics: dict[str, int] | None = None
        """The subscribed topics and their partition counts; None until they are listed."""
        self._list_again_at_ms: int | None = None
        """When the topics are listed again before members join, because the first list may lack some; else None."""
        self._last_durable: StreamOffset | None = None
        """The last durable batch; None if this run knows its number only."""
        self._start = StreamOffset.initial(rules.group)
        """The ``start`` of Spark's last call."""
        self._is_unlimited = rules.single_batch == "yes"
        """Whether the trigger is Once, which reads everything available, or runs like Once."""
        self._may_end = rules.single_batch != "no"
        """Whether Spark may end the run without another call; False after the second call."""
        self._is_resumed = False
        """Whether the run continues a checkpoint, until its first call has passed GATHERING."""
        self._since_ms = 0
        """When the run entered its state, or Spark's last call came."""
        self._unsettled_since_ms: int | None = None
        """Since when a bounded run has had nothing to read in a group that is not settled; None if it is."""
        # --- reads of the log ends
        self._ends_request: ev.ReadLogEnds | None = None
        """The request that is to be sent next; None when the responses are complete."""
        self._is_idle = False
        """Whether the last read found nothing to read."""
        self._ends_read_at_ms = 0
        """When the last read was complete."""
        self._rebalances_at_comparison = 0
        """The number of rebalances when the assignment was compared with the broker's."""
        self._rebalances_at_read = 0
        """The number of rebalances at that time: after a further one there is no pause."""

    # --- entry ------------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, *, now_ms: int) -> list[ev.Command]:
        """Handle one event, and return the commands to execute, in order. Never raises: a broken invariant fails the
        run."""
        self._out.begin(now_ms)
        try:
            self._apply(event)
        except InvariantBroken as exc:
            self._fail_invariant(exc)
        return self._out.commands

    def proceed(self, *, now_ms: int) -> tuple[ev.Step, list[ev.Command]]:
        """Return the next step of the thread of Spark's call, and the commands to execute before it."""
        self._out.begin(now_ms)
        step: ev.Step | None = None
        while step is None:
            try:
                step = self._next()
            except InvariantBroken as exc:
                self._fail_invariant(exc)
        retry_at_ms = self.outage.retry_at_ms(Requester.CALL)
        if isinstance(step, ev.BrokerQuery) and now_ms < retry_at_ms:
            step = ev.Wait(until_ms=retry_at_ms)
        return step, self._out.commands

    # --- queries ----------------------------------------------------------------------------------------------------

    @property
    def seq(self) -> int:
        """Number of the last durable batch; -1 before the first."""
        return self.partitions.seq

    @property
    def is_gathered(self) -> bool:
        """Whether every slot has had an assignment and every partition can be planned: a plan misses no partition, but
        for those whose brokers do not answer."""
        return self.slots.all_assigned and self._has_positions() and not self.partitions.any_adopting

    @property
    def all_committed(self) -> bool:
        """Whether Kafka has the position of every assigned partition as committed offset."""
        return not self.partitions.due and not self._commits.is_committing

    @property
    def is_drained(self) -> bool:
        """Whether all offsets are committed and no batch will follow."""
        idle = self.is_draining and self.state is RunState.OPEN  # Spark's next trigger may be far away
        return self.state is RunState.DRAINED or (idle and self._may_drain)

    @property
    def _may_drain(self) -> bool:
        """Whether Kafka has all durable offsets, also those of partitions that members are about to get."""
        return self.all_committed and self._has_positions() and not self._may_get_back

    @property
    def _may_get_back(self) -> bool:
        """Whether members may be about to get partitions back whose durable offsets Kafka may lack."""
        is_back = self.slots.all_assigned and self._has_positions()
        return not is_back and bool(self.partitions.uncommitted())

    @property
    def last_batch(self) -> int:
        """The number of the batch in flight, if Spark may end the run after it without another call; else -1. The sink
        of such a batch waits until its offsets are committed."""
        return self.plan.seq if self.plan is not None and self._is_single_batch else -1

    def plannable(self) -> dict[TopicPartition, int]:
        """The position of every partition that the next batch may read.

        It excludes partitions that are being revoked, and those whose position is not committed under this stream's
        name.
        """
        found = self.partitions.plannable()
        for tp in self.slots.revoked():
            found.pop(tp, None)
        return found

    def next_deadline_ms(self) -> int | None:
        """When :class:`Tick` is due; None while nothing waits for a time."""
        if self.closed:
            return None
        due = self.slots.deadlines_ms() + self._commits.deadlines_ms() + self.lookups.deadlines_ms()
        due += self.placement.deadlines_ms()
        due += [] if self._renew_at_ms is None else [self._renew_at_ms]
        return min(due, default=None)

    def statistics(self) -> Statistics:
        """A copy of the counters, with the state of the run at this moment."""
        slots, partitions = self.slots.all, self.partitions
        return replace(
            self.counts,
            stream=self.stream,
            seq=self.seq,
            state=self.state.value,
            generation=max((slot.generation for slot in slots), default=-1),
            slots=tuple(slot.state.kind.value for slot in slots),
            assigned=tuple(len(slot.partitions) for slot in slots),
            agents=self.placement.agent_names(),
            placed_since_ms=tuple(slot.placed_since_ms if slot.agent != IN_READER else 0 for slot in slots),
            buffered_bytes=tuple(slot.buffered_bytes for slot in slots),
            buffered_rows=tuple(slot.buffered_rows for slot in slots),
            rows_from_memory=tuple(slot.rows_from_memory for slot in slots),
            rows_from_brokers=tuple(slot.rows_from_brokers for slot in slots),
            slot_recalls=tuple(slot.recalls for slot in slots),
            unreachable_since_ms=self.outage.since_ms or 0,
            uncommitted_partitions=len(partitions.due),
            uncommitted_offsets=sum(at.uncommitted for at in partitions.due.values()),
            missing_topics=self.slots.missing_topics,
            records_lost=self.data_loss.records_lost + self._skips.records_lost,
        )

    # --- events: which part handles which ---------------------------------------------------------------------------

    def _apply(self, event: ev.Event) -> None:
        """Handle an event, from outside or produced by a step."""
        self._out.record(event)
        if isinstance(event, ev.CallEvent):
            self._apply_call_event(event)
        elif not self.closed:
            self._apply_group_event(event)
            if self.stream and not self.closed and not isinstance(event, ev.AgentHeartbeat):
                self._apply_rules()

    def _apply_group_event(self, event: ev.GroupEvent) -> None:
        match event:
            # members
            case ev.Assigned():
                self._fail(self.slots.apply(event))
                self._commits.slot_is_back(event.slot)
                self.placement.member_assigned(event.slot)
            case ev.Revoking() | ev.Lost() | ev.MemberFailed() | ev.MemberFenced():
                self._fail(self.slots.apply(event))
            case ev.NotReplaced():
                self._fail(self.slots.not_replaced(event))
            case ev.ReplacedUnclear():
                self._fail(self.slots.replacement_unclear(event))
            case ev.Replaced():
                self._fail(self.slots.replaced(event.reason))
            case ev.TopicsChanged():
                if self.stream:
                    self.slots.change_topics(event.topics)
            # placement of members on agents
            case ev.MemberEnded():
                self.placement.member_ended(event)
                # An agent reports once why it ends. If that is lost, only this event shows that the member is gone. A
                # member of the stream reader has reported why it ends, or was closed: its slot ignores this.
                ended = ev.MemberFailed(slot=event.slot, client=event.client, reason="it ended with its agent")
                self._fail(self.slots.apply(ended))
            case ev.AgentConnected() | ev.AgentHeartbeat() | ev.AgentDisconnected() | ev.AgentEnded():
                self.placement.apply(event)
            case ev.TransactionsChecked():
                self.placement.apply(event)
            # batches
            case ev.Planned():
                self._batch_planned(event.offset)
            case ev.Durable():
                self._batch_durable(event.offset)
            case ev.RecordsMissing():
                self.partitions.skip_missing(event)
                self.lookups.records_missing(event)
                self._out.log(event.reason, warn=True)
            # positions of new partitions
            case ev.CommittedOffsetsRead():
                self._broker_answered(Requester.LOOKUP)
                event = self._what_counts(event)
                self.lookups.committed_read(event, self.stream)
                self._known_epochs.learn(event.offsets, self.partitions.position, self.stream)
                without_offset = self.lookups.without_offset(event.offsets)
                self.data_loss.learn_ids(event, self.partitions.reset_number, without_offset)
            case ev.StartsResolved():
                self._broker_answered(Requester.LOOKUP)
                self._fail(self.lookups.starts_resolved(event))
                self._known_epochs.learn_starts(event, self.partitions.position)
            case ev.LookupFailed():
                self._broker_silent(Requester.LOOKUP, event.error)
                self.lookups.failed(event.partitions, str(event.error))
            # offset commits
            case ev.OffsetsCommitted():
                self._offsets_committed(event)
            case ev.OffsetCommitFailed():
                self._offset_commit_failed(event)
            case ev.Tick():
                self._tick()
            case _:
                assert_never(event)

    def _apply_call_event(self, event: ev.CallEvent) -> None:
        """Handle an event that moves no partition by itself: Spark's calls, their responses, counters."""
        match event:
            # Spark's calls
            case ev.TargetRequested():
                self._move(ev.TargetRequested)
            case ev.NextBatchRequested():
                self._next_batch_requested(event)
            case ev.BatchStarted():
                self._batch_started(event)
            case ev.StopRequested():
                self._stop_requested()
            # between Spark's calls
            case ev.BatchMarked():
                self._batch_marked(event.batch)
            case ev.DrainRequested():
                self.is_draining = True
            # responses to the steps of a call
            case ev.TargetRead():
                self._broker_answered(Requester.CALL)
                self.planner.target = event.ends
                self._choose_membership()
                self._move(ev.TargetRead)
            case ev.TopicsListed():
                self._broker_answered(Requester.CALL)
                if self.state is RunState.STARTING:
                    self._topics_listed(event.topics)
            case ev.GroupDescribed():
                self._broker_answered(Requester.CALL)
                self._described_after(event.took_ms)
                if self.state is RunState.STARTING and self._topics is not None:
                    self._start_members(self._topics, self._former_slots(event))
                else:
                    self._assignment.take(event)
            case ev.LogEndsRead():
                self._ends_request = None if self._ends_request is None else self.data_loss.take(event)
                if self._ends_request is None:  # else a later request may fail again and again
                    self._broker_answered(Requester.CALL)
            case ev.RequestFailed():
                self._broker_silent(Requester.CALL, event.error)
                if self._ends_request is not None:  # the positions may have changed since the read started
                    self._ends_request = self._first_ends_request()
            # the end of the run
            case ev.MembersClosing():
                if not self.closed:
                    is_committed = not (self.partitions.uncommitted() or self._commits.is_committing)
                    last = self._last_durable
                    positions = {} if last is None else {**last.uncommitted, **last.positions()}
                    if is_committed and self.partitions.are_at(positions):
                        self.committed_offset = last
                    self.slots.close(leave=event.leave)
                    self.closed = True
                self._move(ev.MembersClosing)
            case ev.InternalFailure():
                self._fail(event.error)
            # counters
            case ev.PrefetchReported():
                self.slots.record_prefetch(event)
            case ev.TaskReported():
                self.slots.record_read(event)
                self._skips.add(event)
                self.planner.record_sizes.add(event)
            case _:
                assert_never(event)

    # --- Spark's calls ----------------------------------------------------------------------------------------------

    def _next_batch_requested(self, event: ev.NextBatchRequested) -> None:
        self._is_unlimited |= event.unlimited
        self._may_end &= self.state is RunState.NEW
        self._is_idle &= not event.after_batch
        self._start = event.start
        if self.state is RunState.NEW:
            self._choose_membership()
            self._first_call = event
        elif not event.start.is_initial and self.stream:
            self._apply_reported_reset(event)
            self._apply(ev.Durable(offset=event.start))
        if self.state is not RunState.FAILED:
            self._move(ev.NextBatchRequested)

    def _apply_reported_reset(self, event: ev.NextBatchRequested) -> None:
        """The sink wrote nothing of the last batch, because its table knows a reset that this run does not know yet:
        the first lookup is not answered, or other consumers committed every partition since, so that no commit metadata
        shows the reset. All partitions are looked up again.
        """
        if event.void_by > self.partitions.reset_number:
            self._out.log(
                f"the sink wrote nothing of batch {event.start.seq}, because its table knows reset #{event.void_by} of "
                "the group and the batch's plan does not; all partitions continue at the committed offsets",
                warn=True,
            )
            self.partitions.apply_reset(event.void_by)

    def _batch_started(self, event: ev.BatchStarted) -> None:
        if self.state in (RunState.CLOSED, RunState.FAILED, RunState.STOPPING):
            return
        if self.state is RunState.NEW:
            self._choose_membership()
            self._first_call = event
        elif (
            self.plan is None
            and self._last_durable is not None
            and BatchKey.of(self._last_durable) == BatchKey.of(event.offset)
        ):
            return  # a query that names one load() several times reads the batch for each; the sink's mark came between
        else:
            planned = self.plan is not None and event.offset.seq == self.plan.seq
            _require(planned, f"Spark reads batch {event.offset.seq}, which this run did not plan")
        self._move(ev.BatchStarted)

    # --- the start of a run -----------------------------------------------------------------------------------------

    @property
    def _resumed_from(self) -> StreamOffset:
        """The offset of the call that started the run: the last durable batch, or the one to run again."""
        assert self._first_call is not None
        return self._first_call.offset if isinstance(self._first_call, ev.BatchStarted) else self._first_call.start

    @property
    def _must_count_members(self) -> bool:
        """Whether the run first counts the members that an earlier run left in the group.

        With one slot per agent (``auto_slots``) a resumed stream starts before its agents connect, and starts as many
        slots as there are static members left. With fewer, the broker would assign the rest to members without a
        consumer until their session ends, and move partitions twice.
        """
        return self.rules.auto_slots and self.static and not self._resumed_from.is_initial

    def _former_slots(self, described: ev.GroupDescribed) -> int:
        """The number of slots whose members the group still has, as far as client ids show."""
        numbers = [identifiers.slot_of(self._resumed_from.stream, client) for client in described.assigned]
        members = 1 + max((number for number in numbers if number is not None), default=-1)
        if members > self.rules.slots:
            self._out.log(f"the group still has {members} members of this stream; starting as many")
        return members

    def _topics_listed(self, topics: Mapping[str, int]) -> None:
        """Start with these topics, or list them once more: a broker may not know all topics for a moment.

        Named topics that one broker does not know were asked for again, but a pattern is matched with one list. Topics
        that a new stream finds later count as added, and do not start where the starting options say. A resumed stream
        would give up those that it has read.
        """
        is_first, known = self._topics is None, self._topics or {}
        self._topics = {topic: max(known.get(topic, 0), topics.get(topic, 0)) for topic in sorted({*known, *topics})}
        is_new, is_pattern = self._resumed_from.is_initial, self.rules.matches is not None
        if is_first and is_pattern and (is_new or self._unlisted_topics(self._topics)):
            self._list_again_at_ms = self._now_ms + GRACE_MS
            return
        self._list_again_at_ms = None
        if not self._must_count_members:
            self._start_members(self._topics)

    def _unlisted_topics(self, listed: Collection[str]) -> list[str]:
        return self._resumed_from.unlisted_topics(listed, self.rules.matches or self.rules.named_topics.__contains__)

    def _may_continue_without(self, gone: list[str]) -> bool:
        """Whether the run continues without topics that an earlier run read, and that no list of topics has any more;
        else it fails."""
        if not gone:
            return True
        text = f"topic {shown(gone)} does not exist any more, or the query's user may not describe it"
        if not self.rules.fail_on_data_loss:
            self._out.log(f"{text}; the query continues without it", warn=True)
            return True
        self._fail(
            TopicMissing(
                f"{text}, so records that the query has not read may be lost. Remove it from the subscription, or set "
                "failOnDataLoss=false to continue without it",
                topics=gone,
            )
        )
        return False

    def _start_members(self, topics: dict[str, int], former_slots: int = 0) -> None:
        """The topics are listed: start a new stream or continue the checkpoint's, and let the members join."""
        first, past = self._first_call, self._resumed_from
        if isinstance(first, ev.NextBatchRequested) and past.is_initial:
            try:
                self.rules.starting.resolve([TopicPartition(t, p) for t, count in topics.items() for p in range(count)])
            except OptionError as exc:
                self._fail(exc)
                return
            self.stream, self.lookups.known = first.new_stream, topics
            self.slots.join_all(self.stream, tuple(topics), static=self.static)
            self._move(Cause.STREAM_CREATED)
        else:
            gone = self._unlisted_topics(topics)
            if not self._may_continue_without(gone):
                return
            replayed = isinstance(first, ev.BatchStarted)
            self._resume(past, tuple(topics), former_slots, replay=replayed)
            if not replayed:
                self.partitions.forget(gone)
            if isinstance(first, ev.NextBatchRequested):
                self._apply_reported_reset(first)
            self._move(Cause.REPLAY if replayed else ev.Durable)
        self._renew_at_ms = self._now_ms + RENEW_CHECK_MS

    def _resume(self, offset: StreamOffset, topics: tuple[str, ...], former_slots: int, *, replay: bool) -> None:
        """Continue from a checkpoint: after its last batch, or before it if Spark runs that batch again."""
        self._is_resumed = True
        self.data_loss.restore(offset)
        self.stream = offset.stream
        self.lookups.restore(offset, replay=replay)
        committed = None if isinstance(self._first_call, ev.BatchStarted | None) else self._first_call.committed
        self.partitions.restore(offset, replay=replay, uncommitted=committed != BatchKey.of(offset))
        self._last_durable = None if replay else offset
        self.plan = offset if replay else None
        former = offset.known.keys() | offset.topic_ids.keys() | {tp.topic for tp in offset.ranges}
        before = tuple(topic for topic in topics if topic in former)
        if topics and not before:  # all former topics may be deleted: a member of those alone would not join
            before = tuple(sorted({*former, *topics}))
        self.slots.join_all(self.stream, topics, former_topics=before, static=self.static, former_slots=former_slots)

    def _choose_membership(self) -> None:
        """Static members, except for KIP-848 members of a run that ends by itself: static ones cannot leave the group
        there."""
        self.static = self.rules.classic or not self._is_bounded

    # --- batches ----------------------------------------------------------------------------------------------------

    def _batch_planned(self, offset: StreamOffset) -> None:
        _require(
            offset.stream == self.stream and offset.seq == self.seq + 1 and self.plan is None,
            f"batch {offset.seq} does not follow {self.seq if self.plan is None else self.plan.seq}",
        )
        leaving = offset.ranges.keys() & set(self.slots.revoked())
        _require(not leaving, f"batch {offset.seq} reads {leaving}, which are being revoked")
        self._move(ev.Planned)
        self.partitions.begin_batch(offset.ranges, offset.spans)
        self.plan = offset

    def _batch_durable(self, offset: StreamOffset) -> None:
        _require(offset.stream == self.stream, f"offset of stream {offset.stream!r}, not of {self.stream!r}")
        if self.plan is None or offset.seq != self.plan.seq:  # Spark may repeat an earlier start
            _require(offset.seq <= self.seq, f"batch {offset.seq} is durable, but this run did not plan it")
            return
        self.plan, self._last_durable = None, self.plan
        self.lookups.started -= self.partitions.complete_batch(offset.seq)
        self._commits.batch_durable(self._now_ms if self.partitions.due else None)
        if self.state in (RunState.PLANNED, RunState.READING):
            self._move(ev.Durable)

    def _batch_marked(self, batch: BatchKey) -> None:
        """The batch in flight is durable before Spark requests the next one, which may take as long as the trigger.

        An earlier run may have left the mark, of another batch with that number; and Spark may have discarded a batch
        that it did not start to read: then a batch of another run has its number.
        """
        plan = self.plan
        if plan is not None and self.state is RunState.READING and batch.seq == plan.seq and batch == BatchKey.of(plan):
            self._apply(ev.Durable(offset=plan))

    # --- offset commits ---------------------------------------------------------------------------------------------

    def _offsets_committed(self, event: ev.OffsetsCommitted) -> None:
        self.partitions.apply_commits(event.offsets, now_ms=self._now_ms)
        all_committed = bool(event.offsets) and not self.partitions.due
        took_ms = self._commits.succeeded(self._now_ms, left_out=event.left_out, all_committed=all_committed)
        if event.offsets:
            self.counts.count_commit(took_ms)
        for number, reason in self._commits.newly_absent(self._now_ms):
            self._out.log(
                f"slot {number} is not in the group ({reason}); the offsets of its partitions are committed when it is "
                "back, those of other slots now",
                warn=True,
            )

    def _offset_commit_failed(self, event: ev.OffsetCommitFailed) -> None:
        self._commits.failed(self._now_ms, event.reason)
        self.counts.commits_failed += 1
        self._out.log(
            f"offset commit failed ({event.reason}); no rows are lost, the next commit includes these offsets",
            warn=True,
        )

    # --- joint rules ------------------------------------------------------------------------------------------------

    def _apply_rules(self) -> None:
        """The joint rules, after every group event: commit, release, look up."""
        if self.partitions.due and self._commits.may_commit:
            self._order_commit()
        self.slots.release_revocations()
        self.lookups.order(self.data_loss)

    def _order_commit(self) -> None:
        commit = self.partitions.due_commit(self.stream, self._commits.excluded_slots)
        if commit.offsets:
            self._commits.started(commit.offsets, commit.slots.values())
            self._out.order(
                replace(
                    commit,
                    started=frozenset(self.lookups.started & commit.offsets.keys()),
                    leader_epochs=self._known_epochs.of(commit.offsets),
                    topic_ids=dict(self.data_loss.topic_ids),
                )
            )

    def _agent_for(self, slot: Slot) -> str:
        return self.placement.agent_for(slot)

    def _agent_name(self, agent: str) -> str:
        return self.placement.agents.name(agent)

    def _tick(self) -> None:
        self._commits.tick(self._now_ms)
        self.lookups.tick()
        if self.partitions.all_known():  # no lookup is repeated: the partitions of the failed one were revoked
            self._end_requests(Requester.LOOKUP)
        self._renew_offsets()
        self.slots.tick()
        self.placement.tick()

    def _renew_offsets(self) -> None:
        if self._renew_at_ms is not None and self._now_ms >= self._renew_at_ms:
            self.counts.offsets_renewed += self.partitions.renew_commits(self._now_ms)
            self._renew_at_ms = self._now_ms + RENEW_CHECK_MS

    # --- broker outages ---------------------------------------------------------------------------------------------

    def _broker_silent(self, requester: Requester, error: BrokerUnavailable) -> None:
        name = self.stream or self.rules.group
        if self.outage.request_failed(requester, error, name=name, now_ms=self._now_ms):
            self._out.log(f"brokers do not answer ({error}); retrying", warn=True)
        bound_ms = self.rules.broker_timeout_ms
        if self.state in (RunState.TARGETING, RunState.STARTING):
            bound_ms = min(bound_ms or START_MS_MAX, START_MS_MAX)
        self._fail(self.outage.error_after(requester, bound_ms, now_ms=self._now_ms))

    def _broker_answered(self, requester: Requester) -> None:
        if (took_ms := self._end_requests(requester)) is not None:
            self._out.log(f"brokers answer again after {took_ms / 1000:.0f} s; continuing", warn=True)

    def _end_requests(self, requester: Requester) -> int | None:
        """A request was answered, or none follows, which shows nothing about the brokers. No wait for the group counts
        from before."""
        took_ms = self.outage.end_requests(requester, now_ms=self._now_ms)
        if took_ms is not None:
            self.slots.outage_ended()
        return took_ms

    def _described_after(self, took_ms: int) -> None:
        bound_ms = self.rules.broker_timeout_ms or self.rules.joining_budget_ms
        if self.outage.ends_with_answer(took_ms, bound_ms, now_ms=self._now_ms):
            self._out.log(f"brokers answered after {took_ms / 1000:.0f} s; continuing", warn=True)
            self.slots.outage_ended()

    # --- steps of Spark's call, by state ----------------------------------------------------------------------------

    def _next(self) -> ev.Step | None:
        if self.is_draining and self.state in BEFORE_PLAN:
            self._ends_request = None
            self._end_requests(Requester.CALL)
            self._move(ev.DrainRequested)
        match self.state:
            case RunState.NEW | RunState.OPEN | RunState.CLOSED:
                return ev.ReturnOffset(offset=self._start)
            case RunState.PLANNED | RunState.READING:
                assert self.plan is not None
                return ev.ReturnOffset(offset=self.plan)
            case RunState.FAILED:
                assert self._error is not None
                return ev.RaiseError(error=self._error)
            case RunState.TARGETING:
                return ev.ReadTarget()
            case RunState.STARTING:
                if (at_ms := self._list_again_at_ms) is not None and self._now_ms < at_ms:
                    return ev.Wait(until_ms=at_ms)
                is_listed = self._topics is not None and self._list_again_at_ms is None
                return ev.DescribeGroup() if is_listed else ev.ListTopics()
            case RunState.GATHERING:
                return self._gathering()
            case RunState.SETTLING:
                return self._settling()
            case RunState.PAUSING:
                return self._pausing()
            case RunState.FETCHING_ENDS:
                return self._fetching_ends()
            case RunState.DRAINING:
                return self._draining()
            case RunState.DRAINED:
                return self._wait(IDLE_PAUSES_MS[1]) or ev.ReturnOffset(offset=self._start)
            case RunState.ENDING:
                return self._ending()
            case RunState.STOPPING:
                return self._stopping()
            case _:
                assert_never(self.state)

    def _gathering(self) -> ev.Step | None:
        """Wait until the slots have their partitions, and each partition has its position."""
        if self.placement.has_agents and (wait := self._move_slots()) is not None:
            return wait
        has_enough = self.is_gathered if self._is_first or self._must_read_all else self._has_positions()
        if not has_enough:
            return self._wait_for_the_group(self._since_ms)
        since_ms = self.slots.unassigned_since_ms
        if since_ms is not None and self._now_ms - self._waits_from_ms(since_ms) >= self.rules.joining_budget_ms:
            # Each call would end soon, with nothing to read, for ever. The time before this call is no reason to fail:
            # brokers may have been down while a batch was read, or between two triggers, and no request has met that.
            return self._wait_for_the_group(self._since_ms)
        # A resumed run waits for all partitions at first: "nothing to read" must not mean "nothing assigned".
        late = self._is_resumed and not self.is_gathered
        if late and (wait := self._wait(SETTLE_MS_MAX)) is not None:
            return wait
        self._is_resumed = False
        self._assignment.take(None)
        self._move(Cause.POSITIONS_KNOWN)
        return None

    def _move_slots(self) -> ev.Wait | None:
        """Between two batches, slots move to where they should be placed; the plan waits for them a bounded time."""
        self._start_moves()
        until_ms = self.placement.waits_until_ms()
        return None if until_ms is None or until_ms <= self._now_ms else ev.Wait(until_ms=until_ms)

    def _start_moves(self) -> None:
        """Start the moves of slots that are due. Only between two batches: the last one is durable, and the next one is
        not planned."""
        _require(self.plan is None and not self.closed, "slots move while a batch is in flight, or after the close")
        self.placement.start_moves()

    def _waits_from_ms(self, since_ms: int) -> int:
        """Return when a wait for the group begins to count: an outage does not. That of a lookup may last longer than
        that of the call."""
        return self._now_ms if self.outage.is_unanswered(Requester.LOOKUP) else max(since_ms, self.outage.ended_ms)

    def _wait_for_the_group(self, since_ms: int) -> ev.Step | None:
        """Wait for assignments and positions, with a warning after a while and an error after the joining budget."""
        step = self._assignment.next_step(self._waits_from_ms(since_ms))
        if isinstance(step, GroupError):
            self._fail(step)
            return None
        return step

    def _settling(self) -> ev.Step | None:
        """Check at the broker that this run has all partitions that the group assigns to it: only then can "nothing to
        read" be trusted."""
        if not (self._is_first or self._must_read_all):
            self._move(Cause.GROUP_STABLE)
            return None
        if (step := self._assignment.compare(self.stream, is_gathered=self.is_gathered)) is not None:
            return step
        self._rebalances_at_comparison = self.counts.rebalances
        if self._assignment.is_settled or not self._is_first or self._now_ms - self._since_ms >= SETTLE_MS_MAX:
            self._move(Cause.GROUP_STABLE)
        return None

    def _pausing(self) -> ev.Step | None:
        """Pause an idle query between two reads of the log ends; every call of Spark reads them at least once."""
        shortest, longest = IDLE_PAUSES_MS
        pause_ms = min(max(int(self.data_loss.took_ms / IDLE_LOAD_MAX), shortest), longest)
        may_pause = self._is_idle and self.counts.rebalances == self._rebalances_at_read
        if may_pause and self._now_ms < self._ends_read_at_ms + pause_ms:
            return ev.Wait(until_ms=self._ends_read_at_ms + pause_ms)
        self._move(Cause.PAUSE_ENDED)
        self._ends_request = self._first_ends_request()
        return None

    def _what_counts(self, event: ev.CommittedOffsetsRead) -> ev.CommittedOffsetsRead:
        """Return what counts of an answer: the group has no offset where the committed one is of a deleted topic, and
        where that is not known yet, the lookup is repeated."""
        former, unclear = self.data_loss.compare_ids(event, self._now_ms)
        if not former and not unclear:
            return event
        if former:
            self._out.log(
                f"{len(former)} committed offsets, such as that of {min(former)}, are of a topic that was deleted and "
                "recreated; they do not count in the new topic",
                warn=True,
            )
            self.lookups.see_recreated({tp.topic for tp in former})
        counted = {tp: None if tp in former else at for tp, at in event.offsets.items() if tp not in unclear}
        return replace(event, offsets=counted)

    def _first_ends_request(self) -> ev.ReadLogEnds:
        return self.data_loss.begin(self.plannable(), self._now_ms)

    def _fetching_ends(self) -> ev.Step | None:
        """Read the log ends, request by request, then plan the next batch."""
        if self._ends_request is not None:
            return self._ends_request
        self._ends_read_at_ms, self._rebalances_at_read = self._now_ms, self.counts.rebalances
        for text in self.data_loss.warnings:
            self._out.log(text, warn=True)
        if self.data_loss.error is not None:
            self._fail(self.data_loss.error)
            return None
        self.partitions.forget(self.data_loss.missing_topics)
        self.data_loss.settle(self.partitions.plannable())
        if self.data_loss.records_missing is not None:
            self._apply(self.data_loss.records_missing)
        if self._is_single_batch and not self._knows_all:
            self._read_again()  # what this batch does not read would be left to the next run
        else:
            self._plan_batch()
        return None

    def _plan_batch(self) -> None:
        """Plan the next batch up to the log ends that were read."""
        planned = self.planner.plan(
            self.plannable(),
            self.data_loss.ends,
            self.data_loss.topic_ids,
            self.data_loss.leader_epochs,
            stream=self.stream,
            partitions=self.partitions,
            lookups=self.lookups,
            first=self._is_first,
            unlimited=self._is_unlimited,
            now_ms=self._now_ms,
        )
        self._is_idle = planned is None
        if planned is not None:
            positions = {**planned.uncommitted, **planned.positions()}
            planned = replace(planned, read_to=self._known_epochs.read_to(positions))
            self._unsettled_since_ms = None
            self._known_epochs.remember(planned)
            self._apply(ev.Planned(offset=planned))
        else:
            self._nothing_to_read()

    def _nothing_to_read(self) -> None:
        """Decide what follows from an empty read: a bounded run may end only if it trusts that read."""
        if not self._must_read_all:
            self._move(Cause.NOTHING_TO_READ)
        elif self._knows_all:
            self._move(Cause.TARGET_REACHED if self.planner.target is not None else Cause.NOTHING_TO_READ)
        else:
            self._read_again()

    @property
    def _knows_all(self) -> bool:
        """Whether the last read has the log end of every partition that the group assigns to this run, but for those
        that have had no leader for long: they are left to the next run, and the log names them."""
        wait_ms = min(LEADER_MS_MAX, self.rules.joining_budget_ms // 2)
        since_ms = self._unsettled_since_ms
        if since_ms is not None and self._now_ms - self._waits_from_ms(since_ms) >= wait_ms:
            wait_ms = POSITION_MS_MAX  # the leaders of several partitions may be lost one after the other
        is_complete = self._has_positions(wait_ms) and self.data_loss.is_complete(wait_ms)
        is_settled = self._assignment.is_settled and self.counts.rebalances == self._rebalances_at_comparison
        return is_settled and is_complete and not self.data_loss.has_suspicions

    def _read_again(self) -> None:
        """Wait for a stable assignment and read the log ends again; the run fails after the joining budget, or after
        UNSETTLED_MS_MIN if that is longer."""
        if self._unsettled_since_ms is None:
            self._unsettled_since_ms = self._now_ms
        waited_ms = self._now_ms - self._waits_from_ms(self._unsettled_since_ms)
        if waited_ms >= max(self.rules.joining_budget_ms, UNSETTLED_MS_MIN):
            self._fail(self._assignment.timeout("reached a stable assignment", waited_ms))
            return
        self._recall_slots()
        self._move(Cause.GROUP_UNSTABLE)

    def _recall_slots(self) -> None:
        """Start the moves of slots whose offsets cannot be committed on their agents: they have to return."""
        if self.placement.has_agents and not self.placement.transactional:
            self._start_moves()

    def _draining(self) -> ev.Step | None:
        """Plan no more batches; wait until all durable offsets are committed."""
        if self._may_drain:
            self._move(Cause.ALL_COMMITTED)
            return None
        self._recall_slots()
        if (wait := self._wait(COMMIT_MS_MAX)) is not None:
            return wait
        self._warn_uncommitted()
        return ev.ReturnOffset(offset=self._start)

    def _ending(self) -> ev.Step | None:
        """A bounded run is done: wait until its offsets are committed, then let the members leave the group."""
        if not self.all_committed or self._may_get_back:
            self._recall_slots()
            if (wait := self._wait(COMMIT_MS_MAX)) is not None:
                return wait
            self._warn_uncommitted()
        if self.rules.leave_on_stop == "never":
            self._move(Cause.ALL_COMMITTED)
            return None
        return ev.CloseMembers(leave=True)

    def _stop_requested(self) -> None:
        if self.state is RunState.STOPPING:
            return
        if self.plan is not None and self._is_single_batch:
            self._out.log(
                "Spark stops the query after its only batch, and the sink does not report it as durable; its offsets "
                "are committed at the next start"
            )
        if self._may_end:
            self._warn_of_rest()
        self._move(ev.StopRequested)

    def _warn_of_rest(self) -> None:
        """Log what the run left, if it ends after its first batch: Spark may have ended it as AvailableNow."""
        if isinstance(self._first_call, ev.BatchStarted):
            self._out.log(
                f"the query stops after batch {self._first_call.offset.seq} of an earlier run; if its trigger is "
                "availableNow, run it again to read the rest",
                warn=True,
            )
        elif self.planner.left:
            self._out.log(
                "the query stops after one batch, which maxOffsetsPerTrigger or maxBytesPerTrigger bounded; "
                f"{self.planner.left} offsets are left. If its trigger is availableNow, set the source's option "
                "trigger to availableNow, because this Spark runs only one batch",
                warn=True,
            )

    def _stopping(self) -> ev.Step | None:
        """The run is stopped: wait a short time until its offsets are committed, then close the members."""
        if self._error is None and not self.all_committed and (wait := self._wait(STOP_COMMIT_MS_MAX)) is not None:
            return wait
        rule = self.rules.leave_on_stop
        return ev.CloseMembers(leave=rule == "always" or (rule == "auto" and self._is_bounded))

    def _warn_uncommitted(self) -> None:
        seconds = COMMIT_MS_MAX // 1000
        self._out.log(f"offsets were not committed within {seconds} s; the next start commits them", warn=True)

    # --- helpers ----------------------------------------------------------------------------------------------------

    @property
    def _now_ms(self) -> int:
        return self._out.now_ms

    @property
    def _is_first(self) -> bool:
        """Whether the next batch is the first of the stream."""
        return self._start.is_initial

    @property
    def _is_bounded(self) -> bool:
        """Whether this run ends by itself: trigger AvailableNow or Once."""
        return self._is_unlimited or self.planner.target is not None

    @property
    def _is_single_batch(self) -> bool:
        """Whether Spark ends the run after the next batch, or the batch in flight, or may do so, without a call."""
        return self._is_unlimited or self._may_end

    def _has_positions(self, wait_ms: int = POSITION_MS_MAX) -> bool:
        """Whether the position of every partition is known, apart from those that answers have left out for so long."""
        return self.partitions.all_known(self.lookups.late(wait_ms))

    @property
    def _must_read_all(self) -> bool:
        """Whether the run may end after the next batch, or without one: it must not miss a partition."""
        return self._is_bounded or self._may_end

    def _wait(self, at_most_ms: int) -> ev.Wait | None:
        """Wait in this state, but not longer than ``at_most_ms`` in total; None when that time is over."""
        until_ms = self._since_ms + at_most_ms
        return ev.Wait(until_ms=until_ms) if self._now_ms < until_ms else None

    def _fail_invariant(self, error: InvariantBroken) -> None:
        """Fail the run with a broken invariant, which is a bug; the error contains the last events."""
        self._fail(InvariantBroken(f"{error}. The last events:\n{self._out.history()}"))

    def _fail(self, error: SourceError | None) -> None:
        """Fail the run with an error, if there is one. Its members close at once: the batch in flight may take long,
        and a held revocation would block the group's rebalance until it ends."""
        if error is None:
            return
        if not self.closed:
            self.slots.close(leave=self.rules.leave_on_stop == "always")
            self.closed = True
            self._out.order(ev.Fail(error=error))
        if self._error is None and self.state is not RunState.CLOSED:
            self._error = error
            self._move(ev.Fail)

    def _move(self, cause: AnyCause) -> None:
        to = next_state(RUN, self.state, cause, "the run")
        if to is not self.state or cause is ev.NextBatchRequested:
            self._since_ms = self._now_ms
        self.state = to


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvariantBroken(otherwise)
