"""The demo: a job that shares a consumer group, is killed and restarted, and writes every row once; checked at the end.

Runs in: a process of its own (``make demo``), with a local Kafka, the job and an ordinary consumer as children.
Deliberately absent: anything that a user of the project would not have: the job is ``group_to_delta.py`` as it stands.

The exit status is 0 only if every check of ``demo_proof.py`` holds. Nothing is left behind, also after Ctrl-C.
"""

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from demo_proof import check
from demo_screen import Screen, shown
from demo_stage import DemoFailed, Stage

from spark_group_source.local.broker import Broker

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

STEP_S = 300
"""Bound of every step. Starting Spark takes seconds, on a busy machine minutes."""
FLIGHT_LOOK_S = 0.01
"""A batch takes tenths of a second: what is to happen in the middle of one must be quick."""
SAMPLE_S = 0.4


class Story:
    """The steps of the demo. Each one waits for its effect, so a slow machine only makes the demo longer."""

    def __init__(self, stage: Stage, screen: Screen, seconds: float) -> None:
        self.stage, self.screen, self.seconds = stage, screen, seconds
        self._all = list(range(stage.view.partitions))
        self._began_s = 0.0

    def play(self) -> int:
        """Returns how many orders were produced."""
        self._start()
        self._place()
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

    def _place(self) -> None:
        view = self.stage.view
        self._until(lambda: self._at(0.15), "orders flow through Kafka into the table")
        self._until(lambda: view.executors and self._job_has_all, "the job's members move to its executors' agents")
        where = " and ".join(map(str, sorted(set(view.executors))))
        self._tell(f"its members moved to the agents of executors {where}")

    def _share(self) -> None:
        stage, view = self.stage, self.stage.view
        stage.start_consumer()
        joined = "an ordinary consumer joins the group: Kafka reassigns partitions"
        self._until(lambda: view.owned["ordinary"] and self._shared and view.ordinary > 0, joined)
        self._tell(f"an ordinary consumer joined, Kafka reassigned partitions: {self._owners()}")
        view.described = stage.described()
        left_s = time.monotonic() + 0.2 * self.seconds
        self._until(lambda: time.monotonic() >= left_s, "both read the topic, each one its partitions")
        assert stage.consumer is not None
        if stage.consumer.stop() != 0:
            raise DemoFailed(f"the ordinary consumer failed:\n{stage.consumer.tail()}")
        self._until(lambda: self._job_has_all, "the ordinary consumer leaves: the job gets its partitions back")
        self._tell(f"the ordinary consumer left after {view.ordinary:,} orders: {self._owners()}")

    def _kill_executor(self) -> None:
        stage, view = self.stage, self.stage.view
        self._until(lambda: view.executors, "the job reads all partitions again")
        generation = view.generation
        victim, rows = stage.kill_executor(), self._rows_now()
        moved = f"kill -9 of executor {victim}: its member rejoins on another agent"
        self._until(lambda: view.executors and victim not in view.executors and self._job_has_all, moved)
        self._until(lambda: view.table > rows, "its tasks run again elsewhere")
        calm = "no rebalance" if view.generation == generation else "after a rebalance"
        self._tell(f"kill -9 of executor {victim}: its member rejoined on another agent, {calm}: {self._owners()}")

    def _kill(self) -> None:
        stage, view = self.stage, self.stage.view
        self._until(lambda: self._at(0.55), "the job reads all partitions again")
        assert stage.job is not None
        self._until(lambda: self._job_has_all, "the job has all partitions")
        generation, killed = view.generation, len(stage.job.pids)
        batch = self._until(stage.batch_in_flight, "a batch starts", looks=False)
        stage.job.kill()
        rows = self._rows_now()
        flight = (
            f"in the middle of batch {batch}" if stage.batch_in_flight() == batch else f"at the end of batch {batch}"
        )
        self._tell(f"kill -9 of the whole job {flight}, {killed} processes: driver, executors, agents, workers")
        stage.start_job()
        self._until(lambda: view.table > rows, "the job restarts with its checkpoint; orders wait in Kafka")
        self._until(lambda: self._job_has_all and view.generation is not None, "the job joins the group again")
        if view.generation == generation:
            self._tell(f"restarted: the job took over its memberships, no rebalance: {self._owners()}")
        else:  # KIP-848 keeps a killed member until its session ends
            self._tell(f"restarted: the job owns its partitions again: {self._owners()}")

    def _drain(self) -> int:
        self._until(lambda: self._at(1.0), "the job catches up while orders keep coming")
        produced = self.stage.orders.finish()
        self.stage.look()  # the view may be of a time before the last orders
        self._until(lambda: self.stage.view.lag == 0, "no more orders: the rest is written to the table")
        self._tell(f"the last of {produced:,} orders is in the table: the group's lag is 0")
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

    def _until(self, holds: Callable[[], Any], what: str, *, looks: bool = True) -> Any:
        """Wait until ``holds`` returns a true value, and return it.

        Args:
            looks: whether the view is updated meanwhile; a look takes longer than a batch.
        """
        self.screen.doing(what)
        deadline_s = time.monotonic() + STEP_S
        while not (held := holds()):
            for child in (self.stage.job, self.stage.consumer):
                if child is not None and not child.running and not child.stopping:
                    raise DemoFailed(f"a child process ended unexpectedly ({what}):\n{child.tail()}")
            if time.monotonic() >= deadline_s:
                log = self.stage.job.tail() if self.stage.job else ""
                raise DemoFailed(f"timed out after {STEP_S} s: {what}. {self.stage.view}\n{log}")
            if looks:
                self.stage.look()
            self.screen.tick()
            time.sleep(SAMPLE_S if looks else FLIGHT_LOOK_S)
        return held


def _own_directory(stack: contextlib.ExitStack, keep: Path | None) -> Path:
    """The directory for everything that the demo and its children write."""
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
    """Ignore further signals during the clean-up."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def main(
    seconds: Annotated[float, typer.Option(min=4, help="Minimum time in which orders are produced.")] = 30,
    rate: Annotated[int, typer.Option(min=1, help="Orders a second.")] = 1_000,
    partitions: Annotated[int, typer.Option(min=3, max=50, help="Partitions of the topic.")] = 6,
    protocol: Annotated[Literal["classic", "consumer"], typer.Option(help="The group protocol.")] = "classic",
    keep: Annotated[Path | None, typer.Option(help="Keep table, checkpoint and logs in this empty directory.")] = None,
) -> None:
    """Share a group between a Spark job and an ordinary consumer, kill the job, check that each order is there once."""
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
            with screen:
                produced = Story(stage, screen, seconds).play()
            evidence = stage.evidence(produced)
        proven = screen.final(evidence, check(evidence))
    except DemoFailed as exc:
        print(f"the demo failed: {exc}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted: all processes are stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    raise typer.Exit(0 if proven else 1)


if __name__ == "__main__":
    typer.run(main)
