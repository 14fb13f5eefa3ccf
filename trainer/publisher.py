"""The publisher: the learner's weights made available to the rollout workers, and the evaluation of them.

Owns what is being served and the one task that sends and evaluates it. Invariants: a version is in the log
before a worker hears of it; the next one waits until this one is sent and, where it is due, evaluated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..rollout.protocols import Published
from ..statemachine.crashpoints import crashpoint
from ..statemachine.events import EvaluationDone, Event, WeightsPublished
from ..statemachine.state import RunState
from .parts import Parts
from .tasks import cancel

Also = Callable[[RunState, int], Sequence[Event]]
"""What is decided in the same transaction: given the state before it and the version it publishes."""


class Publisher:
    """Publications of one incarnation. `kick`: called when workers may have become ready for more."""

    def __init__(self, parts: Parts, kick: Callable[[], None]) -> None:
        self._parts = parts
        self._kick = kick
        self.served: Published | None = None  # the last publication; none before recovery has it
        self._serving: asyncio.Task[None] | None = None  # sending and evaluating it
        self._gathering: asyncio.Task[Published] | None = None

    def gather(self) -> None:
        """Begin to gather the learner's weights, which the next call of `publish` will ask for."""
        version = self._parts.journal.state.policy_version + 1
        self._gathering = asyncio.ensure_future(self._parts.learner.gather(version))

    async def forget(self) -> None:
        """Give up what was being gathered: its learner is gone, or nothing more is asked of it."""
        gathering, self._gathering = self._gathering, None
        await cancel(gathering)

    async def publish(self, also: Also) -> None:
        """Gather, commit, then send. Waits until the version before is sent and evaluated.

        Raises LearnerGone, and what serving the version before has raised.
        """
        parts, state = self._parts, self._parts.journal.state
        if self._gathering is None:
            self.gather()
        assert self._gathering is not None
        try:
            published = await self._gathering
        finally:
            await self.forget()
        crashpoint("publish.gathered")
        await self.settle()

        def decide(state: RunState) -> list[Event]:
            event = WeightsPublished(
                version=published.version,
                update=state.updates,
                digest=published.digest,
                bytes=len(published.payload),
                final=state.exhausted or state.updates >= state.total.updates_total,
            )
            return [event, *also(state, published.version)]

        await parts.journal.commit(decide)
        assert state.policy_version == published.version
        self.served = published
        crashpoint("publish.committed")
        self._serving = asyncio.ensure_future(self._serve(published))

    async def _serve(self, published: Published) -> None:
        """Send a publication; then evaluate it, if that is due. Generation goes on meanwhile."""
        self._kick()
        await self._parts.pool.publish(published)
        crashpoint("publish.sent")
        self._kick()
        await self.evaluate_if_due()

    def evaluate_soon(self) -> None:
        """Evaluate what is served, if that is due, beside whatever comes next."""
        self._serving = asyncio.ensure_future(self.evaluate_if_due())

    async def evaluate_if_due(self) -> None:
        """Evaluate the served version if the config asks for it and the log does not hold it."""
        parts, state = self._parts, self._parts.journal.state
        if not state.evaluation_due():
            return
        started = asyncio.get_running_loop().time()
        groups = await parts.pool.evaluate(parts.prompts.evaluation())
        samples = [sample for group in groups for sample in group.samples]
        crashpoint("evaluate.before")
        await parts.journal.append(
            EvaluationDone(
                policy_version=state.policy_version,
                update=state.published_update,
                size=len(samples),
                reward_mean=sum(s.reward for s in samples) / len(samples),
                length_mean=sum(len(s.ids) // 4 for s in samples) / len(samples),
                truncated_frac=sum(s.truncated for s in samples) / len(samples),
                seconds=asyncio.get_running_loop().time() - started,
            )
        )

    async def settle(self) -> None:
        """Wait until the last publication is sent and evaluated. Raises what that raised."""
        task, self._serving = self._serving, None
        if task is not None:
            await task

    async def or_failed(self, awaited: asyncio.Event) -> None:
        """Wait for an event; raise what sending or evaluating raises meanwhile, or has raised."""
        waiting = asyncio.ensure_future(awaited.wait())
        try:
            serving = {self._serving} if self._serving is not None else set()
            while not waiting.done():
                await asyncio.wait({waiting, *serving}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in serving if task.done()]:
                    serving.discard(task)
                    task.result()
        finally:
            await cancel(waiting)

    async def close(self) -> None:
        """Give up whatever is under way."""
        await self.forget()
        await cancel(self._serving)
