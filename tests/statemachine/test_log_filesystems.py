"""A log on a network filesystem: never a write-ahead log, and not at all where locks do not hold."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from surefoot.statemachine import database
from surefoot.statemachine.errors import UserMistake
from surefoot.statemachine.filesystem import locks_hold, network_filesystem
from surefoot.statemachine.log import EventLog, verify_chain
from surefoot.statemachine.sqllog import SqlLog, open_log

from .log_contract import LogContract
from .logs import FIRST, HERE, append, note, run_alone, texts
from .test_log_sqlite import path_of, pragma, run_sql


@pytest.fixture
def on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "network_filesystem", lambda path: "nfs4")


@pytest.mark.usefixtures("on_nfs")
class TestSqliteLogOnNetworkFilesystem(LogContract):
    @pytest.fixture
    def log(self, sqlite_url: str, on_nfs: None) -> Iterator[EventLog]:
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

    def test_there_is_no_write_ahead_log(self, log: SqlLog) -> None:
        log.create("a", FIRST, HERE)
        assert pragma(log, "journal_mode") == "delete"
        assert pragma(log, "synchronous") == 3  # EXTRA: the folder too, from which the journal is deleted
        assert sorted(path.name for path in path_of(self.url).parent.iterdir()) == ["log.db"]


def test_a_log_that_was_moved_there_gives_its_write_ahead_log_up(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_log(sqlite_url, migrate=True)) as log:
        log.create("a", FIRST, HERE)
        assert pragma(log, "journal_mode") == "wal"
    monkeypatch.setattr(database, "network_filesystem", lambda path: "nfs4")
    with closing(open_log(sqlite_url, migrate=True)) as log:
        append(log, "a", note("there"))
        assert pragma(log, "journal_mode") == "delete"
        assert texts(list(log.read("a"))) == ["there"]


def test_where_locks_do_not_hold_a_log_is_refused_with_the_alternatives(
    sqlite_url: str, on_nfs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "locks_hold", lambda folder: locks_hold(folder, vfs="unix-none"))
    with pytest.raises(UserMistake, match=r"nfs4 filesystem.*--runs-dir on a local disk.*--db postgresql://"):
        open_log(sqlite_url, migrate=True)
    assert list(path_of(sqlite_url).parent.iterdir()) == []


def test_two_processes_find_out_whether_locks_hold(tmp_path: Path) -> None:
    assert locks_hold(tmp_path)
    assert not locks_hold(tmp_path, vfs="unix-none")  # SQLite's own way not to lock at all
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_holds_no_lock(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        locks_hold(tmp_path / "missing")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/runs/a/log.db", None),
        ("/srv/nfs/runs/log.db", "nfs4"),
        ("/srv/nfs-not/log.db", None),
        ("/srv/nfs/local/log.db", None),
        ("/home/me/log.db", "fuse.sshfs"),
        ("/mnt/share/log.db", "CIFS"),
        ("/twice/log.db", "lustre"),
    ],
)
def test_the_filesystem_is_that_of_the_nearest_mount(
    path: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [
        ("/", "ext4"),
        ("/srv/nfs/local", "xfs"),
        ("/srv/nfs", "nfs4"),
        ("/home", "fuse.sshfs"),
        ("/mnt/share", "CIFS"),
        ("/twice", "ext4"),
        ("/twice", "lustre"),
    ]
    partitions = [SimpleNamespace(mountpoint=where, fstype=fstype) for where, fstype in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: partitions)
    assert network_filesystem(Path(path)) == kind


def test_what_a_driver_was_killed_in_is_undone_for_a_reader(
    sqlite_url: str, on_nfs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback journal in force: pages of an unfinished transaction are in the file itself."""
    with closing(open_log(sqlite_url, migrate=True)) as log:
        log.create("a", FIRST, HERE)
        append(log, "a", *(note(f"{n} " + "x" * 1000) for n in range(50)))
        before = list(log.read("a"))
    with closing(open_log(sqlite_url, migrate=False)) as early_reader:
        assert list(early_reader.read("a")) == before
        killed = run_alone("die_in_a_spilt_transaction", str(path_of(sqlite_url)))
        assert killed.returncode == -9
        journal = path_of(sqlite_url + "-journal")
        assert journal.exists()
        with (
            pytest.raises(sqlite3.OperationalError, match="readonly"),
            sqlite3.connect(f"{path_of(sqlite_url).as_uri()}?mode=ro", uri=True) as bare,
        ):
            bare.execute("SELECT * FROM events").fetchall()
        # one that was open all the while, and one that comes now
        assert list(early_reader.read("a")) == before
    with closing(open_log(sqlite_url, migrate=False)) as reader:
        assert list(reader.read("a")) == before
        verify_chain(reader.read("a"))
