"""Metrics as a projection of the log: one row an update, one row an evaluation, and nothing of their own.

The writer owns `metrics.jsonl` and the `tensorboard` folder of one run. The invariant: what they hold is what
the log's events make. So a driver that takes a run over first brings both into agreement with the log, and a
row is neither repeated nor lost, whenever the driver before it died.

Every row carries `update` (updates done), `optimizer_step` (optimizer steps taken by then, skipped ones
included) and `policy_version` (that the update was trained at: the publication that it causes shows from the
next row on; of an evaluation, the one that was evaluated).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec

from ..statemachine.errors import ConfigRefused
from ..statemachine.events import BudgetResolved, EvaluationDone, Event, UpdateApplied
from ..statemachine.log import EventRow

NAMES = (
    "reward/mean",
    "reward/std_within_group",
    "policy/entropy",
    "policy/ratio_clip_frac",
    "policy/kl_rollout_learner",
    "response/length",
    "response/truncated_frac",
    "staleness/mean",
    "staleness/max",
    "optim/lr",
    "optim/grad_norm",
)
"""Names that every update's row has; seconds come as `time/...`, an evaluation's figures as `eval/...`."""

JSONL_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

MetricsRow = dict[str, Any]


class MetricsProjection:
    """From events to rows. Holds the few totals that a row needs and its event does not carry."""

    def __init__(self) -> None:
        self._optimizer_steps_per_update = 0

    def row_of(self, event: Event) -> MetricsRow | None:
        """The event's row; None for an event that makes none."""
        if isinstance(event, BudgetResolved):
            self._optimizer_steps_per_update = event.minibatches * event.passes
        elif isinstance(event, UpdateApplied):
            return _update_row(event)
        elif isinstance(event, EvaluationDone):
            return {
                "update": event.update,
                "optimizer_step": event.update * self._optimizer_steps_per_update,
                "policy_version": event.policy_version,
                "eval/reward_mean": event.reward_mean,
                "eval/length": event.length_mean,
                "eval/truncated_frac": event.truncated_frac,
                "eval/size": event.size,
                "time/eval": event.seconds,
            }
        return None


def metrics_rows(rows: Iterable[EventRow]) -> Iterator[MetricsRow]:
    """The metrics of a whole log."""
    projection = MetricsProjection()
    for row in rows:
        if (made := projection.row_of(row.event())) is not None:
            yield made


def _update_row(event: UpdateApplied) -> MetricsRow:
    last = event.steps[-1]
    return {
        "update": event.update,
        "optimizer_step": last.optimizer_step + 1,
        "policy_version": event.policy_version,
        **event.metrics,
        "staleness/mean": event.staleness_mean,
        "staleness/max": event.staleness_max,
        "optim/lr": last.learning_rate,
        "optim/grad_norm": last.grad_norm,
        **{f"time/{name}": seconds for name, seconds in event.seconds.items()},
    }


class MetricsWriter:
    """Writes a run's metrics as its events come; `rows` is the log so far."""

    def __init__(
        self,
        folder: str | Path,
        rows: Iterable[EventRow] = (),
        *,
        jsonl: bool = True,
        tensorboard: bool | None = None,
    ) -> None:
        """Bring what is in `folder` into agreement with the log. Raises ConfigRefused, OSError.

        `tensorboard=None`: if it is installed.
        """
        installed = importlib.util.find_spec("tensorboard") is not None
        if tensorboard and not installed:
            raise ConfigRefused(
                "metrics.tensorboard = true: TensorBoard is not installed; `pip install tensorboard`, or "
                "leave the key out"
            )
        self._projection = MetricsProjection()
        self._file: TextIO | None = None
        self._board: Any = None
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if tensorboard if tensorboard is not None else installed:
            self._board = _open_board(folder / TENSORBOARD_FOLDER)
        made = self._replay(rows)
        if jsonl:
            self._file = _agreeing_file(folder / JSONL_NAME, made)
        else:
            for _ in made:
                pass

    def on_event(self, row: EventRow, event: Event, state: object = None) -> None:
        """Write the event's row, if it makes one. Raises OSError (a full disk)."""
        made = self._projection.row_of(event)
        if made is None:
            return
        self._write_board(row, made)
        if self._file is not None:
            self._file.write(_line(made))
            self._file.flush()

    def close(self) -> None:
        """Write out what is buffered. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._board is not None:
            self._board.close()
            self._board = None

    def _replay(self, rows: Iterable[EventRow]) -> Iterator[MetricsRow]:
        for row in rows:
            if (made := self._projection.row_of(row.event())) is not None:
                self._write_board(row, made)
                yield made

    def _write_board(self, row: EventRow, made: MetricsRow) -> None:
        if self._board is None:
            return
        wall_time = datetime.fromisoformat(row.time).timestamp()
        for name, value in made.items():
            if name != "update":
                self._board.add_scalar(name, float(value), made["update"], wall_time=wall_time)


def _open_board(folder: Path) -> Any:
    # An event file cannot be cut at an update, so what a driver before wrote is made anew from the log.
    shutil.rmtree(folder, ignore_errors=True)
    from tensorboard.summary import Writer

    return Writer(str(folder))


def _agreeing_file(path: Path, made: Iterable[MetricsRow]) -> TextIO:
    """The file, holding exactly these rows, open at its end. It is replaced whole or not at all."""
    wanted = "".join(_line(row) for row in made)
    found = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    if found != wanted:
        fresh = path.with_suffix(".new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(wanted)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    return path.open("a", encoding="utf-8")


def _line(row: MetricsRow) -> str:
    return msgspec.json.encode(row).decode() + "\n"
