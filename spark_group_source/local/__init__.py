"""A Kafka broker on this machine: nodes, jars, Java, and the settings of the demo and the tests.

Runs in: tests, the demo, the command line. Deliberately absent: anything that a query on a cluster needs.
"""
