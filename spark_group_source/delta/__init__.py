"""The sink's side: ``DeltaSink``, the ledger, Delta's log and Spark's checkpoint. It shares values with the source.

Runs in: the user's driver, the command line. Deliberately absent: Kafka, members, the stream reader's code.
"""

from typing import Literal

Writer = Literal["auto", "native", "options"]
"""Who commits to a table: ``deltalake``, Delta Lake, or the one that :class:`table_writer.TableWriter` chooses."""
