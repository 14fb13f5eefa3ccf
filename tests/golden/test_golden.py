"""Logs of every released schema, as they were written: each opens, upgrades, folds and audits for good."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from surefoot.statemachine.audit import audit
from surefoot.statemachine.events import EVENT_TYPES
from surefoot.statemachine.log import verify_chain
from surefoot.statemachine.schema import SCHEMA_REVISION, VERSION_TABLE
from surefoot.statemachine.sqllog import open_log
from surefoot.statemachine.state import fold

FOLDER = Path(__file__).parent
MIGRATIONS = FOLDER.parents[1] / "migrations" / "versions"
VERSIONS = sorted(path.parent.name for path in FOLDER.glob("*/log.db"))


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, object]]:
    """A copy of the log, and what was known of the run when it was written."""
    source = FOLDER / request.param
    shutil.copy(source / "log.db", tmp_path / "log.db")
    return tmp_path / "log.db", json.loads((source / "facts.json").read_text())


def asked(query: str) -> set[str]:
    """What the golden databases answer, as they lie there."""
    answers: set[str] = set()
    for version in VERSIONS:
        url = f"file:{FOLDER / version / 'log.db'}?mode=ro&immutable=1"
        with closing(sqlite3.connect(url, uri=True)) as database:
            answers |= {answer for (answer,) in database.execute(query)}
    return answers


def test_there_is_a_log_of_every_schema() -> None:
    revisions = {path.name.partition("_")[0] for path in MIGRATIONS.glob("[0-9]*.py")}
    assert SCHEMA_REVISION in revisions
    assert asked(f"SELECT version_num FROM {VERSION_TABLE}") == revisions


def test_every_kind_of_event_is_in_a_log() -> None:
    assert asked("SELECT DISTINCT type FROM events") == set(EVENT_TYPES)


@pytest.mark.parametrize("upgraded", [False, True])
def test_a_golden_log_reads_folds_and_audits(golden: tuple[Path, dict[str, object]], upgraded: bool) -> None:
    path, facts = golden
    log = open_log(f"sqlite:///{path}", migrate=upgraded)
    try:
        (head,) = log.runs()
        rows = list(log.read(head.run_id))
    finally:
        log.close()
    verify_chain(rows)
    state = fold(rows)
    assert rows[-1].hash == facts["head_hash"]
    assert (state.seq, state.updates, state.optimizer_steps, state.policy_version, state.incarnation) == (
        facts["seq"],
        facts["updates"],
        facts["optimizer_steps"],
        facts["policy_version"],
        facts["incarnations"],
    )
    report = audit(rows, head)
    assert report.ok, [check for check in report.checks if not check.ok]


def test_the_list_of_event_types_grows_by_decision_alone() -> None:
    assert {name: kind.schema for name, kind in sorted(EVENT_TYPES.items())} == dict.fromkeys(
        [
            "AnswerRefused",
            "AttemptFailed",
            "BudgetResolved",
            "CheckpointCommitted",
            "CheckpointLost",
            "EvaluationDone",
            "FilesRetired",
            "GroupsAdmitted",
            "GroupsDropped",
            "GroupsReissued",
            "GroupsStored",
            "IncarnationBegan",
            "LearnerLost",
            "RunCompleted",
            "RunCreated",
            "RunFailed",
            "RunPreempted",
            "RunStopped",
            "UpdateApplied",
            "UpdateBegan",
            "UpdatesRedone",
            "WeightsPublished",
            "WeightsRemade",
            "WorkerReplaced",
            "WorkersReady",
        ],
        1,
    )
