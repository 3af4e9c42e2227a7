"""Members of the group, wherever they live: here on a thread of their own, or at an agent.

Runs in: the stream reader, agents. Deliberately absent: decisions (``group``), and which offsets are committed
(``driver``).
"""
