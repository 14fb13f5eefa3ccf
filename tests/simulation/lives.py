"""Whole histories of a run, drawn from one seed: lives that crash, are taken over, stopped, and go on.

`history(seed)` draws a small config and a plan of faults, lets one driver after another live, and checks the
audit's identities after every commit. It raises on the first thing that is wrong. The same seed is the same
history; `python -m tests.simulation SEED` repeats one, and `--seeds N` runs many.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.statemachine.audit import Auditor, audit
from surefoot.statemachine.crashpoints import watched
from surefoot.statemachine.errors import FencedOut, RunFailedError, WrongSeq
from surefoot.statemachine.log import EventRow
from surefoot.statemachine.phases import Phase
from surefoot.statemachine.state import RunState

from .virtual import run_virtually
from .world import Crashed, Faults, World, die, ledger, small_config, touch

MAX_LIVES = 12


@dataclass
class TakeOver:
    """Another driver takes the run over while this one lives, and does not know it yet."""

    after_commits: int | None  # of the old driver; else
    after_calls: int  # blocking calls that the old driver has begun: the first are those of its sweep
    old_held_seconds: float  # how long the old driver's files and log then stand still
    heir_waits_seconds: float  # between the heir's claim and its sweep
    heir_reads_late: bool = False  # it reads the log after that wait, not before


@dataclass
class Life:
    """What happens to one driver."""

    crash_after: int | None = None  # crash points reached before SIGKILL
    preempt_after: int | None = None  # commits before SIGTERM
    taken_over: TakeOver | None = None
    disk_full_after: int | None = None  # commits before the disk is full


@dataclass
class History:
    """A drawn history: everything that `history` needs to live it."""

    seed: int
    sections: dict[str, dict[str, Any]]
    data_len: int
    faults: Faults
    lives: list[Life] = field(default_factory=list)


def draw(seed: int) -> History:
    """The history of a seed."""
    rng = random.Random(seed)
    prompts = rng.choice([1, 2, 3, 4])
    minibatches = rng.choice([m for m in (1, 2) if prompts % m == 0])
    passes = rng.choice([1, 1, 2])
    data_len = rng.randint(prompts, 24)
    tail = rng.choice(["drop", "drop", "train"])
    epochs = rng.choice([1, 1, 2])
    rest = data_len * epochs % prompts
    if tail == "train" and 0 < rest < minibatches:
        tail = "drop"
    drop = rng.random() < 0.25
    sections: dict[str, dict[str, Any]] = {
        "data": {"epochs": epochs},
        "batch": {
            "prompts": prompts,
            "group_size": rng.choice([2, 3]),
            "minibatches": minibatches,
            "passes": passes,
            "tail": tail,
        },
        "sync": {
            "every_updates": rng.choice([1, 1, 2, 3]),
            "max_staleness": rng.choice([0, 0, 1, 2]),
            "on_stale": rng.choice(["wait", "wait", "reissue"]),
        },
        "rollout": {
            "workers": rng.choice([1, 2, 3]),
            "max_concurrent": rng.choice([3, 4, 8]),
            "max_attempts": 40,
        },
        "checkpoint": {"every_updates": rng.choice([1, 2, 3, 10]), "keep": rng.choice([1, 2, 3])},
        "groups": {"keep": rng.choice(["covered", "covered", "all"])},
        "algorithm": {"drop_no_spread": drop},
        "preempt": {"grace_seconds": rng.choice([0.3, 2.0, 30.0])},
    }
    if rng.random() < 0.4:
        sections["eval"] = {"every_updates": rng.choice([1, 2, 5]), "size": 3, "source": "object:held_out"}
    faults = Faults(
        worker_dies=rng.choice([0, 0, 0.05]),
        work_raises=rng.choice([0, 0, 0.05]),
        answer_repeats=rng.choice([0, 0, 0.1]),
        learner_dies=rng.choice([0, 0, 0, 0.01]),
        slow_group=rng.choice([0, 0.1]),
        no_spread=frozenset(i for i in range(data_len * epochs) if drop and rng.random() < 0.3),
        call_seconds=rng.choice([0.0, 0.0, 0.001, 0.05, 0.7]),
    )
    lives: list[Life] = []
    for _ in range(rng.randint(0, MAX_LIVES - 1)):
        kind = rng.choice(["crash", "crash", "crash", "crash", "preempt", "zombie", "disk"])
        after = rng.randint(1, 60)
        lives.append(
            Life(
                crash_after=after if kind == "crash" else None,
                preempt_after=after // 2 if kind == "preempt" else None,
                taken_over=_draw_take_over(rng, after // 2) if kind == "zombie" else None,
                disk_full_after=after // 2 if kind == "disk" else None,
            )
        )
    return History(seed, sections, data_len, faults, lives)


def _draw_take_over(rng: random.Random, after: int) -> TakeOver:
    return TakeOver(
        after_commits=rng.choice([max(1, after), None, None]),
        after_calls=rng.choice([1, 2, 3, rng.randint(4, 80)]),
        old_held_seconds=rng.choice([0.0, 0.0, 0.3, 3.0, 20.0]),
        heir_waits_seconds=rng.choice([0.0, 0.0, 0.3, 3.0]),
        heir_reads_late=rng.random() < 0.5,
    )


def history(drawn: History) -> World:
    """Live it, to the end of the run. Raises AssertionError on whatever is wrong."""
    world = World(small_config(**drawn.sections), drawn.data_len, drawn.seed, drawn.faults)
    check = Checker(world)
    for life in drawn.lives:
        if _live(world, life, check):
            break
    else:
        for _ in range(3):  # a learner may die again in the last life
            world.faults = Faults(no_spread=drawn.faults.no_spread)
            if _live(world, Life(), check):
                break
    world.on_commit = None
    _check_end(world)
    return world


class Checker:
    """Looks at the log after every commit: it folds, and no identity of the audit is broken."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.state = RunState()
        self.auditor = Auditor()
        self.commits = 0

    def catch_up(self) -> None:
        """Fold and audit what is new; the fold refuses what is not legal."""
        rows = list(self.world.log.read(self.world.run_id, self.state.seq))
        for row in rows:
            self.state.apply(row)
        self.auditor.take(rows)
        broken = self.auditor.violations()
        assert not broken, "; ".join(broken)

    def committed(self, rows: Sequence[EventRow]) -> None:
        """After one commit: files come before the event that names them, and go after the one that retires
        them, so that all that the log names is there at any moment, whoever else is at work."""
        self.commits += 1
        self.catch_up()
        disk = self.world.disk
        for name in self.state.files.keys() - disk.groups.keys() - disk.spoilt:
            raise AssertionError(f"group file {name}, which the log names, is gone")
        kept = {checkpoint.path for checkpoint in self.state.checkpoints.values()}
        for path in kept - disk.checkpoints.keys() - disk.spoilt:
            raise AssertionError(f"checkpoint {path}, which the log names, is gone")
        fates = self.state.groups_by_fate()
        assert sum(fates.values()) == self.state.drawn
        assert fates["trained"] == self.state.groups_trained

    def audited(self) -> None:
        """The whole audit, from the raw rows, with the run's head."""
        report = audit(self.world.rows(), self.world.log.head(self.world.run_id))
        broken = [f"{check.id}: {check.detail}" for check in report.checks if not check.ok]
        assert report.ok, "; ".join(broken)


def _live(world: World, life: Life, check: Checker) -> bool:
    """One life; whether the run is over."""
    if world.lives and world.state().closed:
        return True
    before = check.commits
    reached = 0
    zombies: list[asyncio.Task[Any]] = []
    moment: asyncio.Event | None = None  # of the take-over
    unwritten = False  # asked to stop, it had no time left for the log to say so

    def place(name: str) -> None:
        nonlocal reached
        touch()
        reached += 1
        if life.crash_after is not None and reached >= life.crash_after:
            die()

    def take_over_now() -> None:
        if life.taken_over is not None and moment is not None and not moment.is_set():
            world.hands.hold(life.taken_over.old_held_seconds)
            moment.set()

    def committed(rows: Sequence[EventRow]) -> None:
        check.committed(rows)
        lived = check.commits - before
        if life.preempt_after is not None and lived == life.preempt_after + 1:
            world.driver.preempt("SIGTERM")
        if life.disk_full_after is not None and lived == life.disk_full_after + 1:
            world.disk.full = True
        if life.taken_over is not None and life.taken_over.after_commits == lived:
            take_over_now()

    world.on_commit = committed

    async def one() -> None:
        nonlocal moment, unwritten
        first = asyncio.ensure_future(world.new_driver().run())
        if life.taken_over is not None:
            moment = asyncio.Event()
            if life.taken_over.after_commits is None:
                calls = life.taken_over.after_calls
                world.hands.on_call = lambda begun: take_over_now() if begun == calls else None
            waiting = asyncio.ensure_future(moment.wait())
            await asyncio.wait({first, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not first.done() and not world.state().ended:
                zombies.append(first)
                first = asyncio.ensure_future(_heir(world, life.taken_over))
        outcome = await first
        unwritten = outcome is not None and bool(outcome.unwritten)
        await asyncio.gather(*zombies, return_exceptions=True)

    crashed = False
    with watched(place):
        try:
            run_virtually(one())
        except Crashed:
            crashed = True
        except (FencedOut, WrongSeq):
            pass
        except RunFailedError as error:
            if (
                "learner_tries" not in error.facts
            ):  # ranks that die again and again are drawn; nothing else is
                raise
        except OSError:
            assert world.disk.full, "an OSError on a disk that is not full"
    world.disk.full = False
    if not crashed and life.crash_after is None:
        assert world.state().ended or zombies or unwritten, "a life that was not killed ends with an end"
    for zombie in zombies:
        if zombie.done() and not zombie.cancelled():
            error = zombie.exception()
            assert error is None or isinstance(
                error, FencedOut | WrongSeq | Crashed | RunFailedError | OSError
            ), repr(error)
    check.catch_up()
    check.audited()
    return world.state().closed


async def _heir(world: World, how: TakeOver) -> Any:
    """Take over, and let some time go by before the first look at the disk."""
    head = world.claim(ask=True)
    driver = None if how.heir_reads_late else world.new_driver(head)
    await asyncio.sleep(how.heir_waits_seconds)
    return await (driver or world.new_driver(head)).run()


def _check_end(world: World) -> None:
    state = world.state()
    assert state.phase in (Phase.COMPLETED, Phase.STOPPED), f"the run is still {state.phase}"
    trained = [index for event in world.events("UpdateApplied") for index, _ in event.groups]
    assert len(trained) == len(set(trained)), "a group was trained twice"
    total = state.total
    if not world.config.algorithm.drop_no_spread:
        assert state.phase is Phase.COMPLETED, "nothing was dropped, yet the run is short"
        assert state.optimizer_steps == total.optimizer_steps_total
    if world.config.sync.on_stale == "wait":
        assert trained == sorted(trained), "trained out of draw order"
    if is_deterministic(world):
        assert ledger(world) == ledger(untouched(world)), "it differs from the run that nobody touched"


def is_deterministic(world: World) -> bool:
    """Whether config and data alone decide what is trained: no timing, no interruption."""
    sync = world.config.sync
    return sync.max_staleness == 0 and sync.on_stale == "wait"


def untouched(world: World) -> World:
    """The same run, to its end, where nothing goes wrong."""
    other = World(world.config, world.data_len, faults=Faults(no_spread=world.faults.no_spread))
    other.run()
    return other


def shortest(seed: int) -> History:
    """The same failure with as few lives as will show it."""
    drawn = draw(seed)
    lives = list(drawn.lives)
    place = 0
    while place < len(lives):
        fewer = lives[:place] + lives[place + 1 :]
        try:
            history(History(seed, drawn.sections, drawn.data_len, drawn.faults, fewer))
            place += 1
        except BaseException:
            lives = fewer
    return History(seed, drawn.sections, drawn.data_len, drawn.faults, lives)


def report(seed: int, error: BaseException) -> str:
    """What a person needs to go on from a failing seed."""
    small = shortest(seed)
    return (
        f"seed {seed}: {type(error).__name__}: {error}\n"
        f"  repeat it:  python -m tests.simulation {seed}\n"
        f"  shortest:   {small.lives}\n"
        f"  config:     {small.sections}, {small.data_len} rows, {small.faults}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one history, or many with a line of progress; 1 at the first that fails."""
    parser = argparse.ArgumentParser(description="Live whole histories of runs in a simulated world.")
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(arguments)
    seeds = (
        [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    )
    started, lives, events = time.monotonic(), 0, 0
    for done, seed in enumerate(seeds, 1):
        try:
            world = history(draw(seed))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            print(report(seed, error), file=sys.stderr)
            return 1
        lives, events = lives + world.lives, events + len(world.rows())
        if done % 500 == 0 or done == len(seeds):
            rate = lives / (time.monotonic() - started) * 60
            print(f"{done} histories, {lives} lives, {events} events, {rate:.0f} lives a minute", flush=True)
    return 0
