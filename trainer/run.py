"""Runs as a library: start or go on with one, watch one, from any asyncio program.

`Run.start` is the one path into a run, new or not: config and data are checked, the log is created or taken
over, the budget is committed, and only then is anything built. It sets no signal handler, edits no
environment, and leaves no process behind. `Run.attach` reads and never fences.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..statemachine.errors import (
    LogBroken,
    LogError,
    RunClosed,
    RunExists,
    RunUnknown,
    SurefootError,
    UserMistake,
)
from ..statemachine.events import Event, IncarnationBegan
from ..statemachine.liveness import DriverIdentity, lives
from ..statemachine.log import EventLog, EventRow, RunHead, chained, driver_of, take_reason
from ..statemachine.sqllog import open_log
from ..statemachine.state import RunState, fold
from .checkpoints import Checkpoints
from .config import Config, load_config
from .driver import Driver
from .ending import CHECKPOINT, RAY, Ending
from .journal import PARTING_SECONDS, Journal, Listener
from .outcome import Outcome, outcome_of
from .parts import unheard
from .places import Place, next_free
from .plan import Prepared, config_changes, digest_changes, first_event, prepare
from .threads import Threads

FOLLOW_SECONDS = 0.2  # between two looks at a log that another process writes

ConfigSource = str | Path | Mapping[str, Any] | Config
Rows = Sequence[Mapping[str, Any]]


class Watched:
    """A run as its log says it, read from outside: any number may watch, none disturbs."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.name = place.run
        self._threads = Threads("surefoot-read")

    async def state(self) -> RunState:
        """The fold of the whole log as it is now."""
        return fold(await self.rows())

    async def rows(self, after_seq: int = 0) -> list[EventRow]:
        """The committed rows after `after_seq`."""
        return await self._threads.files(self._read, after_seq)

    def _read(self, after_seq: int) -> list[EventRow]:
        with self.place.reading() as log:
            return list(log.read(self.name, after_seq))

    async def events(self, after_seq: int = 0) -> AsyncIterator[Event]:
        """Events as they are committed, none left out, until nobody is going to write more: the run has
        ended, or its driver is dead or, on another machine, silent."""
        while True:
            changed = self._changed()
            over = self._is_over()
            rows = await self.rows(after_seq)
            for row in rows:
                after_seq = row.seq
                yield row.event()
            if not rows and (over or (over is None and await self._is_left_at(after_seq))):
                return
            if not rows:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), FOLLOW_SECONDS)

    def _changed(self) -> asyncio.Event:
        return asyncio.Event()  # of another process: only looking tells

    def _is_over(self) -> bool | None:
        return None

    async def _is_left_at(self, seq: int) -> bool:
        def look() -> bool:
            with self.place.reading() as log:
                head = log.head(self.name)
                return head.head_seq <= seq and driver_of(head) != "alive"

        return await self._threads.files(look)

    async def outcome(self) -> Outcome:
        """How the run ended; waits until it has. It does not raise for a run that failed: it says so; and
        of one whose driver is gone, the phase that it was left in."""
        async for _ in self.events():
            pass
        return outcome_of(await self.state())

    def close(self) -> None:
        """Let go of the log."""
        self._threads.close()


class Run(Watched):
    """A run that this program drives. Made by `Run.start`."""

    def __init__(self, place: Place, prepared: Prepared, ending: Ending) -> None:
        super().__init__(place)
        self.prepared = prepared
        self._journal: Journal | None = None
        self._driver: Driver | None = None
        self._task: asyncio.Task[Outcome] | None = None
        self._closed_outcome: Outcome | None = None
        self._ending = ending

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls,
        config: ConfigSource,
        *,
        name: str | None = None,
        runs_dir: str | Path = "runs",
        db: str | None = None,
        sets: Sequence[str] = (),
        new: bool = False,
        rows: Rows | None = None,
        reward: Callable[..., Any] | None = None,
        take_over: bool = False,
        accept_divergence: bool = False,
        listeners: Sequence[Listener] = (),
        waiting: Callable[[str], None] = unheard,
    ) -> AsyncIterator[Run]:
        """Start a run, or go on with it if it exists, and drive it inside the `async with`.

        Leaving the block normally awaits the outcome and raises what the run failed with; leaving it by an
        exception, a cancellation included, preempts the run; one that is cancelled while it starts ends
        within preempt.grace_seconds as well. `rows` and `reward` are Python objects in the
        place of data.source and reward.function; they are recorded by name and must be passed again.
        `new` takes the next free name; `take_over` takes the run from a driver that lives;
        `listeners` are called with every committed row, its event and the state after it; `waiting` with a
        line for each thing that the start waits for.

        Raises UserMistake's children before anything has changed.
        """
        async with contextlib.AsyncExitStack() as stack:
            threads = Threads("surefoot")
            ending = Ending()
            stack.push_async_callback(threads.end, ending)
            try:
                waiting("checking config and data")
                prepared = await threads.files(_prepare, ending, config, sets, rows, reward)
                place = await threads.files(_place, config, name, Path(runs_dir), db, new)
                run = cls(place, prepared, ending)
                stack.push_async_callback(run._threads.end, ending)
                run._closed_outcome = await threads.files(_outcome_if_over, place, prepared, take_over)
                if run._closed_outcome is None:
                    try:
                        await run._begin(stack, threads, take_over, accept_divergence, listeners, waiting)
                    except RunClosed:  # its driver has just brought it to its end
                        again = threads.files(_outcome_if_over, place, prepared, take_over)
                        run._closed_outcome = await again
            except asyncio.CancelledError:
                ending.ask()
                raise
            if run._closed_outcome is not None:
                yield run
                return
            assert run._task is not None
            run._task.add_done_callback(lambda _: ending.pause())
            try:
                yield run
            except BaseException as error:
                await run._stop_for(error)
                raise
            finally:
                ending.resume()
            await run.outcome()

    @classmethod
    async def attach(cls, name: str, *, runs_dir: str | Path = "runs", db: str | None = None) -> Watched:
        """Watch a run. Raises RunUnknown."""
        watched = Watched(Place(name, Path(runs_dir), db))
        await watched.rows()
        return watched

    async def _begin(
        self,
        stack: contextlib.AsyncExitStack,
        threads: Threads,
        take_over: bool,
        accept_divergence: bool,
        listeners: Sequence[Listener],
        waiting: Callable[[str], None],
    ) -> None:
        """Claim the run and set the driver going. Ray is up, and large enough, before the log is touched."""
        ending, address = self._ending, self.prepared.config.cluster.address
        waiting("starting Ray" if address is None else f"joining the Ray cluster at {address}")
        from .assembly import assemble, ray_session  # imports what plan, log and audit never need
        from .metrics import MetricsWriter

        session = await stack.enter_async_context(ray_session(self.prepared.config, ending=ending))
        taken = await _taken(threads, ending, self.place, self.prepared, take_over, accept_divergence)
        log, head, rows = taken.log, taken.head, taken.rows
        stack.push_async_callback(_give_back, threads, ending, log, head)
        began = rows[-1].event()
        if isinstance(began, IncarnationBegan) and "reward" in began.digest_changes:
            waiting("warning: the code of the reward is another than this run began with; that is recorded")
        self._journal = Journal(log, head, fold(rows), blocking=threads.log)
        options = self.prepared.config.metrics
        metrics = MetricsWriter(self.place.folder, rows, jsonl=options.jsonl, tensorboard=options.tensorboard)
        stack.callback(metrics.close)
        self._journal.listeners += [metrics.on_event, *listeners]
        parts = assemble(self.place, self.prepared, self._journal, session, ending, threads.files, waiting)
        self._driver = Driver(parts, self.prepared.budget)
        self._task = asyncio.ensure_future(self._driver.run())
        if taken.cancelled is not None:  # too late not to begin: it is stopped in order, and its log says so
            await self._stop_for(taken.cancelled)
            raise taken.cancelled

    @property
    def driven(self) -> bool:
        """Whether there is anything left to drive: a run that was over is only told of."""
        return self._task is not None

    def _changed(self) -> asyncio.Event:
        return self._journal.changed() if self._journal else asyncio.Event()

    def _is_over(self) -> bool | None:
        return self._task.done() if self._task else True

    async def outcome(self) -> Outcome:
        """How it ended; waits until it has. Raises what the run failed with, and FencedOut."""
        if self._task is None:
            assert self._closed_outcome is not None
            return self._closed_outcome
        return await asyncio.shield(self._task)

    async def preempt(self, because: str = "asked by the program") -> Outcome:
        """Stop within preempt.grace_seconds: a checkpoint if time allows, `RunPreempted`, no child left.

        Where the database is away, nothing can be written: `Outcome.unwritten` says so. Raises what the run
        failed with before it was asked, and FencedOut.
        """
        self._ending.ask()
        if self._driver is not None:
            self._driver.preempt(because)
        return await self.outcome()

    async def _stop_for(self, error: BaseException) -> None:
        """The block was left by `error`: preempt. A second cancellation ends it without a checkpoint."""
        assert self._task is not None and self._driver is not None
        self._driver.preempt(f"the program left with {type(error).__name__}")
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        except Exception as second:
            error.add_note(f"and the run ended with: {second}")


def train(config: ConfigSource, **options: Any) -> Outcome:
    """Start or go on with a run and wait for its end, from a program without an event loop.

    Takes what `Run.start` takes. Raises what the run failed with.
    """
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UserMistake(
            "train() was called where an event loop is running, as in a notebook or a coroutine: use "
            "`async with Run.start(...)` there"
        )

    async def whole() -> Outcome:
        async with Run.start(config, **options) as run:
            return await run.outcome()

    return asyncio.run(whole())


def _prepare(
    ending: Ending,
    config: ConfigSource,
    sets: Sequence[str],
    rows: Rows | None,
    reward: Callable[..., Any] | None,
) -> Prepared:
    named = None if rows is None else getattr(rows, "__name__", type(rows).__name__)
    loaded = load_config(config, sets, rows=named)
    ending.grace_seconds = loaded.preempt.grace_seconds
    return prepare(loaded, rows, reward)


def _place(config: ConfigSource, name: str | None, runs_dir: Path, db: str | None, new: bool) -> Place:
    if name is None:
        name = Path(config).stem if isinstance(config, str | Path) else "run"
    return next_free(name, runs_dir, db) if new else Place(name, runs_dir, db)


def _outcome_if_over(place: Place, prepared: Prepared, take_over: bool) -> Outcome | None:
    """The outcome of a run that is over for good. Refuses here what needs no Ray to refuse.

    Raises LogBroken, naming the event, for a log that is not whole: nothing is trained on it.
    """
    place.refuse_unusable()
    if not place.exists():
        _refuse_leftovers(place, prepared.config)
        return None
    names = Checkpoints(place.storage_url(prepared.config)).names()  # before the log, which names them later
    try:
        with place.reading() as log:
            state = fold(chained(log.read(place.run)))
            head = log.head(place.run)
    except RunUnknown:  # killed between the making of its database and its first event
        place.refuse_another_runs_log()
        _refuse_leftovers(place, prepared.config)  # or its log was lost, and only the empty file is left
        return None
    config_changes(place.run, _created(state), prepared)
    if state.closed:
        return outcome_of(state, already=True)
    _refuse_older_log(place, prepared.config, state, names)
    take_reason(head, ask=take_over, lives=lives)  # raises RunInUse; the transaction later decides
    return None


def _refuse_older_log(place: Place, config: Config, state: RunState, names: Sequence[str]) -> None:
    """Refuse a log that ends before a checkpoint beside it was taken: an older copy, or one that has lost its
    write-ahead log. What it does not name would be deleted, and trained again from what it does."""
    checkpoints = Checkpoints(place.storage_url(config))
    kept = {checkpoint.path for checkpoint in state.checkpoints.values()}
    for path in names:
        if path not in kept and (seq := checkpoints.head_seq(path) or 0) > state.seq:
            raise LogBroken(
                f"the log of run {place.run!r} ends with event {state.seq}, but checkpoint {path} was taken "
                f"at its event {seq}: the log is an older copy; put the newer one back, with its -wal file "
                "if there is one, or start another run with --new",
                run=place.run,
                seq=state.seq,
            )


def _refuse_leftovers(place: Place, config: Config) -> None:
    """Refuse to begin a run where files of one lie whose log is gone: it would silently start from 0."""
    from ..rollout.store import FsspecGroupStore

    storage = place.storage_url(config)
    found = len(Checkpoints(storage).names()), len(FsspecGroupStore(storage).names())
    if any(found):
        raise UserMistake(
            f"{storage} holds {found[0]} checkpoints and {found[1]} group files, but {place.log_url} has no "
            f"run {place.run!r}: put its log back, or delete the folder, or choose another name",
            run=place.run,
        )


@dataclass(frozen=True)
class _Taken:
    """A run that is this process's, and what is in its log."""

    log: EventLog
    head: RunHead
    rows: list[EventRow]
    cancelled: asyncio.CancelledError | None  # while it was being taken


async def _taken(threads: Threads, ending: Ending, *arguments: Any) -> _Taken:
    """`_claim` and a first read, on the log's thread, which goes on if this is cancelled: so the caller goes
    on as well, to tell the log. Only of a thread that hangs is what it took let go of, whenever it has."""
    claimed: list[tuple[EventLog, RunHead]] = []

    def take() -> list[EventRow]:
        log, head = _claim(*arguments)
        claimed.append((log, head))
        try:
            return list(chained(log.read(head.run_id)))
        except BaseException:
            let_go()
            raise

    def let_go() -> None:
        while claimed:
            log, head = claimed.pop()
            log.hurry(PARTING_SECONDS)
            _let_go_of(log, head)

    taking = asyncio.ensure_future(threads.log(take))
    cancelled: asyncio.CancelledError | None = None
    try:
        await asyncio.shield(taking)
    except asyncio.CancelledError as error:
        ending.ask()
        letting_go: asyncio.Future[None] | None = None
        try:
            if await ending.wait(taking, by=CHECKPOINT) and taking.exception() is None:
                cancelled = error
        finally:
            if cancelled is None:  # on the same thread, and so after it
                letting_go = asyncio.ensure_future(threads.log(let_go))
        if letting_go is not None:
            await ending.wait(letting_go, by=RAY)
            raise
    rows = taking.result()
    ((log, head),) = claimed
    return _Taken(log, head, rows, cancelled)


async def _give_back(threads: Threads, ending: Ending, log: EventLog, head: RunHead) -> None:
    """Let go of the run, unless its driver has, and of the log: for a moment, whatever comes of it."""
    log.hurry(min(PARTING_SECONDS, ending.left(RAY)))
    giving = asyncio.ensure_future(threads.log(_let_go_of, log, head))
    if await ending.wait(giving, by=RAY):
        giving.result()


def _let_go_of(log: EventLog, head: RunHead) -> None:
    try:
        with contextlib.suppress(LogError):
            log.release(head.run_id, head.incarnation)
    finally:
        log.close()


def _claim(
    place: Place, prepared: Prepared, take_over: bool, accept_divergence: bool
) -> tuple[EventLog, RunHead]:
    """Create the run or take it over. The folder appears only now."""
    if place.db is None:
        try:
            place.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserMistake(
                f"run {place.run!r} cannot have its folder in {place.runs_dir}: {error}; name another folder "
                "with --runs-dir",
                run=place.run,
            ) from error
    log = open_log(place.log_url, migrate=True)
    try:
        identity = DriverIdentity.here()
        if place.run not in {head.run_id for head in log.runs()}:
            with contextlib.suppress(RunExists):  # two first starts at one moment: the second takes over
                return log, log.create(place.run, first_event(prepared), identity)
        created = _created(fold(chained(log.read(place.run))))
        head = log.take_over(
            place.run,
            identity,
            ask=take_over,
            config_changes=config_changes(place.run, created, prepared),
            digest_changes=digest_changes(created, prepared),
            accept_divergence=accept_divergence,
        )
        return log, head
    except BaseException:
        log.close()
        raise


def _created(state: RunState) -> Any:
    if state.created is None:
        raise SurefootError("the run's log is empty: delete its folder, or start another run with --new")
    return state.created
