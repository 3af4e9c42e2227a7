"""What can go wrong, as a tree of classes.

Runs in: every process. Deliberately absent: exceptions of other libraries (each is translated once, where it is met:
Kafka's in ``kafka.translation``, Delta's in ``delta.deltalog``) and secrets.

::

    SourceError
    ├── OptionError          the call is wrong: fix the option it names
    ├── GroupError           met at run time; ``retriable`` says whether trying again can help
    │   ├── BrokerUnavailable     no broker answered in time (retriable)
    │   ├── AccessDenied          credentials or permissions were refused
    │   ├── TopicMissing          a subscribed topic does not exist
    │   ├── DataLoss              planned or committed offsets are no longer in the log
    │   ├── ReadTimeout           a range was not read before its deadline (retriable)
    │   ├── RebalanceTimeout      the group gave no assignment in time (retriable)
    │   ├── ChannelBroken         the other end of the control channel refused, or did not answer (retriable)
    │   ├── CommitFailed          Kafka refused the group's offsets; the rows are safe (retriable)
    │   ├── Fenced                a newer driver runs this stream
    │   ├── CheckpointMismatch    the checkpoint belongs to another group, or its offsets cannot be read
    │   └── LedgerConflict        the table's offsets and the batch contradict each other
    └── InvariantBroken      our bug: nothing was written; the message carries the last events

Every class keeps its ``fields`` through pickle, because errors travel from executors to the driver.
"""

from typing import Any, ClassVar


class SourceError(Exception):
    """Base of all errors of this package.

    Args:
        message: what was wrong, the value, what would be right, and what settles it.
        fields: the same facts for programs, for example ``topic="orders", partition=3``.
    """

    retriable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.fields)


def _rebuild(cls: type[SourceError], message: str, fields: dict[str, object]) -> SourceError:
    return cls(message, **fields)


class OptionError(SourceError, ValueError):
    """An option is missing, unknown or has a value that cannot work: from ``load()`` or at the start of a query."""


class GroupError(SourceError):
    """Something outside this process did not do what was needed."""


class BrokerUnavailable(GroupError):
    """No broker answered within the bound. ``fields``: op, servers, waited_ms."""

    retriable = True


class AccessDenied(GroupError):
    """The cluster refused the credentials, or they lack a permission. ``fields``: op, and on what it is missing: topic,
    group, or transactional id; empty where it is not known."""


class TopicMissing(GroupError):
    """A subscribed topic does not exist (any more). ``fields``: topics."""


class DataLoss(GroupError):
    """Records that were still to be read are gone. ``fields``: topic, partition, expected, available.

    ``failOnDataLoss=false`` turns this into a warning and goes on with the records that are left.
    """


class ReadTimeout(GroupError):
    """A range could not be read before its deadline. ``fields``: ranges, waited_ms."""

    retriable = True


class RebalanceTimeout(GroupError):
    """The group did not give an assignment within the bound, after every retry. ``fields``: group, waited_ms."""

    retriable = True


class ChannelBroken(GroupError):
    """An executor and the stream reader of its run do not reach each other, or no longer. ``fields``: waited_ms, and
    refused: whether all that listens at its addresses is nobody."""

    retriable = True


class CommitFailed(GroupError):
    """Kafka refused the group's offsets. The rows are not affected: the next commit covers them."""

    retriable = True


class Fenced(GroupError):
    """A newer process holds this driver's transactional id, or took a member's place for good. Do not retry: stop."""


class CheckpointMismatch(GroupError):
    """The checkpoint's offsets are of another group, of a newer release, or damaged."""


class LedgerConflict(GroupError):
    """The table already holds records that the batch would write again, and they cannot be told apart safely."""


class InvariantBroken(SourceError):
    """A rule that must hold did not: a bug in this package. The message carries what led to it."""
