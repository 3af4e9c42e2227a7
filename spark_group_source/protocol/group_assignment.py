"""What Spark's calls know of the group's assignment: whether all members have one, and whether the broker's description
of the group shows the same.

Runs in: the stream reader (inside ``run``), tests. Deliberately absent: when a description is needed, and what follows
from it.
"""

from spark_group_source import command_line
from spark_group_source.errors import CommitFailed, GroupError, RebalanceTimeout
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.protocol.outbox import Outbox
from spark_group_source.protocol.partitions import Partitions
from spark_group_source.protocol.request_schedule import CommitSchedule
from spark_group_source.protocol.rules import Rules
from spark_group_source.protocol.slots import Slots

ASSIGNMENT_WARNING_MS = 10_000
"""How long an assignment may take before a warning explains the possible reasons."""
DESCRIBE_EVERY_MS, DESCRIBED_MIN = 10_000, 10
"""How often a call that waits describes the group: at least so many times until it fails."""
DESCRIBE_PAUSE_MS = 100
"""The shortest time between two descriptions of the group by one call."""


class GroupAssignment:
    """Compares the assignments of this run's members with the broker's description of the group."""

    def __init__(
        self, rules: Rules, slots: Slots, partitions: Partitions, commits: CommitSchedule, out: Outbox
    ) -> None:
        self._rules, self._slots, self._partitions, self._commits, self._out = rules, slots, partitions, commits, out
        self.is_settled = False
        """Whether the last comparison showed exactly the assignment that this run has."""
        self._described: ev.GroupDescribed | None = None
        """The last description of the group, until it is used."""
        self._describe_at_ms = 0
        """The earliest time of the next description."""
        self._described_ms = 0
        """The time of the last description."""
        self._held_elsewhere: list[TopicPartition] = []
        """Partitions that members with this stream's client ids have and this run does not."""
        self._has_warned = False
        """Whether the warning about a missing assignment was logged."""

    def take(self, described: ev.GroupDescribed | None) -> None:
        """Keep a description until it is used; None drops the last one."""
        self._described = described
        if described is not None:
            self._described_ms = self._out.now_ms

    def next_step(self, since_ms: int) -> ev.Step | GroupError:
        """Wait for assignments and positions since ``since_ms``, with a warning after a while; the error follows after
        the joining budget. Meanwhile the group is described again and again: an outage that only members see would
        count as time to join, but a request fails in it, and the outage has its own limit. And a user without
        permission on the group is refused; the library tells a member so once only."""
        budget_ms, now_ms = self._rules.joining_budget_ms, self._out.now_ms
        waited_ms = now_ms - since_ms
        due_ms = max(since_ms, self._described_ms) + min(DESCRIBE_EVERY_MS, budget_ms // DESCRIBED_MIN)
        warn_after_ms = min(ASSIGNMENT_WARNING_MS, budget_ms)
        must_warn = not self._has_warned and waited_ms >= warn_after_ms
        if (now_ms >= due_ms or must_warn or waited_ms >= budget_ms) and self._described is None:
            return ev.DescribeGroup()
        if waited_ms >= budget_ms:
            return self.timeout("assigned partitions", waited_ms)
        self._described = None
        if must_warn:
            self._has_warned = True
            self._out.log(
                f"{self._uncommitted()}; waiting up to {budget_ms / 1000:.0f} s"
                if self._waits_for_commit
                else f"not all {len(self._slots.all)} members of this query have an assignment after "
                f"{waited_ms / 1000:.0f} s; waiting up to {budget_ms / 1000:.0f} s. Another member of the group may be "
                "in a long batch. If the query loads this group twice, the two loads wait for each other: give each "
                "load() its own group",
                warn=True,
            )
        return ev.Wait(until_ms=min(due_ms, since_ms + (budget_ms if self._has_warned else warn_after_ms)))

    def compare(self, stream: str, *, is_gathered: bool) -> ev.Step | None:
        """Set ``is_settled`` from a new description of the group; returns the step that requests it, None when done.

        The members alone do not show it: an assignment may still be on its way (KIP-848 assigns partitions one by one),
        and members that a killed run of this stream left in the group may still have some until their session ends.

        Args:
            stream: the stream id, which the client ids of its members contain.
            is_gathered: whether all members of this run have an assignment, and its partitions their positions.
        """
        if self._described is None:
            early = self._out.now_ms < self._describe_at_ms
            return ev.Wait(until_ms=self._describe_at_ms) if early else ev.DescribeGroup()
        self.is_settled = self._is_the_same(stream, self._described) and is_gathered
        self._described = None
        self._describe_at_ms = self._out.now_ms + DESCRIBE_PAUSE_MS
        return None

    def _is_the_same(self, stream: str, described: ev.GroupDescribed) -> bool:
        """Whether the group is stable and assigns to this stream's members exactly the partitions that this run has."""
        if not self._slots.has_topics:
            return True
        slots = {slot.number for slot in self._slots.all if not slot.is_refused}
        held = self._partitions.ours.keys()
        found = {id_: identifiers.slot_of(stream, id_) for id_ in described.assigned}
        members = {id_: slot for id_, slot in found.items() if slot is not None}
        given = {tp for client_id in members for tp in described.assigned[client_id]}
        self._held_elsewhere = sorted(given - held)
        return described.state == "stable" and slots <= set(members.values()) and given == held

    @property
    def _waits_for_commit(self) -> bool:
        """Whether all members have an assignment, and only the commit of new positions is missing."""
        return self._slots.all_assigned and self._partitions.any_adopting

    def _uncommitted(self) -> str:
        return (
            "the positions of some partitions are not committed by this query yet, which it has to do before it reads "
            f"them (the last answer: {self._commits.last_failure or 'none'})"
        )

    def timeout(self, done: str, waited_ms: int) -> GroupError:
        """The error of a run that has waited too long; ``done``: what the group has not done, as a past participle."""
        rules, elsewhere = self._rules, self._held_elsewhere
        if self._waits_for_commit:
            # Without an answer, finding the positions took the time.
            error = CommitFailed if self._commits.last_failure else RebalanceTimeout
            return error(
                f"group {rules.group!r}: {self._uncommitted()}. The query has waited for {waited_ms / 1000:.0f} s and "
                "cannot continue. Correct what the answer names, then restart the query",
                group=rules.group,
                waited_ms=waited_ms,
            )
        states = ", ".join(sorted({slot.state.kind.value for slot in self._slots.all}))
        other_driver = (
            f"Members with this stream's client ids that do not belong to this run have {len(elsewhere)} "
            f"partitions, such as {elsewhere[0]}: another driver of this stream may still run. "
            if elsewhere
            else ""
        )
        too_large = self._slots.too_large()
        describe = command_line.spark_group("describe", rules.connection, rules.group, "--members")
        return RebalanceTimeout(
            f"group {rules.group!r} has not {done} within {waited_ms / 1000:.0f} s for all "
            f"{len(self._slots.all)} members of this query (slot states: {states}), so the query cannot continue. "
            f"{other_driver}{too_large and too_large + ' '}"
            f"To see the members of the group: {command_line.in_sentence(describe)}. "
            f"The last events:\n{self._out.history()}",
            group=rules.group,
            waited_ms=waited_ms,
        )
