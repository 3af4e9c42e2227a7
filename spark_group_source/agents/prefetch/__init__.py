"""Read-ahead in an agent: what tasks of its executor will read next, held as Arrow batches.

Runs in: agents, and executor workers (``near``). Deliberately absent: membership in the group.
"""
