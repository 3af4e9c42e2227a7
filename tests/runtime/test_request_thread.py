"""The request thread in a manual environment: its requests and commits, their order, and its robustness."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaPartition
from manual_environment import A0, A1, WALL_MS, ManualEnvironment, ManualProducer, metadata, refusal

from spark_group_source.errors import (
    AccessDenied,
    BrokerUnavailable,
    CommitFailed,
    InvariantBroken,
    OptionError,
)
from spark_group_source.kafka.admin import Admin
from spark_group_source.kafka.translation import CommittedOffset, MemberStale
from spark_group_source.members import Member
from spark_group_source.model import LATEST, Identity, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import identifiers
from spark_group_source.runtime.offset_commits import COMMIT_DENIED_MS, PROOF_MS_MAX, TRANSACTION_RETRY_MS, commit_order
from spark_group_source.runtime.request_thread import RequestThread, parse_committed

TIMED_OUT = refusal(KafkaError._TIMED_OUT, retriable=True)
DENIED = refusal(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, fatal=True)
FENCED = refusal(KafkaError._FENCED, fatal=True)
STALE = refusal(KafkaError.ILLEGAL_GENERATION, abort=True)
UNKNOWN = refusal(KafkaError.UNKNOWN_MEMBER_ID, abort=True)
B0 = TopicPartition("b", 0)
REFRESH_MS = "kafka.topic.metadata.refresh.interval.ms"


class FakeMember:
    """A member without a thread: its identity, its commands, and the result of its own commits."""

    def __init__(self, slot: int, environment: ManualEnvironment) -> None:
        self.slot, self.client, self.environment = slot, 7, environment
        self.agent = ""
        self.static = True
        self.identity: Identity | None = Identity(slot + 1, "m", metadata(slot + 1))
        self.partitions: tuple[TopicPartition, ...] = (A0, A1, B0)
        self.commands: list[Any] = []
        self.committed: list[Any] = []
        self.refusal: Exception | None = None

    def submit(self, command: Any) -> None:
        self.commands.append(command)

    def commit(self, part: Any, notes: Mapping[TopicPartition, str]) -> Any:
        done = self.environment.future()
        if self.refusal is None:
            self.committed.append((dict(part.offsets), {tp: notes[tp] for tp in part.offsets}))
            done.set_result(None)
        elif not isinstance(self.refusal, TimeoutError):
            done.set_exception(self.refusal)
        return done


class Scene:
    """A request thread whose consumer returns whatever was committed."""

    def __init__(self, **options: str) -> None:
        self.environment = ManualEnvironment()
        self.handled: list[ev.Event] = []
        self.transactions: list[bool] = []
        """The values of TransactionsChecked."""
        self.may_find_topics = True
        self.topics: list[Mapping[str, int] | Exception] = []
        """What lists of the subscribed topics return before they return both."""
        self.members = {slot: FakeMember(slot, self.environment) for slot in range(3)}
        given = {"kafka.bootstrap.servers": "b", "kafka.group.id": "g", "subscribe": "a,b", REFRESH_MS: "-1"} | options
        if "subscribePattern" in given:
            del given["subscribe"]
        self.options = parsed = Options.parse(given)
        self.thread = RequestThread(
            parsed,
            Admin(parsed.admin_settings(), environment=self.environment, retries=0),
            environment=self.environment,
            topics=self._topics,
            may_find_topics=lambda: self.may_find_topics,
            handle=self._handle,
        )

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.TransactionsChecked):
            self.transactions.append(event.allowed)
        else:
            self.handled.append(event)

    def _topics(self) -> Mapping[str, int]:
        found = self.topics.pop(0) if self.topics else {"a": 2, "b": 1}
        if isinstance(found, Exception):
            raise found
        return found

    def _member(self, slot: int) -> Member | None:
        found: Any = self.members.get(slot)
        return found  # type: ignore[no-any-return]

    def run(self, *script: Callable[[], object]) -> None:
        self.thread.start("s")
        self.environment.run(*script, self.thread.stop)

    def ordered(self, order: Any) -> Any:
        """Capture the members of a commit, as the coordinator does."""
        return commit_order(order, self._member) if isinstance(order, ev.CommitOffsets) else order

    def order(self, *orders: Any) -> Callable[[], None]:
        def give() -> None:
            for order in orders:
                self.thread.submit(self.ordered(order))

        return give

    def order_after(self, ms: int, order: Any) -> Callable[[], None]:
        """Submit the order when this much time has passed."""

        def give() -> None:
            self.environment.clock_ms += ms
            self.thread.submit(self.ordered(order))

        return give

    def shows(self, offsets: Mapping[TopicPartition, int]) -> None:
        self.environment.will(
            "committed", [KafkaPartition(tp.topic, tp.partition, at, "") for tp, at in offsets.items()]
        )

    def topics_there(self, **partitions: int) -> None:
        self.environment.will(
            "describe_topics", {n: SimpleNamespace(topic_id="i", partitions=range(c)) for n, c in partitions.items()}
        )


@pytest.fixture
def scene() -> Scene:
    return Scene()


def commit_command(slots: Mapping[TopicPartition, int] | None = None, **more: Any) -> ev.CommitOffsets:
    slots = {A0: 0, A1: 1} if slots is None else slots
    return ev.CommitOffsets(
        offsets={tp: 5 + slot for tp, slot in slots.items()}, slots=slots, stream="s", seq=4, **more
    )


FETCH = ev.FetchCommittedOffsets(partitions=(A0, A1, B0))

# --- before everything else -----------------------------------------------------------------------------------------


def test_an_older_driver_is_fenced_before_the_first_lookup(scene: Scene) -> None:
    scene.thread.submit(FETCH)
    scene.run()
    assert scene.environment.called("init_transactions", "committed") == ["init_transactions", "committed"]


def test_taking_over_the_transactional_id_is_retried(scene: Scene) -> None:
    scene.environment.will("init_transactions", TIMED_OUT, TIMED_OUT)
    scene.shows({})
    scene.run(*[lambda: None] * 30)
    assert len(scene.environment.called("init_transactions")) == 3  # one every 5 s, and none after it succeeded
    assert scene.handled == []


# --- lookups --------------------------------------------------------------------------------------------------------


def test_a_lookup_returns_its_partitions_and_parsed_notes(scene: Scene) -> None:
    found = KafkaPartition("a", 0, 9, "spark-group:s:3:2:followed")
    scene.environment.will("committed", [found, KafkaPartition("a", 1, -1001)])
    scene.run(scene.order(FETCH))
    assert scene.handled == [
        ev.CommittedOffsetsRead(
            offsets={A0: ev.Committed(offset=9, stream="s", seq=3, reset_number=2, followed=True), A1: None},
            requested=(A0, A1, B0),
        )
    ]


@pytest.mark.parametrize(("stamp_ms", "at_ms"), [(WALL_MS - 5_000, -5_000), (WALL_MS + 86_400_000, 0)])
def test_a_commit_in_the_future_counts_as_one_of_now(stamp_ms: int, at_ms: int) -> None:
    """The clock of the host that committed was ahead: the offset would not be renewed for so long."""
    note = identifiers.note_text(identifiers.Note("s", 3, at_ms=stamp_ms))
    parsed = parse_committed(CommittedOffset(9, note), wall_ms=WALL_MS, now_ms=1_000)
    assert parsed is not None and parsed.at_ms == 1_000 + at_ms


def test_requests_go_on_between_long_attempts_to_take_over_the_transactional_id(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt blocks for longer than the interval between two, while another coordinator answers lookups."""

    def fail(producer: ManualProducer, _timeout: float) -> None:
        producer.environment.clock_ms += 10_000
        producer.environment.answer("init_transactions")

    monkeypatch.setattr(ManualProducer, "init_transactions", fail)
    scene.environment.will("init_transactions", TIMED_OUT, TIMED_OUT)
    scene.run(scene.order(FETCH, FETCH, FETCH))
    assert scene.environment.called("init_transactions", "committed") == ["init_transactions", *["committed"] * 3]


@pytest.mark.parametrize(("level", "requested"), [("read_committed", "READ_COMMITTED"), ("read_uncommitted",) * 2])
def test_starting_positions_are_resolved_at_the_isolation_level_of_the_query(level: str, requested: str) -> None:
    scene = Scene(**{"kafka.isolation.level": level})
    scene.environment.will("list_offsets", {A0: SimpleNamespace(offset=8, leader_epoch=2)})
    scene.run(scene.order(ev.ResolveStarts(starts={A0: LATEST, A1: LATEST})))
    assert scene.handled == [ev.StartsResolved(offsets={A0: 8}, leader_epochs={A0: 2}, requested=(A0, A1))]
    assert scene.environment.called("isolation") == [requested.upper()]


def test_an_unanswered_lookup_is_reported_and_a_refused_one_fails_the_run(scene: Scene) -> None:
    scene.environment.will("committed", TIMED_OUT, *[refusal(KafkaError.GROUP_AUTHORIZATION_FAILED)] * 2)
    scene.run(scene.order(FETCH), scene.order(FETCH))
    failed, broken = scene.handled
    assert isinstance(failed, ev.LookupFailed) and failed.partitions == FETCH.partitions
    assert isinstance(broken, ev.InternalFailure) and isinstance(broken.error, AccessDenied)


# --- errors ---------------------------------------------------------------------------------------------------------


def listing(*topics: Mapping[str, int] | Exception, **subscription: str) -> Scene:
    """A request thread that lists the subscribed topics every 500 ms, with these results."""
    scene = Scene(**subscription, **{REFRESH_MS: "500"})
    scene.topics = list(topics)
    return scene


def test_an_unexpected_error_of_a_due_task_fails_the_run_but_not_the_thread() -> None:
    scene = listing(ValueError("odd"))
    scene.run(lambda: None, lambda: None, scene.order(ev.CheckReplaced(slot=1)))
    broken, answer = (event for event in scene.handled if not isinstance(event, ev.TopicsChanged))
    assert (
        isinstance(broken, ev.InternalFailure)
        and isinstance(broken.error, InvariantBroken)
        and "odd" in str(broken.error)
    )
    assert answer == ev.NotReplaced(slot=1)


def test_an_unexpected_error_of_a_request_fails_the_run_but_not_the_thread(scene: Scene) -> None:
    scene.environment.will("committed", ValueError("odd"))
    scene.run(scene.order(FETCH), scene.order(ev.CheckReplaced(slot=1)))
    assert [type(event) for event in scene.handled] == [ev.InternalFailure, ev.NotReplaced]


def test_the_death_of_the_request_thread_fails_the_run(scene: Scene) -> None:
    scene.thread._died(MemoryError())
    (broken,) = scene.handled
    assert isinstance(broken, ev.InternalFailure)


@pytest.mark.parametrize("client", ["offsets", "committer", "admin"])
def test_idle_clients_are_served(scene: Scene, client: str) -> None:
    """The library reports lost connections again and again, and keeps each report until somebody takes it."""
    environment = scene.environment

    def report() -> None:
        clients: dict[str, Any] = {"offsets": environment.consumers[-1], "committer": environment.producers[-1]}
        environment.reporting = clients.get(client, environment.admins[-1])
        environment.will("error", KafkaError(KafkaError._ALL_BROKERS_DOWN, "down"))

    scene.thread.submit(ev.FetchCommittedOffsets(partitions=(A0,)))
    scene.run(report, lambda: None)
    assert not environment.answers["error"]


@pytest.mark.parametrize("subscription", [{"subscribe": "a,b"}, {"subscribePattern": "a|b"}])
def test_topics_are_listed_periodically_and_failures_are_retried(subscription: dict[str, str]) -> None:
    scene = listing(BrokerUnavailable("no"), **subscription)
    scene.run(lambda: None, lambda: None)
    assert scene.handled == [ev.TopicsChanged(topics=("a", "b"))]


def test_topics_are_listed_periodically_also_when_the_queue_is_never_empty() -> None:
    scene = listing()
    scene.run(scene.order_after(500, ev.CheckReplaced(slot=1)))
    assert ev.TopicsChanged(topics=("a", "b")) in scene.handled


def test_topics_are_not_listed_again_while_all_are_known() -> None:
    """Members find new partitions of known topics by themselves."""
    scene = listing()
    scene.may_find_topics = False
    scene.run(scene.order_after(86_400_000, ev.CheckReplaced(slot=1)))
    assert scene.handled == [ev.NotReplaced(slot=1)]


@pytest.mark.parametrize("off", ["-1", "0"])
def test_topics_are_not_listed_again_if_the_refresh_is_turned_off(off: str) -> None:
    """librdkafka refreshes nothing then."""
    scene = Scene(**{REFRESH_MS: off})
    scene.run(scene.order_after(86_400_000, ev.CheckReplaced(slot=1)))
    assert scene.handled == [ev.NotReplaced(slot=1)]
    assert scene.options.member_settings()[REFRESH_MS.removeprefix("kafka.")] == off


# --- replaced runs --------------------------------------------------------------------------------------------------


NO_ANSWER = refusal(KafkaError._TIMED_OUT, abort=True)


@pytest.mark.parametrize(
    ("call", "answer", "expected"),
    [
        (None, None, ev.NotReplaced),
        ("send_offsets", FENCED, ev.Replaced),
        ("send_offsets", NO_ANSWER, ev.ReplacedUnclear),
        ("init_transactions", TIMED_OUT, ev.ReplacedUnclear),
    ],
    ids=["it has its id", "its id is another's", "no answer", "it has no id, and the check does not take it over"],
)
def test_check_whether_a_run_was_replaced(
    scene: Scene, call: str | None, answer: Exception | None, expected: type
) -> None:
    if call is not None:
        scene.environment.will(call, answer)
    scene.run(scene.order(ev.CheckReplaced(slot=1)))
    (event,) = scene.handled
    assert type(event) is expected and getattr(event, "slot", 1) == 1
    assert len(scene.environment.called("init_transactions")) == 1
    if call is None:
        assert scene.environment.called("send_offsets") == [(-1, {A0: (0, None, None)})]


def test_without_transactions_another_client_counts_as_a_newer_driver(scene: Scene) -> None:
    scene.environment.will("init_transactions", DENIED, DENIED)
    scene.shows({A0: 5, A1: 6})
    question = ev.CheckReplaced(slot=1)
    only_possible = ev.CheckReplaced(slot=2, confirmed=False)
    scene.run(*(scene.order(order) for order in (question, commit_command(), question, only_possible)))
    before, done, after, joins_again = scene.handled
    assert isinstance(before, ev.ReplacedUnclear)
    assert isinstance(done, ev.OffsetsCommitted)
    both = "another client has the instance id of slot 1, and transactions are not allowed here"
    assert after == ev.Replaced(reason=both), "it cannot be found out, so this run stops"
    assert joins_again == ev.NotReplaced(slot=2), "no other member was seen in its place"


def member_at(instance: str, member: str) -> Any:
    nothing = SimpleNamespace(topic_partitions=[])
    return SimpleNamespace(member_id=member, client_id="c", group_instance_id=instance, host="/h", assignment=nothing)


def group_of(*members: Any) -> dict[str, Any]:
    """The group as a broker describes it."""
    found = SimpleNamespace(
        state=SimpleNamespace(name="STABLE"),
        type=SimpleNamespace(name="CLASSIC"),
        partition_assignor="range",
        is_simple_consumer_group=False,
        coordinator=SimpleNamespace(id=1, host="b", port=9092),
        members=list(members),
    )
    return {"g": found}


@pytest.fixture
def broken(scene: Scene) -> Scene:
    """The first commit makes the producer fail for good."""
    scene.environment.will("commit_transaction", refusal(KafkaError.INVALID_TXN_STATE, fatal=True))
    scene.topics_there(a=2)
    return scene


@pytest.mark.parametrize(
    ("instance", "member", "answer"),
    [
        ("g.s.0", "mine", ev.NotReplaced),
        ("g.s.0", "another", ev.Replaced),
        ("g.t.0", "another", ev.NotReplaced),  # of another stream
        ("", "another", ev.NotReplaced),
    ],
)
def test_G6_without_its_id_a_run_checks_its_static_memberships(
    broken: Scene, instance: str, member: str, answer: type
) -> None:
    scene = broken
    scene.thread.own_member_ids.append("mine")
    scene.environment.will("describe_consumer_groups", *[group_of(member_at(instance, member))] * 3)
    question, options = ev.CheckReplaced(slot=0), scene.options
    within = scene.order_after(options.max_poll_interval_ms + options.session_timeout_ms - 10_000, question)
    scene.run(scene.order(commit_command()), scene.order(question), within, scene.order_after(20_000, question))
    failed, first, second, third = (type(event) for event in scene.handled)
    assert failed is ev.OffsetCommitFailed
    assert first is second is (ev.NotReplaced if answer is ev.NotReplaced else ev.ReplacedUnclear)
    assert third is answer
    assert len(scene.environment.producers) == 1


@pytest.mark.proves("G6", level="core")
def test_G6_the_time_of_another_member_begins_anew_when_it_comes_back(broken: Scene) -> None:
    other, nobody = group_of(member_at("g.s.0", "another")), group_of()
    broken.environment.will("describe_consumer_groups", other, nobody, other)
    question, options = ev.CheckReplaced(slot=0), broken.options
    late = broken.order_after(options.max_poll_interval_ms + options.session_timeout_ms + 10_000, question)
    broken.run(broken.order(commit_command()), broken.order(question), broken.order(question), late)
    assert [type(event) for event in broken.handled[1:]] == [ev.ReplacedUnclear, ev.NotReplaced, ev.ReplacedUnclear]


@pytest.mark.parametrize("static", [True, False])
def test_G6_the_id_is_regained_after_a_commit_by_static_members(broken: Scene, static: bool) -> None:
    """Dynamic members prove nothing: a newer run has members beside those of a frozen process, and both may commit the
    offsets of their partitions."""
    broken.thread.own_member_ids.append("m")
    broken.environment.will("describe_consumer_groups", group_of(member_at("g.s.0", "m")))
    for member in broken.members.values():
        member.static = static
    for _ in range(2):
        broken.shows({A0: 5, A1: 6})
    broken.run(*[broken.order(commit_command())] * 3)
    assert [type(event) for event in broken.handled] == [
        ev.OffsetCommitFailed,
        ev.OffsetsCommitted,
        ev.OffsetsCommitted,
    ]
    if static:
        assert [len(member.committed) for member in broken.members.values()] == [1, 1, 0]
    assert len(broken.environment.producers) == 1 + static


def test_G6_the_id_is_not_regained_when_another_client_has_a_membership_of_the_run(broken: Scene) -> None:
    """A process that was frozen may have taken back one of the memberships of its successor, and commits for it."""
    broken.environment.will("describe_consumer_groups", *[group_of(member_at("g.s.2", "another"))] * 2)
    for _ in range(2):
        broken.shows({A0: 5, A1: 6})
    broken.run(*[broken.order(commit_command())] * 3)
    assert [type(event) for event in broken.handled][1:] == [ev.OffsetsCommitted] * 2, "its members may commit"
    assert len(broken.environment.producers) == 1


@pytest.mark.proves("G6", level="core")
@pytest.mark.parametrize("agent", ["", "h1"])
def test_G6_the_id_is_not_regained_by_a_proof_from_before_the_process_was_frozen(broken: Scene, agent: str) -> None:
    """Another driver may have taken it meanwhile, and would be fenced."""

    def frozen_after_the_answer() -> dict[str, Any]:
        broken.environment.clock_ms += PROOF_MS_MAX + 1
        return group_of(member_at("g.s.0", "m"))

    broken.thread.own_member_ids.append("m")
    broken.environment.will("describe_consumer_groups", frozen_after_the_answer)
    for member in broken.members.values():
        member.agent = agent
    broken.shows({A0: 5, A1: 6})
    broken.run(*[broken.order(commit_command())] * 2)
    assert len(broken.environment.called("describe_consumer_groups")) == 1
    assert len(broken.environment.producers) == 1


def test_G6_the_id_is_not_regained_when_a_member_was_skipped(broken: Scene) -> None:
    """A newer driver with fewer members has only the membership of the first slot."""
    broken.members[0].refusal = MemberStale("fenced", expelled=True)
    for _ in range(2):
        broken.shows({A1: 6})
    broken.run(*[broken.order(commit_command())] * 3)
    assert len(broken.environment.producers) == 1


def test_transactions_are_used_again_when_they_are_allowed_again(scene: Scene) -> None:
    scene.environment.will("init_transactions", DENIED, DENIED)
    for _ in range(3):
        scene.shows({A0: 5, A1: 6})
    scene.run(
        scene.order(commit_command()),
        scene.order(commit_command()),
        scene.order_after(TRANSACTION_RETRY_MS, commit_command()),
    )
    assert [type(event) for event in scene.handled] == [ev.OffsetsCommitted] * 3
    assert [len(member.committed) for member in scene.members.values()] == [2, 2, 0]
    assert len(scene.environment.called("commit_transaction")) == 1
    assert scene.transactions == [False, True], "agents may host members again"


def test_the_first_transaction_that_is_allowed_after_refusals_is_reported(scene: Scene) -> None:
    """The id is not taken over again after two refusals: only a commit shows that it is allowed."""
    scene.environment.will("init_transactions", DENIED, DENIED)
    scene.shows({A0: 5, A1: 6})
    scene.run(*[lambda: None] * 12, scene.order(commit_command()))  # 6 s; the second attempt is after 5 s
    assert scene.handled == [ev.OffsetsCommitted(offsets={A0: 5, A1: 6})]
    assert scene.transactions == [False, True], "agents may host members again"


def test_a_single_refusal_of_transactions_counts_anew_after_one_was_allowed(scene: Scene) -> None:
    """A starting broker, or one with a new ACL, refuses for a moment."""
    scene.environment.will("init_transactions", DENIED)
    scene.environment.will("send_offsets", DENIED)
    scene.topics_there(a=2)
    scene.run(*[lambda: None] * 12, scene.order(commit_command()))  # 6 s; the id is taken over after 5 s
    assert [type(event) for event in scene.handled] == [ev.OffsetCommitFailed]
    assert not any(member.committed for member in scene.members.values())


def test_a_run_that_may_not_commit_at_all_fails_with_that_reason(scene: Scene) -> None:
    barred = refusal(KafkaError.GROUP_AUTHORIZATION_FAILED, abort=True)
    scene.environment.will("send_offsets", barred, barred, barred)
    scene.topics_there(a=2)
    scene.topics_there(a=2)
    scene.run(
        scene.order(commit_command()),
        scene.order(commit_command()),
        scene.order_after(COMMIT_DENIED_MS, commit_command()),
    )
    assert [type(event) for event in scene.handled] == [
        ev.OffsetCommitFailed,
        ev.OffsetCommitFailed,
        ev.InternalFailure,
    ]
    ended = scene.handled[-1]
    assert (
        isinstance(ended, ev.InternalFailure)
        and isinstance(ended.error, AccessDenied)
        and "on the group" in str(ended.error)
    )
    assert not any(member.committed for member in scene.members.values())


def test_without_an_existing_topic_replacement_is_unclear(scene: Scene) -> None:
    scene.topics = [{}, {"b": 3}]
    question = ev.CheckReplaced(slot=1)
    scene.run(scene.order(question), scene.order(question))
    assert [type(event) for event in scene.handled] == [ev.ReplacedUnclear, ev.NotReplaced]
    assert scene.environment.called("send_offsets") == [(-1, {B0: (0, None, None)})]


# --- offset commits -------------------------------------------------------------------------------------------------


def test_offsets_are_committed_with_notes_and_read_back(scene: Scene) -> None:
    scene.shows({A0: 5, A1: 6})
    scene.run(scene.order(commit_command(reset_number=2, followed=frozenset({A1}))))
    assert scene.handled == [ev.OffsetsCommitted(offsets={A0: 5, A1: 6})]
    assert scene.environment.called("send_offsets") == [
        (1, {A0: (5, "spark-group:s:4:2:at=7", None)}),
        (2, {A1: (6, "spark-group:s:4:2:followed:at=7", None)}),
    ]


def test_G2_a_closed_slot_does_not_delay_the_commits_of_the_others(scene: Scene) -> None:
    scene.members[1].identity = None
    del scene.members[2]
    scene.shows({A0: 5})
    scene.run(scene.order(commit_command({A0: 0, A1: 1, B0: 2})))
    (done,) = scene.handled
    assert isinstance(done, ev.OffsetsCommitted)
    assert (done.offsets, sorted(done.left_out)) == ({A0: 5}, [1, 2])


def test_offsets_of_a_stale_member_are_skipped_and_the_others_committed(scene: Scene) -> None:
    scene.environment.will("send_offsets", None, STALE)
    scene.shows({A0: 5, B0: 7})
    scene.run(scene.order(commit_command({A0: 0, A1: 1, B0: 2})))
    (done,) = scene.handled
    assert isinstance(done, ev.OffsetsCommitted)
    assert (done.offsets, list(done.left_out)) == ({A0: 5, B0: 7}, [1])
    assert scene.members[1].commands == []
    assert scene.environment.called("commit_transaction") == [None]


def test_an_expelled_member_is_replaced(scene: Scene) -> None:
    scene.environment.will("send_offsets", UNKNOWN)
    scene.shows({A1: 6})
    handled_before_leave: list[ev.Event] = []

    def submit(command: ev.Command) -> None:
        handled_before_leave.extend(scene.handled)
        scene.members[0].commands.append(command)

    scene.members[0].submit = submit  # type: ignore[method-assign]
    scene.run(scene.order(commit_command()))
    failed, done = scene.handled
    assert handled_before_leave == [failed], "the end of the member has no reason"
    assert isinstance(failed, ev.MemberFailed) and (failed.slot, failed.client) == (0, 7)
    assert isinstance(done, ev.OffsetsCommitted) and done.offsets == {A1: 6}
    assert scene.members[0].commands == [ev.Leave(slot=0, leave=False)]


def test_a_commit_without_any_valid_member_leaves_out_all_slots(scene: Scene) -> None:
    scene.environment.will("send_offsets", STALE, STALE)
    scene.run(scene.order(commit_command()))
    (done,) = scene.handled
    assert isinstance(done, ev.OffsetsCommitted) and not done.offsets and set(done.left_out) == {0, 1}
    assert scene.environment.called("commit_transaction") == []


@pytest.mark.parametrize("since", ["joined again", "gave it back"])
def test_G3_offsets_are_committed_for_members_and_partitions_as_of_the_order(scene: Scene, since: str) -> None:
    """A slot may have another member of the same name later, which does not own the partitions of the former one. And a
    KIP-848 member keeps its epoch when it releases partitions: the broker would accept their offsets and move them
    back."""
    scene.shows({A1: 6})

    def ordered_then_changed() -> None:
        scene.thread.submit(scene.ordered(commit_command()))
        if since == "joined again":
            scene.members[0].identity = Identity(9, "m", metadata(9))
        else:
            scene.members[0].partitions = (B0,)

    scene.run(ordered_then_changed)
    (done,) = scene.handled
    assert isinstance(done, ev.OffsetsCommitted) and (done.offsets, list(done.left_out)) == ({A1: 6}, [0])
    assert scene.environment.called("send_offsets") == [(2, {A1: (6, "spark-group:s:4:0:at=7", None)})]


def test_G3_partitions_released_while_an_older_commit_is_finished_are_not_committed(scene: Scene) -> None:
    scene.environment.will("commit_transaction", TIMED_OUT)
    scene.topics_there(a=2)
    scene.shows({A1: 6})

    def the_next_one() -> None:
        def answered_at_last(timeout: float) -> None:
            scene.members[0].partitions = (B0,)

        scene.environment.producers[-1].commit_transaction = answered_at_last  # type: ignore[method-assign]
        scene.thread.submit(scene.ordered(commit_command()))

    scene.run(scene.order(commit_command()), the_next_one)
    failed, done = scene.handled
    assert isinstance(failed, ev.OffsetCommitFailed)
    assert isinstance(done, ev.OffsetsCommitted) and (done.offsets, list(done.left_out)) == ({A1: 6}, [0])
    assert scene.environment.called("send_offsets")[2:] == [(2, {A1: (6, "spark-group:s:4:0:at=7", None)})]


def test_a_run_with_a_fenced_commit_was_replaced(scene: Scene) -> None:
    scene.environment.will("commit_transaction", FENCED)
    scene.run(scene.order(commit_command(), commit_command()))
    assert [type(event) for event in scene.handled] == [ev.Replaced, ev.Replaced]
    assert scene.environment.called("init_transactions") == [None]


def test_a_deleted_partition_does_not_delay_the_commits_of_the_others(scene: Scene) -> None:
    scene.environment.will("send_offsets", None, refusal(KafkaError.UNKNOWN_TOPIC_OR_PART, abort=True))
    scene.topics_there(a=1)
    scene.shows({A0: 5})
    scene.run(scene.order(commit_command()))
    assert scene.handled == [ev.OffsetsCommitted(offsets={A0: 5, A1: 6})]
    assert scene.environment.called("send_offsets")[2:] == [(1, {A0: (5, "spark-group:s:4:0:at=7", None)})]


def test_a_transaction_timeout_that_the_brokers_refuse_fails_the_run(scene: Scene) -> None:
    """Else no offset would ever be committed, and a bounded run would end as if the next start could commit them."""
    scene.environment.will("init_transactions", *[refusal(KafkaError.INVALID_TRANSACTION_TIMEOUT)] * 2)
    scene.run(scene.order(commit_command()))
    (broken,) = scene.handled
    assert isinstance(broken, ev.InternalFailure) and isinstance(broken.error, OptionError)
    assert "kafka.transaction.timeout.ms is 60000" in str(broken.error)


# --- members commit -------------------------------------------------------------------------------------------------


@pytest.fixture
def denied(scene: Scene) -> Scene:
    scene.environment.will("init_transactions", DENIED, DENIED)
    return scene


def test_without_transactions_each_member_commits_its_offsets(denied: Scene) -> None:
    denied.shows({A0: 5, A1: 6})
    denied.run(denied.order(commit_command()))
    assert denied.handled == [ev.OffsetsCommitted(offsets={A0: 5, A1: 6})]
    assert denied.members[1].committed == [({A1: 6}, {A1: ("spark-group:s:4:0:at=7", -1)})]


@pytest.mark.parametrize("expelled", [False, True])
def test_without_transactions_a_stale_member_is_skipped(denied: Scene, expelled: bool) -> None:
    denied.members[0].refusal = MemberStale("again", expelled=expelled)
    denied.shows({A1: 6})
    denied.run(denied.order(commit_command()))
    done = denied.handled[-1]
    assert isinstance(done, ev.OffsetsCommitted) and (done.offsets, done.left_out) == ({A1: 6}, {0: "again"})
    assert bool(denied.members[0].commands) == expelled


@pytest.mark.parametrize("why", [TimeoutError(), CommitFailed("no")])
def test_a_member_that_does_not_commit_in_time_fails_the_commit(denied: Scene, why: Exception) -> None:
    denied.members[0].refusal = why
    denied.topics_there(a=2)
    denied.run(denied.order(commit_command()), *[lambda: None] * isinstance(why, TimeoutError))
    (failed,) = denied.handled
    assert isinstance(failed, ev.OffsetCommitFailed)


# --- placed members -------------------------------------------------------------------------------------------------


def test_a_change_of_permitted_transactions_is_reported() -> None:
    scene = Scene()
    scene.run()
    assert scene.transactions == [True]
    refused = Scene()
    refused.environment.will("init_transactions", *[DENIED] * 9)
    refused.shows({A0: 5, A1: 6})
    for member in refused.members.values():
        member.partitions = (A0, A1)
    refused.run(refused.order(commit_command(), commit_command(), commit_command()))
    assert refused.transactions == [False]


def test_placed_members_do_not_commit_without_transactions() -> None:
    scene = Scene()
    scene.members[0].agent = "h1"
    scene.environment.will("init_transactions", *[DENIED] * 9)
    scene.topics_there(a=2)
    scene.run(scene.order(commit_command()))
    (failed,) = scene.handled
    assert isinstance(failed, ev.OffsetCommitFailed) and "they must return first" in failed.reason
    assert not scene.members[0].committed and not scene.members[1].committed


@pytest.mark.parametrize("others", [(), ("m",)], ids=["places are another's", "places are ours"])
@pytest.mark.parametrize("out", [False, True], ids=["all", "one is out"])
def test_G6_the_id_is_regained_when_the_group_has_all_placed_members(
    broken: Scene, others: tuple[str, ...], out: bool
) -> None:
    """A newer driver of the stream would have their memberships."""
    scene = broken
    scene.members[0].agent = scene.members[1].agent = "h1"
    scene.thread.own_member_ids.append("m")
    found = group_of(*(member_at("g.s.0", member) for member in others))
    scene.environment.will("describe_consumer_groups", *[found] * 3)
    for _ in range(2):
        scene.topics_there(a=2)
    scene.shows({A0: 5, A1: 6})

    def goes_out() -> None:
        scene.members[1].identity = None if out else scene.members[1].identity

    scene.run(scene.order(commit_command()), goes_out, scene.order(commit_command()))
    again = bool(others) and not out
    assert [type(event) for event in scene.handled] == [
        ev.OffsetCommitFailed,
        ev.OffsetsCommitted if again else ev.OffsetCommitFailed,
    ]
    assert len(scene.environment.producers) == 1 + again
    assert not scene.members[0].committed


def test_a_denied_regain_recalls_placed_members_without_failing_the_run(broken: Scene) -> None:
    """A permission that is revoked in the middle of a commit makes the id uncertain, and it cannot be regained
    either."""
    scene = broken
    scene.members[0].agent = scene.members[1].agent = "h1"
    scene.thread.own_member_ids.append("m")
    found = group_of(member_at("g.s.0", "m"))
    scene.environment.will("describe_consumer_groups", *[found] * 4)
    for _ in range(3):
        scene.topics_there(a=2)

    def denies() -> None:
        scene.environment.will("init_transactions", *[DENIED] * 4)

    scene.run(scene.order(commit_command()), denies, scene.order(commit_command()), scene.order(commit_command()))
    assert [type(event) for event in scene.handled] == [ev.OffsetCommitFailed] * 3
    assert "they must return first" in scene.handled[-1].reason  # type: ignore[union-attr]
    assert scene.transactions[-1] is False


def test_lookup_continues_when_a_topic_that_is_not_subscribed_any_more_is_refused() -> None:
    """It is read for the notes of resets alone."""
    scene = Scene(subscribe="a")
    refused = SimpleNamespace(topic="b", partition=0, error=KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    scene.environment.will("committed", [KafkaPartition("a", 0, 5, ""), refused])
    scene.run(scene.order(ev.FetchCommittedOffsets(partitions=(A0,), notes_only=(B0,))))
    (read,) = [event for event in scene.handled if isinstance(event, ev.CommittedOffsetsRead)]
    assert read.offsets[A0] is not None and read.unanswered == ()
