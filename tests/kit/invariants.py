"""The rules of a consumer group, checked at every step of a simulation.

Runs in: tests. The true state is kept apart from the beliefs of the processes: which consumer owns a partition, which
reader processed which offset, which offset is committed. A record may be processed twice only after its reader lost the
partition (its session ended, its hold exceeded the budget, it was killed), and only if its offset was not committed
yet. A process that survives and is notified of the loss must have counted these records. Deliberately absent: the
behaviour of the processes; changes from outside to partitions (``accounts``).
"""

from collections.abc import Iterable, Mapping

from kit.accounts import Accounts, Ranges, Violation, advance
from kit.books import Book, Cause, Holding, Loss, Range, Reader
from kit.kafka_client import Client, Tps
from kit.kafka_group import SESSION_CHECK_MS, SESSION_MS, Entry
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import parse_note
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.runtime.request_thread import TRANSACTIONAL_ID_S_MAX

__all__ = ["Invariants", "Violation"]


class Invariants(Accounts):
    """The rules. Each method is called at the moment of the event."""

    # --- ownership --------------------------------------------------------------------------------------------------

    def joins(self, client: Client, *, answered: bool) -> None:
        """A consumer joins. A consumer of a run waits until the request for the run's transactional id is ``answered``
        or has timed out: before that, the check of an older driver would report that it has not been replaced."""
        reader = self._readers[client.process.name]
        ours = reader.counted is not None and client.process.name == reader.name  # agents' members join later
        if ours and not answered and self._world.now_ms - reader.began_ms < TRANSACTIONAL_ID_S_MAX * 1000:
            self._break(f"{client.name} joins before the request for its run's transactional id is answered")

    def reads_as(self, process: str, reader: Reader) -> None:
        """Consumers of this process read for ``reader``."""
        self._readers[process] = reader
        reader.began_ms = self._world.now_ms

    def reads_for(self, process: str, reader: Reader) -> None:
        """Consumers of an agent's process read for ``reader`` too."""
        self._readers[process] = reader

    def gives_up(self, process: str) -> None:
        """An agent closes its members by itself. The run is notified of these revocations only when the agent ends."""
        self._given_up.add(process)

    def loss_reported(self, reader: Reader, tps: Iterable[TopicPartition]) -> None:
        """A run is notified that it lost these partitions. One that has ended, maybe because it was replaced, does not
        count any more."""
        for loss in (loss for tp in self._there(tps) for loss in self.books[tp].losses if loss.reader is reader):
            loss.report_pending = False
            if reader.closing and not loss.known and loss.cause is Cause.REPORTED:
                loss.cause = Cause.DEAD
            loss.known |= not reader.closing

    def told(self, reader: Reader, offsets: Mapping[TopicPartition, int | None]) -> None:
        """A run has read these committed offsets of the group."""
        reader.told.update(offsets)

    def host_lost(self, reader: Reader, tps: Iterable[TopicPartition]) -> None:
        """A run counts these partitions as lost because it lost their member's agent. They may have no other owner."""
        self.loss_reported(reader, tps)
        for tp in self._there(tps):
            for name, holding in list(self.books[tp].holders.items()):
                if holding.reader is reader:
                    self._close(tp, name, Cause.DEAD if reader.closing else Cause.REPORTED)

    def assigned(self, tps: Tps, client: Client) -> None:
        reader = self._readers[client.process.name]
        self._assigned_without_topic(tps, client, reader)
        for tp in self._there(tps):
            book = self.books[tp]
            if not client.entitled(tp):
                loss = Loss(reader, self._committed(tp), Cause.UNREPORTED)
                book.losses.append(loss)
                book.holders[client.name] = Holding(reader, self._world.now_ms, loss.base, loss=loss)
                continue
            until = None
            for name, other in list(book.holders.items()):
                if other.reader.party == reader.party:
                    if other.reader is reader:
                        until = other.until  # written by this run, whichever of its members has the partition
                    if other.reader is reader or _continues(reader, other.reader):
                        del book.holders[name]  # another slot of this run, or a run that this one continues
                    elif other.loss is None:  # two runs at a time: neither knows the other's progress
                        other.loss = Loss(other.reader, self._committed(tp), Cause.UNREPORTED)
                        book.losses.append(other.loss)
                        if not other.reader.alive:
                            self._close(tp, name, Cause.DEAD)
                elif other.loss is None:
                    other.loss = Loss(other.reader, self._committed(tp), Cause.UNREPORTED)
                    book.losses.append(other.loss)
                    book.away.add(other.reader.party)
                    if not other.reader.alive:
                        self._close(tp, name, Cause.DEAD)
            book.away |= book.chain.keys() - {reader.party}
            begin = self._committed(tp)
            if reader.counted is None:  # it goes on there
                book.unclear |= self._has_unread(book, begin)
            foreign = book.commits and book.commits[-1][1].stream != reader.party
            decides = not reader.closing and not self._is_replaced(reader)
            if reader.party in book.chain and foreign and decides:
                book.chain[reader.party] = begin  # after a foreign commit: also inside its own batch
                until = None
            if reader.party not in book.away:
                begin = max(begin, book.chain.get(reader.party, begin))
            book.holders[client.name] = Holding(reader, self._world.now_ms, begin, until)

    def _is_replaced(self, reader: Reader) -> bool:
        """Whether a later run of its stream is alive, which decides where the stream continues."""
        runs = self._readers.values()
        return any(run.party == reader.party and run.number > reader.number and run.alive for run in runs)

    def _was_replaced(self, reader: Reader, at_ms: int) -> bool:
        """Whether a later run of its stream had begun then."""
        runs = self._readers.values()
        return any(r.party == reader.party and r.number > reader.number and r.began_ms < at_ms for r in runs)

    def has_committed(self, reader: Reader, since_ms: int) -> bool:
        """Whether a run has committed offsets since then."""
        commits = (commit for book in self.books.values() for commit in book.commits)
        return any(entry.by == reader.name and at_ms >= since_ms for at_ms, entry in commits)

    def released(self, tps: Tps, client: Client) -> None:
        """Partitions are released in order: their processed offsets must be committed and visible to a plain read."""
        self._forget(tps, client)
        if self._readers[client.process.name].closing:
            return  # the consumer of a query that is being stopped: the group's state has not changed
        if client.leaving or client.process.name in self._given_up:
            self.lost(tps, client)  # it left the group itself, because it was fenced or replaced
            return
        for tp in self._there(tps):
            book = self.books[tp]
            holding = book.holders.get(client.name)
            if holding is None:
                continue
            if holding.loss is None and holding.reader.counted is not None:
                committed = self._committed(tp)  # in a truncated log, the run goes back to where the log was truncated
                behind = holding.until is not None and committed < holding.until and committed not in book.truncated
                void = holding.reader.reset_number < self._reset  # its batch, by a reset that it knows by now
                reads = holding.reader in book.flight and self._overlaps(tp, holding.reader) and not void
                # The fenced member knows of it: its offsets are not committed, and the partition may have another
                # owner.
                if (behind and not client.entitled(tp)) or (reads and client.is_out):
                    self._close(tp, client.name, Cause.REPORTED)
                    continue
                if behind:
                    self._break(f"{client.name} let {tp} go at {holding.until}, but Kafka has {self._committed(tp)}")
                if reads:
                    self._break(f"{client.name} let {tp} go in the middle of a batch")
            # A fenced ordinary consumer releases partitions whose offsets it could not commit.
            self._close(tp, client.name, Cause.UNREPORTED)

    def lost(self, tps: Iterable[TopicPartition], client: Client) -> None:
        self._forget(tps, client)
        reader = self._readers[client.process.name]
        for tp in self._there(tps):
            if client.name in self.books[tp].holders:
                loss = self._close(tp, client.name, Cause.DEAD if reader.closing else Cause.REPORTED)
                if loss is not None:
                    loss.report_pending = client.process.name != reader.name

    def overran(self, tp: TopicPartition, reader: Reader) -> None:
        """A hold exceeded its budget: the partition is released without a commit."""
        if tp not in self.books:
            return
        book = self.books[tp]
        for name, holding in list(book.holders.items()):
            if holding.reader is reader and holding.loss is None:
                holding.loss = Loss(reader, self._committed(tp), Cause.OVERRUN)
                book.losses.append(holding.loss)
                self._close(tp, name, Cause.OVERRUN)

    def reader_died(self, reader: Reader) -> None:
        """The stream reader has died, and its query goes on until its batch ends: it counts nothing from now on."""
        self._honest(reader)
        reader.has_died = True

    def ended(self, reader: Reader) -> None:
        """A process has ended; the group still lists its consumers as owners."""
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
        # A later run has read on in its place, and may never be assigned the partition.
        behind = first is not None and first is not holding.reader and first.party == holding.reader.party
        behind |= holding.until is not None and holding.until > committed
        # A run that fails closes its members while its batch is being written.
        behind |= book.flight.get(holding.reader, (0, 0))[1] > committed
        # A run that stops after its only batch leaves the commit to the next start.
        batch = book.durable.get(holding.reader.party)
        behind |= batch is not None and batch.start <= committed < batch.end
        if loss is None and (cause is Cause.REPORTED or behind):  # out of the group, no new owner yet
            loss = Loss(holding.reader, committed, cause)
            book.losses.append(loss)
        if loss is not None:
            loss.cause = cause
            if holding.reader.party in book.reached:
                loss.end = max(book.reached[holding.reader.party], loss.base)
            else:
                loss.end = loss.base
        return loss

    def _assigned_without_topic(self, tps: Tps, client: Client, reader: Reader) -> None:
        """The coordinator does not know yet that the topic was deleted. If the topic is recreated in time, the
        partition is the new topic's, and the consumer reads it."""
        for tp in tps - self.books.keys():
            holders = self._former_holders.setdefault(tp, {})
            for name, other in list(holders.items()):
                if other.reader is reader or not other.reader.alive:
                    del holders[name]
                elif other.loss is None:
                    other.loss = Loss(other.reader, 0, Cause.UNREPORTED)
            loss = None if client.entitled(tp) else Loss(reader, 0, Cause.UNREPORTED)
            holders[client.name] = Holding(reader, self._world.now_ms, 0, loss=loss)

    def _forget(self, tps: Iterable[TopicPartition], client: Client) -> None:
        """The consumer released a partition whose topic is deleted."""
        for tp in tps:
            if tp not in self.books:
                self._former_holders.get(tp, {}).pop(client.name, None)

    # --- reads ------------------------------------------------------------------------------------------------------

    def intends(self, reader: Reader, ranges: Ranges) -> None:
        """A batch is being planned. A later loss covers this batch too, as does a loss whose report waits for the
        lock."""
        for tp, (start, end) in self._of(ranges):
            book = self.books[tp]
            book.reached[reader.party] = max(end, book.reached.get(reader.party, end))
            has = any(holding.reader is reader for holding in book.holders.values())
            for loss in book.losses if start < end else ():
                again = loss.report_pending and start in book.truncated
                follows = loss.end == start or (again and loss.end is not None and start < loss.end)
                if loss.reader is reader and loss.cause is Cause.REPORTED and follows:
                    loss.end = end if loss.report_pending or not has else start

    def planned(self, reader: Reader, offset: StreamOffset) -> None:
        """A batch is planned: its ranges start where the last ones ended, or at a foreign commit since."""
        reader.reset_number = offset.reset_number
        self._begun.add(reader.party)
        for tp, (start, end) in self._of(offset.ranges):
            book = self.books[tp]
            last = book.chain.get(reader.party)
            if book.again and reader not in book.begun and start == end:
                continue  # it may not know yet that the topic was recreated, and reads nothing of it until it does
            if book.again and reader not in book.begun and start in (book.start, *book.firsts):
                # A stream that read the former topic starts at the beginning, whatever was committed since.
                book.begun.add(reader)
                book.back.add(reader)
                book.losses.append(Loss(self._no_reader, start, Cause.NEW_LOG))
                last = start
                for held in book.holders.values():
                    if held.reader is reader:
                        held.begin, held.until = start, None  # a replayed batch of the former topic set these
            if last is None and not book.commits and self._may_skip(tp, reader):
                self._mark_skippable(tp, min(start, book.end))
            known = start in (last, self._after_durable_batch(tp, reader)) or start <= book.stale
            known |= start in book.undone  # the group has no offset to compare
            if not known and last is not None and start < last and start in book.firsts.union(book.truncated):
                reset_to_it = any(entry.by == self.operator and entry.offset == start for _, entry in book.commits)
                foreign = [entry.offset for _, entry in book.commits if entry.stream != reader.party]
                if reader.fails_on_loss and book.truncated and not reset_to_it and foreign[-1:] != [start]:
                    self._break(f"{reader.name} goes back to {start} in {tp}, although it must fail on data loss")
                self.went_back += 1
                known = bool(book.truncated)
            if not known and not self._may_start(tp, reader, start, last):
                self._break(f"{reader.name} plans {tp}[{start},{end}), but its last range ended at {last}")
            book.chain[reader.party] = end
            if offset.reset_number < self._reset:
                # Foreign commits replaced all notes of the reset; once the run reads them, the batch is void.
                book.undone.add(start)
                book.losses.append(Loss(self._no_reader, start, Cause.OPERATOR, end))
            mine = [held for held in book.holders.values() if held.reader is reader and held.loss is None]
            if any(held.begin <= start for held in mine):  # else it was planned before the partition was assigned again
                book.away.discard(reader.party)
            else:
                book.away.add(reader.party)
            if start == end:
                continue
            book.flight[reader] = (start, end)
            book.reached[reader.party] = max(end, book.reached.get(reader.party, end))

    def replaying(self, reader: Reader, offset: StreamOffset) -> None:
        """A batch of a former run is in flight again, with the planned ranges, also after a foreign commit."""
        reader.replays = offset.seq
        for tp, (start, end) in self._of(offset.ranges) if offset.reset_number >= self._reset else ():
            book = self.books[tp]
            if start < end:
                if book.durable_seq(reader.party) < offset.seq:  # else it may see the mark at once
                    book.flight[reader] = (start, end)
                holding = {held.reader.party for held in book.holders.values() if held.loss is None}
                # A consumer that is assigned the partition while no member of this stream owns it also reads the whole
                # batch.
                free = reader.party not in holding
                done = end if free or holding - {reader.party} else min(end, book.whole)
                if (free or reader.party in book.away) and done > start:
                    book.losses.append(Loss(reader, start, Cause.DEAD, done))

    def processed_by(
        self,
        reader: Reader,
        ranges: Ranges,
        *,
        again: bool = False,
        table: str = "",
        when_read: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        """These offsets took effect: as rows in a table, or by processing in an ordinary consumer.

        Args:
            again: the sink had written the same batch before.
            table: the table with a ledger that contains the rows.
            when_read: how often their logs had been truncated when the rows were read; None: just now.
        """
        for tp, (start, end) in self._of(ranges):
            if start == end:
                continue
            book = self.books[tp]
            known = book.flight.pop(reader, None) is not None or reader.counted is None  # else the batch is void
            book.reached[reader.party] = max(end, book.reached.get(reader.party, end))
            since = book.truncated[when_read[tp] :] if when_read and tp in when_read else []
            lasts_to = min([end, *since])  # the records from there on have others in their place
            for offset in range(start, lasts_to):
                book.replaced.pop(offset, None)
            ever = max(book.end, book.start + len(book.times))  # the log may have been truncated since
            if book.again and end > ever:
                continue  # read before the topic was deleted
            if end > ever:
                self._break(f"{reader.name} read {tp}[{start},{end}) beyond the end {book.end}")
            for holding in book.holders.values():
                at = holding.begin if holding.until is None else holding.until
                chained = start <= max(at, book.skippable) or start in book.firsts  # the records before it are deleted
                former = end <= book.stale and reader not in book.begun  # may be a batch of the former topic
                if holding.reader is reader and holding.loss is None and chained and known and not former:
                    holding.until = self._goes_on(tp, reader, start, end)
            if start < book.rewound:
                book.took.add(table)
            if table:
                rows = book.rows.setdefault(table, set())
                # Recreated topic: a batch that was planned under the former id may have read either log, and the ledger
                # attributes its rows to the former one.
                if not book.again and (twice := sorted(rows.intersection(range(start, lasts_to)))):
                    self._break(f"{reader.name} writes {tp} offset {twice[0]} into {table} a second time")
                rows.update(range(start, lasts_to))
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
        """The sink has committed a batch, possibly written by a former run of this stream; the batch is no longer in
        flight."""
        for tp, (start, end) in self._of(offset.ranges):
            book = self.books[tp]
            for other in [other for other in book.flight if other.party == reader.party]:
                if other is reader or other.replays == offset.seq:  # a run that replays it may see the mark at once
                    del book.flight[other]
            if book.durable_seq(reader.party) <= offset.seq:
                book.durable[reader.party] = Range(offset.seq, start, end)
            for holding in book.holders.values():
                if holding.reader is reader and holding.loss is None and holding.until is not None:
                    holding.until = max(holding.until, self._goes_on(tp, reader, start, end))

    def _goes_on(self, tp: TopicPartition, reader: Reader, start: int, end: int) -> int:
        """Return the position after a batch: its end, or the offset of a foreign commit inside it. In that case the
        rest of the batch is read again, as a run cannot know whether the sink wrote it. An ordinary consumer knows."""
        book = self.books[tp]
        if reader.counted is None or not book.commits or book.commits[-1][1].stream == reader.party:
            return end
        committed = self._committed(tp)
        reads_from = min(start, committed) if start in book.firsts else start  # the records before it are deleted
        if not reads_from <= committed < end:
            return end
        book.losses.append(Loss(reader, committed, Cause.REPORTED, end))
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

    # --- commits ----------------------------------------------------------------------------------------------------

    def committed(self, tp: TopicPartition, old: Entry | None, new: Entry) -> None:
        book = self.books[tp]
        self._world.note(lambda: f"group: {tp} is committed at {new.offset} by {new.by}")
        writer = self._readers[new.by]
        if new.by == self.operator:
            self._moved(tp, writer, new)
            return
        if new.stream is None:
            book.unclear |= self._has_unread(book, new.offset)
        if old is None and self._may_skip(tp, writer):
            start = min(new.offset, max(book.end, book.longest))  # it started at an end that was truncated
            self._mark_skippable(tp, start)
        # The writer still assumes the former topic, or it assumed it when it ordered this commit and has restarted at
        # the beginning since: a commit names a topic, not its id (OffsetCommit up to version 9, the newest that
        # librdkafka sends).
        anew = book.again and (writer not in book.begun or writer in book.back)
        if new.offset > book.whole and not anew:
            self._break(f"{new.by} committed {tp} at {new.offset}, but only what is below {book.whole} was processed")
        late = old is not None and self._came_late(tp, old, new, writer)
        others = old is not None and old.stream != writer.party and writer.counted is not None and not late
        if old is not None and others and new.offset != old.offset and not anew and new.offset not in book.firsts:
            self._break(f"{new.by} committed {tp} at {new.offset}, but {old.by} had committed it at {old.offset} since")
        book.commits.append((self._world.now_ms, new))
        book.away |= book.chain.keys() - {writer.party}
        if old is None or new.offset >= old.offset:
            return
        noted = parse_note(new.note).truncated_after is not None
        went_back = noted and any(at <= new.offset for at in book.truncated)
        for held in book.holders.values() if went_back else ():
            if held.reader is writer and held.until is not None:
                held.until = min(held.until, new.offset)  # it may release the partition before it reads more
        back = {reader for reader in book.back if reader.party == writer.party}  # or a former run
        begins = book.again and (bool(back) or new.offset in (book.start, *book.firsts))
        book.back -= back
        if begins:  # the next owner reads on from there
            book.losses.append(Loss(self._no_reader, new.offset, Cause.NEW_LOG, old.offset))
        elif old.offset > book.stale:
            if writer.counted is not None and not went_back and not late:
                self._break(f"{new.by} moved the committed offset of {tp} back from {old.offset} to {new.offset}")
            # An ordinary consumer may: a commit sent before it lost a partition may arrive after it is assigned again.
            book.losses.append(Loss(writer, new.offset, Cause.UNREPORTED, old.offset))

    def _came_late(self, tp: TopicPartition, last: Entry, new: Entry, run: Reader) -> bool:
        """Return whether an ordinary consumer without the partition committed last, when the run had it already and had
        read another committed offset. Kafka does not compare what a commit replaces."""
        book = self.books[tp]
        at_ms, _ = book.commits[-1]
        has = [held for held in book.holders.values() if held.reader is run and held.loss is None]
        knew = run.told.get(tp) == last.offset
        had = any(held.since_ms < at_ms and held.begin <= new.offset for held in has)
        has_left = all(held.reader.name != last.by for held in book.holders.values())
        return last.stream is None and last.by != self.operator and had and has_left and not knew

    # --- runs that end by themselves --------------------------------------------------------------------------------

    def drained(self, reader: Reader) -> None:
        """A run reports that it is drained: Kafka has the end of its stream's last durable batch, unless an older run
        of its stream wrote that batch meanwhile, or may still be a member."""
        party, since_ms = reader.party, reader.began_ms - SESSION_MS - SESSION_CHECK_MS
        older = (other for other in self._readers.values() if other.party == party and other is not reader)
        if any(other.alive or other.ended_ms > since_ms for other in older):
            return
        for tp, book in self.books.items():
            batch = book.durable.get(party)
            changed = book.again or book.truncated or book.undone or book.moved or party in book.away
            if batch is not None and not changed and self._committed(tp) < batch.end:
                self._break(f"a run is drained, but {tp} is committed at {self._committed(tp)}, not at {batch.end}")

    def all_read(self, reader: Reader, target: Mapping[TopicPartition, int]) -> None:
        """An AvailableNow run ends by itself. It has read everything up to its target, unless others were in the
        group, or an older run of its stream."""
        since_ms = reader.began_ms - SESSION_MS - SESSION_CHECK_MS
        for other in self._readers.values():
            is_other = other.party != reader.party or other.alive or other.ended_ms > reader.began_ms
            is_late = other.alive or other.ended_ms > since_ms
            if other is not reader and other.name != self.operator and is_other and is_late:
                return
        self.ended_alone += 1
        for tp, end in target.items():
            book = self.books.get(tp)
            if book is None or book.again or book.truncated or book.moved or book.halfway:
                continue
            if book.whole < min(end, book.end):
                self._break(f"{reader.name} ends, but has read {tp} up to {book.whole} only, not to {end}")

    # --- at the end -------------------------------------------------------------------------------------------------

    def finished(self) -> bool:
        """Return whether all is processed and committed."""
        return all(
            book.whole >= book.end and not self._owes_commit(tp) and not self._skipped(book) and not self._unread(book)
            for tp, book in self.books.items()
        )

    def _owes_commit(self, tp: TopicPartition) -> bool:
        """Return whether the end is not committed. Commits below a former topic's progress are not judged, and where
        all records are deleted an ordinary consumer has none to commit."""
        book = self.books[tp]
        return self._committed(tp) < book.end > max([book.stale, *book.firsts])

    def finish(self) -> None:
        """All records were processed and committed; all duplicates were counted."""
        for tp, book in self.books.items():
            if book.whole < book.end:
                self._break(f"{tp} offset {book.whole} of {book.end} was never processed")
            if self._owes_commit(tp):
                self._break(f"{tp} is committed at {self._committed(tp)}, but all up to {book.end} was processed")
            self.must_read_again += bool(book.truncated and self._knows_epochs(book))
            if skipped := self._skipped(book):
                self._break(f"{tp} offset {skipped[0]} replaces a truncated record, and was never read")
            if unread := self._unread(book):
                self._break(f"{tp} offset {unread[0]} of a recreated topic was never read")
        for reader in self._readers.values():
            if reader.alive:
                self._honest(reader)

    def _honest(self, reader: Reader) -> None:
        """Check that the reader counted the duplicates of each loss that was reported to it."""
        known = (Cause.REPORTED, Cause.OVERRUN)
        twice = sum(all(loss.cause in known and not loss.report_pending for loss in losses) for losses in reader.blame)
        if reader.counted is not None and not reader.has_died and twice > reader.counted():
            self._break(f"{reader.name} caused {twice} offsets to be read twice, and counted {reader.counted()}")

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _skipped(self, book: Book) -> list[int]:
        """Return the offsets of records that replace truncated ones, and that no reader has read."""
        found = [at for at in sorted(book.replaced) if book.skippable <= at < book.end]
        return found if found and self._knows_epochs(book) else []

    def _unread(self, book: Book) -> list[int]:
        """Return the offsets of records of a recreated topic that nothing has read, below the former topic's progress.
        Where a stream starts at the end of a log it may skip them."""
        if not book.again or book.unclear or book.halfway or book.moved or self.starts_at_the_end:
            return []
        self._grow(book, book.end)
        first, end = max(book.firsts, default=book.start), min(book.stale, book.end)
        return [at for at in range(first, end) if not book.times[at - book.start]]

    def _knows_epochs(self, book: Book) -> bool:
        """Return whether the streams of the group alone read this partition, so that the leader epoch of each position
        is known. An ordinary consumer that has it waits where it is until the log has grown."""
        moved = book.moved or book.halfway or book.rewound or book.again or book.undone
        moved = moved or any(loss.cause is Cause.OPERATOR for loss in book.losses)
        streams = {entry.stream for _, entry in book.commits} | book.reached.keys()
        ordinary = None in streams or any(held.reader.counted is None for held in book.holders.values())
        return self.reports_epochs and not moved and not ordinary

    def _after_durable_batch(self, tp: TopicPartition, reader: Reader) -> int | None:
        """Return the end of the stream's last durable batch if an older run committed an offset inside it after another
        member's commit: it did not know the batch, or this run replays it, or it repeated the commit of another member
        and died before Kafka had the batch. The sink has all records between the two. A run that was replaced, and does
        not know it yet, continues there too. So does one whose zombie followed another consumer beyond the batch: the
        note is of an older batch. So does one whose zombie replaced the commit of another member, where brokers refuse
        transactions: the note is of a batch before the newest.
        """
        book = self.books[tp]
        batch = book.durable.get(reader.party)
        if batch is not None and self._is_replaced(reader):
            return batch.end
        if batch is None or not book.commits:
            return None
        at_ms, last = book.commits[-1]
        older = last.stream == reader.party and self._readers[last.by] is not reader
        before = book.commits[-2][1] if len(book.commits) > 1 else last
        had = [entry.offset for _, entry in book.commits if entry.stream == reader.party]
        repeats = before.stream != reader.party and before.offset == last.offset >= max(had, default=0)
        note = parse_note(last.note)
        late = older and (note.seq < batch.seq + (reader.replays == batch.seq) or repeats)
        if older and self.refuses_transactions and self._was_replaced(self._readers[last.by], at_ms):
            return batch.end
        begin = max(had, default=0) if repeats else batch.start  # no batch since then was committed
        inside = begin <= last.offset <= batch.end or (note.followed and last.offset > batch.end)
        return batch.end if late and inside else None

    def _may_start(self, tp: TopicPartition, reader: Reader, start: int, last: int | None) -> bool:
        """The committed offset decides after a foreign commit, after another owner, or if this stream never owned
        it."""
        book = self.books[tp]
        voided = min(book.undone, default=start)  # it went back to where a void batch began, or behind it
        if start in book.firsts and (start >= (last or 0) or reader.party in book.away or voided < start):
            return True  # the records before it are deleted
        mine = [held for held in book.holders.values() if held.reader is reader]
        since_ms = min((held.since_ms for held in mine), default=0)
        before = [entry for at_ms, entry in book.commits if at_ms < since_ms]
        seen = before[-1:] + [entry for at_ms, entry in book.commits if at_ms >= since_ms]
        started = next((entry.offset for entry in reversed(seen) if entry.stream == reader.party), start)
        if last is None and start < started and start in book.truncated and not reader.fails_on_loss:
            return True  # the log was truncated below the end at which it started
        anyone = last is None or reader.party in book.away
        if anyone and not before:
            known = {book.start, book.skippable, *book.firsts, *(entry.offset for entry in seen)}
            # Under latest it may have started at a log end that was truncated since, or that retention has passed.
            lost = book.end < start <= book.longest or start < max(book.firsts, default=0)
            # It resolved its start before the next owner committed, and does not know yet that its session has ended,
            # or it has the partition again.
            unnoticed = any(held.loss is not None for held in mine) or any(of.reader is reader for of in book.losses)
            unnoticed &= start <= max(book.end, book.longest)
            return start in known or ((lost or unnoticed) and self._may_skip(tp, reader))
        if anyone and start in book.truncated and not reader.fails_on_loss:
            return True  # the log was truncated below the committed offset
        return start in [entry.offset for entry in seen if anyone or entry.stream != reader.party]


def _continues(reader: Reader, former: Reader) -> bool:
    """Return whether it started with the full state of the former run. It did not if the former run was alive then."""
    return not former.alive and former.number < reader.number and former.ended_ms <= reader.began_ms
