"""A real PostgreSQL server, started once, empty for each test that asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.statemachine.liveness import DriverIdentity

from ..servers import Server, postgres_server
from .logs import dead_driver


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """The server."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: Server) -> str:
    """The URL of an empty database."""
    postgres.empty()
    return postgres.url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a file that is not there yet."""
    return f"sqlite:///{tmp_path / 'runs' / 'a' / 'log.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """Each kind of database in turn, empty."""
    return request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param])


@pytest.fixture(scope="session")
def dead() -> DriverIdentity:
    """A driver of this host that is no more."""
    return dead_driver()
