"""Where a run's things lie: its folder, its log, its storage. Reads nothing of a run but whether it is there.

A run's folder is `<runs folder>/<name>` and holds log.db, groups/, checkpoints/, metrics.jsonl and curve.png.
With a shared database the log is there instead, and the folder holds the rest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..statemachine.errors import RunUnknown, UserMistake

if TYPE_CHECKING:
    from ..statemachine.log import EventLog, RunHead
    from .options import Config

LOG_NAME = "log.db"
CURVE_NAME = "curve.png"

RUNS = Path("runs")
"""Where runs' folders are unless another folder is named."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Place:
    """The place of one run. Raises UserMistake for a name that cannot be a folder's."""

    run: str
    runs_dir: Path = RUNS
    db: str | None = None  # a shared database; none: a file in the run's folder

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.run):
            raise UserMistake(
                f"run name {self.run!r}: must be letters, digits, '.', '_' and '-', beginning with a letter "
                "or digit; choose another",
                run=self.run,
            )

    @property
    def folder(self) -> Path:
        """The run's own folder, absolute."""
        return (self.runs_dir / self.run).absolute()

    @property
    def curve(self) -> Path:
        """The picture of its learning curve, as the user would write the path."""
        return self.runs_dir / self.run / CURVE_NAME

    @property
    def log_url(self) -> str:
        """The database that holds the run's log."""
        return f"sqlite:///{self.folder / LOG_NAME}" if self.db is None else self.db

    def storage_url(self, config: Config) -> str:
        """The folder or URL that group files and checkpoints lie below."""
        url = config.storage.url
        return f"{url.rstrip('/')}/{self.run}" if url else str(self.folder)

    def exists(self) -> bool:
        """Whether the run is there. Reads only."""
        if self.db is None:
            return (self.folder / LOG_NAME).is_file()
        return self.run in _taken(self.db)

    def refuse_unusable(self) -> None:
        """Refuse a place where the run's folder cannot be made, before it is made. Raises UserMistake."""
        for path in (self.folder, *self.folder.parents):
            if path.is_dir():
                if os.access(path, os.W_OK | os.X_OK):
                    return
                raise UserMistake(
                    f"run {self.run!r} cannot have its folder in {self.runs_dir}: {path} cannot be written "
                    "to; name another folder with --runs-dir",
                    run=self.run,
                )
            if path.exists():
                raise UserMistake(
                    f"run {self.run!r} cannot have its folder in {self.runs_dir}: {path} is a file; name "
                    "another folder with --runs-dir",
                    run=self.run,
                )

    def refuse_another_runs_log(self) -> None:
        """Refuse a copied or renamed folder: its log is of the run that it was. Raises UserMistake."""
        if self.db is None and (found := sorted(_taken(self.log_url))):
            raise UserMistake(
                f"{self.folder} holds the log of run {found[0]!r}, not of {self.run!r}: give the folder its "
                "name back, or choose another name",
                run=self.run,
            )

    @contextmanager
    def reading(self) -> Iterator[EventLog]:
        """The run's log, to read from; writes nothing. Raises RunUnknown."""
        from ..statemachine.sqllog import open_log

        if self.db is None and not (self.folder / LOG_NAME).is_file():
            where = _no_folder(self.runs_dir) or f"in {self.runs_dir}: `surefoot runs` lists those there are"
            raise RunUnknown(f"there is no run {self.run!r} {where}", run=self.run)
        log = open_log(self.log_url, migrate=False)
        try:
            log.head(self.run)  # raises RunUnknown
            yield log
        finally:
            log.close()


def next_free(run: str, runs_dir: Path, db: str | None = None) -> Place:
    """The place of that name, or of name-2, name-3 ... if it is taken."""
    place, number = Place(run, runs_dir, db), 1
    taken = _taken(db) if db is not None else None
    while place.run in taken if taken is not None else place.folder.exists():
        number += 1
        place = Place(f"{run}-{number}", runs_dir, db)
    return place


def all_places(runs_dir: Path, db: str | None = None) -> list[Place]:
    """Every run that there is, by name. Raises UserMistake for a folder that is none; the default one may
    be missing, before the first run."""
    if db is not None:
        return [Place(head.run_id, runs_dir, db) for head in _heads(db)]
    refusal = _no_folder(runs_dir)
    if refusal is not None:
        raise UserMistake(f"there are no runs {refusal}")
    found = sorted(path.parent.name for path in runs_dir.glob(f"*/{LOG_NAME}"))
    return [Place(name, runs_dir) for name in found if _NAME.fullmatch(name)]


def _no_folder(runs_dir: Path) -> str | None:
    """What is said of a folder that no run can be in; None for one that is there, or the first run makes."""
    if runs_dir.is_dir() or (runs_dir == RUNS and not runs_dir.exists()):
        return None
    what = "is a file" if runs_dir.exists() else "does not exist"
    return f"in {runs_dir.absolute()}, which {what}: name a folder of runs with --runs-dir"


def _heads(db: str) -> list[RunHead]:
    from ..statemachine.sqllog import open_log

    log = open_log(db, migrate=False)
    try:
        return log.runs()
    finally:
        log.close()


def _taken(db: str) -> set[str]:
    """The names in use. A database without a log yet has none: the first run makes it."""
    try:
        return {head.run_id for head in _heads(db)}
    except RunUnknown:
        return set()
