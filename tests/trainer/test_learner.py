"""The learner on real Ray: two ranks that update, save, resume, and are lost in every way."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import psutil
import pytest

from surefoot.rollout.protocols import Group
from surefoot.statemachine.errors import CheckpointUnusable, LearnerGone, RunFailedError
from surefoot.statemachine.events import CheckpointCommitted
from surefoot.trainer.checkpoints import Checkpoints
from surefoot.trainer.config import load_config
from surefoot.trainer.learner import RayLearner
from surefoot.trainer.protocols import SavedCheckpoint, UpdateResult
from surefoot.trainer.raysession import RaySession
from surefoot.trainer.weights import initial_weights

from .learner_world import LearnerScenario, make_group, write_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def session() -> AbstractAsyncContextManager[RaySession]:
    return RaySession.acquire(None, 12, 240.0)


def learner_of(model: Path, storage: Path, ray_session: RaySession) -> RayLearner:
    config = load_config(
        {
            "data": {"source": "reasoning_gym:chain_sum", "size": 12},
            "model": {"path": str(model)},
            "learner": {"ranks": 2},
            "cluster": {"start_seconds": 300.0, "reply_seconds": 300.0},
        }
    )
    return RayLearner(config, str(storage), session=ray_session)


def batch(update: int) -> list[Group]:
    first = 2 * (update - 1)
    return [make_group(first, [3, 5], [1.0, 0.0]), make_group(first + 1, [2, 4], [0.0, 1.0])]


async def go_on(learner: RayLearner, scenario: LearnerScenario) -> UpdateResult:
    """The next update, committed."""
    groups = batch(scenario.updates + 1)
    scenario.batch_of(groups)
    result = await learner.update(scenario.updates + 1, groups, scenario.new_rows())
    scenario.applied_as(result)
    return result


def committed(saved: SavedCheckpoint) -> CheckpointCommitted:
    return CheckpointCommitted(
        update=saved.update,
        optimizer_steps=saved.update,
        policy_version=saved.update,
        path=saved.path,
        manifest_digest=saved.manifest_digest,
        weights_digest=saved.weights_digest,
        bytes=saved.bytes,
        head_seq=7,
        head_hash="h",
    )


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


async def test_a_life_of_the_learner(ray_up: None, model: Path, tmp_path: Path) -> None:
    scenario = LearnerScenario(model)
    async with session() as ray_session:
        learner = learner_of(model, tmp_path, ray_session)
        ready = await learner.start(scenario.begin().new_rows(), 1)
        assert ready.ranks == 2
        pids = [place.pid for place in learner.places]
        assert len(living(pids)) == 2

        assert await learner.gather(0) == initial_weights(model)
        with pytest.raises(RunFailedError, match="nothing to save"):
            await learner.save("u0", 1, "h", None)
        with pytest.raises(RunFailedError, match="no checkpoint is under way"):
            await learner.saved()

        # A supervisor tells every process to end; the ranks leave that to the driver.
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        first = await go_on(learner, scenario)
        assert first.steps[0].applied
        published = await learner.gather(1)
        assert (published.version, published.update) == (1, 1)

        # Training goes on while files are written, and the snapshot is of the moment.
        await learner.save("u000001-i0001-001", 7, "h", published)
        saving = asyncio.ensure_future(learner.saved())
        second = await go_on(learner, scenario)
        checkpoint = committed(await saving)
        assert checkpoint.update == 1 and checkpoint.weights_digest == published.digest
        assert Checkpoints(tmp_path).names() == ["u0", "u000001-i0001-001"]
        assert await learner.served(checkpoint) == published
        with pytest.raises(FileExistsError):
            await learner.save("u000001-i0001-001", 7, "h", None)
        last = await learner.gather(2)

        await learner.load(checkpoint)
        again = await learner.update(2, batch(2), [])
        assert again.steps == second.steps
        assert await learner.gather(2) == last

        broken = msgspec.structs.replace(checkpoint, manifest_digest="0")
        with pytest.raises(CheckpointUnusable, match="the log committed 0"):
            await learner.load(broken)
        assert len(living(pids)) == 2, "a checkpoint that cannot be used costs no rank"

        await learner.close()
        assert living(pids) == []
        await learner.close()
        with pytest.raises(LearnerGone):
            await learner.gather(2)


async def test_a_rank_that_dies_or_hangs_costs_the_group_and_the_next_try_goes_on(
    ray_up: None, model: Path, tmp_path: Path
) -> None:
    scenario = LearnerScenario(model)
    async with session() as ray_session:
        learner = learner_of(model, tmp_path, ray_session)
        await learner.start(scenario.begin().new_rows(), 1)
        killed = [place.pid for place in learner.places]
        groups = batch(1)
        scenario.batch_of(groups)
        updating = asyncio.ensure_future(learner.update(1, groups, scenario.new_rows()))
        await asyncio.sleep(0)
        os.kill(killed[1], signal.SIGKILL)
        with pytest.raises(LearnerGone, match="learner rank 1 died in update") as lost:
            await updating
        assert (lost.value.facts["learner_try"], lost.value.facts["rank"]) == (1, 1)
        assert living(killed) == []

        scenario.lose_learner()
        patient, learner._cluster = (
            learner._cluster,
            learner._cluster.model_copy(update={"reply_seconds": 3.0}),
        )
        await learner.start(scenario.rows(), 2)
        hung = [place.pid for place in learner.places]
        assert not set(hung) & set(killed)
        os.kill(hung[0], signal.SIGSTOP)
        began = asyncio.get_running_loop().time()
        with pytest.raises(LearnerGone, match="did not answer gather within 3 s") as lost:
            await learner.gather(0)
        assert asyncio.get_running_loop().time() - began < 60.0
        assert lost.value.facts["learner_try"] == 2
        assert living(hung) == []

        learner._cluster = patient
        await learner.start(scenario.rows(), 3)
        assert (await learner.gather(0)).digest == initial_weights(model).digest
        await learner.close()
