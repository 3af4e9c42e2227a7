"""Print how large the ledger is in the commits of a table: ``python -m tests.bench ledger_sizes``.

Without Kafka, Spark and tables: the ledger as text in a commit's JSON, in the first commit and in the next ones.
Offsets are random numbers of ten digits; in each batch the partitions that move, move by up to 5,000 records. Names of
topics are as long as in ``python -m tests.bench topics``. Prints the table of ``docs/formats.md``."""

import argparse
import base64
import json
import random
import statistics
from collections.abc import Iterator, Sequence

from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.table_history import note_of
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

COMMITS = 6


def sizes(partitions: int, moved: int, topics: int) -> Iterator[int]:
    """Yield the bytes of the note in each commit."""
    dice = random.Random(partitions)
    names = ["orders"] if topics == 1 else [f"orders.{n}.".ljust(200, "x") for n in range(topics)]
    ids = {name: base64.urlsafe_b64encode(dice.randbytes(16)).decode().rstrip("=") for name in names}
    tps = [TopicPartition(name, p) for name in names for p in range(partitions // topics)]
    at = {tp: dice.randrange(10**9, 10**10) for tp in tps}
    ledger: Ledger | None = None
    for number in range(COMMITS):
        starts = dict(at)
        at |= {tp: at[tp] + dice.randrange(1, 5_000) for tp in dice.sample(tps, moved)}
        batch = StreamOffset(
            group="etl", stream="9f2c" * 8, seq=number, ranges={tp: (starts[tp], at[tp]) for tp in tps}
        )
        after = (ledger or Ledger(group="etl")).with_batch(batch, void=False).with_offsets(at, ids).with_next_number()
        doc = after.to_json_dict(ledger, starts, now_ms=10**12)
        ledger = after.at_version(number)
        yield len(json.dumps(note_of({"etl": doc}, read=number)))


def main(arguments: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="python -m tests.bench ledger_sizes", description=__doc__).parse_args(arguments)
    print("| partitions | topics | moved in a batch | first commit | later ones (median) |\n|---|---|---|---|---|")
    cases = (
        (10, 10, 1),
        (1_000, 100, 1),
        (1_000, 1_000, 1),
        (10_000, 100, 1),
        (10_000, 10_000, 1),
        (12_000, 20, 2_000),
    )
    for partitions, moved, topics in cases:
        first, *later = sizes(partitions, moved, topics)
        cells = [f"{size / 1000:,.{1 if size < 10**6 else 0}f} KB" for size in (first, statistics.median(later))]
        print(f"| {partitions:,} | {topics:,} | {moved:,} | {' | '.join(cells)} |")
    return 0
