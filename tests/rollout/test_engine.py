"""The engine: log-probabilities, admission, weight swaps, end tokens, aborts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from surefoot.rollout import torch_engine
from surefoot.rollout.attention import DecodeRows, PromptBlock
from surefoot.rollout.engine import Engine, FinishedSample, GroupTask, generate_batch
from surefoot.rollout.torch_engine import TorchEngine
from surefoot.statemachine.errors import ModelRefused, RunFailedError

from .tiny_decoders import (
    VARIANTS,
    VOCABULARY,
    engine_for,
    logprobs_by_transformers,
    random_prompts,
    same,
    tensors_of,
    tiny_model,
)


def task(key: Any, prompt: Sequence[int], seeds: Sequence[int], **changes: Any) -> GroupTask:
    options = {"temperature": 1.0, "max_new_tokens": 8} | changes
    return GroupTask(key=key, prompt_ids=prompt, seeds=seeds, **options)


def drain(engine: Engine) -> list[FinishedSample]:
    finished: list[FinishedSample] = []
    while engine.active_samples():
        finished += engine.step()
    return finished


def alone(model: Any, one: GroupTask, sample: int, **options: Any) -> FinishedSample:
    """The same sample in an engine that has nothing else to do."""
    engine = engine_for(model, slots=1, **options)
    (only,) = generate_batch(
        engine,
        [one.prompt_ids],
        seeds=[[one.seeds[sample]]],
        temperature=one.temperature,
        max_new_tokens=one.max_new_tokens,
    )
    return only[0]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_report_46_log_probabilities_are_those_of_a_full_forward(variant: str, temperature: float) -> None:
    """Temperature, shift, position ids and the end token, in one convention with the learner's."""
    family, changes = VARIANTS[variant]
    model = tiny_model(family, **changes)
    stop_ids = [3, 11, 17]
    prompts = random_prompts([4, 1, 30, 9])
    answers = generate_batch(
        engine_for(model, stop_ids=stop_ids),
        prompts,
        seeds=[[10 * index + sample for sample in range(4)] for index in range(len(prompts))],
        temperature=temperature,
        max_new_tokens=24,
    )
    stopped = [sample for group in answers for sample in group if not sample.truncated]
    assert stopped, "no end token was sampled: its log-probability went unchecked"
    for prompt, group in zip(prompts, answers, strict=True):
        for sample in group:
            expected = logprobs_by_transformers(model, prompt, sample.ids.tolist(), temperature)
            assert sample.logprobs.dtype == np.float32
            torch.testing.assert_close(torch.from_numpy(sample.logprobs), expected, atol=1e-5, rtol=1e-5)


def test_temperature_0_takes_what_generate_takes_and_reports_at_temperature_1() -> None:
    model = tiny_model("Qwen3", head_dim=8)
    prompt = random_prompts([6])[0]
    ((sample,),) = generate_batch(
        engine_for(model), [prompt], seeds=[[5]], temperature=0.0, max_new_tokens=20
    )
    ids = torch.tensor([prompt])
    reference = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
    )
    assert sample.ids.tolist() == reference[0, len(prompt) :].tolist()
    expected = logprobs_by_transformers(model, prompt, sample.ids.tolist(), 1.0)
    torch.testing.assert_close(torch.from_numpy(sample.logprobs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("slots", [1, 3, 5, 64])
def test_a_sample_is_the_same_in_any_company(slots: int) -> None:
    """Admitted whenever a place becomes free, among groups of other lengths and temperatures."""
    model = tiny_model()
    stop_ids = [2, 3, 4, 5]
    lengths = [3, 20, 1, 8, 8, 15, 2]
    tasks = [
        task(index, prompt, [100 * index + sample for sample in range(1 + index % 4)])
        for index, prompt in enumerate(random_prompts(lengths))
    ]
    tasks = [
        task(one.key, one.prompt_ids, one.seeds, temperature=heat, max_new_tokens=limit)
        for one, heat, limit in zip(
            tasks, [1.0, 0.7, 0.0, 1.3, 1.0, 0.7, 1.0], [9, 20, 5, 1, 30, 12, 7], strict=True
        )
    ]
    engine = engine_for(model, slots=slots, stop_ids=stop_ids)
    for one in tasks:
        engine.add(one)
    finished = {(sample.key, sample.sample_index): sample for sample in drain(engine)}
    assert len(finished) == sum(len(one.seeds) for one in tasks)
    for (key, index), sample in finished.items():
        reference = alone(model, tasks[key], index, stop_ids=stop_ids)
        assert sample.ids.tolist() == reference.ids.tolist()
        assert sample.truncated == reference.truncated
        np.testing.assert_allclose(sample.logprobs, reference.logprobs, atol=1e-5)


def test_a_finished_samples_place_is_taken_at_once() -> None:
    engine = engine_for(tiny_model(), slots=2)
    prompts = random_prompts([4, 4, 4, 4])
    for key, (prompt, limit) in enumerate(zip(prompts, [6, 2, 3, 1], strict=True)):
        engine.add(task(key, prompt, [key], max_new_tokens=limit))
    done = [[sample.key for sample in engine.step()] for _ in range(6)]
    # One place is taken for six steps; the other by samples of 2, 3 and 1 tokens, without a step between.
    assert done == [[], [1], [], [], [2], [0, 3]]
    assert engine.step() == []


def test_places_are_counted_by_the_sample() -> None:
    engine = engine_for(tiny_model(), slots=4)
    assert (engine.active_samples(), engine.free_samples()) == (0, 4)
    engine.add(task("a", [1, 2], [1, 2, 3], max_new_tokens=2))
    assert (engine.active_samples(), engine.free_samples()) == (3, 1)
    engine.add(task("b", [1, 2], [4, 5, 6], max_new_tokens=2))
    assert (engine.active_samples(), engine.free_samples()) == (6, 0)
    engine.step()
    assert (engine.active_samples(), engine.free_samples()) == (6, 0)
    assert len(engine.step()) == 4
    assert (engine.active_samples(), engine.free_samples()) == (2, 2)


def spied(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows decoded and prompts computed, for each step from now on."""
    shapes: list[tuple[int, int]] = []
    forward = engine._decoder.forward

    def spy(rows: DecodeRows | None, block: PromptBlock | None) -> torch.Tensor:
        shapes.append((len(rows.tokens) if rows else 0, len(block.prompts) if block else 0))
        return forward(rows, block)

    monkeypatch.setattr(engine._decoder, "forward", spy)
    return shapes


def test_a_groups_prompt_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for samples that find a place only once a sibling has left its own."""
    model = tiny_model()
    prompt = random_prompts([11])[0]
    engine = engine_for(model, slots=3, stop_ids=list(range(0, VOCABULARY, 4)))
    shapes = spied(engine, monkeypatch)
    one = task("group", prompt, list(range(8)), max_new_tokens=16)
    engine.add(one)
    finished = drain(engine)
    assert len({len(sample.ids) for sample in finished}) > 2
    assert shapes[0] == (0, 1) and all(prompts == 0 for _, prompts in shapes[1:])
    for sample in finished:
        assert (
            sample.ids.tolist()
            == alone(model, one, sample.sample_index, stop_ids=list(range(0, VOCABULARY, 4))).ids.tolist()
        )


def test_a_step_takes_in_a_bounded_number_of_prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "PREFILL_TOKENS", 20)
    engine = engine_for(tiny_model(), slots=8)
    shapes = spied(engine, monkeypatch)
    for key, prompt in enumerate(random_prompts([6, 6, 6, 6, 40, 3])):
        engine.add(task(key, prompt, [key], max_new_tokens=10))
    assert len(drain(engine)) == 6
    # 3 x 6 fit and 4 x 6 do not; one of 40 goes alone, as nothing would come of waiting.
    assert [prompts for _, prompts in shapes[:5]] == [3, 1, 1, 1, 0]


def test_new_weights_take_effect_between_two_tokens_and_cached_keys_are_kept() -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    prompt = random_prompts([7])[0]
    engine = engine_for(old, slots=2)
    engine.add(task("a", prompt, [1, 2], max_new_tokens=9))
    for _ in range(4):
        engine.step()
    engine.load_weights(7, tensors_of(new))
    assert engine.version == 7
    finished = drain(engine)
    assert len(finished) == 2
    for sample in finished:
        assert sample.versions.dtype == np.int32
        assert sample.versions.tolist() == [0] * 4 + [7] * 5
        ids = [*prompt, *sample.ids.tolist()]
        cache, logits = DynamicCache(), []
        # The prompt and three tokens have gone through the old weights when they are swapped.
        seen = len(prompt) + 3
        first = old(input_ids=torch.tensor([ids[:seen]]), cache=cache, use_cache=True)
        logits = [first.logits[0, len(prompt) - 1 :]]
        rest = new(input_ids=torch.tensor([ids[seen:-1]]), cache=cache, use_cache=True)
        logits.append(rest.logits[0])
        expected = torch.log_softmax(torch.cat(logits), dim=-1)[range(9), sample.ids.tolist()]
        torch.testing.assert_close(torch.from_numpy(sample.logprobs), expected, atol=1e-5, rtol=1e-5)
        without_cache = logprobs_by_transformers(new, prompt, sample.ids.tolist(), 1.0)
        assert (without_cache - expected)[4:].abs().max() > 1e-3


def test_weights_that_do_not_fit_leave_version_and_samples_as_they_were() -> None:
    model = tiny_model()
    one = task("a", random_prompts([5])[0], [3])
    engine = engine_for(model)
    engine.add(one)
    engine.step()
    with pytest.raises(ModelRefused):
        engine.load_weights(1, {"model.norm.weight": torch.zeros(48)})
    assert engine.version == 0
    (sample,) = drain(engine)
    assert sample.ids.tolist() == alone(model, one, 0).ids.tolist()
    assert set(sample.versions.tolist()) == {0}


def test_weights_are_copied_in() -> None:
    model = tiny_model()
    tensors = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    engine = engine_for(model)
    engine.load_weights(1, tensors)
    for tensor in tensors.values():
        tensor.zero_()
    one = task("a", random_prompts([5])[0], [3])
    engine.add(one)
    assert drain(engine)[0].ids.tolist() == alone(model, one, 0).ids.tolist()


def test_report_52_either_end_id_ends_a_response_and_stays_in_it() -> None:
    """Two end ids; the pad id is one of them; prompts hold both."""
    model = tiny_model("Qwen2", tie_word_embeddings=True, eos_token_id=[9, 40], pad_token_id=40)
    prompts = [[40, 40, 3, 9], [7, 40], [5]]
    answers = generate_batch(
        engine_for(model, stop_ids=[9, 40]),
        prompts,
        seeds=[list(range(100 * index, 100 * index + 20)) for index in range(3)],
        temperature=1.0,
        max_new_tokens=40,
    )
    ends: set[int] = set()
    for prompt, group in zip(prompts, answers, strict=True):
        for sample in group:
            ids = sample.ids.tolist()
            assert not {9, 40} & set(ids[:-1])
            assert sample.truncated == (ids[-1] not in (9, 40))
            assert len(ids) == 40 or not sample.truncated
            assert len(sample.logprobs) == len(sample.versions) == len(ids)
            expected = logprobs_by_transformers(model, prompt, ids, 1.0)
            torch.testing.assert_close(torch.from_numpy(sample.logprobs), expected, atol=1e-5, rtol=1e-5)
            ends |= {ids[-1]} & {9, 40}
    assert ends == {9, 40}


def test_an_end_token_in_the_last_place_is_no_truncation() -> None:
    model = tiny_model()
    one = task("a", random_prompts([5])[0], [3], max_new_tokens=6)
    ids = alone(model, one, 0).ids.tolist()
    assert ids[-1] not in ids[:-1]
    ended = alone(model, one, 0, stop_ids=[ids[-1]])
    assert ended.ids.tolist() == ids and not ended.truncated
    assert alone(model, one, 0, stop_ids=[VOCABULARY + 5, -1]).truncated  # ids that the model has not


def test_a_seed_moves_its_own_sample_only() -> None:
    model = tiny_model()
    prompt = random_prompts([5])[0]

    def answers(seeds: list[int]) -> list[list[int]]:
        (group,) = generate_batch(
            engine_for(model), [prompt], seeds=[seeds], temperature=1.0, max_new_tokens=12
        )
        return [sample.ids.tolist() for sample in group]

    first, second = answers([1, 2, 3, 2]), answers([1, 9, 3, 2])
    assert first[1] == first[3] != first[0]
    assert [first[0], first[2], first[3]] == [second[0], second[2], second[3]]
    assert first[1] != second[1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_aborted_groups_never_come_back_and_the_others_do_not_notice(deterministic: bool) -> None:
    model = tiny_model()
    tasks = [task(key, random_prompts([4 + key])[0], [key, 50 + key]) for key in range(4)]
    engine = engine_for(model, slots=5, deterministic=deterministic)
    for one in tasks:
        engine.add(one)
    engine.step()
    engine.step()
    engine.abort({0, 3, "unknown"})  # the one runs, the other waits
    assert engine.active_samples() == 4
    finished = drain(engine)
    assert {(sample.key, sample.sample_index) for sample in finished} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    for sample in finished:
        reference = alone(model, tasks[sample.key], sample.sample_index)
        assert sample.ids.tolist() == reference.ids.tolist()
    assert engine.free_samples() == 5


@pytest.mark.parametrize("seed", range(6))
def test_every_sample_comes_back_once_whatever_is_added_aborted_and_swapped(seed: int) -> None:
    random = np.random.default_rng(seed)
    model = tiny_model()
    engine = engine_for(model, slots=int(random.integers(1, 6)), stop_ids=[1, 2, 3, 4, 5, 6])
    tasks: dict[int, GroupTask] = {}
    aborted: set[int] = set()
    finished: list[FinishedSample] = []
    for key in range(25):
        prompt = random.integers(0, VOCABULARY, size=random.integers(1, 12)).tolist()
        seeds = random.integers(0, 2**62, size=random.integers(1, 7)).tolist()
        tasks[key] = task(key, prompt, seeds, max_new_tokens=int(random.integers(1, 12)))
        engine.add(tasks[key])
        for _ in range(int(random.integers(0, 6))):
            finished += engine.step()
        if random.random() < 0.2:
            gone = {int(random.integers(0, key + 1))}
            aborted |= gone - {sample.key for sample in finished}
            engine.abort(gone)
            before = len(finished)
            finished = [sample for sample in finished if sample.key not in gone]
            aborted |= gone if before != len(finished) else set()
    finished += drain(engine)
    returned = [(sample.key, sample.sample_index) for sample in finished]
    expected = {
        (key, index) for key, one in tasks.items() if key not in aborted for index in range(len(one.seeds))
    }
    assert len(returned) == len(set(returned)) and set(returned) == expected
    for sample in finished[:: len(finished) // 8]:
        reference = alone(model, tasks[sample.key], sample.sample_index, stop_ids=[1, 2, 3, 4, 5, 6])
        assert sample.ids.tolist() == reference.ids.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_ids": []},
        {"prompt_ids": [1, VOCABULARY]},
        {"prompt_ids": [-1]},
        {"prompt_ids": [1] * 57},
        {"seeds": []},
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
    ],
)
def test_a_task_that_could_never_run_is_refused_by_its_key(changes: dict[str, Any]) -> None:
    engine = engine_for(tiny_model(), max_tokens=64)
    fine: dict[str, Any] = {
        "key": "mine",
        "prompt_ids": [1] * 56,
        "seeds": [1],
        "temperature": 1.0,
        "max_new_tokens": 8,
    }
    with pytest.raises(ValueError, match="'mine'"):
        engine.add(GroupTask(**(fine | changes)))
    engine.add(GroupTask(**fine))
    assert len(drain(engine)[0].ids) == 8


def test_weights_that_give_no_finite_logits_are_named_and_leave_no_trace() -> None:
    model = tiny_model()
    engine = engine_for(model, slots=3)
    broken = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    broken["model.layers.0.self_attn.v_proj.weight"][:] = math.nan
    engine.load_weights(4, broken)
    long, short = random_prompts([30, 4])
    engine.add(task("a", long, [1, 2, 3]))
    with pytest.raises(RunFailedError, match="policy version 4"):
        drain(engine)
    assert engine.active_samples() == 0
    engine.load_weights(5, tensors_of(model))
    tasks = [task("b", short, [1]), task("c", long[:20], [1])]
    for one in tasks:
        engine.add(one)
    for sample in drain(engine):
        one = next(one for one in tasks if one.key == sample.key)
        assert sample.ids.tolist() == alone(model, one, 0).ids.tolist()


def test_nothing_runs_before_weights_are_loaded() -> None:
    model = tiny_model()
    engine = TorchEngine(engine_for(model)._decoder.architecture, slots=1, max_tokens=8, stop_ids=[])
    assert engine.version == -1
    with pytest.raises(RuntimeError, match="no weights"):
        engine.step()


class TestDeterministic:
    """`deterministic`: the same request on the same weights gives the same bits."""

    def test_whatever_is_queued_and_whenever(self) -> None:
        model, other = tiny_model(), tiny_model(seed=1)
        options: dict[str, Any] = {"slots": 8, "deterministic": True, "stop_ids": [2, 3]}
        wanted = task("wanted", random_prompts([9])[0], [5, 6, 7, 8], temperature=0.7, max_new_tokens=20)
        engine = engine_for(model, **options)
        engine.add(wanted)
        first = drain(engine)
        assert len({len(sample.ids) for sample in first}) > 1
        for key, prompt in enumerate(random_prompts([3, 25, 40])):
            engine.add(task(key, prompt, list(range(key + 1)), max_new_tokens=20))
        engine.add(wanted)
        engine.add(task("behind", random_prompts([50])[0], [1, 2, 3, 4, 5, 6], max_new_tokens=14))
        crowded = [sample for sample in drain(engine) if sample.key == "wanted"]
        engine.load_weights(1, tensors_of(other))
        engine.load_weights(2, tensors_of(model))
        engine.add(wanted)
        later = drain(engine)
        elsewhere = engine_for(model, **options)
        elsewhere.add(wanted)
        for answer in (crowded, later, drain(elsewhere)):
            assert len(answer) == 4
            assert all(same(one, two) for one, two in zip(first, answer, strict=True))

    def test_each_group_is_decoded_alone_in_as_many_rows_as_it_has_samples(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = engine_for(tiny_model(), slots=8, deterministic=True, stop_ids=list(range(0, VOCABULARY, 5)))
        shapes = spied(engine, monkeypatch)
        engine.add(task("a", [1, 2, 3], [1, 2, 3, 4], max_new_tokens=30))
        engine.add(task("b", [1, 2], [1, 2], max_new_tokens=30))
        finished = drain(engine)
        steps = [max(len(sample.ids) for sample in finished if sample.key == key) for key in ("a", "b")]
        assert steps[0] > 2
        assert shapes == [(0, 1)] + [(4, 0)] * (steps[0] - 1) + [(0, 1)] + [(2, 0)] * (steps[1] - 1)

    def test_a_sample_is_returned_and_counted_once_though_its_row_stays(self) -> None:
        engine = engine_for(tiny_model(), deterministic=True, stop_ids=list(range(0, VOCABULARY, 3)))
        engine.add(task("a", [1, 2, 3], [1, 2, 3, 4, 5], max_new_tokens=30))
        finished: list[FinishedSample] = []
        while len(finished) < 5:
            finished += engine.step()
            assert engine.active_samples() == 5 - len(finished)
            assert engine.free_samples() == (0 if len(finished) < 5 else 5)
        assert len({len(sample.ids) for sample in finished}) > 1
        assert sorted(sample.sample_index for sample in finished) == [0, 1, 2, 3, 4]

    def test_a_group_larger_than_the_engine_is_refused(self) -> None:
        engine = engine_for(tiny_model(), slots=3, deterministic=True)
        with pytest.raises(ValueError, match=r"4 samples.*3 slots"):
            engine.add(task("a", [1], [1, 2, 3, 4]))

    def test_another_number_of_threads_is_refused(self) -> None:
        engine = engine_for(tiny_model(), deterministic=True)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(threads + 1)
            with pytest.raises(RuntimeError, match="threads"):
                engine.step()
        finally:
            torch.set_num_threads(threads)
