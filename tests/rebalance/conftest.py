"""What the tests of rebalances share: a group's options, runs and members, all tied to the test's broker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scenes import Scene
from streams import options_of

from rebalance.ordinary import OrdinaryConsumer, settings_of
from spark_group_source.local.broker import Broker

Options = Callable[..., dict[str, str]]
Members = Callable[..., OrdinaryConsumer]


class GroupScene(Scene):
    """The test's group with runs of ours and ordinary consumers in it."""

    members = 0

    def run_options(
        self, topic: str | None, strategy: str = "range", *, session_ms: int = 6000, **more: object
    ) -> dict[str, str]:
        """Options of a run in the test's group."""
        return make_options(self.servers, self.group, topic, strategy, session_ms=session_ms, **more)

    def ordinary(self, *topics: str, **more: Any) -> OrdinaryConsumer:
        """Start an ordinary consumer in the test's group; close it."""
        self.members += 1
        return OrdinaryConsumer(
            self.servers, self.group, list(topics), self.folder / f"ordinary-{self.members}.txt", **more
        )


@pytest.fixture
def scene(jvm: None, request: pytest.FixtureRequest, group_id: str) -> GroupScene:
    return GroupScene(request, group_id)


@pytest.fixture
def options(broker: Broker, group_id: str) -> Options:
    """``options(topic, strategy="range", session_ms=6000, **more)`` for a run in the test's group."""

    def make(topic: str | None, strategy: str = "range", *, session_ms: int = 6000, **more: object) -> dict[str, str]:
        return make_options(broker.bootstrap_servers, group_id, topic, strategy, session_ms=session_ms, **more)

    return make


def make_options(
    servers: str, group: str, topic: str | None, strategy: str, *, session_ms: int = 6000, **more: object
) -> dict[str, str]:
    protocol = "consumer" if strategy == "consumer" else "classic"
    own = {} if strategy == "consumer" else settings_of(strategy, session_ms=session_ms)
    own.pop("group.protocol", None)
    subscribe = {} if topic is None else {"subscribe": topic}
    kafka = {f"kafka.{name}": value for name, value in own.items()}
    return options_of(servers, group, protocol=protocol, **{**kafka, **subscribe, **more})


@pytest.fixture
def ordinary(broker: Broker, group_id: str, tmp_path: Path) -> Members:
    """``ordinary(topic, strategy="range", **more)`` starts an ordinary consumer in the test's group; close it."""
    count = 0

    def make(*topics: str, **more: Any) -> OrdinaryConsumer:
        nonlocal count
        count += 1
        return OrdinaryConsumer(
            broker.bootstrap_servers, group_id, list(topics), tmp_path / f"ordinary-{count}.txt", **more
        )

    return make
