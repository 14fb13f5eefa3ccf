"""The log between processes: written, taken over, migrated and killed from several at once."""

from __future__ import annotations

import subprocess
from contextlib import closing

import pytest

from surefoot.statemachine.errors import FencedOut, RunUnknown
from surefoot.statemachine.events import IncarnationBegan, TakeReason
from surefoot.statemachine.log import verify_chain
from surefoot.statemachine.sqllog import open_log

from .logs import FIRST, HERE, append, note, rows_after, run_alone, run_together, start_process, texts


def test_report_40_two_processes_of_200_appends_each_on_runs_of_their_own(database_url: str) -> None:
    """No look at a head becomes a write too late, so none is refused with 'database is locked'."""
    run_together(*(start_process("write_own_run", database_url, run_id, 200) for run_id in "ab"))
    with closing(open_log(database_url, migrate=False)) as log:
        for run_id in "ab":
            rows = list(log.read(run_id))
            assert [row.seq for row in rows] == list(range(1, 203))
            assert texts(rows) == [f"{run_id} {number}" for number in range(200)]
            verify_chain(rows)


def test_report_40_two_processes_of_200_appends_each_on_one_run(database_url: str) -> None:
    with closing(open_log(database_url, migrate=True)) as log:
        log.create("a", FIRST, HERE)
        run_together(*(start_process("write_shared_run", database_url, "a", 200, name) for name in "xy"))
        rows = list(log.read("a"))
    assert [row.seq for row in rows] == list(range(1, 403))
    verify_chain(rows)
    for name in "xy":
        assert [text for text in texts(rows) if text[0] == name] == [f"{name} {n}" for n in range(200)]


def test_report_41_a_second_driver_fences_the_first(database_url: str) -> None:
    with closing(open_log(database_url, migrate=True)) as log:
        first = log.create("a", FIRST, HERE)
        other = start_process("take_over", database_url, "a", "ask")
        assert run_up_to(other, "taken 2")
        with pytest.raises(FencedOut) as fenced:
            log.append("a", 2, 1, rows_after(first, note("zombie")))
        assert fenced.value.facts == {"run": "a", "mine": 1, "current": 2}
        with pytest.raises(FencedOut):
            log.heartbeat("a", 1)
        other.communicate("end\n", timeout=60)
        assert texts(list(log.read("a"))) == ["mine"]


def test_of_two_that_take_a_dead_run_over_at_one_instant_one_does(database_url: str) -> None:
    assert run_alone("start", database_url, "a").returncode == 0  # it never released the run
    processes = [start_process("take_over", database_url, "a") for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = sorted(process.stdout.readline() for process in processes if process.stdout)
    for process in processes:
        process.communicate("end\n", timeout=60)
    assert answers == ["in use\n", "taken 2\n"]
    with closing(open_log(database_url, migrate=False)) as log:
        rows = list(log.read("a"))
    assert texts(rows) == ["one", "mine"]
    began = [event for row in rows if isinstance(event := row.event(), IncarnationBegan)]
    assert [event.reason for event in began] == [TakeReason.NEW, TakeReason.DEAD]


@pytest.mark.parametrize("same_run", [True, False])
def test_two_first_starts_migrate_one_database_once(database_url: str, same_run: bool) -> None:
    names = ["a", "a"] if same_run else ["a", "b"]
    outputs = run_together(*(start_process("start", database_url, name) for name in names))
    assert sorted(outputs) == (["created\n", "exists\n"] if same_run else ["created\n", "created\n"])
    with closing(open_log(database_url, migrate=False)) as log:
        assert [head.run_id for head in log.runs()] == sorted(set(names))
        for name in set(names):
            rows = list(log.read(name))
            assert len(rows) == 3
            verify_chain(rows)


@pytest.mark.parametrize(
    ("crashpoint", "rows_left"),
    [
        ("log.append.after@RunCreated", 2),
        ("log.created", 2),
        ("log.append.before@LearnerLost", 2),
        ("log.append.inside@LearnerLost", 2),
        ("log.append.after@LearnerLost", 3),
        ("log.append.after:2", 3),
    ],
)
def test_a_driver_killed_around_an_append_leaves_all_of_it_or_nothing(
    database_url: str, crashpoint: str, rows_left: int
) -> None:
    assert run_alone("start", database_url, "a", crashpoint=crashpoint).returncode == -9
    with closing(open_log(database_url, migrate=False)) as reader:
        assert len(list(reader.read("a"))) == rows_left
    with closing(open_log(database_url, migrate=True)) as log:
        head = log.take_over("a", HERE)
        append(log, "a", note("goes on"))
        rows = list(log.read("a"))
    assert head.head_seq == rows_left + 1
    assert texts(rows)[-1] == "goes on"
    verify_chain(rows)


@pytest.mark.parametrize("crashpoint", ["log.append.before@RunCreated", "log.append.inside@IncarnationBegan"])
def test_a_driver_killed_before_its_runs_first_events_are_committed_leaves_no_run(
    database_url: str, crashpoint: str
) -> None:
    assert run_alone("start", database_url, "a", crashpoint=crashpoint).returncode == -9
    with closing(open_log(database_url, migrate=False)) as reader:
        assert reader.runs() == []
    assert run_alone("start", database_url, "a").stdout == "created\n"


@pytest.mark.parametrize(("place", "incarnation"), [("before", 1), ("inside", 1), ("after", 2)])
def test_a_driver_killed_as_it_takes_a_run_over_holds_it_or_leaves_it(
    database_url: str, place: str, incarnation: int
) -> None:
    assert run_alone("start", database_url, "a").returncode == 0
    armed = f"log.append.{place}@IncarnationBegan"
    assert run_alone("take_over", database_url, "a", crashpoint=armed).returncode == -9
    with closing(open_log(database_url, migrate=True)) as log:
        assert log.head("a").incarnation == incarnation
        assert len(list(log.read("a"))) == 2 + incarnation
        assert log.take_over("a", HERE).incarnation == incarnation + 1


@pytest.mark.parametrize(
    ("armed", "why"),
    [
        ("log.append.within", "names 'log.append.within', which is no crash point"),
        ("log.append.inside@Nothing:2", "has 'log.append.inside@Nothing', and 'Nothing' is no type of event"),
        ("log.created@RunCreated", "has 'log.created@RunCreated', but only a log.append place takes a type"),
    ],
)
def test_what_can_never_be_reached_is_refused_where_it_is_armed(armed: str, why: str) -> None:
    refused = run_alone("start", "sqlite:///nowhere", "a", crashpoint=armed)
    assert refused.returncode == 1
    assert refused.stderr.strip().endswith(f"ValueError: SUREFOOT_CRASHPOINT {why}")


def test_a_driver_killed_right_after_it_took_a_run_over_is_followed(database_url: str) -> None:
    assert run_alone("start", database_url, "a").returncode == 0
    assert run_alone("take_over", database_url, "a", crashpoint="log.taken_over").returncode == -9
    with closing(open_log(database_url, migrate=True)) as log:
        assert log.take_over("a", HERE).incarnation == 3


@pytest.mark.parametrize(("crashpoint", "is_there"), [("migrate.before", False), ("migrate.after", True)])
def test_a_start_killed_around_the_migration_can_be_repeated(
    database_url: str, crashpoint: str, is_there: bool
) -> None:
    assert run_alone("start", database_url, "a", crashpoint=crashpoint).returncode == -9
    if is_there:
        with closing(open_log(database_url, migrate=False)) as reader:
            assert reader.runs() == []
    else:
        with pytest.raises(RunUnknown):
            open_log(database_url, migrate=False)
    assert run_alone("start", database_url, "a").stdout == "created\n"


def test_what_a_killed_driver_has_been_told_is_committed_is_there(database_url: str) -> None:
    writer = start_process("write_for_ever", database_url, "a")
    assert run_up_to(writer, "40")
    writer.kill()
    assert writer.stdout is not None
    said = writer.stdout.read()  # communicate() would leave out what was read ahead with the lines before
    writer.communicate(timeout=60)
    told = int((["40", *said.split()])[-1])
    with closing(open_log(database_url, migrate=False)) as reader:
        rows = list(reader.read("a"))
    verify_chain(rows)
    written = texts(rows)
    assert written == [str(number) for number in range(len(written))]
    assert told <= len(written) <= told + 2
    assert len(written) % 2 == 0  # each append was of two


def run_up_to(process: subprocess.Popen[str], line: str) -> bool:
    """Let a process go and read what it says until it says `line`."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("go\n")
    process.stdin.flush()
    return any(said.strip() == line for said in process.stdout)
