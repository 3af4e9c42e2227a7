"""``docs/batch.svg``: a batch and a rebalance, drawn from what the protocol's core really does.

``python -m tests.render`` writes it. :func:`film` says what Kafka, Spark and the other member do, and how long their
answers take; what is planned, committed, held and released, and when, is what the run says on a clock moved by hand.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kit.harness import GROUP, STREAM, only, tps
from kit.run_harness import RunHarness

from spark_group_source.group import events as ev
from spark_group_source.group.offsets import StreamOffset

STAYS, LEAVES = tps("orders", 0, 1)
LOOK_MS, ECHO_MS, REBALANCE_MS = 70, 220, 180
"""How long the brokers take to say where the logs end, to commit and show it, to give a free partition away."""
REVOKED_MS, SINK_MS, DURABLE_MS, READ_MS, END_MS = 430, 800, 1050, 1800, 2000
"""When Kafka asks for a partition, the sink begins to commit batch 7 and has it, batch 8 ends, and the picture."""
IDLE_MS = 2_000


class Times(NamedTuple):
    """When what happened, in milliseconds, and the two batches."""

    plan: int
    revoked: int
    echo: int
    next_plan: int
    release: int
    given: int
    first: StreamOffset
    second: StreamOffset
    committed: dict[str, int]


def film() -> Times:
    """A run with one slot, from one call of Spark's to the end of the batch after the next."""
    play = RunHarness()
    play.ends = {STAYS: 100, LEAVES: 40}
    play.committed = {tp: ev.Committed(offset=at, stream=STREAM, seq=6) for tp, at in play.ends.items()}
    play.start = StreamOffset(
        group=GROUP, stream=STREAM, seq=6, known={"orders": 2}, ranges={STAYS: (80, 100), LEAVES: (20, 40)}
    )
    assert play.latest() is play.start, "there is nothing to read before the picture begins"
    play.pass_time(IDLE_MS)
    zero = play.clock()
    play.look_ms, play.silent = LOOK_MS, {ev.Echo}

    play.ends = {STAYS: 160, LEAVES: 90}
    first = play.batch()
    plan = play.clock() - zero
    play.pass_time(REVOKED_MS - plan)
    play.feed(ev.Revoking(slot=0, client=play.clients[0], partitions=(LEAVES,), eager=False))
    play.pass_time(DURABLE_MS - REVOKED_MS)
    assert not only(ev.Release, play.history), "the revocation is held"

    play.ends = {STAYS: 210}
    second = play.batch()
    next_plan = play.clock() - zero
    echo = only(ev.Echo, play.history)[-1]
    play.pass_time(DURABLE_MS + ECHO_MS - next_plan)
    assert only(ev.Release, play.feed(ev.EchoDone(offsets=echo.offsets))), "the commit lets it go"
    release = play.clock() - zero
    committed = {str(tp): at for tp, at in sorted(echo.offsets.items())}
    return Times(plan, REVOKED_MS, DURABLE_MS, next_plan, release, release + REBALANCE_MS, first, second, committed)


# --- drawing --------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, ROW, BAR = 960, 530, 146, 48, 66, 30
ROWS = ("Spark", "coordinator", "slot 0", "Kafka", "another member")
STYLE = """
text { font: 15px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.name { font-weight: 600 } .small { font-size: 14px; fill: #59636e } .mid { text-anchor: middle }
.end { text-anchor: end } .n { font-size: 14px; font-weight: 700; fill: #ffffff; text-anchor: middle }
.page { fill: #ffffff; stroke: #d0d7de } .line { stroke: #d0d7de } .dot { fill: #0969da }
.go { stroke: #0969da; stroke-width: 1.8; fill: none } .tip { fill: #0969da }
.call { fill: #eaeef2; stroke: #8c959f } .read { fill: #ddf4ff; stroke: #54aeff }
.sink { fill: #dafbe1; stroke: #4ac26b }
.hold { fill: #fff1e5; stroke: #fb8f44; stroke-dasharray: 5 3 } .other { fill: #fbefff; stroke: #c297ff }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 } .n { fill: #0d1117 } .page { fill: #0d1117; stroke: #3d444d }
.line { stroke: #3d444d } .dot, .tip { fill: #58a6ff } .go { stroke: #58a6ff } .call { fill: #262c36; stroke: #656c76 }
.read { fill: #0c2d6b; stroke: #388bfd } .sink { fill: #033a16; stroke: #2ea043 }
.hold { fill: #3d1300; stroke: #db6d28 } .other { fill: #3c1e70; stroke: #8957e5 }
}
"""


def _x(ms: int) -> float:
    return round(LEFT + ms * (WIDTH - LEFT - 16) / END_MS, 1)


def _y(row: str) -> int:
    return TOP + ROWS.index(row) * ROW


def _bar(kind: str, row: str, start: int, end: int, text: str, text_until: int | None = None) -> Iterator[str]:
    a, b, y = _x(start), _x(end), _y(row)
    middle = round((a + _x(end if text_until is None else text_until)) / 2, 1)
    yield f'<rect class="{kind}" x="{a}" y="{y}" width="{round(b - a, 1)}" height="{BAR}" rx="4"/>'
    yield f'<text class="mid" x="{middle}" y="{y + 20}">{text}</text>'


def _arrow(start: int, row: str, end: int, to: str, dx: float = 0) -> Iterator[str]:
    """From one row to another, bar to bar; on the coordinator's row there are numbers instead of bars."""
    sign = 1 if ROWS.index(to) > ROWS.index(row) else -1
    reach = [(11 if name == "coordinator" else BAR // 2) for name in (row, to)]
    y1, y2 = _y(row) + BAR // 2 + sign * reach[0], _y(to) + BAR // 2 - sign * (reach[1] + 2)
    yield f'<path class="go" marker-end="url(#tip)" d="M{_x(start)} {y1} L{_x(end) + dx} {y2}"/>'


def _number(x: float, y: float, number: int) -> Iterator[str]:
    yield f'<circle class="dot" cx="{x}" cy="{y}" r="10"/><text class="n" x="{x}" y="{y + 4.5}">{number}</text>'


def draw(at: Times) -> str:
    """The picture as SVG."""
    both, alone = (
        " and ".join(f"{tp} [{a},{b})" for tp, (a, b) in sorted(plan.ranges.items())) for plan in (at.first, at.second)
    )
    goes = str(LEAVES)
    old, new = at.first.ranges[LEAVES][0], at.committed[goes]
    kept = " and ".join(f"{tp} at {n}" for tp, n in sorted(at.committed.items()))
    out: list[str] = []
    for row in ROWS:
        out.append(f'<text class="name end" x="{LEFT - 14}" y="{_y(row) + 20}">{row}</text>')
        out.append(f'<path class="line" d="M{LEFT} {_y(row) + BAR / 2} H{WIDTH - 16}"/>')
    out += [
        f'<text class="small mid" x="{_x(ms) - (10 if ms == END_MS else 0)}" y="26">{ms / 1000} s</text>'
        for ms in range(0, END_MS + 1, 500)
    ]
    shown, joins = (at.echo + at.release) // 2, at.revoked - 40
    out.append(f'<text class="small" x="{_x(joins) + 9}" y="{_y("another member") + 6}">joins the group</text>')
    for part in (
        _arrow(joins, "another member", joins, "Kafka"),
        _arrow(at.revoked, "Kafka", at.revoked, "slot 0"),
        _arrow(at.revoked, "slot 0", at.revoked, "coordinator"),
        _bar("call", "Spark", 0, at.plan, "plan"),
        _bar("read", "Spark", at.plan, SINK_MS, "reads batch 7"),
        _bar("sink", "Spark", SINK_MS, DURABLE_MS, "sink commit"),
        _bar("call", "Spark", DURABLE_MS, at.next_plan, "plan"),
        _bar("read", "Spark", at.next_plan, READ_MS, "reads batch 8"),
        _bar("call", "slot 0", 0, at.revoked, "has both partitions"),
        _bar("hold", "slot 0", at.revoked, at.release, f"holds {goes}; heartbeats go on", at.echo),
        _bar("call", "slot 0", at.release, END_MS, "has orders-0"),
        _bar("call", "Kafka", 0, shown, f"{goes} is slot 0's, committed offset {old}"),
        _bar("sink", "Kafka", shown, at.given, f"committed {new}"),
        _bar("other", "Kafka", at.given, END_MS, f"{goes} is the other's"),
        _bar("other", "another member", at.given, END_MS, f"reads {goes} from {new}"),
        _arrow(at.plan, "coordinator", at.plan, "Spark"),
        _arrow(at.echo, "Spark", at.echo, "coordinator"),
        _arrow(at.echo, "coordinator", shown, "Kafka"),
        _arrow(shown, "Kafka", at.release, "coordinator", dx=-10),
        _arrow(at.next_plan, "coordinator", at.next_plan, "Spark"),
        _arrow(at.release, "coordinator", at.release, "slot 0"),
        _arrow(at.release, "slot 0", at.release, "Kafka"),
        _arrow(at.given, "Kafka", at.given, "another member"),
    ):
        out += part
    legend = (
        (at.plan, "coordinator", f"batch 7 is planned: {both}"),
        (
            at.revoked,
            "coordinator",
            f"another member joined: Kafka wants {goes} back; batch 7 reads it, so it is held",
        ),
        (at.echo, "coordinator", f"batch 7 is in the sink: the echo commits {kept}"),
        (at.next_plan, "coordinator", f"batch 8 is planned: {alone}; {goes} is leaving"),
        (at.release, "coordinator", "Kafka shows the commit: the coordinator releases the revocation"),
        (at.given, "another member", f"the new owner starts at {new}: nothing is read twice, nothing is skipped"),
    )
    for number, (ms, row, text) in enumerate(legend, 1):
        out += _number(_x(ms), _y(row) + BAR // 2, number)
        y = TOP + len(ROWS) * ROW + 24 * number - 10
        out += _number(LEFT, y - 5, number)
        out.append(f'<text class="small end" x="{LEFT - 18}" y="{y}">{ms / 1000:.2f} s</text>')
        out.append(f'<text x="{LEFT + 20}" y="{y}">{text}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img"><title>A batch and a rebalance</title><style>{STYLE}</style>\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0 L8 4 L0 8 Z"/></marker></defs>\n'
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>\n'
        + "\n".join(out)
        + "\n</svg>\n"
    )
