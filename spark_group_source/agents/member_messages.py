"""What an agent and the stream reader tell each other about members: one message each way.

Runs in: the stream reader, agents. Deliberately absent: bytes, connections, behaviour.

An agent sends an :class:`AgentReport` on each new connection, whenever something changes at one of its members, and
several times in a lease to show that it lives. The stream reader answers the first one and those that only show life
with :class:`AgentOrders`, and sends them whenever something is ordered. Both carry at most one change, with its number,
and the number of the last change that was taken (``link``).
"""

from dataclasses import dataclass

from spark_group_source.agents.channel.codec import Codec
from spark_group_source.agents.task_messages import CLAIM_MESSAGES
from spark_group_source.protocol import events as ev


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Who a member is in the group now. ``member`` is empty while it is none; ``metadata``: the library's, in hex."""

    slot: int
    client: int
    generation: int
    member: str
    metadata: str


Report = ev.Assigned | ev.Revoking | ev.Lost | ev.MemberFailed | ev.MemberFenced | ev.MemberEnded | Known
"""What changes at a member."""
Order = ev.Join | ev.Release | ev.ReleaseAll | ev.Subscribe | ev.Leave
"""What a member is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """From an agent.

    ``host``: its own id; ``name``: what people call it; ``fresh``: no stream reader has taken it as yet.
    ``stock``: what it has read ahead for each member. ``over``: why it ends; its members are closed.
    """

    host: str
    executor: str
    name: str
    fresh: bool
    taken: int
    number: int = 0
    report: Report | None = None
    stock: tuple[ev.Buffered, ...] = ()
    over: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrders:
    """To an agent.

    ``lease_ms``: how long each end may be silent. ``client``: the member that the order is for; one that was replaced
    since does not obey. ``over``: why it is none of this run's agents, or not any more: it closes its members and ends.
    """

    taken: int
    lease_ms: int
    number: int = 0
    client: int = 0
    order: Order | None = None
    over: str = ""


CODEC = Codec((*CLAIM_MESSAGES, AgentReport, AgentOrders))
"""All that is sent over the control channel of a run."""
