"""Random histories of one table: batches of two groups, mixed with what happens to tables, groups, topics, checkpoints.

``python -m tests.table_histories [--spark] FROM TO`` plays the seeds from FROM up to TO, without a JVM or on Spark.

Runs in: tests, a terminal. What ships decides: a run's protocol, the sink with both writers, the ledger,
``spark-group``. Models are Kafka's offsets (:class:`OffsetModel`), and the shell of a run (:class:`StreamRun`). After
each batch that the sink accepted, the table's files and its log (:mod:`delta_files`, not the product's code) must have
each record of the group below the end of the batch once, except those that a user removed. Where the sink refused, the
commands of its error must lead there. Each row has the topic id, partition and offset of its record in its value.
"""

import argparse
import contextlib
import json
import random
import re
import shlex
import sys
import tempfile
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))  # the modules of the tests are found as pytest finds them

import pyarrow.parquet as pq
from delta_files import living_files
from kit import frames
from offset_model import END, SERVERS, OffsetModel
from sink_helpers import Query, actions, expire_log, notes
from sink_helpers import commits as commits_of
from sink_source import SCHEMA
from stream_run import StreamRun
from table_changes import MISSING_FILES, ByFiles, ByStatements, Changes
from typer.testing import CliRunner

from spark_group_source.cli import common
from spark_group_source.cli.app import app
from spark_group_source.delta import sink as sinks
from spark_group_source.delta import table_writer
from spark_group_source.delta.native_writer import NativeWriter
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.host import run_files
from spark_group_source.kafka.translation import CommittedOffset
from spark_group_source.model import StartAt, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol.offsets import StreamOffset, parse
from spark_group_source.protocol.rules import StartingPosition
from spark_group_source.protocol.statistics import Statistics

Record = tuple[str, str, int, int]
"""Topic, topic id, partition, offset."""

GROUPS = {"etl": "orders", "ops": "clicks"}
PARTITIONS = 2
STEPS = (15, 30)
LIMITS = (1, 4, 9, 14)
"""Of ``maxOffsetsPerTrigger``, for each run of a query."""
REFUSALS_MAX = 6
"""How often one batch may be refused: each refusal is settled by other commands."""
LEAVES_OUT = ("leave them out", "leave out", "keep the rows as they are", "continue where batch")
"""How purposes start after whose commands the group continues without records that are not in the table."""
DOUBLES = "write them again, and"
"""How the purpose starts whose command writes records twice, as its user wants."""


class Killed(BaseException):
    """The driver, or a command, is killed here."""


class Source:
    """One group, its topic, and its query."""

    def __init__(self, group: str, topic: str, dice: random.Random) -> None:
        self.group, self.kafka, self.dice = group, OffsetModel(group, topic, PARTITIONS), dice
        self.kafka.topic_id = f"{topic}1"
        self.former: dict[tuple[str, int], int] = {}
        """By id and partition of topics that no longer exist: the end of what was read."""
        self.end: dict[tuple[str, int], int] = {}
        """The highest end of a batch."""
        self.checkpoints = 0
        self.limits: tuple[int, ...] = LIMITS
        self.run: StreamRun | None = None
        self.sink: sinks.DeltaSink | None = None
        self.lose_checkpoint()

    def lose_checkpoint(self) -> None:
        """The next run has a new checkpoint. The driver was killed."""
        self.checkpoints += 1
        self.name = f"{self.group}{self.checkpoints}"
        self.query: Query | None = None
        self.batch_id = 0
        self.at: dict[TopicPartition, int] = {}
        """Where the checkpoint's next batch starts."""
        self.id = self.kafka.topic_id
        self.durable: StreamOffset | None = None
        """The end of the last batch in the commit log."""
        self.pending: StreamOffset | None = None
        """The end of the batch that is in the checkpoint, and not in its commit log."""
        self.starting = StartingPosition()
        if self.dice.random() < 0.3:
            starts = ((tp, StartAt("offset", self.dice.randrange(0, 30))) for tp in self.kafka.partitions)
            self.starting = StartingPosition(each=tuple(starts))
        self.kill()

    def plan(self) -> StreamOffset | None:
        """Return the batch that is not finished, or the next one; None: nothing is left to read."""
        if self.run is None:
            limit, durable = self.dice.choice(self.limits), self.durable and parse(self.durable.to_json())
            self.run = StreamRun(self.kafka, uuid.uuid4().hex, durable, limit, self.starting)
            if self.pending is not None:
                self.pending = parse(self.pending.to_json())
                self.run.read(self.pending)
        if self.pending is None:
            self.pending = self.run.plan()
            if self.pending is not None:
                self.run.read(self.pending)
        return self.pending

    def finished(self, end: StreamOffset) -> None:
        """Spark has the batch in its commit log."""
        assert self.run is not None
        self.durable = self.run.start = end
        self.pending, self.batch_id, self.id = None, self.batch_id + 1, end.topic_ids[self.kafka.topic]
        self.at = {tp: at for tp, at in end.positions().items() if tp.topic == self.kafka.topic}

    def kill(self) -> None:
        """The driver is killed."""
        self.run = self.sink = None

    def stop(self) -> None:
        """The query is stopped, or a batch failed."""
        if self.run is not None:
            self.run.end()
        self.kill()

    def stop_or_kill(self) -> None:
        if self.dice.random() < 0.7:
            self.stop()
        self.kill()


class History:
    """Plays one history.

    Args:
        spark: a session of Spark with Delta Lake, or :class:`frames.DeltaSession`.
        changes: what users do to the table.
    """

    def __init__(self, seed: int, home: Path, spark: Any, changes: Changes) -> None:
        self.seed, self.home, self.spark, self.changes = seed, home, spark, changes
        self.dice = random.Random(seed)
        self.sources = {group: Source(group, topic, self.dice) for group, topic in GROUPS.items()}
        self.table = home / "table"
        self.gone: set[Record] = set()
        """Records that a user removed, or left out."""
        self.behind: set[str] = set()
        """Topics of which a batch was committed behind a RESTORE or overwrite: records that it brought back may be in
        the table twice until the group's next batch, which must be refused."""
        self.noted: dict[int, tuple[set[Record], set[str]]] = {}
        """``gone`` and ``behind`` by version of the table; a RESTORE to a version makes them so again."""
        self.moments: dict[str, Callable[[], object]] = {}
        """What happens, once, at a moment of a commit."""
        self.files: dict[Path, list[dict[str, Any]]] = {}
        """The rows of each file that was read: no file changes."""
        self.story: list[str] = []

    # --- the judge ------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[dict[str, Any]]:
        for path in living_files(self.table):
            if path not in self.files:
                self.files[path] = pq.read_table(path).to_pylist()
            yield from self.files[path]

    def present(self) -> Counter[Record]:
        found: Counter[Record] = Counter()
        for row in self.rows():
            id_, p, n = row["value"].rstrip("!").split("/")
            assert (row["partition"], row["offset"]) == (int(p), int(n))
            found[row["topic"], id_, int(p), int(n)] += 1
        return found

    def judge(self, source: Source | None = None) -> None:
        """Fail if a record is in the table twice, or one that the source read is missing."""
        found = self.present()
        self.gone -= found.keys()
        doubled = sorted(record for record, n in found.items() if n > 1 and record[0] not in self.behind)
        assert not doubled, f"doubled: {doubled}"
        if source is not None:
            missing = sorted(self.read(source) - found.keys() - self.gone)
            assert not missing, f"missing of {source.group}: {missing}"

    def read(self, source: Source) -> set[Record]:
        """Return the records below the positions of a source, and those of former topics."""
        topic, ends = source.kafka.topic, dict(source.former)
        if source.id == source.kafka.topic_id:
            ends |= {(source.id, tp.partition): n for tp, n in source.at.items()}
        return {(topic, id_, p, n) for (id_, p), end in ends.items() for n in range(end)}

    def leave_out(self, source: Source, ends: dict[TopicPartition, int] | None = None) -> None:
        """The user continues at these offsets, those in Kafka, without records that are not in the table."""
        ends = {tp: at.offset for tp, at in source.kafka.offsets.items()} if ends is None else ends
        records = {(tp.topic, source.kafka.topic_id, tp.partition, n) for tp, end in ends.items() for n in range(end)}
        self.gone |= records - self.present().keys()

    def note_gone(self) -> None:
        self.noted[self.versions()[-1]] = set(self.gone), set(self.behind)

    def versions(self) -> list[int]:
        return sorted(int(path.stem) for path in (self.table / "_delta_log").glob("*.json"))

    def lose_former(self) -> None:
        """Records of deleted topics that are not in the table cannot be read again."""
        found = self.present()
        for source in self.sources.values():
            self.gone |= {r for r in self.read(source) if r[1] != source.kafka.topic_id} - found.keys()

    # --- batches --------------------------------------------------------------------------------------------------

    def batch(self, source: Source, *, kill: str = "", during: Callable[[], object] | None = None) -> bool:
        """Run a batch; where it is refused, run the commands of the error, and the batch again. Return whether it is in
        the table."""
        for _ in range(REFUSALS_MAX):
            try:
                return self.attempt(source, kill, during)
            except Killed:
                source.kill()
                if self.dice.random() < 0.3:
                    self.log_line("its checkpoint is lost")
                    source.lose_checkpoint()
                return False
            except (LedgerConflict, OptionError) as exc:
                source.stop()
                self.moments.clear()
                self.settle(source, exc)
                kill, during = "", None
        raise AssertionError(f"a batch of {source.group} was refused {REFUSALS_MAX} times")

    def attempt(self, source: Source, kill: str, during: Callable[[], object] | None) -> bool:
        if source.query is None:
            source.query = Query(self.spark, self.home / "checkpoints", source.name)
        if source.sink is None:
            source.sink = source.query.sink(self.table)
        source.sink.writer = self.dice.choice(("auto", "options"))
        is_replay = source.pending is not None
        batch = source.plan()
        if batch is None:
            self.log_line(f"{source.group} has read everything")
            return True
        self.accept_starts(source, batch)
        if kill == "planned" and not is_replay:
            self.log_line(f"{source.group} is killed before Spark has written the offsets of batch {source.batch_id}")
            source.pending = None
            raise Killed
        words = [f"{tp.partition}:[{a},{b})" for tp, (a, b) in batch.ranges.items()]
        words += [name for name in ("followed", "started", "truncated_after") if getattr(batch, name)]
        words += [f"reset {batch.reset_number}", f"kill {kill}" * bool(kill), "with another change" * bool(during)]
        self.log_line(
            f"{source.group} batch {source.batch_id}, {batch.seq} of {batch.stream[:4]} by {source.sink.writer}: "
            f"{' '.join(words)}"
        )
        self.moments = {"decided": during} if during else {kill: self.die} if kill else {}
        source.query.plan(source.batch_id, batch)
        before = self.versions()[-1]
        id_ = batch.topic_ids[source.kafka.topic]
        records = [(r.tp, n) for r in batch.batch() for n in range(r.start, r.end)]
        rows = [(*tp, n, f"{id_}/{tp.partition}/{n}") for tp, n in records]
        source.sink(self.spark.createDataFrame(rows, SCHEMA), source.batch_id)
        self.at("durable")
        source.query.finish(source.batch_id)
        source.finished(batch)
        if run_files.void_by(batch.stream, batch.seq):
            self.log_line("  void")
            source.at = {tp: start for tp, (start, _) in batch.ranges.items()}
            if self.dice.random() < 0.3:
                self.log_line("  the driver moves to another host")
                (run_files.directory() / f"{batch.stream}.void").unlink()
                source.kill()
            return False
        for tp, at in source.at.items():
            source.end[id_, tp.partition] = max(at, source.end.get((id_, tp.partition), 0))
        self.behind -= {source.kafka.topic}
        commits = zip(self.versions(), commits_of(self.table), strict=True)
        *others, _ = (info for n, c in commits if n >= before for info in actions(c, "commitInfo"))
        if any(map(brings_back, others[1:])):
            self.behind |= {source.kafka.topic}
        self.judge(None if during else source)
        self.at("noted")
        if source.run is not None and self.dice.random() < 0.7:
            source.run.notice_mark()
        return True

    def accept_starts(self, source: Source, batch: StreamOffset) -> None:
        """A user who sets startingOffsets leaves out what is before, in a table without rows of the partition."""
        written = {(topic, id_, p) for topic, id_, p, _ in self.present()}
        new = {
            tp for tp in batch.started & batch.ranges.keys() if (*tp[:1], source.kafka.topic_id, tp[1]) not in written
        }
        self.leave_out(source, {tp: batch.ranges[tp][0] for tp in new - source.at.keys()})

    def at(self, moment: str) -> None:
        if action := self.moments.pop(moment, None):
            action()

    def die(self) -> None:
        self.moments.clear()
        self.log_line("  killed")
        raise Killed

    # --- refusals -------------------------------------------------------------------------------------------------

    def settle(self, source: Source, error: Exception) -> None:
        """Run the commands for one of the purposes that an error names."""
        self.behind -= {source.kafka.topic}
        offered = purposes(str(error))
        if "Start the query again" in str(error):
            return None
        assert offered, f"no command: {error}"
        names = [name for name in offered if not name.startswith(DOUBLES)]
        self.log_line(f"  refused: {str(error)[:400]}")
        if self.dice.random() < 0.1:
            self.log_line("  its user deletes the checkpoint and tries again")
            return source.lose_checkpoint()
        if "older than the table's log" in str(error) and source.kafka.topic_id != f"{source.kafka.topic}1":
            return self.settle_recreated(source)
        for name in self.dice.sample(names, len(names)):
            self.log_line(f"  settled: {name or offered[name]}")
            if all(self.command(source, command) for command in offered[name]):
                if name.startswith(LEAVES_OUT) or "records that the clone lacks are unknown" in str(error):
                    self.leave_out(source)
                self.note_gone()
                return None
        raise AssertionError(f"no command can be run: {error}")

    def settle_recreated(self, source: Source) -> None:
        """The log is gone, and rows of a former topic look like those of the present one, or Kafka has no offsets: the
        user moves the group to the end of the rows, as the error proposes ("another position of reset")."""
        topic, id_ = source.kafka.topic, source.kafka.topic_id
        ends = {
            str(p): max((n + 1 for t, i, q, n in self.present() if (t, i, q) == (topic, id_, p)), default=0)
            for p in range(PARTITIONS)
        }
        assert self.reset(source, "--to-offsets", json.dumps({topic: ends}), "--table", str(self.table))
        self.leave_out(source)

    def command(self, source: Source, command: str, depth: int = 0) -> bool:
        """Run a command as it is printed; return whether it could be run. ``VACUUM`` can make a RESTORE impossible."""
        if found := re.fullmatch(r"RESTORE TABLE delta\.`(.+)` TO VERSION AS OF (\d+)", command):
            assert found[1] == str(self.table)
            return self.change("restore", int(found[2]))
        words = shlex.split(command)
        assert words[0] == "spark-group" and words[-1] == "--execute", command
        shown = CliRunner().invoke(app, words[1:])
        if shown.exit_code == 0:
            return True
        offered = purposes(shown.output)
        if not offered and "Kafka has no offsets of the group" in shown.output:
            self.settle_recreated(source)
            return True
        assert offered and depth < 2, f"{command}: {shown.output} {shown.exception!r}"
        for name, lines in offered.items():
            if not name.startswith(DOUBLES) and all(self.command(source, line, depth + 1) for line in lines):
                if name.startswith(LEAVES_OUT):
                    self.leave_out(source)
                return True
        return False

    # --- what happens ---------------------------------------------------------------------------------------------

    def change(self, name: str, *arguments: Any) -> bool:
        """Change the table like a user; return False where ``VACUUM`` deleted the needed files."""
        before = self.present()
        try:
            getattr(self.changes, name)(self.table, *arguments)
        except MISSING_FILES as exc:
            if not re.search("missing|not found|no such file|not exist", str(exc), re.IGNORECASE):
                raise
            self.log_line(f"{name} {arguments}: {str(exc)[:80]}")
            return False
        self.log_line(f"{name} {arguments}")
        after = self.present()
        if name in ("delete", "merge"):
            self.gone |= before.keys() - after.keys()
        elif name == "restore":
            self.restore_gone(arguments[0])
        elif name == "restore_to_time":
            self.restore_gone(self.newest_like(arguments[0]))
        self.lose_former()
        self.judge()
        self.note_gone()  # a concurrent batch makes another version before the end of this step
        return True

    def newest_like(self, version: int) -> int:
        """The newest version with the files of this one: the log does not show which of them a timestamp meant."""
        for n, commit in zip(self.versions(), commits_of(self.table), strict=True):
            if n > version and (actions(commit, "add") or actions(commit, "remove")):
                break
            version = max(n, version)
        return version

    def restore_gone(self, version: int) -> None:
        gone, behind = self.noted[max(n for n in self.noted if n <= version)]
        self.gone |= gone
        self.behind |= behind

    def happen(self, name: str) -> None:
        """Let one thing happen to the table, to a group, or to its topic."""
        dice, source = self.dice, self.dice.choice(list(self.sources.values()))
        kafka, partition, low = source.kafka, dice.randrange(PARTITIONS), dice.randrange(0, 30)
        versions = self.versions()
        match name:
            case "delete" | "update" | "merge":
                self.change(name, kafka.topic, (partition, low, low + dice.choice((1, 3, 50))))
            case "optimize" | "vacuum":
                self.change(name)
            case "restore" | "restore_to_time" | "overwrite" | "replace":
                if versions[:-1]:
                    self.change(name, dice.choice(versions[-8:-1]))
            case "clone":
                self.clone(versions)
            case "expire":
                if not self.is_new_clone() and not self.lacks_rows():
                    self.log_line("the log is cleaned up")
                    for each in self.sources.values():  # a running sink knows its ledger
                        each.stop()
                    expire_log(self.table)
            case "restart":
                source.stop_or_kill()
            case "lose the checkpoint":
                self.log_line(f"{source.group}: the checkpoint is lost")
                source.lose_checkpoint()
            case "lose the offsets":
                self.log_line(f"{source.group}: the offsets are lost")
                source.stop_or_kill()
                kafka.offsets = {}
            case "another consumer":
                self.foreign(source, dice.randrange(-6, 7))
            case "recreate":
                self.recreate(source)
            case "reset" | "reset, killed":
                if name != "reset":
                    self.moments["decided"] = self.die
                self.reset(source, "--to-ledger", "--table", str(self.table))
                self.moments.clear()
            case "reset of Kafka":
                self.reset(source, "--to-offset", str(low), "--topic", kafka.topic)
            case "read again":
                self.batch(source)
                at = kafka.offsets.get(kafka.partitions[partition])
                if source.pending is None and at is not None and low < at.offset:
                    self.change("delete", kafka.topic, (partition, low, END))
                    back = f'{{"{kafka.topic}":{{"{partition}":{low}}}}}'
                    self.reset(source, "--to-offsets", back, "--table", str(self.table))

    def reset(self, source: Source, *position: str) -> bool:
        words = [
            "spark-group",
            "reset",
            "--bootstrap-servers",
            SERVERS,
            "--group",
            source.group,
            *position,
            "--execute",
        ]
        self.log_line(shlex.join(words))
        source.stop()
        try:
            shown = CliRunner().invoke(app, words[1:])
        except Killed:
            return False
        if shown.exit_code:
            self.log_line(f"  {shown.output[:200]}")
        if "--table" not in position and shown.exit_code == 0:
            self.leave_out(source)
        return shown.exit_code == 0

    def foreign(self, source: Source, by: int) -> None:
        """Another consumer of the group commits; what it read is not for the table."""
        source.stop_or_kill()
        for tp, at in list(source.kafka.offsets.items()):
            source.kafka.offsets[tp] = CommittedOffset(max(0, at.offset + by), "")
        self.log_line(f"{source.group}: another consumer commits at {by:+}")
        if by > 0:
            self.leave_out(source)

    def recreate(self, source: Source) -> None:
        """Delete the topic and create it again."""
        for _ in range(REFUSALS_MAX):
            if source.pending is None:
                break
            self.batch(source)
        kafka, number = source.kafka, int(source.kafka.topic_id[-1]) + 1
        if number > 9:
            return
        if self.dice.random() < 0.7:  # else while it runs: what it commits then names the new topic
            source.stop_or_kill()
        self.leave_out(source, source.at if source.id == kafka.topic_id else {})
        source.former |= {(source.id, tp.partition): end for tp, end in source.at.items()}
        kafka.recreate(f"{kafka.topic}{number}", END)
        self.log_line(f"{source.group}: the topic is recreated, id {kafka.topic_id}")

    def clone(self, versions: Sequence[int]) -> None:
        """Continue with a clone of the table instead."""
        version = self.dice.choice(versions[-4:])
        clone = self.table.with_name(f"table{self.dice.randrange(10**9)}")
        try:
            self.changes.clone(self.table, version, clone)
        except MISSING_FILES as exc:
            self.log_line(f"no clone: {str(exc)[:80]}")
            return
        self.log_line(f"clone of version {version}: {clone.name}")
        commits = zip(versions, commits_of(self.table), strict=True)
        first = {doc["group"] for n, commit in commits if n <= version for doc in notes(commit)}
        self.restore_gone(version)
        self.table, self.noted = clone, {}
        for source in self.sources.values():
            source.stop()
            if source.group not in first:
                self.leave_out(source, dict.fromkeys(source.kafka.partitions, END))
        self.lose_former()

    def is_new_clone(self) -> bool:
        """Whether a group has not written to the clone yet. Without the commit of the CLONE it looks like any table."""
        return (
            self.table.name != "table" and len({doc["group"] for c in commits_of(self.table) for doc in notes(c)}) < 2
        )

    def lacks_rows(self) -> bool:
        """Whether rows were removed that no group has been moved back for. Without the commit that removed them nothing
        shows it."""
        expected = {record for source in self.sources.values() for record in self.read(source)}
        return bool(self.behind or expected - self.present().keys() - self.gone)

    # --- a whole history ------------------------------------------------------------------------------------------

    def play(self) -> None:
        with self.patched():
            self.create()
            self.note_gone()
            for _ in range(self.dice.randint(*STEPS)):
                if self.dice.random() < 0.55:
                    self.random_batch()
                else:
                    (name,) = self.dice.choices(list(EVENTS), list(EVENTS.values()))
                    self.happen(name)
                self.note_gone()
            self.finish()

    def random_batch(self) -> None:
        source = self.dice.choice(list(self.sources.values()))
        kill, during = "", None
        if self.dice.random() < 0.2:
            kill = self.dice.choice(("planned", "decided", "written", "committed", "durable", "noted"))
        elif self.dice.random() < 0.15:
            during = self.concurrent(source)
        self.batch(source, kill=kill, during=during)

    def concurrent(self, source: Source) -> Callable[[], object]:
        (other,) = (one for one in self.sources.values() if one is not source)
        name = self.dice.choice(("batch", "delete", "update", "optimize", "restore", "overwrite"))
        return (lambda: self.batch(other)) if name == "batch" else lambda: self.happen(name)

    def finish(self) -> None:
        """Read on until each group has read everything that it ever read; then the table is whole."""
        for source in self.sources.values():
            source.stop()
            source.limits = LIMITS[-1:]
            for _ in range(40):
                id_ = source.kafka.topic_id
                if (
                    self.batch(source)
                    and source.id == id_
                    and all(
                        source.at.get(tp, 0) >= source.end.get((id_, tp.partition), 0) for tp in source.kafka.partitions
                    )
                ):
                    break
            else:
                raise AssertionError(f"{source.group} does not get on")
            self.judge(source)

    def create(self) -> None:
        creator: Any = frames.Session() if isinstance(self.spark, frames.Session) else self.spark
        table_writer.TableWriter(creator, str(self.table)).create(creator.createDataFrame([], SCHEMA))

    def log_line(self, line: str) -> None:
        self.story.append(line)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Let the product use this history's models, and stop its commits at their moments."""

        @contextmanager
        def session() -> Iterator[Any]:
            yield self.spark

        def before(moment: str, real: Callable[..., Any], after: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.at(moment)
                done = real(*args, **kwargs)
                self.at(after)
                return done

            return call

        with ExitStack() as stack:
            changed: list[tuple[Any, str, Any]] = [
                (run_files, "directory", lambda: self.home / "runs"),
                (common, "session", session),
                (common, "admin_of", lambda servers, group, config=None: nullcontext(self.sources[group].kafka)),
                (table_writer, "RACE_WAIT_MAX_S", 0.0),
                (NativeWriter, "_files", before("", NativeWriter._files, "written")),
                (NativeWriter, "commit", before("decided", NativeWriter.commit, "committed")),
                (
                    table_writer.OptionsWriter,
                    "commit",
                    before("decided", table_writer.OptionsWriter.commit, "committed"),
                ),
            ]
            if isinstance(self.spark, frames.Session):
                changed += [
                    (sinks, "without_ranges", frames.without_ranges),
                    (
                        table_writer.TableWriter,
                        "select",
                        table_writer.TableWriter._select_by_deltalake,
                    ),
                ]
            for place, name, value in changed:
                stack.enter_context(patch.object(place, name, value))
            for group, topic in GROUPS.items():
                settings = {"kafka.bootstrap.servers": SERVERS, "kafka.group.id": group, "subscribe": topic}
                run = stack.enter_context(
                    contextlib.closing(run_files.Publisher(group, Options.parse(settings).connection))
                )
                run.publish(
                    Statistics(
                        group=group,
                        stream="s",
                        seq=0,
                        state="reading",
                        generation=1,
                        assigned=(1,),
                        slots=("assigned",),
                    )
                )
            yield


EVENTS = {
    "delete": 2, "update": 1, "merge": 1, "optimize": 1, "vacuum": 1, "restore": 3, "restore_to_time": 2,
    "overwrite": 1, "replace": 1, "clone": 1, "expire": 1, "restart": 1, "lose the checkpoint": 2,
    "lose the offsets": 1, "another consumer": 1, "recreate": 1, "reset": 1, "reset, killed": 1, "reset of Kafka": 1,
    "read again": 1,
}  # fmt: skip
"""What happens between batches, with weights."""


def brings_back(info: Mapping[str, Any]) -> bool:
    """Whether the commit with this ``commitInfo`` may have brought rows of an older version back."""
    mode: str = info.get("operationParameters", {}).get("mode", "")
    return info["operation"] == "RESTORE" or mode == "Overwrite"


def purposes(message: str) -> dict[str, list[str]]:
    """Return the commands of a message by the purpose that it names for them."""
    found: dict[str, list[str]] = {}
    purpose = ""
    for line in message.splitlines():
        if named := re.fullmatch(r"  to (.+):", line):
            purpose = named[1]
        elif line.startswith("    "):
            found.setdefault(purpose, []).append(line.strip())
    return found


def play(seed: int, spark: Any, changes: Changes) -> None:
    """Play one history. A failure has its story."""
    with tempfile.TemporaryDirectory(prefix="history-") as home:
        history = History(seed, Path(home), spark, changes)
        try:
            history.play()
        except BaseException as exc:
            exc.add_note("\n".join([f"history {seed}:", *history.story]))
            raise


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.table_histories", description=__doc__.splitlines()[0])
    parser.add_argument("--spark", action="store_true", help="on Spark with Delta Lake")
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    given = parser.parse_args(arguments)
    failed = []
    with common.session() if given.spark else nullcontext() as started:
        spark: Any = started or frames.DeltaSession()
        changes: Changes = ByFiles() if started is None else ByStatements(started)
        for seed in range(given.first, given.end):
            try:
                play(seed, spark, changes)
            except Exception:  # noqa: BLE001 - the next one is played, too
                failed.append(seed)
                traceback.print_exc()
    print(f"{given.end - given.first} histories, failed: {failed or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
