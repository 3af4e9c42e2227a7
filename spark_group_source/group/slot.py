"""What a run knows of one slot.

Runs in: the stream reader (inside ``slots``), tests. Deliberately absent: what changes it (``slots``, ``lending``).
"""

from dataclasses import dataclass, field

from spark_group_source.group.states import SlotState
from spark_group_source.model import TopicPartition

HOME = ""
"""The host that is always there: the stream reader itself."""

WITHOUT_PARTITIONS = frozenset({SlotState.OUT, SlotState.ASKING, SlotState.MOVING})


@dataclass(slots=True)
class Slot:
    """One member of ours. ``client`` counts its consumers, so that a late event of a former one is told apart."""

    number: int
    state: SlotState = SlotState.OUT
    client: int = 0
    held: set[TopicPartition] = field(default_factory=set)
    revoking: set[TopicPartition] = field(default_factory=set)
    eager: bool = False
    fenced: bool = False
    """In ASKING: whether the broker said that another client has its place; else that is only possible."""
    hold_since_ms: int = 0
    failing_since_ms: int | None = None
    failures: int = 0
    generation: int = -1
    told: tuple[str, ...] = ()
    """The topics that its member was told to subscribe to."""
    host: str = HOME
    """Where its member lives; of a slot that moves, where the next one will."""
    left: str = HOME
    """Of a slot that moves: where its last member still closes."""
    moved_ms: int | None = None
    """When it last began to move."""
    since_ms: int = 0
    """Since when its members live at its host."""
    recalls: int = 0
    """How often it was called back from an agent."""
    out_since_ms: int | None = None
    """Since when it has no assignment from its present host; None: it has one."""
    vanished: bool = False
    """Its last member was not heard to close: the broker may think that it lives."""
    awaited: set[TopicPartition] = field(default_factory=set)
    """After a move: what it had before, and does not have again."""
