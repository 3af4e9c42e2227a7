"""Where the stream reader listens, and at which hosts executors try to reach it."""

import socket

import pytest

from spark_group_source.agents.control_server import Places, places


def test_what_the_user_says_counts_alone_and_limits_where_it_listens_if_it_is_an_own_address() -> None:
    assert places("127.0.0.1", "b:9092") == Places(("127.0.0.1",), ("127.0.0.1",))
    assert places("192.0.2.7", "b:9092") == Places((), ("192.0.2.7",))  # known to executors alone: NAT, a service
    assert places("no.such.host.invalid", "b:9092") == Places((), ("no.such.host.invalid",))


def test_executors_get_the_address_that_routes_to_the_brokers_and_the_hosts_name() -> None:
    name = socket.gethostname()
    assert places(None, "127.0.0.1:9092") == Places((), ("127.0.0.1", name))
    assert places(None, "SASL_SSL://no.such.host.invalid:1, 127.0.0.1:9092").told == ("127.0.0.1", name)
    assert places(None, "no.such.host.invalid:1,nonsense").told == (name,)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_an_address_of_ipv6_is_found_too() -> None:
    assert places(None, "[::1]:9092").told[0] == "::1"


def test_a_name_that_is_the_routed_address_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.1")
    assert places(None, "127.0.0.1:9092").told == ("127.0.0.1",)
