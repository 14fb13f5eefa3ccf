"""The driver: the loop that takes a run from its log's head to its end.

It owns the order of things and nothing else: the journal holds the state, the feeder generates, batches are
read, the publisher serves, the keeper saves, recovery redoes. Phases are guarded on the folded state, the
work is done, the event is appended, and only then has the phase moved. The invariant: whatever the driver was
doing when it died, the log alone says where the next one goes on.

The stop order, always the same:
  1. admission is paused; nothing more is handed to workers
  2. what the learner is doing ends, or is given up unrecorded
  3. a checkpoint is committed, if there is time for one
  4. the last event is appended
  5. workers and ranks are ended
  6. the run is released, heartbeats end

Once the run was asked to stop, `ending` says by when each of these is over, whatever hangs: Ray, a database,
a task that does not end. What is not over by then is left behind, and the log says what it could be told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from ..rollout.protocols import Published
from ..statemachine import events as ev
from ..statemachine.admission import Batch, Blocked, Exhausted, Waiting, next_batch, stale_after_publication
from ..statemachine.crashpoints import crashpoint
from ..statemachine.errors import (
    LearnerGone,
    LogError,
    LogUnavailable,
    RunFailedError,
    TimedOut,
    described,
)
from ..statemachine.phases import Phase
from ..statemachine.state import RunState, fold
from .batches import Batches, ReadBatch
from .ending import CHECKPOINT, LOG, WORKERS
from .feeder import Feeder
from .figures import batch_figures
from .keeper import Keeper
from .lastwords import LastWords
from .outcome import Outcome, outcome_of, unwritten_outcome
from .parts import Parts
from .protocols import UpdateResult
from .publisher import Publisher
from .recovery import redo
from .tasks import cancel
from .wording import counted

HEARTBEAT_SECONDS = 5.0
DRAIN_LOOK_SECONDS = 1.0
CLOSE_SECONDS = 15.0  # for workers and ranks to end
LEARNER_TRIES_WITHOUT_PROGRESS = 3

OF_A_STOP = (LearnerGone, LogUnavailable, TimedOut)
"""What the work under way may meet while the run is being stopped, and is no failure of the run: it stops."""


class Driver:
    """One incarnation of a run, from take-over to its end."""

    def __init__(self, parts: Parts, budget: ev.BudgetResolved) -> None:
        self._parts = parts
        self._journal = parts.journal
        self._ending = parts.ending
        self._last_words = LastWords(parts.journal, parts.ending)
        self._budget = budget  # what the config and the data give now; committed once
        self._feeder = Feeder(parts)
        self._keeper = Keeper(parts)
        self._batches = Batches(parts, self._feeder.submit)
        self._publisher = Publisher(parts, self._feeder.kick)
        self._stop = asyncio.Event()
        self._stop_because = ""
        self._learner_holds = -1  # the update whose weights the learner has; -1: none, or in doubt
        self._no_redo = asyncio.Event()  # set while the learner is not executing an update again
        self._no_redo.set()
        self._pool_serves = False  # it lives on when the learner is lost, and is loaded once
        self._pool_starting: asyncio.Task[None] | None = None  # once for all learner tries
        self._tries = 0  # learner tries since the last update

    # -- from outside ---------------------------------------------------------------------------------

    def preempt(self, because: str = "asked") -> None:
        """Ask the run to stop: checkpoint if time allows, then `RunPreempted`. Safe to call at any time."""
        self._ending.ask()
        self._journal.hurry(self._ending.left(LOG))
        self._stop_because = self._stop_because or because
        self._stop.set()

    async def run(self) -> Outcome:
        """Drive the run to its end. Raises FencedOut when a newer incarnation holds it.

        A failure is recorded as `RunFailed` where the log still takes it, then raised. That the database is
        away when the run is asked to stop is none: the outcome says that it could not be told.
        """
        unwritten = ""
        main = asyncio.ensure_future(self._drive())
        helpers: list[asyncio.Task[Any]] = [
            asyncio.ensure_future(self._heartbeats()),
            asyncio.ensure_future(self._watch_drains()),
        ]
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({main, stop, *helpers}, return_when=asyncio.FIRST_COMPLETED)
            for helper in helpers:
                self._is_over(helper)
            if not self._is_over(main):
                await self._preempt(main)
        except asyncio.CancelledError:
            self._ending.ask()
            raise
        except BaseException as error:
            await self._still(main, stop, *helpers)  # nobody writes after the end, nor while it is told
            if not (self._stop.is_set() and isinstance(error, LogUnavailable)):
                await self._last_words.failed(error)
                raise
            unwritten = described(error)
        finally:
            await self._still(main, stop, *helpers)
            await self._close()
        return unwritten_outcome(self._journal.state, unwritten) if unwritten else self.outcome()

    def _is_over(self, task: asyncio.Task[Any]) -> bool:
        """Whether it has done all that it had to. Raises what it failed with, if that fails the run."""
        if not task.done() or task.cancelled():
            return False
        if self._stop.is_set() and isinstance(task.exception(), OF_A_STOP):
            return False
        task.result()
        return True

    async def _still(self, *tasks: asyncio.Task[Any]) -> None:
        """End everything that could still decide something. Idempotent."""
        self._feeder.paused = True
        publishing = asyncio.ensure_future(self._publisher.close())
        await self._ending.cancel(*tasks, self._pool_starting, by=CHECKPOINT)
        await self._ending.wait(publishing, by=CHECKPOINT)
        self._keeper.abandon()

    def outcome(self) -> Outcome:
        """The outcome as the log says it now."""
        return outcome_of(self._journal.state)

    # -- the phases -----------------------------------------------------------------------------------

    async def _drive(self) -> None:
        state = self._journal.state
        await self._keeper.sweep()
        if state.budget is None:
            crashpoint("budget.before")
            await self._journal.append(self._budget)
            crashpoint("budget.after")
        feeding: asyncio.Task[Any] | None = None
        try:
            while True:
                try:
                    await self._init_workers()
                    if feeding is None:
                        feeding = asyncio.ensure_future(self._feed())
                    await self._beside(feeding, self._learn())
                    return
                except LearnerGone as error:
                    await self._learner_lost(error)
        finally:
            await cancel(feeding)

    async def _beside(self, feeding: asyncio.Task[Any], work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end; if feeding fails first, that is the error."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, feeding}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                feeding.result()
            await task
        finally:
            await cancel(task)

    async def _feed(self) -> None:
        loops = [
            asyncio.ensure_future(self._feeder.admit_forever()),
            asyncio.ensure_future(self._feeder.answer_forever()),
        ]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel(*loops)

    async def _learner_lost(self, error: LearnerGone) -> None:
        self._learner_holds = -1
        self._no_redo.set()
        await self._parts.learner.close()
        with contextlib.suppress(LearnerGone):
            await self._keeper.settle()  # files that were written count; what deletes old ones ends
        self._tries += 1
        await self._journal.append(
            ev.LearnerLost(learner_try=self._journal.state.learner_try, because=str(error))
        )
        if self._tries >= LEARNER_TRIES_WITHOUT_PROGRESS:
            raise RunFailedError(
                f"the learner was lost {self._tries} times without an update in between; the last: {error}",
                learner_tries=self._tries,
            ) from error

    async def _init_workers(self) -> None:
        parts, state = self._parts, self._journal.state
        rows = await self._journal.read_all()
        options = parts.config
        ranks, workers = counted(options.learner.ranks, "learner rank"), ""
        if self._pool_starting is None:
            workers = f" and {counted(options.rollout.workers, 'rollout worker')}"
            self._pool_starting = asyncio.ensure_future(parts.pool.start())
        parts.waiting(f"building {ranks}{workers}")
        ready = await parts.learner.start(rows, state.learner_try)
        await asyncio.shield(self._pool_starting)  # it goes on when the learner is lost meanwhile
        if ready.state_digest != fold(rows).digest():
            raise RunFailedError(
                "learner ranks folded the log to another state than the driver", update=state.updates
            )
        crashpoint("workers.started")
        loading = not self._pool_serves
        served = await redo(parts, self._keeper, ready, self._publisher.served, self._redone)
        self._redone(state.updates, served)
        if loading:
            await parts.pool.publish(served)
            self._pool_serves = True
        await self._journal.append(
            ev.WorkersReady(
                learner_try=state.learner_try,
                workers=parts.config.rollout.workers,
                ranks=ready.ranks,
                fingerprint=ready.fingerprint,
                state_digest=ready.state_digest,
                update=state.updates,
            )
        )
        self._keeper.as_recorded = True  # whatever is recorded from here on begins with these bits
        crashpoint("workers.ready")
        self._feeder.kick()
        if loading:
            self._publisher.evaluate_soon()

    def _redone(self, update: int, served: Published | None) -> None:
        """What recovery says that the learner holds: in this order, for a checkpoint keeps both."""
        if served is not None:
            self._publisher.served = served
        self._learner_holds = update
        if update < 0:
            self._no_redo.clear()
        else:
            self._no_redo.set()

    async def _learn(self) -> None:
        state = self._journal.state
        ready: ReadBatch | None = None  # a batch that has begun
        try:
            while True:
                self._keeper.raise_if_failed()
                if state.phase is Phase.SYNC:
                    ready = await self._publish()
                if self._keeper.is_due(state.updates) and state.updates not in state.checkpoints:
                    await self._keeper.save(state.updates, self._publisher.served)
                if ready is None:
                    await self._reissue_stale()
                    decision = await self._next_batch()
                    if isinstance(decision, Exhausted):
                        await self._finish(decision)
                        return
                    ready = await self._batches.read(decision)
                    if ready is None:
                        continue
                    await self._journal.append(ready.began())
                    crashpoint("update.begun")
                await self._update(ready)
                ready = None
        finally:
            await self._publisher.forget()

    async def _next_batch(self) -> Batch | Exhausted:
        while True:
            changed = self._journal.changed()
            decision = next_batch(self._journal.state, self._parts.config.rollout.max_attempts)
            if isinstance(decision, Blocked):
                raise RunFailedError(
                    f"prompt {decision.prompt_index} failed {counted(decision.failures, 'time')} "
                    f"(rollout.max_attempts = {self._parts.config.rollout.max_attempts}): {decision.error}; "
                    "put that right, and run the same command again",
                    prompt_index=decision.prompt_index,
                )
            if not isinstance(decision, Waiting):
                return decision
            await self._publisher.or_failed(changed)

    async def _update(self, ready: ReadBatch) -> None:
        """Execute a batch that has begun, and commit it; weights that are due are gathered meanwhile."""
        parts, journal, state = self._parts, self._journal, self._journal.state
        self._learner_holds = -1
        executing = asyncio.get_running_loop().time()
        result = await parts.learner.update(ready.update, ready.groups, journal.take_tail())
        self._learner_holds = ready.update  # a preemption may cancel this task before the commit is told
        crashpoint("update.executed")
        ended = asyncio.get_running_loop().time()
        if state.publication_due_after(ready.update):
            self._publisher.gather()
        figures = batch_figures(ready.stored, state)
        await journal.append(
            ev.UpdateApplied(
                update=ready.update,
                learner_try=state.learner_try,
                policy_version=state.policy_version,
                groups=ready.order,
                steps=result.steps,
                staleness_max=figures.staleness_max,
                staleness_mean=figures.staleness_mean,
                staleness_max_updates=figures.staleness_max_updates,
                metrics={**result.metrics, **figures.metrics, **_step_metrics(result)},
                seconds={**result.seconds, "read": ready.seconds, "update": ended - executing},
            )
        )
        self._tries = 0
        crashpoint("update.committed")

    async def _publish(self) -> ReadBatch | None:
        """Publish; what it makes room for, and the next batch if it is there, share the transaction.

        Returns that batch, begun. Under on_stale = "reissue" the choice of a batch follows a publication.
        """
        issued: list[ev.Issue] = []
        ahead: ReadBatch | None = None
        reading = asyncio.ensure_future(self._batches.read_ahead())

        def also(state: RunState, version: int) -> list[ev.Event]:
            begun = [ahead.began()] if ahead is not None else []
            return [*begun, *self._feeder.admission(state, issued, version)]

        try:
            ahead = await reading
            await self._publisher.publish(also)
        finally:
            await cancel(reading)
        if issued:
            self._feeder.submit_admitted(issued)
        await self._reissue_stale()
        if ahead is not None:
            crashpoint("update.begun")
        return ahead

    async def _reissue_stale(self) -> None:
        """Under on_stale = "reissue": after a publication, and once more before a batch is chosen, as the
        driver may have died in between."""
        stale = stale_after_publication(self._journal.state)
        if stale:
            await self._batches.reissue(
                ev.IssueReason.STALE, [(i.prompt_index, i.attempt - 1) for i in stale]
            )

    async def _finish(self, exhausted: Exhausted) -> None:
        journal, state = self._journal, self._journal.state
        self._feeder.paused = True
        short = state.updates < state.total.updates_total
        if short or state.live:
            await journal.commit(
                lambda s: [ev.GroupsDropped(prompt_indices=list(s.live), reason=ev.DropReason.UNUSED)]
            )
        if state.phase is Phase.SYNC:
            await self._publish()
        await self._publisher.settle()
        await self._publisher.evaluate_if_due()
        await self._keeper.settle()
        if state.updates and state.updates not in state.checkpoints:
            await self._keeper.save(state.updates, self._publisher.served)
            await self._keeper.settle()
        crashpoint("end.before")
        digest = self._publisher.served.digest if self._publisher.served else ""
        if not short:
            last: ev.Event = ev.RunCompleted(
                updates=state.updates,
                optimizer_steps=state.optimizer_steps,
                policy_version=state.policy_version,
                weights_digest=digest,
            )
        else:
            last = ev.RunStopped(
                updates=state.updates,
                optimizer_steps=state.optimizer_steps,
                policy_version=state.policy_version,
                weights_digest=digest,
                updates_short=state.total.updates_total - state.updates,
                optimizer_steps_short=state.total.optimizer_steps_total - state.optimizer_steps,
                because=exhausted.because,
            )
        await journal.append(last)
        crashpoint("end.after")

    # -- ends -----------------------------------------------------------------------------------------

    async def _preempt(self, main: asyncio.Task[None]) -> None:
        """Stop within the grace time: give up or finish the learner's work, checkpoint, say so."""
        ending, state = self._ending, self._journal.state
        self._feeder.paused = True
        for_checkpoint = max(2.0 * self._keeper.seconds_last, 0.25 * ending.grace_seconds)
        if state.phase is Phase.UPDATE:
            await self._wait_for_update(main, ending.left(CHECKPOINT) - for_checkpoint)
        elif not self._no_redo.is_set():
            await self._wait_for_redo(main, ending.left(CHECKPOINT) - for_checkpoint)
        publishing = asyncio.ensure_future(self._publisher.close())
        await ending.cancel(main, by=CHECKPOINT)
        await ending.wait(publishing, by=CHECKPOINT)
        self._is_over(main)  # raises, if the run failed while it was being stopped
        await self._last_checkpoint()
        await self._last_words.say(self._preempted)

    def _preempted(self, state: RunState) -> ev.RunPreempted:
        checkpoint = state.latest_checkpoint()
        return ev.RunPreempted(
            updates=state.updates,
            optimizer_steps=state.optimizer_steps,
            checkpoint_update=checkpoint.update if checkpoint else 0,
            because=self._stop_because,
        )

    async def _wait_for_update(self, main: asyncio.Task[None], seconds: float) -> None:
        loop, state = asyncio.get_running_loop(), self._journal.state
        deadline = loop.time() + seconds
        while state.phase is Phase.UPDATE and not main.done() and loop.time() < deadline:
            changed = asyncio.ensure_future(self._journal.changed().wait())
            await asyncio.wait(
                {main, changed}, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            await cancel(changed)

    async def _wait_for_redo(self, main: asyncio.Task[None], seconds: float) -> None:
        """Until the update that is executed again is: a learner in the middle of one cannot be saved."""
        between = asyncio.ensure_future(self._no_redo.wait())
        await asyncio.wait({main, between}, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
        await cancel(between)

    async def _last_checkpoint(self) -> None:
        saving = asyncio.ensure_future(self._checkpoint())
        try:
            if not await self._ending.wait(saving, by=CHECKPOINT):
                saving.cancel()
                raise TimeoutError
            saving.result()
        except LogError:
            raise
        except (OSError, LearnerGone) as error:
            # Not lost: the log holds every update, and the next driver redoes what no checkpoint has.
            update = self._journal.state.updates
            self._stop_because += f"; no checkpoint of update {update} ({type(error).__name__})"

    async def _checkpoint(self) -> None:
        state, held = self._journal.state, self._learner_holds
        await self._keeper.settle()
        if 0 < held <= state.updates and held not in state.checkpoints:  # fewer: in a redo
            await self._keeper.save(held, self._publisher.served)
            await self._keeper.settle()

    async def _close(self) -> None:
        """End workers and ranks, and let go of the run; a Ray that does not answer keeps nobody for long."""
        ending = self._ending
        closing = (
            asyncio.ensure_future(self._parts.pool.close()),
            asyncio.ensure_future(self._parts.learner.close()),
        )
        await ending.wait(*closing, by=WORKERS, seconds=CLOSE_SECONDS)
        late = [task for task in closing if not task.done()]
        # Whoever started Ray ends it, and all that is in it.
        await ending.cancel(*closing, by=WORKERS, seconds=CLOSE_SECONDS)
        releasing = asyncio.ensure_future(
            self._journal.release(ending.left(WORKERS) if ending.asked else None)
        )
        if await ending.wait(releasing, by=WORKERS):
            releasing.result()
        if not ending.asked:  # else the run has stopped, and its log says so, however its parts have ended
            for task in closing:
                if task not in late:
                    task.result()

    async def _watch_drains(self) -> None:
        """A machine is going away: its workers get nothing new; for ranks and for us it is a preemption."""
        parts = self._parts
        while True:
            await asyncio.sleep(DRAIN_LOOK_SECONDS)
            draining = await parts.draining()
            parts.pool.drain(draining)
            if leaving := sorted(draining & (parts.learner.nodes | {parts.node})):
                self.preempt(f"node {leaving[0]} is being drained")
                return

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self._journal.heartbeat()


def _step_metrics(result: UpdateResult) -> dict[str, ev.Number]:
    last = result.steps[-1]
    return {"optim/lr": last.learning_rate, "optim/grad_norm": last.grad_norm, "loss": last.loss}
