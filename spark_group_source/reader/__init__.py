"""Reading in tasks: ranges of offsets to Arrow batches, straight from the brokers.

Runs in: executors. Deliberately absent: the group. Ranges are planned elsewhere, and reading them needs no membership.
"""
