"""A run small enough to be killed many times: random weights, letters for rows, a reward from the text alone.

Nothing in it needs torch to be made. `deterministic` runs are a pure function of their config, so whatever
was killed, ledger and last weights must equal those of the run that nobody touched.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTERS = "abcdefghijklmnopqrstuvwxyz ="
HIDDEN, LAYERS, HEADS, INNER, CONTEXT = 32, 2, 4, 64, 64

TRIP = "trip"
"""While a file of this name is beside the reward, the next response to the second row has none."""

REWARD = '''"""The reward of the small runs: the share of vowels; a function of row and text alone."""

from pathlib import Path

TRIP = Path(__file__).with_name("trip")


def vowels(row, text, ids):
    if row["prompt"] == "bh =" and TRIP.exists():
        TRIP.unlink()
        raise ValueError("tripped")
    if row["flat"]:
        return 0.0
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))
'''

CONFIG = """
seed = 11
[data]
source = "rows.jsonl"
[reward]
function = "small_reward:vowels"
[model]
path = "model"
[batch]
prompts = 2
group_size = 3
[rollout]
max_new_tokens = 6
max_concurrent = 12
deterministic = {deterministic}
workers = {workers}
[learner]
ranks = {ranks}
[sync]
every_updates = 2
max_staleness = {bound}
[checkpoint]
every_updates = 3
keep = 1
[eval]
every_updates = 3
size = 2
source = "held_out.jsonl"
[optim]
lr = 1e-2
[cluster]
start_seconds = 240
"""


def make_small(
    folder: Path,
    *,
    rows: int = 14,
    deterministic: bool = True,
    bound: int = 0,
    workers: int = 1,
    ranks: int = 1,
    flat: Collection[int] = (),
    extra: str = "",
) -> Path:
    """Model, rows, reward and config in a folder; returns the config's path. 7 updates, 4 publications.

    `flat`: rows for which every response has the same reward.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / "model")
    lines = [
        {"prompt": f"{LETTERS[i % 26]}{LETTERS[(7 * i) % 26]} =", "answer": "a", "flat": i in flat}
        for i in range(rows)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    held_out = [{"prompt": f"{letter}{letter} =", "answer": "a", "flat": False} for letter in "xyz"]
    (folder / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held_out))
    (folder / "small_reward.py").write_text(REWARD)
    config = folder / "small.toml"
    text = CONFIG.format(deterministic=str(deterministic).lower(), bound=bound, workers=workers, ranks=ranks)
    config.write_text(text + extra)
    return config


def make_model(folder: Path) -> None:
    """A Llama of 20 thousand random parameters and a tokenizer of single letters."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<end>": 0, "<pad>": 1, **{letter: 2 + i for i, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 1}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"})
    )
    rng = np.random.default_rng(3)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(len(vocabulary), HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(len(vocabulary), HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{name}self_attn.{part}.weight"] = matrix(HIDDEN, HIDDEN)
        tensors[f"{name}mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[f"{name}mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        tensors[f"{name}mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        tensors[f"{name}input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        tensors[f"{name}post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
