"""Simulated time, processes with threads that crash or freeze, and a network that delays, loses and repeats requests.

Runs in: tests. A simulated thread is a greenlet: it runs ordinary blocking code, and each blocking call switches to the
loop of the :class:`World`, which continues with the next due callback. So all events have one order that depends on the
seed only, and a failure is reproducible. Each concern (a thread, a connection, the faults) draws from its own random
stream: an additional draw in one of them does not change the draws of the others.
Deliberately absent: real threads, clocks and randomness other than the seed's; Kafka (``cluster``), and the primitives
on which threads wait (``environment``).
"""

import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

REQUEST_TIMEOUT_MS = 700
"""A request without a response is sent again after this time."""
STORY_LINES_MAX = 10_000
PREEMPTED_MS_MAX = 30
"""Maximum time that a preempted thread waits for others."""

R = TypeVar("R")
Do = Callable[[], None]


class Draws(Random):
    """The random stream of one concern."""

    def between(self, low_ms: int, high_ms: int) -> int:
        return low_ms + int(self.random() * (high_ms + 1 - low_ms))

    def chance(self, share: float) -> bool:
        return share > 0 and self.random() < share


class World:
    """The scheduler: one heap of callbacks, one story, one seed. Used from one real thread."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._draws: dict[str, Draws] = {}
        self.now_ms = 0
        self.loss = 0.0  # share of requests or responses that get lost
        self.delay_ms_max = 15
        self.down_from_ms = self.down_until_ms = 0  # no broker responds in this time
        self.preempt = 0.0  # chance that a thread is preempted where it takes a lock or puts into a queue
        self.steps = 0
        self.current: Thread | None = None  # the running thread; None in the loop itself
        self.hub = getcurrent()
        self.inert = False  # while dead greenlets are unwound: their actions have no effect
        self.processes: list[Process] = []
        self._failure: BaseException | None = None
        self._doomed: list[Process] = []
        self._heap: list[tuple[int, int, Do]] = []
        self._order = itertools.count()
        self._story: deque[tuple[int, str | Callable[[], str]]] = deque(maxlen=STORY_LINES_MAX)

    def at(self, delay_ms: int, do: Do) -> None:
        if not self.inert:
            heapq.heappush(self._heap, (self.now_ms + delay_ms, next(self._order), do))

    def run_until(self, end_ms: int, *, stop: Callable[[], bool] | None = None) -> bool:
        """Run all callbacks up to ``end_ms``. Returns True if ``stop`` was true before.

        Raises:
            BaseException: the first one passed to :meth:`fail`, or raised by a callback.
        """
        heap = self._heap
        while heap and heap[0][0] <= end_ms:
            if stop is not None and heap[0][0] != self.now_ms and stop():
                return True
            self.now_ms, _, do = heapq.heappop(heap)
            self.steps += 1
            do()
            if self._doomed:
                self._bury()
            if self._failure is not None:
                raise self._failure
        self.now_ms = max(self.now_ms, end_ms)
        return stop is not None and stop()

    def others_due(self) -> bool:
        """Whether another callback is due at the current time."""
        return bool(self._heap) and self._heap[0][0] <= self.now_ms

    def draws(self, topic: str) -> Draws:
        """Return the random stream of one concern; always the same object for one topic."""
        found = self._draws.get(topic)
        if found is None:
            found = self._draws[topic] = Draws(f"{self._seed}/{topic}")
        return found

    def note(self, text: str | Callable[[], str]) -> None:
        """Add a line to the story; a function is called only if the story is printed."""
        if not self.inert:
            self._story.append((self.now_ms, text))

    def story(self) -> str:
        return "\n".join(f"{ms:>7} {text if isinstance(text, str) else text()}" for ms, text in self._story)

    def fail(self, error: BaseException) -> None:
        """Stop the history with this error, however the running code handles exceptions."""
        if self._failure is None and not self.inert:
            self._failure = error

    def close(self) -> None:
        """End a history: unwind all greenlets, so that the garbage collector finds none."""
        for process in self.processes:
            process.alive = False
        self._doomed = self.processes
        self._bury()
        self._heap.clear()

    def doom(self, process: "Process") -> None:
        """Unwind a dead process's threads, at once or as soon as the loop runs again."""
        self._doomed.append(process)
        if self.current is None:
            self._bury()
        elif self.current.process is process:
            self.hub.switch()  # returns only by being unwound

    def _bury(self) -> None:
        while self._doomed:
            self.bury(self._doomed.pop().threads)

    def bury(self, threads: "list[Thread]") -> None:
        """Unwind dead threads. Their ``finally`` blocks run; the primitives only raise GreenletExit there."""
        silent = logging.root.manager.disable
        self.inert = True
        logging.disable()
        try:
            for thread in threads:
                self.current = thread
                thread.unwind()
        finally:
            self.current, self.inert = None, False
            logging.disable(silent)


class Process:
    """A process, which can be killed, or stopped and continued (SIGSTOP, SIGCONT).

    Callbacks that become due while it is stopped run when it continues: in order within a thread, in any order across
    threads.
    A thread is a greenlet (:meth:`spawn`), or only a name under which callbacks run in order (:meth:`later`), such as a
    library's own thread.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.frozen = False
        self.orphaned = False
        self.thawed_at_ms = 0
        self.cut_off_from_ms = self.cut_off_until_ms = 0  # no broker is reachable from here in this time
        self.members_from_ms = self.members_until_ms = 0  # no member here reaches the coordinator in this time
        self.survivor: Thread | None = None  # the only thread that runs on
        self.threads: list[Thread] = []
        self._due: dict[str, list[Do]] = {}
        world.processes.append(self)

    def spawn(self, name: str, run: Do) -> "Thread":
        """Start a thread; an exception that leaves ``run`` ends the history."""
        thread = Thread(self, f"{name}~{len(self.threads)}", run)
        if self.alive:
            self.threads.append(thread)
            self.later(thread.name, 0, thread.begin)
        return thread

    def later(self, thread: str, delay_ms: int, do: Do) -> None:
        """Schedule a callback on one of its threads."""
        self.world.at(delay_ms, partial(self.run, thread, do))

    def run(self, thread: str, do: Do) -> None:
        """Run a callback now, or when the process continues."""
        if not self.alive or (self.survivor is not None and thread != self.survivor.name):
            return
        if self.frozen or thread in self._due:
            self._due.setdefault(thread, []).append(do)
        else:
            do()

    def draws(self, topic: str) -> Draws:
        """The random stream of one concern of this process."""
        return self.world.draws(f"{self.name}/{topic}")

    def cut_off(self) -> bool:
        """Whether it cannot reach any broker now."""
        return self.world.now_ms < max(self.world.down_until_ms, self.cut_off_until_ms)

    def cut(self, ms: int) -> None:
        """Let it reach no broker for so long."""
        self.cut_off_from_ms, self.cut_off_until_ms = self.world.now_ms, self.world.now_ms + ms
        self.world.note(f"{self.name}: cut off until {self.cut_off_until_ms}")

    def cut_members(self, ms: int) -> None:
        """Let its members not reach the coordinator for so long; all other requests are answered."""
        self.members_from_ms, self.members_until_ms = self.world.now_ms, self.world.now_ms + ms
        self.world.note(f"{self.name}: members reach no coordinator until {self.members_until_ms}")

    def kill(self, how: str = "killed") -> None:
        """Kill it now, without another step of its threads. Does not return if one of these calls it."""
        if self.alive:
            self.world.note(f"{self.name}: {how}")
            self.alive = False
            self._due.clear()
            self.world.doom(self)

    def kill_all_but(self, thread: "Thread", how: str) -> None:
        """Kill all of its threads but one, which stands for another process. Only from the loop."""
        self.world.note(f"{self.name}: {how}")
        self.survivor = thread
        others = [each for each in self.threads if each is not thread]
        self.threads, self._due = [thread], {name: due for name, due in self._due.items() if name == thread.name}
        self.world.bury(others)

    def freeze(self) -> None:
        """Stop it now, including the thread that calls this."""
        self.world.note(f"{self.name}: frozen")
        self.frozen = True
        if self.world.current is not None and self.world.current.process is self:
            self.world.current.block(0)

    def thaw(self) -> None:
        self.world.note(f"{self.name}: continues")
        self.frozen, self.thawed_at_ms = False, self.world.now_ms
        for thread in list(self._due):
            self.world.at(self.draws("thaw").between(0, 40), partial(self._catch_up, thread))

    def _catch_up(self, thread: str) -> None:
        if self.frozen or not self.alive:
            return
        due = self._due.get(thread, [])
        if not due:
            self._due.pop(thread, None)
            return
        due.pop(0)()
        self.world.at(0, partial(self._catch_up, thread))

    def call(
        self,
        thread: str,
        request: Callable[[Callable[[R], None]], None],
        answer: Callable[[R], None],
        *,
        repeat: bool = True,
    ) -> None:
        """Send a request to the broker, and retry after a timeout until a response arrives; ``answer`` runs on
        ``thread``.

        Args:
            request: runs at the broker and calls its argument with the response, now or later.
            repeat: whether a retry after a lost response makes the broker run the request again.
        """
        world, draws = self.world, self.draws(f"network/{thread}")

        def attempt() -> None:
            if draws.chance(world.loss):
                self.later(thread, REQUEST_TIMEOUT_MS, attempt)
            else:
                world.at(draws.between(1, world.delay_ms_max), serve)

        def serve() -> None:
            if self.cut_off() or world.now_ms < self.members_until_ms:
                self.later(thread, REQUEST_TIMEOUT_MS, attempt)
            else:
                request(reply)

        def reply(result: R) -> None:
            if repeat and draws.chance(world.loss):
                self.later(thread, REQUEST_TIMEOUT_MS, attempt)
            else:
                self.later(thread, draws.between(1, world.delay_ms_max), partial(answer, result))

        attempt()


class Thread:
    """One simulated thread. All methods but :meth:`wake` and :meth:`join` are called on it, or by the loop."""

    def __init__(self, process: Process, name: str, run: Do) -> None:
        self.process, self.name = process, name
        self.ended = False
        self._world = process.world
        self._draws = process.draws(f"preempted/{name}")
        self._run = run
        self._greenlet = greenlet(self._main, parent=self._world.hub)
        self._turn = 0  # number of waits, so that a late event of an earlier wait wakes no later one
        self._woken = False
        self._idle: tuple[int, int] | None = None
        self._interrupt: BaseException | None = None
        self._joiners: list[Thread] = []

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended, perhaps without the survivor."""
        return not self.process.alive or self.process.survivor not in (None, self)

    def begin(self) -> None:
        self._go(self._turn, woken=True)

    def block(self, timeout_ms: int | None) -> bool:
        """Wait until :meth:`wake`, or for ``timeout_ms``; return whether it was woken.

        Raises:
            GreenletExit: the process is dead.
        """
        if self.is_dead:
            raise GreenletExit
        if timeout_ms is not None:
            self._world.at(timeout_ms, partial(self._time_is_up, self._turn))
        self._world.hub.switch()
        if self.is_dead:
            raise GreenletExit
        if self._interrupt is not None:
            error, self._interrupt = self._interrupt, None
            raise error
        return self._woken

    def block_idle(self, step_ms: int, longest_ms: int) -> bool:
        """Wait like a loop that polls every ``step_ms``, without the polls that would find nothing:
        until :meth:`wake`, or :meth:`stir` and the end of the step, but at most ``longest_ms``."""
        self._idle = (self._world.now_ms, step_ms)
        try:
            return self.block(max(step_ms, longest_ms))
        finally:
            self._idle = None

    def wake(self) -> None:
        """End its wait. Callers must know that it waits."""
        self.process.later(self.name, 0, partial(self._go, self._turn, woken=True))

    def stir(self) -> None:
        """Make its next poll find something."""
        if self._idle is not None:
            since_ms, step_ms = self._idle
            left_ms = -(self._world.now_ms - since_ms) % step_ms
            self._world.at(left_ms, partial(self._time_is_up, self._turn))

    def interrupt(self, error: BaseException) -> None:
        """Raise this error where it waits, as a signal handler does that runs meanwhile."""
        if not self.ended:
            self._interrupt = error
            self.wake()

    def may_be_preempted(self) -> None:
        """Sometimes let others run first: those due at this instant, or even those due a little later."""
        world, draws = self._world, self._draws
        if world.preempt and draws.chance(world.preempt):
            delay_ms = 0 if draws.chance(0.7) else draws.between(1, PREEMPTED_MS_MAX)
            if delay_ms or world.others_due():
                self.block(delay_ms)

    def join(self, timeout_s: float | None = None) -> None:
        wait_until(self._world, self._joiners, lambda: self.ended, timeout_s)

    def is_alive(self) -> bool:
        return not self.ended

    def unwind(self) -> None:
        """Unwind its stack. Only for dead processes."""
        self._turn += 1
        try:
            self._greenlet.throw(GreenletExit)
        except BaseException:  # noqa: BLE001 - no caller is left to handle it
            pass

    def _main(self) -> None:
        try:
            self._run()
        except GreenletExit:
            pass
        except BaseException as exc:  # noqa: BLE001 - the loop raises it
            self._world.fail(exc)
        self.ended = True
        for thread in self._joiners:
            thread.wake()

    def _time_is_up(self, turn: int) -> None:
        if turn == self._turn:
            self.process.run(self.name, partial(self._go, turn, woken=False))

    def _go(self, turn: int, *, woken: bool) -> None:
        if turn == self._turn and not self.ended:
            self._turn += 1
            self._woken = woken
            self._world.current = self
            self._greenlet.switch()
            self._world.current = None


def the_thread(world: World) -> Thread:
    """Return the running thread.

    Raises:
        GreenletExit: its process is dead.
        RuntimeError: no thread runs: the loop itself cannot wait.
    """
    me = world.current
    if me is None:
        raise RuntimeError("only a simulated thread can wait")
    if me.is_dead:
        raise GreenletExit
    return me


def wait_until(world: World, waiting: list[Thread], holds: Callable[[], bool], timeout_s: float | None = None) -> bool:
    """Wait on the running thread, woken by changes, until a condition holds; False: not in time."""
    me = the_thread(world)
    deadline_ms = None if timeout_s is None else world.now_ms + to_ms(timeout_s)
    while not holds():
        left_ms = None if deadline_ms is None else deadline_ms - world.now_ms
        if left_ms is not None and left_ms <= 0:
            return False
        waiting.append(me)
        try:
            me.block(left_ms)
        finally:
            if me in waiting:
                waiting.remove(me)
    return True


def to_ms(seconds: float) -> int:
    """Whole milliseconds, rounded up: a wait is never shorter than requested. Negative values become 0."""
    return max(0, -int(-seconds * 1000 // 1))
