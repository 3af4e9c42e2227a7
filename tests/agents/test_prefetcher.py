"""What the prefetcher buffers of what its client returns, with a scripted client."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from kit.fake_reader import FakeChunk, FakeClient, Message

from spark_group_source.agents.agent_folder import AgentFolder
from spark_group_source.agents.messages import PrefetchPositions
from spark_group_source.agents.prefetch import client
from spark_group_source.agents.prefetch.prefetcher import Prefetcher, SharedBuffers
from spark_group_source.agents.prefetch.server import PrefetchServer
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.table import COLUMNS
from spark_group_source.reader.range_reader import ReadCounts
from spark_group_source.reader.records import DAMAGED, EOF, ClientEvent

TP = TopicPartition("t", 0)
WANTED = [OffsetRange(TP, 0, 99)]
EPOCH = {TP: 3}


def message(at: int, *, epoch: int = 3, size: int = 1) -> Message:
    return Message(TP, at, b"v" * size, epoch)


class ScriptedClient(FakeClient):
    """A client whose next poll returns what the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.next = FakeChunk()

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        found, self.next = self.next, FakeChunk()
        return found


class Scene:
    """A prefetcher that runs on the test's thread."""

    def __init__(self, memory_bytes: int = 1 << 20, columns: Sequence[str] = COLUMNS[:-1]) -> None:
        self.buffers = SharedBuffers(memory_bytes)
        self.client = ScriptedClient()
        self.prefetcher = Prefetcher(self.buffers, lambda: self.client, columns)  # type: ignore[arg-type, return-value]  # only what is used

    def follow(self, position: int, **more: object) -> None:
        self.buffers.follow(PrefetchPositions({TP: position}, leader_epochs=EPOCH, **more))  # type: ignore[arg-type]  # of any field
        self.prefetcher._assign(self.client)  # type: ignore[arg-type]  # see above

    def poll(self, *what: Message | ClientEvent) -> None:
        records = [one for one in what if isinstance(one, Message)]
        self.client.next = FakeChunk(records, [one for one in what if isinstance(one, ClientEvent)])
        self.prefetcher._poll(self.client)  # type: ignore[arg-type]  # see above
        self.prefetcher._assign(self.client)  # type: ignore[arg-type]  # see above

    def until(self) -> int:
        """Up to which offset a task's range is served."""
        with self.buffers.locked() as buffers:
            taken, _ = buffers.take(WANTED, {}, EPOCH, {"t": 1 << 40}, 1 << 40)
        return taken[0].until if taken else 0


def eof(at: int) -> ClientEvent:
    return ClientEvent(EOF, "", TP, at)


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.follow(0)
    assert made.client.assigned == {TP: 0}
    return made


def test_gaps_and_the_end_of_the_log_are_covered_without_records(scene: Scene) -> None:
    scene.poll(message(2), message(5))
    scene.poll(eof(9))
    assert scene.until() == 9


def test_records_below_the_position_are_not_buffered_again(scene: Scene) -> None:
    scene.poll(message(0), message(1))
    scene.poll(message(1), message(2))
    with scene.buffers.locked() as buffers:
        (taken,), _ = buffers.take(WANTED, {}, EPOCH, {"t": 1 << 40}, 1 << 40)
        assert sum(each.last - each.first for each in taken.ranges) == 3


@pytest.mark.parametrize("event", [ClientEvent(min(DAMAGED), "damaged", TP, -1), ClientEvent(29, "refused", TP, -1)])
def test_records_with_or_after_an_error_are_not_buffered(scene: Scene, event: ClientEvent) -> None:
    scene.poll(message(0))
    scene.poll(message(1), message(3), event, eof(4))
    scene.poll(message(4), eof(5))
    assert scene.client.assigned == {}
    assert scene.until() == 1
    scene.follow(1)
    assert scene.client.assigned == {TP: 1}


def test_records_of_a_later_leader_are_not_buffered(scene: Scene) -> None:
    scene.poll(message(0), message(1, epoch=4), eof(2))
    assert scene.client.assigned == {}
    assert scene.until() == 1


def test_records_without_room_are_fetched_again() -> None:
    scene = Scene(64 << 10)
    scene.follow(0)
    scene.poll(*(message(at, size=10_000) for at in range(9)), eof(9))
    until = scene.until()
    assert 0 < until < 9, "the log's end after dropped records proves nothing"
    assert scene.client.assigned == {}
    with scene.buffers.changing() as buffers:  # the task has received it
        buffers.drop_topic("none")
        buffers.used_bytes = 0
    scene.prefetcher._assign(scene.client)  # type: ignore[arg-type]  # see above
    assert scene.client.assigned == {TP: until}


def test_the_room_of_records_for_which_memory_lacks_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(64 << 10)
    scene.follow(0)

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(FakeChunk, "batch", fails)
        for _ in range(9):
            with pytest.raises(MemoryError):
                scene.poll(*(message(at, size=10_000) for at in range(3)))
    scene.poll(*(message(at, size=10_000) for at in range(3)))
    assert scene.until() == 3


def test_a_part_of_a_batch_is_served_without_the_column_offset(tmp_path: Path) -> None:
    columns, folder = ("value", "topic"), AgentFolder(tmp_path)
    scene = Scene(columns=columns)
    scene.follow(0)
    scene.poll(*(message(at, size=at) for at in range(9)))
    serving = PrefetchServer(folder, scene.buffers, pytest.fail, columns)
    serving.start()
    try:
        piece = Piece((OffsetRange(TP, 0, 3),), {}, EPOCH)
        batches, rest, _ = client.request_buffered(folder, piece, columns, ReadCounts())
    finally:
        serving.stop()
    assert ([batch.to_pydict() for batch in batches], rest) == (
        [{"value": [b"", b"v", b"vv"], "topic": ["t", "t", "t"]}],
        [],
    )
    scene.follow(5)
    with scene.buffers.locked() as buffers:
        assert [(each.start, each.end) for each in buffers.partitions[TP].ranges] == [(5, 9)]


def test_records_fetched_before_a_seek_are_not_buffered(scene: Scene) -> None:
    scene.buffers.follow(PrefetchPositions({TP: 50}, leader_epochs=EPOCH))  # the client is not assigned again yet
    scene.prefetcher._poll(scene.client)  # type: ignore[arg-type]  # see above
    scene.client.next = FakeChunk([message(60)], [eof(61)])
    scene.prefetcher._poll(scene.client)  # type: ignore[arg-type]  # see above
    with scene.buffers.locked() as buffers:
        assert buffers.partitions[TP].position == 50


def test_a_full_partition_is_unassigned_and_later_assigned_again() -> None:
    scene, other = Scene(64 << 10), TopicPartition("t", 1)
    scene.buffers.follow(PrefetchPositions({TP: 0, other: 0}, leader_epochs=EPOCH))
    scene.prefetcher._assign(scene.client)  # type: ignore[arg-type]  # see above
    scene.poll(*(message(at, size=8_000) for at in range(9)))
    assert scene.client.assigned == {other: 0}
    with scene.buffers.changing() as buffers:
        (taken,), _ = buffers.take(WANTED, {}, EPOCH, {"t": 1 << 40}, 1 << 40)
        buffers.free(taken.ranges)
    scene.prefetcher._assign(scene.client)  # type: ignore[arg-type]  # see above
    assert scene.client.assigned == {other: 0, TP: taken.until}
