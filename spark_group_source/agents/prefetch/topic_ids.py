"""Check that prefetched records belong to the topics that were planned.

Runs in: agents, on the threads that serve tasks. Deliberately absent: fetching. The checks use a client of their own: a
metadata request of the prefetching client would wait behind a fetch at the end of a log.

A topic that is deleted and recreated has another id, and ids are never reused. A metadata request that is sent after
records arrived, and returns the planned id, proves that all of them belong to the planned topic.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from spark_group_source.agents.prefetch.prefetcher import SharedBuffers
from spark_group_source.errors import SourceError
from spark_group_source.reader.native_client import NativeClient

log = logging.getLogger(__name__)

RESPONSE_S = 0.9
"""Limit for a response, shorter than the client's retry interval. Then tasks read from the brokers, which wait for
outages."""
PAUSE_S = 2.0
"""Pause after a request without a response, so that not every task waits for one."""


class TopicIdChecker:
    """Checks topic ids for the threads that serve tasks: one request at a time, whose response all of them use."""

    def __init__(self, buffers: SharedBuffers, open_client: Callable[[], NativeClient]) -> None:
        self._buffers, self._open_client = buffers, open_client
        self._requesting = threading.Lock()
        self._client: NativeClient | None = None
        self._checked: dict[tuple[str, str], int] = {}
        """By topic name and id, the last arrival (:attr:`PrefetchBuffers.last_arrival`) that is known to belong to that
        topic."""
        self._not_before_s = 0.0
        """When the next request may be sent, on the clock of ``time.monotonic``."""

    def checked(self, needed: Mapping[str, int], ids: Mapping[str, str]) -> dict[str, int]:
        """Return, by topic, the last arrival that is known to belong to the planned topic.

        Args:
            needed: by topic, the last arrival to serve.
            ids: topic ids when the batch was planned. A topic without an id is not checked, as in tasks.
        """
        if not self._requesting.acquire(timeout=RESPONSE_S):
            return {}
        try:
            without_id = {name: arrival for name, arrival in needed.items() if not ids.get(name)}
            with_id = {(name, ids[name]): arrival for name, arrival in needed.items() if ids.get(name)}
            unchecked = sorted(name for (name, id_), arrival in with_id.items() if self._last(name, id_) < arrival)
            if unchecked and time.monotonic() >= self._not_before_s:
                self._request(unchecked, ids)
            return without_id | {name: self._last(name, id_) for name, id_ in with_id if self._last(name, id_) >= 0}
        finally:
            self._requesting.release()

    def _last(self, name: str, id_: str) -> int:
        return self._checked.get((name, id_), -1)

    def _request(self, names: list[str], ids: Mapping[str, str]) -> None:
        with self._buffers.locked() as buffers:
            arrival = buffers.last_arrival
        try:
            self._client = self._client or self._open_client()
            request = self._client.describe_topics(names)
            response = request.receive(RESPONSE_S)
            request.cancel()
        except (SourceError, RuntimeError) as exc:
            log.warning("topic ids cannot be requested: %s; tasks read from the brokers", exc)
            response = None
        topics = response[0] if response else None
        if not isinstance(topics, dict):
            self._not_before_s = time.monotonic() + PAUSE_S
            self.close()
            return
        for name, topic in topics.items():
            if topic.code == 0 and topic.id == ids[name]:
                self._checked[name, topic.id] = arrival
            elif topic.code == 0:
                with self._buffers.changing() as buffers:
                    buffers.drop_topic(name)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
