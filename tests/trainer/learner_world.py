"""What a learner is tested on: a tiny model folder, groups with real token arrays, and a log that fits.

The log is a `Scenario` whose config says what a learner reads from it, and whose updates carry the steps that
the learner reported. `RankProcesses` runs real ranks over gloo, each in a process of its own.
"""

from __future__ import annotations

import importlib
import multiprocessing
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from surefoot.rollout.packing import pack_f32, pack_i32
from surefoot.rollout.protocols import Group, Sample
from surefoot.statemachine.events import CheckpointCommitted, UpdateApplied
from surefoot.statemachine.log import EventRow
from surefoot.trainer.checkpoints import Checkpoints, Manifest
from surefoot.trainer.protocols import UpdateResult

from ..statemachine.scenario import Scenario

VOCABULARY = 24


def write_model(folder: Path, *, family: str = "llama", tied: bool = True, dtype: str = "float32") -> Path:
    """A model of some 20 thousand parameters with key-value heads shared by two, weights from a seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    config, kind = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[family]
    model = kind(
        config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            initializer_range=0.1,
        )
    )
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def make_group(
    prompt_index: int,
    lengths: Sequence[int],
    rewards: Sequence[float],
    *,
    attempt: int = 1,
    prompt: int = 5,
    temperature: float = 0.7,
    truncated: Sequence[bool] = (),
    seed: int = 0,
) -> Group:
    """A group of responses of these lengths; ids, and log-probabilities around those of chance, by seed."""
    draw = random.Random(f"{seed}/{prompt_index}/{attempt}")
    samples = [
        Sample(
            ids=pack_i32([draw.randrange(VOCABULARY) for _ in range(length)]),
            logprobs=pack_f32([draw.uniform(-4.2, -2.2) for _ in range(length)]),
            versions=pack_i32([0] * length),
            truncated=bool(truncated[place]) if truncated else False,
            text="",
            reward=reward,
            parts={},
        )
        for place, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    return Group(
        prompt_index=prompt_index,
        attempt=attempt,
        row_index=prompt_index,
        prompt_ids=pack_i32([draw.randrange(VOCABULARY) for _ in range(prompt)]),
        temperature=temperature,
        samples=samples,
    )


class LearnerScenario(Scenario):
    """A log whose first event has a learner's config; sections are overridden by keyword, as dicts."""

    def __init__(
        self,
        model: Path,
        *,
        learner: dict[str, Any] | None = None,
        algorithm: dict[str, Any] | None = None,
        optim: dict[str, Any] | None = None,
        learning_rate: float = 1e-2,
        **options: Any,
    ) -> None:
        self._sections: dict[str, dict[str, Any]] = {
            "model": {"path": str(model)},
            "learner": {
                "ranks": 1,
                "gpus_per_rank": 0.0,
                "micro_batch_tokens": 16384,
                "compute_dtype": "float32",
                "activation_checkpointing": False,
                "threads": 1,
            }
            | (learner or {}),
            "algorithm": {"scale": "group", "clip_low": 0.2, "clip_high": 0.2, "mask_truncated": False}
            | (algorithm or {}),
            "optim": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
            | (optim or {}),
        }
        self._handed = 0
        super().__init__(**({"minibatches": 1, "every_updates": 1, "learning_rate": learning_rate} | options))

    def config(self) -> dict[str, Any]:
        return super().config() | self._sections

    def batch_of(self, groups: Sequence[Group]) -> LearnerScenario:
        """Admit, store and begin the next update on these groups."""
        self.admit()
        self.store()
        self.began([(group.prompt_index, group.attempt) for group in groups])
        return self

    def applied_as(self, result: UpdateResult, *, publish: bool = True) -> LearnerScenario:
        """The update is committed with what the learner reported; then its publication."""
        self.applied()
        seq = len(self.entries) - 1
        incarnation, event = self.entries[seq]
        assert isinstance(event, UpdateApplied)
        self.entries[seq] = (incarnation, msgspec.structs.replace(event, steps=result.steps))
        if publish:
            self.publish()
        return self

    def new_rows(self) -> list[EventRow]:
        """The rows since the last call, as a driver hands them on."""
        rows = self.rows()[self._handed :]
        self._handed += len(rows)
        return rows


def train(
    ranks: RankProcesses,
    scenario: LearnerScenario,
    batches: Sequence[Sequence[Group]],
    *,
    after: Callable[[int], None] = lambda update: None,
) -> list[UpdateResult]:
    """Start ranks on a fresh log and let them execute these updates; `after` is called after each."""
    ranks.start(scenario.begin().new_rows())
    return go_on(ranks, scenario, batches, after=after)


def go_on(
    ranks: RankProcesses,
    scenario: LearnerScenario,
    batches: Sequence[Sequence[Group]],
    *,
    after: Callable[[int], None] = lambda update: None,
) -> list[UpdateResult]:
    """Execute the next updates of a run."""
    results: list[UpdateResult] = []
    for batch in batches:
        scenario.batch_of(batch)
        results.append(ranks.call("update", scenario.updates + 1, batch, scenario.new_rows())[0])
        scenario.applied_as(results[-1])
        after(scenario.updates)
    return results


def redo(ranks: RankProcesses, first: int, batches: Sequence[Sequence[Group]]) -> list[UpdateResult]:
    """Execute recorded updates again, from the checkpoint that was loaded."""
    return [ranks.call("update", update, batch, [])[0] for update, batch in enumerate(batches, start=first)]


def saved_by(ranks: RankProcesses, storage: str, path: str, *, served: Any = None) -> CheckpointCommitted:
    """Save what the ranks hold, as RayLearner does, and return the event that commits it."""
    Checkpoints(storage).make_folder(path)
    begun = ranks.call("begin_save", storage, path)[0]
    return finished_by(ranks, storage, path, begun, served=served)


def finished_by(
    ranks: RankProcesses, storage: str, path: str, begun: Any, *, served: Any = None
) -> CheckpointCommitted:
    """Wait for the files of a snapshot and write its manifest."""
    checkpoints = Checkpoints(storage)
    files = [file for own in ranks.call("finish_save", storage, path) for file in own]
    kept = None
    if served is not None:
        kept, file = checkpoints.add_served(path, served)
        files.append(file)
    manifest = Manifest(
        update=begun.update,
        optimizer_steps=begun.optimizer_steps,
        head_seq=1,
        head_hash="h",
        weights_digest=begun.weights_digest,
        ranks=ranks.ranks,
        served=kept,
        files=files,
    )
    digest, size = checkpoints.add_manifest(path, manifest)
    return CheckpointCommitted(
        update=begun.update,
        optimizer_steps=begun.optimizer_steps,
        policy_version=begun.update,
        path=path,
        manifest_digest=digest,
        weights_digest=begun.weights_digest,
        bytes=size,
        head_seq=1,
        head_hash="h",
    )


# -- ranks in processes ---------------------------------------------------------------------------------

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch._dynamo",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.auto.modeling_auto",
        "surefoot.trainer.rank",
    ]
)


def _rank_process(pipe: Any, rank: int, ranks: int) -> None:
    """Serve calls: "meet" and "start" make a new rank, "run" calls a function on it, the rest its methods."""
    import torch

    from surefoot.trainer.rank import LearnerRank
    from surefoot.trainer.rankgroup import RankPlace, open_store

    torch.set_num_threads(1)
    learner: Any = None
    store: Any = None
    while (call := pipe.recv()) is not None:
        method, arguments = call
        answer: Any = None
        try:
            if method == "meet":
                if learner is not None:
                    learner.leave()
                learner = None
                store = open_store("127.0.0.1", 60.0) if rank == 0 else None
                answer = store.port if store is not None else None
            elif method == "start":
                port, rows = arguments
                place = RankPlace(rank, ranks, "127.0.0.1", port, timeout_seconds=60.0, one_host=True)
                learner = LearnerRank(place, rows, store=store)
                answer = learner.ready()
            elif method == "run":
                answer = arguments[0](learner, *arguments[1:])
            else:
                answer = getattr(learner, method)(*arguments)
            pipe.send((answer, None))
        except Exception as error:
            pipe.send((None, error))


class RankProcesses:
    """Any number of learner ranks, called all at once; `with` ends them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_rank_process, args=(theirs, rank, ranks), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def start(self, rows: Sequence[EventRow], *, by_rank: Sequence[Any] = ()) -> list[Any]:
        """New ranks in the same processes, from these rows, or from rows of each rank's own."""
        port = self.call("meet")[0]
        return self.call_each("start", [(port, own) for own in by_rank or [rows] * self.ranks])

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function of this module returns when each rank is passed to it."""
        return self.call("run", function, *arguments)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Every rank's answer; raises the first error."""
        return self.call_each(method, [arguments] * self.ranks)

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same with arguments of each rank's own."""
        for pipe, own in zip(self._pipes, arguments, strict=True):
            pipe.send((method, own))
        answers = [pipe.recv() for pipe in self._pipes]
        for _, error in answers:
            if error is not None:
                raise error
        return [answer for answer, _ in answers]

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


# -- run on ranks ---------------------------------------------------------------------------------------


def set_in_module(_: Any, module: str, name: str, value: Any) -> None:
    """Set a module's constant in the rank's process."""
    setattr(importlib.import_module(module), name, value)


def register_small_disk(_: Any) -> None:
    """Make `smalldisk://` known in the rank's process."""
    importlib.import_module("tests.rollout.groups")


_layer_calls: list[int] = []


def count_layer_calls(learner: Any) -> None:
    """From here on, count how often each decoder layer of the rank's model is computed."""
    _layer_calls[:] = [0] * len(learner._policy.layers)

    def count(place: int) -> None:
        _layer_calls[place] += 1

    for place, layer in enumerate(learner._policy.layers):
        # In the layer, as it is what lies in it that is computed again.
        layer.mlp.register_forward_pre_hook(lambda *_, place=place: count(place))


def layer_calls(_: Any) -> list[int]:
    """By layer, since counting began."""
    return list(_layer_calls)
