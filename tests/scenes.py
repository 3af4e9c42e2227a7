"""What a test uses of Kafka and Spark under one name, ``scene``: nothing of it starts before it is used.

Runs in: tests. Deliberately absent: judgements, and what only one file of tests needs; both are beside the tests.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs hide them
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    ResourceType,
)
from kafka_helpers import ADMIN_S, Offsets, Record, await_served, await_until, committed_of, end_offsets_of, produce_to
from kit.broker_cluster import BrokerCluster
from streams import LONG_SESSION_MS, Job, QueryWithoutSpark, options_of
from typer.testing import CliRunner

from spark_group_source.cli import common
from spark_group_source.cli.app import app

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


WIDTH = 2000
"""Columns of the terminal that commands believe they have: no table is folded."""


class Shown(NamedTuple):
    """What a command printed."""

    code: int
    output: str
    stdout: str


def refused(shown: Shown) -> str:
    """The error line of a refused command."""
    assert shown.code == 1, shown.output
    return shown.output.splitlines()[-1]


class Scene:
    """A consumer group that no other test uses, with topics, queries and a folder of its own."""

    def __init__(self, request: pytest.FixtureRequest, group: str) -> None:
        self._request = request
        self.group = group

    @cached_property
    def folder(self) -> Path:
        """The test's temporary directory."""
        folder: Path = self._request.getfixturevalue("tmp_path")
        return folder

    # --- Kafka -----------------------------------------------------------------------------------------------------

    @cached_property
    def broker(self) -> BrokerCluster:
        broker: BrokerCluster = self._request.getfixturevalue("broker")
        return broker

    @property
    def servers(self) -> str:
        return self.broker.bootstrap_servers

    @cached_property
    def admin(self) -> AdminClient:
        admin: AdminClient = self._request.getfixturevalue("admin")
        return admin

    @cached_property
    def producer(self) -> Producer:
        producer: Producer = self._request.getfixturevalue("producer")
        return producer

    def topic(self, partitions: int = 1, *, config: Mapping[str, str] | None = None, name: str | None = None) -> str:
        """Create a topic that no other test uses, and return its name."""
        made: str = self._request.getfixturevalue("topic")(partitions, config=config, name=name)
        return made

    def produce(
        self, topic: str, records: Iterable[bytes | str | Record], *, partition: int | None = None
    ) -> list[tuple[int, int]]:
        """Write records and return [(partition, offset)] once all are acknowledged."""
        return produce_to(self.producer, topic, records, partition=partition)

    def grow(self, topic: str, partitions: int) -> None:
        """Give the topic more partitions, and return once the brokers serve them and the producer knows them."""
        self.admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(ADMIN_S)
        await_served(self.admin, topic, partitions)

        def known() -> bool:
            found = self.producer.list_topics(topic, timeout=ADMIN_S).topics[topic].partitions.values()
            return len(found) == partitions and all(p.leader >= 0 for p in found)

        await_until(known, what="leaders of the new partitions")

    def delete(self, topic: str) -> None:
        """Delete the topic, and return once it is gone."""
        self.admin.delete_topics([topic])[topic].result(ADMIN_S)
        await_until(lambda: topic not in self.admin.list_topics(timeout=ADMIN_S).topics, what=f"the end of {topic}")

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Delete the records of a partition that are before this offset."""

        def done() -> bool:
            try:
                (deleted,) = self.admin.delete_records([KafkaPartition(topic, partition, offset)]).values()
                return bool(deleted.result(ADMIN_S).low_watermark == offset)
            except KafkaException:  # this client does not know a new partition's leader yet: it requests metadata
                self.admin.list_topics(topic, timeout=ADMIN_S)
                return False

        await_until(done, what="the deletion of records")

    def committed(self, group: str | None = None) -> Offsets:
        """The next offset of each partition that the test's group, or another, has committed."""
        return committed_of(self.admin, group or self.group)

    def end_offsets(self, topic: str) -> Offsets:
        """The next offset of each partition of the topic."""
        return end_offsets_of(self.admin, topic)

    # --- queries ---------------------------------------------------------------------------------------------------

    @cached_property
    def spark(self) -> "SparkSession":
        # Few workers have a Spark; a test elsewhere would start another one.
        assert self._request.node.get_closest_marker("spark"), "mark this test with pytest.mark.spark"
        spark: SparkSession = self._request.getfixturevalue("spark")
        return spark

    def options(self, protocol: str = "classic", **more: object) -> dict[str, str]:
        """Options of a query in the test's group; see :func:`streams.options_of`."""
        return options_of(self.servers, self.group, protocol=protocol, **more)

    def job(self, protocol: str = "classic", checkpoint: str = "c", **more: object) -> Job:
        """A Spark query in the test's group."""
        return Job(self.spark, self.options(protocol, **more), self.folder / checkpoint)

    def played(self, protocol: str = "classic", **more: object) -> QueryWithoutSpark:
        """The same without Spark."""
        return QueryWithoutSpark(self.options(protocol, **more))

    def patient(self, protocol: str = "classic", **more: object) -> dict[str, str]:
        """Options of a query whose members stay in the group while the machine stalls."""
        if protocol == "classic":
            return self.options(protocol, kafka__session__timeout__ms=LONG_SESSION_MS, **more)
        self.set_session_timeout(LONG_SESSION_MS)
        return self.options(protocol, **more)

    def set_session_timeout(self, ms: int | None) -> None:
        """Set the session timeout of the test's group under KIP-848; None: the brokers', 6 s."""
        kind = AlterConfigOpType.DELETE if ms is None else AlterConfigOpType.SET
        entry = ConfigEntry("consumer.session.timeout.ms", str(ms or 0), incremental_operation=kind)
        resource = ConfigResource(ResourceType.GROUP, self.group, incremental_configs=[entry])
        for done in self.admin.incremental_alter_configs([resource]).values():
            done.result(ADMIN_S)

    # --- commands --------------------------------------------------------------------------------------------------

    def typed(self, *words: str) -> Shown:
        """``spark-group`` with these words, but in this process and, where it needs one, with the tests' session."""

        @contextmanager
        def session() -> "Iterator[SparkSession]":
            yield self.spark

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(common, "session", session)
            result = CliRunner().invoke(app, words, env={"COLUMNS": str(WIDTH)})
        return Shown(result.exit_code, result.output, result.stdout)

    def of_group(self, command: str, *more: str) -> Shown:
        """A command about the test's group at the test's broker."""
        return self.typed(command, "--group", self.group, "--bootstrap-servers", self.servers, *more)
