"""Replay: recorded updates executed again on fresh learner ranks, every number held against the log.

Reads the log and the stored groups, and writes nothing. Ranks are handed the rows as they were when an update
began, so that they do again what was done then, schedule and settings included. It begins at a kept
checkpoint, or at the starting weights where no group file was retired (`groups.keep = "all"`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..rollout.protocols import Group, GroupStore, StoredFile
from ..statemachine import events as ev
from ..statemachine.errors import CheckpointUnusable, GroupUnusable, LogBroken, RunFailedError, UserMistake
from ..statemachine.log import EventRow, chained
from ..statemachine.phases import Phase
from ..statemachine.state import RunState, UpdateRecord
from .comparing import Deviation, compare_steps
from .config import Config
from .protocols import Learner
from .wording import counted

Progress = Callable[[int, int, bool], None]
"""Called after each update: its number, the last one's, and whether it was as recorded."""


@dataclass
class RecordedWeights:
    """A digest that the log holds of the weights after an update."""

    seq: int
    update: int
    digest: str
    fingerprint: dict[str, str] | None = None  # of the ranks that held them; None: they were never ready


@dataclass
class Recording:
    """What of a log is executed again: updates, digests of weights, and where one may begin."""

    rows: list[EventRow]
    state: RunState = field(default_factory=lambda: RunState(every_record=True))
    weights: list[RecordedWeights] = field(default_factory=list)
    retired: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, rows: Iterable[EventRow]) -> Recording:
        """From a whole log, folded as it is read. Raises LogBroken and IllegalEvent for a broken one."""
        recording = cls(list(rows))
        state, starting = recording.state, list[RecordedWeights]()
        for row in recording.rows:
            event = state.apply(row)
            weights: RecordedWeights | None = None
            if isinstance(event, ev.FilesRetired):
                recording.retired.update(event.group_files)
            elif isinstance(event, ev.WeightsPublished | ev.WeightsRemade):
                weights = RecordedWeights(row.seq, event.update, event.digest)
            elif isinstance(event, ev.CheckpointCommitted):
                weights = RecordedWeights(row.seq, event.update, event.weights_digest)
            elif isinstance(event, ev.WorkersReady):
                for one in starting:
                    one.fingerprint = event.fingerprint
                starting.clear()
            elif isinstance(event, ev.IncarnationBegan | ev.LearnerLost):
                starting.clear()
            if weights is not None:
                recording.weights.append(weights)
                if state.phase is Phase.INIT_WORKERS:  # a redo: these ranks have not said yet what they are
                    starting.append(weights)
                else:
                    weights.fingerprint = state.fingerprint
        if state.created is None:
            raise LogBroken("event 1 is no RunCreated: the log has no config", seq=1)
        return recording

    @property
    def updates(self) -> list[UpdateRecord]:
        """Update 1, 2, ... as the log holds them."""
        return list(self.state.records.values())

    def begins(self) -> list[int]:
        """Updates after which a replay may begin, ascending; 0 is the starting weights."""
        whole = all(file not in self.retired for update in self.updates for file, _ in update.places)
        return ([0] if whole else []) + sorted(self.state.checkpoints)

    def base(self, from_update: int | None) -> int:
        """The update whose weights the replay of `from_update` and all that follow begins with.

        Raises UserMistake where the log or the kept files do not reach.
        """
        last = len(self.updates)
        if last == 0:
            raise UserMistake("the log holds no update yet: there is nothing to replay")
        if from_update is not None and not 1 <= from_update <= last:
            raise UserMistake(f"--from {from_update}: the run's updates are 1 to {last}; name one of them")
        begins = [update for update in self.begins() if update < last]
        if not begins:
            raise UserMistake(
                f"no update can be replayed: the only kept checkpoint is of update {last}, the last one, and "
                "the groups before it were deleted; groups.keep = 'all' keeps them"
            )
        if from_update is None:
            return begins[0]
        earlier = [update for update in begins if update < from_update]
        if not earlier:
            raise UserMistake(
                f"--from {from_update}: what is kept begins after update {begins[0]}; name update "
                f"{begins[0] + 1} or a later one (groups.keep = 'all' keeps everything)"
            )
        return earlier[-1]


@dataclass
class Replay:
    """What a replay has shown."""

    checkpoint_update: int  # 0: from the starting weights
    first_update: int
    last_update: int
    ranks: int = 0
    optimizer_steps: int = 0
    deviation: Deviation = field(default_factory=Deviation)
    weights_compared: int = 0
    weights_equal: int = 0
    last_digest: str = ""
    differences: list[str] = field(default_factory=list)  # that should not be

    @property
    def ok(self) -> bool:
        """Nothing differs but what another execution explains."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """As `replay --json` prints it."""
        return {
            "ok": self.ok,
            "checkpoint_update": self.checkpoint_update,
            "first_update": self.first_update,
            "last_update": self.last_update,
            "optimizer_steps": self.optimizer_steps,
            "ranks": self.ranks,
            "same_execution": self.deviation.same_execution,
            "loss_deviation": ev.number(self.deviation.loss),
            "grad_norm_deviation": ev.number(self.deviation.grad_norm),
            "weights_compared": self.weights_compared,
            "weights_equal": self.weights_equal,
            "last_digest": self.last_digest,
            "differences": self.differences,
        }

    def lines(self) -> list[str]:
        """For people."""
        start = f"the checkpoint of update {self.checkpoint_update}"
        bits = self.deviation.same_execution and self.ok
        numbers = (
            "equal bit for bit"
            if bits
            else f"largest deviation {self.deviation.loss:.3g} and {self.deviation.grad_norm:.3g}"
            + ("" if self.deviation.same_execution else " (recorded on another execution)")
        )
        return [
            f"updates {self.first_update} to {self.last_update} ({self.optimizer_steps} optimizer steps) "
            f"executed again from {start if self.checkpoint_update else 'the starting weights'}, "
            f"on {counted(self.ranks, 'rank')}",
            f"learning rates, groups and their order: {'equal' if self.ok else 'see below'}",
            f"loss and gradient norm: {numbers}",
            f"weights: {self.weights_equal} of {self.weights_compared} recorded digests equal; after update "
            f"{self.last_update}: {self.last_digest}",
            *self.differences,
        ]


async def replay(
    recording: Recording, learner: Learner, store: GroupStore, from_update: int | None, progress: Progress
) -> Replay:
    """Execute again what was recorded, from `from_update` on (None: all that is kept).

    Raises UserMistake (nothing kept to begin with), RunFailedError (a group file or checkpoint that should be
    there cannot be used), LearnerGone.
    """
    base = recording.base(from_update)
    todo = recording.updates[base:]
    done = Replay(base, base + 1, len(recording.updates))
    loaded = recording.state.checkpoints.get(base)
    done.deviation.same_execution = loaded is None or loaded.as_recorded
    base_seq = loaded.head_seq if loaded else 0
    began = todo[0].seq - 1  # the row before an update is the last that its ranks had folded
    ready = await learner.start(recording.rows[:began], 1)
    done.ranks = ready.ranks
    if base:
        try:
            await learner.load(recording.state.checkpoints[base])
        except CheckpointUnusable as error:
            raise RunFailedError(f"{error}: name a later update with --from", update=base) from error
    await _compare_weights(recording, learner, base, ready.fingerprint, done)
    for recorded in todo:
        update = recorded.event.update
        groups = _read(store, recorded)
        result = await learner.update(update, groups, recording.rows[began : recorded.seq - 1])
        began = recorded.seq - 1
        known = len(done.differences)
        elsewhere = recording.state.redone_elsewhere_between(base_seq, recorded.seq)
        done.deviation.ran(recorded.fingerprint, ready.fingerprint, redone_elsewhere=elsewhere)
        for difference in compare_steps(recorded.event.steps, result.steps, done.deviation):
            if difference.forbidden:
                done.differences.append(f"event {recorded.seq}: update {update}: {difference}")
        done.optimizer_steps += len(result.steps)
        await _compare_weights(recording, learner, update, ready.fingerprint, done)
        progress(update, done.last_update, len(done.differences) == known)
    return done


def _read(store: GroupStore, recorded: UpdateRecord) -> list[Group]:
    groups: list[Group] = []
    for file, stored in recorded.places:
        try:
            place = StoredFile(file=file, offset=stored.offset, size=stored.size, digest=stored.digest)
            groups.append(store.read(place))
        except GroupUnusable as error:
            update = recorded.event.update
            raise RunFailedError(
                f"update {update} needs group {stored.prompt_index}: {error}; restore the file, or begin "
                f"later with --from {update + 1}",
                update=update,
                prompt_index=stored.prompt_index,
            ) from error
    return groups


async def _compare_weights(
    recording: Recording, learner: Learner, update: int, fingerprint: dict[str, str], done: Replay
) -> None:
    recorded = [weights for weights in recording.weights if weights.update == update]
    if not recorded and update != done.last_update:
        return
    digest = (await learner.gather(recording.state.version_at(update))).digest
    done.last_digest = digest
    for weights in recorded:
        done.weights_compared += 1
        done.weights_equal += weights.digest == digest
        same = done.deviation.same_execution and weights.fingerprint == fingerprint
        if same and weights.digest != digest:
            done.differences.append(
                f"event {weights.seq}: the weights after update {update} were recorded with digest "
                f"{weights.digest}; executed again it is {digest}"
            )


async def replay_run(
    rows: Iterable[EventRow],
    storage: Callable[[Config], str],
    from_update: int | None,
    progress: Progress,
) -> Replay:
    """Replay a log on Ray ranks, here or in the run's cluster. `storage`: see Place.storage_url."""
    recording = Recording.of(chained(rows))
    recording.base(from_update)  # refused before Ray is started
    from ..rollout.store import FsspecGroupStore
    from .assembly import ray_session
    from .learner import RayLearner

    config = Config.from_resolved(recording.state.config)
    url = storage(config)
    async with ray_session(config, workers=0) as session:
        learner = RayLearner(config, url, session=session)
        try:
            return await replay(recording, learner, FsspecGroupStore(url), from_update, progress)
        finally:
            await learner.close()
