"""Run the printed commands of the sink's messages without a JVM and a broker.

``spark-group`` runs in this process, with the test's tables and a model of Kafka's committed offsets. ``deltalake``
runs the SQL statements. After the commands the query continues with the same checkpoint.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable
from offset_model import OffsetModel
from sink_helpers import Query, one
from sink_source import offset
from typer.testing import CliRunner

from spark_group_source.cli.app import app
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.table_history import note_of
from spark_group_source.delta.table_writer import open_existing
from spark_group_source.errors import LedgerConflict, OptionError, SourceError
from spark_group_source.protocol.offsets import StreamOffset

FOLLOWED = [("orders", 0)]


def run_command(command: str) -> None:
    """Run a command exactly as it is printed."""
    if found := re.fullmatch(r"RESTORE TABLE delta\.`(.+)` TO VERSION AS OF (\d+)", command):
        DeltaTable(found[1]).restore(int(found[2]))
        return
    words = shlex.split(command)
    assert words[0] == "spark-group" and words[-1] == "--execute"
    shown = CliRunner().invoke(app, words[1:])
    assert shown.exit_code == 0, shown.output


def refused(run: Callable[[], object]) -> SourceError:
    with pytest.raises((LedgerConflict, OptionError)) as error:
        run()
    return error.value


def continue_query(query: Query, table: Path, admin: OffsetModel, batch_id: int, end: int) -> None:
    """Run the batch after the reset: it starts at the committed offset, and its plan knows the reset."""
    batch = offset(batch_id, one(admin.position, end), followed=FOLLOWED, reset_number=admin.resets)
    query.run(query.sink(table), batch_id, batch)


def commit_late(query: Query, table: Path, ledger: Ledger, late: StreamOffset) -> None:
    """Commit a batch that was decided at version 2."""
    ends = {tp: end for tp, (_, end) in late.ranges.items()}
    after = ledger.with_batch(late, void=False).with_offsets(ends).with_next_number()
    there = open_existing(query.spark, str(table))
    note = note_of({"etl": after.to_json_dict()}, read=2)
    there.commit(there.history(), query.rows(late), {"spark-group-source.etl": 3}, note, needed=True)
