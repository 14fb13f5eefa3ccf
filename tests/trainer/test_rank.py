"""One rank's conduct: the log decides, steps are skipped and recorded, redo is exact, snapshots are whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from surefoot.rollout.packing import pack_f32
from surefoot.rollout.protocols import Group
from surefoot.statemachine.budget import schedule_of
from surefoot.statemachine.errors import BudgetRefused, CheckpointUnusable, ModelRefused, RunFailedError
from surefoot.statemachine.schedule import learning_rates
from surefoot.trainer.checkpoints import Checkpoints
from surefoot.trainer.optimizer import ScheduledAdamW

from ..statemachine.budgets import budget
from .learner_world import (
    LearnerScenario,
    RankProcesses,
    count_layer_calls,
    finished_by,
    go_on,
    layer_calls,
    make_group,
    redo,
    register_small_disk,
    saved_by,
    train,
    write_model,
)
from .reference import Reference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def one() -> Iterator[RankProcesses]:
    with RankProcesses(1) as processes:
        yield processes


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    with RankProcesses(2) as processes:
        yield processes


@pytest.fixture(scope="module")
def three() -> Iterator[RankProcesses]:
    with RankProcesses(3) as processes:
        yield processes


def batch(update: int) -> list[Group]:
    """The two groups of an update."""
    first = 2 * (update - 1)
    return [make_group(first, [3, 5], [1.0, 0.0]), make_group(first + 1, [2, 4], [0.0, 1.0])]


def digest(ranks: RankProcesses) -> str:
    return ranks.call("gather", 1)[0].digest


def not_finite(group: Group) -> Group:
    """The group with a worse sample whose rollout log-probability makes its ratio overflow."""
    worse = min(group.samples, key=lambda sample: sample.reward)
    broken = msgspec.structs.replace(worse, logprobs=pack_f32([-1e30] * (len(worse.ids) // 4)))
    samples = [broken if sample is worse else sample for sample in group.samples]
    return msgspec.structs.replace(group, samples=samples)


# -- the log decides ------------------------------------------------------------------------------------


def test_no_learner_without_a_committed_budget(one: RankProcesses) -> None:
    """Nothing is built: the model's folder is not even looked for."""
    scenario = LearnerScenario(Path("/no/such/model")).create()
    with pytest.raises(BudgetRefused, match="no BudgetResolved"):
        one.start(scenario.rows())


@pytest.mark.parametrize("total", [-1, 0, None])
def test_no_optimizer_without_a_total(total: int | None) -> None:
    resolved = None if total is None else msgspec.structs.replace(budget(), optimizer_steps_total=total)
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(BudgetRefused):
        ScheduledAdamW([("p", parameter)], resolved, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.0)


def test_a_folder_without_a_model_is_refused_by_name(one: RankProcesses, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"config\.json"):
        one.start(LearnerScenario(tmp_path).begin().rows())


def test_ranks_that_fold_to_different_states_do_not_start(two: RankProcesses, model: Path) -> None:
    scenario = LearnerScenario(model).begin()
    with pytest.raises(RunFailedError, match="different states"):
        two.start([], by_rank=[scenario.rows(), scenario.rows()[:-1]])


def test_ranks_agree_on_the_drivers_digest_of_the_state(two: RankProcesses, model: Path) -> None:
    from surefoot.statemachine.state import fold

    rows = LearnerScenario(model).begin().rows()
    first, second = two.start(rows)
    assert first == second
    assert first.state_digest == fold(rows).digest()
    assert first.ranks == 2 and first.fingerprint["ranks"] == "2"


def test_an_update_that_the_log_does_not_hold_is_not_executed(one: RankProcesses, model: Path) -> None:
    scenario = LearnerScenario(model)
    one.start(scenario.begin().new_rows())
    with pytest.raises(RunFailedError, match="no batch of update 1"):
        one.call("update", 1, batch(1), [])
    with pytest.raises(RunFailedError, match="holds update 0"):
        one.call("update", 2, batch(2), [])
    scenario.batch_of(batch(1))
    with pytest.raises(RunFailedError, match="the log says"):
        one.call("update", 1, list(reversed(batch(1))), scenario.new_rows())
    assert one.call("update", 1, batch(1), [])[0].update == 1


@pytest.mark.parametrize(("activation_checkpointing", "times"), [(False, 1), (True, 2)])
def test_activation_checkpointing_computes_every_layer_twice(
    one: RankProcesses, model: Path, activation_checkpointing: bool, times: int
) -> None:
    """Once on the way forward; once more on the way back, where its activations were not kept."""
    learner = {"activation_checkpointing": activation_checkpointing}
    scenario = LearnerScenario(model, learner=learner)
    one.start(scenario.begin().new_rows())
    one.run(count_layer_calls)
    go_on(one, scenario, [batch(1)])
    assert one.run(layer_calls) == [[times, times]]


def test_what_is_trained_are_the_sampled_ids_whatever_the_text_says(one: RankProcesses, model: Path) -> None:
    """Report 47."""

    def with_text(group: Group, text: str) -> Group:
        samples = [msgspec.structs.replace(sample, text=text) for sample in group.samples]
        return msgspec.structs.replace(group, samples=samples)

    plain = Reference(model, minibatches=[2], rates=[1e-2])
    (by_ids,) = plain.update(batch(1))
    digests: set[str] = set()
    for text in ("", "re-tokenises to something else"):
        (result,) = train(one, LearnerScenario(model), [[with_text(group, text) for group in batch(1)]])
        assert (result.steps[0].loss, result.steps[0].grad_norm) == pytest.approx(by_ids, rel=1e-5)
        digests.add(digest(one))
    assert len(digests) == 1


# -- the schedule ---------------------------------------------------------------------------------------


def test_no_step_is_spent_at_rate_0_in_a_warm_up(one: RankProcesses, model: Path) -> None:
    """T = 7 with a warm-up of 2: 1/2, 1, then the decay over the 5 that are left."""
    scenario = LearnerScenario(model, data_len=14, warmup_steps=2, learning_rate=1.0)
    results = train(one, scenario, [batch(update) for update in range(1, 8)])
    rates = [result.steps[0].learning_rate for result in results]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.9045, 0.6545, 0.3455, 0.0955], abs=5e-5)


def test_a_step_that_is_not_finite_is_skipped_recorded_and_keeps_its_place(
    one: RankProcesses, model: Path
) -> None:
    """Report 12: T = 7, step 3 not finite: 7 attempted, 6 applied, the schedule at 7."""
    batches = [batch(update) for update in range(1, 8)]
    batches[3] = [not_finite(batches[3][0]), batches[3][1]]
    digests: list[str] = []
    scenario = LearnerScenario(model, data_len=14, learning_rate=1e-2)
    results = train(one, scenario, batches, after=lambda _: digests.append(digest(one)))
    steps = [result.steps[0] for result in results]
    assert [step.optimizer_step for step in steps] == list(range(7))
    assert [step.applied for step in steps] == [True] * 3 + [False] + [True] * 3
    assert steps[3].skipped_because == "not_finite"
    assert steps[3].grad_norm in ("inf", "nan")
    assert digests[3] == digests[2] and len(set(digests)) == 6
    rates = learning_rates(1e-2, schedule_of(scenario.budget), range(7))
    assert [step.learning_rate for step in steps] == rates


def test_one_rank_that_overflows_makes_every_rank_skip(two: RankProcesses, model: Path) -> None:
    batches = [batch(1), [not_finite(batch(2)[0]), batch(2)[1]], batch(3)]
    digests: list[str] = []
    results = train(two, LearnerScenario(model), batches, after=lambda _: digests.append(digest(two)))
    assert [result.steps[0].applied for result in results] == [True, False, True]
    assert digests[0] == digests[1] != digests[2]


def test_a_minibatch_with_no_token_is_skipped_and_moves_nothing(one: RankProcesses, model: Path) -> None:
    """Report 51: AdamW would move weights at zero gradient once it has moments."""
    batches = [batch(1), batch(2)]
    truncated = [
        msgspec.structs.replace(sample, truncated=True) for group in batch(2)[:1] for sample in group.samples
    ]
    batches[1] = [msgspec.structs.replace(batch(2)[0], samples=truncated), batch(2)[1]]
    scenario = LearnerScenario(model, minibatches=2, algorithm={"mask_truncated": True})
    results = train(one, scenario, batches)
    assert [(step.applied, step.skipped_because, step.tokens) for step in results[1].steps] == [
        (False, "no_tokens", 0),
        (True, None, 6),
    ]

    scenario = LearnerScenario(model, algorithm={"mask_truncated": True})
    nothing = [msgspec.structs.replace(group, samples=truncated) for group in batch(2)]
    digests: list[str] = []
    train(one, scenario, [batch(1), nothing], after=lambda _: digests.append(digest(one)))
    assert digests[0] == digests[1]


def test_a_minibatch_of_equal_rewards_is_an_ordinary_step(one: RankProcesses, model: Path) -> None:
    """Report 51: its gradient is 0, and the moments of the steps before move the weights all the same."""
    equal = [make_group(2, [3, 5], [1.0, 1.0]), make_group(3, [2, 4], [0.5, 0.5])]
    digests: list[str] = []
    results = train(
        one, LearnerScenario(model), [batch(1), equal], after=lambda _: digests.append(digest(one))
    )
    step = results[1].steps[0]
    assert step.applied and step.grad_norm == pytest.approx(0.0, abs=1e-9)
    assert digests[0] != digests[1]


# -- checkpoints ----------------------------------------------------------------------------------------


def test_a_redo_is_the_same_bit_for_bit(one: RankProcesses, model: Path, tmp_path: Path) -> None:
    """Report 50: loss, gradient norm, rate and weights, after loading an optimizer saved at another rate."""
    batches = [batch(update) for update in range(1, 6)]
    scenario = LearnerScenario(model, learning_rate=1e-2)
    results = train(one, scenario, batches[:2])
    checkpoint = saved_by(one, str(tmp_path), "u2")
    results += go_on(one, scenario, batches[2:])
    last = digest(one)
    for again in ("the same ranks", "new ranks"):
        if again == "new ranks":
            one.start(scenario.rows())
        one.call("load", str(tmp_path), checkpoint)
        redone = redo(one, 3, batches[2:])
        assert [result.steps for result in redone] == [result.steps for result in results[2:]], again
        assert digest(one) == last, again
    rates = learning_rates(1e-2, schedule_of(scenario.budget), range(5))
    assert [result.steps[0].learning_rate for result in redone] == rates[2:]
    assert len(set(rates)) == 5


def test_a_snapshot_is_of_the_moment_whatever_is_trained_beside_it(
    two: RankProcesses, model: Path, tmp_path: Path
) -> None:
    """And the next one, which is copied to the same memory, does not change it."""
    batches = [batch(update) for update in range(1, 6)]
    scenario = LearnerScenario(model)
    results = train(two, scenario, batches[:2])
    kept: list[tuple[int, str, Any]] = []
    for held in (2, 4):
        Checkpoints(tmp_path).make_folder(f"u{held}")
        begun = two.call("begin_save", str(tmp_path), f"u{held}")[0]
        at_save = digest(two)
        results += go_on(two, scenario, batches[held : held + 2])
        kept.append((held, at_save, finished_by(two, str(tmp_path), f"u{held}", begun)))
    last = digest(two)
    for held, at_save, checkpoint in kept:
        assert checkpoint.update == held and checkpoint.weights_digest == at_save
        two.call("load", str(tmp_path), checkpoint)
        assert digest(two) == at_save
        redone = redo(two, held + 1, batches[held:])
        assert [result.steps for result in redone] == [result.steps for result in results[held:]]
        assert digest(two) == last


@pytest.fixture(scope="module")
def by_two(
    two: RankProcesses, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, LearnerScenario, Any]:
    """Two updates on two ranks, saved; then a third."""
    storage = tmp_path_factory.mktemp("storage")
    scenario = LearnerScenario(model)
    train(two, scenario, [batch(1), batch(2)])
    checkpoint = saved_by(two, str(storage), "u2")
    return storage, checkpoint, scenario, go_on(two, scenario, [batch(3)])[0]


@pytest.mark.parametrize("ranks", ["one", "three"])
def test_saved_by_two_ranks_loaded_by_another_number(
    ranks: str, by_two: Any, request: pytest.FixtureRequest
) -> None:
    """Report 20: saved by 2, resumed by 1 and by 3."""
    storage, checkpoint, scenario, third = by_two
    others: RankProcesses = request.getfixturevalue(ranks)
    others.start(scenario.rows())
    others.call("load", str(storage), checkpoint)
    assert digest(others) == checkpoint.weights_digest
    (again,) = redo(others, 3, [batch(3)])
    (was,), (now,) = third.steps, again.steps
    assert (now.optimizer_step, now.learning_rate) == (was.optimizer_step, was.learning_rate)
    assert (now.loss, now.grad_norm) == pytest.approx((was.loss, was.grad_norm), rel=1e-5)


def test_saved_by_one_rank_loaded_by_two(
    one: RankProcesses, two: RankProcesses, model: Path, tmp_path: Path
) -> None:
    """Report 20."""
    scenario = LearnerScenario(model)
    train(one, scenario, [batch(1)])
    checkpoint = saved_by(one, str(tmp_path), "u1")
    two.start(scenario.rows())
    two.call("load", str(tmp_path), checkpoint)
    assert digest(two) == digest(one) == checkpoint.weights_digest


def test_a_damaged_file_is_named_and_the_ranks_are_as_before_the_first_update(
    two: RankProcesses, by_two: Any, model: Path
) -> None:
    storage, checkpoint, scenario, _ = by_two
    two.start(scenario.rows())
    first = digest(two)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"):
        path = storage / "checkpoints" / "u2" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointUnusable, match=name.replace(".", r"\.")):
            two.call("load", str(storage), checkpoint)
        path.write_bytes(whole)
        assert digest(two) == first
    (again,) = redo(two, 1, [batch(1)])
    assert again.steps[0].applied


def test_weights_that_are_not_the_committed_ones_are_refused_after_loading(
    two: RankProcesses, by_two: Any
) -> None:
    storage, checkpoint, scenario, _ = by_two
    two.start(scenario.rows())
    first = digest(two)
    other = msgspec.structs.replace(checkpoint, weights_digest="0" * 32)
    with pytest.raises(CheckpointUnusable, match="loads to weights"):
        two.call("load", str(storage), other)
    assert digest(two) == first
    assert redo(two, 1, [batch(1)])[0].update == 1


def test_checkpoints_go_through_any_file_system(two: RankProcesses, model: Path, tmp_path: Path) -> None:
    """A second implementation, behind a URL."""
    two.run(register_small_disk)
    register_small_disk(None)
    url = f"smalldisk://{tmp_path}/run"
    scenario = LearnerScenario(model)
    train(two, scenario, [batch(1)])
    checkpoint = saved_by(two, url, "u1")
    assert {file.name for file in Checkpoints(url).manifest(checkpoint).files} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    }
    two.start(scenario.rows())
    two.call("load", url, checkpoint)
    assert digest(two) == checkpoint.weights_digest
