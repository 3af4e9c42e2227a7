"""The participants of a history and their settings: topics, queries with their sinks, ordinary consumers.

Runs in: tests. The seed draws all of it. Deliberately absent: faults (``faults``) and the rules (``invariants``).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kit.agents import Executors, Luck
from kit.cluster import Cluster
from kit.invariants import Invariants, Violation
from kit.kafka_group import REBALANCE_MS, SESSION_MS, SIZE_MAX, Entry, Group
from kit.misfortune import Misfortune
from kit.operators import Operator, Targets
from kit.ordinary_member import OrdinaryMember
from kit.sinks import Idempotent, Plain, Table
from kit.spark import GROUP, Checkpoint, Habits, MemberHost, Query, Sink, SparkRun, Trigger
from kit.transactions import TRANSACTION_MS
from kit.world import Draws, World
from spark_group_source.errors import (
    CommitFailed,
    DataLoss,
    Fenced,
    LedgerConflict,
    RebalanceTimeout,
    SourceError,
    TopicMissing,
)
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.run import UNSETTLED_MS_MIN
from spark_group_source.protocol.states import RunState
from spark_group_source.runtime.offset_commits import MEMBER_COMMIT_S_MAX

PRODUCE_EVERY_MS = 400
INTERVALS_MS = (0, 0, 0, 1_000, 10_000, 60_000, 600_000)
"""The triggers of queries: mostly at once, and up to longer than a session, a hold and a history."""
PATTERN = "orders|payments|new.*"
"""Of the queries that subscribe to a pattern."""
SHARES = (0.0, 0.002, 0.02)
"""Fractions of the requests to the brokers that one kind of fault affects."""
TRIGGERS: tuple[Trigger, ...] = ("default", "default", "default", "default", "available now", "once")
CHANNEL_SHARES = (0.0, 0.01, 0.05)
"""Fractions of the messages between agents and the stream reader that one kind of fault affects."""
CHANNEL_MS = (10, 100, 1_500)
"""Maximum delays of a message."""
MEMBER_HOSTS: tuple[MemberHost, ...] = ("auto", "auto", "auto", "auto", "executor", "driver")
SLOW_MS = (0, 300, 2_500)
"""Maximum delays until metadata lists a new topic, and then until a broker serves it."""
WATCH_EVERY_MS = 1_000
HOLD_SLACK_MS = 1_500
"""Allowance beyond the hold budget: the member checks every 250 ms, and its thread may have been suspended."""
CALL_MS_MAX = 60_000
"""Maximum duration of a call from Spark while the brokers respond and the process runs."""
PATIENCE_MS_MAX = 20_000
"""Maximum time that a run may wait for the group once the group is stable and all requests are answered."""
AT_REST = ("STABLE", "EMPTY")
"""States of a group that has no rebalance."""
UNOWNED_EVERY_MS = 20_000
"""Interval of the check for partitions without an owner in the calm phase; longer than a session."""
SLACK_MS = 2_000
OUTAGE_MET_MS = 12_000
"""Every run meets an outage of this length: a request is sent, and fails."""
CALL_SLACK_MS = 15_000
"""Allowance beyond the time limit of a call that waits for the group."""
START_AGAIN_MS = (100, 1_500, 4_000, 12_000)
"""Delays before a query that ended is restarted: immediately, or after more than a session."""


@dataclass(frozen=True)
class Backup:
    """A backup of the cluster.

    Args:
        logs: the end of each log, the epoch of its leader, and where the epochs begin.
        ids: the ids of the topics.
        offsets: the committed offsets.
    """

    logs: Mapping[TopicPartition, tuple[int, int, Mapping[int, int]]]
    ids: Mapping[str, str]
    offsets: Mapping[TopicPartition, Entry]


class Scene:
    """The participants of one history."""

    def __init__(
        self, world: World, cluster: Cluster, truth: Invariants, protocol: str, *, agents: bool = False
    ) -> None:
        self.world, self.cluster, self.truth, self.protocol = world, cluster, truth, protocol
        random = world.draws("topics")
        self.producing = True
        self.is_calm = False
        self.ends: Counter[str] = Counter()
        for topic, most in (("orders", 5), ("payments", 3)):
            cluster.create(topic, random.randint(1, most))
        for tp in cluster.partitions():
            log = cluster.log(tp)
            assert log is not None
            log.first = log.end = random.choice([0, 0, 7])
            truth.add_partition(tp, log.first)
        self.group: Group = cluster.group(GROUP)
        random = world.draws("cluster")
        cluster.transactions_allowed = cluster.had_transactions = random.random() < 0.7
        world.loss = random.choice([0.0, 0.0, 0.02, 0.1])
        world.delay_ms_max = random.choice([5, 15, 80])
        world.preempt = random.choice([0.0, 0.02, 0.1])
        self._starting = random.choice(["earliest", "earliest", "latest"])
        self._isolation = random.choice(["read_committed", "read_uncommitted"])
        truth.starts_at_the_end = self._starting == "latest"
        if random.random() < 0.6:
            late, twice, never, refused, lied, partly = (random.choice(SHARES) for _ in range(6))
            cluster.misfortune = Misfortune(late, twice, never, refused, lied, partly)
        random = world.draws("cast")
        self._unanswered = bool(cluster.misfortune.never or cluster.misfortune.late)
        self.tables: list[Table] = []
        self.queries = [self._query(name) for name in ("a", "b")[: random.choice([1, 1, 2])]]
        truth.ledgers = bool(self.tables)
        self.others: list[OrdinaryMember] = []
        self.others_commit_every_ms: int | None = None  # ordinary consumers commit by timer
        self.deleted: set[str] = set()  # topics that will be recreated
        self._at_rest_since_ms = 0  # when the group became stable
        self._outages_ms: dict[SparkRun, int] = {}  # when last no leader of a run's partitions answered
        self.closed = False  # an operator needs an empty group
        self._restarts_ms: dict[str, int] = {}  # when a run that ends is started again, if not by START_AGAIN_MS
        self.while_down: Callable[[], None] | None = None  # called once, when the next query has ended
        self.leaders_return_ms = 0  # how long partitions without a leader have none in the calm time
        change = {"stop": self._stop_all, "start": self._start_all}
        self.operator = Operator(world, cluster, truth, GROUP, **change, tables=self.tables)
        truth.pending = lambda: [at for query in self.queries if (at := query.checkpoint.pending()) is not None]
        truth.last = lambda: [at for query in self.queries if (at := query.checkpoint.last()) is not None]

        if agents:
            self._with_agents()

    # --- participants -----------------------------------------------------------------------------------------------

    def _with_agents(self) -> None:
        """Give the queries executors with agents, where members may be placed."""
        random = self.world.draws("channels")
        swallowed, cut = (random.choice(CHANNEL_SHARES) for _ in range(2))
        for query in self.queries:
            random = self.world.draws(f"agents/{query.name}")
            luck = Luck(swallowed, cut, random.choice(CHANNEL_MS))
            query.executors = Executors(self.world, self.cluster, self.truth, luck, random)
            member_host = random.choice(MEMBER_HOSTS)
            options = query.habits.options | {"groupMembers": str(random.randint(1, 4))}
            auto_slots = random.random() < 0.3
            query.habits = replace(query.habits, options=options, member_host=member_host, auto_slots=auto_slots)

    def _query(self, name: str) -> Query:
        random = self.world.draws(f"query/{name}")
        options = {
            "kafka.bootstrap.servers": "kafka:9092",
            "kafka.group.id": GROUP,
            "startingOffsets": self._starting,
            "failOnDataLoss": random.choice(["true", "false"]),
            "kafka.isolation.level": self._isolation,
            "leaveOnStop": random.choice(["auto", "auto", "always", "never"]),
            "groupMembers": str(random.randint(1, 3)),
            "kafka.max.poll.interval.ms": str(REBALANCE_MS),
        }
        if random.random() < 0.8:
            options["subscribe"] = ",".join(sorted(self.cluster.topics))
        else:
            options["subscribePattern"] = PATTERN
        if self.protocol == "consumer":
            options["kafka.group.protocol"] = "consumer"
        else:
            options |= {"kafka.group.protocol": "classic", "kafka.session.timeout.ms": str(SESSION_MS)}
        if self.protocol == "cooperative":
            options["kafka.partition.assignment.strategy"] = "cooperative-sticky"
        if (most := random.choice([None, 50, 15])) is not None:
            options["maxOffsetsPerTrigger"] = str(most)
        habits = Habits(
            options,
            trigger=random.choice(TRIGGERS),
            sink_ms_max=random.choice([50, 800, 3_000]),
            crash=random.choice([0.0, 0.0, 0.01, 0.04]),
        )
        habits = replace(habits, interval_ms=self.world.draws(f"triggers/{name}").choice(INTERVALS_MS))
        return Query(name, habits, self._sink(name), Checkpoint(f"query-{name}"))

    def _sink(self, name: str) -> Sink:
        random = self.world.draws(f"sink/{name}")
        kind = random.choice(["table", "table", "idempotent", "plain"])
        if kind == "plain":
            return Plain(self.truth)
        if kind == "idempotent":
            return Idempotent(self.truth)
        if not self.tables or random.random() < 0.5:
            self.tables.append(Table(self.world, self.truth, f"table-{name}", GROUP))
        return self.tables[-1]

    def begin(self) -> None:
        for query in self.queries:
            self.start(query)
        for _ in range(self.world.draws("others").choice([0, 1, 1, 2])):
            self.start_other()
        self._produce()
        self._watch()

    def start(self, query: Query) -> None:
        if self.closed:
            return
        run = SparkRun(self.world, self.cluster, self.truth, query, on_end=self._on_end)
        query.runs.append(run)
        run.start()

    def _stop_all(self) -> None:
        self.closed = True
        for query in self.queries:
            for run in query.runs:
                if run.process.frozen or run.process.draws("stopped by an operator").chance(0.5):
                    run.stop()
                else:
                    run.kill()
        for other in self.others:
            other.end()

    def _start_all(self) -> None:
        self.closed = False
        for query in self.queries:
            self.start(query)

    def freeze_all(self) -> None:
        """Freeze the drivers, or kill them: their sessions end, and most of them continue later with what they know."""
        self.closed = True
        for query in self.queries:
            for run in query.runs:
                if run is not query.runs[-1] or run.has_lost_reader or run.process.draws("frozen").chance(0.1):
                    run.kill()
                elif run.process.alive and not run.process.frozen:
                    run.process.freeze()
        for other in self.others:
            other.end()

    def thaw_all(self) -> None:
        """Let the frozen drivers continue, and start those that were killed."""
        self.closed = False
        for query in self.queries:
            run = query.runs[-1]
            if not run.process.alive:
                self.start(query)
            elif run.process.frozen:
                run.process.thaw()

    def start_other(self, *, brief: bool = False) -> None:
        alive = sum(other.process.alive for other in self.others)
        if self.closed or alive + 1 >= self.group.size_max:  # one place is left for the query
            return
        name = f"other{len(self.others) + 1}"
        other = OrdinaryMember(
            self.world,
            self.cluster,
            self.group,
            self.truth,
            name=name,
            brief=brief,
            commits_every_ms=None if brief else self.others_commit_every_ms,
        )
        self.others.append(other)
        other.start()

    def lose_host(self) -> None:
        """The host of a query with a table dies right after a batch. Another consumer takes over, reads a part of the
        batch again and leaves. Then the query starts again."""
        draws = self.world.draws("lost host")
        for query in self.queries:
            run = query.runs[-1]
            if not isinstance(query.sink, Table) or not run.healthy or self.is_calm:
                continue
            query.habits = replace(query.habits, interval_ms=0)
            self._restarts_ms[run.process.name] = SESSION_MS + draws.between(1_000, 6_000)
            run.host_dies = partial(self._host_dies, query, files_lost=draws.chance(0.5))
            break

    def _host_dies(self, query: Query, *, files_lost: bool) -> None:
        if files_lost:
            self.world.note(f"the run files of {query.name} are gone")
            query.durable.clear()
            query.committed.clear()
            query.void.clear()
        for other in self.others:
            other.end()
        self.start_other(brief=True)

    def _on_end(self, run: SparkRun, error: BaseException | None) -> None:
        """Restart a query that ended."""
        self.ends["ended" if error is None else type(error).__name__] += 1
        if run is not run.query.runs[-1]:
            return
        if self.while_down is not None:
            while_down, self.while_down = self.while_down, None
            while_down()
        if isinstance(error, Fenced) and self.cluster.transactions_allowed:
            self._judge_fenced(run, error)
        if isinstance(error, RebalanceTimeout | CommitFailed) and "waited_ms" in error.fields:  # the joining budget
            self._judge_timeout(run, error)
        elif isinstance(error, CommitFailed):
            raise self._violation(f"a commit that failed ended {run.process.name}: {error}")
        query = run.query
        if isinstance(error, (DataLoss, LedgerConflict)) and not self._needs_a_person(run, error):
            raise self._violation(f"{run.process.name} needs a person, although nothing happened: {error}")
        if isinstance(error, (DataLoss, TopicMissing)):
            query.habits = replace(query.habits, options=query.habits.options | {"failOnDataLoss": "false"})
        if isinstance(error, LedgerConflict):
            table = query.sink
            assert isinstance(table, Table)
            self.operator.begin(lambda: self.operator.settle(table, self.tables))
        delay_ms = self.world.draws(f"restarts of {query.name}").choice(START_AGAIN_MS)
        delay_ms = self._restarts_ms.pop(run.process.name, delay_ms)
        self.world.at(delay_ms, lambda: self.start(query) if query.runs[-1] is run else None)

    def _needs_a_person(self, run: SparkRun, error: DataLoss | LedgerConflict) -> bool:
        refused = error.fields.get("refused")
        starts = {TopicPartition(t, p): start for t, p, start, _ in refused} if isinstance(refused, list) else {}
        return self.truth.explains(_partitions_of(error), starts, run.reader.party)

    def _judge_fenced(self, run: SparkRun, error: SourceError) -> None:
        """The newest run of a query may be fenced only by an older run that was initializing a producer when this run
        started, or by its own initialization request that was sent again after a timeout; or by an older run
        that took its id back after the coordinator had forgotten it, while it had the stream's memberships."""
        transactions, name = self.cluster.transactions, run.process.name
        if not (run.late or transactions.taken_twice(name) or transactions.taken_back(name)):
            raise self._violation(f"{run.process.name}, the newest run of its query, was fenced: {error}")

    def _judge_timeout(self, run: SparkRun, error: SourceError) -> None:
        """A run waits for the group only while that is not stable or the brokers do not respond. An older run of its
        stream that nothing fences may continue in the group: the members of both have the same names, and the new run
        waits for the older run's partitions. An older run is also not fenced if it has no static members, such as a
        bounded run under KIP-848. There a static member keeps its instance id from others, so an older run stays until
        it commits, perhaps after a long batch; and longer if it has taken its id back, as in :meth:`_judge_fenced`."""
        older = [other for other in run.query.runs if other is not run and other.lately_alive]
        same = [other for other in older if other.reader.party == run.reader.party]
        if same and not self.cluster.transactions_allowed:
            return
        stays = [one for one in same if not self.truth.has_committed(one.reader, run.reader.began_ms)]
        has_lost_id = self.cluster.transactions.taken_back(run.process.name)
        if self.protocol == "consumer" and (stays or (same and (has_lost_id or run.trigger != "default"))):
            return
        process = run.process
        unsettled_ms = max(self._at_rest_since_ms, process.thawed_at_ms)
        failed_ms, budget_ms = self.world.now_ms, 0
        if run.watched is not None:
            failed_ms, budget_ms = run.watched.failed_ms or failed_ms, run.watched.rules.joining_budget_ms
        rest_ms = max(unsettled_ms, process.cut_off_until_ms, process.members_until_ms)
        answered = not self._unanswered and self.cluster.transactions_allowed  # as in a call that takes long
        if failed_ms - rest_ms > PATIENCE_MS_MAX and answered:
            raise self._violation(f"{process.name} timed out waiting for a stable group: {error}")
        # An outage has a limit of its own: after one that its requests have met, it waits for the group anew.
        for from_ms, until_ms in (
            (self.world.down_from_ms, self.world.down_until_ms),
            (process.cut_off_from_ms, process.cut_off_until_ms),
        ):
            met = until_ms - from_ms >= OUTAGE_MET_MS
            if met and from_ms < failed_ms < until_ms + budget_ms - SLACK_MS and process.thawed_at_ms < from_ms:
                raise self._violation(f"{process.name} counts an outage as time to wait for the group: {error}")

    # --- activity ---------------------------------------------------------------------------------------------------

    def _produce(self) -> None:
        if not self.producing:
            return
        draws = self.world.draws("producer")
        if tps := self.cluster.led_partitions():
            tp = draws.choice(tps)
            count = draws.randint(1, 6)
            self.cluster.produce(tp, count)
            self.truth.produce(tp, count)
        self.world.at(draws.between(1, PRODUCE_EVERY_MS), self._produce)

    def _watch(self) -> None:
        """Check that every wait stays within its limit."""
        now = self.world.now_ms
        if self.group.describe()[0] not in AT_REST or self.group.unfinished or now < self.world.down_until_ms:
            self._at_rest_since_ms = now
        for query in self.queries:
            for run in query.runs:
                if not run.healthy or run.watched is None:
                    continue
                since_ms = run.calling_since_ms
                process = run.process
                outage_ms = max(self.world.down_until_ms, process.cut_off_until_ms, process.members_until_ms)
                trouble_ms = max(process.thawed_at_ms, outage_ms)
                budget_ms = run.watched.rules.joining_budget_ms
                longest_ms = max(CALL_MS_MAX, budget_ms + CALL_SLACK_MS)
                if not self.cluster.transactions_allowed:  # nobody may end an open one, which delays lookups
                    longest_ms += TRANSACTION_MS
                if run.trigger != "default":  # then it must know what is left to read
                    longest_ms += max(budget_ms, UNSETTLED_MS_MIN)
                silent_ms = self.cluster.silent_until_ms
                if (wanted := run.watched.plannable()) and all(map(self.cluster.is_silent, wanted)):
                    self._outages_ms[run] = now
                trouble_ms = max(trouble_ms, self._outages_ms.get(run, 0))
                answered = not self._unanswered and now >= silent_ms
                # Without transactions, one member after the other commits, and lookups wait for the last one.
                if run.trigger == "default" and answered and self.cluster.transactions_allowed:
                    longest_ms = PATIENCE_MS_MAX  # in a stable group, with brokers that answer
                    trouble_ms = max(trouble_ms, self._at_rest_since_ms, silent_ms)
                if since_ms is not None and now - max(since_ms, trouble_ms) > longest_ms:
                    raise self._violation(f"{run.process.name}: {run.calling} takes longer than {longest_ms} ms")
                if self._is_left_out(run, now - max(trouble_ms, self._at_rest_since_ms)):
                    raise self._violation(f"{run.process.name} has no assignment in a stable group")
                held_ms = run.watched.longest_hold_ms(now)
                stood_still = now - trouble_ms <= HOLD_SLACK_MS
                slack_ms = HOLD_SLACK_MS  # and its thread may be busy with a commit as a member
                if not self.cluster.transactions_allowed:
                    slack_ms += int(MEMBER_COMMIT_S_MAX * 1000)
                if held_ms > run.watched.rules.hold_budget_ms + slack_ms and not stood_still:
                    raise self._violation(f"{run.process.name} holds a revocation for {held_ms} ms")
                calm = run.executors is not None and now - trouble_ms > HOLD_SLACK_MS
                if calm and run.executors is not None and (wrong := run.executors.wrong(run)) is not None:
                    raise self._violation(f"{run.process.name}: {wrong}")
                replaced = run is not query.runs[-1]  # the end of a later run removes what it should notice
                if not replaced and now - trouble_ms > HOLD_SLACK_MS and (late := run.unserved()) is not None:
                    raise self._violation(f"{run.process.name} does not notice {late} between two triggers")
        self.world.at(WATCH_EVERY_MS, self._watch)

    def _is_left_out(self, run: SparkRun, calm_ms: int) -> bool:
        """Whether none of its members has joined for longer than a session, although nothing keeps them out: in a calm
        group another member may have their instance ids for so long. A run that failed has none while its last batch
        waits for a leader."""
        assert run.watched is not None
        joins = run.watched.state not in (RunState.NEW, RunState.TARGETING, RunState.STARTING)
        since_ms = run.watched.slots.unassigned_since_ms if joins and not run.watched.closed else None
        lasts_ms = 0 if since_ms is None else min(calm_ms, self.world.now_ms - since_ms)
        older = any(other.lately_alive for other in run.query.runs if other is not run)
        return lasts_ms > self.group.session_ms + PATIENCE_MS_MAX and not older and not self._unanswered

    def _violation(self, rule: str) -> Violation:
        self.world.note(f"VIOLATION: {rule}")
        return Violation(rule)

    def delete(self, topic: str) -> None:
        self.world.note(f"topic {topic} is deleted")
        for tp in self.partitions():
            if tp.topic == topic:
                self.truth.deleted(tp)
        self.cluster.delete(topic)
        self.deleted.add(topic)

    def make_again(self, topic: str) -> None:
        if topic not in self.deleted:
            return
        self.world.note(f"topic {topic} is recreated")
        self.deleted.discard(topic)
        draws = self.world.draws("topics made again")
        slow_ms = 0 if self.is_calm else draws.choice(SLOW_MS)
        self.cluster.create(topic, draws.randint(1, 4), slow_ms=slow_ms)
        for tp in self.partitions():
            if tp.topic == topic:
                self.truth.made_again(tp)

    def targets(self, draws: Draws, committed: Targets) -> Targets:
        """Draw some partitions, mostly a little back."""
        targets = {}
        for tp, at in sorted(committed.items()):
            log = self.cluster.log(tp)
            if log is None or draws.chance(0.4):
                continue
            to = at - draws.between(0, 30) if draws.chance(0.8) else at + draws.between(0, 5)
            targets[tp] = min(max(to, log.first), log.end)
        return targets

    def restarts_after(self, run: SparkRun, ms: int) -> None:
        """When this run ends, its query starts again so much later."""
        self._restarts_ms[run.process.name] = ms

    def age(self, tp: TopicPartition, draws: Draws) -> None:
        """Retention deletes records, read or not."""
        log = self.cluster.log(tp)
        assert log is not None
        self.cluster.age(tp, draws.between(log.first, log.end))
        self.world.note(f"{tp} begins at {log.first} now")
        self.truth.gone(tp, log.first)

    def restore(self, backup: "Backup") -> None:
        """Bring back the logs and committed offsets of a backup of the cluster: leader epochs are earlier ones then."""
        self.world.note("the cluster is restored")
        for tp, (end, epoch, begins) in backup.logs.items():
            log = self.cluster.log(tp)
            if log is None or self.cluster.topics[tp.topic].id != backup.ids[tp.topic]:
                continue
            log.end, log.epoch, log.begins, log.held = max(end, log.first), epoch, dict(begins), None
            self.truth.shrunk(tp, log.end)
            if tp in backup.offsets and tp in self.group.offsets:
                self.group.offsets[tp] = backup.offsets[tp]._replace(order=self.group.offsets[tp].order)

    def back_up(self) -> "Backup":
        logs, topics = {tp: self.cluster.log(tp) for tp in self.partitions()}, self.cluster.topics
        ends = {tp: (log.end, log.epoch, dict(log.begins)) for tp, log in logs.items() if log is not None}
        return Backup(ends, {name: topic.id for name, topic in topics.items()}, dict(self.group.offsets))

    def release(self, tp: TopicPartition) -> None:
        """End the open transaction of the partition's records."""
        if (log := self.cluster.log(tp)) is not None:
            log.held = None

    def truncate(self, tp: TopicPartition, end: int, *, grows: int = 0) -> None:
        """Elect a leader without the records from ``end`` on, which appends ``grows`` other records."""
        self.cluster.shrink(tp, end)
        log = self.cluster.log(tp)
        assert log is not None
        self.world.note(f"{tp} ends at {log.end} now, leader epoch {log.epoch}")
        self.truth.shrunk(tp, log.end)
        self.cluster.produce(tp, grows)
        self.truth.produce(tp, grows)

    def elect_leaders(self) -> None:
        """Every partition has a leader again."""
        self.cluster.silent_until_ms = min(self.cluster.silent_until_ms, self.world.now_ms)
        for tp in self.partitions():
            log = self.cluster.log(tp)
            assert log is not None
            log.leader_from_ms = min(log.leader_from_ms, self.world.now_ms)

    # --- the end ----------------------------------------------------------------------------------------------------

    def calm(self) -> None:
        world = self.world
        world.note("--- calm ---")
        self.is_calm = True
        for topic in sorted(self.deleted):
            self.make_again(topic)
        world.loss, world.down_until_ms = 0.0, min(world.down_until_ms, world.now_ms)
        self.group.size_max = SIZE_MAX
        self.cluster.misfortune = Misfortune()
        self.group.on_topics_changed()
        world.at(UNOWNED_EVERY_MS, self._own_all)
        for query in self.queries:
            query.habits = replace(query.habits, sink_ms_max=100, crash=0.0, trigger="default", interval_ms=0)
            for run in query.runs:
                if run.publisher.drain:
                    run.stop()
        processes = [run.process for query in self.queries for run in query.runs]
        for executors in [query.executors for query in self.queries if query.executors is not None]:
            executors.calm()
        for tp in self.partitions():
            self.release(tp)
        world.at(self.leaders_return_ms, self.elect_leaders)
        for process in [*processes, *(other.process for other in self.others)]:
            if process.alive and process.frozen:
                process.thaw()

    def _own_all(self) -> None:
        """In a stable classic group, a partition without an owner stays unassigned until the next rebalance, as in
        Kafka: a broker that replaces a static member in a stable group compares only the assignor's name
        (``GroupMetadataManager.updateStaticMemberThenRebalanceOrCompleteJoin``, 4.2.1) and assigns the former member's
        partitions. So a partition revoked from a member that was replaced before it rejoined stays unassigned
        (cooperative), as does a topic that a member newly subscribes to. The source's members report this to the
        broker."""
        if self.protocol != "consumer" and self.group.unowned():
            self.world.note("forced rebalance: a partition has no owner")
            self.group.on_topics_changed()
        self.world.at(UNOWNED_EVERY_MS, self._own_all)

    def at_rest(self) -> bool:
        return self.truth.finished() and not self.operator.busy and not self._refused()

    def finish(self) -> None:
        """All records were processed and committed, and members that a full group refused have joined it since."""
        self.truth.finish()
        if refused := self._refused():
            raise Violation(f"{refused[0]} never joined again after a full group refused it")

    def _refused(self) -> list[str]:
        watched = [run.watched for query in self.queries for run in query.runs if run.healthy]
        runs = [run for run in watched if run is not None and not run.closed]
        return [f"slot {slot.number}" for run in runs for slot in run.slots.all if slot.is_refused]

    def partitions(self) -> list[TopicPartition]:
        return self.cluster.partitions()


def _partitions_of(error: SourceError) -> list[TopicPartition]:
    """Return the partitions that an error names; none if it concerns all."""
    for field in ("refused", "missing", "partitions"):
        if isinstance(found := error.fields.get(field), list):
            return [TopicPartition(each[0], each[1]) for each in found]
    topic, partition = error.fields.get("topic"), error.fields.get("partition")
    return [TopicPartition(topic, partition)] if isinstance(topic, str) and isinstance(partition, int) else []
