"""Signals to a process whose run is not under way: before it has begun, and once its end is known.

Owns the process's handlers of SIGTERM and SIGINT while it is entered. While a run is under way, `terminal`
has its own in their place, which stop it in order.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class AtSignal:
    """What a signal ends the process with, at once: nothing is under way that it could hurt."""

    def __init__(self, code: int, said: str) -> None:
        self.code, self.said = code, said
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> AtSignal:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {number: signal.signal(number, self._end) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            print(f"surefoot: {self.said}", file=sys.stderr, flush=True)
        os._exit(self.code)
