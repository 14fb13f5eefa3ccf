"""The log on a PostgreSQL server: the contract, and what is special about a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from surefoot.statemachine import database
from surefoot.statemachine.errors import LogBroken, LogUnavailable, RunExists, RunUnknown, UserMistake
from surefoot.statemachine.log import EventLog, EventRow, verify_chain
from surefoot.statemachine.sqllog import SqlLog, open_log

from ..servers import Server
from .log_contract import LogContract
from .logs import FIRST, HERE, append, note, rows_after, texts


def run_sql(url: str, *statements: str) -> None:
    """Run statements past the log, as someone with psql could."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def disconnect_all(url: str) -> None:
    """Have the server end every connection to the database but this one."""
    run_sql(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )


@pytest.fixture
def log(postgres_url: str) -> Iterator[SqlLog]:
    log = open_log(postgres_url, migrate=True)
    yield log
    log.close()


class TestPostgresLog(LogContract):
    @pytest.fixture
    def log(self, postgres_url: str) -> Iterator[EventLog]:
        self.url = postgres_url
        self.opened = [open_log(postgres_url, migrate=True)]
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


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET payload = '{}' WHERE seq = 2",
        "DELETE FROM events WHERE seq = 2",
        "TRUNCATE events",
        "INSERT INTO events SELECT * FROM events ON CONFLICT (run_id, seq) DO UPDATE SET payload = '{}'",
    ],
)
def test_events_are_never_changed_or_deleted(log: SqlLog, postgres_url: str, statement: str) -> None:
    log.create("a", FIRST, HERE)
    before = list(log.read("a"))
    with pytest.raises(psycopg.errors.RaiseException, match="events are only appended"):
        run_sql(postgres_url, statement)
    assert list(log.read("a")) == before


def test_report_42_edited_and_missing_rows_are_found_by_their_seq(log: SqlLog, postgres_url: str) -> None:
    for run_id in ("edited", "gap", "end"):
        log.create(run_id, FIRST, HERE)
        append(log, run_id, note("one"), note("two"), note("three"))
    run_sql(
        postgres_url,
        "ALTER TABLE events DISABLE TRIGGER USER",
        "UPDATE events SET payload = replace(payload, 'two', 'too') WHERE run_id = 'edited' AND seq = 4",
        "DELETE FROM events WHERE run_id = 'gap' AND seq = 3",
        "DELETE FROM events WHERE run_id = 'end' AND seq = 5",
    )
    for run_id, seq in (("edited", 4), ("gap", 3), ("end", 5)):
        with pytest.raises(LogBroken) as broken:
            verify_chain(log.read(run_id))
        assert broken.value.facts == {"run": run_id, "seq": seq}


# a server that comes and goes


def test_an_append_outlives_a_restart_of_the_server(log: SqlLog, postgres_url: str, postgres: Server) -> None:
    head = log.create("a", FIRST, HERE)
    rows = rows_after(head, note("through the restart"))
    postgres.stop()
    append_thread = threading.Thread(target=log.append, args=("a", 2, 1, rows))
    append_thread.start()
    postgres.start()
    append_thread.join()
    assert texts(list(log.read("a"))) == ["through the restart"]
    log.heartbeat("a", 1)
    append(log, "a", note("and on"))
    assert verify_chain(log.read("a")) == log.head("a").head_hash


def test_a_lost_connection_is_made_anew(log: SqlLog, postgres_url: str) -> None:
    log.create("a", FIRST, HERE)
    list(log.read("a"))
    disconnect_all(postgres_url)
    append(log, "a", note("one"))
    disconnect_all(postgres_url)
    log.heartbeat("a", 1)
    assert texts(list(log.read("a"))) == ["one"]


@pytest.fixture
def lose_answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[bool]]:
    """From the call on, the first commit is done and its answer lost. Returns what shows that it was."""

    def begin() -> list[bool]:
        lost: list[bool] = []
        commit = psycopg.Connection.commit

        def commit_once_without_answer(self: Any) -> None:
            commit(self)
            if not lost:
                lost.append(True)
                self.close()
                raise psycopg.OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(psycopg.Connection, "commit", commit_once_without_answer)
        return lost

    return begin


def test_report_44_an_append_whose_answer_was_lost_took_effect_once(
    log: SqlLog, lose_answers: Callable[[], list[bool]]
) -> None:
    head = log.create("a", FIRST, HERE)
    rows = rows_after(head, note("once"))
    lost = lose_answers()
    log.append("a", 2, 1, rows)
    assert lost
    append(log, "a", note("next"))
    assert texts(list(log.read("a"))) == ["once", "next"]


def test_report_44_a_creation_whose_answer_was_lost_took_effect_once(
    log: SqlLog, lose_answers: Callable[[], list[bool]]
) -> None:
    append_to = log.create("other", FIRST, HERE)
    lost = lose_answers()
    head = log.create("a", FIRST, HERE)
    assert lost
    assert (head.head_seq, head.incarnation) == (2, 1)
    assert len(list(log.read("a"))) == 2
    with pytest.raises(RunExists):
        log.create("a", FIRST, HERE)
    log.append("other", 2, 1, rows_after(append_to, note()))


def test_report_44_a_take_over_whose_answer_was_lost_took_effect_once(
    log: SqlLog, lose_answers: Callable[[], list[bool]]
) -> None:
    log.create("a", FIRST, HERE)
    lost = lose_answers()
    head = log.take_over("a", HERE, ask=True)
    assert lost
    assert (head.head_seq, head.incarnation) == (3, 2)
    log.append("a", 3, 2, rows_after(head, note("mine")))
    assert len(list(log.read("a"))) == 4


def test_patience_with_a_server_that_stays_away_has_an_end(postgres_url: str, postgres: Server) -> None:
    log = open_log(postgres_url, migrate=True, patience_seconds=0.2)
    head = log.create("a", FIRST, HERE)
    postgres.stop()
    try:
        rows = rows_after(head, note("in the end"))
        with pytest.raises(LogUnavailable, match="did not do as it was asked"):
            log.append("a", 2, 1, rows)
    finally:
        postgres.start()
    log.append("a", 2, 1, rows)
    assert texts(list(log.read("a"))) == ["in the end"]
    log.close()


def appending(log: SqlLog, rows: list[EventRow]) -> tuple[threading.Thread, list[LogUnavailable]]:
    """A thread, not started, that appends; and what it is refused with."""
    refused: list[LogUnavailable] = []

    def append_one() -> None:
        try:
            log.append("a", 2, 1, rows)
        except LogUnavailable as error:
            refused.append(error)

    return threading.Thread(target=append_one, daemon=True), refused


def test_a_process_about_to_end_is_not_patient(postgres_url: str, postgres: Server) -> None:
    """Asked to stop while its server is away, a driver gives up within the time that it was given."""
    log = open_log(postgres_url, migrate=True, patience_seconds=3600.0)
    head = log.create("a", FIRST, HERE)
    rows = rows_after(head, note("in the end"))
    waiting, refused = appending(log, rows)
    postgres.stop()
    try:
        waiting.start()
        log.hurry(0.2)
        waiting.join(timeout=30.0)
        assert not waiting.is_alive() and len(refused) == 1
    finally:
        postgres.start()
    log.close()
    with closing(open_log(postgres_url, migrate=False)) as reader:
        assert reader.head("a").head_seq == 2


@pytest.mark.parametrize("asked_to_end", [False, True])
def test_a_server_that_hangs_is_not_waited_for_for_ever(
    postgres_url: str, postgres: Server, asked_to_end: bool
) -> None:
    """It acknowledges what it is sent and answers nothing; then it goes on."""
    log = open_log(postgres_url, migrate=True, patience_seconds=3600.0 if asked_to_end else 1.0)
    head = log.create("a", FIRST, HERE)
    rows = rows_after(head, note("in the end"))
    waiting, refused = appending(log, rows)
    with postgres.frozen():
        waiting.start()
        if asked_to_end:
            log.hurry(1.0)
        waiting.join(timeout=30.0)
        assert not waiting.is_alive() and len(refused) == 1
    log.close()
    again = open_log(postgres_url, migrate=True)
    again.append("a", 2, 1, rows)
    assert texts(list(again.read("a"))) == ["in the end"]
    again.close()


def test_the_wait_for_a_driver_frozen_in_a_transaction_has_an_end(postgres_url: str) -> None:
    with closing(open_log(postgres_url, migrate=True, patience_seconds=1.5)) as log:
        head = log.create("a", FIRST, HERE)
        with psycopg.connect(postgres_url) as frozen:
            frozen.execute("SELECT * FROM runs WHERE run_id = 'a' FOR UPDATE")
            with pytest.raises(LogUnavailable, match="another process keeps it locked"):
                log.append("a", 2, 1, rows_after(head, note("blocked")))
        append(log, "a", note("free"))
        assert texts(list(log.read("a"))) == ["free"]


def test_a_driver_of_ours_that_freezes_in_a_transaction_is_thrown_out(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own session says how long it may sit on a lock, so that no successor waits for ever."""
    monkeypatch.setattr(database, "LOCK_WAIT_SECONDS", 1)
    with closing(open_log(postgres_url, migrate=True)) as frozen:
        frozen.create("a", FIRST, HERE)
        cursor = frozen._cursor
        cursor.execute("SELECT * FROM runs WHERE run_id = 'a' FOR UPDATE")
        monkeypatch.setattr(database, "LOCK_WAIT_SECONDS", 60)
        with closing(open_log(postgres_url, migrate=True)) as heir:
            assert heir.take_over("a", HERE, ask=True).incarnation == 2


# opening


def test_a_commit_is_durable_even_where_the_server_is_told_not_to_wait(postgres_url: str) -> None:
    run_sql(postgres_url, "ALTER DATABASE postgres SET synchronous_commit = off")
    with closing(open_log(postgres_url, migrate=True)) as log:
        log.create("a", FIRST, HERE)
        assert log._cursor.execute("SHOW synchronous_commit").fetchone()[0] == "on"


def test_a_log_opened_for_reading_cannot_write_even_by_mistake(log: SqlLog, postgres_url: str) -> None:
    log.create("a", FIRST, HERE)
    with closing(open_log(postgres_url, migrate=False)) as reader:
        assert len(list(reader.read("a"))) == 2
        with pytest.raises(LogUnavailable, match="read-only transaction"):
            reader._look(lambda cursor: cursor.execute("UPDATE runs SET incarnation = 7"))


def test_a_database_without_a_log_is_unknown_and_stays_empty(postgres_url: str) -> None:
    with pytest.raises(RunUnknown, match="no log at postgresql"):
        open_log(postgres_url, migrate=False)
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT * FROM pg_tables WHERE schemaname = 'public'").fetchall() == []


def test_tables_that_are_not_ours_are_left_alone(postgres_url: str) -> None:
    run_sql(postgres_url, "CREATE TABLE events (what text)")
    with pytest.raises(UserMistake, match="a database of its own"):
        open_log(postgres_url, migrate=True)


def test_a_server_that_cannot_be_reached_is_the_users_to_put_right(tmp_path: Any) -> None:
    with pytest.raises(UserMistake, match=r"cannot open the log at postgresql.*--db") as refused:
        open_log(f"postgresql://me:secret@/x?host={tmp_path}", migrate=True)
    assert "secret" not in str(refused.value)
