"""The wheel is whole: every package, the migrations, the licence and the command; the example is small."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("statemachine", "rollout", "trainer", "migrations")


def test_the_wheel_holds_every_module_the_migrations_and_the_licence(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "README.md").write_text("Surefoot\n")
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"surefoot/{path.relative_to(source).as_posix()}"
        for folder in FOLDERS
        for path in (source / folder).rglob("*.py")
    }
    assert expected <= names
    assert any(name.startswith("surefoot/migrations/versions/0001") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    # No module lies outside the namespace, where it could collide with an embedder's own.
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == {
        "surefoot"
    }
    (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "surefoot = surefoot.trainer.cli:main" in zipfile.ZipFile(wheel).read(entry_points).decode()


def test_the_starting_model_is_under_two_megabytes_in_all() -> None:
    files = [path for path in (ROOT / "examples" / "model").rglob("*") if path.is_file()]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) < 2_000_000
