"""The events: everything that a run knows about itself, typed, frozen, versioned.

An event states one decision that has been made. Types and their payloads only ever grow: a changed meaning
is a new `schema` number, and a type or number that is not known may be read but never resumed from.
Counters carry their unit; prompts are named by `prompt_index`, their place in the draw order, from 0;
updates count from 1 (the number of updates once this one is done); optimizer steps count from 0, as the
schedule does; policy version 0 is the initial weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from .errors import LogBroken

Number = float | Literal["nan", "inf", "-inf"]
"""A float that JSON can hold: the three that it cannot are written as strings."""


def number(value: float) -> Number:
    """The JSON form of a float."""
    value = float(value)
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


class DropReason(StrEnum):
    """Why a group was not trained."""

    NO_SPREAD = "no_spread"  # all its rewards are equal and the filter is on
    UNUSED = "unused"  # no further batch could hold it
    UNTRAINABLE = "untrainable"  # retired by the user's own filter


class IssueReason(StrEnum):
    """Why a group is generated again, as a new attempt."""

    INCARNATION = "incarnation"  # a new driver took over while it was being generated
    FAILED = "failed"  # its work raised
    WORKER_LOST = "worker_lost"  # its worker died under it
    STALE = "stale"  # the next publication would have pushed it over the bound
    BAD_FILE = "bad_file"  # its stored file is missing or damaged


class TakeReason(StrEnum):
    """Why an incarnation began."""

    NEW = "new"  # the run was created
    ENDED = "ended"  # the driver before it had released the run
    DEAD = "dead"  # the driver before it is dead on this host
    SILENT = "silent"  # the driver before it, elsewhere, had no heartbeat for too long
    ASKED = "asked"  # the user asked for it


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of all events. `schema` is the version of the payload's form.

    Values hold no cycles, so the collector need not look at the millions of them in a long log (`gc=False`).
    """

    schema: ClassVar[int] = 1


class Issue(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One group handed to a worker: which attempt, and the version it was admitted at."""

    prompt_index: int
    attempt: int
    admission_version: int


class StoredGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One group within a stored file; the lists have one entry per sample."""

    prompt_index: int
    attempt: int
    offset: int  # bytes, within the file
    size: int  # bytes
    digest: str
    rewards: list[Number]
    lengths: list[int]  # response tokens
    truncated: list[bool]
    oldest_versions: list[int]  # policy version of the oldest token
    newest_versions: list[int]


class OptimizerStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One optimizer step, applied or skipped."""

    optimizer_step: int  # from 0: the schedule's clock
    learning_rate: float
    loss: Number
    grad_norm: Number
    tokens: int  # response tokens with a weight in the loss
    applied: bool
    skipped_because: str | None = None  # "not_finite" | "no_tokens"


class RunCreated(Event, frozen=True, kw_only=True):
    """The first event: what the run is. Nothing in it changes later."""

    config: dict[str, Any]  # resolved, every key
    digests: dict[str, str]  # data, tokenizer, weights
    data_len: int  # rows after filtering
    rows_filtered: int  # rows that max_prompt_tokens took out
    objects: dict[str, str]  # what was passed as Python objects: role -> name
    software: dict[str, str]  # surefoot and the libraries that fix numbers -> version
    cached_keys_kept_at_swap: bool = True  # keys and values made by older weights are kept


class IncarnationBegan(Event, frozen=True, kw_only=True):
    """A driver took the run; every later append carries its number."""

    incarnation: int
    reason: TakeReason
    host: str
    pid: int
    config_changes: dict[str, list[Any]] = {}  # dotted key -> [old, new]
    digest_changes: dict[str, list[str]] = {}  # of RunCreated.digests: name -> [old, new]
    accept_divergence: bool = False


class BudgetResolved(Event, frozen=True, kw_only=True):
    """Every total of the run, before any worker exists."""

    data_len: int
    epochs: int
    max_prompts: int | None
    batch_prompts: int
    minibatches: int
    passes: int
    every_updates: int
    tail: str
    max_optimizer_steps: int | None
    prompts_available: int
    prompts_total: int
    prompts_unused: int
    updates_total: int
    optimizer_steps_total: int
    publications_total: int
    learning_rate: float
    schedule_kind: str
    horizon: int
    warmup_steps: int
    min_ratio: float
    derivation: list[str]


class WorkersReady(Event, frozen=True, kw_only=True):
    """Every rollout worker and learner rank of this learner try is up, loaded and redone."""

    learner_try: int
    workers: int
    ranks: int
    fingerprint: dict[str, str]  # of the learner's execution
    state_digest: str  # of the fold that every rank agreed on
    update: int  # the update whose weights the learner now holds


class UpdatesRedone(Event, frozen=True, kw_only=True):
    """Recorded updates were executed again from a checkpoint, and compared."""

    learner_try: int
    checkpoint_update: int  # 0: the initial weights
    first_update: int
    last_update: int
    same_execution: bool  # the execution fingerprint equals the recorded one
    loss_deviation: Number  # largest absolute difference
    grad_norm_deviation: Number
    accepted_divergence: bool = False


class GroupsAdmitted(Event, frozen=True, kw_only=True):
    """Prompts drawn for the first time and handed to free slots."""

    groups: list[Issue]


class GroupsReissued(Event, frozen=True, kw_only=True):
    """Groups handed out again as a new attempt; they keep their place."""

    groups: list[Issue]
    reason: IssueReason


class AttemptFailed(Event, frozen=True, kw_only=True):
    """The work of one attempt raised, or its worker died."""

    prompt_index: int
    attempt: int
    reason: IssueReason
    error: str


class GroupsStored(Event, frozen=True, kw_only=True):
    """Groups that are on disk, whole, and may be trained."""

    file: str
    groups: list[StoredGroup]


class GroupsDropped(Event, frozen=True, kw_only=True):
    """Groups that will never be trained."""

    prompt_indices: list[int]
    reason: DropReason


class AnswerRefused(Event, frozen=True, kw_only=True):
    """A late answer: its attempt is no longer the group's."""

    prompt_index: int
    attempt: int
    current_attempt: int
    because: str


class UpdateBegan(Event, frozen=True, kw_only=True):
    """A batch has been assembled from stored groups and the learner is at work on it."""

    update: int
    groups: list[tuple[int, int]]  # prompt_index, attempt; in training order


class UpdateApplied(Event, frozen=True, kw_only=True):
    """The exactly-once point: these groups are trained, these optimizer steps are taken."""

    update: int
    learner_try: int
    policy_version: int  # at the update
    groups: list[tuple[int, int]]
    steps: list[OptimizerStep]
    staleness_max: int  # policy version minus the oldest token's version
    staleness_mean: float
    staleness_max_updates: int  # the same, in updates
    metrics: dict[str, Number]
    seconds: dict[str, float]  # where the time went; never compared


class WeightsPublished(Event, frozen=True, kw_only=True):
    """The learner's weights after `update` are policy version `version`."""

    version: int
    update: int
    digest: str
    bytes: int
    final: bool


class WeightsRemade(Event, frozen=True, kw_only=True):
    """A published version was made again on another execution; its new digest."""

    version: int
    update: int
    digest: str
    recorded_digest: str


class CheckpointCommitted(Event, frozen=True, kw_only=True):
    """From here on this checkpoint exists."""

    update: int
    optimizer_steps: int
    policy_version: int
    path: str
    manifest_digest: str
    weights_digest: str
    bytes: int
    head_seq: int  # the log's head that the manifest holds
    head_hash: str
    as_recorded: bool = True  # False: of a redo, whose bits may not be those that the records go on from


class CheckpointLost(Event, frozen=True, kw_only=True):
    """A committed checkpoint cannot be used (missing, damaged); an older one is."""

    update: int
    path: str
    because: str


class FilesRetired(Event, frozen=True, kw_only=True):
    """These files may be deleted; nothing will ask for them again."""

    checkpoints: list[str]
    group_files: list[str]


class EvaluationDone(Event, frozen=True, kw_only=True):
    """Held-out rows answered by one policy version."""

    policy_version: int
    update: int
    size: int
    reward_mean: float
    length_mean: float
    truncated_frac: float
    seconds: float


class WorkerReplaced(Event, frozen=True, kw_only=True):
    """A rollout worker died or did not confirm in time; another took its place."""

    worker: int
    because: str


class LearnerLost(Event, frozen=True, kw_only=True):
    """The learner group is gone and will be rebuilt as the next try."""

    learner_try: int
    because: str


class RunCompleted(Event, frozen=True, kw_only=True):
    """Exactly the budget's optimizer steps have been taken."""

    updates: int
    optimizer_steps: int
    policy_version: int
    weights_digest: str


class RunStopped(Event, frozen=True, kw_only=True):
    """No further batch can form: the run ends short, and says by how much."""

    updates: int
    optimizer_steps: int
    policy_version: int
    weights_digest: str
    updates_short: int
    optimizer_steps_short: int
    because: str


class RunPreempted(Event, frozen=True, kw_only=True):
    """The driver was asked to stop; the same command goes on."""

    updates: int
    optimizer_steps: int
    checkpoint_update: int
    because: str


class RunFailed(Event, frozen=True, kw_only=True):
    """The run could not go on; the same command tries again."""

    code: str
    error: str
    updates: int
    optimizer_steps: int
    facts: dict[str, Any] = {}


END_EVENTS = (RunCompleted, RunStopped, RunPreempted, RunFailed)

EVENT_TYPES: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}

E = TypeVar("E", bound=Event)

_encoder = msgspec.json.Encoder(order="sorted")
_decoders: dict[tuple[str, int], Callable[[bytes | str], Any]] = {
    (name, kind.schema): msgspec.json.Decoder(kind).decode for name, kind in EVENT_TYPES.items()
}


def type_of(event: Event) -> str:
    """The event's type as the log names it."""
    return type(event).__name__


def encode(event: Event) -> bytes:
    """Canonical JSON: keys sorted, shortest floats. Raises ValueError if it would not read back the same."""
    payload = _encoder.encode(event)
    try:
        same = _decoders[type_of(event), event.schema](payload) == event
    except msgspec.ValidationError as error:
        raise ValueError(f"{type_of(event)} cannot be written to the log: {error}") from error
    if not same:
        raise ValueError(f"{type_of(event)} would not read back from the log as it was written")
    return payload


def decode(kind: str, schema: int, payload: bytes | str, *, seq: int = 0) -> Event:
    """The event of a row. Raises LogBroken for a type or schema this version does not know."""
    read = _decoders.get((kind, schema))
    if read is None:
        raise LogBroken(
            f"event {seq} is a {kind} of schema {schema}, which this version of Surefoot does not know: "
            "use the version that wrote it, or a newer one",
            seq=seq,
        )
    try:
        return read(payload)
    except msgspec.DecodeError as error:
        raise LogBroken(f"event {seq} ({kind}) cannot be read: {error}", seq=seq) from error
