"""The command line: exact output where it is a contract, one line for every error, nothing heavy imported."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from surefoot.rollout.store import FsspecGroupStore
from surefoot.statemachine import events as ev
from surefoot.statemachine.errors import UserMistake
from surefoot.statemachine.liveness import DriverIdentity
from surefoot.statemachine.log import EventRow, build_rows
from surefoot.statemachine.sqllog import open_log
from surefoot.trainer.cli import main
from surefoot.trainer.places import Place, next_free

from .models import write_model, write_rows
from .stories import Story


class Shell:
    """Commands run in this process, in a folder of their own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = main(arguments)
        return code, *self._capsys.readouterr()

    def json(self, *arguments: str) -> Any:
        code, out, error = self(*arguments)
        assert (code, error) == (0, "")
        return json.loads(out)

    def refused(self, *arguments: str) -> str:
        code, out, error = self(*arguments)
        assert (code, out) == (2, "")
        assert error.startswith("surefoot: ") and error.count("\n") == 1
        return error


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(capsys)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", 10)
    path = tmp_path / "sums.toml"
    path.write_text(
        """
        data = { source = "rows.jsonl", epochs = 3 }
        model.path = "model"
        batch.prompts = 4
        rollout.max_new_tokens = 8
        sync.every_updates = 4
        optim = { lr = 1.0, schedule.warmup_ratio = 0.1 }
        """
    )
    return path


def told(story: Story, runs_dir: Path = Path("runs")) -> Story:
    story.save(Place(story.run, runs_dir))
    return story


# -- plan -----------------------------------------------------------------------------------------------


def test_plan_json_has_every_total_and_one_learning_rate_per_optimizer_step(
    shell: Shell, config: Path
) -> None:
    plan = shell.json("plan", "sums.toml", "--json")
    expected = {
        "data_len": 10,
        "epochs": 3,
        "prompts_available": 30,
        "prompts_total": 30,
        "updates_total": 7,
        "optimizer_steps_total": 7,
        "publications_total": 2,
        "prompts_unused": 2,
        "horizon": 7,
        "warmup_steps": 1,
    }
    assert {key: plan[key] for key in expected} == expected
    assert len(plan["learning_rates"]) == 7


def test_plan_starts_nothing_and_writes_nothing(shell: Shell, config: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, out, error = shell("plan", "sums.toml")
    assert (code, error) == (0, "")
    assert "optimizer_steps_total = 7 updates * 1 minibatches * 1 passes = 7" in out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "sets",
    [["--set", "data.epochs=1", "--set", "batch.prompts=5"], ["--set", "data.epochs=1", "batch.prompts=5"]],
)
def test_several_keys_are_set_at_once(shell: Shell, config: Path, sets: list[str]) -> None:
    assert shell.json("plan", "sums.toml", "--json", *sets)["updates_total"] == 2


def test_set_on_one_of_two_exclusive_keys_takes_the_others_place(shell: Shell, config: Path) -> None:
    plan = shell.json("plan", "sums.toml", "--json", "--set", "optim.schedule.warmup_steps=3")
    assert plan["warmup_steps"] == 3


# -- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "absent.toml"], ["absent.toml", "no such file"]),
        (["plan", "sums.toml", "--set", "batch.promts=4"], ["batch.promts", "batch.prompts"]),
        (["plan", "sums.toml", "--set", "batch.prompts=31"], ["30", "31"]),
        (["plan", "sums.toml", "--set", "optim.lr=-1"], ["optim.lr = -1"]),
        (["plan", "sums.toml", "--set", "rollout.top_p=0.9"], ["rollout.top_p", "log-probabilities"]),
        (["plan", "sums.toml", "--set", "model.path=nowhere"], ["nowhere"]),
        (["plan", "sums.toml", "--set", "data.source=none.jsonl"], ["none.jsonl"]),
        (["plan", "sums.toml", "stray"], ["stray"]),
        (["plan"], ["CONFIG"]),
        (["plan", "sums.toml", "--bogus"], ["--bogus"]),
        (["train", "sums.toml", "--run", "../up"], ["../up"]),
        (["plan", "."], ["config .: is a folder"]),
        (["runs", "--runs-dir", "nowhere"], ["/nowhere, which does not exist", "--runs-dir"]),
        (["runs", "--runs-dir", "rows.jsonl"], ["/rows.jsonl, which is a file", "--runs-dir"]),
        *(
            (
                [*command, "--runs-dir", "nowhere"],
                ["no run 'a'", "/nowhere, which does not exist", "--runs-dir"],
            )
            for command in (["log", "a"], ["samples", "a"], ["audit", "a"], ["export", "a", "folder"])
        ),
        (["log", "a", "--db", ""], ["'' names no database"]),
        (["samples", "a", "--update", "last"], ["--update last: must be a valid integer; give another"]),
        (["train", "sums.toml", "--set", "batch.promts=4"], ["batch.promts", "batch.prompts"]),
        (["log", "absent"], ["absent", "surefoot runs"]),
        (["samples", "absent"], ["absent"]),
        (["audit", "absent"], ["absent"]),
        (["export", "absent", "folder"], ["absent"]),
        (["replay", "absent"], ["absent"]),
        (["runs", "--db", "sqlite:///absent.db"], ["absent.db"]),
        (["runs", "--db", "mysql://host/db"], ["mysql"]),
        (["nonsense"], ["nonsense"]),
        ([], ["command"]),
    ],
)
def test_a_users_mistake_is_one_line_exit_code_2_and_nothing_changed(
    shell: Shell, config: Path, tmp_path: Path, arguments: list[str], said: list[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    error = shell.refused(*arguments)
    for part in said:
        assert part in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "batch.prompts=31"], ["30", "31"]),
        (["--set", "data.source=none.jsonl"], ["none.jsonl"]),
        (["--runs-dir", "rows.jsonl"], ["rows.jsonl is a file", "--runs-dir"]),
        (["--runs-dir", "rows.jsonl/deep"], ["rows.jsonl is a file", "--runs-dir"]),
    ],
)
def test_a_mistake_that_train_finds_as_it_checks_is_one_line_below_that_it_checks(
    shell: Shell, config: Path, tmp_path: Path, arguments: list[str], said: list[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, out, error = shell("train", "sums.toml", *arguments)
    assert (code, out) == (2, "checking config and data\n")
    assert error.startswith("surefoot: ") and error.count("\n") == 1
    for part in said:
        assert part in error
    assert sorted(tmp_path.rglob("*")) == before


def test_debug_shows_the_traceback(shell: Shell, config: Path) -> None:
    from surefoot.statemachine.errors import ConfigRefused

    with pytest.raises(ConfigRefused):
        main(["plan", "absent.toml", "--debug"])


def test_an_error_that_is_no_mistake_is_one_line_and_exit_code_1(
    shell: Shell, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("surefoot.trainer.plan.prepare", full)
    code, out, error = shell("plan", "sums.toml")
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert "No space left on device" in error


def test_a_mistyped_command_is_told_where_the_right_ones_are(shell: Shell) -> None:
    for words in (["nosuch"], ["plan"], ["plan", "a.toml", "--nosuch"]):
        assert shell.refused(*words).endswith("; `surefoot --help` shows what there is\n")


def test_a_full_disk_is_said_with_the_way_out(
    shell: Shell, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/groups/g0001-0000001.msgpack")

    monkeypatch.setattr("surefoot.trainer.plan.prepare", full)
    code, _, error = shell("plan", "sums.toml")
    assert (code, error.count("\n")) == (1, 1)
    assert "g0001-0000001.msgpack" in error and "make room and run the same command again" in error


def test_a_folder_of_runs_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the operating system, as the administrator may write anywhere but to what is mounted so."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UserMistake, match=r"cannot be written to; name another folder with --runs-dir"):
        Place("a", tmp_path / "new").refuse_unusable()
    monkeypatch.undo()
    Place("a", tmp_path / "new").refuse_unusable()


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
    rest, error = follower.communicate(timeout=60)
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


# -- samples --------------------------------------------------------------------------------------------


def sampled(tmp_path: Path) -> Story:
    """Two updates and a batch that is stored; ids 5, 6 ... are '#', '$' ..."""
    model = write_model(tmp_path / "model")
    store = FsspecGroupStore(tmp_path / "runs" / "a")
    story = Story("a", [f"model.path={model}", "data.size=20"]).began()
    story.updated(store=store).updated(store=store).stored(store=store)
    written = {path.name: path.read_bytes() for path in (tmp_path / "runs/a/groups").iterdir()}
    import shutil

    shutil.rmtree(tmp_path / "runs")
    told(story)
    for name, content in written.items():
        (tmp_path / "runs/a/groups").mkdir(exist_ok=True)
        (tmp_path / "runs/a/groups" / name).write_bytes(content)
    return story


def test_samples_are_of_the_last_update_unless_told(shell: Shell, tmp_path: Path) -> None:
    sampled(tmp_path)
    code, out, error = shell("samples", "a")
    assert (code, error) == (0, "")
    heads = [line for line in out.splitlines() if line.startswith("group")]
    assert heads == [f"group {i}  attempt 1  row {i}  update 2" for i in (4, 5, 6, 7)]
    assert "prompt    ' !\"'" in out  # ids 2, 3, 4
    assert out.count('"#$%&\'"') == 8  # ids 5 to 9
    assert out.count("reward 1  versions 0 to 1  5 tokens") == 4


def test_samples_of_one_update_and_of_one_group(shell: Shell, tmp_path: Path) -> None:
    sampled(tmp_path)

    def heads(*arguments: str) -> list[str]:
        return [line for line in shell("samples", "a", *arguments)[1].splitlines() if line[:5] == "group"]

    assert len(heads("--update", "1")) == 4
    assert heads("--group", "2") == ["group 2  attempt 1  row 2  update 1"]
    assert heads("--update", "2", "--group", "5") == ["group 5  attempt 1  row 5  update 2"]
    assert heads("--group", "9") == ["group 9  attempt 1  row 9  not trained yet"]
    assert "--update 3: the run's updates are 1 to 2;" in shell.refused("samples", "a", "--update", "3")
    assert "update 2" in shell.refused("samples", "a", "--update", "2", "--group", "1")
    assert "--group 99: the stored groups are 0 to 11;" in shell.refused("samples", "a", "--group", "99")
    of_one = shell.refused("samples", "a", "--update", "2", "--group", "99")
    assert "--group 99: update 2 trained the groups 4 to 7;" in of_one


def test_samples_that_are_not_there_yet_are_said_to_be(shell: Shell, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    told(Story("new", [f"model.path={model}"]).began())
    story = Story("stored", [f"model.path={model}"]).began()
    story.stored()
    told(story)
    none = "no update is in the log yet, nor is a group stored; look again when one is"
    assert shell.refused("samples", "new") == f"surefoot: {none}\n"
    assert shell.refused("samples", "new", "--update", "1") == f"surefoot: --update 1: {none}\n"
    assert "--group 0: no group is stored yet" in shell.refused("samples", "new", "--group", "0")
    error = shell.refused("samples", "stored", "--update", "1")
    assert (
        "--update 1: no update is in the log yet; leave --update out and name a stored --group, 0 to 3"
        in error
    )


def test_a_range_with_gaps_says_how_many_there_are() -> None:
    from surefoot.trainer.views import span

    assert (span([3]), span([1, 2, 3]), span({0, 4, 9})) == ("3 to 3", "1 to 3", "0 to 9 (3 of these)")


def test_help_says_what_every_word_after_the_config_is(shell: Shell) -> None:
    for command in ("plan", "train"):
        code, out, _ = shell(command, "--help")
        assert code == 0 and "[KEY=VALUE]..." in out
        assert re.search(r"^  KEY=VALUE .*More overrides, each as if after a --set\.$", out, re.MULTILINE)


def test_samples_that_were_retired_are_said_to_be(shell: Shell, tmp_path: Path) -> None:
    from surefoot.statemachine.errors import UserMistake
    from surefoot.trainer.views import SampleSource

    story = sampled(tmp_path)
    source = SampleSource.of(story.rows)
    files = {update: source.places[groups[0]][0] for update, groups in source.trained.items()}

    def without(*updates: int) -> SampleSource:
        gone = frozenset(files[update] for update in updates)
        return SampleSource(source.config, source.places, source.trained, gone)

    retired = without(1)
    assert without(2).chosen(None, None)[0][0] == 1  # by default the last one that is there
    with pytest.raises(UserMistake, match=r"groups\.keep = 'all'"):
        without(1, 2).chosen(None, None)

    with pytest.raises(UserMistake, match=r"groups\.keep = 'all'"):
        retired.read(FsspecGroupStore(tmp_path / "runs/a"), 0, 1)


def test_a_missing_group_file_is_named_with_its_place_and_the_way_out(shell: Shell, tmp_path: Path) -> None:
    sampled(tmp_path)
    for path in (tmp_path / "runs/a/groups").iterdir():
        path.unlink()
    code, out, error = shell("samples", "a")
    assert (code, out) == (1, "")
    assert re.fullmatch(
        rf"surefoot: group 4: group file \w+ at byte 0 is missing in {tmp_path}/runs/a; put the file back, "
        r"or name another --update\n",
        error,
    )


def test_a_damaged_group_file_is_an_error_of_one_line(shell: Shell, tmp_path: Path) -> None:
    sampled(tmp_path)
    for path in (tmp_path / "runs/a/groups").iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    code, _, error = shell("samples", "a")
    assert code == 1 and error.count("\n") == 1 and "damaged" in error


def test_an_export_of_a_missing_checkpoint_says_what_is_kept(shell: Shell, tmp_path: Path) -> None:
    told(Story().began().completed())
    code, _, error = shell("export", "a", "out")
    assert code == 1 and error == (
        f"surefoot: checkpoint c: manifest.json is missing in {tmp_path}/runs/a: put it back, or name "
        "another --update (kept are the checkpoints of: 4; 0 is the starting weights)\n"
    )
    assert not (tmp_path / "out").exists()


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


# -- names ----------------------------------------------------------------------------------------------


def test_new_takes_the_next_free_name(shell: Shell) -> None:
    runs = Path("runs")
    assert next_free("a", runs).run == "a"
    told(Story("a").began())
    assert next_free("a", runs).run == "a-2"
    told(Story("a-2").began())
    assert next_free("a", runs).run == "a-3"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", ".hidden", "a" * 101, "a b", "a\n"])
def test_a_name_that_cannot_be_a_folders_is_refused(name: str) -> None:
    from surefoot.statemachine.errors import UserMistake

    with pytest.raises(UserMistake, match="run name"):
        Place(name)


# -- what is imported -----------------------------------------------------------------------------------


def test_no_light_command_imports_torch_or_ray(config: Path, tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    store = FsspecGroupStore(tmp_path / "groups-of-a")
    story = Story("a", [f"model.path={model}", f"storage.url={tmp_path / 'elsewhere'}"]).began()
    story.updated(store=FsspecGroupStore(tmp_path / "elsewhere" / "a")).completed()
    told(story, tmp_path / "runs")
    del store
    code = (
        "import json, sys\n"
        "from surefoot.trainer.cli import main\n"
        "codes = [main(arguments) for arguments in json.loads(sys.argv[1])]\n"
        "heavy = sorted({'torch', 'ray', 'transformers', 'matplotlib'} & set(sys.modules))\n"
        "print('\\n' + json.dumps([codes, heavy]))\n"
    )
    commands = [
        ["--help"],
        ["train", "--help"],
        ["plan", "sums.toml"],
        ["plan", "sums.toml", "--json"],
        ["runs"],
        ["log", "a", "--follow"],
        ["samples", "a", "--update", "1"],
        ["audit", "a"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.stderr == ""
    assert json.loads(done.stdout.splitlines()[-1]) == [[0] * len(commands), []]


def test_generated_tasks_are_planned_without_torch_too(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "sums.toml").write_text(
        'data = { source = "reasoning_gym:chain_sum", size = 64 }\nmodel.path = "model"\n'
        "rollout.max_new_tokens = 8\n"
    )
    code = (
        "import sys; from surefoot.trainer.cli import main; code = main(['plan', 'sums.toml'])\n"
        "sys.exit(code or len({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_rows_print_as_they_are(shell: Shell) -> None:
    """A row of a type that this version does not know can still be looked at."""
    from surefoot.trainer.views import row_json, row_line

    row = EventRow("a", 7, "SomethingNew", 3, b'{"x":1}', "2026-01-01T00:00:00Z", 2, "h")
    assert json.loads(row_json(row))["payload"] == {"x": 1}
    assert "SomethingNew" in row_line(row, 200) and "x=1" in row_line(row, 200)
    assert len(row_line(row, 30)) == 30
    assert "SomethingNew" not in ev.EVENT_TYPES
