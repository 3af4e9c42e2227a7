"""The members of the consumer group: one thread and one Kafka consumer for each slot.

Runs in: the stream reader, agents. Deliberately absent: decisions (``protocol``), and placing members on agents
(``agents``).
"""
