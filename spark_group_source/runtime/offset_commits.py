"""A run's offset commits: which member each offset is committed as, which slots are skipped, and by which route.

Runs in: the stream reader, on the request thread (except where stated). Deliberately absent: which offsets are
committed and when (``protocol``), and the transaction itself (``kafka.committer``).

Where transactions are denied, the members commit. The members also commit when the transactional id may belong to
another process, because the producer failed during an outage: if the broker accepts a member's commit, the membership
still belongs to this run, so the run may take the id back. Members on agents do not commit: for them the group's
description shows it.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, cast

from spark_group_source.errors import AccessDenied, CommitFailed, Fenced, SourceError
from spark_group_source.kafka.admin import Admin
from spark_group_source.kafka.committer import TransactionalCommitter
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.group_offsets import GroupOffsets
from spark_group_source.kafka.translation import GroupMember, MemberStale, Notes, OffsetNote
from spark_group_source.members import Member, MemberCommit, SlotMember
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.protocol.offsets import UNKNOWN_EPOCH

log = logging.getLogger(__name__)

MEMBER_COMMIT_S_MAX = 10.0
"""The longest wait for a member's commit, where transactions are denied."""

DENIALS_CONFIRMED = 2
"""Transactions count as denied after this many refusals in a row: a starting broker, or one with a new ACL, refuses for
a moment."""
COMMIT_DENIED_MS = 1_000
"""Neither a transaction nor a member may commit for this long: the run fails."""
PROOF_MS_MAX = 5_000
"""The age up to which an answer about the group proves that this run has its memberships. A process that was frozen
after an older one may have a successor, whose transactional id it would take."""
TRANSACTION_RETRY_MS = 60_000
"""After a denial, the next attempt to commit in a transaction comes this much later. Only transactions show whether a
newer run has replaced this one."""

ReplacedCheck = ev.NotReplaced | ev.Replaced | ev.ReplacedUnclear


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """An offset commit, with the members it is committed as."""

    command: ev.CommitOffsets
    parts: tuple[MemberCommit, ...]
    """The offsets of each slot that had a member when the commit was ordered."""
    skipped: Mapping[int, str]
    """Slots that had no member when the commit was ordered, with the reason."""


def commit_order(command: ev.CommitOffsets, member: Callable[[int], SlotMember | None]) -> CommitOrder:
    """Capture the members and their identities, since a slot may have a new member of the same name later.

    Runs on the thread of the event that led to the command.
    """
    by_slot: dict[int, dict[TopicPartition, int]] = {}
    for tp, offset in command.offsets.items():
        by_slot.setdefault(command.slots[tp], {})[tp] = offset
    members = {slot: member(slot) for slot in by_slot}
    return CommitOrder(
        command,
        tuple(MemberCommit(m, m.identity, by_slot[slot]) for slot, m in members.items() if m is not None),
        {slot: "the slot has no member" for slot, m in members.items() if m is None},
    )


class OffsetCommits:
    """Commits the offsets of one stream, fenced by its stream id.

    Args:
        own_member_ids: the member ids that members of this run have or had.
        has_placed_members: whether a member of this run was ever placed on an agent.
        handle: receives each event; never raises.
    """

    def __init__(
        self,
        options: Options,
        admin: Admin,
        *,
        stream: str,
        offsets: GroupOffsets,
        environment: Environment,
        own_member_ids: Collection[str],
        has_placed_members: Callable[[], bool],
        handle: Callable[[ev.Event], None],
    ) -> None:
        self._has_placed_members = has_placed_members
        self._admin, self._offsets, self._environment, self._handle = admin, offsets, environment, handle
        self._group, self._own_member_ids = options.group_id, own_member_ids
        self._stream = stream
        # A leftover consumer of this run is out by then: a rebalance ends, and its session begins again (classic).
        self._foreign_ms_max = options.max_poll_interval_ms + options.session_timeout_ms
        self._foreign_since_ms: dict[str, int] = {}  # by foreign member id: when it first had a membership of this run
        self._denials = 0  # refused transactions in a row
        self._retry_transaction_at_ms = 0
        self._commit_denied_since_ms: int | None = None  # since when neither a transaction nor a member may commit
        self._reported_allowed: bool | None = None  # what the last TransactionsChecked said; None: none was sent
        self._committer = TransactionalCommitter(
            options.producer_settings(),
            group=options.group_id,
            transactional_id=identifiers.transactional_id(options.group_id, stream),
            environment=environment,
        )

    @property
    def members_commit(self) -> bool:
        """Whether transactions are denied, so that the members commit and a replaced run is not detected. Any
        thread."""
        return self._denials >= DENIALS_CONFIRMED

    def serve(self) -> None:
        """As :meth:`TransactionalCommitter.serve`."""
        self._committer.serve()

    def prepare(self) -> bool:
        """Take over the transactional id, so that an older driver of this stream (for example a frozen one) is fenced.

        Returns:
            False when it was not taken over and should be tried again.
        """
        try:
            self._committer.prepare()
        except SourceError as exc:
            # The first commit reports what this means.
            log.info("group %s: the transactional id was not taken over: %s", self._group, exc)
            self._denials = self._denials + 1 if isinstance(exc, AccessDenied) else 0
            self._report_transactions()
            return self.members_commit
        self._denials = 0
        self._report_transactions(allowed=True)
        return True

    def finish_transaction(self) -> None:
        """Finish an unanswered commit before the group's offsets are read: an open transaction delays a stable read.

        Raises:
            Fenced: a newer driver commits for this stream.
        """
        try:
            self._committer.finish_transaction()
        except Fenced:
            raise
        except SourceError as exc:
            log.info("group %s: the last offset commit is still unanswered: %s", self._group, exc)

    def commit(self, order: CommitOrder) -> ev.OffsetsCommitted:
        """Commit the order's offsets and read them back, without the slots whose members have changed.

        Raises:
            Fenced: a newer driver commits for this stream.
            AccessDenied: neither a transaction nor a member may commit, refused twice.
            GroupError: nothing, or not everything, was committed.
        """
        command, skipped = order.command, dict(order.skipped)
        notes = notes_of(command, at_ms=self._environment.wall_ms())
        try:
            self._commit(order.parts, notes, skipped)
        except CommitFailed:
            wanted = {tp for tp in command.offsets if command.slots[tp] not in skipped}
            existing = self._admin.existing_partitions(wanted)  # Kafka refuses a whole commit that names a deleted one
            if existing == wanted:
                raise
            log.warning(
                "group %s: %d partitions do not exist any more; their offsets are not committed",
                self._group,
                len(wanted - existing),
            )
            parts = [
                replace(p, offsets={tp: at for tp, at in p.offsets.items() if tp in existing}) for p in order.parts
            ]
            self._commit([part for part in parts if part.offsets], notes, skipped)
        # A deleted partition counts as committed: Kafka accepts no offset for it.
        done = {tp: offset for tp, offset in command.offsets.items() if command.slots[tp] not in skipped}
        return ev.OffsetsCommitted(offsets=done, left_out=skipped)

    def _commit(self, parts: Sequence[MemberCommit], notes: Notes, skipped: dict[int, str]) -> None:
        """Commit and read back the parts of all unchanged members; add the slots of the others to ``skipped``."""
        while parts := self._of_unchanged_members(parts, skipped):
            try:
                by_members = self._commit_together(parts, notes, complete=not skipped)
            except MemberStale as exc:
                self._skip(parts[exc.part], exc, skipped)
            else:
                if by_members and not skipped and all(part.member.static for part in parts):
                    self._regain_id()
                self._offsets.wait_until_visible({tp: offset for part in parts for tp, offset in part.offsets.items()})
                return

    def _of_unchanged_members(self, parts: Sequence[MemberCommit], skipped: dict[int, str]) -> list[MemberCommit]:
        for part in parts:
            if (reason := part.stale_reason) is not None:
                skipped.setdefault(part.member.slot, reason)
        return [part for part in parts if part.member.slot not in skipped]

    def _commit_together(self, parts: Sequence[MemberCommit], notes: Notes, *, complete: bool) -> bool:
        """Commit all parts in one transaction or, where transactions are denied, each part by its member. Return
        whether the members committed. ``complete``: no member's part is skipped.

        Raises as :meth:`commit`, and MemberStale if a member has changed.
        """
        placed = [part for part in parts if part.member.agent]
        if self._committer.id_uncertain and placed:
            denied = self._regain_by_group(parts, complete=complete)
            if denied is not None:
                self._count_denial(denied)
        if not self._committer.id_uncertain and self._environment.now_ms() >= self._retry_transaction_at_ms:
            denied = self._commit_in_transaction(parts, notes)
            if denied is None:
                self._transactions_allowed()
                return False
            if denied.fields.get("on") in ("topic", "group"):
                self._commit_denied(denied)  # a member's commit needs the same permission
            self._count_denial(denied)
        if placed:
            raise CommitFailed(
                f"transactions are denied, and {len(placed)} members are placed on agents: they must return first"
            )
        denied = _commit_by_members(parts, notes)
        if denied is not None:
            self._commit_denied(denied)
        self._commit_denied_since_ms = None
        return True

    def _commit_in_transaction(self, parts: Sequence[MemberCommit], notes: Notes) -> AccessDenied | None:
        """Commit in a transaction. Returns the error if transactions are denied."""
        try:
            self._committer.prepare()
            self._committer.finish_transaction()
            _check_unchanged(parts)  # the two calls above may have taken seconds
            self._committer.commit([(p.identity, p.offsets) for p in parts if p.identity is not None], notes)
        except AccessDenied as exc:
            return exc
        return None

    def _transactions_allowed(self) -> None:
        if self.members_commit:
            log.warning("group %s: transactions are allowed again; offsets are committed in transactions", self._group)
        self._denials, self._commit_denied_since_ms = 0, None
        self._report_transactions(allowed=True)

    def _skip(self, part: MemberCommit, exc: MemberStale, skipped: dict[int, str]) -> None:
        member, skipped[part.member.slot] = part.member, str(exc)
        if exc.expelled:  # its own client may not know yet: replace the member
            # Before the order to leave: the end of the member would be reported first, and with another reason.
            self._handle(ev.MemberFailed(slot=member.slot, client=member.client, reason=str(exc)))
            member.submit(ev.Leave(slot=member.slot, leave=False))

    # --- where transactions are denied --------------------------------------------------------------------------------

    def _count_denial(self, exc: AccessDenied) -> None:
        """Count a refused transaction. Raises CommitFailed for the first one: the protocol orders the commit again."""
        self._denials += 1
        if not self.members_commit:
            raise CommitFailed(f"{exc}; retrying once") from exc
        self._retry_transaction_at_ms = self._environment.now_ms() + TRANSACTION_RETRY_MS
        self._report_transactions()
        if self._denials == DENIALS_CONFIRMED:
            log.warning("group %s: transactions are denied (%s); the members commit the offsets", self._group, exc)

    def _commit_denied(self, exc: AccessDenied) -> NoReturn:
        """Raise AccessDenied, which fails the run, if no commit was allowed for COMMIT_DENIED_MS; else CommitFailed."""
        now_ms = self._environment.now_ms()
        if self._commit_denied_since_ms is None:
            self._commit_denied_since_ms = now_ms
        if now_ms - self._commit_denied_since_ms >= COMMIT_DENIED_MS:
            raise exc
        raise CommitFailed(f"{exc}; retrying once") from exc

    def _report_transactions(self, *, allowed: bool = False) -> None:
        """Send TransactionsChecked when it is known whether transactions are allowed, and that has changed."""
        if (allowed or self.members_commit) and self._reported_allowed is not allowed:
            self._reported_allowed = allowed
            self._handle(ev.TransactionsChecked(allowed=allowed))

    # --- whether a newer driver runs this stream ----------------------------------------------------------------------

    def check_replaced(
        self, slot: int, partition: Callable[[], TopicPartition], *, confirmed: bool = True
    ) -> ReplacedCheck:
        """Check on behalf of a slot whether a newer driver commits for this stream.

        The answer cannot be late, so :class:`Replaced` need not name the slot: a slot has one check at a time, and only
        its answer, or the close of the run, ends the slot's state CHECKING.

        Args:
            slot: the slot whose member was fenced.
            partition: returns any partition of the subscription; no offset is committed for it.
            confirmed: the broker reported that another client has the slot's membership. Without transactions the other
                client cannot be identified; a slot whose membership may still be its own joins again.
        """
        if self.members_commit and not confirmed:
            return ev.NotReplaced(slot=slot)
        if self.members_commit and not self._has_placed_members():
            reason = f"another client has the instance id of slot {slot}, and transactions are not allowed here"
            return ev.Replaced(reason=reason)
        try:
            if self._committer.id_uncertain or self.members_commit:
                return self._check_memberships(slot)  # the other client may be a frozen agent of this run
            if self._committer.probe(partition()):
                return ev.NotReplaced(slot=slot)
        except Fenced as exc:
            return ev.Replaced(reason=str(exc))
        except SourceError as exc:
            log.info("group %s: unknown whether this run was replaced: %s", self._group, exc)
            return ev.ReplacedUnclear(slot=slot, reason=str(exc))
        return ev.ReplacedUnclear(slot=slot, reason="this run does not have its transactional id")

    def _check_memberships(self, slot: int) -> ReplacedCheck:
        """Check without the transactional id: a newer driver takes over the static memberships of this run
        (KIP-345)."""
        foreign = self._foreign_member()
        if foreign is None:
            self._foreign_since_ms.clear()
            return ev.NotReplaced(slot=slot)
        now_ms = self._environment.now_ms()
        reason = f"{foreign.instance_id} is {foreign.member_id} at {foreign.host} now"
        if now_ms - self._foreign_since_ms.setdefault(foreign.member_id, now_ms) > self._foreign_ms_max:
            return ev.Replaced(reason=reason)
        # It may be a consumer of this run that rejoined by itself before it was closed; it expires with its session.
        return ev.ReplacedUnclear(slot=slot, reason=reason)

    def _foreign_member(self, found: Iterable[GroupMember] | None = None) -> GroupMember | None:
        """Return a member of the group that has an instance id of this run but is not one of the run's members;
        ``found``: the group's members, which are requested otherwise."""
        found = self._admin.describe_group(self._group).members if found is None else found
        own = frozenset(self._own_member_ids)
        return next(
            (
                member
                for member in found
                if identifiers.is_instance_id_of(self._group, self._stream, member.instance_id)
                and member.member_id not in own
            ),
            None,
        )

    def _regain_by_group(self, parts: Sequence[MemberCommit], *, complete: bool) -> AccessDenied | None:
        """Take the transactional id back if the group contains all of these members: a newer driver of this stream
        would have their memberships. Needed where members are placed on agents, since those do not commit. Return the
        error if transactions are denied: a refusal in the middle of a commit makes the id uncertain."""
        began_ms = self._environment.boot_ms()
        found = self._admin.describe_group(self._group).members
        present = {member.member_id for member in found}
        are_there = complete and all(part.identity is not None and part.identity.member in present for part in parts)
        if not are_there or self._foreign_member(found) is not None:
            raise CommitFailed("the transactional id may belong to another process")
        self._check_fresh(began_ms)
        try:
            self._committer.regain_id()
        except AccessDenied as exc:
            return exc
        return None

    def _regain_id(self) -> None:
        """Take the transactional id back if it is uncertain: the brokers have just accepted the members' commits, and
        no other client has a membership of this run. (A process that was frozen may have taken back some of those of
        its successor.) Raises Fenced if a newer driver commits for this stream."""
        if self._committer.id_uncertain:
            began_ms = self._environment.boot_ms()
            try:
                if (foreign := self._foreign_member()) is not None:
                    raise CommitFailed(f"{foreign.instance_id} is {foreign.member_id} at {foreign.host} now")
                self._check_fresh(began_ms)
                self._committer.regain_id()
            except Fenced:
                raise
            except SourceError as exc:
                log.info("group %s: transactional id not regained; retrying at the next commit: %s", self._group, exc)

    def _check_fresh(self, began_ms: int) -> None:
        """Raise CommitFailed if a proof that began at that time is too old to take the transactional id by it."""
        if (age_ms := self._environment.boot_ms() - began_ms) > PROOF_MS_MAX:
            raise CommitFailed(f"the proof that this run has its memberships is {age_ms} ms old")


def _check_unchanged(parts: Sequence[MemberCommit]) -> None:
    """Raise MemberStale for the first part that may not be committed any more."""
    for index, part in enumerate(parts):
        if (reason := part.stale_reason) is not None:
            raise MemberStale(reason, part=index)


def notes_of(command: ev.CommitOffsets, *, at_ms: int) -> Notes:
    """Return what is committed beside each offset. ``at_ms``: the time of the commit, in milliseconds since 1970."""
    of_all = identifiers.Note(command.stream, command.seq, command.reset_number, at_ms=at_ms)
    topics = {tp.topic for tp in command.offsets}
    notes = {topic: of_all._replace(topic_id=command.topic_ids.get(topic, "")) for topic in topics}
    plain = {topic: identifiers.note_text(note) for topic, note in notes.items()}
    texts = {tp: plain[tp.topic] for tp in command.offsets}
    for tp in command.followed | command.started | command.truncated_after.keys():
        note = notes[tp.topic]._replace(
            followed=tp in command.followed,
            started=tp in command.started,
            truncated_after=command.truncated_after.get(tp),
        )
        texts[tp] = identifiers.note_text(note)
    return {tp: OffsetNote(text, command.leader_epochs.get(tp, UNKNOWN_EPOCH)) for tp, text in texts.items()}


def _commit_by_members(parts: Sequence[MemberCommit], notes: Notes) -> AccessDenied | None:
    """Let each member commit its part. Returns the error if one is denied."""
    for index, part in enumerate(parts):
        try:
            cast("Member", part.member).commit(part, notes).result(timeout=MEMBER_COMMIT_S_MAX)
        except AccessDenied as exc:
            return exc
        except TimeoutError:
            part.is_withdrawn = True
            raise CommitFailed(f"the member did not commit within {MEMBER_COMMIT_S_MAX:.0f} s") from None
        except MemberStale as exc:
            raise MemberStale(str(exc), expelled=exc.expelled, part=index) from exc
    return None
