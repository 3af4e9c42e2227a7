"""``spark-group``: the commands around the source.

Runs in: a terminal. Deliberately absent: anything that a job needs; a job imports the package.
"""
