"""The pool on real Ray actors: processes that are killed, stopped and told to end, on a tiny random model."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from surefoot.rollout.packing import unpack_i32
from surefoot.rollout.protocols import Answer, Group, GroupDone, GroupFailed, GroupRequest, WorkerLost
from surefoot.rollout.rayworkers import RayHandle, RayRolloutPool
from surefoot.statemachine.errors import ConfigRefused, ModelRefused
from surefoot.statemachine.events import IssueReason, encode
from surefoot.trainer.config import load_config
from surefoot.trainer.raysession import RaySession
from tests.statemachine.budgets import budget
from tests.trainer.raysession_lives import living

from .tiny_models import characters, write_model
from .worker_parts import MAX_NEW_TOKENS, PROMPT, ask, model_folder, published

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("ray_up"),
]

PROMPTS = 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("pool") / "model")


def a_pool(
    session: RaySession, folder: Path, *, workers: int = 2, reward: Any = None, **rollout: Any
) -> RayRolloutPool:
    config = load_config(
        {
            "data": {"source": "reasoning_gym:chain_sum", "size": PROMPTS},
            "model": {"path": str(folder)},
            "reward": {"function": reward or "tests.rollout.worker_parts:length_reward"},
            "batch": {"group_size": 3},
            "rollout": {
                "workers": workers,
                "max_concurrent": 9,
                "max_new_tokens": MAX_NEW_TOKENS,
                **rollout,
            },
            "cluster": {"start_seconds": 240, "reply_seconds": 240},
        }
    )
    return RayRolloutPool(
        config,
        session=session,
        budget=lambda: encode(budget(data_len=PROMPTS)),
        max_prompt_tokens=len(PROMPT),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session() -> AsyncIterator[RaySession]:
    async with RaySession.acquire(None, None, 240.0) as session:
        yield session


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(session: RaySession, folder: Path) -> AsyncIterator[RayRolloutPool]:
    pool = a_pool(session, folder)
    await pool.start()
    assert pool.free_slots() == 0
    await pool.publish(published(0))
    yield pool
    await pool.close()


def pids(pool: RayRolloutPool) -> dict[int, int]:
    """The process ids of the workers that are there, by place."""
    found: dict[int, int] = {}
    for index, worker in pool._workers.items():
        assert isinstance(worker.handle, RayHandle)
        assert worker.handle.pid is not None
        found[index] = worker.handle.pid
    return found


async def until(pool: RayRolloutPool, enough: Callable[[list[Answer]], bool]) -> list[Answer]:
    """Every answer until there are enough."""
    found: list[Answer] = []
    while not enough(found):
        found += await pool.answers()
    return found


def groups_in(answers: list[Answer]) -> list[Group]:
    return [answer.group for answer in answers if isinstance(answer, GroupDone)]


async def generated(pool: RayRolloutPool, requests: list[GroupRequest]) -> list[Group]:
    """Submit and wait; every one must be answered by its group."""
    pool.submit(requests)
    answers = await until(pool, lambda found: len(found) >= len(requests))
    assert len(groups_in(answers)) == len(answers) == len(requests)
    return groups_in(answers)


async def full_again(pool: RayRolloutPool) -> None:
    """Wait until every place has a worker that could start work."""
    async with asyncio.timeout(240):
        while pool.free_slots() < 6:
            pool._changed.clear()
            await pool._changed.wait()


def versions(groups: list[Group]) -> set[int]:
    return {v for group in groups for sample in group.samples for v in unpack_i32(sample.versions)}


async def test_groups_are_generated_on_every_worker_with_the_published_version(pool: RayRolloutPool) -> None:
    assert pool.free_slots() == 6
    pool.submit([ask(index) for index in range(40)])
    answers = await until(pool, lambda found: len(found) >= 40)
    assert sorted(group.prompt_index for group in groups_in(answers)) == list(range(40))
    assert {answer.worker for answer in answers} == {0, 1}
    assert versions(groups_in(answers)) == {0}
    await pool.publish(published(1))
    assert versions(await generated(pool, [ask(50, admission_version=1)])) == {1}


async def test_a_group_does_not_depend_on_its_worker_or_attempt(pool: RayRolloutPool) -> None:
    first = await generated(pool, [ask(60)])
    again = await generated(pool, [ask(60, attempt=2)])
    assert [sample.ids for sample in first[0].samples] == [sample.ids for sample in again[0].samples]


async def test_sigterm_does_not_end_a_worker(pool: RayRolloutPool) -> None:
    before = pids(pool)
    for pid in before.values():
        os.kill(pid, signal.SIGTERM)
    await generated(pool, [ask(index) for index in range(70, 90)])
    assert pids(pool) == before


async def test_a_worker_killed_under_load_loses_no_group_and_the_pool_refills(
    pool: RayRolloutPool, capfd: pytest.CaptureFixture[str]
) -> None:
    before = pids(pool)
    wanted = {index: 1 for index in range(100, 400)}
    pool.submit([ask(index) for index in wanted])
    answers = await until(pool, lambda found: len(found) >= 20)
    os.kill(before[0], signal.SIGKILL)
    lost: list[WorkerLost] = []
    failed: list[GroupFailed] = []
    done: dict[int, int] = {group.prompt_index: group.attempt for group in groups_in(answers)}
    while len(done) < len(wanted):
        for answer in await pool.answers():
            if isinstance(answer, GroupDone):
                assert answer.group.prompt_index not in done, "answered twice"
                done[answer.group.prompt_index] = answer.group.attempt
            elif isinstance(answer, GroupFailed):
                failed.append(answer)
                wanted[answer.prompt_index] += 1
                pool.submit([ask(answer.prompt_index, attempt=wanted[answer.prompt_index])])
            else:
                lost.append(answer)
    assert [one.worker for one in lost] == [0]
    assert {one.reason for one in failed} == {IssueReason.WORKER_LOST}
    assert 1 <= len(failed) <= 3, "what it held, and no more than it had places"
    assert done == wanted
    await full_again(pool)
    after = pids(pool)
    assert after[0] != before[0]
    assert after[1] == before[1]
    await pool.publish(published(2))
    assert versions(await generated(pool, [ask(i, admission_version=2) for i in range(500, 520)])) == {2}
    assert capfd.readouterr() == ("", "")


async def test_a_worker_that_is_stopped_is_replaced_and_its_process_ended(pool: RayRolloutPool) -> None:
    before = pids(pool)
    stopped = psutil.Process(before[1])
    os.kill(stopped.pid, signal.SIGSTOP)
    pool._reply_seconds, whole = 2.0, pool._reply_seconds
    await pool.publish(published(3))
    pool._reply_seconds = whole
    (lost,) = await pool.answers()
    assert isinstance(lost, WorkerLost)
    assert lost.worker == 1
    assert "policy version 3" in lost.because
    await full_again(pool)
    assert pids(pool)[0] == before[0]
    assert living([stopped]) == []
    assert versions(await generated(pool, [ask(i, admission_version=3) for i in range(600, 620)])) == {3}


async def test_an_evaluation_outlives_a_worker(pool: RayRolloutPool) -> None:
    requests = [ask(index, samples=1, temperature=0.0) for index in range(60)]
    evaluating = asyncio.ensure_future(pool.evaluate(requests))
    await asyncio.sleep(0)
    os.kill(pids(pool)[0], signal.SIGKILL)
    groups = await evaluating
    assert [group.prompt_index for group in groups] == list(range(60))
    await until(pool, lambda found: any(isinstance(answer, WorkerLost) for answer in found))


async def test_a_raylet_that_hangs_holds_up_no_loop(session: RaySession, pool: RayRolloutPool) -> None:
    """Ray would put so large an argument into the raylet's store right where the call is made."""
    requests = [ask(index, samples=1, temperature=0.0) for index in range(4_000)]
    handle = next(iter(pool._workers.values())).handle
    assert handle is not None
    (raylet,) = (process for process in session._host._processes() if process.name() == "raylet")
    raylet.suspend()
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await handle.evaluate(requests)
    finally:
        raylet.resume()
    assert len(await generated(pool, [ask(index) for index in range(800, 805)])) == 5


async def test_two_pools_share_one_ray_each_on_its_own_loop_and_leave_no_process(
    pool: RayRolloutPool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_rewards.py").write_text(
        "def nine(row, text, ids):\n    return 9\n\n\ndef none(row, text, ids):\n    return 'a lot'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    seen: dict[str, Any] = {}

    async def beside() -> None:
        async with RaySession.acquire(None, None, 240.0) as session:
            other = a_pool(session, folder, workers=1, reward="their_rewards:nine")
            bad = a_pool(session, folder, workers=1, reward="their_rewards:none", max_attempts=1)
            await asyncio.gather(other.start(), bad.start())
            await asyncio.gather(other.publish(published(0)), bad.publish(published(0)))
            seen["groups"] = await generated(other, [ask(index) for index in range(10)])
            bad.submit([ask(5)])
            seen["failed"] = await bad.answers()
            processes = [psutil.Process(pid) for own in (other, bad) for pid in pids(own).values()]
            await asyncio.gather(other.close(), bad.close())
            seen["living"] = living(processes)

    thread = threading.Thread(target=lambda: asyncio.run(beside()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert {sample.reward for group in seen["groups"] for sample in group.samples} == {9.0}
    (failed,) = seen["failed"]
    assert (failed.prompt_index, failed.reason) == (5, IssueReason.FAILED)
    assert "row 105" in failed.error
    assert "a lot" in failed.error
    assert "\n" not in failed.error
    assert seen["living"] == []
    await generated(pool, [ask(700)])


async def test_a_model_or_reward_that_a_worker_refuses_ends_the_start_with_that_error(
    session: RaySession, folder: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "m", characters(), config={"model_type": "mamba"})
    refused = a_pool(session, other, workers=1), a_pool(session, folder, workers=1, reward="no_such:thing")
    errors = await asyncio.gather(*(pool.start() for pool in refused), return_exceptions=True)
    assert [type(error) for error in errors] == [ModelRefused, ConfigRefused]
    await asyncio.gather(*(pool.close() for pool in refused))
