"""The other process in the tests of claims: `python -m tests.trainer.claiming`.

It is told line by line where to claim a run, as `surefoot train` does, and whether it still holds it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from surefoot.statemachine.errors import FencedOut, RunInUse
from surefoot.statemachine.events import WorkerReplaced
from surefoot.statemachine.log import EventLog, RunHead
from surefoot.trainer.places import Place
from surefoot.trainer.run import _claim
from tests.simulation.fileworld import prepared
from tests.simulation.world import small_config
from tests.statemachine.logs import rows_after

APPENDS = 5


class Claimer:
    """One driver's claim, over and over."""

    def __init__(self) -> None:
        self.prepared = prepared(small_config(), 16)
        self.log: EventLog | None = None
        self.head: RunHead

    def claim(self, runs_dir: str, take_over: str) -> str:
        """Claim the run and append to it: "holds N", "in use", or "fenced N"."""
        self.log = None
        try:
            self.log, self.head = _claim(
                Place("a", Path(runs_dir)), self.prepared, take_over == "take-over", False
            )
        except RunInUse:
            return "in use"
        return self.append(APPENDS)

    def again(self) -> str:
        """Whether it still holds what it claimed: shown by one more event."""
        if self.log is None:
            return "in use"
        said = self.append(1)
        self.log.close()
        return said

    def append(self, events: int) -> str:
        assert self.log is not None
        mine = self.head.incarnation
        for _ in range(events):
            rows = rows_after(self.head, WorkerReplaced(worker=mine, because="some event"))
            try:
                self.log.append("a", self.head.head_seq, mine, rows)
            except FencedOut:
                return f"fenced {mine}"
            self.head = RunHead("a", rows[-1].seq, rows[-1].hash, mine, None, None, False)
        return f"holds {mine}"


if __name__ == "__main__":
    claimer = Claimer()
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            said = getattr(claimer, command)(*arguments)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(said, flush=True)
