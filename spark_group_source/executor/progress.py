"""How far one range of a reading task has come.

Runs in: executor workers. Deliberately absent: what moves it (``ranges``).
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """The next offset of one range, and what is known of the log behind it."""

    position: int
    end: int
    looked_s: float
    """When it last moved, or was asked about."""
    stopped: bool = False
    """The client gave it up: it needs a new start."""
    torn: bool = False
    """A batch came damaged: what its client gives behind it is not next. It needs a new start, too."""
    at_eof: bool = False
    """What can be read of the log ends here."""
    held: bool = False
    """And the log itself covers the plan: a transaction is open."""
