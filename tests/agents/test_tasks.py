"""Claims of tasks over a real channel; the test answers for the stream reader."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import restricted
from channel_helpers import SOON_S, RecordingServer
from kafka_helpers import await_until
from restricted import NO_PROC

from spark_group_source.agents import agent_folder, task
from spark_group_source.agents.agent_folder import AgentFolder, ProcessId
from spark_group_source.agents.channel.server import ChannelPeer
from spark_group_source.agents.messages import CODEC, Claim, ClaimGranted, ClaimRefused, TaskEnded
from spark_group_source.agents.task import PlannedTask
from spark_group_source.errors import ChannelBroken
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.reader.range_reader import ReadOptions
from spark_group_source.source import PlainReader, RangesPartition

CLAIM = Claim(plan="r.1", task=0, executor="here")
GRANTED = ClaimGranted(Piece((OffsetRange(TopicPartition("orders", 0), 5, 9),), {"orders": "id"}))
LAST = TaskEnded(plan="r.1", task=1, executor="here")

Answers = Callable[[ChannelPeer, Any], None]


@contextmanager
def listening(answers: Answers) -> Iterator[PlannedTask]:
    """A stream reader that answers claims with ``answers``."""
    with RecordingServer(codec=CODEC) as there:
        there.server._on_message = answers
        yield PlannedTask((("127.0.0.1", there.port),), there.secret, "run", CLAIM.plan, CLAIM.task, late=True)


def test_a_claim_without_a_response_is_repeated_on_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network partition looks like this."""
    monkeypatch.setattr(task, "ATTEMPT_S", 0.3)
    monkeypatch.setattr(task, "CLAIM_S", SOON_S)
    peers: list[ChannelPeer] = []

    def answers(peer: ChannelPeer, _: Any) -> None:
        if peer not in peers:
            peers.append(peer)
        if peer is not peers[0]:
            peer.send(GRANTED)

    with listening(answers) as planned:
        worker = task._Worker(planned)
        found = worker.claim(CLAIM)
        worker.close()
    assert found == GRANTED.piece
    assert len(peers) > 1


def test_a_claim_that_times_out_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "ATTEMPT_S", 0.1)
    monkeypatch.setattr(task, "CLAIM_S", 0.5)
    with (
        listening(lambda *_: None) as planned,
        pytest.raises(ChannelBroken, match=r"coordinatorHost and coordinatorPort.*memberHost"),
    ):
        task._Worker(planned).claim(CLAIM)


def test_a_refused_claim_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "ATTEMPT_S", SOON_S)
    claims = []

    def answers(peer: ChannelPeer, message: Any) -> None:
        claims.append(message)
        peer.send(ClaimRefused(reason="no plan 'r.1'"))

    with listening(answers) as planned, pytest.raises(ChannelBroken, match=r"no plan 'r.1'"):
        task._Worker(planned).claim(CLAIM)
    assert claims == [CLAIM]


def test_an_unreachable_stream_reader_delays_one_task_and_is_tried_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It closes each connection instead of an answer."""
    monkeypatch.setattr(task, "CONNECT_S", SOON_S)
    monkeypatch.setattr(agent_folder, "_warned", set())
    monkeypatch.setattr(agent_folder, "PAUSE_S", SOON_S)
    claims = []

    def answers(peer: ChannelPeer, message: Any) -> None:
        claims.append(message)
        peer.drop("no answer")

    with listening(answers) as planned:
        worker = task._Worker(planned)
        for _ in range(3):
            worker.claim_known_piece(CLAIM)
        assert claims == [CLAIM], "one connection, without an answer"
        monkeypatch.setattr(agent_folder, "PAUSE_S", 0.0)
        worker.claim_known_piece(CLAIM)
    assert claims == [CLAIM, CLAIM]
    assert caplog.text.count("this executor does not reach the stream reader") == 1


def test_a_worker_without_executor_or_folder_looks_again_in_each_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, folder = ProcessId(7, 70), AgentFolder(tmp_path)
    executors: list[ProcessId | None] = [None, here]
    folders: list[AgentFolder | None] = [None, folder, None, folder]
    monkeypatch.setattr(task, "_workers", {})
    monkeypatch.setattr(task, "find_executor", lambda: executors.pop(0))
    monkeypatch.setattr(task, "open_folder", lambda *_: folders.pop(0))
    seen = []
    with listening(lambda *_: None) as planned:
        for _ in range(4):
            worker = task._worker_of(planned)
            seen.append((worker.executor, worker.agent_folder()))
    assert seen == [(None, None), (here, folder), (here, None), (here, folder)]


def test_a_task_without_agents_reads_its_piece_without_claim_and_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "_workers", {})
    reported: list[object] = []
    read: list[Piece] = []

    def read_ranges(piece: Piece, *_: object) -> list[object]:
        read.append(piece)
        return []

    monkeypatch.setattr(task, "start_agent", lambda *_: pytest.fail("an agent was started"))
    monkeypatch.setattr(task, "read_ranges", read_ranges)
    options = Options.parse({"kafka.bootstrap.servers": "b:1", "kafka.group.id": "g", "subscribe": "orders"})
    with listening(lambda _, message: reported.append(message)) as planned:
        partition = RangesPartition(GRANTED.piece, replace(planned, late=False, uses_agents=False))
        assert list(PlainReader(options).read(partition)) == []
        task._worker_of(planned).report(LAST, connect=True)
        await_until(lambda: LAST in reported, what="the last report")
    assert read == [GRANTED.piece]
    assert reported == [LAST]


def test_a_pause_after_very_many_attempts_is_the_longest_one(tmp_path: Path) -> None:
    """The count of an executor that never reaches the driver grows by one an hour."""
    (tmp_path / "unreached").write_text(json.dumps([10_000, time.time()]))
    attempts = agent_folder.Attempts(tmp_path / "unreached")
    assert not attempts.is_due
    (tmp_path / "unreached").write_text(json.dumps([10_000, time.time() - agent_folder.PAUSE_S_MAX]))
    assert attempts.is_due


# --- the executor's name ----------------------------------------------------------------------------------------------

NAMED = """
import sys
from spark_group_source.agents.agent_folder import ProcessId
from spark_group_source.agents.task import executor_name
print(executor_name(ProcessId(7, 70)), flush=True)
sys.stdin.read()
"""


def names_of(*commands: Sequence[str]) -> list[str]:
    """What processes that run at the same time call an executor with the same id and start time."""
    if reason := restricted.obstacle(NO_PROC):
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(subprocess.Popen(each, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for each in commands
        ]
        return [each.stdout.readline().strip() for each in running if each.stdout is not None]


def test_executors_of_two_containers_with_one_host_name_have_different_names() -> None:
    """As on Kubernetes with hostNetwork. The processes of each container are numbered from 1 on."""
    container = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", NAMED]
    process = [sys.executable, "-c", NAMED]
    first, second, here, beside = names_of(container, container, process, process)
    assert len({first, second, here}) == 3
    assert here == beside, "workers of one executor use one name"


def test_an_executor_has_a_name_without_proc() -> None:
    (name,) = names_of(restricted.command([NO_PROC], "-c", NAMED))
    assert name.startswith(socket.gethostname())


# --- racks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zone", "rack"), [("b", "b"), ("", "everywhere"), (None, "everywhere")])
def test_all_clients_of_an_executor_use_its_rack(monkeypatch: pytest.MonkeyPatch, zone: str | None, rack: str) -> None:
    """The clients of its tasks, and those of its agent: for prefetching and for members."""
    given = {"kafka.bootstrap.servers": "b:1", "kafka.group.id": "g", "subscribe": "orders", "memberHost": "executor"}
    more = {"kafka.client.rack": "everywhere", "clientRackEnv": "ZONE"}
    monkeypatch.delenv("ZONE", raising=False)
    if zone is not None:
        monkeypatch.setenv("ZONE", zone)
    started: list[Mapping[str, Any]] = []
    read: list[Mapping[str, str]] = []
    monkeypatch.setattr(task, "_workers", {})

    def read_ranges(_: object, given: ReadOptions, __: object) -> list[object]:
        read.append(given.settings)
        return []

    def answers(peer: ChannelPeer, _: object) -> None:
        peer.send(GRANTED)

    monkeypatch.setattr(task, "start_agent", lambda settings, _, __: started.append(settings))
    monkeypatch.setattr(task, "read_ranges", read_ranges)
    with listening(answers) as planned:
        reader = PlainReader(Options.parse(given | more))
        assert list(reader.read(RangesPartition(Piece(), planned))) == []
    (agent,) = started
    assert [s["client.rack"] for s in (*read, agent["reader_settings"], agent["connection"]["settings"])] == [rack] * 3
    assert dict(reader._options.settings)["client.rack"] == "everywhere", "other executors have their own racks"
