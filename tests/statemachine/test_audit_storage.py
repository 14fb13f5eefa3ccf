"""For every identity of what lies on disk, a log that breaks just it: checkpoints, redo, retired files."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.statemachine.audit import HASHES_AT_ONCE
from surefoot.statemachine.events import (
    CheckpointCommitted,
    CheckpointLost,
    FilesRetired,
    GroupsStored,
    IncarnationBegan,
    IssueReason,
    UpdatesRedone,
    WorkersReady,
)
from surefoot.statemachine.log import GENESIS_HASH, EventRow

from .audits import assert_only, failures, report_of
from .scenario import Scenario, whole_run


def begun(**options: Any) -> Scenario:
    return Scenario(**options).begin()


# -- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"head_hash": "f" * 64},
        {"head_hash": ""},
        {"head_seq": 10**12},
        {"head_seq": -5},
        {"head_seq": 1, "head_hash": GENESIS_HASH},
    ],
    ids=str,
)
def test_a_checkpoint_that_names_no_row_of_the_log_is_found(changes: dict[str, Any]) -> None:
    run = begun().work(2)
    rows = run.rows()
    head = {"head_seq": rows[-1].seq, "head_hash": rows[-1].hash}
    run.checkpoint().change(CheckpointCommitted, 0, **(head | changes))
    failed = failures(run)
    assert list(failed) == ["checkpoints"]
    assert "with a hash that no earlier row has" in failed["checkpoints"]


def long_run() -> tuple[Scenario, list[EventRow]]:
    """Longer than the hashes that the audit packs at once, with a checkpoint near the end."""
    run = begun(data_len=4000, max_staleness=4).work(450)
    rows = run.rows()
    assert len(rows) > 2 * HASHES_AT_ONCE
    return run.checkpoint(), rows


@pytest.mark.parametrize("seq", [HASHES_AT_ONCE - 1, HASHES_AT_ONCE, HASHES_AT_ONCE + 1, 2 * HASHES_AT_ONCE])
def test_every_row_of_a_long_log_can_be_named_by_a_checkpoint(seq: int) -> None:
    run, rows = long_run()
    run.change(CheckpointCommitted, 0, head_seq=seq, head_hash=rows[seq - 1].hash)
    assert "with a hash that no earlier row has" not in failures(run)["checkpoints"]
    run.change(CheckpointCommitted, 0, head_seq=seq, head_hash=rows[seq].hash)
    assert "with a hash that no earlier row has" in failures(run)["checkpoints"]


def test_a_checkpoint_that_names_an_older_head_is_right_if_its_update_is_in_it() -> None:
    """A snapshot is committed later, when groups have come in meanwhile."""
    run = begun().work(2)
    head = run.rows()[-1]
    run.admit().store().checkpoint()
    run.change(CheckpointCommitted, 0, head_seq=head.seq, head_hash=head.hash)
    assert failures(run) == {}


def test_a_checkpoint_whose_head_does_not_hold_its_update_is_found() -> None:
    run = begun().work(1)
    head = run.rows()[-1]
    run.work(1).checkpoint()
    run.change(CheckpointCommitted, 0, head_seq=head.seq, head_hash=head.hash, policy_version=0)
    assert_only(run, "checkpoints", f"names head {head.seq}, which does not hold it")


def test_a_checkpoint_of_an_update_that_is_not_recorded_is_found() -> None:
    run = begun().work(2).checkpoint().change(CheckpointCommitted, 0, update=3, optimizer_steps=6)
    assert_only(run, "checkpoints", "of update 3", "does not hold it")


@pytest.mark.parametrize("optimizer_steps", [2, 3, 8])
def test_a_checkpoint_named_after_another_counter_is_found(optimizer_steps: int) -> None:
    run = begun().work(2).checkpoint().change(CheckpointCommitted, 0, optimizer_steps=optimizer_steps)
    assert_only(run, "checkpoints", f"says {optimizer_steps} optimizer steps, by then it is 4")


def test_a_checkpoint_of_another_policy_version_is_found() -> None:
    run = begun().work(3).checkpoint().change(CheckpointCommitted, 0, policy_version=2)
    assert_only(run, "checkpoints", "says policy version 2, that of its update is 1")


def test_a_checkpoint_made_during_redo_is_of_its_own_update_s_version() -> None:
    """The log is at update 4 and version 2; the checkpoint that is made up for is of update 2."""
    run = begun().work(4).take_over(ready=False)
    run.updates, run.optimizer_steps, run.policy_version = 2, 4, 1
    run.checkpoint()
    run.updates, run.optimizer_steps, run.policy_version = 4, 8, 2
    run.checkpoints.clear()
    assert failures(run.redo().ready()) == {}
    run.change(CheckpointCommitted, 0, policy_version=2)
    assert_only(run, "checkpoints", "says policy version 2, that of its update is 1")


def test_a_lost_checkpoint_that_was_not_kept_is_found() -> None:
    run = begun().work(2).checkpoint().add(CheckpointLost(update=2, path="elsewhere", because="x"))
    assert_only(run, "checkpoints", "checkpoint elsewhere of update 2 was lost, but not kept")


# -- redo ---------------------------------------------------------------------------------------------


def resumed(updates: int = 3, checkpoint_after: int | None = 2) -> Scenario:
    """Killed after some updates, with a checkpoint after one of them."""
    run = begun()
    for update in range(1, updates + 1):
        run.work(1)
        if update == checkpoint_after:
            run.checkpoint()
    return run.take_over()


def test_a_redo_from_the_newest_checkpoint_to_the_head_is_right() -> None:
    run = resumed()
    assert failures(run) == {}
    assert report_of(run).totals["updates_redone"] == 1
    redone = run.event(UpdatesRedone)
    assert (redone.checkpoint_update, redone.first_update, redone.last_update) == (2, 3, 3)


def test_without_a_checkpoint_everything_is_redone_from_the_initial_weights() -> None:
    run = resumed(checkpoint_after=None)
    assert failures(run) == {}
    assert run.event(UpdatesRedone).checkpoint_update == 0


def test_a_checkpoint_of_the_head_needs_no_redo() -> None:
    assert failures(resumed(updates=2)) == {}


def test_a_redo_that_was_left_out_is_found() -> None:
    run = resumed().remove(UpdatesRedone)
    assert_only(run, "redo", "ready with update 3", "newest checkpoint is of update 2")


def test_a_redo_by_another_life_does_not_count() -> None:
    run = resumed().take_over().remove(UpdatesRedone, 1)
    assert_only(run, "redo", "ready with update 3", "nothing was redone after it")


def test_a_redo_by_the_learner_that_was_lost_does_not_count() -> None:
    run = resumed().lose_learner()
    assert failures(run) == {}
    assert_only(run.remove(UpdatesRedone, 1), "redo", "nothing was redone after it")


@pytest.mark.parametrize("update", [2, 4])
def test_a_learner_ready_with_another_update_than_the_log_s_is_found(update: int) -> None:
    run = resumed().change(WorkersReady, 1, update=update)
    assert_only(run, "redo", f"ready with update {update}, the log holds 3")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"last_update": 4}, "recorded are 3"),
        ({"first_update": 2}, "updates 2 to 3 were redone from 2"),
        ({"first_update": 4, "last_update": 4}, "recorded are 3"),
    ],
    ids=str,
)
def test_a_redo_of_updates_that_are_not_recorded_is_found(changes: dict[str, int], words: str) -> None:
    assert_only(resumed().change(UpdatesRedone, 0, **changes), "redo", words)


def test_a_redo_that_stops_short_of_the_head_is_found() -> None:
    run = resumed(updates=4).change(UpdatesRedone, 0, last_update=3)
    assert_only(run, "redo", "updates 3 to 3 were redone from 2", "every update after it, up to 4")


def test_a_redo_that_passes_over_an_update_is_found() -> None:
    run = resumed(updates=4).change(UpdatesRedone, 0, first_update=4)
    assert_only(run, "redo", "updates 4 to 4 were redone from 2: due is every update after it")


def test_a_redo_from_an_older_checkpoint_than_there_is_is_found() -> None:
    """A restart from 0 that says nothing."""
    run = resumed().change(UpdatesRedone, 0, checkpoint_update=0, first_update=1)
    assert_only(run, "redo", "from a checkpoint of update 0, the newest was of 2")


def test_a_redo_from_a_checkpoint_that_was_never_committed_is_found() -> None:
    run = begun().work(3).checkpoint().work(1).take_over()
    run.remove(CheckpointCommitted)
    assert_only(run, "redo", "from a checkpoint of update 3, the newest was of 0")


def test_a_redo_from_an_older_checkpoint_is_right_once_the_newer_is_said_to_be_lost() -> None:
    run = begun().work(1).checkpoint().work(1).checkpoint().work(1).take_over(ready=False)
    newest = run.event(CheckpointCommitted, 1)
    run.add(CheckpointLost(update=2, path=newest.path, because="torn"))
    del run.checkpoints[newest.path]
    assert failures(run.redo().ready()) == {}
    assert run.event(UpdatesRedone).checkpoint_update == 1


def test_a_redo_from_a_lost_checkpoint_is_found() -> None:
    run = begun().work(2).checkpoint().work(1).take_over(ready=False)
    run.add(CheckpointLost(update=2, path=run.event(CheckpointCommitted).path, because="torn"))
    assert_only(run.redo().ready(), "redo", "from a checkpoint of update 2, the newest was of 0")


def test_a_redo_after_the_learner_was_ready_is_found() -> None:
    run = resumed()
    run.add(run.event(UpdatesRedone))
    assert_only(run, "redo", "redone after the learner was ready")


def test_a_redo_of_another_learner_try_is_found() -> None:
    assert_only(resumed().change(UpdatesRedone, 0, learner_try=2), "workers", "learner try 2, not 1")


@pytest.mark.parametrize("changes", [{"loss_deviation": 1e-9}, {"grad_norm_deviation": "nan"}], ids=str)
def test_a_deviation_on_the_same_execution_is_found_unless_accepted(changes: dict[str, Any]) -> None:
    assert_only(resumed().change(UpdatesRedone, 0, **changes), "redo", "which nobody accepted")
    accepted = resumed().change(UpdatesRedone, 0, **changes, accepted_divergence=True)
    assert_only(accepted, "redo", "which nobody accepted")
    assert failures(accepted.change(IncarnationBegan, 1, accept_divergence=True)) == {}
    assert failures(resumed().change(UpdatesRedone, 0, **changes, same_execution=False)) == {}


# -- files --------------------------------------------------------------------------------------------


def test_what_every_kept_checkpoint_covers_may_be_retired() -> None:
    run = begun().work(2).checkpoint().work(2).checkpoint().retire(keep=2)
    assert len(run.event(FilesRetired).group_files) == 4
    assert failures(run) == {}
    assert failures(run.retire(keep=1).work().checkpoint().complete()) == {}
    assert report_of(run).totals["checkpoints_kept"] == [4, 6]


def test_a_group_file_that_a_kept_checkpoint_does_not_cover_is_found_if_retired() -> None:
    """Checkpoints of 2 and 4 are kept: a redo from 2 needs what update 3 trained."""
    run = begun().work(2).checkpoint().work(2).checkpoint().retire(keep=2)
    needed = run.event(GroupsStored, 4)
    run.change(FilesRetired, 0, group_files=lambda files: [*files, needed.file])
    assert_only(
        run, "files", f"group file {needed.file} was retired, a redo of update 3 needs it", "covers 2"
    )


def test_a_group_file_is_not_covered_while_there_is_no_checkpoint() -> None:
    run = begun().work(2)
    run.add(FilesRetired(checkpoints=[], group_files=[run.event(GroupsStored).file]))
    assert_only(run, "files", "a redo of update 1 needs it", "covers 0")


def test_a_group_file_that_waits_for_training_is_found_if_retired() -> None:
    run = begun().work(2).checkpoint().admit().store()
    waiting = run.event(GroupsStored, -1).file
    run.add(FilesRetired(checkpoints=[], group_files=[waiting]))
    assert_only(run, "files", f"group file {waiting} was retired, 1 of its groups wait for training")


def test_a_file_whose_groups_were_all_dropped_may_be_retired() -> None:
    run = begun().admit().store(0).drop(0)
    assert failures(run.add(FilesRetired(checkpoints=[], group_files=["g0001"]))) == {}


def test_a_file_of_a_group_that_was_issued_again_may_be_retired() -> None:
    run = begun().admit().store(0).reissue(IssueReason.BAD_FILE, 0)
    assert failures(run.add(FilesRetired(checkpoints=[], group_files=["g0001"]))) == {}


@pytest.mark.parametrize("names", [["nowhere"], ["g0001", "g0001"]], ids=["unknown", "twice"])
def test_a_group_file_that_is_not_there_is_found_if_retired(names: list[str]) -> None:
    run = begun().work(2).checkpoint().add(FilesRetired(checkpoints=[], group_files=names))
    assert_only(run, "files", f"group file {names[-1]} was retired, but not there")


def test_a_checkpoint_that_is_not_kept_is_found_if_retired() -> None:
    run = begun().work(2).checkpoint().add(FilesRetired(checkpoints=["elsewhere"], group_files=[]))
    assert_only(run, "files", "checkpoint elsewhere was retired, but not kept")


def test_the_last_checkpoint_is_never_retired() -> None:
    run = begun().work(2).checkpoint()
    run.add(FilesRetired(checkpoints=[run.event(CheckpointCommitted).path], group_files=[]))
    assert_only(run, "files", "the last checkpoint was retired")


def test_group_files_that_are_kept_for_good_are_found_if_retired() -> None:
    run = begun(groups_keep="all").work(2).checkpoint().retire()
    assert_only(run, "files", "groups.keep is all")


def test_a_group_file_that_is_overwritten_is_found() -> None:
    run = whole_run()
    run.change(GroupsStored, 3, file=run.event(GroupsStored, 0).file)
    assert_only(run, "files", "group file g0001 was written a second time")


def test_a_checkpoint_that_is_overwritten_is_found() -> None:
    run = begun().work(2).checkpoint().work(2).checkpoint()
    run.change(CheckpointCommitted, 1, path=run.event(CheckpointCommitted, 0).path)
    assert_only(run, "files", "was written a second time")
