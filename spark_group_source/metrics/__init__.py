"""Numbers for Prometheus: of a run, from inside; of any group, from outside.

Runs in: the stream reader (``metricsPort``), and the process of ``spark-group exporter``. Deliberately absent: counting
(``group.statistics`` does), and storing anything: Prometheus does. Names and units follow its conventions
(https://prometheus.io/docs/practices/naming); the tables ``run.METRICS`` and ``groups.METRICS`` are the documentation.
"""
