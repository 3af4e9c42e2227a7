"""What can go wrong, as a tree of classes.

Runs in: every process. Deliberately absent: exceptions of other libraries (each is translated once, where it is met:
Kafka's in ``kafka.translation``, Delta's in ``delta.races``) and secrets.

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
    ├── SetupError           Spark, Java, Python or a library is missing, or of a version that does not fit
    └── InvariantBroken      our bug: nothing was written; the message carries the last events

Every class keeps its ``fields`` through pickle, because errors travel from executors to the driver. The names of the
classes are stable: they stand in stack traces, in logs and before the messages of ``spark-group``; ``docs/errors.md``
has the ``remedy`` of each under its name.
"""

from typing import Any, ClassVar


class SourceError(Exception):
    """Base of all errors of this package.

    Args:
        message: what was wrong, the value, what would be right, and what settles it.
        fields: the same facts for programs, for example ``topic="orders", partition=3``.
    """

    retriable: ClassVar[bool] = False
    remedy: ClassVar[str] = "The message says what settles it."
    """What to do, for the page of errors; the message of an error knows more."""

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.fields)


def _rebuild(cls: type[SourceError], message: str, fields: dict[str, object]) -> SourceError:
    return cls(message, **fields)


class OptionError(SourceError, ValueError):
    """An option is missing, unknown or has a value that cannot work: from ``load()`` or at the start of a query."""

    remedy = "Set the option that the message names to what it says; `docs/options.md` has all of them."


class SetupError(SourceError):
    """Something this machine must have is missing or does not fit. The message is one line and says what to install."""

    remedy = "Install what the message names, on the driver's host and on every executor."


class GroupError(SourceError):
    """Something outside this process did not do what was needed."""

    remedy = (
        "Do what the message says: stop the group's members before a reset, drain again, wait for a session to end."
    )


class BrokerUnavailable(GroupError):
    """No broker answered within the bound. ``fields``: op, servers, waited_ms."""

    retriable = True
    remedy = (
        "Compare `kafka.bootstrap.servers` with the brokers' listeners, and reach them from the driver's host and from "
        "every executor. A query that is to outlive a longer outage needs a larger `brokerTimeoutMs`. Start it again: "
        "it goes on where it was."
    )


class AccessDenied(GroupError):
    """The cluster refused the credentials, or they lack a permission. ``fields``: op, and on what it is missing: topic,
    group, cluster, or transactional id; empty where it is not known."""

    remedy = "Give the user the permission that the message names, or correct the credentials; see `docs/security.md`."


class TopicMissing(GroupError):
    """A subscribed topic does not exist (any more). ``fields``: topics."""

    remedy = "Create the topic, or correct `subscribe`. With `subscribePattern` a topic need not exist yet."


class DataLoss(GroupError):
    """Records that were still to be read are gone. ``fields``: topic, partition, expected, available.

    ``failOnDataLoss=false`` turns this into a warning and goes on with the records that are left.
    """

    remedy = (
        "The records are gone, whatever is done now. `failOnDataLoss=false` goes on with those that are left, and "
        "`records_lost` counts the others. Give the topic a longer retention than the query may stand still."
    )


class ReadTimeout(GroupError):
    """A range could not be read before its deadline. ``fields``: ranges, waited_ms."""

    retriable = True
    remedy = (
        "Spark tries the task again by itself. Where it stays, executors do not reach the partition's leader at its "
        "advertised listener, or `kafkaConsumer.pollTimeoutMs` is too short for the size of a task."
    )


class RebalanceTimeout(GroupError):
    """The group did not give an assignment within the bound, after every retry. ``fields``: group, waited_ms."""

    retriable = True
    remedy = (
        "`spark-group describe` shows who is in the group: a member that does not poll holds every rebalance up, until "
        "its `max.poll.interval.ms` is over; another driver of the same checkpoint keeps its places. Stop that one, or "
        "wait for its session to end, and start again."
    )


class ChannelBroken(GroupError):
    """An executor and the stream reader of its run do not reach each other, or no longer. ``fields``: waited_ms, and
    refused: whether all that listens at its addresses is nobody."""

    retriable = True
    remedy = (
        "Open `coordinatorPort` between executors and the driver's host, and set `coordinatorHost` to a name that "
        "executors can resolve. `memberHost=driver` does without; see `docs/channel.md`."
    )


class CommitFailed(GroupError):
    """Kafka refused the group's offsets. The rows are not affected: the next commit covers them."""

    retriable = True
    remedy = "Nothing is lost. After a reset, look with `spark-group describe` whether it was done, then repeat it."


class Fenced(GroupError):
    """A newer process holds this driver's transactional id, or took a member's place for good. Do not retry: stop."""

    remedy = (
        "Another driver runs the same checkpoint; leave that one and stop this. If there should be two queries, give "
        "each a `checkpointLocation` of its own."
    )


class CheckpointMismatch(GroupError):
    """The checkpoint's offsets are of another group, of a newer release, or damaged."""

    remedy = (
        "Give the query a checkpoint of its own, or set `kafka.group.id` back. With `DeltaSink` a new checkpoint loses "
        "and doubles nothing: the table knows where the group stands."
    )


class LedgerConflict(GroupError):
    """The table already holds records that the batch would write again, and they cannot be told apart safely."""

    remedy = (
        "Nothing was written. Somebody moved the group, or restored the table: decide where to go on, and move both "
        "with `spark-group reset --table`. `--to-ledger` is where the table stands; `spark-group ledger verify` tells "
        "whether its rows fit."
    )


class InvariantBroken(SourceError):
    """A rule that must hold did not: a bug in this package. The message carries what led to it."""

    remedy = "Nothing was written. Start the query again, and report the whole message: it has the last events."
