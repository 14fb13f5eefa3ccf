"""Machines of a cluster go away, with notice and without; the run loses what was on them and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .clusters import LocalCluster, local_cluster
from .lives import RealRun, gone
from .small import make_small

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # nothing listens beyond this machine
        with local_cluster() as cluster:
            yield cluster


def test_a_node_of_workers_and_ranks_that_goes_away_is_their_death_and_not_the_drivers(
    cluster: LocalCluster, untouched: RealRun, tmp_path: Path
) -> None:
    run = RealRun(untouched.config, tmp_path)
    node = cluster.add_node(slots=3)
    life = run.stand("log.append.after@UpdateApplied:2", "--set", f"cluster.address={cluster.address}")
    cluster.take_away(node)
    other = cluster.add_node(slots=3)
    life.go_on()
    assert life.wait() == 0, run.output()
    assert run.events("LearnerLost") and run.events("WorkerReplaced")
    assert run.state().incarnation == 1
    assert run.audit().ok
    assert run.ledger() == untouched.ledger()
    cluster.take_away(other)


def test_notice_that_a_node_of_ranks_is_taken_away_is_a_preemption(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    run = RealRun(make_small(tmp_path, rows=80), tmp_path / "runs")  # 40 updates: some seconds
    node = cluster.add_node(slots=3)
    to_cluster = ("--set", f"cluster.address={cluster.address}")
    life = run.stand("update.committed:3", *to_cluster)
    below = life.below()
    cluster.drain(node)
    life.go_on()
    assert life.wait() == 75, run.output()
    assert gone(below) == []
    (preempted,) = run.events("RunPreempted")
    assert f"node {node.node_id} is being drained" in preempted.because
    assert 3 <= preempted.updates < 40 and preempted.checkpoint_update == preempted.updates
    cluster.take_away(node)
    cluster.add_node(slots=3)
    assert run.live(*to_cluster) == 0, run.output()
    trained = [index for event in run.events("UpdateApplied") for index, _ in event.groups]
    assert trained == list(range(80))
    assert run.audit().ok
