"""The log of a run: its rows, their hash chain, and what every database that holds one must do.

Owns the form of a row and the rules of appending; the state is the databases'. The invariant: the rows of a
run are numbered 1, 2, 3 ... without a gap, each holds the hash of itself and the row before, and none is
changed once it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Protocol

import msgspec

from .errors import FencedOut, LogBroken, RunClosed, RunExists, RunInUse, RunUnknown, WrongSeq
from .events import (
    Event,
    IncarnationBegan,
    RunCompleted,
    RunStopped,
    TakeReason,
    decode,
    encode,
    type_of,
)
from .liveness import DriverIdentity, lives

__all__ = [
    "GENESIS_HASH",
    "SILENT_AFTER_SECONDS",
    "DriverIdentity",
    "EventLog",
    "EventRow",
    "RunHead",
    "build_rows",
    "chained",
    "driver_of",
    "follow",
    "incarnation_began",
    "refuse_misbuilt",
    "row_hash",
    "row_hasher",
    "run_exists",
    "run_unknown",
    "take_reason",
    "utc_now",
    "verify_chain",
    "why_refused",
]

GENESIS_HASH = "0" * 64
"""What stands for the row before the first."""

SILENT_AFTER_SECONDS = 30.0
"""A driver that cannot be looked at counts as dead once its heartbeat is this old."""


class EventRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row of the log, as it is stored."""

    run_id: str
    seq: int  # dense from 1
    type: str
    schema: int  # version of the payload's form
    payload: bytes  # canonical JSON
    time: str  # for people; never read by replay
    incarnation: int
    hash: str  # over all of that and the hash before

    def event(self) -> Event:
        """What the row says. Raises LogBroken for a type or schema that this version does not know."""
        return decode(self.type, self.schema, self.payload, seq=self.seq)


class RunHead(msgspec.Struct, frozen=True):
    """Where a run's log ends, and who holds the run."""

    run_id: str
    head_seq: int
    head_hash: str
    incarnation: int
    driver: DriverIdentity | None
    heartbeat_age_seconds: float | None  # by the database's clock
    released: bool


class EventLog(Protocol):
    """A database of runs. Synchronous; one writing thread and any number of reading ones may share it.

    An error other than FencedOut and WrongSeq leaves the outcome of an append open; to append the very same
    rows again is safe, and takes effect once.
    """

    def create(self, run_id: str, first: Event, driver: DriverIdentity) -> RunHead:
        """Begin a run: `first`, then IncarnationBegan(1), in one transaction. Raises RunExists."""
        ...

    def take_over(
        self,
        run_id: str,
        driver: DriverIdentity,
        *,
        ask: bool = False,
        config_changes: Mapping[str, list[Any]] | None = None,
        digest_changes: Mapping[str, list[str]] | None = None,
        accept_divergence: bool = False,
    ) -> RunHead:
        """Raise the incarnation and append IncarnationBegan, in one transaction.

        Raises RunInUse while its driver lives, unless `ask`; RunUnknown.
        """
        ...

    def append(self, run_id: str, expected_seq: int, incarnation: int, rows: Sequence[EventRow]) -> None:
        """Append all rows in one transaction, or none.

        Rows that are in place already, hash for hash, count as done. Raises FencedOut, WrongSeq.
        """
        ...

    def read(self, run_id: str, after_seq: int = 0, limit: int | None = None) -> Iterator[EventRow]:
        """The rows after `after_seq`, in order and without a gap. Raises RunUnknown, LogBroken."""
        ...

    def head(self, run_id: str) -> RunHead:
        """Raises RunUnknown."""
        ...

    def runs(self) -> list[RunHead]:
        """Every run in the database, by name."""
        ...

    def heartbeat(self, run_id: str, incarnation: int) -> None:
        """Say that the driver lives. Raises FencedOut."""
        ...

    def hurry(self, seconds: float) -> None:
        """The process is about to end: wait no longer than so many seconds from now for a database that is
        away, whatever is under way included."""
        ...

    def release(self, run_id: str, incarnation: int) -> None:
        """Say that the driver is done with the run; of no effect if a newer incarnation holds it."""
        ...

    def close(self) -> None:
        """Let go of the database. May be called twice."""
        ...


def row_hash(
    previous_hash: str,
    run_id: str,
    seq: int,
    type: str,
    schema: int,
    payload: bytes,
    time: str,
    incarnation: int,
) -> str:
    """SHA-256 of a row and the hash before it, in hex.

    One line of decimal numbers (the lengths in characters, of the payload in bytes, and the three integers),
    then the fields end to end: the line says where each ends, so no two rows have the same bytes.
    """
    head = (
        f"{len(previous_hash)} {len(run_id)} {len(type)} {len(time)} {len(payload)} "
        f"{seq} {schema} {incarnation}\n{previous_hash}{run_id}{type}{time}"
    )
    return sha256(head.encode() + payload).hexdigest()


def row_hasher() -> Callable[[str, EventRow], str]:
    """A function that says what `row_hash` does of a row after a hash, for many rows of a log.

    Rows come in runs of a kind, and what such rows share of the hashed text is put together once.
    """
    run_id = sizes = numbers = names = ""
    schema = incarnation = 0
    kind: str | None = None  # of no row: the first one is put together in any case

    def hash_of(previous_hash: str, row: EventRow) -> str:
        nonlocal run_id, kind, schema, incarnation, sizes, numbers, names
        payload, time = row.payload, row.time
        if row.type != kind or row.run_id != run_id or row.schema != schema or row.incarnation != incarnation:
            run_id, kind, schema, incarnation = row.run_id, row.type, row.schema, row.incarnation
            sizes = f" {len(run_id)} {len(kind)} "
            numbers = f" {schema} {incarnation}\n"
            names = run_id + kind
        head = (
            f"{len(previous_hash)}{sizes}{len(time)} {len(payload)} {row.seq}{numbers}"
            f"{previous_hash}{names}{time}"
        )
        return sha256(head.encode() + payload).hexdigest()

    return hash_of


def build_rows(
    run_id: str, head_seq: int, head_hash: str, incarnation: int, events: Iterable[Event], time: str
) -> list[EventRow]:
    """The rows that put `events` after the head. Built once: a retry must append these very rows."""
    rows: list[EventRow] = []
    for seq, event in enumerate(events, head_seq + 1):
        kind, payload = type_of(event), encode(event)
        head_hash = row_hash(head_hash, run_id, seq, kind, event.schema, payload, time, incarnation)
        rows.append(EventRow(run_id, seq, kind, event.schema, payload, time, incarnation, head_hash))
    return rows


def chained(
    rows: Iterable[EventRow], previous_hash: str = GENESIS_HASH, after_seq: int | None = None
) -> Iterator[EventRow]:
    """The rows, each checked against the one before as it passes. Raises LogBroken naming the seq.

    `previous_hash` is that of row `after_seq`; without `after_seq` the chain is taken up at the first row,
    or at seq 1 if the hash is that of no row.
    """
    seq = 0 if after_seq is None and previous_hash == GENESIS_HASH else after_seq
    hash_of = row_hasher()
    for row in rows:
        if seq is None:
            seq = row.seq - 1
        seq += 1
        if row.seq != seq:
            raise LogBroken(
                f"event {seq} of run {row.run_id!r} is missing: event {row.seq} is in its place",
                run=row.run_id,
                seq=seq,
            )
        expected = hash_of(previous_hash, row)
        if row.hash != expected:
            raise LogBroken(
                f"event {seq} of run {row.run_id!r} is not as it was written: its hash does not hold; "
                "go on from a copy of the log that is whole",
                run=row.run_id,
                seq=seq,
            )
        previous_hash = expected
        yield row


def verify_chain(
    rows: Iterable[EventRow], previous_hash: str = GENESIS_HASH, after_seq: int | None = None
) -> str:
    """Check all rows as `chained` does, at once. Returns the hash of the last one."""
    for row in chained(rows, previous_hash, after_seq):
        previous_hash = row.hash
    return previous_hash


def follow(log: EventLog, run_id: str, after_seq: int = 0, *, wait: Callable[[], bool]) -> Iterator[EventRow]:
    """The rows after `after_seq`, then those that come, none skipped, for as long as `wait` says so.

    `wait` is called when there are no more rows for now; it returns when it is time to look again, and
    whether to.
    """
    while True:
        for row in log.read(run_id, after_seq):
            yield row
            after_seq = row.seq
        if not wait():
            return


def driver_of(head: RunHead, lives: Callable[[DriverIdentity], bool | None] = lives) -> str:
    """Whether the driver that holds a run lives: alive; dead; silent, where it cannot be looked at from here
    and its heartbeat is old; left, where it has let go of the run."""
    try:
        reason = take_reason(head, ask=False, lives=lives)
    except RunInUse:
        return "alive"
    return {TakeReason.DEAD: "dead", TakeReason.SILENT: "silent"}.get(reason, "left")


# What follows are the rules that every database applies between locking a run's row and writing it.


def take_reason(head: RunHead, *, ask: bool, lives: Callable[[DriverIdentity], bool | None]) -> TakeReason:
    """Why the run may be taken over. Raises RunInUse if it may not."""
    if head.released or head.driver is None:
        return TakeReason.ENDED
    alive = lives(head.driver)
    if alive is False:
        return TakeReason.DEAD
    age = head.heartbeat_age_seconds
    if alive is None and (age is None or age >= SILENT_AFTER_SECONDS):
        return TakeReason.SILENT
    if ask:
        return TakeReason.ASKED
    raise RunInUse(
        f"run {head.run_id!r} is in use: incarnation {head.incarnation} (process {head.driver.pid} on "
        f"{head.driver.host}) wrote {max(age or 0.0, 0.0):.0f} s ago; stop it, or take the run over with "
        "--take-over",
        run=head.run_id,
        incarnation=head.incarnation,
        heartbeat_age_seconds=age,
        host=head.driver.host,
        pid=head.driver.pid,
    )


def refuse_closed(run_id: str, last_type: str) -> None:
    """Nobody takes over a run that is over for good. Raises RunClosed."""
    if last_type in (RunCompleted.__name__, RunStopped.__name__):
        raise RunClosed(
            f"run {run_id!r} is over: its last event is {last_type}", run=run_id, ending=last_type
        )


def incarnation_began(
    incarnation: int,
    reason: TakeReason,
    driver: DriverIdentity,
    config_changes: Mapping[str, list[Any]] | None = None,
    digest_changes: Mapping[str, list[str]] | None = None,
    accept_divergence: bool = False,
) -> IncarnationBegan:
    """The event with which `driver` begins its life."""
    return IncarnationBegan(
        incarnation=incarnation,
        reason=reason,
        host=driver.host,
        pid=driver.pid,
        config_changes=dict(config_changes or {}),
        digest_changes=dict(digest_changes or {}),
        accept_divergence=accept_divergence,
    )


def why_refused(head: RunHead, expected_seq: int, incarnation: int) -> FencedOut | WrongSeq:
    """The error for an append that does not fit the run's row, with both values."""
    if incarnation != head.incarnation:
        by = f" (process {head.driver.pid} on {head.driver.host})" if head.driver is not None else ""
        return FencedOut(
            f"run {head.run_id!r} is held by incarnation {head.incarnation}{by}, which has taken it over: "
            f"incarnation {incarnation} may write no more",
            run=head.run_id,
            mine=incarnation,
            current=head.incarnation,
        )
    return WrongSeq(
        f"run {head.run_id!r} ends at event {head.head_seq}, not at {expected_seq}: something else has "
        "appended in its place",
        run=head.run_id,
        expected=expected_seq,
        found=head.head_seq,
    )


def run_exists(run_id: str) -> RunExists:
    """The error for a name that is taken."""
    return RunExists(
        f"run {run_id!r} is there already: go on with it by the same command, or choose another name",
        run=run_id,
    )


def run_unknown(run_id: str) -> RunUnknown:
    """The error for a name that no run has."""
    return RunUnknown(
        f"there is no run {run_id!r} in this log: `surefoot runs` lists those that there are", run=run_id
    )


def refuse_misbuilt(run_id: str, expected_seq: int, incarnation: int, rows: Sequence[EventRow]) -> None:
    """Raise ValueError for rows that were not built for this place."""
    for seq, row in enumerate(rows, expected_seq + 1):
        if (row.run_id, row.seq, row.incarnation) != (run_id, seq, incarnation):
            raise ValueError(
                f"a row of run {row.run_id!r}, seq {row.seq}, incarnation {row.incarnation} cannot be "
                f"event {seq} of run {run_id!r}, incarnation {incarnation}"
            )
    if not rows:
        raise ValueError("an append holds at least one row")


def utc_now() -> str:
    """The time as rows hold it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
