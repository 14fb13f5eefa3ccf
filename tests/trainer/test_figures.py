"""A batch's figures, worked by hand: groups and responses of unequal size, every sample weighing the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from surefoot.statemachine.events import StoredGroup
from surefoot.statemachine.state import RunState
from surefoot.trainer.figures import batch_figures


def stored(
    rewards: Sequence[float], lengths: Sequence[int], truncated: Sequence[bool], oldest: Sequence[int]
) -> StoredGroup:
    return StoredGroup(
        prompt_index=0,
        attempt=1,
        offset=0,
        size=1,
        digest="d",
        rewards=list(rewards),
        lengths=list(lengths),
        truncated=list(truncated),
        oldest_versions=list(oldest),
        newest_versions=[3] * len(oldest),
    )


def at_version_3() -> RunState:
    """Nine updates done, published every three."""
    state = RunState()
    state.policy_version, state.updates, state.update_of_version = 3, 9, [0, 3, 6, 9]
    return state


def test_figures_are_means_over_samples_and_the_spread_a_mean_over_groups() -> None:
    groups = [
        # Mean 1/2, squared distances 4 * 1/4, over n - 1 = 3.
        stored([1.0, 0.0, 0.0, 1.0], [1, 2, 3, 4], [False, False, False, True], [3, 3, 2, 3]),
        # Mean 2, squared distances 2 * 1, over n - 1 = 1.
        stored([3.0, 1.0], [10, 4], [True, False], [1, 3]),
    ]
    figures = batch_figures(groups, at_version_3())
    assert figures.metrics == pytest.approx(
        {
            "reward/mean": 6 / 6,  # of the groups' means 5/4
            "reward/std_within_group": (math.sqrt(1 / 3) + math.sqrt(2)) / 2,
            "response/length": 24 / 6,  # of the groups' means 19/4
            "response/truncated_frac": 2 / 6,  # of the groups' means 3/8
            "staleness/mean": 3 / 6,  # 0, 0, 1, 0 and 2, 0
            "staleness/max": 2,
        }
    )
    assert (figures.staleness_max, figures.staleness_mean) == (2, 0.5)
    assert figures.staleness_max_updates == 6  # version 1 is of update 3, and 9 are done


def test_a_group_of_equal_rewards_has_no_spread_and_counts_in_the_mean() -> None:
    groups = [
        stored([0.5, 0.5], [2, 2], [False, False], [3, 3]),
        stored([1.0, 0.0], [2, 2], [False, False], [3, 3]),
    ]
    metrics = batch_figures(groups, at_version_3()).metrics
    assert metrics["reward/std_within_group"] == pytest.approx(math.sqrt(1 / 2) / 2)
    assert metrics["response/truncated_frac"] == 0.0


def test_a_reward_that_is_no_number_is_said_and_not_averaged_away() -> None:
    groups = [stored([1.0, math.inf], [2, 2], [False, False], [3, 3])]
    metrics = batch_figures(groups, at_version_3()).metrics
    assert metrics["reward/mean"] == "inf"
