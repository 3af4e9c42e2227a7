"""The metrics endpoint: ports, addresses, and slow or too many clients."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from kafka_helpers import await_until
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from metrics.scrapes import scrape, value
from spark_group_source.errors import OptionError
from spark_group_source.metrics import endpoint
from spark_group_source.metrics.endpoint import Endpoint

HANG_S = 600


class Counted(Collector):
    """Counts its scrapes."""

    def __init__(self) -> None:
        self.scrapes = 0

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.scrapes += 1
        yield GaugeMetricFamily("scrapes", "How often.", self.scrapes)


@pytest.fixture
def serving() -> Iterator[Endpoint]:
    one = Endpoint(Counted(), port=0, option="metricsPort")
    yield one
    one.stop()


def test_every_scrape_collects_current_values(serving: Endpoint) -> None:
    before = value(scrape(serving.port), "scrapes")
    assert value(scrape(serving.port), "scrapes") == before + 1
    assert value(scrape(serving.port), "process_resident_memory_bytes") > 0


def test_a_port_in_use_is_refused_or_waited_for(serving: Endpoint) -> None:
    with pytest.raises(OptionError, match=f"metricsPort is {serving.port}.*another process uses it") as caught:
        Endpoint(Counted(), port=serving.port, option="metricsPort")
    assert "\n" not in str(caught.value)
    serving.stop()
    Endpoint(Counted(), port=serving.port, option="metricsPort", wait_s=HANG_S).stop()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 64])
def test_an_address_of_another_host_is_refused_at_once(host: str) -> None:
    with pytest.raises(OptionError, match=f"cannot listen on that port \\({host}\\)"):
        Endpoint(Counted(), host=host, port=0, option="metricsPort", wait_s=60)


def test_idle_connections_do_not_exceed_the_limit(serving: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PEER_S", 2 * HANG_S)
    silent = [socket.create_connection(("127.0.0.1", serving.port)) for _ in range(endpoint.SCRAPES_MAX + 1)]
    silent[-1].settimeout(HANG_S)
    assert silent[-1].recv(1) == b"", "the one too many is closed"
    for one in silent:
        one.close()

    def answers() -> bool:
        try:
            return bool(scrape(serving.port))
        except OSError:
            return False

    await_until(answers, what="an answer once they are gone")


def test_requests_that_arrive_byte_by_byte_are_ended(serving: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PEER_S", 0.1)
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", serving.port)))
            for _ in range(endpoint.SCRAPES_MAX)
        ]

        def answers() -> bool:
            with contextlib.suppress(OSError):
                for one in peers:
                    one.sendall(b"G")
            try:
                return bool(scrape(serving.port))
            except OSError:
                return False

        await_until(answers, what="an answer although all peers go on")


def test_scrapes_are_answered_again_after_no_thread_could_be_started(
    serving: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter(range(endpoint.SCRAPES_MAX))

    class Thread(threading.Thread):
        def start(self) -> None:
            if next(failures, None) is not None:
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(threading, "Thread", Thread)
    for _ in range(endpoint.SCRAPES_MAX):
        with pytest.raises(OSError):
            scrape(serving.port)
    assert value(scrape(serving.port), "scrapes") == 1
