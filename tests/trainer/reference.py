"""A plain one-process learner in float64, written from the formulas: what any number of ranks must equal.

One sample at a time, without padding, micro-batches or sharding; torch gives it the model, autograd and
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from surefoot.rollout.packing import unpack_f32, unpack_i32
from surefoot.rollout.protocols import Group


class Reference:
    """The same settings as a learner's, by keyword."""

    def __init__(
        self,
        folder: Path,
        *,
        minibatches: Sequence[int],
        passes: int = 1,
        rates: Sequence[float],
        scale: str = "group",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        mask_truncated: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self.parameters = dict(self.model.named_parameters())
        self.initial = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.minibatches, self.passes, self.rates = minibatches, passes, list(rates)
        self.scale, self.clip_low, self.clip_high = scale, clip_low, clip_high
        self.mask_truncated = mask_truncated
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.max_grad_norm = max_grad_norm
        self.steps = 0
        self.tokens: list[tuple[float, float, float, float]] = []

    def update(self, groups: Sequence[Group]) -> list[tuple[float, float]]:
        """Train on a batch; loss and gradient norm of each optimizer step."""
        self.tokens = []
        found: list[tuple[float, float]] = []
        for _ in range(self.passes):
            begin = 0
            for prompts in self.minibatches:
                found.append(self._step(groups[begin : begin + prompts]))
                begin += prompts
        return found

    def _step(self, groups: Sequence[Group]) -> tuple[float, float]:
        terms: list[torch.Tensor] = []
        for group in groups:
            rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
            advantages = rewards - rewards.mean()
            if self.scale == "group":
                advantages = advantages / (rewards.std(unbiased=True) + 1e-4)
            prompt = unpack_i32(group.prompt_ids)
            for sample, advantage in zip(group.samples, advantages, strict=True):
                if self.mask_truncated and sample.truncated:
                    continue
                response = unpack_i32(sample.ids)
                logits = self.model(input_ids=torch.tensor([prompt + response])).logits[0]
                scaled = logits[len(prompt) - 1 : -1] / group.temperature
                chosen = scaled[range(len(response)), response]
                logprobs = chosen - torch.logsumexp(scaled, 1)
                ratios = torch.exp(logprobs - torch.tensor(unpack_f32(sample.logprobs)).double())
                clipped = torch.clamp(ratios, 1 - self.clip_low, 1 + self.clip_high)
                terms += list(-torch.minimum(ratios * advantage, clipped * advantage))
                self._look(scaled, ratios, clipped, advantage)
        loss = torch.stack(terms).sum() / len(terms)
        self.model.zero_grad()
        loss.backward()
        gradients = {name: p.grad for name, p in self.parameters.items()}
        norm = torch.sqrt(sum((g**2).sum() for g in gradients.values()))
        self._adamw(gradients, min(1.0, self.max_grad_norm / (norm.item() + 1e-6)))
        return loss.item(), norm.item()

    @torch.no_grad()
    def _look(
        self, scaled: torch.Tensor, ratios: torch.Tensor, clipped: torch.Tensor, advantage: torch.Tensor
    ) -> None:
        """What an update's metrics are made of, a token each; of a clipped one the constant is the less."""
        entropies = torch.logsumexp(scaled, 1) - (torch.softmax(scaled, 1) * scaled).sum(1)
        divergences = ratios - 1 - torch.log(ratios)
        taken = (clipped * advantage < ratios * advantage).double()
        columns = (taken, divergences, entropies, (ratios - 1).abs())
        self.tokens += zip(*(column.tolist() for column in columns), strict=True)

    def metrics(self) -> dict[str, float]:
        """Of the last update: means over every token that a step trained on, once a pass."""
        clipped, divergences, entropies, deviations = zip(*self.tokens, strict=True)
        count = len(self.tokens)
        return {
            "policy/ratio_clip_frac": sum(clipped) / count,
            "policy/kl_rollout_learner": sum(divergences) / count,
            "policy/entropy": sum(entropies) / count,
            "policy/ratio_deviation_max": max(deviations),
        }

    def _adamw(self, gradients: dict[str, torch.Tensor], scale: float) -> None:
        """Decoupled weight decay (arXiv 1711.05101), bias corrected."""
        rate = self.rates[self.steps]
        self.steps += 1
        for name, parameter in self.parameters.items():
            gradient = gradients[name] * scale
            self.first[name] = self.betas[0] * self.first[name] + (1 - self.betas[0]) * gradient
            self.second[name] = self.betas[1] * self.second[name] + (1 - self.betas[1]) * gradient**2
            first = self.first[name] / (1 - self.betas[0] ** self.steps)
            second = self.second[name] / (1 - self.betas[1] ** self.steps)
            with torch.no_grad():
                parameter -= rate * self.weight_decay * parameter
                parameter -= rate * first / (second.sqrt() + self.eps)

    def moved(self) -> dict[str, torch.Tensor]:
        """How far each parameter is from where it began."""
        return {name: p.detach() - self.initial[name] for name, p in self.parameters.items()}
