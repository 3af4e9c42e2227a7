"""G4, G7: kills of agents, executors and workers, and faults of the control channel. Short runs;
``python -m tests.bench agents`` has the long ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.broker_cluster import BrokerCluster
from rebalance.accounts import measured

from crash import channel_faults, kills
from crash.churn import Application, broker_settings
from crash.running import HANG_S

SESSION_MS = 15_000
SEED = 1

pytestmark = [pytest.mark.crash, pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(HANG_S)]


@pytest.fixture(scope="module")
def broker(jvm: None) -> Iterator[BrokerCluster]:
    """A broker of its own: its log contains these groups only, and its sessions suit them."""
    with BrokerCluster(settings=broker_settings(SESSION_MS)) as started:
        yield started


@pytest.fixture
def application(broker: BrokerCluster, tmp_path: Path) -> Callable[..., Application]:
    def make(protocol: str, **more: Any) -> Application:
        return Application(broker, tmp_path / "home", protocol=protocol, session_ms=SESSION_MS, **more)

    return make


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_kills_lose_and_duplicate_nothing_and_cause_no_rebalance(
    protocol: str, application: Callable[..., Application]
) -> None:
    account = kills.Kills(application(protocol, **kills.SLOW_READ), each=1, seed=SEED, report=measured).run()
    assert not account.lost and not account.doubled, account
    assert sum(account.rebalances(kind) for kind in kills.KINDS) == 0, account


def test_short_faults_of_the_channel_end_no_agent_and_cause_no_rebalance(broker: BrokerCluster, tmp_path: Path) -> None:
    short = tuple(fault for fault in channel_faults.FAULTS if fault.short)[:4]
    faults = channel_faults.ChannelFaults(broker, tmp_path / "home", protocol="classic", report=measured, faults=short)
    account = faults.run()
    assert not account.lost and not account.doubled, account
    assert all(one.rebalances == one.agents_lost == 0 for one in account.results), account
