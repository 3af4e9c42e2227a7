"""What runs in each cell of the matrix, besides tests of other files: kills, lost checkpoints, two applications, and
stateful queries. ``make matrix`` sets the number of kills, and takes figures from the recorded properties."""

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer
from crash import kills as executor_kills
from crash.churn import Application, broker_settings
from crash.killed import Account, Hammer, Way
from crash.running import HANG_S, progress_of, script
from kafka_helpers import Produce, Record, TopicFactory, await_progress, produce_to
from kit.broker_cluster import BrokerCluster
from rebalance.accounts import measured

from spark_group_source import compatibility
from spark_group_source.local.broker import Broker

KILLS = int(os.environ.get("MATRIX_KILLS", "4"))
SEED = int(os.environ.get("MATRIX_SEED", "0")) or secrets.randbelow(2**32)
PYTHONS = 40
"""Percentage of kills that hit one of Spark's Python processes; the others hit the JVM and the driver."""
POINT_ROUNDS = 2
"""Batches that are killed at each of their points: the first of a query, and a later one."""
SESSION_MS = 15_000
PARTITIONS = 4
HAS_DELTA = compatibility.has_delta_release()
WAYS: tuple[Way, ...] = ("native", "options") if HAS_DELTA else ("native",)
Note = Callable[[str, object], None]

pytestmark = [pytest.mark.crash, pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(4 * HANG_S)]


@pytest.fixture
def hammer(broker: Broker, topic: TopicFactory, group_id: str, tmp_path: Path) -> Callable[..., Hammer]:
    def make(way: Way, **more: Any) -> Hammer:
        home, name = tmp_path / way, f"{group_id}-{way}"
        return Hammer(
            broker,
            home,
            way=way,
            group=name,
            topic=topic(PARTITIONS),
            seed=SEED,
            pythons=PYTHONS,
            report=measured,
            **more,
        )

    return make


def noted(note: Note, accounts: list[Account]) -> None:
    """Record the sums of these accounts, and fail if one has a violation."""
    struck: Counter[str] = Counter(kind for account in accounts for kind in account.struck.elements())
    note("kills", struck.total())
    for kind, count in struck.items():
        note(f"kills of {kind}", count)
    note("lost checkpoints", sum(account.lost_checkpoints for account in accounts))
    note("records", sum(account.produced for account in accounts))
    assert not [account.wrong for account in accounts if account.wrong], "\n".join(map(str, accounts))


def shares(count: int) -> list[tuple[Way, int]]:
    """Each way of writing with its share of the kills."""
    return [(way, count // len(WAYS) + (number < count % len(WAYS))) for number, way in enumerate(WAYS)]


def test_kills_of_the_driver(hammer: Callable[..., Hammer], record_property: Note) -> None:
    noted(record_property, [hammer(way).run(kills=n, lost_checkpoints=0) for way, n in shares(KILLS) if n])


def test_kills_at_each_point_of_a_batch(hammer: Callable[..., Hammer], record_property: Note) -> None:
    noted(record_property, [hammer(way).run_points(POINT_ROUNDS) for way in WAYS])


def test_lost_checkpoints(hammer: Callable[..., Hammer], record_property: Note) -> None:
    noted(record_property, [hammer(way).run(kills=1, lost_checkpoints=1) for way in WAYS])


def test_two_applications_on_one_table(hammer: Callable[..., Hammer], record_property: Note) -> None:
    found = [hammer(way, applications=2).run(kills=2, lost_checkpoints=0) for way in WAYS]
    assert all(account.joined >= 2 for account in found), found
    noted(record_property, found)


# --- executors -------------------------------------------------------------------------------------------------------


def test_kills_of_executors(tmp_path: Path, record_property: Note) -> None:
    """A broker of its own: its log has this group only, and its sessions suit it."""
    each = max(1, KILLS // len(executor_kills.KINDS))
    with BrokerCluster(settings=broker_settings(SESSION_MS)) as broker:
        slow: dict[str, Any] = {**executor_kills.SLOW_READ}
        app = Application(broker, tmp_path / "home", protocol="classic", session_ms=SESSION_MS, **slow)
        account = executor_kills.Kills(app, each=each, seed=SEED, report=measured).run()
    record_property("kills", len(account.results))
    record_property("records", account.produced)
    record_property("rebalances", sum(map(account.rebalances, executor_kills.KINDS)))
    assert not account.lost and not account.doubled, account


# --- stateful queries ------------------------------------------------------------------------------------------------

ROUNDS = 2
"""Kills of the application, each after all queries have written a batch that Spark has not recorded as finished."""
STATEFUL = ("windows", "distinct", "joined")
WINDOW_S = 10
PER_ROUND = 300
"""Records of a round: each id twice, within one second of event time."""
STEP_S = 40
"""Event time between two rounds: later than the watermark's delay."""
JOB = Path(__file__).with_name("stateful_job.py")


class Stateful:
    """The application, and what it must have computed."""

    def __init__(self, servers: str, options: dict[str, object], home: Path, topics: tuple[str, str]) -> None:
        self.home, self.options, self.topics = home, options, topics
        self.producer = Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 3})
        self.start_ms = int(time.time()) // WINDOW_S * WINDOW_S * 1000
        self.expected: dict[str, Counter[str]] = {name: Counter() for name in STATEFUL}
        self.process: object = None

    def send(self, number: int, count: int = PER_ROUND) -> None:
        """Send the records of a round: ids from ``number * PER_ROUND``, each twice, and half of them joined."""
        at_ms = self.start_ms + number * STEP_S * 1000
        ids = [str(number * PER_ROUND + n) for n in range(count)]
        for topic, names in ((self.topics[0], [*ids, *ids]), (self.topics[1], ids[::2])):
            rows = [Record(one.encode(), partition=n % 2, timestamp_ms=at_ms) for n, one in enumerate(names)]
            produce_to(self.producer, topic, rows)
        self.expected["windows"][str(at_ms // 1000 // WINDOW_S * WINDOW_S)] += 2 * count
        self.expected["distinct"].update(ids)
        self.expected["joined"].update(dict.fromkeys(ids[::2], 2))  # each of the two equal records is joined

    def results(self, name: str) -> Counter[str]:
        """What the batches of a query have written, from their files: how often each id, or the count of a window."""
        found: Counter[str] = Counter()
        for batch in (self.home / name).glob("[0-9]*"):
            if (batch / "_SUCCESS").exists():
                for file in batch.glob("*.parquet"):
                    for row in pq.read_table(file).to_pylist():
                        assert name != "windows" or row["id"] not in found, f"window {row['id']} twice"
                        found[row["id"]] += row["count"]
        return found

    def replayed(self, name: str) -> int:
        """How many batches were written more than once."""
        return sum(n > 1 for n in Counter((self.home / f"{name}.written").read_text().split()).values())


def test_stateful_queries_have_each_result_once_after_kills(
    broker: Broker, topic: TopicFactory, group_id: str, produce: Produce, tmp_path: Path, record_property: Note
) -> None:
    del produce
    topics = (topic(2, name=f"{group_id}-a"), topic(2, name=f"{group_id}-b"))
    options: dict[str, object] = {
        "servers": broker.bootstrap_servers,
        "group": group_id,
        "topic": topics[0],
        "other": topics[1],
        "memberHost": "driver",
        "kafka.session.timeout.ms": "6000",
        "kafka.heartbeat.interval.ms": "500",
    }
    home = tmp_path / "home"
    home.mkdir()
    app = Stateful(broker.bootstrap_servers, options, home, topics)
    hold, held = home / "hold", [home / f"held-{name}" for name in STATEFUL]
    for number in range(ROUNDS):
        app.send(number)
        hold.touch()
        with script(JOB, home, options) as process:
            await_progress(lambda: _alive(process, home) and all(h.exists() for h in held), _of(home, process))
            for one in held:
                one.unlink()
        hold.unlink()
    app.send(ROUNDS)
    with script(JOB, home, options) as process:
        wanted = {**app.expected, "windows": Counter(dict(list(app.expected["windows"].items())[:ROUNDS]))}

        def complete() -> bool:
            _alive(process, home)
            return all(sum(app.results(name).values()) >= wanted[name].total() for name in STATEFUL)

        await_progress(complete, _of(home, process), what="all results")
        app.send(ROUNDS + 1, count=1)  # the watermark passes the window before; nothing else may change
        wanted["windows"] = Counter(dict(list(app.expected["windows"].items())[: ROUNDS + 1]))
        wanted["distinct"], wanted["joined"] = app.expected["distinct"], app.expected["joined"]
        await_progress(complete, _of(home, process), what="the last window")
    assert {name: app.results(name) for name in STATEFUL} == wanted
    replayed = {name: app.replayed(name) for name in STATEFUL}
    assert all(replayed.values()), replayed
    record_property("kills", ROUNDS)
    record_property("replayed batches", sum(replayed.values()))
    record_property("results", sum(each.total() for each in wanted.values()))


def _alive(process: object, home: Path) -> bool:
    assert process.poll() is None, (home / "log").read_text(errors="replace")[-4000:]  # type: ignore[attr-defined]
    return True


def _of(home: Path, process: object) -> Callable[[], object]:
    def progress() -> object:
        written = [path.stat().st_size for path in sorted(home.glob("*.written"))]
        return progress_of(home, process), written, len(list(home.glob("checkpoint-*/*/*")))  # type: ignore[arg-type]

    return progress
