"""The members that live in an agent, and the channel to their coordinator.

Runs in: agents. Deliberately absent: what members do (``members``), and reading ahead. The channel is opened again when
it is cut, for as long as the stream reader's lease lasts; where nobody listens any more, the run is over.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from spark_group_source.agents import member_messages as ms
from spark_group_source.agents.channel.client import Client
from spark_group_source.agents.channel.codec import Envelope, WireError
from spark_group_source.agents.channel.handshake import Secret
from spark_group_source.agents.hosted_member import Buffered, Hosted
from spark_group_source.agents.task_messages import Ahead
from spark_group_source.errors import ChannelBroken
from spark_group_source.kafka import Environment

log = logging.getLogger(__name__)

OPEN_S = 3.0
"""For one try to reach the stream reader at all of its addresses."""
AGAIN_S = 0.5
"""Between two tries."""
LOOK_S = 1.0
"""While it is connected: how often to look whether the agent ends."""
NOBODY_S = 5.0
"""When all addresses say for so long that nobody listens, the stream reader has ended: it listens all its life."""


class Membership:
    """The members of one agent, and its coordinator.

    Args:
        given: JSON: ``addresses``, ``secret`` (hex), ``executor``, ``name``, and ``settings`` of members.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        environment = Environment()
        self._addresses = [(str(host), int(port)) for host, port in given["addresses"]]
        self._secret = Secret.revealed(given["secret"])
        self._client: Client | None = None
        self._over = threading.Event()
        self._why = ""
        self._read_ahead: Callable[[Ahead], None] = lambda _: None
        self._hosted = Hosted(
            host=environment.new_id(),
            executor=given["executor"],
            name=given["name"],
            settings=given["settings"],
            environment=environment,
            send=self._send,
            ended=self._ended,
            deaf=self._deaf,
        )

    def start(self, read_ahead: Callable[[Ahead], None], buffered: Buffered) -> None:
        """Begin, on threads of its own, which may call both at any time."""
        self._read_ahead = read_ahead
        self._hosted.begin(buffered)
        threading.Thread(target=self._stay_connected, name="coordinator", daemon=True).start()

    def ended(self) -> str:
        """Why the agent has to end: its run is over, or its coordinator is gone. Empty as long as neither is."""
        return self._why

    def stop(self, timeout_s: float) -> None:
        """Close the members, which keep their places, and the channel."""
        self._hosted.close("the agent ends")
        self._over.wait(timeout_s)
        if (client := self._client) is not None:
            client.close()

    # --- the channel ------------------------------------------------------------------------------------------------

    def _stay_connected(self) -> None:
        refused_since_s: float | None = None
        while not self._over.is_set():
            try:
                client = Client(self._addresses, ms.CODEC, self._secret, OPEN_S)
            except ChannelBroken as exc:
                now_s = time.monotonic()
                refused_since_s = (refused_since_s or now_s) if exc.fields.get("refused") else None
                if refused_since_s is not None and now_s - refused_since_s >= NOBODY_S:
                    self._hosted.close(f"the stream reader has ended: {exc}")
                    return
                self._over.wait(AGAIN_S)
                continue
            refused_since_s = None
            log.info("the stream reader answers at %s, port %d", *client.address)
            self._client = client
            self._hosted.opened()
            self._listen(client)
            self._client = None

    def _listen(self, client: Client) -> None:
        while not self._over.is_set():
            try:
                found = client.receive(LOOK_S)
            except ChannelBroken as exc:
                log.info("the channel to the stream reader is cut: %s", exc)
                return
            match found:
                case None:
                    pass
                case Envelope(message=Ahead() as ahead):
                    self._read_ahead(ahead)
                case Envelope(message=message):
                    self._hosted.take(message)

    def _send(self, message: ms.AgentReport) -> None:
        client = self._client
        if client is not None:
            try:
                client.send(message)
            except WireError:
                log.exception("a message that the channel does not take")
                client.close()

    def _deaf(self) -> None:
        client = self._client
        if client is not None:
            log.warning("nothing is heard of the stream reader on this channel: it is opened again")
            client.close()

    def _ended(self, why: str) -> None:
        self._why = why
        self._over.set()
