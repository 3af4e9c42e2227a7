"""Agents: a process beside each executor that runs group members placed there, and prefetches records for its tasks.

Runs in: the stream reader, executor workers (they start an agent and read from it), and agents. Deliberately absent:
the behaviour of members (``members``), and the decision which slot is placed where (``protocol.placement``).
"""
