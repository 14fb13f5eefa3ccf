"""How each type of event comes to be written in a small run, so that the driver can be killed at its append.

Every type of event is in one of three tables: `UNDISTURBED`, what a run that nobody touches writes;
`SITUATIONS`, what is done to one for it to write the others; `SIMULATED`, those that no small run of real
parts can be made to write, with the reason: `tests/simulation/test_appends.py` kills at their appends.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .lives import Life, RealRun, gone
from .small import TRIP, make_small

DRIVER, WORKER, RANK = "driver", "worker", "rank"
ACTORS = {WORKER: "RolloutWorker", RANK: "RankActor"}

UNDISTURBED = {
    "RunCreated": 1,
    "BudgetResolved": 1,
    "WorkersReady": 1,
    "GroupsAdmitted": 2,
    "GroupsStored": 3,
    "UpdateBegan": 3,
    "UpdateApplied": 4,
    "WeightsPublished": 2,
    "EvaluationDone": 2,
    "CheckpointCommitted": 1,
    "FilesRetired": 1,
    "RunCompleted": 1,
}
"""At which of its appends the driver is killed."""


SIGTERM = "SIGTERM"


@dataclass(frozen=True)
class Situation:
    """What is done to a run, from its beginning to the life that is killed at the append, and after it."""

    config: str = "small"
    first_life: str = ""  # where the life before dies
    damage: Callable[[RealRun], None] = lambda run: None  # to its files, after that
    stands_at: str = ""  # where the driver stands, and
    meanwhile: str = ""  # who is killed there: a worker or rank; or SIGTERM to the driver
    resumed_with: tuple[str, ...] = ()  # arguments of every life but the first
    mend: Callable[[RealRun], None] = lambda run: None  # before the last life
    same_execution: bool = True  # whether losses, gradient norms and weights can be compared


def hit(life: Life, what: str) -> str:
    """Do what is done while a driver stands; returns why it could not be."""
    if what == SIGTERM:  # it is taken once the driver goes on
        life.process.send_signal(signal.SIGTERM)
        return ""
    victims = life.actors(ACTORS[what])
    for victim in victims:
        victim.kill()
    gone(victims)
    return "" if victims else f"there was no {what} at this place"


def trip_the_reward(run: RealRun) -> None:
    """The reward of one group raises once."""
    (run.config.parent / TRIP).touch()


def damage_checkpoint(run: RealRun) -> None:
    """The only checkpoint loses its manifest."""
    (checkpoint,) = run.state().checkpoints.values()
    (_folder(run) / "checkpoints" / checkpoint.path / "manifest.json").unlink()


def hide_groups(run: RealRun) -> None:
    """The groups that a redo needs are not where they were."""
    shutil.move(_folder(run) / "groups", _folder(run) / "elsewhere")


def bring_groups_back(run: RealRun) -> None:
    """They are there again."""
    shutil.rmtree(_folder(run) / "groups", ignore_errors=True)
    shutil.move(_folder(run) / "elsewhere", _folder(run) / "groups")


def _folder(run: RealRun) -> Path:
    return run.runs_dir / run.name


SITUATIONS = {
    "IncarnationBegan": Situation(first_life="update.committed:5"),
    "UpdatesRedone": Situation(first_life="update.committed:5"),
    "WeightsRemade": Situation(
        first_life="update.committed:5",
        resumed_with=("--set", "learner.micro_batch_tokens=12"),
        same_execution=False,
    ),
    "GroupsReissued": Situation(first_life="admit.after:2"),
    "CheckpointLost": Situation(first_life="checkpoint.committed", damage=damage_checkpoint),
    "RunFailed": Situation(first_life="update.committed:2", damage=hide_groups, mend=bring_groups_back),
    "AttemptFailed": Situation(damage=trip_the_reward),
    "WorkerReplaced": Situation(stands_at="group.stored:4", meanwhile=WORKER),
    "LearnerLost": Situation(stands_at="update.executed:4", meanwhile=RANK),
    "RunPreempted": Situation(stands_at="update.executed:4", meanwhile=SIGTERM),
    "GroupsDropped": Situation(config="short"),
    "RunStopped": Situation(config="short"),
}

SIMULATED = {
    "AnswerRefused": "the pool ends an older attempt when it hands out the newer one, so only an answer that "
    "is on its way at that moment is late: a race that no place in the driver decides",
}


ENDS = {"small": 0, "short": 3}
"""The exit code of a run of each config: Completed, or Stopped."""


class Untouched:
    """The runs that nobody touches, one of each config, lived when a case first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, RealRun] = {}

    def of(self, config: str) -> RealRun:
        """Raises AssertionError with what it printed, if it does not end as it should."""
        if config not in self._runs:
            made = make_short if config == "short" else make_small
            run = RealRun(made(self._folder / config), self._folder / "untouched" / config)
            assert run.live() == ENDS[config], run.output()
            self._runs[config] = run
        return self._runs[config]


def make_short(folder: Path) -> Path:
    """The small run, with two groups that are dropped for want of a spread: at least an update fewer."""
    return make_small(folder, flat=(4, 9), extra="[algorithm]\ndrop_no_spread = true\n")
