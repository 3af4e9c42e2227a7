"""Metrics for Prometheus: of a query run, and of any group (the exporter).

Runs in: the stream reader (``metricsPort``), the process of ``spark-group exporter``. Deliberately absent: counting
(``protocol.statistics``) and storage (Prometheus). Names and units follow the conventions of Prometheus
(https://prometheus.io/docs/practices/naming). The documentation is generated from the tables ``run.METRICS`` and
``groups.METRICS``.
"""
