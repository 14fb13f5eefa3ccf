"""The quickstart's kind of work, for the product and for a bare loop alike: a model, prompts, a config.

Owns nothing but the files that it writes. Sums of two numbers of one or two digits, `12+5=`, answered by a
character-level Llama of 0.8 million parameters; rewarded by exact match.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from .figures import ROOT

PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 32, 8, 5
LEARNING_RATE = 1e-4
MODEL = ROOT / "examples" / "model"

CONFIG = """
seed = 1
[data]
source = "{rows}"
[model]
path = "{model}"
[batch]
prompts = {prompts}
group_size = {group_size}
[rollout]
max_new_tokens = {max_new_tokens}
max_concurrent = {max_concurrent}
threads = {threads}
[learner]
threads = {threads}
[optim]
lr = {learning_rate}
[sync]
max_staleness = {bound}
[checkpoint]
every_updates = {checkpoint_every}
"""


def make_model(folder: Path, *, taught_steps: int = 150) -> Path:
    """The quickstart's starting model: the one that is there, or one made like it."""
    if (MODEL / "config.json").exists():
        return MODEL
    command = [sys.executable, str(ROOT / "examples" / "make_model.py"), str(folder)]
    subprocess.run([*command, "--train-steps", str(taught_steps)], check=True, capture_output=True)
    return folder


def sums(rows: int) -> list[dict[str, str]]:
    """Prompts and answers, from a seed."""
    draw = random.Random(7)
    pairs = [(draw.randrange(1, 100), draw.randrange(1, 100)) for _ in range(rows)]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def write_config(folder: Path, model: Path, *, updates: int, bound: int, checkpoint_every: int = 10) -> Path:
    """Rows for so many updates, and a config that trains on them, on two cores.

    Worker and learner have a core each where they work side by side, and both in turn where they alternate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in sums(updates * PROMPTS)))
    config = folder / "bench.toml"
    values: dict[str, Any] = {
        "rows": rows,
        "model": model,
        "prompts": PROMPTS,
        "group_size": GROUP_SIZE,
        "max_new_tokens": MAX_NEW_TOKENS,
        "max_concurrent": PROMPTS * GROUP_SIZE,
        "learning_rate": LEARNING_RATE,
        "bound": bound,
        "threads": 1,
        "checkpoint_every": checkpoint_every,
    }
    config.write_text(CONFIG.format(**values))
    return config
