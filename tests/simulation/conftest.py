"""``pytest tests/simulation --seed N`` plays one history instead of all."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="play only this history of the simulated group")


@pytest.fixture
def only_seed(request: pytest.FixtureRequest) -> int | None:
    seed: int | None = request.config.getoption("--seed", default=None)
    return seed
