"""A real Kafka whose clients all go through a proxy for each node, and the faults that are drawn for it from a seed.

Runs in: tests. Deliberately absent: a simulation (``cluster`` has one), and who judges what came of the faults.

::

    with FaultyCluster(nodes=3) as cluster:
        with cluster.suffering(Fault("refuse", node=1)):
            ...  # clients of cluster.bootstrap_servers meet it; those of cluster.direct_servers do not
"""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, get_args

from kit.broker_cluster import BrokerCluster
from kit.proxy import Direction, Line, Proxy
from spark_group_source.local.broker import JAVA_OPTIONS, free_ports

Kind = Literal["delay", "narrow", "refuse", "cut", "swallow", "half-open", "cut-after", "kill", "pause"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SMALL_JAVA = (*(option for option in JAVA_OPTIONS if not option.startswith("-Xm")), "-Xms96m", "-Xmx320m")
"""A node of a cluster that holds megabytes, beside two others."""


@dataclass(frozen=True)
class Fault:
    """What one node suffers.

    Args:
        directions: of those faults that have one; empty for both.
        amount: seconds of delay, bytes a second, or bytes until the cut.
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
    """Faults without end, the same ones for the same seed."""

    seed: int
    nodes: Sequence[int]
    kinds: Sequence[Kind] = KINDS
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def __iter__(self) -> Iterator[tuple[Fault, float]]:
        """Each with how many seconds it lasts. Every kind comes once before one comes again."""
        while True:
            for kind in self._random.sample(self.kinds, k=len(self.kinds)):
                yield self._one(kind), round(self._random.uniform(0.5, 8.0), 1)

    def _one(self, kind: Kind) -> Fault:
        node = self._random.choice(list(self.nodes))
        directions = self._random.choice([(), (Direction.TO_SERVER,), (Direction.TO_CLIENT,)])
        match kind:
            case "delay":
                return Fault(kind, node, directions, round(self._random.uniform(0.05, 1.0), 2))
            case "narrow":
                return Fault(kind, node, directions, self._random.randrange(5_000, 100_000, 5_000))
            case "cut-after":
                return Fault(kind, node, (Direction.TO_CLIENT,), self._random.randrange(200, 50_000))
            case "swallow":
                return Fault(kind, node, directions)
            case "half-open":
                return Fault(kind, node, (self._random.choice(list(Direction)),))
            case _:
                return Fault(kind, node)


class FaultyCluster:
    """One or three nodes, each behind a proxy; a context manager that leaves neither nodes nor ports.

    Args:
        nodes: 1 or 3.
        settings: Kafka settings, as :class:`BrokerCluster` takes them.
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
        """For clients that meet the faults."""
        return self.broker.bootstrap_servers

    @property
    def direct_servers(self) -> str:
        """For those that judge: past the proxies."""
        return self.broker.direct_servers

    def kill(self, node: int) -> None:
        """SIGKILL; as long as it is down, its port refuses."""
        self.broker.kill(node)
        self.proxies[node].refuse()

    def start_node(self, node: int) -> None:
        """Start one that was killed, with its data; return when it answers."""
        self.broker.start_node(node)
        self.proxies[node].accept()

    def heal(self) -> None:
        """End every fault: what was killed runs again, what was frozen goes on, every proxy passes all on."""
        if down := [node for node in self.broker.nodes if node not in self.broker.pids]:
            self.broker.start_node(*down)
        for node in self.broker.nodes:
            self.broker.resume(node)
            self.proxies[node].heal()

    def begin(self, fault: Fault) -> None:
        proxy = self.proxies[fault.node]
        match fault.kind:
            case "delay":
                proxy.lay(Line(delay_s=fault.amount), *fault.directions)
            case "narrow":
                proxy.lay(Line(bytes_per_s=int(fault.amount)), *fault.directions)
            case "swallow":
                proxy.lay(Line(swallow=True), *fault.directions)
            case "cut-after":
                proxy.lay(Line(cut_after=int(fault.amount)), *fault.directions)
            case "refuse":
                proxy.refuse()
            case "cut":
                proxy.cut()
            case "half-open":
                proxy.half_open(*fault.directions)
            case "kill":
                self.kill(fault.node)
            case "pause":
                self.broker.pause(fault.node)

    @contextlib.contextmanager
    def suffering(self, fault: Fault) -> Iterator[None]:
        """The fault inside the block; every fault is healed behind it."""
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
