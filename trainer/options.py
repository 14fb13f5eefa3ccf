"""Every option of a run: its type, its range, its default and what it is for.

The one place where defaults are stated. Models are frozen and refuse what they do not know; reading files,
overriding and comparing are `config`'s. A default is chosen so that an option left out does the plain thing:
standard GRPO, everything on, nothing that needs a GPU. `docs/config.md` is generated from the descriptions.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PrivateAttr,
)


class Section(BaseModel):
    """Base of all: frozen, strict about types, closed to unknown keys and to numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _exact(value: object) -> Decimal | None:
    """An exact decimal from a Decimal, string or integer; a float counts as its shortest decimal form."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError("must be a number")
    try:
        return Decimal(repr(value) if isinstance(value, float) else value)
    except InvalidOperation:
        raise ValueError("must be a number") from None


def _ratio(value: Decimal | None) -> Decimal | None:
    if value is not None and not (value.is_finite() and 0 <= value <= 1):
        raise ValueError("must be at least 0 and at most 1")
    return value


Ratio = Annotated[
    Decimal | None,
    BeforeValidator(_exact),
    AfterValidator(_ratio),
    PlainSerializer(lambda value: None if value is None else str(value), return_type=str | None),
]
"""An exact decimal between 0 and 1; its JSON form is the string of its digits."""


def _function_name(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", value):
        raise ValueError("must be package.module:function")
    return value


def _pair(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class WrittenPath(NamedTuple):
    """A path as a config has it, and where it was looked for: (path, what it was taken from)."""

    text: str
    tried: tuple[tuple[str, str], ...]


Beta = Annotated[float, Field(ge=0, lt=1)]


class DataOptions(Section):
    """Where prompts come from and how many of them there are."""

    source: str = Field(
        min_length=1,
        description="`reasoning_gym:TASK` for a generated task, or the path of a .jsonl or .parquet file "
        "with `prompt` and `answer` columns; a prompt is a string or a list of chat messages.",
    )
    size: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Rows to generate (prompts). Generated tasks only, and needed there.",
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Options of the generated task, as it names them. Generated tasks only.",
    )
    epochs: int = Field(
        default=1, ge=1, description="How often the data is drawn in full, each time in a new order."
    )
    max_prompts: int | None = Field(
        default=None,
        ge=1,
        description="Upper bound on prompts drawn over the whole run; unset: all that epochs give.",
    )
    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Rows with a longer prompt (tokens, template applied) are taken out; unset: none.",
    )
    template: str | None = Field(
        default=None,
        min_length=1,
        description="Jinja template of the prompt over the row's columns, used in place of the tokenizer's "
        "chat template; unset: chat messages go through the tokenizer's, strings stay as they are.",
    )


class RewardOptions(Section):
    """How a response is scored."""

    function: Annotated[str | None, AfterValidator(_function_name)] = Field(
        default=None,
        description="`package.module:function` called with (row, text, ids), sync or async, giving a number "
        "or a dict of named parts whose sum is the reward; imported from where the command runs, its folder "
        "included; `row` is the row's columns, `ids` the sampled tokens; unset: the task's own scorer, or "
        "for files an exact match of the extracted answer.",
    )
    timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        description="Bound on scoring one response (seconds); one that takes longer has failed.",
    )


class ModelOptions(Section):
    """The model that is trained."""

    path: str = Field(
        min_length=1,
        description="A transformers model folder (config, safetensors, tokenizer) of a supported decoder.",
    )


class BatchOptions(Section):
    """What one update trains on."""

    prompts: int = Field(default=32, ge=1, description="Prompts (groups) per update.")
    group_size: int = Field(
        default=8,
        ge=2,
        description="Responses sampled per prompt; at least 2, as a reward is compared within its group.",
    )
    minibatches: int = Field(
        default=1, ge=1, description="Optimizer steps per pass over a batch; must divide `batch.prompts`."
    )
    passes: int = Field(default=1, ge=1, description="Times that an update goes over its batch.")
    tail: Literal["drop", "train"] = Field(
        default="drop",
        description="What becomes of prompts that do not fill a batch at the end: `drop`: not even "
        "generated; `train`: one smaller last batch. Dropping is the default so that all updates are alike.",
    )


class RolloutOptions(Section):
    """How responses are generated."""

    workers: int = Field(default=1, ge=1, description="Rollout workers (processes).")
    max_concurrent: int = Field(
        default=64,
        ge=1,
        description="Samples that one worker decodes at a time; more is faster until memory is full.",
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Bound on a response's length (tokens).")
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Sampling temperature in training; the learner's log-probabilities use it too.",
    )
    deterministic: bool = Field(
        default=False,
        description="Decode each group alone at a fixed shape, so that with `sync.max_staleness = 0` the run "
        "is a pure function of its config on a given machine; off by default as it is slower.",
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        description="Tries at generating one group within one life of the driver before the run fails.",
    )
    gpus_per_worker: float = Field(
        default=0.0, ge=0, description="GPUs of one worker; a fraction shares one."
    )
    threads: int = Field(
        default=1, ge=1, description="CPU threads of one worker; 1 suits many workers on few cores."
    )


class LearnerOptions(Section):
    """How an update is computed; nothing here changes what is computed, but for rounding."""

    ranks: int = Field(
        default=1, ge=1, description="Learner ranks (processes) over which the model is sharded."
    )
    gpus_per_rank: float = Field(
        default=0.0, ge=0, description="GPUs of one rank: 0 trains on CPU (gloo), 1 on a GPU (nccl)."
    )
    micro_batch_tokens: int = Field(
        default=16384,
        ge=1,
        description="Upper bound on tokens (padding included) in one forward pass of one rank.",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type of the forward and backward pass; parameters and optimizer stay float32.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Compute activations again in the backward pass: less memory, about a third slower.",
    )
    threads: int = Field(
        default=1, ge=1, description="CPU threads of one rank; 1, as ranks share a machine's cores."
    )


class AlgorithmOptions(Section):
    """The objective: GRPO."""

    scale: Literal["group", "none"] = Field(
        default="group",
        description="What an advantage (reward minus group mean) is divided by: `group`: the group's "
        "unbiased standard deviation + 1e-4, as in the GRPO paper; `none`: nothing.",
    )
    clip_low: float = Field(
        default=0.2, ge=0, lt=1, description="An importance ratio is clipped below 1 - clip_low."
    )
    clip_high: float = Field(
        default=0.2, ge=0, description="An importance ratio is clipped above 1 + clip_high."
    )
    mask_truncated: bool = Field(
        default=False, description="Leave responses that hit `rollout.max_new_tokens` out of the loss."
    )
    drop_no_spread: bool = Field(
        default=False,
        description="Drop groups whose rewards are all equal and draw others in their place; off by default, "
        "since it makes the total of optimizer steps an upper bound.",
    )


class ScheduleOptions(Section):
    """The learning rate's course over optimizer steps."""

    kind: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="Form of the decay after warm-up."
    )
    warmup_steps: int | None = Field(
        default=None,
        ge=0,
        description="Optimizer steps of linear warm-up; excludes `optim.schedule.warmup_ratio`; unset: none.",
    )
    warmup_ratio: Ratio = Field(
        default=None,
        description="Warm-up as an exact share (0 to 1) of the horizon, rounded up to whole optimizer steps; "
        "excludes `optim.schedule.warmup_steps`.",
    )
    min_ratio: float = Field(
        default=0.0, ge=0, le=1, description="The decay ends at this multiple of `optim.lr`."
    )
    horizon: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer step at which the decay ends; may be longer than the run, never shorter; "
        "unset: the run's total.",
    )


class OptimOptions(Section):
    """The optimizer: AdamW."""

    lr: float = Field(
        default=1e-6, gt=0, description="Peak learning rate; small, as suits a pretrained model of size."
    )
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_pair)] = Field(
        default=(0.9, 0.999), description="AdamW's decay rates of the first and second moment."
    )
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay; 0: none.")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="The gradient's global norm is clipped to this."
    )
    max_optimizer_steps: int | None = Field(
        default=None,
        ge=1,
        description="Lowers the total of optimizer steps, to whole updates; unset: the data decides.",
    )
    schedule: ScheduleOptions = Field(
        default_factory=ScheduleOptions, description=ScheduleOptions.__doc__ or ""
    )


class SyncOptions(Section):
    """When workers get new weights, and how old a sample may be."""

    every_updates: int = Field(default=1, ge=1, description="Updates between two publications of weights.")
    max_staleness: int = Field(
        default=1,
        ge=0,
        description="Bound on a trained token's age (policy versions); 0 waits for every update.",
    )
    on_stale: Literal["wait", "reissue"] = Field(
        default="wait",
        description="`wait`: batches in draw order, no bias; `reissue`: batches of what is ready, groups too "
        "old are generated again; faster with long tails, biased towards short answers.",
    )


class CheckpointOptions(Section):
    """Snapshots that a resumed run starts from."""

    every_updates: int = Field(
        default=10, ge=1, description="Updates between two checkpoints; the last update always has one."
    )
    keep: int = Field(
        default=2, ge=1, description="Committed checkpoints kept; 2, so that a damaged one costs only time."
    )


class GroupsOptions(Section):
    """The stored groups: what a redo trains on."""

    keep: Literal["covered", "all"] = Field(
        default="covered",
        description="`covered`: a group file goes once every kept checkpoint covers its update; `all`: none "
        "goes, so that the whole run can be executed again.",
    )


class EvalOptions(Section):
    """Held-out rows, answered now and then."""

    every_updates: int | None = Field(
        default=None,
        ge=1,
        description="Updates between two evaluations, at the next publication; unset: none at all.",
    )
    size: int = Field(default=128, ge=1, le=100_000, description="Rows of one evaluation (prompts).")
    source: str | None = Field(
        default=None,
        min_length=1,
        description="Like `data.source`; unset: rows of the same generated task from another seed.",
    )
    temperature: float = Field(
        default=0.0, ge=0, description="Sampling temperature of evaluation; 0 is greedy."
    )


class MetricsOptions(Section):
    """Where metrics go; they are a projection of the log and can be made again from it."""

    jsonl: bool = Field(
        default=True,
        description="Write metrics.jsonl into the run's folder: a row an update, and a row an evaluation.",
    )
    tensorboard: bool | None = Field(
        default=None, description="Write TensorBoard files; unset: if it is installed."
    )


class ClusterOptions(Section):
    """The Ray cluster that workers and ranks live in."""

    address: str | None = Field(
        default=None,
        min_length=1,
        description="A Ray cluster to join; unset: a local one is started and ended.",
    )
    slots: int | None = Field(
        default=None,
        ge=1,
        description="Workers and ranks that a local cluster can hold; unset: max(8, 4 per core).",
    )
    start_seconds: float = Field(default=120.0, gt=0, description="Bound on bringing the parts up (seconds).")
    reply_seconds: float = Field(
        default=600.0, gt=0, description="Bound on every wait for a part's answer (seconds)."
    )


class PreemptOptions(Section):
    """What happens when the run is asked to stop."""

    grace_seconds: float = Field(
        default=30.0, gt=0, description="Time for a last checkpoint and an orderly end (seconds)."
    )


class StorageOptions(Section):
    """Where group files and checkpoints go."""

    url: str | None = Field(
        default=None,
        min_length=1,
        description="An fsspec URL that every process reaches; unset: the run's folder.",
    )


class Config(Section):
    """A run's whole configuration."""

    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the draw order, of sampling and of generated tasks."
    )
    data: DataOptions
    reward: RewardOptions = Field(default_factory=RewardOptions)
    model: ModelOptions
    batch: BatchOptions = Field(default_factory=BatchOptions)
    rollout: RolloutOptions = Field(default_factory=RolloutOptions)
    learner: LearnerOptions = Field(default_factory=LearnerOptions)
    algorithm: AlgorithmOptions = Field(default_factory=AlgorithmOptions)
    optim: OptimOptions = Field(default_factory=OptimOptions)
    sync: SyncOptions = Field(default_factory=SyncOptions)
    checkpoint: CheckpointOptions = Field(default_factory=CheckpointOptions)
    groups: GroupsOptions = Field(default_factory=GroupsOptions)
    eval: EvalOptions = Field(default_factory=EvalOptions)
    metrics: MetricsOptions = Field(default_factory=MetricsOptions)
    cluster: ClusterOptions = Field(default_factory=ClusterOptions)
    preempt: PreemptOptions = Field(default_factory=PreemptOptions)
    storage: StorageOptions = Field(default_factory=StorageOptions)

    _written: dict[str, WrittenPath] = PrivateAttr(default_factory=dict)
    # How paths were written before they were made absolute. For messages only: no part of what a config is.

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def written(self, key: str) -> WrittenPath | None:
        """How one of PATHS was written, where that is known: not in a config out of a log."""
        return self._written.get(key)

    def resolved(self) -> dict[str, Any]:
        """Plain nested JSON values, every key present: what the log's first event holds."""
        return self.model_dump(mode="json")

    @classmethod
    def from_resolved(cls, resolved: dict[str, Any]) -> Config:
        """The config of a run, from its log. Raises pydantic's ValidationError."""
        return cls.model_validate(resolved)


FREE_FORM = frozenset({"data.options"})
"""Keys whose value is a table of the user's own names."""

EXCLUSIVE = (("optim.schedule.warmup_steps", "optim.schedule.warmup_ratio"),)
"""Keys of which only one can hold; `--set` on one takes the other's place."""

PATHS = frozenset({"data.source", "eval.source", "model.path"})
"""Keys that may hold a path."""

OBJECT = "object:"
"""What a source begins with whose rows the embedding program passes."""

_MAY_CHANGE = frozenset(
    {
        "rollout.workers",
        "rollout.max_concurrent",
        "rollout.max_attempts",
        "rollout.gpus_per_worker",
        "rollout.threads",
        "learner.ranks",
        "learner.gpus_per_rank",
        "learner.micro_batch_tokens",
        "learner.threads",
        "reward.timeout_seconds",
        "checkpoint.",
        "metrics.",
        "cluster.",
        "preempt.",
    }
)
_FIXED_IF_DETERMINISTIC = frozenset({"rollout.max_concurrent", "rollout.threads"})


def may_change(key: str, *, deterministic: bool) -> bool:
    """Whether a run may go on with another value: it does not touch its accounting or numbers."""
    if deterministic and key in _FIXED_IF_DETERMINISTIC:
        return False
    return key in _MAY_CHANGE or f"{key.partition('.')[0]}." in _MAY_CHANGE
