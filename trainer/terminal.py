"""A run driven from a terminal: its display, its signals, its exit code and, at its end, its curve.

Owns the process's handlers of SIGTERM and SIGINT while the run is driven, which a library may not. The first
signal asks the run to stop in order; a second one ends the process at once, which is as safe as a kill. What
hangs when the grace time is over does not keep the process: it ends with the exit code it would have had.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from ..statemachine.errors import SurefootError, described
from ..statemachine.events import Event
from ..statemachine.log import EventRow
from ..statemachine.phases import Phase
from ..statemachine.state import RunState
from .config import Config
from .curve import curve_of, draw_curve
from .display import Display
from .ending import MOMENT_SECONDS, PROCESS
from .outcome import Outcome
from .places import Place
from .raysession import kill_started
from .signals import SIGNALS, AtSignal

STARTING = Outcome(Phase.PREEMPTED, 0, 0, 0, "was asked to stop while it started: run it again")
EXIT_SECONDS = 3.0  # that Python, torch and Ray may take to end with the process
CURVE_SECONDS = 5.0  # that the curve may take on a busy machine; the next start draws one as well


def drive(config: Config, place: Place, *, take_over: bool, accept_divergence: bool) -> int:
    """Start the run or go on with it; returns the exit code. Raises SurefootError."""
    driven: list[EventRow] = []
    curve: str | None = None
    last = _LastResort(place.run, PROCESS * config.preempt.grace_seconds)
    with last.at_signal:
        try:
            outcome = asyncio.run(_drive(config, place, take_over, accept_divergence, driven, last))
            if driven and not outcome.unwritten and last.left() >= CURVE_SECONDS:
                curve = _curve(place)
        except BaseException:
            if driven and last.left() >= CURVE_SECONDS:  # one that failed has a curve too, as far as it came
                curve = _curve(place)
            last.disarm_unless_left_behind()
            raise
        if not driven and place.curve.is_file():
            curve = str(place.curve)
        with suppress(BrokenPipeError):  # how the run ended stands, whoever hears of it
            print(f"run {place.run} {outcome.message}")
            if curve is not None:
                print(f"learning curve: {curve}")
        last.end_if_left_behind()
    return outcome.exit_code


async def _drive(
    config: Config,
    place: Place,
    take_over: bool,
    accept_divergence: bool,
    driven: list[EventRow],
    last: _LastResort,
) -> Outcome:
    """`driven` gets the first row that is written."""
    from .run import Run

    task, driving, stopping = asyncio.current_task(), list[Run](), list[asyncio.Task[Outcome]]()
    words = f"asked to stop: ending within {config.preempt.grace_seconds:g} s; ask again to end at once"

    def answer() -> None:
        display.waiting(words)
        if driving:
            stopping.append(asyncio.ensure_future(driving[0].preempt("the process was asked to stop")))
            stopping[0].add_done_callback(_look_at)  # outcome() raises the same
        elif task is not None:
            task.cancel()

    def first(row: EventRow, event: Event, state: RunState) -> None:
        if not driven:
            driven.append(row)

    with Display(place.run) as display, _asked_to_stop(answer, last.arm) as asked:
        try:
            async with Run.start(
                config,
                name=place.run,
                runs_dir=place.runs_dir,
                db=place.db,
                take_over=take_over,
                accept_divergence=accept_divergence,
                listeners=[first, display.on_event],
                waiting=display.waiting,
            ) as run:
                driving.append(run)
                return last.told(await run.outcome())
        except asyncio.CancelledError:
            if not asked.is_set():
                raise
            if driving:  # the signal came as the start ended: leaving has stopped the run in order
                return last.told(await driving[0].outcome())
            return last.told(STARTING)
        except BaseException as error:
            last.told(Outcome(Phase.FAILED, 0, 0, 0, f"failed: {described(error)}"))
            raise


class _LastResort:
    """Ends the process once the grace time is over, whatever hangs in it; armed by the first signal."""

    def __init__(self, run: str, seconds: float) -> None:
        self.outcome: Outcome | None = None  # once it is known
        self.at_signal = AtSignal(STARTING.exit_code, f"run {run} {STARTING.message}")
        self._run, self._seconds = run, seconds
        self._timer: threading.Timer | None = None
        self._ends_at: float | None = None  # by the monotonic clock
        self._before = set(threading.enumerate())

    def told(self, outcome: Outcome) -> Outcome:
        """How it has ended: whatever comes now changes nothing about that."""
        self.outcome = outcome
        self.at_signal.code, self.at_signal.said = outcome.exit_code, f"run {self._run} {outcome.message}"
        return outcome

    def left(self) -> float:
        """Seconds that the process still has; infinite if it was not asked to stop."""
        return math.inf if self._ends_at is None else self._ends_at - time.monotonic()

    def arm(self) -> None:
        self._ends_at = time.monotonic() + self._seconds
        self._timer = threading.Timer(self._seconds, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def disarm_unless_left_behind(self) -> None:
        """For a run that failed, whose error is still to be said: the process ends by itself, unless a thread
        of the run's hangs, which Python would wait for."""
        if self._timer is not None and not self._left_behind():
            self._timer.cancel()

    def _left_behind(self) -> bool:
        own = [t for t in set(threading.enumerate()) - self._before if t.name.startswith("surefoot")]
        for thread in own:
            thread.join(MOMENT_SECONDS)
        return any(thread.is_alive() for thread in own)

    def _give_up(self) -> None:
        if self.outcome is None:
            said = f"run {self._run} was asked to stop, and something in it hangs: RunPreempted may not have"
            said += " been written; nothing is lost, the same command goes on with the run"
            self.outcome = Outcome(Phase.PREEMPTED, 0, 0, 0, said)
            print(f"surefoot: {said}", file=sys.stderr)
        self._end(self.outcome)

    def end_if_left_behind(self) -> None:
        """Let the process end as any does, unless a thread of the run's hangs, which would be waited for, or
        there is no time for it."""
        if self._timer is None:
            return
        late = self._left_behind() or self.left() < EXIT_SECONDS
        if late and self.outcome is not None:
            self._end(self.outcome)
        self._timer.cancel()

    def _end(self, outcome: Outcome) -> None:
        kill_started()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(outcome.exit_code)


def _look_at(task: asyncio.Task[Outcome]) -> None:
    """Take the error of a task that nobody may await, so that asyncio does not print it as unseen."""
    if not task.cancelled():
        task.exception()


@contextmanager
def _asked_to_stop(
    answer: Callable[[], None] = lambda: None, at_once: Callable[[], None] = lambda: None
) -> Iterator[asyncio.Event]:
    """An event that the first signal sets; the loop calls `answer` then, and the handler itself `at_once`,
    though the loop hangs. A second signal has its default effect."""
    loop, asked, heard = asyncio.get_running_loop(), asyncio.Event(), list[int]()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if heard:
            kill_started()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        heard.append(number)
        at_once()
        loop.call_soon_threadsafe(orderly)

    def orderly() -> None:
        asked.set()
        answer()

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _curve(place: Place) -> str | None:
    """Draw the curve; its path, or None while no update is in the log and there is nothing to see.

    A picture that cannot be drawn changes nothing about how the run has ended.
    """
    try:
        with place.reading() as log:
            rows = list(log.read(place.run))
        return str(draw_curve(rows, place.curve)) if curve_of(rows).updates else None
    except (OSError, SurefootError) as error:
        print(f"surefoot: the learning curve could not be drawn: {error}", file=sys.stderr)
        return None


@contextmanager
def replay_progress() -> Iterator[Callable[[int, int, bool], None]]:
    """What tells of each update executed again, on standard error: a bar on a terminal, else a line each."""
    if not sys.stderr.isatty():
        yield lambda update, last, equal: print(
            f"update {update} of {last}: {'as recorded' if equal else 'DIFFERS'}", file=sys.stderr
        )
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting learner ranks", total=None)

        def show(update: int, last: int, equal: bool) -> None:
            bar.update(task, description=f"update {update} of {last}", completed=update, total=last)

        yield show
