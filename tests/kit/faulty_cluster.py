"""A real Kafka cluster with a proxy before each node, and faults that are drawn from a seed.

Runs in: tests. Deliberately absent: simulation (``cluster``), and judging the results of faults.

::

    with FaultyCluster(nodes=3) as cluster:
        with cluster.suffering(Fault("refuse", node=1)):
            ...  # affects clients of cluster.bootstrap_servers, not those of cluster.direct_servers
"""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, get_args

from kit.broker_cluster import BrokerCluster
from kit.proxy import Conditions, Direction, Proxy
from spark_group_source.local.broker import JAVA_OPTIONS, free_ports

Kind = Literal["delay", "slow", "refuse", "reset", "drop", "half-open", "reset-after", "kill", "pause"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SMALL_JAVA = (*(option for option in JAVA_OPTIONS if not option.startswith("-Xm")), "-Xms96m", "-Xmx320m")
"""The heap of a node of a cluster with megabytes of data, beside two other nodes."""


@dataclass(frozen=True)
class Fault:
    """A fault of one node.

    Args:
        directions: for faults with a direction; empty: both.
        amount: seconds of delay, bytes per second, or bytes until the reset.
    """

    kind: Kind
    node: int
    directions: tuple[Direction, ...] = ()
    amount: float = 0.0

    def __str__(self) -> str:
        where = " and ".join(self.directions)
        return " ".join(
            filter(None, [self.kind, f"{self.amount:g}" if self.amount else "", f"node {self.node}", where])
        )


@dataclass
class Draw:
    """An endless series of faults, determined by the seed."""

    seed: int
    nodes: Sequence[int]
    kinds: Sequence[Kind] = KINDS
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def __iter__(self) -> Iterator[tuple[Fault, float]]:
        """Each fault with its duration in seconds. Every kind is drawn once before any is drawn again."""
        while True:
            for kind in self._random.sample(self.kinds, k=len(self.kinds)):
                yield self._one(kind), round(self._random.uniform(0.5, 8.0), 1)

    def _one(self, kind: Kind) -> Fault:
        node = self._random.choice(list(self.nodes))
        directions = self._random.choice([(), (Direction.TO_SERVER,), (Direction.TO_CLIENT,)])
        match kind:
            case "delay":
                return Fault(kind, node, directions, round(self._random.uniform(0.05, 1.0), 2))
            case "slow":
                return Fault(kind, node, directions, self._random.randrange(5_000, 100_000, 5_000))
            case "reset-after":
                return Fault(kind, node, (Direction.TO_CLIENT,), self._random.randrange(200, 50_000))
            case "drop":
                return Fault(kind, node, directions)
            case "half-open":
                return Fault(kind, node, (self._random.choice(list(Direction)),))
            case _:
                return Fault(kind, node)


class FaultyCluster:
    """One or three nodes, each behind a proxy; a context manager that stops the nodes and frees the ports.

    Args:
        nodes: 1 or 3.
        settings: Kafka settings, as for :class:`BrokerCluster`.
    """

    def __init__(self, nodes: int = 1, *, settings: Mapping[str, str] | None = None) -> None:
        self.proxies = {node: Proxy(port=port) for node, port in enumerate(free_ports(nodes), start=1)}
        self.broker = BrokerCluster(
            nodes,
            settings=settings,
            advertised=[proxy.port for proxy in self.proxies.values()],
            java_options=SMALL_JAVA,
        )

    def start(self) -> Self:
        try:
            for proxy in self.proxies.values():
                proxy.start()
            self.broker.start()
            for node, port in self.broker.ports.items():
                self.proxies[node].target = ("127.0.0.1", port)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        try:
            self.broker.stop()
        finally:
            for proxy in self.proxies.values():
                proxy.close()

    @property
    def bootstrap_servers(self) -> str:
        """Bootstrap servers of clients that are affected by the faults."""
        return self.broker.bootstrap_servers

    @property
    def direct_servers(self) -> str:
        """Bootstrap servers of judges: they bypass the proxies."""
        return self.broker.direct_servers

    def kill(self, node: int) -> None:
        """Kill a node (SIGKILL); while it is down, its port refuses connections."""
        self.broker.kill(node)
        self.proxies[node].refuse()

    def start_node(self, node: int) -> None:
        """Start a killed node, with its data; return when it answers."""
        self.broker.start_node(node)
        self.proxies[node].accept()

    def heal(self) -> None:
        """End every fault: killed nodes run again, frozen ones continue, every proxy passes all bytes."""
        if down := [node for node in self.broker.nodes if node not in self.broker.pids]:
            self.broker.start_node(*down)
        for node in self.broker.nodes:
            self.broker.resume(node)
            self.proxies[node].heal()

    def begin(self, fault: Fault) -> None:
        proxy = self.proxies[fault.node]
        match fault.kind:
            case "delay":
                proxy.set_conditions(Conditions(delay_s=fault.amount), *fault.directions)
            case "slow":
                proxy.set_conditions(Conditions(bytes_per_s=int(fault.amount)), *fault.directions)
            case "drop":
                proxy.set_conditions(Conditions(drop=True), *fault.directions)
            case "reset-after":
                proxy.set_conditions(Conditions(reset_after_bytes=int(fault.amount)), *fault.directions)
            case "refuse":
                proxy.refuse()
            case "reset":
                proxy.reset()
            case "half-open":
                proxy.half_open(*fault.directions)
            case "kill":
                self.kill(fault.node)
            case "pause":
                self.broker.pause(fault.node)

    @contextlib.contextmanager
    def suffering(self, fault: Fault) -> Iterator[None]:
        """Apply the fault inside the block; heal every fault after it."""
        self.begin(fault)
        try:
            yield
        finally:
            self.heal()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
