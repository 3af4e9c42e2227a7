"""The books of all partitions, and what the world does to them: records come and go, topics are made again, operators
move the group on purpose.

Runs in: tests. Deliberately absent: who has what and who reads what (``invariants``).
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
    """A rule did not hold. The message names the rule."""


class Accounts(Books):
    """The books, and what they need to be kept true."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._readers: dict[str, Reader] = {}
        self._given_up: set[str] = set()  # agents that close their members by themselves
        self.books: dict[TopicPartition, Book] = {}
        self.starts_at_the_end = False  # startingOffsets=latest
        self.ledgers = False  # somebody writes to a table with a ledger
        self.operator = ""  # the name of a process that may move the group
        self.pending: Callable[[], list[StreamOffset]] = list  # batches that queries would run again at their start
        self.last: Callable[[], list[StreamOffset]] = list  # the newest batches that queries planned
        self._reset = 0
        self._nobody = Reader("nobody", "nobody")
        self._former: dict[TopicPartition, int] = {}  # deleted, and how far they were read
        self._former_holders: dict[TopicPartition, dict[str, Holding]] = {}  # who has them all the same
        self._remade: set[str] = set()  # topics that were deleted and made again
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
        """Retention took the records below ``first``: who did not read them need not."""
        self.books[tp].firsts.add(first)
        self._nobodys(tp, first)

    def shrunk(self, tp: TopicPartition, end: int) -> None:
        """The log lost its end. What comes to these offsets now may be read, or be taken for what was read."""
        book = self.books[tp]
        former, book.end = book.end, end
        book.longest = max(book.longest, former)
        self._grow(book, former)
        for offset in range(end, former):
            book.times[offset - book.start] = max(1, book.times[offset - book.start])
        for rows in book.rows.values():
            rows.difference_update(range(end, former))
        book.losses.append(Loss(self._nobody, end, Cause.NEW_LOG, former))
        advance(book)

    def deleted(self, tp: TopicPartition) -> None:
        """The topic is gone. One that is made under its name has other records at the same offsets."""
        book = self.books.pop(tp)
        self._former[tp] = max([book.end, book.whole, book.stale, *book.reached.values()])
        self._former_holders[tp] = book.holders

    def made_again(self, tp: TopicPartition) -> None:
        """As far as the former topic was read, whose records are meant is not judged."""
        self._remade.add(tp.topic)
        stale = self._former.get(tp, -1)
        book = self.books[tp] = Book(0, 0, whole=max(stale, 0), nobodys=max(stale, 0), stale=stale, again=True)
        if stale >= 0:
            book.losses.append(Loss(self._nobody, 0, Cause.NEW_LOG, stale))
        for name, held in self._former_holders.pop(tp, {}).items():
            loss = None if held.loss is None else Loss(held.reader, 0, Cause.UNTOLD)
            book.holders[name] = Holding(held.reader, held.since_ms, 0, loss=loss)
            book.losses += [] if loss is None else [loss]

    def resets(self, reset_number: int) -> None:
        """``spark-group reset`` moves the group now: what was planned before is void, also where nothing was committed
        and so nothing can be moved."""
        self._reset = reset_number
        for offset in self.last():
            for tp, (start, end) in self._of(offset.ranges):
                book = self.books[tp]
                if not book.commits:
                    book.undone.add(start)
                    book.losses.append(Loss(self._nobody, start, Cause.OPERATOR, end))

    def half_done(self, offsets: Iterable[TopicPartition]) -> None:
        """That reset did not reach the table: what it says may still be taken back by the next one."""
        for tp in self._there(offsets):
            self.books[tp].halfway = True

    def _moved(self, tp: TopicPartition, operator: Reader, new: Entry) -> None:
        """An operator moved a partition on purpose: forward, and what is left out is nobody's; or back, and then all
        from there on has to be processed once more."""
        book, at, note = self.books[tp], new.offset, parse_note(new.note)
        void, meant = note.reset_number > 0, note.stream is None  # a reset keeps the notes of what it does not move
        book.commits.append((self._world.now_ms, new))
        book.away |= book.chain.keys()
        back = meant and at < book.whole
        if void or back:
            book.losses.append(Loss(operator, 0, Cause.OPERATOR, max([at, *book.reached.values()])))
        if void:
            book.flight.clear()
            book.durable.clear()
        book.moved |= not void
        # By Kafka's tool, a batch that was planned and not finished counts as if it had come before. That it was, no
        # run can tell later: it follows the operator into the middle of the batch.
        kept = [offset.ranges[tp] for offset in self.pending() if tp in offset.ranges and not void]
        book.losses += [Loss(operator, at, Cause.OPERATOR, end) for start, end in kept if start <= at < end]
        if at > book.whole:
            # What a reset does not move stands where the table does: that may take an earlier move back.
            self.require(
                meant or book.moved or book.halfway,
                f"a reset leaves {tp} at {at}, but only what is below {book.whole} was processed",
            )
            self._nobodys(tp, at)
        elif back:
            book.rewound = max(book.rewound, 0 if void else book.nobodys)
            book.nobodys = max([book.start, min(book.nobodys, at), *book.firsts])
            # Nor does a table with a ledger take again what the ledger covers: it refuses that, or leaves it out.
            again = range(max(0, at - book.start), len(book.times)) if void or not self.ledgers else ()
            for i in again:
                if not any(start <= book.start + i < end for start, end in kept):
                    book.times[i] = 0
            book.whole = max(book.nobodys, min(book.whole, at))
            advance(book)

    def has_already(self, ranges: Ranges, *, table: str) -> None:
        """A table left out what it has. After a reset that did not move this table, that was to be processed again.

        What came before its ledger began counts as if it had it, where another query took the rewind first and so this
        one does not know of it: a ledger has one number for each partition. Who goes back behind where a table began
        has to move both (``spark-group reset --table``).
        """
        for tp, (start, end) in self._of(ranges):
            book = self.books[tp]
            self._grow(book, book.end)
            left_out = range(max(start, book.start), end)
            before = book.rewound if book.took - {table} else 0
            for row in book.rows.get(table, set()).intersection(left_out) | {r for r in left_out if r < before}:
                if row < book.end:
                    book.times[row - book.start] = max(1, book.times[row - book.start])
            advance(book)

    def ledger_moved(self, table: str, offsets: Mapping[TopicPartition, int]) -> None:
        """An operator moved a table's ledger: what stands behind that is to be written again."""
        for tp, at in offsets.items():
            if tp in self.books and table in self.books[tp].rows:
                self.books[tp].rows[table] = {row for row in self.books[tp].rows[table] if row < at}

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
        """Those whose topic is not deleted."""
        return sorted(tp for tp in tps if tp in self.books)

    def _of(self, ranges: Ranges) -> list[tuple[TopicPartition, tuple[int, int]]]:
        return [(tp, bounds) for tp, bounds in ranges.items() if tp in self.books]

    def _may_skip(self, tp: TopicPartition, reader: Reader) -> bool:
        """Whether this stream may begin at the end: under ``latest``, if it did not begin before, and not on partitions
        that were added since. Another stream may have begun, and lost the partition before it committed where: nobody
        can know of that."""
        known = reader.known.get(tp.topic, 0)
        return self.starts_at_the_end and tp.partition < known and reader.party not in self.books[tp].chain

    def _nobodys(self, tp: TopicPartition, until: int) -> None:
        """Records below this are nobody's to process."""
        book = self.books[tp]
        book.nobodys = max(book.nobodys, until)
        advance(book)

    def _grow(self, book: Book, end: int) -> None:
        missing = end - book.start - len(book.times)
        book.times += [0] * missing
        book.first += [self._nobody] * missing

    def _overlaps(self, tp: TopicPartition, reader: Reader) -> bool:
        (start, end), committed = self.books[tp].flight[reader], self._committed(tp)
        book = self.books[tp]
        if committed < start and (book.moved or book.again):
            return False  # an operator, or who took the topic for a new one, has it read again by whoever is next
        others = [entry.offset for _, entry in book.commits if entry.stream != reader.party]
        if committed < start and reader.party in book.away and others[-1:] == [committed]:
            return False  # a former run planned it, and others have put the group before it since: there it goes on
        return committed < end and start < end


def advance(book: Book) -> None:
    book.whole = max(book.whole, book.nobodys)
    while book.whole - book.start < len(book.times) and book.times[book.whole - book.start]:
        book.whole += 1
