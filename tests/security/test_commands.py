"""Commands in messages connect to brokers that need credentials: with the file that the message describes."""

import shlex

import pytest
from kafka_helpers import Record, committed_of, create_topic, set_committed
from kit.run_harness import RunHarness
from printed_commands import commands
from reading import read
from scenes import Scene

from security.secured import PASSWORD, SecuredBroker, query
from spark_group_source.errors import GroupError, RebalanceTimeout
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev

pytestmark = pytest.mark.broker


def test_commands_run_as_printed_with_a_file_of_the_querys_kafka_options(
    secured: SecuredBroker, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = {"message.timestamp.after.max.ms": str(2**63 - 1)}
    topic = create_topic(secured.admin, f"{scene.group}-unreadable", config=far)
    given = query(secured.scram(), scene.group, topic)
    options = Options.parse(given)
    secured.produce(topic, [Record(b"x", timestamp_ms=2**62)])
    set_committed(secured.admin, scene.group, topic, {0: 0})
    tp = TopicPartition(topic, 0)

    run = RunHarness(group=scene.group, connection=options.connection)
    run.silent = {ev.Join}
    with pytest.raises(RebalanceTimeout) as timeout:
        run.latest()
    with pytest.raises(GroupError, match="cannot store") as unreadable:
        list(read(options.consumer_settings(), [OffsetRange(tp, 0, 1)]))

    monkeypatch.chdir(scene.folder)
    lines = [f"{name.removeprefix('kafka.')}={value}\n" for name, value in given.items() if name.startswith("kafka.")]
    (scene.folder / "client.properties").write_text("".join(lines))
    for error in (timeout, unreadable):
        assert "client.properties contains the query's kafka.* options without this prefix" in str(error.value)
        assert PASSWORD not in str(error.value)
        (command,) = commands(error.value)
        shown = scene.typed(*shlex.split(command)[1:])
        assert shown.code == 0 and scene.group in shown.output, f"{command}\n{shown.output}"
    assert committed_of(secured.admin, scene.group) == {tp: 1}
