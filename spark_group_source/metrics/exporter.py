"""The loop of ``spark-group exporter``: a sweep every interval, served to Prometheus as it ended.

Runs in: a process of its own, on its main thread. Deliberately absent: what is asked (``sweep``), and what is told
(``groups``). Kafka is asked at its own interval, however often and by how many Prometheus asks here.
"""

import threading

from spark_group_source.kafka import Runtime
from spark_group_source.metrics import groups
from spark_group_source.metrics.endpoint import Endpoint
from spark_group_source.metrics.sweep import Seen, Sweeps


class Exporter:
    """Sweeps until it is stopped.

    Args:
        sweeps: what looks at the groups.
        interval_s: from the beginning of one sweep to that of the next; a longer one is followed at once.
        host, port: as of :class:`Endpoint`.

    Raises:
        OptionError: it cannot listen there.
    """

    def __init__(
        self, sweeps: Sweeps, *, interval_s: float, host: str, port: int, runtime: Runtime | None = None
    ) -> None:
        self._sweeps, self._interval_s = sweeps, interval_s
        self._runtime = runtime or Runtime()
        self.last: Seen | None = None
        collector = groups.collector(lambda: self.last, now_ms=self._runtime.now_ms)
        self._endpoint = Endpoint(collector, host=host, port=port, option="--port", runtime=self._runtime)
        self.port = self._endpoint.port

    def sweep(self) -> Seen:
        """Look once, and tell that from now on."""
        self.last = seen = self._sweeps.sweep()
        return seen

    def run(self, stop: threading.Event) -> None:
        """Sweep every interval until ``stop`` is set."""
        while not stop.is_set():
            began_ms = self._runtime.now_ms()
            self.sweep()
            stop.wait(max(0.0, self._interval_s - (self._runtime.now_ms() - began_ms) / 1000))

    def close(self) -> None:
        """Free the port, and close every connection."""
        self._endpoint.stop()
        self._sweeps.close()
