"""``spark-group describe`` and ``reset`` on a real group: output, moves and refusals.

Kafka's offsets are read back with its own admin API, the table's rows from its files.
"""

import contextlib
import json
import os
import re
import shlex
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from delta_files import living_rows
from kafka_helpers import await_until, set_committed
from rebalance.accounts import describe
from scenes import Scene
from streams import Job, numbered, planned, readers_below, remove_entry

from spark_group_source import DeltaSink, compatibility
from spark_group_source.delta.checkpoint import positions, spark_files
from spark_group_source.errors import OptionError
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark


RUNS = 1 if compatibility.has_admission_control() else 2
"""Spark 4.0 and 4.1 end an AvailableNow run after a batch that an earlier run did not finish."""


def into(job: Job, table: Path) -> None:
    """AvailableNow runs of the job into a Delta table until nothing is left; raises the query's error."""
    for _ in range(RUNS):
        job.run_into(DeltaSink(table), availableNow=True)


def offsets_in(table: Path) -> Counter[tuple[int, int]]:
    return Counter((row["partition"], row["offset"]) for row in living_rows(table, ["partition", "offset"]))


# --- describe -------------------------------------------------------------------------------------------------------


def test_describe_shows_members_offsets_lag_and_ledger(scene: Scene) -> None:
    name, table = scene.topic(2), scene.folder / "table"
    scene.produce(name, numbered(0, 9, 2))
    into(scene.job(subscribe=name), table)
    scene.produce(name, numbered(10, 12, 2))
    shown = json.loads(scene.of_group("describe", "--json", "--table", str(table)).stdout)
    assert (shown["state"], shown["members"], shown["lag"]) == ("empty", [], 3)
    found = [(row["partition"], row["committed"], row["end"], row["lag"], row["ledger"]) for row in shown["partitions"]]
    assert found == [(0, 5, 7, 2, 5), (1, 5, 6, 1, 5)]


# --- reset ----------------------------------------------------------------------------------------------------------


def await_left(scene: Scene) -> None:
    """Wait until the members of a failed query have left, which may be after its error.

    A batch that Spark replays may fail before its members have joined: the group is empty, and then has members. So
    the stream reader, which creates them, has to end first. No other query runs in this process.
    """
    await_until(lambda: not readers_below(), what="the end of the stream reader")
    await_until(lambda: describe(scene.admin, scene.group).state == "empty", what="the members that leave")


def reset_to(scene: Scene, offset: int, table: Path) -> None:
    """A reset of the group when the members of the last run have left: it is refused before."""
    await_left(scene)
    shown = scene.of_group("reset", "--to-offset", str(offset), "--table", str(table), "--execute")
    assert shown.code == 0, shown.output


def times(*counts: tuple[int, int, int]) -> dict[tuple[int, int], int]:
    """From ``(first, end, n)``: the offsets from first to before end are in the table n times, in both partitions."""
    return {(p, offset): n for first, end, n in counts for offset in range(first, end) for p in range(2)}


def printed(text: str) -> list[str]:
    """The commands that an error prints, each on a line of its own."""
    return list(dict.fromkeys(re.findall(r"^ {4}(spark-group .+)$", text, re.MULTILINE)))


def type_in(scene: Scene, command: str) -> None:
    """Run a command as it is printed."""
    shown = scene.typed(*shlex.split(command)[1:])
    assert shown.code == 0, f"{command}\n{shown.output}"


def conflict(scene: Scene, job: Job, table: Path) -> str:
    """The message of a run that the ledger refuses."""
    before = offsets_in(table)
    with pytest.raises(Exception, match="LedgerConflict") as refused:
        into(job, table)
    await_left(scene)
    assert offsets_in(table) == before, "nothing was written"
    return str(refused.value)


def test_query_follows_a_reset_that_came_during_a_pending_batch(scene: Scene) -> None:
    """Pending: ``offsets/N`` exists and ``commits/N`` does not. The source is killed during the batch."""
    name, table = scene.topic(2), scene.folder / "table"
    one = scene.job(subscribe=name, kafka__session__timeout__ms=2000)
    scene.produce(name, numbered(0, 9, 2))
    into(one, table)
    scene.produce(name, numbered(10, 19, 2))
    pending = len(planned(one.checkpoint))

    def killed(df: "DataFrame", number: int) -> None:
        for reader in readers_below():
            with contextlib.suppress(ProcessLookupError):  # that of the run before has ended
                os.kill(reader, signal.SIGKILL)
        raise RuntimeError("killed")

    with pytest.raises(Exception, match="killed"):
        one.run_into(killed, availableNow=True)
    await_left(scene)
    assert not (one.checkpoint / "commits" / str(pending)).exists()
    assert offsets_in(table) == times((0, 5, 1))

    reset_to(scene, 3, table)
    into(one, table)
    once_more = times((0, 3, 1), (3, 5, 2), (5, 10, 1))
    assert offsets_in(table) == once_more
    assert planned(one.checkpoint)[pending + 1].ranges == {TopicPartition(name, p): (3, 10) for p in range(2)}
    assert set(scene.committed().values()) == {10}

    for _ in range(2):  # the second one counts, and nothing is read for the first
        reset_to(scene, 8, table)
    into(one, table)
    scene.produce(name, numbered(20, 21, 2))
    into(one, table)
    assert offsets_in(table) == {
        **once_more,
        **{at: once_more[at] + 1 for at in times((8, 10, 1))},
        **times((10, 11, 1)),
    }
    assert set(scene.committed().values()) == {11}


def test_rewind_without_table_is_refused_and_its_commands_work(scene: Scene) -> None:
    """All with one checkpoint: it has the refused batch, which is void after the printed command."""
    name, table = scene.topic(2), scene.folder / "table"
    one, rewound = scene.job(subscribe=name), {0: 2, 1: 2}
    scene.produce(name, numbered(0, 9, 2))
    into(one, table)
    set_committed(scene.admin, scene.group, name, rewound)
    text = conflict(scene, one, table)
    to_ledger, to_current = printed(text)
    assert "--to-ledger" in to_ledger and "--to-current" in to_current
    again = printed(conflict(scene, one, table))  # a start alone settles nothing
    # Spark replays the batch at once, and the new run may not have published its servers yet.
    assert [command.replace("HOST:PORT", scene.servers) for command in again] == [to_ledger, to_current]

    type_in(scene, to_ledger)
    scene.produce(name, numbered(10, 11, 2))
    into(one, table)
    assert offsets_in(table) == times((0, 6, 1))

    set_committed(scene.admin, scene.group, name, rewound)
    conflict(scene, one, table)
    # As if the driver had died before its plan was written: the run has committed the position under its own name, and
    # the note beside it shows where it came from.
    remove_entry(one.checkpoint, "offsets", max(planned(one.checkpoint)))
    assert f"{name}-0: committed offset 2, the table holds up to 6" in conflict(scene, one, table)

    type_in(scene, to_current)
    for _ in range(2):
        into(one, table)
        assert offsets_in(table) == times((0, 2, 1), (2, 6, 2))


def test_reset_to_checkpoint_uses_start_of_batch_or_last_end(scene: Scene) -> None:
    """The start of batch 0 stays available after later batches and restarts."""
    name = scene.topic(2)
    p0, p1 = TopicPartition(name, 0), TopicPartition(name, 1)
    scene.produce(name, numbered(0, 19, 2))
    starting = json.dumps({name: {"0": 4, "1": 2}})
    one = scene.job(subscribe=name, startingOffsets=starting, maxOffsetsPerTrigger=4)
    one.run()
    checkpoint = str(one.checkpoint)
    assert scene.committed() == {p0: 10, p1: 10}
    scene.of_group("reset", "--to-earliest", "--execute")

    scene.of_group("reset", "--to-checkpoint", checkpoint, "--execute")
    assert scene.committed() == {p0: 10, p1: 10}
    scene.of_group("reset", "--to-checkpoint", checkpoint, "--batch", "0", "--execute")
    assert scene.committed() == {p0: 4, p1: 2}
    scene.of_group("reset", "--to-checkpoint", checkpoint, "--batch", "1", "--topic", name, "--execute")
    assert scene.committed() == {p0: 6, p1: 4}
    assert len(one.run()) == 10, "what came after batch 0, once more"

    files = spark_files(scene.spark)
    with pytest.raises(OptionError, match=r"does not have batch 77; it has 0 to \d+"):
        positions(files, checkpoint, scene.group, 77)
    with pytest.raises(OptionError, match=r"batch 0 in .* has no partition of group 'other'"):
        positions(files, checkpoint, "other", 0)
    with pytest.raises(OptionError, match=r"has no planned batch: it is not the checkpointLocation"):
        positions(files, f"{checkpoint}-no", scene.group)
