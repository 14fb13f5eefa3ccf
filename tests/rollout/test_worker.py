"""A rollout worker in this process, on a tiny random model: what goes in, what comes out, what is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from surefoot.rollout.engineloop import WorkerBroken
from surefoot.rollout.packing import unpack_f32, unpack_i32
from surefoot.rollout.protocols import Group, GroupRequest
from surefoot.rollout.worker import ABORTED, RolloutWorker
from surefoot.statemachine.errors import ConfigRefused, LogBroken, ModelRefused, RewardFailed, RunFailedError
from surefoot.statemachine.events import encode
from tests.statemachine.budgets import budget

from .tiny_decoders import logprobs_by_transformers
from .worker_parts import MAX_NEW_TOKENS, PROMPT, a_model, ask, model_folder, published, settings

pack = msgspec.msgpack.encode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("worker") / "model")


async def worker_at(folder: Path, version: int = 0, **changes: Any) -> RolloutWorker:
    """A worker that is ready, with weights loaded."""
    worker = RolloutWorker(settings(folder, **changes))
    await worker.ready()
    await load(worker, version)
    return worker


async def load(worker: RolloutWorker, version: int) -> None:
    weights = published(version)
    assert await worker.load(weights.version, weights.digest, weights.payload) == version


async def group_of(worker: RolloutWorker, request: GroupRequest) -> Group:
    return msgspec.msgpack.decode(await worker.generate(pack(request)), type=Group)


async def evaluated(worker: RolloutWorker, requests: Sequence[GroupRequest]) -> list[Group]:
    return msgspec.msgpack.decode(await worker.evaluate(pack(list(requests))), type=list[Group])


async def test_a_group_names_its_request_and_has_one_sample_a_seed(folder: Path) -> None:
    worker = await worker_at(folder)
    group = await group_of(worker, ask(3, samples=4, attempt=2))
    assert (group.prompt_index, group.attempt, group.row_index) == (3, 2, 103)
    assert unpack_i32(group.prompt_ids) == PROMPT
    assert group.temperature == 0.7
    assert len(group.samples) == 4


async def test_logprobs_are_those_of_the_scaled_full_distribution(folder: Path) -> None:
    worker = await worker_at(folder)
    group = await group_of(worker, ask())
    for sample in group.samples:
        expected = logprobs_by_transformers(a_model(0), PROMPT, unpack_i32(sample.ids), 0.7)
        assert torch.allclose(torch.tensor(unpack_f32(sample.logprobs)), expected, atol=1e-5)


async def test_every_token_carries_the_version_that_made_it(folder: Path) -> None:
    worker = await worker_at(folder, version=0)
    await load(worker, 1)
    group = await group_of(worker, ask(admission_version=1))
    for sample in group.samples:
        assert unpack_i32(sample.versions) == [1] * len(unpack_i32(sample.ids))
        expected = logprobs_by_transformers(a_model(1), PROMPT, unpack_i32(sample.ids), 0.7)
        assert torch.allclose(torch.tensor(unpack_f32(sample.logprobs)), expected, atol=1e-5)


async def test_text_is_decoded_and_the_reward_sees_row_text_and_ids(folder: Path) -> None:
    worker = await worker_at(folder)
    alphabet = ["", "", *"0123456789+-= "]
    for sample in (await group_of(worker, ask())).samples:
        ids = unpack_i32(sample.ids)
        assert sample.text == "".join(alphabet[one] for one in ids)
        assert sample.parts == {"length": len(ids), "answer": 3.0}
        assert sample.reward == len(ids) + 3.0
        assert sample.truncated == (len(ids) == MAX_NEW_TOKENS and ids[-1] != 1)


async def test_a_reward_passed_as_bytes_is_made_again(folder: Path) -> None:
    from ray import cloudpickle

    seven = 7.0
    worker = await worker_at(folder, reward_pickled=cloudpickle.dumps(lambda row, text, ids: seven))
    assert [sample.reward for sample in (await group_of(worker, ask())).samples] == [7.0] * 3


async def test_a_reward_that_cannot_be_made_again_is_refused(folder: Path) -> None:
    worker = RolloutWorker(settings(folder, reward_pickled=b"cno_such_module\nfunction\n."))
    with pytest.raises(ConfigRefused, match="no_such_module"):
        await worker.ready()


async def test_a_request_waits_for_its_admission_version(folder: Path) -> None:
    """Report 30: no group starts on older weights than it was admitted at."""
    worker = await worker_at(folder, version=0)
    waiting = asyncio.ensure_future(group_of(worker, ask(0, admission_version=1)))
    await group_of(worker, ask(1))
    assert not waiting.done()
    await load(worker, 1)
    assert {v for sample in (await waiting).samples for v in unpack_i32(sample.versions)} == {1}


async def test_weights_whose_digest_is_not_the_published_one_are_not_loaded(folder: Path) -> None:
    worker = await worker_at(folder, version=0)
    weights = published(1)
    damaged = bytearray(weights.payload)
    damaged[-3] ^= 1
    with pytest.raises(WorkerBroken, match=weights.digest):
        await worker.load(1, weights.digest, bytes(damaged))
    with pytest.raises(WorkerBroken, match="policy version 1"):
        await worker.load(1, weights.digest, weights.payload[:-8])
    group = await group_of(worker, ask())
    assert {v for sample in group.samples for v in unpack_i32(sample.versions)} == {0}


async def test_weights_of_another_model_are_refused(folder: Path) -> None:
    from surefoot.rollout.payload import digest_of, read_tensors
    from surefoot.rollout.payload import pack as pack_tensors

    worker = await worker_at(folder)
    tensors = read_tensors(published(1).payload)
    del tensors["model.norm.weight"]
    with pytest.raises(ModelRefused, match=r"model\.norm\.weight"):
        await worker.load(1, digest_of(tensors), pack_tensors(tensors))


async def test_a_worker_is_built_from_a_budget_and_from_nothing_else(folder: Path) -> None:
    with pytest.raises(LogBroken):
        RolloutWorker(settings(folder, budget=b'{"optimizer_steps_total": -1}'))
    empty = msgspec.structs.replace(budget(), optimizer_steps_total=0)
    with pytest.raises(RunFailedError, match="0 optimizer steps"):
        await RolloutWorker(settings(folder, budget=encode(empty))).ready()


async def test_no_prompt_beyond_the_budget_is_generated(folder: Path) -> None:
    worker = await worker_at(folder)
    total = budget().prompts_total
    await group_of(worker, ask(total - 1))
    with pytest.raises(RunFailedError, match=f"prompt {total} "):
        await group_of(worker, ask(total))


async def test_a_reward_that_raises_names_its_row(folder: Path) -> None:
    worker = await worker_at(folder, reward="tests.rollout.worker_parts:raising_reward")
    with pytest.raises(RewardFailed, match=r"row 105 .*no such thing"):
        await group_of(worker, ask(5))


async def test_an_evaluation_comes_in_order_and_greedy_is_the_likeliest_token(folder: Path) -> None:
    worker = await worker_at(folder)
    requests = [ask(index, samples=1, temperature=0.0) for index in range(12)]  # more than there are slots
    groups = await evaluated(worker, requests)
    assert [group.prompt_index for group in groups] == list(range(12))
    assert len({group.samples[0].ids for group in groups}) == 1
    ids = unpack_i32(groups[0].samples[0].ids)
    for place in range(len(ids)):
        logits = a_model(0)(input_ids=torch.tensor([PROMPT + ids[:place]])).logits[0, -1]
        assert ids[place] == int(logits.argmax())


async def test_an_evaluation_that_failed_can_be_asked_for_again_at_once(folder: Path) -> None:
    worker = await worker_at(folder, reward="tests.rollout.worker_parts:raising_reward")
    requests = [ask(index, samples=1) for index in range(12)]
    requests.append(ask(12, admission_version=7))  # would be waited for in vain
    for _ in range(2):
        with pytest.raises(RewardFailed):
            await asyncio.wait_for(evaluated(worker, requests), 30)


async def test_an_aborted_group_says_so_and_its_next_attempt_is_generated(folder: Path) -> None:
    worker = await worker_at(folder, version=0)
    waiting = asyncio.ensure_future(worker.generate(pack(ask(0, admission_version=1))))
    await asyncio.sleep(0)
    await worker.abort(0, 1)
    assert await waiting == ABORTED
    assert (await group_of(worker, ask(0, attempt=2))).attempt == 2


async def test_deterministic_groups_are_the_same_whatever_else_is_asked_for(folder: Path) -> None:
    alone = await worker_at(folder, deterministic=True)
    beside = await worker_at(folder, deterministic=True)
    first = await group_of(alone, ask(4))
    groups = await asyncio.gather(*(group_of(beside, ask(index)) for index in (7, 4, 1)))
    assert groups[1].samples == first.samples


PROGRAM = """
import os, signal, subprocess, sys, threading
from surefoot.rollout.worker import ignore_sigterm
thread = threading.Thread(target=ignore_sigterm)
thread.start(); thread.join()
os.kill(os.getpid(), signal.SIGTERM)
child = subprocess.Popen([sys.executable, "-c", "import sys; print(); sys.stdout.flush(); sys.stdin.read()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
child.terminate()
print("alive, and its child ended with", child.wait(timeout=20))
"""


def test_a_worker_outlives_sigterm_and_processes_of_its_reward_do_not() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "alive, and its child ended with -15"
