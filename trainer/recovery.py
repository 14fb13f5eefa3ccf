"""Redo: from the last usable checkpoint to the log's head, out of stored groups, compared step by step.

A new run and a resumed one take this one path: with an empty log there is nothing to load and nothing to
redo. The invariant: when `redo` returns, the learner holds exactly the weights of the last recorded update,
and what is returned are the weights of the last publication.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..rollout.protocols import Group, Published, StoredFile
from ..statemachine.crashpoints import crashpoint
from ..statemachine.errors import CheckpointUnusable, Diverged, GroupUnusable, RunFailedError
from ..statemachine.events import (
    CheckpointCommitted,
    CheckpointLost,
    StoredGroup,
    UpdatesRedone,
    WeightsRemade,
    number,
)
from ..statemachine.state import UpdateRecord
from .comparing import Deviation, compare_steps
from .keeper import Keeper
from .parts import Parts
from .protocols import LearnerReady, UpdateResult


async def read_groups(parts: Parts, places: Sequence[tuple[str, StoredGroup]]) -> list[Group | GroupUnusable]:
    """Stored groups, digests checked; in the place of one that cannot be used, why."""

    def read() -> list[Group | GroupUnusable]:
        groups: list[Group | GroupUnusable] = []
        for file, stored in places:
            place = StoredFile(file=file, offset=stored.offset, size=stored.size, digest=stored.digest)
            try:
                groups.append(parts.store.read(place))
            except GroupUnusable as error:
                groups.append(error)
        return groups

    return await parts.blocking(read)


async def redo(
    parts: Parts,
    keeper: Keeper,
    ready: LearnerReady,
    served: Published | None,
    holds: Callable[[int, Published | None], None],
) -> Published:
    """Bring the learner to the log's head. `served`: the last publication, where it is still in memory.

    `holds` is told which update's weights the learner holds (-1: in doubt), and the last publication as far
    as it is known. Once the run was asked to stop no further update is begun: whoever asked takes a
    checkpoint of what is held, and cancels.

    Raises Diverged, RunFailedError (a needed group file is gone), LearnerGone.
    """
    journal, state = parts.journal, parts.journal.state
    version, published_update = state.policy_version, state.published_update
    if served is not None and served.version != version:
        served = None
    if served is None and version == 0:
        served = parts.initial_weights()
    base, served = await _load(parts, served)
    loaded = state.checkpoints.get(base)
    base_seq = loaded.head_seq if loaded else 0
    deviation = Deviation(same_execution=loaded is None or loaded.as_recorded)
    keeper.as_recorded = deviation.same_execution
    holds(base, served)
    first, last = base + 1, state.updates
    records = state.records
    missing = next((update for update in range(first, last + 1) if update not in records), None)
    if missing is not None and state.config["groups"]["keep"] == "all":
        records = await journal.every_record()
    elif missing is not None:
        raise RunFailedError(
            f"update {missing} must be redone, but its groups were deleted once every kept checkpoint "
            "covered it, and none of those can be used any more: start a new run with --new (with a larger "
            "checkpoint.keep more of them have to be lost)",
            update=missing,
        )
    if last >= first:
        source = f"the checkpoint of update {base}" if base else "the starting weights"
        parts.waiting(f"redoing updates {first} to {last} from {source}")
    for update in range(first, last + 1):
        record = records[update]
        batch = await _read_for_redo(parts, update, record.places)
        if parts.ending.asked:
            await asyncio.Event().wait()
        holds(-1, served)
        result = await parts.learner.update(update, batch, journal.take_tail())
        elsewhere = state.redone_elsewhere_between(base_seq, record.seq)
        deviation.ran(record.fingerprint, ready.fingerprint, redone_elsewhere=elsewhere)
        _compare(record, result, deviation, state.accept_divergence)
        keeper.as_recorded = deviation.same_execution and not deviation.accepted
        parts.waiting(f"redoing updates {first} to {last}: {update} is done")
        crashpoint("redo.update")
        if update == published_update and served is None:
            served = await parts.learner.gather(version)
        holds(update, served)
        if keeper.is_due(update):
            await keeper.save(update, served)
    await keeper.settle()
    if served is None:
        raise RunFailedError(
            f"the weights of policy version {version} (update {published_update}) could not be made again",
            policy_version=version,
        )
    if last >= first:
        await journal.append(
            UpdatesRedone(
                learner_try=state.learner_try,
                checkpoint_update=base,
                first_update=first,
                last_update=last,
                same_execution=deviation.same_execution,
                loss_deviation=number(deviation.loss),
                grad_norm_deviation=number(deviation.grad_norm),
                accepted_divergence=deviation.accepted,
            )
        )
        crashpoint("redo.done")
    if version > 0 and served.digest != state.published_digest:
        if deviation.same_execution and not state.accept_divergence:
            raise Diverged(
                f"policy version {version} was made again with digest {served.digest}, its record says "
                f"{state.published_digest}: pass --accept-divergence to go on with the new weights",
                seq=state.seq,
                update=published_update,
            )
        await journal.append(
            WeightsRemade(
                version=version,
                update=published_update,
                digest=served.digest,
                recorded_digest=state.published_digest,
            )
        )
    return served


async def _load(parts: Parts, served: Published | None) -> tuple[int, Published | None]:
    """Load the newest usable checkpoint; says which were not. Returns its update (0: initial weights)."""
    journal, state = parts.journal, parts.journal.state
    while (checkpoint := state.latest_checkpoint()) is not None:
        parts.waiting(f"loading the checkpoint of update {checkpoint.update}")
        try:
            await parts.learner.load(checkpoint)
            known = await _served_at(parts, checkpoint, served)
            if known is None and state.published_update < checkpoint.update:
                raise CheckpointUnusable(
                    f"checkpoint {checkpoint.path} lacks the weights of policy version "
                    f"{state.policy_version}, which are older than its own",
                    path=checkpoint.path,
                )
            return checkpoint.update, known
        except CheckpointUnusable as error:
            await journal.append(
                CheckpointLost(update=checkpoint.update, path=checkpoint.path, because=str(error))
            )
    return 0, served


async def _served_at(
    parts: Parts, checkpoint: CheckpointCommitted, served: Published | None
) -> Published | None:
    state = parts.journal.state
    if served is not None or state.published_update > checkpoint.update:
        return served
    if state.published_update == checkpoint.update:
        return await parts.learner.gather(state.policy_version)
    return await parts.learner.served(checkpoint)


async def _read_for_redo(parts: Parts, update: int, places: Sequence[tuple[str, StoredGroup]]) -> list[Group]:
    batch: list[Group] = []
    for group, (_, stored) in zip(await read_groups(parts, places), places, strict=True):
        if isinstance(group, GroupUnusable):
            raise RunFailedError(
                f"update {update} must be redone and needs group {stored.prompt_index}: {group}; "
                "restore the file, or start a new run",
                update=update,
                prompt_index=stored.prompt_index,
            ) from group
        batch.append(group)
    return batch


def _compare(
    record: UpdateRecord,
    result: UpdateResult,
    deviation: Deviation,
    accept_divergence: bool,
) -> None:
    """Compare a redone update with its record. Raises Diverged where a difference should not be."""
    for difference in compare_steps(record.event.steps, result.steps, deviation):
        if difference.position or (difference.forbidden and not accept_divergence):
            way_out = "" if difference.position else ": pass --accept-divergence to go on with it"
            raise Diverged(
                f"event {record.seq}: update {record.event.update}: {difference}{way_out}",
                seq=record.seq,
                update=record.event.update,
            )
        deviation.accepted = deviation.accepted or difference.forbidden
