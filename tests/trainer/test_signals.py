"""A signal to a process whose run is not under way."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.trainer.signals import SIGNALS, AtSignal

from .stories import BASE

BEFORE = """
import os, signal
from surefoot.trainer import cli, config
config.load_config = lambda *_: os.kill(os.getpid(), signal.{name})
raise SystemExit(cli.main(["train", "a.toml"]))
"""

AFTER = """
import contextlib, os, signal
from surefoot.statemachine.phases import Phase
from surefoot.trainer import run, terminal
from surefoot.trainer.config import load_config
from surefoot.trainer.outcome import Outcome
from surefoot.trainer.places import Place

class StandIn:
    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, config, **options):
        options["listeners"][0](None, None, None)
        yield cls()
    async def outcome(self):
        return Outcome(Phase.{phase}, 1, 1, 1, "has ended")

run.Run = StandIn
terminal._curve = lambda place: os.kill(os.getpid(), signal.SIGTERM)
raise SystemExit(terminal.drive(load_config({base!r}), Place("a"), take_over=False, accept_divergence=False))
"""


def lived(program: str, folder: Path) -> tuple[int, str]:
    """The exit code of a process, and what it said of an error."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_before_the_run_has_begun_it_is_a_preemption(tmp_path: Path, name: str) -> None:
    code, said = lived(BEFORE.format(name=name), tmp_path)
    assert (code, said) == (75, "surefoot: asked to stop before the run had begun: run it again\n")


@pytest.mark.parametrize(("phase", "code"), [("COMPLETED", 0), ("STOPPED", 3)])
def test_once_the_run_has_ended_it_changes_nothing_about_how(tmp_path: Path, phase: str, code: int) -> None:
    assert lived(AFTER.format(phase=phase, base=BASE), tmp_path) == (code, "surefoot: run a has ended\n")


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with AtSignal(75, ""):
        assert all(signal.getsignal(number) not in before for number in SIGNALS)
    assert [signal.getsignal(number) for number in SIGNALS] == before
