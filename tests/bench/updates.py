"""Seconds per update against a bare loop doing the same work; what the quickstart takes and learns.

Owns nothing. Everything has two cores: the bare loop two threads; both runs a rollout worker and a learner
rank of one thread each, which work side by side or, at bound 0, take turns. All one after the other; the bare
loop before and after, its mean counts.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from .figures import Bench, Figure
from .workload import write_config

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
TOO_SLOW_SECONDS = 600.0
QUICKSTART_SECONDS, FIRST_STEP_SECONDS, MEMORY_BYTES = 300.0, 30.0, 4e9
LAST = 2  # updates at the end, next to which nothing is generated any more


def measure(bench: Bench) -> list[Figure]:
    """Asynchronous, bound 0, and the quickstart's figures."""
    updates, skip = (8, 3) if bench.quick else (42, 5)
    bare = {"model": str(bench.model), "threads": 2, "updates": updates, "skip": skip}
    bench.say(f"bare loop, {updates} updates")
    before = bench.ask_child("bareloop", bare)
    runs = {}
    for bound, name in ((1, "asynchronous"), (0, "bound 0")):
        bench.say(f"{name} run, {updates} updates")
        runs[bound] = _timeline(bench, updates, bound, skip)
    bench.say("bare loop again")
    after = bench.ask_child("bareloop", bare)
    seconds = {part: (before[part] + after[part]) / 2 for part in before}
    base = {"bare_seconds": seconds, "bare_before": before["all"], "bare_after": after["all"]}
    return [
        Figure(
            "update_asynchronous",
            runs[1]["seconds_per_update"] / seconds["all"],
            at_most=1.2,
            says="seconds per update, max_staleness 1 / bare one-process loop",
            details=base | runs[1],
        ),
        Figure(
            "update_bound_0",
            runs[0]["seconds_per_update"] / seconds["all"],
            at_most=1.5,
            says="seconds per update, max_staleness 0 / bare one-process loop",
            details=base | runs[0],
        ),
        *_quickstart(bench, {name: value for name, value in runs[1].items() if name.startswith("log_")}),
    ]


def _quickstart(bench: Bench, steady: dict[str, Any]) -> list[Figure]:
    """The quickstart from its command to its end: what it takes, what it learns, and what of its time its
    log's thread was appending."""
    bench.say("the quickstart")
    sets, memory_at = (["data.size=256"], [4]) if bench.quick else ([], [20, 100])
    folder = str(bench.folder / "quickstart")
    lines = _lines(
        bench, {"config": str(QUICKSTART), "runs_dir": folder, "sets": sets, "memory_at": memory_at}
    )
    events = [line for line in lines if line["what"] == "event"]
    seconds = lines[-1]["at"] - lines[0]["at"]
    first_step = next(line["at"] for line in events if line["type"] == "UpdateApplied") - lines[0]["at"]
    rewards = [line["reward_mean"] for line in events if "reward_mean" in line]
    held = max(line["memory_bytes"] for line in events if "memory_bytes" in line)
    return [
        _log_share(events[-1], seconds, steady),
        Figure(
            "quickstart_gain",
            rewards[-1] - rewards[0],
            at_least=0.15,
            says="held-out greedy reward of the quickstart's sums, last less first",
            details={"rewards": rewards},
        ),
        Figure(
            "quickstart_seconds",
            seconds / QUICKSTART_SECONDS,
            at_most=1.0,
            says=f"the whole quickstart / {QUICKSTART_SECONDS:g} s",
            details={"seconds": seconds},
        ),
        Figure(
            "first_step",
            first_step / FIRST_STEP_SECONDS,
            at_most=1.0,
            says=f"from the command to the first optimizer step / {FIRST_STEP_SECONDS:g} s",
            details={"seconds": first_step},
        ),
        Figure(
            "memory",
            held / MEMORY_BYTES,
            at_most=1.0,
            says=f"all processes of the quickstart together / {MEMORY_BYTES / 1e9:g} GB",
            details={"megabytes": held / 1e6},
        ),
    ]


def _log_share(last: dict[str, Any], seconds: float, steady: dict[str, Any]) -> Figure:
    return Figure(
        "log_share",
        last["in_thread"] / seconds,
        at_most=0.01,
        says="seconds in the log's appends / seconds of the quickstart",
        details={
            "quickstart_seconds": seconds,
            "appends": last["appends"],
            "milliseconds_per_append": 1e3 * last["in_thread"] / last["appends"],
            "share_with_the_way_to_the_thread": last["appending"] / seconds,
            "steady_state_of_the_run_above": steady,
        },
    )


def _timeline(bench: Bench, updates: int, bound: int, skip: int) -> dict[str, Any]:
    """One run from its lines: what its steady state looks like."""
    folder = bench.folder / f"bound{bound}"
    config = write_config(folder, bench.model, updates=updates, bound=bound)
    settings = {
        "config": str(config),
        "runs_dir": str(folder / "runs"),
        "processors_at": [skip, updates - LAST],
    }
    return steady_state(_lines(bench, settings), skip)


def _lines(bench: Bench, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What a real run says of itself from its beginning to its end."""
    process = bench.child("drive", settings)
    out, err = process.communicate(timeout=TOO_SLOW_SECONDS)
    if process.returncode != 0:
        raise RuntimeError(f"the run ended with {process.returncode}:\n{err[-4000:]}")
    return [json.loads(line) for line in out.splitlines() if line.startswith('{"what"')]


def steady_state(lines: list[dict[str, Any]], skip: int) -> dict[str, Any]:
    """Figures between the update `skip` and the last few."""
    applied = [line for line in lines if line.get("type") == "UpdateApplied"]
    first, last = applied[skip - 1], applied[-1 - LAST]
    updates = last["update"] - first["update"]
    wall = last["at"] - first["at"]
    inside = [line for line in lines if first["at"] < line["at"] <= last["at"]]
    events = [line for line in inside if line["what"] == "event"]
    within = [line["seconds"] for line in applied[skip:-LAST]]
    whole = lines[-1]["at"] - lines[0]["at"]
    appended = applied[-1]
    processors = {
        kind: (last["processors"][kind] - first["processors"].get(kind, 0.0)) / updates
        for kind in last["processors"]
    }
    return {
        "seconds_per_update": wall / updates,
        "updates": updates,
        "median_seconds": {
            part: statistics.median(seconds[part] for seconds in within) for part in within[0]
        },
        "learner_calls_per_update": {
            name: sum(line["seconds"] for line in inside if line["what"] == name) / updates
            for name in sorted({line["what"] for line in inside if line["what"].startswith("learner.")})
        },
        "processor_seconds_per_update": processors,
        "events_per_update": len(events) / updates,
        "stores_per_update": sum(line["type"] == "GroupsStored" for line in events) / updates,
        "start_seconds": applied[0]["at"] - lines[0]["at"],
        "log_share": (last["appending"] - first["appending"]) / wall,
        "log_share_of_whole_run": appended["appending"] / whole,
        "log_share_in_its_thread": (last["in_thread"] - first["in_thread"]) / wall,
        "log_appends_per_update": (last["appends"] - first["appends"]) / updates,
        "log_milliseconds_per_append": 1e3
        * (last["in_thread"] - first["in_thread"])
        / max(1, last["appends"] - first["appends"]),
    }
