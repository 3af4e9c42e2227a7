"""The control server: the stream reader's end of the control channel, for agents and tasks.

Runs in: the stream reader. Deliberately absent: the placement of slots (``connected_agents`` and the run), and the
decision on a claim (``protocol.claims``).
"""

import gc
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from spark_group_source.agents.channel.client import Address
from spark_group_source.agents.channel.server import ChannelPeer, ChannelServer
from spark_group_source.agents.channel.wire import Secret, WireError
from spark_group_source.agents.connected_agents import ConnectedAgents, PlacedMembers
from spark_group_source.agents.messages import (
    CODEC,
    AgentReport,
    Claim,
    ClaimGranted,
    ClaimRefused,
    PrefetchPositions,
    TaskEnded,
)
from spark_group_source.model import Piece, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.claims import Claims, TaskPlan
from spark_group_source.protocol.offsets import StreamOffset

log = logging.getLogger(__name__)

LARGE_PLAN_RANGES = 10_000
"""From this many ranges on, plans let Python's garbage collector stop the channel for long."""
PREFETCHED_MAX = 10_000
"""Partitions that one agent prefetches, those with records in the last batch first. Their positions fit into one
message even if each is of another topic with the longest name that Kafka permits."""
UNFREEZE_S = 3_600.0
"""Interval in which cyclic garbage among the frozen objects is collected."""
UNREACHED_BATCHES = 3
"""After so many batches of which no task has connected, the log says once that executors do not reach this process. A
batch may have no running task: a function in ``foreachBatch`` that does not use the rows."""
LOOPBACK = "127.0.0.1"
RUN_DIGITS = 12
"""Length of a run's name, which is random."""


class ControlServer:
    """Receives reports of agents, and claims and reports of tasks, from :meth:`start` to :meth:`stop`.

    Args:
        options: the query's.
        local_mode: whether all tasks run on this host.
        uses_agents: whether members may be placed on agents; then each task connects.
        agents: handles the reports of agents.
        died: receives the error that ended the channel's thread.
        on_task_report: receives what tasks report that they read.
    """

    def __init__(
        self,
        options: Options,
        *,
        local_mode: bool,
        uses_agents: bool,
        agents: ConnectedAgents,
        died: Callable[[BaseException], None],
        on_task_report: Callable[[ev.TaskReported], None],
    ) -> None:
        self.uses_agents, self._agents, self._on_task_report = uses_agents, agents, on_task_report
        self.run, self.secret = uuid.uuid4().hex[:RUN_DIGITS], Secret.new()
        self.addresses: tuple[Address, ...] = ()
        """Where executors reach the server, in the order in which they try; empty before :meth:`start`."""
        self._lock = threading.Lock()
        self._group = options.group_id
        self._unreached: set[int] | None = set() if uses_agents else None
        """The batches that had tasks while no task has connected; None after one has, and after the log said so."""
        self._prefetching: set[str] = set()  # agents that read ahead
        self._claims = Claims(
            self.run, min_partitions=options.min_partitions, max_records=options.max_records_per_partition
        )
        where = listen_addresses(options.coordinator_host, options.bootstrap_servers, local_mode=local_mode)
        self._advertised = where.advertised
        self._server = ChannelServer(
            CODEC,
            self.secret,
            on_message=self._on_message,
            on_closed=agents.closed,
            died=died,
            hosts=where.bind,
            port=options.coordinator_port,
        )

    def start(self) -> None:
        """Listen.

        Raises:
            ChannelBroken: the port is taken, or an address is not this host's.
        """
        port = self._server.start()
        self.addresses = tuple((host, port) for host in self._advertised)
        log.info("listening for agents and tasks at %s, port %d", ", ".join(self._advertised), port)

    def stop(self) -> None:
        """Close all connections."""
        if not self._server.stop():
            log.warning("the thread of the control channel did not end in time")

    def plan_tasks(self, offset: StreamOffset, placed: Iterable[PlacedMembers]) -> TaskPlan:
        """Split a batch into the pieces of its tasks."""
        if len(offset.ranges) >= LARGE_PLAN_RANGES:
            freeze_objects()
        with self._lock:
            plan = self._claims.plan_tasks(
                offset, {tp: member.executor for member in placed for tp in member.partitions}
            )
            self._report_unreached(plan)
        return plan

    def _report_unreached(self, plan: TaskPlan) -> None:
        """Log once that no task has connected, though the tasks of several batches have ended."""
        batches = self._unreached  # the channel's thread sets it
        if batches is None or not plan.pieces:
            return
        if len(batches - {plan.offset.seq}) >= UNREACHED_BATCHES:
            self._unreached = None
            log.warning(
                "group %s: no task of %d batches has connected to the stream reader at %s; members stay here, and "
                "records that tasks skip are not counted. Let executors reach the driver's host (options "
                "coordinatorHost and coordinatorPort), or set memberHost to driver",
                self._group,
                UNREACHED_BATCHES,
                ", ".join(f"{host}:{port}" for host, port in self.addresses),
            )
        else:
            batches.add(plan.offset.seq)

    def prefetch_after(self, offset: StreamOffset, placed: Iterable[PlacedMembers]) -> None:
        """Let agents prefetch from where this batch ends."""
        by_agent: dict[str, list[TopicPartition]] = {}
        for member in placed:
            by_agent.setdefault(member.agent, []).extend(member.partitions)
        for agent in self._prefetching - by_agent.keys():  # its last member has left: it reads ahead for nobody
            by_agent[agent] = []
        self._prefetching = {agent for agent, tps in by_agent.items() if tps}
        for agent, tps in by_agent.items():
            self._agents.prefetch(agent, _positions_after(offset, tps))

    # --- on the channel's thread ------------------------------------------------------------------------------------

    def _on_message(self, peer: ChannelPeer, message: Any) -> None:
        self._unreached = None
        match message:
            case Claim():
                self._respond(peer, self._answer(message))
            case TaskEnded():
                self._on_task_ended(message)
            case AgentReport():
                self._agents.receive(peer, message)
            case _:
                peer.drop(f"it sent {type(message).__name__}, which only the stream reader sends")

    @staticmethod
    def _respond(peer: ChannelPeer, response: ClaimGranted | ClaimRefused) -> None:
        """Respond to a claim. A response that cannot be sent fails the task, not the run."""
        try:
            peer.send(response)
        except WireError as exc:
            log.warning("the response to a task's claim cannot be sent: %s; the task fails", exc)
            peer.send(ClaimRefused(reason=str(exc)))

    def _on_task_ended(self, task: TaskEnded) -> None:
        with self._lock:
            self._claims.ended(task.plan, task.task, task.executor)
            plan = self._claims.plan(task.plan)
        if plan is not None and any(task.counts):
            self._on_task_report(ev.TaskReported(seq=plan.offset.seq, counts=task.counts))

    def _answer(self, claim: Claim) -> ClaimGranted | ClaimRefused:
        with self._lock:
            answer = self._claims.claim(claim.plan, claim.task, claim.executor)
            plan = self._claims.plan(claim.plan)
        if isinstance(answer, str):
            return ClaimRefused(reason=answer)
        assert plan is not None  # it has the piece
        return ClaimGranted(Piece.of(answer.ranges, plan.offset.topic_ids, plan.offset.leader_epochs))


def _positions_after(offset: StreamOffset, tps: Iterable[TopicPartition]) -> PrefetchPositions:
    ranges = offset.ranges
    planned = sorted((tp for tp in tps if tp in ranges), key=lambda tp: (ranges[tp][0] == ranges[tp][1], tp))
    planned = sorted(planned[:PREFETCHED_MAX])  # a topic's name is written once for each run of its partitions
    topics = {tp.topic for tp in planned}
    return PrefetchPositions(
        positions={tp: offset.ranges[tp][1] for tp in planned},
        keep={tp: offset.ranges[tp][0] for tp in planned},
        topic_ids={topic: id_ for topic, id_ in offset.topic_ids.items() if topic in topics},
        leader_epochs={tp: offset.leader_epochs[tp] for tp in planned if tp in offset.leader_epochs},
    )


# --- where it listens -------------------------------------------------------------------------------------------------


class ListenAddresses(NamedTuple):
    """``bind``: addresses to listen at; none: all of this host. ``advertised``: hosts that executors try, in order."""

    bind: tuple[str, ...]
    advertised: tuple[str, ...]


def listen_addresses(coordinator_host: str | None, bootstrap_servers: str, *, local_mode: bool) -> ListenAddresses:
    """Where to listen, and the hosts that executors try.

    Args:
        coordinator_host: the name or address under which executors reach this host; then the only one they try. This
            host may be unable to resolve it. If it is an address of this host, the server listens only there.
        bootstrap_servers: the brokers. Without ``coordinator_host`` executors try the address from which this host
            reaches the brokers, a network that executors use too, and the host's name.
        local_mode: all tasks run on this host. Without ``coordinator_host`` only this host can connect then.
    """
    if coordinator_host:
        found = tuple(_resolve(coordinator_host))
        return ListenAddresses(found if found and all(map(_is_local, found)) else (), (coordinator_host,))
    if local_mode:
        return ListenAddresses((LOOPBACK,), (LOOPBACK,))
    return ListenAddresses((), tuple(dict.fromkeys([*_source_addresses(bootstrap_servers), socket.gethostname()])))


def _source_addresses(bootstrap_servers: str) -> list[str]:
    """This host's address on the route to the first broker whose name resolves. Connecting a UDP socket sends no
    packet."""
    for server in bootstrap_servers.split(","):
        host, _, port = server.strip().rpartition("/")[2].rpartition(":")
        with suppress(OSError, ValueError):
            for family, kind, protocol, _, address in socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_DGRAM
            ):
                with suppress(OSError), socket.socket(family, kind, protocol) as connection:
                    connection.connect(address)
                    return [str(connection.getsockname()[0])]
    return []


def _resolve(host: str) -> Iterator[str]:
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        yield from dict.fromkeys(str(address[0]) for *_, address in found)


def _is_local(address: str) -> bool:
    """Whether this host can listen at the address."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as tried:
        tried.bind((address, 0))
        return True
    return False


# --- garbage collection -----------------------------------------------------------------------------------------------

_unfrozen_s = time.monotonic()


def freeze_objects() -> None:
    """Exclude all living objects from garbage collection. Call it before the tasks of a large batch are planned.

    A full collection visits every object, and no other thread runs meanwhile: neither the one that answers tasks nor
    those of members. With 100,000 partitions that took up to 0.8 s, several times in a plan. Reference counting frees
    objects as ever; cyclic garbage among the frozen ones is collected every :data:`UNFREEZE_S`.
    """
    global _unfrozen_s  # noqa: PLW0603 - there is one collector in a process
    if time.monotonic() - _unfrozen_s >= UNFREEZE_S:
        _unfrozen_s = time.monotonic()
        gc.unfreeze()
    gc.collect()
    gc.freeze()
