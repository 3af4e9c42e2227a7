"""Histories in which offsets grow old within seconds: whatever happens, committing them again breaks no guarantee."""

import pytest
from kit.simulation import run

from spark_group_source.group import machine, positions

OLD_AFTER_S = 3


@pytest.mark.proves("G2", level="simulation")
@pytest.mark.parametrize(
    ("seed", "protocol", "agents"),
    [
        (11, "cooperative", True),
        (3, "eager", False),
        (4, "consumer", False),
    ],
)
def test_G2_offsets_that_are_committed_again_and_again(
    seed: int, protocol: str, agents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positions, "RENEW_MS", OLD_AFTER_S * 1000)
    monkeypatch.setattr(machine, "RENEW_LOOK_MS", 1_000)
    renewed = 0
    renew = positions.Positions.renew

    def counted(self: positions.Positions, now_ms: int) -> int:
        nonlocal renewed
        count = renew(self, now_ms)
        renewed += count
        return count

    monkeypatch.setattr(positions.Positions, "renew", counted)
    run(seed, protocol=protocol, agents=agents)
    assert renewed > 0
