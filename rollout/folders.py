"""Reading a model folder's weights.

Owns nothing. Invariant: what `load_folder` returns is every tensor of the folder in fp32 by the name
transformers gives it, from one safetensors file or from the shards that its index names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..statemachine.errors import ModelRefused
from .architecture import read_config
from .weightfiles import weight_files


def load_folder(folder: str | Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the weights of a model folder, on the CPU in fp32. Raises ModelRefused."""
    folder = Path(folder)
    config = read_config(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dict
                    tensors[name] = opened.get_tensor(name).to(torch.float32)
        except (OSError, SafetensorError) as error:
            raise ModelRefused(
                f"{file} cannot be read as safetensors ({error}): save the model again with save_pretrained",
                path=str(file),
            ) from error
    return config, tensors
