"""A run of a cluster: its log in PostgreSQL, its groups and checkpoints behind a URL; the server restarts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..servers import postgres_server
from .lives import RealRun

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def make_known(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make `smalldisk://` known to fsspec in every process that is started from now on."""
    about = folder / "smalldisk-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: smalldisk\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\nsmalldisk = tests.rollout.groups:SmallDisk\n")
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))


def test_log_on_a_server_that_restarts_and_files_behind_a_url_it_is_the_same_run(
    untouched: RealRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_known(tmp_path / "known", monkeypatch)
    storage = tmp_path / "shared"
    elsewhere = ("--set", f"storage.url=smalldisk://{storage}")
    with postgres_server() as server:
        run = RealRun(untouched.config, tmp_path / "runs", db=server.url)
        assert run.live(*elsewhere, crashpoint="update.committed:4") == -9
        life = run.stand("update.committed:1", *elsewhere)
        assert run.state().updates == 5
        server.stop()
        life.go_on()  # its connection is gone, and there may be no server for a while
        server.start()
        assert life.wait() == 0, run.output()
        assert run.state().incarnation == 2
        assert run.audit().ok
        assert run.ledger() == untouched.ledger()
        (checkpoint,) = run.state().checkpoints.values()
        assert (storage / "small" / "checkpoints" / checkpoint.path / "manifest.json").is_file()
        assert (storage / "small" / "groups").is_dir()
        assert not {"groups", "checkpoints", "log.db"} & {p.name for p in (run.runs_dir / "small").iterdir()}
