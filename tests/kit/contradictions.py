"""Contradictions between the parts of a run.

Runs in: tests. Deliberately absent: the rules of a consumer group (``invariants``).
"""

from spark_group_source.errors import InvariantBroken
from spark_group_source.protocol.partitions import Known, Partitions, state_of
from spark_group_source.protocol.run import Run
from spark_group_source.protocol.slots import AssignedState, ClosedState, RevokingState, Slots
from spark_group_source.protocol.states import PartitionState


def require_consistent(run: Run) -> None:
    """Visit every slot and partition of a run.

    Raises:
        InvariantBroken: two of them contradict each other.
    """
    if wrong := contradiction(run):
        raise InvariantBroken(wrong)


def contradiction(run: Run) -> str | None:
    """The first contradiction, or None."""
    if not run.closed:
        return _of_slots(run.slots, run.partitions) or _of_partitions(run.partitions)
    all_closed = all(isinstance(slot.state, ClosedState) for slot in run.slots.all)
    return None if all_closed else "a closed run still has a member"  # events are ignored: the rest is out of date


def _of_slots(slots: Slots, partitions: Partitions) -> str | None:
    for slot in slots.all:
        revoking = slot.state if isinstance(slot.state, RevokingState) else None
        if revoking is not slots._held.get(slot.number):
            return f"slot {slot.number} holds another revocation, and is {slot.state.kind.value}"
        if revoking is not None and not revoking.partitions <= slot.partitions:
            return f"slot {slot.number} releases partitions that it does not have"
    if sum(len(slot.partitions) for slot in slots.all) != len(partitions.ours):
        return "a partition has two slots or none"
    for tp, partition in partitions.ours.items():
        if tp not in slots.all[partition.slot].partitions:
            return f"{tp} names another slot than the one that has it"
    assigned = sum(isinstance(slot.state, AssignedState) for slot in slots.all)
    return None if assigned == slots._assigned_count else "the assigned slots are miscounted"


def _of_partitions(partitions: Partitions) -> str | None:
    unknown = adopting = 0
    for tp, partition in partitions.ours.items():
        if tp in partitions._unassigned:
            return f"{tp} is assigned and unassigned"
        state = state_of(partition)
        if (state is PartitionState.UNRESOLVED) != (tp in partitions._unresolved):
            return f"{tp} has no position, and no lookup is planned"
        known = partition if isinstance(partition, Known) else None
        if (known is not None and known.is_due) != (tp in partitions.due):
            return f"the position of {tp} has to be committed, and no commit is planned"
        if known is not None and known.until is not None and not known.position.offset < known.until:
            return f"the range of {tp} does not start at its position"
        unknown += known is None
        adopting += state is PartitionState.ADOPTING
    if partitions._unknown_count != unknown:
        return "the partitions without a position are miscounted"
    if partitions._adopting_count != adopting:
        return "the partitions with foreign commits are miscounted"
    return None
