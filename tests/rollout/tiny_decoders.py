"""Small random models of transformers, engines that run them, and what transformers says of a response."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from surefoot.rollout.architecture import Architecture
from surefoot.rollout.engine import FinishedSample
from surefoot.rollout.torch_engine import TorchEngine

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, heads sharing keys": ("Llama", {}),
    "llama, every head its own keys, tied": (
        "Llama",
        {"num_key_value_heads": 6, "tie_word_embeddings": True},
    ),
    "llama, biases, heads wider than the stream": (
        "Llama",
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, untied, another base": (
        "Qwen2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ),
    "qwen3, heads wider than the stream": ("Qwen3", {"head_dim": 32}),
    "qwen3, biases, tied": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
}


def tiny_model(family: str = "Llama", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model whose logits are far from equal and whose biases and norms are not trivial."""
    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model.requires_grad_(False)


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def architecture_of(model: PreTrainedModel) -> Architecture:
    return Architecture.of(model.config.to_dict(), "the model")


def engine_for(model: PreTrainedModel, **options: Any) -> TorchEngine:
    """An engine with the model loaded as version 0."""
    options = {"slots": 5, "max_tokens": 64, "stop_ids": []} | options
    engine = TorchEngine(architecture_of(model), **options)
    engine.load_weights(0, tensors_of(model))
    return engine


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, size=length).tolist() for length in lengths]


def logprobs_by_transformers(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> torch.Tensor:
    """The convention both sides keep: token t of the response from the logits before it; fp32 [response]."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1)[range(len(response)), list(response)]


def same(one: FinishedSample, other: FinishedSample) -> bool:
    """Bit for bit."""
    return (
        one.ids.tobytes() == other.ids.tobytes()
        and one.logprobs.tobytes() == other.logprobs.tobytes()
        and one.truncated == other.truncated
    )


def saved(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder
