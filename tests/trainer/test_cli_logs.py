"""What `runs`, `log` and `audit` print of runs that go on, have ended, or are broken."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from surefoot.statemachine import events as ev
from surefoot.statemachine.liveness import DriverIdentity
from surefoot.statemachine.log import build_rows
from surefoot.statemachine.sqllog import open_log
from surefoot.trainer.places import Place

from .shell import Shell, told
from .stories import Story

# -- runs -----------------------------------------------------------------------------------------------


def test_runs_says_phase_step_x_of_y_and_the_last_events_age(shell: Shell) -> None:
    told(Story("b").began().updated().updated())
    told(Story("a", ["sync.every_updates=4", "batch.minibatches=2"]).began().completed())
    views = shell.json("runs", "--json")
    assert [(v["run"], v["phase"], v["update"], v["updates_total"]) for v in views] == [
        ("a", "Completed", 4, 4),
        ("b", "Rollout", 2, 4),
    ]
    assert (views[0]["optimizer_step"], views[0]["optimizer_steps_total"]) == (8, 8)
    assert views[0]["policy_version"] == 1  # one publication of four updates
    assert 0 <= views[0]["last_event_age_seconds"] < 600
    code, out, _ = shell("runs")
    assert code == 0
    assert re.search(r"^b +Rollout +2 of 4 +2 of 4 +2 +\d+:\d\d ago +left$", out, re.MULTILINE)


def test_runs_in_a_shared_database_are_listed_from_there(shell: Shell, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    Story("one").began().save(Place("one", Path("runs"), url))
    assert [view["run"] for view in shell.json("runs", "--json", "--db", url)] == ["one"]
    assert shell("log", "one", "--db", url)[0] == 0
    assert shell.json("runs", "--json") == []


def test_runs_says_why_a_run_failed(shell: Shell) -> None:
    story = Story("a").began().updated()
    story.add(ev.RunFailed(code="X", error="prompt 9 failed 3 times", updates=1, optimizer_steps=1, facts={}))
    told(story)
    (view,) = shell.json("runs", "--json")
    assert (view["phase"], view["outcome"]) == ("Failed", "failed at update 1: prompt 9 failed 3 times")
    assert shell("runs")[1].splitlines()[-1] == f"run a: {view['outcome']}"


def test_a_run_whose_log_is_broken_is_still_listed(shell: Shell, tmp_path: Path) -> None:
    told(Story("a").began().updated())
    with sqlite3.connect(tmp_path / "runs" / "a" / "log.db") as database:
        names = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type='trigger'")]
        for name in names:
            database.execute(f'DROP TRIGGER "{name}"')
        database.execute("DELETE FROM events WHERE seq = 5")
    database.close()
    (view,) = shell.json("runs", "--json")
    assert view["phase"] == "Broken" and "5" in view["error"]


def test_before_the_first_run_there_are_none_yet(shell: Shell) -> None:
    assert shell("runs") == (0, "no runs yet in runs: `surefoot train` begins one\n", "")
    assert shell.json("runs", "--json") == []


def test_a_log_that_cannot_be_opened_hides_no_other_run(shell: Shell, tmp_path: Path) -> None:
    told(Story("a").began().completed())
    (tmp_path / "runs/torn").mkdir()
    (tmp_path / "runs/torn/log.db").write_text("this is no database, and long enough to be looked at as one")
    (tmp_path / "runs/unborn").mkdir()
    (tmp_path / "runs/unborn/log.db").touch()  # there before its run is
    whole, torn = shell.json("runs", "--json")
    assert (whole["run"], whole["phase"], whole["error"]) == ("a", "Completed", None)
    assert (torn["run"], torn["phase"], torn["driver"]) == ("torn", "Unreadable", None)
    assert "not a database" in torn["error"]
    assert shell("runs")[1].splitlines()[-1] == f"run torn: {torn['error']}"


def held(place: Place, driver: DriverIdentity, events: Sequence[ev.Event] = ()) -> None:
    """The run is in the hands of `driver`, which has written `events` and let go of nothing."""
    log = open_log(place.log_url, migrate=True)
    head = log.take_over(place.run, driver)
    if events:
        rows = build_rows(
            place.run, head.head_seq, head.head_hash, head.incarnation, events, "2026-01-01T00:00:00Z"
        )
        log.append(place.run, head.head_seq, head.incarnation, rows)
    log.close()


def dead_driver() -> DriverIdentity:
    """Of this host, and of a process that is gone."""
    child = subprocess.Popen(["true"])
    child.wait()
    return msgspec.structs.replace(DriverIdentity.here(), pid=child.pid)


def test_runs_marks_a_run_that_nobody_drives_and_writes_nothing(shell: Shell, tmp_path: Path) -> None:
    ended = ev.RunPreempted(updates=1, optimizer_steps=1, checkpoint_update=0, because="asked")
    for name, driver, events in (
        ("alive", DriverIdentity.here(), []),
        ("dead", dead_driver(), []),
        ("ended", dead_driver(), [ended]),
        ("silent", msgspec.structs.replace(DriverIdentity.here(), host="elsewhere.invalid"), []),
    ):
        place = Place(name)
        told(Story(name).began().updated())
        held(place, driver, events)
    told(Story("left").began().updated())
    with sqlite3.connect(tmp_path / "runs/silent/log.db") as database:
        database.execute("UPDATE runs SET heartbeat_at = heartbeat_at - 31")
    database.close()
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("log.db")}
    assert {view["run"]: view["driver"] for view in shell.json("runs", "--json")} == {
        "alive": "alive",
        "dead": "dead",
        "ended": None,
        "silent": "silent",
        "left": "left",
    }
    out = shell("runs")[1]
    assert re.search(r"^run .* last event +driver$", out, re.MULTILINE)
    assert re.search(r"^dead .* ago +dead$", out, re.MULTILINE)
    assert re.search(r"^ended .* ago +-$", out, re.MULTILINE)
    way_out = "; the same `surefoot train` goes on with it"
    assert out.splitlines()[-4:] == [
        f"run dead: its driver is dead, and left no end in the log{way_out}",
        "run ended: preempted at update 1: asked; start it again to go on",
        f"run left: its driver has left it, without an end in the log{way_out}",
        f"run silent: its driver, on another machine, has been silent for too long{way_out}",
    ]
    assert {path: path.read_bytes() for path in before} == before


# -- log ------------------------------------------------------------------------------------------------


def test_log_json_is_one_object_a_line_with_the_logs_own_payload(shell: Shell) -> None:
    story = told(Story().began().updated())
    code, out, error = shell("log", "a", "--json")
    assert (code, error) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(story.rows) + 1))
    assert set(lines[0]) == {"seq", "type", "schema", "payload", "time", "incarnation", "hash"}
    for line, row in zip(lines, story.rows, strict=True):
        assert line["type"] == row.type
        if row.type != "IncarnationBegan":  # that one names this very process
            assert line["payload"] == json.loads(row.payload)


def test_log_for_people_is_one_line_an_event(shell: Shell) -> None:
    story = told(Story().began().updated())
    out = shell("log", "a")[1]
    assert len(out.splitlines()) == len(story.rows)
    assert "UpdateApplied" in out and "update=1" in out


class Growing(Story):
    """A story that goes on while it is followed: each look at an empty tail brings the next events."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.run)
        self.place = place
        self.began().updated()
        self.save(place)
        self.looks = 0

    def look(self, seconds: float) -> None:
        self.looks += 1
        head = len(self.rows)
        self.updated() if self.looks < 4 else self.completed()
        log = open_log(self.place.log_url, migrate=True)
        from surefoot.statemachine.log import utc_now

        at = log.head(self.run)
        events = [row.event() for row in self.rows[head:]]
        log.append(
            self.run,
            at.head_seq,
            at.incarnation,
            build_rows(self.run, at.head_seq, at.head_hash, at.incarnation, events, utc_now()),
        )
        log.close()


def test_following_a_log_skips_nothing_and_ends_with_the_run(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Growing(Place("a"))
    monkeypatch.setattr("time.sleep", story.look)
    code, out, error = shell("log", "a", "--json", "--follow")
    assert (code, error) == (0, "") and story.looks == 4
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["seq"] for line in lines] == list(range(1, len(story.rows) + 1))
    assert lines[-1]["type"] == "RunCompleted"


def test_following_a_run_whose_driver_is_dead_ends_by_saying_so(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = told(Story().began().updated())
    held(Place("a"), dead_driver())

    def no_wait(seconds: float) -> None:
        raise AssertionError("nothing is going to come")

    monkeypatch.setattr("time.sleep", no_wait)
    code, out, error = shell("log", "a", "--follow")
    assert code == 1 and len(out.splitlines()) == len(story.rows) + 1  # and the take-over
    assert error == (
        "surefoot: run 'a' has not ended, but its driver is dead, and left no end in the log: nothing more "
        "will come until `surefoot train` goes on with it\n"
    )
    assert shell("log", "a")[0] == 0


def test_ctrl_c_ends_following_cleanly(tmp_path: Path) -> None:
    told(Story().began().updated(), tmp_path)
    code = "from surefoot.trainer.cli import main; import sys; sys.exit(main())"
    follower = subprocess.Popen(
        [sys.executable, "-c", code, "log", "a", "--follow", "--json", "--runs-dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    for line in follower.stdout:
        if json.loads(line)["type"] == "WeightsPublished":  # the last one for now
            break
    follower.send_signal(signal.SIGINT)
    rest = follower.stdout.read()  # what was read ahead with the lines before, too
    _, error = follower.communicate(timeout=60)
    assert (follower.returncode, rest, error) == (0, "", "")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    # More than a pipe holds, so that the write is under way when the reader leaves.
    told(Story(sets=[f"data.options.padding={'x' * 200_000}"]).began(), tmp_path)
    code = "from surefoot.trainer.cli import main; import sys; sys.exit(main())"
    command = f"{sys.executable} -c '{code}' log a --json --runs-dir {tmp_path} | head -c 9"
    command += "; echo :${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout == '{"seq":1,:0\n'


def test_the_exit_code_is_the_commands_though_nobody_reads_its_output(tmp_path: Path) -> None:
    # What is printed fits the buffer, so that it fails only when it is flushed, once the command is done.
    told(Story().began(), tmp_path)
    code = "import surefoot.trainer.cli as c; import sys; c.FAILED = 7; sys.exit(c.main())"
    with sqlite3.connect(tmp_path / "a" / "log.db") as log:
        log.execute("UPDATE runs SET head_hash = 'x'")
    command = f"{sys.executable} -c '{code}' audit a --runs-dir {tmp_path} | true"
    command += "; echo ${PIPESTATUS[0]}"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stderr == "" and done.stdout == "7\n"


# -- audit ----------------------------------------------------------------------------------------------


def test_audit_prints_a_verdict_for_every_identity(shell: Shell) -> None:
    story = told(Story().began().completed())
    report = shell.json("audit", "a", "--json")
    assert report["ok"] is True and all(check["ok"] for check in report["checks"])
    assert {"id", "ok", "detail"} == set(report["checks"][0])
    totals = report["totals"]
    assert (totals["updates"], totals["optimizer_steps"], totals["policy_version"]) == (4, 4, 4)
    assert totals["groups"]["trained"] == story.state.groups_trained == 16
    assert totals["incarnations"] == 1
    code, out, _ = shell("audit", "a")
    assert code == 0 and "every identity holds" in out.splitlines()[-1]
    assert len([line for line in out.splitlines() if "  holds  " in line]) == len(report["checks"])


def test_an_audit_that_finds_something_fails(shell: Shell, tmp_path: Path) -> None:
    told(Story().began().completed())
    database = sqlite3.connect(tmp_path / "runs" / "a" / "log.db")
    for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type='trigger'").fetchall():
        database.execute(f'DROP TRIGGER "{name}"')
    database.execute("UPDATE events SET payload = replace(payload, '0.001', '0.002') WHERE seq = 8")
    database.commit()
    database.close()
    code, out, error = shell("audit", "a")
    assert (code, error) == (1, "")
    assert re.search(r"^chain +BROKEN +event 8: ", out, re.MULTILINE)
