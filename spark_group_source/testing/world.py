"""Simulated time, processes that crash or freeze, and a network that delays, loses and repeats.

Runs in: tests. Deliberately absent: real threads, clocks and randomness other than the seed's; what happens is decided
by the seed alone, so a failure can be run again. Kafka (``kafka_group``) and what the processes do (``spark_driver``).
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from random import Random
from typing import TypeVar

REQUEST_TIMEOUT_MS = 700
"""After this a request without an answer is sent again."""
STORY_LINES_MAX = 10_000

R = TypeVar("R")
Do = Callable[[], None]


class World:
    """The scheduler: one heap of things to do, one source of randomness, one story."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_ms = 0
        self.loss = 0.0  # share of requests or answers that get lost
        self.delay_ms_max = 15
        self.down_until_ms = 0  # no broker answers before this
        self.steps = 0
        self._heap: list[tuple[int, int, Do]] = []
        self._order = itertools.count()
        self._story: deque[tuple[int, str | Callable[[], str]]] = deque(maxlen=STORY_LINES_MAX)

    def at(self, delay_ms: int, do: Do) -> None:
        heapq.heappush(self._heap, (self.now_ms + delay_ms, next(self._order), do))

    def run_until(self, end_ms: int, *, stop: Callable[[], bool] | None = None) -> bool:
        """Do everything up to ``end_ms``; True when ``stop`` held before."""
        while self._heap and self._heap[0][0] <= end_ms:
            if stop is not None and stop():
                return True
            self.now_ms, _, do = heapq.heappop(self._heap)
            self.steps += 1
            do()
        self.now_ms = end_ms
        return stop is not None and stop()

    def between(self, low_ms: int, high_ms: int) -> int:
        return low_ms + int(self.random.random() * (high_ms + 1 - low_ms))

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def note(self, text: str | Callable[[], str]) -> None:
        """A line of the story; a function makes its text only if the story is told."""
        self._story.append((self.now_ms, text))

    def story(self) -> str:
        return "\n".join(f"{ms:>7} {text if isinstance(text, str) else text()}" for ms, text in self._story)


class Process:
    """Something that can be killed, or stopped and continued (SIGSTOP, SIGCONT).

    What is due while it is stopped happens when it goes on: in order for each of its threads, in any order among them.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.frozen = False
        self.thawed_at_ms = 0
        self._due: dict[str, list[Do]] = {}

    def later(self, thread: str, delay_ms: int, do: Do) -> None:
        """Do something on one of its threads."""
        self.world.at(delay_ms, lambda: self._run(thread, do))

    def _run(self, thread: str, do: Do) -> None:
        if not self.alive:
            return
        if self.frozen or thread in self._due:
            self._due.setdefault(thread, []).append(do)
        else:
            do()

    def kill(self) -> None:
        self.world.note(f"{self.name}: killed")
        self.alive = False

    def freeze(self) -> None:
        self.world.note(f"{self.name}: frozen")
        self.frozen = True

    def thaw(self) -> None:
        self.world.note(f"{self.name}: goes on")
        self.frozen, self.thawed_at_ms = False, self.world.now_ms
        for thread in list(self._due):
            self.world.at(self.world.between(0, 40), lambda thread=thread: self._catch_up(thread))  # type: ignore[misc]

    def _catch_up(self, thread: str) -> None:
        if self.frozen:
            return
        due = self._due.get(thread, [])
        if not due:
            self._due.pop(thread, None)
            return
        do = due.pop(0)
        if self.alive:
            do()
            self.world.at(0, lambda: self._catch_up(thread))

    def call(
        self,
        thread: str,
        ask: Callable[[Callable[[R], None]], None],
        answer: Callable[[R], None],
        *,
        repeat: bool = True,
    ) -> None:
        """Send a request to the broker, again after a timeout until it is answered; ``answer`` runs on ``thread``.

        Args:
            ask: runs at the broker and calls what it is given, now or later.
            repeat: whether a lost answer makes the broker do it again.
        """
        world = self.world

        def attempt() -> None:
            lost = world.chance(world.loss)
            if lost:
                self.later(thread, REQUEST_TIMEOUT_MS, attempt)
            else:
                world.at(world.between(1, world.delay_ms_max), serve)

        def serve() -> None:
            if world.now_ms < world.down_until_ms:
                self.later(thread, REQUEST_TIMEOUT_MS, attempt)
            else:
                ask(reply)

        def reply(result: R) -> None:
            if repeat and world.chance(world.loss):
                self.later(thread, REQUEST_TIMEOUT_MS, attempt)
            else:
                self.later(thread, world.between(1, world.delay_ms_max), lambda: answer(result))

        attempt()
