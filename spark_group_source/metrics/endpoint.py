"""Metrics as rows of a table, and the HTTP server that answers ``GET /metrics`` with them.

Runs in: the stream reader, the exporter; a thread that accepts, and one for each answer. Deliberately absent: which
metrics there are (``run``, ``groups``), TLS and passwords. An answer holds names of groups, topics and hosts, and
numbers: no records and no secrets. To keep it from others, use rules of the network, or listen on 127.0.0.1 behind a
proxy that authenticates.
"""

import contextlib
import errno
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from spark_group_source.errors import OptionError
from spark_group_source.kafka import Environment

log = logging.getLogger(__name__)

PEER_S = 10.0
"""How long a peer may take for its question, and for taking the answer."""
SCRAPES_MAX = 8
"""Answers at one time; more connections are closed."""
ANY = "0.0.0.0"
AGAIN_S = 0.25
"""Between two tries to get a port that another process has."""

Of = TypeVar("Of")
Sample = tuple[tuple[str, ...], float]
"""The values of the labels, and that of the metric."""


class Metric(NamedTuple, Generic[Of]):
    """One row of a table. ``samples`` reads it off what was published last, at a time of the publisher's clock (ms); a
    value that is not known is left out, never 0."""

    name: str
    labels: tuple[str, ...]
    samples: Callable[[Of, int], Iterable[Sample]]
    doc: str

    @property
    def kind(self) -> Literal["gauge", "counter"]:
        """By Prometheus' conventions what only grows ends in ``_total``."""
        return "counter" if self.name.endswith("_total") else "gauge"


class Published(Collector, Generic[Of]):
    """The metrics of a table, as ``prometheus_client`` asks for them at each scrape; has no state.

    Args:
        metrics: the table.
        last: what was published last; None: nothing so far.
        now_ms: the publisher's clock.
    """

    def __init__(
        self, metrics: Sequence[Metric[Of]], last: Callable[[], Of | None], *, now_ms: Callable[[], int]
    ) -> None:
        self._metrics, self._last, self._now_ms = metrics, last, now_ms

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        of, now_ms = self._last(), self._now_ms()
        for metric in self._metrics:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.doc, labels=metric.labels)
            for labels, value in () if of is None else metric.samples(of, now_ms):
                family.add_metric(labels, value)
            yield family


def since_s(then_ms: int | None, now_ms: int) -> float:
    """Seconds from a time of the publisher's clock to now; 0 for "never" (None or 0)."""
    return max(0, now_ms - then_ms) / 1000 if then_ms else 0.0


class Endpoint:
    """Serves one collector, and the process's memory and CPU time (``process_*``), until it is stopped.

    Args:
        collector: asked at every scrape, on a thread of the server's.
        host: a name or address of this machine to listen at; "": all its IPv4 addresses.
        port: 0: any free one.
        option: what the port is called where it is set, for errors.
        wait_s: how long a port is waited for that another process has: a run that ends keeps its own for seconds.

    Raises:
        OptionError: it cannot listen there.
    """

    def __init__(
        self,
        collector: Collector,
        *,
        host: str = "",
        port: int,
        option: str,
        wait_s: float = 0.0,
        environment: Environment | None = None,
    ) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        environment = environment or Environment()
        self._server = _bound(host or ANY, port, option, wait_s, environment)
        self._server.set_app(make_wsgi_app(registry))
        self.port = int(self._server.server_address[1])
        self._thread = environment.spawn("metrics", self._server.serve_forever, died=_died)

    def stop(self) -> None:
        """Free the port at once. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = PEER_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        log.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    """What ``prometheus_client.start_http_server`` starts, with a bound on peers and their time, and without its
    question for this machine's name, which may take as long as a name server does not answer."""

    daemon_threads = True

    def __init__(self, address: tuple[Any, ...], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._places = threading.BoundedSemaphore(SCRAPES_MAX)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        log.debug("a scrape by %s failed: %s", client_address, sys.exception())


def _bound(host: str, port: int, option: str, wait_s: float, environment: Environment) -> _Server:
    until_ms = environment.now_ms() + wait_s * 1000
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return _Server(address, family)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or environment.now_ms() >= until_ms:
                taken = "another process has it. Free it, or choose another; 0 takes any free one"
                why = taken if exc.errno == errno.EADDRINUSE else exc.strerror or str(exc)
                raise OptionError(
                    f"{option} is {port}, and this process cannot listen there ({host}): {why}", option=option
                ) from exc
        environment.pause(AGAIN_S)


def _died(exc: BaseException) -> None:
    log.warning("metrics are not served any more: %r", exc)
