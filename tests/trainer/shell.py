"""Commands as a user types them, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.trainer.cli import main
from surefoot.trainer.places import Place

from .stories import Story


class Shell:
    """Commands run in this process, in a folder of their own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capsys.readouterr()
        code = main(arguments)
        return code, *self._capsys.readouterr()

    def json(self, *arguments: str) -> Any:
        code, out, error = self(*arguments)
        assert (code, error) == (0, "")
        return json.loads(out)

    def refused(self, *arguments: str) -> str:
        code, out, error = self(*arguments)
        assert (code, out) == (2, "")
        assert error.startswith("surefoot: ") and error.count("\n") == 1
        return error


def told(story: Story, runs_dir: Path = Path("runs")) -> Story:
    story.save(Place(story.run, runs_dir))
    return story
