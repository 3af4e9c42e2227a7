"""The group protocol as a pure state machine: events in, commands out.

Runs in: the stream reader, tests. Deliberately absent: clock, threads, sockets, logs, Kafka, Spark.
"""
