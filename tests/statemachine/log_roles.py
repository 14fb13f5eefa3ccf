"""The other process in the tests of the log: `python -m tests.statemachine.log_roles ROLE URL ...`.

It says that it is ready, waits for a line, and plays its role; so several can begin at one instant.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys

from surefoot.statemachine.errors import RunExists, RunInUse, WrongSeq
from surefoot.statemachine.log import DriverIdentity
from surefoot.statemachine.sqllog import open_log

from .logs import FIRST, append, note, rows_after


def start(url: str, run_id: str) -> str:
    """A first start, from nothing: migrate, create, append."""
    log = open_log(url, migrate=True)
    try:
        log.create(run_id, FIRST, DriverIdentity.here())
    except RunExists:
        return "exists"
    append(log, run_id, note("one"))
    log.close()
    return "created"


def write_own_run(url: str, run_id: str, appends: str) -> str:
    """Create a run and append to it, one event a transaction, a look at the head before each."""
    log = open_log(url, migrate=True)
    log.create(run_id, FIRST, DriverIdentity.here())
    for number in range(int(appends)):
        append(log, run_id, note(f"{run_id} {number}"))
    log.close()
    return "done"


def write_shared_run(url: str, run_id: str, appends: str, name: str) -> str:
    """Append to a run that another process appends to as well; where that one was faster, once more."""
    log = open_log(url, migrate=True)
    lost = 0
    for number in range(int(appends)):
        while True:
            try:
                append(log, run_id, note(f"{name} {number}"))
                break
            except WrongSeq:
                lost += 1
    log.close()
    return str(lost)


def take_over(url: str, run_id: str, ask: str = "") -> str:
    """Take a run over, append to it, and stay alive until a line comes."""
    log = open_log(url, migrate=True)
    try:
        head = log.take_over(run_id, DriverIdentity.here(), ask=bool(ask))
    except RunInUse:
        say("in use")
        sys.stdin.readline()
        return ""
    log.append(run_id, head.head_seq, head.incarnation, rows_after(head, note("mine")))
    say(f"taken {head.incarnation}")
    sys.stdin.readline()
    return ""


def write_for_ever(url: str, run_id: str) -> str:
    """Append until killed."""
    log = open_log(url, migrate=True)
    log.create(run_id, FIRST, DriverIdentity.here())
    number = 0
    while True:
        append(log, run_id, note(str(number)), note(str(number + 1)))
        number += 2
        say(str(number))


def die_in_a_spilt_transaction(path: str) -> str:
    """Write past the log, more than fits in memory, so that unfinished pages reach the file; then die."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA cache_size = 5")
    connection.execute("DROP TRIGGER events_refuse_update")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE events SET payload = replace(payload, 'x', 'y')")
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def say(line: str) -> None:
    print(line, flush=True)


ROLES = {
    role.__name__: role
    for role in (
        start,
        write_own_run,
        write_shared_run,
        take_over,
        write_for_ever,
        die_in_a_spilt_transaction,
    )
}

if __name__ == "__main__":
    say("ready")
    sys.stdin.readline()
    say(ROLES[sys.argv[1]](*sys.argv[2:]))
