"""How learner ranks meet and compare notes: one torch.distributed group, and a second one for files.

Owns the process groups of one rank's process. Invariants: every rank makes the same calls in the same order;
what is gathered comes in order of rank, so that every rank adds up the same numbers in the same order and
decides the same; a peer that is lost or silent ends a call with an error within the timeout.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class RankPlace:
    """Where one rank stands, and where all of them meet."""

    rank: int
    ranks: int
    address: str  # of the store that rank 0 has opened
    port: int
    timeout_seconds: float
    one_host: bool  # all ranks are on one machine: they talk over loopback alone


def open_store(address: str, timeout_seconds: float) -> TCPStore:
    """The meeting place, opened by rank 0 on a free port of this address; `store.port` says which.

    The socket is bound here and handed over, as torch would listen on every address, and so that no other
    process can take the port in between.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.bind((address, 0))
        listening.listen(1024)
        port = listening.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            master_listen_fd=listening.detach(),
        )


class RankGroup:
    """One rank's membership. `store`: the one that rank 0 opened, in its own process."""

    def __init__(self, place: RankPlace, device: torch.device, store: TCPStore | None = None) -> None:
        self.rank, self.ranks, self.device = place.rank, place.ranks, device
        timeout = timedelta(seconds=place.timeout_seconds)
        if store is None:
            store = TCPStore(place.address, place.port, is_master=False, timeout=timeout)
        if place.one_host:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.ranks,
            timeout=timeout,
        )
        # Checkpoints are written beside training; on the same group their calls would meet its calls.
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self.for_files = group
        self.mesh: DeviceMesh = init_device_mesh(device.type, (place.ranks,))

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, as float64, in order of rank."""
        own = torch.tensor(values, dtype=torch.float64)
        if self.ranks == 1:
            return [own.tolist()]
        found = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(found, own)
        return [numbers.tolist() for numbers in found]

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in order of rank."""
        found = [""] * self.ranks
        dist.all_gather_object(found, text)
        return found

    def leave(self) -> None:
        """Leave the groups; the last call."""
        dist.destroy_process_group()
