"""Ranks over gloo against a plain float64 loop: the same loss, gradient and weights on any split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from surefoot.rollout.packing import pack_f32, unpack_f32
from surefoot.rollout.protocols import Group
from surefoot.statemachine.budget import minibatch_sizes, schedule_of
from surefoot.statemachine.schedule import learning_rates
from surefoot.trainer.protocols import UpdateResult
from surefoot.trainer.weights import initial_weights, unpack

from .learner_world import LearnerScenario, RankProcesses, make_group, set_in_module, train, write_model
from .reference import Reference

FAR = {"eps": 1.0, "betas": [0.9, 0.999]}
"""An epsilon that dwarfs every gradient: a step is then smooth in the gradient, and as exact as it."""

BATCHES = [
    [make_group(0, [3, 1, 4, 2], [1.0, 0.0, 0.0, 1.0]), make_group(1, [5, 9, 2, 6], [0.0, 0.0, 0.0, 1.0])],
    [
        make_group(2, [1, 9, 1, 9], [0.5, 2.0, -1.0, 0.0], prompt=3),
        make_group(3, [7, 7, 1, 2], [1.0, 1.0, 0.0, 1.0], temperature=1.3),
    ],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    with RankProcesses(request.param) as processes:
        yield processes


_references: dict[str, tuple[list[Any], dict[str, torch.Tensor]]] = {}


def reference(
    scenario: LearnerScenario, model: Path, batches: Sequence[Sequence[Group]], **settings: Any
) -> tuple[list[list[tuple[float, float]]], dict[str, torch.Tensor]]:
    """Loss and gradient norm of each update's steps, and what the weights moved by; once for all ranks."""
    total = scenario.budget
    key = repr((model, total, batches, settings))
    if key not in _references:
        plain = Reference(
            model,
            minibatches=minibatch_sizes(total.batch_prompts, total.minibatches),
            passes=total.passes,
            rates=learning_rates(total.learning_rate, schedule_of(total), range(total.optimizer_steps_total)),
            **settings,
        )
        steps = [plain.update(batch) for batch in batches]
        _references[key] = steps, plain.moved()
    return _references[key]


def assert_equal_to_reference(
    ranks: RankProcesses,
    scenario: LearnerScenario,
    model: Path,
    *,
    batches: Sequence[Sequence[Group]] = BATCHES,
    **settings: Any,
) -> list[UpdateResult]:
    """Losses, gradient norms and what the weights moved by, to 1e-5 relative."""
    expected, moves = reference(scenario, model, batches, **settings)
    results = train(ranks, scenario, batches)
    for result, steps in zip(results, expected, strict=True):
        found = [(step.loss, step.grad_norm) for step in result.steps]
        assert found == [pytest.approx(step, rel=1e-5) for step in steps]
        assert all(step.applied for step in result.steps)
    before = unpack(initial_weights(model).payload)
    after = unpack(ranks.call("gather", 1)[0].payload)
    for name, moved in moves.items():
        error = torch.linalg.vector_norm(after[name].double() - before[name].double() - moved)
        assert error <= 1e-5 * torch.linalg.vector_norm(moved), name
    return results


@pytest.mark.parametrize("micro_batch_tokens", [16384, 40, 1])
def test_any_ranks_and_any_micro_batches_equal_one_process(
    ranks: RankProcesses, model: Path, micro_batch_tokens: int
) -> None:
    scenario = LearnerScenario(
        model,
        group_size=4,
        learner={"micro_batch_tokens": micro_batch_tokens},
        optim=FAR,
        learning_rate=1.0,
        schedule_kind="constant",
    )
    results = assert_equal_to_reference(ranks, scenario, model, eps=1.0)
    assert [step.tokens for result in results for step in result.steps] == [10 + 22, 20 + 17]


def test_minibatches_and_passes_are_steps_in_order_on_the_schedule(ranks: RankProcesses, model: Path) -> None:
    scenario = LearnerScenario(
        model, group_size=4, minibatches=2, passes=2, optim=FAR, learning_rate=1.0, schedule_kind="cosine"
    )
    results = assert_equal_to_reference(ranks, scenario, model, eps=1.0)
    steps = [step for result in results for step in result.steps]
    assert [step.optimizer_step for step in steps] == list(range(8))
    assert [step.tokens for step in steps] == [10, 22, 10, 22, 20, 17, 20, 17]


def test_metrics_are_means_over_the_tokens_that_were_trained(ranks: RankProcesses, model: Path) -> None:
    """Minibatches of 9 and 22, then 20 and 16 tokens, gone over twice; two responses are left out."""
    batches = [
        [
            make_group(0, [3, 1, 4, 2], [1.0, 0.0, 0.0, 1.0], truncated=[False, True, False, False]),
            BATCHES[0][1],
        ],
        [
            BATCHES[1][0],
            make_group(3, [7, 7, 1, 2], [1.0, 1.0, 0.0, 1.0], truncated=[False, False, True, False]),
        ],
    ]
    settings: dict[str, Any] = {"mask_truncated": True, "clip_low": 0.1, "clip_high": 0.3}
    scenario = LearnerScenario(
        model,
        group_size=4,
        minibatches=2,
        passes=2,
        learner={"micro_batch_tokens": 1},
        algorithm=settings,
        optim=FAR,
        learning_rate=1.0,
        schedule_kind="constant",
    )
    plain = Reference(model, minibatches=[1, 1], passes=2, rates=[1.0] * 8, eps=1.0, **settings)
    for result, batch in zip(train(ranks, scenario, batches), batches, strict=True):
        plain.update(batch)
        expected = plain.metrics()
        assert len(plain.tokens) == sum(step.tokens for step in result.steps)
        assert 0.1 < expected["policy/ratio_clip_frac"] < 0.9  # the rollout's policy is far away
        assert result.metrics == pytest.approx(expected, rel=1e-5)


def test_the_largest_deviation_is_found_on_whatever_rank_it_lies(ranks: RankProcesses, model: Path) -> None:
    """Each response of a group in turn is the one that the rollout's policy would hardly have given."""
    batches: list[list[Group]] = []
    for unlikely in range(4):
        group, other = (make_group(2 * unlikely + i, [3, 4, 5, 6], [1.0, 0.0, 0.0, 1.0]) for i in range(2))
        samples = list(group.samples)
        lengths = len(unpack_f32(samples[unlikely].logprobs))
        samples[unlikely] = replace(samples[unlikely], logprobs=pack_f32([-9.0] * lengths))
        batches.append([replace(group, samples=samples), other])
    settings: dict[str, Any] = {"group_size": 4, "optim": FAR, "schedule_kind": "constant"}
    scenario = LearnerScenario(model, learning_rate=1e-3, **settings)
    plain = Reference(model, minibatches=[2], passes=1, rates=[1e-3] * 4, eps=1.0)
    for result, batch in zip(train(ranks, scenario, batches), batches, strict=True):
        plain.update(batch)
        expected = plain.metrics()["policy/ratio_deviation_max"]
        assert expected > 20
        assert result.metrics["policy/ratio_deviation_max"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("betas", [(0.5, 0.9), (0.0, 0.99)])
def test_moments_decay_at_the_rates_of_the_config(
    ranks: RankProcesses, model: Path, betas: tuple[float, float]
) -> None:
    """From the second step on they tell in what the weights move by."""
    scenario = LearnerScenario(
        model,
        group_size=4,
        optim=FAR | {"betas": list(betas)},
        learning_rate=4.0,
        schedule_kind="constant",
    )
    assert_equal_to_reference(ranks, scenario, model, eps=1.0, betas=betas)


def test_two_live_groups_on_any_ranks_are_as_on_one(ranks: RankProcesses, model: Path) -> None:
    """Report 48: every response of both is trained on; on three ranks, the work does not divide."""
    batches = [[make_group(0, [1, 9], [0.0, 1.0]), make_group(1, [6, 2], [1.0, 0.0])]]
    scenario = LearnerScenario(model, group_size=2, optim=FAR, learning_rate=1.0, schedule_kind="constant")
    results = assert_equal_to_reference(ranks, scenario, model, batches=batches, eps=1.0)
    assert results[0].steps[0].tokens == 18


def test_two_groups_on_three_ranks_neither_hang_nor_weigh_differently(
    ranks: RankProcesses, model: Path
) -> None:
    """Reports 48 and 49: lengths 1 and 9 weigh 1:9.

    The other group is left out, and one prompt's two responses on three ranks leave one with nothing to do.
    """
    batches = [[make_group(0, [1, 9], [0.0, 1.0]), make_group(1, [1], [1.0])]]
    batches[0][1] = make_group(1, [1, 1], [1.0, 0.0], truncated=[True, True])
    scenario = LearnerScenario(
        model,
        group_size=2,
        algorithm={"mask_truncated": True, "scale": "none", "clip_low": 0.1, "clip_high": 0.3},
        optim=FAR | {"max_grad_norm": 1e9, "weight_decay": 0.01},
        learning_rate=1.0,
        schedule_kind="constant",
    )
    results = assert_equal_to_reference(
        ranks,
        scenario,
        model,
        batches=batches,
        scale="none",
        mask_truncated=True,
        clip_low=0.1,
        clip_high=0.3,
        eps=1.0,
        weight_decay=0.01,
        max_grad_norm=1e9,
    )
    assert results[0].steps[0].tokens == 10


def test_the_form_of_sharding_and_of_the_output_matrix_changes_nothing(
    ranks: RankProcesses, model: Path
) -> None:
    """A unit a layer, and logits three tokens at a time, as large models have them."""
    constants = [("ONE_UNIT_BYTES", 0), ("LOGITS_AT_ONCE", 3 * 24)]
    before = [("ONE_UNIT_BYTES", 1 << 26), ("LOGITS_AT_ONCE", 1 << 26)]
    for name, value in constants:
        ranks.run(set_in_module, "surefoot.trainer.policy", name, value)
    try:
        scenario = LearnerScenario(
            model,
            group_size=4,
            learner={"micro_batch_tokens": 40, "activation_checkpointing": True},
            optim=FAR,
            learning_rate=1.0,
            schedule_kind="constant",
        )
        assert_equal_to_reference(ranks, scenario, model, eps=1.0)
    finally:
        for name, value in before:
            ranks.run(set_in_module, "surefoot.trainer.policy", name, value)


def test_untied_weights_biases_and_a_bfloat16_folder(ranks: RankProcesses, tmp_path: Path) -> None:
    model = write_model(tmp_path / "qwen2", family="qwen2", tied=False, dtype="bfloat16")
    scenario = LearnerScenario(model, group_size=4, optim=FAR, learning_rate=1.0, schedule_kind="constant")
    assert_equal_to_reference(ranks, scenario, model, eps=1.0)


def test_version_0_from_the_folder_is_what_the_ranks_begin_with(ranks: RankProcesses, model: Path) -> None:
    ranks.start(LearnerScenario(model).begin().rows())
    published, *others = ranks.call("gather", 0)
    assert published == initial_weights(model)
    assert others == [None] * (ranks.ranks - 1)


def test_the_schedule_knows_nothing_of_ranks(ranks: RankProcesses, model: Path) -> None:
    """Report 14: T = 40: the same curve on any number of ranks; at k = 10 (1 + cos(pi / 4)) / 2."""
    batches = [[make_group(place, [2, 1], [1.0, 0.0])] for place in range(11)]
    scenario = LearnerScenario(model, data_len=40, batch_prompts=1, learning_rate=1.0, max_staleness=20)
    results = train(ranks, scenario, batches)
    assert scenario.budget.optimizer_steps_total == 40
    assert results[10].steps[0].optimizer_step == 10
    assert results[10].steps[0].learning_rate == pytest.approx(0.85355, abs=5e-6)


def test_bfloat16_compute_is_near_and_keeps_float32_weights(ranks: RankProcesses, model: Path) -> None:
    scenario = LearnerScenario(
        model,
        group_size=4,
        learner={"compute_dtype": "bfloat16"},
        optim=FAR,
        learning_rate=1.0,
        schedule_kind="constant",
    )
    steps, _ = reference(scenario, model, BATCHES[:1], eps=1.0)
    loss, norm = steps[0][0]
    (result,) = train(ranks, scenario, BATCHES[:1])
    assert (result.steps[0].loss, result.steps[0].grad_norm) == pytest.approx((loss, norm), rel=0.05)
    assert result.steps[0].loss != pytest.approx(loss, rel=1e-6)
    weights = unpack(ranks.call("gather", 1)[0].payload)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
