"""What a query says when it cannot go on, and that nothing is lost when it can again."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from conftest import ADMIN_S, await_until
from kafka_words import SASL_PASSWORD, sasl
from scenes import Scene
from streams import END_S, Job, numbered, options_of, planned, rewrite, texts, values_of

from spark_group_source.host import runs
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark

NOWHERE = "127.0.0.1:1"


def message_of(action: Callable[[], object]) -> str:
    """What the user reads when ``action`` fails."""
    with pytest.raises(Exception, match=r"\S") as failure:
        action()
    return str(failure.value)


# --- the call is wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kafka.group.id": None}, "option 'kafka.group.id' is required"),
        ({"subscribe": None}, "exactly one of subscribe and subscribePattern is required; neither is given"),
        ({"subscribePattern": "t.*"}, "exactly one of subscribe and subscribePattern is required; both is given"),
        ({"kafka.sesion.timeout": "1"}, 'No such configuration property: "sesion.timeout"'),
        ({"kafka.fetch.min.bytes": "many"}, 'Invalid value for configuration property "fetch.min.bytes"'),
        ({"startingOffset": "latest"}, "unknown option 'startingoffset'; did you mean 'startingOffsets'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "+".join(value),
)
def test_a_wrong_option_is_refused_by_load_in_one_sentence(
    change: dict[str, str | None], says: str, scene: Scene
) -> None:
    one = scene.job(subscribe="t")
    one.options = {name: text for name, text in {**one.options, **change}.items() if text is not None}
    text = message_of(one.load)
    assert "OptionError" in text
    assert says in text


def test_a_batch_read_is_refused_with_the_way_to_a_bounded_run(scene: Scene) -> None:
    options = scene.job(subscribe=scene.topic()).options
    text = message_of(lambda: scene.spark.read.format("kafka-group").options(**options).load().collect())
    assert "write spark.readStream, with trigger(availableNow=True)" in text


def test_a_topic_that_does_not_exist_is_named(scene: Scene) -> None:
    text = message_of(scene.job(subscribe=f"{scene.topic()},{scene.group}-nowhere").run)
    assert f"TopicMissing: topic {scene.group}-nowhere does not exist on" in text
    assert "Create it first" in text


# --- the cluster cannot be used -------------------------------------------------------------------------------------


def test_B36_a_broker_that_is_not_there_is_named_in_bounded_time(scene: Scene) -> None:
    one = scene.job(subscribe="t", kafka__bootstrap__servers=NOWHERE, fetchOffset__numRetries=0)
    query = one.start()
    text = message_of(lambda: query.awaitTermination(END_S))
    assert "BrokerUnavailable: the brokers have not answered for " in text
    assert "describing topics was not answered by 127.0.0.1:1 within" in text
    assert "Check kafka.bootstrap.servers" in text


WRONG = "close-sesame-19bc"


@pytest.fixture
def guarded_job(scene: Scene) -> Callable[..., Job]:
    """A query that says who it is."""

    def make(password: str, **more: Any) -> Job:
        options = options_of(scene.broker.sasl_bootstrap_servers, scene.group, **more) | sasl(password)
        return Job(scene.spark, options, scene.folder / "c")

    return make


def test_wrong_credentials_are_refused_at_once_by_name_and_not_shown(guarded_job: Callable[..., Job]) -> None:
    text = message_of(guarded_job(WRONG, subscribe="t").run)
    assert "AccessDenied" in text
    assert "Authentication failed" in text
    assert "kafka.sasl.*" in text
    assert WRONG not in text


@pytest.mark.proves("G9", level="spark")
def test_G9_credentials_work_and_show_neither_in_the_plan_nor_in_progress_nor_in_the_checkpoint(
    guarded_job: Callable[..., Job], scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    name = scene.topic()
    scene.produce(name, ["in"])
    one = guarded_job(SASL_PASSWORD, subscribe=name)
    frame = one.load()
    frame.explain(extended=True)
    query = one.start_frame(frame, availableNow=True)
    assert query.awaitTermination(END_S)
    assert one.values == ["in"]
    query.explain(extended=True)
    plans = capsys.readouterr().out
    assert "kafka-group" in plans
    shown = [plans, *(p.json for p in query.recentProgress)]
    shown += [path.read_text(errors="replace") for path in one.checkpoint.rglob("*") if path.is_file()]
    assert not [text for text in shown if SASL_PASSWORD in text]


# --- the checkpoint -------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_group_is_refused_and_left_as_it_is(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 3))
    one = scene.job(subscribe=name)
    one.run()
    text = message_of(lambda: one.run(kafka__group__id="another"))
    assert f"the checkpoint belongs to group '{scene.group}', but kafka.group.id is 'another'" in text
    scene.produce(name, numbered(4, 5))
    assert values_of(one.run()) == texts(4, 5)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda doc: json.dumps({**doc, "v": 2}), "has format version 2; this release reads version 1"),
        (lambda doc: json.dumps({**doc, "topics": 7}), "the checkpoint's offset is damaged"),
        (lambda doc: json.dumps({"t": {"0": 5}}), "the checkpoint's offset is not one of kafka-group"),
    ],
    ids=["newer", "damaged", "another source"],
)
@pytest.mark.parametrize("pending", [False, True], ids=["done", "pending"])
def test_B56_an_offset_that_cannot_be_read_is_refused_and_nothing_is_guessed(
    pending: bool, damage: Callable[[dict[str, Any]], str], says: str, scene: Scene
) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 3))
    one = scene.job(subscribe=name)
    one.run()
    before = scene.committed()
    last = max(planned(one.checkpoint))
    good = (one.checkpoint / "offsets" / str(last)).read_text().splitlines()[2]
    rewrite(one.checkpoint, last, damage(json.loads(good)))
    if pending:
        (one.checkpoint / "commits" / str(last)).unlink()
        (one.checkpoint / "commits" / f".{last}.crc").unlink()
    scene.produce(name, numbered(4, 5))
    text = message_of(one.run)
    assert "CheckpointMismatch" in text
    assert says in text
    assert one.values == texts(0, 3)
    assert scene.committed() == before


def test_B56_an_offset_that_is_no_json_stops_the_query(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 3))
    one = scene.job(subscribe=name)
    one.run()
    rewrite(one.checkpoint, max(planned(one.checkpoint)), '{"group": "half')
    assert "JSON" in message_of(one.run)
    assert one.values == texts(0, 3)


# --- lost data ------------------------------------------------------------------------------------------------------


def delete_before(scene: Scene, name: str, partition: int, offset: int) -> None:
    def done() -> bool:
        try:
            (deleted,) = scene.admin.delete_records([KafkaPartition(name, partition, offset)]).values()
            return bool(deleted.result(ADMIN_S).low_watermark == offset)
        except KafkaException:  # this client has not heard of a new partition's leader yet: let it ask
            scene.admin.list_topics(name, timeout=ADMIN_S)
            return False

    await_until(done, what="the deletion of records")


def test_B37_B38_records_that_went_while_it_was_stopped_stop_it_or_are_passed_over(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    one = scene.job(subscribe=name)
    one.run()
    scene.produce(name, numbered(4, 13, 2))
    delete_before(scene, name, 1, 4)
    text = message_of(one.run)
    assert "DataLoss" in text
    assert f"the records of {name}-1 from 2 on are gone: it begins at 4 now" in text
    assert "Set failOnDataLoss to false" in text
    assert one.values == texts(0, 3)
    assert scene.committed() == {TopicPartition(name, 0): 2, TopicPartition(name, 1): 2}
    assert values_of(one.run(failOnDataLoss=False)) == sorted(str(n) for n in range(4, 14) if n not in (5, 7))
    assert scene.committed() == scene.end_offsets(name)


@pytest.mark.parametrize("member_host", ["auto", "driver"])
def test_what_tasks_had_to_skip_is_counted_once(member_host: str, scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 9))
    found: list[list[str]] = []

    def lose_and_read(frame: "DataFrame", number: int) -> None:
        """The records go between the plan and its reading, and it is read twice."""
        delete_before(scene, name, 0, 4)
        found.extend([row.value.decode() for row in frame.select("value").collect()] for _ in range(2))
        await_until(lambda: told()["records_lost"], what="word of tasks")
        if member_host == "auto":
            rows = "rows_from_memory", "rows_from_brokers"
            await_until(lambda: sum(sum(told()[name]) for name in rows) == 12, what="word of all")
        assert told()["records_lost"] == 4

    def told() -> dict[str, Any]:
        (run,) = runs.read(scene.group)
        return run

    scene.job(subscribe=name, failOnDataLoss=False, memberHost=member_host).run_into(lose_and_read, availableNow=True)
    assert found == [texts(4, 9)] * 2


def test_B43_a_group_offset_that_aged_out_is_a_loss_for_a_new_query_too(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 3))
    scene.job(subscribe=name).run()
    scene.produce(name, numbered(4, 9))
    delete_before(scene, name, 0, 6)
    text = message_of(scene.job(checkpoint="new", subscribe=name).run)
    assert f"DataLoss: the records of {name}-0 from 4 on are gone: it begins at 6 now" in text
    assert values_of(scene.job(checkpoint="again", subscribe=name, failOnDataLoss=False).run()) == texts(6, 9)


def test_B15_a_new_partition_that_does_not_begin_at_0_is_a_loss(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 3))
    one = scene.job(subscribe=name)
    one.run()
    scene.grow(name, 2)
    scene.produce(name, ["a", "b", "c"], partition=1)
    delete_before(scene, name, 1, 2)
    assert f"DataLoss: new partition {name}-1 begins at 2, not at 0" in message_of(one.run)
    assert values_of(one.run(failOnDataLoss=False)) == ["c"]


def test_B40_a_topic_made_again_while_it_was_stopped_is_noticed_though_its_log_is_longer(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 3))
    one = scene.job(subscribe=name)
    one.run()
    scene.delete(name)
    scene.topic(name=name)
    scene.produce(name, [f"again-{n}" for n in range(9)])
    text = message_of(one.run)
    assert f"DataLoss: topic {name} was deleted and made again" in text
    assert one.values == texts(0, 3)
    assert values_of(one.run(failOnDataLoss=False)) == [f"again-{n}" for n in range(9)]
    assert scene.committed() == {TopicPartition(name, 0): 9}


@pytest.mark.parametrize("fails", [True, False])
def test_B40_a_topic_made_again_between_two_batches(fails: bool, scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 3))
    one = scene.job(subscribe=name, failOnDataLoss=fails)

    def again(number: int) -> None:
        if len(one.batches) == 1:
            scene.delete(name)
            scene.topic(name=name)
            scene.produce(name, [f"again-{n}" for n in range(9)])

    one.on_batch = again
    with one.running() as query:
        if fails:
            assert "was deleted and made again" in message_of(lambda: query.awaitTermination(END_S))
        else:
            await_until(lambda: len(one.rows) >= 13, what="the rows of the new topic")
    assert one.values == sorted([*texts(0, 3), *([] if fails else [f"again-{n}" for n in range(9)])])


@pytest.mark.parametrize("alone", [False, True])
def test_a_topic_deleted_while_it_runs_stops_it_by_name(alone: bool, scene: Scene) -> None:
    """Also the only one, of which the library says what it says of brokers that it cannot reach."""
    gone, kept = scene.topic(2), scene.topic()
    scene.produce(gone, numbered(0, 3, 2))
    scene.produce(kept, numbered(4, 5))
    one = scene.job(subscribe=gone if alone else f"{gone},{kept}")
    with one.running() as query:
        query.processAllAvailable()
        scene.delete(gone)
        text = message_of(lambda: query.awaitTermination(END_S))
    assert f"TopicMissing: topic {gone} does not exist any more" in text
    assert "set failOnDataLoss to false to go on without it" in text
    assert one.values == texts(0, 3 if alone else 5)


def test_B41_a_topic_deleted_while_it_runs_is_left_out_when_losses_are_allowed(scene: Scene) -> None:
    gone, kept = scene.topic(2), scene.topic()
    scene.produce(gone, numbered(0, 3, 2))
    one = scene.job(subscribe=f"{gone},{kept}", failOnDataLoss=False)
    one.on_batch = lambda number: scene.delete(gone) if number == 0 else None  # its offsets cannot be committed
    with one.running() as query:
        await_until(lambda: one.batches, what="the first batch")
        scene.produce(kept, numbered(4, 5))
        await_until(lambda: len(one.rows) >= 6, what="the rows of the other topic")
        scene.produce(kept, numbered(6, 7))
        await_until(lambda: len(one.rows) >= 8, what="more rows of the other topic")
        await_until(
            lambda: scene.committed().items() >= scene.end_offsets(kept).items(), what="the other topic's offsets"
        )
        assert query.exception() is None
    assert one.values == texts(0, 7)


# --- asynchronous progress ------------------------------------------------------------------------------------------


def test_asynchronous_progress_tracking_is_refused_where_rows_could_count_as_durable_too_early(scene: Scene) -> None:
    one = scene.job(subscribe=scene.topic())
    writer = one.load().writeStream.foreachBatch(lambda frame, number: None)
    text = message_of(
        lambda: (
            writer.option("checkpointLocation", str(one.checkpoint))
            .option("asyncProgressTrackingEnabled", "true")
            .start()
            .awaitTermination(END_S)
        )
    )
    assert "does not support async progress tracking" in text
