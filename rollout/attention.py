"""The key-value cache, and attention over it.

Owns the cached keys and values: `slots` rows of `length` positions. Invariant: a position of a row is read
only after it has been written for the sample that the row holds; what lies beyond a row's own length is
hidden by its position. Which sample is in which row is the engine's to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from .architecture import Architecture

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows 0..n-1 of the cache, each taking one token in."""

    tokens: Integers  # [rows]
    positions: Integers  # [rows]; where the token goes: the row holds this many already


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """Prompts, each computed once, for the rows from `first_row` on."""

    prompts: list[Integers]  # [prompt] each
    owners: Integers  # [new rows]; which of the prompts each new row begins with
    first_row: int

    def padded(self) -> tuple[Integers, Integers]:
        """Token ids [prompts, longest prompt], filled up with 0 behind, and lengths [prompts]."""
        lengths = np.array([len(prompt) for prompt in self.prompts])
        tokens = np.zeros((len(self.prompts), lengths.max()), dtype=np.int64)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        return tokens, lengths


class KeyValueCache:
    """Keys and values [layers, slots, kv_heads, length, head_dim]."""

    def __init__(
        self, architecture: Architecture, slots: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (architecture.layers, slots, architecture.kv_heads, length, architecture.head_dim)
        # Zeros, not empty: what a mask hides is multiplied by 0, and 0 times leftover nan is nan.
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.slots = torch.arange(slots, device=device)
        self.columns = torch.arange(length, device=device)
        # Per layer, one token's keys and values of all heads behind [slot, position].
        self.keys_by_token = self.keys.transpose(2, 3).unbind()
        self.values_by_token = self.values.transpose(2, 3).unbind()

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """The array where the cache is; on the CPU without a copy."""
        return torch.from_numpy(array).to(self.keys.device, non_blocking=True)

    def copy_rows(self, sources: Integers, targets: Integers, length: int) -> None:
        """Copy the first `length` positions of some rows to others; no row is both."""
        start, end = self.upload(sources), self.upload(targets)
        self.keys[:, end, :, :length] = self.keys[:, start, :, :length]
        self.values[:, end, :, :length] = self.values[:, start, :, :length]

    def clear(self) -> None:
        """Forget everything."""
        self.keys.zero_()
        self.values.zero_()


class Attention:
    """The attention of one forward pass: decoded rows over the cache, a block of prompts within itself.

    The first tokens of the pass are the decoded rows', the others the block's, prompt after prompt. Queries
    come scaled. What is the same for every layer is made once, here.
    """

    def __init__(
        self,
        architecture: Architecture,
        cache: KeyValueCache,
        rows: DecodeRows | None,
        block: PromptBlock | None,
        width: int,
    ) -> None:
        kv_heads = architecture.kv_heads
        self._split = (architecture.heads, kv_heads, kv_heads)
        self._cache = cache
        self._count = 0 if rows is None else len(rows.tokens)
        self._block = block
        self._width = width  # of the padded block
        if rows is not None:
            positions = cache.upload(rows.positions)
            self._places = (cache.slots[: self._count], positions)
            reach = int(rows.positions.max()) + 1  # no row attends further
            # Views, not copies: what this pass writes is read through them.
            flat = (architecture.layers, self._count * kv_heads, reach, architecture.head_dim)
            self._keys = cache.keys[:, : self._count, :, :reach].view(flat).transpose(2, 3).unbind()
            self._values = cache.values[:, : self._count, :, :reach].view(flat).unbind()
            self._mask: torch.Tensor | None = None
            if rows.positions.min() + 1 != reach:
                beyond = cache.columns[:reach] > positions.unsqueeze(1)
                mask = torch.zeros(beyond.shape, device=beyond.device, dtype=cache.keys.dtype)
                mask.masked_fill_(beyond, float("-inf"))
                self._mask = mask.repeat_interleave(kv_heads, dim=0).unsqueeze(1)
        if block is not None:
            self._new_rows = slice(block.first_row, block.first_row + len(block.owners))
            shared = len(block.owners) != len(block.prompts)
            self._owners = cache.upload(block.owners) if shared else None

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """Queries, keys, values [tokens, heads + 2 kv_heads, head_dim] to [tokens, heads * head_dim]."""
        if self._block is None:
            return self._decode(layer, heads)
        if self._count == 0:
            return self._prefill(layer, heads)
        decoded = self._decode(layer, heads[: self._count])
        return torch.cat((decoded, self._prefill(layer, heads[self._count :])))

    def _decode(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        queries, keys, values = heads.split(self._split, dim=1)
        self._cache.keys_by_token[layer].index_put_(self._places, keys)
        self._cache.values_by_token[layer].index_put_(self._places, values)
        # The query heads that share a key head stand where a sequence of queries would: nothing is repeated.
        cached = self._keys[layer]
        scores = torch.bmm(queries.reshape(len(cached), -1, heads.shape[-1]), cached)
        if self._mask is not None:
            scores.add_(self._mask)
        shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(heads.dtype)
        return torch.bmm(shares, self._values[layer]).view(self._count, -1)

    def _prefill(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        width = self._width
        block = heads.view(-1, width, *heads.shape[1:]).transpose(1, 2)
        queries, keys, values = block.split(self._split, dim=1)
        # Padding stands behind a prompt: the causal mask hides it here, and positions hide it in the cache.
        new = self._new_rows
        self._cache.keys[layer, new, :, :width] = keys if self._owners is None else keys[self._owners]
        self._cache.values[layer, new, :, :width] = values if self._owners is None else values[self._owners]
        shared = self._split[0] != self._split[1]
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=1.0, enable_gqa=shared
        )
        return mixed.transpose(1, 2).reshape(len(heads), -1)
