"""How fast Spark takes rows from a Python source that has nothing to do: the bound of every such source.

Used by ``executors``. The rows have the columns of the group's source; one Arrow batch is made by each task before its
first row counts, and handed out again and again. What is left is Spark: the Arrow stream between worker and JVM, and
rows made of columns.
"""

import os
from typing import Any

FLOOR = "floor"


def floor(rows: int, size: int, partitions: int) -> Any:
    """A data source with ``rows`` of ``size`` bytes a batch in so many partitions; its class is pickled whole."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    from spark_group_source.executor.records import BATCH_ROWS_MAX, spark_ddl

    class Reader(DataSourceStreamReader):
        at = 0

        def initialOffset(self) -> dict[str, int]:
            return {"batch": 0}

        def latestOffset(self) -> dict[str, int]:  # type: ignore[override]
            self.at += 1
            return {"batch": self.at}

        def partitions(self, start: Any, end: Any) -> list[InputPartition]:
            return [InputPartition(number) for number in range(partitions)]

        def read(self, partition: InputPartition) -> Any:
            from datetime import UTC, datetime

            import pyarrow as pa

            from spark_group_source.executor.records import arrow_schema

            def batch(count: int) -> pa.RecordBatch:
                columns = [
                    pa.nulls(count, pa.binary()),
                    pa.array([os.urandom(size)] * count, pa.binary()),
                    pa.array(["bench"] * count),
                    pa.array([partition.value] * count, pa.int32()),
                    pa.array(range(count), pa.int64()),
                    pa.array([datetime.now(UTC)] * count, pa.timestamp("us", tz="UTC")),
                    pa.array([0] * count, pa.int32()),
                ]
                return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(False))

            left = rows // partitions
            whole = batch(min(left, BATCH_ROWS_MAX))
            while left:
                part = whole.slice(0, min(left, whole.num_rows))
                left -= part.num_rows
                yield part

    class Floor(DataSource):
        @classmethod
        def name(cls) -> str:
            return FLOOR

        def schema(self) -> str:
            return spark_ddl(False)

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            return Reader()

    return Floor
