"""What a machine wants done: the orders of one event, and the time it came at.

Runs in: the stream reader (inside ``machine``), tests. Deliberately absent: doing it.
"""

from spark_group_source.group import events as ev


class Outbox:
    """Filled while one event is taken in; emptied by whoever handed it in."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.commands: list[ev.Command] = []

    def begin(self, now_ms: int) -> None:
        self.now_ms, self.commands = now_ms, []

    def order(self, command: ev.Command) -> None:
        self.commands.append(command)

    def say(self, text: str, *, warn: bool = False) -> None:
        """One line for the log. ``warn``: someone should look at it."""
        self.commands.append(ev.Say(text=text, warn=warn))
