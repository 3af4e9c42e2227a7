"""Makes ``format("kafka-group")`` known to Spark without a ``register()`` call.

Runs in: every Python process that Spark asks for data sources: it imports each installed top-level module whose name
starts with ``pyspark_`` and takes its ``DefaultSource``. Deliberately absent: everything else; import
``spark_group_source`` instead.
"""

from spark_group_source.source import KafkaGroupDataSource as DefaultSource

__all__ = ["DefaultSource"]
