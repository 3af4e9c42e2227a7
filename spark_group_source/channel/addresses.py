"""Where the stream reader listens, and at which hosts executors try to reach it.

Runs in: the stream reader. Deliberately absent: packets to other hosts, except to the resolver of names.
"""

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple


class Places(NamedTuple):
    """``bind``: addresses to listen at, none for all of this host; ``told``: hosts that executors try, in order."""

    bind: tuple[str, ...]
    told: tuple[str, ...]


def places(coordinator_host: str | None, bootstrap_servers: str) -> Places:
    """Where to listen, and what to tell executors.

    Args:
        coordinator_host: as executors reach this host; it counts alone. It may be a name or an address that only
            executors know. An address of this host is also the only one to listen at.
        bootstrap_servers: the brokers. Without ``coordinator_host`` executors get the address of this host from which
            it reaches the brokers, a network that executors use too, and the host's name.
    """
    if coordinator_host:
        found = tuple(_resolved(coordinator_host))
        return Places(found if found and all(map(_is_own, found)) else (), (coordinator_host,))
    return Places((), tuple(dict.fromkeys([*_routed(bootstrap_servers), socket.gethostname()])))


def _routed(bootstrap_servers: str) -> list[str]:
    """This host's address on the way to the first broker whose name is known; connecting a UDP socket sends nothing."""
    for server in bootstrap_servers.split(","):
        host, _, port = server.strip().rpartition("/")[2].rpartition(":")
        with suppress(OSError, ValueError):
            for family, kind, protocol, _, where in socket.getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_DGRAM
            ):
                with suppress(OSError), socket.socket(family, kind, protocol) as way:
                    way.connect(where)
                    return [str(way.getsockname()[0])]
    return []


def _resolved(host: str) -> Iterator[str]:
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        yield from dict.fromkeys(str(where[0]) for *_, where in found)


def _is_own(address: str) -> bool:
    """Whether this host can listen there."""
    with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as tried:
        tried.bind((address, 0))
        return True
    return False
