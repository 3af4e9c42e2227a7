"""What a user may set: the table of options, their values, the Kafka client's settings, Java's names for them, and
where partitions start.

Runs in: every process. Deliberately absent: asking a broker, a file or a session; an option is checked by
its text alone.
"""
