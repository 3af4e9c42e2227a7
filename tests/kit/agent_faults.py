"""What goes wrong with agents and their channels, beside all that goes wrong without them.

Runs in: tests. Deliberately absent: the agents (``agents``).
"""

from kit.agents import EXECUTORS_MAX, Agent
from kit.faults import FROZEN_MS, OUTAGES_MS, Faults
from kit.scene import Scene
from kit.spark import SparkRun

SILENT_MS = (500, 3_000, 6_000, 15_000)
"""Shorter and longer than a lease."""
SHARE = 0.5
"""How many of the faults are of agents."""


class AgentFaults(Faults):
    """The faults of one history with agents."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        of_agents = [
            self._kill_agent,
            self._freeze_agent,
            self._cut_channel,
            self._silence_channel,
            self._bye_agent,
            self._twin_agent,
            self._cut_agent_off,
            self._break_lent_member,
            self._change_executors,
        ]
        self._kinds += of_agents * max(1, int(SHARE / (1 - SHARE) * len(self._kinds) / len(of_agents)))

    def _agent(self) -> tuple[SparkRun, Agent] | None:
        run = self._run()
        if run is None or run.executors is None:
            return None
        living = [agent for agent in run.executors.of(run) if agent.healthy]
        return (run, self.draws.choice(living)) if living else None

    def _kill_agent(self) -> bool:
        if (found := self._agent()) is None:
            return False
        found[1].kill()
        return True

    def _freeze_agent(self) -> bool:
        """For shorter or longer than a lease."""
        if (found := self._agent()) is None:
            return False
        process = found[1].process
        process.freeze()
        delay_ms = self.draws.choice(FROZEN_MS) + self.draws.between(0, 2_000)
        self.world.at(delay_ms, lambda: process.thaw() if process.alive and process.frozen else None)
        return True

    def _cut_channel(self) -> bool:
        if (found := self._agent()) is None or found[1].channel is None:
            return False
        found[1].channel.cut()
        return True

    def _silence_channel(self) -> bool:
        """Whatever is sent is swallowed, both ways, and nobody hears of that."""
        if (found := self._agent()) is None:
            return False
        found[1].silent_until_ms = self.world.now_ms + self.draws.choice(SILENT_MS)
        self.world.note(f"{found[1].process.name}: not heard until {found[1].silent_until_ms}")
        return True

    def _bye_agent(self) -> bool:
        """Its executor ends."""
        if (found := self._agent()) is None:
            return False
        found[1].bye()
        return True

    def _twin_agent(self) -> bool:
        """A second agent of one executor is started."""
        if (found := self._agent()) is None:
            return False
        run, agent = found
        assert run.executors is not None
        run.executors.start(run, agent.executor)
        return True

    def _cut_agent_off(self) -> bool:
        """It reaches no broker, while its channel works."""
        if (found := self._agent()) is None:
            return False
        process = found[1].process
        process.cut_off_until_ms = self.world.now_ms + self.draws.choice(OUTAGES_MS)
        self.world.note(f"{process.name}: cut off until {process.cut_off_until_ms}")
        return True

    def _break_lent_member(self) -> bool:
        """A fatal error ends one member of an agent."""
        if (found := self._agent()) is None:
            return False
        consumers = list(self.scene.cluster.consumers.get(found[1].process.name, ()))
        self.draws.shuffle(consumers)
        return any(consumer.breaks() for consumer in consumers)

    def _change_executors(self) -> bool:
        """Spark takes more executors, or fewer."""
        run = self._run()
        if run is None or run.executors is None:
            return False
        wanted = self.draws.randint(0, EXECUTORS_MAX)
        for agent in run.executors.of(run):
            if int(agent.executor.removeprefix("x")) >= wanted:
                agent.kill() if self.draws.chance(0.5) else agent.bye()
        run.executors.wanted = wanted
        return True
