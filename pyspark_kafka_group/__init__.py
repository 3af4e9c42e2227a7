"""Registers ``format("kafka-group")`` with Spark, without a ``register()`` call.

Runs in: every Python process in which Spark looks up data sources: it imports each installed top-level module whose
name starts with ``pyspark_``, and uses its ``DefaultSource``. Deliberately absent: everything else; import
``spark_group_source`` instead.

Spark imports all such modules in one process, and a failing import breaks the lookup of every other source. So where
the source cannot be imported, as with an unsupported Spark or an old pyarrow, this module has a source that fails at
``load()`` instead.
"""

from typing import TYPE_CHECKING, Any

from spark_group_source import compatibility
from spark_group_source.errors import SetupError

if TYPE_CHECKING:
    from spark_group_source.source import KafkaGroupDataSource as DefaultSource
else:
    try:
        compatibility.check()
        from spark_group_source.source import KafkaGroupDataSource as DefaultSource
    except (SetupError, ImportError) as exc:
        from pyspark.sql.datasource import DataSource

        problem = exc

        class DefaultSource(DataSource):
            """A source that fails at ``load()`` with the reason."""

            def __init__(self, options: Any) -> None:  # noqa: ARG002 - Spark's signature
                raise problem

            @classmethod
            def name(cls) -> str:
                return "kafka-group"


__all__ = ["DefaultSource"]
