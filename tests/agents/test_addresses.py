"""The addresses at which the control server listens, and the hosts that executors try."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from spark_group_source.agents import agent_folder, control_server
from spark_group_source.agents.agent_folder import ProcessId
from spark_group_source.agents.control_server import ControlServer, ListenAddresses
from spark_group_source.options.table import Options

SOON_S = 600
GIVEN = {"kafka.bootstrap.servers": "127.0.0.1:9092", "kafka.group.id": "g", "subscribe": "orders"}
listen_addresses = partial(control_server.listen_addresses, local_mode=False)


def test_coordinatorHost_is_the_only_advertised_host_and_a_local_address_is_the_only_one_to_listen_at() -> None:
    assert listen_addresses("127.0.0.1", "b:9092") == ListenAddresses(("127.0.0.1",), ("127.0.0.1",))
    # Executors may know an address that this host does not: NAT, a Kubernetes service.
    assert listen_addresses("192.0.2.7", "b:9092") == ListenAddresses((), ("192.0.2.7",))
    assert listen_addresses("driver..svc", "b:9092") == ListenAddresses((), ("driver..svc",))
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


# --- local mode -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def executor_in_this_process() -> Iterator[None]:
    """A thread with the name of one that Spark starts in each JVM with an executor."""
    is_named, ended = threading.Event(), threading.Event()

    def heartbeat() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("executor-heartbeater")
        is_named.set()
        ended.wait(SOON_S)

    thread = threading.Thread(target=heartbeat)
    thread.start()
    try:
        assert is_named.wait(SOON_S)
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("has_executor", "coordinator_host", "is_reached"),
    [(True, None, False), (True, "127.0.0.2", True), (False, None, True)],
)
def test_in_local_mode_the_server_listens_at_one_loopback_address_unless_coordinatorHost_is_set(
    monkeypatch: pytest.MonkeyPatch, has_executor: bool, coordinator_host: str | None, is_reached: bool
) -> None:
    """This process is in place of the driver's JVM. 127.0.0.2 is in place of the host's address in a network."""
    monkeypatch.setattr(agent_folder, "find_executor", lambda: ProcessId.of(os.getpid()))
    more = {} if coordinator_host is None else {"coordinatorHost": coordinator_host}
    with executor_in_this_process() if has_executor else contextlib.nullcontext():
        local_mode = agent_folder.is_local_mode()
    server = ControlServer(
        Options.parse(GIVEN | more),
        local_mode=local_mode,
        uses_agents=True,
        agents=Mock(),
        died=lambda _: None,
        on_task_report=lambda _: None,
    )
    server.start()
    try:
        host, port = server.addresses[0]
        socket.create_connection((host, port), SOON_S).close()
        with contextlib.nullcontext() if is_reached else pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), SOON_S).close()
    finally:
        server.stop()
