"""The commands of ``docs/recovery.md``, typed in their order; after them the table has each record once.

``spark-group`` runs in this process, with real tables and a model of Kafka. Statements of Delta that need Spark are
replaced by what they do to a table's files.
"""

import re
import shlex
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from offset_model import SERVERS, OffsetModel
from sink_helpers import NewQuery, Query, clone_of, one, records, rows
from sink_source import offset
from typer.testing import CliRunner

from spark_group_source.cli.app import app
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.ledger_store import transfer_ledger
from spark_group_source.delta.table_history import CommitRace, LedgerExpired, TableHistory
from spark_group_source.delta.table_writer import TableWriter
from spark_group_source.errors import OptionError

PAGE = Path(__file__).parents[3] / "docs" / "recovery.md"
FOLLOWED = [("orders", 0)]


def commands(section: str) -> list[str]:
    """The commands of a section."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [line.strip() for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()
            if line.strip()]  # fmt: skip


def run_typed(line: str, lake: Path) -> str:
    """Run a command as it is printed, with this test's brokers and folder; return its output."""
    line, _, file = line.partition(" > ")
    text = (
        line.replace("broker:9092", SERVERS).replace("/lake/", f"{lake}/").replace("offsets.csv", f"{lake}/offsets.csv")
    )
    words = shlex.split(text)
    assert words[0] == "spark-group"
    shown = CliRunner().invoke(app, words[1:])
    assert shown.exit_code == 0, shown.output
    if file:
        (lake / file.strip()).write_text(shown.stdout)
    return shown.output


@pytest.fixture
def lake(query: Query, table: Path, admin: OffsetModel) -> Path:
    """A folder with the table ``orders``, which has two batches."""
    lake = table.parent
    table.rename(lake / "orders")
    for n in range(2):
        query.run(query.sink(lake / "orders"), n, offset(n, one(n * 10, n * 10 + 10)))
    admin.commit(20)
    return lake


def continue_anew(new_query: NewQuery, table: Path, kafka: OffsetModel, end: int, **more: str) -> None:
    """Run a batch with a new checkpoint: it starts at the committed offset, and its plan knows the reset."""
    fresh = new_query(f"anew-{table.name}")
    batch = offset(0, one(kafka.position, end), stream="s9", followed=FOLLOWED, reset_number=kafka.resets, **more)  # type: ignore[arg-type]
    fresh.run(fresh.sink(table), 0, batch)


def test_every_section_with_commands_has_a_test() -> None:
    sections = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    tested = ["What to back up", "The offsets are lost", "A moved table", "A clone", "A rebuilt cluster"]
    assert [name for name in sections if commands(name)] == [*tested, "A mirrored cluster"]


def test_lost_offsets(new_query: NewQuery, lake: Path, admin: OffsetModel) -> None:
    (export,) = commands("What to back up")
    run_typed(export, lake)
    assert (lake / "offsets.csv").read_text() == "orders,0,20\n"
    admin.offsets.clear()
    (command,) = commands("The offsets are lost")
    run_typed(command, lake)
    continue_anew(new_query, lake / "orders", admin, 30)
    assert rows(lake / "orders") == records(0, 30)


@pytest.mark.parametrize("complete", [True, False])
def test_a_moved_table(query: Query, new_query: NewQuery, lake: Path, admin: OffsetModel, complete: bool) -> None:
    if complete:
        copytree(lake / "orders", lake / "moved")
    else:  # a backup, older than the offsets
        copytree(lake / "orders", lake / "moved")
        query.run(query.sink(lake / "orders"), 2, offset(2, one(20, 25)))
        admin.commit(25)
    show, plan = commands("A moved table")
    assert "next offset" in run_typed(show, lake)
    assert re.search(r"orders +│ 0 +│ +(20|25) +│ +20 ", run_typed(plan, lake))
    if not complete:
        run_typed(f"{plan} --execute", lake)
    continue_anew(new_query, lake / "moved", admin, 30)
    assert rows(lake / "moved") == records(0, 30)


@pytest.mark.parametrize("group", ["etl-clone", "etl"])
def test_a_clone(query: Query, new_query: NewQuery, lake: Path, admin: OffsetModel, group: str) -> None:
    """The clone is older than the offsets. ``test_fakes.py`` compares its commit with that of Spark's statement."""
    clone_of(lake / "orders", 2, lake / "clone")
    query.run(query.sink(lake / "orders"), 2, offset(2, one(20, 25)))
    admin.commit(25)
    typed = commands("A clone")
    admin.group = group
    if group != "etl":
        admin.offsets.clear()
    for line in typed[:2] if group == "etl" else typed[2:]:
        run_typed(line, lake)
    assert admin.position == 20
    continue_anew(new_query, lake / "clone", admin, 30, group=group)
    assert rows(lake / "clone") == records(0, 30)


def test_a_rebuilt_cluster(new_query: NewQuery, lake: Path, admin: OffsetModel) -> None:
    admin.recreate("id-2", 15)
    (command,) = commands("A rebuilt cluster")
    run_typed(command, lake)
    continue_anew(new_query, lake / "orders", admin, 15, topic_id="id-2")
    assert rows(lake / "orders") == sorted(records(0, 20) + records(0, 15)), "of the former topic, and of the new one"


def test_a_mirrored_cluster(new_query: NewQuery, lake: Path, admin: OffsetModel) -> None:
    admin.recreate("id-2", 300)
    admin.commit(118, foreign=True)  # 20 in the source cluster is 120 here; translated offsets are not exact
    (command,) = commands("A mirrored cluster")
    run_typed(command, lake)
    continue_anew(new_query, lake / "orders", admin, 130, topic_id="id-2")
    assert rows(lake / "orders") == sorted(records(0, 20) + records(118, 130))


@pytest.mark.parametrize("races", [0, 1])
def test_a_ledger_gets_another_name_although_it_is_unknown_whether_there_is_one(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch, races: int
) -> None:
    """The log that Delta describes shows no numbers, and an old one does not reach back to the first commit. Delta
    refuses the first number of a name that has a ledger."""
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    read, commit = TableHistory.ledger, TableWriter.commit_ledger

    def ledger(self: TableHistory, group: str, known: Ledger | None = None) -> Ledger | None:
        if group == "renamed":
            raise LedgerExpired(group)
        return read(self, group, known)

    def commit_ledger(*args: Any, **more: Any) -> Ledger:
        if races:
            raise CommitRace("another commit has the number")
        return commit(*args, **more)

    monkeypatch.setattr(TableHistory, "ledger", ledger)
    monkeypatch.setattr(TableHistory, "number", lambda self, group: None)
    monkeypatch.setattr(TableWriter, "commit_ledger", commit_ledger)
    names = (query.spark, str(table), "etl", str(table), "renamed")
    if races:
        with pytest.raises(OptionError, match="has a ledger of group 'renamed' already"):
            transfer_ledger(*names, execute=True)
    else:
        assert transfer_ledger(*names, execute=True).number == 1
