"""`python -m tests.golden.faulty FOLDER`: write a golden log of a run in which everything went wrong once.

A real run's log holds the kinds of events that a good day brings; this one, made by hand, holds the others.
Run it only for a schema that is being released: a log that is there already stays as it was written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from surefoot.statemachine.events import (
    AnswerRefused,
    AttemptFailed,
    CheckpointLost,
    IncarnationBegan,
    IssueReason,
    RunCreated,
    TakeReason,
    UpdatesRedone,
    WeightsRemade,
    WorkerReplaced,
)
from surefoot.statemachine.liveness import DriverIdentity
from surefoot.statemachine.sqllog import open_log
from tests.statemachine.scenario import Scenario

DRIVER = DriverIdentity(host="host", pid=100, process_start="0")


def faulty_run() -> Scenario:
    """Twelve prompts, of which one has no spread, so that five of six updates can be: three lives."""
    run = Scenario().begin().admit()
    run.add(AttemptFailed(prompt_index=0, attempt=1, reason=IssueReason.FAILED, error="the reward raised"))
    run.reissue(IssueReason.FAILED, 0)
    run.add(
        AnswerRefused(prompt_index=0, attempt=1, current_attempt=2, because="another attempt counts"),
        AttemptFailed(prompt_index=1, attempt=1, reason=IssueReason.WORKER_LOST, error="its worker died"),
        WorkerReplaced(worker=0, because="killed"),
    )
    run.reissue(IssueReason.WORKER_LOST, 1).store().update().update().checkpoint()
    run.lose_learner().preempt()

    run.take_over(TakeReason.DEAD, ready=False)
    ((path, update),) = run.checkpoints.items()
    run.checkpoints.clear()
    run.add(CheckpointLost(update=update, path=path, because="torn")).redo()
    run.change(UpdatesRedone, -1, same_execution=False)
    run.add(WeightsRemade(version=1, update=2, digest="w2-again", recorded_digest="w2")).ready()
    run.update().fail()

    run.take_over(TakeReason.DEAD).admit().store(8, rewards=[1.0, 1.0]).drop(8)
    return run.work(2).stop()


def write(folder: Path) -> None:
    """The log as its database writes it, and what is known of the run."""
    run = faulty_run()
    rows = run.rows()
    folder.mkdir(parents=True)
    log = open_log(
        f"sqlite:///{folder / 'log.db'}", migrate=True, now=lambda: rows[0].time, lives=lambda driver: False
    )
    name = rows[0].run_id
    try:
        for row in rows:
            event = row.event()
            if isinstance(event, RunCreated):
                head = log.create(name, event, DRIVER)
            elif isinstance(event, IncarnationBegan):
                head = log.take_over(name, DRIVER) if event.incarnation > 1 else log.head(name)
            else:
                log.append(name, row.seq - 1, row.incarnation, [row])
                head = log.head(name)
        log.release(name, run.incarnation)
    finally:
        log.close()
    assert (head.head_seq, head.head_hash) == (rows[-1].seq, rows[-1].hash)
    facts = {
        "seq": len(rows),
        "head_hash": rows[-1].hash,
        "updates": run.updates,
        "optimizer_steps": run.optimizer_steps,
        "policy_version": run.policy_version,
        "incarnations": run.incarnation,
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
