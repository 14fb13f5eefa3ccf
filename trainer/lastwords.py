"""The last event of an incarnation that does not come to the end of its run: `RunPreempted` or `RunFailed`.

Owns nothing. Invariant: it is said once and is the last, and nobody waits for it beyond the grace time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..statemachine import events as ev
from ..statemachine.errors import FencedOut, LogError, LogUnavailable, SurefootError, WrongSeq, described
from ..statemachine.state import RunState
from .ending import EVENT, Ending
from .journal import Journal


class LastWords:
    """One incarnation's."""

    def __init__(self, journal: Journal, ending: Ending) -> None:
        self._journal, self._ending = journal, ending

    async def say(self, end: Callable[[RunState], ev.Event]) -> None:
        """Commit the end, unless there is one. Raises LogUnavailable, also if no answer comes in time."""
        telling = asyncio.ensure_future(self._journal.commit(lambda s: [] if s.ended else [end(s)]))
        if not await self._ending.wait(telling, by=EVENT):
            telling.cancel()
            raise LogUnavailable("the database of the log did not answer")
        error = None if telling.cancelled() else telling.exception()
        if error is not None and not self._journal.state.ended:  # else a listener's: the end is committed
            raise error

    async def failed(self, error: BaseException) -> None:
        """Record the failure, if the log takes it; a fenced or broken log is left as it is."""
        if self._journal.broken or isinstance(error, FencedOut | WrongSeq):
            return
        facts = dict(error.facts) if isinstance(error, SurefootError) else {}

        def end(state: RunState) -> ev.Event:
            return ev.RunFailed(
                code=error.code if isinstance(error, SurefootError) else type(error).__name__,
                error=described(error),
                updates=state.updates,
                optimizer_steps=state.optimizer_steps,
                facts={key: value for key, value in facts.items() if isinstance(value, str | int | float)},
            )

        try:
            await self.say(end)
        except (LogError, OSError) as second:
            error.add_note(f"and the log did not take the failure: {second}")
