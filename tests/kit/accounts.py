"""The true state of all partitions, and changes from outside: records are added and deleted, topics are recreated,
operators move the group's offsets.

Runs in: tests. Deliberately absent: ownership and reads (``invariants``).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from kit.books import Book, Cause, Holding, Loss, Reader
from kit.kafka_group import Books, Entry
from kit.world import World
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import parse_note
from spark_group_source.protocol.offsets import StreamOffset

Ranges = Mapping[TopicPartition, tuple[int, int]]


class Violation(AssertionError):
    """A rule is broken. The message names the rule."""


class Accounts(Books):
    """The true state of all partitions, and the events that change it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._readers: dict[str, Reader] = {}
        self._given_up: set[str] = set()  # agents that close their members by themselves
        self.books: dict[TopicPartition, Book] = {}
        self.starts_at_the_end = False  # startingOffsets=latest
        self.ledgers = False  # a query writes to a table with a ledger
        self.keeps = False  # a reset keeps all offsets
        self.operator = ""  # the name of a process that may move the group's offsets
        self.pending: Callable[[], list[StreamOffset]] = list  # batches that queries would replay at their start
        self.last: Callable[[], list[StreamOffset]] = list  # the newest batches that queries planned
        self._reset = 0
        self._no_reader = Reader("no reader", "no reader")
        self._former: dict[TopicPartition, int] = {}  # deleted partitions, and how far they were read
        self._former_holders: dict[TopicPartition, dict[str, Holding]] = {}  # consumers that still own them
        self._remade: set[str] = set()  # recreated topics
        self._begun: set[str] = set()  # parties that have planned a batch
        self.checkpoints_lost = 0
        self.ended_alone = 0  # AvailableNow runs that ended by themselves, alone in the group
        self.reports_epochs = False  # brokers report leader epochs
        self.refuses_transactions = False  # so that nothing fences a zombie
        self.went_back = 0  # ranges that start where a log was truncated
        self.must_read_again = 0  # truncated partitions whose new records no stream may skip
        self.twice = 0
        self.processed = 0
        self.causes: dict[Cause, int] = defaultdict(int)

    def add_partition(self, tp: TopicPartition, start: int) -> None:
        if tp in self._former or tp.topic in self._remade:
            self.made_again(tp)
        else:
            self.books[tp] = Book(start, start, whole=start)

    def produce(self, tp: TopicPartition, count: int) -> None:
        self.books[tp].end += count

    def gone(self, tp: TopicPartition, first: int) -> None:
        """Retention deleted the records below ``first``: they need not be processed."""
        self.books[tp].firsts.add(first)
        self._mark_skippable(tp, first)

    def shrunk(self, tp: TopicPartition, end: int) -> None:
        """The log was truncated. New records at these offsets may be read, or be taken for records read before."""
        book = self.books[tp]
        former, book.end = book.end, end
        book.longest = max(book.longest, former)
        self._grow(book, former)
        for offset in range(end, former):
            book.times[offset - book.start] = max(1, book.times[offset - book.start])
        for rows in book.rows.values():
            rows.difference_update(range(end, former))
        book.losses.append(Loss(self._no_reader, end, Cause.NEW_LOG, former))
        book.truncated.append(end)
        for offset in range(end, former):
            parties = {party for party, reached in book.reached.items() if reached > offset}
            book.replaced[offset] = book.replaced.get(offset, set()) | parties
        for held in book.holders.values():  # a run that goes back need not commit what it read of the former log
            held.begin = min(held.begin, end)
            held.until = None if held.until is None else min(held.until, end)
        advance(book)

    def deleted(self, tp: TopicPartition) -> None:
        """The topic is deleted. A topic that is recreated under its name has other records at the same offsets."""
        book = self.books.pop(tp)
        self._former[tp] = max([book.end, book.whole, book.stale, *book.reached.values()])
        self._former_holders[tp] = book.holders

    def made_again(self, tp: TopicPartition) -> None:
        """A topic is recreated. Offsets below the former topic's progress are ambiguous and not judged."""
        self._remade.add(tp.topic)
        stale = self._former.get(tp, -1)
        book = self.books[tp] = Book(0, 0, whole=max(stale, 0), skippable=max(stale, 0), stale=stale, again=True)
        streams = [reader for reader in self._readers.values() if reader.alive and reader.counted is not None]
        book.unclear = any(reader.party not in self._begun for reader in streams)
        if stale >= 0:
            book.losses.append(Loss(self._no_reader, 0, Cause.NEW_LOG, stale))
        for name, held in self._former_holders.pop(tp, {}).items():
            loss = None if held.loss is None else Loss(held.reader, 0, Cause.UNREPORTED)
            book.holders[name] = Holding(held.reader, held.since_ms, 0, loss=loss)
            book.losses += [] if loss is None else [loss]

    def resets(self, reset_number: int) -> None:
        """``spark-group reset`` moves the group now: earlier plans are void, also where nothing was committed and so no
        offset can be moved."""
        self._reset = reset_number
        for offset in self.last():
            for tp, (start, end) in self._of(offset.ranges):
                book = self.books[tp]
                if not book.commits:
                    book.undone.add(start)
                    book.losses.append(Loss(self._no_reader, start, Cause.OPERATOR, end))

    def half_done(self, offsets: Iterable[TopicPartition]) -> None:
        """This reset did not reach the table: the next one may revert its offsets."""
        for tp in self._there(offsets):
            self.books[tp].halfway = True

    def _moved(self, tp: TopicPartition, operator: Reader, new: Entry) -> None:
        """An operator moved a committed offset: forward, which skips records; or back, after which all records from
        there on must be processed again."""
        book, at, note = self.books[tp], new.offset, parse_note(new.note)
        before = book.commits[-1][1].offset if book.commits else at
        if self.keeps and at < before and not book.again and not book.truncated:
            self._break(f"a reset to the current offsets moves {tp} back from {before} to {at}")
        void, meant = note.reset_number > 0, note.stream is None  # a reset keeps the other offsets with their notes
        book.commits.append((self._world.now_ms, new))
        book.away |= book.chain.keys()
        back = meant and at < book.whole
        book.unclear |= self._has_unread(book, at)
        if void or back:
            book.losses.append(Loss(operator, 0, Cause.OPERATOR, max([at, *book.reached.values()])))
        if void:
            book.flight.clear()
            book.durable.clear()
        book.moved |= not void
        # With Kafka's own tool, a planned batch that is not finished counts as if the move had preceded it. A later run
        # cannot determine the order: it follows the operator into the middle of the batch. So does it with the last
        # finished batch, if Kafka never had its end; and the run after it may go on behind that batch.
        kept = [offset.ranges[tp] for offset in self.pending() if tp in offset.ranges and not void]
        furthest = max((entry.offset for _, entry in book.commits), default=0)
        kept += [(start, end) for _, start, end in book.durable.values() if start <= at < end and furthest < end]
        book.losses += [Loss(operator, at, Cause.OPERATOR, end) for start, end in kept if start <= at < end]
        if at > book.whole and book.again and note.topic_id:
            return  # of the deleted topic, maybe: the note has its id, by which the next run starts at the beginning
        if at > book.whole:
            # A reset keeps an offset that it does not move at the table's position: that may revert an earlier move.
            self.require(
                meant or book.moved or book.halfway,
                f"a reset leaves {tp} at {at}, but only what is below {book.whole} was processed",
            )
            self._mark_skippable(tp, at)
        elif back:
            book.rewound = max(book.rewound, 0 if void else book.skippable)
            book.skippable = max([book.start, min(book.skippable, at), *book.firsts])
            # A table with a ledger does not accept rows that its ledger covers: it refuses or drops them.
            again = range(max(0, at - book.start), len(book.times)) if void or not self.ledgers else ()
            for i in again:
                if not any(start <= book.start + i < end for start, end in kept):
                    book.times[i] = 0
            book.whole = max(book.skippable, min(book.whole, at))
            advance(book)

    def truncations(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return how often each log was truncated."""
        return {tp: len(self.books[tp].truncated) for tp in tps if tp in self.books}

    def has_already(self, reader: Reader, ranges: Ranges, *, table: str) -> None:
        """A table dropped rows that it has. A reset that did not move this table wanted them processed again.

        Rows before the start of its ledger count as present if another query read from the rewound offset first, so
        that this query does not know of the rewind: a ledger has one number per partition. An operator who rewinds
        behind the start of a table has to move both (``spark-group reset --table``). So has one whose reset did not
        reach the table: then everything below the ledger counts as present. If only the ledger shows that records were
        read which a truncated log has replaced since, as another stream read them, their leader epoch is unknown.
        """
        for tp, (start, end) in self._of(ranges):
            book = self.books[tp]
            self._grow(book, book.end)
            left_out = range(max(start, book.start), end)
            before = book.rewound if book.took - {table} else 0
            before = end if book.halfway else before
            for row in left_out:
                if reader.party not in book.replaced.get(row, {reader.party}):
                    del book.replaced[row]
            for row in book.rows.get(table, set()).intersection(left_out) | {r for r in left_out if r < before}:
                if row < book.end:
                    book.times[row - book.start] = max(1, book.times[row - book.start])
            advance(book)

    def ledger_moved(self, table: str, offsets: Mapping[TopicPartition, int]) -> None:
        """An operator moved a table's ledger: rows from that offset on must be written again."""
        for tp, at in offsets.items():
            if tp in self.books and table in self.books[tp].rows:
                self.books[tp].rows[table] = {row for row in self.books[tp].rows[table] if row < at}

    def explains(self, tps: Iterable[TopicPartition], starts: Mapping[TopicPartition, int], party: str) -> bool:
        """Return whether a person is rightly needed: a checkpoint was lost, or an operator, retention, an election or a
        new topic changed all of these partitions, or any partition if none is named; or the refused batch of ``party``
        starts at offsets that it cannot distinguish from an operator's rewind, or from offsets that expired."""
        named = list(tps)
        if self.checkpoints_lost:
            return True
        if not named:
            return any(self._was_changed(tp) for tp in self.books) or bool(self._former)
        unclear = {
            tp
            for tp, start in starts.items()
            if tp in self.books and (self._is_ambiguous(tp, start, party) or self._is_second_start(tp, start, party))
        }
        return all(tp not in self.books or tp in unclear or self._was_changed(tp) for tp in named)

    def _is_ambiguous(self, tp: TopicPartition, start: int, party: str) -> bool:
        """Return whether an ordinary consumer committed this start, and a query of another stream wrote its record:
        only that one knows that Kafka had not its batch then, or that it wrote the batch after that commit. So it is if
        a run of this stream wrote the record late, in a former run's batch, when another stream had already moved the
        group before it: the run continues there like that stream, and Kafka never has the batch."""
        book = self.books[tp]
        at = start - book.start
        if not (0 <= at < len(book.first) and any(e.stream is None and e.offset == start for _, e in book.commits)):
            return False
        writer = book.first[at]
        before = [entry for at_ms, entry in book.commits if at_ms < writer.began_ms]
        is_late = writer.replays >= 0 and bool(before) and before[-1].offset <= start
        return writer.party != party or (is_late and before[-1].stream not in (None, party))

    def _is_second_start(self, tp: TopicPartition, start: int, party: str) -> bool:
        """Return whether starting offsets decided this start, and another stream planned a batch from where they had
        decided before, but was killed, or stopped, before it had committed that to Kafka. Either of them is refused."""
        book = self.books[tp]
        first = book.commits[0][1] if book.commits else None
        if first is None or first.stream is None or first.offset != start:
            return False
        begun = [*book.chain.items(), *((other, batch.start) for other, batch in book.durable.items())]
        lower = {other for other, begin in begun if begin < start and other != first.stream}
        return bool(lower) and party in {first.stream, *lower}

    def _was_changed(self, tp: TopicPartition) -> bool:
        book = self.books[tp]
        causes = {loss.cause for loss in book.losses} & {Cause.OPERATOR, Cause.NEW_LOG}
        return bool(causes or book.firsts or book.again or book.moved or book.halfway or book.rewound or book.undone)

    def require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._break(otherwise)

    def _break(self, rule: str) -> None:
        self._world.note(f"VIOLATION: {rule}")
        error = Violation(rule)
        self._world.fail(error)
        raise error

    def _committed(self, tp: TopicPartition) -> int:
        book = self.books[tp]
        return book.commits[-1][1].offset if book.commits else book.start

    def _there(self, tps: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Return the partitions whose topic is not deleted."""
        return sorted(tp for tp in tps if tp in self.books)

    def _of(self, ranges: Ranges) -> list[tuple[TopicPartition, tuple[int, int]]]:
        return [(tp, bounds) for tp, bounds in ranges.items() if tp in self.books]

    def _may_skip(self, tp: TopicPartition, reader: Reader) -> bool:
        """Return whether this stream may start at the log end: under ``latest``, if it did not start before, and not on
        partitions that were added since. Another stream may have started, and lost the partition before its first
        commit; its start is unknown."""
        known = reader.known.get(tp.topic, 0)
        return self.starts_at_the_end and tp.partition < known and reader.party not in self.books[tp].chain

    def _mark_skippable(self, tp: TopicPartition, until: int) -> None:
        """Records below this offset need not be processed."""
        book = self.books[tp]
        book.skippable = max(book.skippable, until)
        advance(book)

    def _grow(self, book: Book, end: int) -> None:
        missing = end - book.start - len(book.times)
        book.times += [0] * missing
        book.first += [self._no_reader] * missing

    def _has_unread(self, book: Book, until: int) -> bool:
        """Return whether records of a recreated topic below this offset are unread: it is a position in the former
        topic, of a consumer that does not know topic ids."""
        self._grow(book, book.end)
        first = max(book.firsts, default=book.start)
        return book.again and not all(book.times[first - book.start : until - book.start])

    def _overlaps(self, tp: TopicPartition, reader: Reader) -> bool:
        (start, end), committed = self.books[tp].flight[reader], self._committed(tp)
        book = self.books[tp]
        if committed < start and (book.moved or book.again):
            return False  # an operator, or a run that took the topic for a new one, makes the next owner read it again
        others = [entry.offset for _, entry in book.commits if entry.stream != reader.party]
        if committed < start and reader.party in book.away and others[-1:] == [committed]:
            return False  # a former run planned it, and foreign commits moved the group before it since
        return committed < end and start < end


def advance(book: Book) -> None:
    book.whole = max(book.whole, book.skippable)
    while book.whole - book.start < len(book.times) and book.times[book.whole - book.start]:
        book.whole += 1
