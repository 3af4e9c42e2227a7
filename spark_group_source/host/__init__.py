"""What runs, sinks and the command line share on one host: run files, and ``GroupListener``, which reads them.

Runs in: the stream reader and the user's driver (both write), the command line (reads). Deliberately absent: counting
(:mod:`spark_group_source.protocol.statistics`), Kafka.
"""
