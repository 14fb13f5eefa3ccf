"""The learning curve comes from the log alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from surefoot.trainer.curve import curve_of, draw_curve, running_mean

from .stories import Story


def test_the_curve_has_every_update_evaluation_and_learning_rate() -> None:
    story = Story(sets=["eval.every_updates=2", "batch.minibatches=2"]).began().evaluated(0.25)
    story.updated(reward=0.5).updated(reward=0.75).evaluated(0.5)
    curve = curve_of(story.rows)
    assert (curve.run, curve.updates_total) == ("a", 4)
    assert (curve.updates, curve.rewards) == ([1, 2], [0.5, 0.75])
    assert (curve.evaluated_updates, curve.held_out) == ([0, 2], [0.25, 0.5])
    assert curve.step_updates == [0.5, 1.0, 1.5, 2.0]
    # cosine over 8 optimizer steps: (1 + cos(pi k / 8)) / 2
    assert [round(rate / 1e-3, 4) for rate in curve.learning_rates] == [1.0, 0.9619, 0.8536, 0.6913]


def test_the_picture_is_a_png_that_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "run" / "curve.png"
    story = Story().began()
    draw_curve(story.rows, path)  # nothing to draw yet is no error
    empty = path.read_bytes()
    assert draw_curve(story.updated().updated().rows, path) == path
    assert path.read_bytes().startswith(b"\x89PNG") and path.read_bytes() != empty
    assert list(path.parent.iterdir()) == [path]


def test_a_running_mean_does_not_lean_at_the_ends() -> None:
    line = [float(i) for i in range(10)]
    assert running_mean(line, 2) == line[2:-2]
    assert running_mean([0.0, 3.0, 0.0, float("nan"), 6.0], 1) == [1.0, 1.5, 3.0]
    assert running_mean(line, 5) == []


def test_drawing_brings_no_state_that_a_host_program_would_share(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from surefoot.trainer.curve import draw_curve\n"
        f"draw_curve([], {str(tmp_path / 'curve.png')!r})\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
