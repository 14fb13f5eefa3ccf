"""The log in a SQLite file: the contract, and what is special about a file."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from surefoot.statemachine.errors import LogBroken, LogError, LogUnavailable, RunUnknown, UserMistake
from surefoot.statemachine.log import EventLog, verify_chain
from surefoot.statemachine.sqllog import SqlLog, open_log

from .log_contract import LogContract
from .logs import FIRST, HERE, append, note, rows_after, run_alone, texts


def path_of(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


def run_sql(url: str, *statements: str) -> list[tuple[object, ...]]:
    """Run statements past the log, as someone with a shell could."""
    with closing(sqlite3.connect(path_of(url), isolation_level=None, timeout=60)) as connection:
        for statement in statements:
            rows = connection.execute(statement).fetchall()
        return rows


def pragma(log: SqlLog, text: str) -> object:
    """Of the very connection that the log writes with."""
    cursor = log._cursor or log._connect_to_write()
    return cursor.execute(f"PRAGMA {text}").fetchone()[0]


DROP_TRIGGERS = (
    "DROP TRIGGER events_refuse_update",
    "DROP TRIGGER events_refuse_delete",
    "DROP TRIGGER events_refuse_replace",
)


@pytest.fixture
def log(sqlite_url: str) -> Iterator[SqlLog]:
    log = open_log(sqlite_url, migrate=True)
    yield log
    log.close()


class TestSqliteLog(LogContract):
    @pytest.fixture
    def log(self, sqlite_url: str) -> Iterator[EventLog]:
        self.url = sqlite_url
        self.opened = [open_log(sqlite_url, migrate=True)]
        yield self.opened[0]
        for log in self.opened:
            log.close()

    def again(self, log: EventLog) -> EventLog:
        self.opened.append(open_log(self.url, migrate=True))
        return self.opened[-1]

    def let_pass(self, log: EventLog, run_id: str, seconds: float) -> None:
        run_sql(
            self.url, f"UPDATE runs SET heartbeat_at = heartbeat_at - {seconds} WHERE run_id = '{run_id}'"
        )


# what is in the file


def test_a_committed_event_has_reached_the_disk(log: SqlLog) -> None:
    log.create("a", FIRST, HERE)
    assert pragma(log, "journal_mode") == "wal"
    assert pragma(log, "synchronous") == 2  # FULL: the write-ahead log is synced at each commit


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET payload = '{}' WHERE seq = 2",
        "DELETE FROM events WHERE seq = 2",
        "DELETE FROM events",
        "REPLACE INTO events SELECT run_id, seq, type, schema, '{}', time, incarnation, hash FROM events",
        "INSERT INTO events SELECT * FROM events WHERE true "
        "ON CONFLICT (run_id, seq) DO UPDATE SET payload = '{}'",
    ],
)
def test_events_are_never_changed_or_deleted(log: SqlLog, sqlite_url: str, statement: str) -> None:
    log.create("a", FIRST, HERE)
    before = list(log.read("a"))
    with pytest.raises(sqlite3.IntegrityError, match="events are only appended"):
        run_sql(sqlite_url, statement)
    assert list(log.read("a")) == before


@pytest.mark.parametrize(
    "edit",
    [
        "payload = replace(payload, 'two', 'too')",
        "time = '2020-01-01T00:00:00.000Z'",
        "type = 'LearnerLast'",
        "schema = 2",
        "incarnation = 2",
        "hash = replace(hash, substr(hash, 1, 1), 'g')",
    ],
)
def test_report_42_an_edited_row_is_found_by_its_seq(log: SqlLog, sqlite_url: str, edit: str) -> None:
    log.create("a", FIRST, HERE)
    append(log, "a", note("one"), note("two"), note("three"))
    run_sql(sqlite_url, *DROP_TRIGGERS, f"UPDATE events SET {edit} WHERE seq = 4")
    with pytest.raises(LogBroken, match="event 4") as broken:
        verify_chain(log.read("a"))
    assert broken.value.facts["seq"] == 4


def test_report_42_a_row_whose_hash_was_made_anew_is_found_by_the_next(log: SqlLog, sqlite_url: str) -> None:
    head = log.create("a", FIRST, HERE)
    append(log, "a", note("one"), note("two"))
    forged = rows_after(head, note("won"))[0]
    run_sql(
        sqlite_url,
        *DROP_TRIGGERS,
        f"UPDATE events SET payload = '{forged.payload.decode()}', time = '{forged.time}', "
        f"hash = '{forged.hash}' WHERE seq = 3",
    )
    with pytest.raises(LogBroken, match="event 4"):
        verify_chain(log.read("a"))


@pytest.mark.parametrize("seq", [1, 3, 5])
def test_report_42_a_missing_row_is_found_by_its_seq(log: SqlLog, sqlite_url: str, seq: int) -> None:
    log.create("a", FIRST, HERE)
    append(log, "a", note("one"), note("two"), note("three"))
    run_sql(sqlite_url, *DROP_TRIGGERS, f"DELETE FROM events WHERE seq = {seq}")
    with pytest.raises(LogBroken, match=f"event {seq} of run 'a' is missing") as broken:
        list(log.read("a"))
    assert broken.value.facts == {"run": "a", "seq": seq}


def test_report_42_a_last_row_that_is_another_is_found(log: SqlLog, sqlite_url: str) -> None:
    """Even one that is rightly chained: the run's head names the row it ends with."""
    head = log.create("a", FIRST, HERE)
    append(log, "a", note("one"))
    forged = rows_after(head, note("won"))[0]
    run_sql(
        sqlite_url,
        *DROP_TRIGGERS,
        f"UPDATE events SET payload = '{forged.payload.decode()}', time = '{forged.time}', "
        f"hash = '{forged.hash}' WHERE seq = 3",
    )
    with pytest.raises(LogBroken, match=r"event 3 .* head"):
        list(log.read("a"))


def test_nothing_is_appended_to_a_head_that_was_edited(log: SqlLog, sqlite_url: str) -> None:
    head = log.create("a", FIRST, HERE)
    append(log, "a", note("one"))
    head = log.head("a")
    run_sql(sqlite_url, f"UPDATE runs SET head_hash = '{'0' * 64}'")
    with pytest.raises(LogBroken, match="event 3"):
        log.append("a", 3, 1, rows_after(head, note("two")))
    other = open_log(sqlite_url, migrate=True)
    with pytest.raises(LogBroken):
        other.append("a", 3, 1, rows_after(head, note("two")))
    other.close()


def test_report_42_a_torn_file_is_found_by_the_first_row_that_cannot_be_read(
    log: SqlLog, sqlite_url: str
) -> None:
    log.create("a", FIRST, HERE)
    append(log, "a", *(note("x" * 200) for _ in range(3000)))
    log.close()
    path = path_of(sqlite_url)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xa5" * 65536)
    with closing(open_log(sqlite_url, migrate=False)) as torn, pytest.raises(LogBroken) as broken:
        verify_chain(torn.read("a"))
    assert 500 < broken.value.facts["seq"] < 3000


# a full disk


def test_a_full_disk_stops_the_append_and_leaves_the_log_whole(log: SqlLog) -> None:
    """As SQLite sees it: the file may not grow by another page."""
    log.create("a", FIRST, HERE)
    pragma(log, "max_page_count = 40")
    kept = 0
    with pytest.raises(LogUnavailable, match="the disk is full; make room") as full:
        while True:
            rows = rows_after(log.head("a"), note("x" * 3000, kept), note("y" * 3000, kept))
            log.append("a", rows[0].seq - 1, 1, rows)
            kept += 2
    assert isinstance(full.value, LogError)
    assert kept > 2
    written = list(log.read("a"))
    assert len(written) == log.head("a").head_seq == 2 + kept
    assert verify_chain(written) == log.head("a").head_hash
    pragma(log, "max_page_count = 1000000")
    log.append("a", rows[0].seq - 1, 1, rows)
    assert len(list(log.read("a"))) == 2 + kept + 2


def test_a_disk_that_takes_no_more_bytes_stops_the_append_and_leaves_the_log_whole(
    log: SqlLog, sqlite_url: str
) -> None:
    """As the operating system sees it: nothing may lie further back in the write-ahead log."""
    log.create("a", FIRST, HERE)
    _, frames, _ = run_sql(sqlite_url, "PRAGMA wal_checkpoint(PASSIVE)")[0]
    assert isinstance(frames, int)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 + frames * (24 + 4096) + 30_000, hard))
    try:
        kept = 0
        with pytest.raises(LogUnavailable):
            while True:
                rows = rows_after(log.head("a"), note("x" * 3000, kept))
                log.append("a", rows[0].seq - 1, 1, rows)
                kept += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert 0 < kept < 10
    assert verify_chain(log.read("a")) == log.head("a").head_hash
    log.append("a", rows[0].seq - 1, 1, rows)
    log.append("a", rows[0].seq - 1, 1, rows)
    with closing(open_log(sqlite_url, migrate=False)) as reader:
        assert len(list(reader.read("a"))) == 2 + kept + 1


@pytest.mark.parametrize("asked_to_end", [False, True])
def test_the_wait_for_another_process_in_a_transaction_has_an_end(
    sqlite_url: str, asked_to_end: bool
) -> None:
    """That of its patience, or of the time that a driver asked to stop still has."""
    with closing(open_log(sqlite_url, migrate=True, patience_seconds=3600.0 if asked_to_end else 1.5)) as log:
        head = log.create("a", FIRST, HERE)
        rows = rows_after(head, note("blocked"))
        if asked_to_end:
            log.hurry(1.5)
        with closing(sqlite3.connect(path_of(sqlite_url), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LogUnavailable, match="another process keeps it locked"):
                log.append("a", 2, 1, rows)
        log.append("a", 2, 1, rows)
        assert texts(list(log.read("a"))) == ["blocked"]


def test_a_commit_does_not_make_the_write_ahead_log_longer(log: SqlLog, sqlite_url: str) -> None:
    """A longer file needs the filesystem's own journal to be synced as well."""
    wal = path_of(sqlite_url + "-wal")
    before = wal.stat().st_size
    log.create("a", FIRST, HERE)
    for number in range(600):  # more pages than it is folded into the file at
        append(log, "a", note("x" * 3000, number))
    assert before <= wal.stat().st_size < 1.1 * before


def test_a_write_ahead_log_of_full_length_holds_nothing(log: SqlLog, sqlite_url: str) -> None:
    tables = run_sql(sqlite_url, "SELECT name FROM sqlite_master WHERE name LIKE '%large%'")
    assert tables == []
    assert run_sql(sqlite_url, "PRAGMA freelist_count") == [(0,)]
    with closing(open_log(sqlite_url, migrate=False)) as reader:
        assert reader.runs() == []


# reading


def test_reading_needs_no_one_elses_leave_and_changes_nothing(log: SqlLog, sqlite_url: str) -> None:
    log.create("a", FIRST, HERE)
    append(log, "a", note("committed"))
    before = path_of(sqlite_url).read_bytes()
    with closing(sqlite3.connect(path_of(sqlite_url), isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE runs SET incarnation = 9")
        reader = open_log(sqlite_url, migrate=False)
        assert texts(list(reader.read("a"))) == ["committed"]
        assert reader.head("a").incarnation == 1
        reader.close()
        writer.execute("ROLLBACK")
    assert path_of(sqlite_url).read_bytes() == before


def test_a_log_that_was_opened_for_reading_cannot_be_written(log: SqlLog, sqlite_url: str) -> None:
    head = log.create("a", FIRST, HERE)
    with closing(open_log(sqlite_url, migrate=False)) as reader:
        for write in (
            lambda: reader.append("a", 2, 1, rows_after(head, note())),
            lambda: reader.create("b", FIRST, HERE),
            lambda: reader.take_over("a", HERE, ask=True),
            lambda: reader.heartbeat("a", 1),
            lambda: reader.release("a", 1),
        ):
            with pytest.raises(LogError, match="opened for reading"):
                write()


def test_a_reader_stays_at_work_while_drivers_come_and_go(sqlite_url: str) -> None:
    first = open_log(sqlite_url, migrate=True)
    first.create("a", FIRST, HERE)
    reader = open_log(sqlite_url, migrate=False)
    assert len(list(reader.read("a"))) == 2
    first.close()
    second = open_log(sqlite_url, migrate=True)
    append(second, "a", note("of the second"))
    assert texts(list(reader.read("a"))) == ["of the second"]
    second.close()
    reader.close()


def test_a_closed_log_is_one_file(log: SqlLog, sqlite_url: str) -> None:
    log.create("a", FIRST, HERE)
    list(log.read("a"))
    log.close()
    assert [path.name for path in path_of(sqlite_url).parent.iterdir()] == ["log.db"]


def test_a_log_that_is_not_there_is_unknown_and_not_made(sqlite_url: str) -> None:
    with pytest.raises(RunUnknown, match=r"no log at .*log\.db.*surefoot runs"):
        open_log(sqlite_url, migrate=False)
    assert not path_of(sqlite_url).parent.exists()


def test_a_file_that_no_log_was_made_in_yet_is_unknown(sqlite_url: str) -> None:
    path_of(sqlite_url).parent.mkdir(parents=True)
    path_of(sqlite_url).touch()
    with pytest.raises(RunUnknown, match="surefoot train"):
        open_log(sqlite_url, migrate=False)
    assert path_of(sqlite_url).stat().st_size == 0


@pytest.mark.parametrize("migrate", [True, False])
def test_a_file_that_is_no_database_is_refused(sqlite_url: str, migrate: bool) -> None:
    path_of(sqlite_url).parent.mkdir(parents=True)
    path_of(sqlite_url).write_bytes(b"not a database, whatever its name says" * 200)
    with pytest.raises(UserMistake, match=r"log\.db.*not a database"):
        open_log(sqlite_url, migrate=migrate)


@pytest.mark.parametrize(
    "url", ["runs/a/log.db", "sqlite://", "sqlite:///:memory:", "mysql://x/y", "", "postgresql+asyncpg://x/y"]
)
def test_a_url_that_names_no_database_for_a_log_is_refused(url: str) -> None:
    with pytest.raises(UserMistake, match=r"sqlite:///path.*postgresql://"):
        open_log(url, migrate=True)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UserMistake, match="choose another folder"):
        open_log(f"sqlite:///{tmp_path}/runs/a/log.db", migrate=True)


# a writer that was killed


def test_what_a_killed_driver_had_not_committed_is_not_there(sqlite_url: str) -> None:
    killed = run_alone("start", sqlite_url, "a", crashpoint="log.append.inside@LearnerLost")
    assert killed.returncode == -9
    with closing(open_log(sqlite_url, migrate=False)) as reader:
        rows = list(reader.read("a"))
    assert [row.seq for row in rows] == [1, 2]
    verify_chain(rows)
