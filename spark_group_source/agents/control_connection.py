"""An agent's connection to the stream reader, and the members that are placed on the agent.

Runs in: agents. Deliberately absent: the behaviour of members (``hosted_members``), and reading. A closed connection is
opened again while the stream reader's lease lasts; if nothing listens at any of its addresses, the run has ended.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from spark_group_source.agents.channel.client import ChannelClient
from spark_group_source.agents.channel.handshake import Secret
from spark_group_source.agents.channel.wire import Envelope, WireError
from spark_group_source.agents.hosted_members import HostedMembers, PrefetchSize
from spark_group_source.agents.messages import CODEC, AgentReport, PrefetchPositions
from spark_group_source.errors import ChannelBroken
from spark_group_source.kafka import Environment

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""Limit for one attempt to reach the stream reader at all of its addresses."""
RETRY_S = 0.5
"""Pause between two attempts."""
RECEIVE_S = 1.0
"""While connected: how often the thread checks whether the agent ends."""
REFUSED_S = 5.0
"""When all addresses refuse connections for this long, the run has ended: the stream reader listens until then."""


class ControlConnection:
    """The connection of one agent to the stream reader, with the members of the agent.

    Args:
        given: JSON: ``addresses``, ``secret`` (hexadecimal), ``executor``, ``name``, and ``settings`` of members.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        environment = Environment()
        self._addresses = [(str(host), int(port)) for host, port in given["addresses"]]
        self._secret = Secret.from_hex(given["secret"])
        self._client: ChannelClient | None = None
        self._ended = threading.Event()
        self._end_reason = ""
        self._prefetch: Callable[[PrefetchPositions], None] = lambda _: None
        self._members = HostedMembers(
            agent=environment.new_id(),
            executor=given["executor"],
            name=given["name"],
            settings=given["settings"],
            environment=environment,
            send=self._send,
            on_ended=self._on_ended,
            on_silent=self._on_silent,
        )

    def start(self, prefetch: Callable[[PrefetchPositions], None], prefetched: PrefetchSize) -> None:
        """Start the threads that connect, receive and send heartbeats.

        Args:
            prefetch: receives the positions after each new plan.
            prefetched: returns the size of what is prefetched, for each heartbeat.
        """
        self._prefetch = prefetch
        self._members.start(prefetched)
        threading.Thread(target=self._stay_connected, name="control-connection", daemon=True).start()

    @property
    def end_reason(self) -> str:
        """Why the agent has to end: its run is over, or the stream reader is gone. Empty while neither is the case."""
        return self._end_reason

    def stop(self, timeout_s: float) -> None:
        """Close the members, which stay in the group as static members, and the connection."""
        self._members.close("the agent ends")
        self._ended.wait(timeout_s)
        if (client := self._client) is not None:
            client.close()

    # --- the connection's thread ------------------------------------------------------------------------------------

    def _stay_connected(self) -> None:
        refused_since_s: float | None = None
        while not self._ended.is_set():
            try:
                client = ChannelClient(self._addresses, CODEC, self._secret, CONNECT_S)
            except ChannelBroken as exc:
                now_s = time.monotonic()
                refused_since_s = (refused_since_s or now_s) if exc.fields.get("refused") else None
                if refused_since_s is not None and now_s - refused_since_s >= REFUSED_S:
                    self._members.close(f"the stream reader has ended: {exc}")
                    return
                self._ended.wait(RETRY_S)
                continue
            refused_since_s = None
            log.info("connected to the stream reader at %s, port %d", *client.address)
            self._client = client
            self._members.connected()
            self._receive_until_closed(client)
            self._client = None

    def _receive_until_closed(self, client: ChannelClient) -> None:
        while not self._ended.is_set():
            try:
                found = client.receive(RECEIVE_S)
            except ChannelBroken as exc:
                log.info("the connection to the stream reader is lost: %s; reconnecting", exc)
                return
            match found:
                case None:
                    pass
                case Envelope(message=PrefetchPositions() as positions):
                    self._prefetch(positions)
                case Envelope(message=message):
                    self._members.receive(message)

    def _send(self, message: AgentReport) -> None:
        client = self._client
        if client is not None:
            try:
                client.send(message)
            except WireError:
                log.exception("a message to the stream reader cannot be encoded; closing the connection")
                client.close()

    def _on_silent(self) -> None:
        client = self._client
        if client is not None:
            log.warning("nothing is received from the stream reader on this connection; opening another one")
            client.close()

    def _on_ended(self, reason: str) -> None:
        self._end_reason = reason
        self._ended.set()
