"""The Delta side: the sink, the ledger, Delta's log and Spark's checkpoint. It meets the source in values only.

Runs in: the user's driver, the command line. Deliberately absent: Kafka, members, everything of the stream reader.
"""
