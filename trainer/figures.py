"""Figures of a batch, from what the log says of its groups: rewards, lengths, staleness. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..statemachine.events import Number, StoredGroup, number
from ..statemachine.state import RunState


@dataclass(frozen=True)
class BatchFigures:
    """Staleness of the batch at this policy version, and the metrics that need no learner."""

    staleness_max: int
    staleness_mean: float
    staleness_max_updates: int
    metrics: dict[str, Number]


def batch_figures(groups: Sequence[StoredGroup], state: RunState) -> BatchFigures:
    """`groups` are about to be trained at the state's policy version."""
    version, published = state.policy_version, state.update_of_version
    oldest = [v for group in groups for v in group.oldest_versions]
    staleness = [version - v for v in oldest]
    rewards = [[float(r) for r in group.rewards] for group in groups]
    flat = [r for group in rewards for r in group]
    lengths = [length for group in groups for length in group.lengths]
    truncated = [flag for group in groups for flag in group.truncated]
    spreads = [_spread(group) for group in rewards]
    return BatchFigures(
        staleness_max=max(staleness),
        staleness_mean=statistics.fmean(staleness),
        staleness_max_updates=state.updates - min(published[v] for v in oldest),
        metrics={
            "reward/mean": number(statistics.fmean(flat)),
            "reward/std_within_group": number(statistics.fmean(spreads)),
            "response/length": number(statistics.fmean(lengths)),
            "response/truncated_frac": number(sum(truncated) / len(truncated)),
            "staleness/mean": number(statistics.fmean(staleness)),
            "staleness/max": number(max(staleness)),
        },
    )


def _spread(values: Sequence[float]) -> float:
    """Unbiased standard deviation; `statistics.stdev` is exact, and a hundred times slower."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
