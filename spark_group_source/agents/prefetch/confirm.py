"""Whether what was read ahead is of the topics that were planned.

Runs in: agents, on the threads that serve tasks. Deliberately absent: fetching; its client is another one, because a
question would wait behind a fetch at the log's end.

A topic that is deleted and made anew has another id, and no id comes back. So one question that is asked after records
came, and tells the planned id, proves them all.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from spark_group_source.agents.prefetch.reader import Stock
from spark_group_source.errors import SourceError
from spark_group_source.reader.native_client import NativeClient

log = logging.getLogger(__name__)

ANSWER_S = 0.9
"""The longest wait for an answer, shorter than a question waits before it is sent again; after that tasks read
directly, where outages are waited for."""
PAUSE_S = 2.0
"""After a question without an answer none is asked for so long, lest every task waits for one."""


class Confirmer:
    """Asks about topics for those who serve; one question at a time, whose answer is good for all who wait."""

    def __init__(self, stock: Stock, open_client: Callable[[], NativeClient]) -> None:
        self._stock, self._open = stock, open_client
        self._asking = threading.Lock()
        self._client: NativeClient | None = None
        self._confirmed: dict[tuple[str, str], int] = {}
        self._not_before_s = 0.0

    def confirmed(self, needed: Mapping[str, int], ids: Mapping[str, str]) -> dict[str, int]:
        """Up to which block each topic is known to be the planned one.

        Args:
            needed: by topic, the last block that somebody wants to serve.
            ids: as they were planned; a topic without one is not compared, as tasks do not.
        """
        if not self._asking.acquire(timeout=ANSWER_S):
            return {}
        try:
            known = {name: number for name, number in needed.items() if not ids.get(name)}
            compared = {(name, ids[name]): number for name, number in needed.items() if ids.get(name)}
            open_ = sorted(name for (name, id_), number in compared.items() if self._known(name, id_) < number)
            if open_ and time.monotonic() >= self._not_before_s:
                self._ask(open_, ids)
            return known | {name: self._known(name, id_) for name, id_ in compared if self._known(name, id_) >= 0}
        finally:
            self._asking.release()

    def _known(self, name: str, id_: str) -> int:
        return self._confirmed.get((name, id_), -1)

    def _ask(self, names: list[str], ids: Mapping[str, str]) -> None:
        with self._stock.locked() as buffers:
            number = buffers.number
        try:
            self._client = self._client or self._open()
            question = self._client.describe_topics(names)
            answer = question.receive(ANSWER_S)
            question.cancel()
        except (SourceError, RuntimeError) as exc:
            log.warning("topics cannot be asked about: %s", exc)
            answer = None
        told = answer[0] if answer else None
        if not isinstance(told, dict):
            self._not_before_s = time.monotonic() + PAUSE_S
            self.close()
            return
        for name, topic in told.items():
            if topic.code == 0 and topic.id == ids[name]:
                self._confirmed[name, topic.id] = number
            elif topic.code == 0:
                with self._stock.changing() as buffers:
                    buffers.drop(name)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
