"""A ledger that the table's log does not go back to any more, made anew from the rows.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: how it
came that nothing is left (nobody of the group wrote for ``delta.logRetentionDuration``), and Kafka.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spark_group_source.delta import names
from spark_group_source.delta.history import Past
from spark_group_source.delta.ledger import Ledger
from spark_group_source.errors import LedgerConflict
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

ROW_COLUMNS = {"topic": "string", "partition": "int", "offset": "bigint"}
"""The columns that tell which record a row is."""


def from_rows(spark: "SparkSession", past: Past, group: str, offsets: Sequence[StreamOffset], *, number: int) -> Ledger:
    """What the table has of the topics of a batch: behind the last row of each partition.

    Without the columns topic, partition and offset nothing is known, and the group goes on where it stands in Kafka.
    Which of the two it was is said in the log.

    Raises:
        LedgerConflict: another group wrote these topics, too, so that nobody can tell whose rows they are.
    """
    table, topics = past.table, sorted({tp.topic for offset in offsets for tp in offset.ranges})
    for other in past.groups():
        there = past.ledger(other) if other != group else None
        if there is not None and set(topics) & there.topic_ids.keys():
            raise LedgerConflict(
                f"group {group!r} wrote to table {table} longer ago than the table's log goes back, and group "
                f"{other!r} has rows of the same topics there: nobody can tell from the rows where {group!r} stands. "
                f"Nothing was written. Say where it goes on: `spark-group reset --group {group} --table {table}`",
                table=table,
                group=group,
            )
    ids = {topic: id_ for offset in offsets for topic, id_ in offset.topic_ids.items() if topic in topics}
    rows = names.read(spark, table)
    types = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
    if not ROW_COLUMNS.items() <= types.items():
        log.warning(
            "group %s: the log of table %s does not go back to its ledger, and the rows lack the columns %s. It goes "
            "on where it stands in Kafka: what was written after the last offset there is written twice",
            group, table, ", ".join(ROW_COLUMNS),
        )  # fmt: skip
        return Ledger(group=group, topic_ids=ids, number=number)
    ends: list[Any] = (
        rows.where(rows["topic"].isin(topics)).groupBy("topic", "partition").agg({"offset": "max"}).collect()
    )
    found = {TopicPartition(row[0], row[1]): row[2] + 1 for row in ends}
    log.warning(
        "group %s: the log of table %s does not go back to its ledger. It is made anew from the rows: %s",
        group, table, ", ".join(f"{tp} {offset}" for tp, offset in sorted(found.items())[:5]) or "none",
    )  # fmt: skip
    return Ledger(group=group, offsets=found, topic_ids=ids, number=number)
