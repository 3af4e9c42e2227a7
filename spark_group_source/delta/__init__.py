"""The sink's side: ``DeltaSink``, the ledger, Delta's log and Spark's checkpoint. It shares values with the source.

Runs in: the user's driver, the command line. Deliberately absent: Kafka, members, the stream reader's code.
"""
