"""What the protocol gets from the options: limits, budgets and choices.

Runs in: every process. Deliberately absent: parsing (``options``), and the settings of Kafka clients.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from spark_group_source.command_line import Connection
from spark_group_source.errors import OptionError
from spark_group_source.model import EARLIEST, StartAt, TopicPartition

SLOTS_MAX = 1_000
"""The most slots of one run; the option ``groupMembers`` has the same limit."""
LISTED_MAX = 20
"""Partitions that an error message lists; more are only counted."""

NoMatch = Literal["error", "latest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPosition:
    """Where the partitions of a query start that its group never committed, combined from the starting options.

    A partition that is added while the query runs starts at :data:`EARLIEST` whatever the options are, because "latest"
    would skip its first records; the caller knows that the partition is new.
    """

    everywhere: StartAt = EARLIEST
    """The position of all partitions, if ``each`` is None."""
    each: tuple[tuple[TopicPartition, StartAt], ...] | None = None
    """The position of each partition; None: ``everywhere`` applies."""
    no_match: NoMatch = "error"
    """For kind "time", if no record has such a timestamp: fail, or start at the end of the log."""

    def resolve(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, StartAt]:
        """Return the starting position of every partition of a new stream.

        Args:
            partitions: all partitions of the subscribed topics, not only those assigned to this process.

        Raises:
            OptionError: the JSON does not name exactly these partitions; ``fields``: specified, assigned.
        """
        if self.each is None:
            return dict.fromkeys(partitions, self.everywhere)
        named = dict(self.each)
        specified, assigned = sorted(named), sorted(set(partitions))
        if specified != assigned:
            raise OptionError(
                "the starting options do not name exactly the partitions of the subscribed topics: "
                f"specified {_listed(specified)}; assigned {_listed(assigned)}. "
                "Name each partition once (-2 is earliest, -1 is latest)",
                specified=[str(tp) for tp in specified],
                assigned=[str(tp) for tp in assigned],
            )
        return named

    def of(self, tp: TopicPartition) -> StartAt:
        """Return the starting position of one partition, without a check; earliest if the JSON does not name it."""
        return self.everywhere if self.each is None else dict(self.each).get(tp, EARLIEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one query."""

    group: str
    starting: StartingPosition
    connection: Connection = ()
    """The arguments with which commands connect to the brokers, for those in error texts."""
    named_topics: tuple[str, ...] = ()
    """The topics that ``subscribe`` names; some may not exist yet."""
    matches: Callable[[str], bool] | None = None
    """Whether ``subscribePattern`` matches a topic; None: the topics are named."""
    slots: int = 1
    """The members of this run; with ``auto_slots`` those at its start."""
    hold_budget_ms: int = 240_000
    """How long a revocation may be held until the batch in flight is durable and its offsets are committed. After that
    the partition is released without a commit, and counted."""
    joining_budget_ms: int = 345_000
    """How long a slot may fail to join, and Spark's call may wait for an assignment, before the run fails."""
    broker_timeout_ms: int = 600_000
    """How long an outage of the brokers may last before the run fails; 0: no limit."""
    classic: bool = True
    """The group protocol: classic, or KIP-848. KIP-848 members of a run that ends by itself are dynamic, because static
    ones cannot leave. A KIP-848 broker uses each member's own subscription, also of a static member that rejoins."""
    cooperative: bool = False
    """Whether rebalances are incremental: cooperative-sticky of the classic protocol, and always by KIP-848."""
    lease_ms: int = 45_000
    """How long an agent may send no heartbeat; less than the group's session timeout."""
    member_host: Literal["auto", "executor", "driver"] = "auto"
    """Where members run: beside executors where agents can run (auto, executor), or in the stream reader (driver)."""
    auto_slots: bool = False
    """Whether the run has one slot for each connected agent. It starts with ``slots``, or with as many as an earlier
    run left in the group."""
    single_batch: Literal["no", "maybe", "yes"] = "no"
    """Whether Spark ends the run after its first batch without another call. maybe: Spark 4.0 and 4.1 do so with the
    trigger AvailableNow, and do not pass the trigger to a Python source."""
    shrink_ms: int = 300_000
    """With ``auto_slots``: how long there may be more slots than agents before a slot leaves the group."""
    leave_on_stop: Literal["auto", "always", "never"] = "auto"
    """Whether the members leave the group when the run ends; auto: if the run ends by itself."""
    fail_on_data_loss: bool = True
    """Whether the run fails when records were deleted before it read them. False: it logs that and continues."""
    max_offsets: int | None = None
    """The most offsets of one batch; None: no limit."""
    max_bytes: int | None = None
    """The most bytes of one batch by the sizes of the records that were read before; None: no limit."""
    min_offsets: int | None = None
    """A batch waits for this many offsets; None: it does not wait."""
    max_delay_ms: int = 900_000
    """How long a batch waits for ``min_offsets`` after the batch before it."""


def _listed(partitions: list[TopicPartition]) -> str:
    shown = ", ".join(str(tp) for tp in partitions[:LISTED_MAX])
    more = len(partitions) - LISTED_MAX
    return f"[{shown}]" if more <= 0 else f"[{shown} and {more} more]"
