"""Tables that a function of the key names, by decisions alone: random histories of batches, crashes between two tables,
lost checkpoints and offsets, truncated logs and restored tables. Deliberately absent: Spark, Delta, and how the rows of
a batch are divided (``tests/delta/test_topics.py``)."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from sink_source import offset

from spark_group_source.delta.ledger_decision import AlreadyWritten, WriteBatch, catch_up, decide
from spark_group_source.delta.ledger_format import Ledger, LedgerPartition, LedgerTopic
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

PARTITIONS, KEYS, OTHERS = 2, "abcd", "others"
HISTORIES, STEPS = 200, 40


@dataclass
class Record:
    """A record of the log."""

    id: int
    epoch: int
    """The leader epoch under which it was written."""
    key: str
    """The table that it belongs to."""


@dataclass
class Table:
    """A table with the ledger of the group, and the records whose rows it has."""

    ledger: Ledger | None = None
    rows: Counter[int] = field(default_factory=Counter)


@dataclass
class Position:
    """Where the group continues, and the leader epoch up to there."""

    at: int = 0
    epoch: int = 0
    is_started: bool = False
    """Whether the starting options decided it."""


class History:
    """A query, its tables and its topic, with everything that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.logs: list[list[Record]] = [[] for _ in range(PARTITIONS)]
        self.epochs = [0] * PARTITIONS
        self.produced = 0
        self.tables = {OTHERS: Table()}
        self.committed = [Position() for _ in range(PARTITIONS)]
        self.positions = [Position() for _ in range(PARTITIONS)]
        self.stream, self.seq, self.reset_number = 0, 0, 0
        self.planned: StreamOffset | None = None
        """The batch of the checkpoint that some table may lack."""
        self.crashes = True

    def produce(self) -> None:
        for log, epoch in zip(self.logs, self.epochs, strict=True):
            for _ in range(self.draw.randrange(4)):
                log.append(Record(self.produced, epoch, self.draw.choice([*KEYS, OTHERS])))
                self.produced += 1

    def truncate(self) -> None:
        """A log loses its end. The group has read it, or else no ledger distinguishes the new end from the old one."""
        ledgers = [table.ledger for table in self.tables.values() if table.ledger is not None]
        ahead = [
            tp for ledger in ledgers for tp, end in ledger.offsets.items() if end > self.positions[tp.partition].at
        ]
        if self.planned is None and not self.unnoticed and not ahead:
            self.committed = [replace(position) for position in self.positions]
            p = self.draw.randrange(PARTITIONS)
            del self.logs[p][self.draw.randint(max(0, len(self.logs[p]) - 3), len(self.logs[p])) :]
            self.epochs[p] += 1

    @property
    def unnoticed(self) -> bool:
        """Whether a log was truncated that no complete batch has read since."""
        return any(now.epoch < epoch for now, epoch in zip(self.committed, self.epochs, strict=True))

    def plan(self) -> StreamOffset:
        ranges, truncated, epochs, started = {}, {}, {}, []
        for p, (log, now) in enumerate(zip(self.logs, self.positions, strict=True)):
            known_end = sum(record.epoch <= now.epoch for record in log)
            start = now.at
            if known_end < start:
                start, truncated[TopicPartition("orders", p)] = known_end, now.epoch
            end = self.draw.randint(start, len(log)) if self.crashes else len(log)
            ranges["orders", p] = (start, end)
            epochs[TopicPartition("orders", p)] = self.epochs[p]
            started += [("orders", p)] * now.is_started
        planned = offset(self.seq, ranges, stream=f"s{self.stream}", started=started, reset_number=self.reset_number)
        self.seq += 1
        return replace(planned, truncated_after=truncated, leader_epochs=epochs)

    def batch(self) -> None:
        """A batch, or a replay of the one that was interrupted; it may be interrupted between two tables."""
        planned = self.planned = self.planned or self.plan()
        ranges = {tp.partition: pair for tp, pair in planned.ranges.items()}
        read = [(p, n) for p, (start, end) in ranges.items() for n in range(start, end)]
        keys = sorted({self.logs[p][n].key for p, n in read} - {OTHERS})
        self.draw.shuffle(keys)
        common = self.tables[OTHERS].ledger
        for name in [*keys, OTHERS]:
            if self.crashes and self.draw.random() < 0.1:
                return
            self.write(name, planned, [(p, n) for p, n in read if self.logs[p][n].key == name], common)
        for p, (_, end) in ranges.items():
            self.positions[p] = Position(end, self.epochs[p])
        if not self.crashes or self.draw.random() < 0.9:
            self.committed = [replace(position) for position in self.positions]
        self.planned = None

    def write(self, name: str, planned: StreamOffset, rows: list[tuple[int, int]], common: Ledger | None) -> None:
        table = self.tables.setdefault(name, Table())
        known = {"etl": common} if common is not None and name != OTHERS else {}
        decision = decide([planned], {"etl": table.ledger}, table=name, batch_id=planned.seq, common=known)
        if isinstance(decision, AlreadyWritten):
            return
        for p, n in rows:
            if not any(r.tp.partition == p and r.start <= n < r.end for r in decision.drop):
                table.rows[self.logs[p][n].id] += 1
        table.ledger = decision.ledgers["etl"]

    def lose_checkpoint(self) -> None:
        self.start_anew([replace(position) for position in self.committed])

    def lose_offsets(self) -> None:
        if self.unnoticed:
            return  # no position is left that shows the truncation
        self.start_anew([Position(0, self.epochs[p], is_started=True) for p in range(PARTITIONS)])

    def start_anew(self, positions: list[Position]) -> None:
        self.stream, self.seq, self.planned, self.positions = self.stream + 1, 0, None, positions

    def restore(self) -> None:
        """A table loses its last rows, and an operator resets the group to the table's ledger, if it is ahead."""
        name = self.draw.choice(sorted(self.tables))
        table = self.tables[name]
        if any(self.epochs) or self.planned is not None or table.ledger is None:
            return
        self.reset_number += 1
        at = {tp: self.draw.randint(max(0, end - 3), end) for tp, end in table.ledger.offsets.items()}
        table.ledger = table.ledger.after_reset(self.reset_number, at, {"orders": "id-1"})
        for tp, end in at.items():
            for record in self.logs[tp.partition][end:]:
                del table.rows[record.id]
        self.committed = [
            replace(position, at=min(at.get(TopicPartition("orders", p), position.at), position.at))
            for p, position in enumerate(self.committed)
        ]
        self.start_anew([replace(position) for position in self.committed])

    def play(self) -> None:
        events = [self.produce] * 4 + [self.batch] * 8 + [self.truncate, self.lose_checkpoint, self.lose_offsets]
        for _ in range(STEPS):
            self.draw.choice([*events, self.restore])()
        self.crashes = False
        for _ in range(2):  # the replay, and all the rest
            self.batch()

    def misplaced(self) -> list[str]:
        """Return what is wrong: a living record is not in its table, or anywhere twice."""
        alive = {record.id: record.key for log in self.logs for record in log}
        twice = [
            f"{id_} is in {name} {n} times" for name, t in self.tables.items() for id_, n in t.rows.items() if n > 1
        ]
        lost = [f"{id_} is not in {key}" for id_, key in alive.items() if not self.tables.get(key, Table()).rows[id_]]
        return twice + lost


@pytest.mark.proves("G4", level="simulation")
def test_each_record_is_in_its_table_once_after_any_history() -> None:
    wrong = {}
    for seed in range(HISTORIES):
        history = History(seed)
        history.play()
        if found := history.misplaced():
            wrong[seed] = found[:3]
    assert not wrong


def test_a_table_that_an_operator_moved_back_is_not_taken_for_one_without_rows() -> None:
    """The other table is ahead of it, and the group reads again what this one lacks."""
    tp = TopicPartition("orders", 0)
    back = Ledger(group="etl", reset_number=1).with_offsets({tp: 10}, {"orders": "id-1"})
    common = Ledger(group="etl", reset_number=1).with_offsets({tp: 90}, {"orders": "id-1"})
    for start in (10, 30):
        assert catch_up(back, common, offset(0, {("orders", 0): (start, 40)})).offsets == {tp: start}


def test_a_truncation_that_a_reset_made_a_table_forget_is_older_than_its_rows() -> None:
    def ledger(rows: LedgerPartition) -> Ledger:
        return Ledger(group="etl").with_topics([LedgerTopic("orders", "id-1", {0: rows})])

    tp, common = TopicPartition("orders", 0), ledger(LedgerPartition(offset=90, epoch=1, gone=0))
    ahead, older = ledger(LedgerPartition(offset=95, epoch=1)), ledger(LedgerPartition(offset=95))
    assert catch_up(ahead, common, offset(0, {("orders", 0): (90, 99)})).offsets == {tp: 95}
    assert catch_up(older, common, offset(0, {("orders", 0): (90, 99)})).offsets == {tp: 90}


@pytest.mark.proves("G4", level="core")
@pytest.mark.parametrize(("read", "drop"), [(55, [(60, 80)]), (70, [(70, 80)]), (90, [])])
def test_rows_that_a_table_has_of_the_log_after_a_truncation_stay_known(read: int, drop: list[tuple[int, int]]) -> None:
    """It got a batch that ``others`` lacks, because the query was killed between the two. Then another query, whose
    batch up to ``read`` has no rows for this table, found the truncation at 55."""
    tp = TopicPartition("orders", 0)

    def write(ledger: Ledger | None, batch: StreamOffset, epoch: int, common: Ledger | None = None) -> WriteBatch:
        batch = replace(batch, leader_epochs={tp: epoch})
        shared = {} if common is None else {"etl": common}
        decision = decide([batch], {"etl": ledger}, table="t", batch_id=batch.seq, common=shared)
        assert isinstance(decision, WriteBatch)
        return decision

    first = write(None, offset(0, {("orders", 0): (0, 60)}), 3).ledgers["etl"]
    table = write(first, offset(0, {("orders", 0): (60, 80)}, stream="s2"), 5, first).ledgers["etl"]
    found = offset(1, {("orders", 0): (55, read)}, truncated_after={("orders", 0): 3})
    others = write(first, found, 5).ledgers["etl"]
    decision = write(table, offset(2, {("orders", 0): (read, 100)}), 5, others)
    assert [(r.start, r.end) for r in decision.drop] == drop
    assert decision.ledgers["etl"].offsets == {tp: 100}
