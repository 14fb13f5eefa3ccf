"""Where runs are: a database that has no run yet, or not even a log, is a place where one can begin."""

from __future__ import annotations

from pathlib import Path

from surefoot.statemachine.sqllog import open_log
from surefoot.trainer.places import Place, next_free
from surefoot.trainer.run import _outcome_if_over
from tests.simulation.fileworld import prepared
from tests.simulation.world import small_config
from tests.statemachine.conftest import postgres, postgres_url  # noqa: F401 - fixtures


def test_an_empty_shared_database_has_no_runs_and_takes_the_first(
    postgres_url: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    place = Place("first", tmp_path, postgres_url)
    assert not place.exists()
    assert next_free("first", tmp_path, postgres_url) == place


def test_a_log_whose_run_was_never_created_is_no_run(tmp_path: Path) -> None:
    """Killed between the making of the database and the first event: the same command starts the run."""
    place = Place("a", tmp_path)
    place.folder.mkdir()
    open_log(place.log_url, migrate=True).close()
    assert _outcome_if_over(place, prepared(small_config(), 8), take_over=False) is None
