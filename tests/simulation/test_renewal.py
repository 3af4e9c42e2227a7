"""Histories in which offsets grow old within seconds: whatever happens, committing them again breaks no guarantee."""

import pytest
from kit import fake_admin
from kit.simulation import run

from spark_group_source.driver import worker
from spark_group_source.group import renewal

OLD_AFTER_S = 3


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
    monkeypatch.setattr(worker, "RETENTION_AFTER_S", 0.5)
    monkeypatch.setattr(fake_admin, "RETENTION_MIN", 1)
    monkeypatch.setattr(renewal, "RENEW", OLD_AFTER_S / 60)
    monkeypatch.setattr(renewal, "LOOKS", 60)
    renewed = 0
    take = renewal.Renewal.tick

    def tick(self: renewal.Renewal) -> None:
        nonlocal renewed
        before = self._counters.offsets_renewed
        take(self)
        renewed += self._counters.offsets_renewed - before

    monkeypatch.setattr(renewal.Renewal, "tick", tick)
    run(seed, protocol=protocol, agents=agents)
    assert renewed > 0
