"""One run of a query over the model of its group's offsets: the shipped protocol decides where each batch starts.

Runs in: tests. Deliberately absent: members of other consumers, records, agents; time passes only while the run waits.
"""

from kit.run_harness import RunHarness
from offset_model import OffsetModel

from spark_group_source.host import run_files
from spark_group_source.kafka.translation import CommittedOffset
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import GRACE_MS
from spark_group_source.protocol.offsets import BatchKey, StreamOffset
from spark_group_source.protocol.rules import StartingPosition
from spark_group_source.runtime.offset_commits import notes_of
from spark_group_source.runtime.request_thread import parse_committed

COMMIT_MS = 100
"""Enough for a commit."""
CALLS_MAX = 3
"""A recreated topic is found in the first call, and moved to its first records in the second."""


class StreamRun(RunHarness):
    """A run from its start to its end. The end of each log is the one that ``spark-group`` sees; ``limit`` bounds a
    batch.

    Args:
        stream: the stream's id if it has none yet.
        durable: the end of the last batch in the checkpoint's commit log; None for a new checkpoint.
    """

    def __init__(
        self, kafka: OffsetModel, stream: str, durable: StreamOffset | None, limit: int, starting: StartingPosition
    ) -> None:
        self.kafka = kafka
        topics = {kafka.topic: len(kafka.partitions)}
        super().__init__(
            topics=topics, group=kafka.group, starting=starting, fail_on_data_loss=False, max_offsets=limit
        )
        self.start = StreamOffset.initial(kafka.group) if durable is None else durable
        self._stream = stream

    def plan(self) -> StreamOffset | None:
        """Call ``latestOffset`` until there is something to read; None: there is nothing."""
        for _ in range(CALLS_MAX):
            end = self.call(
                ev.NextBatchRequested(
                    start=self.start,
                    new_stream=self._stream,
                    void_by=run_files.void_by(self.start.stream, self.start.seq),
                    committed=run_files._marked(self.start.stream, run_files.COMMITTED),
                )
            )
            if end is not self.start:
                return end
            self.pass_time(GRACE_MS)
        return None

    def read(self, end: StreamOffset) -> None:
        """Spark starts to read the planned batch, or again one that is in the checkpoint and not in its commit log."""
        self.call(ev.BatchStarted(offset=end))

    def notice_mark(self) -> None:
        """The clock finds the sink's durable mark, and the offsets are committed."""
        plan = self.run.plan
        if plan is not None and (batch := run_files.durable_mark(plan.stream)) == BatchKey.of(plan):
            self.feed(ev.BatchMarked(batch=batch))
            self.pass_time(COMMIT_MS)

    def end(self) -> None:
        """Spark stops the query, or a batch failed."""
        self.notice_mark()
        self.call(ev.StopRequested())
        if (committed := self.run.committed_offset) is not None:
            run_files._mark(run_files.COMMITTED, committed)

    def answer(self, step: ev.Step) -> ev.Event:
        self._read_kafka()
        return super().answer(step)

    def _answer(self, command: ev.Command) -> ev.Event | None:
        self._read_kafka()
        answer = super()._answer(command)
        if isinstance(command, ev.CommitOffsets):
            notes = notes_of(command, at_ms=self.clock())
            self.kafka.offsets |= {tp: CommittedOffset(at, notes[tp].text) for tp, at in command.offsets.items()}
        return answer

    def _read_kafka(self) -> None:
        partitions = self.kafka.partitions
        self.ids = {self.kafka.topic: self.kafka.topic_id}
        self.firsts, self.ends = dict.fromkeys(partitions, 0), dict.fromkeys(partitions, self.kafka.end)
        offsets = {
            tp: parse_committed(at, wall_ms=self.clock(), now_ms=self.clock()) for tp, at in self.kafka.offsets.items()
        }
        self.committed = {tp: at for tp, at in offsets.items() if at is not None}
