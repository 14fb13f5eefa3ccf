"""Any sequence of lives and faults, drawn rule by rule and shrunk to the shortest that shows a fault.

Where `lives` draws a plan and then lives it, here each step is drawn in the face of what the run has become:
a driver begins, works for a while, dies at a named place, is taken over from while it lives or stands still;
disks fill, ranks die, files are damaged. After every step the log folds, the audit's identities hold, and
what the log names is on disk. In the end the run is finished, and equals the one that nobody touched where
config and data alone decide.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from surefoot.statemachine.crashpoints import CRASHPOINTS, watched
from surefoot.statemachine.errors import FencedOut, RunFailedError, SurefootError, WrongSeq
from surefoot.statemachine.log import EventRow, RunHead
from surefoot.trainer.driver import Driver

from .hands import HANDS, Hands
from .lives import Checker, is_deterministic, untouched
from .standins import StandInLearner
from .virtual import LIMIT_SECONDS, VirtualLoop
from .world import Crashed, World, die, ledger, small_config, touch, trained

OF_OTHERS = ("log.created", "log.taken_over", "log.append.inside", "group.write.inside", "migrate.")
PLACES = sorted(
    name for name in CRASHPOINTS if not name.startswith((*OF_OTHERS, "checkpoint.files", "checkpoint.man"))
)
"""Where a driver can die here: SQLite's, the real store's and the real learner's places are not reached."""

MOST_ALIVE = 3


@dataclass
class Alive:
    """One driver's process."""

    head: RunHead  # as it claimed the run
    task: asyncio.Task[Any] | None = None
    driver: Driver | None = None  # none between the claim and the first look at the log
    hands: Hands | None = None
    learner: StandInLearner | None = None
    killed: bool = False


class AnyLives(RuleBasedStateMachine):
    """One run, and whoever drives it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.loop.set_exception_handler(lambda loop, context: None)
        self.open = ExitStack()
        self.open.callback(self.loop.close)
        self.alive: list[Alive] = []
        self.newest: RunHead | None = None  # what the newest claim was given
        self.commits = 0
        self.committed = asyncio.Event()
        self.dies_at: tuple[str, int] | None = None
        self.disk_was_full = False
        self.whole = True  # the last rule and the checks after it went through

    @initialize(
        prompts=st.sampled_from([1, 2, 3]),
        data_len=st.integers(6, 14),
        every_updates=st.sampled_from([1, 1, 2]),
        max_staleness=st.sampled_from([0, 0, 1]),
        on_stale=st.sampled_from(["wait", "wait", "reissue"]),
        checkpoint_every=st.sampled_from([1, 2, 3]),
        keep=st.sampled_from([1, 2]),
        seed=st.integers(0, 1000),
    )
    def a_run(
        self,
        prompts: int,
        data_len: int,
        every_updates: int,
        max_staleness: int,
        on_stale: str,
        checkpoint_every: int,
        keep: int,
        seed: int,
    ) -> None:
        config = small_config(
            batch={"prompts": prompts},
            sync={"every_updates": every_updates, "max_staleness": max_staleness, "on_stale": on_stale},
            rollout={"workers": 2, "max_concurrent": 4, "max_attempts": 1000},
            checkpoint={"every_updates": checkpoint_every, "keep": keep},
            preempt={"grace_seconds": 2.0},
        )
        self.world = World(config, data_len, seed)
        self.check = Checker(self.world)
        self.world.on_commit = self.on_commit
        self.open.enter_context(watched(self.on_place))

    # -- what the world tells -------------------------------------------------------------------------

    def on_commit(self, rows: Sequence[EventRow]) -> None:
        self.check.committed(rows)
        self.commits += len(rows)
        self.committed.set()

    def on_place(self, name: str) -> None:
        touch()
        if self.dies_at is not None and self.dies_at[0] == name:
            self.dies_at = (name, self.dies_at[1] - 1) if self.dies_at[1] > 1 else None
            if self.dies_at is None:
                die()

    # -- what the rules are made of -------------------------------------------------------------------

    @property
    def holder(self) -> Alive | None:
        """The driver that holds the run, if it lives."""
        return self.alive[-1] if self.alive and self.alive[-1].head == self.newest else None

    def work(self, what: Coroutine[Any, Any, Any]) -> None:
        """Let all drivers live on while `what` goes on."""
        self.whole = False
        self.loop.run_until_complete(what)
        for one in [one for one in self.alive if one.task is not None and one.task.done()]:
            self.alive.remove(one)
            self.ended(one)

    def ended(self, one: Alive) -> None:
        """A driver's process is over: it may only have ended with what was done to it."""
        assert one.task is not None
        error = asyncio.CancelledError() if one.task.cancelled() else one.task.exception()
        if error is None or isinstance(error, FencedOut | WrongSeq | Crashed):
            return
        if one.killed and isinstance(error, asyncio.CancelledError):
            return
        if isinstance(error, OSError) and self.disk_was_full:
            return
        if isinstance(error, RunFailedError) and "learner_tries" in error.facts:
            return
        if isinstance(error, SurefootError | OSError) and one.head != self.newest:
            return  # it was taken over from: files may be gone under it, and the log takes nothing of it
        raise error

    async def start(self, waits_seconds: float, reads_late: bool) -> None:
        """Claim the run; look at log and disk after a while."""
        self.newest = self.world.claim(ask=True)
        one = Alive(self.newest)
        if not reads_late:
            self.look(one)

        async def life() -> Any:
            await asyncio.sleep(waits_seconds)
            if one.driver is None:
                self.look(one)
            HANDS.set(one.hands)
            assert one.driver is not None
            return await one.driver.run()

        one.task = asyncio.ensure_future(life())
        self.alive.append(one)
        await asyncio.sleep(0)

    def look(self, one: Alive) -> None:
        one.driver = self.world.new_driver(one.head)
        one.hands, one.learner = self.world.hands, self.world.learner

    def is_closed(self) -> bool:
        return bool(self.world.lives) and self.check.state.closed

    # -- rules ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.holder is None and not self.is_closed())
    @rule(waits=st.sampled_from([0.0, 0.0, 0.3]), reads_late=st.booleans())
    def a_driver_begins(self, waits: float, reads_late: bool) -> None:
        self.work(self.start(waits, reads_late))

    @precondition(lambda self: self.holder is not None and len(self.alive) < MOST_ALIVE)
    @precondition(lambda self: not self.check.state.ended)
    @rule(
        held=st.sampled_from([0.0, 0.0, 0.3, 3.0, 20.0]),
        waits=st.sampled_from([0.0, 0.3, 3.0]),
        reads_late=st.booleans(),
    )
    def another_takes_over_beside_it(self, held: float, waits: float, reads_late: bool) -> None:
        old = self.holder
        assert old is not None

        async def both() -> None:
            if old.hands is not None:
                old.hands.hold(held)
            await self.start(waits, reads_late)

        self.work(both())

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.3, 1.0, 3.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.work(asyncio.sleep(seconds))

    @precondition(lambda self: self.alive)
    @rule(rows=st.integers(1, 12))
    def until_rows_are_committed(self, rows: int) -> None:
        wanted = self.commits + rows
        self.work(self.until(lambda: self.commits >= wanted, 20.0))

    async def until(self, reached: Any, seconds: float) -> None:
        """Let time pass until it is so, or nobody is left."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        tasks = [one.task for one in self.alive if one.task is not None]
        while not reached() and loop.time() < end and not all(task.done() for task in tasks):
            self.committed.clear()
            waiting = asyncio.ensure_future(self.committed.wait())
            await asyncio.wait({waiting, *tasks}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if any(task.done() for task in tasks):
                await asyncio.sleep(0.01)

    @precondition(lambda self: self.alive)
    @rule(place=st.sampled_from(PLACES), nth=st.sampled_from([1, 1, 2, 3]))
    def one_dies_at(self, place: str, nth: int) -> None:
        self.dies_at = (place, nth)
        self.work(self.until(lambda: self.dies_at is None, 30.0))
        self.dies_at = None

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, MOST_ALIVE - 1))
    def one_is_killed(self, which: int) -> None:
        one = self.alive[which % len(self.alive)]
        one.killed = True
        assert one.task is not None
        if one.hands is not None:
            one.hands.dead = True
        one.task.cancel()
        self.work(asyncio.wait({one.task}))

    @precondition(lambda self: self.holder is not None and self.holder.hands is not None)
    @rule(seconds=st.sampled_from([0.3, 3.0, 20.0]))
    def its_disk_stands_still(self, seconds: float) -> None:
        holder = self.holder
        assert holder is not None and holder.hands is not None
        hands = holder.hands

        async def hold() -> None:
            hands.hold(seconds)

        self.work(hold())

    @precondition(lambda self: self.holder is not None and self.holder.driver is not None)
    @rule()
    def it_is_preempted(self) -> None:
        holder = self.holder
        assert holder is not None and holder.driver is not None
        driver = holder.driver

        async def stop() -> None:
            driver.preempt("SIGTERM")
            await self.until(lambda: False, 30.0)

        self.work(stop())

    @precondition(lambda self: self.holder is not None and self.holder.learner is not None)
    @rule()
    def a_rank_dies(self) -> None:
        holder = self.holder
        assert holder is not None and holder.learner is not None
        holder.learner._alive = False

    @precondition(lambda self: self.holder is not None)
    @rule(what=st.sampled_from(["lost", "raises", "repeated"]), times=st.integers(1, 3))
    def the_next_answers_are(self, what: str, times: int) -> None:
        self.world.faults.once += [what] * times

    @precondition(lambda self: not self.world.disk.full)
    @rule()
    def the_disk_fills(self) -> None:
        self.world.disk.full = self.disk_was_full = True

    @precondition(lambda self: self.world.disk.full)
    @rule()
    def the_disk_is_freed(self) -> None:
        self.world.disk.full = False

    @precondition(lambda self: not self.alive and self.untrained_files())
    @rule(which=st.integers(0, 20), missing=st.booleans())
    def a_group_file_not_trained_yet_is_damaged(self, which: int, missing: bool) -> None:
        files = self.untrained_files()
        name = files[which % len(files)]
        groups = self.world.disk.groups
        self.world.disk.spoilt.add(name)
        if missing:
            del groups[name]
        else:
            groups[name] = [b"damaged" for _ in groups[name]]

    def untrained_files(self) -> list[str]:
        """Those that no redo can need, by draw order of what they hold."""
        files = self.check.state.files
        return [name for name in self.world.disk.groups if name in files and files[name].last_update == 0]

    @precondition(lambda self: not self.alive and len(self.kept_on_disk()) >= 2)
    @rule()
    def the_newest_checkpoint_is_deleted(self) -> None:
        path = self.kept_on_disk()[-1]
        self.world.disk.spoilt.add(path)
        del self.world.disk.checkpoints[path]

    def kept_on_disk(self) -> list[str]:
        """Committed checkpoints that are there, by update. An older one can only be gone back to while the
        groups after it are kept, which they are as long as it is."""
        kept = self.check.state.checkpoints.values()
        return [checkpoint.path for checkpoint in kept if checkpoint.path in self.world.disk.checkpoints]

    # -- what always holds ----------------------------------------------------------------------------

    @invariant()
    def every_identity_holds(self) -> None:
        if not self.world.lives:
            return
        self.check.catch_up()
        self.check.audited()
        order = trained(self.world)
        assert len(order) == len(set(order)), "a group was trained twice"
        self.whole = True

    def teardown(self) -> None:
        with self.open:
            if self.whole and hasattr(self, "world"):
                self.finish()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    def finish(self) -> None:
        """Nothing goes wrong any more: the run ends, whole."""
        world = self.world
        world.disk.full = False
        world.faults.once.clear()
        for _ in range(4):
            if self.alive:
                self.work(self.until(lambda: False, LIMIT_SECONDS / 10))
                assert not self.alive, "it hangs"
            if self.is_closed():
                break
            self.work(self.start(0.0, False))
        self.every_identity_holds()
        state = world.state()
        assert state.closed, f"the run is still {state.phase}"
        assert state.optimizer_steps == state.total.optimizer_steps_total
        if is_deterministic(world):
            assert ledger(world) == ledger(untouched(world)), "it differs from the run that nobody touched"


TestAnyLives = AnyLives.TestCase
TestAnyLives.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    derandomize="CI" in os.environ,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
