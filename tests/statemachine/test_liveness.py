"""Whether a driver lives, told from its process and from nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from surefoot.statemachine.liveness import DriverIdentity, _process_start, lives

from .logs import HERE


def identity_of(process: subprocess.Popen[bytes]) -> DriverIdentity:
    start = _process_start(process.pid)
    assert start is not None
    return DriverIdentity(HERE.host, process.pid, start)


@pytest.fixture
def sleeper(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process whose name holds what the table of processes is delimited by."""
    program = tmp_path / "a) R 1 (b"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    return subprocess.Popen([program, "600"])


def test_a_process_lives_until_it_is_killed_even_if_nobody_has_reaped_it(
    sleeper: subprocess.Popen[bytes],
) -> None:
    driver = identity_of(sleeper)
    assert lives(driver) is True
    sleeper.kill()
    # wait for its end, and leave it unreaped: a zombie, as under a container's idle first process
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert lives(driver) is False
    sleeper.wait()
    assert lives(driver) is False


def test_this_process_lives() -> None:
    assert lives(HERE) is True
    assert DriverIdentity.here() == HERE


def test_a_later_process_with_the_same_id_is_not_the_driver() -> None:
    boot, namespace, tick = HERE.process_start.split("/")
    before = msgspec.structs.replace(HERE, process_start=f"{boot}/{namespace}/{int(tick) - 1}")
    assert lives(before) is False


def test_a_driver_of_before_the_last_boot_is_dead() -> None:
    _, namespace, tick = HERE.process_start.split("/")
    assert lives(msgspec.structs.replace(HERE, process_start=f"another-boot/{namespace}/{tick}")) is False


def test_a_driver_in_another_container_of_this_host_cannot_be_seen() -> None:
    boot, _, tick = HERE.process_start.split("/")
    assert lives(msgspec.structs.replace(HERE, process_start=f"{boot}/pid:[1]/{tick}")) is None


def test_a_driver_on_another_host_cannot_be_seen() -> None:
    assert lives(msgspec.structs.replace(HERE, host="another-host.invalid")) is None


def test_an_identity_made_by_another_system_is_not_alive_here() -> None:
    """The same host name, a start time in another form: no process here has it."""
    assert lives(msgspec.structs.replace(HERE, process_start="1700000000.00")) is False
