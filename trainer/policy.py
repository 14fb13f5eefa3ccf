"""The policy as one module from token ids to token log-probabilities, and its sharding.

Owns the model of one rank. Invariants: the model is as in generation (no dropout, full attention, positions
from 0); parameters are float32 whatever the compute dtype; logits exist only where a response token is
predicted. The root of the sharding is the whole module, so that the output matrix and a tied embedding are
gathered and reduced once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from ..rollout.architecture import read_architecture
from ..statemachine.errors import ModelRefused
from .losses import token_logprobs
from .microbatches import MicroBatch

ATTENTION = "sdpa"
LOGITS_AT_ONCE = 1 << 26
"""Elements of a logits matrix; a larger one is computed in parts, again in the backward pass."""
ONE_UNIT_BYTES = 1 << 26
"""A model below this is gathered and reduced at once: a collective a layer would cost more than it hides."""


class Policy(nn.Module):
    """A causal language model that answers with the log-probabilities of given tokens."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.language_model = language_model
        self.vocabulary, self.hidden = self.head.weight.shape

    @property
    def decoder(self) -> nn.Module:
        """The model below the output matrix."""
        return self.get_submodule("language_model.model")

    @property
    def head(self) -> nn.Linear:
        """The output matrix: `vocabulary` rows, `hidden` columns."""
        return self.language_model.lm_head  # type: ignore[return-value]

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder's layers, in order."""
        return list(self.get_submodule("language_model.model.layers").children())

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter by the name transformers gives it; tied ones once."""
        for name, parameter in self.named_parameters():
            yield name.removeprefix("language_model."), parameter

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each token of the micro-batch, float32 `[tokens]`."""
        output = self.decoder(
            input_ids=batch.input_ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
        )
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, batch.select)
        part = max(1, LOGITS_AT_ONCE // self.vocabulary)
        if len(hidden) <= part:
            return self._answer(hidden, batch.ids, batch.temperatures)
        parts = [
            checkpoint(
                self._answer,
                hidden[start : start + part],
                batch.ids[start : start + part],
                batch.temperatures[start : start + part],
                use_reentrant=False,
            )
            for start in range(0, len(hidden), part)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _answer(
        self, hidden: torch.Tensor, ids: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(self.head(hidden), ids, temperatures)


def load_policy(folder: str | Path, *, activation_checkpointing: bool = False) -> Policy:
    """The policy of a model folder, in float32 on the CPU. Raises ModelRefused."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    architecture = read_architecture(folder)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=ATTENTION,
        local_files_only=True,
        output_loading_info=True,
    )
    model, found = loaded
    # transformers would train a weight that it did not find from random values.
    amiss = sorted([*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])])
    if amiss:
        raise ModelRefused(
            f"{folder} has no {amiss[0]} that fits its config.json: save the model with save_pretrained",
            path=str(folder),
            tensor=amiss[0],
        )
    policy = Policy(model.eval())
    assert {name for name, _ in policy.named_weights()} == set(architecture.parameter_shapes())
    if activation_checkpointing:
        with warnings.catch_warnings():  # its new name is not in every version that we run on
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in policy.layers:
            layer.training = True  # the layer alone: what is in it stays without dropout
    return policy


def shard_policy(
    policy: Policy, mesh: DeviceMesh, compute_dtype: torch.dtype, *, one_unit: bool | None = None
) -> FSDPModule:
    """Shard in place over the mesh, gradients summed over ranks in float32.

    `one_unit`: gather the whole model at once; unset: if it is small.
    """
    if one_unit is None:
        one_unit = sum(p.nbytes for p in policy.parameters()) < ONE_UNIT_BYTES
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype is torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    if not one_unit:
        for layer in policy.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
    root = fully_shard(policy, mesh=mesh, mp_policy=precision)
    for unit in policy.modules():
        if isinstance(unit, FSDPModule):
            # FSDP averages; the loss is divided by the global minibatch's tokens already: ranks add up.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    return root
