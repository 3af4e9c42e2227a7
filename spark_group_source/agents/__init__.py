"""The agent: one process beside an executor that reads ahead between batches and hands tasks what it has.

Runs in: executor workers (they start it and ask it) and the agent itself. Deliberately absent: what
members do (``members``).
"""
