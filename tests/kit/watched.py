"""The shipped run of the protocol, looked at after each event: its own rules, and what it decides.

Runs in: tests. Deliberately absent: any decision. It takes the place of ``Machine`` in the shipped coordinator and
hands everything through.
"""

from kit.books import Reader
from kit.invariants import Invariants, Violation
from kit.world import Process
from spark_group_source.errors import InvariantBroken
from spark_group_source.group import events as ev
from spark_group_source.group.machine import Machine
from spark_group_source.group.outbox import brief
from spark_group_source.group.rules import Rules

NO_THREAD = "can't start new thread"
"""What Python says where the machine has no more of them: nobody broke a rule."""


class WatchedRun(Machine):
    """A run that breaks the history when it breaks a rule.

    Args:
        process, reader: whose run it is.
        truth: is told of what the run decides.
    """

    def __init__(self, rules: Rules, process: Process, reader: Reader, truth: Invariants) -> None:
        super().__init__(rules)
        self._process, self._reader, self._truth = process, reader, truth
        self._planned_seq = -1

    def longest_hold_ms(self, now_ms: int) -> int:
        """How long a revocation is held by now."""
        return max((now_ms - slot.hold_since_ms for slot in self.slots._holds()), default=0)

    def handle(self, event: ev.Event, *, now_ms: int) -> list[ev.Command]:
        tick = isinstance(event, ev.Tick)
        self._reader.closing |= isinstance(event, ev.Closing)
        if isinstance(event, ev.Lost):
            self._truth.hears(self._reader, event.partitions)
        lending = self.lending
        before, overruns = (set(self.positions.ours), self.counts.overruns) if tick or lending.any else (set(), 0)
        recalls = self.counts.recalls
        commands = super().handle(event, now_ms=now_ms)
        if self.counts.recalls > recalls:
            self._truth.host_lost(self._reader, sorted(before - self.positions.ours.keys()))
        if commands or not tick:
            self._process.world.note(lambda: f"{self._process.name} {_told(event, commands)}")
        if tick and self.counts.overruns > overruns:
            for tp in sorted(before - self.positions.ours.keys()):
                self._truth.overran(tp, self._reader)
        self._inspect(commands)
        return commands

    def proceed(self, *, now_ms: int) -> tuple[ev.Step, list[ev.Command]]:
        step, commands = super().proceed(now_ms=now_ms)
        if not isinstance(step, ev.Wait):
            self._process.world.note(lambda: f"{self._process.name} {_told(step, commands)}")
        plan = self.plan
        if plan is not None and plan.seq != self._planned_seq and isinstance(step, ev.Answer):
            self._planned_seq = plan.seq
            self._truth.intends(self._reader, plan.ranges)
        self._inspect(commands)
        return step, commands

    def _inspect(self, commands: list[ev.Command]) -> None:
        if self.stream and self._reader.known is not self.lookups.known:
            self._reader.party, self._reader.known = self.stream, self.lookups.known
        self._reader.closing |= self.closed  # nothing is counted any more
        try:
            self.check()
        except InvariantBroken as exc:
            self._break(str(exc))
        for command in commands:
            broken = isinstance(command, ev.Fail) and isinstance(command.error, InvariantBroken)
            if isinstance(command, ev.Fail) and broken and NO_THREAD not in str(command.error):
                self._break(str(command.error))
            if isinstance(command, ev.Echo) and not self.closed:
                for tp in command.offsets.keys() - self.positions.ours.keys():
                    self._break(f"commits {tp}, which it was told is another member's")

    def _break(self, rule: str) -> None:
        self._process.world.note(f"VIOLATION: {self._process.name}: {rule}")
        self._process.world.fail(Violation(f"{self._process.name}: {rule}"))


def _told(event: ev.Event | ev.Step, commands: list[ev.Command]) -> str:
    return brief(event) + "".join(f"\n{'':>14}-> {brief(command)}" for command in commands)
