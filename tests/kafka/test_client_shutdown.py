"""Admin clients are destroyed when their run stops: the library aborts the process if one is destroyed on its own
thread.

The library's request for all offsets of a group can abort the process too. The scripted clients do not model that: a
request for it fails the test.
"""

import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from kafka_helpers import await_until
from scenes import Scene
from streams import Engine

from spark_group_source import describe, reset
from spark_group_source.errors import BrokerUnavailable, OptionError
from spark_group_source.kafka import admin
from spark_group_source.kafka.admin import Admin
from spark_group_source.kafka.environment import Environment


class Watching(Environment):
    """Remembers the admin clients that it created, and keeps none alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Callable[[], Any]] = []

    def admin(self, settings: Any) -> Any:
        client = super().admin(settings)
        self.made.append(weakref.ref(client))
        return client

    def ended(self) -> bool:
        return bool(self.made) and not [client for made in self.made if (client := made()) is not None]


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANSWER_S_MAX", "REQUEST_TIMEOUT_S"):
        monkeypatch.setattr(admin, name, 0.5)


@pytest.mark.usefixtures("short_timeouts")
def test_replaced_admin_clients_are_destroyed_when_the_admin_is_closed() -> None:
    environment = Watching()
    client = Admin({"bootstrap.servers": "127.0.0.1:1"}, environment=environment, retries=0)
    with pytest.raises(BrokerUnavailable):
        client.describe_group("g")
    assert len(environment.made) > 1 and not environment.ended()
    client.close()
    assert environment.ended()


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize(
    "call",
    [lambda to: describe("g", to), lambda to: reset("g", to, to="earliest")],
    ids=["describe", "reset"],
)
def test_the_admin_clients_of_a_call_are_destroyed_when_it_ends(
    call: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook goes on: if the clients were left to the garbage collection, it might run on the thread of one."""
    environment = Watching()
    monkeypatch.setattr(admin, "Environment", lambda: environment)
    with pytest.raises(BrokerUnavailable):
        call("127.0.0.1:1")
    assert environment.ended()


def test_the_admin_clients_of_a_run_are_destroyed_when_it_stops(scene: Scene) -> None:
    """No test collects garbage before it ends. A late answer may run the collection on the client's own thread, which
    then aborts."""
    name, environment = scene.topic(), Watching()
    scene.produce(name, ["a"])
    with Engine(scene.options(subscribe=name), environment=environment) as engine:
        engine.run()
        assert not environment.ended()
    await_until(environment.ended, what="the end of the run's clients")


def test_the_admin_clients_of_a_run_that_never_joined_are_destroyed_when_it_stops(scene: Scene) -> None:
    name, environment = scene.topic(2), Watching()
    first_only = json.dumps({name: {"0": 0}})
    with (
        Engine(scene.options(subscribe=name, startingOffsets=first_only), environment=environment) as engine,
        pytest.raises(OptionError),
    ):
        engine.run()
    await_until(environment.ended, what="the end of the run's clients")
