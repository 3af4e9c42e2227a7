"""Time a query from a topic in Avro to a Delta table: by this source with ``decode.avro``, and by Spark's own connector
with the same ``from_avro`` expression, written by hand for the one schema of the topic.

``python -m tests.bench avro [--records N] [--rounds N]``

One broker, one Spark, a schema registry on loopback, ``records`` records of about 100 bytes in one topic, read with
AvailableNow in BATCHES batches. The two ways take turns. ``versions N``: the subject has more schemas, and the records
are those of the first one. Prints records per second of the batches without the first one, and the ratio.
"""

import argparse
import io
import json
import statistics
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastavro
from confluent_kafka import Producer
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from deltalake import DeltaTable
from kit.schema_registry import SchemaRegistry
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import from_avro

from bench.report import OURS, QUERY_S, done, machine, run_to_end, session
from spark_group_source import DeadLetters, DeltaSink, decode
from spark_group_source.local.background import create_topics
from spark_group_source.local.broker import Broker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC = "orders"
SUBJECT = f"{TOPIC}-value"
BATCHES = 4
PARTITIONS = 4
MANY = 20
"""The versions of the subject with several."""
SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "string"},
        {"name": "amount", "type": "double"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "items", "type": {"type": "array", "items": "int"}},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
CONNECTOR, PLAIN, SEVERAL, LETTERS = "Spark's connector", "decode.avro", f"{MANY} versions", "with dead letters"


def fill(servers: str, schema_id: int, records: int) -> None:
    """Write the records."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "queue.buffering.max.messages": 200_000})
    parsed = fastavro.parse_schema(SCHEMA)
    for number in range(records):
        row = {"id": number, "customer": f"customer-{number % 997:020}", "amount": number / 7, "at": number}
        buffer = io.BytesIO(struct.pack(">bI", 0, schema_id))
        buffer.seek(0, io.SEEK_END)
        fastavro.schemaless_writer(buffer, parsed, {**row, "items": [1, 2, 3], "note": "x" * 40})
        producer.produce(TOPIC, buffer.getvalue(), partition=number % PARTITIONS)
        producer.poll(0)
    if producer.flush(QUERY_S):
        raise TimeoutError(f"the records were not written within {QUERY_S} s")


def by_hand(df: "DataFrame") -> "DataFrame":
    value = from_avro(F.substring("value", 6, 2**31 - 1), json.dumps(SCHEMA))
    return df.select("topic", "partition", "offset", value.alias("o")).select("topic", "partition", "offset", "o.*")


def batch_rate(
    spark: "SparkSession", servers: str, way: str, registries: Mapping[str, decode.Registry], records: int, home: Path
) -> float:
    """Run the query. Returns its records per second without the first batch."""
    kind = "kafka" if way == CONNECTOR else OURS
    stream = spark.readStream.format(kind).option("kafka.bootstrap.servers", servers).option("subscribe", TOPIC)
    stream = stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", str(records // BATCHES))
    if way == CONNECTOR:
        write = by_hand(stream.load()).writeStream.format("delta").option("path", str(home / "table"))
    else:
        stream = stream.option("kafka.group.id", f"bench-{home.name}")

        def parse(df: "DataFrame") -> "DataFrame":
            rows = decode.avro(df, "value", registries.get(way, registries[PLAIN]), subject=SUBJECT, reader=1)
            return rows.select("topic", "partition", "offset", "value.*", *["error"] * (way == LETTERS))

        letters = DeadLetters(home / "bad", error="error") if way == LETTERS else None
        write = stream.load().writeStream.foreachBatch(DeltaSink(home / "table", transform=parse, dead_letters=letters))
    query = run_to_end(write.option("checkpointLocation", str(home / "checkpoint")))
    found = DeltaTable(home / "table").to_pyarrow_table(columns=["id"])["id"].to_numpy()
    if len(found) != records or int(found.sum()) != records * (records - 1) // 2:
        raise AssertionError(f"{way}: the table has {len(found)} rows, not {records}, or other ones")
    measured = done(query)[1:]
    took_s = sum(progress["durationMs"]["addBatch"] for progress in measured) / 1000
    return float(sum(progress["numInputRows"] for progress in measured) / took_s)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench avro", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    ways = (CONNECTOR, PLAIN, SEVERAL, LETTERS)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as scratch,
        Broker() as broker,
        SchemaRegistry() as one,
        SchemaRegistry() as several,
    ):
        for server, versions in ((one, 1), (several, MANY)):
            client = SchemaRegistryClient({"url": server.url})
            for number in range(versions):
                client.register_schema(SUBJECT, Schema(json.dumps({**SCHEMA, "doc": f"{number}"}), "AVRO"))
        create_topics(broker.bootstrap_servers, {TOPIC: PARTITIONS})
        fill(broker.bootstrap_servers, 1, chosen.records)
        registries = {PLAIN: decode.Registry(one.url), SEVERAL: decode.Registry(several.url)}
        spark = session(Path(scratch))
        try:
            for number in range(chosen.rounds):
                for way in sorted(ways, reverse=bool(number % 2)):
                    home = Path(scratch) / f"{number}-{ways.index(way)}"
                    home.mkdir()
                    rate = batch_rate(spark, broker.bootstrap_servers, way, registries, chosen.records, home)
                    rates[way].append(rate)
        finally:
            spark.stop()
    medians = {way: statistics.median(values) for way, values in rates.items()}
    print(f"{machine()}: {chosen.records:,} records, {BATCHES} batches, records/s into Delta")
    for way, median in medians.items():
        each = ", ".join(f"{value:,.0f}" for value in rates[way])
        print(f"  {way:18} {median:9,.0f} ({each})  {median / medians[CONNECTOR]:.2f} times the connector's")
    return 0
