"""From a minibatch of groups to what each rank computes: rows, micro-batches, tensors.

Owns nothing; a pure function of groups, ranks and limits, so every rank works out the whole plan by itself.
Invariants: each trainable response is in exactly one row of one rank; every rank has the same number of
micro-batches, the last ones empty where there is nothing left; positions count from 0 and what is trained
follows from lengths alone, never from the value of an id.

A row is a prompt followed by one or more responses to it. Responses after the first see the prompt and
themselves, not each other, and count their positions from the prompt's end, so every token has the numbers
that it would have in a row of its own while the prompt is computed once. The last token of a response
predicts nothing and is left out of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch

from ..rollout.protocols import Group
from .losses import group_advantages

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]
Floats = np.ndarray[tuple[int], np.dtype[np.float32]]

ATTENTION_WEIGHT = 4.0
"""What an attention operation costs against one of a matrix product; measured on CPU, for short rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """A response that is trained."""

    ids: Ints
    rollout_logprobs: Floats
    advantage: float

    @property
    def inputs(self) -> int:
        """Tokens it adds to a row's input."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True, eq=False)
class TrainedGroup:
    """A prompt and those of its responses that are trained."""

    prompt_ids: Ints
    temperature: float
    responses: list[Response]


class Row(NamedTuple):
    """A prompt with some of its responses: indices into the minibatch, and the length of the input."""

    group: int
    responses: tuple[int, ...]
    length: int


Plan = list[list[list[Row]]]
"""`plan[rank][micro_batch]` is a list of rows; every rank's list is as long."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One forward pass. The last five are `[tokens]`, over all response tokens in it."""

    input_ids: torch.Tensor  # [rows, length]
    mask: torch.Tensor | None  # bool [rows, 1, length, length]; None: causal, one response a row
    positions: torch.Tensor | None  # [rows, length]; None: 0, 1, 2 ...
    select: torch.Tensor  # where in [rows * length] each token is predicted
    ids: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    temperatures: torch.Tensor
    empty: bool  # holds one token of no weight, so that its rank keeps step with the others

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        if device.type == "cpu":
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


def read_groups(groups: Sequence[Group], *, scale: str, mask_truncated: bool) -> list[TrainedGroup]:
    """Groups as arrays, with advantages over all their samples. Raises ValueError for an empty prompt."""
    found: list[TrainedGroup] = []
    for group in groups:
        prompt_ids = np.frombuffer(group.prompt_ids, "<i4")
        if not len(prompt_ids):
            raise ValueError(
                f"group {group.prompt_index} has an empty prompt: nothing predicts its first token"
            )
        advantages = group_advantages([sample.reward for sample in group.samples], scale)
        responses = [
            Response(np.frombuffer(sample.ids, "<i4"), np.frombuffer(sample.logprobs, "<f4"), advantage)
            for sample, advantage in zip(group.samples, advantages, strict=True)
            if sample.ids and not (mask_truncated and sample.truncated)
        ]
        found.append(TrainedGroup(prompt_ids, group.temperature, responses))
    return found


def tokens_in(groups: Sequence[TrainedGroup]) -> int:
    """Response tokens with a weight in the loss."""
    return sum(len(response.ids) for group in groups for response in group.responses)


def make_plan(
    groups: Sequence[TrainedGroup],
    *,
    ranks: int,
    micro_batch_tokens: int,
    hidden: int,
    share_prompts: bool = True,
) -> Plan:
    """Deal rows to ranks by cost, then cut each rank's rows into micro-batches by padded tokens.

    A row longer than `micro_batch_tokens` is alone in its micro-batch. `hidden` is the model's width, which
    says how dear attention is beside matrix products. Without `share_prompts` each response has its own row.
    """
    rows = _rows(groups, ranks, micro_batch_tokens, hidden, share_prompts)
    rows.sort(key=lambda row: (-row.length, row.group, row.responses))
    dealt: list[list[Row]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for row in rows:
        rank = load.index(min(load))
        dealt[rank].append(row)
        load[rank] += _cost(row.length, hidden)
    plan = [_cut(own, micro_batch_tokens) for own in dealt]
    most = max(len(micro_batches) for micro_batches in plan)
    return [micro_batches + [[] for _ in range(most - len(micro_batches))] for micro_batches in plan]


def _rows(
    groups: Sequence[TrainedGroup], ranks: int, micro_batch_tokens: int, hidden: int, share_prompts: bool
) -> list[Row]:
    trained = [index for index, group in enumerate(groups) if group.responses]
    responses = sum(len(groups[index].responses) for index in trained)
    if not responses:
        return []
    # Few groups on many ranks are cut finer, so that no rank waits for another.
    rows_a_rank = -(-len(trained) // ranks)
    most = -(-responses // (ranks * rows_a_rank)) if share_prompts else 1
    rows: list[Row] = []
    for index in trained:
        group = groups[index]
        candidates: list[tuple[float, list[Row]]] = []
        together = min(most, len(group.responses))
        while together >= 1:
            cut = _rows_of(index, group, together)
            if together == 1 or all(row.length <= micro_batch_tokens for row in cut):
                candidates.append((sum(_cost(row.length, hidden) for row in cut), cut))
            together //= 2
        rows += min(candidates, key=lambda candidate: candidate[0])[1]
    return rows


def _rows_of(index: int, group: TrainedGroup, together: int) -> list[Row]:
    rows: list[Row] = []
    for start in range(0, len(group.responses), together):
        taken = range(start, min(start + together, len(group.responses)))
        length = len(group.prompt_ids) + sum(group.responses[response].inputs for response in taken)
        rows.append(Row(index, tuple(taken), length))
    return rows


def _cost(length: int, hidden: int) -> float:
    """Of one row, in tokens: a layer has some 24 hidden^2 operations a token, and 4 hidden per other one."""
    return length * (1.0 + ATTENTION_WEIGHT * length / (6.0 * hidden))


def _cut(rows: Sequence[Row], micro_batch_tokens: int) -> list[list[Row]]:
    """Longest first, so that rows of like length are padded together."""
    micro_batches: list[list[Row]] = []
    for row in rows:
        last = micro_batches[-1] if micro_batches else None
        if last is not None and (len(last) + 1) * last[0].length <= micro_batch_tokens:
            last.append(row)
        else:
            micro_batches.append([row])
    return micro_batches


def build(groups: Sequence[TrainedGroup], rows: Sequence[Row]) -> MicroBatch:
    """The tensors of a micro-batch, padded on the right to its longest row."""
    if not rows:
        return _empty()
    length = max(row.length for row in rows)
    input_ids = np.zeros((len(rows), length), np.int64)
    positions = np.zeros((len(rows), length), np.int64)
    segments = np.full((len(rows), length), -1, np.int16)  # 0: the prompt, 1 ...: responses, -1: padding
    select: list[np.ndarray] = []
    taken: list[Response] = []
    temperatures: list[float] = []
    for at, row in enumerate(rows):
        group = groups[row.group]
        prompt = end = len(group.prompt_ids)
        input_ids[at, :prompt] = group.prompt_ids
        positions[at, :prompt] = np.arange(prompt)
        segments[at, :prompt] = 0
        for segment, index in enumerate(row.responses, start=1):
            response = group.responses[index]
            start, end = end, end + response.inputs
            input_ids[at, start:end] = response.ids[:-1]
            positions[at, start:end] = np.arange(prompt, prompt + response.inputs)
            segments[at, start:end] = segment
            predicted_at = np.arange(start - 1, end) + at * length
            predicted_at[0] = at * length + prompt - 1  # by the prompt's last token
            select.append(predicted_at)
            taken.append(response)
            temperatures.append(group.temperature)
    tokens = [len(response.ids) for response in taken]
    shared = any(len(row.responses) > 1 for row in rows)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        mask=_mask(torch.from_numpy(segments)) if shared else None,
        positions=torch.from_numpy(positions) if shared else None,
        select=torch.from_numpy(np.concatenate(select)),
        ids=torch.from_numpy(np.concatenate([response.ids for response in taken]).astype(np.int64)),
        rollout_logprobs=torch.from_numpy(
            np.concatenate([response.rollout_logprobs for response in taken]).astype(np.float32)
        ),
        advantages=_per_token([response.advantage for response in taken], tokens),
        temperatures=_per_token(temperatures, tokens),
        empty=False,
    )


def _mask(segments: torch.Tensor) -> torch.Tensor:
    """True where a query may look: not ahead, and at its own segment or the prompt.

    Padding looks at padding, so that no query is left with nothing to look at, which would give nan.
    """
    query, key = segments.unsqueeze(2), segments.unsqueeze(1)
    length = segments.shape[1]
    not_ahead = torch.ones(length, length, dtype=torch.bool).tril()
    return (((query == key) | (key == 0)) & not_ahead).unsqueeze(1)


def _per_token(values: Sequence[float], tokens: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.asarray(values, np.float32), tokens))


def _empty() -> MicroBatch:
    zero = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        input_ids=zero.unsqueeze(0),
        mask=None,
        positions=None,
        select=zero,
        ids=zero,
        rollout_logprobs=torch.zeros(1),
        advantages=torch.zeros(1),
        temperatures=torch.ones(1),
        empty=True,
    )
