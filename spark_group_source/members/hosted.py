"""The agent's side of lent slots: the members that live here, for one coordinator.

Runs in: agents. Deliberately absent: the channel below (``send`` and :meth:`Hosted.take` are all of it), reading, and
decisions. The members are the same as in the stream reader. What they report goes to the coordinator, what it orders
comes back, in order and once (``link``). An agent that does not hear of its coordinator for a lease closes its members,
which keep their places in the group, and ends: by then they are someone else's.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import assert_never

from spark_group_source.errors import AccessDenied, GroupError
from spark_group_source.group import events as ev
from spark_group_source.kafka import Identity, MemberStale, Runtime
from spark_group_source.members import messages as ms
from spark_group_source.members.link import Link
from spark_group_source.members.member import Member
from spark_group_source.members.shares import Share
from spark_group_source.model import TopicPartition
from spark_group_source.options.client import SESSION_TIMEOUT_MS, number_ms

log = logging.getLogger(__name__)

PINGS_A_LEASE = 6
"""How often the agent shows in a lease that it lives, and is answered."""
DEAF_SHARE = 1 / 3
"""Of a lease: an agent that hears nothing for so long, two pings, takes its channel for one that swallows what is sent,
and asks for another while the lease lasts."""
CLOSE_S_MAX = 8.0
"""How long the members of an agent that ends may take to close; then their places end with their sessions."""
KNOWN_AS_MAX = 2_000
"""Member ids that are remembered; nobody asks for them here."""
Buffered = Callable[[Iterable[TopicPartition]], tuple[int, int]]
"""Tells bytes and rows that are held here of partitions."""


def _nothing(_: Iterable[TopicPartition]) -> tuple[int, int]:
    return 0, 0


class Hosted:
    """The members at one agent.

    Args:
        host: the agent's own id, which no other agent ever has.
        executor, name: which executor it runs for, and what people call it.
        settings: librdkafka settings of members, with group.id.
        runtime: threads, clock and clients.
        send: sends the coordinator a message; never raises, never waits. What it loses is sent again.
        ended: told once, why the agent has to end. Its members are closed by then.
        deaf: told when nothing was heard on the channel for too long; never raises, never waits. ``opened`` follows
            when there is another channel.
    """

    def __init__(
        self,
        *,
        host: str,
        executor: str,
        name: str,
        settings: Mapping[str, str],
        runtime: Runtime,
        send: Callable[[ms.FromAgent], object],
        ended: Callable[[str], None],
        deaf: Callable[[], object],
    ) -> None:
        self._deaf = deaf
        self._host, self._executor, self._name = host, executor, name
        self._settings, self._runtime, self._send, self._ended = dict(settings), runtime, send, ended
        self._buffered: Buffered = _nothing
        self._link = Link(runtime)
        self._changed = runtime.condition()
        self._members: dict[int, Member] = {}
        self._former: list[Member] = []
        self._lease_ms = number_ms(self._settings, "session.timeout.ms", SESSION_TIMEOUT_MS)
        self._heard_ms = self._listens_ms = runtime.now_ms()
        self._fresh = True
        self._welcome = False  # on this channel
        self._why_end: str | None = None

    def begin(self, buffered: Buffered = _nothing) -> None:
        """From here on it shows that it lives, on a thread of its own, until it has ended, and what is ``buffered``."""
        self._buffered = buffered
        self._runtime.spawn("hosted", self._run, died=lambda exc: self._ended(f"the thread of the agent died: {exc!r}"))

    def opened(self) -> None:
        """There is a channel, maybe a new one."""
        with self._changed:
            self._welcome = False
            self._listens_ms = self._runtime.now_ms()
            self._link.connect(None)
            hello = ms.Hello(
                host=self._host,
                executor=self._executor,
                name=self._name,
                fresh=self._fresh,
                heard=self._link.heard,
            )
        self._send(hello)

    def take(self, message: ms.ToAgent) -> None:
        """A message of the coordinator's. On the channel's thread, one after the other; never waits."""
        with self._changed:
            self._heard_ms = self._runtime.now_ms()
        match message:
            case ms.Welcome():
                with self._changed:
                    self._fresh, self._welcome, self._lease_ms = False, True, message.lease_ms
                    self._changed.notify_all()  # its next ping was due by another lease
                self._link.connect(self._send, heard=message.heard)
            case ms.Dismissed():
                self.close(message.reason)
            case ms.Pong():
                self._link.other_heard(message.heard)
            case ms.Told():
                order = self._link.take(message)
                if order is not None:
                    self._obey(order)
            case _:
                assert_never(message)

    def close(self, reason: str) -> None:
        """Close the members, which keep their places, and end. Any thread; does not wait for it."""
        with self._changed:
            self._why_end = self._why_end or reason
            self._changed.notify_all()

    # --- its own thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (why := self._wait()) is None:
            if self._is_deaf():
                self._deaf()
            elif self._welcome:
                self._ping()
            else:
                self.opened()
        self._end(why)

    def _wait(self) -> str | None:
        """Until the next ping is due. Returns why the agent ends, if it does."""
        with self._changed:
            if self._why_end is None:
                self._changed.wait(self._lease_ms / PINGS_A_LEASE / 1000)
            silent_ms = self._runtime.now_ms() - self._heard_ms
            if self._why_end is None and silent_ms >= self._lease_ms:
                self._why_end = f"the stream reader was not heard for {silent_ms} ms"
            if self._why_end is None and self._link.broken:
                self._why_end = "the stream reader does not take what it is told"
            return self._why_end

    def _is_deaf(self) -> bool:
        """Whether this channel has to be given up. The next one has as much time from then on."""
        with self._changed:
            now_ms = self._runtime.now_ms()
            deaf = now_ms - max(self._heard_ms, self._listens_ms) >= self._lease_ms * DEAF_SHARE
            if deaf:
                self._listens_ms = now_ms
            return deaf

    def _end(self, why: str) -> None:
        log.info("the agent %s ends: %s", self._name, why)
        with self._changed:
            members = [*self._members.values(), *self._former]
            self._members.clear()
        deadline_ms = self._runtime.now_ms() + int(CLOSE_S_MAX * 1000)
        for member in members:
            member.order(ev.Leave(slot=member.slot, leave=False))
        for member in members:
            if not member.wait_ended(max(0, deadline_ms - self._runtime.now_ms()) / 1000):
                log.warning("a member did not close in time; its place in the group ends with its session")
        self._send(ms.Bye(reason=why))
        self._ended(why)

    # --- orders -----------------------------------------------------------------------------------------------------

    def _obey(self, order: ms.Order | ms.Report) -> None:
        match order:
            case ms.Start():
                self._start(order.join)
            case ms.Give():
                if (member := self._member(order.slot, order.client)) is not None:
                    member.order(order.order)
            case ms.Commit():
                self._commit(order)
            case _:
                log.warning("the stream reader sent what only agents send: %s", type(order).__name__)

    def _start(self, join: ev.Join) -> None:
        member = Member(
            join,
            self._settings,
            runtime=self._runtime,
            known_as=deque(maxlen=KNOWN_AS_MAX),
            report=partial(self._report, join),
            renamed=partial(self._renamed, join),
        )
        with self._changed:
            if self._why_end is not None:
                return
            former = self._members.get(join.slot)
            self._members[join.slot] = member
            if former is not None:
                self._former.append(former)
        if former is not None:
            former.order(ev.Leave(slot=join.slot, leave=False))
        member.start()

    def _commit(self, order: ms.Commit) -> None:
        member = self._member(order.slot, order.client)
        if member is None:
            self._committed(order, MemberStale("the member has ended"))
            return
        who = Identity(order.generation, order.member, bytes.fromhex(order.metadata)) if order.member else None
        member.commit_then(Share(member, who, order.offsets), order.notes, partial(self._committed, order))

    def _committed(self, order: ms.Commit, failure: GroupError | None) -> None:
        kinds = {MemberStale: "stale", AccessDenied: "denied"}
        self._link.tell(
            ms.Committed(
                ask=order.ask,
                slot=order.slot,
                client=order.client,
                failure="" if failure is None else kinds.get(type(failure), "failed"),
                reason="" if failure is None else str(failure),
                thrown_out=isinstance(failure, MemberStale) and failure.thrown_out,
            )
        )

    def _member(self, slot: int, client: int) -> Member | None:
        with self._changed:
            member = self._members.get(slot)
        return member if member is not None and member.client == client else None

    # --- what members say, on their threads -------------------------------------------------------------------------

    def _report(self, join: ev.Join, event: ev.Event) -> None:
        match event:
            case ev.Assigned() | ev.Revoking() | ev.Lost() | ev.MemberFailed() | ev.MemberFenced():
                self._link.tell(ms.Reported(event=event))
            case ev.MemberEnded():
                with self._changed:
                    if (member := self._members.get(join.slot)) is not None and member.client == join.client:
                        del self._members[join.slot]
                    me = (join.slot, join.client)
                    self._former = [member for member in self._former if (member.slot, member.client) != me]
                self._link.tell(ms.Reported(event=event))
            case ev.Broken():  # what cannot work here may work elsewhere
                failed = ev.MemberFailed(slot=join.slot, client=join.client, reason=str(event.error))
                self._link.tell(ms.Reported(event=failed))
            case _:
                log.warning("a member says what no member says: %s", type(event).__name__)

    def _ping(self) -> None:
        with self._changed:
            members = list(self._members.values())
        held = [(member.slot, *self._buffered(member.held)) for member in members]
        stock = tuple(ev.Buffered(slot=slot, bytes=bytes_, rows=rows) for slot, bytes_, rows in held)
        self._send(ms.Ping(heard=self._link.heard, stock=stock))

    def _renamed(self, join: ev.Join, who: Identity | None) -> None:
        generation, member, metadata = (-1, "", "") if who is None else (*who[:2], bytes(who.metadata).hex())
        self._link.tell(
            ms.Known(slot=join.slot, client=join.client, generation=generation, member=member, metadata=metadata)
        )
