"""What several tests of real kills share: the run that nobody touched."""

from __future__ import annotations

import pytest

from .lives import RealRun
from .small import make_small


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> RealRun:
    """The small deterministic run, from its beginning to its end."""
    folder = tmp_path_factory.mktemp("untouched")
    run = RealRun(make_small(folder), folder / "runs")
    assert run.live() == 0, run.output()
    return run
