"""Lasting troubles that a share of the histories has, beside the faults: each concern has its own draws, so that the
other histories do not change.

Runs in: tests. Deliberately absent: faults that come and go in every history (``faults``), failures of single requests
(``misfortune``).
"""

from collections import Counter
from dataclasses import replace

from kit.scene import PATTERN, Scene
from kit.world import Draws
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

SMALL_COMMITS_SHARE = 0.1
SMALL_COMMITS = (1, 2, 3)
"""How many offsets the coordinator accepts in one request."""
THOUSANDS_SHARE = 0.015
THOUSANDS = (1_000, 2_000)
"""How many partitions a topic gets in addition. A request has at most :data:`THOUSANDS_IN_COMMIT` offsets then."""
THOUSANDS_IN_COMMIT = (300, 800)
THOUSANDS_FROM_MS = (0, 30_000)
NO_TOPIC_SHARE = 0.04
NO_TOPIC_MS = (2_000, 20_000)
DENIED_SHARE = 0.1
"""Share of the histories in which the queries may not read a topic for some time."""
DENIED_FROM_MS = (1_000, 30_000)
DENIED_MS = (500, 5_000, 20_000)
READER_SHARE = 0.15
"""Share of the histories without agents in which stream readers die alone."""
READER_DEATHS = 2
READER_MS = (1_000, 30_000)
TIMED_SHARE = 0.15
"""Share of the histories in which ordinary consumers commit by timer."""
TIMED_MS = (500, 5_000)
LEADERLESS_SHARE = 0.3
LEADERLESS_MS = (2_000, 15_000, 60_000, 200_000)
"""How long a partition has no leader: an election, or until a broker is repaired."""
CALM_LEADERLESS_MS = 45_000
"""How long such a partition waits while nothing else happens: no call may wait with it."""
LEADERLESS_EVERY_MS = (3_000, 20_000)
FORGOTTEN_SHARE = 0.08
"""Share of the histories in which the transaction coordinator forgets ids: they have expired, or its log is lost."""
FORGOTTEN_EVERY_MS = (5_000, 40_000)
ELECTIONS_SHARE = 0.3
"""Share of the histories with elections of leaders that answer at once, with and without all records."""
ELECTIONS_EVERY_MS = (1_000, 15_000)


class Troubles:
    """The troubles of one history. ``happened``: the count of each kind."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.world = scene, scene.world
        self.happened: Counter[str] = Counter()

    @staticmethod
    def kinds() -> tuple[str, ...]:
        return (
            "leaderless partition",
            "leaderless before it was read",
            "commit too large",
            "thousands of partitions",
            "no topic exists",
            "commit by timer",
            "reader dies alone",
            "topic denied",
            "transactional ids forgotten",
            "election without loss",
            "truncation between triggers",
            "truncation of a planned batch",
            "truncation while a query is down",
            "stream went back to a truncation",
            "truncated records read again",
        )

    def outcome(self) -> dict[str, int]:
        """How often each kind happened."""
        timed = sum(other.timed_commits for other in self.scene.others)
        died = sum(run.has_lost_reader for query in self.scene.queries for run in query.runs)
        more = {"commit too large": self.scene.cluster.commits_refused, "commit by timer": timed}
        more |= {"reader dies alone": died, "topic denied": self.scene.cluster.denials}
        truth = self.scene.truth
        more |= {"stream went back to a truncation": truth.went_back}
        more |= {"truncated records read again": truth.must_read_again}
        return dict(self.happened + Counter(more))

    def begin(self) -> None:
        draws = self.world.draws("trouble: sizes")
        if draws.chance(SMALL_COMMITS_SHARE):
            self.scene.cluster.offsets_max = draws.choice(SMALL_COMMITS)
        draws = self.world.draws("trouble: thousands")
        if draws.chance(THOUSANDS_SHARE):
            self.scene.cluster.offsets_max = draws.choice(THOUSANDS_IN_COMMIT)
            self.world.at(draws.between(*THOUSANDS_FROM_MS), lambda: self._grow(draws.choice(THOUSANDS)))

        draws = self.world.draws("trouble: topics")
        if draws.chance(NO_TOPIC_SHARE):
            self._no_topic(draws, draws.choice(NO_TOPIC_MS))
        draws = self.world.draws("trouble: leaders")
        if draws.chance(LEADERLESS_SHARE):
            self.scene.leaders_return_ms = CALM_LEADERLESS_MS
            self.world.at(draws.choice([0, *LEADERLESS_EVERY_MS]), lambda: self._lose_leader(draws))

        draws = self.world.draws("trouble: timers")
        if draws.chance(TIMED_SHARE):
            self.scene.others_commit_every_ms = draws.choice(TIMED_MS)

        draws = self.world.draws("trouble: readers")
        if draws.chance(READER_SHARE) and all(query.executors is None for query in self.scene.queries):
            for _ in range(READER_DEATHS):
                self.world.at(draws.between(*READER_MS), lambda: self._lose_reader(draws))

        draws = self.world.draws("trouble: permissions")
        if draws.chance(DENIED_SHARE):
            self.world.at(draws.between(*DENIED_FROM_MS), lambda: self._deny(draws))

        draws = self.world.draws("trouble: ids")
        if draws.chance(FORGOTTEN_SHARE):
            self.world.at(draws.between(*FORGOTTEN_EVERY_MS), lambda: self._forget_ids(draws))

        draws = self.world.draws("trouble: elections")
        if draws.chance(ELECTIONS_SHARE):
            self.world.at(draws.between(*ELECTIONS_EVERY_MS), lambda: self._elect(draws))

    def _forget_ids(self, draws: Draws) -> None:
        if self.scene.is_calm:
            return
        self.world.at(draws.between(*FORGOTTEN_EVERY_MS), lambda: self._forget_ids(draws))
        if self.scene.cluster.transactions.forget():
            self.world.note("transactional ids are forgotten")
            self.happened["transactional ids forgotten"] += 1

    def _grow(self, count: int) -> None:
        """A topic gets so many partitions that no request has room for all."""
        if self.scene.cluster.topics and not self.scene.is_calm:
            for tp in self.scene.cluster.grow(min(self.scene.cluster.topics), count):
                self.scene.truth.add_partition(tp, 0)
            self.happened["thousands of partitions"] += 1

    def _elect(self, draws: Draws) -> None:
        """A partition has another leader, with all records or with other ones after a truncation."""
        if self.scene.is_calm:
            return
        self.world.at(draws.between(*ELECTIONS_EVERY_MS), lambda: self._elect(draws))
        tps, kind = self.scene.partitions(), draws.choice(["all", "now", "planned", "down"])
        lost, grows = draws.between(1, 8), draws.choice([0, 2, 12])
        if not tps:
            return
        tp = draws.choice(tps)

        def truncate(tp: TopicPartition, name: str) -> None:
            log = self.scene.cluster.log(tp)
            if log is not None and log.first < log.end and not self.scene.is_calm:
                self.scene.truncate(tp, log.end - lost, grows=grows)
                self.happened[name] += 1

        def truncate_planned(offset: StreamOffset) -> None:
            if ranges := sorted(r.tp for r in offset.batch()):
                truncate(ranges[0], "truncation of a planned batch")

        if kind == "all":
            log = self.scene.cluster.log(tp)
            assert log is not None
            log.elect()
            self.happened["election without loss"] += 1
        elif kind == "now":
            truncate(tp, "truncation between triggers")
        elif kind == "planned":
            draws.choice(self.scene.queries).runs[-1].after_plan = truncate_planned
        else:
            self.scene.while_down = lambda: truncate(tp, "truncation while a query is down")

    def _deny(self, draws: Draws) -> None:
        """An administrator takes the right to read a topic from the queries' user, for a while."""
        if not self.scene.is_calm and self.scene.cluster.topics:
            topic, ms = draws.choice(sorted(self.scene.cluster.topics)), draws.choice(DENIED_MS)
            self.world.note(f"reading {topic} is denied for {ms} ms")
            self.scene.cluster.denied_until_ms[topic] = self.world.now_ms + ms

    def _lose_reader(self, draws: Draws) -> None:
        """The stream reader of a query dies during its next batch, and the driver lives on."""
        if not self.scene.is_calm:
            draws.choice(self.scene.queries).runs[-1].reader_dies = True

    def _no_topic(self, draws: Draws, ms: int) -> None:
        """The topics that the queries name, or that match their pattern, are created later."""
        for query in self.scene.queries:
            options = {name: value for name, value in query.habits.options.items() if name != "subscribe"}
            if draws.chance(0.5):
                query.habits = replace(query.habits, options=options | {"subscribePattern": PATTERN})
        for topic in sorted(self.scene.cluster.topics):
            self.scene.delete(topic)
            self.world.at(ms, lambda topic=topic: self.scene.make_again(topic))  # type: ignore[misc]
        self.happened["no topic exists"] += 1

    def _lose_leader(self, draws: Draws) -> None:
        """All brokers with the log of one partition are down, all others answer."""
        if self.scene.is_calm:
            return
        new = [tp for tp in self.scene.partitions() if tp not in self.scene.group.offsets]
        tps = new if new and draws.chance(0.5) else self.scene.partitions()
        if tps:
            tp = draws.choice(tps)
            log = self.scene.cluster.log(tp)
            assert log is not None
            log.leader_from_ms = self.world.now_ms + draws.choice(LEADERLESS_MS)
            log.elect()
            self.world.note(f"{tp} has no leader until {log.leader_from_ms}")
            self.happened["leaderless before it was read" if tp in new else "leaderless partition"] += 1
        self.world.at(draws.between(*LEADERLESS_EVERY_MS), lambda: self._lose_leader(draws))
