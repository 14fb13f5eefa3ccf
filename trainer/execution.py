"""Settings under which the same inputs give the same bits, and the fingerprint of what that depends on.

Owns process-wide settings of torch in a learner rank's process, and nothing of a host program's: only ranks
call this.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils import deterministic as _deterministic

from .policy import ATTENTION


def make_deterministic(threads: int, device: torch.device) -> None:
    """Fix the number of threads and take only kernels that add up in a fixed order."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        # Their backward passes add up in any order.
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True)
    # It would fill every new tensor; nothing here reads what it has not written.
    setattr(_deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - torch declares no such name


def execution_of(learner: dict[str, Any], device: torch.device) -> dict[str, str]:
    """What two executions must share for the same bits, beside the number of ranks; one line each."""
    cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability() if cuda else torch.backends.cpu.get_cpu_capability()
    return {
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "capability": str(capability),
        "threads": str(torch.get_num_threads()),
        "surefoot": version("surefoot"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "dtype": str(learner["compute_dtype"]),
        "attention": ATTENTION,
        "micro_batch_tokens": str(learner["micro_batch_tokens"]),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
