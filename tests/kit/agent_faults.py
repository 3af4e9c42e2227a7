"""Faults of agents and their channels, in addition to the faults without agents.

Runs in: tests. Deliberately absent: the agents (``agents``).
"""

from kit.agents import EXECUTORS_MAX, Agent
from kit.faults import Faults, of
from kit.scene import Scene
from kit.spark import SparkRun

SILENT_MS = (500, 3_000, 6_000, 15_000)
"""Shorter and longer than a lease."""
SHARE = 0.5
"""Share of agents' faults among all."""


class AgentFaults(Faults):
    """The faults of one history with agents."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        of_agents = AgentFaults.kinds()
        self._kinds += of_agents * max(1, int(SHARE / (1 - SHARE) * len(self._kinds) / len(of_agents)))

    def _agent(self) -> Agent | None:
        run = self._run()
        if run is None or run.executors is None:
            return None
        living = [agent for agent in run.executors.of(run) if agent.healthy]
        return self.draws.choice(living) if living else None

    @of(_agent)
    def kill_agent(self, agent: Agent) -> None:
        agent.kill()

    @of(_agent)
    def freeze_agent(self, agent: Agent) -> None:
        """For shorter or longer than a lease."""
        self._freeze(agent.process)

    @of(_agent)
    def cut_channel(self, agent: Agent) -> bool:
        if agent.channel is None:
            return False
        agent.channel.cut()
        return True

    @of(_agent)
    def silence_channel(self, agent: Agent) -> None:
        """Drop all messages, both ways, without closing the channel."""
        agent.silent_until_ms = self.world.now_ms + self.draws.choice(SILENT_MS)
        self.world.note(f"{agent.process.name}: silent until {agent.silent_until_ms}")

    @of(_agent)
    def bye_agent(self, agent: Agent) -> None:
        """Its executor ends."""
        agent.bye()

    @of(_agent)
    def twin_agent(self, agent: Agent) -> None:
        """A second agent of one executor is started."""
        assert agent.run.executors is not None
        agent.run.executors.start(agent.run, agent.executor)

    @of(_agent)
    def cut_agent_off(self, agent: Agent) -> None:
        """The agent reaches no broker, while its channel works."""
        self._cut_off(agent.process)

    @of(_agent)
    def break_placed_member(self, agent: Agent) -> bool:
        """One member of an agent meets a fatal error."""
        return self._breaks(agent.process)

    @of(Faults._run)
    def change_executors(self, run: SparkRun) -> bool:
        """Spark adds or removes executors."""
        if run.executors is None:
            return False
        wanted = self.draws.randint(0, EXECUTORS_MAX)
        for agent in run.executors.of(run):
            if int(agent.executor.removeprefix("x")) >= wanted:
                agent.kill() if self.draws.chance(0.5) else agent.bye()
        run.executors.wanted = wanted
        return True
