"""All that is said on the control channel of a run.

Runs in: the stream reader, agents, tasks. Deliberately absent: what it means. Both ends must have the same messages, or
they do not let each other in.
"""

import functools

from spark_group_source.channel.codec import Codec
from spark_group_source.channel.messages import CLAIM_MESSAGES
from spark_group_source.members import messages as ms


@functools.cache
def codec() -> Codec:
    """One for the process: it has no state."""
    return Codec((*ms.TYPES, *CLAIM_MESSAGES))
