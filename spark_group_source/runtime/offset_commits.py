"""A run's commits: in whose name each offset goes to Kafka, who is left out, and whether they are still taken.

Runs in: the stream reader, on the worker's thread (except where said). Deliberately absent: which offsets and when
(``group``), and the transaction itself (``kafka``).

Where transactions are not allowed the members commit. They also do where the transactional id may be another process's
by now, because a producer broke in an outage: a broker that takes their commits says that the places in the group are
still this run's, so that it may take the id back.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, cast

from spark_group_source.errors import AccessDenied, CommitFailed, Fenced, SourceError
from spark_group_source.kafka import Admin, Environment, GroupMember, GroupOffsets, MemberStale, OffsetCommitter
from spark_group_source.members.slot_member import Share, SlotMember
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers

if TYPE_CHECKING:
    from spark_group_source.members.member import Member

log = logging.getLogger(__name__)

MEMBER_COMMIT_S_MAX = 10.0
"""How long a member may take to commit where transactions are not allowed."""

DENIALS_BELIEVED = 2
"""How often in a row transactions must be refused: brokers that start, and permissions that were just given, refuse."""
SESSIONS_OF_ANOTHER = 1.5
"""For how many session timeouts somebody must have a place of this run before it is another process's."""
BARRED_MS = 1_000
"""For how long nobody must be allowed to commit before the run ends with that."""
DENIED_AGAIN_MS = 60_000
"""After this long a commit is tried as a transaction again; without them nobody can tell whether a run was replaced."""

Probed = ev.NotReplaced | ev.Replaced | ev.ReplacedUnclear


@dataclass(frozen=True, slots=True)
class Order:
    """An echo, and in whose name. ``left``: slots that had no member when it was ordered, and why."""

    echo: ev.CommitOffsets
    shares: tuple[Share, ...]
    left: Mapping[int, str]


def in_whose_name(echo: ev.CommitOffsets, member: Callable[[int], SlotMember | None]) -> Order:
    """Note who holds what is to be committed: later a slot may have another member of the same name. On the thread of
    the event that led to the order."""
    by_slot: dict[int, dict[TopicPartition, int]] = {}
    for tp, offset in echo.offsets.items():
        by_slot.setdefault(echo.slots[tp], {})[tp] = offset
    members = {slot: member(slot) for slot in by_slot}
    return Order(
        echo,
        tuple(Share(m, m.identity, by_slot[slot]) for slot, m in members.items() if m is not None),
        {slot: "the slot has no member" for slot, m in members.items() if m is None},
    )


class OffsetCommits:
    """Commits for one stream, fenced by its id.

    Args:
        options, admin: the run's.
        stream: its id.
        offsets: reads the group's offsets.
        environment: clients.
        known_as: the ids under which the group knows, or knew, the members of this run.
        lent: whether a slot of this run was ever lent to an agent.
        handle: takes each event; never raises.
    """

    def __init__(
        self,
        options: Options,
        admin: Admin,
        *,
        stream: str,
        offsets: GroupOffsets,
        environment: Environment,
        known_as: Collection[str],
        lent: Callable[[], bool],
        handle: Callable[[ev.Event], None],
    ) -> None:
        self._lent = lent
        self._admin, self._offsets, self._environment, self._handle = admin, offsets, environment, handle
        self._group, self._known_as = options.group_id, known_as
        self._stream = stream
        self._stays_ms = int(SESSIONS_OF_ANOTHER * options.session_timeout_ms)
        self._taken_since_ms: dict[str, int] = {}  # by member id
        self._denials = 0
        self._denied_until_ms = 0
        self._barred_ms: int | None = None
        self._told_allowed: bool | None = None
        self._committer = OffsetCommitter(
            options.producer_settings(),
            group=options.group_id,
            transactional_id=identifiers.transactional_id(options.group_id, stream),
            environment=environment,
        )

    @property
    def by_members(self) -> bool:
        """Whether transactions are not allowed, so that nobody can tell whether the run was replaced. Any thread."""
        return self._denials >= DENIALS_BELIEVED

    def prepare(self) -> bool:
        """Shut out an older driver of this stream that may still be there, frozen. False: not done, try again."""
        try:
            self._committer.prepare()
        except SourceError as exc:
            log.info("the commits' transactions are not ready: %s", exc)  # the first commit says what that means
            self._denials = self._denials + 1 if isinstance(exc, AccessDenied) else 0
            self._tell_allowed()
            return self.by_members
        self._denials = 0
        self._tell_allowed(works=True)
        return True

    def _tell_allowed(self, *, works: bool = False) -> None:
        """Let the core know whether transactions work, when that is known and has changed."""
        if (works or self.by_members) and self._told_allowed is not works:
            self._told_allowed = works
            self._handle(ev.TransactionsChecked(allowed=works))

    def probe(self, slot: int, partition: Callable[[], TopicPartition], *, seen: bool = True) -> Probed:
        """Whether a newer driver commits for this stream, on behalf of a slot.

        Args:
            partition: names any one of the group; nothing is committed for it.
            seen: the broker said that another client has the slot's place. Where transactions are not allowed nobody
                can tell who that is; a slot whose place may still be its own joins again there.
        """
        if self.by_members and not seen:
            return ev.NotReplaced(slot=slot)
        if self.by_members and not self._lent():
            return ev.ReplacedUnclear(slot=slot, reason="transactions are not allowed here", final=True)
        try:
            if self._committer.lost or self.by_members:  # it may be an agent of this run that was frozen
                return self._whose_places(slot)
            if self._committer.probe(partition()):
                return ev.NotReplaced(slot=slot)
        except Fenced as exc:
            return ev.Replaced(reason=str(exc))
        except SourceError as exc:
            log.info("whether this run was replaced is not known: %s", exc)
            return ev.ReplacedUnclear(slot=slot, reason=str(exc))
        return ev.ReplacedUnclear(slot=slot, reason="this run does not have its transactional id")

    def _whose_places(self, slot: int) -> Probed:
        """The same without the id: a newer driver takes the places of this one (classic static members, KIP-345)."""
        taken = self._taken()
        if taken is None:
            self._taken_since_ms.clear()
            return ev.NotReplaced(slot=slot)
        now_ms = self._environment.now_ms()
        reason = f"{taken.instance_id} is {taken.member_id} at {taken.host} now"
        if now_ms - self._taken_since_ms.setdefault(taken.member_id, now_ms) > self._stays_ms:
            return ev.Replaced(reason=reason)
        # It may be a consumer of this run that joined again by itself before it was closed: that ends with its session.
        return ev.ReplacedUnclear(slot=slot, reason=reason)

    def _taken(self) -> GroupMember | None:
        """A member that has a place of this run, and is none of it."""
        found = self._admin.group(self._group).members
        mine = frozenset(self._known_as)
        return next(
            (
                member
                for member in found
                if identifiers.is_instance_id_of(self._group, self._stream, member.instance_id)
                and member.member_id not in mine
            ),
            None,
        )

    def settle(self) -> None:
        """Before the group's offsets are read: a commit of ours that is still open would hold the answer back.

        Raises:
            Fenced: a newer driver commits for this stream.
        """
        try:
            self._committer.settle()
        except Fenced:
            raise
        except SourceError as exc:
            log.info("a commit was not answered yet: %s", exc)

    def echo(self, order: Order) -> ev.OffsetsCommitted | ev.OffsetCommitFailed:
        """Commit and read back what the order says, without the shares of members that are not what they were.

        Raises:
            Fenced: a newer driver commits for this stream.
            AccessDenied: neither a transaction nor a member may commit, told twice.
            GroupError: nothing, or not everything, was committed.
        """
        echo, left = order.echo, dict(order.left)
        at_ms = self._environment.wall_ms()
        usual = identifiers.note_text(echo.stream, echo.seq, echo.reset_number, at_ms=at_ms)
        notes = dict.fromkeys(echo.offsets, usual)
        for tp in echo.followed | echo.truncated_from.keys():
            followed, truncated_from = tp in echo.followed, echo.truncated_from.get(tp)
            notes[tp] = identifiers.note_text(
                echo.stream, echo.seq, echo.reset_number, followed=followed, truncated_from=truncated_from, at_ms=at_ms
            )
        try:
            self._commit(order.shares, notes, left)
        except CommitFailed:
            wanted = {tp for tp in echo.offsets if echo.slots[tp] not in left}
            there = self._still_there(wanted)
            if there == wanted:
                raise
            log.warning("%d partitions are gone, and their offsets with them", len(wanted - there))
            shares = [replace(s, offsets={tp: at for tp, at in s.offsets.items() if tp in there}) for s in order.shares]
            self._commit([share for share in shares if share.offsets], notes, left)
        # What is gone counts as done: Kafka takes no offset for it.
        done = {tp: offset for tp, offset in echo.offsets.items() if echo.slots[tp] not in left}
        if done or not left:
            return ev.OffsetsCommitted(offsets=done, left=left)
        return ev.OffsetCommitFailed(reason="; ".join(sorted(set(left.values()))), stale=True)

    def _still_there(self, tps: Iterable[TopicPartition]) -> set[TopicPartition]:
        """Without what was deleted: Kafka takes no offsets for it, and all of a commit or nothing."""
        asked = set(tps)
        topics = self._admin.existing(tp.topic for tp in asked)
        return {tp for tp in asked if tp.topic in topics and tp.partition < topics[tp.topic].partitions}

    def _commit(self, shares: Sequence[Share], notes: Mapping[TopicPartition, str], left: dict[int, str]) -> None:
        """Commit and read back the shares of all members that are what they were; ``left`` takes in the others."""
        while shares := self._of_members(shares, left):
            try:
                by_members = self._commit_together(shares, notes, whole=not left)
            except MemberStale as exc:
                self._leave_out(shares[exc.share], exc, left)
            else:
                if by_members and not left and all(share.member.static for share in shares):
                    self._take_over()
                self._offsets.wait_shown({tp: offset for share in shares for tp, offset in share.offsets.items()})
                return

    def _take_over(self) -> None:
        """Raises Fenced: a newer driver commits for this stream."""
        if self._committer.lost:
            try:
                self._committer.anew()
            except Fenced:
                raise
            except SourceError as exc:
                log.info("the transactional id was not taken over, the next commit tries again: %s", exc)

    def _of_members(self, shares: Sequence[Share], left: dict[int, str]) -> list[Share]:
        for share in shares:
            if (why := share.outdated) is not None:
                left.setdefault(share.member.slot, why)
        return [share for share in shares if share.member.slot not in left]

    def _leave_out(self, share: Share, exc: MemberStale, left: dict[int, str]) -> None:
        member, left[share.member.slot] = share.member, str(exc)
        if exc.thrown_out:  # it may not have heard: it starts anew
            member.order(ev.Leave(slot=member.slot, leave=False))
            self._handle(ev.MemberFailed(slot=member.slot, client=member.client, reason=str(exc)))

    def _commit_together(self, shares: Sequence[Share], notes: Mapping[TopicPartition, str], *, whole: bool) -> bool:
        """By a transaction, or else each member its share. Returns whether the members did it.

        Args:
            whole: the share of no member is left out.

        Raises:
            MemberStale: a member is not what it was.
            AccessDenied: nobody may commit, told twice.
            CommitFailed: nothing was committed; the core orders it again.
        """
        away = [share for share in shares if share.member.agent]
        if self._committer.lost and away and (denied := self._regain(shares, whole=whole)) is not None:
            self._deny(denied)
        if not self._committer.lost and self._environment.now_ms() >= self._denied_until_ms:
            denied = self._try_transaction(shares, notes)
            if denied is None:
                self._allowed()
                return False
            if denied.fields.get("on") in ("topic", "group"):
                self._bar(denied)  # a member would be refused as well
            self._deny(denied)
        if away:
            raise CommitFailed(f"transactions are refused, and {len(away)} members are at agents: they come home first")
        denied = _try_members(shares, notes)
        if denied is not None:
            self._bar(denied)
        self._barred_ms = None
        return True

    def _try_transaction(self, shares: Sequence[Share], notes: Mapping[TopicPartition, str]) -> AccessDenied | None:
        """Returns why it is not allowed, if so."""
        try:
            self._committer.prepare()
            self._committer.settle()
            _check(shares)  # those two may have taken their time
            self._committer.commit([(s.identity, s.offsets) for s in shares if s.identity is not None], notes)
        except AccessDenied as exc:
            return exc
        return None

    def _allowed(self) -> None:
        if self.by_members:
            log.warning("transactions are allowed again: the members commit their offsets no more")
        self._denials, self._barred_ms = 0, None
        self._tell_allowed(works=True)

    def _regain(self, shares: Sequence[Share], *, whole: bool) -> AccessDenied | None:
        """Take the transactional id back, if the group has all of these members: a newer driver of this stream would
        have their places. Members at agents do not commit, which would say the same. Returns why it is not allowed, if
        so: a refusal in the middle of a commit is how the id was lost."""
        there = {member.member_id for member in self._admin.group(self._group).members}
        if not whole or any(share.identity is None or share.identity.member not in there for share in shares):
            raise CommitFailed("the transactional id may be another process's by now")
        try:
            self._committer.anew()
        except AccessDenied as exc:
            return exc
        return None

    def _deny(self, exc: AccessDenied) -> None:
        """Raises CommitFailed where it was the first time: the core orders the commit again."""
        self._denials += 1
        if not self.by_members:
            raise CommitFailed(f"{exc}; it is tried once more") from exc
        self._denied_until_ms = self._environment.now_ms() + DENIED_AGAIN_MS
        self._tell_allowed()
        if self._denials == DENIALS_BELIEVED:
            log.warning("transactions are not allowed here (%s): the members commit their offsets instead", exc)

    def _bar(self, exc: AccessDenied) -> NoReturn:
        """Nobody of ours may commit: the run ends with that where it is said again after a while."""
        now_ms = self._environment.now_ms()
        if self._barred_ms is None:
            self._barred_ms = now_ms
        if now_ms - self._barred_ms >= BARRED_MS:
            raise exc
        raise CommitFailed(f"{exc}; it is tried once more") from exc


def _check(shares: Sequence[Share]) -> None:
    """Raises MemberStale for the first that may not be committed any more."""
    for at, share in enumerate(shares):
        if (why := share.outdated) is not None:
            raise MemberStale(why, share=at)


def _try_members(shares: Sequence[Share], notes: Mapping[TopicPartition, str]) -> AccessDenied | None:
    """Each member commits its share. Returns why one may not, if so."""
    for at, share in enumerate(shares):
        try:
            cast("Member", share.member).commit(share, notes).result(timeout=MEMBER_COMMIT_S_MAX)
        except AccessDenied as exc:
            return exc
        except TimeoutError:
            raise CommitFailed(f"the member did not commit within {MEMBER_COMMIT_S_MAX:.0f} s") from None
        except MemberStale as exc:
            raise MemberStale(str(exc), thrown_out=exc.thrown_out, share=at) from exc
    return None
