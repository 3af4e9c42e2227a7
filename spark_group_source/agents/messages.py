"""The messages of the control channel and of an agent's socket, and the session that delivers changes of members.

Runs in: the stream reader, agents, tasks. Deliberately absent: bytes, connections, and rules (``protocol.claims``
decides the response to a claim).

Tasks claim pieces of a plan, and read from their agent's buffer; the stream reader sends agents the positions to
prefetch from. About members there is one type for each direction: an agent sends an :class:`AgentReport` on each new
connection, after each change of one of its members, and as a heartbeat several times in a lease. The stream reader
answers the first report of a connection and each heartbeat with :class:`AgentOrders`, and sends them with each order.
Both carry at most one change with its number, and the number of the last change received, for the :class:`Session`.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from spark_group_source.agents.channel.wire import Codec
from spark_group_source.model import Identity, Piece, TaskCounts, TopicPartition
from spark_group_source.protocol import events as ev

if TYPE_CHECKING:  # this module loads confluent_kafka, which would delay the first task of each worker
    from spark_group_source.kafka.environment import Environment

# --- tasks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A request: task number ``task`` of a plan starts on ``executor`` and claims its piece."""

    plan: str
    task: int
    executor: str


@dataclass(frozen=True, slots=True)
class ClaimGranted:
    """The response, and a task's request for what its agent has of the piece."""

    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRefused:
    """The response: the task gets no piece, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    """An attempt of a task ended on ``executor``. Without a claim, only attempts that succeeded report."""

    plan: str
    task: int
    executor: str
    counts: TaskCounts = field(default_factory=TaskCounts)


@dataclass(frozen=True, slots=True)
class PrefetchPositions:
    """The positions to prefetch from. They replace the former ones: other partitions are prefetched no more."""

    positions: Mapping[TopicPartition, int]
    """Start of the next plan. A position below the former one is a rewind: the partition's buffer is dropped."""
    keep: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Start of the batch in flight, whose tasks may not have read yet; buffered records below it are dropped. The
    position applies to a partition that is missing: it has no batch in flight."""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """Topic ids when the batch was planned (KIP-516). If an id changes, the topic's buffers are dropped."""
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Epochs of the leaders that reported the ends of the last plans (KIP-320). If an epoch changes, the partition's
    buffer is dropped: its log may have been truncated. A partition that is missing keeps the former epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRange:
    """What an agent serves of one range: all records below the offset ``until``, which are ``rows`` rows.

    ``index``: of the range in the request. ``bytes``: keys, values and included headers of those rows.
    """

    index: int
    until: int
    rows: int
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRanges:
    """An agent's response to a task's :class:`ClaimGranted`. ``rows`` rows in all follow as an Arrow stream.

    ``is_cut``: whether more is buffered than one response may have; the task requests the rest of its ranges again.
    """

    ranges: tuple[ServedRange, ...]
    rows: int
    is_cut: bool = False


# --- members --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberIdentity:
    """The identity of a member in the group after it changed; None while the consumer is no member."""

    slot: int
    client: int
    identity: Identity | None


MemberChange = ev.Assigned | ev.Revoking | ev.Lost | ev.MemberFailed | ev.MemberFenced | ev.MemberEnded | MemberIdentity
"""A change of one member."""
MemberOrder = ev.Join | ev.Release | ev.Subscribe | ev.Leave
"""An order to one member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """From an agent to the stream reader.

    ``agent``: its unique id. ``executor``: its executor's name, as in :class:`Claim`. ``name``: its executor's host and
    process id, for logs and client ids. ``fresh``: no stream reader has accepted the agent yet. ``received``: number of
    the last order received. ``number``, ``change``: the change, or 0 and None. ``prefetched``: what the agent has
    prefetched for each member, in heartbeats. ``end_reason``: why the agent ends; its members are closed. Empty while
    it runs.
    """

    agent: str
    executor: str
    name: str
    fresh: bool
    received: int
    number: int = 0
    change: MemberChange | None = None
    prefetched: tuple[ev.Buffered, ...] = ()
    end_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrders:
    """From the stream reader to an agent.

    ``received``: number of the last change received. ``lease_ms``: how long each end may be silent. ``number``,
    ``client``, ``order``: the order and the number of the consumer that it is for; a later consumer of the slot ignores
    it. ``end_reason``: why the agent has to close its members and end; empty while it belongs to the run.
    """

    received: int
    lease_ms: int
    number: int = 0
    client: int = 0
    order: MemberOrder | None = None
    end_reason: str = ""


CODEC = Codec((Claim, ClaimGranted, ClaimRefused, TaskEnded, PrefetchPositions, AgentReport, AgentOrders))
"""All messages of a run's control channel."""


# --- delivery of changes and orders ---------------------------------------------------------------------------------

PENDING_MAX = 10_000
"""Changes that the other end has not received. Beyond this the session overflows and has to end."""

ChangeT = TypeVar("ChangeT")


class Session(Generic[ChangeT]):
    """One end of a session of an agent and the stream reader. Any thread.

    Changes arrive in order and once, over any number of connections. A connection delivers messages in order and
    complete until it ends, so nothing is sent twice over one connection. After a reconnect each end first sends the
    changes that the other end has not received, then new changes as they happen.

    The ends exchange changes and not the current state of the members: a member that lost its partitions and was
    assigned the same ones while the connection was down must not look like one that kept them.

    Args:
        environment: locks.
    """

    def __init__(self, environment: "Environment") -> None:
        self._lock = environment.condition()
        self._send: Callable[[int, ChangeT], object] | None = None
        """Sends over the current connection; None while there is none."""
        self._pending: deque[tuple[int, ChangeT]] = deque()
        """Numbered changes that the other end has not acknowledged."""
        self._last_number = 0
        self.received = 0
        """Number of the last change of the other end that was received here."""
        self.overflowed = False
        """Whether a change was dropped because :data:`PENDING_MAX` were pending."""

    def connect(self, send: Callable[[int, ChangeT], object] | None) -> None:
        """Use a new connection, or none. ``send`` receives a change's number and the change, and never waits."""
        with self._lock:
            self._send = send
            if send is not None:
                for number, change in self._pending:
                    send(number, change)

    def add(self, change: ChangeT) -> None:
        """Send a change to the other end, now or after the next reconnect."""
        with self._lock:
            if len(self._pending) >= PENDING_MAX:
                self.overflowed = True
                return
            self._last_number += 1
            self._pending.append((self._last_number, change))
            if self._send is not None:
                self._send(self._last_number, change)

    def receive(self, number: int) -> bool:
        """Note that the other end's change with this number arrived. Returns whether it is new: after a reconnect a
        change may arrive again."""
        with self._lock:
            if number != self.received + 1:
                return False
            self.received = number
            return True

    def acknowledge(self, number: int) -> None:
        """The other end has received all changes up to this number."""
        with self._lock:
            while self._pending and self._pending[0][0] <= number:
                self._pending.popleft()
