"""An ordinary consumer as a program: it processes records, writes each one down, commits, and takes commands.

Runs in: a child process of the tests (:class:`rebalance.ordinary.OrdinaryConsumer`). Deliberately absent: any import of
this package. One JSON object per line: commands arrive on stdin, events are written to stdout with the monotonic time.

Commands: ``{"do": "close"}`` leaves the group and ends; ``stall`` stops polling; ``subscribe`` with ``topics``.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Container
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

RECORDS_MAX = 100
"""Records between two commits."""
POLL_S = 0.1


class Application:
    def __init__(self, topics: list[str], file: str, settings: dict[str, Any], keep: bool) -> None:
        self.consumer = Consumer(settings)
        self.topics = topics
        self.out = open(file, "a", encoding="ascii")  # noqa: SIM115 - open for the life of the process
        self.keep = keep
        self.stalled = self.ending = False
        self.next: dict[tuple[str, int], int] = {}
        self.awaited: set[tuple[str, int]] = set()
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        for line in sys.stdin:
            self.commands.put(json.loads(line))
        os._exit(1)  # the test process has ended

    def run(self) -> None:
        self.subscribe()
        emit("started")
        while not self.ending:
            self.execute_commands()
            if not self.stalled and not self.ending:
                self.work()
        self.commit()
        self.consumer.close()
        emit("closed")

    def subscribe(self) -> None:
        self.consumer.subscribe(self.topics, on_assign=self.on_assign, on_revoke=self.on_revoke, on_lost=self.on_lost)

    def execute_commands(self) -> None:
        while True:
            try:
                command = self.commands.get(timeout=POLL_S) if self.stalled else self.commands.get_nowait()
            except queue.Empty:
                return
            match command["do"]:
                case "close":
                    self.ending = True
                case "stall":
                    self.stalled = True
                case "subscribe":
                    self.topics = command["topics"]
                    self.subscribe()
            emit("executed", order=command["do"])
            if self.ending:
                return

    def work(self) -> None:
        count = 0
        while count < RECORDS_MAX and not self.stalled:
            message: Any = self.consumer.poll(POLL_S)
            if message is None:
                break
            if (error := message.error()) is not None:
                emit("error", code=error.name(), text=error.str(), fatal=error.fatal())
                if error.name() == "_FATAL":
                    self.ending = True
                break
            tp = (message.topic(), message.partition())
            if tp in self.awaited:
                self.awaited.discard(tp)
                emit("first", topic=tp[0], partition=tp[1], offset=message.offset())
            self.out.write(f"P {tp[0]} {tp[1]} {message.offset()}\n")
            self.out.flush()
            self.next[tp] = message.offset() + 1
            count += 1
            if not self.commands.empty():
                break
        self.commit()

    def commit(self) -> None:
        if not self.next or self.keep:
            return
        try:
            done = self.consumer.commit(
                offsets=[TopicPartition(*tp, offset) for tp, offset in self.next.items()], asynchronous=False
            )
            for tp in done:
                if tp.error is not None:
                    raise KafkaException(tp.error)
            self.out.writelines(f"C {t} {p} {offset}\n" for (t, p), offset in self.next.items())
            self.out.flush()
            self.next.clear()
        except KafkaException as exc:
            emit("commit_failed", code=exc.args[0].name(), text=exc.args[0].str())

    def on_assign(self, consumer: Any, partitions: list[Any]) -> None:
        tps = [(tp.topic, tp.partition) for tp in partitions]
        self.awaited |= set(tps)
        emit("assigned", partitions=tps)
        if tps:
            try:
                starts = consumer.committed(partitions, timeout=10)
                emit("starts", offsets=[(tp.topic, tp.partition, tp.offset) for tp in starts])
            except KafkaException as exc:
                emit("starts_unknown", text=str(exc))

    def on_revoke(self, consumer: Any, partitions: list[Any]) -> None:
        self.commit()
        emit("revoked", partitions=self.forget(partitions, of=self.next))  # the uncommitted ones

    def on_lost(self, consumer: Any, partitions: list[Any]) -> None:
        emit("lost", partitions=self.forget(partitions))

    def forget(self, partitions: list[Any], of: Container[tuple[str, int]] | None = None) -> list[tuple[str, int]]:
        tps = [(tp.topic, tp.partition) for tp in partitions]
        self.out.writelines(f"L {t} {p} 0\n" for t, p in tps if of is None or (t, p) in of)
        self.out.flush()
        for tp in tps:
            self.next.pop(tp, None)
            self.awaited.discard(tp)
        return tps


def emit(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)  # noqa: T201 - the pipe


if __name__ == "__main__":
    application = Application(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: application.commands.put({"do": "close"}))
    application.run()
