"""The test of tests: what the engine says of a token and what the learner says of it is one number.

Bound 0, one update per publication, one minibatch, one pass, fp32, temperature 0.7: every ratio of an
update's first step is 1 within 1e-4, and nothing is clipped.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from surefoot.rollout.architecture import read_architecture
from surefoot.rollout.engine import generate_batch
from surefoot.rollout.packing import pack_i32
from surefoot.rollout.protocols import Group, Published, Sample
from surefoot.rollout.torch_engine import TorchEngine
from surefoot.trainer.weights import initial_weights, unpack

from .learner_world import VOCABULARY, LearnerScenario, RankProcesses, write_model

GROUP_SIZE = 4
END = 3


def generate(engine: TorchEngine, weights: Published, update: int) -> list[Group]:
    """The batch of an update, generated with the weights that were published last."""
    engine.load_weights(weights.version, unpack(weights.payload))
    draw = random.Random(update)
    first = 2 * (update - 1)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 7))] for _ in range(2)]
    answers = generate_batch(
        engine,
        prompts,
        seeds=[[100 * (first + place) + sample for sample in range(GROUP_SIZE)] for place in range(2)],
        temperature=0.7,
        max_new_tokens=12,
    )
    return [
        Group(
            prompt_index=first + place,
            attempt=1,
            row_index=first + place,
            prompt_ids=pack_i32(prompt),
            temperature=0.7,
            samples=[
                Sample(
                    ids=sample.ids.tobytes(),
                    logprobs=sample.logprobs.tobytes(),
                    versions=sample.versions.tobytes(),
                    truncated=sample.truncated,
                    text="",
                    reward=float(draw.random()),
                    parts={},
                )
                for sample in own
            ],
        )
        for place, (prompt, own) in enumerate(zip(prompts, answers, strict=True))
    ]


@pytest.mark.parametrize(("family", "tied", "ranks"), [("llama", True, 1), ("qwen2", False, 2)])
def test_every_ratio_of_an_on_policy_step_is_one(tmp_path: Path, family: str, tied: bool, ranks: int) -> None:
    model = write_model(tmp_path / "model", family=family, tied=tied)
    engine = TorchEngine(read_architecture(model), slots=8, max_tokens=20, stop_ids=[END])
    scenario = LearnerScenario(model, group_size=GROUP_SIZE, max_staleness=0, learning_rate=1e-2)
    weights = initial_weights(model)
    ended = truncated = 0
    with RankProcesses(ranks) as learner:
        learner.start(scenario.begin().new_rows())
        for update in (1, 2, 3):
            groups = generate(engine, weights, update)
            samples = [sample for group in groups for sample in group.samples]
            ended += sum(not sample.truncated for sample in samples)
            truncated += sum(sample.truncated for sample in samples)
            scenario.batch_of(groups)
            result = learner.call("update", update, groups, scenario.new_rows())[0]
            scenario.applied_as(result)
            assert result.metrics["policy/ratio_deviation_max"] < 1e-4
            assert result.metrics["policy/ratio_clip_frac"] == 0.0
            assert result.metrics["policy/kl_rollout_learner"] == pytest.approx(0.0, abs=1e-8)
            before = weights
            weights = learner.call("gather", update)[0]
            assert weights.digest != before.digest
    assert ended and truncated, "end tokens are trained, and responses without one"


def test_weights_of_another_version_are_seen_at_once(tmp_path: Path) -> None:
    """The same samples against weights one update on: ratios leave 1, so the test above can fail."""
    model = write_model(tmp_path / "model")
    engine = TorchEngine(read_architecture(model), slots=8, max_tokens=20, stop_ids=[END])
    scenario = LearnerScenario(model, group_size=GROUP_SIZE, learning_rate=1e-2)
    weights = initial_weights(model)
    with RankProcesses(1) as learner:
        learner.start(scenario.begin().new_rows())
        for update in (1, 2):
            groups = generate(engine, weights, update)
            scenario.batch_of(groups)
            result = learner.call("update", update, groups, scenario.new_rows())[0]
            scenario.applied_as(result)
    assert result.metrics["policy/ratio_deviation_max"] > 1e-3
