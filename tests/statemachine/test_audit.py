"""The audit as a whole: right runs pass it, broken rows do not end it, and its report says what there is."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from surefoot.statemachine import audit as audit_module
from surefoot.statemachine.audit import audit
from surefoot.statemachine.audit_findings import CHECKS
from surefoot.statemachine.errors import LogBroken
from surefoot.statemachine.events import (
    EVENT_TYPES,
    Event,
    IssueReason,
    TakeReason,
    UpdateBegan,
    WorkerReplaced,
    WorkersReady,
)
from surefoot.statemachine.folded import folded
from surefoot.statemachine.log import EventRow, RunHead
from surefoot.statemachine.state import RunState, fold

from .audits import detail, failures, report_of
from .scenario import Scenario, whole_run

SHAPES: list[dict[str, Any]] = [
    {},
    {"max_staleness": 0},
    {"max_staleness": 3, "every_updates": 1},
    {"every_updates": 4},
    {"tail": "train", "data_len": 15, "batch_prompts": 4},
    {"tail": "drop", "data_len": 13, "batch_prompts": 4},
    {"minibatches": 1, "passes": 3, "batch_prompts": 1},
    {"epochs": 3, "data_len": 5, "batch_prompts": 4, "max_optimizer_steps": 5},
    {"warmup_steps": 3, "schedule_kind": "linear", "min_ratio": 0.1, "horizon": 40},
    {"group_size": 1},
    {"on_stale": "reissue"},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_right_run_passes_and_the_fold_takes_it_too(shape: dict[str, Any]) -> None:
    scenario = whole_run(**shape)
    assert failures(scenario) == {}
    assert fold(scenario.rows()).closed


@pytest.mark.parametrize("kept", range(1, len(whole_run().entries) + 1))
def test_every_beginning_of_a_right_run_passes(kept: int) -> None:
    """Killed at any event, the log that is left is right, and says that it is open."""
    scenario = whole_run()
    scenario.entries = scenario.entries[:kept]
    report = report_of(scenario)
    assert report.ok
    assert report.totals["ending"] == ("completed" if kept == len(whole_run().entries) else "open")


def eventful() -> Scenario:
    """Killed twice, a learner lost, attempts lost, checkpoints retired, groups dropped and replaced."""
    run = Scenario(data_len=16, max_optimizer_steps=12).begin().admit(5).store(0, 1)
    run.take_over().reissue(IssueReason.INCARNATION, 2, 3, 4).admit().store().update().update().checkpoint()
    run.add(WorkerReplaced(worker=0, because="died")).admit().lose_learner().store(8, 9)
    run.drop(5).admit().store().update().update()
    run.preempt().take_over(TakeReason.ENDED).checkpoint().admit().store()
    return run.update().update().checkpoint().retire().complete()


def test_a_run_that_was_killed_and_went_on_passes() -> None:
    scenario = eventful()
    assert failures(scenario) == {}
    assert fold(scenario.rows()).closed
    totals = report_of(scenario).totals
    assert totals["incarnations"] == 3
    assert totals["learners_lost"] == 1
    assert totals["groups"] == {"admitted": 0, "stored": 0, "trained": 12, "dropped": 1}
    assert (totals["updates"], totals["optimizer_steps"], totals["policy_version"]) == (6, 12, 3)
    assert totals["groups_reissued"] == 3
    assert totals["updates_redone"] == 2
    assert totals["checkpoints_kept"] == [6]
    assert totals["seq"] == len(scenario.entries)


def test_every_check_is_reported_in_order_with_a_detail() -> None:
    report = report_of(whole_run())
    assert [check.id for check in report.checks] == [name for name in CHECKS if name != "fold"]
    assert all(check.detail for check in report.checks)
    compared = audit(whole_run().rows(), folded=lambda: folded(whole_run().rows()))
    assert [check.id for check in compared.checks] == list(CHECKS)


def fold_check(rows: Sequence[EventRow], state: RunState | None = None) -> tuple[bool, str]:
    report = audit(rows, folded=lambda: folded(rows, state))
    (check,) = (check for check in report.checks if check.id == "fold")
    return check.ok, check.detail


def test_the_fold_takes_a_valid_log_and_agrees() -> None:
    rows = eventful().rows()
    assert fold_check(rows) == (True, f"{len(rows)} events taken, in phase Completed")


def test_an_event_that_the_fold_refuses_is_named_and_nothing_after_it() -> None:
    scenario = whole_run()
    began = next(i for i, (_, event) in enumerate(scenario.entries) if isinstance(event, UpdateBegan))
    del scenario.entries[began]
    ok, detail = fold_check(scenario.rows())
    assert not ok
    assert detail.startswith(f"event {began + 1}: ") and detail.count("event ") <= 2


def test_a_fold_that_adds_up_to_something_else_is_said_with_both_values() -> None:
    class Miscounts(RunState):
        def apply(self, row: EventRow, event: Event | None = None) -> Event:
            taken = super().apply(row, event)
            if row.type == "RunCompleted":
                self.optimizer_steps += 1
            return taken

    rows = whole_run().rows()
    steps = fold(rows).optimizer_steps
    ok, detail = fold_check(rows, Miscounts())
    assert not ok
    assert f"optimizer steps: {steps + 1} by the fold, {steps} by the audit" in detail


def test_a_row_that_cannot_be_read_ends_the_folding_and_not_the_audit() -> None:
    rows = whole_run().rows()
    rows[5] = msgspec.structs.replace(rows[5], payload=b"{")
    ok, detail = fold_check(rows)
    assert not ok and "event 6" in detail


def test_the_report_is_plain_json() -> None:
    report = report_of(eventful())
    decoded = msgspec.json.decode(msgspec.json.encode(report))
    assert decoded["ok"] is True
    assert {"updates", "optimizer_steps", "policy_version", "groups", "incarnations"} <= decoded[
        "totals"
    ].keys()


def test_every_event_type_is_audited() -> None:
    auditor = audit_module.Auditor()
    assert set(auditor._handlers) == set(EVENT_TYPES)


def test_rows_are_looked_at_once_and_not_kept() -> None:
    rows = whole_run().rows()
    seen = 0

    def stream() -> Iterator[EventRow]:
        nonlocal seen
        for row in rows:
            seen += 1
            yield row

    assert audit(stream()).ok
    assert seen == len(rows)


# -- the chain ----------------------------------------------------------------------------------------


def edited(row: EventRow, **changes: Any) -> EventRow:
    return msgspec.structs.replace(row, **changes)


def failed_ids(rows: list[EventRow]) -> dict[str, str]:
    return {check.id: check.detail for check in audit(rows).checks if not check.ok}


@pytest.mark.parametrize(
    "changes",
    [
        {"time": "2026-01-02T00:00:00Z"},
        {"hash": "0" * 64},
        {"hash": "no hash"},
        {"hash": ""},
    ],
    ids=str,
)
def test_an_edited_row_is_found_and_named(changes: dict[str, Any]) -> None:
    rows = whole_run().rows()
    rows[9] = edited(rows[9], **changes)
    failed = failed_ids(rows)
    assert list(failed) == ["chain"]
    assert "event 10" in failed["chain"]


def test_an_edited_payload_is_found_though_it_still_makes_sense() -> None:
    rows = whole_run().rows()
    stored = next(row for row in rows if row.type == "GroupsStored")
    rows[stored.seq - 1] = edited(stored, payload=stored.payload.replace(b'"digest":"x"', b'"digest":"y"'))
    failed = failed_ids(rows)
    assert list(failed) == ["chain"]
    assert f"event {stored.seq}" in failed["chain"]


def test_a_missing_row_is_named() -> None:
    rows = whole_run().rows()
    kept = next(row for row in rows if row.type == "UpdateBegan")
    failed = failed_ids([row for row in rows if row.seq != kept.seq])
    assert f"event {kept.seq}: the row is missing" in failed["chain"]


def test_a_row_that_stands_twice_is_named() -> None:
    rows = whole_run().rows()
    failed = failed_ids([*rows[:4], rows[3], *rows[4:]])
    assert "event 4" in failed["chain"]


def test_a_row_of_another_run_is_named() -> None:
    rows = whole_run().rows()
    rows[5] = edited(rows[5], run_id="other")
    assert "event 6: the row is of run 'other'" in failed_ids(rows)["chain"]


def test_an_empty_log_is_no_run() -> None:
    failed = failed_ids([])
    assert list(failed) == ["chain"]
    assert "empty" in failed["chain"]


def test_a_database_that_cannot_go_on_reading_is_a_broken_chain() -> None:
    rows = whole_run().rows()

    def stream() -> Iterator[EventRow]:
        yield from rows[:7]
        raise LogBroken("event 8 is torn", seq=8)

    report = audit(stream())
    assert not report.ok
    assert detail(report, "chain") == "event 8: event 8 is torn"
    assert report.totals["seq"] == 7


def head_of(rows: list[EventRow], **changes: Any) -> RunHead:
    head = RunHead("scenario", rows[-1].seq, rows[-1].hash, 1, None, None, True)
    return msgspec.structs.replace(head, **changes)


def test_a_log_that_ends_where_its_run_says_passes() -> None:
    rows = whole_run().rows()
    assert audit(rows, head_of(rows)).ok


def test_rows_cut_off_at_the_end_are_found_by_the_head() -> None:
    rows = whole_run().rows()
    report = audit(rows[:-1], head_of(rows))
    assert [check.id for check in report.checks if not check.ok] == ["chain"]
    assert f"event {len(rows)}" in detail(report, "chain")


def test_a_last_row_replaced_with_a_whole_chain_is_found_by_the_head() -> None:
    rows = whole_run().rows()
    assert "chain" in [c.id for c in audit(rows, head_of(rows, head_hash="f" * 64)).checks if not c.ok]


def test_a_head_of_another_incarnation_is_found() -> None:
    rows = whole_run().rows()
    report = audit(rows, head_of(rows, incarnation=2))
    assert [check.id for check in report.checks if not check.ok] == ["incarnations"]


# -- rows that cannot be read -------------------------------------------------------------------------


def test_an_unknown_type_is_named_and_the_audit_goes_on() -> None:
    scenario = whole_run()
    scenario.insert_after(WorkersReady, 0, WorkerReplaced(worker=0, because="x"))
    rows = scenario.rows()
    place = scenario.seq(WorkerReplaced) - 1
    rows[place] = edited(rows[place], type="WorkerPromoted")
    failed = failed_ids(rows)
    assert set(failed) == {"chain", "events"}
    assert f"event {place + 1}" in failed["events"]
    assert "WorkerPromoted" in failed["events"]


@pytest.mark.parametrize("payload", [b"", b"{", b"null", b"\xff\xfe", b"[1,2,3]", b'{"update":"x"}'])
def test_a_torn_payload_is_named_and_the_audit_goes_on(payload: bytes) -> None:
    rows = whole_run().rows()
    ready = next(row for row in rows if row.type == "CheckpointCommitted")
    rows[ready.seq - 1] = edited(ready, payload=payload)
    report = audit(rows)
    failed = {check.id: check.detail for check in report.checks if not check.ok}
    assert f"event {ready.seq}" in failed["chain"]
    assert f"event {ready.seq}" in failed["events"]
    assert report.totals["updates"] == 6


def test_only_the_first_violations_are_shown_and_the_rest_counted() -> None:
    scenario = whole_run()
    rows = [edited(row, time="later") for row in scenario.rows()]
    (chain,) = [check for check in audit(rows).checks if check.id == "chain"]
    assert chain.detail.count("event ") == 3
    assert chain.detail.endswith(f"and {len(rows) - 3} more")


def spoilt(rows: list[EventRow], rng: random.Random) -> list[EventRow]:
    """Rows dropped, moved, doubled and torn at random, in fields of every type."""
    rows = list(rows)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(rows))
        row = rows[place]
        kind = rng.randrange(6)
        if kind == 0:
            del rows[place]
        elif kind == 1:
            rows.insert(rng.randrange(len(rows) + 1), row)
        elif kind == 2:
            cut = rng.randrange(len(row.payload) + 1)
            rows[place] = edited(row, payload=row.payload[:cut])
        elif kind == 3:
            digits = [i for i, byte in enumerate(row.payload) if chr(byte).isdigit()]
            if digits:
                at = rng.choice(digits)
                number = rng.choice([b"7", b"99999999999", b"-3", b"1e300"])
                rows[place] = edited(row, payload=row.payload[:at] + number + row.payload[at + 1 :])
        elif kind == 4:
            rows[place] = edited(row, type=rng.choice(list(EVENT_TYPES)))
        else:
            rows[place] = edited(
                row, **{rng.choice(["seq", "incarnation", "schema"]): rng.choice([-1, 0, 2, 10**12])}
            )
        if not rows:
            break
    return rows


@pytest.mark.parametrize("seed", range(300))
def test_no_broken_log_ends_the_audit(seed: int) -> None:
    rng = random.Random(seed)
    rows = eventful().rows()
    broken = spoilt(rows, rng)
    assert audit(broken).ok == (broken == rows)
