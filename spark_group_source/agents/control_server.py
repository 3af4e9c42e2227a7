"""Where agents and tasks reach the stream reader: the channel's server, claims to pieces, and word of the next plan.

Runs in: the stream reader. Deliberately absent: which slot is lent to whom (``hosts`` and the run), and who may claim
what (``group.claims``).
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

from spark_group_source.agents import member_messages as ms
from spark_group_source.agents.channel.client import Address
from spark_group_source.agents.channel.handshake import Secret
from spark_group_source.agents.channel.server import Peer, Server
from spark_group_source.agents.connected_agents import ConnectedAgents, PlacedMembers
from spark_group_source.agents.task_messages import Ahead, Claim, ClaimGranted, ClaimRefused, TaskEnded
from spark_group_source.model import Piece, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.claims import Claims, Plan, Unknown
from spark_group_source.protocol.offsets import StreamOffset

log = logging.getLogger(__name__)

LARGE_RANGES = 10_000
"""Ranges of a plan that make the collector of garbage stop the channel for long."""
LOOK_AGAIN_S = 3_600.0
"""What was set aside and became garbage in circles meanwhile is found this late."""
RUN_DIGITS = 12
"""Of a run's name, which no other run has."""


class ControlServer:
    """Of one run, from :meth:`start` to :meth:`stop`.

    Args:
        options: the query's.
        hosts: takes what agents say.
        died: is given what ended the channel's thread.
        read: takes what tasks tell of what they read.
    """

    def __init__(
        self,
        options: Options,
        *,
        hosts: ConnectedAgents,
        died: Callable[[BaseException], None],
        read: Callable[[ev.TaskReported], None],
    ) -> None:
        self._options, self._hosts, self._read = options, hosts, read
        self.run, self.secret = uuid.uuid4().hex[:RUN_DIGITS], Secret.new()
        self.addresses: tuple[Address, ...] = ()
        self._lock = threading.Lock()
        self._claims = Claims(
            self.run, min_partitions=options.min_partitions, max_records=options.max_records_per_partition
        )
        places_ = places(options.coordinator_host, options.bootstrap_servers)
        self._told = places_.told
        self._server = Server(
            ms.CODEC,
            self.secret,
            on_message=self._heard,
            on_closed=hosts.closed,
            died=died,
            hosts=places_.bind,
            port=options.coordinator_port,
        )

    def start(self) -> None:
        """Listen.

        Raises:
            ChannelBroken: it cannot.
        """
        port = self._server.start()
        self.addresses = tuple((host, port) for host in self._told)
        log.info("listening for agents and tasks at %s, port %d", ", ".join(self._told), port)

    def stop(self) -> None:
        if not self._server.stop():
            log.warning("the control channel did not end in time")

    def cut(self, offset: StreamOffset, lent: Iterable[PlacedMembers]) -> Plan:
        """The pieces of a batch."""
        if len(offset.ranges) >= LARGE_RANGES:
            set_aside()
        with self._lock:
            return self._claims.cut(offset, {tp: one.executor for one in lent for tp in one.partitions})

    def read_ahead(self, offset: StreamOffset, lent: Iterable[PlacedMembers]) -> None:
        """Tell agents where the batch after this one begins."""
        held: dict[str, list[TopicPartition]] = {}
        for one in lent:
            held.setdefault(one.host, []).extend(one.partitions)
        for host, tps in held.items():
            self._hosts.read_ahead(host, _ahead(offset, tps))

    # --- on the channel's thread ------------------------------------------------------------------------------------

    def _heard(self, peer: Peer, message: Any, asks: int) -> None:
        match message:
            case Claim():
                peer.send(self._given(message), answers=asks)
            case TaskEnded():
                self._ended(message)
            case ms.AgentReport():
                self._hosts.take(peer, message)
            case _:
                peer.drop(f"it said {type(message).__name__}, which is not for it to say")

    def _ended(self, task: TaskEnded) -> None:
        with self._lock:
            self._claims.ended(task.plan, task.task, task.executor)
            plan = self._claims.plan(task.plan)
        if plan is not None and (task.memory or task.brokers or task.lost):
            seq = plan.offset.seq
            self._read(
                ev.TaskReported(
                    seq=seq, rows_from_memory=task.memory, rows_from_brokers=task.brokers, skipped=task.lost
                )
            )

    def _given(self, claim: Claim) -> ClaimGranted | ClaimRefused:
        with self._lock:
            piece = self._claims.claim(claim.plan, claim.task, claim.executor)
            plan = self._claims.plan(claim.plan)
        if isinstance(piece, Unknown) or plan is None:
            return ClaimRefused(reason=piece.reason if isinstance(piece, Unknown) else "its plan is gone")
        return ClaimGranted(**Piece.of(piece.ranges, plan.offset.topic_ids, plan.offset.leader_epochs)._asdict())


def _ahead(offset: StreamOffset, tps: Iterable[TopicPartition]) -> Ahead:
    mine = [tp for tp in tps if tp in offset.ranges]
    return Ahead(
        positions={tp: offset.ranges[tp][1] for tp in mine},
        keep={tp: offset.ranges[tp][0] for tp in mine},
        topic_ids={topic: id_ for topic, id_ in offset.topic_ids.items() if topic in {tp.topic for tp in mine}},
        leader_epochs={tp: offset.leader_epochs[tp] for tp in mine if tp in offset.leader_epochs},
    )


# --- where it listens -------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """``bind``: addresses to listen at, none for all of this host; ``told``: hosts that executors try, in order."""

    bind: tuple[str, ...]
    told: tuple[str, ...]


def places(coordinator_host: str | None, bootstrap_servers: str) -> Places:
    """Where to listen, and what to tell executors.

    Args:
        coordinator_host: as executors reach this host; it counts alone. It may be a name or an address that only
            executors know. An address of this host is also the only one to listen at.
        bootstrap_servers: the brokers. Without ``coordinator_host`` executors get the address of this host from which
            it reaches the brokers, a network that executors use too, and the host's name.
    """
    if coordinator_host:
        found = tuple(_resolved(coordinator_host))
        return Places(found if found and all(map(_is_own, found)) else (), (coordinator_host,))
    return Places((), tuple(dict.fromkeys([*_routed(bootstrap_servers), socket.gethostname()])))


def _routed(bootstrap_servers: str) -> list[str]:
    """This host's address on the way to the first broker whose name is known; connecting a UDP socket sends nothing."""
    for server in bootstrap_servers.split(","):
        host, _, port = server.strip().rpartition("/")[2].rpartition(":")
        with suppress(OSError, ValueError):
            for family, kind, protocol, _, where in socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_DGRAM
            ):
                with suppress(OSError), socket.socket(family, kind, protocol) as way:
                    way.connect(where)
                    return [str(way.getsockname()[0])]
    return []


def _resolved(host: str) -> Iterator[str]:
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        yield from dict.fromkeys(str(where[0]) for *_, where in found)


def _is_own(address: str) -> bool:
    """Whether this host can listen there."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as tried:
        tried.bind((address, 0))
        return True
    return False


# --- garbage ----------------------------------------------------------------------------------------------------------

_looked_at_s = time.monotonic()


def set_aside() -> None:
    """Keep Python's collector of garbage from stopping everything for the sake of plans. Call it after each plan: what
    lives now lives long, and need not be looked at again for :data:`LOOK_AGAIN_S`; counting references frees as ever.

    A full collection looks at every object, and no thread runs meanwhile: not the one that answers tasks, nor a
    member's. With 100,000 partitions that took up to 0.8 s, several times in a plan.
    """
    global _looked_at_s  # noqa: PLW0603 - there is one collector in a process
    if time.monotonic() - _looked_at_s >= LOOK_AGAIN_S:
        _looked_at_s = time.monotonic()
        gc.unfreeze()
    gc.collect()
    gc.freeze()
