"""Where the stream reader listens, and under which addresses executors are told to reach it.

Runs in: the stream reader. Deliberately absent: connecting to anything outside this host, and asking Spark: the stream
reader has no session, and is told the driver's host.
"""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

ADDRESSES_MAX: Final = 8
"""Each that does not answer costs a task a moment. A host with more has networks that executors are not in."""
IF_INET6: Final = Path("/proc/net/if_inet6")
SIOCGIFADDR: Final = 0x8915
"""Linux: the IPv4 address of an interface."""


class Places(NamedTuple):
    """``bind``: addresses to listen at, none for all of this host; ``told``: hosts that executors try, in order."""

    bind: tuple[str, ...]
    told: tuple[str, ...]


def places(driver_host: str | None, coordinator_host: str | None, own: Iterable[str] | None = None) -> Places:
    """Where to listen, and what to tell executors.

    Args:
        driver_host: as Spark's driver is reached by executors (``spark.driver.host``), None where that is not known.
            When it is this host's loopback, executors are on this host and nobody else should reach the channel.
        coordinator_host: the user's word, which counts alone. It may be a name or an address that only executors know.
        own: this host's addresses; asked for when not given.
    """
    found = tuple(own_addresses() if own is None else own)
    if coordinator_host:
        of_it = _resolved(coordinator_host)
        return Places(of_it if of_it and set(of_it) <= {*found, *_LOOPBACK} else (), (coordinator_host,))
    if driver_host and _means_loopback(driver_host):
        address = driver_host if driver_host != "localhost" else "127.0.0.1"
        return Places((address,), (address,))
    outside = [each for each in found if not _is_loopback(each)]
    if not outside and not driver_host:
        return Places(("127.0.0.1",), ("127.0.0.1",))
    told = dict.fromkeys([*([driver_host] if driver_host else []), *sorted(outside, key=_unlikely)])
    return Places((), tuple(told)[:ADDRESSES_MAX])


_LOOPBACK: Final = ("127.0.0.1", "::1")


def own_addresses() -> list[str]:
    """The addresses of this host's interfaces, those of IPv6 that are valid on one link only left out."""
    found = dict.fromkeys([*_of_interfaces(), *_of_ipv6(), *_resolved(socket.gethostname())])
    return [each for each in found if not ipaddress.ip_address(each).is_link_local]


def _of_interfaces() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
            except OSError:  # it has none, or this is not Linux
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return found


def _of_ipv6() -> list[str]:
    try:
        lines = IF_INET6.read_text().split("\n")
    except OSError:  # no IPv6, or not Linux
        return []
    return [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines if line]


def _resolved(host: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(where[0]).partition("%")[0] for *_, where in found))


def _means_loopback(host: str) -> bool:
    """By its own words. Many hosts find their own name at 127.0.1.1, where others find it at its real address."""
    try:
        return _is_loopback(host)
    except ValueError:
        return host == "localhost"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _unlikely(address: str) -> tuple[bool, bool]:
    """Sorts addresses: IPv4 before IPv6, and those of containers' bridges, which every host has for itself, last."""
    parsed = ipaddress.ip_address(address)
    return parsed.version == 4 and parsed in _BRIDGES, parsed.version == 6


_BRIDGES: Final = ipaddress.ip_network("172.17.0.0/16")
"""Docker's own."""
