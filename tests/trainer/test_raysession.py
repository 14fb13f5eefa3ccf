"""The process's Ray: shared by runs, gone with the last of them, and a guest in its host's process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..faults.lives import gone

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.trainer.raysession_lives", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def live(*arguments: str) -> dict[str, Any]:
    """Run one of the programs to its end; what it saw."""
    process = start(*arguments)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return live("whole_life")


@pytest.fixture(scope="module")
def guest() -> dict[str, Any]:
    return live("found_and_joined")


def test_two_sessions_in_one_process_share_one_ray(seen: dict[str, Any]) -> None:
    assert seen["available"] == [6.0, 0.0]
    assert seen["shared"]


def test_ray_stays_up_until_the_last_session_has_ended(seen: dict[str, Any]) -> None:
    assert seen["up_after_second_left"]
    assert not seen["up_after_last_left"]


def test_signal_handlers_and_excepthook_of_the_host_are_untouched(seen: dict[str, Any]) -> None:
    assert seen["handlers_while_up"]


def test_environment_of_the_host_is_untouched(seen: dict[str, Any]) -> None:
    assert seen["environment_while_up"]
    assert seen["environment_after"]


def test_nothing_listens_beyond_the_loopback_address(seen: dict[str, Any]) -> None:
    assert seen["listening"]
    assert {address.removeprefix("::ffff:") for address in seen["listening"]} == {"127.0.0.1"}


def test_no_process_thread_or_folder_outlives_the_last_session(seen: dict[str, Any]) -> None:
    """Report 37."""
    assert {"gcs_server", "raylet"} <= set(seen["names_while_up"])
    assert seen["folders_while_up"]
    assert seen["living_after"] == seen["children_after"] == []
    assert seen["folders_after"] == []
    assert seen["threads_after"] == []


def test_more_than_the_cluster_has_is_refused_with_both_numbers(seen: dict[str, Any]) -> None:
    """Report 38, on a real Ray."""
    assert "need 7 slots" in seen["too_many"]
    assert "has 6:" in seen["too_many"]
    assert "cluster.slots" in seen["too_many"]
    assert "need 0.5 GPUs" in seen["no_gpu"]
    assert "has 0:" in seen["no_gpu"]


def test_what_one_run_has_reserved_another_does_not_get(seen: dict[str, Any]) -> None:
    assert "need 2 slots" in seen["beside_another"]
    assert "has 1 left" in seen["beside_another"]


def test_a_second_cluster_in_one_process_is_refused(seen: dict[str, Any]) -> None:
    assert "10.255.255.1:6379" in seen["other_cluster"]


def test_a_ray_that_is_up_is_used_and_left_up(guest: dict[str, Any]) -> None:
    assert guest["available"] == [3.0, 0.0]
    assert "need 4 slots" in guest["too_many"]
    assert "has 3:" in guest["too_many"]
    assert guest["still_up"]


def test_a_cluster_is_joined_by_its_address_and_left_as_it_was(guest: dict[str, Any]) -> None:
    assert guest["joined"] == {"available": [3.0, 0.0], "children": [], "up_after": False}
    assert guest["still_up"]


def test_cancelled_while_ray_starts_leaves_no_process() -> None:
    assert live("cancelled") == {"cancelled": True, "living": []}


def test_a_killed_driver_leaves_nothing_and_the_same_command_starts_at_once() -> None:
    """Reports 37 and 39."""
    first = start("until_killed")
    assert first.stdout is not None
    left = json.loads(first.stdout.readline())
    os.killpg(first.pid, signal.SIGKILL)
    second = start("until_killed")
    assert second.stdout is not None
    assert json.loads(second.stdout.readline())["actor"] not in left["pids"]
    processes = [psutil.Process(pid) for pid in left["pids"] if psutil.pid_exists(pid)]
    assert gone(processes, 30.0) == []
    os.killpg(second.pid, signal.SIGKILL)
    for process in (first, second):
        process.communicate()
