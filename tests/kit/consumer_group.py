"""The coordinator of the KIP-848 protocol: heartbeats, epochs, one member's reconciliation at a time.

Runs in: tests. Deliberately absent: regular expressions, racks, assignors other than the sticky one.
"""

from collections.abc import Callable, Mapping

from kit.kafka_group import Answer, Books, Code, Group, Member, balanced
from kit.world import World
from spark_group_source.model import TopicPartition

RELEASED = -2
"""Epoch of a static member that left and keeps its membership until its session ends."""
LEFT = -1


class ConsumerGroup(Group):
    """One group of KIP-848 members."""

    protocol = "consumer"
    epoch = 0

    def __init__(self, world: World, topics: Mapping[str, int], books: Books) -> None:
        super().__init__(world, topics, books)
        self._target: dict[str, set[TopicPartition]] = {}

    def heartbeat(
        self,
        id_: str,
        instance: str | None,
        client_id: str,
        epoch: int,
        owned: frozenset[TopicPartition] | None,
        topics: frozenset[str],
        reply: Callable[[Answer], None],
    ) -> None:
        """A heartbeat: epoch 0 joins, :data:`LEFT` and :data:`RELEASED` leave; ``owned`` acknowledges the partitions.

        Without ``instance``, which only full heartbeats have, a replaced member is not detected.
        """
        if epoch == 0:
            reply(self._join(id_, instance, client_id, topics))
            return
        member = self.members.get(id_)
        if member is None:
            reply(Answer(Code.UNKNOWN_MEMBER if self.static(instance) is None else Code.FENCED_INSTANCE))
        elif epoch == LEFT:
            self.remove(member, "it left")
            reply(Answer(Code.OK))
        elif epoch == RELEASED:
            member.epoch, member.revoking, member.revoking_since_ms = RELEASED, set(), None
            reply(Answer(Code.OK))
        elif epoch not in (member.epoch, member.generation):  # the last answer may be lost
            reply(Answer(Code.FENCED_EPOCH))
        else:
            member.seen_ms = self.world.now_ms
            if topics != member.topics:
                member.topics = topics
                self._new_target()
            self._reconcile(member, owned)
            reply(self._state_of(member))

    def take(
        self,
        id_: str,
        instance: str | None,
        client_id: str,
        topics: frozenset[str],
        reply: Callable[[Answer], None],
    ) -> None:
        """A static member of the classic protocol joins as a new one; no instance id is refused."""
        if self.refuses(id_):
            reply(Answer(Code.GROUP_FULL))
            return
        holder = self.static(instance)
        if holder is None:
            member = self.new_member(id_, instance, client_id)
        else:
            member = self._replace(holder, id_, client_id)
        member.taken = True
        self._subscribed(member, topics)
        reply(self._state_of(member))

    def _join(self, id_: str, instance: str | None, client_id: str, topics: frozenset[str]) -> Answer:
        if self.refuses(id_):
            return Answer(Code.GROUP_FULL)
        holder = self.static(instance)
        if holder is not None and holder.id != id_:
            if holder.epoch != RELEASED and not holder.taken:
                return Answer(Code.UNRELEASED)
            member = self._replace(holder, id_, client_id)
        elif id_ in self.members:  # the answer to its first request was lost
            member = self.members[id_]
            member.seen_ms = self.world.now_ms
        else:
            member = self.new_member(id_, instance, client_id)
        self._subscribed(member, topics)
        return self._state_of(member)

    def _replace(self, holder: Member, id_: str, client_id: str) -> Member:
        del self.members[holder.id]
        member = self.new_member(id_, holder.instance, client_id)
        member.assigned, member.epoch, member.generation = holder.assigned, self.epoch, self.epoch
        member.joined_order, member.topics = holder.joined_order, holder.topics
        self._target[id_] = self._target.pop(holder.id, set())
        self.world.note(f"group: {id_} takes the place of {holder.id}")
        return member

    def _subscribed(self, member: Member, topics: frozenset[str]) -> None:
        if topics != member.topics:
            member.topics = topics
            self._new_target()
        self._reconcile(member, frozenset())

    def _state_of(self, member: Member) -> Answer:
        return Answer(Code.OK, member.id, member.epoch, assignment=frozenset(member.assigned))

    def _reconcile(self, member: Member, owned: frozenset[TopicPartition] | None) -> None:
        """Compare one member with the target: revoke partitions first, assign them when they are free."""
        if member.revoking and owned is not None and not (member.revoking & owned):
            member.revoking, member.revoking_since_ms = set(), None
        if member.revoking:
            return
        target = self._target.get(member.id, set())
        if gone := member.assigned - target:
            member.assigned -= gone
            if owned is None or owned:  # it may own some, so it must report their release
                member.revoking, member.revoking_since_ms = gone, self.world.now_ms
                return
        taken = {tp for m in self.members.values() if m is not member for tp in m.assigned | m.revoking}
        member.assigned |= target - taken
        if member.epoch != self.epoch:
            member.generation, member.epoch = member.epoch, self.epoch

    def _new_target(self) -> None:
        self.epoch += 1
        self.rebalances += 1
        members = list(self.members.values())
        self._target = balanced(members, {m.id: m.assigned for m in members}, self.partitions())
        self.world.note(
            f"group: epoch {self.epoch}: " + ", ".join(f"{i}={len(tps)}" for i, tps in self._target.items())
        )

    # --- for the base class -----------------------------------------------------------------------------------------

    def check_generation(self, member: Member, generation: int, *, transactional: bool) -> Code:
        if member.epoch == generation:
            return Code.OK
        return Code.ILLEGAL_GENERATION if transactional else Code.STALE_EPOCH

    def describe(self) -> tuple[str, dict[str, frozenset[TopicPartition]]]:
        """The state as the library reports it: it has no value for groups that assign or reconcile."""
        members = list(self.members.values())
        settled = all(m.epoch == self.epoch and m.assigned == self._target.get(m.id) for m in members)
        state = "EMPTY" if not members else "STABLE" if settled else "UNKNOWN"
        return state, {m.id: frozenset(m.assigned) for m in members}

    def on_topics_changed(self) -> None:
        if self.members:
            self._new_target()

    def on_member_gone(self, member: Member) -> None:
        self._target.pop(member.id, None)
        self._new_target()

    def alive(self, member: Member) -> bool:
        since = member.revoking_since_ms
        if since is not None and self.world.now_ms - since > self.rebalance_ms:
            self.remove(member, "it did not revoke in time")
            return True
        return False
