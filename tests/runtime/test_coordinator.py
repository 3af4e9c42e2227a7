"""What the coordinator publishes, how long it waits, and the end of its threads. No broker, no thread."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from kit.harness import GroupHarness, tps
from manual_environment import ManualEnvironment

from spark_group_source.errors import InvariantBroken
from spark_group_source.host import run_files
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.statistics import Statistics
from spark_group_source.runtime.coordinator import WAIT_S, Coordinator

(A,) = tps("orders", 0)


class Published(run_files.Publisher):
    """Without files."""

    committed = has_ended = False

    def publish(
        self, statistics: Statistics, *, drained: bool = False, last_batch: int = -1, committed: bool = False
    ) -> None:
        assert not self.has_ended, "nothing is published after the end"
        self.committed = committed

    def close(self, committed: StreamOffset | None = None, *, seq: int = -1) -> None:
        self.has_ended = True


@pytest.fixture
def published() -> Published:
    return Published("g")


@pytest.fixture
def coordinator(published: Published) -> Coordinator:
    options = Options.parse({"kafka.bootstrap.servers": "b", "kafka.group.id": "g", "subscribe": "orders"})
    return Coordinator(options, environment=ManualEnvironment(), publisher=published)


@pytest.mark.proves("G2", level="core")
def test_offsets_count_as_committed_when_kafka_has_all_of_them(coordinator: Coordinator, published: Published) -> None:
    """The sink of a run's last batch waits for that."""
    group = GroupHarness()
    group.start_stream()
    group.reads({A: (100, 150)})
    coordinator._run = group.run

    def is_published() -> bool:
        coordinator._publish()
        return published.committed

    assert is_published()
    group.durable()
    assert not is_published()
    group.commit_succeeds()
    assert is_published()


def test_a_run_that_stops_after_its_jvm_commits_and_closes_its_members(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[ev.Step] = [ev.Wait(until_ms=0), ev.Wait(until_ms=0), ev.RaiseError(error=InvariantBroken("a fault"))]
    ends: list[bool] = []
    monkeypatch.setattr(coordinator._environment, "is_orphaned", lambda: True)
    monkeypatch.setattr(coordinator, "_handle", lambda _: None)
    monkeypatch.setattr(coordinator, "_next_step", lambda: steps.pop(0))
    monkeypatch.setattr(coordinator, "_shut_down", lambda *, leave: ends.append(leave))
    with pytest.raises(InvariantBroken, match="a fault"):
        coordinator.close()
    assert ends == [False] and not steps


class Changed(threading.Condition):
    """Records the waits, which end at once."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return True


@pytest.mark.parametrize(("ms", "waits"), [(100, [0.1]), (60_000, [WAIT_S]), (0, [])])
def test_a_wait_of_the_run_ends_when_its_time_is_over(coordinator: Coordinator, ms: int, waits: list[float]) -> None:
    def proceed(*, now_ms: int) -> tuple[ev.Step, list[ev.Command]]:
        return ev.Wait(until_ms=now_ms + ms), []

    stub: Any = SimpleNamespace(proceed=proceed)
    coordinator._run, coordinator._changed = stub, (changed := Changed())
    coordinator._next_step()
    assert changed.waits == waits


def test_the_files_of_a_run_are_removed_while_nothing_is_published(
    coordinator: Coordinator, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock thread that has begun to publish would write them again."""
    free: list[bool] = []

    def try_to_publish() -> None:
        if coordinator._publishing.acquire(blocking=False):
            free.append(True)

    def close(committed: StreamOffset | None = None, *, seq: int = -1) -> None:
        clock = threading.Thread(target=try_to_publish)
        clock.start()
        clock.join()
        published.has_ended = True

    monkeypatch.setattr(published, "close", close)
    coordinator._shut_down(leave=False)
    assert published.has_ended and not free


def test_the_clock_ends_when_the_run_is_shut_down(coordinator: Coordinator) -> None:
    coordinator._shut_down(leave=False)
    coordinator._run_clock()  # a clock that goes on publishes
