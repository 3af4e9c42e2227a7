"""What an agent's reader takes of what its client brings, with a client that says what a test wants."""

import pytest
from kit.fake_reader import FakeChunk, FakeClient, Message

from spark_group_source.agents.prefetch.reader import Reader, Stock
from spark_group_source.agents.task_messages import Ahead
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.reader.planned_rows import DAMAGED, EOF
from spark_group_source.reader.records import ClientEvent

TP = TopicPartition("t", 0)
WANTED = [OffsetRange(TP, 0, 99)]
EPOCH = {TP: 3}


def message(at: int, *, epoch: int = 3, size: int = 1) -> Message:
    return Message(TP, at, b"v" * size, epoch)


class Scripted(FakeClient):
    """A client that brings one thing after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.next = FakeChunk()

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        found, self.next = self.next, FakeChunk()
        return found


class Scene:
    """A reader whose thread is the test's."""

    def __init__(self, memory_bytes: int = 1 << 20) -> None:
        self.stock = Stock(memory_bytes)
        self.client = Scripted()
        self.reader = Reader(self.stock, lambda: self.client, include_headers=False)  # type: ignore[arg-type, return-value]  # only what is used

    def tell(self, position: int, **more: object) -> None:
        self.stock.follow(Ahead({TP: position}, leader_epochs=EPOCH, **more))  # type: ignore[arg-type]  # of any field
        self.reader._adjust(self.client)  # type: ignore[arg-type]  # see above

    def bring(self, *what: Message | ClientEvent) -> None:
        records = [one for one in what if isinstance(one, Message)]
        self.client.next = FakeChunk(records, [one for one in what if isinstance(one, ClientEvent)])
        self.reader._poll(self.client)  # type: ignore[arg-type]  # see above
        self.reader._adjust(self.client)  # type: ignore[arg-type]  # see above

    def until(self) -> int:
        """Where the range that a task asks for would be read directly from."""
        with self.stock.locked() as buffers:
            taken = buffers.take(WANTED, {}, EPOCH, {"t": 1 << 40})
        return taken[0].until if taken else 0


def eof(at: int) -> ClientEvent:
    return ClientEvent(EOF, "", TP, at)


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.tell(0)
    assert made.client.assigned == {TP: 0}
    return made


def test_gaps_and_the_logs_end_are_known_to_hold_no_record(scene: Scene) -> None:
    scene.bring(message(2), message(5))
    scene.bring(eof(9))
    assert scene.until() == 9


def test_records_below_the_position_are_not_taken_twice(scene: Scene) -> None:
    scene.bring(message(0), message(1))
    scene.bring(message(1), message(2))
    with scene.stock.locked() as buffers:
        (taken,) = buffers.take(WANTED, {}, EPOCH, {"t": 1 << 40})
        assert sum(piece.last - piece.first for piece in taken.pieces) == 3


@pytest.mark.parametrize("event", [ClientEvent(min(DAMAGED), "damaged", TP, -1), ClientEvent(29, "refused", TP, -1)])
def test_nothing_is_taken_of_what_comes_with_trouble_or_behind_it(scene: Scene, event: ClientEvent) -> None:
    scene.bring(message(0))
    scene.bring(message(1), message(3), event, eof(4))
    scene.bring(message(4), eof(5))
    assert scene.client.assigned == {}
    assert scene.until() == 1
    scene.tell(1)
    assert scene.client.assigned == {TP: 1}


def test_records_of_a_later_leader_wait_until_that_is_told(scene: Scene) -> None:
    scene.bring(message(0), message(1, epoch=4), eof(2))
    assert scene.client.assigned == {}
    assert scene.until() == 1


def test_what_there_is_no_room_for_is_fetched_again_and_not_skipped() -> None:
    scene = Scene(64 << 10)
    scene.tell(0)
    scene.bring(*(message(at, size=10_000) for at in range(9)), eof(9))
    until = scene.until()
    assert 0 < until < 9, "the log's end behind them proves nothing"
    assert scene.client.assigned == {}
    with scene.stock.changing() as buffers:  # the task has it
        buffers.drop("none")
        buffers.used = 0
    scene.reader._adjust(scene.client)  # type: ignore[arg-type]  # see above
    assert scene.client.assigned == {TP: until}


def test_what_was_read_for_a_former_plan_is_not_taken(scene: Scene) -> None:
    scene.stock.follow(Ahead({TP: 50}, leader_epochs=EPOCH))  # and its client does not know yet
    scene.reader._poll(scene.client)  # type: ignore[arg-type]  # see above
    scene.client.next = FakeChunk([message(60)], [eof(61)])
    scene.reader._poll(scene.client)  # type: ignore[arg-type]  # see above
    with scene.stock.locked() as buffers:
        assert buffers.partitions[TP].position == 50


def test_a_full_partition_makes_way_for_others_and_comes_back() -> None:
    scene, other = Scene(64 << 10), TopicPartition("t", 1)
    scene.stock.follow(Ahead({TP: 0, other: 0}, leader_epochs=EPOCH))
    scene.reader._adjust(scene.client)  # type: ignore[arg-type]  # see above
    scene.bring(*(message(at, size=8_000) for at in range(9)))
    assert scene.client.assigned == {other: 0}
    with scene.stock.changing() as buffers:
        (taken,) = buffers.take(WANTED, {}, EPOCH, {"t": 1 << 40})
        buffers.free(taken.pieces)
    scene.reader._adjust(scene.client)  # type: ignore[arg-type]  # see above
    assert scene.client.assigned == {other: 0, TP: taken.until}
