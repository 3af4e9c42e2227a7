"""What the runs of one host tell others there, and what they are asked to: small files in a directory of the user's.

Runs in: the stream reader (writes), the user's driver and the command line (read). Deliberately absent: counting
(``group``), Kafka.
"""
