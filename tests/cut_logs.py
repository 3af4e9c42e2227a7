"""A log that is cut and grows again: what a disk loses with a broker that has no replica, and its leader afterwards."""

import struct
from pathlib import Path

from kit.broker_cluster import BrokerCluster

from spark_group_source.model import TopicPartition

CLEAN = ".kafka_cleanshutdown"


def cut_log(broker: BrokerCluster, data: Path, tp: TopicPartition, end: int, *, node: int = 1) -> None:
    """Stop a node, take the batches of a partition from ``end`` on out of its file, and start it again."""
    broker.stop_node(node)
    (log,) = data.rglob(f"{tp}/*.log")
    log.write_bytes(_below(log.read_bytes(), end))
    for mark in data.rglob(CLEAN):  # with it the node would believe its indexes
        mark.unlink()
    broker.start_node(node)


def _below(batches: bytes, end: int) -> bytes:
    at = 0
    while at < len(batches):
        first, length = struct.unpack(">qi", batches[at : at + 12])
        if first >= end:
            break
        at += 12 + length
    return batches[:at]
