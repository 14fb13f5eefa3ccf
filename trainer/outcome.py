"""How a run ended, as its fold says it."""

from __future__ import annotations

from dataclasses import dataclass

from ..statemachine.phases import Phase
from ..statemachine.state import RunState


@dataclass(frozen=True)
class Outcome:
    """How a run, or this driver's part in it, ended."""

    phase: Phase
    updates: int
    optimizer_steps: int
    policy_version: int
    message: str
    already: bool = False  # it had ended before: nothing was done
    unwritten: str = ""
    """Why the log does not have the `RunPreempted` of a run that was asked to stop and has stopped: its
    database was away. Empty otherwise. Nothing is lost by it: whoever starts the run again goes on from what
    the log does have."""

    @property
    def exit_code(self) -> int:
        """0 completed, 1 failed, 3 stopped short, 75 preempted."""
        return {Phase.COMPLETED: 0, Phase.STOPPED: 3, Phase.PREEMPTED: 75}.get(self.phase, 1)


def outcome_of(state: RunState, already: bool = False) -> Outcome:
    """The outcome of a run as its fold says it."""
    end = state.end
    message = {
        Phase.COMPLETED: f"completed: {state.updates} updates, {state.optimizer_steps} optimizer steps",
        Phase.STOPPED: f"stopped short at update {state.updates}: {getattr(end, 'because', '')}",
        Phase.PREEMPTED: (
            f"preempted at update {state.updates}: {getattr(end, 'because', '')}; start it again to go on"
        ),
        Phase.FAILED: f"failed at update {state.updates}: {getattr(end, 'error', '')}",
    }.get(
        state.phase, f"not ended, in phase {state.phase} at update {state.updates}; start it again to go on"
    )
    return Outcome(
        phase=state.phase,
        updates=state.updates,
        optimizer_steps=state.optimizer_steps,
        policy_version=state.policy_version,
        message=("already " if already else "") + message,
        already=already,
    )


def unwritten_outcome(state: RunState, because: str) -> Outcome:
    """Of a run that has stopped as it was asked to, while its log did not take the word."""
    return Outcome(
        phase=Phase.PREEMPTED,
        updates=state.updates,
        optimizer_steps=state.optimizer_steps,
        policy_version=state.policy_version,
        message=(
            f"stopped at update {state.updates}, as it was asked to, but RunPreempted could not be written: "
            f"{because}; nothing is lost, the same command goes on with the run"
        ),
        unwritten=because,
    )
