"""Where the stream reader listens, and what executors are told."""

import socket

from spark_group_source.channel.addresses import ADDRESSES_MAX, own_addresses, places

OWN = ["127.0.0.1", "::1", "172.17.0.1", "fd00::5", "10.0.0.5"]


def test_a_driver_at_loopback_is_reached_at_loopback_only() -> None:
    assert places("127.0.0.1", None, OWN) == (("127.0.0.1",), ("127.0.0.1",))
    assert places("localhost", None, OWN) == (("127.0.0.1",), ("127.0.0.1",))
    assert places("::1", None, OWN) == (("::1",), ("::1",))


def test_the_address_at_which_executors_reach_the_driver_comes_first_and_bridges_come_last() -> None:
    assert places("driver.example", None, OWN) == ((), ("driver.example", "10.0.0.5", "fd00::5", "172.17.0.1"))
    assert places("10.0.0.5", None, OWN).told == ("10.0.0.5", "fd00::5", "172.17.0.1")
    assert places(None, None, OWN).told == ("10.0.0.5", "fd00::5", "172.17.0.1")


def test_a_host_without_a_network_has_loopback() -> None:
    assert places(None, None, ["127.0.0.1"]) == (("127.0.0.1",), ("127.0.0.1",))


def test_the_users_word_counts_alone() -> None:
    assert places("driver.example", "10.0.0.5", OWN) == (("10.0.0.5",), ("10.0.0.5",))
    assert places("127.0.0.1", "192.0.2.77", OWN) == ((), ("192.0.2.77",))  # behind an address translation
    assert places(None, "127.0.0.1", ["10.0.0.5"]) == (("127.0.0.1",), ("127.0.0.1",))


def test_few_are_told() -> None:
    assert len(places(None, None, [f"10.0.0.{n}" for n in range(1, 30)]).told) == ADDRESSES_MAX


def test_this_hosts_addresses_can_be_listened_at() -> None:
    found = own_addresses()
    assert "127.0.0.1" in found
    for address in found:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.create_server((address, 0), family=family).close()
