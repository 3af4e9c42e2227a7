"""Tasks: ranges of offsets to Arrow batches, straight from the brokers.

Runs in: executors. Deliberately absent: the group. Which range a task reads was planned elsewhere, and reading it makes
nobody a member.
"""
