"""Connections to the database that a log's URL names: SQLite in one file, PostgreSQL on a server.

Owns the settings that durability and waiting depend on. The invariants: a reading connection to a file
cannot write to it; a committed transaction has reached the disk; no wait for a lock is without a bound.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import QueuePool

from .errors import RunUnknown, UserMistake
from .filesystem import locks_hold, network_filesystem

LOCK_WAIT_SECONDS = 60
"""How long to wait for another process's transaction; they last milliseconds."""

LOCK_TRY_SECONDS = 1
"""How long one try of a log's transaction does, so that it can be given up in between."""

SQLITE_READONLY_ROLLBACK = sqlite3.SQLITE_READONLY_ROLLBACK
"""What a reading connection meets when a writer was killed inside its transaction, without WAL."""

# A transaction that begins by reading and writes later is refused at once, whatever the timeout, if another
# process has written in between; so every writing one takes its lock as it begins.
_IMMEDIATE = "BEGIN IMMEDIATE"

# The write-ahead log is folded into the file once it has a thousand pages of 4 KiB, and then begins again.
# A commit that makes it longer takes the filesystem's journal as well: half as long again.
_WAL_BYTES = 1000 * 4096
_JOURNAL_SIZE_LIMIT = 64 << 20  # bytes; what is left of the write-ahead log after a checkpoint


class Database(msgspec.Struct, frozen=True):
    """Engines for one database. `writer` is None where it was opened for reading."""

    name: str  # for messages
    reader: Engine
    writer: Engine | None
    begin: str | None  # how a writing transaction begins, if not by itself
    cut: Callable[[Any], None] | None  # ends a connection's wait for a server that is there and silent
    impatient: str  # what makes a connection wait for a lock no longer than LOCK_TRY_SECONDS

    def close(self) -> None:
        # the last connection to go folds SQLite's write-ahead log into its file: it must be able to write
        self.reader.dispose()
        if self.writer is not None:
            self.writer.dispose()


def open_database(url: str, *, writable: bool) -> Database:
    """Engines for `url`, which nothing has been written to. Raises UserMistake."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        parsed = None
    if parsed is not None and parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return _open_postgresql(parsed, writable=writable)
    if parsed is not None and parsed.drivername == "sqlite" and (parsed.database or ":memory:") != ":memory:":
        return _open_sqlite(Path(str(parsed.database)).absolute(), writable=writable)
    raise UserMistake(
        f"{url!r} names no database for a log: use sqlite:///path/to/log.db or postgresql://user@host/name"
    )


# PostgreSQL


def _open_postgresql(url: URL, *, writable: bool) -> Database:
    if importlib.util.find_spec("psycopg") is None:
        raise UserMistake(
            "a log on PostgreSQL needs psycopg: `pip install 'surefoot[postgres]'`, or leave --db out"
        )
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        isolation_level="READ COMMITTED",  # a locked row is read as its last writer left it
        pool_pre_ping=True,
        connect_args={
            "connect_timeout": 5,
            "application_name": "surefoot",
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 30_000,  # milliseconds
        },
    )

    def set_up(connection: Any, _record: object) -> None:
        _set_up_postgresql(connection, writable)

    event.listen(engine, "connect", set_up)
    name = url.render_as_string(hide_password=True)
    impatient = f"SET lock_timeout = '{LOCK_TRY_SECONDS}s'"
    return Database(name, engine, engine if writable else None, None, _cut_off, impatient)


def _cut_off(connection: Any) -> None:
    """End a connection under whoever waits for its answer: for a server that was stopped, not ended, the
    kernel still acknowledges everything. May be called from any thread."""
    with (
        contextlib.suppress(Exception),  # one that is gone already needs no end
        socket.socket(fileno=os.dup(connection.fileno())) as its,
    ):
        its.shutdown(socket.SHUT_RDWR)


def _set_up_postgresql(connection: Any, writable: bool) -> None:
    with connection.cursor() as cursor:
        if not writable:
            cursor.execute("SET default_transaction_read_only = on")
        cursor.execute(f"SET lock_timeout = '{LOCK_WAIT_SECONDS}s'")
        # a driver that is frozen inside a transaction must not keep its row from the one that takes over
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{LOCK_WAIT_SECONDS}s'")
        if cursor.execute("SHOW synchronous_commit").fetchone()[0] == "off":
            cursor.execute("SET synchronous_commit = on")
    connection.commit()


# SQLite


def _open_sqlite(path: Path, *, writable: bool) -> Database:
    writer = None
    if writable:
        filesystem = network_filesystem(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if filesystem is not None:
                _require_locks(path, filesystem)
        except OSError as error:
            raise UserMistake(f"{path.parent} cannot hold a log ({error}): choose another folder") from error
        writer = _sqlite_engine(lambda: _connect_writer(path, "DELETE" if filesystem else "WAL"), _IMMEDIATE)
    elif not path.is_file():
        raise RunUnknown(
            f"there is no log at {path}: name another with --db; without it `surefoot runs` lists "
            "those of a folder"
        )
    reader = _sqlite_engine(lambda: _connect_reader(path), "BEGIN")
    impatient = f"PRAGMA busy_timeout = {1000 * LOCK_TRY_SECONDS}"
    return Database(str(path), reader, writer, _IMMEDIATE, None, impatient)


def _sqlite_engine(connect: Callable[[], sqlite3.Connection], begin: str) -> Engine:
    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool)

    def begin_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "begin", begin_transaction)
    return engine


def _require_locks(path: Path, filesystem: str) -> None:
    if not locks_hold(path.parent):
        raise UserMistake(
            f"{path.parent} is on a {filesystem} filesystem whose file locks do not hold, so that two "
            "drivers could write there at once: choose a --runs-dir on a local disk, or --db postgresql://..."
        )


def _connect_writer(path: Path, journal: str) -> sqlite3.Connection:
    is_new = not path.exists()
    connection = sqlite3.connect(
        path, timeout=LOCK_WAIT_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        if _set_journal_mode(connection, journal) == "wal":
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_SIZE_LIMIT}")
            _lengthen_wal(connection, path)
        else:
            if journal == "WAL":
                _require_locks(path, "memory-sharing-less")  # one that did not give itself away
            # EXTRA also syncs the folder once the journal is deleted, which is what commits
            connection.execute("PRAGMA synchronous = EXTRA")
        if is_new:
            _sync_folder(path.parent)
    except BaseException:
        connection.close()
        raise
    return connection


def _lengthen_wal(connection: sqlite3.Connection, path: Path) -> None:
    """Have the write-ahead log as long as it is going to be, by a transaction too large for memory that is
    taken back. For speed alone: where it cannot be, commits do it one by one."""
    with contextlib.suppress(OSError):
        if path.with_name(path.name + "-wal").stat().st_size >= _WAL_BYTES:
            return
    cached = connection.execute("PRAGMA cache_size").fetchone()[0]
    connection.execute("PRAGMA cache_size = 10")
    with contextlib.suppress(sqlite3.OperationalError):  # another process is at it, or the disk is full
        connection.execute(_IMMEDIATE)
        connection.execute("CREATE TABLE too_large AS SELECT zeroblob(?) AS filler", (_WAL_BYTES + 100_000,))
    if connection.in_transaction:
        connection.rollback()
    connection.execute(f"PRAGMA cache_size = {cached}")


def _set_journal_mode(connection: sqlite3.Connection, journal: str) -> str:
    """Changing it takes a lock that SQLite does not always wait for; what is set already takes none."""
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            return str(connection.execute(f"PRAGMA journal_mode = {journal}").fetchone()[0]).lower()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, be a writer at work, killed in the middle, or long gone."""
    try:
        return _connect_and_look(f"{path.as_uri()}?mode=ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == SQLITE_READONLY_ROLLBACK:
            # a writer was killed while its rollback journal was in force: SQLite itself has to undo that
            connection = _connect_and_look(f"{path.as_uri()}?mode=rw")
            connection.execute("PRAGMA query_only = ON")
            return connection
        wal = path.with_name(path.name + "-wal")
        if os.access(path.parent, os.W_OK) or (wal.exists() and wal.stat().st_size):
            raise
        # the shared memory of the write-ahead log cannot be made in this folder, nor is it needed
        return _connect_and_look(f"{path.as_uri()}?mode=ro&immutable=1")


def _connect_and_look(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri, uri=True, timeout=LOCK_WAIT_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
