"""A learner rank as a Ray actor: bytes in, structs out.

Owns one `LearnerRank`. Invariants: signals that a supervisor sends to every process do not end it, the driver
does; what waits for files runs beside what trains, on a thread of its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

import msgspec
import ray

from ..rollout.protocols import Group, Published
from ..statemachine.errors import RunFailedError
from ..statemachine.events import CheckpointCommitted
from ..statemachine.log import EventRow
from .checkpoints import ManifestFile
from .protocols import LearnerReady, UpdateResult

FILES = "files"
"""The concurrency group of calls that wait for a checkpoint's files."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 25

_rows = msgspec.msgpack.Decoder(list[EventRow])
_groups = msgspec.msgpack.Decoder(list[Group])


class RankActor:
    """See LearnerRank for what the calls do."""

    def __init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _keep_freed_memory()
        # Before torch is loaded: threads that wait by spinning take the cores that rollout workers need.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._rank: Any = None
        self._store: Any = None

    def where(self) -> tuple[str, str, int]:
        """The address of this node, Ray's id of it, and the process id."""
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), os.getpid()

    def open_store(self, address: str, timeout_seconds: float) -> int:
        """On rank 0: open the meeting place; its port."""
        from .rankgroup import open_store

        self._store = open_store(address, timeout_seconds)
        return self._store.port

    def start(self, place: dict[str, Any], rows: bytes) -> LearnerReady:
        from .rank import LearnerRank
        from .rankgroup import RankPlace

        self._rank = LearnerRank(RankPlace(**place), _rows.decode(rows), store=self._store)
        return self._rank.ready()

    def load(self, storage: str, committed: CheckpointCommitted) -> None:
        self._rank.load(storage, committed)

    def update(self, update: int, groups: bytes, rows: bytes) -> UpdateResult:
        return self._rank.update(update, _groups.decode(groups), _rows.decode(rows))

    def gather(self, version: int) -> Published | None:
        return self._rank.gather(version)

    def begin_save(self, storage: str, path: str) -> Any:
        return self._rank.begin_save(storage, path)

    @ray.method(concurrency_group=FILES)
    def finish_save(self, storage: str, path: str) -> list[ManifestFile]:
        try:
            return self._rank.finish_save(storage, path)
        except Exception as error:  # a full disk and the like: the rank itself is well
            raise RunFailedError(f"checkpoint {path} cannot be written: {error!r}", path=path) from error


def _keep_freed_memory() -> None:
    """Have glibc keep what tensors free, instead of asking the kernel for it again at every step."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError):  # another C library: nothing to set, only slower
        return
