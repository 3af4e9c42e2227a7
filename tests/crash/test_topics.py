"""G2, G4, G5: the driver of a query with a table for each topic, or for each value of an expression, is killed: each
record is in its table once, and Kafka is never ahead of a table that has a commit in each batch."""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest
from confluent_kafka.admin import AdminClient
from delta_files import living_rows
from kafka_helpers import Offsets, TopicFactory, await_progress, committed_of, end_offsets_of, size_of
from rebalance.accounts import Flow
from streams import planned

from crash.job import BY, ROUTES
from crash.killed import ARGUMENTS, CALM, Application, Way, ledger_of, needs_delta
from spark_group_source.local.broker import Broker

RATE_PER_S = 50
TOPICS = 3
Routing = Literal["topic", "value", "function of the value"]
"""What the table of a record depends on, or what names the tables."""


class Lake:
    """The query, its topics and their tables."""

    def __init__(self, broker: Broker, home: Path, group: str, topics: list[str], way: Way, routing: Routing) -> None:
        self.folder, self.group, self.topics = home / "lake", group, topics
        routed, on_demand = routing != "topic", routing == "function of the value"
        self.tables = dict.fromkeys(ROUTES, topics) if routed else {topic: [topic] for topic in topics}
        """The topics of each table."""
        self.complete = [ROUTES[-1]] if on_demand else [*self.tables]
        """The tables that have a commit in each batch with records of their topics."""
        self.servers = broker.bootstrap_servers
        self.admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        given = {"servers": self.servers, "group": group, "topic": ",".join(topics), "by": BY if routed else ""}
        given["on_demand"] = "1" if on_demand else ""
        given |= {"table": f"{self.folder}/{{topic}}", "maxOffsetsPerTrigger": "2000", **ARGUMENTS[way], **CALM}
        self.query = Application(home, given, read_table=lambda: self.folder / next(iter(self.tables)))

    def progress(self) -> object:
        return size_of(self.query.log), [len(list(self.folder.glob("*/_delta_log/*.json")))]

    def ledger(self, table: str) -> Offsets:
        return ledger_of(self.folder / table, self.group) if (self.folder / table).exists() else {}

    def run_until_commits(self) -> None:
        """Until the run, started if necessary, has written to each table."""
        self.query.running()
        before = {table: self.ledger(table) for table in self.tables}

        def are_written() -> bool:
            self.query.running()
            return all(
                any(at > former.get(tp, 0) for tp, at in self.ledger(table).items()) for table, former in before.items()
            )

        await_progress(are_written, self.progress, what="a commit to each table")

    def kill(self) -> None:
        self.query.kill()
        committed = committed_of(self.admin, self.group)
        for table in self.complete:
            topics, ledger = self.tables[table], self.ledger(table)
            ahead = {tp: at for tp, at in committed.items() if tp.topic in topics and at > ledger.get(tp, 0)}
            assert not ahead, (table, ahead, ledger)

    def kill_between_tables(self) -> None:
        """The last table does not have the batch, the others do."""
        (self.query.home / "scratch" / "hold").touch()
        *others, last = self.tables
        await_progress(lambda: self.have_batch(others), self.progress, what="the batch in the other tables")
        self.kill()
        assert not self.have_batch([last])

    def have_batch(self, tables: list[str]) -> bool:
        """Whether the run waits between tables, and these have the newest planned batch."""
        if not (self.query.home / "scratch" / "paused").exists():
            return False
        batches = planned(Path(self.query.arguments["checkpoint"]))
        batch = batches[max(batches)].batch()
        return all(
            self.ledger(table).get(r.tp, 0) >= r.end
            for table in tables
            for r in batch
            if r.tp.topic in self.tables[table]
        )

    def drain(self) -> None:
        ends = {tp: at for t in self.topics for tp, at in end_offsets_of(self.admin, t).items()}

        def at_the_end() -> bool:
            self.query.running()
            return committed_of(self.admin, self.group) == ends

        await_progress(at_the_end, self.progress, what="the end of what was produced")
        for table in self.complete:
            topics = self.tables[table]
            assert self.ledger(table) == {tp: at for tp, at in ends.items() if tp.topic in topics}


@pytest.fixture
def lake(
    broker: Broker, tmp_path: Path, group_id: str, topic: TopicFactory, request: pytest.FixtureRequest
) -> Iterator[Lake]:
    way, routing = request.param
    found = Lake(broker, tmp_path, group_id, sorted(topic(2) for _ in range(TOPICS)), way, routing)
    yield found
    found.query.end()


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(1_800)  # three starts of Spark, some minutes each on one core
@pytest.mark.parametrize(
    "lake",
    [
        ("native", "topic"),
        pytest.param(("options", "value"), marks=needs_delta),
        ("connect", "function of the value"),
    ],
    ids=lambda each: f"{each[0]} by {each[1]}",
    indirect=True,
)
def test_G4_records_are_in_the_table_of_their_topic_or_value_once_after_kills_between_tables(lake: Lake) -> None:
    with ExitStack() as running:
        flows = [running.enter_context(Flow(lake.servers, t, 2, per_s=RATE_PER_S)) for t in lake.topics]
        lake.run_until_commits()
        lake.kill_between_tables()
        lake.run_until_commits()
        lake.kill_between_tables()
        shutil.rmtree(lake.query.arguments["checkpoint"])
        lake.run_until_commits()
    lake.drain()
    sent = {topic: flow.sent for topic, flow in zip(lake.topics, flows, strict=True)}
    found: Counter[tuple[str, str]] = Counter()
    for table, topics in lake.tables.items():
        rows = [(row["topic"], row["id"]) for row in living_rows(lake.folder / table, ["topic", "id"])]
        assert all(topic in topics and (table not in ROUTES or table == str(int(id_) % 3)) for topic, id_ in rows)
        found.update(rows)
    assert set(found.values()) == {1}, found.most_common(3)
    assert Counter(topic for topic, _ in found) == sent
