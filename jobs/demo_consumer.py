"""The demo's other member: an ordinary consumer, with nothing in it that knows of Spark.

Runs in: a child process of ``demo.py``. It processes a few records at a time, commits them, and only then writes down
which orders they were, so its file holds exactly what it committed. SIGTERM makes it leave the group.
"""

import json
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from confluent_kafka import Consumer, Message, TopicPartition

RECORDS_MAX = 200
WAIT_S = 0.2
NAME = "ordinary-consumer"


def main(
    bootstrap_servers: Annotated[str, typer.Option()],
    group: Annotated[str, typer.Option()],
    topic: Annotated[str, typer.Option()],
    out: Annotated[Path, typer.Option(help="A line for each record: partition, offset, order.")],
    protocol: Annotated[str, typer.Option(help="classic or consumer.")] = "classic",
) -> None:
    """Process orders as a member of the group until SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": group,
        "group.protocol": protocol,
        "client.id": NAME,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
    }
    if protocol == "classic":  # under KIP-848 the broker has these
        settings |= {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 500}
    consumer = Consumer(settings)
    consumer.subscribe([topic])
    try:
        with out.open("a", encoding="utf-8") as file:
            while not stop.is_set():
                records = [r for r in consumer.consume(RECORDS_MAX, WAIT_S) if r.error() is None]
                if records:
                    orders = [json.loads(r.value() or "")["order_id"] for r in records]  # the processing
                    consumer.commit(offsets=_next_of(records), asynchronous=False)
                    lines = zip(records, orders, strict=True)
                    file.writelines(f"{r.partition()} {r.offset()} {order}\n" for r, order in lines)
                    file.flush()
    finally:
        consumer.close()


def _next_of(records: list[Message]) -> list[TopicPartition]:
    """The offset after the last record of each partition."""
    last = {(r.topic() or "", r.partition() or 0): r.offset() or 0 for r in records}
    return [TopicPartition(topic, partition, offset + 1) for (topic, partition), offset in last.items()]


if __name__ == "__main__":
    typer.run(main)
