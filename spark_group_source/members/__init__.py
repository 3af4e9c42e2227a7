"""Members of the group: the thread that owns a consumer, wherever it runs.

Runs in: the stream reader. Deliberately absent: decisions (``group``), which offsets are committed (``driver``).
"""
