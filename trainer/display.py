"""What a run looks like while it goes on: a live panel on a terminal, one plain line an update elsewhere.

Owns the screen lines it draws and the few figures that need two events (tokens a second, time to go). Every
other figure is the fold's, so a run that goes on at update 96 starts its display at 96.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ..statemachine import events as ev
from ..statemachine.log import EventRow
from ..statemachine.state import RunState
from .wording import counted

WINDOW_UPDATES = 20
"""Rates are of the last updates: long enough to be steady, short enough to follow a change."""


BAR_COLUMNS, NARROW_COLUMNS = 60, 70
"""Of the panel: its bar, and the terminal on which figures stand one below the other."""

FAILURES_SHOWN = 3
"""Failed attempts that have a line of their own between two updates; of the others there is a number."""


class Progress:
    """The figures of the display, from events; pure."""

    def __init__(self) -> None:
        self.phase = ""
        self.updates = self.updates_total = 0
        self.optimizer_steps = self.optimizer_steps_total = 0
        self.policy_version = 0
        self.incarnation = 0
        self.learning_rate: float | None = None
        self.reward: float | None = None
        self.staleness: tuple[float, int] | None = None  # mean, max
        self.held_out: tuple[int, float] | None = None  # policy version, reward
        self._tokens = 0  # generated in this incarnation
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=WINDOW_UPDATES + 1)  # time, update, tokens

    def take(self, row: EventRow, event: ev.Event, state: RunState) -> None:
        """Take in one event; `state` is the fold with it."""
        self.phase = state.phase.value
        self.updates, self.optimizer_steps = state.updates, state.optimizer_steps
        self.policy_version, self.incarnation = state.policy_version, state.incarnation
        if state.budget is not None:
            self.updates_total = state.budget.updates_total
            self.optimizer_steps_total = state.budget.optimizer_steps_total
        if isinstance(event, ev.IncarnationBegan):
            self._marks.clear()
            self._tokens = 0
        elif isinstance(event, ev.WorkersReady):
            self._mark(row)
        elif isinstance(event, ev.GroupsStored):
            self._tokens += sum(sum(group.lengths) for group in event.groups)
        elif isinstance(event, ev.UpdateApplied):
            self.learning_rate = event.steps[-1].learning_rate
            self.reward = float(event.metrics.get("reward/mean", "nan"))
            self.staleness = (event.staleness_mean, event.staleness_max)
            self._mark(row)
        elif isinstance(event, ev.EvaluationDone):
            self.held_out = (event.policy_version, event.reward_mean)

    def _mark(self, row: EventRow) -> None:
        self._marks.append((datetime.fromisoformat(row.time).timestamp(), self.updates, self._tokens))

    @property
    def tokens_per_second(self) -> float | None:
        """Response tokens generated a second, over the last updates."""
        seconds = self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0
        return (self._marks[-1][2] - self._marks[0][2]) / seconds if seconds > 0 else None

    @property
    def seconds_to_go(self) -> float | None:
        """At the pace of the last updates."""
        if len(self._marks) < 2 or self._marks[-1][1] == self._marks[0][1]:
            return None
        seconds, updates = (self._marks[-1][place] - self._marks[0][place] for place in (0, 1))
        return seconds / updates * (self.updates_total - self.updates)

    def figures(self) -> list[tuple[str, str]]:
        """Names and values, as both displays show them."""
        mean_max = self.staleness
        return [
            ("update", f"{self.updates}/{self.updates_total}"),
            ("optimizer step", f"{self.optimizer_steps}/{self.optimizer_steps_total}"),
            ("learning rate", _figure(self.learning_rate, "{:.3e}")),
            ("reward", _figure(self.reward, "{:.3f}")),
            ("policy version", str(self.policy_version)),
            ("staleness", f"{mean_max[0]:.2f} (max {mean_max[1]})" if mean_max else "-"),
            ("tokens/s", _figure(self.tokens_per_second, "{:,.0f}")),
            ("to go", clock(self.seconds_to_go)),
        ]


def notice_of(event: ev.Event, state: RunState) -> str | None:
    """One line for an event that someone who watches wants to know of, besides the updates."""
    match event:
        case ev.BudgetResolved():
            return (
                f"budget committed: {event.updates_total} updates, {event.optimizer_steps_total} optimizer "
                f"steps, {event.publications_total} publications"
            )
        case ev.UpdatesRedone():
            return (
                f"redone: updates {event.first_update} to {event.last_update} from the checkpoint of update "
                f"{event.checkpoint_update}, largest loss deviation {event.loss_deviation}"
            )
        case ev.WorkersReady():
            return (
                f"incarnation {state.incarnation} at update {state.updates}: ready are "
                f"{counted(event.workers, 'rollout worker')} and {counted(event.ranks, 'learner rank')}"
            )
        case ev.EvaluationDone():
            return (
                f"policy version {event.policy_version} (update {event.update}): held-out reward "
                f"{event.reward_mean:.3f} over {event.size} rows"
            )
        case ev.AttemptFailed():
            return f"attempt {event.attempt} of prompt {event.prompt_index} failed: {event.error}"
        case ev.WorkerReplaced():
            return f"rollout worker {event.worker} replaced: {event.because}"
        case ev.LearnerLost():
            return f"learner lost on try {event.learner_try}: {event.because}"
        case ev.CheckpointLost():
            return f"checkpoint of update {event.update} cannot be used: {event.because}"
        case _:
            return None


class Display:
    """Shows one run; `on_event` is what the run calls. Use as a context manager."""

    def __init__(self, run: str, console: Console | None = None) -> None:
        self.progress = Progress()
        self._run = run
        self._console = console or Console()
        self._live: Live | None = None
        self._waiting: Spinner | None = None
        self._failures = 0  # attempts that failed since the last update

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._panel)
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._live is not None:
            self._live.transient = self.progress.incarnation == 0  # nothing was begun: nothing to leave there
            self._live.stop()
            self._live = None

    def waiting(self, text: str) -> None:
        """Show what is being waited for: in the panel until workers are ready, or as one plain line."""
        if self._live is None:
            self._say(text)
        else:
            self._waiting = Spinner("dots", Text(text))

    def on_event(self, row: EventRow, event: ev.Event, state: RunState) -> None:
        """Show one committed event."""
        self.progress.take(row, event, state)
        if isinstance(event, ev.WorkersReady) or state.ended:
            self._waiting = None
        if isinstance(event, ev.AttemptFailed):
            self._failures += 1
        elif isinstance(event, ev.UpdateApplied) or state.ended:
            if self._failures > FAILURES_SHOWN:
                more = counted(self._failures - FAILURES_SHOWN, "more attempt")
                self._say(f"{more} failed: `surefoot log {self._run}` has each with its reason")
            self._failures = 0
        if self._failures > FAILURES_SHOWN and isinstance(event, ev.AttemptFailed):
            return
        if (notice := notice_of(event, state)) is not None:
            self._say(notice)
        elif isinstance(event, ev.UpdateApplied) and self._live is None:
            self._say(line_of(self.progress.figures()))

    def _say(self, text: str) -> None:
        # Rich's form of a reader that went away, which is no reason to end a run; it prints no more.
        with contextlib.suppress(SystemExit):
            self._console.print(Text(text), soft_wrap=True)

    def _panel(self) -> RenderableType:
        progress, waiting = self.progress, self._waiting
        begun = f", incarnation {progress.incarnation}" if progress.incarnation else ""
        head: list[RenderableType] = [Text(f"run {self._run}{begun}", style="bold")]
        if waiting is not None:
            head.append(waiting)
        if not begun:
            return Group(*head)
        table, beside = Table.grid(padding=(0, 2)), 2 if self._console.width >= NARROW_COLUMNS else 1
        for _ in range(2 * beside):
            table.add_column(no_wrap=True)
        figures = [("phase", progress.phase), *progress.figures()]
        if progress.held_out is not None:
            figures.append(("held-out", f"{progress.held_out[1]:.3f} (version {progress.held_out[0]})"))
        for left in range(0, len(figures), beside):
            cells: list[Text] = []
            for name, value in figures[left : left + beside]:
                cells += [Text(name, style="dim"), Text(value)]
            table.add_row(*cells)
        bar = Table.grid()  # a bar by itself does not end its line
        bar.add_row(
            ProgressBar(
                total=max(1, progress.updates_total),
                completed=progress.updates,
                width=min(BAR_COLUMNS, self._console.width),
            )
        )
        return Group(*head, bar, table)


def line_of(figures: Sequence[tuple[str, str]]) -> str:
    """One plain line."""
    return "  ".join(f"{name} {value}" for name, value in figures)


def clock(seconds: float | None) -> str:
    """Hours, minutes and seconds."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
