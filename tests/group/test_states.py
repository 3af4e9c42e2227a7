"""The two tables of states: every row is reached by some events, and every change that the machine makes is a row."""

import ast
import inspect
from collections.abc import Callable

import pytest

from spark_group_source.errors import InvariantBroken
from spark_group_source.group import events as ev
from spark_group_source.group import machine
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.group.states import PHASES, SLOTS, Phase, SlotState, render_markdown
from spark_group_source.testing.harness import FOUNDING_BUDGET_MS, GroupHarness, tps

A, B = tps("orders", 0, 1)
REPLAYED = StreamOffset(group="etl", stream="9f2c", seq=3, known={"orders": 2}, ranges={A: (100, 150)})

Way = list[Callable[[GroupHarness], object]]


def born(g: GroupHarness) -> None:
    g.born()


def out(g: GroupHarness) -> None:
    g.born()
    g.failed()


def assigned(g: GroupHarness) -> None:
    g.born()
    g.settled(A, B)


def planned(g: GroupHarness) -> None:
    assigned(g)
    g.plan({A: (100, 150), B: (100, 110)})


def revoking(g: GroupHarness) -> None:
    planned(g)
    g.revoking(A)


def unable_to_join(g: GroupHarness) -> None:
    g.failed()
    g.tick(ms=100)
    g.clock.advance(ms=FOUNDING_BUDGET_MS)
    g.failed()


# For each row: what leads to its state, and the step that it describes.
SLOT_WAYS: dict[tuple[SlotState, str], Way] = {
    (SlotState.OUT, "Join"): [out, lambda g: g.tick(ms=100)],
    (SlotState.JOINING, "Assigned"): [born, lambda g: g.assigned(A)],
    (SlotState.ASSIGNED, "Assigned"): [assigned, lambda g: g.assigned()],
    (SlotState.REVOKING, "Assigned"): [revoking, lambda g: g.assigned()],
    (SlotState.JOINING, "Revoking"): [born, lambda g: g.revoking()],
    (SlotState.ASSIGNED, "Revoking"): [planned, lambda g: g.revoking(A)],
    (SlotState.REVOKING, "Revoking"): [revoking, lambda g: g.revoking(B)],
    (SlotState.REVOKING, "Release"): [revoking, lambda g: (g.durable(), g.echoed())],
    (SlotState.REVOKING, "Release (eager)"): [
        planned,
        lambda g: g.revoking(A, B, eager=True),
        lambda g: (g.durable(), g.echoed()),
    ],
    (SlotState.JOINING, "Lost"): [born, lambda g: g.lost()],
    (SlotState.ASSIGNED, "Lost"): [assigned, lambda g: g.lost(A, B)],
    (SlotState.REVOKING, "Lost"): [revoking, lambda g: g.lost(A, B)],
    (SlotState.JOINING, "MemberFailed"): [born, lambda g: g.failed()],
    (SlotState.ASSIGNED, "MemberFailed"): [assigned, lambda g: g.failed()],
    (SlotState.REVOKING, "MemberFailed"): [revoking, lambda g: g.failed()],
    (SlotState.JOINING, "MemberFenced"): [born, lambda g: g.fenced()],
    (SlotState.ASSIGNED, "MemberFenced"): [assigned, lambda g: g.fenced()],
    (SlotState.REVOKING, "MemberFenced"): [revoking, lambda g: g.fenced()],
    (SlotState.JOINING, "Leave"): [born, lambda g: g.feed(ev.Closing(leave=True))],
    (SlotState.ASSIGNED, "Leave"): [assigned, lambda g: g.feed(ev.Closing(leave=True))],
    (SlotState.REVOKING, "Leave"): [revoking, lambda g: g.feed(ev.Closing(leave=True))],
}

PHASE_WAYS: dict[tuple[Phase, str], Way] = {
    (Phase.NEW, "Born"): [lambda g: None, born],
    (Phase.NEW, "Durable"): [lambda g: None, lambda g: g.durable({A: (100, 150)})],
    (Phase.NEW, "Replay"): [lambda g: None, lambda g: g.feed(ev.Replay(offset=REPLAYED, topics=("orders",)))],
    (Phase.NEW, "Closing"): [lambda g: None, lambda g: g.feed(ev.Closing(leave=True))],
    (Phase.OPEN, "Planned"): [assigned, lambda g: g.plan({})],
    (Phase.OPEN, "Closing"): [assigned, lambda g: g.feed(ev.Closing(leave=True))],
    (Phase.OPEN, "Fail"): [born, unable_to_join],
    (Phase.PLANNED, "Durable"): [planned, lambda g: g.durable()],
    (Phase.PLANNED, "Closing"): [planned, lambda g: g.feed(ev.Closing(leave=True))],
    (Phase.PLANNED, "Fail"): [planned, lambda g: g.fenced()],
}


def test_the_ways_are_those_of_the_tables() -> None:
    assert SLOT_WAYS.keys() == SLOTS.keys()
    assert PHASE_WAYS.keys() == PHASES.keys()


@pytest.mark.parametrize("row", SLOTS, ids=lambda row: f"{row[0].value}-{row[1]}")
def test_every_row_of_the_slots_is_reached(row: tuple[SlotState, str], fresh: GroupHarness) -> None:
    *before, step = SLOT_WAYS[row]
    for lead in before:
        lead(fresh)
    assert fresh.machine.statistics().slots == (row[0].value,)
    step(fresh)
    # An eager or a plain revocation with nothing to wait for goes at once.
    gone_at_once = row == (SlotState.JOINING, "Revoking")
    assert fresh.machine.statistics().slots == (("assigned" if gone_at_once else SLOTS[row].value),)


@pytest.mark.parametrize("row", PHASES, ids=lambda row: f"{row[0].value}-{row[1]}")
def test_every_row_of_the_phases_is_reached(row: tuple[Phase, str], fresh: GroupHarness) -> None:
    *before, step = PHASE_WAYS[row]
    for lead in before:
        lead(fresh)
    assert fresh.phase() is row[0]
    step(fresh)
    assert fresh.phase() is PHASES[row]


def test_the_causes_in_the_code_are_those_of_the_tables() -> None:
    used: dict[str, set[str]] = {"_move": set(), "_move_phase": set()}
    for node in ast.walk(ast.parse(inspect.getsource(machine))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in used:
            cause = ast.walk(node.args[-1])
            used[node.func.attr] |= {
                part.value for part in cause if isinstance(part, ast.Constant) and isinstance(part.value, str)
            }
    assert used["_move"] == {cause for _, cause in SLOTS}
    assert used["_move_phase"] == {cause for _, cause in PHASES}


def test_every_state_is_the_end_of_some_row_or_the_beginning() -> None:
    assert {*PHASES.values(), Phase.NEW} == set(Phase)
    assert {*SLOTS.values()} == set(SlotState)


def test_nothing_leads_out_of_the_ends() -> None:
    assert not [row for row in PHASES if row[0] is Phase.CLOSED]
    assert not [row for row in SLOTS if row[0] is SlotState.FENCED]


def test_a_change_that_is_not_in_the_table_is_a_bug(group: GroupHarness) -> None:
    with pytest.raises(InvariantBroken, match="Born in phase open"):
        group.born()


def test_the_tables_are_rendered_for_the_readme() -> None:
    text = render_markdown()
    rows = [(cause, to.value) for (_, cause), to in PHASES.items()]
    rows += [(cause, to.value) for (_, cause), to in SLOTS.items()]
    for cause, to in rows:
        assert f"{cause} → `{to}`" in text
    assert "| `closed` | nothing |" in text and "| `fenced` | nothing |" in text
