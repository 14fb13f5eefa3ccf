"""The SQL of the log: every statement that reads or writes a run, said once for both databases.

Owns nothing. SQLAlchemy puts the statements into the dialect, once for each log that is opened; they are
then run on the driver's bare cursor, because an append that is nearly all fsync has no time for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import starmap
from typing import Any

from sqlalchemy import (
    BigInteger,
    Double,
    LargeBinary,
    Text,
    bindparam,
    cast,
    func,
    insert,
    literal_column,
    select,
    update,
)

from .liveness import DriverIdentity
from .log import EventRow, RunHead
from .schema import events, runs

_CLOCK = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM clock_timestamp())::double precision",
}


class Statement:
    """An SQL statement, compiled once: SQLAlchemy says it in the dialect, the driver runs it bare."""

    def __init__(self, statement: Any, dialect: Any) -> None:
        # positional parameters everywhere, so that a row is a tuple
        style = {"sqlite": "qmark", "postgresql": "format"}[dialect.name]
        compiled: Any = statement.compile(dialect=type(dialect)(paramstyle=style))
        self._text = str(compiled)
        self._names: tuple[str, ...] = tuple(compiled.positiontup)
        self._fixed: dict[str, object] = dict(compiled.params)

    def run(self, cursor: Any, **values: object) -> Any:
        cursor.execute(self._text, [values.get(name, self._fixed.get(name)) for name in self._names])
        return cursor

    def run_many(self, cursor: Any, rows: Sequence[tuple[object, ...]]) -> None:
        """For values in the order of the table's columns."""
        if len(rows) == 1:
            cursor.execute(self._text, rows[0])
        else:
            cursor.executemany(self._text, rows)


class Statements:
    """All SQL of the log."""

    def __init__(self, dialect: Any) -> None:
        clock = literal_column(_CLOCK[dialect.name], Double)
        run_id, incarnation = bindparam("run", type_=Text), bindparam("mine", type_=BigInteger)
        columns = [runs.c[name] for name in runs.c.keys() if name != "heartbeat_at"]  # noqa: SIM118
        new_run: dict[str, Any] = {column.name: bindparam(column.name) for column in columns}
        taken: dict[str, Any] = {name: bindparam(f"new_{name}") for name in new_run if name != "run_id"}
        head = select(*columns, (clock - runs.c.heartbeat_at).label("age"))
        payload: Any = (
            cast(events.c.payload, LargeBinary)
            if dialect.name == "sqlite"
            else func.convert_to(events.c.payload, literal_column("'UTF8'"))
        )
        # all but the run: it is that of the condition, and a million copies of its name take their time
        stored: list[Any] = [
            payload if column is events.c.payload else column
            for column in events.c
            if column is not events.c.run_id
        ]

        def compiled(statement: Any) -> Statement:
            return Statement(statement, dialect)

        self.heads = compiled(head)
        self.head = compiled(head.where(runs.c.run_id == run_id))
        # The lock that makes appends, take-overs and creations of one run take turns. On SQLite the
        # transaction holds it already.
        self.lock_head = compiled(head.where(runs.c.run_id == run_id).with_for_update())
        self.create = compiled(insert(runs).values(**new_run, heartbeat_at=clock))
        self.insert = compiled(insert(events))
        # Locks the run's row and fences in one: of two that append, the second waits for the first and then
        # finds another head, and an incarnation that was raised meanwhile finds none.
        self.advance = compiled(
            update(runs)
            .where(
                runs.c.run_id == run_id,
                runs.c.incarnation == incarnation,
                runs.c.head_seq == bindparam("expected", type_=BigInteger),
                runs.c.head_hash == bindparam("previous", type_=Text),
            )
            .values(head_seq=bindparam("seq"), head_hash=bindparam("hash_"), heartbeat_at=clock)
        )
        # Only ever run under `lock_head`, once it is decided that the run may be taken.
        self.hand_over = compiled(
            update(runs).where(runs.c.run_id == run_id).values(**taken, heartbeat_at=clock)
        )
        # These two say for themselves who may: an old driver must not look alive in a new one's stead,
        # nor give away what is no longer its own.
        mine = (runs.c.run_id == run_id, runs.c.incarnation == incarnation)
        self.heartbeat = compiled(update(runs).where(*mine).values(heartbeat_at=clock))
        self.release = compiled(update(runs).where(*mine).values(released=True))
        self.page = compiled(
            select(*stored)
            .where(events.c.run_id == run_id, events.c.seq > bindparam("after"))
            .order_by(events.c.seq)
            .limit(bindparam("size"))
        )


def tuples_of(rows: Sequence[EventRow]) -> list[tuple[object, ...]]:
    """The rows as `insert` takes them."""
    return [
        (r.run_id, r.seq, r.type, r.schema, r.payload.decode(), r.time, r.incarnation, r.hash) for r in rows
    ]


def rows_of(run_id: str, cursor: Any) -> list[EventRow]:
    """What a cursor on which `page` was run holds."""
    return list(starmap(partial(EventRow, run_id), cursor.fetchall()))


def row_of(head: RunHead, prefix: str = "") -> dict[str, object]:
    """The run's row as `create` takes it, and with the prefix new_ as `hand_over` does."""
    assert head.driver is not None
    row = {
        "run_id": head.run_id,
        "incarnation": head.incarnation,
        "head_seq": head.head_seq,
        "head_hash": head.head_hash,
        "host": head.driver.host,
        "pid": head.driver.pid,
        "process_start": head.driver.process_start,
        "released": head.released,
    }
    return {prefix + name: value for name, value in row.items()}


def head_of(row: Any) -> RunHead | None:
    """What a row of `head` and its kin says."""
    if row is None:
        return None
    run_id, incarnation, head_seq, head_hash, host, pid, process_start, released, age = row
    return RunHead(
        run_id=run_id,
        head_seq=head_seq,
        head_hash=head_hash,
        incarnation=incarnation,
        driver=DriverIdentity(host, pid, process_start),
        heartbeat_age_seconds=max(age, 0.0),
        released=bool(released),
    )
