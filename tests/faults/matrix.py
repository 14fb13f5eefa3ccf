"""The matrix of faults: every crash point, with the driver, a worker or a rank killed there; on real parts.
At the append of every type of event the driver is killed with its rows written and not committed, and again
once they are committed and nobody has been told.

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

from .lives import RealRun
from .situations import (
    ACTORS,
    DRIVER,
    ENDS,
    RANK,
    SITUATIONS,
    UNDISTURBED,
    WORKER,
    Situation,
    Untouched,
    hit,
)

BEFORE_WORKERS = ("migrate.", "log.created", "log.taken_over", "budget.", "log.append.")
"""Places where the driver alone is killed: no worker or rank exists, or what is told apart is the event."""

BY_EVENT = ("log.append.inside", "log.append.after")
"""Places with a case for every type of event."""

AFTER_A_CRASH = ("log.taken_over", "redo.")
"""Places that only a driver that takes over reaches."""

NTH = {
    "log.append.before": 12,
    "update.begun": 3,
    "update.executed": 4,
    "update.committed": 2,
    "admit.after": 3,
    "group.stored": 4,
}
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

    @property
    def kind(self) -> str:
        """The type of event whose append it is about, if it is about one."""
        return self.place.partition("@")[2]


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
    """Every crash point with every victim that exists there, and every append by what it appends."""
    places = [
        Case(place, victim)
        for place in CRASHPOINTS
        for victim in (DRIVER, WORKER, RANK)
        if victim == DRIVER or not place.startswith((*BEFORE_WORKERS, "end.after", "workers.started"))
        if place not in BY_EVENT
    ]
    appends = [Case(f"{place}@{kind}", DRIVER) for kind in (*UNDISTURBED, *SITUATIONS) for place in BY_EVENT]
    return places + appends


@cache
def seed_of_the_day() -> int:
    """The seed of the cases that are lived with the other tests: another one every day."""
    return int(time.time()) // 86_400


def some_cases(seed: int, count: int) -> list[Case]:
    """A random subset; the seed is printed by whoever uses it."""
    return random.Random(seed).sample(all_cases(), count)


def situation_of(case: Case) -> tuple[Situation, str]:
    """What leads up to a case, and where the driver is killed, if it is."""
    place, _, kind = case.place.partition("@")
    armed = f"{case.place}:{UNDISTURBED.get(kind, NTH.get(place, 1))}"
    if kind:
        return SITUATIONS.get(kind, Situation()), armed
    first_life = "update.committed:5" if place.startswith(AFTER_A_CRASH) else ""
    if case.victim == DRIVER:
        return Situation(first_life=first_life), armed
    return Situation(first_life=first_life, stands_at=armed, meanwhile=case.victim), ""


def live_through(case: Case, untouched: Untouched, folder: Path) -> Verdict:
    """Live the case to its end, and compare."""
    situation, armed = situation_of(case)
    like = untouched.of(situation.config)
    run = RealRun(like.config, folder, case.name.replace(".", "-").replace("@", "-"))
    started, first = time.monotonic(), -signal.SIGKILL
    if situation.first_life:
        first = run.live(crashpoint=situation.first_life)
    situation.damage(run)
    code, said = _live_until_hit(run, situation, armed)
    if first != -signal.SIGKILL:
        said = f"the first life was not killed at {situation.first_life}: exit code {first}"
    if armed:
        situation.mend(run)
        code = run.live(*situation.resumed_with)
    if code != ENDS[situation.config] and not said:
        said = f"the run ended with exit code {code}: {run.output().strip().splitlines()[-1:]}"
    state, told = run.state(), RealRun.ledger if situation.same_execution else RealRun.accounts
    trained = [index for event in run.events("UpdateApplied") for index, _ in event.groups]
    return Verdict(
        case=case,
        kills=sum(map(bool, (situation.first_life, armed, situation.meanwhile in ACTORS))),
        resumes=max(0, state.incarnation - 1),
        lost_steps=like.state().optimizer_steps - state.optimizer_steps,
        trained_twice=len(trained) - len(set(trained)),
        equal=told(run) == told(like),
        audited=run.audit().ok,
        seconds=time.monotonic() - started,
        said=said,
    )


def _live_until_hit(run: RealRun, situation: Situation, armed: str) -> tuple[int, str]:
    """The life that is hit; its exit code, and what is wrong with the case."""
    stops = [f"{situation.stands_at}:stop"] if situation.stands_at else []
    life = run.start(*situation.resumed_with, crashpoint=",".join([*stops, *filter(None, [armed])]))
    said = ""
    if stops and not life.stands():
        said = "the driver did not come to stand"
    elif stops:
        said = hit(life, situation.meanwhile)
        life.go_on()
    code = life.wait()
    if armed and code != -signal.SIGKILL and not said:
        said = f"the crash point was not reached: exit code {code}"
    return code, said


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
