"""The feeder: keeps free slots busy and turns answers into stored groups.

It owns no state: what may be admitted, which attempt of a group counts and what is left to issue again are
read from the fold under the journal's lock. Two invariants: an attempt is in the log before a worker hears
of it, and a group's file is durable before the event that names it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from ..rollout.packing import unpack_i32
from ..rollout.protocols import Answer, Group, GroupDone, GroupFailed, StoredFile, WorkerLost
from ..statemachine.admission import admissions, completes_batch, reissues
from ..statemachine.crashpoints import crashpoint
from ..statemachine.events import (
    AnswerRefused,
    AttemptFailed,
    DropReason,
    Event,
    GroupsAdmitted,
    GroupsDropped,
    GroupsReissued,
    GroupsStored,
    Issue,
    IssueReason,
    StoredGroup,
    WorkerReplaced,
    number,
)
from ..statemachine.phases import Phase
from ..statemachine.state import LiveGroup, RunState
from .parts import Parts
from .tasks import cancel

HELD_SECONDS = 0.25
"""How long answers wait for more of them at the longest: what a kill makes the workers answer again."""
MOMENT_SECONDS = 0.05
"""The same where slots are free for other groups, while the learner is busy."""


class Feeder:
    """Admission and answers of one incarnation."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._kick = asyncio.Event()
        self._file_numbers = itertools.count(1)
        self._promised = 0  # groups in a decision that are not with the pool yet: their slots are taken
        self.paused = False  # set when the run is about to end: nothing more is admitted

    def kick(self) -> None:
        """Look again: slots, window or groups may have changed."""
        self._kick.set()

    async def admit_forever(self) -> None:
        """Fill free slots whenever something has changed."""
        while True:
            self._kick.clear()
            await self._admit()
            await self._kick.wait()

    async def answer_forever(self) -> None:
        """Take answers as they come; those that nobody waits for share a file and a transaction."""
        loop = asyncio.get_running_loop()
        arrived: list[Answer] = []
        since = 0.0  # when the first of them did
        some = asyncio.Event()

        async def collect() -> None:
            nonlocal since
            while True:
                answers = await self._parts.pool.answers()
                since = since if arrived else loop.time()
                arrived.extend(answers)
                some.set()

        collecting = asyncio.ensure_future(collect())
        waiting = asyncio.ensure_future(some.wait())
        try:
            while True:
                held = since + self._hold_seconds(arrived) - loop.time() if arrived else None
                if held is not None and held <= 0.0:
                    answers, arrived[:] = arrived[:], []
                    await self._receive(answers)
                    self.kick()
                    continue
                await asyncio.wait({waiting, collecting}, timeout=held, return_when=asyncio.FIRST_COMPLETED)
                if collecting.done():
                    collecting.result()
                if waiting.done():
                    if not arrived:  # a worker has come back
                        self.kick()
                    some.clear()
                    waiting = asyncio.ensure_future(some.wait())
        finally:
            await cancel(collecting, waiting)

    def _hold_seconds(self, arrived: Sequence[Answer]) -> float:
        """How long what has arrived may wait for more: not at all where a batch or a lost attempt does."""
        state, config = self._parts.journal.state, self._parts.config
        done = {answer.group.prompt_index for answer in arrived if isinstance(answer, GroupDone)}
        if len(done) < len(arrived) or completes_batch(state, done):
            return 0.0
        slots = 0 if self.paused else self._parts.pool.free_slots() - self._promised
        if slots > 0 and (state.room() or reissues(state, slots, config.rollout.max_attempts)):
            return 0.0 if state.phase is Phase.ROLLOUT else MOMENT_SECONDS
        return HELD_SECONDS

    async def _admit(self) -> None:
        issued: list[Issue] = []
        if await self._parts.journal.commit(lambda state: self.admission(state, issued)):
            crashpoint("admit.after")
            self.submit_admitted(issued)

    def admission(
        self, state: RunState, issued: list[Issue], policy_version: int | None = None
    ) -> list[Event]:
        """What fills the free slots: groups to issue again first, then prompts to draw. Adds to `issued`.

        `policy_version`: the one that the same transaction publishes, if it does.
        """
        slots = self._parts.pool.free_slots() - self._promised
        if slots <= 0 or state.exhausted or self.paused:
            return []
        events: list[Event] = []
        for reason, issues in reissues(state, slots, self._parts.config.rollout.max_attempts).items():
            events.append(GroupsReissued(groups=issues, reason=reason))
            issued.extend(issues)
        fresh = admissions(state, slots - len(issued), policy_version)
        if fresh:
            events.append(GroupsAdmitted(groups=fresh))
            issued.extend(fresh)
        if events:
            self._promised += len(issued)
            crashpoint("admit.before")
        return events

    def submit_admitted(self, issues: Sequence[Issue]) -> None:
        """Hand what `admission` has decided on, once it is committed, to workers."""
        self._promised -= len(issues)
        self.submit(issues)

    def submit(self, issues: Sequence[Issue]) -> None:
        """Hand committed attempts to workers."""
        self._parts.pool.submit([self._parts.prompts.request(issue) for issue in issues])

    async def _receive(self, answers: Sequence[Answer]) -> None:
        journal = self._parts.journal
        done: dict[tuple[int, int], Group] = {}
        repeated: list[tuple[int, int]] = []
        for answer in answers:
            if isinstance(answer, GroupDone):
                key = (answer.group.prompt_index, answer.group.attempt)
                if key in done:
                    repeated.append(key)
                done[key] = answer.group
            elif isinstance(answer, WorkerLost):
                await journal.append(WorkerReplaced(worker=answer.worker, because=answer.because))
        failed = [answer for answer in answers if isinstance(answer, GroupFailed)]
        wanted = {key: group for key, group in done.items() if is_current(journal.state, *key)}
        file, places = "", dict[tuple[int, int], StoredFile]()
        if wanted:
            crashpoint("group.write.before")
            file = f"g{journal.incarnation:04d}-{next(self._file_numbers):07d}.msgpack"
            stored = await self._parts.blocking(self._parts.store.write, file, list(wanted.values()))
            places = dict(zip(wanted, stored, strict=True))
            crashpoint("group.write.after")

        def decide(state: RunState) -> list[Event]:
            events: list[Event] = []
            keep: list[StoredGroup] = []
            for key, group in done.items():
                if key in places and is_current(state, *key):
                    keep.append(describe(group, places[key]))
                else:
                    events.append(refusal(state, *key, "another attempt of the group counts"))
            for answer in failed:
                key = (answer.prompt_index, answer.attempt)
                if is_current(state, *key):
                    events.append(
                        AttemptFailed(
                            prompt_index=answer.prompt_index,
                            attempt=answer.attempt,
                            reason=answer.reason,
                            error=answer.error,
                        )
                    )
                elif answer.reason is IssueReason.FAILED:
                    events.append(refusal(state, *key, answer.error))
            if keep:
                events.append(GroupsStored(file=file, groups=keep))
                flat = [group.prompt_index for group in keep if has_no_spread(group)]
                if flat and self._parts.config.algorithm.drop_no_spread:
                    events.append(GroupsDropped(prompt_indices=flat, reason=DropReason.NO_SPREAD))
            events += [refusal(state, *key, "it was answered already") for key in repeated]
            if keep and not failed:  # the slots that came free are filled in the same transaction
                events += self.admission(state, issued)
            return events

        issued: list[Issue] = []
        if await journal.commit(decide) and places:
            crashpoint("group.stored")
        if issued:
            crashpoint("admit.after")
            self.submit_admitted(issued)


def is_current(state: RunState, prompt_index: int, attempt: int) -> bool:
    """Whether an answer of this attempt is still wanted."""
    group: LiveGroup | None = state.live.get(prompt_index)
    return group is not None and group.attempt == attempt and group.under_way


def refusal(state: RunState, prompt_index: int, attempt: int, because: str) -> AnswerRefused:
    """The record of a late answer."""
    group = state.live.get(prompt_index)
    return AnswerRefused(
        prompt_index=prompt_index,
        attempt=attempt,
        current_attempt=group.attempt if group else 0,
        because=because,
    )


def has_no_spread(group: StoredGroup) -> bool:
    """Whether all rewards of the group are equal: it has no advantage to learn from."""
    return len(set(group.rewards)) <= 1


def describe(group: Group, place: StoredFile) -> StoredGroup:
    """What the log says of a stored group: enough to audit it without its tokens."""
    versions = [unpack_i32(sample.versions) for sample in group.samples]
    return StoredGroup(
        prompt_index=group.prompt_index,
        attempt=group.attempt,
        offset=place.offset,
        size=place.size,
        digest=place.digest,
        rewards=[number(sample.reward) for sample in group.samples],
        lengths=[len(sample) for sample in versions],
        truncated=[sample.truncated for sample in group.samples],
        oldest_versions=[min(sample) for sample in versions],
        newest_versions=[max(sample) for sample in versions],
    )
