"""``spark-group delete-offsets`` and ``delete-group`` on real groups, compared with Kafka's own tool (KIP-496).

Kafka's offsets are read back with a plain consumer, and by ``kafka-consumer-groups``.
"""

import json

import pytest
from delta_files import living_rows
from kafka_helpers import SASL_PASSWORD, SASL_USER, await_until, set_committed
from kafka_tool import kafka_consumer_groups
from rebalance.accounts import describe
from scenes import Scene, Shown
from streams import PROTOCOLS, OtherMember, numbered

from spark_group_source import DeltaSink
from spark_group_source.cli import offsets as deletion
from spark_group_source.cli.common import RETRIABLE
from spark_group_source.cli.offsets import DeletionResult, Outcome, predict_deletion, select_offsets
from spark_group_source.error_codes import CODES
from spark_group_source.errors import BrokerUnavailable, GroupError, OptionError
from spark_group_source.kafka import group_admin
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.translation import CommittedOffset, GroupDescription, GroupMember
from spark_group_source.model import TopicPartition

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
AT = {A0: CommittedOffset(5, ""), A1: CommittedOffset(7, ""), B0: CommittedOffset(9, "")}


def outcomes(shown: Shown) -> dict[tuple[str, int], str]:
    found = json.loads(shown.output[: shown.output.rindex("}") + 1])
    return {(row["topic"], row["partition"]): row["outcome"] for row in found["partitions"]}


# --- selection and prediction ---------------------------------------------------------------------------------------


def test_topic_option_selects_committed_or_named_partitions() -> None:
    assert select_offsets({"a": ()}, AT) == {A0: 5, A1: 7}
    assert select_offsets({"a": {1}, "b": ()}, AT) == {A1: 7, B0: 9}
    assert select_offsets({"a": (0, 4)}, AT) == {A0: 5, TopicPartition("a", 4): None}


def test_topic_without_offsets_is_refused_with_those_that_have_some() -> None:
    with pytest.raises(OptionError, match="no committed offsets of topic 'c'; it has offsets of: a, b"):
        select_offsets({"c": ()}, AT)


def test_only_assigned_partitions_prove_a_subscription() -> None:
    member = GroupMember("m", "c", "", "h", (A1,))
    offsets = {A0: 5, B0: 9, TopicPartition("b", 1): None}
    found = predict_deletion(offsets, GroupDescription("stable", "classic", "range", (member,)))
    assert found[A0].outcome is Outcome.WOULD_STAY, "also unassigned partitions"
    assert found[B0].outcome is Outcome.WOULD_GO and "unless a member subscribes" in found[B0].reason
    assert found[TopicPartition("b", 1)].outcome is Outcome.NOTHING
    assert predict_deletion({A0: 5}, GroupDescription("empty", "classic", "", ())) == {
        A0: DeletionResult(5, Outcome.WOULD_GO)
    }


class Scripted:
    """An admin client with scripted responses."""

    connection = ("--bootstrap-servers", "b")

    def __init__(self, codes: dict[TopicPartition, int], after: dict[TopicPartition, CommittedOffset | None]) -> None:
        self.codes, self.after = codes, after

    def delete_offsets(self, _group: str, _tps: object) -> dict[TopicPartition, int]:
        return self.codes

    def read_offsets(self, _group: str, _tps: object) -> dict[TopicPartition, CommittedOffset | None]:
        return self.after


def test_G10_partition_missing_in_response_is_not_reported_as_deleted() -> None:
    left = Scripted({A0: 0}, {A0: None, A1: None})
    found = deletion.delete(left, "g", {A0: 5, A1: 7})  # type: ignore[arg-type]
    assert [result.outcome for result in found.values()] == [Outcome.DELETED, Outcome.NOT_ANSWERED]
    assert deletion.not_deleted(found) == [A1]


def test_offset_that_is_not_read_back_is_not_reported_as_deleted() -> None:
    again = Scripted({A0: 0, A1: 0, B0: 99}, {A0: CommittedOffset(6, ""), B0: CommittedOffset(9, "")})
    found = deletion.delete(again, "g", {A0: 5, A1: 7, B0: 9})  # type: ignore[arg-type]
    assert found[A0] == DeletionResult(5, Outcome.AGAIN, "now at 6")
    assert found[A1].outcome is Outcome.NOT_ANSWERED
    assert (found[B0].outcome, "INVALID_UPDATE" in found[B0].reason) == (Outcome.REFUSED, False)
    assert len(deletion.not_deleted(found)) == 3


# --- on a real group ------------------------------------------------------------------------------------------------


@pytest.mark.broker
def test_delete_offsets_of_an_empty_group_needs_execute(scene: Scene) -> None:
    name, other = scene.topic(3), scene.topic(1)
    set_committed(scene.admin, scene.group, name, {0: 0, 1: 0})
    set_committed(scene.admin, scene.group, other, {0: 0})
    before = scene.committed()
    dry = scene.of_group("delete-offsets", "--topic", f"{name}:0,2", "--json")
    assert (dry.code, outcomes(dry)) == (0, {(name, 0): "would be deleted", (name, 2): "nothing committed"})
    assert scene.committed() == before
    done = scene.of_group("delete-offsets", "--topic", f"{name}:0,2", "--execute", "--json")
    assert (done.code, outcomes(done)) == (0, {(name, 0): "deleted", (name, 2): "nothing committed"})
    assert scene.committed() == {TopicPartition(name, 1): 0, TopicPartition(other, 0): 0}
    text = scene.of_group("delete-offsets", "--topic", name, "--execute").output
    assert "deleted" in text and "checkpoint" in text
    assert scene.committed() == {TopicPartition(other, 0): 0}
    shown = kafka_consumer_groups(scene.servers, "--describe", "--group", scene.group)
    assert other in shown and f"{name} " not in shown, shown


@pytest.mark.broker
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_delete_offsets_of_an_active_group_matches_kafkas_tool(protocol: str, scene: Scene) -> None:
    read, former = scene.topic(2), scene.topic(2)
    set_committed(scene.admin, scene.group, read, {0: 0, 1: 0})
    set_committed(scene.admin, scene.group, former, {0: 0, 1: 0})
    with OtherMember(scene.servers, scene.group, [read], protocol) as member:
        await_until(lambda: len(member.partitions) == 2, what="its partitions")
        await_until(lambda: describe(scene.admin, scene.group).state == "stable", what="a stable group")
        dry = scene.of_group("delete-offsets", "--topic", read, "--topic", former, "--json")
        assert set(outcomes(dry).items()) == {
            *(((read, p), "would be refused") for p in range(2)),
            *(((former, p), "would be deleted") for p in range(2)),
        }
        done = scene.of_group("delete-offsets", "--topic", read, "--topic", f"{former}:0", "--execute")
        assert done.code == 1
        last = done.output.strip().splitlines()[-1]
        assert last.startswith("error: GroupError: 2 of 3 offsets") and "GROUP_SUBSCRIBED_TO_TOPIC" in last, done.output
        kept = {TopicPartition(read, 0): 0, TopicPartition(read, 1): 0, TopicPartition(former, 1): 0}
        assert scene.committed() == kept
        theirs = kafka_consumer_groups(
            scene.servers, "--delete-offsets", "--group", scene.group, "--topic", read, "--topic", f"{former}:1"
        )
        assert theirs.count("GroupSubscribedToTopicException") == 2 and theirs.count("Successful") == 1, theirs
        assert scene.committed() == {TopicPartition(read, 0): 0, TopicPartition(read, 1): 0}
        refused = scene.of_group("delete-group", "--execute")
        assert refused.code == RETRIABLE
        assert refused.output.count("\n") == 1 and "has 1 member," in refused.output
    assert len(scene.committed()) == 2


@pytest.mark.broker
def test_delete_group_deletes_group_and_offsets(scene: Scene) -> None:
    name = scene.topic(2)
    set_committed(scene.admin, scene.group, name, {0: 0, 1: 0})
    assert "nothing was changed" in scene.of_group("delete-group").output
    assert len(scene.committed()) == 2
    shown = scene.of_group("delete-group", "--execute", "--json")
    assert (shown.code, json.loads(shown.output)["offsets"]) == (0, 2)
    assert scene.committed() == {}
    assert scene.group not in kafka_consumer_groups(scene.servers, "--list")
    again, missing = scene.of_group("delete-group", "--execute"), f"group {scene.group!r} does not exist"
    assert again.code == 1 and again.output.count("\n") == 1
    assert again.output.startswith(f"error: GroupError: {missing}")
    assert scene.of_group("delete-offsets", "--topic", name).output.startswith(f"error: GroupError: {missing}")
    admin = GroupAdmin({"bootstrap.servers": scene.servers}, retries=0)
    with pytest.raises(GroupError, match=missing):
        admin.delete_group(scene.group)
    with pytest.raises(GroupError, match=missing):  # in the library's text alone: `group_admin._broker_error`
        admin.delete_offsets(scene.group, [TopicPartition(name, 0)])


@pytest.mark.broker
def test_broker_refuses_deletion_for_a_member_that_joined_meanwhile(scene: Scene) -> None:
    name = scene.topic(1)
    with OtherMember(scene.servers, scene.group, [name]) as member:
        await_until(lambda: member.partitions, what="its partition")
        with pytest.raises(GroupError, match="The group is not empty") as refused:
            GroupAdmin({"bootstrap.servers": scene.servers}, retries=0).delete_group(scene.group)
    assert not refused.value.retriable


# --- the library ----------------------------------------------------------------------------------------------------


def test_G9_invalid_client_setting_is_reported_without_secrets() -> None:
    settings = {"bootstrap.servers": "b", "sasl.password": "geheim", "linger.ms": "geheim"}
    with pytest.raises(OptionError, match=r"linger|queue\.buffering") as refused:
        group_admin._delete_once(settings, "g", [A0])
    assert "geheim" not in str(refused.value)


def test_G8_deletion_times_out_when_brokers_are_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_admin, "DELETE_S_MAX", 0.3)
    with pytest.raises(BrokerUnavailable, match="was not answered"):
        GroupAdmin({"bootstrap.servers": "127.0.0.1:1"}).delete_offsets("g", [A0])


def test_broker_error_is_parsed_from_library_text() -> None:
    text = "DELETECONSUMERGROUPOFFSETS worker failed to parse response: OffsetDelete response error: "
    assert (
        group_admin._broker_error(-196, f"{text}Broker: The group id does not exist").code()
        == CODES["GROUP_ID_NOT_FOUND"]
    )
    for unknown in (f"{text}Broker: a text of a later release", text, "Local: Timed out"):
        assert group_admin._broker_error(-196, unknown).code() == -196


@pytest.mark.broker
def test_offset_deletion_with_accepted_and_refused_password(scene: Scene) -> None:
    name = scene.topic(1)
    set_committed(scene.admin, scene.group, name, {0: 0})
    settings = {
        "bootstrap.servers": scene.broker.sasl_bootstrap_servers,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": SASL_USER,
        "sasl.password": "wrong",
    }
    with pytest.raises(GroupError, match=r"kafka\.security\.protocol") as refused:
        GroupAdmin(settings).delete_offsets(scene.group, [TopicPartition(name, 0)])
    assert type(refused.value).__name__ == "AccessDenied"
    right = GroupAdmin(settings | {"sasl.password": SASL_PASSWORD})
    assert right.delete_offsets(scene.group, [TopicPartition(name, 0)]) == {TopicPartition(name, 0): 0}
    assert scene.committed() == {}


# --- a query of ours whose group has lost its offsets -----------------------------------------------------------------


@pytest.mark.proves("G4", level="spark")
@pytest.mark.spark
def test_G4_G5_query_with_deleted_offsets_writes_each_record_once(scene: Scene) -> None:
    name, table, numbers = scene.topic(2), scene.folder / "table", range(10)

    def lost(*command: str) -> None:
        """The group has neither members nor offsets, and there are new records."""
        await_until(lambda: not describe(scene.admin, scene.group).members, what="the end of its members")
        assert scene.of_group(*command, "--execute").code == 0
        assert scene.committed() == {}
        scene.produce(name, numbered(numbers.stop, numbers.stop + 9, 2))

    def reads(checkpoint: str, starting: str = "latest") -> None:
        job = scene.job(subscribe=name, checkpoint=checkpoint, startingOffsets=starting)
        job.run_into(DeltaSink(table), availableNow=True)
        assert sorted(int(row["value"]) for row in living_rows(table, ["value"])) == list(numbers)
        assert scene.committed() == scene.end_offsets(name)

    set_committed(scene.admin, scene.group, name, {0: 0, 1: 0})
    scene.produce(name, numbered(0, 9, 2))
    reads("c")

    lost("delete-offsets", "--topic", name)
    numbers = range(20)
    reads("c")  # on at the checkpoint, and not at startingOffsets

    lost("delete-group")
    numbers = range(30)
    reads("another", "earliest")  # the ledger leaves out what the table has

    lost("delete-group")
    numbers = range(40)
    with pytest.raises(
        Exception, match="Kafka had no committed offsets of group"
    ) as refused:  # else 30 to 39 had no reader
        reads("a third")
    command = f"--group {scene.group} --to-ledger --table {table} --execute"
    assert command in str(refused.value)
    await_until(lambda: not describe(scene.admin, scene.group).members, what="the end of its members")
    with pytest.raises(Exception, match="Kafka had no committed offsets of group"):  # it has where "a third" starts
        reads("a fourth")
    await_until(lambda: not describe(scene.admin, scene.group).members, what="the end of its members")
    assert scene.of_group("reset", *command.split()[2:]).code == 0
    reads("a third")
