"""The prefetch server with clients that are slow, silent, many, or send garbage. Without Kafka."""

import contextlib
import errno
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agent_helpers
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_group_source.agents import agent_folder
from spark_group_source.agents.agent_folder import AgentFolder
from spark_group_source.agents.channel import wire
from spark_group_source.agents.channel.wire import WireError, frame, receive_frame
from spark_group_source.agents.messages import ClaimGranted, PrefetchPositions, ServedRange, ServedRanges
from spark_group_source.agents.prefetch import client, server
from spark_group_source.agents.prefetch.buffers import AcceptedRows
from spark_group_source.agents.prefetch.prefetcher import SharedBuffers
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.table import COLUMNS
from spark_group_source.reader import records
from spark_group_source.reader.range_reader import ReadCounts, ReadOptions

ENDED_S = 600.0


@contextlib.contextmanager
def connect_to(folder: AgentFolder) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, folder.socket_path() as path:
        connection.connect(path)
        connection.settimeout(ENDED_S)
        yield connection


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def folder(agent: Callable[..., AgentFolder]) -> AgentFolder:
    return agent()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=200).map(frame),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=4),
            max_leaves=12,
        ).map(lambda body: frame(json.dumps([1, 0, "ClaimGranted", body]).encode())),
    )
)
def test_garbage_closes_only_its_own_connection(folder: AgentFolder, sent: bytes) -> None:
    with connect_to(folder) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while connection.recv(4096):
                pass
    agent_helpers.await_ready(folder)


def test_the_client_of_checks_is_closed_if_it_is_not_used_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would keep what it reports about lost connections until the client is used."""
    now_s, made = [1_000.0], list[Any]()

    class Client:
        closed = False

        def __init__(self) -> None:
            made.append(self)

        def describe_topics(self, names: list[str]) -> Any:
            topics = {name: SimpleNamespace(code=0, id="id") for name in names}
            return SimpleNamespace(receive=lambda _: (topics,), cancel=lambda: None)

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    checker = server.TopicIdChecker(SharedBuffers(1 << 20), Client)  # type: ignore[arg-type]
    for after_s, closed in ((server.UNUSED_S_MAX - 1, [False]), (server.UNUSED_S_MAX, [True])):
        checker._checked.clear()
        assert checker.checked({"a": -1, "b": 0}, {"b": "id"})
        now_s[0] += after_s
        checker.close_unused()
        assert [client.closed for client in made] == closed
    checker._checked.clear()
    checker.checked({"b": 0}, {"b": "id"})
    assert len(made) == 2, "the next check opens another one"


def test_a_message_that_is_too_long_is_refused_by_its_length(folder: AgentFolder) -> None:
    with connect_to(folder) as connection:
        connection.sendall(struct.pack(">I", client.CODEC.bytes_max + 1))
        assert is_closed(connection)
    agent_helpers.await_ready(folder)


def test_silent_connections_are_bounded_in_number_and_time(folder: AgentFolder) -> None:
    """They occupy all connections; further ones are refused at once, until those time out."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect_to(folder)) for _ in range(server.CONNECTIONS_MAX + 3)]
        for connection in silent[-3:]:
            assert is_closed(connection)
        wanted = [OffsetRange(TopicPartition("t", 0), 0, 5)]
        assert client.request_buffered(folder, Piece(tuple(wanted)), COLUMNS, ReadCounts()) == ([], wanted, False)
        for connection in silent:
            assert is_closed(connection)
    agent_helpers.await_ready(folder)


def test_a_client_that_sends_byte_by_byte_times_out(folder: AgentFolder) -> None:
    with connect_to(folder) as connection:
        connection.sendall(struct.pack(">I", 1 << 20))
        pause = threading.Event()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(round(ENDED_S / 0.05)):
                connection.sendall(b" ")
                pause.wait(0.05)
            pytest.fail("the connection is still open")


def test_an_impossible_response_is_refused() -> None:
    r = OffsetRange(TopicPartition("t", 0), 5, 9)
    assert client._rest([r], [ServedRange(index=0, until=7, rows=1)]) == [OffsetRange(r.tp, 7, 9)]
    assert client._rest([r], [ServedRange(index=0, until=9, rows=4)]) == []
    for index, until in ((0, 4), (0, 10), (1, 7), (-1, 7)):
        with pytest.raises(WireError):
            client._rest([r], [ServedRange(index=index, until=until, rows=1)])


def test_a_long_transfer_is_accepted_while_it_progresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the limit for each part of it. The clock advances by a third of that with each part."""
    now_s, deadline = [0.0], wire.set_deadline
    clock = SimpleNamespace(monotonic=lambda: now_s[0], time=time.time)

    def set_deadline(connection: socket.socket, until_s: float) -> None:
        deadline(connection, until_s)
        now_s[0] += client.RESPONSE_S / 3

    for module in (client, wire):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(client, "set_deadline", set_deadline)
    monkeypatch.setattr(client, "TRANSFER_S", 10 * client.RESPONSE_S)
    slow = AgentFolder(tmp_path)
    schema = records.arrow_schema(COLUMNS)
    row = dict.fromkeys(schema.names) | {"topic": "t", "partition": 0, "offset": 0}
    batch = pa.RecordBatch.from_pylist([row], schema)
    wanted = OffsetRange(TopicPartition("t", 0), 0, 5)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("wb") as file:
            receive_frame(connection, client.CODEC.bytes_max, 1e6)
            answer = ServedRanges(ranges=(ServedRange(index=0, until=5, rows=5),), rows=5)
            connection.sendall(frame(client.CODEC.encode(answer)))
            with pa.ipc.new_stream(file, schema) as stream:
                for _ in range(5):
                    stream.write_batch(batch)

    with socket.socket(socket.AF_UNIX) as listener, slow.socket_path() as path:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        batches, rest, _ = client.request_buffered(slow, Piece((wanted,)), COLUMNS, ReadCounts())
        thread.join(ENDED_S)
    assert (sum(each.num_rows for each in batches), rest) == (5, [])
    assert now_s[0] > client.RESPONSE_S


def test_an_agent_that_does_not_respond_delays_one_task_and_is_tried_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RESPONSE_S", 0.2)
    folder, piece = AgentFolder(tmp_path), Piece((OffsetRange(TopicPartition("t", 0), 0, 5),))
    with socket.socket(socket.AF_UNIX) as frozen, folder.socket_path() as path:
        frozen.bind(path)
        frozen.listen()
        for _ in range(3):
            assert client.request_buffered(folder, piece, COLUMNS, ReadCounts()).rest == list(piece.ranges)
        frozen.setblocking(False)
        frozen.accept()[0].close()
        with pytest.raises(BlockingIOError):
            frozen.accept()
    (tmp_path / "socket").unlink()
    monkeypatch.setattr(agent_folder, "PAUSE_S", 0.0)
    monkeypatch.setattr(client, "RESPONSE_S", ENDED_S)
    thawed = server.PrefetchServer(folder, SharedBuffers(1 << 20), pytest.fail, COLUMNS)
    thawed.start()
    try:
        client.request_buffered(folder, piece, COLUMNS, ReadCounts())
    finally:
        thawed.stop()
    assert not folder.unanswered.exists(), "its response ends the pauses"


def test_a_task_requests_the_rest_after_a_response_that_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "RESPONSE_BYTES_MAX", 30_000)
    folder, tps = AgentFolder(tmp_path), [TopicPartition("t", p) for p in range(2)]
    buffers, schema = SharedBuffers(1 << 20), records.arrow_schema(COLUMNS)
    buffers.follow(PrefetchPositions(dict.fromkeys(tps, 0)))
    with buffers.changing() as filled:
        for tp, n in ((tp, n) for tp in tps for n in range(5)):
            row = dict.fromkeys(schema.names) | {"topic": "t", "partition": tp.partition, "offset": n}
            batch = pa.RecordBatch.from_pylist([row | {"value": b"v" * 10_000}], schema)
            _, reserved = filled.reserve(tp, np.array([10_000]))
            added = filled.partitions[tp]
            filled.add(batch, [AcceptedRows(records.RowSlice(tp, 0, 1), added, added.seek, n, n + 1, reserved)])
    read_from_brokers: list[Piece] = []

    def read_ranges(piece: Piece, *_: object) -> Iterator[pa.RecordBatch]:
        read_from_brokers.append(piece)
        return iter(())

    monkeypatch.setattr(client, "read_ranges", read_ranges)
    serving = server.PrefetchServer(folder, buffers, pytest.fail, COLUMNS)
    serving.start()
    try:
        piece, counts = Piece(tuple(OffsetRange(tp, 0, 7) for tp in tps)), ReadCounts()
        options = ReadOptions({}, columns=COLUMNS)
        first = client.request_buffered(folder, piece, COLUMNS, ReadCounts())
        assert first.is_cut and sum(batch.num_rows for batch in first.batches) == 2
        piece = piece._replace(ranges=tuple(first.rest))
        rows = [row for batch in client.read_with_agent(folder, piece, options, counts) for row in batch.to_pylist()]
    finally:
        serving.stop()
    at = {tp.partition: [row["offset"] for row in rows if row["partition"] == tp.partition] for tp in tps}
    assert at == {0: [2, 3, 4], 1: [0, 1, 2, 3, 4]}
    assert read_from_brokers == [Piece(tuple(OffsetRange(tp, 5, 7) for tp in tps))]
    assert counts.rows_from_memory == {tps[0]: 3, tps[1]: 5}, "of all responses"


@pytest.mark.parametrize("error", [errno.EMFILE, None], ids=["no file descriptor", "no thread"])
def test_the_server_serves_tasks_again_after_the_process_had_no_room_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    monkeypatch.setattr(server, "ACCEPT_PAUSE_S", 0.01)
    failures = iter([True])

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if error is not None and next(failures, False):
                raise OSError(error, os.strerror(error))
            return super().accept()

    class Thread(threading.Thread):
        def start(self) -> None:
            if error is None and self.name == server.TASK_THREAD and next(failures, False):
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(threading, "Thread", Thread)
    monkeypatch.setattr(socket, "socket", Listener)
    folder = AgentFolder(tmp_path)
    serving = server.PrefetchServer(folder, SharedBuffers(1 << 20), pytest.fail, COLUMNS)
    serving.start()
    try:
        if error is None:
            with connect_to(folder) as connection:
                assert is_closed(connection)
        wanted = [OffsetRange(TopicPartition("t", 0), 0, 5)]
        with connect_to(folder) as connection:
            until_s = time.monotonic() + ENDED_S
            client.send(connection, ClaimGranted(Piece(tuple(wanted))), until_s)
            assert client.receive(connection, ServedRanges, until_s) == ServedRanges(ranges=(), rows=0)
    finally:
        serving.stop()
    assert next(failures, None) is None, "the failure did not happen"
