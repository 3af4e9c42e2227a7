"""Histories in which offsets are due for renewal within seconds: committing them again breaks no guarantee."""

import pytest
from kit import simulation

from spark_group_source.protocol import partitions, run

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
def test_G2_renewed_commits_break_no_guarantee(
    seed: int, protocol: str, agents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "RENEW_MS", OLD_AFTER_S * 1000)
    monkeypatch.setattr(run, "RENEW_CHECK_MS", 1_000)
    renewed = 0
    renew = partitions.Partitions.renew_commits

    def counted(self: partitions.Partitions, now_ms: int) -> int:
        nonlocal renewed
        count = renew(self, now_ms)
        renewed += count
        return count

    monkeypatch.setattr(partitions.Partitions, "renew_commits", counted)
    simulation.run(seed, protocol=protocol, agents=agents)
    assert renewed > 0
