"""Print how large the ledger is in the commits of a table: ``python -m tests.bench ledger_sizes``.

Without Kafka, Spark and tables: the ledgers of 2 * FULL_EVERY commits, as text in a commit's JSON. Offsets are random
numbers of ten digits; in each batch the partitions that move, move by up to 5,000 records. Prints the table of
``docs/formats.md``."""

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence

from spark_group_source.delta.ledger_format import FULL_EVERY, Ledger
from spark_group_source.delta.table_history import note_of
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset


def sizes(partitions: int, moved: int) -> Iterator[int]:
    """Yield the bytes of the note in each commit."""
    dice = random.Random(partitions)
    tps = [TopicPartition("orders", p) for p in range(partitions)]
    at = {tp: dice.randrange(10**9, 10**10) for tp in tps}
    ledger: Ledger | None = None
    for number in range(2 * FULL_EVERY):
        starts = dict(at)
        at |= {tp: at[tp] + dice.randrange(1, 5_000) for tp in dice.sample(tps, moved)}
        batch = StreamOffset(
            group="etl", stream="9f2c" * 8, seq=number, ranges={tp: (starts[tp], at[tp]) for tp in tps}
        )
        after = (ledger or Ledger(group="etl")).with_batch(batch, void=False).with_offsets(at).with_next_number()
        after, text = after.to_commit(ledger, starts, now_ms=10**12, log_retention_ms=10**9)
        ledger = after.at_version(number)
        yield len(json.dumps(note_of({"etl": text}, read=number)))


def main(arguments: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="python -m tests.bench ledger_sizes", description=__doc__).parse_args(arguments)
    print("| partitions | moved in a batch | first commit | full ledger | changes | mean |\n|---|---|---|---|---|---|")
    for partitions, moved in ((10, 10), (1_000, 100), (1_000, 1_000), (10_000, 100), (10_000, 10_000)):
        found = list(sizes(partitions, moved))
        first, full, changes = found[0], found[FULL_EVERY], statistics.median(found[FULL_EVERY + 1 :])
        cells = [first, full, changes, statistics.mean(found[FULL_EVERY:])]
        print(f"| {partitions:,} | {moved:,} | {' | '.join(f'{cell / 1000:.1f} KB' for cell in cells)} |")
    return 0
