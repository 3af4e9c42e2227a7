"""A real Kafka cluster of one or three nodes that can be killed, stopped, paused and restarted, with more listeners.

Runs in: tests. Deliberately absent: proxies between nodes and clients (``faulty_cluster``), and starting a single node
(``spark_group_source.local.broker``).
"""

import contextlib
import json
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from kafka_helpers import STALLED_S, await_until

from spark_group_source.errors import BrokerUnavailable, OptionError
from spark_group_source.local.broker import Broker, connects, free_ports, kafka_uuid, serves_groups
from spark_group_source.local.conf import read_conf


class BrokerCluster(Broker):
    """One Kafka cluster in KRaft mode on 127.0.0.1; every node is broker and controller.

    Args:
        nodes: 1 or 3; numbered from 1.
        advertised: the port of 127.0.0.1 that each node advertises to clients instead of its own: the port of a
            proxy. Nodes connect to each other through a listener of their own, without the proxies.
        sasl: passwords by user: opens a second listener, ``sasl_bootstrap_servers``, that requires SASL/PLAIN.
        listeners: security protocol by name of further listeners, for :meth:`servers`; their settings are in
            ``settings``.
        more: other arguments of :class:`Broker`.
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        advertised: Sequence[int] | None = None,
        sasl: Mapping[str, str] | None = None,
        listeners: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        if nodes not in (1, 3):
            raise OptionError(f"nodes={nodes}: a local cluster has 1 or 3 nodes", nodes=nodes)
        if advertised is not None and len(advertised) != nodes:
            raise OptionError(f"{len(advertised)} ports for {nodes} nodes: give one for each", ports=list(advertised))
        self.nodes = range(1, nodes + 1)
        self._advertised = dict(zip(self.nodes, advertised, strict=True)) if advertised is not None else {}
        self._sasl = dict(sasl or {})
        self._listeners = ({"SASL": "SASL_PLAINTEXT"} if self._sasl else {}) | dict(listeners or {})
        self._at: dict[str, dict[int, int]] = {}  # the port of each node, by listener

    # --- addresses --------------------------------------------------------------------------------------------------

    @property
    def direct_servers(self) -> str:
        """``host:port`` of every node, bypassing the proxies: clients that start here get no other addresses."""
        return self.servers(self._between)

    @property
    def sasl_bootstrap_servers(self) -> str:
        return self.servers("SASL")

    def servers(self, listener: str) -> str:
        """``host:port`` of every node at one listener, including nodes that are down."""
        _ = self._home
        return ",".join(f"127.0.0.1:{port}" for port in self._at[listener].values())

    @property
    def ports(self) -> dict[int, int]:
        """The client port of each node."""
        return dict(self._at["PLAINTEXT"])

    @property
    def controller(self) -> int:
        """The node that leads the controllers, according to the nodes' files of the last election; 0: none."""
        found = []
        for node in self.nodes:
            with contextlib.suppress(OSError, ValueError):  # being rewritten at this moment
                file = self._data(node) / "__cluster_metadata-0" / "quorum-state"
                state = json.loads(file.read_text())
                found.append((int(state["leaderEpoch"]), int(state["leaderId"])))
        return max([0, *(leader for epoch, leader in found if epoch == max(found)[0])])

    # --- faults -----------------------------------------------------------------------------------------------------

    def kill(self, node: int) -> None:
        """Kill a node (SIGKILL), and return when its process has ended."""
        self._nodes[node].kill()

    def stop_node(self, *nodes: int) -> None:
        """Stop nodes gracefully, all at the same time. Each first hands over its partitions if another one is left."""
        for node in nodes:
            self._nodes[node].signal(signal.SIGTERM)
        for node in nodes:
            assert self._nodes[node].wait(STALLED_S), f"node {node} did not stop"

    def start_node(self, *nodes: int) -> None:
        """Start nodes that were killed or stopped, with their former ports and data; return when all of them answer.

        Raises:
            BrokerUnavailable: a node ended, or did not answer in time; the message ends with its log.
        """
        if running := [node for node in nodes if self._nodes[node].running]:
            raise BrokerUnavailable(f"node {running[0]} already runs")
        for node in nodes:
            self._nodes[node].kill()
            self._launch(node)
        self._await_nodes(nodes)

    def pause(self, node: int) -> None:
        """Freeze a node (SIGSTOP): its connections stay open but it does not answer.

        The signal is asynchronous: on a busy machine a node can answer a request before it is frozen.
        """
        self._nodes[node].signal(signal.SIGSTOP)
        process = psutil.Process(self.pids[node])
        await_until(lambda: process.status() == psutil.STATUS_STOPPED, what="a frozen node")

    def resume(self, node: int) -> None:
        """Continue a paused node (SIGCONT)."""
        self._nodes[node].signal(signal.SIGCONT)

    # --- start and stop ---------------------------------------------------------------------------------------------

    @property
    def _between(self) -> str:
        """The listener for connections between nodes."""
        return "INTERNAL" if self._advertised else "PLAINTEXT"

    def _data(self, node: int) -> Path:
        return self._home / f"node-{node}" / "data"

    def _boot(self) -> None:
        names = dict.fromkeys(["PLAINTEXT", "CONTROLLER", *self._listeners, self._between])
        free = iter(free_ports(len(names) * len(self.nodes)))
        self._at = {listener: {node: next(free) for node in self.nodes} for listener in names}
        if self._ports:
            self._at["PLAINTEXT"] = dict(zip(self.nodes, self._ports, strict=True))
        clients = self._advertised or self._at["PLAINTEXT"]
        self._servers = ",".join(f"127.0.0.1:{port}" for port in clients.values())
        homes = [self._configure(node, self._node_settings(node)) for node in self.nodes]
        if not all((self._data(node) / "meta.properties").is_file() for node in self.nodes):
            cluster_id = kafka_uuid()
            self._format(homes[0], cluster_id)
            # The files that Kafka's tool writes for another node differ in one file, and each run of it costs a JVM.
            for node in self.nodes[1:]:
                shutil.copytree(self._data(1), self._data(node))
                meta = {"version": "1", "cluster.id": cluster_id, "node.id": node, "directory.id": kafka_uuid()}
                text = "".join(f"{key}={value}\n" for key, value in meta.items())
                (self._data(node) / "meta.properties").write_text(text, encoding="utf-8")
        for node in self.nodes:
            self._launch(node)
        self._await_nodes(self.nodes)

    def _node_settings(self, node: int) -> dict[str, str]:
        at = {listener: f"{listener}://127.0.0.1:{ports[node]}" for listener, ports in self._at.items()}
        clients = at | {"PLAINTEXT": f"PLAINTEXT://127.0.0.1:{self._advertised.get(node, self._at['PLAINTEXT'][node])}"}
        protocols = {listener: self._listeners.get(listener, "PLAINTEXT") for listener in self._at}
        settings = read_conf("broker.properties") | {
            "node.id": str(node),
            "process.roles": "broker,controller",
            "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{port}" for n, port in self._at["CONTROLLER"].items()),
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join(at.values()),
            "advertised.listeners": ",".join(text for name, text in clients.items() if name != "CONTROLLER"),
            "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
            "inter.broker.listener.name": self._between,
        }
        if len(self.nodes) == 3:  # one node may be down; each is a rack, and serves clients of that rack
            settings |= {name: "3" for name in settings if name.endswith("replication.factor")}
            settings |= {name: "2" for name in settings if name.endswith((".isr", "insync.replicas"))}
            settings["broker.rack"] = f"rack-{node}"
            settings["replica.selector.class"] = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
        if self._sasl:
            users = " ".join(f'user_{user}="{password}"' for user, password in self._sasl.items())
            login = "org.apache.kafka.common.security.plain.PlainLoginModule"
            settings["sasl.enabled.mechanisms"] = "PLAIN"
            settings["listener.name.sasl.plain.sasl.jaas.config"] = f"{login} required {users};"
        return settings | self._settings

    def _await_nodes(self, nodes: Sequence[int]) -> None:
        """Return when each of these nodes is a live member of the cluster, and groups are served."""
        waiting, settings = set(nodes), self._node_settings(1)

        def ready() -> bool:
            waiting.difference_update([node for node in waiting if self._answers(node)])
            return not waiting and serves_groups(self.direct_servers, settings)

        self._await(nodes, ready)

    def _answers(self, node: int) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        port = self._at[self._between][node]
        if connects(port):
            # A new client each time: one that found a closed port waits before it retries.
            admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
            with contextlib.suppress(KafkaException):
                return node in admin.list_topics(timeout=2).brokers
        return False

    def _end(self, wait_s: float) -> None:
        for node in self._nodes.values():
            node.signal(signal.SIGCONT)
        super()._end(wait_s)
