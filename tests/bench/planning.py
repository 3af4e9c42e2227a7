"""Measure the coordinator's work at a batch boundary with many partitions, and for a group with many changes.

``python -m tests.bench planning [--repeat N]``

Without Kafka and Spark: the run, the planner and the offset JSON alone, on one core. CPU time, the best of some runs,
so that the figures are comparable on a busy machine."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import LeaderEpochs
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.planner import Planner
from spark_group_source.protocol.rules import Rules, StartingPosition
from spark_group_source.protocol.run import Run
from spark_group_source.protocol.states import RunState

SIZES = (100, 1_000, 10_000, 100_000)
SLOTS = 500
TARGET_MS = 50.0
"""Target for 10,000 partitions and 500 slots: a tenth of a batch of 0.5 s."""
GROWTH_MAX = 1.5
"""Target for linear growth. The cost of a boundary is measured in dict comprehensions over the same partitions, and may
grow by this factor over the sizes: in time, even those cost more per key when 100,000 keys exceed the CPU's caches."""
MEMBERS = 5_000
CHURN = 0.01
"""Share of the members that change per second."""
GROUP, STREAM = "bench", "9f2c"
T = TypeVar("T")
STEPS = ("durable", "plan", "planned", "json")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="planning")
    parser.add_argument("--repeat", type=int, default=7)
    repeat = parser.parse_args(arguments).repeat
    table = Table(title=f"one boundary, {SLOTS} slots (ms of CPU)")
    for column in ("partitions", *STEPS, "all", "us each", "dicts"):
        table.add_column(column, justify="right")
    totals, dicts = {}, {}
    for partitions in SIZES:
        parts = boundary(partitions, min(SLOTS, partitions), repeat)
        one_dict = parts.pop("dict")
        totals[partitions] = sum(parts.values())
        dicts[partitions] = totals[partitions] / one_dict
        per = totals[partitions] * 1_000 / partitions
        shown = [f"{parts[step]:.2f}" for step in STEPS]
        table.add_row(f"{partitions:,}", *shown, f"{totals[partitions]:.1f}", f"{per:.2f}", f"{dicts[partitions]:.0f}")
    console = Console(width=110)
    console.print(table)
    events, per_s = churn(MEMBERS, CHURN, seconds=20)
    share = events / per_s
    console.print(
        f"{MEMBERS:,} members, {CHURN:.0%} of them a second: {events:.0f} events a second to handle, "
        f"{per_s:,.0f} a second possible: {share:.1%} of a core"
    )
    growth = max(dicts.values()) / dicts[SIZES[0]]
    missed = [
        text
        for text, wrong in (
            (f"10,000 partitions cost {totals[10_000]:.0f} ms, not {TARGET_MS:.0f}", totals[10_000] > TARGET_MS),
            (f"the cost of a boundary, in dicts, grows {growth:.1f} times", growth > GROWTH_MAX),
            (f"churn takes {share:.0%} of a core", share > 1.0),
        )
        if wrong
    ]
    for text in missed:
        console.print(f"[red]missed[/red]: {text}")
    return bool(missed)


def boundary(partitions: int, slots: int, repeat: int) -> dict[str, float]:
    """Milliseconds of each step from "the batch is durable" to the text of the next offset, the best of ``repeat``."""
    run = running(partitions, slots)
    planner = Planner(Rules(group=GROUP, starting=StartingPosition(), max_offsets=partitions * 20))
    start = plan(run, planner)[0]
    best = dict.fromkeys((*STEPS, "dict"), float("inf"))
    for _ in range(repeat):
        spent, orders = measure(lambda start=start: run.handle(ev.Durable(offset=start), now_ms=0))  # type: ignore[misc]
        for order in orders:
            if isinstance(order, ev.CommitOffsets):
                run.handle(ev.OffsetsCommitted(offsets=order.offsets), now_ms=0)
        start, parts = plan(run, planner)
        for step, ms in {"durable": spent, **parts}.items():
            best[step] = min(best[step], ms)
    return best


def running(partitions: int, slots: int) -> Run:
    """A run whose slots have equal shares of the partitions, with all positions at 100."""
    run = Run(Rules(group=GROUP, starting=StartingPosition(), slots=slots))
    run.handle(ev.NextBatchRequested(start=StreamOffset.initial(GROUP), new_stream=STREAM), now_ms=0)
    run.handle(ev.TopicsListed(topics={"orders": partitions}), now_ms=0)
    everything = [TopicPartition("orders", p) for p in range(partitions)]
    orders: list[ev.Command] = []
    for slot in range(slots):
        share = tuple(everything[slot::slots])
        orders += run.handle(ev.Assigned(slot=slot, client=1, partitions=share, generation=1), now_ms=0)
    while orders:
        answers = [answer for order in orders if (answer := _answer(order, {})) is not None]
        orders = [order for answer in answers for order in run.handle(answer, now_ms=0)]
    assert run.is_gathered or not partitions
    return run


def plan(run: Run, planner: Planner) -> tuple[StreamOffset, dict[str, float]]:
    """Plan a batch that reads some of every partition's backlog, as a run does."""
    parts: dict[str, float] = {}
    positions = run.plannable()
    ends = {tp: at + 10 + tp.partition % 90 for tp, at in positions.items()}
    leaders = dict.fromkeys(positions, 3)

    def epochs_at(positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        return LeaderEpochs().at_ends(positions, ends, leaders)

    parts["plan"], planned = measure(
        lambda: planner.plan(
            run.plannable(),
            ends,
            {"orders": "x"},
            epochs_at,
            stream=run.stream,
            partitions=run.partitions,
            lookups=run.lookups,
            first=False,
            unlimited=False,
            now_ms=0,
        )
    )
    assert planned is not None
    parts["dict"], _ = measure(lambda: {tp: at + 1 for tp, at in positions.items()})
    run.state = RunState.FETCHING_ENDS  # the state of Spark's call at this point
    parts["planned"], _ = measure(lambda: run.handle(ev.Planned(offset=planned), now_ms=0))
    parts["json"], _ = measure(planned.to_json)
    return planned, parts


def churn(members: int, share: float, *, seconds: int) -> tuple[float, float]:
    """Events per second that ``share`` of the members cause by failing, joining, losing and revoking, and how many of
    them one core can handle per second."""
    run = running(members, members)
    clients = dict.fromkeys(range(members), 1)
    handled = 0
    now_ms = 0
    started = time.process_time()
    changes = int(members * share)
    for second in range(seconds):
        for n in range(changes):
            now_ms += 1_000 // changes
            slot = (second * changes + n) * 7 % members
            for event in _change(slot, clients, n % 3):
                orders = run.handle(event, now_ms=now_ms)
                handled += 1
                while orders:
                    answers = [answer for order in orders if (answer := _answer(order, clients)) is not None]
                    orders = [o for answer in answers for o in run.handle(answer, now_ms=now_ms)]
                    handled += len(answers)
            if (due_ms := run.next_deadline_ms()) is not None and due_ms <= now_ms:
                for order in run.handle(ev.Tick(), now_ms=now_ms):
                    if isinstance(order, ev.Join):
                        clients[order.slot] = order.client
                handled += 1
    spent_s = time.process_time() - started
    return handled / seconds, handled / spent_s


def _change(slot: int, clients: dict[int, int], kind: int) -> list[ev.Event]:
    """A member fails and joins again later, or its partition is revoked or lost and assigned again."""
    tps = (TopicPartition("orders", slot),)
    client = clients[slot]
    if kind == 0:
        return [ev.MemberFailed(slot=slot, client=client, reason="gone")]
    gone: ev.Event = ev.Lost(slot=slot, client=client, partitions=tps)
    if kind == 1:
        gone = ev.Revoking(slot=slot, client=client, partitions=tps, eager=False)
    return [gone, ev.Assigned(slot=slot, client=client, partitions=tps, generation=2)]


def _answer(order: ev.Command, clients: dict[int, int]) -> ev.Event | None:
    match order:
        case ev.Join():
            clients[order.slot] = order.client
            mine = (TopicPartition("orders", order.slot),)
            return ev.Assigned(slot=order.slot, client=order.client, partitions=mine, generation=2)
        case ev.FetchCommittedOffsets():
            found = {tp: ev.Committed(offset=100, stream=STREAM) for tp in order.partitions}
            return ev.CommittedOffsetsRead(offsets=found, requested=order.partitions, reset_number=0)
        case ev.CommitOffsets():
            return ev.OffsetsCommitted(offsets=order.offsets)
        case _:
            return None


def measure(do: Callable[[], T]) -> tuple[float, T]:
    started = time.process_time()
    result = do()
    return (time.process_time() - started) * 1_000, result
