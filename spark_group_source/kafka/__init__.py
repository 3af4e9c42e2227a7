"""The group's side of Kafka: requests about topics, offsets and groups, the fenced offset commit, members' consumers.

Runs in: the stream reader, agents, the user's driver (CLI). Deliberately absent: reading records (``reader``), and
decisions (``protocol``). Besides ``reader`` and ``local`` only this package imports confluent_kafka; here Kafka's
errors become this package's exceptions.
"""
