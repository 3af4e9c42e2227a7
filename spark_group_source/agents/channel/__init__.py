"""The control channel between the stream reader of a run and the agents and tasks on executors.

Runs in: the stream reader (the server), agents and tasks (the clients). Deliberately absent: the messages
(``agents.messages``), Kafka, Spark, and encryption. Messages contain offsets, names and states, but no records or
credentials, and the run's secret is never sent.
"""
