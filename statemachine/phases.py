"""The phases of a run: one table of legal moves, from which machine, fold and diagram are made.

The machine holds no truth of its own. A move is named by the event that makes it: the driver asks
`Phases.may(state, event)` (the guards look at the folded state), does the work, appends the event, and only
then calls `Phases.move`. The fold follows the same table, so log and machine cannot disagree.
Rollout, Update and Sync say what the learner's loop is doing; generation overlaps all three.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

import msgspec
from transitions import Machine

from .errors import IllegalEvent
from .events import Event, UpdateApplied, UpdateBegan, WeightsPublished, WorkersReady, type_of

if TYPE_CHECKING:
    from .state import RunState


class Phase(StrEnum):
    """What the run is doing, or how it ended."""

    CREATED = "Created"  # the config is in the log
    RESOLVE_BUDGET = "ResolveBudget"  # totals are being worked out; nothing else may exist
    INIT_WORKERS = "InitWorkers"  # workers and ranks come up; recorded updates are redone
    ROLLOUT = "Rollout"  # the learner waits for the next batch
    UPDATE = "Update"  # the learner trains on a batch
    SYNC = "Sync"  # weights become the next policy version
    COMPLETED = "Completed"  # exactly the budget's optimizer steps
    STOPPED = "Stopped"  # short of the budget, and said so
    PREEMPTED = "Preempted"  # asked to stop; goes on when run again
    FAILED = "Failed"  # could not go on; tried again when run again


# tuples: each event folded is looked up here, and an enum's hash is worked out in Python
ENDED = (Phase.COMPLETED, Phase.STOPPED, Phase.PREEMPTED, Phase.FAILED)
CLOSED = (Phase.COMPLETED, Phase.STOPPED)
_LEARNING = (Phase.ROLLOUT, Phase.UPDATE, Phase.SYNC)
_ALIVE = (Phase.CREATED, Phase.RESOLVE_BUDGET, Phase.INIT_WORKERS, *_LEARNING)

Need = Callable[["RunState", Event], bool]


class Move(msgspec.Struct, frozen=True):
    """One row of the table: the event, from where to where, and what entering needs (all of it)."""

    event: str
    sources: tuple[Phase, ...]
    dest: Phase
    needs: tuple[Need, ...] = ()


def no_budget_yet(state: RunState, event: Event) -> bool:
    """No budget is in the log."""
    return state.budget is None


def budget_committed(state: RunState, event: Event) -> bool:
    """The budget is in the log."""
    return state.budget is not None


def redone_to_the_head(state: RunState, event: Event) -> bool:
    """The learner holds the weights of the last recorded update."""
    return isinstance(event, WorkersReady) and event.update == state.updates


def publication_due(state: RunState, event: Event) -> bool:
    """`every_updates` updates since the last publication, or no further update to come."""
    updates = event.update if isinstance(event, UpdateApplied) else state.updates
    return state.publication_due_after(updates)


def no_publication_due(state: RunState, event: Event) -> bool:
    """The next update may begin before the next publication."""
    return not publication_due(state, event)


def batch_is_stored(state: RunState, event: Event) -> bool:
    """The batch is the next update's, and every group of it is in the store."""
    if not isinstance(event, UpdateBegan) or event.update != state.updates + 1:
        return False
    # every update of a log comes by here: to loop is cheaper than all() over a generator
    for prompt_index, attempt in event.groups:  # noqa: SIM110
        if not state.is_stored(prompt_index, attempt):
            return False
    return True


def publishes_the_last_update(state: RunState, event: Event) -> bool:
    """The weights are those of the last update, as the next version."""
    return (
        isinstance(event, WeightsPublished)
        and event.update == state.updates
        and event.version == state.policy_version + 1
    )


def every_step_taken(state: RunState, event: Event) -> bool:
    """Optimizer steps in the log are the budget's total."""
    return state.budget is not None and state.optimizer_steps == state.budget.optimizer_steps_total


def steps_are_missing(state: RunState, event: Event) -> bool:
    """The run is short of its budget, and no further batch can form."""
    return state.exhausted and not every_step_taken(state, event)


def last_update_is_safe(state: RunState, event: Event) -> bool:
    """The last update is published, and a committed checkpoint of it exists."""
    return state.published_update == state.updates and (
        state.updates == 0 or state.updates in state.checkpoints
    )


def drops_the_rest(state: RunState, event: Event) -> bool:
    """No further batch can form, so what is left over is dropped as unused."""
    return getattr(event, "reason", None) == "unused"


def updates_are_unpublished(state: RunState, event: Event) -> bool:
    """There are updates since the last publication."""
    return state.updates > state.published_update


MOVES: tuple[Move, ...] = (
    Move(
        "IncarnationBegan",
        (Phase.CREATED, Phase.RESOLVE_BUDGET, Phase.PREEMPTED, Phase.FAILED),
        Phase.RESOLVE_BUDGET,
        (no_budget_yet,),
    ),
    Move(
        "IncarnationBegan",
        (Phase.INIT_WORKERS, *_LEARNING, Phase.PREEMPTED, Phase.FAILED),
        Phase.INIT_WORKERS,
        (budget_committed,),
    ),
    Move("BudgetResolved", (Phase.RESOLVE_BUDGET,), Phase.INIT_WORKERS, (no_budget_yet,)),
    Move(
        "WorkersReady",
        (Phase.INIT_WORKERS,),
        Phase.SYNC,
        (budget_committed, redone_to_the_head, publication_due),
    ),
    Move("WorkersReady", (Phase.INIT_WORKERS,), Phase.ROLLOUT, (budget_committed, redone_to_the_head)),
    Move("UpdateBegan", (Phase.ROLLOUT,), Phase.UPDATE, (batch_is_stored, no_publication_due)),
    Move("UpdateApplied", (Phase.UPDATE,), Phase.SYNC, (publication_due,)),
    Move("UpdateApplied", (Phase.UPDATE,), Phase.ROLLOUT),
    Move("GroupsDropped", (Phase.ROLLOUT,), Phase.SYNC, (drops_the_rest, updates_are_unpublished)),
    Move("WeightsPublished", (Phase.SYNC,), Phase.ROLLOUT, (publication_due, publishes_the_last_update)),
    Move("LearnerLost", (Phase.INIT_WORKERS, *_LEARNING), Phase.INIT_WORKERS),
    Move("RunCompleted", (Phase.ROLLOUT,), Phase.COMPLETED, (every_step_taken, last_update_is_safe)),
    Move("RunStopped", (Phase.ROLLOUT,), Phase.STOPPED, (steps_are_missing, last_update_is_safe)),
    Move("RunPreempted", _ALIVE, Phase.PREEMPTED),
    Move("RunFailed", _ALIVE, Phase.FAILED),
)

MOVES_BY_EVENT: dict[str, tuple[Move, ...]] = {
    name: tuple(move for move in MOVES if move.event == name)
    for name in dict.fromkeys(move.event for move in MOVES)
}
_MAY_STAY = frozenset({"GroupsDropped"})  # moves only when it drops the rest


def destination(state: RunState, event: Event) -> Phase:
    """Where the event leads from the state's phase. Raises IllegalEvent where no move allows it."""
    name, phase = type_of(event), state.phase
    moves = MOVES_BY_EVENT.get(name)
    if moves is None:
        return phase
    for move in moves:
        if phase in move.sources:
            for need in move.needs:
                if not need(state, event):
                    break
            else:
                return move.dest
    if name in _MAY_STAY:
        return phase
    needs = [need.__doc__ or "" for move in moves if phase in move.sources for need in move.needs]
    rule = " ".join(dict.fromkeys(needs)) if needs else f"{name} is legal in {', '.join(_legal_in(moves))}."
    raise IllegalEvent(
        f"event {state.seq + 1}: {name} is not allowed in phase {phase}: {rule}",
        seq=state.seq + 1,
        event=name,
    )


def _legal_in(moves: tuple[Move, ...]) -> list[str]:
    return list(dict.fromkeys(phase.value for move in moves for phase in move.sources))


class Phases:
    """The `transitions` machine over the table, moved by committed events alone."""

    def __init__(self, phase: Phase = Phase.CREATED) -> None:
        self.state: str = phase.value  # set by the machine
        self.machine = phase_machine(self, phase)

    def may(self, state: RunState, event: Event) -> bool:
        """Whether the event is legal now, or moves nothing."""
        name = type_of(event)
        if name not in MOVES_BY_EVENT:
            return True
        return self._moves(state, event) or name in _MAY_STAY

    def move(self, state: RunState, event: Event) -> None:
        """Follow one committed event; `state` is the fold before it. Raises IllegalEvent."""
        name = type_of(event)
        if name not in MOVES_BY_EVENT:
            return
        if not self._moves(state, event):
            destination(state, event)  # raises, and says why, unless the event may stay
            return
        cast(Callable[..., bool], getattr(self, name))(state, event)

    def _moves(self, state: RunState, event: Event) -> bool:
        return cast(Callable[..., bool], getattr(self, f"may_{type_of(event)}"))(state, event)


def phase_machine(
    model: Any, initial: Phase = Phase.CREATED, machine: type[Machine] = Machine, **options: Any
) -> Any:
    """A machine of `transitions` built from the table; `machine` may be its graph flavour."""
    return machine(
        model=model,
        states=[phase.value for phase in Phase],
        initial=initial.value,
        auto_transitions=False,
        send_event=False,
        transitions=[
            {
                "trigger": move.event,
                "source": source.value,
                "dest": move.dest.value,
                "conditions": list(move.needs),
            }
            for move in MOVES
            for source in move.sources
        ],
        **options,
    )


def diagram() -> str:
    """The legal moves as a Mermaid state diagram, drawn from the machine's own transitions.

    What any living phase may do is drawn once, from the box that holds them all.
    """
    machine = phase_machine(type("Model", (), {})())
    arrows: dict[tuple[str, str], list[str]] = {}
    alive = {phase.value for phase in _ALIVE}
    for event in MOVES_BY_EVENT:
        moves: list[tuple[str, str]] = [(move.source, move.dest) for move in machine.get_transitions(event)]
        for dest in dict.fromkeys(dest for _, dest in moves):
            sources = [source for source, where in moves if where == dest]
            for source in ["Alive"] if set(sources) == alive else sources:
                arrows.setdefault((source, dest), []).append(event)
    inside, outside = list[str](), list[str]()
    for (source, dest), names in arrows.items():
        line = f"{source} --> {dest}: {', '.join(dict.fromkeys(names))}"
        (inside if source in alive and dest in alive else outside).append(line)
    return "\n".join(
        [
            "stateDiagram-v2",
            "  state Alive {",
            "    [*] --> Created",
            *(f"    {line}" for line in inside),
            "  }",
            *(f"  {line}" for line in outside),
            *(f"  {phase} --> [*]" for phase in Phase if phase in CLOSED),
            "",
        ]
    )
