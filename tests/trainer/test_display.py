"""The display shows the fold's figures: in a panel on a terminal, elsewhere one plain line an update."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from surefoot.statemachine import events as ev
from surefoot.statemachine.state import RunState
from surefoot.trainer.display import Display, Progress, clock

from .stories import Story


def shown(story: Story, *, terminal: bool = False, after_seq: int = 0) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    state = RunState()
    with Display("a", console) as display:
        for row in story.rows:
            event = state.apply(row)
            if row.seq > after_seq:
                display.on_event(row, event, state)
    return out.getvalue()


def test_without_a_terminal_each_update_is_one_plain_line() -> None:
    text = shown(Story().began().updated(reward=0.125).updated())
    lines = [line for line in text.splitlines() if line.startswith("update ")]
    assert len(lines) == 2 and "\x1b" not in text
    assert lines[0].startswith("update 1/4  optimizer step 1/4  learning rate 1.000e-03  reward 0.125")
    for name in ("policy version", "staleness", "tokens/s", "to go"):
        assert name in lines[1]


def test_update_optimizer_step_and_policy_version_are_told_apart() -> None:
    story = Story(sets=["sync.every_updates=4", "batch.minibatches=2", "data.size=20"]).began()
    for _ in range(5):
        story.updated()
    line = [line for line in shown(story).splitlines() if line.startswith("update ")][-1]
    assert "update 5/5" in line and "optimizer step 10/10" in line and "policy version 1" in line


def test_a_run_that_goes_on_starts_its_display_where_it_stands() -> None:
    """Report 35: resumed at 96, it shows 96."""
    story = Story(sets=["data.size=400"]).began()
    for _ in range(96):
        story.updated()
    head = len(story.rows)
    story.began()
    progress, state = Progress(), RunState()
    for row in story.rows:
        event = state.apply(row)
        if row.seq > head:
            progress.take(row, event, state)
            assert progress.figures()[0] == ("update", "96/100")
    assert "incarnation 2 at update 96" in shown(story.updated(), after_seq=head)


def test_rates_are_of_the_last_updates_of_this_incarnation() -> None:
    # Stories have an event a second; an update has 5 events, 4 groups of 2 samples of 5 tokens.
    story = Story(sets=["data.size=400"]).began().updated().updated().updated().began().updated().updated()
    progress, state = Progress(), RunState()
    for row in story.rows:
        progress.take(row, state.apply(row), state)
    assert progress.updates == 5
    # from WorkersReady to the second update applied after it: 9 seconds, 80 tokens, 2 updates
    assert progress.tokens_per_second == 80 / 9
    assert progress.seconds_to_go == 9 / 2 * 95


def test_a_terminal_gets_a_panel_and_no_line_an_update() -> None:
    text = shown(Story().began().updated(), terminal=True)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "run a, incarnation 1" in plain and "optimizer step" in plain and "1/4" in plain
    assert "phase" in plain and "Rollout" in plain
    assert not [line for line in plain.splitlines() if line.startswith("update 1/4")]


def test_without_a_terminal_what_is_waited_for_is_a_plain_line() -> None:
    out = io.StringIO()
    with Display("a", Console(file=out)) as display:
        display.waiting("starting Ray")
        display.waiting("redoing updates 3 to 4: 3 is done")
    assert out.getvalue() == "starting Ray\nredoing updates 3 to 4: 3 is done\n"


def test_a_terminal_shows_what_is_waited_for_until_workers_are_ready() -> None:
    display, state = Display("a", Console(file=io.StringIO(), force_terminal=True, width=100)), RunState()

    def panel() -> str:
        console = Console(file=io.StringIO(), width=100)
        console.print(display._panel())
        return console.file.getvalue()  # type: ignore[attr-defined]

    with display:
        display.waiting("starting Ray")
        assert panel().splitlines()[0] == "run a" and "starting Ray" in panel()
        assert "policy version" not in panel()  # there is none to speak of
        for row in Story().began().rows:
            event = state.apply(row)
            if row.type == "WorkersReady":
                display.waiting("building the parts")
                assert "building the parts" in panel() and "run a, incarnation 1" in panel()
            display.on_event(row, event, state)
        assert "building" not in panel() and "policy version" in panel()


def test_a_run_that_was_refused_leaves_no_panel_behind() -> None:
    out = io.StringIO()
    with Display("a", Console(file=out, force_terminal=True, width=100)) as display:
        display.waiting("checking config and data")
    assert out.getvalue().endswith("\x1b[1A\x1b[2K" * 2)  # both of its lines are erased
    assert shown(Story().began(), terminal=True).endswith(
        "\x1b[?25h"
    )  # and those of a run that began are not


@pytest.mark.parametrize("width", [120, 80, 50])
def test_the_panel_has_each_figure_whole_on_any_terminal(width: int) -> None:
    story, state = Story().began().updated(reward=0.125).updated(reward=0.125), RunState()
    out = io.StringIO()
    display = Display("a", Console(file=out, force_terminal=True, color_system=None, width=width))
    for row in story.rows:
        event = state.apply(row)
        display.progress.take(row, event, state)
    Console(file=out, width=width, color_system=None).print(display._panel())
    lines = out.getvalue().splitlines()
    assert set(lines[1].strip()) <= set("━╸╺ ")  # the bar has its line to itself
    shown = "\n".join(lines[2:])
    for name, value in [("phase", "Rollout"), *display.progress.figures()]:
        assert re.search(rf"\b{name} +{re.escape(value)}(  |$)", shown, re.MULTILINE), name


def test_what_else_happens_is_said_in_a_line() -> None:
    story = Story(sets=["eval.every_updates=1"]).began().evaluated(0.4)
    text = shown(story)
    assert "incarnation 1 at update 0: ready are 1 rollout worker and 1 learner rank" in text
    assert "budget committed: 4 updates, 4 optimizer steps, 4 publications" in text
    assert "policy version 0 (update 0): held-out reward 0.400 over 8 rows" in text


def test_attempts_that_fail_in_numbers_are_counted() -> None:
    story = Story(sets=["rollout.max_attempts=9"]).began()
    story.add(ev.GroupsAdmitted(groups=[ev.Issue(index, 1, 0) for index in range(4)]))
    for attempt in range(1, 9):
        story.add(ev.AttemptFailed(prompt_index=0, attempt=attempt, reason=ev.IssueReason.FAILED, error="no"))
        again = [ev.Issue(0, attempt + 1, 0)]
        story.add(ev.GroupsReissued(groups=again, reason=ev.IssueReason.FAILED))
    story.add(ev.RunFailed(code="X", error="no more", updates=0, optimizer_steps=0, facts={}))
    lines = [line for line in shown(story).splitlines() if "failed" in line]
    assert lines[:3] == [f"attempt {attempt} of prompt 0 failed: no" for attempt in (1, 2, 3)]
    assert lines[3:] == ["5 more attempts failed: `surefoot log a` has each with its reason"]


def test_clock_reads_as_hours_minutes_seconds() -> None:
    assert [clock(s) for s in (None, 0, 59.6, 61, 3661)] == ["-", "0:00", "1:00", "1:01", "1:01:01"]
