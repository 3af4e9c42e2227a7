"""G8: a part of a run that does not work ends the run with its reason, or holds back nothing but its own."""

import threading
from typing import Any

import pytest
from conftest import await_until
from scenes import Scene
from streams import Engine, numbered, texts, values_of

from spark_group_source.driver.worker import Worker
from spark_group_source.errors import InvariantBroken
from spark_group_source.members.member import Member

REFUSAL = "can't start new thread"


@pytest.fixture
def options(scene: Scene) -> dict[str, str]:
    """Two slots, a topic of two partitions with four records, and little patience."""
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    return scene.options(subscribe=name, groupMembers=2, kafka__max__poll__interval__ms=6000)


def ends_with(engine: Engine) -> str:
    """What the run ends with, be it at once or after a batch."""
    with pytest.raises(InvariantBroken) as found:
        await_until(lambda: engine.step() is None and False, what="the end of the run")
    return str(found.value)


@pytest.mark.parametrize("name", ["worker", "slot-0.1", "slot-1.1"])
def test_G8_a_thread_that_cannot_start_ends_the_run_and_says_so(
    name: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == name:
            raise RuntimeError(REFUSAL)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with Engine(options) as engine:
        text = ends_with(engine)
    assert REFUSAL in text
    assert ("worker" if name == "worker" else f"slot {name[5]}") in text


def test_G8_a_worker_that_dies_ends_the_run_and_says_so(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(options) as engine:
        engine.run()
        assert values_of(engine.rows) == texts(0, 3)

        def die(self: Worker) -> None:
            raise KeyboardInterrupt("the worker is told to go")

        monkeypatch.setattr(Worker, "_turn", die)
        assert "the worker is told to go" in ends_with(engine)


def test_G8_what_the_worker_did_not_expect_ends_the_run_and_says_so(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(options) as engine:
        engine.run()

        def fail(self: Worker) -> None:
            raise ZeroDivisionError("what nobody thought of")

        monkeypatch.setattr(Worker, "_on_time", fail)
        assert "what nobody thought of" in ends_with(engine)


def test_G2_a_slot_that_is_out_of_the_group_holds_no_other_ones_offsets_back_and_is_named(
    options: dict[str, str], scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name, out = options["subscribe"], {1}
    real: Any = vars(Member)["identity"].fget
    with Engine(options) as engine:
        engine.run()
        await_until(lambda: scene.committed() == scene.end_offsets(name), what="the first offsets of both")
        monkeypatch.setattr(Member, "identity", property(lambda self: None if self.slot in out else real(self)))
        before = scene.committed()
        behind = {tp for tp, p in engine.coordinator._run.positions.ours.items() if p.slot in out}
        assert len(behind) == 1
        scene.produce(name, numbered(4, 7, 2))
        engine.run()
        half = {tp: before[tp] if tp in behind else end for tp, end in scene.end_offsets(name).items()}
        await_until(lambda: engine.step() is None and scene.committed() == half, what="the offsets of the other slot")
        await_until(lambda: "slot 1 is not in the group at the moment" in caplog.text, what="the line that says so")
        assert scene.committed() == half
        out.clear()
        await_until(lambda: engine.step() is None and scene.committed() == scene.end_offsets(name), what="the rest")
    assert values_of(engine.rows) == texts(0, 7)
