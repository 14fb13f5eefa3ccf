"""AdamW on the schedule that the budget committed to.

Owns the optimizer's state on one rank. Invariants: there is no optimizer without a `BudgetResolved`; the rate
of a step is set from the schedule by the step's number right before it, whatever was loaded meanwhile; a step
that is skipped moves nothing, and the next one has its own number all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ..statemachine.budget import schedule_of
from ..statemachine.errors import BudgetRefused
from ..statemachine.events import BudgetResolved
from ..statemachine.schedule import multiplier

MOMENTS = ("exp_avg", "exp_avg_sq")


class ScheduledAdamW:
    """The optimizer of one rank, over its shards. Raises BudgetRefused without a total to go by."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        budget: BudgetResolved | None,
        *,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
    ) -> None:
        if budget is None or budget.optimizer_steps_total < 1 or budget.horizon < 1:
            total = "no BudgetResolved" if budget is None else f"a total of {budget.optimizer_steps_total}"
            raise BudgetRefused(
                f"the log holds {total}: an optimizer is built on a committed total of at least 1 optimizer "
                "step; resolve the budget first"
            )
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._adamw = AdamW(
            self._parameters,
            lr=budget.learning_rate,
            betas=(float(betas[0]), float(betas[1])),
            eps=eps,
            weight_decay=weight_decay,
            fused=True,
        )
        self._schedule = LambdaLR(self._adamw, partial(multiplier, schedule_of(budget)))
        for parameter in self._parameters:  # from the start, so that a checkpoint always has it
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What it moves, in order."""
        return self._parameters

    def set_rate(self, optimizer_step: int) -> float:
        """Set the learning rate of optimizer step k, from 0, and return it."""
        self._schedule.last_epoch = optimizer_step
        rates = [
            base * scale(optimizer_step)
            for base, scale in zip(self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self._adamw.param_groups, rates, strict=True):
            group["lr"] = rate
        return float(rates[0])

    def apply(self) -> None:
        """One AdamW step at the rate that is set."""
        self._adamw.step()

    def clear(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """The moments by parameter, shards as they are, and the number of applied steps. No rates."""
        tensors = {f"{moment}.{name}": state[moment] for name, state in self._states() for moment in MOMENTS}
        return {**tensors, "applied": next(self._states())[1]["step"].to("cpu", copy=True)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` returned, on this or another number of ranks."""
        for name, own in self._states():
            for moment in MOMENTS:
                own[moment].copy_(state[f"{moment}.{name}"])
            own["step"].copy_(state["applied"])

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, parameter in zip(self._names, self._parameters, strict=True):
            yield name, self._adamw.state[parameter]
