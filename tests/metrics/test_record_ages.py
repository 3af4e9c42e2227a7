"""Which next records are read, and which are known without reading."""

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from spark_group_source.kafka.group_offsets import NO_TIME, RecordTime
from spark_group_source.metrics import groups
from spark_group_source.metrics.groups import READ_AGAIN_MS, GroupSweeper, RecordAges
from spark_group_source.model import TopicPartition

TP = TopicPartition("orders", 0)
OTHER = TopicPartition("orders", 1)
KEY = (TP, 40)
RECORD = RecordTime(43, 5_000)


def known(record: RecordTime | None, *, end: int = 90) -> RecordAges:
    ages = RecordAges()
    ages.update({KEY: record}, {KEY: end}, [KEY], now_ms=0)
    return ages


def test_a_known_record_that_still_exists_is_not_read_again() -> None:
    ages = known(RECORD)
    assert ages.known([KEY], now_ms=1) == {TP}
    assert ages.missing({KEY: 95}, {TP: 43}, now_ms=1) == []
    assert ages.age_s(TP, 40, wall_ms=8_000) == 3.0


def test_a_known_record_is_read_again_when_it_may_be_deleted() -> None:
    ages = known(RECORD)
    assert ages.missing({KEY: 95}, {TP: 44}, now_ms=1) == [KEY], "retention took it"
    assert ages.missing({KEY: 95}, {}, now_ms=1) == [KEY], "the start of the log is unknown"
    assert ages.known([KEY], now_ms=READ_AGAIN_MS) == set()
    assert ages.missing({KEY: 95}, {TP: 0}, now_ms=READ_AGAIN_MS) == [KEY], "compaction is not reported"
    assert ages.missing({(TP, 41): 95}, {TP: 0}, now_ms=1) == [(TP, 41)], "the group went on"


def test_the_absence_of_a_record_is_known_until_the_log_grows() -> None:
    ages = known(None, end=90)
    assert ages.known([KEY], now_ms=1) == set()
    assert ages.missing({KEY: 90}, {}, now_ms=1) == []
    assert ages.age_s(TP, 40, wall_ms=8_000) == 0.0
    assert ages.missing({KEY: 91}, {}, now_ms=1) == [KEY]


def test_an_unanswered_record_is_unknown_and_read_first_in_the_next_sweep() -> None:
    ages = known(RECORD)
    behind = {KEY: 95, (OTHER, 7): 9}
    ages.update({KEY: RECORD}, behind, list(behind), now_ms=1)
    assert ages.age_s(OTHER, 7, wall_ms=8_000) is None
    assert ages.missing(behind, {TP: 44}, now_ms=2) == [(OTHER, 7), KEY]
    ages.update({}, behind, [KEY], now_ms=3)
    assert ages.age_s(TP, 40, wall_ms=8_000) is None, "it may be gone, and the present record is unknown"


def test_records_without_a_timestamp_have_no_age_and_future_ones_age_zero() -> None:
    assert known(RecordTime(43, NO_TIME)).age_s(TP, 40, wall_ms=8_000) is None
    assert known(RECORD).age_s(TP, 40, wall_ms=4_000) == 0.0


class OneGroup:
    """A cluster with one partition and one group, in place of all clients of a sweeper; records the requests."""

    def __init__(self) -> None:
        self.at = 40
        self.requests: list[str] = []

    def __call__(self, *_: object, **__: object) -> Any:
        return self

    def list_topics(self) -> dict[str, object]:
        return {TP.topic: SimpleNamespace(partitions=[TP.partition])}

    def describe_group(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(state="empty", members=())

    def latest(self, tps: Collection[TopicPartition], **_: object) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 95)

    def earliest(self, tps: Collection[TopicPartition], **_: object) -> dict[TopicPartition, int]:
        self.requests.append("log starts")
        return dict.fromkeys(tps, 0)

    def read(self, tps: Any, **_: object) -> dict[TopicPartition, object]:
        """The committed offset, or the next record of an offset."""
        if not isinstance(tps, Mapping):
            return {TP: SimpleNamespace(offset=self.at)}
        self.requests.append("record")
        return {tp: RecordTime(offset, 5_000) for tp, offset in tps.items()}


def test_log_starts_are_requested_only_of_groups_that_did_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = OneGroup()
    for name in ("GroupAdmin", "RecordTimes", "GroupOffsets"):
        monkeypatch.setattr(groups, name, cluster)
    sweeper = GroupSweeper({}, ["etl"], isolation_level="read_committed", bound_s=15.0)
    for cluster.at in (40, 50, 60):
        sweeper.sweep()
    assert cluster.requests == ["record"] * 3
    sweeper.sweep()
    assert cluster.requests == ["record"] * 3 + ["log starts"]
