"""Whether a run fits its Ray cluster is asked before its log is touched; here of one that is two numbers."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from surefoot.statemachine.errors import ClusterTooSmall
from surefoot.trainer.raysession import FREE_WAIT_SECONDS, RaySession
from tests.simulation.virtual import run_virtually


class Cluster:
    """A host of sessions without a Ray: so many slots, and so many of them free."""

    def __init__(self, slots: float, free: float, started_here: bool) -> None:
        self.started_here = started_here
        self.reserved: dict[int, tuple[float, float]] = {}
        self._have = {"total": (slots, 0.0), "available": (free, 0.0)}

    def submit(self, call: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call())
        return done

    def resources(self, which: str) -> tuple[float, float]:
        return self._have[which]


def seconds_to_refusal(cluster: Cluster, workers: int, ranks: int, said: str) -> float:
    async def ask() -> float:
        session = RaySession(cluster)  # type: ignore[arg-type]
        began = asyncio.get_running_loop().time()
        with pytest.raises(ClusterTooSmall, match=said):
            await session.check_fits(workers, ranks)
        return asyncio.get_running_loop().time() - began

    return run_virtually(ask())


@pytest.mark.parametrize("started_here", [True, False])
def test_nine_workers_where_eight_fit_are_refused_at_once_with_both_numbers(started_here: bool) -> None:
    """Report 38."""
    cluster = Cluster(8, 8, started_here)
    said = r"rollout\.workers = 9 and learner\.ranks = 0 need 9 slots, .*has 8: .*use fewer workers"
    assert seconds_to_refusal(cluster, 9, 0, said) == 0
    assert cluster.reserved == {}


def test_what_others_hold_is_waited_for_and_not_for_ever() -> None:
    """Report 38: in a cluster of others that is large enough, but busy."""
    cluster = Cluster(8, 3, started_here=False)
    waited_seconds = seconds_to_refusal(cluster, 4, 1, r"need 5 slots, .*has 3 left beside other runs")
    assert FREE_WAIT_SECONDS <= waited_seconds < FREE_WAIT_SECONDS + 1


def test_what_fits_is_reserved() -> None:
    """Report 38: eight where eight fit."""
    cluster = Cluster(8, 8, started_here=True)
    session = RaySession(cluster)  # type: ignore[arg-type]
    run_virtually(session.check_fits(7, 1))
    assert list(cluster.reserved.values()) == [(8.0, 0.0)]
