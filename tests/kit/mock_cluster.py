"""librdkafka's mock cluster: brokers in this process that speak Kafka's protocol, with injected errors.

Runs in: tests; other processes may connect while it is open. It needs no JVM and starts in milliseconds. Deliberately
absent, because these brokers cannot do it: retention, compaction, offsets by timestamp, transactions with records, most
of the admin API (``describe_topics`` and ``list_offsets`` work, since they use Metadata and ListOffsets), topic errors
by :meth:`MockCluster.push_request_errors` (Metadata responses ignore them: see :meth:`MockCluster.set_topic_error`).
librdkafka calls it experimental; only this module uses it.

Produce with any client: an unknown topic is created with four partitions.
"""

import ctypes as c
from collections.abc import Sequence
from enum import IntEnum
from types import TracebackType

import pytest

from spark_group_source.librdkafka import (
    CLIENT,
    INT,
    INT64,
    POINTER,
    POINTERS,
    PRODUCER,
    SIZE,
    TEXT,
    Client,
    Library,
    Signatures,
    _loaded,
)
from spark_group_source.model import TopicPartition

_I16, _I32 = c.c_int16, c.c_int32
_CALLS: Signatures = {
    **CLIENT,  # name: result, arguments
    "mock_cluster_new": (POINTER, POINTER, INT),
    "mock_cluster_destroy": (None, POINTER),
    "mock_cluster_bootstraps": (TEXT, POINTER),
    "mock_topic_create": (INT, POINTER, TEXT, INT, INT),
    "mock_topic_delete": (INT, POINTER, TEXT),
    "mock_topic_set_error": (None, POINTER, TEXT, INT),
    "mock_partition_delete_records": (INT, POINTER, TEXT, _I32, INT64),
    "mock_partition_set_leader": (INT, POINTER, TEXT, _I32, _I32),
    "mock_partition_push_request_errors": (INT, POINTER, TEXT, _I32, _I16, SIZE),  # and as many codes
    "mock_push_request_errors_array": (None, POINTER, _I16, SIZE, c.POINTER(INT)),
    "mock_clear_request_errors": (None, POINTER, _I16),
    "mock_set_controller_id": (None, POINTER, _I32),
    "mock_broker_set_down": (INT, POINTER, _I32),
    "mock_broker_set_up": (INT, POINTER, _I32),
    "mock_broker_set_rtt": (INT, POINTER, _I32, INT),
    "mock_set_apiversion": (INT, POINTER, _I16, _I16, _I16),
    "mock_start_request_tracking": (None, POINTER),
    "mock_clear_requests": (None, POINTER),
    "mock_get_requests": (POINTERS, POINTER, c.POINTER(SIZE)),
    "mock_request_destroy_array": (None, POINTERS, SIZE),
    "mock_request_api_key": (_I16, POINTER),
}
_OLDEST = 0x0210_00_00
"""The oldest librdkafka with such a mock cluster. With an older one, which the package supports, real brokers test it.
"""
_ARGUMENTS_MAX = 500
"""The maximum of arguments of one C call, which ctypes limits."""


class Api(IntEnum):
    """The API keys of the requests that these brokers answer."""

    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_FOR_LEADER_EPOCH = 23


class MockCluster:
    """Brokers 1 to ``brokers`` on 127.0.0.1; a context manager. Its methods may be called from any thread.

    Args:
        brokers: the number of brokers.

    Raises:
        SetupError: this librdkafka has no mock cluster, or another one.
    """

    def __init__(self, brokers: int = 1) -> None:
        if _loaded().rd_kafka_version() < _OLDEST:
            pytest.skip("the brokers of this mock cluster have no controller, which topic checks need: librdkafka 2.16")
        self._lib = lib = Library(_CALLS)
        self._client = Client(lib, PRODUCER, {"log_level": "3"})
        self._handle = lib.mock_cluster_new(self._client.rk, brokers)
        self.set_controller(1)
        lib.mock_start_request_tracking(self._cluster)

    @property
    def _cluster(self) -> int:
        """Return the handle for C calls, which would abort the process after :meth:`close`."""
        if not self._handle:
            raise RuntimeError("there is no mock cluster, or it is closed")
        return int(self._handle)

    @property
    def bootstrap_servers(self) -> str:
        return str(self._lib.mock_cluster_bootstraps(self._cluster).decode())

    # --- topics

    def create_topic(self, name: str, partitions: int = 1, replicas: int = 1) -> None:
        """Create a topic, with an id. Brokers become leaders in turn: see :meth:`set_leader`."""
        self._check(self._lib.mock_topic_create(self._cluster, name.encode(), partitions, replicas))

    def delete_topic(self, name: str) -> None:
        self._check(self._lib.mock_topic_delete(self._cluster, name.encode()))

    def delete_records(self, tp: TopicPartition, before: int) -> None:
        """Move the log start offset, as if the records before it had aged out."""
        self._check(self._lib.mock_partition_delete_records(self._cluster, tp.topic.encode(), tp.partition, before))

    def set_topic_error(self, name: str, code: int) -> None:
        """Set the error of the topic in Metadata from now on; 0: none. With 3 and 100 it has no partitions either."""
        self._lib.mock_topic_set_error(self._cluster, name.encode(), code)

    def set_leader(self, tp: TopicPartition, broker: int) -> None:
        """Move a partition to another leader; -1: no leader. Increments its leader epoch."""
        self._check(self._lib.mock_partition_set_leader(self._cluster, tp.topic.encode(), tp.partition, broker))

    # --- errors

    def push_request_errors(self, api_key: int, codes: Sequence[int]) -> None:
        """Set the error codes of the next requests of this kind, at any broker, one each; 0: no error.

        librdkafka's -195 closes the connection instead of responding. Metadata responses ignore the codes.
        """
        array = (c.c_int * len(codes))(*codes)
        self._lib.mock_push_request_errors_array(self._cluster, api_key, len(codes), array)

    def push_partition_errors(self, tp: TopicPartition, api_key: int, codes: Sequence[int]) -> None:
        """Set the error codes of one partition in the next requests; supported by Produce and Fetch."""
        topic, partition = tp.topic.encode(), tp.partition
        for first in range(0, len(codes), _ARGUMENTS_MAX):
            part = codes[first : first + _ARGUMENTS_MAX]
            count, each = c.c_size_t(len(part)), [c.c_int(code) for code in part]
            self._check(
                self._lib.mock_partition_push_request_errors(self._cluster, topic, partition, api_key, count, *each)
            )

    def clear_request_errors(self, api_key: int) -> None:
        self._lib.mock_clear_request_errors(self._cluster, api_key)

    # --- brokers

    def set_controller(self, broker: int) -> None:
        """Set the broker that admin clients use; default 1."""
        self._lib.mock_set_controller_id(self._cluster, broker)

    def disable(self, api_key: int) -> None:
        """Make the brokers report to new connections that they do not know this kind of request."""
        self._check(self._lib.mock_set_apiversion(self._cluster, api_key, -1, -1))

    def set_broker_down(self, broker: int) -> None:
        """Close its connections and refuse new ones. Its partitions, and the controller if it is, become
        unavailable."""
        self._check(self._lib.mock_broker_set_down(self._cluster, broker))

    def set_broker_up(self, broker: int) -> None:
        self._check(self._lib.mock_broker_set_up(self._cluster, broker))

    def set_rtt(self, broker: int, rtt_ms: int) -> None:
        """Set the latency of its responses from now on."""
        self._check(self._lib.mock_broker_set_rtt(self._cluster, broker, rtt_ms))

    # --- received requests

    def request_count(self, api_key: int) -> int:
        """Return the number of requests of one kind since the last :meth:`forget_requests`."""
        count = c.c_size_t()
        found = self._lib.mock_get_requests(self._cluster, c.byref(count))
        if not found:
            return 0
        kinds = [int(self._lib.mock_request_api_key(request)) for request in found[: count.value]]
        self._lib.mock_request_destroy_array(found, count.value)
        return kinds.count(api_key)

    def forget_requests(self) -> None:
        self._lib.mock_clear_requests(self._cluster)

    # --- its end

    def close(self) -> None:
        """Stop the brokers. Idempotent."""
        handle, self._handle = self._handle, None
        if handle:
            self._lib.mock_cluster_destroy(handle)
            self._client.close()

    def __enter__(self) -> "MockCluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(self._lib.err2str(code).decode())
