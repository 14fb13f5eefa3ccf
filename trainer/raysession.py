"""The process's Ray: one for all of its runs, started by the first that asks, ended by the last that leaves.

Owns whether Ray is up and who uses it. Invariants: a Ray that was up already is used and left up; one that
was started here is gone, with every process below it, when the last session has ended; signal handlers and
environment of the host process are as they were. A run that was asked to stop waits for nothing here beyond
its share of the grace time: then the Ray that was started is killed, and one that was joined is left alone.

Ray itself allows one `init` per process, calls it best from one thread that lives as long as the cluster
(its daemons are bound to die with that very thread), and takes the SIGTERM handler when called from the main
one. So one thread, made for it, does all of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

import psutil

from ..statemachine.errors import ClusterTooSmall, ConfigRefused, RunFailedError, TimedOut
from .ending import RAY, WORKERS, Ending
from .rayhost import (
    PARTING_SECONDS,
    Folder,
    deaf,
    end,
    environment,
    forget_token,
    kill,
    killed_after,
    local_environment,
    loopback,
    processes_naming,
    quiet,
    signals,
    silent,
)
from .slots import local_slots

T = TypeVar("T")

OBJECT_STORE_BYTES = 400 * 1024 * 1024  # shared memory, taken as it fills; Ray spills to disk beyond it
FREE_WAIT_SECONDS = 10.0  # for what a run before this one is about to give back
CONNECT_SECONDS = 10.0  # for the head of a cluster that is to be joined
CALL_SECONDS = 120.0  # for one call that may block; weights of many gigabytes take a while
LEAVE_SECONDS = 20.0  # for Ray's own shutdown
GIVE_UP_SECONDS = 10.0  # for what nobody waits for any more to end: a start of Ray, a thread that hung


class RaySession:
    """One run's hold on the process's Ray, for as long as `acquire` is entered."""

    def __init__(self, host: _Host, ending: Ending | None = None) -> None:
        self._host = host
        self._ending = ending or Ending()

    @classmethod
    @contextlib.asynccontextmanager
    async def acquire(
        cls, address: str | None, slots: int | None, start_seconds: float, ending: Ending | None = None
    ) -> AsyncIterator[RaySession]:
        """Use the Ray that is up, or join `address`, or start a local one of `slots` CPUs.

        To be cancelled is to be asked to stop. Raises TimedOut; ConfigRefused if the process is in another
        cluster already.
        """
        ending = ending or Ending()
        host = _Host.enlist()
        entering = asyncio.wrap_future(host.submit(functools.partial(host.enter, address, slots)))
        try:
            entered = await ending.wait(entering, by=RAY, seconds=start_seconds)
        except asyncio.CancelledError:
            ending.ask()
            try:
                await _to_the_end(entering, min(start_seconds, GIVE_UP_SECONDS), ending)
            finally:
                if entering.done():
                    await _leave(host, ending)
                else:
                    host.give_up()
            raise
        if not entered:
            host.give_up()
            where = f"the Ray cluster at {address}" if address else "a local Ray"
            raise TimedOut(
                f"{where} did not answer within cluster.start_seconds = {start_seconds:g}: check that "
                "it runs, or allow more",
                waited_for="ray",
                seconds=start_seconds,
            )
        session = cls(host, ending)
        try:
            entering.result()
            yield session
        finally:
            host.reserved.pop(id(session), None)
            await _leave(host, ending)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Make a call to Ray that may block, on the session's thread. Raises TimedOut."""
        return await _answer(self._host.submit(functools.partial(function, *args)), function, self._ending)

    @property
    def node(self) -> str:
        """Ray's id of the machine that this process is on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    async def draining(self) -> frozenset[str]:
        """Ray's ids of the nodes that are being drained. Raises RunFailedError if the cluster cannot say,
        TimedOut. Asked on a thread of its own, so that a cluster that hangs here holds up nothing else."""
        from ray._private.state import state  # Ray's own trainer asks here; there is no public way
        from ray.exceptions import RayError

        try:
            asked = _aside(state.get_draining_nodes)
            return frozenset(await _answer(asked, state.get_draining_nodes, self._ending))
        except (RayError, RuntimeError) as error:
            raise RunFailedError(f"the Ray cluster does not say which nodes it drains: {error}") from error

    async def available(self) -> tuple[float, float]:
        """CPUs and GPUs that this session could use now."""
        cpus, gpus = await self.call(self._host.resources, "available")
        return cpus, gpus

    async def check_fits(
        self, workers: int, ranks: int, gpus_per_worker: float = 0.0, gpus_per_rank: float = 0.0
    ) -> None:
        """Refuse more than there is, before anything is started. Raises ClusterTooSmall.

        What fits is reserved against the other runs of this process.
        """
        need = (float(workers + ranks), workers * gpus_per_worker + ranks * gpus_per_rank)
        total = await self.call(self._host.resources, "total")
        own = self._host.started_here
        deadline = asyncio.get_running_loop().time() + (0.0 if own else FREE_WAIT_SECONDS)
        while True:
            others = [taken for key, taken in self._host.reserved.items() if key != id(self)]
            if own:
                have = (total[0] - sum(t[0] for t in others), total[1] - sum(t[1] for t in others))
            else:
                have = await self.available()
            if need[0] <= have[0] and need[1] <= have[1]:
                self._host.reserved[id(self)] = need
                return
            hopeless = need[0] > total[0] or need[1] > total[1]
            if hopeless or asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(0.2)
        left = "" if hopeless else " left beside other runs"
        if need[0] > have[0]:
            raise ClusterTooSmall(
                f"rollout.workers = {workers} and learner.ranks = {ranks} need {need[0]:g} slots, the Ray "
                f"cluster has {have[0]:g}{left}: "
                + ("raise cluster.slots, or " if own else "")
                + "use fewer workers or ranks",
                needed=need[0],
                available=have[0],
            )
        raise ClusterTooSmall(
            f"{workers} workers of rollout.gpus_per_worker = {gpus_per_worker:g} and {ranks} ranks of "
            f"learner.gpus_per_rank = {gpus_per_rank:g} need {need[1]:g} GPUs, the Ray cluster has "
            f"{have[1]:g}{left}: use fewer of them, or set both to 0 to run on CPUs",
            needed=need[1],
            available=have[1],
        )


def kill_started() -> None:
    """Kill every process of the Ray that this process has started: it is about to end, and cannot wait."""
    host = _Host.current
    if host is not None:
        kill(host._processes())


async def _answer(future: Future[T], function: Callable[..., Any], ending: Ending) -> T:
    """What the thread answers. Raises TimedOut: a cluster whose head hangs does not answer at all."""
    answer = asyncio.wrap_future(future)
    began = asyncio.get_running_loop().time()
    try:
        if await ending.wait(answer, by=WORKERS, seconds=CALL_SECONDS):
            return answer.result()
    finally:
        answer.cancel()
    what = getattr(function, "__name__", "a call").strip("_")
    seconds = min(CALL_SECONDS, asyncio.get_running_loop().time() - began)
    raise TimedOut(
        f"Ray did not answer {what} within {seconds:.3g} s: see whether the head of its cluster lives",
        waited_for=what,
        seconds=seconds,
    )


def _aside(function: Callable[[], T]) -> Future[T]:
    """Run `function` on a thread made for it, which nobody waits for at the end."""
    future: Future[T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, name="surefoot-ray-aside", daemon=True).start()
    return future


async def _leave(host: _Host, ending: Ending) -> None:
    """Count out, and wait until that is done, or give the thread up."""
    leaving = asyncio.wrap_future(host.submit_leave())
    try:
        await _to_the_end(leaving, LEAVE_SECONDS, ending)
    finally:
        if not leaving.done():
            host.abandon()
    if leaving.done() and not (ending.asked and leaving.exception()):  # a Ray that is killed may say so
        leaving.result()


async def _to_the_end(future: asyncio.Future[Any], seconds: float, ending: Ending) -> None:
    """Wait for `future` though the task is cancelled, which asks the run to stop and is raised afterwards."""
    deadline = asyncio.get_running_loop().time() + seconds
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            left = deadline - asyncio.get_running_loop().time()
            await ending.wait(future, by=RAY, seconds=left)
            break
        except asyncio.CancelledError as error:
            ending.ask()
            cancelled = error
    if cancelled is not None:
        raise cancelled


class _Host:
    """The thread that calls Ray, and the Ray that it has started, joined or found.

    `users` and `leaving` are guarded by the lock; everything else is touched by the thread alone.
    """

    current: _Host | None = None
    given_up: ClassVar[list[threading.Thread]] = []  # may be about to end the Ray that they had
    lock = threading.Lock()

    def __init__(self) -> None:
        self.users = 0
        self.leaving = 0  # of them, those that have asked to be counted out
        self.started_here = False
        self.reserved: dict[int, tuple[float, float]] = {}  # session -> CPUs, GPUs
        self._address: str | None = None
        self._up = False  # entered, by whatever way
        self._joined = False
        self._abandoned = False
        self._folder: Folder | None = None
        self._put_back = contextlib.ExitStack()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="surefoot-ray", daemon=True)
        self._thread.start()

    @classmethod
    def enlist(cls) -> _Host:
        """The process's host, counted in."""
        with cls.lock:
            if cls.current is None:
                cls.current = cls()
            cls.current.users += 1
            return cls.current

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` on the thread, after those before it."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def submit_leave(self) -> Future[None]:
        """Count out on the thread; the session that asks uses Ray no more."""
        with self.lock:
            self.leaving += 1
        return self.submit(self.leave)

    def give_up(self) -> None:
        """For a session that has not even come in."""
        self.submit_leave()
        self.abandon()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del item, job, future

    def abandon(self) -> None:
        """Give up a thread that hangs inside Ray: its processes are killed, another run gets a new thread.

        Not while other runs use it: then it goes on for them, and counts out whoever has left when it can.
        """
        with self.lock:
            if self.users > self.leaving:
                return
            self._abandoned = True
            _Host.given_up.append(self._thread)
            if _Host.current is self:
                _Host.current = None
        self._jobs.put(None)
        kill(self._processes())
        if self._folder is not None:
            self._folder.remove()

    def enter(self, address: str | None, slots: int | None) -> None:
        """On the thread: make sure that Ray is up. Raises ConfigRefused."""
        if self._up:
            if address is not None and (self.started_here or self._joined) and address != self._address:
                other = self._address or "a local one"
                raise ConfigRefused(
                    f"cluster.address = {address}, but this process already runs in {other}: a process has "
                    "one Ray; use the same address, or another process"
                )
            return
        imported_before = "ray" in sys.modules
        excepthook = sys.excepthook
        with environment({}):
            import ray
        if not imported_before:
            sys.excepthook = excepthook  # Ray puts its own there, and Ray is a guest here
        for thread in _Host.given_up:  # else the Ray that is up now might be gone the moment after
            thread.join(GIVE_UP_SECONDS)
        _Host.given_up[:] = [thread for thread in _Host.given_up if thread.is_alive()]
        if not ray.is_initialized():
            self._put_back.enter_context(quiet())
            self._put_back.enter_context(silent())
            if address is None:
                self._start(slots)
            else:
                self._join(address)
        self._address = address
        self._up = True
        if self._abandoned:
            self._stop()

    def leave(self) -> None:
        """On the thread: count out; the last one ends the Ray that was started or joined here."""
        with self.lock:
            self.users -= 1
            self.leaving -= 1
            if self.users:
                return
        try:
            self._stop()
        finally:
            with self.lock:
                if not self.users:  # nobody has come meanwhile
                    if _Host.current is self:
                        _Host.current = None
                    self._jobs.put(None)

    def resources(self, which: str) -> tuple[float, float]:
        """On the thread: CPUs and GPUs, "total" or "available"."""
        import ray

        found = ray.cluster_resources() if which == "total" else ray.available_resources()
        return float(found.get("CPU", 0.0)), float(found.get("GPU", 0.0))

    def _start(self, slots: int | None) -> None:
        import ray

        self._folder = folder = Folder()
        try:
            with environment(local_environment()), loopback(), signals(), deaf():
                ray.init(
                    address="local",  # whatever RAY_ADDRESS says
                    num_cpus=local_slots(slots),
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    configure_logging=False,
                    log_to_driver=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder.path / "r"),
                )
        except BaseException:
            self.started_here = True
            self._stop()
            raise
        self.started_here = True

    def _join(self, address: str) -> None:
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal() and "/" not in host:  # Ray itself would try for a minute, aloud
            try:
                socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
            except (OSError, OverflowError) as error:
                raise ConfigRefused(
                    f"cluster.address = {address}: nothing answers there ({error}): start the cluster, or "
                    "correct the address",
                    key="cluster.address",
                ) from error
        import ray

        with environment({}), signals():
            ray.init(address=address, configure_logging=False, log_to_driver=False)
        self._joined = True

    def _stop(self) -> None:
        self._up = False
        with self._put_back:
            if self._joined:
                import ray

                self._joined = False
                ray.shutdown()
            if self.started_here:
                self.started_here = False
                self._end_local()

    def _end_local(self) -> None:
        import ray

        processes = self._processes()
        try:
            with killed_after(PARTING_SECONDS, processes):
                ray.shutdown(wait_for_processes=True)
        finally:
            end(processes)
            forget_token()
            if self._folder is not None:
                self._folder.remove()
                self._folder = None

    def _processes(self) -> list[psutil.Process]:
        """Every process of the Ray that was started here."""
        return processes_naming(str(self._folder.path)) if self._folder is not None else []
