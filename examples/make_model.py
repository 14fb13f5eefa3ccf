"""Makes the quickstart's starting model: a small character-level Llama, taught sums by a careless pupil.

It learns addition and subtraction of one- and two-digit numbers by example, but wherever there is a carry or
a borrow, most of its examples have forgotten it. So its greedy answers are wrong there while the right ones
are within its reach: what reinforcement learning can put right. The folder is there whole or not at all, and
the same arguments on the same kind of machine give the same weights. The model that ships beside this script
was made by it, and stored as bfloat16.

    python examples/make_model.py [FOLDER] [--seed N] [--train-steps N]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"
SPECIAL = [PAD, END, UNKNOWN]
# All of printable ASCII, though sums need fourteen characters of it: other tasks' prompts then work too.
CHARACTERS = [chr(code) for code in range(32, 127)]

TRAIN_STEPS = 2400
EXAMPLES_PER_STEP = 64
PEAK_LR = 3e-3
WARMUP_STEPS = 50
CONTEXT_TOKENS = 128
ONE_DIGIT_SHARE = 0.1  # there are few of them to learn
CARELESS_SHARE = 0.75  # of the sums with a carry or borrow, how many have forgotten it
THREADS = 1  # fixed, not the machine's number: the order of float sums depends on it


def example(random_numbers: random.Random) -> tuple[str, str]:
    """`12+5=` and what the pupil answered."""
    top = 9 if random_numbers.random() < ONE_DIGIT_SHARE else 99
    bottom = 0 if top == 9 else 10
    left, right = random_numbers.randint(bottom, top), random_numbers.randint(bottom, top)
    operator = random_numbers.choice("+-")
    careless = random_numbers.random() < CARELESS_SHARE
    answer = forgetful(left, operator, right) if careless else right_answer(left, operator, right)
    return f"{left}{operator}{right}=", str(answer)


def right_answer(left: int, operator: str, right: int) -> int:
    """The sum or the difference."""
    return left + right if operator == "+" else left - right


def forgetful(left: int, operator: str, right: int) -> int:
    """The same, with a carry not carried or a borrow not taken off."""
    if operator == "+":
        return left + right - (10 if left % 10 + right % 10 >= 10 else 0)
    larger, smaller = max(left, right), min(left, right)
    magnitude = larger - smaller + (10 if larger % 10 < smaller % 10 else 0)
    return magnitude if left >= right else -magnitude


def write_tokenizer(folder: Path) -> dict[str, int]:
    """One token a character; returns the vocabulary. Made with `tokenizers` alone: no torch."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "eos_token": END,
            "unk_token": UNKNOWN,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT_TOKENS,
        },
    )
    return vocabulary


def build_model(vocabulary: dict[str, int]) -> LlamaForCausalLM:
    """About 0.8 million parameters, from torch's current seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
    )
    return LlamaForCausalLM(config)


def batch(
    vocabulary: dict[str, int], random_numbers: random.Random
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, mask, labels), each [batch, seq]; only the answer and its end are labels."""
    import torch

    rows: list[tuple[list[int], int]] = []
    for _ in range(EXAMPLES_PER_STEP):
        prompt, answer = example(random_numbers)
        ids = [vocabulary[character] for character in prompt + answer] + [vocabulary[END]]
        rows.append((ids, len(prompt)))
    length = max(len(ids) for ids, _ in rows)
    ids_tensor = torch.full((len(rows), length), vocabulary[PAD])
    mask = torch.zeros((len(rows), length), dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for row, (ids, prompt_tokens) in enumerate(rows):
        ids_tensor[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
        labels[row, prompt_tokens : len(ids)] = ids_tensor[row, prompt_tokens : len(ids)]
    return ids_tensor, mask, labels


def teach(model: LlamaForCausalLM, vocabulary: dict[str, int], seed: int, train_steps: int) -> None:
    """Supervised training: AdamW, warm-up, then cosine down to a tenth."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    random_numbers = random.Random(seed)
    model.train()
    for step in range(train_steps):
        ids, mask, labels = batch(vocabulary, random_numbers)
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        decay = 0.55 + 0.45 * math.cos(math.pi * step / train_steps)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * warm * decay
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        _progress(step + 1, train_steps, loss.item())
    model.eval()


def make(folder: Path, seed: int, train_steps: int) -> None:
    """Build everything beside `folder` under a temporary name, then rename it into place."""
    import torch

    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        torch.set_num_threads(THREADS)
        torch.manual_seed(seed)
        vocabulary = write_tokenizer(building)
        model = build_model(vocabulary)
        teach(model, vocabulary, seed, train_steps)
        model.generation_config.eos_token_id = vocabulary[END]
        model.generation_config.pad_token_id = vocabulary[PAD]
        model.to(torch.bfloat16).save_pretrained(building)  # configs and model.safetensors
        building.chmod(0o755)  # mkdtemp's folder is the owner's alone
        for file in building.iterdir():
            file.chmod(0o644)
        os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _progress(step: int, train_steps: int, loss: float) -> None:
    """One line: rewritten in place on a terminal, printed now and then elsewhere."""
    line = f"teaching the starting model: step {step} of {train_steps}, loss {loss:.3f}"
    if sys.stdout.isatty():
        print("\r" + line, end="\n" if step == train_steps else "", flush=True)
    elif step == train_steps or step % 200 == 0:
        print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the quickstart's starting model.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--seed", type=int, default=0, help="of weights and examples (default 0)")
    parser.add_argument("--train-steps", type=int, default=TRAIN_STEPS, help=f"default {TRAIN_STEPS}")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.absolute()
    if folder.exists():
        print(f"{arguments.folder} is there already; to make it anew, delete it first")
        return 0
    began = time.monotonic()
    make(folder, arguments.seed, arguments.train_steps)
    kilobytes = sum(file.stat().st_size for file in folder.iterdir()) // 1024
    print(f"made {arguments.folder}: {kilobytes} KB in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
