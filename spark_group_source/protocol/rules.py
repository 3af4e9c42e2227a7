"""What the options say to the protocol: limits, budgets, and what to do where there is a choice.

Runs in: the stream reader, tests. Deliberately absent: parsing (``options``), and every setting of the Kafka client.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from spark_group_source.model import StartAt, TopicPartition

SLOTS_MAX = 1_000
"""Slots of one run; what ``groupMembers`` allows too."""
RETRY_PAUSES_MS = (100, 200, 500, 1_000, 2_000, 5_000)
"""Pauses before what failed is ordered again: a broker's fail-over takes seconds, so the last one repeats."""


class Starting(Protocol):
    """Where a partition starts that its group never committed (``options.starting`` has the real one)."""

    @property
    def no_match(self) -> Literal["error", "latest"]:
        """When no record is as young as the time that was asked for: fail, or start at the end."""

    def of(self, tp: TopicPartition) -> StartAt:
        """The start of one partition."""

    def resolve(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, StartAt]:
        """The start of all partitions of a new stream; raises OptionError if it names others than there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """One query's rules.

    ``hold_budget_ms``: how long a revocation may be held for the batch in flight; after it the partition goes without a
    commit and is counted. ``joining_budget_ms``: how long a slot may fail to join, and a call may wait for the group,
    before the run gives up. ``broker_timeout_ms``: how long brokers may be silent; 0 is no bound.
    ``classic``: the protocol. KIP-848 members of a run that ends by itself are not static, because such cannot leave;
    and the broker looks at each member's own subscription, also of one that comes back to its place.
    ``lease_ms``: how long an agent may be silent, which is less than the group waits for a member. ``member_host``:
    where members live: beside executors where agents can run (auto, executor), or in the stream reader (driver).
    ``auto_slots``: one slot for each agent that stays, and ``slots`` is how many there are to begin with, or as many as
    a former run left in the group; a slot too many leaves when its agent has stayed away for ``shrink_ms``.
    """

    group: str
    starting: Starting
    slots: int = 1
    hold_budget_ms: int = 240_000
    joining_budget_ms: int = 345_000
    broker_timeout_ms: int = 600_000
    classic: bool = True
    lease_ms: int = 45_000
    member_host: Literal["auto", "executor", "driver"] = "auto"
    auto_slots: bool = False
    shrink_ms: int = 300_000
    leave_on_stop: Literal["auto", "always", "never"] = "auto"
    fail_on_data_loss: bool = True
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 900_000


def pause_ms(failures: int) -> int:
    """How long to wait after so many failures in a row."""
    return RETRY_PAUSES_MS[min(failures, len(RETRY_PAUSES_MS) - 1)]
