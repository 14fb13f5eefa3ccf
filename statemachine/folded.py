"""What a fold of a whole run comes to, here or in a process beside, for the audit to compare with.

A long log is folded by a child process while its parent audits it: neither waits for the other, and both
read every row. Owns that child, which writes nothing and ends with the context that it was started in.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import msgspec

from .log import EventLog, EventRow
from .state import RunState

BESIDE_FROM_EVENTS = 50_000
"""A shorter log is folded sooner than a process has started."""

SLOWEST_SECONDS, SLOWEST_EVENTS_A_SECOND = 60.0, 2_000
"""A process beside that takes longer than this has been stopped, or worse."""


class Folded(msgspec.Struct, frozen=True):
    """How far a fold came, and what the events up to there add up to, named as the audit names it."""

    events: int
    phase: str
    totals: dict[str, Any]
    refused: str = ""  # why the event after them was not folded, if one was not


class _Work(msgspec.Struct, frozen=True):
    url: str
    run_id: str
    seq: int


def folded(rows: Iterable[EventRow], state: RunState | None = None) -> Folded:
    """Fold all rows of a run. Never raises for what they hold."""
    state, refused = RunState() if state is None else state, ""
    try:
        for row in rows:
            state.apply(row)
    except Exception as error:  # what a fold does with a log that is broken already is not known
        refused = str(error)
    totals = {
        "seq": state.seq,
        "incarnations": state.incarnation,
        "updates": state.updates,
        "optimizer_steps": state.optimizer_steps,
        "policy_version": state.policy_version,
        "prompts_drawn": state.drawn,
        "groups": state.groups_by_fate(),
    }
    return Folded(state.seq, state.phase.value, totals, refused)


@contextmanager
def folding(log: EventLog, url: str, run_id: str, seq: int) -> Generator[Callable[[], Folded]]:
    """Fold the events of a run up to `seq`; what is yielded says what they came to, once.

    A long log is folded in a process beside, which opens `url`; where that one fails, it is folded here.
    """
    child = _start(_Work(url, run_id, seq)) if seq >= BESIDE_FROM_EVENTS else None

    @cache
    def result() -> Folded:
        if child is not None:
            with suppress(OSError, msgspec.DecodeError, subprocess.TimeoutExpired):
                answer, _ = child.communicate(timeout=max(SLOWEST_SECONDS, seq / SLOWEST_EVENTS_A_SECOND))
                if child.returncode == 0:
                    return msgspec.json.decode(answer, type=Folded)
        return folded(log.read(run_id, limit=seq))

    try:
        yield result
    finally:
        if child is not None:
            child.kill()
            child.wait()


def _start(work: _Work) -> subprocess.Popen[bytes] | None:
    """The process beside, at work; None where there can be none. The URL may hold a password, so it does not
    stand in the command; `-P` keeps what lies in the current folder out of the child's imports."""
    command = [sys.executable, "-P", "-m", __name__]
    child: subprocess.Popen[bytes] | None = None
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(work))
        child.stdin.close()
    except OSError:
        if child is not None:
            child.kill()
            child.wait()
        return None
    child.stdin = None
    return child


def main() -> None:
    """The child: what to fold comes in, what it came to goes out."""
    from .sqllog import open_log

    work = msgspec.json.decode(sys.stdin.buffer.read(), type=_Work)
    log = open_log(work.url, migrate=False)
    sys.stdout.buffer.write(msgspec.json.encode(folded(log.read(work.run_id, limit=work.seq))))
    log.close()


if __name__ == "__main__":
    main()
