"""Sampling: numbers that depend on seed and place alone, tokens that follow their distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.rollout.engine import generate_batch
from surefoot.rollout.sampling import pick, seed_words, uniforms

from .tiny_decoders import engine_for, random_prompts, tiny_model


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Normalised so that about 0 is expected and 4 is next to impossible (Wilson and Hilferty, 1931)."""
    expected = probabilities * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = len(counts) - 1
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def choose(logits: list[list[float]], numbers: list[float], temperature: float = 1.0) -> list[int]:
    rows = len(numbers)
    tokens, _ = pick(
        torch.tensor(logits).expand(rows, -1),
        np.full(rows, temperature, dtype=np.float32),
        np.array(numbers),
    )
    return tokens.tolist()


def test_the_mixing_function_is_splitmix64() -> None:
    assert seed_words([0]).tolist() == [0xE220A8397B1DCDAF]  # the generator's published first output
    assert seed_words([-1, 2**64 - 1, 2**70]).tolist() == seed_words([-1, -1, 0]).tolist()


def test_numbers_depend_on_seed_and_place_alone() -> None:
    words, places = seed_words([5, 6, 7]), np.array([3, 0, 9])
    numbers = uniforms(words, places)
    assert uniforms(words[1:2], places[1:2])[0] == numbers[1]
    assert uniforms(words[::-1].copy(), places[::-1].copy()).tolist() == numbers[::-1].tolist()
    assert len({*numbers.tolist(), *uniforms(words, places + 1).tolist()}) == 6


def test_numbers_are_even_and_neither_seeds_nor_places_are_related() -> None:
    seeds, places = 400, 500
    words = np.repeat(seed_words(list(range(seeds))), places)
    numbers = uniforms(words, np.tile(np.arange(places), seeds))
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts = np.bincount((numbers * 256).astype(int), minlength=256)
    assert abs(chi_square(counts, np.full(256, 1 / 256))) < 4
    table = numbers.reshape(seeds, places) - 0.5
    for one, other in [
        (table[1:], table[:-1]),
        (table[:, 1:], table[:, :-1]),
        (table[1:, :-1], table[:-1, 1:]),
    ]:
        correlation = float((one * other).mean()) * 12
        assert abs(correlation) * math.sqrt(one.size) < 4
    # Seeds apart by what a place is apart from the next do not repeat a neighbour's stream.
    for apart in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03):
        stream = uniforms(np.repeat(seed_words([0, apart]), 50), np.tile(np.arange(50), 2))
        assert len(set(stream.tolist())) == 100


def test_a_number_picks_the_token_whose_share_it_falls_into() -> None:
    shares = [0.0, 0.125, 0.5, 0.0, 0.375, 0.0]
    logits = [[math.log(share) if share else -math.inf for share in shares]]
    numbers = [0.0, 0.12, 0.13, 0.62, 0.63, 1 - 2**-53]
    assert choose(logits, numbers) == [1, 1, 2, 2, 4, 4]
    # At temperature 1/2 shares are squared: 1 : 16 : 9 of 26.
    assert choose(logits, [0.038, 0.039, 0.653, 0.654], 0.5) == [1, 2, 2, 4]


def test_the_rarest_tokens_of_a_large_vocabulary_keep_their_share() -> None:
    """A sum in single precision could not tell the last ten thousand of these from nothing."""
    size, rare = 150_000, 10_000
    logits = torch.zeros(1, size)
    logits[0, size - rare :] = -12.0
    mass = rare * math.exp(-12.0) / (size - rare + rare * math.exp(-12.0))
    numbers = [1 - mass * share for share in (1.01, 0.999, 0.5, 0.001)]
    tokens = choose(logits.tolist(), numbers)
    places = [(token - (size - rare)) / rare for token in tokens]
    assert places == pytest.approx([0.0, 0.001, 0.5, 0.999], abs=2e-3) and places[0] < 0


def test_every_row_has_its_own_temperature_and_0_is_the_most_likely() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]]).repeat(4, 1)
    temperatures = np.array([0.0, 1.0, 0.5, 0.0], dtype=np.float32)
    tokens, logprobs = pick(logits, temperatures, np.array([0.9, 0.9, 0.9, 0.0]))
    assert tokens.tolist() == [1, 2, 1, 1]
    wide = torch.tensor([0.0, 3.0, 1.0], dtype=torch.float64)
    one, half = torch.log_softmax(wide, 0), torch.log_softmax(wide * 2, 0)
    assert logprobs.dtype == torch.float32
    assert logprobs.tolist() == pytest.approx(
        [float(part) for part in (one[1], one[2], half[1], one[1])], abs=1e-6
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_follow_the_distribution_of_the_model(temperature: float) -> None:
    model = tiny_model()
    prompt = random_prompts([6])[0]
    samples = 6000
    (group,) = generate_batch(
        engine_for(model, slots=samples, max_tokens=8),
        [prompt],
        seeds=[list(range(samples))],
        temperature=temperature,
        max_new_tokens=2,
    )
    firsts = np.array([sample.ids[0] for sample in group])
    assert abs(deviation(model, prompt, firsts, temperature)) < 4
    # The second token, given the most frequent first one.
    likely = int(np.bincount(firsts).argmax())
    seconds = np.array([sample.ids[1] for sample in group if sample.ids[0] == likely])
    assert len(seconds) > 500
    assert abs(deviation(model, [*prompt, likely], seconds, temperature)) < 4


def deviation(model: Any, ids: list[int], tokens: np.ndarray, temperature: float) -> float:
    """Of tokens sampled after `ids` from what transformers says; the rarest ones are counted together."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
    shares = torch.softmax(logits / temperature, dim=-1).numpy()
    counts = np.bincount(tokens, minlength=len(shares))
    order = np.argsort(-shares)
    common = max(5, int((shares * len(tokens) >= 5).sum()) - 1)
    gathered = [np.append(part[order[:common]], part[order[common:]].sum()) for part in (counts, shares)]
    return chi_square(*gathered)
