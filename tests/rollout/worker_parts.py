"""What a real worker is built from: a tiny random model, published weights, settings, requests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedModel

from surefoot.rollout.payload import RawTensor, digest_of, pack
from surefoot.rollout.protocols import GroupRequest, Published, Row
from surefoot.rollout.worker import WorkerSettings
from surefoot.statemachine.events import encode
from tests.statemachine.budgets import budget

from .tiny_decoders import tensors_of, tiny_model
from .tiny_models import characters, write_model

VOCABULARY = 16
PROMPT = [3, 12, 4, 14]  # "1+2="
MAX_NEW_TOKENS = 6


@functools.cache
def a_model(seed: int = 0) -> PreTrainedModel:
    return tiny_model(vocab_size=VOCABULARY, eos_token_id=1, pad_token_id=0, seed=seed)


def model_folder(folder: Path) -> Path:
    """A character-level model with random weights."""
    write_model(folder, characters(), tokenizer_config={"eos_token": "<end>", "pad_token": "<pad>"})
    a_model().save_pretrained(folder)
    return folder


def published(version: int, seed: int | None = None) -> Published:
    """The weights of one random model, by default another one for each version."""
    tensors = {
        name: RawTensor("F32", tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
        for name, tensor in tensors_of(a_model(version if seed is None else seed)).items()
    }
    return Published(version=version, update=version, digest=digest_of(tensors), payload=pack(tensors))


def settings(folder: Path, **changes: Any) -> bytes:
    values: dict[str, Any] = {
        "budget": encode(budget()),
        "model_path": str(folder),
        "slots": 8,
        "max_tokens": 32,
        "reward": "tests.rollout.worker_parts:length_reward",
    }
    return msgspec.msgpack.encode(WorkerSettings(**(values | changes)))


def ask(prompt_index: int = 0, *, samples: int = 3, **changes: Any) -> GroupRequest:
    values: dict[str, Any] = {
        "prompt_index": prompt_index,
        "attempt": 1,
        "admission_version": 0,
        "row": Row(row_index=prompt_index + 100, prompt="1+2=", prompt_ids=PROMPT, fields={"answer": "3"}),
        "seeds": [1000 * prompt_index + sample for sample in range(samples)],
        "temperature": 0.7,
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    return GroupRequest(**(values | changes))


def length_reward(row: dict[str, Any], text: str, ids: list[int]) -> dict[str, float]:
    """So many tokens, and a part that shows that the row was seen."""
    return {"length": float(len(ids)), "answer": float(row["answer"])}


def raising_reward(row: dict[str, Any], text: str, ids: list[int]) -> float:
    raise KeyError("no such thing")
