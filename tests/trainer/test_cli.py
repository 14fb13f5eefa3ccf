"""The command line: exact output where it is a contract, one line for every error, nothing heavy imported."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.rollout.store import FsspecGroupStore
from surefoot.statemachine import events as ev
from surefoot.statemachine.errors import UserMistake
from surefoot.statemachine.log import EventRow
from surefoot.trainer.cli import main
from surefoot.trainer.places import Place, next_free

from .models import write_model
from .shell import Shell, told
from .stories import Story

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
