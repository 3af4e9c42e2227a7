"""Messages of agents and the stream reader about members, one type for each direction.

Runs in: the stream reader, agents. Deliberately absent: bytes, connections, behaviour.

An agent sends an :class:`AgentReport` on each new connection, after each change of one of its members, and as a
heartbeat several times in a lease. The stream reader answers the first report of a connection and each heartbeat with
:class:`AgentOrders`, and sends them with each order. Both types carry at most one change with its number, and the
number of the last change received (``session``).
"""

from dataclasses import dataclass

from spark_group_source.agents.channel.codec import Codec
from spark_group_source.agents.task_messages import TASK_MESSAGES
from spark_group_source.protocol import events as ev


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberIdentity:
    """The identity of a member in the group after it changed.

    ``member``: the member id; empty while the consumer is no member. ``metadata``: the client library's group metadata,
    in hexadecimal.
    """

    slot: int
    client: int
    generation: int
    member: str
    metadata: str


MemberChange = ev.Assigned | ev.Revoking | ev.Lost | ev.MemberFailed | ev.MemberFenced | ev.MemberEnded | MemberIdentity
"""A change of one member."""
MemberOrder = ev.Join | ev.Release | ev.ReleaseAll | ev.Subscribe | ev.Leave
"""An order to one member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """From an agent to the stream reader.

    ``agent``: its unique id; ``name``: its executor's host and process id, for people. ``fresh``: no stream reader has
    accepted the agent yet. ``received``: number of the last order received. ``number``, ``change``: the change, or 0
    and None. ``prefetched``: what the agent has prefetched for each member, in heartbeats. ``end_reason``: why the
    agent ends; its members are closed. Empty while it runs.
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


CODEC = Codec((*TASK_MESSAGES, AgentReport, AgentOrders))
"""All messages of a run's control channel."""
