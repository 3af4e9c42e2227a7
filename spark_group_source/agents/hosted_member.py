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

from spark_group_source.agents import member_messages as ms
from spark_group_source.agents.session import Session
from spark_group_source.kafka import Environment, Identity
from spark_group_source.members.member import Member
from spark_group_source.model import TopicPartition
from spark_group_source.options.client import SESSION_TIMEOUT_MS, setting_ms
from spark_group_source.protocol import events as ev

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
        environment: threads, clock and clients.
        send: sends the coordinator a message on the present channel, if there is one; never raises.
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
        environment: Environment,
        send: Callable[[ms.AgentReport], object],
        ended: Callable[[str], None],
        deaf: Callable[[], object],
    ) -> None:
        self._deaf = deaf
        self._host, self._executor, self._name = host, executor, name
        self._settings, self._environment, self._send, self._ended = dict(settings), environment, send, ended
        self._buffered: Buffered = _nothing
        self._link: Session[ms.Report] = Session(environment)
        self._changed = environment.condition()
        self._members: dict[int, Member] = {}
        self._former: list[Member] = []
        self._lease_ms = setting_ms(self._settings, "session.timeout.ms", SESSION_TIMEOUT_MS)
        self._heard_ms = self._listens_ms = environment.now_ms()
        self._fresh = True
        self._why_end: str | None = None

    def begin(self, buffered: Buffered = _nothing) -> None:
        """From here on it shows that it lives, on a thread of its own, until it has ended, and what is ``buffered``."""
        self._buffered = buffered
        self._environment.spawn(
            "hosted", self._run, died=lambda exc: self._ended(f"the thread of the agent died: {exc!r}")
        )

    def opened(self) -> None:
        """There is a channel, maybe a new one."""
        with self._changed:
            self._listens_ms = self._environment.now_ms()
        self._say()
        self._link.connect(lambda number, report: self._say(number=number, report=report))

    def take(self, message: ms.AgentOrders) -> None:
        """A message of the coordinator's. On the channel's thread, one after the other; never waits."""
        with self._changed:
            self._heard_ms = self._environment.now_ms()
            if not message.over:
                if message.lease_ms != self._lease_ms:
                    self._changed.notify_all()  # the next report was due by another lease
                self._fresh, self._lease_ms = False, message.lease_ms
        if message.over:
            self.close(message.over)
            return
        self._link.other_took(message.taken)
        if message.order is not None and self._link.take(message.number):
            self._obey(message.client, message.order)

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
            else:
                self._say(stock=self._stock())
        self._end(why)

    def _wait(self) -> str | None:
        """Until the next ping is due. Returns why the agent ends, if it does."""
        with self._changed:
            if self._why_end is None:
                self._changed.wait(self._lease_ms / PINGS_A_LEASE / 1000)
            silent_ms = self._environment.now_ms() - self._heard_ms
            if self._why_end is None and silent_ms >= self._lease_ms:
                self._why_end = f"the stream reader was not heard for {silent_ms} ms"
            if self._why_end is None and self._link.broken:
                self._why_end = "the stream reader does not take what it is told"
            return self._why_end

    def _is_deaf(self) -> bool:
        """Whether this channel has to be given up. The next one has as much time from then on."""
        with self._changed:
            now_ms = self._environment.now_ms()
            deaf = now_ms - max(self._heard_ms, self._listens_ms) >= self._lease_ms * DEAF_SHARE
            if deaf:
                self._listens_ms = now_ms
            return deaf

    def _end(self, why: str) -> None:
        log.info("the agent %s ends: %s", self._name, why)
        with self._changed:
            members = [*self._members.values(), *self._former]
            self._members.clear()
        deadline_ms = self._environment.now_ms() + int(CLOSE_S_MAX * 1000)
        for member in members:
            member.order(ev.Leave(slot=member.slot, leave=False))
        for member in members:
            if not member.wait_ended(max(0, deadline_ms - self._environment.now_ms()) / 1000):
                log.warning("a member did not close in time; its place in the group ends with its session")
        self._say(over=why)
        self._ended(why)

    # --- orders -----------------------------------------------------------------------------------------------------

    def _obey(self, client: int, order: ms.Order) -> None:
        if isinstance(order, ev.Join):
            self._start(order)
            return
        with self._changed:
            member = self._members.get(order.slot)
        if member is not None and member.client == client:
            member.order(order)

    def _start(self, join: ev.Join) -> None:
        member = Member(
            join,
            self._settings,
            environment=self._environment,
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

    # --- what members say, on their threads -------------------------------------------------------------------------

    def _report(self, join: ev.Join, event: ev.Event) -> None:
        match event:
            case ev.Assigned() | ev.Revoking() | ev.Lost() | ev.MemberFailed() | ev.MemberFenced():
                self._link.tell(event)
            case ev.MemberEnded():
                with self._changed:
                    if (member := self._members.get(join.slot)) is not None and member.client == join.client:
                        del self._members[join.slot]
                    me = (join.slot, join.client)
                    self._former = [member for member in self._former if (member.slot, member.client) != me]
                self._link.tell(event)
            case ev.InternalFailure():  # what cannot work here may work elsewhere
                failed = ev.MemberFailed(slot=join.slot, client=join.client, reason=str(event.error))
                self._link.tell(failed)
            case _:
                log.warning("a member says what no member says: %s", type(event).__name__)

    def _stock(self) -> tuple[ev.Buffered, ...]:
        with self._changed:
            members = list(self._members.values())
        held = [(member.slot, *self._buffered(member.held)) for member in members]
        return tuple(ev.Buffered(slot=slot, bytes=bytes_, rows=rows) for slot, bytes_, rows in held)

    def _say(
        self,
        *,
        number: int = 0,
        report: ms.Report | None = None,
        stock: tuple[ev.Buffered, ...] = (),
        over: str = "",
    ) -> None:
        self._send(
            ms.AgentReport(
                host=self._host,
                executor=self._executor,
                name=self._name,
                fresh=self._fresh,
                taken=self._link.taken,
                number=number,
                report=report,
                stock=stock,
                over=over,
            )
        )

    def _renamed(self, join: ev.Join, who: Identity | None) -> None:
        generation, member, metadata = (-1, "", "") if who is None else (*who[:2], bytes(who.metadata).hex())
        self._link.tell(
            ms.Known(slot=join.slot, client=join.client, generation=generation, member=member, metadata=metadata)
        )
