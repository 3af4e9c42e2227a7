"""Metrics as rows of a table, and the HTTP server that serves them at ``GET /metrics``.

Runs in: the stream reader, the exporter; an accepting thread and one thread per response. Deliberately absent: the
metrics themselves (``run``, ``groups``), TLS and authentication. A response contains numbers and the names of groups,
topics and hosts, but no records and no secrets. To restrict access, use network rules, or listen on 127.0.0.1 behind an
authenticating proxy.
"""

import contextlib
import errno
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from spark_group_source.errors import OptionError
from spark_group_source.kafka.environment import Environment

log = logging.getLogger(__name__)

PEER_S = 10.0
"""The timeout for receiving a whole request, and for sending the response."""
SCRAPES_MAX = 8
"""Concurrent responses; further connections are closed."""
ALL_ADDRESSES = "0.0.0.0"
BIND_RETRY_S = 0.25
"""The pause before another attempt to bind a port that is in use."""

Source = TypeVar("Source")
Sample = tuple[tuple[str, ...], float]
"""The values of the labels, and the value of the metric."""


class Metric(NamedTuple, Generic[Source]):
    """One metric: a row of a table."""

    name: str
    labels: tuple[str, ...]
    """The names of the labels."""
    samples: Callable[[Source, int], Iterable[Sample]]
    """Derives the samples from the values published last and the time of the publisher's clock in ms. An unknown value
    is left out, never 0."""
    doc: str
    """The help text in a scrape, and the metric's row in ``docs/metrics.md``."""

    @property
    def kind(self) -> Literal["gauge", "counter"]:
        """By Prometheus' conventions the names of counters end in ``_total``."""
        return "counter" if self.name.endswith("_total") else "gauge"


class MetricsCollector(Collector, Generic[Source]):
    """Collects the metrics of a table at each scrape; has no state.

    Args:
        last: returns the values published last; None: nothing so far.
        now_ms: the publisher's clock.
    """

    def __init__(
        self, metrics: Sequence[Metric[Source]], last: Callable[[], Source | None], *, now_ms: Callable[[], int]
    ) -> None:
        self._metrics, self._last, self._now_ms = metrics, last, now_ms

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        source, now_ms = self._last(), self._now_ms()
        for metric in self._metrics:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.doc, labels=metric.labels)
            for labels, value in () if source is None else metric.samples(source, now_ms):
                family.add_metric(labels, value)
            yield family


def since_s(then_ms: int | None, now_ms: int) -> float:
    """Return the seconds from a time of the publisher's clock to now; 0 for "never" (None or 0)."""
    return max(0, now_ms - then_ms) / 1000 if then_ms else 0.0


class Endpoint:
    """Serves a collector, and the process's memory and CPU time (``process_*``), until it is stopped.

    Args:
        collector: called at every scrape, on a thread of the server.
        host: the name or address to listen on; "": all IPv4 addresses of this host.
        port: the port to listen on; 0: any free one.
        option: the name of the port's option, for errors.
        wait_s: how long to wait for a port that is in use: a run that stops keeps its port for seconds.

    Raises:
        OptionError: it cannot listen on this address.
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
        self._server = _bound(host or ALL_ADDRESSES, port, option, wait_s, environment)
        self._server.set_app(make_wsgi_app(registry))
        self.port = int(self._server.server_address[1])
        self._thread = environment.spawn("metrics", self._server.serve_forever, died=_died)

    def stop(self) -> None:
        """Close the port at once. Idempotent."""
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = PEER_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        log.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    """The server of ``prometheus_client.start_http_server``, with a limit on connections and timeouts, and without the
    lookup of this host's name, which blocks while a name server does not answer."""

    daemon_threads = True

    def __init__(self, address: tuple[Any, ...], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._request_until_s: dict[Any, float] = {}
        """The open connections, each with the time until which its request must have arrived."""
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._request_until_s) >= SCRAPES_MAX:
            self.shutdown_request(request)
            return
        self._request_until_s[request] = time.monotonic() + PEER_S
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system cannot start more threads
            del self._request_until_s[request]
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._request_until_s[request]

    def service_actions(self) -> None:
        """Twice a second: end overdue requests. The handler's timeout bounds each read alone; a peer may send byte by
        byte."""
        for request, until_s in self._request_until_s.copy().items():
            if time.monotonic() >= until_s:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RD)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        log.debug("a scrape by %s failed: %s", client_address, sys.exception())


def _bound(host: str, port: int, option: str, wait_s: float, environment: Environment) -> _Server:
    until_ms = environment.now_ms() + wait_s * 1000
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return _Server(address, family)
        except (OSError, UnicodeError) as exc:  # UnicodeError: no name of a host has this form
            error, text = (exc.errno, exc.strerror) if isinstance(exc, OSError) else (0, "")
            if error != errno.EADDRINUSE or environment.now_ms() >= until_ms:
                in_use = "another process uses it. Stop that process, or set another port (0: any free one)"
                reason = in_use if error == errno.EADDRINUSE else text or str(exc)
                raise OptionError(
                    f"{option} is {port}, but this process cannot listen on that port ({host}): {reason}", option=option
                ) from exc
        environment.pause(BIND_RETRY_S)


def _died(exc: BaseException) -> None:
    log.warning("the metrics endpoint failed; metrics are not served any more: %r", exc)
