"""The stream reader, the process that Spark starts beside the driver for each run of a query: shells around ``group``.

Runs in: the stream reader. Deliberately absent: decisions (``group``), Spark, Delta. A shell carries out what the
protocol says and brings back what came of it.
"""
