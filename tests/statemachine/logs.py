"""What the tests of the log build on: events, drivers, and other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.statemachine.events import Event, LearnerLost, RunCompleted, RunCreated, RunStopped
from surefoot.statemachine.liveness import DriverIdentity
from surefoot.statemachine.log import EventLog, EventRow, RunHead, build_rows, utc_now

ROOT = Path(__file__).parents[2]

FIRST = RunCreated(config={}, digests={}, data_len=8, rows_filtered=0, objects={}, software={})

HERE = DriverIdentity.here()
ELSEWHERE = DriverIdentity("another-host.invalid", 4242, "some-boot/pid:[1]/99")


def note(text: str = "nothing", number: int = 1) -> Event:
    """Some event that says no more than its text."""
    return LearnerLost(learner_try=number, because=text)


def ending(kind: type[RunCompleted] | type[RunStopped]) -> Event:
    """An event with which a run is over for good."""
    if kind is RunCompleted:
        return RunCompleted(updates=1, optimizer_steps=1, policy_version=1, weights_digest="x")
    return RunStopped(
        updates=1,
        optimizer_steps=1,
        policy_version=1,
        weights_digest="x",
        updates_short=1,
        optimizer_steps_short=1,
        because="no prompt is left",
    )


def rows_after(head: RunHead, *events: Event, time: str | None = None) -> list[EventRow]:
    """The rows that put events after a head."""
    return build_rows(head.run_id, head.head_seq, head.head_hash, head.incarnation, events, time or utc_now())


def append(log: EventLog, run_id: str, *events: Event) -> list[EventRow]:
    """Append events at the run's head, as its present driver."""
    head = log.head(run_id)
    rows = rows_after(head, *events)
    log.append(run_id, head.head_seq, head.incarnation, rows)
    return rows


def texts(rows: Sequence[EventRow]) -> list[str]:
    """The texts of those rows that are notes."""
    events = [row.event() for row in rows]
    return [event.because for event in events if isinstance(event, LearnerLost)]


def dead_driver() -> DriverIdentity:
    """A process of this host that is no more."""
    child = subprocess.run(
        [sys.executable, "-c", "from surefoot.statemachine.liveness import DriverIdentity as D\n"
         "d = D.here()\nprint(d.host, d.pid, d.process_start, sep='\\n')"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    host, pid, start = child.stdout.splitlines()
    return DriverIdentity(host, int(pid), start)


def start_process(role: str, *arguments: object, crashpoint: str = "") -> subprocess.Popen[str]:
    """Another process that plays a role of `log_roles`; its standard input keeps it waiting at the gate."""
    environment = {**os.environ, "SUREFOOT_CRASHPOINT": crashpoint}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.statemachine.log_roles", role, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=environment,
    )  # fmt: skip


def run_together(*processes: subprocess.Popen[str]) -> list[str]:
    """Open the gate for all at once and wait; their outputs. Fails if one ends badly."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs: list[str] = []
    for process in processes:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        outputs.append(out)
    return outputs


def run_alone(role: str, *arguments: object, crashpoint: str = "") -> subprocess.CompletedProcess[Any]:
    """One such process, from beginning to end, however it ends."""
    process = start_process(role, *arguments, crashpoint=crashpoint)
    out, err = process.communicate("go\n", timeout=100)
    return subprocess.CompletedProcess([role], process.returncode, out.removeprefix("ready\n"), err)
