"""Real kills of real parts: Ray workers, FSDP ranks, SQLite; the log and the weights tell of none of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from surefoot.statemachine.crashpoints import CRASHPOINTS
from surefoot.statemachine.events import CheckpointCommitted, IncarnationBegan

from .lives import RealRun, gone
from .matrix import AFTER_A_CRASH
from .situations import UNDISTURBED

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def test_the_untouched_run_is_whole(untouched: RealRun) -> None:
    state = untouched.state()
    assert (state.updates, state.optimizer_steps, state.policy_version) == (7, 7, 4)
    report = untouched.audit()
    assert report.ok, report.checks
    kinds = [row.type for row in untouched.rows()]
    assert kinds.index("BudgetResolved") < kinds.index("WorkersReady")


def test_killed_twice_and_resumed_it_is_the_same_run(
    untouched: RealRun, killed: RealRun, tmp_path: Path
) -> None:
    """Reports 16 and 39: real kills; it was run again at once the first time."""
    run = killed.copied_to(tmp_path / "runs")
    assert run.live() == 0, run.output()
    assert run.state().incarnation == 3
    assert run.audit().ok
    assert run.ledger() == untouched.ledger()


def test_sigterm_leaves_a_checkpoint_no_child_and_code_75_and_a_second_ends_it_at_once(
    untouched: RealRun, tmp_path: Path
) -> None:
    """Reports 36 and 37."""
    run = RealRun(untouched.config, tmp_path)
    life = run.stand("log.created:1")  # its driver does not know yet that it has the run
    below = life.below()
    os.kill(life.process.pid, signal.SIGTERM)  # to the driver alone, as most senders do
    life.go_on()
    assert life.wait() == 75, run.output()
    assert gone(below) == []
    assert [row.type for row in run.rows()][-1] == "RunPreempted"

    life = run.stand("log.append.after@UpdateApplied:2")
    below = life.below()
    for process in below:  # as a supervisor does that ends a whole group
        process.terminate()
    os.kill(life.process.pid, signal.SIGTERM)
    life.go_on()
    assert life.wait() == 75, run.output()
    assert gone(below) == []
    state = run.state()
    assert state.phase == "Preempted" and state.updates in state.checkpoints

    life = run.stand("log.append.after@IncarnationBegan:1")
    below = life.below()
    for number in (signal.SIGTERM, signal.SIGINT):  # two of one kind may arrive as one
        os.kill(life.process.pid, number)
    life.go_on()
    assert life.wait() in (-signal.SIGTERM, -signal.SIGINT), "the second ends it at once"
    assert gone(below) == []

    assert run.live() == 0, run.output()
    assert run.ledger() == untouched.ledger()
    assert run.live() == 0 and "already" in run.output()


def test_a_killed_rank_costs_the_learner_group_and_a_killed_worker_its_groups_and_nothing_else(
    untouched: RealRun, tmp_path: Path
) -> None:
    run = RealRun(untouched.config, tmp_path)
    life = run.stand("log.append.after@UpdateApplied:2,log.append.after@WorkersReady:2")
    (worker,) = life.actors("RolloutWorker")
    (rank,) = life.actors("RankActor")
    rank.kill()
    life.go_on()
    assert life.stands(), run.output()
    assert len(run.events("LearnerLost")) == 1
    assert worker.is_running(), "the rollout worker lives on"
    assert not run.events("WorkerReplaced")
    worker.kill()
    life.go_on()
    assert life.wait() == 0, run.output()
    assert (len(run.events("LearnerLost")), len(run.events("WorkerReplaced"))) == (1, 1)
    assert run.state().incarnation == 1
    assert run.audit().ok
    assert run.ledger() == untouched.ledger()


def test_the_quickstart_killed_and_resumed_trains_each_group_once(tmp_path: Path) -> None:
    run = RealRun(QUICKSTART, tmp_path, "quickstart")
    smaller = ["data.size=192", "checkpoint.every_updates=2", "eval.size=20", "eval.every_updates=3"]
    sets = [word for one in smaller for word in ("--set", one)]
    run.stand("log.append.after@UpdateApplied:3", *sets).kill()
    assert run.live(*sets) == 0, run.output()
    state = run.state()
    assert (state.updates, state.optimizer_steps, state.incarnation) == (6, 6, 2)
    trained = [index for event in run.events("UpdateApplied") for index, _ in event.groups]
    assert trained == list(range(192))
    assert run.audit().ok
    assert (tmp_path / "quickstart" / "curve.png").stat().st_size > 10_000
    replayed = run.command("replay", "quickstart", "--json")
    assert replayed.returncode == 0, replayed.stderr
    shown = json.loads(replayed.stdout)
    # the quickstart keeps every group: all of it is executed again, whichever life did it first
    assert (shown["checkpoint_update"], shown["first_update"], shown["last_update"]) == (0, 1, 6)
    assert shown["ok"] and shown["same_execution"] and shown["loss_deviation"] == 0.0
    assert shown["last_digest"] == run.events("RunCompleted")[0].weights_digest


def test_resumed_on_other_ranks_workers_and_micro_batches_the_accounting_is_the_same(
    untouched: RealRun, resumed_elsewhere: RealRun
) -> None:
    """Report 20, on real parts: the deviations of the redo are recorded, and the run goes on."""
    run = resumed_elsewhere
    assert len(run.events("UpdatesRedone")) == 2
    redone = run.events("UpdatesRedone")[1]
    events = [row.event() for row in run.rows()]
    killed_at = [place for place, event in enumerate(events) if isinstance(event, IncarnationBegan)][2]
    saved = [event.update for event in events[:killed_at] if isinstance(event, CheckpointCommitted)]
    assert saved in ([], [3]), "the kill may come before a slow disk has the checkpoint of update 3"
    assert (redone.first_update, redone.last_update) == (sum(saved) + 1, 5)
    assert not redone.same_execution and not redone.accepted_divergence
    assert 0.0 <= redone.loss_deviation < 1e-5
    changes = run.events("IncarnationBegan")[2].config_changes
    assert changes == {
        "learner.ranks": [1, 2],
        "learner.micro_batch_tokens": [16384, 40],
        "rollout.workers": [1, 2],
    }
    assert run.audit().ok
    for was, now in zip(untouched.ledger()[:-1], run.ledger()[:-1], strict=True):
        assert now[:2] == was[:2], "the same groups in the same update"
        assert [step[:2] for step in now[2]] == [step[:2] for step in was[2]], "at the same learning rates"


def test_what_the_untouched_run_writes_is_what_the_matrix_says_of_it(untouched: RealRun) -> None:
    assert {row.type for row in untouched.rows()} == {*UNDISTURBED, "IncarnationBegan"}


def test_every_crash_point_is_reached_by_real_processes(
    untouched: RealRun, resumed_elsewhere: RealRun
) -> None:
    """One that nothing reaches would be killed at by no fault, and each of its cases would prove nothing."""
    after_a_crash = {place for place in CRASHPOINTS if place.startswith(AFTER_A_CRASH)}
    assert untouched.reached() == CRASHPOINTS.keys() - after_a_crash
    assert untouched.reached() | resumed_elsewhere.reached() == set(CRASHPOINTS)
