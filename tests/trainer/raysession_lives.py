"""Small programs that hold Ray sessions, each run in a process of its own by `test_raysession`.

Run as `python -m tests.trainer.raysession_lives NAME [ARGUMENT]`; what a program saw is its last line, JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

from surefoot.statemachine.errors import ClusterTooSmall, ConfigRefused
from surefoot.trainer.raysession import RaySession

START_SECONDS = 110.0


def living(processes: list[psutil.Process]) -> list[str]:
    """Those that have not ended, by name."""
    names: list[str] = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                names.append(process.name())
    return names


def listening(processes: list[psutil.Process]) -> list[str]:
    """The addresses on which processes can be reached from elsewhere on the network."""
    found: set[str] = set()
    for process in [psutil.Process(), *processes]:
        with contextlib.suppress(psutil.Error):
            found |= {
                connection.laddr.ip
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
    return sorted(found)


async def _refused(attempt: Any) -> str:
    try:
        await attempt
    except (ClusterTooSmall, ConfigRefused) as error:
        return str(error)
    return ""


async def whole_life() -> dict[str, Any]:
    """Two sessions at once in one process, then a look at what is left."""
    handlers = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), sys.excepthook]
    environment = dict(os.environ)
    seen: dict[str, Any] = {}
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    handlers[0] = signal.getsignal(signal.SIGTERM)
    async with RaySession.acquire(None, 6, START_SECONDS) as first:
        import ray

        seen["handlers_while_up"] = handlers == [
            signal.getsignal(signal.SIGTERM),
            signal.getsignal(signal.SIGINT),
            sys.excepthook,
        ]
        os.kill(os.getpid(), signal.SIGTERM)  # the table in Python is not all: C++ may have its own handler
        await asyncio.wait_for(told.wait(), 30)
        seen["environment_while_up"] = environment == dict(os.environ)
        seen["available"] = await first.available()
        node = ray.get_runtime_context().get_node_id()
        async with RaySession.acquire(None, None, START_SECONDS) as second:
            seen["shared"] = node == ray.get_runtime_context().get_node_id()
            seen["too_many"] = await _refused(first.check_fits(6, 1))
            seen["no_gpu"] = await _refused(first.check_fits(1, 1, gpus_per_worker=0.5))
            await first.check_fits(3, 2)
            seen["beside_another"] = await _refused(second.check_fits(1, 1))
            await second.check_fits(1, 0)
            seen["other_cluster"] = await _refused(_enter("10.255.255.1:6379"))
        seen["up_after_second_left"] = ray.is_initialized()
        await first.check_fits(5, 1)
        processes = psutil.Process().children(recursive=True)
        seen["names_while_up"] = living(processes)
        seen["listening"] = listening(processes)
        seen["folders_while_up"] = _folders(processes)
    seen["up_after_last_left"] = ray.is_initialized()
    seen["living_after"] = living(processes)
    seen["children_after"] = living(psutil.Process().children(recursive=True))
    seen["folders_after"] = _existing(seen["folders_while_up"])
    seen["environment_after"] = environment == dict(os.environ)
    await asyncio.to_thread(_join_thread)
    seen["threads_after"] = [t.name for t in threading.enumerate() if t.name == "surefoot-ray"]
    return seen


async def _enter(address: str) -> None:
    async with RaySession.acquire(address, None, START_SECONDS):
        pass


def _folders(processes: list[psutil.Process]) -> list[str]:
    """The folders that Ray's processes were started with."""
    said = ""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            said += " ".join([*process.cmdline(), ""])
    return sorted(set(re.findall(r"/\S*surefoot-ray-[^/ ]+", said)))


def _existing(folders: list[str]) -> list[str]:
    return [folder for folder in folders if Path(folder).exists()]


def _join_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "surefoot-ray":
            thread.join(10)


async def found_and_joined() -> dict[str, Any]:
    """A Ray of the host's own, used from this process and joined by address from another one."""
    import ray

    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    seen: dict[str, Any] = {}
    async with RaySession.acquire(None, 8, START_SECONDS) as session:
        seen["available"] = await session.available()
        seen["too_many"] = await _refused(session.check_fits(4, 0))
        address = ray.get_runtime_context().gcs_address
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.trainer.raysession_lives", "joining", address,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await child.communicate()
        seen["joined"] = json.loads(output.splitlines()[-1])
    seen["still_up"] = ray.is_initialized() and ray.cluster_resources()["CPU"] == 3.0
    ray.shutdown()
    return seen


async def joining(address: str) -> dict[str, Any]:
    """Join a cluster that runs elsewhere, and leave it."""
    async with RaySession.acquire(address, None, START_SECONDS) as session:
        seen: dict[str, Any] = {"available": await session.available()}
        seen["children"] = living(psutil.Process().children(recursive=True))
    import ray

    seen["up_after"] = ray.is_initialized()
    return seen


async def cancelled() -> dict[str, Any]:
    """Cancelled while Ray starts."""
    loop, started = asyncio.get_running_loop(), asyncio.Event()

    class Noted(subprocess.Popen[Any]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            loop.call_soon_threadsafe(started.set)

    subprocess.Popen = Noted  # before Ray is imported, which makes its own kind of it
    entering = asyncio.ensure_future(_enter_local())
    await started.wait()
    processes = psutil.Process().children(recursive=True)
    entering.cancel()
    await asyncio.wait({entering})
    return {
        "cancelled": entering.cancelled(),
        "living": living(processes) + living(psutil.Process().children(recursive=True)),
    }


async def _enter_local() -> None:
    async with RaySession.acquire(None, None, START_SECONDS):
        pass


async def until_killed() -> dict[str, Any]:
    """Up, with an actor at work, until somebody kills it."""
    import ray

    async with RaySession.acquire(None, None, START_SECONDS):
        actor = ray.remote(_Busy).remote()
        pid = await actor.pid.remote()
        processes = psutil.Process().children(recursive=True)
        print(json.dumps({"actor": pid, "pids": [process.pid for process in processes]}), flush=True)
        await asyncio.Event().wait()
    return {}


class _Busy:
    def pid(self) -> int:
        return os.getpid()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))), flush=True)
