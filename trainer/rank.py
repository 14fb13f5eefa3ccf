"""One learner rank: it folds the log's rows, and executes updates as the fold says.

Owns the model, the optimizer and the policy's position on one rank. Plain class, no Ray: whatever runs it
makes the same calls on every rank, as most of them are collective. Invariants: what is trained, with which
settings and at which place in the schedule comes from the folded rows alone; an update is executed only if
the log holds it and the rank holds the weights of the one before; all ranks fold to the same state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import _foreach_mul_ as foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
from torch import _foreach_norm as foreach_norm  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..rollout.protocols import Group, Published
from ..statemachine.errors import BudgetRefused, CheckpointUnusable, RunFailedError
from ..statemachine.events import CheckpointCommitted, Number, OptimizerStep, number
from ..statemachine.log import EventRow
from ..statemachine.state import RunState, fold, update_shape
from .checkpoints import Checkpoints, ManifestFile, SnapshotBegun
from .execution import execution_of, make_deterministic
from .losses import policy_loss
from .microbatches import MicroBatch, build, make_plan, read_groups, tokens_in
from .optimizer import ScheduledAdamW
from .policy import Policy, load_policy, shard_policy
from .protocols import LearnerReady, UpdateResult
from .rankgroup import RankGroup, RankPlace
from .snapshots import begin_snapshot, load_snapshot, make_stager, written_by
from .weights import RawTensor, WeightsDigest, digest_of, pack, raw

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class _Minibatch:
    """One optimizer step's share of this rank."""

    micro_batches: list[MicroBatch]
    tokens: int  # response tokens of the global minibatch


@dataclass(slots=True)
class _Totals:
    """What an update adds up over its optimizer steps, passes included."""

    tokens: int = 0
    clipped: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    ratio_deviation: float = 0.0

    def metrics(self) -> dict[str, Number]:
        """Means over trained tokens; nan where there was none."""
        tokens = self.tokens or math.nan
        return {
            "policy/ratio_clip_frac": number(self.clipped / tokens),
            "policy/kl_rollout_learner": number(self.kl / tokens),
            "policy/entropy": number(self.entropy / tokens),
            "policy/ratio_deviation_max": number(self.ratio_deviation),
        }


class LearnerRank:
    """See the module. Raises BudgetRefused where the rows hold no budget, ModelRefused."""

    def __init__(self, place: RankPlace, rows: Sequence[EventRow], store: Any = None) -> None:
        self._state: RunState = fold(rows)
        config = self._state.config
        if self._state.budget is None:
            raise BudgetRefused(
                f"the log's {self._state.seq} events hold no BudgetResolved: a learner is built from a "
                "committed budget; resolve it first"
            )
        self._learner, self._algorithm = config["learner"], config["algorithm"]
        self._device = torch.device("cuda" if self._learner["gpus_per_rank"] > 0 else "cpu")
        make_deterministic(int(self._learner["threads"]), self._device)
        self._group = RankGroup(place, self._device, store)
        self._policy: Policy
        self._root: FSDPModule
        self._optimizer: ScheduledAdamW
        self._snapshot: tuple[str, Callable[[], None]] | None = None
        self._stager = make_stager(self._device)
        try:
            digests = self._group.gather_texts(self._state.digest())
            if len(set(digests)) > 1:
                raise RunFailedError(f"learner ranks folded the log to different states: {digests}")
            self._build()
        except BaseException:
            self._group.leave()
            raise

    def _build(self) -> None:
        """Model and optimizer as they are before the first update."""
        config, learner = self._state.config, self._learner
        policy = load_policy(
            config["model"]["path"], activation_checkpointing=learner["activation_checkpointing"]
        ).to(self._device)
        self._policy = policy
        self._root = shard_policy(policy, self._group.mesh, _DTYPES[learner["compute_dtype"]])
        optim = config["optim"]
        self._optimizer = ScheduledAdamW(
            list(policy.named_weights()),
            self._state.budget,
            betas=optim["betas"],
            eps=optim["eps"],
            weight_decay=optim["weight_decay"],
        )
        self._max_grad_norm = float(optim["max_grad_norm"])
        self._update = 0  # the update whose weights this rank holds
        self._digested: tuple[int, str] | None = None  # update, digest of its weights

    def ready(self) -> LearnerReady:
        """What the ranks agree on. Collective."""
        own = execution_of(self._learner, self._device)
        lines = self._group.gather_texts("\n".join(own.values()))
        columns = zip(*(line.split("\n") for line in lines), strict=True)
        merged = {name: " | ".join(sorted(set(column))) for name, column in zip(own, columns, strict=True)}
        return LearnerReady(
            ranks=self._group.ranks,
            fingerprint={"ranks": str(self._group.ranks), **merged},
            state_digest=self._state.digest(),
        )

    # -- updates --------------------------------------------------------------------------------------

    def update(self, update: int, groups: Sequence[Group], rows: Sequence[EventRow]) -> UpdateResult:
        """Execute one update. Collective. Raises RunFailedError if it is not the log's, or not the next."""
        torch.set_num_threads(int(self._learner["threads"]))  # the setting is a thread's own
        started = time.perf_counter()
        fold(rows, self._state)
        self._refuse_another(update, groups)
        total = self._state.total
        minibatches: list[_Minibatch] = []
        begin = 0
        for prompts in update_shape(total, update):
            minibatches.append(self._prepare(groups[begin : begin + prompts]))
            begin += prompts
        prepared = time.perf_counter()
        self._update = -1  # in doubt until all of it is done
        totals = _Totals()
        optimizer_step = (update - 1) * total.minibatches * total.passes
        steps: list[OptimizerStep] = []
        for _ in range(total.passes):
            for minibatch in minibatches:
                steps.append(self._step(optimizer_step, minibatch, totals))
                optimizer_step += 1
        self._update = update
        ended = time.perf_counter()
        return UpdateResult(
            update=update,
            steps=steps,
            metrics=totals.metrics(),
            seconds={"learner_prepare": prepared - started, "learner_steps": ended - prepared},
        )

    def _refuse_another(self, update: int, groups: Sequence[Group]) -> None:
        state = self._state
        if update != self._update + 1:
            raise RunFailedError(
                f"update {update} was asked of a learner that holds update {self._update}", update=update
            )
        record = state.records.get(update)
        if record is not None:
            recorded = record.event.groups
        elif state.batch is not None and state.batch.update == update == state.updates + 1:
            recorded = state.batch.groups
        else:
            raise RunFailedError(
                f"the log's {state.seq} events hold no batch of update {update}", update=update
            )
        given = [(group.prompt_index, group.attempt) for group in groups]
        if given != [tuple(group) for group in recorded]:
            raise RunFailedError(
                f"update {update} was handed groups {given}, the log says {recorded}", update=update
            )

    def _prepare(self, groups: Sequence[Group]) -> _Minibatch:
        trained = read_groups(
            groups, scale=self._algorithm["scale"], mask_truncated=self._algorithm["mask_truncated"]
        )
        plan = make_plan(
            trained,
            ranks=self._group.ranks,
            micro_batch_tokens=self._learner["micro_batch_tokens"],
            hidden=self._policy.hidden,
            share_prompts=self._device.type == "cpu",  # flash attention on GPUs takes no mask
        )
        own = plan[self._group.rank]
        return _Minibatch([build(trained, rows).to(self._device) for rows in own], tokens_in(trained))

    def _step(self, optimizer_step: int, minibatch: _Minibatch, totals: _Totals) -> OptimizerStep:
        rate = self._optimizer.set_rate(optimizer_step)
        if minibatch.tokens == 0:
            return _skipped(optimizer_step, rate, 0.0, 0.0, 0, "no_tokens")
        loss, norm = self._gradient(minibatch, totals)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._optimizer.clear()
            return _skipped(optimizer_step, rate, loss, norm, minibatch.tokens, "not_finite")
        scale = self._max_grad_norm / (norm + 1e-6)
        if scale < 1.0:
            foreach_mul_(self._gradients(), scale)
        self._optimizer.apply()
        self._optimizer.clear()
        return OptimizerStep(
            optimizer_step=optimizer_step,
            learning_rate=rate,
            loss=loss,
            grad_norm=norm,
            tokens=minibatch.tokens,
            applied=True,
        )

    def _gradient(self, minibatch: _Minibatch, totals: _Totals) -> tuple[float, float]:
        """Gradients of the global minibatch, summed over ranks; its loss and its gradient's norm."""
        sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        deviation = torch.zeros((), dtype=torch.float64, device=self._device)
        last = len(minibatch.micro_batches) - 1
        for place, batch in enumerate(minibatch.micro_batches):
            self._root.set_requires_gradient_sync(place == last)
            logprobs, entropies = self._policy(batch)
            if batch.empty:
                loss = logprobs.sum() * 0.0
            else:
                loss, tokens = policy_loss(
                    logprobs,
                    entropies,
                    batch.rollout_logprobs,
                    batch.advantages,
                    clip_low=self._algorithm["clip_low"],
                    clip_high=self._algorithm["clip_high"],
                    minibatch_tokens=minibatch.tokens,
                )
                sums += torch.stack([tokens.loss, tokens.clipped, tokens.kl, tokens.entropy])
                deviation = torch.maximum(deviation, tokens.ratio_deviation)
            loss.backward()
        with torch.no_grad():
            squares = torch.stack(foreach_norm(self._gradients())).double().square().sum()
        own = torch.cat([sums, torch.stack([squares, deviation])]).tolist()
        by_rank = self._group.gather_numbers(own)
        loss, clipped, kl, entropy, squares, _ = (sum(column) for column in zip(*by_rank, strict=True))
        totals.tokens += minibatch.tokens
        totals.clipped += clipped
        totals.kl += kl
        totals.entropy += entropy
        totals.ratio_deviation = max(totals.ratio_deviation, *(numbers[-1] for numbers in by_rank))
        return loss, math.sqrt(squares)

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's shards of the gradients."""
        return [_local(parameter.grad) for parameter in self._optimizer.parameters]

    # -- weights --------------------------------------------------------------------------------------

    def gather(self, version: int) -> Published | None:
        """The current weights as a policy version; only rank 0 returns them. Collective."""
        tensors = {name: tensor for name, tensor in self._whole() if self._group.rank == 0}
        if self._group.rank != 0:
            return None
        digest = digest_of(tensors)
        self._digested = (self._update, digest)
        return Published(version=version, update=self._update, digest=digest, payload=pack(tensors))

    def _whole(self) -> Iterator[tuple[str, RawTensor]]:
        """Each parameter gathered, one at a time, in order of name."""
        with torch.no_grad():
            for name, parameter in sorted(self._policy.named_weights()):
                if isinstance(parameter, DTensor):  # one rank holds all of it: no copy then
                    whole = parameter.to_local() if self._group.ranks == 1 else parameter.full_tensor()
                else:
                    whole = parameter
                yield name, raw(whole)

    def _weights_digest(self) -> str:
        """Of the current weights, on rank 0; without holding all of them. Collective."""
        known = self._group.gather_texts(str(self._digested and self._digested[0] == self._update))
        if known[0] == "True":
            return self._digested[1] if self._digested else ""
        digest = WeightsDigest()
        for name, tensor in self._whole():
            digest.add(name, tensor)
        self._digested = (self._update, digest.hexdigest())
        return digest.hexdigest()

    # -- checkpoints ----------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, torch.Tensor]:
        weights = {f"weights.{name}": parameter.detach() for name, parameter in self._policy.named_weights()}
        return {**weights, **{f"optimizer.{name}": t for name, t in self._optimizer.state().items()}}

    def begin_save(self, storage: str, path: str) -> SnapshotBegun:
        """Take a snapshot for the folder at `path`, which is there and empty. Collective."""
        self._holds_an_update()
        if self._snapshot is not None:
            self._snapshot[1]()  # written, or its memory may not be used again
        checkpoints = Checkpoints(storage)
        digest = self._weights_digest()  # before the writing begins, which would take turns with it
        wait = begin_snapshot(checkpoints, path, self._tensors(), self._group.for_files, self._stager)
        self._snapshot = (path, wait)
        total = self._state.total
        return SnapshotBegun(
            update=self._update,
            optimizer_steps=self._update * total.minibatches * total.passes,
            weights_digest=digest,
        )

    def finish_save(self, storage: str, path: str) -> list[ManifestFile]:
        """Wait until this rank's files are durable, and describe them. May be called from another thread."""
        snapshot = self._snapshot
        if snapshot is None or snapshot[0] != path:
            raise RunFailedError(f"no checkpoint is under way at {path}", path=path)
        snapshot[1]()
        return written_by(Checkpoints(storage), path, self._group.rank)

    def load(self, storage: str, committed: CheckpointCommitted) -> None:
        """Take over a committed checkpoint. Collective; raises CheckpointUnusable on all ranks alike."""
        checkpoints = Checkpoints(storage)
        self._all_or_none(lambda: self._verify(checkpoints, committed))
        self._update, self._digested = -1, None
        try:
            tensors = self._tensors()
            self._all_or_none(lambda: self._read(checkpoints, committed, tensors))
            self._optimizer.load({name: tensors[f"optimizer.{name}"] for name in self._optimizer.state()})
            self._update = committed.update
            digest = self._weights_digest()
            self._all_or_none(lambda: _refuse_weights(self._group.rank, committed, digest))
        except CheckpointUnusable:
            self._build()  # what was half loaded is nobody's weights
            raise

    def _verify(self, checkpoints: Checkpoints, committed: CheckpointCommitted) -> None:
        """The manifest, and this rank's share of the files."""
        files = checkpoints.manifest(committed).files
        checkpoints.verify(committed.path, files[self._group.rank :: self._group.ranks])

    def _read(
        self, checkpoints: Checkpoints, committed: CheckpointCommitted, tensors: dict[str, torch.Tensor]
    ) -> None:
        try:
            load_snapshot(checkpoints, committed.path, tensors, self._group.for_files)
        except Exception as error:  # DCP raises its own on every rank, whatever went wrong on one
            raise CheckpointUnusable(
                f"checkpoint {committed.path} cannot be loaded: {error!r}", path=committed.path
            ) from error

    def _all_or_none(self, work: Callable[[], None]) -> None:
        """Do it on all ranks; where it failed on one, raise its CheckpointUnusable on all."""
        failed = ""
        try:
            work()
        except CheckpointUnusable as error:
            failed = f"{error.facts.get('path', '')}\n{error}"
        for text in filter(None, self._group.gather_texts(failed)):
            path, message = text.split("\n", 1)
            raise CheckpointUnusable(message, path=path)

    def _holds_an_update(self) -> None:
        if self._update < 1:
            raise RunFailedError(f"the learner holds update {self._update}: there is nothing to save")

    def leave(self) -> None:
        """Leave the group; the last call."""
        self._group.leave()


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a parameter took no part in the loss"
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _refuse_weights(rank: int, committed: CheckpointCommitted, digest: str) -> None:
    if rank == 0 and digest != committed.weights_digest:
        raise CheckpointUnusable(
            f"checkpoint {committed.path} loads to weights {digest}, not {committed.weights_digest}",
            path=committed.path,
        )


def _skipped(
    optimizer_step: int, rate: float, loss: float, norm: float, tokens: int, because: str
) -> OptimizerStep:
    return OptimizerStep(
        optimizer_step=optimizer_step,
        learning_rate=rate,
        loss=number(loss),
        grad_norm=number(norm),
        tokens=tokens,
        applied=False,
        skipped_because=because,
    )
