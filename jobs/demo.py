"""The demo: a job that shares a consumer group, is killed, goes on, and has every row once. It proves that at its end.

Runs in: a process of its own (``make demo``), with a local Kafka, the job and an ordinary consumer as children.
Deliberately absent: anything that a user of the project would not have: the job is ``group_to_delta.py`` as it stands.

The exit status is 0 only if every check of ``demo_proof.py`` holds. Nothing is left behind, also after Ctrl-C.
"""

import contextlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from demo_proof import Evidence, check
from demo_screen import Screen, shown
from demo_stage import DemoFailed, Stage

from spark_group_source.local.broker import Broker

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

STEP_S = 300
"""Bound of every step. Starting Spark takes seconds, on a busy machine minutes."""
LOOK_S = 0.1
FLIGHT_LOOK_S = 0.01
"""A batch takes tenths of a second: what is to happen in the middle of one must be quick."""
SAMPLE_S = 0.4


class Story:
    """The steps, one after the other. Each waits for what it is about, so a slow machine makes the demo longer."""

    def __init__(self, stage: Stage, screen: Screen, seconds: float) -> None:
        self.stage, self.screen, self.seconds = stage, screen, seconds
        self._all = list(range(stage.view.partitions))
        self._began_s = 0.0

    def play(self) -> int:
        """Returns how many orders were produced."""
        self._start()
        self._lend()
        self._share()
        self._kill_executor()
        self._kill()
        return self._drain()

    def _start(self) -> None:
        self.stage.start_job()
        self._until(lambda: self._job_has_all, "the job starts and joins the group")
        self._tell(f"the Spark job is the group: {self._owners()}")
        self.stage.orders.start()
        self._began_s = time.monotonic()
        self._until(lambda: self.stage.view.table > 0, "orders flow through Kafka into the table")

    def _lend(self) -> None:
        view = self.stage.view
        self._until(lambda: self._at(0.15), "orders flow through Kafka into the table")
        self._until(lambda: view.executors and self._job_has_all, "the job's members move beside its executors")
        where = " and ".join(map(str, sorted(set(view.executors))))
        self._tell(f"its members live beside executors, processes {where}, and read ahead")

    def _share(self) -> None:
        stage, view = self.stage, self.stage.view
        stage.start_consumer()
        joined = "an ordinary consumer joins the group: Kafka moves partitions to it"
        self._until(lambda: view.owned["ordinary"] and self._shared and view.ordinary > 0, joined)
        self._tell(f"an ordinary consumer joined, Kafka moved partitions: {self._owners()}")
        view.described = stage.described()
        left_s = time.monotonic() + 0.2 * self.seconds
        self._until(lambda: time.monotonic() >= left_s, "both read the topic, each its own partitions")
        assert stage.consumer is not None
        if stage.consumer.stop() != 0:
            raise DemoFailed(f"the ordinary consumer failed:\n{stage.consumer.tail()}")
        self._until(lambda: self._job_has_all, "the ordinary consumer leaves: its partitions go back")
        self._tell(f"the ordinary consumer left after {view.ordinary:,} orders: {self._owners()}")

    def _kill_executor(self) -> None:
        stage, view = self.stage, self.stage.view
        self._until(lambda: view.executors, "the job reads all partitions again")
        generation = view.generation
        victim, rows = stage.kill_executor(), self._rows_now()
        moved = f"kill -9 of executor {victim}: its member joins elsewhere"
        self._until(lambda: view.executors and victim not in view.executors and self._job_has_all, moved)
        self._until(lambda: view.table > rows, "its tasks run again elsewhere")
        calm = "no rebalance" if view.generation == generation else "after a rebalance"
        self._tell(f"kill -9 of executor {victim}, its member went on beside another, {calm}: {self._owners()}")

    def _kill(self) -> None:
        stage, view = self.stage, self.stage.view
        self._until(lambda: self._at(0.55), "the job reads all partitions again")
        assert stage.job is not None
        self._until(lambda: self._job_has_all, "the job has all partitions")
        generation, killed = view.generation, len(stage.job.pids)
        batch = self._until(stage.batch_in_flight, "a batch begins", every_s=FLIGHT_LOOK_S)
        stage.job.kill()
        rows = self._rows_now()
        flight = (
            f"in the middle of batch {batch}" if stage.batch_in_flight() == batch else f"at the end of batch {batch}"
        )
        self._tell(f"kill -9 of the whole job {flight}, {killed} processes: driver, executors, agents, workers")
        stage.start_job()
        self._until(lambda: view.table > rows, "the job starts again on its checkpoint; orders wait in Kafka")
        self._until(lambda: self._job_has_all and view.generation is not None, "the job takes its place again")
        if view.generation == generation:
            self._tell(f"started again, the job took its places over, no rebalance: {self._owners()}")
        else:  # under KIP-848 a killed member's place is free when its session has ended
            self._tell(f"started again, the job has its partitions back: {self._owners()}")

    def _drain(self) -> int:
        self._until(lambda: self._at(1.0), "the job catches up while orders keep coming")
        produced = self.stage.orders.finish()
        self._until(lambda: self.stage.view.lag == 0, "no more orders: the rest goes into the table")
        self._tell(f"the last of {produced:,} orders is in: the group's lag is 0")
        self.screen.doing("the job stops")
        assert self.stage.job is not None
        if self.stage.job.stop() != 0:
            raise DemoFailed(f"the job did not stop cleanly:\n{self.stage.job.tail()}")
        self._tell("the job stopped cleanly")
        return produced

    # --- waiting ----------------------------------------------------------------------------------------------------

    @property
    def _job_has_all(self) -> bool:
        return self.stage.view.owned["job"] == self._all and not self.stage.view.owned["ordinary"]

    @property
    def _shared(self) -> bool:
        view = self.stage.view
        return sorted(view.owned["job"] + view.owned["ordinary"]) == self._all

    def _at(self, share: float) -> bool:
        return time.monotonic() - self._began_s >= share * self.seconds

    def _rows_now(self) -> int:
        self.stage.look()
        return self.stage.view.table

    def _owners(self) -> str:
        view = self.stage.view
        ordinary = f", consumer {shown(view.owned['ordinary'])}" if view.owned["ordinary"] else ""
        return f"job {shown(view.owned['job'])}{ordinary}"

    def _tell(self, text: str) -> None:
        self.screen.tell(text)

    def _until(self, holds: Callable[[], Any], what: str, every_s: float = LOOK_S) -> Any:
        """Wait until it holds; returns what it returned then."""
        self.screen.doing(what)
        deadline_s = time.monotonic() + STEP_S
        while not (held := holds()):
            for child in (self.stage.job, self.stage.consumer):
                if child is not None and not child.running and not child.stopping:
                    raise DemoFailed(f"a child ended while it was needed ({what}):\n{child.tail()}")
            if time.monotonic() >= deadline_s:
                log = self.stage.job.tail() if self.stage.job else ""
                raise DemoFailed(f"within {STEP_S} s it did not happen that {what}. {self.stage.view}\n{log}")
            self.screen.tick()
            time.sleep(every_s)
        return held


@contextlib.contextmanager
def watching(stage: Stage) -> Any:
    """Keep the view up to date from a thread of its own, so that the picture moves while a step waits."""
    end = threading.Event()

    def run() -> None:
        while not end.wait(SAMPLE_S):
            stage.look()

    thread = threading.Thread(target=run, name="watcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(STEP_S)


def conclude(screen: Screen, evidence: Evidence) -> bool:
    """Check the evidence and show the final screen; whether everything holds."""
    checks = check(evidence)
    screen.final(evidence, checks)
    return bool(checks) and all(found.holds for found in checks)


def _own_directory(stack: contextlib.ExitStack, keep: Path | None) -> Path:
    """A directory for all that the demo writes, also what its children call temporary."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise typer.BadParameter(f"--keep {keep}: the directory must be empty")
        directory = keep.resolve()
    else:
        made = tempfile.TemporaryDirectory(prefix="spark-group-demo-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(made))
    scratch = directory / "tmp"
    scratch.mkdir()
    tempfile.tempdir = str(scratch)  # the job's TMPDIR, where it publishes what it does: `describe()` looks there
    return directory


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    """What is being cleaned up is cleaned up to its end."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def main(
    seconds: Annotated[float, typer.Option(min=4, help="How long orders are produced, at least.")] = 30,
    rate: Annotated[int, typer.Option(min=1, help="Orders a second.")] = 1_000,
    partitions: Annotated[int, typer.Option(min=3, max=50, help="Partitions of the topic.")] = 6,
    protocol: Annotated[
        Literal["classic", "consumer"], typer.Option(help="How the members talk to Kafka.")
    ] = "classic",
    keep: Annotated[Path | None, typer.Option(help="Keep table, checkpoint and logs in this empty directory.")] = None,
) -> None:
    """Share a group between a Spark job and an ordinary consumer, kill the job, prove that each order is in once."""
    for number in STOPPING:
        signal.signal(number, _interrupt)
    subtitle = (
        f"{rate:,} orders a second into {partitions} partitions, for at least {seconds:g} s; "
        "an ordinary consumer comes and goes"
    )
    try:
        with contextlib.ExitStack() as stack:
            print("starting a local Kafka …", file=sys.stderr)
            directory = _own_directory(stack, keep)
            broker = stack.enter_context(Broker())
            stage = Stage(directory, broker, partitions=partitions, rate=rate, protocol=protocol)
            stack.callback(stage.close)
            stack.callback(_ignore_signals)
            screen = Screen(stage.view, subtitle=subtitle)
            with watching(stage), screen:
                produced = Story(stage, screen, seconds).play()
            evidence = stage.evidence(produced)
        proven = conclude(screen, evidence)
    except DemoFailed as exc:
        print(f"the demo could not be played to its end: {exc}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted: everything that was started is stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    raise typer.Exit(0 if proven else 1)


if __name__ == "__main__":
    typer.run(main)
