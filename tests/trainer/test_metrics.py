"""Metrics are what the log's events make: never repeated, never lost, each in its unit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.statemachine.errors import ConfigRefused
from surefoot.trainer.metrics import NAMES, MetricsWriter, metrics_rows

from .stories import Story


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def live(writer: MetricsWriter, story: Story, after_seq: int = 0) -> None:
    for row in story.rows[after_seq:]:
        writer.on_event(row, row.event(), None)


def test_every_update_has_a_row_with_every_fixed_name(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    live(writer, Story().began().updated(reward=0.25).updated())
    rows = written(tmp_path)
    assert [row["update"] for row in rows] == [1, 2]
    for row in rows:
        assert set(NAMES) <= set(row)
    assert rows[0]["reward/mean"] == 0.25 and rows[0]["time/update"] == 0.25
    assert rows[0]["optim/lr"] == 1e-3


def test_each_row_says_update_optimizer_step_and_policy_version_in_their_own_units() -> None:
    # 4 updates between publications, 2 minibatches: after update 4, 8 optimizer steps, one publication.
    story = Story(sets=["sync.every_updates=4", "data.size=20", "batch.minibatches=2"]).began()
    for _ in range(5):
        story.updated()
    counters = [(r["update"], r["optimizer_step"], r["policy_version"]) for r in metrics_rows(story.rows)]
    assert counters == [(1, 2, 0), (2, 4, 0), (3, 6, 0), (4, 8, 0), (5, 10, 1)]


def test_an_evaluation_has_a_row_of_the_version_it_evaluated() -> None:
    story = Story(sets=["eval.every_updates=1", "batch.minibatches=2"]).began().evaluated(0.4)
    story.updated().evaluated(0.6)
    rows = [row for row in metrics_rows(story.rows) if "eval/reward_mean" in row]
    assert [(r["policy_version"], r["update"], r["optimizer_step"]) for r in rows] == [(0, 0, 0), (1, 1, 2)]
    assert [row["eval/reward_mean"] for row in rows] == [0.4, 0.6]


@pytest.mark.parametrize("seen", [0, 1, 5])
def test_after_a_kill_rows_go_on_where_the_log_does(tmp_path: Path, seen: int) -> None:
    """Report 45: the driver before wrote fewer rows than the log, or as many: 5 stands once, 6 follows."""
    story = Story(sets=["data.size=32"]).began()
    for _ in range(5):
        story.updated()
    before = MetricsWriter(tmp_path, tensorboard=False)
    told = Story(sets=["data.size=32"]).began()
    for _ in range(seen):
        told.updated()
    live(before, told)  # killed: not closed
    story.began()
    after = MetricsWriter(tmp_path, story.rows, tensorboard=False)
    head = len(story.rows)
    story.updated()
    live(after, story, head)
    assert [row["update"] for row in written(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_rows_that_the_log_does_not_have_go(tmp_path: Path) -> None:
    story = Story().began().updated()
    MetricsWriter(tmp_path, Story().began().updated().updated().rows, tensorboard=False).close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 3, "torn')
    MetricsWriter(tmp_path, story.rows, tensorboard=False).close()
    assert [row["update"] for row in written(tmp_path)] == [1]


def test_a_number_that_is_none_is_still_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    live(writer, Story().began().updated(metrics={"policy/entropy": "nan"}))
    assert written(tmp_path)[0]["policy/entropy"] == "nan"


def test_jsonl_can_be_turned_off(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, Story().began().updated().rows, jsonl=False, tensorboard=False)
    live(writer, Story().began().updated())
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_holds_each_update_once_after_a_kill(tmp_path: Path) -> None:
    """Report 45."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    story = Story().began().updated().updated()
    before = MetricsWriter(tmp_path, tensorboard=True)
    live(before, story)
    before.close()
    story.began()
    after = MetricsWriter(tmp_path, story.rows, tensorboard=True)
    head = len(story.rows)
    live(after, story.updated(reward=0.75), head)
    after.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    board.Reload()
    from tensorboard.util.tensor_util import make_ndarray

    points = [(e.step, float(make_ndarray(e.tensor_proto))) for e in board.Tensors("reward/mean")]
    assert points == [(1, 0.5), (2, 0.5), (3, 0.75)]


def test_tensorboard_is_refused_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.trainer.metrics.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigRefused, match=r"metrics\.tensorboard = true: TensorBoard is not installed"):
        MetricsWriter(tmp_path, tensorboard=True)
    MetricsWriter(tmp_path, tensorboard=None).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
