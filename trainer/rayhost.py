"""What Ray leaves its marks on in a host process, and how each is taken away: folder, environment, signals.

Owns nothing but Ray's folder. Invariant: what a context manager here has changed in the host process is as it
was when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

PARTING_SECONDS = 0.5  # for this process to say good-bye to Ray, after which its daemons are killed
END_SECONDS = 10.0  # for Ray's processes to end by themselves, after which they are killed
TEMP_PREFIX = "surefoot-ray-"
FAILURE_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGSEGV,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGTRAP,
)
SIGACTION_ROOM = 512  # more bytes than any platform's struct sigaction has
SOCKET_PATH_ROOM = 24  # longer roots bring Ray's socket paths near the 107 bytes that they may have


class Folder:
    """A short-named folder for Ray's sockets and logs, locked while this process lives.

    What earlier processes left behind, when they were killed, is swept: the lock went with them.
    """

    def __init__(self) -> None:
        root = tempfile.gettempdir()
        if len(root) > SOCKET_PATH_ROOM and os.access("/tmp", os.W_OK):
            root = "/tmp"
        for old in Path(root).glob(f"{TEMP_PREFIX}*"):
            with contextlib.suppress(OSError), (old / "lock").open("r+b") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=root))  # for this user alone
        self._held = (self.path / "lock").open("w+b")
        fcntl.flock(self._held, fcntl.LOCK_EX)

    def remove(self) -> None:
        self._held.close()
        shutil.rmtree(self.path, ignore_errors=True)


def local_environment() -> dict[str, str]:
    """What the daemons of a local Ray need to find in their environment."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps every socket on the loopback address
        "RAY_AUTH_TOKEN": secrets.token_hex(16),  # else Ray writes one into the home folder
    }


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set what the host has not set, for child processes to inherit; put back all of Ray's afterwards."""
    before = {key: value for key, value in os.environ.items() if _of_ray(key)}
    os.environ.update({key: value for key, value in variables.items() if key not in before})
    try:
        yield
    finally:
        for key in [key for key in os.environ if _of_ray(key) and key not in before]:
            del os.environ[key]
        os.environ.update(before)


def _of_ray(variable: str) -> bool:
    return variable.startswith("RAY_") or variable == "PYTHONBREAKPOINT"


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    """What RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 does, where Ray was imported before it was set."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """The host's signal handlers as they were, below Python: Ray's C++ puts one that aborts in their place.

    Python's own table does not show it, and only the main thread may call `signal.signal`; sigaction(2) may
    be called from any.
    """
    sigaction = ctypes.CDLL(None).sigaction
    saved = {number: ctypes.create_string_buffer(SIGACTION_ROOM) for number in FAILURE_SIGNALS}
    for number, action in saved.items():
        sigaction(int(number), None, action)
    try:
        yield
    finally:
        for number, action in saved.items():
            sigaction(int(number), action, None)


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """What this thread starts meanwhile, and all below it, does not hear SIGTERM, as Ray does it with SIGINT.

    A supervisor sends it to every process, and a checkpoint can be taken only while Ray is there. When Ray
    ends is for us to say; who is killed with us dies all the same.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def killed_after(seconds: float, processes: list[psutil.Process]) -> Iterator[None]:
    """Kill processes beside the body, which asks them to end one after the other, and they do not hear it."""
    timer = threading.Timer(seconds, kill, [processes])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log lines of Ray below an error."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Nothing of Ray's on stdout, where it reports every worker that died: whoever lost one says so."""
    from ray._private import worker

    before = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        worker.print_to_stdstream = before


def forget_token() -> None:
    """Unlearn the token of the Ray that has ended, or the process could join no other one."""
    from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


def processes_naming(mark: str) -> list[psutil.Process]:
    """Every child of this process whose command line names `mark`, and all that is below it."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(mark in argument for argument in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def end(processes: list[psutil.Process]) -> None:
    """Wait for processes to end; kill those that have not."""
    deadline = time.monotonic() + END_SECONDS
    while any(map(lives, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    kill(processes)
    while any(map(lives, processes)) and time.monotonic() < deadline + END_SECONDS:
        time.sleep(0.02)


def kill(processes: list[psutil.Process]) -> None:
    for process in filter(lives, processes):
        with contextlib.suppress(psutil.Error):
            process.kill()


def lives(process: psutil.Process) -> bool:
    # An orphan stays a zombie until whoever inherits it looks: it has ended all the same.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
