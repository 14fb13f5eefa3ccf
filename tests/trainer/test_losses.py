"""The numbers of GRPO, worked by hand."""

import math

import pytest
import torch

from surefoot.trainer.losses import group_advantages, policy_loss, token_logprobs


def loss_of(ratios: list[float], advantages: list[float], *, tokens: int | None = None, **clip: float):
    """Loss, gradient by log-probability and sums, for tokens of these ratios."""
    logprobs = torch.log(torch.tensor(ratios)).requires_grad_()
    count = len(ratios)
    loss, sums = policy_loss(
        logprobs,
        torch.zeros(count),
        torch.zeros(count),
        torch.tensor(advantages),
        clip_low=clip.get("clip_low", 0.2),
        clip_high=clip.get("clip_high", 0.2),
        minibatch_tokens=tokens or count,
    )
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), sums


def test_an_advantage_is_the_distance_from_the_group_mean_over_the_unbiased_std() -> None:
    # Mean 1/2, squared distances 4 * 1/4, over n - 1 = 3.
    std = math.sqrt(1.0 / 3.0)
    half = 0.5 / (std + 1e-4)
    assert group_advantages([1.0, 0.0, 0.0, 1.0], "group") == pytest.approx([half, -half, -half, half])


def test_without_scale_an_advantage_is_the_distance_alone() -> None:
    assert group_advantages([3.0, 0.0, 0.0], "none") == pytest.approx([2.0, -1.0, -1.0])


def test_equal_rewards_give_advantage_zero_and_no_nan() -> None:
    assert group_advantages([0.5] * 8, "group") == [0.0] * 8


def test_a_scale_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="batch"):
        group_advantages([1.0, 0.0], "batch")


def test_a_logprob_is_of_the_temperature_scaled_distribution() -> None:
    # Odds of 1 : 3 become 1 : 9 at temperature 1/2 and 1 : sqrt(3) at temperature 2.
    logits = torch.tensor([[0.0, math.log(3.0)]] * 3)
    logprobs, _ = token_logprobs(logits, torch.tensor([1, 1, 0]), torch.tensor([1.0, 0.5, 2.0]))
    assert logprobs.exp().tolist() == pytest.approx([3 / 4, 9 / 10, 1 / (1 + math.sqrt(3.0))])


def test_entropy_is_of_the_same_distribution_and_carries_no_gradient() -> None:
    logits = torch.zeros(1, 5, requires_grad=True)
    _, entropy = token_logprobs(logits * 3.0, torch.tensor([2]), torch.tensor([0.7]))
    assert entropy.item() == pytest.approx(math.log(5.0))
    assert not entropy.requires_grad


def test_logprobs_are_worked_out_in_float32_whatever_the_logits_are() -> None:
    logits = torch.tensor([[10.0, 10.0625, -3.0]], dtype=torch.bfloat16)
    logprobs, _ = token_logprobs(logits, torch.tensor([0]), torch.tensor([1.0]))
    exact = -math.log(1.0 + math.exp(0.0625) + math.exp(-13.0))
    assert logprobs.dtype is torch.float32
    assert logprobs.item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, -1.0, -1.0, 0.0),
        (2.0, 1.0, -1.2, 0.0, 1.0),  # better, and far already: no more push
        (2.0, -1.0, 2.0, 2.0, 0.0),  # worse, and likelier: pushed back with all its weight
        (0.5, 1.0, -0.5, -0.5, 0.0),
        (0.5, -1.0, 0.8, 0.0, 1.0),  # worse, and far already
    ],
)
def test_the_clip_takes_away_only_what_goes_too_far(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: float
) -> None:
    found, gradients, sums = loss_of([ratio], [advantage])
    assert found == pytest.approx(loss)
    assert gradients == pytest.approx([gradient])
    assert sums.clipped.item() == clipped
    assert sums.loss.item() == pytest.approx(loss)


def test_the_clip_has_two_sides_of_their_own() -> None:
    found, _, _ = loss_of([2.0, 0.2], [1.0, -1.0], clip_low=0.1, clip_high=0.4)
    assert found == pytest.approx((-1.4 + 0.9) / 2)


def test_every_token_weighs_the_same_whatever_it_is_computed_with() -> None:
    """Report 49: lengths 1 and 9 in one minibatch weigh 1:9, together or apart."""
    together, _, _ = loss_of([1.0] * 10, [-1.0] + [2.0] * 9)
    first, _, _ = loss_of([1.0], [-1.0], tokens=10)
    second, _, _ = loss_of([1.0] * 9, [2.0] * 9, tokens=10)
    assert together == pytest.approx((1.0 - 9 * 2.0) / 10)
    assert first + second == pytest.approx(together)


def test_the_divergence_is_k3_and_zero_where_nothing_moved() -> None:
    _, _, sums = loss_of([2.0, 1.0], [1.0, 1.0])
    assert sums.kl.item() == pytest.approx(2.0 - 1.0 - math.log(2.0))
    assert sums.ratio_deviation.item() == pytest.approx(1.0)
