"""librdkafka's own calls by ctypes, in the copy that confluent_kafka ships: for what its Python client cannot do.

Runs in: executor workers, the stream reader, a terminal; wherever ``executor`` and ``kafka`` call C. Deliberately
absent: what is called (each caller lists its calls with their types), any call back from C into Python (errors, log
lines and wishes for tokens are polled as events), and the confluent_kafka package: executor workers never load it.
"""

import ctypes as c
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

POINTER, POINTERS, TEXT = c.c_void_p, c.POINTER(c.c_void_p), c.c_char_p
INT, INT64, SIZE = c.c_int, c.c_int64, c.c_size_t

Signatures = Mapping[str, Sequence[Any]]
"""By name without ``rd_kafka_``: the type of what is returned, and those of the arguments."""


class Partition(c.Structure):
    """``rd_kafka_topic_partition_t``."""

    _fields_ = [
        ("topic", c.c_char_p),
        ("partition", c.c_int32),
        ("offset", c.c_int64),
        ("metadata", c.c_void_p),
        ("metadata_size", c.c_size_t),
        ("opaque", c.c_void_p),
        ("err", c.c_int),
        ("private", c.c_void_p),
    ]


class PartitionList(c.Structure):
    """``rd_kafka_topic_partition_list_t``."""

    _fields_ = [("cnt", c.c_int), ("size", c.c_int), ("elems", c.POINTER(Partition))]


PARTITIONS = c.POINTER(PartitionList)

CLIENT: Signatures = {
    "err2str": (TEXT, INT),
    "conf_new": (POINTER,),
    "conf_destroy": (None, POINTER),
    "conf_set": (INT, POINTER, TEXT, TEXT, TEXT, SIZE),
    "conf_set_events": (None, POINTER, INT),
    "new": (POINTER, INT, POINTER, TEXT, SIZE),
    "set_log_queue": (INT, POINTER, POINTER),
    "queue_new": (POINTER, POINTER),
    "queue_get_main": (POINTER, POINTER),
    "queue_destroy": (None, POINTER),
    "queue_poll": (POINTER, POINTER, INT),
    "event_type": (INT, POINTER),
    "event_error": (INT, POINTER),
    "event_error_string": (TEXT, POINTER),
    "event_log": (INT, POINTER, c.POINTER(TEXT), c.POINTER(TEXT), c.POINTER(INT)),
    "event_destroy": (None, POINTER),
    "topic_partition_list_new": (PARTITIONS, INT),
    "topic_partition_list_add": (c.POINTER(Partition), PARTITIONS, TEXT, c.c_int32),
    "topic_partition_list_destroy": (None, PARTITIONS),
    "AdminOptions_new": (POINTER, POINTER, INT),
    "AdminOptions_set_request_timeout": (INT, POINTER, INT, TEXT, SIZE),
    "AdminOptions_destroy": (None, POINTER),
    "error_code": (INT, POINTER),
    "error_string": (TEXT, POINTER),
}
"""What every client needs: settings, events, lists of partitions, errors."""


def calls(signatures: Signatures) -> dict[str, Any]:
    """librdkafka's functions by their names without ``rd_kafka_``.

    Raises:
        ImportError: the library is not there, or has no such function.
    """
    rdkafka = c.CDLL(str(extension()))
    found = {}
    for name, (result, *arguments) in signatures.items():
        call = getattr(rdkafka, f"rd_kafka_{name}", None)
        if call is None:
            raise ImportError(f"librdkafka has no rd_kafka_{name}")
        call.restype, call.argtypes = result, arguments
        found[name] = call
    return found


def extension() -> Path:
    """confluent_kafka's extension module, found without importing the package: it brings librdkafka with it.

    Raises:
        ImportError: confluent_kafka is not installed.
    """
    package = importlib.util.find_spec("confluent_kafka")
    for folder in (package.submodule_search_locations or []) if package else []:
        for path in Path(folder).glob("cimpl*.so"):
            return path
    raise ImportError("confluent_kafka is not installed")
