"""A static consumer of the classic protocol that joins a KIP-848 group, which brokers allow: it takes its place.

Runs in: tests. Only its join is played: whoever uses it takes the place, closes it at once, and makes a KIP-848 one.
Deliberately absent: heartbeats, other members of the classic protocol, groups that change their protocol.
"""

from kit.consumer_group import ConsumerGroup
from kit.kafka_client import Client, Kind
from kit.kafka_group import Answer, Code


class TakingClient(Client):
    """From its join to its close."""

    _group: ConsumerGroup
    _joining = False

    def subscribe(self, topics: frozenset[str]) -> None:
        self.topics = topics
        if not self._joining and not self.generation > 0:
            self._joining = True
            id_ = f"{self.name}-classic"
            self.process.call(
                self.thread,
                lambda reply: self._group.take(id_, self.instance, self.client_id, topics, reply),
                self._joined,
                repeat=False,
            )

    def close(self, *, leave: bool) -> None:
        """A static one says nothing."""
        del leave
        self.closed = True

    def refused(self, code: Code) -> None:
        raise NotImplementedError("it commits nothing")

    def _leave(self) -> None:
        raise NotImplementedError("it does not leave")

    def _joined(self, answer: Answer) -> None:
        self._joining = False
        if self.closed or self.calling is not None:
            return
        assert answer.assignment is not None
        self._is(member=answer.member, generation=answer.generation)
        self._ask(Kind.ASSIGN, answer.assignment, lambda: None)
