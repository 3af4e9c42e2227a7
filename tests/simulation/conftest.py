"""``pytest tests/simulation --seed N`` runs one history instead of all."""

from collections.abc import Iterator

import pytest
from simulation.stage import Stage


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="run only this history of the simulated group")


@pytest.fixture
def only_seed(request: pytest.FixtureRequest) -> int | None:
    seed: int | None = request.config.getoption("--seed", default=None)
    return seed


@pytest.fixture
def play(request: pytest.FixtureRequest, group_id: str) -> Iterator[Stage]:
    """The stage on which a script runs: see :func:`simulation.stage.played`."""
    flavour, real = request.param
    if real:
        servers = request.getfixturevalue("broker").bootstrap_servers
        stage = Stage(flavour, group_id, servers=servers, make_topic=request.getfixturevalue("topic"))
    else:
        stage = Stage(flavour, group_id)
    yield stage
    stage.world.close()
