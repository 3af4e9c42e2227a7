"""What a call of Spark waits for and does, state by state: the steps of a run.

Runs in: the stream reader (inside ``run``), tests. Deliberately absent: what events do to a run (``run``), clock,
threads, Kafka, Spark; the slots and positions (``machine``), the ranges of a batch (``plan``), lost data (``loss``).
"""

from typing import assert_never

from spark_group_source.errors import InvariantBroken, RebalanceTimeout, SourceError
from spark_group_source.group import events as ev
from spark_group_source.group import names
from spark_group_source.group.loss import Lookout
from spark_group_source.group.machine import GroupMachine
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.group.outage import Asker, Outage
from spark_group_source.group.plan import Planner
from spark_group_source.group.positions import NotInTable
from spark_group_source.group.reading import Reading
from spark_group_source.group.rules import Rules
from spark_group_source.group.states import RUN, RunState
from spark_group_source.model import TopicPartition

SETTLE_MS_MAX = 10_000
"""How long the first batch of a run waits for a rebalance that is going on; then it takes what it has."""
PATIENCE_MS = 10_000
"""How long an assignment may take before the log says why that can be."""
SIBLINGS_EVERY_MS = 3_000
"""How often to look whether another stream of this very query waits for this one. It does if it is seen twice; once it
may be the reader of a query that was just stopped."""
ECHO_MS_MAX = 60_000
"""How long a run that ends or drains waits for its offsets to be committed."""
STOP_ECHO_MS_MAX = 4_000
"""The same for a run that is stopped: Spark ends its process after some seconds."""
IDLE_LOAD_MAX = 0.04
"""Share of the time that an idle query may spend asking for new records; it sets the pause between two questions."""
IDLE_PAUSES_MS = (100, 1_000)
"""Shortest and longest of these pauses: the latency of a new record, and the cost of many partitions."""


class Steps:
    """One run, as the thread of Spark's call meets it.

    Args:
        rules: what the options say.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.state = RunState.NEW
        self.machine = GroupMachine(rules)
        self.planner = Planner(rules)
        self.outage = Outage()
        self.reading = Reading()
        self.lookout = Lookout(fail_on_data_loss=rules.fail_on_data_loss)
        self._first: ev.Asked | ev.Reading | None = None  # the call that began it
        self._topics: dict[str, int] | None = None  # those that there are, once they are listed
        self._start = StreamOffset.initial(rules.group)
        self._unlimited = self._returning = self._drain = False
        self._since_ms = 0  # in this state
        self._unsettled_since_ms: int | None = None
        self._told_waiting = False
        self._looked_around_ms = -1
        self._sibling: int | None = None
        self._seen: ev.GroupSeen | None = None
        self._describe_at_ms = 0
        self._settled = False
        self._elsewhere: list[TopicPartition] = []  # with members of this stream's names that this run does not have
        self._look: ev.Look | None = None
        self._idle = False
        self._asked_at_ms = 0
        self._rest_rebalances = 0
        self._error: SourceError | None = None
        self._out: list[ev.Command] = []
        self._now_ms = 0

    def proceed(self, *, now_ms: int) -> tuple[ev.Step, list[ev.Command]]:
        """What the thread of Spark's call does next, and the commands that come with it."""
        self._now_ms, self._out = now_ms, []
        step: ev.Step | None = None
        while step is None:
            try:
                step = self._next()
            except (InvariantBroken, NotInTable) as exc:
                self._fail(exc)
        again_at_ms = self.outage.again_at_ms(Asker.CALL)
        if isinstance(step, ev.Question) and now_ms < again_at_ms:
            step = ev.Wait(until_ms=again_at_ms)
        return step, self._out

    # --- steps ------------------------------------------------------------------------------------------------------

    def _next(self) -> ev.Step | None:
        match self.state:
            case RunState.NEW | RunState.OPEN | RunState.CLOSED:
                return ev.Answer(offset=self._start)
            case RunState.PLANNED | RunState.READING:
                assert self.machine.plan is not None
                return ev.Answer(offset=self.machine.plan)
            case RunState.FAILED:
                assert self._error is not None
                return ev.Raise(error=self._error)
            case RunState.AIMING:
                return ev.TakeTarget()
            case RunState.STARTING:
                return ev.ListTopics() if self._topics is None else ev.Describe()
            case RunState.GATHERING:
                return self._gathering()
            case RunState.SETTLING:
                return self._settling()
            case RunState.RESTING:
                return self._resting()
            case RunState.LOOKING:
                return self._looking()
            case RunState.DRAINING:
                return self._draining()
            case RunState.DRAINED:
                return self._wait(IDLE_PAUSES_MS[1]) or ev.Answer(offset=self._start)
            case RunState.ENDING:
                return self._ending()
            case RunState.STOPPING:
                return self._closing()
            case _:
                assert_never(self.state)

    def _gathering(self) -> ev.Step | None:
        if self._drain:
            self._move(ev.DrainAsked)
            return None
        if self.machine.lending.any and (wait := self._lend()) is not None:
            return wait
        enough = self.machine.gathered if self._is_first or self._bounded else self.machine.positions.resolved
        if not enough:
            return self._wait_for_the_group()
        # "nothing to read" must not mean "nothing assigned yet"; after a while it may
        late = self._returning and not self.machine.gathered
        if late and (wait := self._wait(SETTLE_MS_MAX)) is not None:
            return wait
        self._returning, self._seen = False, None
        self._move(ev.Gathered)
        return None

    def _lend(self) -> ev.Wait | None:
        """Before the next batch is planned slots go where they belong; the plan waits for them, but not for long."""
        self._machine(ev.Boundary())
        until_ms = self.machine.lending.waits_until_ms()
        return None if until_ms is None or until_ms <= self._now_ms else ev.Wait(until_ms=until_ms)

    def _wait_for_the_group(self) -> ev.Step | None:
        budget_ms = self.rules.joining_budget_ms
        since_ms = max(self._since_ms, self.outage.ended_ms)
        waited_ms = self._now_ms - since_ms
        if waited_ms >= budget_ms and self._seen is None:
            return ev.Describe()  # the group is silent; or nobody reaches it, and an outage has a bound of its own
        if waited_ms >= budget_ms:
            self._fail(self._timeout("given an assignment", waited_ms))
            return None
        self._seen = None
        patience_ms = min(PATIENCE_MS, budget_ms)
        if waited_ms >= patience_ms and not self._told_waiting:
            self._told_waiting = True
            self._say(
                f"group {self.rules.group} has not given an assignment to all {self.machine.slot_count} members after "
                f"{waited_ms / 1000:.0f} s; waiting up to {budget_ms / 1000:.0f} s. Another member may be in "
                "a long batch. A query that has two loads of this group, as a self-join of one load() has, waits for "
                "itself: give each side a load() with a group of its own",
                warn=True,
            )
        if self._now_ms - max(self._looked_around_ms, self._since_ms) >= SIBLINGS_EVERY_MS:
            self._looked_around_ms = self._now_ms
            return ev.LookForSiblings()
        at_ms = [since_ms + budget_ms, max(self._looked_around_ms, self._since_ms) + SIBLINGS_EVERY_MS]
        at_ms += [] if self._told_waiting else [since_ms + patience_ms]
        return ev.Wait(until_ms=min(at_ms))

    def _settling(self) -> ev.Step | None:
        """Whether we have all that the group means to give us now, so that "nothing to read" can be believed.

        The members alone cannot tell: an assignment may still be on its way (KIP-848 gives partitions one by one), and
        members of a killed run of this stream may still have some, which will be ours when their session ends.
        """
        if not (self._is_first or self._bounded):
            self._move(ev.Settled)
            return None
        if self._is_first and (step := self._look_around()) is not None:
            return step
        if self._seen is None:
            early = self._now_ms < self._describe_at_ms
            return ev.Wait(until_ms=self._describe_at_ms) if early else ev.Describe()
        self._settled, self._seen = self._is_settled(self._seen), None
        self._describe_at_ms = self._now_ms + IDLE_PAUSES_MS[0]
        if self._settled or not self._is_first or self._now_ms - self._since_ms >= SETTLE_MS_MAX:
            self._move(ev.Settled)
        return None

    def _look_around(self) -> ev.Step | None:
        """Where members keep their partitions through a rebalance, two streams of one query need not wait for each
        other: each would read a part of the records, and nobody would know."""
        never = self._looked_around_ms < self._since_ms
        again_at_ms = self._looked_around_ms + SIBLINGS_EVERY_MS
        if never or (self._sibling is not None and self._now_ms >= again_at_ms):
            self._looked_around_ms = self._now_ms
            return ev.LookForSiblings()
        return None if self._sibling is None else ev.Wait(until_ms=again_at_ms)

    def _is_settled(self, seen: ev.GroupSeen) -> bool:
        slots = set(range(self.machine.slot_count))
        ours = {client: slot for client in seen.given if (slot := names.slot_of(self.machine.stream, client)) in slots}
        given = {tp for client in ours for tp in seen.given[client]}
        self._elsewhere = sorted(given - self.machine.held())
        return (
            self.machine.gathered
            and seen.state == "stable"
            and slots == set(ours.values())
            and given == self.machine.held()
        )

    def _resting(self) -> ev.Step | None:
        """An idle query asks no more often than it can afford; new records are always looked for after the call."""
        shortest, longest = IDLE_PAUSES_MS
        pause_ms = min(max(int(self.lookout.took_ms / IDLE_LOAD_MAX), shortest), longest)
        rests = self._idle and self.machine.rebalances == self._rest_rebalances
        if rests and self._now_ms < self._asked_at_ms + pause_ms:
            return ev.Wait(until_ms=self._asked_at_ms + pause_ms)
        self._move(ev.Rested)
        self._look = self.lookout.begin(self.machine.plannable(), self._now_ms, self.machine.positions.epoch)
        return None

    def _looking(self) -> ev.Step | None:
        if self._look is not None:
            return self._look
        self._asked_at_ms, self._rest_rebalances = self._now_ms, self.machine.rebalances
        for text in self.lookout.warnings:
            self._say(text, warn=True)
        if self.lookout.error is not None:
            self._fail(self.lookout.error)
            return None
        if self.lookout.gone is not None:
            self._machine(self.lookout.gone)
        planned = self.planner.cut(
            self.machine,
            self.lookout.ends,
            self.lookout.topic_ids,
            self.lookout.leader_epochs,
            first=self._is_first,
            unlimited=self._unlimited,
            now_ms=self._now_ms,
        )
        self._idle = planned is None
        if planned is not None:
            self._unsettled_since_ms = None
            self.lookout.heights.remember(planned)
            self._machine(ev.Planned(offset=planned))
            self._move(ev.Planned)
        else:
            self._nothing()
        return None

    def _nothing(self) -> None:
        if not self._bounded:
            self._move(ev.NothingToRead)
        elif self._settled and self.lookout.complete and not self.lookout.suspects:
            self._move(ev.TargetReached if self.planner.bounded else ev.NothingToRead)
        else:
            if self._unsettled_since_ms is None:
                self._unsettled_since_ms = self._now_ms
            waited_ms = self._now_ms - self._unsettled_since_ms
            if waited_ms >= self.rules.joining_budget_ms:
                self._fail(self._timeout('come to rest, so that "nothing to read" could be believed,', waited_ms))
            else:
                self._move(ev.Unsettled)

    def _draining(self) -> ev.Step | None:
        """Plan nothing more: whoever asked for it learns when all that is durable is at Kafka."""
        if self.machine.echoed:
            self._move(ev.Echoed)
            return None
        if (wait := self._wait(ECHO_MS_MAX)) is not None:
            return wait
        self._not_echoed()
        return ev.Answer(offset=self._start)

    def _ending(self) -> ev.Step | None:
        if not self.machine.echoed:
            if (wait := self._wait(ECHO_MS_MAX)) is not None:
                return wait
            self._not_echoed()
        if self.rules.leave_on_stop == "never":
            self._move(ev.Echoed)
            return None
        return ev.End(leave=True)

    def _closing(self) -> ev.Step | None:
        if self._error is None and not self.machine.echoed and (wait := self._wait(STOP_ECHO_MS_MAX)) is not None:
            return wait
        rule = self.rules.leave_on_stop
        return ev.End(leave=rule == "always" or (rule == "auto" and self._bounded))

    def _not_echoed(self) -> None:
        seconds = ECHO_MS_MAX // 1000
        self._say(f"the group's offsets were not committed within {seconds} s; the next start does it", warn=True)

    # --- helpers ----------------------------------------------------------------------------------------------------

    @property
    def _is_first(self) -> bool:
        """Whether the next batch is the stream's first."""
        return self._start.is_initial

    @property
    def _bounded(self) -> bool:
        """Whether this run ends by itself: AvailableNow or Once."""
        return self._unlimited or self.planner.bounded

    def _wait(self, at_most_ms: int) -> ev.Wait | None:
        """Wait in this state, but not for longer than that in all."""
        until_ms = self._since_ms + at_most_ms
        return ev.Wait(until_ms=until_ms) if self._now_ms < until_ms else None

    def _timeout(self, done: str, waited_ms: int) -> RebalanceTimeout:
        slots = ", ".join(sorted(set(self.machine.statistics().slots)))
        others = (
            f"Members of this stream that are not this run's have {len(self._elsewhere)} partitions, such as "
            f"{self._elsewhere[0]}: another driver of it may still run. "
            if self._elsewhere
            else ""
        )
        return RebalanceTimeout(
            f"group {self.rules.group!r} has not {done} within {waited_ms / 1000:.0f} s, for all "
            f"{self.machine.slot_count} members of this query ({slots}). {others}`spark-group describe` shows who is "
            f"in the group. The last events:\n"
            f"{self.machine.story()}",
            group=self.rules.group,
            waited_ms=waited_ms,
        )

    def _fail(self, error: SourceError | NotInTable) -> None:
        """The run ends with this; a change that no table has is a broken rule, and carries the story."""
        if isinstance(error, NotInTable):
            error = InvariantBroken(f"{error}. The last events:\n{self.machine.story()}")
        self._machine(ev.Broken(error=error))

    def _machine(self, event: ev.MachineEvent) -> None:
        """Hand an event to the machine; ``Run`` does."""
        raise NotImplementedError

    def _move(self, cause: type) -> None:
        to = RUN.get((self.state, cause))
        if to is None:
            raise NotInTable(f"the run: {cause.__name__} in state {self.state.value}")
        if to is not self.state or cause is ev.Asked:
            self._since_ms = self._now_ms
        self.state = to

    def _say(self, text: str, *, warn: bool = False) -> None:
        self._out.append(ev.Say(text=text, warn=warn))
