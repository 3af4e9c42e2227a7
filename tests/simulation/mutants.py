"""Group machines with one rule broken each: the simulation must notice every one of them."""

from collections.abc import Mapping

from spark_group_source.group import events as ev
from spark_group_source.group.machine import GroupMachine, _Slot
from spark_group_source.model import TopicPartition


class NoHold(GroupMachine):
    """Revocations go at once, in the middle of a batch."""

    def _must_wait(self, tp: TopicPartition) -> bool:
        return False


class NoEchoBeforeRelease(GroupMachine):
    """Revocations go when the batch is durable, before Kafka shows its offsets."""

    def _must_wait(self, tp: TopicPartition) -> bool:
        return self._held[tp].planned is not None


class CommitsWhatIsLost(GroupMachine):
    """What was taken away without asking is committed all the same."""

    def _lost(self, slot: _Slot, partitions: tuple[TopicPartition, ...], why: str) -> None:
        ends = {tp: self._held[tp].planned or (0, self._held[tp].position) for tp in partitions if tp in slot.held}
        super()._lost(slot, partitions, why)
        if offsets := {tp: end for tp, (_, end) in ends.items() if end is not None}:
            self._out.append(ev.Echo(offsets=offsets, stream=self.stream, seq=self.seq))


class StartsFromTheCommitted(GroupMachine):
    """Ranges start where Kafka says, not where the last one ended."""

    def _committed_read(self, offsets: Mapping[TopicPartition, ev.Committed | None]) -> None:
        self._memory.clear()
        super()._committed_read(offsets)


class ReadsBeforeTaking(GroupMachine):
    """What others committed is read before it is committed under our name."""

    def _committed_read(self, offsets: Mapping[TopicPartition, ev.Committed | None]) -> None:
        super()._committed_read(offsets)
        for tp in offsets.keys() & self._held.keys():
            self._held[tp].taken = True
            self._dirty -= {tp} if self._held[tp].position == self._held[tp].committed else set()


class OwesNothing(GroupMachine):
    """Offsets carry only what is held."""

    def owed(self) -> dict[TopicPartition, int]:
        return {}


class LetsTheUnknownGo(GroupMachine):
    """A partition without a position yet may always go."""

    def _must_wait(self, tp: TopicPartition) -> bool:
        return self._held[tp].position is not None and super()._must_wait(tp)


class CountsOnlyTheBatch(GroupMachine):
    """Rows that Kafka does not know yet are not counted when their partition is lost."""

    def _unconfirmed(self, tp: TopicPartition) -> int:
        planned = self._held[tp].planned
        return planned[1] - planned[0] if planned else 0


class NeverOverruns(GroupMachine):
    """A hold has no end."""

    def _tick(self) -> None:
        self._hold_budget_ms = 10**9
        super()._tick()


class ForgetsAFailedEcho(GroupMachine):
    """A commit that failed is not made again."""

    def _echo_failed(self, event: ev.EchoFailed) -> None:
        super()._echo_failed(event)
        self._dirty.clear()
