"""``spark-group watch``, ``describe()`` and ``reset()``: events between snapshots, and a real group."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer
from kafka_helpers import await_until, set_committed
from rich.console import Console
from scenes import Scene
from streams import numbered
from typer.testing import CliRunner

import spark_group_source
from spark_group_source import OptionError
from spark_group_source.cli import common, group
from spark_group_source.cli import report as reporting
from spark_group_source.cli.app import app
from spark_group_source.cli.group import changes, rate
from spark_group_source.cli.report import BAR, GroupReport, PartitionRow, group_view, partitions_table, spans
from spark_group_source.kafka.translation import CommittedOffset, GroupDescription, GroupMember
from spark_group_source.model import TopicPartition

WATCH_S = 300


def report(
    owners: Mapping[int, str], *, committed: int = 5, end: int = 9, state: str = "stable", **run: Any
) -> GroupReport:
    """A group that reads topic t, with the owner of each partition."""
    of: dict[str, Any] = {
        "topic": "t",
        "committed": committed,
        "end": end,
        "lag": end - committed,
        "ledger": None,
        "stream": "",
    }
    rows = tuple(PartitionRow(partition=p, member=name, **of) for p, name in owners.items())
    members = tuple(
        GroupMember(name, name, "", "/10.0.0.1", tuple(TopicPartition("t", p) for p in owners if owners[p] == name))
        for name in sorted({*owners.values()} - {""})
    )
    runs = ({"pid": 7, "rebalances": 0, "reason": "", **run},)
    return GroupReport(
        group="g", state=state, protocol="classic", assignor="range", members=members, partitions=rows, runs=runs
    )


def shown(look: GroupReport, **more: Any) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(group_view(look, bars=True, **more))
    return console.export_text()


# --- two snapshots ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (report({0: "a"}), report({0: "a"}, committed=9), []),
        (report(dict.fromkeys(range(4), "a")), report({0: "a", 1: "b", 2: "b", 3: "a"}), ["b joined", "t 1-2: a → b"]),
        (
            report({0: "a", 2: "b"}),
            report({0: "a", 2: ""}, state="preparing_rebalancing"),
            ["the group is preparing_rebalancing, it was stable", "b left", "t 2: b → unassigned"],
        ),
        (
            report({0: "a"}, rebalances=2),
            report({0: "a"}, rebalances=3, reason="a member joined"),
            ["rebalance 3 of the query in process 7: a member joined"],
        ),
    ],
    ids=["records are read", "a member joins", "a member leaves", "a query reports the reason"],
)
def test_changes_between_two_snapshots(before: GroupReport, after: GroupReport, lines: list[str]) -> None:
    assert changes(before, after) == lines


def test_rate_counts_commits_and_ignores_backward_resets() -> None:
    assert rate(report({0: "a", 1: "a"}), report({0: "a", 1: "a"}, committed=9), 2.0) == 4.0
    assert rate(report({0: "a"}, committed=9), report({0: "a"}), 1.0) == 0.0


def test_watch_waits_for_a_group_that_does_not_exist_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [None, None, report({0: "a"}), None]
    stop = SimpleNamespace(wait=lambda _: not looks)
    monkeypatch.setattr(reporting, "read_group", lambda *_, **__: looks.pop(0))
    monkeypatch.setattr(group, "stop_on_signals", lambda: stop)
    monkeypatch.setattr(group, "admin_of", lambda *_: nullcontext(SimpleNamespace(connection=())))
    watching = ["watch", "--group", "g", "--bootstrap-servers", "b:1"]
    shown = CliRunner().invoke(app, watching)
    assert shown.exit_code == 0, shown.output
    lines = [re.sub(r"^[\d:]+  ", "", line) for line in shown.output.splitlines()]
    assert lines[:3] == [
        "group g does not exist; waiting for it",
        "the group is stable, it was dead",
        "a joined",
    ]
    assert "the group is dead, it was stable" in lines, "it was deleted"
    monkeypatch.setattr(reporting, "read_group", lambda *_, **__: None)
    once = CliRunner().invoke(app, [*watching, "--once"])
    assert once.exit_code == 1 and "group 'g' does not exist" in once.output


def test_partition_without_a_leader_hides_no_other() -> None:
    there, leaderless = (TopicPartition("t", p) for p in range(2))
    admin: Any = SimpleNamespace(
        describe_group=lambda _: GroupDescription("empty", "classic", "", ()),
        committed=lambda _, **__: dict.fromkeys((there, leaderless), CommittedOffset(5, "")),
        latest=lambda _, *, require_all: {there: 5} if not require_all else 1 / 0,
        retention_ms=lambda _: None,
    )
    look = reporting.read_group(admin, "g-of-nobody")
    assert look is not None
    assert [(row.end, row.lag) for row in look.partitions] == [(5, 0), (None, None)]
    assert "lag 0 without 1 partition whose end is unknown" in shown(look)
    assert (look.as_dict()["lag"], look.as_dict()["unknown_ends"]) == (0, 1)


def test_lag_of_partitions_without_a_committed_offset_does_not_look_like_none() -> None:
    look = report({0: "a", 1: "a"}, end=5)
    assert (look.as_dict()["without_offset"], reporting.heading(look).spans[-1].style) == (0, "bold green")
    unread = replace(look, partitions=tuple(replace(row, committed=None, lag=None) for row in look.partitions))
    assert "lag 0 without 2 partitions without a committed offset" in shown(unread)
    assert (unread.as_dict()["without_offset"], reporting.heading(unread).spans[-1].style) == (2, "bold yellow")


def test_watch_does_not_request_settings_of_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many users may not read them, and a refusal is confirmed after a pause, in each round."""
    requests: list[int] = []
    admin = SimpleNamespace(
        describe_group=lambda _: GroupDescription("empty", "classic", "", (), coordinator_id=4),
        committed=lambda _, **__: {TopicPartition("t", 0): CommittedOffset(5, "")},
        latest=lambda tps, **_: dict.fromkeys(tps, 5),
        retention_ms=requests.append,
    )
    monkeypatch.setattr(group, "admin_of", lambda *_: nullcontext(admin))
    once = CliRunner().invoke(app, ["watch", "--group", "g", "--bootstrap-servers", "b:1", "--once"])
    assert once.exit_code == 0 and requests == [], once.output
    monkeypatch.setattr(common, "admin_of", lambda *_, **__: nullcontext(admin))
    spark_group_source.describe("g", "b:1")
    assert requests == [4], "of the coordinator that is known already"


def test_tables_fit_80_columns() -> None:
    member = "spark-group.9f2c41d8aa0b47d29f2c41d8aa0b47d2.1"
    look = report({0: member, 1: ""}, committed=1234567890, end=1234567999)
    rows = tuple(replace(row, topic="shop.orders.created", ledger=row.committed) for row in look.partitions)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(partitions_table(replace(look, partitions=rows), bars=True))
    text = console.export_text()
    assert all(len(line) <= 80 for line in text.splitlines())
    for part in ("1234567890  1234567999  109  1234567890", "partition", "committed", "spa…b47d2.1"):
        assert part in text, text


@pytest.mark.parametrize("width", [30, 40, 50, 56])
def test_a_terminal_that_is_too_narrow_for_the_numbers_shows_all_digits(width: int) -> None:
    look = report({0: "spark-group.9f2c41d8.1", 1: ""}, committed=1234567890, end=1234567999)
    rows = tuple(replace(row, ledger=row.committed) for row in look.partitions)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(partitions_table(replace(look, partitions=rows)))
    text = " ".join(console.export_text().split())
    at = "committed 1234567890, end 1234567999, lag 109, ledger 1234567890"
    assert f"topic t, partition 0, {at}, member spa…c41d8.1 topic t, partition 1, {at}" in text


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([3], "3"), ([5, 0, 1, 2, 7, 8], "0-2, 5, 7-8")])
def test_spans(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


# --- one snapshot ----------------------------------------------------------------------------------------------------


def test_watch_view_shows_members_partitions_and_events() -> None:
    text = shown(report({0: "a", 1: "b"}), events=["12:00:00  b joined"], per_s=1234.0)
    assert "group g: stable, classic protocol, range, 2 members, lag 8, 1,234 records/s" in text
    assert re.search(r"│ b +│ b +│ /10.0.0.1 +│ 1 +│ 4 +│ t 1 +│", text)
    assert "█" * BAR in text and "12:00:00  b joined" in text


def test_a_drained_run_is_shown_as_such() -> None:
    runs = tuple({"pid": pid, "drained": pid == 7} for pid in (7, 8))
    text = shown(replace(report({0: "a"}), runs=runs))
    assert "the query in process 7 is drained: it reads nothing" in text and "process 8" not in text


def test_watch_view_shows_partitions_with_largest_lag() -> None:
    look = report(dict.fromkeys(range(50), "a"))
    behind = replace(look.partitions[41], lag=1_000_000)
    text = shown(replace(look, partitions=(*look.partitions[:41], behind, *look.partitions[42:])), rows_max=3)
    assert "1,000,000" in text and "and 47 partitions with less lag" in text


def test_outdated_watch_view_is_marked() -> None:
    assert "no answer: no broker" in shown(report({0: "a"}), silent="no broker")


def in_a_notebook(value: Any) -> str:
    """The HTML that a notebook shows for a value."""
    return " ".join(value._repr_mimebundle_((), ())["text/html"].split())


def test_notebook_tables_escape_html_and_markup() -> None:
    shown = in_a_notebook(report({0: "<b>[red]a"}))
    assert "&lt;b&gt;[red]a" in shown and "<b>" not in shown
    assert "committed" in shown


# --- a real group ----------------------------------------------------------------------------------------------------


@pytest.fixture
def name(scene: Scene) -> str:
    """A topic with 5 records in each of its two partitions, 2 of them committed."""
    found = scene.topic(2)
    scene.produce(found, numbered(0, 9, 2))
    set_committed(scene.admin, scene.group, found, {0: 2, 1: 2})
    return found


def test_describe_in_a_notebook_returns_tables(scene: Scene, name: str) -> None:
    look = spark_group_source.describe(scene.group, scene.servers)
    assert [(row.partition, row.committed, row.end, row.lag) for row in look.partitions] == [(0, 2, 5, 3), (1, 2, 5, 3)]
    assert re.search(r" 0 +2 +5 +3 ", in_a_notebook(look).replace("│", " "))


def test_reset_in_a_notebook_matches_the_command(scene: Scene, name: str) -> None:
    moves: list[tuple[Any, list[int]]] = [
        ("earliest", [0, 0]),
        ("latest", [5, 5]),
        (4, [4, 4]),
        (datetime(2020, 1, 1, tzinfo=UTC), [0, 0]),
        ({name: {1: -1}}, [0, 5]),
    ]

    def at() -> list[int]:
        return [offset for _, offset in sorted(scene.committed().items())]

    before = at()
    for number, (to, then) in enumerate(moves, 1):
        planned = spark_group_source.reset(scene.group, scene.servers, to=to)
        assert planned.number is None and "nothing was changed" in in_a_notebook(planned)
        assert at() == before
        done = spark_group_source.reset(scene.group, scene.servers, to=to, execute=True)
        assert done.number == number and done.moves == planned.moves
        before = at()
        assert before == then


def test_reset_refuses_a_named_partition_that_does_not_exist(scene: Scene, name: str) -> None:
    with pytest.raises(OptionError, match=f"partition {name}-7 does not exist"):
        spark_group_source.reset(scene.group, scene.servers, to={name: {0: 1, 7: 1}})


def test_watch_without_terminal_prints_one_line_per_event(scene: Scene, name: str) -> None:
    command = [sys.executable, "-m", "spark_group_source", "watch", "--group", scene.group]
    command += ["--bootstrap-servers", scene.servers]
    first = subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=WATCH_S, check=True).stdout
    assert f"group {scene.group}: empty" in " ".join(first.split()) and "lag 6" in first

    lines: list[str] = []
    with subprocess.Popen([*command, "--interval-s", "0.2"], stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        settings = {"bootstrap.servers": scene.servers, "group.id": scene.group, "group.instance.id": "second"}
        consumer = Consumer({**settings, "auto.offset.reset": "earliest"})
        try:
            for line in watching.stdout:  # its first look is printed before the consumer is there
                lines.append(line)
                if "partitions" in line:
                    break
            consumer.subscribe([name])
            await_until(lambda: consumer.poll(0.1) is not None, WATCH_S, what="the consumer's first record")
            for line in watching.stdout:
                lines.append(line)
                if f"{name} 0-1: unassigned → second" in line:
                    break
        finally:
            consumer.close()
            watching.terminate()
        assert watching.wait(WATCH_S) == 0
    assert any(line.endswith("  second joined\n") for line in lines)


def test_watch_in_a_terminal_ends_with_ctrl_c(scene: Scene, name: str) -> None:
    command = [sys.executable, "-m", "spark_group_source", "watch", "--group", scene.group, "--interval-s", "0.2"]
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [*command, "--bootstrap-servers", scene.servers],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    ) as watching:  # fmt: skip
        os.close(theirs)
        seen = b""
        while seen.count(b"records/s") < 2:  # the second look has a rate
            seen += os.read(ours, 65_536)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(WATCH_S) == 0
    os.close(ours)
    assert b"\x1b[?1049h" in seen and b"committed" in seen  # a screen of its own
