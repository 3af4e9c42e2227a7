"""Details of librdkafka that the reading client does not take for granted."""

import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from confluent_kafka import Producer
from kit.mock_cluster import MockCluster
from reading import read

from spark_group_source.errors import SetupError
from spark_group_source.librdkafka import extension
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.reader import native_client, range_reader
from spark_group_source.reader.native_client import list_calls

OTHER_LAYOUT = """
import ctypes, logging, sys
from types import SimpleNamespace
from spark_group_source.reader import native_client

logging.basicConfig()
known = native_client.Library

def word(address):
    return ctypes.c_uint64.from_address(address).value

layouts = {
    "a pointer to the messages, then the count": (
        lambda given: word(given + 8), lambda given, at: word(word(given) + 8 * at)
    ),
    "a handle": (lambda given: word(word(given)), lambda given, at: word(word(given) + 8 + 8 * at)),
    "a linked list": (word, lambda given, at: word(given + 8) if at == 0 else word(word(given + 8))),
    "pointers without a count": (lambda given: word(word(word(given))), lambda given, at: word(given + 8 * at)),
}
count, get = layouts[sys.argv[1]]
other = SimpleNamespace(messages_count=count, messages_get=get, messages_destroy=None)
native_client.Library = lambda calls: other if calls is native_client._LISTS else known(calls)
assert native_client.list_calls() is None
"""


@pytest.mark.parametrize(
    "layout",
    ["a pointer to the messages, then the count", "a handle", "a linked list", "pointers without a count"],
)
def test_another_layout_of_message_lists_falls_back_and_crashes_no_worker(layout: str) -> None:
    ran = subprocess.run([sys.executable, "-c", OTHER_LAYOUT, layout], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("destroying messages one by one") == 1


@pytest.fixture
def fresh() -> None:
    list_calls.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_release_that_is_not_tested_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tested = ".".join(native_client.library().version_str().decode().split(".")[:2])
    assert tested in native_client.LISTS_TESTED, "add it after the memory tests passed with it"
    assert list_calls() is not None
    list_calls.cache_clear()
    monkeypatch.setattr(native_client, "LISTS_TESTED", ("2.1",))
    assert list_calls() is list_calls() is None
    assert caplog.text.count("tested in 2.1 only; destroying messages one by one") == 1
    list_calls.cache_clear()


@pytest.mark.parametrize("sent", [[], [("name", b"value")]], ids=["without headers", "with headers elsewhere"])
def test_a_record_without_an_address_of_headers_has_none_if_librdkafka_knows_none(
    sent: list[tuple[str, str | bytes | None]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So are records in the formats before Kafka 0.11. Here the zeros of a null key are read in their place."""
    monkeypatch.setattr(native_client, "_HEADERS_AT", 40)
    with MockCluster() as cluster:
        cluster.create_topic("t")
        servers = {"bootstrap.servers": cluster.bootstrap_servers}
        producer = Producer(servers)
        producer.produce("t", b"value", partition=0, headers=sent)
        producer.flush()
        ranges = [OffsetRange(TopicPartition("t", 0), 0, 1)]
        (row,) = [row for batch in read(servers, ranges, columns=("value", "headers")) for row in batch.to_pylist()]
        range_reader.close_idle_clients()
    assert row["value"] == b"value"
    assert row["headers"] == ([{"key": "name", "value": b"value"}] if sent else None)
    assert ("headers elsewhere" in caplog.text) == bool(sent)


def test_the_extension_of_another_python_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "confluent_kafka"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cimpl.cpython-29-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "confluent_kafka")
    with pytest.raises(SetupError, match="confluent_kafka is not installed in this Python"):
        extension()
    own = package / f"cimpl{EXTENSION_SUFFIXES[0]}"
    own.touch()
    assert extension() == own


NO_MEMORY = """
import sys
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.reader import native_client, range_reader

def fail(*_):
    raise MemoryError("no memory")

failing, servers = sys.argv[1:]
if failing == "rows":
    native_client.gather = fail
elif failing == "addresses":
    native_client.words_at = fail
else:
    gather = native_client.gather

    def fail_next_serve(*arguments):
        native_client.NativeClient.serve = fail
        return gather(*arguments)

    native_client.gather = fail_next_serve
piece = Piece((OffsetRange(TopicPartition("t", 0), 0, 100),))
try:
    for _ in range_reader.read_ranges(piece, range_reader.ReadOptions({"bootstrap.servers": servers})):
        pass
except MemoryError:
    print("the task failed")
"""
HANG_S = 60
"""More than a process needs to read some records; a client whose messages are not freed is never closed."""


@pytest.mark.parametrize("failing", ["addresses", "rows", "events"])
def test_a_poll_without_memory_fails_the_task_and_does_not_hang_it(failing: str) -> None:
    with MockCluster() as cluster:
        cluster.create_topic("t")
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
        for _ in range(100):
            producer.produce("t", b"value", partition=0)
        producer.flush()
        command = [sys.executable, "-c", NO_MEMORY, failing, cluster.bootstrap_servers]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (ran.returncode, ran.stdout.strip()) == (0, "the task failed"), ran.stderr
