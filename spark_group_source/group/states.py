"""The states of a run and of a slot, and every change of them that is allowed.

Runs in: the stream reader, tests. Deliberately absent: what is done on a change (``machine``). The two tables are the
whole of it: a change that is not in them raises :class:`InvariantBroken` with the story, and the README's tables are
rendered from them.
"""

from collections.abc import Mapping
from enum import Enum


class Phase(Enum):
    """Where the run stands between Spark's micro-batches."""

    NEW = "new"  # no stream named yet; no member joins
    OPEN = "open"  # between batches: revocations are released as soon as their offsets are committed
    PLANNED = "planned"  # a batch is in flight: revocations of its partitions are held
    CLOSED = "closed"  # the run is over; every event is ignored


class SlotState(Enum):
    """Where one member of ours stands."""

    OUT = "out"  # has no consumer
    JOINING = "joining"  # has a consumer and waits for an assignment
    ASSIGNED = "assigned"  # has an assignment, maybe an empty one
    REVOKING = "revoking"  # holds a revocation; heartbeats go on
    FENCED = "fenced"  # a newer process took the slot


PHASES: Mapping[tuple[Phase, str], Phase] = {
    (Phase.NEW, "Born"): Phase.OPEN,
    (Phase.NEW, "Durable"): Phase.OPEN,
    (Phase.NEW, "Replay"): Phase.PLANNED,
    (Phase.OPEN, "Planned"): Phase.PLANNED,
    (Phase.PLANNED, "Durable"): Phase.OPEN,
    (Phase.NEW, "Closing"): Phase.CLOSED,
    (Phase.OPEN, "Closing"): Phase.CLOSED,
    (Phase.PLANNED, "Closing"): Phase.CLOSED,
    (Phase.OPEN, "Fail"): Phase.CLOSED,
    (Phase.PLANNED, "Fail"): Phase.CLOSED,
}

SLOTS: Mapping[tuple[SlotState, str], SlotState] = {
    (SlotState.OUT, "Join"): SlotState.JOINING,
    (SlotState.JOINING, "Assigned"): SlotState.ASSIGNED,
    (SlotState.ASSIGNED, "Assigned"): SlotState.ASSIGNED,
    (SlotState.REVOKING, "Assigned"): SlotState.ASSIGNED,
    (SlotState.JOINING, "Revoking"): SlotState.REVOKING,
    (SlotState.ASSIGNED, "Revoking"): SlotState.REVOKING,
    (SlotState.REVOKING, "Revoking"): SlotState.REVOKING,
    (SlotState.REVOKING, "Release"): SlotState.ASSIGNED,
    (SlotState.REVOKING, "Release (eager)"): SlotState.JOINING,
    (SlotState.JOINING, "Lost"): SlotState.JOINING,
    (SlotState.ASSIGNED, "Lost"): SlotState.JOINING,
    (SlotState.REVOKING, "Lost"): SlotState.JOINING,
    (SlotState.JOINING, "MemberFailed"): SlotState.OUT,
    (SlotState.ASSIGNED, "MemberFailed"): SlotState.OUT,
    (SlotState.REVOKING, "MemberFailed"): SlotState.OUT,
    (SlotState.JOINING, "MemberFenced"): SlotState.FENCED,
    (SlotState.ASSIGNED, "MemberFenced"): SlotState.FENCED,
    (SlotState.REVOKING, "MemberFenced"): SlotState.FENCED,
    (SlotState.JOINING, "Leave"): SlotState.OUT,
    (SlotState.ASSIGNED, "Leave"): SlotState.OUT,
    (SlotState.REVOKING, "Leave"): SlotState.OUT,
}


def render_markdown() -> str:
    """The two tables as the README shows them: one row a state, what leads out of it and where."""
    lines = ["| run | leaves by |", "|---|---|"]
    for phase in Phase:
        exits = [f"{cause} → `{to.value}`" for (at, cause), to in PHASES.items() if at is phase]
        lines.append(f"| `{phase.value}` | {', '.join(exits) or 'nothing'} |")
    lines += ["", "| slot | leaves by |", "|---|---|"]
    for state in SlotState:
        exits = [f"{cause} → `{to.value}`" for (at, cause), to in SLOTS.items() if at is state]
        lines.append(f"| `{state.value}` | {', '.join(exits) or 'nothing'} |")
    return "\n".join(lines) + "\n"
