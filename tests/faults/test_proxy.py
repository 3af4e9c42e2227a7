"""The effect of each proxy fault on a plain connection, without a broker."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from kafka_helpers import await_until
from kit.proxy import CLEAR, Conditions, Direction, Proxy

REPLY_S = 600
SILENCE_S = 0.3
"""How long to wait for the absence of data."""
LARGE = bytes(range(256)) * 8192
HOUR_S = 3600.0
MOMENTS = 500
"""Connections that are reset, each at another moment of its start."""


class Echo:
    """An echo server; ``ended`` has how each of its connections ended."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.received_bytes = 0
        self.ended: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    self.received_bytes += len(data)
                    connection.sendall(data)
                self.ended.append("closed")
            except ConnectionError:
                self.ended.append("reset")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(target=echo.address) as started:
        yield started


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    """A connection that has been used once."""
    with connect(proxy) as connection:
        assert echoed(connection, b"hello") == b"hello"
        yield connection


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=REPLY_S)


def echoed(connection: socket.socket, data: bytes) -> bytes:
    sending = threading.Thread(target=connection.sendall, args=(data,))
    sending.start()
    answer = received(connection, len(data))
    sending.join(REPLY_S)
    return answer


def received(connection: socket.socket, count: int) -> bytes:
    """Receive this many bytes, or those before the connection's end."""
    found = b""
    while len(found) < count and (data := connection.recv(count - len(found))):
        found += data
    return found


def silent(connection: socket.socket) -> bool:
    """Assert that neither data nor the end arrives."""
    connection.settimeout(SILENCE_S)
    try:
        return connection.recv(1) is None
    except TimeoutError:
        return True
    finally:
        connection.settimeout(REPLY_S)


def test_everything_passes_in_both_directions(proxy: Proxy, client: socket.socket) -> None:
    with connect(proxy) as other:
        assert echoed(client, LARGE) == LARGE
        assert echoed(other, b"second") == b"second"
        assert proxy.connections == 2
        assert proxy.passed == dict.fromkeys(Direction, len(LARGE) + len("hellosecond"))


@pytest.mark.parametrize("direction", Direction)
def test_delayed_bytes_arrive_after_the_delay_or_its_removal(
    direction: Direction, proxy: Proxy, client: socket.socket
) -> None:
    proxy.set_conditions(Conditions(delay_s=0.1), direction)
    assert echoed(client, LARGE) == LARGE
    proxy.set_conditions(Conditions(delay_s=HOUR_S), direction)
    client.sendall(b"later")
    assert silent(client)
    proxy.heal()
    assert received(client, 5) == b"later"


def test_a_limited_bandwidth_slows_transfer(proxy: Proxy, client: socket.socket) -> None:
    before = proxy.passed[Direction.TO_CLIENT]
    proxy.set_conditions(Conditions(bytes_per_s=40), Direction.TO_CLIENT)
    client.sendall(LARGE[:100_000])
    assert received(client, 4) == LARGE[:4]
    assert 4 <= proxy.passed[Direction.TO_CLIENT] - before < 10_000
    proxy.set_conditions(CLEAR)
    assert received(client, 99_996) == LARGE[4:100_000]


def test_a_connection_stops_at_a_byte_count_until_the_limit_is_removed(proxy: Proxy, client: socket.socket) -> None:
    proxy.set_conditions(Conditions(stop_at_bytes=proxy.passed[Direction.TO_CLIENT] + 4), Direction.TO_CLIENT)
    assert echoed(client, b"four") == b"four"
    client.sendall(b"more")
    assert silent(client)
    proxy.set_conditions(CLEAR)
    assert received(client, 4) == b"more"


def test_a_refusing_port_resets_and_refuses_connections(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    proxy.refuse()
    assert proxy.refusing
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
    proxy.refuse()  # refused connections stay refused
    await_until(lambda: echo.ended == ["reset"], REPLY_S, what="a reset at the server")
    proxy.accept()
    with connect(proxy) as again:
        assert echoed(again, b"back") == b"back"


def test_a_reset_closes_both_ends_and_new_connections_pass(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    assert proxy.reset() == 1
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    await_until(lambda: echo.ended == ["reset"], REPLY_S, what="a reset at the server")
    with connect(proxy) as again:
        assert echoed(again, b"new") == b"new"


@pytest.mark.parametrize("direction", Direction)
def test_dropped_bytes_leave_the_connection_open(
    direction: Direction, proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    proxy.set_conditions(Conditions(drop=True), direction)
    client.sendall(b"anybody?")
    arrived = len("hello") + (0 if direction is Direction.TO_SERVER else len("anybody?"))
    await_until(lambda: echo.received_bytes >= arrived, what="what passes")
    assert silent(client)
    assert (echo.received_bytes, echo.ended, proxy.connections) == (arrived, [], 1)
    proxy.heal()
    with pytest.raises(ConnectionResetError):
        client.recv(1)  # what arrives now is not the next byte


def test_the_client_of_a_half_open_connection_receives_nothing(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    assert proxy.half_open(Direction.TO_CLIENT) == 1
    await_until(lambda: echo.ended == ["reset"], REPLY_S, what="the server's end")
    client.sendall(b"anybody?")
    assert silent(client)
    assert echo.received_bytes == len("hello")
    with connect(proxy) as other:
        assert echoed(other, b"new") == b"new"
    proxy.heal()
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_the_server_of_a_half_open_connection_receives_nothing(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    assert proxy.half_open(Direction.TO_SERVER) == 1
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert (echo.ended, proxy.connections) == ([], 1)
    proxy.heal()
    await_until(lambda: echo.ended == ["reset"], REPLY_S, what="the server's end")


@pytest.mark.parametrize("count", [1, 300, 100_000])
def test_a_response_is_reset_in_the_middle(count: int, proxy: Proxy, client: socket.socket) -> None:
    proxy.set_conditions(Conditions(reset_after_bytes=count), Direction.TO_CLIENT)
    for connection in (client, connect(proxy)):
        with connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(LARGE[: 2 * count])
            with contextlib.suppress(ConnectionResetError):
                assert received(connection, 2 * count) == LARGE[:count]
    proxy.heal()
    with connect(proxy) as again:
        assert echoed(again, LARGE) == LARGE


def test_without_a_server_connections_are_reset() -> None:
    with Proxy() as proxy:
        with pytest.raises(ConnectionResetError), connect(proxy) as connection:  # connect may already fail
            connection.recv(1)
        probe = socket.create_server(("127.0.0.1", 0))
        proxy.target = probe.getsockname()
        probe.close()
        with pytest.raises(ConnectionResetError), connect(proxy) as another:
            another.recv(1)


def test_a_connection_that_is_reset_while_it_is_opened_closes(proxy: Proxy) -> None:
    """A cancellation that coincides with the server's response is not lost: ``reset`` returns each time."""
    for _ in range(MOMENTS):
        with socket.create_connection(("127.0.0.1", proxy.port), REPLY_S):
            proxy.reset()
    await_until(lambda: proxy.connections == 0, what="no connection is left")
