"""Runs without Spark: a coordinator driven as Spark drives it, with a gate before the sink.

Runs in: tests, and in a child process of theirs (:class:`RunProcess` starts this file), so that a run can be killed and
frozen. Deliberately absent: judgements (``accounts``).
"""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a child process: make the test modules importable, as pytest does
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from kafka_helpers import STALLED_S, await_progress, size_of
from streams import Engine

from rebalance.child import Child
from spark_group_source.host import run_files as progress
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset, parse

log = logging.getLogger(__name__)

GATE_S = 600
"""The longest time that a test keeps a batch in flight."""
CLOSE_S = 600

Record = tuple[str, int, int]
"""topic, partition, offset"""


class Run:
    """One run of a query on its own thread: plan, read, sink, repeat.

    Args:
        options: as a user writes them.
        log: offsets of earlier runs of the stream, as in its checkpoint; all are durable.
        file: the sink: a line for each durable record, and one for each durable batch (``B`` and its offset).
        available_now: fix its end offsets first, as an AvailableNow run does.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        log: Sequence[str] = (),
        *,
        file: Path | None = None,
        available_now: bool = False,
    ) -> None:
        self.engine = Engine(options, log)
        self.planned: list[StreamOffset] = []
        self.durable_at_s: list[float] = []
        self.error: BaseException | None = None
        self._file = file
        self._available_now = available_now
        self._gate = threading.Event()
        self._gate.set()
        self._trigger = threading.Event()
        self._trigger.set()
        self._full = threading.Event()
        self._ending = threading.Event()
        self._resting = threading.Event()
        self._idle = 0
        self._thread = threading.Thread(target=self._drive, name="spark", daemon=True)
        self._thread.start()

    def _drive(self) -> None:
        try:
            if self._available_now:
                self.engine.coordinator.prepare_available_now()
            while not self._ending.is_set():
                if not self._trigger.is_set():
                    self._resting.set()
                    self._trigger.wait(GATE_S)
                    self._resting.clear()
                    continue
                end = self.engine.plan()
                if end is None:
                    self._idle += 1
                    continue
                rows = self.engine.read(end)
                self.planned.append(end)
                if rows:
                    if not self._gate.is_set():
                        log.info("batch in flight: %s", end.to_json())
                    self._full.set()
                    self._gate.wait(GATE_S)
                self._keep(end, [(row.topic, row.partition, row.offset) for row in rows])
                self.engine.rows += rows
                self.engine.log.append(end.to_json())
                self.durable_at_s.append(time.monotonic())
                self._full.clear()
        except BaseException as exc:  # noqa: BLE001 - the test checks it
            self.error = exc

    def _keep(self, end: StreamOffset, rows: Sequence[Record]) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as out:
                out.writelines(f"P {topic} {partition} {offset}\n" for topic, partition, offset in rows)
                out.write(f"B {end.to_json()}\n")

    # --- the gate before the sink -----------------------------------------------------------------------------------

    def rest(self) -> None:
        """Pause between two triggers, until :meth:`hold` or :meth:`let_go`."""
        self._trigger.clear()
        self.await_(self._resting.is_set, "the end of the trigger")

    def hold(self) -> StreamOffset:
        """Keep the next batch with records in flight; return its plan."""
        self._gate.clear()
        self._trigger.set()
        await_progress(self._holds, self.progress, what="a batch in flight")
        return self.planned[-1]

    def let_go(self) -> float:
        """Make the batch in flight durable; return the time."""
        before = len(self.durable_at_s)
        self._trigger.set()
        self._gate.set()
        self.await_(lambda: len(self.durable_at_s) > before, "the batch in flight to become durable")
        return self.durable_at_s[before]

    def _holds(self) -> bool:
        self.check()
        return self._full.is_set()

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def records(self) -> list[Record]:
        """Every durable record, in order."""
        return [(row.topic, row.partition, row.offset) for row in list(self.engine.rows)]

    @property
    def statistics(self) -> dict[str, Any]:
        return self.engine.coordinator._run.statistics().as_dict()

    @property
    def partitions(self) -> set[TopicPartition]:
        """The partitions of its members."""
        return set(self.engine.coordinator._run.partitions.ours.keys())

    def progress(self) -> object:
        """Its progress, for ``await_progress``: batches, partitions, the states of its slots."""
        slots = self.statistics["slots"]
        return len(self.planned), len(self.durable_at_s), frozenset(self.partitions), tuple(slots)

    def await_(self, holds: Any, what: str, stalled_s: float = STALLED_S) -> None:
        def look() -> bool:
            self.check()
            return bool(holds())

        await_progress(look, self.progress, stalled_s, what=what)

    def await_partitions(self, count: int, stalled_s: float = STALLED_S) -> None:
        self.await_(lambda: len(self.partitions) == count, f"{count} partitions in the run", stalled_s)

    def await_idle(self) -> None:
        """Wait until two triggers in a row found no records: earlier durable offsets are committed or being
        committed."""
        before = self._idle
        self.await_(lambda: self._idle >= before + 2, "an idle run")

    def await_echo(self) -> None:
        """Let one more trigger report the durable offset to the source, as in a query that is stopped gracefully
        between two batches; then stop before the next batch."""
        self.rest()
        self.engine.coordinator._handle(ev.Durable(offset=parse(self.engine.log[-1])))

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._ending.set()
        self._trigger.set()
        self._gate.set()
        self._thread.join(CLOSE_S)
        assert not self._thread.is_alive(), "the run did not end"
        self.engine.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        if kind is None:
            self.check()


class RunProcess(Child):
    """A :class:`Run` in its own process. Its sink and checkpoint are one file, from which the next one continues.

    Args:
        held: keep the first batch with records in flight until :meth:`let_go`.
    """

    def __init__(self, options: Mapping[str, str], file: Path, *, held: bool = False) -> None:
        super().__init__(file, CLOSE_S)
        self._group = options["kafka.group.id"]
        arguments = {"options": dict(options), "file": str(file), "earlier": self.offsets(), "held": held}
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def rest(self) -> None:
        """Pause between two triggers, until the command to hold: records produced meanwhile are in one batch."""
        before = self.output.count("resting")
        self.send("rest")
        await_progress(lambda: self.output.count("resting") > before, self.progress, what="the end of the trigger")

    def await_in_flight(self) -> None:
        """Wait for a batch with records, after the command to hold."""
        await_progress(lambda: "batch in flight" in self.output, self.progress, what="a batch in flight")

    def await_partitions(self, count: int) -> None:
        await_progress(
            lambda: sum(self.statistics.get("assigned", [])) == count,
            self.progress,
            what=f"{count} partitions at the run",
        )

    def progress(self) -> object:
        """Its output and its slots, for ``await_progress``."""
        return size_of(self.file, self.file.with_suffix(".log")), self.statistics.get("slots")

    @property
    def statistics(self) -> dict[str, Any]:
        """What the run publishes on this host; nothing until it starts."""
        return next((doc for doc in progress.read(self._group) if doc["pid"] == self.process.pid), {})

    def close(self) -> None:
        """Stop it gracefully: the batch in flight is finished."""
        self.end("close")

    @property
    def output(self) -> str:
        """Its output: the log, and the error that stopped it."""
        return self.file.with_suffix(".log").read_text(errors="replace")

    @property
    def records(self) -> list[Record]:
        lines = (line.split() for line in self._lines() if line.startswith("P "))
        return [(topic, int(partition), int(offset)) for _, topic, partition, offset in lines]

    def offsets(self) -> list[str]:
        return [line[2:] for line in self._lines() if line.startswith("B ")]

    def last(self) -> StreamOffset:
        return parse(self.offsets()[-1])

    def _lines(self) -> list[str]:
        return self.file.read_text().rpartition("\n")[0].splitlines() if self.file.exists() else []


STOPPED = os.pipe() if __name__ == "__main__" else (-1, -1)
"""Readable after SIGTERM."""


def _serve(options: dict[str, str], file: str, earlier: list[str], held: bool) -> None:
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s")
    run = Run(options, earlier, file=Path(file))
    if held:
        run._gate.clear()
    signal.signal(signal.SIGTERM, lambda *_: os.close(STOPPED[1]))
    for line in _orders():
        match line.strip():
            case "rest":
                run.rest()
                logging.getLogger(__name__).info("resting")
            case "hold":
                run._gate.clear()
                run._trigger.set()
            case "let_go":
                run._gate.set()
            case "close":
                break
    run.await_echo()
    run.close()
    run.check()


def _orders() -> Iterator[str]:
    """Lines of stdin until its end, or until the signal to stop closes it."""
    while True:
        ready, _, _ = select.select([STOPPED[0], 0], [], [])
        if STOPPED[0] in ready or not (line := sys.stdin.readline()):
            return
        yield line


if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))
