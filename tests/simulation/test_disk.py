"""Whole runs on real files that are torn, edited, damaged, deleted or full: each is found, named, and
recovered from or refused; nothing damaged is ever trained on."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from surefoot.rollout.packing import pack_f32
from surefoot.statemachine.audit import audit
from surefoot.statemachine.crashpoints import watched
from surefoot.statemachine.errors import LogBroken, LogUnavailable, RunFailedError, UserMistake
from surefoot.statemachine.phases import Phase
from surefoot.statemachine.sqllog import open_log
from surefoot.trainer.places import Place
from surefoot.trainer.run import _outcome_if_over

from .fileworld import SHARD, FileWorld
from .world import World, crash_at, ledger, small_config, trained

CONFIG = small_config(sync={"max_staleness": 0, "every_updates": 2}, checkpoint={"every_updates": 3})
"""8 updates; checkpoints of 3, 6 and 8; publications of 2, 4, 6 and 8; a pure function of its config."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FileWorld]:
    world = FileWorld(tmp_path, CONFIG)
    yield world
    world.log.close()


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The ledger of the run that nobody touched."""
    world = FileWorld(tmp_path_factory.mktemp("untouched"), CONFIG)
    assert world.run().exit_code == 0
    world.log.close()
    return ledger(world)


def goes_on_to_the_same_end(world: FileWorld, untouched: list[object]) -> None:
    """The same command brings the run to its end, and no trace of the damage is in what it learned."""
    assert world.run().exit_code == 0
    assert audit(world.rows(), world.log.head(world.run_id)).ok
    assert trained(world) == list(range(16))
    assert ledger(world) == untouched


def run_sql(world: FileWorld, *statements: str) -> None:
    """Past the log, as someone with a shell could."""
    world.log.close()
    with closing(sqlite3.connect(world.place.folder / "log.db", isolation_level=None)) as connection:
        for name in ("update", "delete", "replace"):
            connection.execute(f"DROP TRIGGER events_refuse_{name}")
        for statement in statements:
            connection.execute(statement)


# the log


def test_an_edited_row_is_named_and_the_run_is_not_taken_over(world: FileWorld) -> None:
    """Report 42: a row in the middle, legal as an event; the head knows nothing of it."""
    crash_at(world, "update.committed", 4)
    rows = world.rows()
    (row,) = [row for row in rows if row.type == "UpdateApplied" and row.event().update == 2]  # type: ignore[attr-defined]
    run_sql(
        world,
        f"UPDATE events SET payload = replace(payload, '\"staleness_mean\":0.0', '\"staleness_mean\":0.5') "
        f"WHERE seq = {row.seq}",
    )
    for _ in range(2):
        with pytest.raises(
            LogBroken, match=rf"event {row.seq} of run 'sim' is not as it was written"
        ) as found:
            world.run()
        assert found.value.facts["seq"] == row.seq
    with world.place.reading() as log:
        assert log.head("sim").incarnation == 1
        assert len(list(log.read("sim"))) == len(rows), "nothing was written after it"


def test_a_last_row_that_is_torn_is_named_and_the_run_is_not_taken_over(world: FileWorld) -> None:
    """Report 42: half of its payload is there."""
    crash_at(world, "update.committed", 4)
    seq = world.rows()[-1].seq
    run_sql(world, f"UPDATE events SET payload = substr(payload, 1, length(payload) / 2) WHERE seq = {seq}")
    with pytest.raises(LogBroken, match=rf"event {seq} "):
        world.run()


def test_a_last_row_that_is_gone_is_named_and_the_run_is_not_taken_over(world: FileWorld) -> None:
    """Report 42: the head says that there was one."""
    crash_at(world, "update.committed", 4)
    seq = world.rows()[-1].seq
    run_sql(world, f"DELETE FROM events WHERE seq = {seq}")
    with pytest.raises(LogBroken, match=rf"event {seq} .*missing"):
        world.run()


@pytest.mark.parametrize("left", ["checkpoints", "groups"])
def test_files_without_their_log_are_said_and_never_a_silent_start_from_0(
    world: FileWorld, left: str
) -> None:
    """Report 19: the folder of a run whose log was deleted."""
    crash_at(world, "checkpoint.committed", 1)
    world.log.close()
    for path in world.place.folder.glob("log.db*"):
        path.unlink()
    shutil.rmtree(world.place.folder / ("groups" if left == "checkpoints" else "checkpoints"))
    with pytest.raises(UserMistake, match=r"holds .*has no run 'sim': put its log back"):
        world.run()
    assert not (world.place.folder / "log.db").exists()


def test_a_log_that_has_lost_its_rows_with_its_write_ahead_log_is_no_new_run(world: FileWorld) -> None:
    """While a run is young, log.db is empty and all that was written is in log.db-wal."""
    crash_at(world, "checkpoint.committed", 1)
    world.log.close()
    for path in world.place.folder.glob("log.db*"):
        path.unlink()
    open_log(world.place.log_url, migrate=True).close()
    before = sorted(world.place.folder.rglob("*/*"))
    with pytest.raises(UserMistake, match=r"holds .*has no run 'sim': put its log back"):
        world.run()
    assert before and sorted(world.place.folder.rglob("*/*")) == before


def test_an_older_copy_of_a_log_is_refused_before_what_it_does_not_name_is_deleted(world: FileWorld) -> None:
    crash_at(world, "update.committed", 2)
    ended = world.state().seq
    with closing(sqlite3.connect(":memory:")) as copy:
        with closing(sqlite3.connect(world.place.folder / "log.db")) as log:
            log.backup(copy)
        crash_at(world, "checkpoint.committed", 1)
        (path,) = (checkpoint.path for checkpoint in world.state().checkpoints.values())
        world.log.close()
        for file in world.place.folder.glob("log.db*"):
            file.unlink()
        with closing(sqlite3.connect(world.place.folder / "log.db")) as log:
            copy.backup(log)
    again = FileWorld(world.place.runs_dir, CONFIG)
    with pytest.raises(LogBroken, match=rf"ends with event {ended}, but checkpoint {path} .* older copy"):
        again.run()
    assert again.checkpoint_file(path, "manifest.json").exists()
    assert look(world.place, "SELECT incarnation FROM runs") == [(1,)]


def look(place: Place, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(place.folder / "log.db")) as log:
        return log.execute(query).fetchall()


# group files


def a_group_file(world: FileWorld, trained_already: bool) -> str:
    files = world.state().files
    (name, *_) = [name for name, use in files.items() if (use.last_update > 0) is trained_already]
    return name


ONE, OTHER = pack_f32([-1.0]), pack_f32([-2.0])
# "another number" is still a group that can be read: only its digest tells.
DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "another number": lambda path: path.write_bytes(
        path.read_bytes().replace(pack_f32([-1]), pack_f32([-2]))
    ),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_group_file_that_is_not_trained_yet_is_made_by_another_attempt(
    world: FileWorld, untouched: list[object], damage: str
) -> None:
    crash_at(world, "group.stored", 6)
    name = a_group_file(world, trained_already=False)
    lost = {group.prompt_index for e in world.events("GroupsStored") if e.file == name for group in e.groups}
    DAMAGE[damage](world.group_file(name))
    goes_on_to_the_same_end(world, untouched)
    again = {
        i.prompt_index for e in world.events("GroupsReissued") if e.reason == "bad_file" for i in e.groups
    }
    assert again and again <= lost
    attempts = dict(pair for event in world.events("UpdateApplied") for pair in event.groups)
    assert all(attempts[index] > 1 for index in again), "what was trained is the new attempt"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_bad_group_file_that_a_redo_needs_is_refused_with_its_update_named(
    world: FileWorld, untouched: list[object], damage: str
) -> None:
    crash_at(world, "update.committed", 5)  # the checkpoint of 3 is there, 4 and 5 are to be redone
    last = world.state().records[5].places[0][0]
    whole = world.group_file(last).read_bytes()
    DAMAGE[damage](world.group_file(last))
    with pytest.raises(
        RunFailedError, match=r"update 5 must be redone and needs group \d+.*restore the file"
    ):
        world.run()
    (failed,) = world.events("RunFailed")
    assert failed.facts["update"] == 5
    assert world.state().updates == 5, "and nothing was trained in its place"
    world.group_file(last).write_bytes(whole)
    goes_on_to_the_same_end(world, untouched)


# checkpoints


@pytest.mark.parametrize("place", ["checkpoint.files", "checkpoint.manifest"])
def test_killed_in_the_middle_of_checkpoint_6_it_goes_on_from_5(tmp_path: Path, place: str) -> None:
    """Report 19: what no event committed does not count, however whole it looks; 6 is redone."""
    world = FileWorld(tmp_path, small_config(checkpoint={"every_updates": 1, "keep": 3}))
    crash_at(world, place, 6)
    half = [name for name in world.checkpoints().names() if name.startswith("u000006")]
    assert half and max(world.state().checkpoints) == 5
    assert world.checkpoint_file(half[0], "manifest.json").exists() is (place == "checkpoint.manifest")
    updates = world.state().updates
    assert world.run().exit_code == 0
    redone = world.events("UpdatesRedone")[0]
    assert (redone.checkpoint_update, redone.first_update, redone.last_update) == (5, 6, updates)
    assert half[0] not in world.checkpoints().names(), "swept, never loaded"
    assert trained(world) == list(range(16))
    world.log.close()


def test_with_no_committed_checkpoint_every_update_is_redone_and_it_is_said(tmp_path: Path) -> None:
    """Report 19: a folder with a checkpoint that nobody committed is no start from 0 in silence."""
    world = FileWorld(tmp_path, small_config(checkpoint={"every_updates": 3}))
    crash_at(world, "checkpoint.manifest", 1)
    updates = world.state().updates
    assert updates >= 3 and world.checkpoints().names() and not world.state().checkpoints
    assert world.run().exit_code == 0
    redone = world.events("UpdatesRedone")[0]
    assert (redone.checkpoint_update, redone.first_update, redone.last_update) == (0, 1, updates)
    assert world.state().optimizer_steps == 8 and trained(world) == list(range(16))
    world.log.close()


def test_a_latest_marker_and_a_newer_folder_of_someone_elses_change_nothing(
    world: FileWorld, untouched: list[object]
) -> None:
    """Report 22: only the log decides which checkpoint counts."""
    crash_at(world, "update.committed", 5)
    folder = world.place.folder / "checkpoints"
    (committed,) = world.state().checkpoints.values()
    shutil.copytree(folder / committed.path, folder / "u000007-i0001-009")
    (folder / "u000007-i0001-009" / SHARD).write_text("of another run")
    (folder / "latest").write_text("u000007-i0001-009")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    goes_on_to_the_same_end(world, untouched)
    assert world.events("UpdatesRedone")[0].checkpoint_update == committed.update == 3


SPOILT: dict[str, Callable[[Path], object]] = {
    "deleted by hand": shutil.rmtree,
    "its manifest cut short": lambda path: os.truncate(path / "manifest.json", 40),
    "its manifest missing": lambda path: (path / "manifest.json").unlink(),
    "a shard cut short": lambda path: os.truncate(path / SHARD, 5),
    "a shard changed": lambda path: (path / SHARD).write_text("0" * 24),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_checkpoint_that_cannot_be_used_is_recorded_lost_and_the_one_before_is_redone_from(
    world: FileWorld, untouched: list[object], how: str
) -> None:
    crash_at(world, "update.committed", 8)
    assert sorted(world.state().checkpoints) == [3, 6]
    newest = world.state().checkpoints[6]
    SPOILT[how](world.place.folder / "checkpoints" / newest.path)
    goes_on_to_the_same_end(world, untouched)
    (lost,) = world.events("CheckpointLost")
    assert (lost.update, lost.path) == (6, newest.path)
    assert newest.path in lost.because and lost.because.count("\n") == 0
    assert world.events("UpdatesRedone")[0].checkpoint_update == 3
    assert world.events("UpdatesRedone")[0].first_update == 4


def test_served_weights_that_are_damaged_cost_their_checkpoint_only(
    world: FileWorld, untouched: list[object]
) -> None:
    """The checkpoint of 3 keeps the weights of version 1, of update 2: they are made again by redo."""
    crash_at(world, "checkpoint.committed", 1)
    assert world.state().published_update == 2
    (committed,) = world.state().checkpoints.values()
    path = world.checkpoint_file(committed.path, "served.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    goes_on_to_the_same_end(world, untouched)
    assert [event.update for event in world.events("CheckpointLost")] == [3]


def test_no_checkpoint_left_where_groups_were_retired_is_refused_with_the_update_named(
    world: FileWorld,
) -> None:
    crash_at(world, "update.committed", 8)
    for committed in world.state().checkpoints.values():
        shutil.rmtree(world.place.folder / "checkpoints" / committed.path)
    with pytest.raises(RunFailedError, match=r"update 1 must be redone, but its groups were deleted"):
        world.run()
    assert [event.update for event in world.events("CheckpointLost")] == [6, 3]
    assert world.state().updates == 8


# a full disk


@pytest.mark.parametrize("full_at", ["group.write.before", "update.committed"])
def test_a_full_disk_fails_the_run_by_name_and_the_same_command_goes_on(
    world: FileWorld, untouched: list[object], monkeypatch: pytest.MonkeyPatch, full_at: str
) -> None:
    """Where a group or a checkpoint is written; the log still takes the reason."""
    reached = 0

    def fills(place: str) -> None:
        nonlocal reached
        reached += place == full_at
        if reached == 3 and place == full_at:
            monkeypatch.setattr(os, "write", no_space)

    def no_space(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with watched(fills), pytest.raises(OSError, match="No space left on device"):
        world.run()
    monkeypatch.undo()
    assert world.state().phase is Phase.FAILED
    assert "No space left" in world.events("RunFailed")[0].error
    kept = set(world.state().files)
    assert kept <= set(world.store().names())
    goes_on_to_the_same_end(world, untouched)


def test_a_disk_that_takes_no_more_of_the_log_stops_training_and_loses_nothing(
    world: FileWorld, untouched: list[object]
) -> None:
    """Report 41: the update that could not be recorded did not happen."""

    def fills(rows: object) -> None:
        if world.state().updates == 3:
            cursor = world.log._cursor  # type: ignore[attr-defined]
            cursor.execute(f"PRAGMA max_page_count = {cursor.execute('PRAGMA page_count').fetchone()[0]}")

    world.on_commit = fills
    with pytest.raises(LogUnavailable, match="the disk is full; make room and run the same command again"):
        world.run()
    world.on_commit = None
    assert not world.state().ended, "nothing more was written, not even the reason"
    assert len(world.learner.executed) <= world.state().updates + 1
    goes_on_to_the_same_end(world, untouched)


def test_stand_in_files_and_real_ones_give_one_ledger(untouched: list[object]) -> None:
    """Guards the tests above: what they compare with is the run itself, not its files."""
    other = World(CONFIG, 16)
    other.run()
    assert [entry[:2] for entry in ledger(other)] == [entry[:2] for entry in untouched]  # type: ignore[index]


def test_a_copied_runs_folder_is_refused_by_the_name_of_its_log(tmp_path: Path) -> None:
    world = FileWorld(tmp_path, CONFIG)
    crash_at(world, "update.committed", 3)
    shutil.copytree(world.place.folder, world.place.folder.with_name("copy"))
    place = Place("copy", world.place.runs_dir)
    with pytest.raises(UserMistake, match="holds the log of run 'sim', not of 'copy'"):
        _outcome_if_over(place, world.prepared, take_over=False)
