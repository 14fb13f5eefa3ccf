"""GRPO: from rewards and logits to the loss, as sums over tokens.

Owns nothing. Invariant: everything here is a sum over tokens divided by one number that is handed in, the
response tokens of the global minibatch. So any split over ranks and micro-batches adds up to the same loss
and gradient, and no mean of means can arise.

The objective is that of DeepSeekMath (arXiv 2402.03300), its clipped importance ratio taken against the
log-probabilities that the rollout workers recorded, without a KL term, and normalised by tokens rather than
by responses, as DAPO does (arXiv 2503.14476).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import nll_loss

STD_FLOOR = 1e-4
"""Added to a group's standard deviation, so that equal rewards give advantage 0 and not a division by it."""


class TokenSums(NamedTuple):
    """What a step adds up over its tokens, each a float64 scalar tensor; ratio = learner / rollout."""

    loss: torch.Tensor  # already divided by the minibatch's tokens
    clipped: torch.Tensor  # tokens whose gradient the clip takes away
    kl: torch.Tensor  # k3 estimates of KL(rollout || learner)
    entropy: torch.Tensor  # of the learner's temperature-scaled distribution
    ratio_deviation: torch.Tensor  # the largest |ratio - 1|; not a sum


def group_advantages(rewards: Sequence[float], scale: str) -> list[float]:
    """Reward minus group mean; with scale "group" divided by the unbiased standard deviation + 1e-4."""
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if scale == "none":
        return centred
    if scale != "group":
        raise ValueError(f"algorithm.scale {scale!r} is neither 'group' nor 'none'")
    variance = math.fsum(value * value for value in centred) / max(1, len(rewards) - 1)
    return [value / (math.sqrt(variance) + STD_FLOOR) for value in centred]


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each id, and the entropy without gradient, both float32 `[tokens]`.

    Of the full distribution scaled by temperature: log-softmax of `logits / temperature` in float32.
    `logits` is `[tokens, vocabulary]`, `ids` and `temperatures` are `[tokens]`.
    """
    distribution = torch.log_softmax(logits.float() / temperatures.unsqueeze(-1), dim=-1)
    chosen = -nll_loss(distribution, ids, reduction="none")
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return chosen, entropy


def policy_loss(
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    minibatch_tokens: int,
) -> tuple[torch.Tensor, TokenSums]:
    """This micro-batch's share of the loss, with gradient, and its sums. All inputs are `[tokens]`.

    loss = -sum(min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)) / minibatch_tokens

    The divergence is Schulman's k3, exp(d) - 1 - d with d = learner - rollout log-probability: it is never
    negative and, as the tokens were sampled by the rollout, unbiased for KL(rollout || learner)
    (joschu.net/blog/kl-approx.html).
    """
    difference = logprobs - rollout_logprobs
    ratio = torch.exp(difference)
    clipped = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    token_losses = -torch.minimum(ratio * advantages, clipped * advantages)
    loss = token_losses.sum() / minibatch_tokens
    with torch.no_grad():
        away = ((advantages > 0) & (ratio > 1.0 + clip_high)) | ((advantages < 0) & (ratio < 1.0 - clip_low))
        sums = TokenSums(
            loss=token_losses.double().sum() / minibatch_tokens,
            clipped=away.double().sum(),
            kl=(torch.expm1(difference) - difference).double().sum(),
            entropy=entropies.double().sum(),
            ratio_deviation=(ratio - 1.0).abs().double().amax(),
        )
    return loss, sums
