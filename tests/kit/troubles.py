"""Lasting troubles that a share of the histories has, beside the faults: each concern has its own draws, so that the
other histories do not change.

Runs in: tests. Deliberately absent: faults that come and go in every history (``faults``), failures of single requests
(``misfortune``).
"""

from collections import Counter
from dataclasses import replace
from functools import partial

from kit.fake_consumer import FakeConsumer
from kit.scene import PATTERN, Scene
from kit.spark import SparkRun
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
FULL_SHARE = 0.5
"""Share of the histories with one query that has a member for each agent, in which the brokers limit the group's size.
"""
FULL = (2, 2, 3)
"""How many members it may have; one place is left for the query."""
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
SILENT_SHARE = 0.3
"""Share of the partitions without a leader whose leader does not answer: metadata still has it."""
CHECKS_SHARE = 0.1
"""Share of the histories in which partitions leave during a check before a batch."""
CHECKS_EVERY_MS = (1_000, 15_000)
STALL_MS = (500, 2_000, 5_000)
"""How long the request of such a check takes."""
LEAVES_MS = (0, 500)
OLD_BATCH_SHARE = 0.15
"""Share of the histories in which a batch is committed when its topic was recreated meanwhile."""
OLD_BATCH_MS = (2_000, 40_000)
OLD_BATCH_TAKES_MS = (300, 6_000)
GONE_MS = (10, 10, 1_500)
"""How long such a topic does not exist."""
LATE_COMMIT_MS = (500, 4_000)
AWAY_MS = (9_000, 20_000)
"""How long a query is away then: others get its partitions."""
DOWN_SHARE = 0.05
"""Share of the histories in which a topic is recreated while a query is down."""
DOWN_MS = (1_000, 30_000)
MEMBERS_SHARE = 0.06
"""Share of the histories in which the members of a query reach no coordinator, while its requests are answered."""
MEMBERS_MS = (2_000, 40_000)
MEMBERS_CUT_MS = (2_000, 6_000, 12_000, 25_000, 45_000)
EXECUTORS_SHARE = 0.15
"""Share of the histories with agents in which no member can join from an executor from some time on, or ever."""
EXECUTORS_MS = (0, 40_000)
RESTORED_SHARE = 0.05
"""Share of the histories in which the cluster is restored from a backup, and the group is reset."""
BACKUP_MS = (5_000, 30_000)
RESTORED_MS = (5_000, 30_000)
"""Time since the backup."""
CURRENT_SHARE = 0.05
"""Share of the histories in which an impatient operator resets the group to its current offsets: the command is refused
until the group is empty."""
LIVING_SHARE = 0.08
"""Share of the histories with resets of a group whose queries are frozen, and continue."""
LIVING_MS = (3_000, 40_000)
AGAIN_MS = (50, 4_000)
"""How long they run until the next reset."""


PAUSE_MS = (1_000, 5_000)


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
            "member refused by a full group",
            "thousands of partitions",
            "no topic exists",
            "commit by timer",
            "reader dies alone",
            "topic denied",
            "transactional ids forgotten",
            "election without loss",
            "silent leader",
            "partition leaves during a check",
            "recreated during a check",
            "batch of a former topic",
            "late commit to a recreated topic",
            "recreated while a query is down",
            "outage of the members alone",
            "executors cannot join",
            "reset of a living query",
            "second reset of a living query",
            "reset with a printed command",
            "reset to the current offsets",
            "restored cluster",
            "AvailableNow run ended alone",
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
        more |= {"member refused by a full group": self.scene.group.refusals}
        more |= {"reader dies alone": died, "topic denied": self.scene.cluster.denials}
        truth = self.scene.truth
        more |= {"stream went back to a truncation": truth.went_back}
        more |= {"truncated records read again": truth.must_read_again}
        more |= {"AvailableNow run ended alone": truth.ended_alone}
        more |= {"reset with a printed command": self.scene.operator.refused}
        return dict(self.happened + Counter(more))

    def begin(self) -> None:
        """Draw which troubles the history has, and from when on. Each has its own draws: a new one changes no other."""
        draws = self.world.draws("trouble: sizes")
        if draws.chance(SMALL_COMMITS_SHARE):
            self.scene.cluster.offsets_max = draws.choice(SMALL_COMMITS)

        draws, queries = self.world.draws("trouble: group size"), self.scene.queries
        if draws.chance(FULL_SHARE) and len(queries) == 1 and queries[0].habits.auto_slots:
            self.scene.group.size_max = draws.choice(FULL)

        draws = self.world.draws("trouble: topics")
        if draws.chance(NO_TOPIC_SHARE):
            self._no_topic(draws, draws.choice(NO_TOPIC_MS))

        draws = self.world.draws("trouble: timers")
        if draws.chance(TIMED_SHARE):
            self.scene.others_commit_every_ms = draws.choice(TIMED_MS)

        draws = self.world.draws("trouble: readers")
        if draws.chance(READER_SHARE) and all(query.executors is None for query in self.scene.queries):
            for _ in range(READER_DEATHS):
                self.world.at(draws.between(*READER_MS), partial(self._lose_reader, draws))

        draws = self.world.draws("trouble: leaders")
        if draws.chance(LEADERLESS_SHARE):
            self.scene.leaders_return_ms = CALM_LEADERLESS_MS
            self.world.at(draws.choice([0, *LEADERLESS_EVERY_MS]), partial(self._lose_leader, draws))

        draws = self.world.draws("trouble: thousands")
        if draws.chance(THOUSANDS_SHARE):
            self.scene.cluster.offsets_max = draws.choice(THOUSANDS_IN_COMMIT)
            self.world.at(draws.between(*THOUSANDS_FROM_MS), partial(self._grow, draws.choice(THOUSANDS)))

        for trouble, share, from_ms, begin in (
            ("permissions", DENIED_SHARE, DENIED_FROM_MS, self._deny),
            ("ids", FORGOTTEN_SHARE, FORGOTTEN_EVERY_MS, self._forget_ids),
            ("elections", ELECTIONS_SHARE, ELECTIONS_EVERY_MS, self._elect),
            ("members during checks", CHECKS_SHARE, CHECKS_EVERY_MS, self._interrupt_check),
            ("batches of former topics", OLD_BATCH_SHARE, OLD_BATCH_MS, self._old_batch),
            ("topics while down", DOWN_SHARE, DOWN_MS, self._recreate_while_down),
            ("outage of members", MEMBERS_SHARE, MEMBERS_MS, self._cut_members),
            ("executors", EXECUTORS_SHARE, EXECUTORS_MS, self._keep_executors_from_joining),
            ("resets", LIVING_SHARE, LIVING_MS, partial(self._reset_living, more=1)),
            ("backups", RESTORED_SHARE, BACKUP_MS, self._back_up),
            ("current", CURRENT_SHARE, LIVING_MS, self._reset_to_current),
        ):
            draws = self.world.draws(f"trouble: {trouble}")
            if draws.chance(share):
                self.world.at(draws.between(*from_ms), partial(begin, draws))

    def _back_up(self, draws: Draws) -> None:
        """Back the cluster up now, and restore it later."""
        scene, backup = self.scene, self.scene.back_up()
        positions = draws.choice(["--to-current", "--to-current", "--to-ledger"])

        def act() -> None:
            if not self.happened["restored cluster"]:
                self.happened["restored cluster"] += 1
                scene.restore(backup)
            ledgers = [table.ledger for table in scene.tables]
            has_offsets = ledgers and all(ledger is not None and ledger.offsets for ledger in ledgers)
            scene.operator.to(positions if has_offsets else "--to-current", scene.tables)

        def begin() -> None:
            if not scene.is_calm and scene.partitions() and not scene.operator.begin(act):
                self.world.at(PAUSE_MS[0], begin)

        self.world.at(draws.between(*RESTORED_MS), begin)

    def _reset_to_current(self, draws: Draws) -> None:
        scene = self.scene
        if scene.is_calm:
            return

        def act() -> None:
            scene.truth.keeps = True
            scene.operator.to("--to-current", scene.tables)
            self.happened["reset to the current offsets"] += 1
            scene.truth.keeps = False

        if not scene.operator.begin(act, is_patient=False):
            self.world.at(draws.between(*PAUSE_MS), partial(self._reset_to_current, draws))

    def _run(self, draws: Draws) -> SparkRun | None:
        run = draws.choice(self.scene.queries).runs[-1]
        return run if run.healthy and not self.scene.is_calm else None

    def _recreate(self, topic: str, gone_ms: int) -> bool:
        """Delete a topic, and create it again after a while."""
        if self.scene.is_calm or topic not in self.scene.cluster.topics or self.scene.deleted:
            return False
        self.scene.delete(topic)
        self.world.at(gone_ms, lambda: self.scene.make_again(topic))
        return True

    def _interrupt_check(self, draws: Draws) -> None:
        """A member of a query is out while a request of a check before a batch is answered late."""
        if self.scene.is_calm:
            return
        self.world.at(draws.between(*CHECKS_EVERY_MS), partial(self._interrupt_check, draws))
        change, number = draws.choice(["none", "recreated", "recreated", "aged"]), draws.choice([2, 3, 3])
        how, stall_ms = draws.choice(["out", "out", "breaks"]), draws.choice(STALL_MS)
        leaves_ms = draws.between(*LEAVES_MS)
        topics = sorted(self.scene.cluster.topics)
        if (run := self._run(draws)) is None or run.watched is None or not topics:
            return
        topic = draws.choice(topics)
        if change == "recreated":
            self._recreate(topic, 10)
        elif change == "aged":
            for tp in [tp for tp in self.scene.partitions() if tp.topic == topic]:
                self.scene.age(tp, draws)

        def leaves() -> None:
            consumers = list(self.scene.cluster.consumers.get(run.process.name, ()))
            draws.shuffle(consumers)
            leave = FakeConsumer.breaks if how == "breaks" else FakeConsumer.is_expelled
            if any(leave(consumer) for consumer in consumers):
                self.world.note(f"{run.process.name}: a member leaves during a check")
                self.happened["partition leaves during a check"] += 1
                self.happened["recreated during a check"] += change == "recreated" and number == 3

        def during_check() -> None:
            assert self.world.current is not None
            self.scene.cluster.stalls_ms[self.world.current] = stall_ms
            self.world.at(leaves_ms, leaves)

        run.watched.during_check = number if change == "recreated" else 2, during_check

    def _old_batch(self, draws: Draws) -> None:
        """The topic of a batch is recreated while the sink writes it, or while its offsets are on their way to Kafka.
        Then the query is away for a while, or not."""
        if (run := self._run(draws)) is None:
            self.world.at(draws.between(*PAUSE_MS), lambda: None if self.scene.is_calm else self._old_batch(draws))
            return
        takes_ms, gone_ms = draws.between(*OLD_BATCH_TAKES_MS), draws.choice(GONE_MS)
        late_ms, is_away = draws.choice([0, draws.between(*LATE_COMMIT_MS)]), draws.chance(0.6)
        before_ms, away_ms = draws.between(0, 1_500), draws.between(*AWAY_MS)

        def planned(offset: StreamOffset) -> None:
            if not (topics := sorted({r.tp.topic for r in offset.batch()})):
                run.after_plan = planned
                return
            run.slow_ms, topic = takes_ms, draws.choice(topics)
            if not late_ms:
                kind, at_ms = "batch of a former topic", draws.between(0, takes_ms)
                self.world.at(at_ms, lambda: self._counted(kind, topic, gone_ms))

            def written() -> None:
                if late_ms:
                    self.scene.cluster.late_commits_ms[run.process.name] = late_ms
                    kind, at_ms = "late commit to a recreated topic", draws.between(1, late_ms)
                    self.world.at(at_ms, lambda: self._counted(kind, topic, GONE_MS[0]))
                if is_away:
                    self.scene.restarts_after(run, away_ms)
                    self.world.at(late_ms + before_ms, lambda: None if self.scene.is_calm else run.kill())

            run.after_write = written

        run.after_plan = planned

    def _counted(self, kind: str, topic: str, gone_ms: int) -> None:
        self.happened[kind] += self._recreate(topic, gone_ms)

    def _recreate_while_down(self, draws: Draws) -> None:
        topics, gone_ms = sorted(self.scene.cluster.topics), draws.choice(GONE_MS)
        if topics:
            topic = draws.choice(topics)
            self.scene.while_down = lambda: self._counted("recreated while a query is down", topic, gone_ms)

    def _cut_members(self, draws: Draws) -> None:
        if (run := self._run(draws)) is not None:
            run.process.cut_members(draws.choice(MEMBERS_CUT_MS))
            self.happened["outage of the members alone"] += 1

    def _keep_executors_from_joining(self, draws: Draws) -> None:
        del draws
        for query in self.scene.queries:
            if query.executors is not None:
                query.executors.keep_from_joining()
                self.happened["executors cannot join"] += 1

    def _reset_living(self, draws: Draws, *, more: int) -> None:
        """Operators reset the group while its queries are frozen; these continue, and may be reset again."""
        scene, targets = self.scene, partial(self.scene.targets, draws)
        with_tables, twice, again_ms = draws.chance(0.8), draws.chance(0.3), draws.between(*AGAIN_MS)
        if scene.is_calm:
            return

        def act() -> None:
            for _ in range(1 + twice):
                scene.operator.by_reset(targets, scene.tables if with_tables else ())
            self.happened["reset of a living query" if more else "second reset of a living query"] += 1

        def start() -> None:
            scene.thaw_all()
            if more and draws.chance(0.7):
                self.world.at(again_ms, lambda: self._reset_living(draws, more=more - 1))

        if not scene.operator.begin(act, stop=scene.freeze_all, start=start):
            self.world.at(again_ms, lambda: self._reset_living(draws, more=more))

    def _forget_ids(self, draws: Draws) -> None:
        if self.scene.is_calm:
            return
        self.world.at(draws.between(*FORGOTTEN_EVERY_MS), partial(self._forget_ids, draws))
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
        self.world.at(draws.between(*ELECTIONS_EVERY_MS), partial(self._elect, draws))
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
            log.is_silent = self.world.draws("trouble: silent leaders").chance(SILENT_SHARE)
            if log.is_silent:
                self.scene.cluster.silent_until_ms = max(self.scene.cluster.silent_until_ms, log.leader_from_ms)
                self.happened["silent leader"] += 1
            self.world.note(f"{tp} has {'a silent' if log.is_silent else 'no'} leader until {log.leader_from_ms}")
            self.happened["leaderless before it was read" if tp in new else "leaderless partition"] += 1
        self.world.at(draws.between(*LEADERLESS_EVERY_MS), partial(self._lose_leader, draws))
