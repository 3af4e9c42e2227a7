"""The simulated world: threads interleave, wait, are preempted, freeze and end."""

import logging
import queue
from collections.abc import Callable, Iterator

import pytest
from kit.environment import SimulatedEnvironment
from kit.world import Process, World


@pytest.fixture
def world() -> Iterator[World]:
    world = World(1)
    yield world
    world.close()


def end_with(error: BaseException) -> None:
    raise error


def start(process: Process, name: str, run: Callable[[], None]) -> None:
    SimulatedEnvironment(process).spawn(name, run, died=end_with)


def test_threads_wait_in_simulated_time(world: World) -> None:
    process = Process(world, "p")
    environment = SimulatedEnvironment(process)
    orders, answer, seen = environment.queue(2), environment.future(), []

    def worker() -> None:
        seen.append((orders.get(timeout=5), world.now_ms))
        seen.append((orders.get(timeout=5), world.now_ms))
        answer.set_result(seen)
        with pytest.raises(queue.Empty):
            orders.get(timeout=0.25)
        seen.append(("none", world.now_ms))

    def boss() -> None:
        orders.put_nowait("one")
        environment.pause(0.1)
        orders.put_nowait("two")
        with pytest.raises(TimeoutError):
            environment.future().result(timeout=0.01)
        assert answer.result(timeout=1) is seen

    start(process, "worker", worker)
    start(process, "boss", boss)
    world.run_until(10_000)
    assert seen == [("one", 0), ("two", 100), ("none", 350)]
    assert world.now_ms == 10_000


def test_a_condition_admits_one_thread_and_wakes_waiting_threads(world: World) -> None:
    process = Process(world, "p")
    environment = SimulatedEnvironment(process)
    changed = environment.condition()
    log: list[object] = []

    def waits() -> None:
        with changed, changed:
            log.append(changed.wait(1))
            log.append(changed.wait(1))
            log.append(world.now_ms)

    def holds() -> None:
        environment.pause(0.5)
        with changed:
            changed.notify_all()
            environment.pause(2)  # no other thread enters meanwhile
            log.append("out")

    start(process, "waits", waits)
    start(process, "holds", holds)
    world.run_until(10_000)
    assert log == ["out", True, False, 3_500]


def test_draws_of_one_concern_do_not_shift_those_of_another() -> None:
    plain, more = World(3), World(3)
    more.draws("network").between(0, 100)
    assert more.draws("faults").random() == plain.draws("faults").random() != World(4).draws("faults").random()
    assert plain.draws("network") is plain.draws("network")
    assert plain.draws("network").random() != more.draws("network").random()  # one draw further


def test_seeds_decide_how_threads_interleave() -> None:
    def order(seed: int) -> str:
        world = World(seed)
        world.preempt = 0.3
        process = Process(world, "p")
        lock, log = SimulatedEnvironment(process).condition(), []

        def run(name: str) -> None:
            for _ in range(5):
                with lock:
                    log.append(name)

        for name in "ab":
            start(process, name, lambda name=name: run(name))  # type: ignore[misc]
        world.run_until(10_000)
        world.close()
        return "".join(log)

    orders = [order(seed) for seed in range(30)]
    assert len(set(orders)) > 10
    assert orders == [order(seed) for seed in range(30)]


def test_callbacks_due_while_a_process_is_frozen_run_when_it_continues(world: World) -> None:
    process = Process(world, "p")
    environment = SimulatedEnvironment(process)
    log: list[int] = []

    def run() -> None:
        for _ in range(3):
            environment.pause(0.1)
            log.append(world.now_ms)

    start(process, "t", run)
    world.at(150, process.freeze)
    world.at(5_000, process.thaw)
    world.run_until(10_000)
    assert log[0] == 100
    assert 5_000 <= log[1] <= 5_040 and log[2] == log[1] + 100


def test_a_thread_that_freezes_its_process_stops_at_that_point(world: World) -> None:
    process = Process(world, "p")
    log: list[int] = []

    def run() -> None:
        process.freeze()
        log.append(world.now_ms)

    start(process, "t", run)
    world.at(700, process.thaw)
    world.run_until(1_000)
    assert len(log) == 1 and log[0] >= 700


@pytest.mark.parametrize("where", ["by another", "by itself", "by the loop"])
def test_a_killed_process_takes_no_further_step(
    world: World, where: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    process, other = Process(world, "p"), Process(world, "q")
    environment = SimulatedEnvironment(process)
    orders, changed, log = environment.queue(9), environment.condition(), []

    def run() -> None:
        try:
            with changed:
                if where == "by itself":
                    process.kill()
                changed.wait(60)
            log.append("woken")
        except:
            logging.getLogger("product").error("died")
            log.append("unwound")  # plain Python code runs, but its calls have no effect
            with changed:
                log.append("never")
            raise
        finally:
            orders.put_nowait("never")

    def waits() -> None:
        orders.get(timeout=100)
        log.append("never")

    start(process, "run", run)
    start(process, "waits", waits)
    if where == "by another":
        start(other, "kills", process.kill)
    elif where == "by the loop":
        world.at(0, process.kill)
    world.run_until(200_000)
    assert log == ["unwound"]
    assert not caplog.records
    assert capsys.readouterr() == ("", "")
    assert "p: killed" in world.story()


def test_an_uncaught_error_ends_the_history_or_is_passed_to_the_callback(world: World) -> None:
    process = Process(world, "p")
    errors: list[BaseException] = []
    environment = SimulatedEnvironment(process)
    environment.spawn("t", lambda: end_with(ValueError("x")), died=errors.append)
    environment.spawn("t", lambda: end_with(SystemExit()), died=errors.append)
    world.run_until(10)
    assert [str(error) for error in errors] == ["x"]
    process.spawn("t", lambda: end_with(ValueError("y")))
    with pytest.raises(ValueError, match="y"):
        world.run_until(20)


def test_a_thread_that_cannot_be_started_is_reported(world: World) -> None:
    environment = SimulatedEnvironment(Process(world, "p"))
    environment.threads_left = 0
    errors: list[BaseException] = []
    thread = environment.spawn("t", lambda: None, died=errors.append)
    assert not thread.is_alive() and len(errors) == 1


def test_a_polling_thread_sees_an_item_at_its_next_poll(world: World) -> None:
    process = Process(world, "p")
    environment = SimulatedEnvironment(process)
    orders, seen = environment.queue(9), []

    def run() -> None:
        me = world.current
        assert me is not None
        while orders.empty():
            me.block_idle(100, 2_000)
            try:
                seen.append((orders.get_nowait(), world.now_ms))
            except queue.Empty:
                seen.append(("nothing", world.now_ms))

    start(process, "run", run)
    for at_ms in (2_050, 4_320):
        world.at(at_ms, lambda: start(process, "puts", lambda: orders.put_nowait("order")))
    world.run_until(5_000)
    assert seen == [("nothing", 2_000), ("order", 2_100), ("nothing", 4_100), ("order", 4_400)]


def test_a_survivor_continues_when_the_other_threads_of_its_process_are_killed(world: World) -> None:
    process = Process(world, "p")
    environment = SimulatedEnvironment(process)
    log: list[tuple[str, int]] = []

    def count(name: str) -> None:
        for _ in range(3):
            environment.pause(0.1)
            log.append((name, world.now_ms))

    thread = process.spawn("survivor", lambda: count("survivor"))
    start(process, "other", lambda: count("other"))
    process.later("library", 200, lambda: log.append(("library", world.now_ms)))
    world.at(150, lambda: process.kill_all_but(thread, "dies"))
    world.run_until(1_000)
    assert log == [("survivor", 100), ("other", 100), ("survivor", 200), ("survivor", 300)]
