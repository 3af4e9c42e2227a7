"""The coordinator of a query run and its request thread, in the stream reader (the process Spark starts per query run).

Runs in: the stream reader. Deliberately absent: decisions (``protocol``), Spark, Delta. This package executes the
commands and steps of ``protocol.run.Run`` and feeds their results back as events.
"""
