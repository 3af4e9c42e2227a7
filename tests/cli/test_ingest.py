"""The guide from kafka-delta-ingest as printed, with a table that has its transactions."""

import shlex

import pyarrow as pa
import pytest
from delta_files import living_rows
from deltalake import CommitProperties, Transaction, write_deltalake
from scenes import Scene
from streams import numbered
from test_docs import blocks

from spark_group_source import DeltaSink
from spark_group_source.model import TopicPartition

pytestmark = pytest.mark.spark

LAST = {0: 2, 1: 4}
"""By partition: the offset of the last record in the table."""
PRINTED = '{"orders":{"0":24,"1":17}}'


def test_a_query_goes_on_behind_the_records_that_kafka_delta_ingest_wrote(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    topic, table = scene.topic(len(LAST)), scene.folder / "orders"
    scene.produce(topic, numbered(0, 9, len(LAST)))
    stored = [Transaction(f"ingest-{partition}", at) for partition, at in LAST.items()]
    rows = pa.table({"id": [at * len(LAST) + partition for partition, last in LAST.items() for at in range(last + 1)]})
    write_deltalake(table, rows, commit_properties=CommitProperties(app_transactions=stored))
    code = next(b.text for b in blocks() if b.document == "migrate.md" and "transaction_version" in b.text)
    exec(code.replace("/lake/orders", str(table)).replace('"orders"', f'"{topic}"'), {})
    offsets = capsys.readouterr().out.strip()
    command = next(b.text for b in blocks() if b.document == "migrate.md" and PRINTED in b.text)
    command = command.replace(PRINTED, offsets).replace("broker:9092", scene.servers)
    _, *words = shlex.split(command.replace("--topic orders", f"--topic {topic}").replace("etl", scene.group))
    moved = scene.typed(*words)
    assert moved.code == 0, moved.output
    assert scene.committed() == {TopicPartition(topic, partition): at + 1 for partition, at in LAST.items()}
    sink = DeltaSink(table, transform=lambda df: df.selectExpr("CAST(CAST(value AS STRING) AS BIGINT) AS id"))
    scene.job(subscribe=topic).run_into(sink, availableNow=True)
    assert sorted(row["id"] for row in living_rows(table, ["id"])) == list(range(10))
