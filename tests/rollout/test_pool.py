"""The pool's bookkeeping, on worker processes that a test holds by their strings and a clock that jumps."""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from surefoot.rollout.handles import WorkRaised
from surefoot.rollout.pool import REPLACEMENTS_IN_A_ROW
from surefoot.rollout.protocols import Answer, GroupDone, GroupFailed, WorkerLost
from surefoot.statemachine.errors import ModelRefused, RunFailedError, TimedOut
from surefoot.statemachine.events import IssueReason
from tests.simulation.virtual import run_virtually

from .fake_workers import (
    REPLY_SECONDS,
    START_SECONDS,
    FakeSource,
    FakeWorker,
    a_pool,
    request,
    settle,
    weights,
)


def virtually(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on the loop whose clock jumps."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtually(test(*args, **kwargs))

    del run.__wrapped__  # or pytest-asyncio takes it for a coroutine function
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run


async def ready_pool(source: FakeSource, **options: Any) -> Any:
    """A pool that is up, with version 0 loaded."""
    pool = a_pool(source, **options)
    await pool.start()
    await pool.publish(weights(0))
    return pool


def failed(answers: list[Answer]) -> list[tuple[int, int]]:
    return sorted((a.prompt_index, a.attempt) for a in answers if isinstance(a, GroupFailed))


@virtually
async def test_no_slot_is_free_before_the_first_publication_is_loaded() -> None:
    source = FakeSource()
    pool = a_pool(source, workers=2, groups=3)
    await pool.start()
    assert pool.free_slots() == 0
    await pool.publish(weights(0))
    assert pool.free_slots() == 6


@virtually
async def test_requests_go_to_the_freest_worker() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=2, groups=3)
    pool.submit([request(index) for index in range(4)])
    await settle()
    assert [len(worker.work) for worker in source.spawned] == [2, 2]
    assert pool.free_slots() == 2
    first = source.spawned[0]
    for key in list(first.work):
        first.finish(*key)
    await settle()
    pool.submit([request(4), request(5)])
    await settle()
    assert sorted(first.work) == [(4, 1), (5, 1)]


@virtually
async def test_requests_beyond_the_room_wait_and_start_as_places_become_free() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1, groups=2)
    pool.submit([request(index) for index in range(4)])
    await settle()
    (worker,) = source.spawned
    assert sorted(worker.work) == [(0, 1), (1, 1)]
    assert pool.free_slots() == 0
    worker.finish(1)
    await settle()
    assert sorted(worker.work) == [(0, 1), (2, 1)]
    assert pool.free_slots() == 0


@virtually
async def test_answers_are_all_that_are_there_and_at_least_one() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1, groups=3)
    pool.submit([request(index) for index in range(3)])
    waiting = asyncio.ensure_future(pool.answers())
    await settle()
    assert not waiting.done()
    (worker,) = source.spawned
    worker.finish(2)
    (done,) = await waiting
    assert isinstance(done, GroupDone)
    assert done.group.prompt_index == 2
    worker.finish(0)
    worker.raise_in(1, "the reward of row 1 raised KeyError")
    await settle()
    both = await pool.answers()
    assert [type(answer) for answer in both] == [GroupDone, GroupFailed]
    assert both[1] == GroupFailed(
        worker=0,
        prompt_index=1,
        attempt=1,
        reason=IssueReason.FAILED,
        error="the reward of row 1 raised KeyError",
    )


@virtually
async def test_a_lost_worker_is_answered_once_and_so_is_every_attempt_that_it_held() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=2, groups=2)
    pool.submit([request(index) for index in range(4)])
    await settle()
    victim, survivor = source.spawned
    held = sorted(victim.work)
    victim.die("out of memory")
    await settle()
    answers = await pool.answers()
    assert answers[0] == WorkerLost(worker=0, because="out of memory")
    assert failed(answers) == held
    assert {a.reason for a in answers[1:]} == {IssueReason.WORKER_LOST}
    for key in list(survivor.work):
        survivor.finish(*key)
    await settle()
    assert all(isinstance(answer, GroupDone) for answer in await pool.answers())


@virtually
async def test_a_replacement_has_the_last_weights_before_it_gets_work() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1, groups=1)
    await pool.publish(weights(1))
    pool.submit([request(0), request(1)])
    await settle()
    source.spawned[0].die()
    assert pool.free_slots() == 0
    await settle()
    replacement = source.spawned[1]
    assert replacement.index == 0
    assert replacement.loads == [1]
    assert list(replacement.work) == [(1, 1)], "what waited goes to it, what was held was answered"


@virtually
async def test_weights_published_while_a_replacement_loads_are_loaded_too() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1)
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(worker: FakeWorker) -> None:
        reached.set()
        await go_on.wait()

    source.ready = slowly
    source.spawned[0].die()
    await reached.wait()
    await pool.publish(weights(1))
    assert pool.free_slots() == 0
    go_on.set()
    await settle()
    assert source.spawned[1].loads == [1]
    assert pool.free_slots() == 2


@virtually
async def test_a_publication_goes_on_when_a_worker_dies_during_it() -> None:
    """Report 30: a receiver is lost during it."""
    source = FakeSource()
    pool = await ready_pool(source, workers=2)
    victim, survivor = source.spawned
    victim.before_load = lambda version: victim.die("killed by the system")
    await pool.publish(weights(1))
    assert survivor.loads == [0, 1]
    await settle()
    assert await pool.answers() == [WorkerLost(worker=0, because="killed by the system")]
    assert source.spawned[2].loads == [1]
    assert pool.free_slots() == 4


@virtually
async def test_a_worker_that_does_not_confirm_in_time_is_killed_and_replaced() -> None:
    """Report 30: a receiver hangs during it."""
    source = FakeSource()
    pool = await ready_pool(source, workers=2)
    hung = source.spawned[1]
    hung.hang_at_load = True
    began = asyncio.get_running_loop().time()
    await pool.publish(weights(1))
    assert 0 < asyncio.get_running_loop().time() - began <= REPLY_SECONDS
    (lost,) = await pool.answers()
    assert isinstance(lost, WorkerLost)
    assert "policy version 1" in lost.because
    await settle()
    assert hung.killed
    assert source.spawned[2].loads == [1]


@virtually
async def test_a_worker_that_does_not_answer_in_time_is_killed_and_replaced() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1, groups=2)
    pool.submit([request(7), request(8)])
    answers = await pool.answers()
    assert asyncio.get_running_loop().time() == REPLY_SECONDS
    lost = [answer for answer in answers if isinstance(answer, WorkerLost)]
    assert len(lost) == 1
    assert "cluster.reply_seconds" in lost[0].because
    assert failed(answers) == [(7, 1), (8, 1)]
    await settle()
    assert source.spawned[0].killed
    assert len(source.living) == 1


@virtually
async def test_a_group_from_a_worker_that_was_given_up_is_not_answered_a_second_time() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1)
    slow = source.spawned[0]
    pool.submit([request(0)])
    await settle()
    slow.hang_at_load = True
    slow.kill = asyncio.Event().wait  # type: ignore[method-assign,assignment]  # it takes long to die
    await pool.publish(weights(1))
    slow.finish(0)
    await settle()
    assert [type(answer) for answer in await pool.answers()] == [WorkerLost, GroupFailed]
    assert pool.free_slots() == 2


@virtually
async def test_a_newer_attempt_ends_the_older_one_which_is_answered_no_more() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1, groups=2)
    (worker,) = source.spawned
    pool.submit([request(0), request(1), request(2)])  # 2 waits
    await settle()
    pool.submit([request(0, attempt=2), request(2, attempt=2)])
    await settle()
    assert worker.aborted == [(0, 1)]
    assert (2, 1) not in worker.work
    for key in ((0, 2), (1, 1), (2, 2)):
        worker.finish(*key)
        await settle()
    keys = [(a.group.prompt_index, a.group.attempt) for a in await pool.answers() if isinstance(a, GroupDone)]
    assert keys == [(0, 2), (1, 1), (2, 2)]
    await asyncio.sleep(2 * REPLY_SECONDS)
    assert not worker.killed, "nobody waits for the older attempts"


@virtually
async def test_replacements_that_do_not_come_up_fail_the_run_after_a_few() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1)

    async def refuse(worker: FakeWorker) -> None:
        raise WorkRaised("no memory left on the device")

    source.ready = refuse
    evaluating = asyncio.ensure_future(pool.evaluate([request(index) for index in range(3)]))
    source.spawned[0].evaluate_as = lambda requests: None
    await settle()
    source.spawned[0].die()
    with pytest.raises(RunFailedError, match="no memory left"):
        while True:
            await pool.answers()
    with pytest.raises(RunFailedError, match="no memory left"):
        await evaluating
    assert len(source.spawned) == 1 + REPLACEMENTS_IN_A_ROW
    assert source.living == []


@virtually
async def test_a_replacement_that_hangs_is_given_up_in_time() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1)

    async def hang(worker: FakeWorker) -> None:
        await asyncio.Event().wait()

    source.ready = hang
    source.spawned[0].die()
    with pytest.raises(RunFailedError, match="start_seconds"):
        while True:
            await pool.answers()
    assert asyncio.get_running_loop().time() == pytest.approx(REPLACEMENTS_IN_A_ROW * START_SECONDS)
    assert source.living == []


@virtually
async def test_a_replacement_that_comes_up_clears_the_count() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1)
    for _ in range(3):
        left = [True] * (REPLACEMENTS_IN_A_ROW - 1)

        async def refuse_at_first(worker: FakeWorker, left: list[bool] = left) -> None:
            if left:
                left.pop()
                raise WorkRaised("not yet")

        source.ready = refuse_at_first
        source.living[0].die()
        await settle()
        assert await pool.answers() == [WorkerLost(worker=0, because="out of memory")]
        assert pool.free_slots() == 2


@virtually
async def test_a_replacement_that_cannot_load_the_weights_is_ended_and_another_tried() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1)
    left = [True]

    def refuse_once(version: int) -> None:
        if left:
            left.pop()
            raise WorkRaised("weights of another model")

    source.before_load = refuse_once
    source.spawned[0].die()
    await settle()
    assert source.spawned[1].killed
    assert source.spawned[2].loads == [0]
    assert pool.free_slots() == 2


@virtually
async def test_a_start_that_takes_too_long_says_for_what_it_waited_and_leaves_nothing() -> None:
    source = FakeSource()

    async def only_the_first(worker: FakeWorker) -> None:
        if worker.index:
            await asyncio.Event().wait()

    source.ready = only_the_first
    pool = a_pool(source, workers=3)
    with pytest.raises(TimedOut, match="2 of 3 rollout workers") as caught:
        await pool.start()
    assert caught.value.facts["seconds"] == START_SECONDS
    assert asyncio.get_running_loop().time() == START_SECONDS
    assert len(source.spawned) == 3
    assert source.living == []


@virtually
async def test_what_a_worker_refuses_at_the_start_is_the_error() -> None:
    source = FakeSource()

    async def refuse(worker: FakeWorker) -> None:
        if worker.index == 1:
            raise WorkRaised("no such model", ModelRefused("no such model"))

    source.ready = refuse
    with pytest.raises(ModelRefused, match="no such model"):
        await a_pool(source).start()
    assert source.living == []


@virtually
async def test_a_start_that_was_cancelled_leaves_nothing_and_can_be_repeated() -> None:
    source = FakeSource()

    async def hang(worker: FakeWorker) -> None:
        await asyncio.Event().wait()

    source.ready = hang
    pool = a_pool(source, workers=2)
    starting = asyncio.ensure_future(pool.start())
    await settle()
    starting.cancel()
    await asyncio.wait({starting})
    assert source.living == []
    source.ready = source._at_once
    await pool.start()
    await pool.publish(weights(0))
    assert pool.free_slots() == 4


@virtually
async def test_an_evaluation_is_spread_over_workers_and_comes_back_in_order() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=2, samples_per_worker=4)
    groups = await pool.evaluate([request(index, samples=1) for index in range(10)])
    assert [group.samples[0].text for group in groups] == [str(index) for index in range(10)]
    assert all(worker.evaluations for worker in source.spawned)
    assert max(len(chunk) for worker in source.spawned for chunk in worker.evaluations) == 4


@virtually
async def test_a_small_evaluation_is_shared_out_too() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=2, samples_per_worker=64)
    await pool.evaluate([request(index, samples=1) for index in range(4)])
    assert [worker.evaluations for worker in source.spawned] == [[[0, 1]], [[2, 3]]]


@virtually
async def test_an_evaluation_waits_for_weights() -> None:
    source = FakeSource()
    pool = a_pool(source)
    await pool.start()
    evaluating = asyncio.ensure_future(pool.evaluate([request(0, samples=1)]))
    await settle()
    assert not evaluating.done()
    await pool.publish(weights(0))
    assert [group.prompt_index for group in await evaluating] == [0]


@virtually
async def test_rows_of_a_worker_that_dies_are_evaluated_by_another() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=2)
    victim = source.spawned[0]
    victim.evaluate_as = lambda requests: None
    evaluating = asyncio.ensure_future(pool.evaluate([request(index, samples=1) for index in range(8)]))
    await settle()
    assert victim.evaluations
    victim.die()
    assert [group.prompt_index for group in await evaluating] == list(range(8))


@virtually
async def test_a_row_that_cannot_be_evaluated_fails_the_run_after_its_attempts() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1, max_attempts=3)
    tries: list[int] = []

    def refuse(requests: Any) -> Any:
        tries.append(1)
        raise WorkRaised("the reward of row 3 raised")

    source.spawned[0].evaluate_as = refuse
    with pytest.raises(RunFailedError, match="row 3"):
        await pool.evaluate([request(0)])
    assert len(tries) == 3


@virtually
async def test_close_ends_every_worker_also_one_that_is_being_replaced_and_twice_is_once() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=2)

    async def hang(worker: FakeWorker) -> None:
        await asyncio.Event().wait()

    source.ready = hang
    pool.submit([request(0), request(1)])
    source.spawned[0].die()
    await settle()
    assert len(source.living) == 2
    await pool.close()
    await pool.close()
    assert source.living == []
    assert len(source.spawned) == 3


@pytest.mark.parametrize("seed", range(80))
@virtually
async def test_every_attempt_is_answered_exactly_once_whatever_dies(seed: int) -> None:
    chance = random.Random(seed)
    source = FakeSource()
    pool = await ready_pool(source, workers=chance.randint(1, 3), groups=chance.randint(1, 3))
    wanted: set[tuple[int, int]] = set()
    answered: Counter[tuple[int, int]] = Counter()
    lost = 0
    attempt = dict.fromkeys(range(30), 0)

    async def listen() -> None:
        nonlocal lost
        while True:
            for answer in await pool.answers():
                if isinstance(answer, GroupDone):
                    answered[answer.group.prompt_index, answer.group.attempt] += 1
                elif isinstance(answer, GroupFailed):
                    answered[answer.prompt_index, answer.attempt] += 1
                else:
                    lost += 1

    listening = asyncio.ensure_future(listen())
    deaths, version = 0, 0
    for _ in range(60):
        act = chance.random()
        if act < 0.5:
            index = chance.randrange(30)
            attempt[index] += 1
            if (index, attempt[index] - 1) not in answered:
                wanted.discard((index, attempt[index] - 1))
            wanted.add((index, attempt[index]))
            pool.submit([request(index, attempt[index])])
        elif act < 0.8:
            busy = [(worker, key) for worker in source.living for key in worker.work]
            if busy:
                worker, key = chance.choice(busy)
                if chance.random() < 0.8:
                    worker.finish(*key)
                else:
                    worker.raise_in(key[0], "raised", key[1])
        elif act < 0.9:
            await settle()  # so that whoever dies was in the pool, not on its way there
            chance.choice(source.living).die()
            deaths += 1
        else:
            version += 1
            await pool.publish(weights(version))
        for _ in range(chance.randint(0, 6)):
            await asyncio.sleep(0)
    for _ in range(20):  # at most 30 groups, and at least two places a round
        await settle()
        for worker in source.living:
            for key in list(worker.work):
                worker.finish(*key)
    await settle()
    assert not listening.done()
    assert wanted <= set(answered), f"not answered: {wanted - set(answered)}"
    assert max(answered.values(), default=1) == 1
    assert lost == deaths
    assert {worker.loads[-1] for worker in source.living} == {version}
    await pool.close()
    listening.cancel()


async def test_a_draining_nodes_worker_gets_nothing_new_and_is_replaced_once_it_is_idle() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=2, groups=2)
    first, second = source.spawned
    pool.submit([request(0), request(1)])
    await settle()
    assert list(first.work) == [(0, 1)] and list(second.work) == [(1, 1)]
    pool.drain(frozenset({first.node}))
    assert pool.free_slots() == 1  # of the other
    pool.submit([request(2), request(3)])
    await settle()
    assert list(first.work) == [(0, 1)], "it gets nothing new"
    assert list(second.work) == [(1, 1), (2, 1)]
    assert not first.killed, "what it has begun it may finish"
    first.finish(0)
    await settle()
    assert first.killed and len(source.living) == 2
    (third,) = (worker for worker in source.living if worker is not second)
    assert third.loads == [0] and list(third.work) == [(3, 1)], "its place is taken on another node"
    answers = await pool.answers()
    assert [type(answer).__name__ for answer in answers] == ["GroupDone", "WorkerLost"]
    await pool.close()


async def test_an_idle_worker_of_a_draining_node_is_replaced_at_once_but_not_in_an_evaluation() -> None:
    source = FakeSource()
    pool = await ready_pool(source, workers=1, groups=2)
    (first,) = source.spawned
    first.evaluate_as = lambda requests: None  # until it dies
    evaluating = asyncio.ensure_future(pool.evaluate([request(0)]))
    await settle()
    pool.drain(frozenset({first.node}))
    await settle()
    assert not first.killed, "it is at work"
    first.die()
    await settle()
    assert [group.prompt_index for group in await evaluating] == [0]
    (second,) = source.living
    pool.drain(frozenset({second.node}))
    await settle()
    assert second.killed and len(source.living) == 1
    await pool.close()
