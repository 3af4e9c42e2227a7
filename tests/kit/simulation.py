"""A simulation of a whole group for a few minutes: queries, ordinary consumers, Kafka, and faults.

Runs in: tests. One seed is one history: :func:`run` raises :class:`Failed` with the story, and the same seed gives the
same story again. After up to a minute and a half of faults (``faults``) comes a calm time, in which every record must
be processed and every offset committed. The product's own code runs: ``runtime``, ``kafka``, ``protocol``, ``agents``,
the commit path of ``delta.sink``, and the decisions of ``cli.group_reset``. Only Kafka, time, threads and Spark are
models.

Deliberately absent (not modelled): what agents read ahead, changed subscriptions, several groups, clocks that jump, the
duration of an event in the protocol, and changes of a table by others (``table_histories``).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from kit.agent_faults import AgentFaults
from kit.books import Cause
from kit.classic_group import ClassicGroup, CooperativeGroup
from kit.cluster import Cluster
from kit.consumer_group import ConsumerGroup
from kit.faults import Faults
from kit.invariants import Invariants, Violation
from kit.kafka_group import Group
from kit.scene import Scene
from kit.troubles import Troubles
from kit.world import World
from spark_group_source.delta import table_writer
from spark_group_source.protocol import slots

FAULTS_MS = (30_000, 90_000)
"""Duration of the faults, drawn by the seed."""
REFUSED_SHARE = 0.3
"""Share of the histories with agents in which an administrator revokes the right to use transactional ids, some time
after the last fault."""
HOST_SHARE = 0.4
"""Share of the histories in which the host of a query is lost."""
HOST_MS = (2_000, 30_000)
"""When that happens."""
CALM_MS_MAX = 300_000
"""Time after which the group must be at rest: sessions have ended, members have rejoined, the backlog is read."""
FULL_PAUSE_MS = 12_000
"""How long a slot waits that a full group refused; in a query five minutes, as long as a history."""
PROTOCOLS: dict[str, type[Group]] = {"eager": ClassicGroup, "cooperative": CooperativeGroup, "consumer": ConsumerGroup}


class Failed(AssertionError):
    """A rule was broken. The message has the rule, the end of the story, and the command that runs it again."""


@dataclass(frozen=True)
class Outcome:
    """What happened in a history, to check that the seeds cover enough."""

    seed: int
    protocol: str
    processed: int
    twice: int
    causes: dict[Cause, int]
    rebalances: int
    faults: dict[str, int]
    ends: dict[str, int]
    holds: int
    steps: int
    troubles: dict[str, int]
    moves: int = 0
    recalls: int = 0


def run(seed: int, *, protocol: str | None = None, agents: bool = False) -> Outcome:
    """Play one history.

    Args:
        agents: whether the queries have executors, on whose agents members are placed.

    Raises:
        Failed: a rule did not hold.
    """
    world = World(seed)
    names = sorted(PROTOCOLS)
    drawn = world.draws("protocol").choice(names)
    protocol = protocol or drawn
    again = f"again: python -m tests.simulation {seed} {protocol}{' agents' if agents else ''}"
    with story_on_failure(world, f"{seed} ({protocol})", again):
        return _play(world, seed, protocol, agents=agents)


@contextmanager
def story_on_failure(world: World, name: str, again: str = "") -> Iterator[None]:
    """Play a history with the product's log disabled, because the story has more, and without pauses after lost
    races, which would take real time; close its world.

    Raises:
        Failed: with the story, where a rule does not hold.
    """
    silent = logging.root.manager.disable
    logging.disable()
    try:
        with patch.object(table_writer, "RACE_WAIT_MAX_S", 0.0), patch.object(slots, "FULL_PAUSE_MS", FULL_PAUSE_MS):
            yield
    except Violation as exc:
        raise Failed(f"{exc}\n\nthe story of seed {name}:\n{world.story()}\n\n{exc}\n{again}") from exc
    finally:
        world.close()
        logging.disable(silent)


def _play(world: World, seed: int, protocol: str, *, agents: bool) -> Outcome:
    truth = Invariants(world)
    cluster = Cluster(world, PROTOCOLS[protocol], truth)
    truth.reports_epochs = cluster.reports_epochs
    scene = Scene(world, cluster, truth, protocol, agents=agents)
    truth.refuses_transactions = not cluster.transactions_allowed
    faults = AgentFaults(scene) if agents else Faults(scene)
    troubles = Troubles(scene)
    troubles.begin()
    scene.begin()
    faults.begin()
    if (host := world.draws("host")).chance(HOST_SHARE):
        world.at(host.between(*HOST_MS), scene.lose_host)
    world.run_until(world.draws("faults").between(*FAULTS_MS))
    scene.calm()
    # Some records after the last fault show that everything works again.
    world.run_until(world.now_ms + 10_000)
    if agents and world.draws("permission").chance(REFUSED_SHARE):
        world.note("transactions are refused from now on")  # slots on agents are recalled
        cluster.transactions_allowed = False
        world.run_until(world.now_ms + 10_000)
    scene.producing = False
    world.run_until(world.now_ms + CALM_MS_MAX, stop=_every(scene.at_rest))
    scene.finish()
    watched = [run.watched for query in scene.queries for run in query.runs if run.watched is not None]
    return Outcome(
        seed=seed,
        protocol=protocol,
        processed=truth.processed,
        twice=truth.twice,
        causes=dict(truth.causes),
        rebalances=scene.group.rebalances,
        faults=dict(faults.happened),
        troubles=troubles.outcome(),
        ends=dict(scene.ends),
        holds=sum(run.counts.holds for run in watched),
        steps=world.steps,
        moves=sum(run.counts.moves for run in watched),
        recalls=sum(run.counts.recalls for run in watched),
    )


def _every(look: Callable[[], bool], calls: int = 20) -> Callable[[], bool]:
    """Evaluate ``look`` only once in so many calls: it costs more than a step."""
    left = 0

    def sometimes() -> bool:
        nonlocal left
        left -= 1
        if left > 0:
            return False
        left = calls
        return look()

    return sometimes
