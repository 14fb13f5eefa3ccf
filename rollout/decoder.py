"""The model: weights by transformers' names, and one forward pass over a key-value cache.

Owns the weights, in the form that is fastest to run. Invariants: logits equal transformers' for the same
weights and tokens; loading weights replaces them in place, all or none, and does not touch the cache.

Three things are arranged once, at loading, so that a step has few operations: queries, keys and values are
one matrix, and so are gate and up; the softmax scale is in the query weights; the two halves of a head,
which transformers rotates against each other, lie interleaved, so that a rotation is one product of complex
numbers. Scores do not notice the last: queries and keys are reordered alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ..statemachine.errors import ModelRefused
from .architecture import Architecture
from .attention import Attention, DecodeRows, KeyValueCache, PromptBlock


@dataclass(slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Decoder:
    """A decoder whose cache has room for `slots` rows of `length` tokens. Call it in inference mode."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        slots: int,
        length: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.architecture = architecture
        self.device = torch.device(device)
        self.dtype = dtype
        self.cache = KeyValueCache(architecture, slots, length, self.device, dtype)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), _frequencies(architecture))
        self._rotations = torch.polar(torch.ones_like(angles), angles).to(self.device)  # [length, pairs]
        self._eps = torch.full((1,), architecture.norm_eps, device=self.device)
        self._embedding: torch.Tensor | None = None
        self._head: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None
        self._layers: list[_Layer] = []

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take weights by transformers' names. Raises ModelRefused if they do not fit, and keeps the old."""
        architecture = self.architecture
        if architecture.tied and "model.embed_tokens.weight" not in tensors and "lm_head.weight" in tensors:
            tensors = {**tensors, "model.embed_tokens.weight": tensors["lm_head.weight"]}
        _check(architecture, tensors)
        self._embedding = self._place(self._embedding, tensors["model.embed_tokens.weight"])
        self._norm = self._place(self._norm, tensors["model.norm.weight"])
        head = self._embedding if architecture.tied else self._place(self._head, tensors["lm_head.weight"])
        self._head = head
        first = not self._layers
        for index in range(architecture.layers):
            layer = _arrange(architecture, tensors, index)
            held = None if first else self._layers[index]
            for name in _Layer.__slots__:
                tensor = getattr(layer, name)
                if tensor is not None:
                    setattr(layer, name, self._place(getattr(held, name, None), tensor))
            if first:
                self._layers.append(layer)

    def _place(self, held: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
        # In place where there is a place: memory is bounded, and addresses, which kernels may look at, stay.
        if held is None:
            held = torch.empty(tensor.shape, device=self.device, dtype=self.dtype)
        return held.copy_(tensor)

    def forward(self, rows: DecodeRows | None, block: PromptBlock | None) -> torch.Tensor:
        """Logits for the next token, fp32 [rows + new rows, vocabulary]: decoded rows first, then new ones.

        Writes keys and values of every token it takes in. One pass does both, so that the prompts of new
        samples cost no pass of their own while others are decoded.
        """
        count = 0 if rows is None else len(rows.tokens)
        tokens = [] if rows is None else [rows.tokens]
        positions = [] if rows is None else [rows.positions]
        last, width = None, 0
        if block is not None:
            padded, lengths = block.padded()
            prompts, width = padded.shape
            tokens.append(padded.reshape(-1))
            positions.append(np.tile(np.arange(width), prompts))
            last = np.concatenate([np.arange(count), count + np.arange(prompts) * width + lengths - 1])
        upload = self.cache.upload
        inputs = upload(np.stack([np.concatenate(tokens), np.concatenate(positions)]))
        attention = Attention(self.architecture, self.cache, rows, block, width)
        hidden = self._transform(inputs[0], inputs[1], attention)
        if last is not None:
            hidden = hidden[upload(last)]
        assert self._norm is not None and self._head is not None
        hidden = _rms_norm(hidden, self._norm, self._eps)
        logits = F.linear(hidden, self._head).float()
        if block is not None and len(block.owners) != len(block.prompts):
            logits = logits[upload(np.concatenate([np.arange(count), count + block.owners]))]
        return logits

    def _transform(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Every token through every layer; [tokens, hidden], before the last normalisation."""
        architecture, eps = self.architecture, self._eps
        turned = architecture.heads + architecture.kv_heads
        shape = (len(tokens), turned + architecture.kv_heads, architecture.head_dim)
        rotations = self._rotations[positions].unsqueeze(1)
        assert self._embedding is not None
        stream = F.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            heads = F.linear(_rms_norm(stream, layer.input_norm, eps), layer.qkv, layer.qkv_bias).view(shape)
            queries_and_keys = heads[:, :turned]
            if layer.head_norm is not None:
                queries_and_keys.copy_(_rms_norm(queries_and_keys, layer.head_norm, eps))
            _rotate(queries_and_keys, rotations)
            stream.add_(F.linear(attention(index, heads), layer.output, layer.output_bias))
            both = F.linear(_rms_norm(stream, layer.mlp_norm, eps), layer.gate_up, layer.gate_up_bias)
            gate, up = both.chunk(2, dim=-1)
            stream.add_(F.linear(F.silu(gate).mul_(up), layer.down, layer.down_bias))
        return stream


def _rms_norm(stream: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (Zhang and Sennrich, 2019)."""
    wide = stream.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, length, length, value=1 / wide.shape[-1]).rsqrt_()
    return (wide * scale).to(stream.dtype).mul_(weight)


def _rotate(heads: torch.Tensor, rotations: torch.Tensor) -> None:
    """Turn pairs [tokens, heads, head_dim] by unit complex numbers [tokens, 1, pairs], in place."""
    pairs = (*heads.shape[:2], -1, 2)
    if heads.dtype == torch.float32:
        torch.view_as_complex(heads.view(pairs)).mul_(rotations)
    else:
        turned = torch.view_as_complex(heads.float().view(pairs)).mul_(rotations)
        heads.copy_(torch.view_as_real(turned).flatten(-2))


def _frequencies(architecture: Architecture) -> torch.Tensor:
    """Radians per position of each pair of dimensions; fp32 throughout, as transformers has it.

    At a position of some ten thousand the last bit of a frequency is a visible angle. llama3 is Llama 3.1's
    scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended.
    """
    rope, size = architecture.rope, architecture.head_dim
    plain = 1.0 / (rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    if rope.kind == "default":
        return plain
    stretched = plain / rope.factor
    if rope.kind == "linear":
        return stretched
    turns = rope.original_positions * plain / (2 * torch.pi)  # over the original context
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * plain + (1 - keep) * stretched


def _check(architecture: Architecture, tensors: Mapping[str, torch.Tensor]) -> None:
    shapes = architecture.parameter_shapes()
    kind = f"a {architecture.family} model of this config"
    one_model = "config.json and the weights must be of one model"
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelRefused(
                f"the weights lack {name}, which {kind} has: {one_model}",
                name=name,
            )
        if tuple(tensors[name].shape) != shape:
            raise ModelRefused(
                f"{name} has shape {list(tensors[name].shape)}, the config says {list(shape)}: {one_model}",
                name=name,
            )
    for name in tensors:
        tied_again = architecture.tied and name == "lm_head.weight"
        if name not in shapes and not tied_again and not name.endswith("rotary_emb.inv_freq"):
            raise ModelRefused(
                f"the weights hold {name}, which {kind} has not: {one_model}",
                name=name,
            )


def _arrange(architecture: Architecture, tensors: Mapping[str, torch.Tensor], index: int) -> _Layer:
    """One layer's weights in fp32, in the form that the forward pass takes."""
    base, size = f"model.layers.{index}.", architecture.head_dim
    halves = torch.arange(size).view(2, size // 2).t().reshape(-1)  # 0, size/2, 1, size/2 + 1, ...
    scale = size**-0.5

    def get(name: str) -> torch.Tensor:
        return tensors[base + name].float()

    def interleave(name: str) -> torch.Tensor:
        tensor = get(name)
        return tensor.unflatten(0, (-1, size))[:, halves.to(tensor.device)].flatten(0, 1)

    def joined(kind: str) -> torch.Tensor:
        queries, keys = interleave(f"self_attn.q_proj.{kind}"), interleave(f"self_attn.k_proj.{kind}")
        # A norm would undo a scale that stands before it.
        queries = queries if architecture.head_norm else queries * scale
        return torch.cat((queries, keys, get(f"self_attn.v_proj.{kind}")))

    head_norm = None
    if architecture.head_norm:
        queries = (interleave("self_attn.q_norm.weight") * scale).expand(architecture.heads, size)
        keys = interleave("self_attn.k_norm.weight").expand(architecture.kv_heads, size)
        head_norm = torch.cat((queries, keys))
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return _Layer(
        input_norm=get("input_layernorm.weight"),
        qkv=joined("weight"),
        qkv_bias=joined("bias") if architecture.qkv_bias else None,
        head_norm=head_norm,
        output=get("self_attn.o_proj.weight"),
        output_bias=get("self_attn.o_proj.bias") if architecture.output_bias else None,
        mlp_norm=get("post_attention_layernorm.weight"),
        gate_up=torch.cat([get(f"{name}.weight") for name in gate_up]),
        gate_up_bias=torch.cat([get(f"{name}.bias") for name in gate_up]) if architecture.mlp_bias else None,
        down=get("mlp.down_proj.weight"),
        down_bias=get("mlp.down_proj.bias") if architecture.mlp_bias else None,
    )
