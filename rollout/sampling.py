"""Choosing tokens: per-sample random numbers, and log-probabilities as both sides mean them.

Owns no state. Invariant: the token at response position t of a sample depends on the sample's seed, on t
and on its distribution, never on which other samples are in the batch.

Why a counter-based generator and the inverse of the distribution function: a generator object per sample
would have to be stored, moved and restored with it, and one per batch makes a token depend on its
neighbours. A hash of (seed, t) needs no state. One uniform number per token and a cumulative sum cost less
than a Gumbel number for every entry of the vocabulary. Numbers have 53 bits and the cumulative sum is in
double, so that the rarest tokens of a large vocabulary keep their share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_SEED_STEP = np.uint64(0x9E3779B97F4A7C15)
_POSITION_STEP = np.uint64(0xD1B54A32D192ED03)


def _mix(words: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the word moves every other."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def seed_words(seeds: list[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Integers of any size and sign as 64-bit words, mixed, so that neighbouring seeds share nothing."""
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    return _mix(words + _SEED_STEP)


def uniforms(
    words: np.ndarray[Any, np.dtype[np.uint64]], positions: np.ndarray[Any, np.dtype[np.int64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One number in [0, 1) for each sample's seed word and response position, from 0.

    Words are mixed before positions are added, and again after: two seeds a multiple of the step apart do
    not give the same stream shifted.
    """
    mixed = _mix(words + (positions.astype(np.uint64) + np.uint64(1)) * _POSITION_STEP)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def pick(
    logits: torch.Tensor,
    temperatures: np.ndarray[Any, np.dtype[np.float32]],
    numbers: np.ndarray[Any, np.dtype[np.float64]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, and its log-probability.

    `logits` [rows, vocabulary] in fp32; `temperatures` and `numbers` [rows]. The log-probability is that of
    log-softmax in fp32 over the whole vocabulary of logits / temperature. Temperature 0 takes the most
    likely token and reports its log-probability at temperature 1. Returns int64 [rows], fp32 [rows]. A row
    whose logits are not finite gives a log-probability that is not finite.
    """
    device = logits.device
    greedy = temperatures == 0.0
    if (temperatures != 1.0).any():
        scale = np.where(greedy, np.float32(1.0), temperatures)
        logits = logits / torch.from_numpy(scale).to(device).unsqueeze(1)
    logprobs = torch.log_softmax(logits, dim=-1)
    if greedy.all():
        tokens = logprobs.argmax(dim=-1, keepdim=True)
    else:
        cumulative = torch.cumsum(logprobs.double().exp_(), dim=-1)
        # The first entry above the mark: entries without probability are never it, and the mark stays
        # below the last sum because numbers are below 1. The clamp only catches rows of nan.
        marks = torch.from_numpy(numbers).to(device).unsqueeze(1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, marks, right=True).clamp_(max=logits.shape[-1] - 1)
        if greedy.any():
            chosen = torch.from_numpy(greedy).to(device).unsqueeze(1)
            tokens = torch.where(chosen, logprobs.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
