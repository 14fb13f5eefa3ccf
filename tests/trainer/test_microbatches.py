"""The plan of a minibatch: complete, in step on all ranks, within its limits, and blind to ids' values."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.rollout.packing import unpack_i32
from surefoot.trainer.microbatches import Plan, TrainedGroup, build, make_plan, read_groups, tokens_in

from .learner_world import make_group

HIDDEN = 128


def groups_of(*lengths: list[int], prompt: int = 5) -> list[TrainedGroup]:
    groups = [make_group(place, own, [1.0] * len(own), prompt=prompt) for place, own in enumerate(lengths)]
    return read_groups(groups, scale="group", mask_truncated=False)


def placed(plan: Plan) -> list[tuple[int, int]]:
    """Every (group, response) that is in some row."""
    rows = [row for rank in plan for micro_batch in rank for row in micro_batch]
    return [(row.group, response) for row in rows for response in row.responses]


shapes = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=9), min_size=1, max_size=7)


@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(1, 5), st.integers(1, 200), st.booleans())
def test_every_response_is_in_one_row_and_all_ranks_keep_step(
    lengths: list[list[int]], ranks: int, micro_batch_tokens: int, share: bool
) -> None:
    groups = groups_of(*lengths)
    plan = make_plan(
        groups, ranks=ranks, micro_batch_tokens=micro_batch_tokens, hidden=HIDDEN, share_prompts=share
    )
    everything = [(place, response) for place, own in enumerate(lengths) for response in range(len(own))]
    assert sorted(placed(plan)) == everything
    assert len(plan) == ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    for micro_batch in (batch for rank in plan for batch in rank):
        padded = len(micro_batch) * max((row.length for row in micro_batch), default=0)
        assert padded <= micro_batch_tokens or len(micro_batch) == 1
        for row in micro_batch:
            assert row.length <= micro_batch_tokens or len(row.responses) == 1
            assert share or len(row.responses) == 1


@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(1, 4))
def test_what_is_built_holds_each_token_once(lengths: list[list[int]], ranks: int) -> None:
    groups = groups_of(*lengths)
    plan = make_plan(groups, ranks=ranks, micro_batch_tokens=64, hidden=HIDDEN)
    built = [build(groups, rows) for rank in plan for rows in rank if rows]
    ids = torch.cat([batch.ids for batch in built]).tolist()
    expected = [int(token) for group in groups for own in group.responses for token in own.ids]
    assert sorted(ids) == sorted(expected)
    assert len(ids) == tokens_in(groups) == sum(map(sum, lengths))


def test_the_plan_is_the_same_wherever_it_is_made() -> None:
    groups = groups_of([3, 9, 4], [2, 2, 2], [7, 1, 8])
    plans = [make_plan(groups, ranks=2, micro_batch_tokens=40, hidden=HIDDEN) for _ in range(3)]
    assert plans[0] == plans[1] == plans[2]


def test_no_rank_is_idle_while_there_are_responses_enough() -> None:
    """Two groups of four on three ranks: cut finer than by group."""
    plan = make_plan(groups_of([4] * 4, [4] * 4), ranks=3, micro_batch_tokens=16384, hidden=HIDDEN)
    by_rank = [sum(len(row.responses) for batch in rank for row in batch) for rank in plan]
    assert sorted(by_rank) == [2, 3, 3]


def test_short_responses_share_their_prompt_and_long_ones_do_not() -> None:
    (short,) = make_plan(groups_of([4] * 8, prompt=8), ranks=1, micro_batch_tokens=16384, hidden=HIDDEN)
    assert [len(row.responses) for row in short[0]] == [8]
    (long,) = make_plan(groups_of([400] * 8, prompt=8), ranks=1, micro_batch_tokens=16384, hidden=HIDDEN)
    assert {len(row.responses) for batch in long for row in batch} == {1}


def test_a_response_after_another_sees_the_prompt_and_itself_and_counts_from_the_prompt() -> None:
    groups = groups_of([3, 4], prompt=2)
    (plan,) = make_plan(groups, ranks=1, micro_batch_tokens=16384, hidden=HIDDEN)
    batch = build(groups, plan[0])
    assert batch.positions is not None and batch.mask is not None
    # Prompt p p, then the first two ids of one response and the first three of the other.
    assert batch.positions.tolist() == [[0, 1, 2, 3, 2, 3, 4]]
    assert batch.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 1, 1, 1],
    ]
    assert batch.select.tolist() == [1, 2, 3, 1, 4, 5, 6]


def test_one_response_a_row_needs_no_mask_and_pads_on_the_right() -> None:
    groups = groups_of([3], [1], prompt=2)
    (plan,) = make_plan(groups, ranks=1, micro_batch_tokens=16384, hidden=HIDDEN, share_prompts=False)
    batch = build(groups, plan[0])
    assert batch.mask is None and batch.positions is None
    assert batch.input_ids.shape == (2, 4)
    assert batch.select.tolist() == [1, 2, 3, 4 + 1]


def test_the_end_token_is_trained_also_where_its_id_is_that_of_the_padding() -> None:
    group = make_group(0, [3, 2], [1.0, 0.0])
    zeros = [msgspec.structs.replace(sample, ids=bytes(len(sample.ids))) for sample in group.samples]
    group = msgspec.structs.replace(group, samples=zeros)
    trained = read_groups([group], scale="group", mask_truncated=False)
    (plan,) = make_plan(trained, ranks=1, micro_batch_tokens=16384, hidden=HIDDEN)
    assert build(trained, plan[0]).ids.tolist() == [0] * 5


def test_masked_truncated_responses_are_left_out_but_count_for_the_advantage() -> None:
    group = make_group(0, [3, 2, 4], [2.0, 0.0, 1.0], truncated=[True, False, False])
    (kept,) = read_groups([group], scale="none", mask_truncated=True)
    assert [response.advantage for response in kept.responses] == [-1.0, 0.0]
    assert [list(response.ids) for response in kept.responses] == [
        unpack_i32(sample.ids) for sample in group.samples[1:]
    ]
    (all_of_it,) = read_groups([group], scale="none", mask_truncated=False)
    assert tokens_in([kept]) == 6 and tokens_in([all_of_it]) == 9


def test_a_minibatch_of_nothing_gives_every_rank_nothing() -> None:
    group = make_group(0, [3, 2], [1.0, 0.0], truncated=[True, True])
    trained = read_groups([group], scale="group", mask_truncated=True)
    assert tokens_in(trained) == 0
    assert make_plan(trained, ranks=3, micro_batch_tokens=9, hidden=HIDDEN) == [[], [], []]


def test_an_empty_micro_batch_is_one_token() -> None:
    empty = build([], [])
    assert empty.empty and empty.input_ids.shape == (1, 1) and empty.select.tolist() == [0]


def test_a_prompt_of_no_token_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="group 3 "):
        read_groups([make_group(3, [2, 2], [1.0, 0.0], prompt=0)], scale="group", mask_truncated=False)


def test_token_arrays_come_back_as_they_were_packed() -> None:
    group = make_group(0, [3], [1.0])
    (read,) = read_groups([group], scale="group", mask_truncated=False)
    assert read.prompt_ids.tolist() == unpack_i32(group.prompt_ids)
    assert np.array_equal(read.responses[0].rollout_logprobs, np.frombuffer(group.samples[0].logprobs, "<f4"))
