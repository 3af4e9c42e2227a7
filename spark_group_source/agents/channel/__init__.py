"""The control channel: how tasks and other processes on executors speak with the stream reader of their run.

Runs in: the stream reader (the server), executor processes and tasks (the clients). Deliberately absent: what is said
(the messages belong to who says them), Kafka, Spark, and encryption: what travels are ranges, names and states. Records
and credentials do not, and the secret itself never does.
"""
