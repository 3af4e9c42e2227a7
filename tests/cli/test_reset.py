"""What a reset commits: reset number, offsets and metadata of every partition. No broker but a mock, no Spark."""

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError
from kit.mock_cluster import Api, MockCluster
from manual_environment import A0, A1, ManualEnvironment, refusal
from printed_commands import commands
from typer.testing import CliRunner, Result

from spark_group_source import reset
from spark_group_source.cli import common, group_reset
from spark_group_source.cli.app import app
from spark_group_source.cli.group_reset import NO_LEDGER, Targets, plan_reset, resolve
from spark_group_source.cli.migrate import Progress, group_offsets
from spark_group_source.delta import ledger_store
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.errors import BrokerUnavailable, GroupError, OptionError, TopicMissing
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.translation import CommittedOffset, GroupDescription, GroupMember, Topic
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition
from spark_group_source.protocol.identifiers import Note, note_text, parse_note, reset_text

P0, P1, P2 = (TopicPartition("orders", p) for p in range(3))
TOPICS = {"orders": Topic("id-1", 3)}


def committed(entries: Mapping[TopicPartition, tuple[int, str]]) -> dict[TopicPartition, CommittedOffset]:
    return {tp: CommittedOffset(*entry) for tp, entry in entries.items()}


def ledger(offsets: dict[TopicPartition, int], *, reset_number: int = 0, topic_id: str = "id-1") -> Ledger:
    return Ledger(group="etl", reset_number=reset_number).with_offsets(offsets, {"orders": topic_id})


def test_first_reset_has_number_1_in_all_commit_metadata() -> None:
    found = plan_reset({P0: 5}, committed({P0: (9, "anyone"), P1: (7, "")}), NO_LEDGER, TOPICS)
    assert found.reset_number == 1
    assert found.offsets == {P0: 5, P1: 7}
    assert found.notes == {P0: reset_text(1), P1: reset_text(1)}


def test_reset_number_follows_the_highest_of_kafka_and_table() -> None:
    before = committed(
        {P0: (9, note_text(Note("s1", 4, 2))), P1: (7, reset_text(3)), P2: (7, note_text(Note("s1", 4)))}
    )
    assert plan_reset({P0: 5}, before, NO_LEDGER, TOPICS).reset_number == 4
    assert plan_reset({P0: 5}, before, ledger({}, reset_number=2), TOPICS).reset_number == 4
    assert plan_reset({P0: 5}, before, ledger({}, reset_number=6), TOPICS).reset_number == 7
    assert plan_reset({P0: 5}, {}, NO_LEDGER, TOPICS).reset_number == 1


def test_unmoved_partition_keeps_stream_id_with_new_reset_number() -> None:
    before = committed(
        {P0: (9, note_text(Note("s1", 4))), P1: (7, note_text(Note("s1", 3))), P2: (8, note_text(Note("s1", 3, 1)))}
    )
    found = plan_reset({P0: 5}, before, NO_LEDGER, TOPICS)
    assert found.notes[P0] == reset_text(2)
    assert [parse_note(found.notes[tp]) for tp in (P1, P2)] == [Note("s1", 3, 2)] * 2
    more = note_text(Note("s1", 3, followed=True, truncated_after=90))
    kept = plan_reset({P0: 5}, committed({P1: (7, more)}), NO_LEDGER, TOPICS)
    assert parse_note(kept.notes[P1]) == Note("s1", 3, 1, followed=True, truncated_after=90)


@pytest.mark.parametrize(("recorded", "started"), [(None, True), (7, True), (8, False)])
def test_unmoved_partition_still_starts_there_unless_the_ledger_moves_it(recorded: int | None, started: bool) -> None:
    of_table = NO_LEDGER if recorded is None else ledger({P1: recorded})
    found = plan_reset({P0: 5}, committed({P1: (7, note_text(Note("s1", -1, started=True)))}), of_table, TOPICS)
    assert found.offsets[P1] == (recorded or 7)
    assert parse_note(found.notes[P1]).started is started


def test_unmoved_partition_follows_a_ledger_that_is_ahead() -> None:
    """The last commit of a run was lost. Behind the ledger, the partition would look like an operator's rewind."""
    before = committed({P0: (9, note_text(Note("s1", 4))), P1: (7, note_text(Note("s1", 4)))})
    found = plan_reset({P0: 5}, before, ledger({P0: 12, P1: 10, P2: 3}), TOPICS)
    assert found.offsets == {P0: 5, P1: 10, P2: 3}
    assert plan_reset({P0: 5}, before, ledger({P1: 2}), TOPICS).offsets == {P0: 5, P1: 7}, "another member had it since"


def test_ledger_with_older_reset_number_does_not_undo_a_reset() -> None:
    """The group was reset to another table's ledger; a reset with this table skips no record that the other lacks."""
    before = committed(
        {P0: (9, note_text(Note("s1", 4, 1))), P1: (7, note_text(Note("s2", 4, 1))), P2: (7, reset_text(1))}
    )
    assert plan_reset({P0: 5}, before, ledger({P1: 10, P2: 10}), TOPICS).offsets == {P0: 5, P1: 7, P2: 7}
    assert plan_reset({P0: 5}, before, ledger({P1: 10, P2: 10}, reset_number=1), TOPICS).offsets == {
        P0: 5,
        P1: 10,
        P2: 10,
    }


def test_commit_of_a_void_batch_is_ignored() -> None:
    """The stream did not know the last reset. At Kafka's offset the records of that batch would be lost. So would those
    that a reset moved back to, where the offsets of a backup are from before it."""
    before = committed(
        {P0: (9, note_text(Note("s1", 4))), P1: (7, note_text(Note("s1", 4))), P2: (7, note_text(Note("s2", 4, 1)))}
    )
    table = ledger({P1: 2, P2: 2}, reset_number=1)
    kept = committed({P1: (7, reset_text(1)), P2: (7, "")})
    newer = ledger({P1: 2, P2: 2}, reset_number=2)
    assert plan_reset({P0: 5}, kept, newer, TOPICS).offsets == {P0: 5, P1: 2, P2: 7}, "other consumers know no resets"
    for each in (table, replace(table, void=frozenset({"s1"}))):
        assert plan_reset({P0: 5}, before, each, TOPICS).offsets == {P0: 5, P1: 2, P2: 7}


def test_ledger_of_a_recreated_topic_is_ignored() -> None:
    found = plan_reset({P0: 0}, committed({P1: (2, "")}), ledger({P0: 100, P1: 100, P2: 100}, topic_id="id-0"), TOPICS)
    assert found.offsets == {P0: 0, P1: 2}


def test_deleted_partitions_are_left_out() -> None:
    gone, beyond = TopicPartition("gone", 0), TopicPartition("orders", 3)
    found = plan_reset({P0: 5}, committed({gone: (1, ""), beyond: (1, ""), P1: (7, "")}), ledger({gone: 4}), TOPICS)
    assert found.offsets.keys() == found.notes.keys() == {P0, P1}


def test_partition_deleted_during_the_request_is_left_out() -> None:
    environment = ManualEnvironment()
    admin = GroupAdmin({"bootstrap.servers": "b"}, environment=environment, retries=0)
    no_record, there = SimpleNamespace(offset=-1), SimpleNamespace(offset=5)
    gone, unknown = refusal(KafkaError.UNKNOWN_TOPIC_OR_PART), refusal(KafkaError._UNKNOWN_PARTITION)
    environment.will("list_offsets", {A0: no_record, A1: there}, {A0: unknown})
    environment.will("describe_topics", {"a": gone})
    assert resolve(admin, "g", dict.fromkeys([A0, A1], StartAt("time", 7))) == Targets({A1: 5})


def test_a_migration_refuses_named_partitions_that_do_not_exist() -> None:
    admin: Any = Cluster({}, ledger({}))
    found = Progress(3, {P0: 5}, {P0: "0"})
    for wanted in ({7}, {0, 7}):
        with pytest.raises(OptionError, match="topic orders has no partition 7; it has 0 to 2"):
            group_offsets(admin, found, {"orders": frozenset(wanted)})
    assert group_offsets(admin, found, {"orders": frozenset({1})}) == {P1: 0}
    assert group_offsets(admin, found, {}) == {P0: 5, P1: 0, P2: 0}


def test_a_migration_from_a_topic_that_was_deleted_says_how_it_is_left_out() -> None:
    """Its name is in the checkpoint: no one can correct it."""
    admin: Any = Cluster({}, ledger({}), deleted={"gone"})
    found = Progress(3, {P0: 5, TopicPartition("gone", 0): 7}, {})
    with pytest.raises(OptionError, match=r"offset 7 of gone-0, which does not exist: .* the other topics"):
        group_offsets(admin, found, {})
    assert group_offsets(admin, found, {"orders": frozenset({0})}) == {P0: 5}


@pytest.fixture
def two_leaders() -> Iterator[MockCluster]:
    """Two partitions, each with a leader of its own."""
    with MockCluster(2) as cluster:
        cluster.create_topic("a", 2)
        for tp, broker in ((A0, 1), (A1, 2)):
            cluster.set_leader(tp, broker)
        yield cluster


@pytest.mark.parametrize(
    ("plan", "answered"),
    [
        (lambda admin: resolve(admin, "g", dict.fromkeys([A0, A1], EARLIEST)), 0),
        (lambda admin: resolve(admin, "g", dict.fromkeys([A0, A1], StartAt("offset", 0))), 0),
        (lambda admin: resolve(admin, "g", dict.fromkeys([A0, A1], StartAt("offset", 0))), 2),
        (lambda admin: group_offsets(admin, Progress(3, {A0: 0}, {}), {}), 0),
        (lambda admin: group_offsets(admin, Progress(3, {A0: 0}, {}), {}), 2),
    ],
)
def test_a_partition_that_its_leader_does_not_know_yet_is_not_left_out(
    two_leaders: MockCluster, plan: Callable[[GroupAdmin], object], answered: int
) -> None:
    """A leader reports one that was just added, or moved to it, as unknown."""
    admin = GroupAdmin({"bootstrap.servers": two_leaders.bootstrap_servers}, retries=0)
    try:
        whole = plan(admin)
        codes = [0] * answered + [KafkaError.UNKNOWN_TOPIC_OR_PART]
        two_leaders.push_request_errors(Api.LIST_OFFSETS, codes)
        with pytest.raises(BrokerUnavailable, match=r"a-\d exists, but its leader does not know it yet"):
            plan(admin)
        assert plan(admin) == whole
    finally:
        admin.close()


def test_a_group_that_has_read_into_an_open_transaction_is_not_moved_back_for_an_unknown_partition() -> None:
    admin: Any = SimpleNamespace(
        earliest=lambda _: {},
        latest=lambda tps, *, committed=True: dict.fromkeys(tps, 5) if committed else {},
        offsets_at_time=lambda _: {},
        committed=lambda _: {A0: CommittedOffset(8, "")},
        existing_partitions=set,
    )
    with pytest.raises(BrokerUnavailable, match="a-0 exists"):
        resolve(admin, "g", {A0: LATEST})


def test_a_named_offset_may_be_in_an_open_transaction() -> None:
    """Groups that read uncommitted records have such positions, and so has Spark's Kafka connector by default."""
    ends = {False: 10, True: 5}
    admin: Any = SimpleNamespace(
        existing_topics=lambda _: {"a": Topic("id-1", 2)},
        earliest=lambda tps: dict.fromkeys(tps, 0),
        latest=lambda tps, *, committed=True: dict.fromkeys(tps, ends[committed]),
        offsets_at_time=lambda _: {},
        committed=lambda _: {},
    )
    assert resolve(admin, "g", {A0: StartAt("offset", 10), A1: LATEST}) == Targets({A0: 10, A1: 5})
    assert resolve(admin, "g", {A0: StartAt("offset", 11), A1: EARLIEST}) == Targets({A0: 10, A1: 0}, {A0: 11})
    assert group_offsets(admin, Progress(0, {A0: 10}, {A0: "0"}), {}) == {A0: 10, A1: 0}
    with pytest.raises(OptionError, match="offset 11 of a-0, which ends at 10"):
        group_offsets(admin, Progress(0, {A0: 11}, {A0: "0"}), {})


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("newest", "must be 'earliest', 'latest', 'ledger', an offset, a time"),
        (-1, "must be 'earliest'"),
        (True, "must be 'earliest'"),
        ({"orders": {0: True}}, "to has True for orders-0; it must be an offset"),
        ({"orders": {0: 5, 1: -1001}}, "to has -1001 for orders-1; it must be an offset"),
        ({"orders": {0: "5"}}, "to has '5' for orders-0; it must be an offset"),
        ({"orders": 5}, "must have partitions and offsets by topic"),
        ({"orders": {"first": 5}}, "must have partitions and offsets by topic"),
        (datetime.fromisoformat("2026-01-31T12:00:00"), "has no time zone"),
        (datetime.fromisoformat("1969-12-31T23:59:59.999+00:00"), "is before 1970"),
    ],
)
def test_a_wrong_position_is_refused_before_any_request_to_table_and_brokers(to: Any, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        reset("etl", "nowhere:1", to=to, table="/no/such/table", execute=True)


@pytest.mark.parametrize("topics", ["ab", ["ab"]])
def test_the_topics_of_a_reset_may_be_one_name(topics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the topics that are named like its letters."""
    admin: Any = SimpleNamespace(
        require_topics=lambda scope: {name: Topic("id-1", 2) for name in scope},
        earliest=lambda tps: dict.fromkeys(tps, 0),
        latest=lambda tps, *, committed=True: dict.fromkeys(tps, 5),
        offsets_at_time=lambda _: {},
        committed=lambda _: {},
        describe_group=lambda _: GroupDescription("dead", "", "", ()),
        existing_topics=lambda _: {},
    )
    monkeypatch.setattr(common, "admin_of", lambda *_, **__: nullcontext(admin))
    done = reset("etl", "nowhere:1", to="earliest", topics=topics)
    assert [(move.topic, move.partition) for move in done.moves] == [("ab", 0), ("ab", 1)] and done.is_new


def test_a_reset_to_the_ledger_needs_a_table() -> None:
    with pytest.raises(OptionError, match="needs table="):
        reset("etl", "nowhere:1", to="ledger")


class Cluster:
    """A cluster with a topic of 3 partitions of 8000 records, an inactive group, and a table with a ledger of it."""

    connection = ("--bootstrap-servers", "nowhere:1")

    def __init__(
        self, offsets: Mapping[TopicPartition, tuple[int, str]], of_table: Ledger, deleted: Set[str] = frozenset()
    ) -> None:
        self.offsets, self.ledger, self.deleted = offsets, of_table, deleted
        self.described = GroupDescription("empty", "classic", "", ())
        self.moved: dict[TopicPartition, int] = {}

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        return committed(self.offsets)

    def describe_group(self, group: str) -> GroupDescription:
        return self.described

    def existing_topics(self, names: Iterable[str]) -> dict[str, Topic]:
        return {name: TOPICS.get(name, Topic("id-9", 1)) for name in names if name not in self.deleted}

    def require_topics(self, names: Collection[str]) -> dict[str, Topic]:
        if self.deleted.isdisjoint(names):
            return self.existing_topics(names)
        raise TopicMissing("create it first")

    def earliest(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 0)

    def latest(self, tps: Iterable[TopicPartition], *, committed: bool = True) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 8000)

    def offsets_at_time(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, None]:
        return dict.fromkeys(times)

    def move_committed(self, group: str, offsets: dict[TopicPartition, int], *, notes: object) -> None:
        self.moved = offsets

    def read_ledger(self, *_: object, **__: object) -> Ledger:
        return self.ledger

    def typed(self, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
        """The result of the command with the table."""
        monkeypatch.setattr(common, "admin_of", lambda *_: nullcontext(self))
        monkeypatch.setattr(common, "session", lambda: nullcontext(object()))
        monkeypatch.setattr(group_reset, "table_version", lambda *_: 1)
        monkeypatch.setattr(ledger_store, "set_ledger", lambda *_, **__: None)
        for name in ("read_ledger", "require_ledger", "counted_ledger"):
            monkeypatch.setattr(ledger_store, name, self.read_ledger)
        more = ["--bootstrap-servers", "nowhere:1", "--group", "etl", "--table", "/lake/orders", "--execute"]
        return CliRunner().invoke(app, ["reset", *words, *more])


def test_positions_are_read_when_the_group_is_inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that commits its last batch meanwhile, and leaves, would be moved back before that batch."""

    class LeavingGroup(Cluster):
        def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
            found, self.offsets, self.ledger = super().committed(group), {P0: (1000, "")}, ledger({P0: 1000})
            self.described = GroupDescription("empty", "classic", "", ())
            return found

    def leaving() -> LeavingGroup:
        cluster = LeavingGroup({P0: (100, "")}, ledger({P0: 100}))
        member = GroupMember("m", "c", "", "h", (P0,))
        cluster.described = GroupDescription("stable", "classic", "range", (member,))
        return cluster

    for to in (["--to-current"], ["--shift-by", "0"], ["--to-ledger"], ["--to-further"]):
        cluster = leaving()
        assert cluster.typed(monkeypatch, *to).exit_code == common.RETRIABLE
        assert cluster.moved == {}
    cluster, spark = leaving(), cast("Any", object())
    monkeypatch.setattr(common, "admin_of", lambda *_, **__: nullcontext(cluster))
    with pytest.raises(GroupError, match="is stable with 1 member"):
        reset("etl", "nowhere:1", to="ledger", table="/lake/orders", spark=spark, execute=True)
    assert cluster.moved == {}


@pytest.mark.parametrize(
    ("words", "unknown"),
    [
        ("--to-ledger --topic ordres", "ordres"),
        ("--to-ledger --topic orders --topic payments", "payments"),
        ("--to-ledger --topic orders:0,2", "orders-2"),
        ("--to-further --topic payments", "payments"),
        ("""--to-offsets '{"orders":{"0":5}}' --topic orders:1""", "orders-1"),
    ],
)
def test_a_topic_of_which_a_position_has_no_offset_is_not_left_out(
    words: str, unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster({P0: (100, "")}, ledger({P0: 90}))
    refused = cluster.typed(monkeypatch, *shlex.split(words))
    assert refused.exit_code == common.FINAL and cluster.moved == {}
    assert f"this position has no offset of {unknown}, or" in refused.output


FORMER = note_text(Note("s1", 3, topic_id="id-0"))
"""A commit of a topic that was deleted and recreated since."""


@pytest.mark.parametrize(
    ("to", "then"), [(["--to-current"], 10), (["--shift-by", "-3"], 7), (["--to-further"], 10), (["--to-ledger"], 10)]
)
def test_the_ledger_of_a_recreated_topic_replaces_the_committed_offset_of_the_former_one(
    to: list[str], then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has written its records to the table, and no commit has reached Kafka since."""
    cluster = Cluster({P0: (5000, FORMER), P1: (9, "")}, ledger({P0: 10}))
    shown = cluster.typed(monkeypatch, *to)
    assert shown.exit_code == 0, shown.output
    assert cluster.moved[P0] == then


@pytest.mark.parametrize(
    ("offsets", "of_table", "named", "rewound"),
    [
        ({P0: (700, note_text(Note("s1", 4, topic_id="id-1"))), P1: (5000, FORMER)}, {}, "orders:1", {P1}),
        ({P0: (5000, FORMER), P1: (5000, FORMER), P2: (5000, FORMER)}, {P0: 10}, "orders:1,2", {P1, P2}),
        ({P1: (5000, FORMER)}, {P0: 10}, "orders:1", {P1}),
        ({P1: (5000, FORMER)}, {}, "orders", {P0, P1, P2}),
        ({P1: (5000, FORMER), TopicPartition("orders", 7): (5000, FORMER)}, {}, "orders:1", {P1}),
    ],
)
def test_the_command_for_a_recreated_topic_rewinds_no_partition_that_was_read_since(
    offsets: dict[TopicPartition, tuple[int, str]],
    of_table: dict[TopicPartition, int],
    named: str,
    rewound: set[TopicPartition],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(offsets, ledger(of_table))
    refused = cluster.typed(monkeypatch, "--to-latest", "--topic", "other")
    assert refused.exit_code == common.FINAL and cluster.moved == {}
    first, keep = commands(refused.output)
    assert f" --to-earliest --topic {named} --table " in first and f" --to-current --topic {named} --table " in keep
    shown = CliRunner().invoke(app, shlex.split(first)[1:])
    assert shown.exit_code == 0, shown.output
    assert {tp for tp, at in cluster.moved.items() if at == 0} == rewound
