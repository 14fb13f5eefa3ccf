"""Training: config, learner, checkpoints, the driver, the asynchronous API and the command line.

`Run` and `train` are the library. They are imported when they are first asked for, so that a command which
only reads a log does not pay for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Run, train

__all__ = ["Run", "train"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import run

    return getattr(run, name)
