"""A consumer of the classic protocol as librdkafka implements it: join, sync, heartbeat.

Runs in: tests. Deliberately absent: choosing an assignment (the coordinator does it, ``classic_group``), and the parts
in ``kafka_client``.
"""

from collections.abc import Callable

from kit.classic_group import ClassicGroup
from kit.kafka_client import HEARTBEAT_MS, Client, Kind, ignore
from kit.kafka_group import Answer, Code

JOIN_AGAIN_MS = (100, 1_000)
"""Bounds of the pause after a join that was refused."""


class ClassicClient(Client):
    """Both flavours: eager members release all partitions before they rejoin, cooperative ones keep theirs."""

    _group: ClassicGroup
    _started = False
    _beating = False
    _joining = False
    _in_group = False  # it received an assignment, possibly empty, and has not released it since
    _joined_with: frozenset[str] = frozenset()
    _joins = 0

    def subscribe(self, topics: frozenset[str]) -> None:
        self.topics, self._leaving = topics, False
        if not self._started:
            self._started = True
            self._join()
        elif self.calling is None and not self._joining:
            self._taken()
        if not self._beating:
            self._beating = True
            self._later(HEARTBEAT_MS, self._beat)

    def close(self, *, leave: bool) -> None:
        self.closed = True
        if leave or self.instance is None:
            self._send_leave()

    def refused(self, code: Code) -> None:
        if not self.closed and code in (Code.UNKNOWN_MEMBER, Code.ILLEGAL_GENERATION, Code.FENCED_INSTANCE):
            self._failed(code)

    def _leave(self) -> None:
        self._send_leave()
        self._started = self._joining = self._in_group = False
        self._is(member="")

    def _send_leave(self) -> None:
        if member := self.member:
            self.process.call("closing", lambda reply: self._group.leave(member, reply), ignore)

    # --- joining ----------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        if self._joining or self.calling is not None or not self._started or self.closed:
            return
        self._joining = True
        self._joins += 1
        self._joined_with = topics = self.topics
        member, owned, generation = self.member, self.owned, self.generation
        self.process.call(
            self.thread,
            lambda reply: self._group.join(member, self.instance, self.client_id, owned, generation, topics, reply),
            self._joined,
            repeat=False,
        )

    def _joined(self, answer: Answer) -> None:
        if self.closed or not self._joining:
            if answer.code is Code.OK and not self.closed and not self.member:
                self.member = answer.member  # the answer arrived after the application had left
                self._leave()
            return
        self._answered_ms = self.process.world.now_ms
        if answer.code is not Code.OK:
            self._not_joined(answer.code)
            return
        self._is(member=answer.member, generation=answer.generation)
        self.process.call(
            self.thread,
            lambda reply: self._group.sync(answer.member, answer.generation, reply),
            self._synced,
            repeat=False,
        )

    def _synced(self, answer: Answer) -> None:
        if self.closed or not self._joining:
            return
        self._answered_ms = self.process.world.now_ms
        if answer.code is not Code.OK:
            self._not_joined(answer.code)
            return
        self._joining = False
        if self.calling is not None:
            return  # unsubscribed meanwhile
        assert answer.assignment is not None
        self._in_group = True
        revoked, added = self.owned - answer.assignment, answer.assignment - self.owned
        if revoked:
            # librdkafka always runs the second step, even if nothing was added and whatever happened meanwhile.
            self._start_op(Kind.REVOKE, revoked, lambda: self._start_op(Kind.ASSIGN, added, self._join_again))
        else:
            self._start_op(Kind.ASSIGN, added, self._taken)

    def _not_joined(self, code: Code) -> None:
        self._joining = False
        if code is Code.UNKNOWN_SERVER:  # the group cannot be stored; a cooperative member keeps its partitions
            self._join_after_pause()
        elif code is Code.GROUP_FULL:
            self._listener.full()
            self._join_after_pause()
        elif self.calling is not None or (
            code in (Code.UNKNOWN_MEMBER, Code.ILLEGAL_GENERATION) and not (self._group.incremental and self.owned)
        ):
            self._forget(code)
            self._join_after_pause()
        else:
            self._failed(code)

    def _join_after_pause(self) -> None:
        pause_ms, joins = self.process.draws(f"{self.thread} joins again").between(*JOIN_AGAIN_MS), self._joins
        # Another join that was sent during the pause replaces the retry: the library has one state for both.
        self._later(pause_ms, lambda: self._join() if self._joins == joins else None)

    def _join_again(self) -> None:
        self._in_group = False
        if not self._goes():
            self._join()

    def _taken(self) -> None:
        """After joining with no pending step: check for changes meanwhile."""
        if not self._goes() and self.topics != self._joined_with:
            self._rebalance()

    # --- heartbeats -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._later(HEARTBEAT_MS, self._beat)
        if self._joining or not self._in_group or (not self.member and self.calling is not None):
            return
        if self.member and self.process.world.now_ms - self._answered_ms > self._group.session_ms:
            self._failed(Code.UNKNOWN_MEMBER)  # the library's own session timer
            return
        member, generation = self.member, self.generation

        def send(reply: Callable[[Answer], None]) -> None:
            self._group.heartbeat(member, self.instance, generation, reply)

        self.process.call(self.thread, send, lambda answer: self._beaten(answer, member, generation))

    def _beaten(self, answer: Answer, member: str, generation: int) -> None:
        if self.closed or (member, generation) != (self.member, self.generation) or self._joining:
            return
        if answer.code in (Code.OK, Code.REBALANCE):
            self._answered_ms = self.process.world.now_ms
        if answer.code is not Code.OK:
            self._failed(answer.code)

    def _failed(self, code: Code) -> None:
        if code is Code.FENCED_INSTANCE:
            self._die(code)
            return
        self._forget(code)
        if self.calling is not None or not self._started:
            return  # neither a rebalance nor the fencing is reported
        if code is Code.REBALANCE:
            self._rebalance()
        elif self.owned or (self._in_group and not self._group.incremental):
            self._start_op(Kind.LOST, self.owned, self._join_again)
        else:
            self._join()

    def _rebalance(self) -> None:
        if self._group.incremental or not self._in_group:
            self._join()
        else:
            self._start_op(Kind.REVOKE, self.owned, self._join_again)

    def _forget(self, code: Code) -> None:
        if code is Code.UNKNOWN_MEMBER:
            self._is(member="")
        elif code is Code.ILLEGAL_GENERATION:
            self._is(generation=-1)
