"""The journal: one run's log as its driver writes it, and the state that the log adds up to.

Owns the folded `RunState` and the phase machine, and is the only path by which either changes: a decision is
made by a function of the state under the journal's lock, tried on a second fold that runs one append ahead,
committed in one transaction, then folded, then told to listeners. The invariants: `state` never holds
anything that is not committed; nobody decides on a state that an append under way is about to change; what
the fold would refuse is never written, so no fault of a driver leaves a log that its heirs cannot fold.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from ..statemachine.errors import LogError, SurefootError
from ..statemachine.events import Event
from ..statemachine.log import EventLog, EventRow, RunHead, build_rows
from ..statemachine.phases import Phases
from ..statemachine.state import RunState, UpdateRecord, fold

PARTING_SECONDS = 5.0
"""For a log that has failed already to let go of the run."""

T = TypeVar("T")
Listener = Callable[[EventRow, Event, RunState], None]
Blocking = Callable[..., Awaitable[Any]]
"""`await blocking(fn, *args)`: run a blocking call off the event loop (a simulator runs it in place)."""


def utc_now() -> str:
    """The time as events carry it: for people, never read by replay."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class Journal:
    """The one writer of a run, in one incarnation."""

    def __init__(
        self,
        log: EventLog,
        head: RunHead,
        state: RunState,
        *,
        blocking: Blocking,
        now: Callable[[], str] = utc_now,
    ) -> None:
        self.log = log
        self.run_id = head.run_id
        self.state = state
        self._ahead = state.copy()  # what the append under way makes of the state; else equal to it
        self.incarnation = head.incarnation
        self.phases = Phases(state.phase)
        self.listeners: list[Listener] = []
        self.seconds_appending = 0.0
        self._blocking = blocking
        self._now = now
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._broken: BaseException | None = None
        self._tail: list[EventRow] = []  # rows that the learner has not been handed yet

    async def append(self, *events: Event) -> None:
        """Commit events that do not depend on what else is being decided."""
        await self.commit(lambda state: list(events))

    async def commit(self, decide: Callable[[RunState], Sequence[Event]]) -> list[Event]:
        """Decide under the lock, commit in one transaction, fold, tell. Returns the events.

        The append goes on if the caller is cancelled, so that log and state stay equal. After a failed
        append nothing more is written: whatever its outcome was, the log will say it to the next driver.
        Raises IllegalEvent before anything is written; FencedOut, WrongSeq, and whatever the database raised.
        """
        task = asyncio.ensure_future(self._commit(decide))
        task.add_done_callback(_look_at)
        return await asyncio.shield(task)

    async def _commit(self, decide: Callable[[RunState], Sequence[Event]]) -> list[Event]:
        async with self._lock:
            if self._broken is not None:
                raise self._broken  # whoever asks is told why nothing more is written
            events = list(decide(self.state))
            if not events:
                return []
            rows = build_rows(
                self.run_id, self.state.seq, self.state.hash, self.incarnation, events, self._now()
            )
            self._try(rows, events)
            started = asyncio.get_running_loop().time()
            try:
                await self._blocking(self.log.append, self.run_id, self.state.seq, self.incarnation, rows)
            except BaseException as error:
                self._broken = error
                raise
            self.seconds_appending += asyncio.get_running_loop().time() - started
            raised = [
                error for row, event in zip(rows, events, strict=True) for error in self._fold(row, event)
            ]
            self._tail.extend(rows)
            self._changed.set()
            self._changed = asyncio.Event()
            if raised:  # a listener's: the log and the fold are whole
                raise raised[0]
            return events

    def _try(self, rows: Sequence[EventRow], events: Sequence[Event]) -> None:
        """Fold ahead of the append. Raises IllegalEvent, and whatever else a fold raises: nothing is written
        then, and the journal is as it was."""
        if self.state.incarnation != self.incarnation:
            return  # taken over from before it had read its log, which refuses the append and says by whom
        try:
            for row, event in zip(rows, events, strict=True):
                self._ahead.apply(row, event)
        except BaseException:
            self._ahead = self.state.copy()
            raise

    def _fold(self, row: EventRow, event: Event) -> list[Exception]:
        """Fold one row, and tell the listeners; what they raise is returned."""
        try:
            self.phases.move(self.state, event)
            self.state.apply(row, event)
        except SurefootError as error:
            self._broken = error
            raise
        raised: list[Exception] = []
        for listener in self.listeners:
            try:
                listener(row, event, self.state)
            except Exception as error:
                raised.append(error)
        return raised

    @property
    def broken(self) -> bool:
        """Whether an append failed: nothing more can be written by this driver."""
        return self._broken is not None

    def changed(self) -> asyncio.Event:
        """An event that is set by the next commit; take it before looking at the state."""
        return self._changed

    def take_tail(self) -> list[EventRow]:
        """Rows committed since the last call."""
        rows, self._tail = self._tail, []
        return rows

    async def heartbeat(self) -> None:
        """Say that this driver lives. Raises FencedOut."""
        await self._blocking(self.log.heartbeat, self.run_id, self.incarnation)

    async def every_record(self) -> dict[int, UpdateRecord]:
        """The records of all updates, those too that the state has let go of; read from the log again."""
        async with self._lock:
            read = lambda: fold(self.log.read(self.run_id), RunState(every_record=True))  # noqa: E731
            return (await self._blocking(read)).records

    async def read_all(self) -> list[EventRow]:
        """Every committed row; the tail starts again after it."""
        async with self._lock:
            rows = await self._blocking(lambda: list(self.log.read(self.run_id)))
            self._tail = []
            return rows

    def hurry(self, seconds: float) -> None:
        """Wait no longer than so many seconds from now for a database that is away."""
        self.log.hurry(seconds)

    async def release(self, seconds: float | None = None) -> None:
        """Close the run: the next driver need not ask who lives, nor whoever watches wait.

        With `seconds`, and after a failed append, it is tried for a moment, whatever comes of it: the end
        is in the log or cannot be, and the program that this driver was part of may live on.
        """
        async with self._lock:
            if self._broken is None and seconds is None:
                await self._blocking(self.log.release, self.run_id, self.incarnation)
                return
            self.log.hurry(PARTING_SECONDS if seconds is None else min(seconds, PARTING_SECONDS))
            with contextlib.suppress(LogError):
                await self._blocking(self.log.release, self.run_id, self.incarnation)


def _look_at(task: asyncio.Task[list[Event]]) -> None:
    """Take the error of a commit whose caller was cancelled: the journal keeps it, and asyncio need not
    print it as one that nobody has seen."""
    if not task.cancelled():
        task.exception()
