"""Fixtures of the rebalance tests: a group with runs and ordinary consumers, and its accounts."""

from collections.abc import Sequence
from typing import Any

import pytest
from scenes import Scene
from streams import LONG_SESSION_MS, numbered, options_of

from rebalance.accounts import GroupView, Recorded, assert_once, await_committed, describe
from rebalance.ordinary import OrdinaryConsumer, settings_of


class GroupScene(Scene):
    """The test's group, with runs and ordinary consumers."""

    members = 0
    is_patient = True

    def run_options(
        self, topic: str | None, strategy: str = "range", *, session_ms: int = LONG_SESSION_MS, **more: object
    ) -> dict[str, str]:
        """Options of a run in the test's group."""
        self._set_session(strategy, session_ms)
        return make_options(self.servers, self.group, topic, strategy, session_ms=session_ms, **more)

    def ordinary(
        self, *topics: str, strategy: str = "range", session_ms: int = LONG_SESSION_MS, **more: Any
    ) -> OrdinaryConsumer:
        """Start an ordinary consumer in the test's group; close it after the test."""
        self._set_session(strategy, session_ms)
        self.members += 1
        file = self.folder / f"ordinary-{self.members}.txt"
        more |= {"strategy": strategy, "session_ms": session_ms}
        return OrdinaryConsumer(self.servers, self.group, list(topics), file, **more)

    def _set_session(self, strategy: str, session_ms: int) -> None:
        """Under KIP-848 the members of a group have one session timeout: the long one, unless one of them is to lose
        its session."""
        self.is_patient &= session_ms == LONG_SESSION_MS
        if strategy == "consumer":
            self.set_session_timeout(LONG_SESSION_MS if self.is_patient else None)

    def fill(self, topic: str, each: int) -> None:
        """Produce this many more records to each partition of the topic."""
        partitions = len(self.end_offsets(topic))
        self.produce(topic, numbered(0, each * partitions - 1, partitions))

    def describe(self) -> GroupView:
        """Describe the test's group."""
        return describe(self.admin, self.group)

    def await_committed(self, *topics: str) -> None:
        """See :func:`rebalance.accounts.await_committed`."""
        await_committed(self.admin, self.group, topics)

    def assert_once(self, topics: Sequence[str], runs: Sequence[Recorded], *ordinary: Any, **more: Any) -> None:
        """See :func:`rebalance.accounts.assert_once`."""
        assert_once(self.admin, topics, runs, *ordinary, **more)


@pytest.fixture
def scene(jvm: None, request: pytest.FixtureRequest, group_id: str) -> GroupScene:
    return GroupScene(request, group_id)


def make_options(
    servers: str, group: str, topic: str | None, strategy: str, *, session_ms: int = LONG_SESSION_MS, **more: object
) -> dict[str, str]:
    protocol = "consumer" if strategy == "consumer" else "classic"
    own = {} if strategy == "consumer" else settings_of(strategy, session_ms=session_ms)
    own.pop("group.protocol", None)
    subscribe = {} if topic is None else {"subscribe": topic}
    kafka = {f"kafka.{name}": value for name, value in own.items()}
    return options_of(servers, group, protocol=protocol, **{**kafka, **subscribe, **more})
