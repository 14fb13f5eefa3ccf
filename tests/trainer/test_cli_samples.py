"""What `samples` prints, and what is said where there is nothing to print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from surefoot.rollout.store import FsspecGroupStore
from surefoot.statemachine.errors import UserMistake

from .models import write_model
from .shell import Shell, told
from .stories import Story

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
