"""Everything that is settled before a run starts: data, model, budget, and all that can be refused by then.

Owns no state and starts nothing; `plan` prints what `prepare` gives, and a run starts from the same. Neither
torch nor Ray is imported. The invariant: what `prepare` returns can give the budget's optimizer steps as far
as config, data and model folder can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from ..rollout.architecture import Architecture, read_architecture
from ..rollout.data import LoadedData, load_eval_rows, load_rows
from ..rollout.protocols import RewardFunction
from ..rollout.rewards import code_digest, resolve_reward
from ..rollout.tokens import Tokenizer, load_tokenizer
from ..rollout.weightfiles import weights_digest
from ..statemachine.budget import BudgetInputs, resolve_budget, schedule_of
from ..statemachine.errors import ConfigChanged, ConfigRefused, DataRefused, ModelRefused, UserMistake
from ..statemachine.events import BudgetResolved, RunCreated
from ..statemachine.schedule import learning_rates
from .config import changed, missing_path, refuse_changes
from .options import PATHS, Config
from .slots import local_slots

RATES_SHOWN = 24
"""Learning rates that `plan` prints as text; with --json it prints all."""

SOFTWARE = ("surefoot", "torch", "transformers", "ray", "numpy", "tokenizers", "reasoning-gym")
"""Packages whose versions can change a number of the run."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Prepared:
    """A config whose every promise has been looked at."""

    config: Config
    tokenizer: Tokenizer
    architecture: Architecture
    reward: RewardFunction
    data: LoadedData
    eval_data: LoadedData | None  # held-out rows; None: evaluation is off
    budget: BudgetResolved
    digests: dict[str, str]  # data, tokenizer, weights, and eval where there is one
    objects: dict[str, str]  # what was passed as Python objects: role -> name
    warnings: list[str]


def prepare(config: Config, rows: Rows | None = None, reward: Callable[..., Any] | None = None) -> Prepared:
    """Load and check all of it; `rows` and `reward` are Python objects that take the config's place.

    Raises UserMistake's children: DataRefused, ModelRefused, ConfigRefused, BudgetRefused.
    """
    _refuse_missing(config, data=rows is None)
    _refuse_storage(config)
    architecture = read_architecture(config.model.path)
    tokenizer = load_tokenizer(config.model.path)
    if tokenizer.vocab_size > architecture.vocabulary:
        raise ModelRefused(
            f"{config.model.path}: the tokenizer has {tokenizer.vocab_size} ids and the model's vocabulary "
            f"is {architecture.vocabulary}: they do not belong together; copy both from one model"
        )
    scorer = resolve_reward(
        reward if reward is not None else config.reward.function,
        config.data.source if rows is None else None,
        dict(config.data.options),
    )
    needs_answer = reward is None and config.reward.function is None
    shared: dict[str, Any] = {
        "source": config.data.source if rows is None else rows,
        "options": config.data.options,
        "tokenizer": tokenizer,
        "max_new_tokens": config.rollout.max_new_tokens,
        "seed": config.seed,
        "max_prompt_tokens": config.data.max_prompt_tokens,
        "template": config.data.template,
        "needs_answer": needs_answer,
    }
    data = load_rows(size=config.data.size, **shared)
    budget = resolve_budget(budget_inputs(config, len(data.rows)))
    eval_data = None
    if config.eval.every_updates is not None:
        eval_data = load_eval_rows(
            train=data.rows, eval_source=config.eval.source, size=config.eval.size, **shared
        )
    _refuse_long_rows(config, data)
    digests = {
        "data": data.digest,
        "tokenizer": tokenizer.digest(),
        "weights": weights_digest(config.model.path),
    }
    if eval_data is not None:
        digests["eval"] = eval_data.digest
    if not needs_answer and (code := code_digest(scorer)) is not None:
        digests["reward"] = code
    objects: dict[str, str] = {}
    if rows is not None:
        objects["rows"] = config.data.source
    if reward is not None:
        objects["reward"] = object_name(reward)
    return Prepared(
        config=config,
        tokenizer=tokenizer,
        architecture=architecture,
        reward=scorer,
        data=data,
        eval_data=eval_data,
        budget=budget,
        digests=digests,
        objects=objects,
        warnings=list(_warnings(config, budget, eval_data)),
    )


def budget_inputs(config: Config, data_len: int) -> BudgetInputs:
    """What the budget is made of: the config's keys, and the length of the data after filtering."""
    schedule = config.optim.schedule
    return BudgetInputs(
        data_len=data_len,
        epochs=config.data.epochs,
        max_prompts=config.data.max_prompts,
        batch_prompts=config.batch.prompts,
        minibatches=config.batch.minibatches,
        passes=config.batch.passes,
        every_updates=config.sync.every_updates,
        tail=config.batch.tail,
        max_optimizer_steps=config.optim.max_optimizer_steps,
        learning_rate=config.optim.lr,
        schedule_kind=schedule.kind,
        warmup_steps=schedule.warmup_steps,
        warmup_ratio=schedule.warmup_ratio,
        min_ratio=schedule.min_ratio,
        horizon=schedule.horizon,
    )


def object_name(value: Any) -> str:
    """What a Python object is recorded as."""
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}:{kind.__qualname__}"


def first_event(prepared: Prepared) -> RunCreated:
    """What the run is, as its first event says it."""
    return RunCreated(
        config=prepared.config.resolved(),
        digests=prepared.digests,
        data_len=len(prepared.data.rows),
        rows_filtered=prepared.data.filtered,
        objects=prepared.objects,
        software={name: found for name in SOFTWARE if (found := _version(name))},
    )


def config_changes(run: str, created: RunCreated, prepared: Prepared) -> dict[str, list[Any]]:
    """What differs from the run's config and may: dotted key -> [old, new].

    `created` is the fold's: with the changes of every incarnation so far. A path may change as long as what
    lies there is the same. Raises ConfigChanged with both values.
    """
    for role in sorted(created.objects.keys() | prepared.objects.keys()):
        old, new = created.objects.get(role), prepared.objects.get(role)
        if old != new:
            raise ConfigChanged(
                f"{role}: {_passed(new)}, but when run {run!r} was started {_passed(old)}: a run goes on "
                "only with the objects that it began with; pass the same, or start another run",
                run=run,
                keys=[role],
            )
    forbidden, allowed = changed(created.config, prepared.config.resolved())
    named = sorted((created.digests.keys() | prepared.digests.keys()) - {"reward"})
    same = all(created.digests.get(name) == prepared.digests.get(name) for name in named)
    moved = {key: pair for key, pair in forbidden.items() if key in PATHS and same and None not in pair}
    refuse_changes(run, {key: pair for key, pair in forbidden.items() if key not in moved})
    for name in named:
        old, new = created.digests.get(name), prepared.digests.get(name)
        if old != new:
            raise ConfigChanged(
                f"the digest of the {name} is {new}, but run {run!r} was started with {old}: what the config "
                "names was changed since; put it back, or start another run with --new",
                run=run,
                keys=[name],
            )
    return {key: list(pair) for key, pair in {**allowed, **moved}.items()}


def digest_changes(created: RunCreated, prepared: Prepared) -> dict[str, list[str]]:
    """Which digests differ and may: name -> [old, new]. It is the code of the reward alone, as a fault in it
    is put right; `config_changes` refuses the others."""
    old, new = (digests.get("reward") for digests in (created.digests, prepared.digests))
    return {} if old is None or new is None or old == new else {"reward": [old, new]}


def plan_dict(prepared: Prepared) -> dict[str, Any]:
    """The plan as JSON values: every figure of the budget, and the learning rate of every optimizer step."""
    return {
        **msgspec.to_builtins(prepared.budget),
        "rows_filtered": prepared.data.filtered,
        "eval_rows": len(prepared.eval_data.rows) if prepared.eval_data else 0,
        "learning_rates": rates_of(prepared.budget, range(prepared.budget.optimizer_steps_total)),
        "digests": prepared.digests,
        "warnings": prepared.warnings,
    }


def rates_of(budget: BudgetResolved, optimizer_steps: Iterable[int]) -> list[float]:
    """The learning rates of these optimizer steps of the run."""
    return learning_rates(budget.learning_rate, schedule_of(budget), optimizer_steps)


def plan_lines(prepared: Prepared) -> Iterator[str]:
    """The plan for people: the derivation line by line, then learning rates, then warnings."""
    budget = prepared.budget
    yield f"data: {prepared.config.data.source}, {budget.data_len} rows"
    if prepared.data.filtered:
        yield f"taken out: {prepared.data.filtered} rows longer than data.max_prompt_tokens"
    if prepared.eval_data is not None:
        yield f"held out: {len(prepared.eval_data.rows)} rows"
    yield from budget.derivation
    yield (
        f"learning rate: {budget.learning_rate:g}, {budget.schedule_kind}, over optimizer steps 0 to "
        f"{budget.optimizer_steps_total - 1}, counted from 0 (train's display counts those that are done)"
    )
    shown = shown_steps(budget.optimizer_steps_total, budget.warmup_steps)
    for optimizer_step, rate in zip(shown, rates_of(budget, shown), strict=True):
        yield f"  optimizer step {optimizer_step:>6}  {rate:.6e}"
    for warning in prepared.warnings:
        yield f"warning: {warning}"


def shown_steps(optimizer_steps: int, warmup_steps: int) -> list[int]:
    """All optimizer steps if they are few; else some at even distances, the peak and the last among them."""
    if optimizer_steps <= RATES_SHOWN:
        return list(range(optimizer_steps))
    even = {round(i * (optimizer_steps - 1) / (RATES_SHOWN - 1)) for i in range(RATES_SHOWN)}
    return sorted(even | {min(warmup_steps, optimizer_steps - 1)})


def _passed(name: str | None) -> str:
    return "none was passed" if name is None else f"{name} was passed"


def _refuse_missing(config: Config, *, data: bool) -> None:
    """Paths that lead nowhere, in the words of the config; what lies there is looked at later."""
    read: list[tuple[str, type[UserMistake]]] = [("model.path", ModelRefused)]
    if data:
        read.append(("data.source", DataRefused))
    if config.eval.every_updates is not None:
        read.append(("eval.source", DataRefused))
    for key, refused in read:
        said = missing_path(config, key)
        if said is not None:
            what = "a folder written by save_pretrained" if refused is ModelRefused else "another file"
            raise refused(f"{said}; put it there, or name {what}")


def _refuse_storage(config: Config) -> None:
    """A file system that is none, or whose package is not there, would be met only by the run's workers."""
    from fsspec import get_filesystem_class
    from fsspec.core import split_protocol

    url = config.storage.url
    protocol = None if url is None else split_protocol(url)[0]
    if url is None or protocol is None or "::" in url:  # a folder; or a chain, which is fsspec's to read
        return
    try:
        get_filesystem_class(protocol)
    except (ValueError, ImportError) as error:
        raise ConfigRefused(
            f"storage.url = {url!r}: {' '.join(str(error).split())}; name a folder or a URL that fsspec "
            "opens here"
        ) from None


def _refuse_long_rows(config: Config, data: LoadedData) -> None:
    """A sequence is never cut, so the longest possible one has to fit a micro-batch."""
    longest = max(len(row.prompt_ids) for row in data.rows) + config.rollout.max_new_tokens
    if longest > config.learner.micro_batch_tokens:
        raise ConfigRefused(
            f"learner.micro_batch_tokens = {config.learner.micro_batch_tokens}: a prompt and "
            f"rollout.max_new_tokens come to {longest} tokens, and a micro-batch holds whole sequences; "
            f"raise it to {longest} or more"
        )


def _warnings(config: Config, budget: BudgetResolved, eval_data: LoadedData | None) -> Iterator[str]:
    if eval_data is not None and len(eval_data.rows) < config.eval.size:
        yield (
            f"eval.size = {config.eval.size}, and eval.source has {len(eval_data.rows)} rows whose prompt is "
            "not in training: an evaluation is of those"
        )
    workers, ranks = config.rollout.workers, config.learner.ranks
    slots = local_slots(config.cluster.slots)
    if config.cluster.address is None and workers + ranks > slots:
        yield (
            f"rollout.workers = {workers} and learner.ranks = {ranks} need {workers + ranks} slots, a local "
            f"Ray here has {slots}: train will refuse them; raise cluster.slots, or use fewer workers or "
            "ranks"
        )
    if config.algorithm.drop_no_spread and budget.prompts_unused == 0:
        yield (
            "algorithm.drop_no_spread is on and no prompts are to spare: groups that are dropped cannot be "
            f"replaced, so {budget.optimizer_steps_total} optimizer steps are an upper bound"
        )
    if config.rollout.deterministic and config.sync.max_staleness > 0:
        yield (
            f"rollout.deterministic is on and sync.max_staleness = {config.sync.max_staleness}: which "
            "version makes a token depends on timing; with 0 the run is a pure function of its config"
        )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
