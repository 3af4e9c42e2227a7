"""``spark-group describe`` and ``reset`` on a real group: output, moves and refusals.

Kafka's offsets are read back with its own admin API, the table's rows from its files.
"""

import json
import os
import re
import shlex
import signal
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from delta_files import living_rows
from kafka_helpers import await_until, noted_of, set_committed
from rebalance.accounts import describe
from scenes import Scene, Shown
from streams import Job, OtherMember, numbered, planned, readers_below, remove_entry

from spark_group_source import DeltaSink, compatibility
from spark_group_source.cli.common import RETRIABLE
from spark_group_source.delta import ledger_store
from spark_group_source.delta.checkpoint import positions, spark_files
from spark_group_source.delta.ledger_store import read_ledger
from spark_group_source.errors import OptionError
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.translation import ListedGroup
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import Note, parse_note

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark


def refused(shown: Shown) -> str:
    """The error line of a refused command."""
    assert shown.code == 1, shown.output
    return shown.output.splitlines()[-1]


RUNS = 1 if compatibility.has_admission_control() else 2
"""Spark 4.0 and 4.1 end an AvailableNow run after a batch that an earlier run did not finish."""


def into(job: Job, table: Path) -> None:
    """AvailableNow runs of the job into a Delta table until nothing is left; raises the query's error."""
    for _ in range(RUNS):
        job.run_into(DeltaSink(table), availableNow=True)


def die_in(scene: Scene, job: Job, table: Path, batch: int) -> None:
    """A run whose sink fails: the batch is planned, but not in the table."""
    sink = DeltaSink(table)

    def write(df: "DataFrame", number: int) -> None:
        if number == batch:
            raise RuntimeError("the sink died")
        sink(df, number)

    def run() -> None:
        for _ in range(batch + 1):  # Spark 4.0 and 4.1 run one batch with AvailableNow
            job.run_into(write, availableNow=True)

    with pytest.raises(Exception, match="the sink died"):
        run()
    await_left(scene)


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


def test_describe_of_a_missing_group_is_refused(scene: Scene) -> None:
    for command in (("describe",), ("reset", "--to-latest"), ("migrate", "--to-checkpoint")):
        assert f"group {scene.group!r} does not exist" in refused(scene.of_group(*command)), command


def test_reset_creates_a_group(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 4))
    shown = scene.of_group("reset", "--topic", name, "--to-latest", "--execute")
    assert f"group {scene.group} does not exist yet; the reset creates it" in shown.output
    assert "--table" not in shown.output, "no table has a ledger of it"
    assert scene.committed() == {TopicPartition(name, 0): 5}


def test_group_deleted_after_listing_is_skipped(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    name, here, gone = scene.topic(), f"{scene.group}-here", f"{scene.group}-gone"
    set_committed(scene.admin, here, name, {0: 0})
    listed = [ListedGroup(group, "empty", "classic") for group in (gone, here)]
    monkeypatch.setattr(GroupAdmin, "groups", lambda _: listed)
    every = scene.typed("describe", "--all-groups", "--json", "--bootstrap-server", scene.servers)
    assert [one["group"] for one in json.loads(every.output)] == [here]
    named = scene.typed("describe", "--group", here, "--group", gone, "--bootstrap-server", scene.servers)
    assert f"group {gone!r} does not exist" in refused(named)


def test_list_and_describe_show_all_groups_with_state(scene: Scene) -> None:
    name, idle = scene.topic(3), f"{scene.group}-idle"
    set_committed(scene.admin, idle, name, {0: 0})

    def shown(*words: str) -> str:
        result = scene.typed(*words, "--bootstrap-server", scene.servers)
        assert result.code == 0, result.output
        return result.output

    with OtherMember(scene.servers, scene.group, [name]) as other:
        await_until(lambda: len(other.partitions) == 3, what="its partitions")
        assert {scene.group, idle} <= set(shown("list").splitlines())
        listed = {one["group"]: one["state"] for one in json.loads(shown("list", "--json"))}
        assert (listed[scene.group], listed[idle]) == ("stable", "empty")
        states = {one["group"] for one in json.loads(shown("list", "--state", "Empty,Dead", "--json"))}
        assert idle in states and scene.group not in states
        every = {one["group"]: one for one in json.loads(shown("describe", "--all-groups", "--json"))}
        assert [row["committed"] for row in every[idle]["partitions"]] == [0]
        assert len(every[scene.group]["members"]) == 1
        both = shown("describe", "--group", scene.group, "--group", idle, "--state")
        assert f"127.0.0.1:{scene.servers.rpartition(':')[2]} (" in both
        assert "lag" not in both
        verbose = shown("describe", "--group", scene.group, "--members", "--verbose")
        assert f"{name} 0-2" in verbose


# --- reset ----------------------------------------------------------------------------------------------------------


PLACES = {
    ("--to-earliest",): (0, 0),
    ("--to-latest",): (6, 5),
    ("--to-offset", "3"): (3, 3),
    ("--to-offset", "99"): (6, 5),
    ("--to-offsets", '{"%s":{"0":-1,"1":1}}'): (6, 1),
    ("--to-offsets", '{"%s":{"0":-2}}'): (0, 5),
    ("--to-datetime", datetime.fromtimestamp(2_000, UTC).isoformat()): (5, 5),
    ("--by-duration", "PT0S"): (6, 5),
    ("--by-duration", "P36500D"): (0, 0),
    ("--shift-by", "-2"): (3, 3),
    ("--shift-by", "99"): (6, 5),
    ("--shift-by", "-1", "--topic", "%s:1"): (5, 4),
    ("--to-current",): (5, 5),
}
"""Destinations of a group that is at 5 in both partitions."""


def test_reset_moves_offsets_only_with_execute(scene: Scene) -> None:
    name = scene.topic(2, config={"retention.ms": "-1"})  # else the broker removes records that are as old as these
    scene.produce(name, numbered(0, 9, 2, at_ms=1_000_000))
    scene.produce(name, numbered(10, 10, 2, at_ms=3_000_000))
    here = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
    for to, then in PLACES.items():
        set_committed(scene.admin, scene.group, name, {0: 5, 1: 5})
        arguments = [argument % name if "%s" in argument else argument for argument in to]
        assert "nothing was changed" in scene.of_group("reset", *arguments).output, to
        assert scene.committed() == here, to
        scene.of_group("reset", *arguments, "--execute")
        assert scene.committed() == dict(zip(here, then, strict=True)), to


def test_reset_is_refused_while_the_group_has_members(scene: Scene) -> None:
    name = scene.topic()
    with OtherMember(scene.servers, scene.group, [name]) as other:
        await_until(lambda: other.partitions, what="its partitions")
        shown = scene.of_group("reset", "--to-latest", "--topic", name, "--execute")
        assert shown.code == RETRIABLE, shown.output
        assert f"group '{scene.group}' is stable with 1 member: Kafka moves offsets only" in shown.output
        assert scene.committed() == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to-latest", "--topic", "no-such-topic"), "topic no-such-topic does not exist"),
        (
            ("--to-latest", "--execute"),
            "of a share group or a streams group; to create it, name the topics with --topic",
        ),
        (("--to-current", "--topic", "no-such-topic:0"), "topic no-such-topic does not exist"),
        (("--to-offsets", '{"no-such-topic":{"0":1}}'), "partition no-such-topic-0 does not exist"),
    ],
)
def test_reset_refuses_invalid_arguments(arguments: tuple[str, ...], message: str, scene: Scene) -> None:
    assert message in refused(scene.of_group("reset", *arguments))


def notes(scene: Scene) -> dict[TopicPartition, Note]:
    """The metadata of the group's committed offsets."""
    return {tp: parse_note(text) for tp, (_, text) in noted_of(scene.admin, scene.group).items()}


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


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(False, id="batch-not-in-table"),
        pytest.param(True, id="batch-in-table", marks=pytest.mark.full),
    ],
)
def test_query_follows_a_reset_that_came_during_a_pending_batch(written: bool, scene: Scene) -> None:
    """Pending: ``offsets/N`` exists and ``commits/N`` does not. The source is killed during the batch."""
    name, table = scene.topic(2), scene.folder / "table"
    one = scene.job(subscribe=name, kafka__session__timeout__ms=2000)
    scene.produce(name, numbered(0, 9, 2))
    into(one, table)
    scene.produce(name, numbered(10, 19, 2))
    pending, sink = len(planned(one.checkpoint)), DeltaSink(table)

    def killed(df: "DataFrame", number: int) -> None:
        for reader in readers_below():
            os.kill(reader, signal.SIGKILL)
        if written:
            sink(df, number)
        raise RuntimeError("killed")

    with pytest.raises(Exception, match="killed"):
        one.run_into(killed, availableNow=True)
    await_left(scene)
    assert not (one.checkpoint / "commits" / str(pending)).exists()
    assert offsets_in(table) == times((0, 10 if written else 5, 1))

    reset_to(scene, 3, table)
    into(one, table)
    once_more = times((0, 3, 1), (3, 5, 2), (5, 10, 2 if written else 1))
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


@pytest.mark.parametrize(
    ("to", "skipped"),
    [
        pytest.param("--to-latest", range(8, 10), id="forward"),
        pytest.param("--to-ledger", range(0), id="to the ledger", marks=pytest.mark.full),
    ],
)
def test_batch_pending_at_a_reset_is_void(to: str, skipped: range, scene: Scene) -> None:
    name, table = scene.topic(2), scene.folder / "table"
    scene.produce(name, numbered(0, 19, 2))
    one = scene.job(subscribe=name, maxOffsetsPerTrigger=8)
    die_in(scene, one, table, 2)
    pending = planned(one.checkpoint)[2]
    assert set(pending.ranges.values()) == {(8, 10)}
    for _ in range(2):
        shown = scene.of_group("reset", to, "--table", str(table), "--execute")
    assert f"moved 2 partitions of group {scene.group}; this is its reset #2" in shown.output
    scene.produce(name, numbered(20, 23, 2))
    into(one, table)

    assert offsets_in(table) == {at: n for at, n in times((0, 12, 1)).items() if at[1] not in skipped}
    plans = planned(one.checkpoint)
    assert plans[2] == pending
    assert {number: plan.reset_number for number, plan in plans.items() if number > 2} == dict.fromkeys(
        range(3, len(plans)), 2
    )
    ledger = read_ledger(scene.spark, str(table), scene.group)
    assert ledger is not None
    assert (ledger.reset_number, set(ledger.offsets.values())) == (2, {12})
    found = notes(scene)
    assert {(note.stream, note.reset_number) for note in found.values()} == {(pending.stream, 2)}, (
        "the number is carried on"
    )


@pytest.mark.full
def test_pending_batch_is_void_when_one_of_its_topics_is_reset(scene: Scene) -> None:
    """The other topic continues at its committed offset, so its records in the void batch are not lost."""
    moved, other = (scene.topic(name=f"{scene.group}-{what}") for what in ("moved", "other"))
    table = scene.folder / "table"
    for name in (moved, other):
        scene.produce(name, numbered(0, 9))
    one = scene.job(subscribe=f"{moved},{other}", maxOffsetsPerTrigger=8)
    die_in(scene, one, table, 2)
    scene.of_group("reset", "--topic", moved, "--to-earliest", "--table", str(table), "--execute")
    into(one, table)
    found = Counter((row["topic"], row["offset"]) for row in living_rows(table, ["topic", "offset"]))
    assert found == {
        **{(other, n): 1 for n in range(10)},
        **{(moved, n): 2 if n < 8 else 1 for n in range(10)},
    }


def test_second_reset_repairs_one_that_died_before_the_table(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    name, table = scene.topic(2), scene.folder / "table"
    scene.produce(name, numbered(0, 19, 2))
    one = scene.job(subscribe=name, maxOffsetsPerTrigger=8)
    die_in(scene, one, table, 2)

    def die(*_: object, **__: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as killed:
        killed.setattr(ledger_store, "set_ledger", die)
        assert scene.of_group("reset", "--to-offset", "3", "--table", str(table), "--execute").code == 1
    assert {note.reset_number for note in notes(scene).values()} == {1}
    with pytest.raises(Exception, match=r"committed offset 3, the table holds up to 10"):
        into(one, table)
    await_left(scene)
    once = {(p, offset): 1 for p in range(2) for offset in range(10)}
    assert offsets_in(table) == once, "what was pending was not planned after the reset that the table never saw"
    scene.of_group("reset", "--to-offset", "3", "--table", str(table), "--execute")
    into(one, table)
    assert offsets_in(table) == {at: 2 if at[1] >= 3 else 1 for at in once}


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
