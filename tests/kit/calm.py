"""One query and its executors, in a group without other faults: what placement alone does to the group.

Runs in: tests. Agents connect, die, freeze and lose their channels, while the brokers answer and everything else works.
The group must not rebalance: each instance id is taken over before its session ends, unless the agent that takes it
over is lost within that time as well; so there is at most one fault in a session. One exception: a KIP-848 member that
fails while its agent runs keeps its membership until its session ends, and rejoins: two rebalances.
Deliberately absent: all other faults (``simulation``).
"""

from dataclasses import dataclass, replace

from kit.agent_faults import AgentFaults
from kit.cluster import Cluster
from kit.invariants import Invariants, Violation
from kit.kafka_group import SESSION_MS
from kit.misfortune import Misfortune
from kit.scene import Scene
from kit.simulation import CALM_MS_MAX, PROTOCOLS, story_on_failure
from kit.world import World
from spark_group_source.options.client import SESSION_TIMEOUT_MS

CLASSIC_SESSION_MS = 2 * SESSION_MS
GATHERED_MS = 10_000
"""Time after which the members have joined."""
PLACEMENT_MS = (40_000, 90_000)
"""How long agents come and go, drawn by the seed: several sessions, which are longer with KIP-848."""


@dataclass(frozen=True)
class CalmOutcome:
    """The result of one history."""

    moves: int
    recalls: int
    rebalances: int
    faults: dict[str, int]


class CalmScene(Scene):
    """One query, no other consumer, and brokers that answer."""

    def __init__(self, world: World, cluster: Cluster, truth: Invariants, protocol: str) -> None:
        super().__init__(world, cluster, truth, protocol, agents=True)
        world.loss, cluster.misfortune = 0.0, Misfortune()
        # Without transactions, only the session distinguishes a frozen agent that rejoined from a newer driver.
        cluster.transactions_allowed = True
        self.queries = self.queries[:1]
        query = self.queries[0]
        habits = replace(query.habits, trigger="default", crash=0.0, sink_ms_max=800)
        # In a shorter session a move over a closed channel would be late.
        self.group.session_ms = SESSION_TIMEOUT_MS if protocol == "consumer" else CLASSIC_SESSION_MS
        options = dict(habits.options)
        if protocol != "consumer":
            options["kafka.session.timeout.ms"] = str(CLASSIC_SESSION_MS)
        # A change of the number of slots is a rebalance.
        query.habits = replace(habits, options=options, member_host="auto", auto_slots=False)
        assert query.executors is not None
        query.executors.luck.swallowed = 0.0  # each would close the channel: several in a lease are too many
        query.executors.luck.cut = 0.0  # this fault is injected separately

    def begin(self) -> None:
        self.start(self.queries[0])
        self._produce()
        self._watch()


class CalmFaults(AgentFaults):
    """Faults of agents alone, without those that separate a member from the brokers."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.pause_ms = scene.group.session_ms, 2 * scene.group.session_ms
        self._kinds = [kind for kind in AgentFaults.kinds() if kind is not AgentFaults.cut_agent_off]


def play_calm(seed: int, protocol: str) -> CalmOutcome:
    """Play one history.

    Raises:
        Failed: a rule did not hold.
    """
    world = World(seed)
    with story_on_failure(world, f"{seed} ({protocol})"):
        return _play(world, protocol)


def _play(world: World, protocol: str) -> CalmOutcome:
    truth = Invariants(world)
    scene = CalmScene(world, Cluster(world, PROTOCOLS[protocol], truth), truth, protocol)
    faults = CalmFaults(scene)
    scene.begin()
    world.run_until(GATHERED_MS)
    before = scene.group.rebalances
    faults.begin()
    longer = scene.group.session_ms // SESSION_MS
    world.run_until(world.now_ms + longer * world.draws("faults").between(*PLACEMENT_MS))
    rebalances = scene.group.rebalances - before
    broken = faults.happened.get("break_placed_member", 0) if protocol == "consumer" else 0
    if rebalances > 2 * broken:
        raise Violation(f"the group rebalanced {rebalances} times")
    scene.calm()
    scene.producing = False
    world.run_until(world.now_ms + CALM_MS_MAX, stop=scene.at_rest)
    truth.finish()
    if scene.ends:
        raise Violation(f"the query stopped: {dict(scene.ends)}")
    watched = scene.queries[0].runs[0].watched
    assert watched is not None
    return CalmOutcome(watched.counts.moves, watched.counts.recalls, rebalances, faults.happened)
