"""A folder to type commands in, and a small config there."""

from __future__ import annotations

from pathlib import Path

import pytest

from .models import write_model, write_rows
from .shell import Shell


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
