"""Makes ``format("kafka-group")`` known to Spark without a ``register()`` call.

Runs in: every Python process that Spark asks for data sources: it imports each installed top-level module whose name
starts with ``pyspark_`` and takes its ``DefaultSource``. Deliberately absent: everything else; import
``spark_group_source`` instead.

All such modules are imported in one process, and one that cannot be spoils the look-up for every other source: so on a
Spark that does not fit it is a source that says so at ``load()``.
"""

from typing import TYPE_CHECKING, Any

from spark_group_source import compatibility

if TYPE_CHECKING or compatibility.problem() is None:
    from spark_group_source.source import KafkaGroupDataSource as DefaultSource
else:
    from pyspark.sql.datasource import DataSource

    class DefaultSource(DataSource):
        """In place of the source."""

        def __init__(self, options: Any) -> None:  # noqa: ARG002 - Spark's signature
            compatibility.check()

        @classmethod
        def name(cls) -> str:
            return "kafka-group"


__all__ = ["DefaultSource"]
