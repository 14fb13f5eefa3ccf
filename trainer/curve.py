"""The learning curve as a picture, drawn from the log alone.

Owns nothing but the file it writes, whole or not at all. Above: the reward that training sampled, update by
update, and the held-out reward of each evaluated policy version. Below: the learning rate of every optimizer
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..statemachine.events import BudgetResolved, EvaluationDone, RunCreated, UpdateApplied
from ..statemachine.log import EventRow

SMOOTHING_SHARE = 0.05
"""Width of the running mean, as a share of the updates drawn."""


@dataclass
class Curve:
    """What is drawn: one entry an update, an evaluation, an optimizer step."""

    run: str = ""
    updates: list[int] = field(default_factory=list[int])
    rewards: list[float] = field(default_factory=list[float])
    evaluated_updates: list[int] = field(default_factory=list[int])
    held_out: list[float] = field(default_factory=list[float])
    step_updates: list[float] = field(default_factory=list[float])  # where an optimizer step lies, in updates
    learning_rates: list[float] = field(default_factory=list[float])
    updates_total: int = 0
    deterministic_evaluation: bool = True


def curve_of(rows: Iterable[EventRow]) -> Curve:
    """What a log has to draw."""
    curve = Curve()
    for row in rows:
        curve.run = row.run_id
        if row.type not in ("RunCreated", "BudgetResolved", "UpdateApplied", "EvaluationDone"):
            continue
        event = row.event()
        if isinstance(event, UpdateApplied):
            curve.updates.append(event.update)
            curve.rewards.append(float(event.metrics.get("reward/mean", math.nan)))
            for place, step in enumerate(event.steps, 1):
                curve.step_updates.append(event.update - 1 + place / len(event.steps))
                curve.learning_rates.append(step.learning_rate)
        elif isinstance(event, EvaluationDone):
            curve.evaluated_updates.append(event.update)
            curve.held_out.append(event.reward_mean)
        elif isinstance(event, BudgetResolved):
            curve.updates_total = event.updates_total
        elif isinstance(event, RunCreated):
            curve.deterministic_evaluation = event.config.get("eval", {}).get("temperature", 0.0) == 0.0
    return curve


def running_mean(values: list[float], half: int) -> list[float]:
    """For each value with `half` others on both sides, the mean of all of them; what is no number is left
    out. There is none for the first and last `half`: of fewer values it would jump."""
    smooth: list[float] = []
    for place in range(half, len(values) - half):
        near = [value for value in values[place - half : place + half + 1] if math.isfinite(value)]
        smooth.append(sum(near) / len(near) if near else math.nan)
    return smooth


def draw_curve(rows: Iterable[EventRow], path: str | Path) -> Path:
    """Draw a run's log into `path` (.png, .svg or .pdf) and return it. Raises OSError."""
    # The figure class alone: no pyplot, no display, no state shared with a program that embeds us.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    curve, path = curve_of(rows), Path(path)
    figure = Figure(figsize=(9.0, 6.0), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot(curve.updates, curve.rewards, color="#9db8d2", linewidth=0.9, label="reward in training")
    half = round(SMOOTHING_SHARE * len(curve.updates) / 2)
    if half > 0:
        smooth, label = running_mean(curve.rewards, half), f"mean of {2 * half + 1} updates"
        above.plot(curve.updates[half:-half], smooth, color="#1f5a96", linewidth=1.8, label=label)
    if curve.held_out:
        how = "greedy" if curve.deterministic_evaluation else "sampled"
        above.plot(
            curve.evaluated_updates,
            curve.held_out,
            color="#c2571a",
            marker="o",
            markersize=4.5,
            linewidth=1.4,
            label=f"held-out reward, {how}",
        )
    above.set_ylabel("reward")
    above.set_title(
        f"{curve.run}: update {curve.updates[-1] if curve.updates else 0} of {curve.updates_total}"
    )
    above.grid(alpha=0.25)
    if curve.updates or curve.held_out:
        above.legend(frameon=False, loc="best")
    below.plot(curve.step_updates, curve.learning_rates, color="#3d7a4f", linewidth=1.4)
    below.set_ylabel("learning rate")
    below.set_ylim(bottom=0.0)
    below.set_xlabel("update")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    below.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.stem}.new{path.suffix}")
    try:
        figure.savefig(fresh)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path
