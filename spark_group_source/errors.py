"""The error classes of this package.

Runs in: every process. Deliberately absent: exceptions of other libraries (each is translated in one place: Kafka's in
``kafka.translation``, Delta's in ``delta.table_writer``) and secrets.

Every class keeps its ``fields`` through pickle, because errors travel from executors to the driver. Class names are
stable: they appear in stack traces, in logs and in the output of ``spark-group``. ``docs/errors.md`` is rendered from
the docstrings and from ``remedy``.
"""

from typing import Any, ClassVar


class SourceError(Exception):
    """Base of all errors of this package.

    Args:
        message: what is wrong with which value, why it matters, and what to do.
        fields: the same facts for programs, for example ``topic="orders", partition=3``.
    """

    retriable: ClassVar[bool] = False
    """Whether the same call can succeed when it is repeated without a change."""
    remedy: ClassVar[str] = "Follow the message."
    """What to do, as ``docs/errors.md`` prints it. The message of an error is more specific."""

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.fields)


def _rebuild(cls: type[SourceError], message: str, fields: dict[str, object]) -> SourceError:
    return cls(message, **fields)


class OptionError(SourceError, ValueError):
    """An option is missing, unknown, or has a value that cannot work. Raised by ``load()`` or when a query starts.
    ``fields``: option, if one option is the cause."""

    remedy = "Change the option that the message names. `docs/options.md` lists all options."


class SetupError(SourceError):
    """A program or library on this machine is missing or has an unsupported version. The message is one line."""

    remedy = "Install what the message names, on the driver's host and on every executor."


class GroupError(SourceError):
    """An operation on Kafka, on the group or on the table failed at run time."""

    remedy = (
        "Follow the message. Typical steps: stop the group's members before a reset, repeat a drain, or wait until the "
        "session of a stopped member ends."
    )


class BrokerUnavailable(GroupError):
    """No broker answered in time. ``fields``: op, servers, waited_ms."""

    retriable = True
    remedy = (
        "Check that `kafka.bootstrap.servers` matches the brokers' advertised listeners, and that the driver's host "
        "and every executor can connect to them. Then restart the query: it continues at its position. To survive "
        "longer outages without a restart, raise `brokerTimeoutMs`."
    )


class AccessDenied(GroupError):
    """The cluster refused the credentials, or the user lacks a permission. ``fields``: op, and on: the kind of
    resource (topic, group, cluster or transactional id), empty if unknown."""

    remedy = "Grant the permission that the message names, or correct the credentials. See `docs/security.md`."


class TopicMissing(GroupError):
    """A topic that the query has read was deleted, or a command needs one that does not exist. ``fields``: topics.

    A query may start before its topics exist. With ``failOnDataLoss=false`` it also continues without a deleted one.
    """

    remedy = (
        "Remove the topic from the subscription, or set `failOnDataLoss=false`. A batch that was planned before the "
        "topic was deleted needs the latter. For a command, correct the name."
    )


class DataLoss(GroupError):
    """Records that were not read yet are no longer in the log. ``fields``: topic, partition, expected, available.

    With ``failOnDataLoss=false`` the query logs a warning instead and continues with the remaining records.
    """

    remedy = (
        "The records cannot be recovered from Kafka. Set `failOnDataLoss=false` to continue with the remaining "
        "records; the metric `records_lost` counts the missing ones. To prevent it, set the topic's retention longer "
        "than the longest downtime of the query."
    )


class ReadTimeout(GroupError):
    """A task could not read a range within its deadline. ``fields``: ranges, waited_ms."""

    retriable = True
    remedy = (
        "Spark retries the task. If the error persists, check that executors can connect to the partition leader's "
        "advertised listener and that no client quota (`consumer_byte_rate`) stops them, or raise "
        "`kafkaConsumer.pollTimeoutMs`."
    )


class RebalanceTimeout(GroupError):
    """The group got no assignment in time, after all retries. ``fields``: group, waited_ms."""

    retriable = True
    remedy = (
        "List the members with `spark-group describe --bootstrap-servers HOST:PORT --group GROUP --members`. A member "
        "that does not poll blocks every rebalance until its `max.poll.interval.ms` expires; another driver of the "
        "same checkpoint keeps the static memberships. Stop that member or driver, or wait until its session ends, "
        "then restart the query."
    )


class DrainTimeout(GroupError):
    """A query did not finish its batch within the time of a drain. ``fields``: group."""

    retriable = True
    remedy = "The query drains when its batch ends: run the command again, with a larger `--timeout-s`."


class ChannelBroken(GroupError):
    """The control channel between an executor and the stream reader could not be opened, or was closed. ``fields``:
    waited_ms, and refused: whether every address refused the connection."""

    retriable = True
    remedy = (
        "Open `coordinatorPort` between the executors and the driver's host, and set `coordinatorHost` to a name that "
        "executors can resolve. `memberHost=driver` works without the channel. See `docs/channel.md`."
    )


class CommitFailed(GroupError):
    """Kafka refused an offset commit. The rows are not affected; the next commit includes these offsets."""

    retriable = True
    remedy = (
        "No action is needed for a query that runs. If it cannot start, correct what the message names. After a failed "
        "reset, compare the committed offsets with `spark-group describe --bootstrap-servers HOST:PORT --group GROUP`, "
        "then repeat the reset."
    )


class Fenced(GroupError):
    """A newer process uses this driver's transactional id or instance id. This driver must stop; do not retry."""

    remedy = (
        "Another driver runs with the same checkpoint: keep that one and stop this one. If both queries are intended, "
        "give each its own `checkpointLocation`."
    )


class CheckpointMismatch(GroupError):
    """The offsets in the checkpoint belong to another group, were written by a newer release, or are damaged."""

    remedy = (
        "If `kafka.group.id` was changed, set it back: another group has other offsets, and reads records again. "
        "`docs/recovery.md` shows how to rename one. Otherwise use a new `checkpointLocation`: with `DeltaSink` it "
        "neither loses nor duplicates rows, because the table stores the group's offsets."
    )


class LedgerConflict(GroupError):
    """The batch contradicts the offsets stored in the table: rows could be written twice or skipped."""

    remedy = (
        "Nothing was written. The group's offsets were moved, the table was restored, or a function caught the error "
        "of an earlier batch; the message says which, with the commands. Check the table with `spark-group ledger "
        "verify TABLE`. Then move the group and the table to one position: `spark-group reset "
        "--bootstrap-servers HOST:PORT --group GROUP --table TABLE --to-ledger --execute` moves the group to the "
        "table's offsets; other targets are listed in `docs/cli.md`."
    )


class BadRecords(GroupError):
    """More records than ``DeadLetters`` allows violate a rule or a constraint of the table, or have wrong types."""

    remedy = (
        "Nothing of the batch was written. The message has the first bad records and what they violate. Correct the "
        "sink's `transform`, the rules or the table, or raise `max_fraction`, and start the query with the same "
        "checkpoint."
    )


class RegistryUnavailable(GroupError):
    """A schema registry did not answer in time. Nothing of the batch was written. ``fields``: url, waited_ms."""

    retriable = True
    remedy = (
        "Check that the URL of `decode.Registry` is right and that the driver's host can connect to it; the message "
        "has the client's error. Then start the query with the same checkpoint. To survive longer outages without a "
        "restart, raise `wait_s`."
    )


class InvariantBroken(SourceError):
    """A rule that must always hold was violated: a bug in this package. The message has the last events."""

    remedy = "Nothing was written. Restart the query and report the whole message."
