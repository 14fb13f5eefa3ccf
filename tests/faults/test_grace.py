"""SIGTERM while what is not ours hangs, Ray's head or the database: the run ends within its grace time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from ..servers import postgres_server
from .lives import Life, RealRun, gone
from .small import make_small

GRACE_SECONDS = 10.0

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run that is long enough to be still at it when the signal comes."""
    return make_small(tmp_path, rows=200, extra=f"[preempt]\ngrace_seconds = {GRACE_SECONDS:g}\n")


def head(life: Life) -> list[psutil.Process]:
    """The daemons of the Ray that it has started."""
    found = [process for process in life.below() if process.name() in ("gcs_server", "raylet")]
    assert len(found) == 2
    return found


def ended(life: Life) -> tuple[int, float, list[psutil.Process]]:
    """Ask a driver that stands to stop, and let it go on: its exit code, the seconds that it took, and what
    it has left behind."""
    below, asked = life.below(), time.monotonic()
    os.kill(life.process.pid, signal.SIGTERM)
    life.go_on()
    code = life.wait(10 * GRACE_SECONDS)
    return code, time.monotonic() - asked, gone(below, 1.0)


def test_a_head_of_ray_that_hangs_keeps_no_run_that_is_asked_to_stop(config: Path, tmp_path: Path) -> None:
    run = RealRun(config, tmp_path / "runs")
    life = run.stand("log.append.after@UpdateApplied:2")
    for process in head(life):
        process.suspend()
    code, seconds, left = ended(life)
    assert (code, left) == (75, []), run.output()
    assert seconds <= GRACE_SECONDS
    assert [row.type for row in run.rows()][-1] == "RunPreempted"
    state = run.state()
    assert state.updates in state.checkpoints, "ranks do not need the head to save"


def test_a_database_server_that_hangs_keeps_no_run_that_is_asked_to_stop(
    config: Path, tmp_path: Path
) -> None:
    with postgres_server() as server:
        run = RealRun(config, tmp_path / "runs", db=server.url)
        life = run.stand("log.append.after@UpdateApplied:2")
        with server.frozen():
            code, seconds, left = ended(life)
        assert (code, left) == (75, []), run.output()
        assert seconds <= GRACE_SECONDS
        last = run.output().splitlines()[-1]
        assert "RunPreempted could not be written" in last
        assert "the same command goes on with the run" in last
        assert run.state().incarnation == 1 and not run.state().ended
        assert run.audit().ok
