"""The group protocol as a pure state machine: events in, commands out.

Runs in: the stream reader, tests; its values (such as rules, events, offsets) in every process. Deliberately absent:
clock, threads, sockets, logs, Kafka, Spark.
"""
