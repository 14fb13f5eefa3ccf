"""Two thousand lives of simulated runs; a failing seed prints what repeats it and its shortest form."""

from __future__ import annotations

import pytest

from .lives import draw, history, report

HISTORIES_PER_BLOCK = 100
BLOCKS = 6  # a history has three to four lives on average


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.timeout(600)
def test_no_history_loses_or_repeats_a_step(block: int) -> None:
    lives = 0
    for seed in range(block * HISTORIES_PER_BLOCK, (block + 1) * HISTORIES_PER_BLOCK):
        try:
            lives += history(draw(seed)).lives
        except Exception as error:
            pytest.fail(report(seed, error), pytrace=False)
    assert lives >= HISTORIES_PER_BLOCK * 3


def test_the_simulator_finds_a_redo_that_leaves_an_update_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the driver on purpose: after a crash, the last recorded update is not executed again."""
    from surefoot.statemachine.state import RunState

    whole = RunState.latest_checkpoint

    def forgets(self: RunState):  # type: ignore[no-untyped-def]
        for update in sorted(self.records)[:-1][:1]:
            del self.records[update]
        return whole(self)

    monkeypatch.setattr(RunState, "latest_checkpoint", forgets)
    found = 0
    for seed in range(30):
        try:
            history(draw(seed))
        except Exception:
            found += 1
    assert found > 0
