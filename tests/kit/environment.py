"""The environment of product code in simulated time: ``kafka.environment.Environment`` over the simulated world.

Runs in: tests. Conditions, queues and futures behave like the standard library's, and raise the same exceptions.
Deliberately absent: their unused parts. Where a lock is taken or an item is put into a queue, another thread may be
scheduled first (``World.preempt``), so that the seed also determines how threads interleave.
"""

import queue
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit

from kit.world import Process, Thread, World, the_thread, to_ms, wait_until
from spark_group_source.kafka.environment import Environment

if TYPE_CHECKING:
    from kit.cluster import Cluster


class SimulatedEnvironment(Environment):
    """The environment of one simulated process.

    Args:
        process: the process of these threads.
        cluster: the Kafka of its clients; None where only threads and time matter.
    """

    def __init__(self, process: Process, cluster: "Cluster | None" = None) -> None:
        self.process = process
        self.threads_left: int | None = None  # how many more threads can be started; None: unlimited
        self._cluster = cluster
        self._world = process.world

    def now_ms(self) -> int:
        return self._world.now_ms

    def boot_ms(self) -> int:
        return self._world.now_ms

    def wall_ms(self) -> int:
        return self._world.now_ms

    def condition(self) -> Any:
        return Condition(self._world)

    def queue(self, size_max: int) -> Any:
        return Queue(self._world, size_max)

    def future(self) -> Any:
        return Future(self._world)

    def spawn(self, name: str, run: Callable[[], None], *, died: Callable[[BaseException], None]) -> Thread:
        """Start a daemon thread; exceptions of ``run`` go to ``died``, also when the thread cannot be started."""

        def guarded() -> None:
            try:
                run()
            except (GreenletExit, SystemExit):
                pass
            except BaseException as exc:  # noqa: BLE001 - as the real one
                died(exc)

        if self.threads_left is not None:
            self.threads_left -= 1
            if self.threads_left < 0:
                thread = Thread(self.process, name, run)
                thread.ended = True
                died(RuntimeError("can't start new thread"))
                return thread
        return self.process.spawn(name, guarded)

    def pause(self, wait_s: float) -> None:
        the_thread(self._world).block(to_ms(wait_s))

    def is_orphaned(self) -> bool:
        return self.process.orphaned

    def new_id(self) -> str:
        return f"{self.process.draws('ids').getrandbits(48):012x}"

    def consumer(self, settings: Mapping[str, Any]) -> Any:
        return self._kafka().consumer(self.process, settings)

    def producer(self, settings: Mapping[str, Any]) -> Any:
        return self._kafka().producer(self.process, settings)

    def admin(self, settings: Mapping[str, Any]) -> Any:
        return self._kafka().admin(self.process, settings)

    def _kafka(self) -> "Cluster":
        if self._cluster is None:
            raise RuntimeError("this process has no Kafka")
        return self._cluster


class Condition:
    """``threading.Condition(RLock())``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Thread | None = None
        self._depth = 0
        self._entering: deque[Thread] = deque()
        self._waiting: list[Thread] = []

    def __enter__(self) -> bool:
        me = the_thread(self._world)
        if self._owner is not me:
            me.may_be_preempted()
            self._take(me, 1)
        else:
            self._depth += 1
        return True

    def __exit__(self, *_: object) -> None:
        if self._owner is None or self._owner is not self._world.current:
            if not self._world.inert:
                raise RuntimeError("cannot release un-acquired lock")
            return
        self._depth -= 1
        if self._depth == 0:
            self._free()

    def wait(self, timeout: float | None = None) -> bool:
        me = the_thread(self._world)
        if self._owner is not me:
            raise RuntimeError("cannot wait on un-acquired lock")
        depth = self._depth
        self._free()
        self._waiting.append(me)
        try:
            return me.block(None if timeout is None else to_ms(timeout))
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
            self._take(me, depth)

    def notify_all(self) -> None:
        if self._owner is None or self._owner is not the_thread(self._world):
            raise RuntimeError("cannot notify on un-acquired lock")
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            thread.wake()

    def _is_taken(self) -> bool:
        return self._owner is not None

    def _take(self, me: Thread, depth: int) -> None:
        while self._is_taken():
            self._entering.append(me)
            try:
                me.block(None)
            except BaseException:
                if me not in self._entering and not self._is_taken():
                    self._free()  # it was this thread's turn
                raise
            finally:
                if me in self._entering:
                    self._entering.remove(me)
        self._owner, self._depth = me, depth

    def _free(self) -> None:
        self._owner, self._depth = None, 0
        if self._entering:
            self._entering.popleft().wake()


class Queue:
    """``queue.Queue``: raises its Empty and Full."""

    def __init__(self, world: World, size_max: int) -> None:
        self._world, self._size_max = world, size_max
        self._items: deque[Any] = deque()
        self._getting: list[Thread] = []
        self._reader: Thread | None = None  # the thread that polls it

    def put_nowait(self, item: Any) -> None:
        me = the_thread(self._world)
        if len(self._items) >= self._size_max > 0:
            raise queue.Full
        self._items.append(item)
        if self._getting:
            self._getting.pop(0).wake()
        elif self._reader is not None:
            self._reader.stir()
        me.may_be_preempted()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._reader = the_thread(self._world)
        if not block:
            return self.get_nowait()
        if not wait_until(self._world, self._getting, lambda: bool(self._items), timeout):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        self._reader = the_thread(self._world)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class Future:
    """``concurrent.futures.Future``, without cancelling."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._waiting: list[Thread] = []

    def done(self) -> bool:
        return self._done

    def set_result(self, result: Any) -> None:
        self._settle(result, None)

    def set_exception(self, error: BaseException | None) -> None:
        self._settle(None, error)

    def result(self, timeout: float | None = None) -> Any:
        if not self._done and not wait_until(self._world, self._waiting, self.done, timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self._world.inert:
            return
        if self._done:
            raise RuntimeError("a future has one result")
        self._done, self._result, self._error = True, result, error
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            thread.wake()
