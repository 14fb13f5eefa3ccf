"""The matrix of faults: every crash point, with the driver, a worker or a rank killed there; on real parts.

Each case is one run: it lives until the fault, goes on with the same command, and must end as the run that
nobody touched: same ledger, same last weights, every identity of the audit. `python -m tests.faults` lives
all of them and writes the table.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from surefoot.statemachine.crashpoints import CRASHPOINTS

from .lives import Life, RealRun, gone

DRIVER, WORKER, RANK = "driver", "worker", "rank"
ACTORS = {WORKER: "RolloutWorker", RANK: "RankActor"}

BEFORE_WORKERS = ("migrate.", "log.created", "log.taken_over", "budget.", "log.append.")
"""Places that are reached while no worker or rank exists; appends are killed at their first."""

AFTER_A_CRASH = ("log.taken_over", "redo.")
"""Places that only a driver that takes over reaches."""

NTH = {"update.begun": 3, "update.executed": 4, "update.committed": 2, "admit.after": 3, "group.stored": 4}
"""Where the first time would be too early to tell anything."""

CASES_A_DAY = 2
"""That are lived with the other tests."""


@dataclass(frozen=True)
class Case:
    """One fault."""

    place: str
    victim: str

    @property
    def name(self) -> str:
        return f"{self.place}-{self.victim}"


@dataclass(frozen=True)
class Verdict:
    """What came of it."""

    case: Case
    kills: int
    resumes: int
    lost_steps: int
    trained_twice: int
    equal: bool
    audited: bool
    seconds: float
    said: str = ""

    @property
    def ok(self) -> bool:
        return (
            not self.said and self.equal and self.audited and not self.lost_steps and not self.trained_twice
        )


def all_cases() -> list[Case]:
    """Every crash point with every victim that exists there."""
    return [
        Case(place, victim)
        for place in CRASHPOINTS
        for victim in (DRIVER, WORKER, RANK)
        if victim == DRIVER or not place.startswith((*BEFORE_WORKERS, "end.after", "workers.started"))
    ]


@cache
def seed_of_the_day() -> int:
    """The seed of the cases that are lived with the other tests: another one every day."""
    return int(time.time()) // 86_400


def some_cases(seed: int, count: int) -> list[Case]:
    """A random subset; the seed is printed by whoever uses it."""
    return random.Random(seed).sample(all_cases(), count)


def live_through(case: Case, untouched: RealRun, folder: Path) -> Verdict:
    """Live the case to its end, and compare."""
    run = RealRun(untouched.config, folder, case.place.replace(".", "-") + "-" + case.victim)
    started, kills, said = time.monotonic(), 0, ""
    if case.place.startswith(AFTER_A_CRASH):
        run.live(crashpoint="update.committed:5")
        kills += 1
    armed = f"{case.place}:{NTH.get(case.place, 1)}"
    if case.victim == DRIVER:
        code = run.live(crashpoint=armed)
        kills += 1
        if code != -signal.SIGKILL:
            said = f"the crash point was not reached: exit code {code}"
        code = run.live()
    else:
        life = run.start(crashpoint=f"{armed}:stop")
        said = _kill_while_it_stands(life, ACTORS[case.victim])
        kills += 1
        code = life.wait()
    if code != 0 and not said:
        said = f"the run ended with exit code {code}: {run.output().strip().splitlines()[-1:]}"
    state = run.state()
    trained = [index for event in run.events("UpdateApplied") for index, _ in event.groups]
    total = state.budget.optimizer_steps_total if state.budget else 0
    return Verdict(
        case=case,
        kills=kills,
        resumes=max(0, state.incarnation - 1),
        lost_steps=total - state.optimizer_steps,
        trained_twice=len(trained) - len(set(trained)),
        equal=run.ledger() == untouched.ledger(),
        audited=run.audit().ok,
        seconds=time.monotonic() - started,
        said=said,
    )


def _kill_while_it_stands(life: Life, actor: str) -> str:
    """Kill an actor while the driver stands at the crash point, then let it go on."""
    if not life.stands():
        return f"the crash point was not reached: exit code {life.wait()}"
    victims = life.actors(actor)
    for victim in victims:
        victim.kill()
    gone(victims)
    life.go_on()
    return "" if victims else f"there was no {actor} at this place"


def table(verdicts: list[Verdict]) -> str:
    """The verdicts in Markdown, with their sums."""
    lines = [
        "| crash point | killed | kills | resumes | lost steps | double-trained | digests equal | audit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for v in verdicts:
        lines.append(
            f"| {v.case.place} | {v.case.victim} | {v.kills} | {v.resumes} | {v.lost_steps} | "
            f"{v.trained_twice} | {'yes' if v.equal else 'NO'} | {'holds' if v.audited else 'BROKEN'} |"
            + (f" {v.said}" if v.said else "")
        )
    lines.append(
        f"| **{len(verdicts)} cases** | | **{sum(v.kills for v in verdicts)}** | "
        f"**{sum(v.resumes for v in verdicts)}** | **{sum(v.lost_steps for v in verdicts)}** | "
        f"**{sum(v.trained_twice for v in verdicts)}** | **{sum(v.equal for v in verdicts)} of "
        f"{len(verdicts)}** | **{sum(v.audited for v in verdicts)} of {len(verdicts)}** |"
    )
    return "\n".join(lines) + "\n"
