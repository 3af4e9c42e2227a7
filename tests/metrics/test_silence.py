"""Which groups the exporter reports as unreachable: those that were asked and did not answer."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.kafka.environment import Environment
from spark_group_source.metrics import groups
from spark_group_source.metrics.groups import GroupSweeper

GROUPS = [f"g{number:03}" for number in range(1000)]
BOUND_S, ANSWER_MS, SILENCE_MS = 15.0, 50, 7_000


class Clock(Environment):
    ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms


class Brokers:
    """Brokers with a thousand groups, each of which answers after some time; of some the coordinator is down."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.down, self.closed = clock, set[str](), 0
        self.are_gone = False

    def __call__(self, *_: object, **__: object) -> Any:
        return self

    def groups(self) -> list[SimpleNamespace]:
        if self.are_gone:
            raise BrokerUnavailable("no broker", servers="b:9092", waited_ms=SILENCE_MS)
        return [SimpleNamespace(group=name) for name in GROUPS]

    def list_topics(self) -> dict[str, object]:
        return {}

    def describe_group(self, name: str) -> SimpleNamespace:
        self._clock.ms += SILENCE_MS if name in self.down else ANSWER_MS
        if name in self.down:
            raise BrokerUnavailable("no coordinator", servers="b:9092", waited_ms=SILENCE_MS)
        return SimpleNamespace(state="stable", members=())

    def read(self, *_: object, **__: object) -> dict[object, object]:
        return {}

    def close(self) -> None:
        self.closed += 1

    def latest(self, *_: object, **__: object) -> dict[object, object]:
        return {}


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    made = Brokers(Clock())
    for name in ("GroupAdmin", "RecordTimes", "GroupOffsets"):
        monkeypatch.setattr(groups, name, made)
    return made


def of_this_thread(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, without threads that other tests have left."""
    return [record.getMessage() for record in caplog.records if record.thread == threading.get_ident()]


def sweeper(brokers: Brokers) -> GroupSweeper:
    return GroupSweeper(
        {"bootstrap.servers": "b"}, None, isolation_level="read_committed", bound_s=BOUND_S, environment=brokers._clock
    )


def test_a_sweep_that_takes_longer_than_its_interval_reads_every_group(
    brokers: Brokers, caplog: pytest.LogCaptureFixture
) -> None:
    seen = sweeper(brokers).sweep()
    assert [(group.group, group.state) for group in seen.groups] == [(name, "stable") for name in GROUPS]
    assert seen.took_s > BOUND_S
    assert not of_this_thread(caplog)


def test_a_group_that_was_not_asked_is_not_unreachable(brokers: Brokers, caplog: pytest.LogCaptureFixture) -> None:
    """A coordinator that is down takes the time of the others."""
    brokers.down = {"g000", "g001", "g002"}
    made = sweeper(brokers)
    assert [group.group for group in made.sweep().groups] == sorted(brokers.down)
    assert len(of_this_thread(caplog)) == 3, "nothing follows for the groups that were not asked"
    seen = made.sweep()
    assert [group.group for group in seen.groups if group.unreachable_since_ms is not None] == sorted(brokers.down)
    assert len(seen.groups) == len(GROUPS), "the others are asked first, and nothing fails before they are"
    assert seen.unreachable_since_ms is None


def test_clients_of_groups_are_closed_while_no_broker_answers(brokers: Brokers) -> None:
    """The library would keep what it reports about each of them until the client is used."""
    made = sweeper(brokers)
    made.sweep()
    brokers.closed, brokers.are_gone = 0, True
    made.sweep()
    assert brokers.closed == groups.OPEN_GROUPS_MAX + 1, "and that of the records' timestamps"
    brokers.are_gone = False
    assert len(made.sweep().groups) == len(GROUPS)
