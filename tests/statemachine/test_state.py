"""The fold: what it refuses, that a refused event changes nothing, and that parts fold to the whole."""

from __future__ import annotations

import copy
import random

import msgspec
import pytest

from surefoot.statemachine import events as ev
from surefoot.statemachine.errors import IllegalEvent, LogBroken
from surefoot.statemachine.fold_lives import with_changes
from surefoot.statemachine.log import EventRow, build_rows
from surefoot.statemachine.state import RunState, fold
from tests.golden.faulty import faulty_run
from tests.simulation.world import Faults, World, small_config


@pytest.fixture(scope="module")
def rows() -> list[EventRow]:
    """A whole run with two minibatches, publications every second update, workers that die."""
    world = World(
        small_config(
            batch={"prompts": 4, "minibatches": 2},
            sync={"every_updates": 2},
            rollout={"workers": 4, "max_concurrent": 4, "max_attempts": 50},
            checkpoint={"every_updates": 2},
            eval={"every_updates": 2, "size": 2, "source": "object:x"},
        ),
        data_len=40,
        faults=Faults(worker_dies=0.1),
        seed=2,
    )
    world.run()
    return world.rows()


def before(rows: list[EventRow], kind: str, nth: int = 0) -> tuple[RunState, ev.Event]:
    """The state before the n-th event of a type, and that event."""
    seqs = [row.seq for row in rows if row.type == kind]
    return fold(rows[: seqs[nth] - 1]), rows[seqs[nth] - 1].event()


def apply(state: RunState, event: ev.Event) -> None:
    (row,) = build_rows("sim", state.seq, state.hash, state.incarnation, [event], "2026")
    state.apply(row)


def frozen(state: RunState) -> str:
    """Everything a state holds, as text."""
    return repr({name: value for name, value in sorted(vars(state).items()) if name != "_handlers"})


def test_a_fold_in_parts_is_the_fold_of_the_whole(rows: list[EventRow]) -> None:
    whole = fold(rows)
    rng = random.Random(1)
    for _ in range(5):
        cut = rng.randrange(1, len(rows))
        assert frozen(fold(rows[cut:], fold(rows[:cut]))) == frozen(whole)
    assert fold(rows).digest() == whole.digest()


def test_a_copy_folds_on_by_itself(rows: list[EventRow]) -> None:
    """At every event, of every kind: the copy is the same, and its next event is its own."""
    logs = [rows, faulty_run().rows()]
    assert {row.type for log in logs for row in log} == set(ev.EVENT_TYPES)
    for log in logs:
        state = RunState()
        for row in log:
            was, other = frozen(state), state.copy()
            assert frozen(other) == was
            other.apply(row)
            assert frozen(state) == was
            state.apply(row)
            assert frozen(other) == frozen(state)


def test_an_option_of_a_table_that_the_run_did_not_know_is_folded() -> None:
    created = ev.RunCreated(
        config={"seed": 1}, digests={}, data_len=1, rows_filtered=0, objects={}, software={}
    )
    changes = {"later.options": [None, 3], "seed": [1, 2]}
    began = ev.IncarnationBegan(
        incarnation=2, reason=ev.TakeReason.ENDED, host="here", pid=1, config_changes=changes
    )
    assert with_changes(created, began).config == {"seed": 2, "later": {"options": 3}}
    assert created.config == {"seed": 1}


def test_a_missing_row_is_named(rows: list[EventRow]) -> None:
    with pytest.raises(LogBroken, match="event 7 is missing"):
        fold([*rows[:6], *rows[7:]])


def test_a_row_of_an_older_incarnation_is_refused(rows: list[EventRow]) -> None:
    state, _ = before(rows, "UpdateApplied")
    (row,) = build_rows("sim", state.seq, state.hash, 0, [ev.LearnerLost(learner_try=1, because="")], "")
    with pytest.raises(IllegalEvent, match="incarnation 0, and incarnation 1 holds"):
        state.apply(row)


REFUSED = {
    "a prompt out of draw order": (
        "GroupsAdmitted",
        lambda s, e: ev.GroupsAdmitted(groups=[ev.Issue(s.drawn + 1, 1, s.policy_version)]),
        "drawn in order",
    ),
    "more groups than the window holds": (
        "GroupsAdmitted",
        lambda s, e: ev.GroupsAdmitted(
            groups=[ev.Issue(s.drawn + i, 1, s.policy_version) for i in range(s.room() + 1)]
        ),
        "there is room for",
    ),
    "an admission at another version": (
        "GroupsAdmitted",
        lambda s, e: ev.GroupsAdmitted(groups=[ev.Issue(s.drawn, 1, s.policy_version + 1)]),
        "current policy version",
    ),
    "an attempt that is not the next": (
        "GroupsReissued",
        lambda s, e: msgspec.structs.replace(
            e, groups=[msgspec.structs.replace(e.groups[0], attempt=e.groups[0].attempt + 1)]
        ),
        "does not follow",
    ),
    "a group stored under an old attempt": (
        "GroupsStored",
        lambda s, e: msgspec.structs.replace(
            e, groups=[msgspec.structs.replace(e.groups[0], attempt=e.groups[0].attempt + 7)]
        ),
        "not under way",
    ),
    "a file name used before": (
        "GroupsStored",
        lambda s, e: msgspec.structs.replace(e, file=next(iter(s.files))),
        "there already",
    ),
    "another batch than began": (
        "UpdateApplied",
        lambda s, e: msgspec.structs.replace(e, groups=e.groups[::-1]),
        "not the batch",
    ),
    "a group issued again out of a batch that has begun": (
        "UpdateApplied",
        lambda s, e: ev.GroupsReissued(
            groups=[ev.Issue(e.groups[0][0], e.groups[0][1] + 1, s.live[e.groups[0][0]].admission_version)],
            reason=ev.IssueReason.BAD_FILE,
        ),
        "in the batch of update",
    ),
    "a group dropped out of a batch that has begun": (
        "UpdateApplied",
        lambda s, e: ev.GroupsDropped(prompt_indices=[e.groups[0][0]], reason=ev.DropReason.NO_SPREAD),
        "in the batch of update",
    ),
    "an update out of order": (
        "UpdateApplied",
        lambda s, e: msgspec.structs.replace(e, update=e.update + 1),
        "next update",
    ),
    "an optimizer step left out": (
        "UpdateApplied",
        lambda s, e: msgspec.structs.replace(e, steps=e.steps[1:]),
        "optimizer steps from",
    ),
    "a learning rate that is not the schedule's": (
        "UpdateApplied",
        lambda s, e: msgspec.structs.replace(
            e, steps=[msgspec.structs.replace(e.steps[0], learning_rate=0.0), *e.steps[1:]]
        ),
        "the schedule's is",
    ),
    "a result of an older learner try": (
        "UpdateApplied",
        lambda s, e: msgspec.structs.replace(e, learner_try=e.learner_try + 1),
        "another learner try",
    ),
    "a publication out of turn": (
        "WeightsPublished",
        lambda s, e: msgspec.structs.replace(e, version=e.version + 1),
        "as the next version",
    ),
    "a checkpoint of an update that is not in the log": (
        "CheckpointCommitted",
        lambda s, e: msgspec.structs.replace(e, update=s.updates + 1),
        "is not in the log",
    ),
    "a file retired that a redo may need": (
        "FilesRetired",
        lambda s, e: ev.FilesRetired(
            checkpoints=[], group_files=[next(n for n, use in s.files.items() if use.waiting)]
        ),
        "may still be needed",
    ),
    "the last checkpoint retired": (
        "FilesRetired",
        lambda s, e: ev.FilesRetired(checkpoints=[c.path for c in s.checkpoints.values()], group_files=[]),
        "never retired",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_illegal_event_is_refused_and_changes_nothing(case: str, rows: list[EventRow]) -> None:
    kind, spoil, why = REFUSED[case]
    nth = 3 if kind in ("GroupsStored", "UpdateApplied") else 1 if kind == "FilesRetired" else 0
    state, event = before(rows, kind, nth)
    apply(copy.deepcopy(state), event)  # the event itself is legal
    was = frozen(state)
    with pytest.raises(IllegalEvent, match=why):
        apply(state, spoil(state, event))
    assert frozen(state) == was


def test_a_group_over_the_staleness_bound_is_refused(rows: list[EventRow]) -> None:
    state, event = before(rows, "UpdateApplied", 6)
    assert isinstance(event, ev.UpdateApplied)
    group = state.live[event.groups[0][0]]
    assert group.stored is not None
    group.stored = msgspec.structs.replace(group.stored, oldest_versions=[-9, 1])
    with pytest.raises(IllegalEvent, match="the bound is 1"):
        apply(state, event)


def test_every_group_file_is_retired_once_kept_checkpoints_cover_it(rows: list[EventRow]) -> None:
    state = fold(rows)
    assert state.closed
    kept = state.covered_update()
    assert all(use.last_update > kept for use in state.files.values())
    assert set(state.records) == {update for update in range(1, state.updates + 1) if update > kept}
