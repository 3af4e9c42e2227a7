"""What must be true of a group whatever happens to it, checked at every step of a simulation.

Runs in: tests. The truth is kept apart from what any process believes: which consumer really has a partition, who
processed which offset, what is committed. A record may be processed twice only where somebody had a partition taken
away from it (its session ended, its hold overran, it was killed) and only those that Kafka did not know yet; and a
process that lives to hear of it must have counted them. Deliberately absent: how the processes do it; what the world
does to partitions (``accounts``).
"""

from collections.abc import Iterable

from kit.accounts import Accounts, Ranges, Violation, advance
from kit.books import Cause, Holding, Loss, Range, Reader
from kit.kafka_client import Client, Tps
from kit.kafka_group import Entry
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import parse_note
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.runtime.request_thread import TRANSACTIONAL_ID_S_MAX

__all__ = ["Invariants", "Violation"]


class Invariants(Accounts):
    """The rules. Every method is called when the thing really happens."""

    # --- who has what -----------------------------------------------------------------------------------------------

    def joins(self, client: Client, *, answered: bool) -> None:
        """A consumer joins. One of a run waits until the question for the run's transactional id is ``answered``, or
        the wait's bound is over: before that an older driver would be told that nobody has replaced it."""
        reader = self._readers[client.process.name]
        ours = reader.counted is not None and client.process.name == reader.name  # agents' come later
        if ours and not answered and self._world.now_ms - reader.began_ms < TRANSACTIONAL_ID_S_MAX * 1000:
            self._break(f"{client.name} joins while its run still asks for its transactional id")

    def reads_as(self, process: str, reader: Reader) -> None:
        """Consumers of this process read for ``reader``."""
        self._readers[process] = reader
        reader.began_ms = self._world.now_ms

    def reads_for(self, process: str, reader: Reader) -> None:
        """So do those of an agent's process."""
        self._readers[process] = reader

    def gives_up(self, process: str) -> None:
        """An agent closes its members by itself: what they give back, their run only learns with the agent's end."""
        self._given_up.add(process)

    def hears(self, reader: Reader, tps: Iterable[TopicPartition]) -> None:
        """A run learns that it lost these."""
        for loss in (loss for tp in self._there(tps) for loss in self.books[tp].losses if loss.reader is reader):
            loss.unheard = False

    def host_lost(self, reader: Reader, tps: Iterable[TopicPartition]) -> None:
        """A run counts these as lost, because their member's host is. Maybe they are nobody else's."""
        self.hears(reader, tps)
        for tp in self._there(tps):
            for name, holding in list(self.books[tp].holders.items()):
                if holding.reader is reader:
                    self._close(tp, name, Cause.TOLD)

    def given(self, tps: Tps, client: Client) -> None:
        reader = self._readers[client.process.name]
        self._given_without_topic(tps, client, reader)
        for tp in self._there(tps):
            book = self.books[tp]
            if not client.entitled(tp):
                loss = Loss(reader, self._committed(tp), Cause.UNTOLD)
                book.losses.append(loss)
                book.holders[client.name] = Holding(reader, self._world.now_ms, loss.base, loss=loss)
                continue
            for name, other in list(book.holders.items()):
                if other.reader.party == reader.party:
                    if other.reader is reader or _continues(reader, other.reader):
                        del book.holders[name]  # another slot of this run, or a run that this one continues
                    elif other.loss is None:  # two runs at a time: neither knows what the other does now
                        other.loss = Loss(other.reader, self._committed(tp), Cause.UNTOLD)
                        book.losses.append(other.loss)
                        if not other.reader.alive:
                            self._close(tp, name, Cause.DEAD)
                elif other.loss is None:
                    other.loss = Loss(other.reader, self._committed(tp), Cause.UNTOLD)
                    book.losses.append(other.loss)
                    book.away.add(other.reader.party)
                    if not other.reader.alive:
                        self._close(tp, name, Cause.DEAD)
            book.away |= book.chain.keys() - {reader.party}
            begin = self._committed(tp)
            if reader.party in book.chain and book.commits and book.commits[-1][1].stream != reader.party:
                book.chain[reader.party] = begin  # others committed: it goes on there, also inside a batch of its own
            if reader.party not in book.away:
                begin = max(begin, book.chain.get(reader.party, begin))
            book.holders[client.name] = Holding(reader, self._world.now_ms, begin)

    def released(self, tps: Tps, client: Client) -> None:
        """Given back in order: what it read must be committed, and a plain read must show it."""
        self._forget(tps, client)
        if self._readers[client.process.name].closing:
            return  # the consumer of a query that is stopped: as far as the group knows, nothing has changed
        if client.leaving or client.process.name in self._given_up:
            self.told(tps, client)  # it gave up its membership itself, because it was thrown out or replaced
            return
        for tp in self._there(tps):
            book = self.books[tp]
            holding = book.holders.get(client.name)
            if holding is None:
                continue
            if holding.loss is None and holding.reader.counted is not None:
                behind = holding.until is not None and self._committed(tp) < holding.until
                reads = holding.reader in book.flight and self._overlaps(tp, holding.reader)
                # It was thrown out, and knows: nothing is committed in its name, and another may have it.
                if (behind and not client.entitled(tp)) or (reads and client.is_out):
                    self._close(tp, client.name, Cause.TOLD)
                    continue
                if behind:
                    self._break(f"{client.name} let {tp} go at {holding.until}, but Kafka has {self._committed(tp)}")
                if reads:
                    self._break(f"{client.name} let {tp} go in the middle of a batch")
            # An ordinary consumer that was thrown out gives back what it could not commit.
            self._close(tp, client.name, Cause.UNTOLD)

    def told(self, tps: Iterable[TopicPartition], client: Client) -> None:
        self._forget(tps, client)
        reader = self._readers[client.process.name]
        for tp in self._there(tps):
            if client.name in self.books[tp].holders:
                loss = self._close(tp, client.name, Cause.DEAD if reader.closing else Cause.TOLD)
                if loss is not None:
                    loss.unheard = client.process.name != reader.name

    def overran(self, tp: TopicPartition, reader: Reader) -> None:
        """The hold used up its budget: it goes without a commit."""
        if tp not in self.books:
            return
        book = self.books[tp]
        for name, holding in list(book.holders.items()):
            if holding.reader is reader and holding.loss is None:
                holding.loss = Loss(reader, self._committed(tp), Cause.OVERRUN)
                book.losses.append(holding.loss)
                self._close(tp, name, Cause.OVERRUN)

    def ended(self, reader: Reader) -> None:
        """A process is gone; its consumers still have their partitions as far as the group knows."""
        self._honest(reader)
        reader.alive, reader.ended_ms = False, self._world.now_ms
        for tp, book in self.books.items():
            book.flight.pop(reader, None)
            for name, holding in list(book.holders.items()):
                if holding.reader is reader and holding.loss is not None:
                    self._close(tp, name, Cause.DEAD)
            for loss in book.losses:
                if loss.reader is reader:
                    loss.cause = Cause.DEAD

    def _close(self, tp: TopicPartition, name: str, cause: Cause) -> Loss | None:
        book = self.books[tp]
        holding = book.holders.pop(name)
        loss = holding.loss
        committed, first = self._committed(tp), None
        if book.start <= committed < book.start + len(book.first):
            first = book.first[committed - book.start]
        # A run that follows it has read on in its place, and may never be given it.
        behind = first is not None and first is not holding.reader and first.party == holding.reader.party
        behind |= holding.until is not None and holding.until > committed
        # A run that fails closes its members while its batch is written.
        behind |= book.flight.get(holding.reader, (0, 0))[1] > committed
        if loss is None and (cause is Cause.TOLD or behind):  # out of the group, and nobody has come instead yet
            loss = Loss(holding.reader, committed, cause)
            book.losses.append(loss)
        if loss is not None:
            loss.cause = cause
            if holding.reader.party in book.reached:
                loss.end = max(book.reached[holding.reader.party], loss.base)
            else:
                loss.end = loss.base
        return loss

    def _given_without_topic(self, tps: Tps, client: Client, reader: Reader) -> None:
        """The group has not heard yet that the topic was deleted. If it is made again in time, the partition is the new
        topic's, and the consumer reads it."""
        for tp in tps - self.books.keys():
            holders = self._former_holders.setdefault(tp, {})
            for name, other in list(holders.items()):
                if other.reader is reader or not other.reader.alive:
                    del holders[name]
                elif other.loss is None:
                    other.loss = Loss(other.reader, 0, Cause.UNTOLD)
            loss = None if client.entitled(tp) else Loss(reader, 0, Cause.UNTOLD)
            holders[client.name] = Holding(reader, self._world.now_ms, 0, loss=loss)

    def _forget(self, tps: Iterable[TopicPartition], client: Client) -> None:
        """It gave back a partition whose topic is deleted."""
        for tp in tps:
            if tp not in self.books:
                self._former_holders.get(tp, {}).pop(client.name, None)

    # --- what is read -----------------------------------------------------------------------------------------------

    def intends(self, reader: Reader, ranges: Ranges) -> None:
        """A batch is on its way: a loss from now on is a loss of this too, and one whose word waits for the lock."""
        for tp, (start, end) in self._of(ranges):
            book = self.books[tp]
            book.reached[reader.party] = max(end, book.reached.get(reader.party, end))
            has = any(holding.reader is reader for holding in book.holders.values())
            for loss in book.losses if start < end else ():
                if loss.reader is reader and loss.cause is Cause.TOLD and loss.end == start:
                    loss.end = end if loss.unheard or not has else start

    def planned(self, reader: Reader, offset: StreamOffset) -> None:
        """A batch is fixed: its ranges follow the last ones, or what somebody else committed since."""
        for tp, (start, end) in self._of(offset.ranges):
            book = self.books[tp]
            last = book.chain.get(reader.party)
            if book.again and reader not in book.begun and start in (book.start, *book.firsts):
                # A stream that knew the former topic begins anew, whoever committed what since.
                book.begun.add(reader)
                book.back.add(reader)
                book.losses.append(Loss(self._nobody, start, Cause.NEW_LOG))
                last = start
                for held in book.holders.values():
                    if held.reader is reader:
                        held.begin, held.until = start, None  # a batch of the former topic that was replayed set these
            if last is None and not book.commits and self._may_skip(tp, reader):
                self._nobodys(tp, min(start, book.end))
            known = start in (last, self._after_durable_batch(tp, reader)) or start <= book.stale
            if not known and not self._may_start(tp, reader, start, last):
                self._break(f"{reader.name} plans {tp}[{start},{end}), but its last range ended at {last}")
            book.chain[reader.party] = end
            if offset.reset_number < self._reset:
                # Others committed over all notes of the reset; when the run hears of it, this is void.
                book.undone.add(start)
                book.losses.append(Loss(self._nobody, start, Cause.OPERATOR, end))
            mine = [held for held in book.holders.values() if held.reader is reader and held.loss is None]
            if any(held.begin <= start for held in mine):  # else it was planned before it had the partition back
                book.away.discard(reader.party)
            else:
                book.away.add(reader.party)
            if start == end:
                continue
            book.flight[reader] = (start, end)
            book.reached[reader.party] = max(end, book.reached.get(reader.party, end))

    def replaying(self, reader: Reader, offset: StreamOffset) -> None:
        """A batch of a former run is in flight again: as it was planned, also where somebody else came in between."""
        for tp, (start, end) in self._of(offset.ranges) if offset.reset_number >= self._reset else ():
            book = self.books[tp]
            if start < end:
                book.flight[reader] = (start, end)
                holding = {held.reader.party for held in book.holders.values() if held.loss is None}
                # Who is given it while no place of this stream keeps it reads all of the batch, too.
                free = reader.party not in holding
                done = end if free or holding - {reader.party} else min(end, book.whole)
                if (free or reader.party in book.away) and done > start:
                    book.losses.append(Loss(reader, start, Cause.DEAD, done))

    def processed_by(self, reader: Reader, ranges: Ranges, *, again: bool = False, table: str = "") -> None:
        """These offsets took effect: rows in a table, or whatever an ordinary consumer does.

        Args:
            again: the sink had written this very batch before.
            table: the table with a ledger whose rows they are.
        """
        for tp, (start, end) in self._of(ranges):
            if start == end:
                continue
            book = self.books[tp]
            known = book.flight.pop(reader, None) is not None or reader.counted is None  # else it is void
            book.reached[reader.party] = max(end, book.reached.get(reader.party, end))
            ever = max(book.end, book.start + len(book.times))  # the log may have lost its end since
            if book.again and end > ever:
                continue  # read before the topic was deleted
            if end > ever:
                self._break(f"{reader.name} read {tp}[{start},{end}) beyond the end {book.end}")
            for holding in book.holders.values():
                at = holding.begin if holding.until is None else holding.until
                chained = start <= max(at, book.nobodys) or start in book.firsts  # what came before is gone
                if holding.reader is reader and holding.loss is None and chained and known:
                    holding.until = self._goes_on(tp, reader, start, end)
            if start < book.rewound:
                book.took.add(table)
            if table:
                rows = book.rows.setdefault(table, set())
                # Of a topic that was made again: a batch that was planned under the former id may have read either
                # log, and the ledger takes its rows for those of the former one.
                if not book.again and (twice := sorted(rows.intersection(range(start, end)))):
                    self._break(f"{reader.name} writes {tp} offset {twice[0]} into {table} for the second time")
                rows.update(range(start, end))
            self._grow(book, book.end)
            for offset in range(start, end):
                at = offset - book.start
                book.times[at] += 1
                self.processed += 1
                if book.times[at] == 1:
                    book.first[at] = reader
                elif again:
                    self.twice += 1
                    self.causes[Cause.REPLAY] += 1
                else:
                    self._excuse(tp, offset, reader, book.first[at])
            advance(book)

    def durable(self, reader: Reader, offset: StreamOffset) -> None:
        """The sink has a batch, which a former run of this reader's stream may have written: it is not in flight any
        more."""
        for tp, (start, end) in self._of(offset.ranges):
            book = self.books[tp]
            book.flight.pop(reader, None)
            if book.durable.get(reader.party, Range(-1, 0, 0)).seq <= offset.seq:
                book.durable[reader.party] = Range(offset.seq, start, end)
            for holding in book.holders.values():
                if holding.reader is reader and holding.loss is None and holding.until is not None:
                    holding.until = max(holding.until, self._goes_on(tp, reader, start, end))

    def _goes_on(self, tp: TopicPartition, reader: Reader, start: int, end: int) -> int:
        """Where a partition stands after a batch: at its end, or where somebody else committed inside it. Then the rest
        of the batch is read again: whether the sink took it, no run can tell."""
        book = self.books[tp]
        if not book.commits or book.commits[-1][1].stream == reader.party:
            return end
        committed = self._committed(tp)
        if not start <= committed < end:
            return end
        book.losses.append(Loss(reader, committed, Cause.TOLD, end))
        return committed

    def _excuse(self, tp: TopicPartition, offset: int, second: Reader, first: Reader) -> None:
        book = self.books[tp]
        open_end = max(book.reached.values())
        excuses = [loss for loss in book.losses if loss.base <= offset < (open_end if loss.end is None else loss.end)]
        if not excuses:
            self._break(f"{tp} offset {offset} was processed by {first.name} and again by {second.name}")
        self.twice += 1
        blamed = excuses[-1].reader
        alone = blamed in (first, second) and all(loss.reader is blamed for loss in excuses)
        if alone and book.times[offset - book.start] == 2:  # else a former run had read it, or it is counted already
            blamed.blame.append(excuses)
        self.causes[excuses[-1].cause] += 1

    # --- what is committed ------------------------------------------------------------------------------------------

    def committed(self, tp: TopicPartition, old: Entry | None, new: Entry) -> None:
        book = self.books[tp]
        self._world.note(lambda: f"group: {tp} is committed at {new.offset} by {new.by}")
        writer = self._readers[new.by]
        if new.by == self.operator:
            self._moved(tp, writer, new)
            return
        if old is None and self._may_skip(tp, writer):
            self._nobodys(tp, min(new.offset, book.end))
        # It takes the topic for the former one as yet; or it did when it ordered this, and has begun anew since: a
        # commit names a topic, not its id (OffsetCommit up to version 9, the newest that librdkafka sends).
        anew = book.again and (writer not in book.begun or writer in book.back)
        if new.offset > book.whole and not anew:
            self._break(f"{new.by} committed {tp} at {new.offset}, but only what is below {book.whole} was processed")
        others = old is not None and old.stream != writer.party and writer.counted is not None
        if old is not None and others and new.offset != old.offset and not anew and new.offset not in book.firsts:
            self._break(f"{new.by} committed {tp} at {new.offset}, but {old.by} had committed it at {old.offset} since")
        book.commits.append((self._world.now_ms, new))
        book.away |= book.chain.keys() - {writer.party}
        if old is None or new.offset >= old.offset:
            return
        begins = book.again and (writer in book.back or new.offset in (book.start, *book.firsts))
        book.back.discard(writer)
        if begins:  # whoever has it next reads on from there
            book.losses.append(Loss(self._nobody, new.offset, Cause.NEW_LOG, old.offset))
        elif old.offset > book.stale:
            if writer.counted is not None:
                self._break(f"{new.by} moved the committed offset of {tp} back from {old.offset} to {new.offset}")
            # An ordinary consumer may: what it sent before it lost a partition arrives after it has it again.
            book.losses.append(Loss(writer, new.offset, Cause.UNTOLD, old.offset))

    # --- at the end -------------------------------------------------------------------------------------------------

    def finished(self) -> bool:
        """As far as a former topic of that name was read, who committed what is not judged either."""
        return all(
            book.whole >= book.end and (self._committed(tp) >= book.end or book.end <= book.stale)
            for tp, book in self.books.items()
        )

    def finish(self) -> None:
        """Everything produced was processed and is committed; what was processed twice had been counted."""
        for tp, book in self.books.items():
            if book.whole < book.end:
                self._break(f"{tp} offset {book.whole} of {book.end} was never processed")
            if self._committed(tp) < book.end > book.stale:
                self._break(f"{tp} is committed at {self._committed(tp)}, but all up to {book.end} was processed")
        for reader in self._readers.values():
            if reader.alive:
                self._honest(reader)

    def _honest(self, reader: Reader) -> None:
        """What was read twice because of a loss that the reader was told of, it has counted."""
        known = (Cause.TOLD, Cause.OVERRUN)
        twice = sum(all(loss.cause in known and not loss.unheard for loss in losses) for losses in reader.blame)
        if reader.counted is not None and twice > reader.counted():
            self._break(f"{reader.name} caused {twice} offsets to be read twice, and counted {reader.counted()}")

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _after_durable_batch(self, tp: TopicPartition, reader: Reader) -> int | None:
        """The end of the stream's last durable batch, if an older run that did not know of it committed an offset in it
        since, after another member. By its note this commit is from before the batch, and the sink has all records
        between the two."""
        book = self.books[tp]
        batch = book.durable.get(reader.party)
        if batch is None or not book.commits:
            return None
        last = book.commits[-1][1]
        older = last.stream == reader.party and self._readers[last.by] is not reader
        late = older and parse_note(last.note).seq < batch.seq
        return batch.end if late and batch.start <= last.offset <= batch.end else None

    def _may_start(self, tp: TopicPartition, reader: Reader, start: int, last: int | None) -> bool:
        """Where somebody else committed, or had the partition, or this stream never had it: the group's offset says."""
        book = self.books[tp]
        if start in book.undone:
            return True  # the group has no offset that could say so
        if start in book.firsts and (start >= (last or 0) or reader.party in book.away):
            return True  # the records before it are gone
        since_ms = min((held.since_ms for held in book.holders.values() if held.reader is reader), default=0)
        before = [entry for at_ms, entry in book.commits if at_ms < since_ms]
        seen = before[-1:] + [entry for at_ms, entry in book.commits if at_ms >= since_ms]
        anyone = last is None or reader.party in book.away
        if anyone and not before:
            known = {book.start, book.nobodys, *book.firsts, *(entry.offset for entry in seen)}
            # Under latest it may have begun at an end that the log has lost since, or that retention has passed.
            lost = book.end < start <= book.longest or start < max(book.firsts, default=0)
            return start in known or (lost and self._may_skip(tp, reader))
        return start in [entry.offset for entry in seen if anyone or entry.stream != reader.party]


def _continues(reader: Reader, former: Reader) -> bool:
    """Whether it began with all that the former one did. One that began while the former still ran did not."""
    return not former.alive and former.number < reader.number and former.ended_ms <= reader.began_ms
