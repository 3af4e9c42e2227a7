"""Reading checkpoints of Spark's own Kafka connector, and refusals. No broker, no Spark."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_group_source.cli import common, group_reset, migrate
from spark_group_source.cli.migrate import Progress
from spark_group_source.delta import checkpoint as checkpoint_module
from spark_group_source.delta import ledger_store
from spark_group_source.delta.checkpoint import local_files
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.errors import CheckpointMismatch, OptionError, SourceError
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import OPTIONS, REFUSED

METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}'
O0, O1, OTHER = TopicPartition("orders", 0), TopicPartition("orders", 1), TopicPartition("other", 0)


def checkpoint(folder: Path, offsets: Mapping[int, Sequence[str]], commits: Sequence[int], version: str = "v1") -> Path:
    """A checkpoint as Spark writes it, with checksums and an unfinished file."""
    for log, texts in (
        ("offsets", {n: "\n".join([version, METADATA, *lines]) for n, lines in offsets.items()}),
        ("commits", dict.fromkeys(commits, 'v1\n{"nextBatchWatermarkMs":0}')),
    ):
        (folder / log).mkdir(parents=True)
        for number, text in texts.items():
            (folder / log / str(number)).write_text(text)
            (folder / log / f".{number}.crc").write_bytes(b"crc\0")
        (folder / log / f".{max(texts, default=0) + 1}.0a1b.tmp").write_text("v1")
    return folder


def progress(folder: Path, sources: Sequence[str] = ()) -> Progress:
    return migrate.progress(local_files(), str(folder), sources)


@pytest.mark.parametrize(("version", "prefix"), [("v1", ""), ("v2", "0:")])
def test_position_is_read_from_last_finished_batch(version: str, prefix: str, tmp_path: Path) -> None:
    lines = [f'{prefix}{{"orders":{{"0":{n},"1":{n + 1}}}}}' for n in (3, 6)]
    found = progress(checkpoint(tmp_path, {0: lines[:1], 1: lines[1:]}, [0, 1], version))
    assert found == Progress(1, {O0: 6, O1: 7}, {O0: "0", O1: "0"})
    (tmp_path / "state" / "0").mkdir(parents=True)
    assert progress(tmp_path) == found._replace(stateful=True)


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        ("v1", ['{"orders":{"0":10,"1":10}}', "0", '{"logOffset":4}', '{"other":{"0":20}}', "-"]),
        ("v2", ['3:{"other":{"0":20}}', "1:0", '0:{"orders":{"0":10,"1":10}}', '2:{"logOffset":4}']),
    ],
)
def test_connector_sources_are_recognised_and_can_be_selected(version: str, lines: list[str], tmp_path: Path) -> None:
    checkpoint(tmp_path, {0: lines}, [0], version)
    everything = progress(tmp_path)
    assert (everything.offsets, everything.others) == ({O0: 10, O1: 10, OTHER: 20}, 2)
    assert everything.source == {O0: "0", O1: "0", OTHER: "3"}
    assert progress(tmp_path, ["3"]) == Progress(0, {OTHER: 20}, {OTHER: "3"})


def test_sources_with_a_common_partition_need_separate_groups(tmp_path: Path) -> None:
    checkpoint(tmp_path, {0: ['{"orders":{"0":5}}', '{"orders":{"0":7}}']}, [0])
    with pytest.raises(CheckpointMismatch, match=r"sources 0 and 1 both read orders-0.*--source 0 and --source 1"):
        progress(tmp_path)
    assert progress(tmp_path, ["1"]).offsets == {O0: 7}


ENDED = ['{"orders":{"0":3}}']


@pytest.mark.parametrize(
    ("offsets", "commits", "error", "message"),
    [
        ({0: ENDED, 1: ENDED}, [0], CheckpointMismatch, "batch 1 was planned and is not finished.*availableNow=True"),
        ({0: ENDED}, [], CheckpointMismatch, "batch 0 was planned and is not finished"),
        ({}, [], OptionError, "it is not the checkpointLocation of a query, or the query never planned one"),
        ({0: ENDED}, [0, 1], CheckpointMismatch, "has commits/1 and no offsets/1"),
        ({0: ["0"]}, [0], OptionError, "has no position of Spark's Kafka connector: it has 1 other sources"),
        ({0: ["{}"]}, [0], OptionError, "the query has read no partition yet"),
        (
            {0: ['{"group":"etl","seq":0,"stream":"s","v":1}']},
            [0],
            OptionError,
            "is the checkpoint of a kafka-group query",
        ),
        (
            {0: ['{"group":"my etl","seq":0,"stream":"s","v":1}']},
            [0],
            OptionError,
            "--group 'my etl' --to-checkpoint /.* --execute`",
        ),
        ({0: ['{"group":"etl","v']}, [0], CheckpointMismatch, "the offset of its kafka-group source is damaged"),
    ],
)
def test_unfinished_and_foreign_checkpoints_are_refused_with_remedy(
    offsets: dict[int, list[str]], commits: list[int], error: type[SourceError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        progress(checkpoint(tmp_path, offsets, commits))


def test_unknown_checkpoint_format_or_source_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, {0: ENDED}, [0], "v9")
    with pytest.raises(CheckpointMismatch, match="format 'v9'"):
        progress(tmp_path)
    (tmp_path / "offsets" / "0").write_text("\n".join(["v1", METADATA, *ENDED]))
    with pytest.raises(OptionError, match="has no source '4'; it has 0"):
        progress(tmp_path, ["4"])


@pytest.mark.parametrize("prefix", ["", "file:", "file://", "FILE:", "file://localhost"])
@pytest.mark.parametrize("name", ["a%20b", "a b", "a#b", "a?b"])
def test_a_local_checkpoint_is_found_by_the_text_of_its_path_as_by_hadoop(
    tmp_path: Path, prefix: str, name: str
) -> None:
    (tmp_path / name / "offsets").mkdir(parents=True)
    with common.checkpoint_files(f"{prefix}{tmp_path}/{name}/") as (files, root):
        assert (root, files.names(root)) == (f"{tmp_path}/{name}", ["offsets"])


def test_a_checkpoint_of_another_file_system_is_read_by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def session() -> Iterator[object]:
        yield object()

    monkeypatch.setattr(common, "session", session)
    for place in ("s3a://bucket/chk", "abfss://c@a.dfs.core.windows.net/chk", "dbfs:/chk", "hdfs://nn/chk"):
        with common.checkpoint_files(f"{place}/") as (_, root):
            assert root == place


def test_a_reset_to_a_checkpoint_of_another_file_system_uses_the_session_of_its_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second session would be the same one, and stopping it would stop the one that reads the table's ledger."""
    table_session: Any = object()
    used: list[object] = []

    def session() -> None:
        raise AssertionError("a second session")

    monkeypatch.setattr(common, "session", session)
    monkeypatch.setattr(checkpoint_module, "spark_files", used.append)
    monkeypatch.setattr(checkpoint_module, "positions", lambda *_: Ledger(group="etl"))
    monkeypatch.setattr(ledger_store, "read_ledger", lambda spark, *_, **__: used.append(spark))
    admin: Any = SimpleNamespace(existing_topics=lambda _: {})
    group_reset._of_checkpoint(admin, "etl", "s3a://bucket/chk", 3, {}, table_session, "s3a://bucket/table")
    assert used == [table_session, table_session]


# --- options of the connector ---------------------------------------------------------------------------------------

CONNECTOR = """
    assign subscribe subscribePattern startingOffsets startingOffsetsByTimestamp startingTimestamp endingOffsets
    endingOffsetsByTimestamp endingTimestamp failOnDataLoss kafkaConsumer.pollTimeoutMs fetchOffset.numRetries
    fetchOffset.retryIntervalMs maxOffsetsPerTrigger minOffsetsPerTrigger maxTriggerDelay minPartitions
    maxRecordsPerPartition groupIdPrefix includeHeaders startingOffsetsByTimestampStrategy kafka.bootstrap.servers
    kafka.group.id topic
"""
"""Every option of the source in Spark 4.2: the keys in KafkaSourceProvider, in the spelling of its documentation."""


def test_every_connector_option_is_supported_or_refused_with_reason() -> None:
    here = {row.name for row in OPTIONS}
    for name in CONNECTOR.split():
        assert (name in here) != (name in REFUSED), name


def test_migration_guide_lists_refused_options() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/migrate.md").read_text()
    table = text.partition("## Differences")[2]
    for name in REFUSED.keys() & set(CONNECTOR.split()) - {"topic"}:
        assert re.search(rf"`{re.escape(name)}`", table), name
