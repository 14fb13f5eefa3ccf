"""Who drives a run, and whether that process still lives: a question of manners, never of safety.

Owns the identity of a driver process. Its invariant: a process that cannot be looked at from here (another
host, another PID namespace) is never called dead. Safety is the fence's, in the log.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import psutil


class DriverIdentity(msgspec.Struct, frozen=True):
    """A driver process: its host, its process id, and what tells it from a later process of the same id.

    `process_start` is opaque: on Linux boot id, PID namespace and start tick, which no correction of the
    wall clock can move; elsewhere the start time.
    """

    host: str
    pid: int
    process_start: str

    @classmethod
    def here(cls) -> DriverIdentity:
        """This very process."""
        pid = os.getpid()
        start = _process_start(pid)
        assert start is not None, "this process is there"
        return cls(socket.gethostname(), pid, start)


def lives(driver: DriverIdentity) -> bool | None:
    """Whether that process lives; None where it cannot be seen from here."""
    if driver.host != socket.gethostname():
        return None
    here = DriverIdentity.here().process_start.split("/")
    there = driver.process_start.split("/")
    if len(here) == len(there) == 3:
        boot, namespace, _ = there
        if boot != here[0]:
            return False  # this host has been started anew since
        if namespace != here[1]:
            return None  # a container beside this one: its process ids mean nothing here
    return _process_start(driver.pid) == driver.process_start


def _process_start(pid: int) -> str | None:
    """What tells this process from another of the same id; None if it is gone, or dead and not yet reaped."""
    if Path("/proc/self/stat").exists():
        try:
            # the second field, the program's name in brackets, may hold spaces and brackets itself
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid")
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else f"{boot}/{namespace}/{fields[19]}"
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None
