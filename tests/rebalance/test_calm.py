"""G7, G8, and what a run says of itself: a calm group stays calm, limits are named errors, statistics are readable."""

import json

import pytest
from conftest import await_until
from typer.testing import CliRunner

from rebalance.accounts import Flow, stays
from rebalance.conftest import GroupScene
from rebalance.runs import Run, RunProcess
from spark_group_source.cli.app import app
from spark_group_source.errors import OptionError

PARTITIONS = 4
CALM_S = 10
SOAK_S = 1200


@pytest.mark.proves("G7", level="kafka")
@pytest.mark.parametrize("strategy", ["range", "consumer"])
@pytest.mark.parametrize("for_s", [CALM_S, pytest.param(SOAK_S, marks=pytest.mark.soak)])
def test_G7_a_group_in_which_nothing_changes_is_not_disturbed(strategy: str, for_s: int, scene: GroupScene) -> None:
    """Idle and busy; its topics are listed again twice a second all the time, under a pattern."""
    name = scene.topic(PARTITIONS)
    with Run(scene.run_options(None, strategy, subscribePattern=name)) as run:
        run.await_partitions(PARTITIONS)
        run.await_idle()
        members, before = scene.describe(), run.statistics

        def same() -> bool:
            run.check()
            now = run.statistics
            return all(now[key] == before[key] for key in ("generation", "rebalances", "lost", "assigned"))

        stays(same, for_s / 2, "the idle group")
        with Flow(scene.servers, name, PARTITIONS) as flow:
            stays(same, for_s / 2, "the busy group")
            flow.stop()
        scene.assert_once([name], [run])
        scene.await_committed(name)
        assert scene.describe() == members


def test_G8_a_session_timeout_below_the_brokers_minimum_is_a_named_error(scene: GroupScene) -> None:
    name = scene.topic(1)  # of a broker whose minimum is 1 s
    run = Run(scene.run_options(name, kafka__session__timeout__ms=500, kafka__heartbeat__interval__ms=100))
    try:
        await_until(lambda: run.error is not None, what="the run's end")
        assert isinstance(run.error, OptionError), run.error
        assert "kafka.session.timeout.ms is 500, which the brokers refuse" in str(run.error)
        assert "group.min.session.timeout.ms" in str(run.error)
    finally:
        run.close()


@pytest.mark.parametrize("strategy", ["range", "consumer"])
def test_a_run_on_this_host_publishes_what_it_did_and_describe_shows_it(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    with RunProcess(scene.run_options(name, strategy, groupMembers=2), scene.folder / "run") as run:
        run.await_partitions(PARTITIONS)
        run.tell("hold")
        scene.fill(name, 2)
        run.await_in_flight()
        with scene.ordinary(name, strategy=strategy) as other:
            await_until(lambda: "revoking" in run.statistics["slots"], what="Kafka to ask for partitions")
            stays(lambda: not other.partitions, 0.5, "the hold")
            run.tell("let_go")
            await_until(lambda: other.partitions, what="partitions at the other")
            await_until(
                lambda: run.statistics["holds"] > 0 and not run.statistics["uncommitted"],
                what="the hold in the statistics",
            )
            found = run.statistics
            assert found["rebalances"] >= 2 and found["generation"] > 0
            assert len(found["assigned"]) == 2 and sum(found["assigned"]) <= PARTITIONS
            assert found["hold_max_ms"] >= 500 and found["hold_max_ms"] >= found["hold_last_ms"] >= 0
            assert found["lost"] == found["overruns"] == found["maybe_twice"] == found["commits_failed"] == 0
            assert found["commits"] >= 1
            assert 0 < found["echo_last_ms"] <= found["echo_max_ms"]
            shown = CliRunner().invoke(
                app,
                ["describe", "--group", scene.group, "--bootstrap-servers", scene.servers, "--json"],
            )
            assert shown.exit_code == 0, shown.output
            text = json.dumps(json.loads(shown.stdout))
            assert "hold_max_ms" in text and f"spark-group-{found['stream']}-0" in text and "ordinary" in text
