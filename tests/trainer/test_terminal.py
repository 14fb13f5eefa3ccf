"""Driving from a terminal: one signal asks, the exit code tells how it ended, the curve is always drawn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.statemachine.errors import RunFailedError
from surefoot.statemachine.phases import Phase
from surefoot.trainer.cli import main
from surefoot.trainer.config import load_config
from surefoot.trainer.outcome import Outcome, unwritten_outcome
from surefoot.trainer.places import Place
from surefoot.trainer.terminal import drive

from .stories import BASE, Story


class StandIn:
    """A run that ends as it is told to, or once it is asked to stop."""

    ends: Phase | None = Phase.COMPLETED
    fails = False
    signals = 0
    hangs = False  # its start, as that of a Ray that does not answer
    preempted: list[str]
    started: tuple[Any, dict[str, Any]]  # the config and the options that the last start was given

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, config: Any, **options: Any) -> AsyncIterator[StandIn]:
        run = cls()
        cls.preempted, cls.started = [], (config, options)
        if cls.hangs:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        for row in Story().began().updated().rows:
            for listener in options["listeners"]:
                listener(row, row.event(), Story().began().state)
        for _ in range(cls.signals):
            os.kill(os.getpid(), signal.SIGTERM)
        options["waiting"]("building the parts")
        yield run

    async def outcome(self) -> Outcome:
        if self.fails:
            raise RunFailedError("prompt 9 failed 3 times")
        phase = self.ends
        if phase is None:
            await self._asked.wait()
            phase = Phase.PREEMPTED
        return Outcome(phase, 1, 1, 1, f"is {phase}")

    async def preempt(self, because: str) -> Outcome:
        self.preempted.append(because)
        self._asked.set()
        return await self.outcome()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("surefoot.trainer.run.Run", StandIn)
    place = Place("a")
    Story("a").began().updated().save(place)
    return place


def driven(place: Place) -> int:
    return drive(load_config(BASE), place, take_over=False, accept_divergence=False)


DEFAULTS = {"name": "a", "runs_dir": Path("runs"), "db": None, "take_over": False, "accept_divergence": False}


@pytest.mark.parametrize(
    ("arguments", "arrives"),
    [
        ([], {}),
        (["--run", "b"], {"name": "b"}),
        (["--new"], {"name": "a-2"}),
        (["--new", "--run", "b"], {"name": "b"}),
        (["--take-over"], {"take_over": True}),
        (["--accept-divergence"], {"accept_divergence": True}),
        (["--runs-dir", "elsewhere"], {"runs_dir": Path("elsewhere")}),
        (["--runs-dir", "elsewhere", "--new"], {"runs_dir": Path("elsewhere")}),
        (["--db", "sqlite:///shared.db"], {"db": "sqlite:///shared.db"}),
        (["--db", "sqlite:///shared.db", "--new"], {"db": "sqlite:///shared.db"}),  # where no name is taken
        (["--set", "preempt.grace_seconds=7"], {}),
    ],
)
def test_every_option_of_train_reaches_the_run(
    place: Place, arguments: list[str], arrives: dict[str, Any]
) -> None:
    Path("elsewhere").mkdir()
    Path("a.toml").write_text(
        'data = { source = "reasoning_gym:chain_sum", size = 16 }\n'
        'model.path = "model"\nbatch.prompts = 4\npreempt.grace_seconds = 9\n'
    )
    assert main(["train", "a.toml", *arguments]) == 0
    config, options = StandIn.started
    assert {name: options[name] for name in DEFAULTS} == DEFAULTS | arrives
    assert set(options) == set(DEFAULTS) | {"listeners", "waiting"}
    assert config.batch.prompts == 4
    assert config.preempt.grace_seconds == (7 if "--set" in arguments else 9)


@pytest.mark.parametrize(
    ("phase", "code"), [(Phase.COMPLETED, 0), (Phase.STOPPED, 3), (Phase.FAILED, 1), (Phase.PREEMPTED, 75)]
)
def test_the_exit_code_says_how_the_run_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], phase: Phase, code: int
) -> None:
    monkeypatch.setattr(StandIn, "ends", phase)
    assert driven(place) == code
    out = capsys.readouterr().out
    assert f"run a is {phase}" in out and "learning curve: runs/a/curve.png" in out
    assert (place.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [line for line in out.splitlines() if line.startswith("update ")]
    assert "building the parts" in out.splitlines()


def test_a_run_without_an_update_has_no_curve(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StandIn, "ends", Phase.PREEMPTED)
    place = Place("early")
    Story("early", ["eval.every_updates=1"]).began().evaluated(0.4).save(place)
    assert driven(place) == 75
    assert "curve" not in capsys.readouterr().out
    assert not place.curve.exists()


def test_a_signal_asks_the_run_to_stop(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StandIn, "ends", None)
    monkeypatch.setattr(StandIn, "signals", 1)
    before = signal.getsignal(signal.SIGTERM)
    assert driven(place) == 75
    assert len(StandIn.preempted) == 1
    answered = "asked to stop: ending within 30 s; ask again to end at once"
    assert capsys.readouterr().out.count(answered) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, signal\n"
        "from surefoot.trainer.terminal import _asked_to_stop\n"
        "async def whole():\n"
        "    with _asked_to_stop() as asked:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        await asked.wait()\n"
        "        print('asked', flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(whole())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "asked\n", "")


def test_a_run_that_fails_has_its_curve_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "fails", True)
    with pytest.raises(RunFailedError):
        driven(place)
    assert (place.folder / "curve.png").exists()


def test_a_signal_while_the_run_is_being_started_is_obeyed_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StandIn, "hangs", True)
    assert driven(place) == 75
    assert "while it started: run it again" in capsys.readouterr().out


def test_a_curve_that_cannot_be_drawn_changes_no_exit_code(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("surefoot.trainer.terminal.draw_curve", full)
    assert driven(place) == 0
    assert "the learning curve could not be drawn: [Errno 28]" in capsys.readouterr().err


def test_a_stop_that_the_log_could_not_be_told_of_is_code_75_and_the_last_line_says_so(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def outcome(run: StandIn) -> Outcome:
        return unwritten_outcome(Story().began().updated().state, "the server is away")

    def drawn(*_: Any) -> None:
        raise AssertionError("the log was read, though its database is away")

    monkeypatch.setattr(StandIn, "outcome", outcome)
    monkeypatch.setattr("surefoot.trainer.terminal._curve", drawn)
    assert driven(place) == 75
    last = capsys.readouterr().out.splitlines()[-1]
    assert "RunPreempted could not be written: the server is away" in last
    assert "the same command goes on with the run" in last


HANGS = """
import asyncio, contextlib, os, signal, sys, threading, time
from surefoot.trainer import run, terminal
from surefoot.trainer.config import load_config
from surefoot.trainer.outcome import Outcome, unwritten_outcome
from surefoot.statemachine.phases import Phase
from surefoot.trainer.places import Place

class StandIn:
    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, config, **options):
        yield cls()
    async def outcome(self):
        os.kill(os.getpid(), signal.SIGTERM)
        await asked.wait()
        {hangs}
        return Outcome(Phase.{phase}, 1, 1, 1, "has ended")
    async def preempt(self, because):
        asked.set()
        return Outcome(Phase.PREEMPTED, 1, 1, 1, "")

run.Run = StandIn
asked = asyncio.Event()
config = load_config({base!r}, ["preempt.grace_seconds=2"])
sys.exit(terminal.drive(config, Place("a"), take_over=False, accept_divergence=False))
"""


@pytest.mark.parametrize(
    ("hangs", "phase", "code", "said"),
    [
        ("time.sleep(60)", "PREEMPTED", 75, "something in it hangs: RunPreempted may not have been written"),
        ("threading.Thread(target=time.sleep, args=(60,), name='surefoot-log').start()", "COMPLETED", 0, ""),
    ],
)
def test_what_hangs_does_not_keep_the_process_beyond_the_grace_time(
    tmp_path: Path, hangs: str, phase: str, code: int, said: str
) -> None:
    """The loop itself, and a thread that Python would wait for at its end."""
    program = HANGS.format(hangs=hangs, phase=phase, base=BASE)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr and ("has ended" in done.stdout) is (code == 0)


LATE = """
import asyncio, contextlib, os, signal, sys, threading, time
from surefoot.statemachine.errors import RunFailedError
from surefoot.statemachine.phases import Phase
from surefoot.trainer import run, terminal
from surefoot.trainer.config import load_config
from surefoot.trainer.outcome import Outcome
from surefoot.trainer.places import Place

def ask(after=0.0):
    threading.Timer(after, os.kill, (os.getpid(), signal.SIGTERM)).start()

class StandIn:
    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, config, **options):
        yield cls()
    async def outcome(self):
        {does}
    async def preempt(self, because):
        asked.set()
        return Outcome(Phase.PREEMPTED, 1, 1, 1, "")

asked = asyncio.Event()

async def last():
    try:
        await asyncio.Event().wait()
    finally:  # as the loop is closed
        os.kill(os.getpid(), signal.SIGTERM)

run.Run = StandIn
config = load_config({base!r}, ["preempt.grace_seconds=2"])
try:
    code = terminal.drive(config, Place("a"), take_over=False, accept_divergence=False)
except RunFailedError as error:
    print(error, file=sys.stderr, flush=True)
    code = 1
sys.exit(code)
"""
COMPLETED = 'return Outcome(Phase.COMPLETED, 1, 1, 1, "has ended")'
FAILED = 'raise RunFailedError("a prompt failed")'
LAST = "self.last = asyncio.ensure_future(last()); await asyncio.sleep(0)"


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        (f"{LAST}; {COMPLETED}", 0, "run a has ended"),
        (f"{LAST}; {FAILED}", 1, "a prompt failed"),
        ("ask(); ask(0.5); time.sleep(60)", -signal.SIGTERM, ""),
        ("ask(); time.sleep(60)", 75, "something in it hangs"),
        (
            "ask(); await asked.wait(); "
            f"threading.Thread(target=time.sleep, args=(60,), name='surefoot-files').start(); {FAILED}",
            1,
            "a prompt failed",
        ),
    ],
    ids=["completed", "failed", "a loop that hangs, asked twice", "asked once", "failed, and a thread hangs"],
)
def test_a_signal_at_the_end_and_one_that_a_loop_that_hangs_cannot_hear(
    tmp_path: Path, does: str, code: int, said: str
) -> None:
    program = LATE.format(does=does, base=BASE)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
