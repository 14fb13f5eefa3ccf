"""The data as requests: which row and which seeds belong to a prompt index, and the held-out rows.

Owns the draw order. The invariant: a request depends on config, data and prompt index alone, so every
attempt of a group asks for the same samples.
"""

from __future__ import annotations

from ..rollout.data import draw_order, sample_seed
from ..rollout.protocols import GroupRequest, Row
from ..statemachine.events import Issue
from .plan import Prepared

EVALUATION_SEED_OFFSET = 1 << 32
"""Held-out rows sample (where evaluation is not greedy) with seeds that no training prompt has."""


class DataPrompts:
    """The prompts of a prepared run."""

    def __init__(self, prepared: Prepared) -> None:
        self._config = prepared.config
        self._rows = prepared.data.rows
        self._held_out: list[Row] = list(prepared.eval_data.rows) if prepared.eval_data else []
        self._order = draw_order(len(self._rows), prepared.config.data.epochs, prepared.config.seed)

    def request(self, issue: Issue) -> GroupRequest:
        """The request of one attempt of a group."""
        config = self._config
        return GroupRequest(
            prompt_index=issue.prompt_index,
            attempt=issue.attempt,
            admission_version=issue.admission_version,
            row=self._rows[self._order(issue.prompt_index)],
            seeds=[
                sample_seed(config.seed, issue.prompt_index, sample)
                for sample in range(config.batch.group_size)
            ],
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
        )

    def evaluation(self) -> list[GroupRequest]:
        """One request a held-out row, one sample each, at eval.temperature."""
        config = self._config
        return [
            GroupRequest(
                prompt_index=index,
                attempt=1,
                admission_version=0,
                row=row,
                seeds=[sample_seed(config.seed, EVALUATION_SEED_OFFSET + index, 0)],
                temperature=config.eval.temperature,
                max_new_tokens=config.rollout.max_new_tokens,
            )
            for index, row in enumerate(self._held_out)
        ]
