"""What `runs`, `log` and `samples` print: text and JSON made from a run's log and its stored groups.

Owns nothing and writes nothing. Every value is from the log, so a view of a run on another machine, or of one
that is being driven, says the same as the run itself would.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypedDict

import msgspec

from ..rollout.packing import unpack_i32
from ..rollout.protocols import Group, GroupStore, StoredFile
from ..statemachine.audit import AuditReport
from ..statemachine.errors import (
    GroupUnusable,
    LogBroken,
    LogError,
    RunUnknown,
    SurefootError,
    UserMistake,
)
from ..statemachine.events import (
    END_EVENTS,
    FilesRetired,
    GroupsStored,
    RunCreated,
    StoredGroup,
    UpdateApplied,
)
from ..statemachine.log import EventRow, RunHead, driver_of
from ..statemachine.phases import Phase
from ..statemachine.state import RunState, fold
from .display import clock
from .options import Config
from .outcome import outcome_of
from .places import Place

END_TYPES = frozenset(kind.__name__ for kind in END_EVENTS)


GONE = {
    "dead": "its driver is dead, and left no end in the log",
    "silent": "its driver, on another machine, has been silent for too long",
    "left": "its driver has left it, without an end in the log",
}
"""What is said of a run that nobody drives although it has not ended."""


class RunView(TypedDict):
    """One run in a line of `runs`."""

    run: str
    phase: str
    update: int
    updates_total: int | None
    optimizer_step: int
    optimizer_steps_total: int | None
    policy_version: int
    incarnation: int
    last_event_age_seconds: float | None
    driver: str | None  # alive, dead, silent or left; null: the run has ended and needs none
    outcome: str | None  # how it ended, and why; null: it has not
    error: str | None  # why the log cannot be read or folded, if it cannot


def view_of(place: Place) -> RunView | None:
    """How the run of that place stands; None for a database that is there before its run is.

    A log that cannot be opened is listed with its error, so that it does not hide the others.
    """
    try:
        with place.reading() as log:
            head = log.head(place.run)  # before the rows: what is read after it may have been written since
            return run_view(place.run, log.read(place.run), driver=driver_of(head))
    except RunUnknown:
        return None
    except UserMistake as unreadable:
        view = run_view(place.run, ())
        return {**view, "phase": "Unreadable", "error": str(unreadable)}


def refuse_to_wait(head: RunHead, seen_seq: int) -> None:
    """Raise SurefootError if nobody is going to write what comes after `seen_seq`: the driver is dead or
    silent, and has not left more than that."""
    driver = driver_of(head)
    if head.head_seq == seen_seq and driver in ("dead", "silent"):
        raise SurefootError(
            f"run {head.run_id!r} has not ended, but {GONE[driver]}: nothing more will come until "
            "`surefoot train` goes on with it",
            run=head.run_id,
        )


def run_view(
    run: str, rows: Iterable[EventRow], now: datetime | None = None, driver: str | None = None
) -> RunView:
    """How a run stands. A log that is broken is listed as such, as far as it can be followed."""
    state, error = RunState(), None
    try:
        fold(rows, state)
    except SurefootError as broken:
        error = str(broken)
    age = None
    if state.time:
        age = ((now or datetime.now(UTC)) - datetime.fromisoformat(state.time)).total_seconds()
    budget = state.budget
    return RunView(
        run=run,
        phase=state.phase.value if error is None else "Broken",
        update=state.updates,
        updates_total=budget.updates_total if budget else None,
        optimizer_step=state.optimizer_steps,
        optimizer_steps_total=budget.optimizer_steps_total if budget else None,
        policy_version=state.policy_version,
        incarnation=state.incarnation,
        last_event_age_seconds=age,
        driver=None if state.ended else driver,
        outcome=outcome_of(state).message if state.ended else None,
        error=error,
    )


def runs_lines(views: Iterable[RunView]) -> list[str]:
    """The runs as lines of a table, and below it what needs more words."""
    lines = [("run", "phase", "update", "optimizer step", "policy version", "last event", "driver")]
    below: list[str] = []
    for view in views:
        age = view["last_event_age_seconds"]
        lines.append(
            (
                view["run"],
                view["phase"],
                _of(view["update"], view["updates_total"]),
                _of(view["optimizer_step"], view["optimizer_steps_total"]),
                str(view["policy_version"]),
                "-" if age is None else f"{clock(max(age, 0.0))} ago",
                view["driver"] or "-",
            )
        )
        if view["error"] is not None:
            below.append(f"run {view['run']}: {view['error']}")
        elif view["outcome"] is not None and view["phase"] != Phase.COMPLETED:
            below.append(f"run {view['run']}: {view['outcome']}")
        elif view["driver"] in GONE:
            below.append(
                f"run {view['run']}: {GONE[view['driver']]}; the same `surefoot train` goes on with it"
            )
    return aligned(lines) + below


def _of(done: int, total: int | None) -> str:
    return f"{done} of {total if total is not None else '?'}"


def aligned(lines: list[tuple[str, ...]]) -> list[str]:
    """Columns of equal width, two spaces apart."""
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def row_json(row: EventRow) -> str:
    """One row as one JSON object; the payload is the log's own bytes."""
    return msgspec.json.encode(
        {
            "seq": row.seq,
            "type": row.type,
            "schema": row.schema,
            "payload": msgspec.Raw(row.payload),
            "time": row.time,
            "incarnation": row.incarnation,
            "hash": row.hash,
        }
    ).decode()


def row_line(row: EventRow, width: int) -> str:
    """One row as one line for people: the payload's plain values, cut at `width`."""
    try:
        payload: dict[str, Any] = msgspec.json.decode(row.payload)
    except msgspec.DecodeError as error:
        raise LogError(f"event {row.seq} ({row.type}) has a payload that is no JSON: {error}") from error
    values = " ".join(f"{name}={_brief(value)}" for name, value in payload.items())
    line = f"{row.seq:>6}  {row.time[:19]}  {row.incarnation:>3}  {row.type:<20} {values}".rstrip()
    return line if len(line) <= width else line[: max(1, width - 1)] + "…"


def _brief(value: Any) -> str:
    if isinstance(value, list) and (len(value) > 4 or any(isinstance(one, dict) for one in value)):
        return f"<{len(value)} items>"
    if isinstance(value, dict) and (len(value) > 2 or any(isinstance(one, dict) for one in value.values())):
        return f"<{len(value)} keys>"
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def audit_lines(report: AuditReport) -> list[str]:
    """The audit as a table: each identity with its verdict and figures, then what the log adds up to."""
    checks = [("check", "verdict", "figures")]
    checks += [(check.id, "holds" if check.ok else "BROKEN", check.detail) for check in report.checks]
    failed = sum(not check.ok for check in report.checks)
    verdict = f"{failed} of {len(report.checks)} identities are broken" if failed else "every identity holds"
    totals = report.totals
    fates = ", ".join(f"{number} {fate}" for fate, number in totals["groups"].items())
    return [
        *aligned(checks),
        "",
        f"run {totals['run']}: {verdict}; {totals['updates']} updates, {totals['optimizer_steps']} optimizer "
        f"steps, policy version {totals['policy_version']}, {totals['incarnations']} incarnations; "
        f"groups: {fates}",
    ]


@dataclass(frozen=True)
class SampleSource:
    """Where the groups of a log lie, and in which update each was trained."""

    config: Config
    places: dict[tuple[int, int], tuple[str, StoredGroup]]  # (prompt_index, attempt)
    trained: dict[int, list[tuple[int, int]]]  # update -> its groups, in training order
    retired: frozenset[str]

    @classmethod
    def of(cls, rows: Iterable[EventRow]) -> SampleSource:
        """From a whole log. Raises LogBroken for one that does not begin with its config."""
        config: Config | None = None
        retired: set[str] = set()
        places: dict[tuple[int, int], tuple[str, StoredGroup]] = {}
        trained: dict[int, list[tuple[int, int]]] = {}
        for row in rows:
            if row.type not in ("RunCreated", "GroupsStored", "UpdateApplied", "FilesRetired"):
                continue
            event = row.event()
            if isinstance(event, GroupsStored):
                for group in event.groups:
                    places[group.prompt_index, group.attempt] = (event.file, group)
            elif isinstance(event, UpdateApplied):
                trained[event.update] = event.groups
            elif isinstance(event, FilesRetired):
                retired.update(event.group_files)
            elif isinstance(event, RunCreated):
                config = Config.from_resolved(event.config)
        if config is None:
            raise LogBroken("event 1 is no RunCreated: the log has no config", seq=1)
        return cls(config, places, trained, frozenset(retired))

    def chosen(self, update: int | None, group: int | None) -> list[tuple[int | None, int, int]]:
        """(update or None, prompt_index, attempt) of what was asked for; by default the last update that is
        still in the store.

        Raises UserMistake for an update or a group that is not in the log.
        """
        if update is not None and update not in self.trained:
            if not self.trained:
                raise UserMistake(f"--update {update}: no update is in the log yet{self._without_update()}")
            raise UserMistake(
                f"--update {update}: the run's updates are {span(self.trained)}; name one of them"
            )
        if group is None:
            if not self.trained:
                raise UserMistake(f"no update is in the log yet{self._without_update()}")
            update = self._last_stored() if update is None else update
            return [(update, *one) for one in self.trained[update]]
        updates = [update] if update is not None else list(self.trained)
        for number in updates:
            for prompt_index, attempt in self.trained[number]:
                if prompt_index == group:
                    return [(number, prompt_index, attempt)]
        attempts = [attempt for prompt_index, attempt in self.places if prompt_index == group]
        if update is not None or not attempts:
            raise UserMistake(f"--group {group}: {self._groups_there_are(update)}")
        return [(None, group, max(attempts))]

    def _without_update(self) -> str:
        if not self.places:
            return ", nor is a group stored; look again when one is"
        return f"; leave --update out and name a stored --group, {span({group for group, _ in self.places})}"

    def _groups_there_are(self, update: int | None) -> str:
        if not self.places:
            return "no group is stored yet; look again when one is"
        where = "the stored groups are" if update is None else f"update {update} trained the groups"
        keys = self.places if update is None else self.trained[update]
        return f"{where} {span({prompt_index for prompt_index, _ in keys})}; name one of them"

    def _last_stored(self) -> int:
        for update in sorted(self.trained, reverse=True):
            if all(self.places[group][0] not in self.retired for group in self.trained[update]):
                return update
        raise UserMistake(
            "every trained group was deleted once all kept checkpoints covered it; a run with "
            "groups.keep = 'all' keeps them"
        )

    def read(self, store: GroupStore, prompt_index: int, attempt: int, where: str = "its store") -> Group:
        """One group; `where` names the store. Raises UserMistake if its file was retired, GroupUnusable."""
        file, stored = self.places[prompt_index, attempt]
        if file in self.retired:
            raise UserMistake(
                f"group {prompt_index}: its file {file} was deleted once every kept checkpoint covered it; "
                "groups.keep = 'all' keeps them, or name a later --update"
            )
        try:
            return store.read(
                StoredFile(file=file, offset=stored.offset, size=stored.size, digest=stored.digest)
            )
        except GroupUnusable as error:
            raise GroupUnusable(
                f"group {prompt_index}: {error} in {where}; put the file back, or name another --update",
                file=file,
                prompt_index=prompt_index,
            ) from error


def span(numbers: Collection[int]) -> str:
    """The range that numbers lie in, and whether any in between are missing."""
    low, high = min(numbers), max(numbers)
    between = "" if len(numbers) == high - low + 1 else f" ({len(numbers)} of these)"
    return f"{low} to {high}{between}"


def sample_lines(update: int | None, group: Group, decode: Callable[[list[int]], str]) -> Iterator[str]:
    """A group for people: prompt, then each response with its reward and versions."""
    where = f"update {update}" if update is not None else "not trained yet"
    yield f"group {group.prompt_index}  attempt {group.attempt}  row {group.row_index}  {where}"
    yield f"  prompt    {decode(unpack_i32(group.prompt_ids))!r}"
    for number, sample in enumerate(group.samples):
        versions = unpack_i32(sample.versions)
        oldest, newest = min(versions, default=0), max(versions, default=0)
        span = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
        parts = "".join(f"  {name} {value:g}" for name, value in sample.parts.items())
        cut = "  truncated" if sample.truncated else ""
        yield f"  {number:>2}  reward {sample.reward:g}{parts}  {span}  {len(versions)} tokens{cut}"
        yield f"      {decode(unpack_i32(sample.ids))!r}"
