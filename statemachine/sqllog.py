"""The log in an SQL database: one place that knows how rows are written and read.

Owns one writing connection, behind a lock, and a pool of reading ones. The invariant: a transaction that
writes has locked the run's row before it looks at anything, so what it decides on is still so when it
commits. Waiting for a server that went away happens here, and what is sent again takes effect once.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeVar

from sqlalchemy import PoolProxiedConnection
from sqlalchemy.exc import DBAPIError

from .crashpoints import crashpoint
from .database import SQLITE_READONLY_ROLLBACK, Database, open_database
from .errors import LogBroken, LogError, LogUnavailable, UserMistake
from .events import Event, TakeReason
from .liveness import DriverIdentity, lives
from .log import (
    GENESIS_HASH,
    EventRow,
    RunHead,
    build_rows,
    incarnation_began,
    refuse_closed,
    refuse_misbuilt,
    run_exists,
    run_unknown,
    take_reason,
    utc_now,
    verify_chain,
    why_refused,
)
from .migrating import migrate as bring_up_to_date
from .migrating import require_readable
from .statements import Statements, head_of, row_of, rows_of, tuples_of

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""How long to wait for a database server that has gone away."""

_PAGE_ROWS = 1024  # rows read in one query: no reader holds a transaction while its caller works


def open_log(
    url: str,
    *,
    migrate: bool,
    patience_seconds: float = PATIENCE_SECONDS,
    now: Callable[[], str] = utc_now,
    lives: Callable[[DriverIdentity], bool | None] = lives,
) -> SqlLog:
    """The log in the database at `url`: `sqlite:///path/to/log.db` or `postgresql://...`.

    With `migrate` the tables are made or brought up to date, and the log may be written; without, nothing
    is ever written. Raises RunUnknown where there is no log to read, SchemaTooNew, UserMistake.
    """
    database = open_database(url, writable=migrate)
    try:
        if database.writer is not None:
            bring_up_to_date(database.writer, database.name)
        else:
            require_readable(database.reader, database.name)
    except DBAPIError as error:
        database.close()
        raise UserMistake(
            f"cannot open the log at {database.name}: {_first_line(error)}; check --runs-dir or --db"
        ) from error
    except BaseException:
        database.close()
        raise
    return SqlLog(database, patience_seconds=patience_seconds, now=now, lives=lives)


class SqlLog:
    """An EventLog in an SQL database; `open_log` makes one."""

    def __init__(
        self,
        database: Database,
        *,
        patience_seconds: float,
        now: Callable[[], str],
        lives: Callable[[DriverIdentity], bool | None],
    ) -> None:
        self._database = database
        self._patience_seconds = patience_seconds
        self._gives_up_at = math.inf  # by the monotonic clock, however patient
        self._asking: list[Any] = []  # connections that a server's answer is waited for on
        self._now = now
        self._lives = lives
        dialect: Any = database.reader.dialect
        self._sql = Statements(dialect)
        self._driver: Any = dialect.loaded_dbapi
        self._lock = threading.Lock()  # over the writing connection
        self._writing: PoolProxiedConnection | None = None
        self._cursor: Any = None  # of the writing connection
        self._heads: dict[str, tuple[int, str]] = {}  # where this log's own last appends ended

    def create(self, run_id: str, first: Event, driver: DriverIdentity) -> RunHead:
        began = incarnation_began(1, TakeReason.NEW, driver)
        rows = build_rows(run_id, 0, GENESIS_HASH, 1, (first, began), self._now())
        sent = False
        crashpoint("log.append.before", rows)

        def work(cursor: Any) -> RunHead:
            nonlocal sent
            head = head_of(self._sql.lock_head.run(cursor, run=run_id).fetchone())
            if head is not None:
                if sent and head.head_hash == rows[-1].hash:
                    return head  # the answer was lost, not the deed
                raise run_exists(run_id)
            sent = True
            last = rows[-1]
            created = RunHead(run_id, last.seq, last.hash, 1, driver, 0.0, False)
            try:
                self._sql.create.run(cursor, **row_of(created))
            except self._driver.IntegrityError:
                # PostgreSQL has no row to lock yet: another process has just created the run
                raise run_exists(run_id) from None
            self._sql.insert.run_many(cursor, tuples_of(rows))
            crashpoint("log.append.inside", rows)
            return created

        head = self._transact(work)
        crashpoint("log.append.after", rows)
        crashpoint("log.created")
        return head

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
        sent: set[str] = set()
        rows: list[EventRow] = []

        def work(cursor: Any) -> RunHead:
            nonlocal rows
            head = self._locked_head(cursor, run_id)
            if head.head_hash in sent:
                return head  # the answer was lost, not the deed
            self._sql.page.run(cursor, run=run_id, after=head.head_seq - 1, size=1)
            refuse_closed(run_id, rows_of(run_id, cursor)[0].type)
            reason = take_reason(head, ask=ask, lives=self._lives)
            mine = head.incarnation + 1
            began = incarnation_began(mine, reason, driver, config_changes, digest_changes, accept_divergence)
            rows = build_rows(run_id, head.head_seq, head.head_hash, mine, (began,), self._now())
            crashpoint("log.append.before", rows)
            last = rows[-1]
            sent.add(last.hash)
            self._sql.insert.run_many(cursor, tuples_of(rows))
            taken = RunHead(run_id, last.seq, last.hash, mine, driver, 0.0, False)
            self._sql.hand_over.run(cursor, run=run_id, **row_of(taken, "new_"))
            crashpoint("log.append.inside", rows)
            return taken

        head = self._transact(work)
        crashpoint("log.append.after", rows)
        crashpoint("log.taken_over")
        return head

    def append(self, run_id: str, expected_seq: int, incarnation: int, rows: Sequence[EventRow]) -> None:
        refuse_misbuilt(run_id, expected_seq, incarnation, rows)
        crashpoint("log.append.before", rows)
        last = rows[-1]
        stored = tuples_of(rows)

        def work(cursor: Any) -> None:
            seq, previous_hash = self._heads.get(run_id, (None, ""))
            if seq != expected_seq:
                head = self._locked_head(cursor, run_id)
                if self._is_in_place(cursor, head, expected_seq, incarnation, rows):
                    return
                previous_hash = head.head_hash
            fence = {"mine": incarnation, "expected": expected_seq, "previous": previous_hash}
            if not self._sql.advance.run(cursor, run=run_id, seq=last.seq, hash_=last.hash, **fence).rowcount:
                head = self._locked_head(cursor, run_id)
                if self._is_in_place(cursor, head, expected_seq, incarnation, rows):
                    return
                raise _not_the_head(run_id, head.head_seq)
            verify_chain(rows, previous_hash, expected_seq)
            self._sql.insert.run_many(cursor, stored)
            crashpoint("log.append.inside", rows)

        self._transact(work)
        self._heads[run_id] = (last.seq, last.hash)
        crashpoint("log.append.after", rows)

    def read(self, run_id: str, after_seq: int = 0, limit: int | None = None) -> Iterator[EventRow]:
        return self._pages(self.head(run_id), after_seq, limit)

    def head(self, run_id: str) -> RunHead:
        head = self._look(lambda cursor: head_of(self._sql.head.run(cursor, run=run_id).fetchone()))
        if head is None:
            raise run_unknown(run_id)
        return head

    def runs(self) -> list[RunHead]:
        heads = self._look(lambda cursor: [head_of(row) for row in self._sql.heads.run(cursor).fetchall()])
        # sorted here: a database sorts names by its own alphabet
        return sorted((head for head in heads if head is not None), key=lambda head: head.run_id)

    def heartbeat(self, run_id: str, incarnation: int) -> None:
        def work(cursor: Any) -> None:
            if self._sql.heartbeat.run(cursor, run=run_id, mine=incarnation).rowcount == 0:
                head = self._locked_head(cursor, run_id)
                raise why_refused(head, head.head_seq, incarnation)

        self._transact(work)

    def hurry(self, seconds: float) -> None:
        self._gives_up_at = time.monotonic() + seconds
        for connection in list(self._asking):
            self._timer(connection, seconds).start()

    def release(self, run_id: str, incarnation: int) -> None:
        def work(cursor: Any) -> None:
            if self._sql.release.run(cursor, run=run_id, mine=incarnation).rowcount == 0:
                self._locked_head(cursor, run_id)

        self._transact(work)

    def close(self) -> None:
        with self._lock:
            if self._writing is not None:
                self._writing.close()
                self._writing = self._cursor = None
            self._database.close()

    def _pages(self, head: RunHead, after_seq: int, limit: int | None) -> Iterator[EventRow]:
        """Rows page by page. That `seq` is dense and ends no earlier than the head is checked here; that
        rows are as they were written is for `verify_chain`."""
        run_id = head.run_id
        left = limit
        while left is None or left > 0:
            size = _PAGE_ROWS if left is None else min(_PAGE_ROWS, left)
            rows = self._page(run_id, after_seq, size)
            end = after_seq + len(rows)
            if rows and rows[-1].seq != end:  # they come in order, and no seq comes twice
                present = (row.seq for row in rows)
                raise _missing(run_id, next(n for n, seq in enumerate(present, after_seq + 1) if n != seq))
            if after_seq < head.head_seq <= end and rows[head.head_seq - end - 1].hash != head.head_hash:
                raise _not_the_head(run_id, head.head_seq)
            yield from rows
            after_seq = end
            if len(rows) < size:
                if after_seq < head.head_seq:
                    raise _missing(run_id, after_seq + 1)
                return
            left = None if left is None else left - size

    def _page(self, run_id: str, after_seq: int, size: int) -> list[EventRow]:
        def work(cursor: Any) -> list[EventRow]:
            self._sql.page.run(cursor, run=run_id, after=after_seq, size=size)
            return rows_of(run_id, cursor)

        try:
            return self._look(work)
        except LogUnavailable as error:
            if getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF in _TORN:
                for row in range(size if size > 1 else 0):
                    self._page(run_id, after_seq + row, 1)  # until the one that cannot be read
                raise LogBroken(
                    f"event {after_seq + 1} of run {run_id!r} cannot be read ({error.__cause__}): go on from "
                    "a copy of the log that is whole",
                    run=run_id,
                    seq=after_seq + 1,
                ) from error
            raise

    def _is_in_place(
        self, cursor: Any, head: RunHead, expected_seq: int, incarnation: int, rows: Sequence[EventRow]
    ) -> bool:
        """Whether an earlier try was committed and only its answer lost; raises if another row is there."""
        if (head.head_seq, head.incarnation) == (expected_seq, incarnation):
            return False
        self._sql.page.run(cursor, run=head.run_id, after=expected_seq, size=len(rows))
        if rows_of(head.run_id, cursor) == list(rows):
            return True
        raise why_refused(head, expected_seq, incarnation)

    def _locked_head(self, cursor: Any, run_id: str) -> RunHead:
        head = head_of(self._sql.lock_head.run(cursor, run=run_id).fetchone())
        if head is None:
            raise run_unknown(run_id)
        return head

    def _transact(self, work: Callable[[Any], T]) -> T:
        """One writing transaction, all of it again if the server went away; `work` must bear that."""
        if self._database.writer is None:
            raise LogError(f"the log at {self._database.name} was opened for reading only")
        return self._patiently(self._transact_once, work)

    def _transact_once(self, work: Callable[[Any], T]) -> T:
        with self._lock:
            cursor = self._cursor or self._connect_to_write()
            try:
                if self._database.cut is None:
                    return self._try(cursor, work)
                with self._bounded(cursor.connection):
                    return self._try(cursor, work)
            except BaseException:
                try:
                    cursor.connection.rollback()
                except self._driver.Error:
                    # the connection is gone; the next try makes another
                    assert self._writing is not None
                    self._writing.invalidate()
                    self._writing = self._cursor = None
                raise

    def _try(self, cursor: Any, work: Callable[[Any], T]) -> T:
        if self._database.begin is not None:
            cursor.execute(self._database.begin)
        done = work(cursor)
        cursor.connection.commit()
        return done

    def _connect_to_write(self) -> Any:
        assert self._database.writer is not None
        self._writing = self._database.writer.raw_connection()
        self._cursor = self._writing.cursor()
        self._cursor.execute(self._database.impatient)
        self._cursor.connection.commit()
        return self._cursor

    def _look(self, work: Callable[[Any], T]) -> T:
        return self._patiently(self._look_once, work)

    def _look_once(self, work: Callable[[Any], T]) -> T:
        with closing(self._database.reader.raw_connection()) as connection:
            try:
                with closing(connection.cursor()) as cursor, self._bounded(cursor.connection):
                    return work(cursor)
            except self._driver.Error:
                connection.invalidate()
                raise

    @contextmanager
    def _bounded(self, connection: Any) -> Generator[None]:
        """A bound on what one try may wait for a server that says nothing at all."""
        if self._database.cut is None:
            yield
            return
        timer = self._timer(connection, min(self._patience_seconds, self._gives_up_at - time.monotonic()))
        self._asking.append(connection)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._asking.remove(connection)

    def _timer(self, connection: Any, seconds: float) -> threading.Timer:
        def cut() -> None:
            if connection in self._asking and self._database.cut is not None:
                self._database.cut(connection)

        timer = threading.Timer(max(0.0, seconds), cut)
        timer.daemon = True
        return timer

    def _patiently(self, once: Callable[[Callable[[Any], T]], T], work: Callable[[Any], T]) -> T:
        """Try until it is done or refused, or until patience with a server that is away runs out."""
        patient_until = time.monotonic() + self._patience_seconds
        pause_seconds = 0.02
        while True:
            try:
                return once(work)
            except (DBAPIError, self._driver.Error) as error:
                cause: Any = error.orig if isinstance(error, DBAPIError) else error
                deadline = min(patient_until, self._gives_up_at)
                if not self._may_pass(cause) or time.monotonic() + pause_seconds > deadline:
                    raise LogUnavailable(
                        f"the log at {self._database.name} did not do as it was asked: {_advice(cause)}"
                    ) from cause
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, 1.0)

    def _may_pass(self, error: Any) -> bool:
        """Whether it is the server's coming and going or another's lock, and no answer to what was asked."""
        if _is_locked(error):
            return True
        if isinstance(error, sqlite3.Error):
            # met where a writer was killed: the next connection undoes what that one had begun
            return getattr(error, "sqlite_errorcode", None) == SQLITE_READONLY_ROLLBACK
        state = getattr(error, "sqlstate", None)
        # class 08: the connection; 57P0x: the server is stopping or starting; none: it said nothing at all
        passing = state is None or state.startswith(("08", "57P0"))
        return isinstance(error, self._driver.OperationalError) and passing


_TORN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def _is_locked(error: Any) -> bool:
    """Whether another process was in a transaction for as long as one try waits."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code == sqlite3.SQLITE_BUSY or getattr(error, "sqlstate", None) == "55P03"


def _advice(error: Any) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if _is_locked(error):
        return "another process keeps it locked; see which one has it open"
    if code == sqlite3.SQLITE_FULL or getattr(error, "sqlstate", None) == "53100":
        return "the disk is full; make room and run the same command again"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


def _not_the_head(run_id: str, seq: int) -> LogBroken:
    return LogBroken(
        f"event {seq} of run {run_id!r} is not the one that the run's head names: go on from a copy of the "
        "log that is whole",
        run=run_id,
        seq=seq,
    )


def _missing(run_id: str, seq: int) -> LogBroken:
    return LogBroken(
        f"event {seq} of run {run_id!r} is missing: go on from a copy of the log that is whole",
        run=run_id,
        seq=seq,
    )
