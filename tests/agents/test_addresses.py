"""The addresses at which the control server listens, and the hosts that executors try."""

import socket

import pytest

from spark_group_source.agents.control_server import ListenAddresses, listen_addresses


def test_coordinatorHost_is_the_only_advertised_host_and_a_local_address_is_the_only_one_to_listen_at() -> None:
    assert listen_addresses("127.0.0.1", "b:9092") == ListenAddresses(("127.0.0.1",), ("127.0.0.1",))
    # Executors may know an address that this host does not: NAT, a Kubernetes service.
    assert listen_addresses("192.0.2.7", "b:9092") == ListenAddresses((), ("192.0.2.7",))
    assert listen_addresses("no.such.host.invalid", "b:9092") == ListenAddresses((), ("no.such.host.invalid",))


def test_the_address_on_the_route_to_the_brokers_and_the_hosts_name_are_advertised() -> None:
    name = socket.gethostname()
    assert listen_addresses(None, "127.0.0.1:9092") == ListenAddresses((), ("127.0.0.1", name))
    assert listen_addresses(None, "SASL_SSL://no.such.host.invalid:1, 127.0.0.1:9092").advertised == ("127.0.0.1", name)
    assert listen_addresses(None, "no.such.host.invalid:1,nonsense").advertised == (name,)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_an_ipv6_route_is_advertised() -> None:
    assert listen_addresses(None, "[::1]:9092").advertised[0] == "::1"


def test_duplicate_hosts_are_advertised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.1")
    assert listen_addresses(None, "127.0.0.1:9092").advertised == ("127.0.0.1",)
