"""G2, G4, G5: the driver of a query with a table for each topic is killed: each record is in its table once, and Kafka
is never ahead of a table."""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from delta_files import living_rows
from kafka_helpers import Offsets, TopicFactory, await_progress, committed_of, end_offsets_of, size_of
from rebalance.accounts import Flow
from streams import planned

from crash.job import BETWEEN_TABLES
from crash.killed import ARGUMENTS, CALM, Application, Way, ledger_of
from spark_group_source.local.broker import Broker

RATE_PER_S = 50
TOPICS = 3


class Lake:
    """The query, its topics and their tables."""

    def __init__(self, broker: Broker, home: Path, group: str, topics: list[str], way: Way) -> None:
        self.folder, self.group, self.topics = home / "lake", group, topics
        self.servers = broker.bootstrap_servers
        self.admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        given = {"servers": self.servers, "group": group, "topic": ",".join(topics)}
        given |= {"table": f"{self.folder}/{{topic}}", "maxOffsetsPerTrigger": "2000", **ARGUMENTS[way], **CALM}
        self.query = Application(home, given, read_table=lambda: self.folder / topics[0])

    def progress(self) -> object:
        return size_of(self.query.log), [len(list(self.folder.glob("*/_delta_log/*.json")))]

    def ledgers(self) -> Offsets:
        return {tp: at for t in self.topics if (self.folder / t).exists() for tp, at in self.ledger(t).items()}

    def ledger(self, topic: str) -> Offsets:
        return ledger_of(self.folder / topic, self.group)

    def run_until_commits(self) -> None:
        """Until the run has written to each table."""
        self.query.running()
        before = self.ledgers()

        def are_written() -> bool:
            ledgers = self.ledgers()
            self.query.running()
            return all(any(ledgers[tp] > before.get(tp, 0) for tp in ledgers if tp.topic == t) for t in self.topics)

        await_progress(are_written, self.progress, what="a commit to each table")

    def kill(self) -> None:
        self.query.kill()
        ledgers = self.ledgers()
        ahead = {tp: at for tp, at in committed_of(self.admin, self.group).items() if at > ledgers.get(tp, 0)}
        assert not ahead, (ahead, ledgers)

    def kill_between_tables(self) -> None:
        """The table of the last topic does not have the batch, the others do."""
        self.query.arguments["pause"] = BETWEEN_TABLES
        self.query.start()
        await_progress(lambda: self.has_batch(self.topics[:-1]), self.progress, what="the batch in the other tables")
        self.kill()
        assert not self.has_batch(self.topics[-1:])
        self.query.arguments["pause"] = None

    def has_batch(self, topics: list[str]) -> bool:
        """Whether the run waits between tables, and those of these topics have the newest planned batch."""
        if not (self.query.home / "scratch" / "paused").exists():
            return False
        ledgers, batches = self.ledgers(), planned(Path(self.query.arguments["checkpoint"]))
        return all(ledgers.get(r.tp, 0) >= r.end for r in batches[max(batches)].batch() if r.tp.topic in topics)

    def drain(self) -> None:
        ends = {tp: at for t in self.topics for tp, at in end_offsets_of(self.admin, t).items()}

        def at_the_end() -> bool:
            self.query.running()
            return committed_of(self.admin, self.group) == ends

        await_progress(at_the_end, self.progress, what="the end of what was produced")
        assert self.ledgers() == ends


@pytest.fixture
def lake(
    broker: Broker, tmp_path: Path, group_id: str, topic: TopicFactory, request: pytest.FixtureRequest
) -> Iterator[Lake]:
    found = Lake(broker, tmp_path, group_id, sorted(topic(2) for _ in range(TOPICS)), request.param)
    yield found
    found.query.end()


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(1_800)  # four starts of Spark, some minutes each on one core
@pytest.mark.parametrize(
    "lake",
    ["native", *(pytest.param(way, marks=pytest.mark.full) for way in ("options", "connect"))],
    indirect=True,
)
def test_G4_records_are_in_the_table_of_their_topic_once_after_kills_between_tables(lake: Lake) -> None:
    with ExitStack() as running:
        flows = [running.enter_context(Flow(lake.servers, t, 2, per_s=RATE_PER_S)) for t in lake.topics]
        lake.run_until_commits()
        lake.kill_between_tables()
        lake.run_until_commits()
        lake.kill_between_tables()
        shutil.rmtree(lake.query.arguments["checkpoint"])
        lake.run_until_commits()
    lake.drain()
    for topic, flow in zip(lake.topics, flows, strict=True):
        counts = Counter(row["id"] for row in living_rows(lake.folder / topic, ["id"]))
        assert len(counts) == flow.sent and set(counts.values()) == {1}, (topic, flow.sent, counts.most_common(3))
