"""A model folder as plan and samples need one: everything but sensible weights. Made without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

CHARACTERS = ["<pad>", "<end>", *(chr(code) for code in range(32, 127))]
CONTEXT_TOKENS = 128


def write_model(folder: Path, **changes: object) -> Path:
    """A character-level Llama of one layer; `changes` go into config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({one: i for i, one in enumerate(CHARACTERS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(CHARACTERS),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"lm_head.weight": numpy.zeros((len(CHARACTERS), 16), dtype=numpy.float32)}
    save_file(weights, str(folder / "model.safetensors"))
    return folder


def write_rows(path: Path, rows: int, prompt: str = "{i}+1=") -> Path:
    """A .jsonl file of sums."""
    lines = [json.dumps({"prompt": prompt.format(i=i), "answer": str(i + 1)}) for i in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path
