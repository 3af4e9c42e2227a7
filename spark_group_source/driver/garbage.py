"""Keeps Python's garbage collector from stopping everything for the sake of plans.

Runs in: the stream reader. Deliberately absent: freeing, which counting references does as ever.

A full collection looks at every object, and no thread runs meanwhile: not the one that answers tasks, nor a member's.
With 100,000 partitions that took up to 0.8 s, several times in a plan, and nothing of a plan is garbage for it.
"""

import gc
import time
from typing import Final

LOOK_AGAIN_S: Final = 3_600.0
"""What was set aside and became garbage in circles meanwhile is found this late."""

_looked_at_s = time.monotonic()


def set_aside() -> None:
    """Call it after each plan: what lives now lives long, and need not be looked at again until the hour is over."""
    global _looked_at_s  # noqa: PLW0603 - there is one collector in a process
    if time.monotonic() - _looked_at_s >= LOOK_AGAIN_S:
        _looked_at_s = time.monotonic()
        gc.unfreeze()
    gc.collect()
    gc.freeze()
