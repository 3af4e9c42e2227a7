"""The user's options: the option table, settings of the Kafka client, Java's names for them, starting positions.

Runs in: every process. Deliberately absent: access to brokers, files or a Spark session; options are checked as text.
"""
