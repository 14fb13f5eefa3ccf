"""Runs as a library: started, watched, preempted, cancelled, two at once; real Ray and torch, tiny model."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from surefoot.statemachine.audit import audit
from surefoot.statemachine.errors import ConfigChanged, RunFailedError, RunInUse
from surefoot.statemachine.events import RunPreempted, UpdateApplied
from surefoot.statemachine.phases import Phase
from surefoot.trainer.metrics import NAMES, metrics_rows
from surefoot.trainer.run import Run, train
from tests.faults.lives import gone
from tests.faults.small import make_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

ROWS = [{"prompt": f"{letter}b =", "answer": "a"} for letter in "abcdefghijkl"]


def vowels(row: dict[str, Any], text: str, ids: list[int]) -> dict[str, float]:
    return {"vowels": sum(letter in "aeiou" for letter in text) / max(1, len(text)), "ids": len(ids) * 0.01}


async def another(row: dict[str, Any], text: str, ids: list[int]) -> float:
    await asyncio.sleep(0)
    return float(len(text))


def poisoned(row: dict[str, Any], text: str, ids: list[int]) -> float:
    if row["prompt"].startswith("c"):
        raise ValueError("no reward for c")
    return 1.0


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    make_model(tmp_path / "model")
    return {
        "model": {"path": str(tmp_path / "model")},
        "batch": {"prompts": 2, "group_size": 2},
        "rollout": {"max_new_tokens": 4, "max_concurrent": 8},
        "optim": {"lr": 1e-3},
        "cluster": {"start_seconds": 240},
    }


def below() -> list[psutil.Process]:
    """Our actors. Ray itself may be up already, for tests before this one."""
    found = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith(("ray::RayRolloutWorker", "ray::RankActor")):
            found.append(process)
    return found


async def test_a_program_drives_a_run_and_watches_its_events(tmp_path: Path, config: dict[str, Any]) -> None:
    before = {process.pid for process in below()}
    async with Run.start(config, name="a", runs_dir=tmp_path, rows=ROWS, reward=vowels) as run:
        seen = [event async for event in run.events()]
        outcome = await run.outcome()
    assert (outcome.phase, outcome.exit_code, outcome.optimizer_steps) == (Phase.COMPLETED, 0, 6)
    assert [event.update for event in seen if isinstance(event, UpdateApplied)] == [1, 2, 3, 4, 5, 6]
    watched = await Run.attach("a", runs_dir=tmp_path)
    rows = await watched.rows()
    assert audit(rows).ok and len(rows) == len(seen)
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert found == list(metrics_rows(rows))
    assert [row["optimizer_step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert all(set(NAMES) <= set(row) for row in found)
    assert (await watched.outcome()).phase is Phase.COMPLETED
    watched.close()
    assert gone([process for process in below() if process.pid not in before]) == []
    again = await asyncio.to_thread(train, config, name="a", runs_dir=tmp_path, rows=ROWS, reward=vowels)
    assert again.already and again.exit_code == 0
    with pytest.raises(ConfigChanged, match="reward"):
        await asyncio.to_thread(train, config, name="a", runs_dir=tmp_path, rows=ROWS, reward=another)


async def test_two_runs_side_by_side_share_one_ray(tmp_path: Path, config: dict[str, Any]) -> None:
    before = {process.pid for process in below()}

    async def one(name: str, reward: Any) -> Any:
        async with Run.start(config, name=name, runs_dir=tmp_path, rows=ROWS, reward=reward) as run:
            return await run.outcome()

    first, second = await asyncio.gather(one("a", vowels), one("b", another))
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert gone([process for process in below() if process.pid not in before]) == []


async def test_preempted_by_its_program_and_gone_on_with(tmp_path: Path, config: dict[str, Any]) -> None:
    async with Run.start(config, name="a", runs_dir=tmp_path, rows=ROWS, reward=vowels) as run:
        async for event in run.events():
            if isinstance(event, UpdateApplied) and event.update == 2:
                with pytest.raises(RunInUse, match="in use: incarnation 1"):
                    async with Run.start(config, name="a", runs_dir=tmp_path, rows=ROWS, reward=vowels):
                        pass
                outcome = await run.preempt("enough for today")
    assert (outcome.phase, outcome.exit_code) == (Phase.PREEMPTED, 75)
    watched = await Run.attach("a", runs_dir=tmp_path)
    (said,) = [e async for e in watched.events() if isinstance(e, RunPreempted)]
    assert said.because == "enough for today" and said.checkpoint_update == said.updates
    watched.close()
    async with Run.start(config, name="a", runs_dir=tmp_path, rows=ROWS, reward=vowels) as run:
        outcome = await run.outcome()
    assert (outcome.exit_code, outcome.optimizer_steps) == (0, 6)


async def test_a_cancelled_program_leaves_no_child_process(tmp_path: Path, config: dict[str, Any]) -> None:
    """Report 37."""
    before = {process.pid for process in below()}

    async def program() -> None:
        async with Run.start(config, name="a", runs_dir=tmp_path, rows=ROWS, reward=vowels) as run:
            async for event in run.events():
                if isinstance(event, UpdateApplied):
                    began.set()

    began = asyncio.Event()
    task = asyncio.create_task(program())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone([process for process in below() if process.pid not in before]) == []
    state = await (await Run.attach("a", runs_dir=tmp_path)).state()
    assert state.phase is Phase.PREEMPTED


async def test_a_reward_that_raises_fails_the_run_and_names_the_row(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    with pytest.raises(RunFailedError, match=r"failed 3 times.*row 2"):
        async with Run.start(config, name="a", runs_dir=tmp_path, rows=ROWS, reward=poisoned) as run:
            await run.outcome()
    watched = await Run.attach("a", runs_dir=tmp_path)
    state = await watched.state()
    rows = await watched.rows()
    watched.close()
    assert state.phase is Phase.FAILED and audit(rows).ok
