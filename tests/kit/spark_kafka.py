"""The jars of Spark's own Kafka connector, for comparisons.

Runs in: tests, benchmarks. Deliberately absent: the session that gets them.
"""

from importlib import metadata
from pathlib import Path

from spark_group_source.local import jars

EXCLUDE = (f"org.apache.spark:spark-token-provider-kafka-0-10_{jars.SCALA}",)
TOKEN_PROVIDER = f"{EXCLUDE[0]}:4.0.0"


def spark_kafka_jars(version: str = "") -> list[Path]:
    """The jars without those that Spark contains.

    Args:
        version: empty: that of the installed Spark.
    """
    connector = f"org.apache.spark:spark-sql-kafka-0-10_{jars.SCALA}:{version or metadata.version('pyspark')}"
    exclude = (*EXCLUDE, *jars._sparks_modules())
    return jars._without_sparks(jars.resolve((connector, TOKEN_PROVIDER), exclude=exclude, mb=10))
