"""What several tests of real kills share: the run that nobody touched, and one that was resumed elsewhere."""

from __future__ import annotations

import pytest

from .lives import RealRun
from .situations import Untouched


@pytest.fixture(scope="session")
def untouched_runs(tmp_path_factory: pytest.TempPathFactory) -> Untouched:
    """The runs that nobody touches, by their config."""
    return Untouched(tmp_path_factory.mktemp("untouched"))


@pytest.fixture(scope="session")
def untouched(untouched_runs: Untouched) -> RealRun:
    """The small deterministic run, from its beginning to its end."""
    return untouched_runs.of("small")


@pytest.fixture(scope="session")
def killed(untouched: RealRun, tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """The same run killed twice, all of its processes at once, as its second and its fifth update are
    committed. It is copied by whoever goes on with it."""
    run = RealRun(untouched.config, tmp_path_factory.mktemp("killed"))
    for updates in (2, 3):
        run.stand(f"log.append.after@UpdateApplied:{updates}").kill()
    assert run.state().updates == 5
    return run


@pytest.fixture(scope="session")
def resumed_elsewhere(killed: RealRun, tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """The killed run, resumed on other ranks, workers and micro-batches."""
    run = killed.copied_to(tmp_path_factory.mktemp("resumed") / "runs")
    elastic = ["learner.ranks=2", "learner.micro_batch_tokens=40", "rollout.workers=2"]
    assert run.live(*(word for one in elastic for word in ("--set", one))) == 0, run.output()
    return run
