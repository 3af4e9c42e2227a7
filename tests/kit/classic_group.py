"""The coordinator of the classic protocol: join, sync, generations; eager and cooperative; static members (KIP-345).

Runs in: tests. Deliberately absent: several protocol names in one group, the round of MEMBER_ID_REQUIRED, member
metadata other than owned partitions and subscriptions.
"""

from collections.abc import Callable, Collection
from enum import Enum

from kit.kafka_group import Answer, Code, Group, Member, balanced
from spark_group_source.model import TopicPartition

INITIAL_DELAY_MS = 300
"""group.initial.rebalance.delay.ms: an empty group waits this long for more members."""


class State(Enum):
    """The states, with librdkafka's names."""

    EMPTY = "EMPTY"
    PREPARING = "PREPARING_REBALANCING"  # waits for all members to join
    COMPLETING = "COMPLETING_REBALANCING"  # waits for the leader's assignment
    STABLE = "STABLE"


Reply = Callable[[Answer], None]


class ClassicGroup(Group):
    """One group of classic members.

    Args:
        incremental: cooperative-sticky; else range-like and eager.
    """

    incremental = False
    record_bytes_max = 1_048_588  # max.message.bytes of the topic __consumer_offsets
    state = State.EMPTY
    generation = 0
    leader = ""
    _round = 0

    def join(
        self,
        id_: str,
        instance: str | None,
        client_id: str,
        owned: Collection[TopicPartition],
        generation: int,
        topics: frozenset[str],
        reply: Reply,
    ) -> None:
        """A member joins (``id_`` empty: a new one) or rejoins."""
        if self.refuses(id_):
            if id_ in self.members:
                self.remove(self.members[id_], "the group is full")
            reply(Answer(Code.GROUP_FULL))
            return
        holder = self.static(instance)
        if holder is not None and not id_:
            self._replace(holder, client_id, owned, topics, reply)
            return
        if holder is not None and holder.id != id_:
            reply(Answer(Code.FENCED_INSTANCE))
            return
        if id_ and id_ not in self.members:
            reply(Answer(Code.UNKNOWN_MEMBER))
            return
        if not id_:
            member = self.new_member(f"{client_id}-{self._joined + 1}", instance, client_id)
        else:
            member = self.members[id_]
            unchanged = set(owned) == member.owned and topics == member.topics
            follower = self.state is State.STABLE and id_ != self.leader and unchanged
            if follower and member.generation == self.generation and not self.incremental:
                reply(Answer(Code.OK, id_, self.generation))
                return
        member.owned, member.generation, member.topics, member.join_reply = set(owned), generation, topics, reply
        self._prepare()
        self._complete_if_all_joined()

    def _replace(
        self, old: Member, client_id: str, owned: Collection[TopicPartition], topics: frozenset[str], reply: Reply
    ) -> None:
        """A new process takes over a static member's instance id: without a rebalance when the group is stable."""
        for waiting in (old.join_reply, old.sync_reply):
            if waiting is not None:
                waiting(Answer(Code.FENCED_INSTANCE))
        del self.members[old.id]
        member = self.new_member(f"{client_id}-{self._joined + 1}", old.instance, client_id)
        member.joined_order, member.assigned, member.generation = old.joined_order, old.assigned, old.generation
        member.owned, member.topics = set(owned), topics
        self.world.note(f"group: {member.id} takes the place of {old.id}")
        if self.leader == old.id:
            self.leader = member.id
        if self.state is State.STABLE:
            member.generation = self.generation
            reply(Answer(Code.OK, member.id, self.generation))
            return
        member.join_reply = reply
        if self.state is State.COMPLETING:
            self._prepare()
        self._complete_if_all_joined()

    def sync(self, id_: str, generation: int, reply: Reply) -> None:
        member = self.members.get(id_)
        if member is None:
            reply(Answer(Code.UNKNOWN_MEMBER))
        elif generation != self.generation:
            reply(Answer(Code.ILLEGAL_GENERATION))
        elif self.state is State.STABLE:
            reply(Answer(Code.OK, id_, generation, assignment=frozenset(member.assigned)))
        elif self.state is State.COMPLETING:
            member.sync_reply, member.seen_ms = reply, self.world.now_ms
            if id_ == self.leader:
                self._assign()
        else:
            reply(Answer(Code.REBALANCE))

    def heartbeat(self, id_: str, instance: str | None, generation: int, reply: Reply) -> None:
        member = self.members.get(id_)
        if member is None:
            holder = self.static(instance)
            reply(Answer(Code.UNKNOWN_MEMBER if holder is None else Code.FENCED_INSTANCE))
        elif generation != self.generation:
            reply(Answer(Code.ILLEGAL_GENERATION))
        else:
            member.seen_ms = self.world.now_ms
            reply(Answer(Code.REBALANCE if self.state is State.PREPARING else Code.OK))

    def leave(self, id_: str, reply: Reply) -> None:
        if (member := self.members.get(id_)) is not None:
            self.remove(member, "it left")
        reply(Answer(Code.OK))

    # --- the round --------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        if self.state is State.PREPARING:
            return
        delay_ms = INITIAL_DELAY_MS if self.state is State.EMPTY else self.rebalance_ms
        self.state = State.PREPARING
        self.rebalances += 1
        self._round += 1
        self.world.note("group: a rebalance begins")
        for member in self.members.values():
            if member.sync_reply is not None:
                member.sync_reply(Answer(Code.REBALANCE))
                member.sync_reply = None
        round_ = self._round
        self._initial = delay_ms == INITIAL_DELAY_MS
        self.world.at(delay_ms, lambda: self._on_timeout(round_))

    def _complete_if_all_joined(self) -> None:
        everyone = bool(self.members) and all(m.join_reply is not None for m in self.members.values())
        if self.state is State.PREPARING and everyone and not self._initial:
            self._complete()

    def _on_timeout(self, round_: int) -> None:
        if self.state is not State.PREPARING or round_ != self._round:
            return
        for member in [m for m in self.members.values() if m.join_reply is None and m.instance is None]:
            self.world.note(f"group: {member.id} did not join in time")
            del self.members[member.id]
        self._initial = False
        if any(m.join_reply is not None for m in self.members.values()):
            self._complete()
        elif self.members:  # all are static members that are absent: the group waits for a session to end
            self.world.at(self.rebalance_ms, lambda: self._on_timeout(round_))
        else:
            self.state = State.EMPTY

    def _complete(self) -> None:
        self.generation += 1
        self.state = State.COMPLETING
        joined = [m for m in self.members.values() if m.join_reply is not None]
        if self.leader not in {m.id for m in joined}:
            self.leader = min(joined, key=lambda m: m.joined_order).id
        for member in joined:
            member.seen_ms, member.generation = self.world.now_ms, self.generation
            reply, member.join_reply = member.join_reply, None
            assert reply is not None
            reply(Answer(Code.OK, member.id, self.generation, member.id == self.leader))
        round_ = self._round
        # A member that joined but does not request its assignment is removed.
        self.world.at(self.rebalance_ms, lambda: self._expire_pending_sync(round_))

    def _expire_pending_sync(self, round_: int) -> None:
        if round_ != self._round or self.state is not State.COMPLETING:
            return
        for member in [m for m in self.members.values() if m.sync_reply is None]:
            self.remove(member, "it never synced")

    def _assign(self) -> None:
        members = list(self.members.values())
        everything = self.partitions()
        if self.incremental:
            target = self._cooperative(members, everything)
        else:
            target = {m.id: set() for m in members}
            ranked = sorted(members, key=lambda m: m.joined_order)
            for topic in sorted({tp.topic for tp in everything}):
                takers = [m for m in ranked if topic in m.topics]
                for at, tp in enumerate(tp for tp in everything if tp.topic == topic):
                    target[takers[at % len(takers)].id].add(tp)
        if self._record_bytes(target) > self.record_bytes_max:
            for member in members:
                if member.sync_reply is not None:
                    reply, member.sync_reply = member.sync_reply, None
                    reply(Answer(Code.UNKNOWN_SERVER))
            self._prepare()
            return
        self.state = State.STABLE
        for member in members:
            member.assigned = target[member.id]
            if member.sync_reply is not None:
                reply, member.sync_reply = member.sync_reply, None
                reply(Answer(Code.OK, member.id, self.generation, assignment=frozenset(member.assigned)))
        self.world.note(
            f"group: generation {self.generation}: " + ", ".join(f"{i}={len(t)}" for i, t in target.items())
        )

    def _record_bytes(self, target: dict[str, set[TopicPartition]]) -> int:
        """The size of GroupMetadataValue: ids, subscriptions and assignments of the members."""

        def listed(tps: Collection[TopicPartition]) -> int:
            return sum(6 + len(topic) for topic in {tp.topic for tp in tps}) + 4 * len(tps)

        members = self.members.values()
        names = sum(2 + len(topic) for member in members for topic in member.topics)
        owned = sum(listed(member.owned) for member in members) if self.incremental else 0
        ids = sum(len(member.id) + len(member.client_id) for member in members)
        return ids + names + owned + sum(map(listed, target.values()))

    def _cooperative(self, members: list[Member], everything: list[TopicPartition]) -> dict[str, set[TopicPartition]]:
        claims: dict[TopicPartition, Member] = {}
        for member in sorted(members, key=lambda m: m.generation):  # the newer generation of two claims counts
            claims.update(dict.fromkeys(member.owned, member))
        owned = {m.id: {tp for tp, owner in claims.items() if owner is m} for m in members}
        target = balanced(members, owned, everything)
        newest = max((m.generation for m in members if m.owned), default=-1)
        claimed = {m.id: m.owned for m in members if m.generation == newest}
        # A moved partition is first only revoked; its owner rejoins without it. So is one claimed twice in one
        # generation.
        return {
            id_: {tp for tp in tps if all(tp not in of for other, of in claimed.items() if other != id_)}
            for id_, tps in target.items()
        }

    # --- for the base class -----------------------------------------------------------------------------------------

    def is_full(self, id_: str) -> bool:
        """In a rebalance, members are accepted in the order in which they join: the last ones of too many are out."""
        if self.state is not State.PREPARING:
            return self.state is not State.EMPTY and super().is_full(id_)
        joined = {m.id for m in self.members.values() if m.join_reply is not None}
        return id_ not in joined and len(joined) >= self.size_max

    def check_generation(self, member: Member, generation: int, *, transactional: bool) -> Code:
        del member  # all share one generation
        if generation != self.generation:
            return Code.ILLEGAL_GENERATION
        return Code.REBALANCE if self.state is State.COMPLETING and not transactional else Code.OK

    def describe(self) -> tuple[str, dict[str, frozenset[TopicPartition]]]:
        """During a rebalance the coordinator does not report the members' partitions."""
        given = {m.id: frozenset(m.assigned if self.state is State.STABLE else ()) for m in self.members.values()}
        return self.state.value, given

    def on_topics_changed(self) -> None:
        if self.members and self.state is State.STABLE:
            self._prepare()

    def on_member_gone(self, member: Member) -> None:
        for waiting in (member.join_reply, member.sync_reply):
            if waiting is not None:
                waiting(Answer(Code.UNKNOWN_MEMBER))
        if not self.members:
            self.state = State.EMPTY
        elif self.state is State.PREPARING:
            self._complete_if_all_joined()
        else:
            self._prepare()
            self._complete_if_all_joined()

    def alive(self, member: Member) -> bool:
        return member.join_reply is not None or member.sync_reply is not None


class CooperativeGroup(ClassicGroup):
    """cooperative-sticky: members keep their partitions through a rebalance."""

    incremental = True
