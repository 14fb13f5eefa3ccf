"""Real lives of a run: the command line as a process group of its own, killed in all the ways there are."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from surefoot.statemachine.audit import AuditReport, audit
from surefoot.statemachine.errors import RunUnknown
from surefoot.statemachine.log import EventRow
from surefoot.statemachine.state import RunState, fold
from surefoot.trainer.places import Place

LIFE_SECONDS = 300.0


@dataclass(frozen=True)
class RealRun:
    """One run of the command line: its config, its place."""

    config: Path
    runs_dir: Path
    name: str = "small"
    db: str | None = None  # a shared database for the log

    @property
    def _where(self) -> list[str]:
        return ["--runs-dir", str(self.runs_dir), *(["--db", self.db] if self.db else [])]

    @property
    def _reached(self) -> Path:
        return self.runs_dir / f"{self.name}.reached"

    def copied_to(self, runs_dir: Path) -> RealRun:
        """The same run in another folder of runs, which is not there yet, as far as it has come."""
        shutil.copytree(self.runs_dir, runs_dir)
        return replace(self, runs_dir=runs_dir)

    def start(self, *arguments: str, crashpoint: str | None = None) -> Life:
        """Begin a life: `surefoot train`, in a session of its own."""
        environment = {key: value for key, value in os.environ.items() if key != "SUREFOOT_CRASHPOINT"}
        environment["SUREFOOT_CRASHPOINTS_REACHED"] = str(self._reached.absolute())
        if crashpoint is not None:
            environment["SUREFOOT_CRASHPOINT"] = crashpoint
        command = [
            str(Path(sys.executable).with_name("surefoot")),
            "train",
            str(self.config),
            "--run",
            self.name,
            *self._where,
            *arguments,
        ]
        self.runs_dir.mkdir(parents=True, exist_ok=True)
        output = (self.runs_dir / f"{self.name}.out").open("a")
        return Life(
            self,
            subprocess.Popen(
                command,
                cwd=self.config.parent,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ),
        )

    def stand(self, crashpoints: str, *arguments: str) -> Life:
        """Begin a life that stands at each of these places (`name:n,...`); on return, at the first."""
        life = self.start(*arguments, crashpoint=crashpoints.replace(",", ":stop,") + ":stop")
        assert life.stands(), self.output()
        return life

    def live(self, *arguments: str, crashpoint: str | None = None) -> int:
        """A whole life; its exit code (-9: killed itself at the crash point)."""
        return self.start(*arguments, crashpoint=crashpoint).wait()

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command of surefoot on this run's folder, to its end."""
        words = [
            str(Path(sys.executable).with_name("surefoot")),
            *arguments,
            *self._where,
        ]
        return subprocess.run(
            words, cwd=self.config.parent, capture_output=True, text=True, timeout=LIFE_SECONDS, check=False
        )

    def rows(self) -> list[EventRow]:
        """The log; empty if there is none yet."""
        place = Place(self.name, self.runs_dir, self.db)
        try:
            if not place.exists():
                return []
            with place.reading() as log:
                return list(log.read(self.name))
        except RunUnknown:  # its database is there before it is
            return []

    def state(self) -> RunState:
        return fold(self.rows())

    def audit(self) -> AuditReport:
        return audit(self.rows())

    def output(self) -> str:
        """What all lives so far have printed."""
        return (self.runs_dir / f"{self.name}.out").read_text()

    def reached(self) -> set[str]:
        """The crash points that any process of any life so far has reached."""
        return set(self._reached.read_text().split())

    def events(self, kind: str) -> list[Any]:
        return [row.event() for row in self.rows() if row.type == kind]

    def ledger(self) -> list[Any]:
        """Groups, learning rates, losses and gradient norms of every update, and the last weights."""
        updates = [
            (
                event.update,
                [index for index, _ in event.groups],
                [(s.optimizer_step, s.learning_rate, s.loss, s.grad_norm) for s in event.steps],
            )
            for event in self.events("UpdateApplied")
        ]
        ends = [*self.events("RunCompleted"), *self.events("RunStopped")]
        return [*updates, [event.weights_digest for event in ends]]

    def accounts(self) -> list[Any]:
        """What the ledger shares with that of another kind of machine: groups, steps, learning rates."""
        return [
            (update, groups, [step[:2] for step in steps]) for update, groups, steps in self.ledger()[:-1]
        ]


@dataclass(frozen=True)
class Life:
    """One process, and everything below it."""

    run: RealRun
    process: subprocess.Popen[bytes]

    def wait(self, seconds: float = LIFE_SECONDS) -> int:
        """The exit code. Raises TimeoutExpired, after ending it."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def stands(self, seconds: float = LIFE_SECONDS) -> bool:
        """Wait until it stands at a crash point armed with `stop`. False: it has ended without, or is killed
        because the time is up."""
        with ThreadPoolExecutor(1) as waiting:
            news = os.WSTOPPED | os.WEXITED | os.WNOWAIT
            child = waiting.submit(os.waitid, os.P_PID, self.process.pid, news)
            try:
                said = child.result(seconds)
            except TimeoutError:
                self.kill()
                return False
        return said is not None and said.si_code == os.CLD_STOPPED

    def go_on(self) -> None:
        """Let one that stands go on."""
        os.kill(self.process.pid, signal.SIGCONT)

    def below(self) -> list[psutil.Process]:
        """Every process that this one has started."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def actors(self, kind: str) -> list[psutil.Process]:
        """Ray actors of a class, by the title that Ray gives their processes."""
        found = []
        for process in self.below():
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if title.startswith("ray::") and kind in title:
                found.append(process)
        return found

    def kill(self) -> None:
        """SIGKILL to the whole process group, as a machine's end would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def gone(processes: list[psutil.Process], seconds: float = 20.0) -> list[psutil.Process]:
    """Those that are still alive when the time is up."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
