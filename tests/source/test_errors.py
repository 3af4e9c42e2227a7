"""Errors that stop a run, and that nothing is lost when it continues; without Spark."""

import pytest
from kafka_helpers import await_until
from scenes import Scene
from streams import Engine, numbered, texts, values_of

from spark_group_source.errors import BrokerUnavailable, DataLoss, OptionError, TopicMissing
from spark_group_source.model import TopicPartition

NOWHERE = "127.0.0.1:1"


def test_an_unreachable_broker_is_named_in_bounded_time(scene: Scene) -> None:
    one = scene.played(subscribe="t", kafka__bootstrap__servers=NOWHERE, fetchOffset__numRetries=0)
    with pytest.raises(BrokerUnavailable, match=r"describing topics was not answered by 127.0.0.1:1 within.*servers"):
        one.run()


def test_records_deleted_while_a_query_is_stopped_fail_it_or_are_skipped(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    one = scene.played(subscribe=name)
    one.run()
    scene.produce(name, numbered(4, 13, 2))
    scene.delete_before(name, 1, 4)
    gone = f"the records of {name}-1 from 2 on are lost: it starts at 4 now.*Set failOnDataLoss=false"
    with pytest.raises(DataLoss, match=gone):
        one.run()
    assert values_of(one.rows) == texts(0, 3)
    assert scene.committed() == {TopicPartition(name, 0): 2, TopicPartition(name, 1): 2}
    assert one.run(failOnDataLoss=False) == sorted(str(n) for n in range(4, 14) if n not in (5, 7))
    assert scene.committed() == scene.end_offsets(name)


def test_a_topic_recreated_while_a_query_is_stopped_is_detected_even_if_its_log_is_longer(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 3))
    one = scene.played(subscribe=name)
    one.run()
    scene.delete(name)
    scene.topic(name=name)
    again = [f"again-{n}" for n in range(9)]
    scene.produce(name, again)
    with pytest.raises(DataLoss, match=f"topic {name} was deleted and recreated"):
        one.run()
    assert values_of(one.rows) == texts(0, 3)
    assert one.run(failOnDataLoss=False) == again
    assert scene.committed() == {TopicPartition(name, 0): 9}


@pytest.mark.parametrize("by", ["subscribe", "subscribePattern"])
def test_a_topic_deleted_while_a_query_is_stopped_fails_it_or_is_read_when_it_exists_again(
    by: str, scene: Scene
) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 3))
    one = scene.played(**{by: name})
    one.run()
    scene.delete(name)
    with pytest.raises(TopicMissing, match=f"topic {name} does not exist any more.*set failOnDataLoss=false"):
        one.run()
    assert one.run(failOnDataLoss=False) == []
    scene.topic(name=name)
    scene.produce(name, numbered(4, 5))
    assert one.run(failOnDataLoss=False) == texts(4, 5)


def test_deleting_the_only_topic_of_a_running_query_fails_it_with_the_topics_name(scene: Scene) -> None:
    """For the only topic librdkafka reports the same error as for an unreachable broker."""
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    with Engine(scene.options(subscribe=name)) as engine:
        engine.run()
        scene.delete(name)
        with pytest.raises(TopicMissing, match=f"topic {name} does not exist any more.*set failOnDataLoss=false"):
            await_until(lambda: engine.step() is not None, what="the failure of the run")
    assert values_of(engine.rows) == texts(0, 3)


@pytest.mark.parametrize(
    ("protocol", "setting", "value", "named"),
    [
        ("classic", "kafka.transaction.timeout.ms", "9000000", "is 9000000. The brokers refuse that"),
        ("consumer", "kafka.group.remote.assignor", "nope", "is 'nope', which the brokers do not have"),
    ],
)
def test_setting_that_the_brokers_refuse_ends_the_query(
    scene: Scene, protocol: str, setting: str, value: str, named: str
) -> None:
    """Else nothing would ever be committed, or the member would join again for ever."""
    name = scene.topic()
    scene.produce(name, ["a", "b"])
    with pytest.raises(OptionError, match=f"{setting} {named}"):
        scene.played(protocol, subscribe=name, **{setting: value}).run()
