"""Prefetching in an agent: records that tasks of its executor will read next, buffered as Arrow batches.

Runs in: agents, and executor workers (``client``). Deliberately absent: membership in the group.
"""
