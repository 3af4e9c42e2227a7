"""A consumer of the KIP-848 protocol as librdkafka implements it: heartbeats only.

Runs in: tests. Deliberately absent: subscriptions by regular expression, and the parts in ``kafka_client``.
"""

from collections.abc import Callable

from kit.consumer_group import LEFT, RELEASED, ConsumerGroup
from kit.kafka_client import HEARTBEAT_MS, Client, Kind, Tps, ignore
from kit.kafka_group import Answer, Code


class ConsumerClient(Client):
    """The client generates its member id and never changes it; its epoch is 0 while it is not in the group."""

    _group: ConsumerGroup
    _started = False
    _beating = False
    _heartbeat_in_flight = False
    _again = False
    _thrown_out = False

    def subscribe(self, topics: frozenset[str]) -> None:
        self.topics, self._leaving = topics, False
        if not self._started:
            self._started = True
            self._is(generation=0)
        self._beat_now()
        if not self._beating:
            self._beating = True
            self._later(HEARTBEAT_MS, self._beat)

    def close(self, *, leave: bool) -> None:
        """Close. A static member cannot leave permanently, whatever ``leave`` is."""
        del leave
        self._send_leave()
        self.closed = True

    def refused(self, code: Code) -> None:
        if code is Code.FENCED_INSTANCE and not self.closed:
            self._die(code)
        elif not self.closed:
            self._beat_now(full=False)

    def _leave(self) -> None:
        self._send_leave()
        self._started = self._thrown_out = False
        self._is(generation=-1)

    def _send_leave(self) -> None:
        if self._started and self.generation > 0:
            self._send("closing", RELEASED if self.instance else LEFT, None, ignore)

    def _beat(self) -> None:
        self._later(HEARTBEAT_MS, self._beat)
        self._beat_now(full=False)

    def _beat_now(self, *, full: bool = True) -> None:
        if self._thrown_out or not self._started:
            return
        if self._heartbeat_in_flight:
            self._again |= full
            return
        self._heartbeat_in_flight = True
        owned = self.owned if full and not self.holding else None
        self._send(self.thread, self.generation, owned, self._beaten, full=full)

    def _send(
        self, thread: str, epoch: int, owned: Tps | None, answer: Callable[[Answer], None], *, full: bool = True
    ) -> None:
        topics, instance = self.topics, self.instance if full else None  # as librdkafka: it did not change
        self.process.call(
            thread,
            lambda reply: self._group.heartbeat(self.member, instance, self.client_id, epoch, owned, topics, reply),
            answer,
        )

    def _beaten(self, answer: Answer) -> None:
        self._heartbeat_in_flight = False
        if self.closed or not self._started:
            return
        if answer.code is Code.OK:
            self._accept(answer)
        elif answer.code in (Code.FENCED_INSTANCE, Code.UNRELEASED, Code.GROUP_FULL):
            self._die(answer.code)
            return
        else:
            self._thrown_out = True
            if self.calling is None:
                self._rejoin()
        if self._again:
            self._again = False
            self._beat_now()

    def _accept(self, answer: Answer) -> None:
        self._is(generation=answer.generation)
        if self.calling is not None or answer.assignment is None:
            return
        revoked, added = self.owned - answer.assignment, answer.assignment - self.owned
        if revoked:
            self._start_op(Kind.REVOKE, revoked, self._go_on)
        elif added:
            self._start_op(Kind.ASSIGN, added, self._go_on)

    def _go_on(self) -> None:
        """The application has completed its operation. Only now librdkafka reports the events meanwhile
        (F_WAIT_REJOIN)."""
        if self._thrown_out:
            self._rejoin()
        elif not self._goes():
            self._beat_now()

    def _rejoin(self) -> None:
        if self.owned:
            self._start_op(Kind.LOST, self.owned, self._begin_again)
        else:
            self._begin_again()

    def _begin_again(self) -> None:
        self._thrown_out = False
        self._is(generation=0)
        if not self._goes():
            self._beat_now()


class TakingClient(Client):
    """A static consumer of the classic protocol that takes over an instance id in a KIP-848 group; brokers allow it.

    Only its join is modelled: the caller takes the instance id over, closes this client and creates a KIP-848 one.
    """

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
        """A static member sends no request to leave."""
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
        if answer.code is Code.GROUP_FULL:
            self._listener.full()
            return
        assert answer.assignment is not None
        self._is(member=answer.member, generation=answer.generation)
        self._start_op(Kind.ASSIGN, answer.assignment, lambda: None)
