"""A member's thread in a manual environment: each line of a script runs where the thread would wait next."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError
from manual_environment import A0, A1, ManualConsumer, ManualEnvironment, metadata, refusal

from spark_group_source.errors import AccessDenied, CommitFailed, GroupError
from spark_group_source.kafka.consumer import REFUSAL_MS_MAX, TAKE_OVER_MS_MAX
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.retry import CONFIRM_S
from spark_group_source.kafka.translation import MemberStale, OffsetNote
from spark_group_source.members import EMPTY_AFTER_MS, POLL_S, Member, MemberCommit
from spark_group_source.model import Identity, TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.runtime import offset_commits

SESSION_MS = 10_000
EAGER = {"bootstrap.servers": "b", "group.id": "g", "session.timeout.ms": str(SESSION_MS)}
COOPERATIVE = EAGER | {"partition.assignment.strategy": "cooperative-sticky"}
JOIN = ev.Join(slot=3, client=2, topics=("a",), client_id="c-3", instance_id="g.s.3")


class Scene:
    """One member and its reported events."""

    def __init__(self) -> None:
        self.environment = ManualEnvironment()
        self.reported: list[ev.Event] = []
        self.ended: list[ev.Event] = []
        self.called_when_ended: list[Any] = []
        self.done: list[Any] = []
        self.member = self.make()

    def make(self, settings: dict[str, str] = EAGER, join: ev.Join = JOIN) -> Member:
        self.member = Member(
            join,
            settings,
            own_member_ids=deque(),
            environment=self.environment,
            report=self._report,
        )
        return self.member

    def _report(self, event: ev.Event) -> None:
        if isinstance(event, ev.MemberEnded):
            self.ended.append(event)
            self.called_when_ended = self.environment.called()
        else:
            self.reported.append(event)

    @property
    def consumer(self) -> ManualConsumer:
        return self.environment.consumers[-1]

    def run(self, *script: Callable[[], object]) -> None:
        self.member.start()
        self.environment.run(*script)

    def freeze(self, for_ms: int = SESSION_MS) -> None:
        self.environment.clock_ms += for_ms

    def leave(self) -> None:
        self.member.submit(ev.Leave(slot=3, leave=False))

    def release(self) -> None:
        self.member.submit(ev.Release(slot=3, client=2))

    def assign(self) -> None:
        self.consumer.assign_callback(A0)

    def lose(self) -> None:
        self.consumer.lose_callback()

    def commit(self, *tps: TopicPartition, identity: Identity | None = None) -> Callable[[], None]:
        """Order a commit at 5, as ``identity`` or as its identity then; :attr:`done` has the result."""

        def order() -> None:
            part = MemberCommit(self.member, identity or self.member.identity, dict.fromkeys(tps, 5))
            self.done.append(self.member.commit(part, dict.fromkeys(tps, OffsetNote("x"))))

        return order

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.reported]

    def doubts(self) -> list[bool]:
        """Of the reports of an uncertain membership: whether the broker confirmed it."""
        return [event.confirmed for event in self.reported if isinstance(event, ev.MemberFenced)]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_member_joins_under_its_names_and_reports_its_end(scene: Scene) -> None:
    scene.run(scene.leave)
    (settings,) = scene.environment.called("Consumer")
    assert (settings["client.id"], settings["group.instance.id"]) == ("c-3", "g.s.3")
    assert scene.environment.called("subscribe") == [("a",)]
    assert scene.ended == [ev.MemberEnded(slot=3, client=2)]
    assert scene.called_when_ended[-1] == "close"


def test_a_second_assignment_of_an_eager_member_reports_the_first_as_lost(scene: Scene) -> None:
    """The library reports nothing of rebalances that were completed while the thread was busy."""
    scene.run(scene.assign, lambda: scene.consumer.assign_callback(A1, generation=2), scene.leave)
    first, lost, second = scene.reported
    assert first == ev.Assigned(slot=3, client=2, partitions=(A0,), generation=1)
    assert lost == ev.Lost(slot=3, client=2, partitions=(A0,))
    assert second == ev.Assigned(slot=3, client=2, partitions=(A1,), generation=2)


def test_an_incremental_member_adds_assigned_partitions(scene: Scene) -> None:
    scene.make(COOPERATIVE)
    scene.run(scene.assign, lambda: scene.consumer.assign_callback(A1, generation=2), scene.leave)
    assert scene.kinds() == ["Assigned", "Assigned"]


def test_a_member_without_topics_reports_an_empty_assignment_and_does_not_join(scene: Scene) -> None:
    scene.make(EAGER, replace(JOIN, topics=()))
    scene.run(lambda: None, scene.leave)
    assert scene.reported == [ev.Assigned(slot=3, client=2, partitions=(), generation=-1)]
    assert "subscribe" not in scene.environment.called()


def test_a_member_of_a_classic_group_has_no_assignment_before_its_callback(scene: Scene) -> None:
    """Its generation comes with the answer to its join; the leader may assign partitions much later, or never."""
    scene.make(COOPERATIVE)

    def join() -> None:
        scene.consumer.metadata = metadata(5)

    scene.run(join, *[lambda: None] * 100, lambda: scene.consumer.assign_callback(generation=5), scene.leave)
    assert scene.reported == [ev.Assigned(slot=3, client=2, partitions=(), generation=5)]


def test_a_kip_848_member_without_a_callback_has_no_partitions_after_a_while(scene: Scene) -> None:
    """Its epoch comes before its partitions: their names take another request."""
    scene.make(KIP_848)
    reported_ms: list[int] = []
    began_ms = scene.environment.clock_ms

    def join(epoch: int) -> Callable[[], None]:
        return lambda: setattr(scene.consumer, "metadata", metadata(epoch))

    def look() -> None:
        reported_ms.extend([scene.environment.clock_ms - began_ms] * (len(scene.reported) > len(reported_ms)))

    scene.run(join(5), *[look] * 15, join(6), *[look] * 30, scene.leave)
    assert scene.reported == [ev.Assigned(slot=3, client=2, partitions=(), generation=6)]
    assert reported_ms[0] >= 1_600 + EMPTY_AFTER_MS


def test_a_member_that_lost_a_deleted_topic_keeps_its_other_partitions(scene: Scene) -> None:
    """Only the partitions of the topic are reported lost to an incremental member; the others are committed as
    before."""
    scene.make(COOPERATIVE)
    scene.run(
        scene.assign,
        lambda: scene.consumer.assign_callback(A1, generation=2),
        lambda: scene.consumer.lose_callback(A1),
        lambda: scene.reported.append(ev.Tick()) if scene.member.partitions == (A0,) else None,
        scene.leave,
    )
    assert scene.reported[-1] == ev.Tick()


# --- an uncertain membership ----------------------------------------------------------------------------------------


def test_G6_a_member_that_lost_its_membership_does_not_rejoin_by_itself(scene: Scene) -> None:
    scene.run(scene.assign, scene.lose)
    assert scene.doubts() == [False]
    assert scene.kinds() == ["Assigned", "Lost", "MemberFenced"]
    assert scene.reported[1] == ev.Lost(slot=3, client=2, partitions=())
    assert scene.environment.called()[-4:] == ["unsubscribe", "unassign", "poll", "close"]


def test_a_closing_member_does_not_report_an_uncertain_membership(scene: Scene) -> None:
    def closed_while_it_polls() -> None:
        scene.member._leaving = ev.Leave(slot=3, leave=False)
        scene.lose()

    scene.run(scene.assign, closed_while_it_polls)
    assert scene.doubts() == []


@pytest.mark.parametrize("settings", [EAGER, COOPERATIVE])
def test_G6_a_stalled_member_does_not_poll_again(scene: Scene, settings: dict[str, str]) -> None:
    """No callback reports the end of its session to an incremental member without partitions."""
    scene.make(settings)
    scene.run(scene.assign, scene.freeze)
    assert (scene.doubts(), scene.kinds()) == ([False], ["Assigned", "MemberFenced"])


def test_G6_a_member_of_a_machine_that_was_suspended_does_not_poll_again(scene: Scene) -> None:
    """The monotonic clock of Linux stops meanwhile; the member's session does not."""

    def suspend() -> None:
        scene.environment.suspended_ms += SESSION_MS

    scene.run(scene.assign, suspend)
    assert (scene.doubts(), scene.kinds()) == ([False], ["Assigned", "MemberFenced"])


def test_a_stall_between_two_polls_is_detected(scene: Scene) -> None:

    def report(event: ev.Event) -> None:
        scene.reported.append(event)
        scene.freeze()

    scene.member._report = report
    scene.run(scene.assign)
    assert scene.doubts() == [False]


@pytest.mark.parametrize("fails", [False, True])
def test_a_long_commit_is_a_stall_only_if_it_fails(scene: Scene, fails: bool) -> None:
    """A coordinator that answers late has accepted the member."""

    def slow(*_: object) -> None:
        scene.freeze()
        if fails:
            raise GroupError("no answer")

    scene.run(
        scene.assign,
        lambda: setattr(scene.member._consumer, "commit", slow),
        scene.commit(A0),
        *([] if fails else [scene.leave]),
    )
    assert scene.doubts() == ([False] if fails else [])
    assert (scene.done[0].exception() is None) != fails


def test_a_short_pause_is_no_stall(scene: Scene) -> None:
    scene.run(scene.assign, lambda: scene.freeze(SESSION_MS // 2 - 200), scene.leave)
    assert scene.doubts() == []


def test_a_stalled_dynamic_member_continues(scene: Scene) -> None:
    scene.make(join=ev.Join(slot=3, client=2, topics=("a",)))
    scene.run(scene.assign, scene.freeze, scene.lose, scene.leave)
    assert scene.kinds() == ["Assigned", "Lost"]


# --- holding a revocation -------------------------------------------------------------------------------------------


def revoke(scene: Scene) -> Callable[[], None]:
    return lambda: scene.consumer.revoke_callback(A0)


def test_a_revocation_is_held_until_it_is_released(scene: Scene) -> None:
    waits = [lambda: None] * (SESSION_MS // 250 + 1)
    scene.run(scene.assign, revoke(scene), *waits, scene.release, scene.leave)
    assert scene.kinds() == ["Assigned", "Revoking"]


@pytest.mark.parametrize("settings", [EAGER, COOPERATIVE])
def test_a_member_stalled_in_a_hold_ends_before_the_library_rejoins(scene: Scene, settings: dict[str, str]) -> None:
    scene.make(settings)
    scene.run(scene.assign, revoke(scene), scene.freeze)
    assert (scene.doubts(), scene.kinds()) == ([False], ["Assigned", "Revoking", "MemberFenced"])
    unassign = "unassign" if settings is EAGER else "incremental_unassign"
    assert scene.environment.called()[-4:] == ["unsubscribe", unassign, "poll", "close"]


def test_a_release_after_a_stall_does_not_hide_the_stall(scene: Scene) -> None:

    def thaw_and_release() -> None:
        scene.freeze()
        scene.release()

    scene.run(scene.assign, revoke(scene), thaw_and_release)
    assert scene.kinds()[-1] == "MemberFenced"


def test_a_failed_unassign_does_not_hide_the_reason(scene: Scene) -> None:
    scene.environment.will("unassign", refusal(KafkaError._FATAL))
    scene.run(scene.assign, revoke(scene), scene.freeze)
    assert scene.kinds()[-1] == "MemberFenced"


# --- how members end ------------------------------------------------------------------------------------------------


class Message:
    def __init__(self, code: int, text: str, topic: str | None = None) -> None:
        self._error, self._topic = KafkaError(code, text), topic

    def error(self) -> KafkaError:
        return self._error

    def topic(self) -> str | None:
        return self._topic


STILL_TAKEN = "Broker: The instance ID is still used by another member in the consumer group"
NO_ASSIGNOR = "Broker: The assignor or its version range is not supported by the consumer group"
KIP_848 = {"bootstrap.servers": "b", "group.id": "g", "group.protocol": "consumer"}


@pytest.mark.parametrize(
    ("call", "answer", "expected"),
    [
        ("poll", Message(KafkaError._FATAL, "instance id was fenced"), "MemberFenced"),
        ("poll", Message(KafkaError._FATAL, STILL_TAKEN), "MemberFailed"),  # maybe another driver's: it is not taken
        ("poll", Message(KafkaError.INVALID_SESSION_TIMEOUT, "no"), "InternalFailure"),
        ("poll", Message(KafkaError._FATAL, NO_ASSIGNOR), "InternalFailure"),
        ("Consumer", refusal(KafkaError._INVALID_ARG), "MemberFailed"),
    ],
)
def test_events_of_a_member_that_ends(scene: Scene, call: str, answer: Any, expected: str) -> None:
    scene.make(KIP_848)
    scene.environment.will(call, answer)
    scene.run(*[lambda: None] * (call == "poll"))
    assert scene.kinds() == [expected]
    assert scene.doubts() == [True] * (expected == "MemberFenced")
    assert len(scene.environment.called("Consumer")) == 1


NOT_PERMITTED = "Fatal consumer error: Broker: Group authorization failed"


@pytest.mark.parametrize("refusals", [1, 2])
def test_a_refusal_that_ends_the_consumer_counts_when_it_is_repeated(scene: Scene, refusals: int) -> None:
    scene.make(KIP_848)
    scene.environment.will("poll", *[Message(KafkaError._FATAL, NOT_PERMITTED)] * refusals)
    scene.run(*[lambda: None] * refusals, *([scene.assign, scene.leave] if refusals == 1 else []))
    assert len(scene.environment.called("Consumer")) == 2
    if refusals == 1:
        assert scene.kinds() == ["Assigned"]
    else:
        (failure,) = scene.reported
        assert isinstance(failure, ev.InternalFailure) and isinstance(failure.error, AccessDenied)
        assert "Read and Describe on the group 'g'" in str(failure.error)


def test_a_member_that_is_refused_later_is_replaced_first(scene: Scene) -> None:
    """Its partitions are lost with its consumer."""
    scene.make(KIP_848)
    scene.environment.will("poll", None, Message(KafkaError._FATAL, NOT_PERMITTED))
    scene.run(scene.assign, lambda: None)
    assert scene.kinds() == ["Assigned", "MemberFailed"]


def test_a_member_that_was_refused_once_is_replaced_at_a_later_refusal(scene: Scene) -> None:
    """It was in the group in between: the first refusal is no part of the second."""
    scene.make(KIP_848)
    refused = Message(KafkaError._FATAL, NOT_PERMITTED)
    scene.environment.will("poll", refused, None, refused)
    scene.run(lambda: None, scene.assign, lambda: None)
    assert scene.kinds() == ["Assigned", "MemberFailed"]


def metadata_of(topic: str, code: int | None = None) -> Any:
    error = None if code is None else KafkaError(code)
    return SimpleNamespace(topics={topic: SimpleNamespace(error=error)})


def refused_topics(*topics: str) -> list[Message]:
    """librdkafka reports each topic that one Metadata response refuses, and reports a lasting refusal once."""
    return [Message(KafkaError.TOPIC_AUTHORIZATION_FAILED, "Subscribed topic not available", topic) for topic in topics]


def test_G10_topics_that_were_refused_for_a_moment_do_not_end_the_member(scene: Scene) -> None:
    scene.make(join=replace(JOIN, topics=("a", "b")))
    scene.environment.will("poll", None, *refused_topics("a", "b"))
    scene.environment.will("list_topics", refusal(KafkaError._TRANSPORT), metadata_of("b"), metadata_of("a"))
    scene.run(scene.assign, *[lambda: None] * 60, scene.leave)
    assert scene.environment.called("list_topics") == ["a", "b", "a"], "one that is not answered is requested again"
    assert scene.kinds() == ["Assigned"]


def test_a_topic_that_is_refused_again_when_its_metadata_is_requested_ends_the_member(scene: Scene) -> None:
    scene.environment.will("poll", None, *refused_topics("a"))
    scene.environment.will("list_topics", metadata_of("a", KafkaError.TOPIC_AUTHORIZATION_FAILED))
    began_ms = scene.environment.clock_ms
    scene.run(scene.assign, *[lambda: None] * int(CONFIRM_S / POLL_S + 1))
    assert scene.environment.clock_ms - began_ms >= CONFIRM_S * 1000
    failure = scene.reported[-1]
    assert isinstance(failure, ev.InternalFailure) and isinstance(failure.error, AccessDenied)
    assert "Describe on the topic 'a'" in str(failure.error)


def test_a_refused_topic_that_is_not_subscribed_any_more_is_not_confirmed(scene: Scene) -> None:
    scene.make(join=replace(JOIN, topics=("a", "b")))
    scene.environment.will("poll", None, *refused_topics("b"))
    subscribe = ev.Subscribe(slot=3, topics=("a",))
    scene.run(scene.assign, lambda: scene.member.submit(subscribe), *[lambda: None] * 20, scene.leave)
    assert scene.environment.called("list_topics") == []


@pytest.mark.parametrize(
    ("after_ms", "fails"),
    [(0, False), (int(CONFIRM_S * 1000), True), (REFUSAL_MS_MAX, False)],
    ids=["at once", "after the grace period", "much later"],
)
def test_a_refused_group_counts_when_it_is_refused_again_soon(scene: Scene, after_ms: int, fails: bool) -> None:
    refused = Message(KafkaError.GROUP_AUTHORIZATION_FAILED, "no")
    scene.environment.will("poll", None, refused, refused)

    def later() -> None:
        scene.environment.suspended_ms -= after_ms  # the thread itself was not stalled
        scene.environment.clock_ms += after_ms

    scene.run(scene.assign, lambda: None, later, *([] if fails else [scene.leave]))
    assert scene.kinds() == ["Assigned", *["InternalFailure"] * fails]


def test_a_refused_member_that_must_leave_does_not_join_again(scene: Scene) -> None:
    scene.make(KIP_848)
    scene.environment.will("poll", Message(KafkaError._FATAL, NOT_PERMITTED))
    scene.run(scene.leave)
    assert len(scene.environment.called("Consumer")) == 1


def test_a_refused_membership_is_taken_over_from_a_vanished_member(scene: Scene) -> None:
    scene.make(KIP_848, replace(JOIN, takes_over=True))
    scene.environment.will("poll", Message(KafkaError._FATAL, STILL_TAKEN))
    scene.run(
        lambda: None,  # refused
        lambda: scene.consumer.assign_callback(A0, member="taking"),
        lambda: scene.consumer.assign_callback(A0, generation=7, member="m"),
        scene.leave,
    )
    protocols = [settings["group.protocol"] for settings in scene.environment.called("Consumer")]
    assert protocols == ["consumer", "classic", "consumer"]
    assert {settings["group.instance.id"] for settings in scene.environment.called("Consumer")} == {"g.s.3"}
    assert scene.reported == [ev.Assigned(slot=3, client=2, partitions=(A0,), generation=7)], "once, as who stays"
    assert scene.environment.called("close", "Consumer", "unsubscribe").count("unsubscribe") == 0, "it would leave"


def test_a_membership_that_cannot_be_taken_over_fails_the_member(scene: Scene) -> None:
    scene.make(KIP_848, replace(JOIN, takes_over=True))
    scene.environment.will("poll", Message(KafkaError._FATAL, STILL_TAKEN))
    scene.run(lambda: None, lambda: scene.freeze(TAKE_OVER_MS_MAX))
    assert scene.kinds() == ["MemberFailed"]
    assert "was not taken" in str(scene.reported[-1])


def test_a_thread_that_cannot_be_started_is_reported(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(name: str, run: object, *, died: Callable[[BaseException], None]) -> None:
        died(RuntimeError("can't start new thread"))

    monkeypatch.setattr(scene.environment, "spawn", none_left)
    scene.member.start()
    assert scene.kinds() == ["InternalFailure"]
    assert scene.ended == [ev.MemberEnded(slot=3, client=2)]
    assert scene.member.wait_ended(0)


def test_a_thread_that_dies_while_closing_is_reported() -> None:
    """Also an unexpected error: here, closing the consumer fails."""
    reported: list[ev.Event] = []
    hand = ManualEnvironment()
    hand.will("subscribe", refusal(KafkaError._INVALID_ARG))
    hand.will("close", ValueError("odd"))

    class Threads(Environment):
        def consumer(self, settings: Any) -> Any:
            return hand.consumer(settings)

    member = Member(JOIN, EAGER, environment=Threads(), own_member_ids=deque(), report=reported.append)
    member.start()
    assert member.wait_ended(600)
    assert [type(event) for event in reported] == [ev.MemberFailed, ev.MemberEnded, ev.InternalFailure]


# --- commits as the member ------------------------------------------------------------------------------------------


def test_a_member_commits_only_with_the_identity_of_the_order(scene: Scene) -> None:
    scene.run(
        lambda: scene.consumer.assign_callback(A0, A1),
        scene.commit(A0, A1, identity=Identity(1, "m", metadata(1))),
        scene.commit(A0, A1, identity=Identity(2, "m", metadata(2))),
        scene.leave,
    )
    assert scene.done[0].result(0) is None
    assert scene.environment.called("commit") == [[("a", 0, 5, "x"), ("a", 1, 5, "x")]]
    with pytest.raises(MemberStale, match="rejoined"):
        scene.done[1].result(0)


def test_G3_a_member_does_not_commit_partitions_released_since_the_order(scene: Scene) -> None:
    """A release after the hold budget; a KIP-848 member keeps its epoch, since it must revoke more at once."""
    scene.make(COOPERATIVE | {"group.protocol": "consumer"})

    def release_then_order() -> None:
        scene.release()
        scene.commit(A0, A1)()
        scene.commit(A1)()

    scene.run(
        lambda: scene.consumer.assign_callback(A0, A1),
        lambda: scene.consumer.revoke_callback(A0),
        release_then_order,
        scene.leave,
    )
    with pytest.raises(MemberStale, match="released partitions"):
        scene.done[0].result(0)
    assert scene.done[1].result(0) is None
    assert scene.environment.called("commit") == [[("a", 1, 5, "x")]]


def test_a_commit_that_nobody_waits_for_any_more_is_not_executed_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member's thread was busy. Meanwhile a transaction may have committed further offsets."""
    monkeypatch.setattr(offset_commits, "MEMBER_COMMIT_S_MAX", 0)

    def order() -> None:
        part = MemberCommit(scene.member, scene.member.identity, {A0: 5})
        with pytest.raises(CommitFailed, match="did not commit"):
            offset_commits._commit_by_members([part], {A0: OffsetNote("x")})

    scene.run(scene.assign, order, scene.leave)
    assert scene.environment.called("commit") == []


def test_a_member_unknown_to_the_broker_is_reported_as_expelled(scene: Scene) -> None:
    scene.environment.will("commit", refusal(KafkaError.UNKNOWN_MEMBER_ID))
    scene.run(scene.assign, scene.commit(A0), scene.leave)
    with pytest.raises(MemberStale) as stale:
        scene.done[0].result(0)
    assert stale.value.expelled


def test_a_commit_after_the_end_of_the_member_fails(scene: Scene) -> None:
    def leave_then_order() -> None:
        scene.leave()
        scene.member._consumer.close = lambda leave: scene.commit()()  # type: ignore[union-attr, method-assign]

    scene.run(leave_then_order)
    with pytest.raises(Exception, match="ended"):
        scene.done[0].result(0)
