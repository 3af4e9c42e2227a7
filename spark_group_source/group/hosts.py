"""The agents that may host members of ours: who is there, who stays, whose lease is over.

Runs in: the stream reader (inside ``lending``), tests. Deliberately absent: which slot is where
(``lending``), channels.

An agent is known by an id of its own, and runs for one executor. Its lease begins anew whenever it is heard. A channel
that is cut is no lost host: the agent may come back within its lease, under the same id. One that comes back later, or
was admitted by a former run, is dismissed: its slots are elsewhere.
"""

from collections import deque
from dataclasses import dataclass

from spark_group_source.group import events as ev
from spark_group_source.group.outbox import Outbox
from spark_group_source.group.positions import NotInTable
from spark_group_source.group.rules import Rules
from spark_group_source.group.states import HOSTS, HostState

STAY_MS = 5_000
"""How long an agent must have stayed before slots are lent to it: executors that come together are one change."""
PUT_OFF_MS = 60_000
"""How long an agent is lent nothing from which a slot could not join the group."""
HOSTS_MAX = 5_000
"""Agents at a time; more are dismissed."""
GONE_MAX = 1_000
"""Ids of agents that are gone, which are dismissed when they come back as if they were new."""


@dataclass(slots=True)
class Host:
    """One agent. ``since_ms``: since when it stays; ``put_off_until_ms``: it is lent nothing before."""

    id: str
    executor: str
    name: str
    since_ms: int
    heard_ms: int
    state: HostState = HostState.NEW
    put_off_until_ms: int = 0


class Hosts:
    """All agents of one run.

    Args:
        rules: the lease.
        out: takes orders and log lines; it has the time.
    """

    def __init__(self, rules: Rules, out: Outbox) -> None:
        self._rules, self._out = rules, out
        self.all: dict[str, Host] = {}
        self._gone: deque[str] = deque(maxlen=GONE_MAX)

    # --- events: each returns who is lost by it, and why -------------------------------------------------------------

    def came(self, event: ev.HostCame) -> dict[str, str]:
        now_ms, known = self._out.now_ms, self.all.get(event.host)
        if known is not None:
            if known.state is HostState.CUT:
                known.since_ms = now_ms
            self._move(known, ev.HostCame)
            known.heard_ms = now_ms
            self._out.order(ev.Admit(host=event.host))
            return {}
        if not event.fresh or event.host in self._gone:
            self._dismiss(event.host, "it is none of this run's, or its lease is over")
            return {}
        lost = {}
        for twin in [host for host in self.all.values() if host.executor == event.executor]:
            lost[twin.id] = self._lose(twin, ev.TwinCame, "a newer agent of its executor came")
        if len(self.all) >= HOSTS_MAX:
            self._dismiss(event.host, f"there are {HOSTS_MAX} agents")
            return lost
        self.all[event.host] = Host(event.host, event.executor, event.name, now_ms, now_ms)
        self._out.order(ev.Admit(host=event.host))
        return lost

    def heard(self, event: ev.HostHeard) -> None:
        host = self.all.get(event.host)
        if host is None:
            self._dismiss(event.host, "it is none of this run's, or its lease is over")
        else:
            host.heard_ms = self._out.now_ms

    def cut(self, event: ev.HostCut) -> None:
        host = self.all.get(event.host)
        if host is not None and host.state is not HostState.CUT:
            self._move(host, ev.HostCut)

    def gone(self, event: ev.HostGone) -> dict[str, str]:
        host = self.all.get(event.host)
        return {} if host is None else {host.id: self._lose(host, ev.HostGone, event.reason)}

    def tick(self) -> dict[str, str]:
        now_ms = self._out.now_ms
        lost = {}
        for host in list(self.all.values()):
            silent_ms = now_ms - host.heard_ms
            if silent_ms >= self._rules.lease_ms:
                lost[host.id] = self._lose(host, ev.LeaseOver, f"it was not heard for {silent_ms} ms")
            elif host.state is HostState.NEW and now_ms - host.since_ms >= STAY_MS:
                self._move(host, ev.Stayed)
        return lost

    def put_off(self, id_: str) -> None:
        """A slot could not join from there."""
        if (host := self.all.get(id_)) is not None:
            host.put_off_until_ms = self._out.now_ms + PUT_OFF_MS

    # --- what may be asked ------------------------------------------------------------------------------------------

    def ready(self) -> list[Host]:
        """Those that slots may be lent to, in the order in which they came."""
        now_ms = self._out.now_ms
        return [h for h in self.all.values() if h.state is HostState.HERE and now_ms >= h.put_off_until_ms]

    def coming(self) -> bool:
        """Whether some have come that must stay for a while."""
        return any(host.state is HostState.NEW for host in self.all.values())

    def reaches(self, id_: str) -> bool:
        """Whether a slot that is lent to it may join from there again."""
        host = self.all.get(id_)
        return host is not None and host.state is not HostState.CUT and self._out.now_ms >= host.put_off_until_ms

    def name(self, id_: str) -> str:
        """As people know it; empty for the stream reader itself."""
        host = self.all.get(id_)
        return id_ if host is None else host.name or host.executor

    def deadlines_ms(self) -> list[int]:
        leases = [host.heard_ms + self._rules.lease_ms for host in self.all.values()]
        return leases + [host.since_ms + STAY_MS for host in self.all.values() if host.state is HostState.NEW]

    # --- changes ----------------------------------------------------------------------------------------------------

    def _lose(self, host: Host, cause: type, why: str) -> str:
        self._move(host, cause)
        del self.all[host.id]
        self._gone.append(host.id)
        self._dismiss(host.id, why)
        return f"agent {host.name or host.executor} is gone: {why}"

    def _dismiss(self, id_: str, reason: str) -> None:
        self._out.order(ev.Dismiss(host=id_, reason=reason))

    def _move(self, host: Host, cause: type) -> None:
        to = HOSTS.get((host.state, cause))
        if to is None:
            raise NotInTable(f"host {host.id}: {cause.__name__} in state {host.state.value}")
        host.state = to
